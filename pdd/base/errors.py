"""Every error that pdd raises on purpose: whose fault it is, whether trying again helps, and its HTTP status.

Below the fabric port errors are numbers; above it they are these exceptions. `str(error)` is written for the
person who has to act on it: what happened, where, and what to do.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Fault(StrEnum):
    CLIENT = "client"
    OPERATOR = "operator"
    PEER = "peer"
    INTERNAL = "internal"


class PddError(Exception):
    """Root of the tree. Subclasses set the class attributes; nobody raises the root itself."""

    fault: ClassVar[Fault] = Fault.INTERNAL
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"


class BadRequest(PddError):
    """The client's request cannot be served as written; `param` names the offending field."""

    fault = Fault.CLIENT
    http_status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLarge(BadRequest):
    http_status = 413
    code = "request_too_large"


class UnsupportedMediaType(BadRequest):
    """The body of a request is encoded in a way that is not taken."""

    http_status = 415
    code = "unsupported_media_type"


class ContextTooLong(BadRequest):
    """Prompt and answer together are longer than a sequence may be."""

    code = "context_length_exceeded"


class Unauthorized(PddError):
    fault = Fault.CLIENT
    http_status = 401
    code = "invalid_api_key"


class NotFound(PddError):
    """A model, request or path that does not exist here."""

    fault = Fault.CLIENT
    http_status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class DeadlineExceeded(PddError):
    """The request's own deadline passed, queueing included."""

    fault = Fault.CLIENT
    http_status = 408
    code = "deadline_exceeded"


class QueueFull(PddError):
    """More requests wait than the topology allows; `retry_after_s` is an estimate of when room appears."""

    retryable = True
    http_status = 429
    code = "queue_full"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoPath(PddError):
    """No replica that could serve the request is reachable now."""

    fault = Fault.PEER
    retryable = True
    http_status = 503
    code = "no_path"


class Cancelled(PddError):
    """Someone cancelled the request: the client or an operator, who does not want it to be tried again."""

    fault = Fault.CLIENT
    http_status = 503
    code = "cancelled"


class GoingDown(PddError):
    """The daemon ends before the request could; another one may serve it."""

    fault = Fault.OPERATOR
    retryable = True
    http_status = 503
    code = "going_down"


class HandoffFailed(PddError):
    """The prefiller could not deliver the KV pages and policy says not to recompute them."""

    fault = Fault.PEER
    retryable = True
    http_status = 502
    code = "handoff_failed"


class ReplicaFailed(PddError):
    """An executor of the replica died or stopped answering."""

    retryable = True
    http_status = 503
    code = "replica_failed"


class OperatorError(PddError):
    """Something that only the person who runs the daemon can mend; the process exits with `exit_code`."""

    fault = Fault.OPERATOR
    code = "operator_error"
    exit_code: ClassVar[int] = 1


class TopologyInvalid(OperatorError):
    """The topology file does not describe a runnable cluster; the message lists every fault, one a line."""

    exit_code = 4


class ModelInvalid(OperatorError):
    """The model's files are missing, damaged, or of a kind that pdd does not run."""

    exit_code = 4


class KeyFileInvalid(OperatorError):
    """The cluster key file is missing, too short, or readable by others."""

    exit_code = 4


class CertificateInvalid(OperatorError):
    """A TLS certificate, its key or its authority is missing, open to others, or does not fit."""

    exit_code = 4


class FabricUnavailable(OperatorError):
    """The libfabric provider that the topology names cannot be opened, or memory cannot be registered."""


class AddressBusy(OperatorError):
    """A port or socket that the topology names is taken by another process."""


class FabricError(PddError):
    """A call of the C library failed; `errno` is the positive error number."""

    def __init__(self, message: str, errno: int) -> None:
        super().__init__(message)
        self.errno = errno


class FabricBusy(FabricError):
    """No completion slot is free: submit again after draining events."""

    retryable = True


class RemoteProtocolError(PddError):
    """A peer sent bytes that are no message of ours; its link is closed."""

    fault = Fault.PEER
    code = "remote_protocol_error"


class HandshakeRefused(PddError):
    """A peer's hello does not fit: wrong key, version, cluster or layout; the message names the fields."""

    fault = Fault.PEER
    code = "handshake_refused"


class BadTicket(PddError):
    """A prefill ticket that cannot be served: nothing was or will be written for it; the message names the field."""

    fault = Fault.PEER
    code = "bad_ticket"


class OutOfPages(PddError):
    """The pool has fewer free pages than asked for; nothing was allocated."""

    retryable = True


class InvariantBroken(PddError):
    """pdd's own bookkeeping contradicts itself: a bug. The message tells the story so far."""


class IllegalEvent(InvariantBroken):
    """A state machine got an event that its table does not allow in its state; nothing was changed."""
