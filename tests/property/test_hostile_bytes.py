"""Hostile bytes on every port, through the objects that really stand there: what they get is an end, never a crash.

Control links (in clear and over TLS, before and after the key was proved, with a whole node behind them), the admin
socket, HTTP, and what an executor may send. After each attack an honest client is served.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from certificates import make_authority, make_certificate
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_codec_property import TYPES, bodies, frames, json_like

from pdd.base.clock import MonotonicClock
from pdd.base.errors import ModelInvalid, OperatorError, ReplicaFailed
from pdd.base.ids import NodeName, new_incarnation
from pdd.daemon.admin import AdminServer
from pdd.daemon.node import Node
from pdd.engine.handle import ExecutorHandle, _receive_ready
from pdd.engine.protocol import ExecutorFailed, ExecutorReady, Sampled, Step, StepDone
from pdd.memory.layout import KvLayout
from pdd.topology.load import load
from pdd.wire.admin import AdminRequest, DrainResult
from pdd.wire.codec import MAX_FRAME_BYTES, MAX_HANDSHAKE_FRAME_BYTES, Decoder, encode
from pdd.wire.handshake import Handshake, Side
from pdd.wire.link import Link
from pdd.wire.links import Links
from pdd.wire.messages import Hello, Message, Proof, Refusal
from pdd.wire.tls import LinkTls, Tls

KEY = b"k" * 32
TOY = load(Path(__file__).parents[2] / "topology" / "toy.yaml")
US, THEM = NodeName("decode0"), NodeName("prefill0")

hostile = settings(
    max_examples=150,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Examples share one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Each attack would be told in the log."""
    structlog.configure(processors=[drop])
    yield
    structlog.reset_defaults()


def drop(*_: object) -> dict[str, object]:
    raise structlog.DropEvent


async def turns(number: int = 4) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


# ---- control links ----


class Pipe(asyncio.Transport):
    """What a Link writes is kept; closing tells it so one turn later, like a socket."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._link.connection_lost, None)

    abort = close


class Attacked:
    """An accepted link of a whole node, and the attacker's end of it."""

    def __init__(self, tls: LinkTls | None = None) -> None:
        self.node = Node(TOY, US, new_incarnation(), MonotonicClock())
        self.links = self.node.links = Links(
            node=US, incarnation=self.node.incarnation, cluster="toy", key=KEY, host="127.0.0.1", port=0,
            peers={THEM: ("127.0.0.1", 1)}, dial=(), heartbeat_s=1.0, silence_s=9.0, user=self.node, tls=tls,
        )  # fmt: skip
        self.link = self.links._accepted()
        self.pipe = Pipe(self.link)
        self.link.connection_made(self.pipe)

    def feed(self, data: bytes, step: int = 1 << 20) -> None:
        for start in range(0, len(data), step):
            if not self.pipe.closed:
                self.link.data_received(data[start : start + step])

    def authenticate(self) -> None:
        handshake = Handshake(side=Side.DIALER, node=THEM, incarnation=new_incarnation(), cluster="toy", key=KEY,
                              expected=(US,))  # fmt: skip
        decoder = Decoder()
        self.feed(encode(handshake.hello))
        for _ in range(2):
            written, self.pipe.written = bytes(self.pipe.written), bytearray()
            for message in decoder.feed(written):
                for reply in () if handshake.done else handshake.receive(message):
                    self.feed(encode(reply))
                if handshake.done:
                    decoder.authenticated()
        assert self.link.authenticated

    async def end(self) -> None:
        """Whatever was said: at most one frame is held, and the end is clean."""
        most = MAX_FRAME_BYTES if self.link.authenticated else MAX_HANDSHAKE_FRAME_BYTES
        assert len(self.link._decoder._buffer) <= 4 + most
        assert len(self.pipe.written) < 100_000
        await turns()
        self.pipe.close()
        await turns()
        assert not self.links._connections
        assert not self.links._half_open
        assert [peer.node for peer in self.node.peers] == [US]
        assert self.links.counters.internal_errors == 0


@hostile
@given(data=st.lists(frames | st.binary(max_size=200), max_size=4).map(b"".join), step=st.integers(1, 64))
def test_a_stranger_on_the_control_port(run: Run, data: bytes, step: int) -> None:
    async def attack() -> None:
        attacked = Attacked()
        attacked.feed(data, step)
        assert not attacked.link.authenticated
        await attacked.end()

    run(attack())


