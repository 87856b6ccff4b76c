"""Errors as OpenAI clients read them: a status, headers, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math

import msgspec
import structlog
from aiohttp import web

from pdd.base.errors import BadRequest, PddError, QueueFull
from pdd.http.sequences import GenerationFailed

log = structlog.get_logger("pdd.http")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    message: str
    code: str
    retryable: bool
    param: str | None = None
    retry_after_s: float | None = None
    allow: tuple[str, ...] = ()
    """Methods that the path takes, where the request's is none of them."""

    def body(self) -> bytes:
        error = {"message": self.message, "type": self._type(), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """`x-should-retry` is what OpenAI's own clients obey before they look at the status."""
        headers = {"x-should-retry": "true" if self.retryable else "false"}
        if self.status == 429:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s or 0)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow:
            headers["Allow"] = ", ".join(self.allow)
        return headers

    def response(self) -> web.Response:
        return web.Response(
            status=self.status, body=self.body(), headers=self.headers(), content_type="application/json"
        )

    def _type(self) -> str:
        special = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
        return special.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


def fault_of(error: Exception) -> Fault:
    """What the client is told. Faults that are our own bugs are logged with their story and told without it."""
    match error:
        case GenerationFailed(info=info):
            return Fault(
                status=info.http_status,
                message=info.message,
                code=info.code,
                retryable=info.retryable,
                retry_after_s=info.retry_after_s,
            )
        case PddError() if error.http_status != 500:
            return Fault(
                status=error.http_status,
                message=str(error),
                code=error.code,
                retryable=error.retryable,
                param=error.param if isinstance(error, BadRequest) else None,
                retry_after_s=error.retry_after_s if isinstance(error, QueueFull) else None,
            )
        case web.HTTPException():
            return _of_http_exception(error)
    log.error("a request failed because of a fault of our own", exc_info=error)
    return Fault(status=500, message="The server failed; its log tells why.", code="internal_error", retryable=False)


def _of_http_exception(error: web.HTTPException) -> Fault:
    """What aiohttp's router and body reader refuse."""
    codes = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    messages = {
        404: "There is nothing at this path.",
        405: "This path does not take that method.",
        413: f"The request's body is too large: {error.text}",
    }
    return Fault(
        status=error.status,
        message=messages.get(error.status, error.reason),
        code=codes.get(error.status, "invalid_request_error"),
        retryable=False,
        allow=tuple(sorted(error.allowed_methods)) if isinstance(error, web.HTTPMethodNotAllowed) else (),
    )
