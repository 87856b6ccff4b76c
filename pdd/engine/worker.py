"""The executor process, `python -m pdd.engine.worker --fd N`: one rank of a replica, steps in, tokens out.

Started by the daemon with one end of a Unix socket pair. It holds the model and the arena, and lives exactly as long
as the daemon's end of the socket.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from pdd.base.errors import InvariantBroken, OperatorError, PddError, TopologyInvalid
from pdd.base.process import die_with_parent
from pdd.engine.affinity import node_of, pin, prefer_node
from pdd.engine.config import ModelConfig
from pdd.engine.gathering import Gathering
from pdd.engine.pack import PackedModel, open_packed
from pdd.engine.protocol import ExecutorConfig, ExecutorFailed, ExecutorReady, FromExecutor, Step, StepDone
from pdd.engine.runner import LayerProgress, Model, Runner
from pdd.engine.sharding import check_parallel
from pdd.engine.toy import ToyModel
from pdd.memory.arena import Arena, LayerCounter, WakeFd
from pdd.memory.layout import KvLayout
from pdd.memory.shape import heads_of
from pdd.topology.discover_sysfs import numa_nodes

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Longer frames are refused: a step is a few hundred kilobytes at most."""

T = TypeVar("T")


class Channel:
    """The executor's end of the socket: whole frames in and out, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def receive(self) -> bytes | None:
        """The next frame's body; None where the daemon has closed. Raises InvariantBroken for an oversized frame."""
        header = self._exactly(4)
        if header is None:
            return None
        num_bytes = int.from_bytes(header, "little")
        if num_bytes > MAX_FRAME_BYTES:
            raise InvariantBroken(f"the daemon announced a frame of {num_bytes} bytes; the limit is {MAX_FRAME_BYTES}")
        return self._exactly(num_bytes)

    def send(self, message: FromExecutor, fds: tuple[int, ...] = ()) -> None:
        """Descriptors ride with the first byte. Raises BrokenPipeError where the daemon is gone."""
        body = msgspec.msgpack.encode(message)
        frame = memoryview(len(body).to_bytes(4, "little") + body)
        num_sent = socket.send_fds(self._socket, [frame], fds) if fds else 0
        self._socket.sendall(frame[num_sent:])

    def _exactly(self, num_bytes: int) -> bytes | None:
        data = bytearray()
        while len(data) < num_bytes:
            part = self._socket.recv(min(num_bytes - len(data), 1024 * 1024))
            if not part:
                return None
            data += part
        return bytes(data)


def serve(channel: Channel) -> None:
    """From the first frame until the daemon closes. Raises what it cannot mend."""
    body = channel.receive()
    if body is None:
        return
    config = _decoded(body, ExecutorConfig)
    _pin(config)
    started_s = time.monotonic()
    packed = open_packed(Path(config.model_dir), config.dtype)
    if faults := check_parallel(packed.config, config.tp, config.dp, config.ep):
        raise TopologyInvalid("\n".join(f"{config.replica}: {fault}" for fault in faults))
    arena = Arena.create(plan_layout(packed.config, config))
    _place(arena, config)
    counter, wakes = LayerCounter.create(), _wakes(config)
    model = build_model(packed, arena, LayerProgress(counter, wakes), config)
    runner = Runner(model, arena.layout, packed.config)
    gc.freeze()  # what was loaded stays: no collection need look at it again
    ready = ExecutorReady(layout=arena.layout, load_s=time.monotonic() - started_s, resident_bytes=resident_bytes())
    lead_only = (counter.fd, *(wake.fd for wake in wakes)) if wakes else ()
    channel.send(ready, (arena.fd, *lead_only))
    while (body := channel.receive()) is not None:
        step = _decoded(body, Step)
        started_s = time.monotonic()
        sampled = runner.step(step)
        channel.send(StepDone(number=step.number, sampled=sampled, compute_s=time.monotonic() - started_s))