def of_type(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Valid by type, and nothing else."""
    return st.builds(kind, **{field: values(hint) for field, hint in msgspec_hints(kind).items()})


def msgspec_hints(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.inspect.type_info(kind).fields}  # type: ignore[union-attr]


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    info = msgspec.inspect
    match kind:
        case info.IntType():
            return st.integers(-1, 3) | st.integers(-(2**63), 2**64 - 1)
        case info.FloatType():
            return st.floats()
        case info.BoolType():
            return st.booleans()
        case info.BytesType():
            return st.binary(max_size=40)
        case info.StrType():
            known = ["r0", "r1", "decode0/0", "prefill0/0", "decode", "prefill", "float32", "tcp"]
            return st.sampled_from(known) | st.text(max_size=8)
        case info.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
        case info.VarTupleType(item_type=item) | info.ListType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case info.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case info.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case info.UnionType(types=types):
            return st.one_of(*map(values, types))
        case info.NoneType():
            return st.none()
        case info.EnumType(cls=cls):
            return st.sampled_from(cls)
        case info.Metadata(type=inner):
            return values(inner)
        case _:
            raise NotImplementedError(kind)


messages = st.one_of(*(of_type(kind) for kind in TYPES if kind not in (Hello, Proof, Refusal)))


def encoded(message: Message) -> bytes:
    with contextlib.suppress(Exception):  # numbers that msgpack does not have
        return encode(message)
    return b""


@hostile
@given(sent=st.lists(messages.map(encoded) | frames | st.binary(max_size=40), max_size=12))
def test_a_peer_that_has_the_key_and_says_anything(run: Run, sent: list[bytes]) -> None:
    async def attack() -> None:
        attacked = Attacked()
        attacked.authenticate()
        for data in sent:
            attacked.feed(data)
        await attacked.end()

    run(attack())


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> LinkTls:
    directory = tmp_path_factory.mktemp("certificates")
    return LinkTls(make_certificate(directory, "node", make_authority(directory)))


def client_hello(tls: LinkTls) -> bytes:
    dialer: Tls = tls.end(Side.DIALER)
    dialer.receive(b"")
    return dialer.outgoing()


@hostile
@given(
    junk=st.binary(max_size=300),
    damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    keep=st.integers(0, 600),
    step=st.integers(1, 200),
)
def test_a_stranger_on_a_control_port_with_tls(
    run: Run, tls: LinkTls, junk: bytes, damage: list[tuple[int, int]], keep: int, step: int
) -> None:
    async def attack() -> None:
        attacked = Attacked(tls)
        said = bytearray(client_hello(tls)[:keep])
        for place, value in damage:
            if place < len(said):
                said[place] = value
        attacked.feed(bytes(said) + junk, step)
        assert not attacked.link.authenticated
        await attacked.end()

    run(attack())


# ---- admin socket ----


async def drained(request: AdminRequest) -> msgspec.Struct:
    return DrainResult(draining=request.command == "drain", unfinished=0)


admin_lines = st.one_of(
    st.binary(max_size=300),
    json_like.map(lambda value: json.dumps(value, default=str).encode()),
    st.dictionaries(st.sampled_from(["command", "request", "x"]), json_like, max_size=3).map(
        lambda value: json.dumps(value, default=str).encode()
    ),
    st.integers(1, 3).map(lambda number: b"[" * 40_000 * number),
)


@hostile
@given(lines=st.lists(admin_lines, max_size=4))
def test_anything_on_the_admin_socket(run: Run, tmp_path: Path, lines: list[bytes]) -> None:
    async def attack() -> None:
        server = AdminServer(tmp_path / "a.sock", drained, lambda: None)
        await server.start()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "a.sock")
        with contextlib.suppress(ConnectionError):
            writer.write(b"\n".join(lines))
            writer.write_eof()
            for line in (await reader.read()).splitlines():
                assert set(json.loads(line)) == {"result", "error"}
        writer.close()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "a.sock")
        writer.write(b'{"command": "drain"}\n')
        assert json.loads(await reader.readline())["result"] == {"draining": True, "unfinished": 0}
        writer.close()
        await server.stop()

    run(attack())


# ---- executors ----


class Process:
    """An executor that does not end by itself."""

    pid = 1

    async def wait(self) -> int:
        return 0

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


READY = ExecutorReady(
    layout=KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_tokens=1, dtype="float32", num_pages=1),
    load_s=0.0,
    resident_bytes=0,
)
from_executors = st.one_of(
    st.builds(
        StepDone,
        number=st.integers(-1, 9),
        sampled=st.lists(
            st.builds(Sampled, sequence=st.integers(-1, 3), token=st.integers(-(2**63), 2**63), logprobs=st.none()),
            max_size=3,
        ),
        compute_s=st.floats(),
    ),
    st.builds(ExecutorFailed, message=st.text(), exit_code=st.integers(-(2**63), 2**63)),
    st.builds(ExecutorReady, layout=values(msgspec.inspect.type_info(KvLayout)), load_s=st.floats(),
              resident_bytes=st.integers(-1, 1)),
)  # fmt: skip
executor_frames = (from_executors.map(msgspec.msgpack.encode) | bodies).map(
    lambda body: len(body).to_bytes(4, "little") + body
)


@hostile
@given(data=st.lists(executor_frames | st.binary(max_size=40), max_size=3).map(b"".join))
def test_what_an_executor_answers_ends_its_replica_at_most(run: Run, data: bytes) -> None:
    async def attack() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_unix_connection(sock=ours)
            handle = ExecutorHandle("toy/0 rank 0", Process(), streams, READY, [-1])  # type: ignore[arg-type]
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ReplicaFailed):
                done = await handle.step(Step(number=1, release=[], start=[], rows=[]))
                assert done.number == 1
                assert all(0 <= one.token < 2**31 for one in done.sampled)
            await handle.stop()

    run(attack())


@hostile
@given(
    data=st.lists(executor_frames | st.binary(max_size=40), min_size=1, max_size=3).map(b"".join),
    num_sent=st.integers(0, 3),
    num_wanted=st.integers(1, 2),
)
def test_what_an_executor_begins_with_ends_its_replica_at_most(
    run: Run, data: bytes, num_sent: int, num_wanted: int
) -> None:
    async def attack() -> None:
        before = len(os.listdir("/proc/self/fd"))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            rights = array.array("i", [theirs.fileno()] * num_sent)
            if data:
                theirs.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if num_sent else [])
            theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ReplicaFailed, OperatorError, ModelInvalid):
                ready, descriptors = await _receive_ready(ours, "toy/0 rank 0", num_wanted)
                assert ready.layout.arena_bytes > 0
                assert len(descriptors) == num_wanted
                for descriptor in descriptors:
                    os.close(descriptor)
        assert len(os.listdir("/proc/self/fd")) == before, "a descriptor leaked"

    run(attack())
