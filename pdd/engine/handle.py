"""The daemon's end of one executor process: start it, give it steps, notice its death.

The socket pair is the only tie: when either side ends, the other reads end-of-file. Steps go strictly in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import msgspec
import structlog

from pdd.base.errors import ModelInvalid, OperatorError, ReplicaFailed
from pdd.engine.protocol import ExecutorConfig, ExecutorFailed, ExecutorReady, FromExecutor, Step, StepDone
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape

log = structlog.get_logger(__name__)

_MAX_FRAME_BYTES = 64 * 1024 * 1024
_STOP_S = 5.0


class ExecutorHandle:
    """A running executor. Made by `start`. Its descriptors belong to whoever takes them: `arena_fd`, and of the lead
    rank of a set `counter_fd` and a wake-up for each port, `wake_fds` (see ExecutorReady)."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        ready: ExecutorReady,
        descriptors: list[int],
    ) -> None:
        self.name = name
        self.ready = ready
        self.arena_fd = descriptors[0]
        self.counter_fd = descriptors[1] if len(descriptors) > 1 else None
        self.wake_fds = tuple(descriptors[2:])
        self._process = process
        self._reader, self._writer = streams
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def start(cls, config: ExecutorConfig) -> ExecutorHandle:
        """Starts the process and waits until its model is loaded.

        Raises ReplicaFailed when it dies on the way, OperatorError or ModelInvalid when it says why it cannot run, and
        OSError when no process can be started.
        """
        name = f"{config.replica} rank {config.rank}"
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "pdd.engine.worker", "--fd", str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, env=_environment(config.threads),
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        log.info("executor started", executor=name, pid=process.pid)
        try:
            await asyncio.get_running_loop().sock_sendall(ours, _frame(msgspec.msgpack.encode(config)))
            num_descriptors = 1 if config.rank % config.tp else 2 + config.num_wakes
            message, descriptors = await _receive_ready(ours, name, num_descriptors)
            streams = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            await _end(process)
            raise
        return cls(name, process, streams, message, descriptors)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def killed(self) -> bool:
        """Whether a signal ended it."""
        return (self._process.returncode or 0) < 0

    async def step(self, step: Step) -> StepDone:
        """Runs one step. Raises ReplicaFailed when the executor died or reports that it cannot go on."""
        try:
            self._writer.write(_frame(self._encoder.encode(step)))
            header = await self._reader.readexactly(4)
            message = _decode(await self._reader.readexactly(_length(header)), self.name)
        except (OSError, asyncio.IncompleteReadError) as error:
            code = await self._exit_code()
            raise ReplicaFailed(f"executor {self.name} (pid {self.pid}) ended in step {step.number}: {code}") from error
        if isinstance(message, ExecutorFailed):
            raise ReplicaFailed(f"executor {self.name}: {message.message}")
        if not isinstance(message, StepDone) or message.number != step.number:
            raise ReplicaFailed(f"executor {self.name} answered step {step.number} with {type(message).__name__}")
        return message

    async def wait_for_exit(self) -> str:
        """Returns how the process ended; for noticing a death between steps."""
        return _describe(await self._process.wait())

    def kill(self) -> None:
        """Ends it at once, stuck or stopped; `stop` still has to be called."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Closes the socket, which tells the executor to go; insists after a while. Idempotent."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await _end(self._process)

    async def _exit_code(self) -> str:
        try:
            async with asyncio.timeout(_STOP_S):
                return await self.wait_for_exit()
        except TimeoutError:
            return "it closed its socket but still runs"


async def _receive_ready(sock: socket.socket, name: str, num_descriptors: int) -> tuple[ExecutorReady, list[int]]:
    descriptors: list[int] = []
    data = bytearray()
    try:
        while len(data) < 4 or len(data) < 4 + _length(data[:4]):
            await _readable(sock)
            try:
                chunk, received, _, _ = socket.recv_fds(sock, 1 << 16, num_descriptors)
            except OSError:  # it died with our words unread
                chunk, received = b"", []
            descriptors += received
            if not chunk or len(descriptors) > num_descriptors:
                raise ReplicaFailed(f"executor {name} ended before its model was loaded; its own message is above")
            data += chunk
        message = _decode(data[4:], name)
        if isinstance(message, ExecutorFailed):
            kind = ModelInvalid if message.exit_code == ModelInvalid.exit_code else OperatorError
            raise kind(f"executor {name}: {message.message}")
        if not isinstance(message, ExecutorReady) or len(descriptors) != num_descriptors:
            raise ReplicaFailed(f"executor {name} began with {type(message).__name__}, {len(descriptors)} descriptors")
        _check_layout(message.layout, name)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors


def _check_layout(layout: KvLayout, name: str) -> None:
    problems = KvShape(tp=1, num_kv_heads=layout.num_kv_heads, layout=layout).problems()
    if problems or layout.num_pages < 1:
        reason = "; ".join(problems) or f"num_pages: {layout.num_pages} is below 1"
        raise ReplicaFailed(f"executor {name} announced no arena that there can be: {reason}")


def _decode(body: bytes | bytearray, name: str) -> FromExecutor:
    """Raises ReplicaFailed: what an executor sends can end its replica, nothing more."""
    try:
        return msgspec.msgpack.decode(body, type=FromExecutor)
    except (ValueError, RecursionError, OverflowError) as error:  # msgspec's errors are ValueErrors
        raise ReplicaFailed(f"executor {name} sent a malformed frame: {error}") from error


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def _end(process: asyncio.subprocess.Process) -> None:
    for insist in (None, process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            if insist is not None:
                insist()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
                return
        except TimeoutError:
            log.warning("executor does not end; insisting", pid=process.pid)


def _environment(threads: int) -> dict[str, str]:
    """Thread pools are sized when libraries load, so the environment is the only sure place to say it."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def _length(header: bytes | bytearray) -> int:
    length = int.from_bytes(header, "little")
    if length > _MAX_FRAME_BYTES:
        raise ReplicaFailed(f"an executor announced a frame of {length} bytes")
    return length


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