def _wakes(config: ExecutorConfig) -> list[WakeFd]:
    """One for each port of the set, on its lead: a port empties the one that it waits for."""
    is_lead = config.rank % config.tp == 0
    return [WakeFd.create() for _ in range(config.num_wakes)] if is_lead else []


def plan_layout(model: ModelConfig, config: ExecutorConfig) -> KvLayout:
    """As many pages as `kv_bytes` holds, of the rank's own heads. Raises TopologyInvalid where that is not even one."""
    layout = KvLayout(
        num_layers=model.num_layers,
        num_kv_heads=len(heads_of(config.rank % config.tp, config.tp, model.num_kv_heads)),
        head_dim=model.head_dim,
        page_tokens=config.page_tokens,
        dtype=config.dtype,
        num_pages=0,
        num_planes=model.num_planes,
    )
    across_layers = layout.num_layers * layout.page_bytes
    num_pages = config.kv_bytes // across_layers
    if num_pages < 1:
        raise TopologyInvalid(
            f"{config.replica}: kv_bytes is {config.kv_bytes}, but one page of {config.page_tokens} tokens takes "
            f"{across_layers} bytes over {layout.num_layers} layers; raise kv_bytes"
        )
    return msgspec.structs.replace(layout, num_pages=num_pages)


def build_model(packed: PackedModel, arena: Arena, progress: LayerProgress, config: ExecutorConfig) -> Model:
    """Returns when all ranks of the replica are there. Only an executor whose model needs torch imports it."""
    if packed.config.architecture == "toy":
        return ToyModel(packed.config, arena, progress, Gathering.join(config))
    from pdd.engine.models.load import load_model  # noqa: PLC0415

    return load_model(packed, arena, progress, config)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _pin(config: ExecutorConfig) -> None:
    """Before anything starts a thread: threads inherit the affinity, and OpenMP reads the count once."""
    if config.cores:
        pin(config.replica, config.cores)
    os.environ["OMP_NUM_THREADS"] = str(config.threads)


def _place(arena: Arena, config: ExecutorConfig) -> None:
    """Before anybody touches the arena: its memory comes from the executor's NUMA node where it is pinned to one."""
    node = node_of(config.cores, numa_nodes()) if config.cores else None
    if node is not None and not prefer_node(arena.address, arena.num_bytes, node):
        text = f"{config.replica}: the system refuses to keep the KV memory on NUMA node {node} (mbind)"
        with suppress(OSError):  # a stderr that takes nothing ends no executor
            print(f"{text}: in a container, allow it with CAP_SYS_NICE", file=sys.stderr, flush=True)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise InvariantBroken(f"the daemon sent a frame that is no {kind.__name__}: {error}") from error


def _fail(channel: Channel, error: Exception) -> int:
    """Tell the daemon, leave the traceback of a bug on stderr, and answer with the exit code."""
    if not isinstance(error, PddError) or isinstance(error, InvariantBroken):
        with suppress(OSError):
            traceback.print_exception(error)
    message = str(error) if isinstance(error, PddError) else f"{type(error).__name__}: {error}"
    exit_code = error.exit_code if isinstance(error, OperatorError) else 1
    with suppress(ConnectionError):  # the daemon may have given us up already
        channel.send(ExecutorFailed(message=message, exit_code=exit_code))
    return exit_code


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdd.engine.worker", description="Executor; the daemon starts it.")
    parser.add_argument("--fd", type=int, required=True, help="this end of the socket pair")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the daemon's business
    die_with_parent(signal.SIGKILL)  # the socket's end of file ends us between steps; this also stopped or within one
    with socket.socket(fileno=parser.parse_args(arguments).fd) as sock:
        channel = Channel(sock)
        try:
            serve(channel)
        except ConnectionError:
            return 0  # the daemon went away while we answered
        except Exception as error:
            return _fail(channel, error)
    return 0


if __name__ == "__main__":
    code = main()
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # without the libraries' own farewells: gloo's aborts the process where a peer is gone
