"""What makes a process a service: logs, signals, and the words that systemd wants to hear."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable

import structlog

from pdd.base.errors import OperatorError
from pdd.daemon.log_stream import LogStream

LEAST_DESCRIPTORS = 64
"""A daemon with one small replica opens about 50 before its first client."""
_LAST_LINES_S = 2.0
"""How long a process that ends waits for its last lines to be taken."""
_SYSTEMD_S = 0.2
"""How long the event loop may wait for systemd to take a datagram."""


def set_up_logs(level: str, *, node: str) -> LogStream:
    """Structured lines on stderr: readable on a terminal, logfmt elsewhere. All that this process writes to stderr goes
    through the stream that is returned, tracebacks of libraries too: it never waits for a reader and never fails."""
    stream = LogStream(os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno())
    sys.stderr = stream.text()
    atexit.register(stream.drain, _LAST_LINES_S)
    renderer = (
        structlog.dev.ConsoleRenderer()
        if sys.stderr.isatty()
        else structlog.processors.LogfmtRenderer(
            key_order=["timestamp", "level", "node", "event"], drop_missing=True, bool_as_flag=False
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(node=node)
    # aiohttp tells of each malformed request with a traceback; it has been answered with 400, which is enough.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    return stream


def allow_descriptors() -> None:
    """As many file descriptors as the system lets us have: each client, peer and executor takes some. Raises
    OperatorError where that is too few for any daemon."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_DESCRIPTORS:
        raise OperatorError(
            f"this process may open {most} files, a daemon needs {LEAST_DESCRIPTORS} and one for each client: raise "
            "the hard limit (ulimit -n, or LimitNOFILE of a systemd unit)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def on_signals(stop: Callable[[str], None]) -> None:
    """Calls `stop` with the signal's name. (libfabric installs handlers too; the C library puts ours back.)"""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)


class Notifier:
    """sd_notify(3): datagrams to $NOTIFY_SOCKET; says nothing where systemd does not listen."""

    def __init__(self, environment: dict[str, str] | os._Environ[str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6
        """How often systemd expects `alive`; 0: never."""

    @property
    def heard(self) -> bool:
        """Whether systemd listens."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self, extend_s: float) -> None:
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(extend_s * 1e6)}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(_SYSTEMD_S)
            try:
                sock.sendto(text.encode(), self._address)
            except OSError as error:
                structlog.get_logger(__name__).warning("systemd was not told", text=text, error=str(error))
