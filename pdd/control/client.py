"""The operator's end of an admin socket: one question, one answer, and never longer than a bound.

A daemon is trusted with the operator's requests but not with the operator's terminal or memory: a reply has a size
limit, a deadline, and must be the struct that the command promises.
"""

from __future__ import annotations

import socket
from pathlib import Path
from time import monotonic
from typing import ClassVar, TypeVar

import msgspec

from pdd.base.errors import OperatorError
from pdd.wire.admin import AdminReply, AdminRequest

REPLY_TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 16 * 1024 * 1024

Reply = TypeVar("Reply", bound=msgspec.Struct)


class UnreachableError(OperatorError):
    """No daemon answers on the socket."""

    exit_code: ClassVar[int] = 3


class RefusedError(OperatorError):
    """The daemon answered, with a refusal or with something that is no answer; `reason` is its own code for it."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def ask(path: Path, request: AdminRequest, kind: type[Reply], timeout_s: float = REPLY_TIMEOUT_S) -> Reply:
    """Send one request and read its reply. Raises UnreachableError or RefusedError."""
    deadline_s = monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = _line(connection, deadline_s)
        except TimeoutError:
            raise UnreachableError(f"{path}: no answer within {timeout_s:g} s: it hangs or is stopped") from None
        except FileNotFoundError:
            raise UnreachableError(f"{path}: no such socket: the daemon does not run") from None
        except ConnectionRefusedError:
            raise UnreachableError(f"{path}: nobody listens: the daemon that made this socket is gone") from None
        except OSError as error:
            raise UnreachableError(f"{path}: {error.strerror or error}") from None
    return _decode(path, line, kind)


def listens(path: Path) -> bool:
    """Whether a daemon accepts connections there."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _line(connection: socket.socket, deadline_s: float) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        left_s = deadline_s - monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(64 * 1024)
        if not piece:
            half = f" in the middle of an answer ({len(received)} bytes)" if received else " without an answer"
            raise OSError(f"the daemon closed the connection{half}")
        received += piece
        if len(received) > MAX_REPLY_BYTES:
            raise OSError(f"the answer is longer than {MAX_REPLY_BYTES // 2**20} MiB")
    return bytes(received)


def _decode(path: Path, line: bytes, kind: type[Reply]) -> Reply:
    try:
        reply = msgspec.json.decode(line, type=AdminReply)
        if reply.error is None:
            return msgspec.convert(reply.result, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        text = f"{path}: the answer is no reply of this version of pdd: {error}"
        raise RefusedError(text, "not_a_reply") from None
    raise RefusedError(reply.error.message, reply.error.code)
