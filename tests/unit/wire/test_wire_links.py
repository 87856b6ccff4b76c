"""Control links over real loopback sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from pdd.base.errors import AddressBusy, TopologyInvalid
from pdd.base.ids import Incarnation, NodeName, RequestId, new_incarnation
from pdd.wire import links as links_module
from pdd.wire.codec import Decoder, encode
from pdd.wire.handshake import Handshake, Side
from pdd.wire.links import MAX_HALF_OPEN, Links
from pdd.wire.messages import Announce, Cancel, Hello, Load, Message, Proof, Refusal

KEY = b"k" * 32
A, B = NodeName("a"), NodeName("b")


class Recorder:
    """A LinkUser that writes down what it hears and lets tests wait for it."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []
        self.changed = asyncio.Event()
        self.on_message: Callable[[Message], None] = lambda message: None
        self.loads = 0

    def link_up(self, peer: NodeName, incarnation: Incarnation) -> None:
        self._record("up", peer, incarnation)

    def message(self, peer: NodeName, incarnation: Incarnation, message: Message) -> None:
        if not isinstance(message, Load):
            self._record("message", peer, incarnation, message)
        self.on_message(message)

    def link_down(self, peer: NodeName, incarnation: Incarnation, reason: str) -> None:
        self._record("down", peer, incarnation, reason)

    def load(self) -> Load:
        self.loads += 1
        return Load(sequence=self.loads, replicas=())

    def kinds(self) -> list[object]:
        return [entry[0] for entry in self.heard]

    def messages(self) -> list[object]:
        return [entry[3] for entry in self.heard if entry[0] == "message"]

    def reasons(self) -> list[str]:
        return [str(entry[3]) for entry in self.heard if entry[0] == "down"]

    async def until(self, condition: Callable[[Recorder], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()

    def _record(self, *entry: object) -> None:
        self.heard.append(entry)
        self.changed.set()


async def until(condition: Callable[[], bool]) -> None:
    """For what no callback tells."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Cluster:
    """Starts Links that know each other and closes them all at the end."""

    def __init__(self) -> None:
        self.started: list[Links] = []

    async def node(self, name: str, user: Recorder, **changes: object) -> Links:
        options: dict[str, object] = {
            "node": NodeName(name),
            "incarnation": new_incarnation(),
            "cluster": "test",
            "key": KEY,
            "host": "127.0.0.1",
            "port": 0,
            "peers": {},
            "dial": (),
            "heartbeat_s": 0.02,
            "silence_s": 10.0,
            "user": user,
        }
        links = Links(**(options | changes))  # type: ignore[arg-type]
        await links.start()
        self.started.append(links)
        return links

    async def pair(self, user_a: Recorder, user_b: Recorder, **changes_a: object) -> tuple[Links, Links]:
        """a dials b."""
        b = await self.node("b", user_b, peers={A: ("127.0.0.1", 1)})
        a = await self.node("a", user_a, peers={B: ("127.0.0.1", b.port)}, dial=(B,), **changes_a)
        return a, b


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for links in reversed(cluster.started):  # who dials stops first: nobody is accepted while the other one closes
        await links.close()
    assert len(asyncio.all_tasks()) == 1, "only the test itself is left"


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(links_module, "MAX_BACKOFF_S", 0.02)


class RawPeer:
    """A connection that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = Decoder()
        self.inbox: deque[Message] = deque()

    @classmethod
    async def connect(cls, port: int) -> RawPeer:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def write(self, *messages: Message) -> None:
        self.writer.write(b"".join(encode(message) for message in messages))

    async def receive(self) -> Message | None:
        """The next message; None at the end of the stream."""
        async with asyncio.timeout(20):
            while not self.inbox:
                try:
                    data = await self.reader.read(65536)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self.inbox.extend(self.decoder.feed(data))
        return self.inbox.popleft()

    async def rest(self) -> list[Message]:
        """What comes until the other side closes."""
        messages = []
        while (message := await self.receive()) is not None:
            messages.append(message)
        return messages

    async def authenticate(self, *, key: bytes = KEY, node: str = "a", cluster: str = "test") -> Handshake:
        handshake = Handshake(
            side=Side.DIALER,
            node=NodeName(node),
            incarnation=new_incarnation(),
            cluster=cluster,
            key=key,
            expected=(B,),
        )
        self.write(handshake.hello)
        while not handshake.done:
            message = await self.receive()
            assert message is not None
            self.write(*handshake.receive(message))
        self.decoder.authenticated()
        return handshake

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@pytest.fixture
async def acceptor(cluster: Cluster) -> tuple[Links, Recorder]:
    """Node b, which waits for node a."""
    user = Recorder()
    return await cluster.node("b", user, peers={A: ("127.0.0.1", 1)}, handshake_s=20.0), user


@pytest.fixture
async def raw(acceptor: tuple[Links, Recorder]) -> AsyncIterator[RawPeer]:
    raw = await RawPeer.connect(acceptor[0].port)
    yield raw
    await raw.close()


def cancel(name: str) -> Cancel:
    return Cancel(request=RequestId(name), stopped=False)


async def test_both_sides_come_up_and_talk_in_order(cluster: Cluster) -> None:
    user_a, user_b = Recorder(), Recorder()
    a, b = await cluster.pair(user_a, user_b)
    await user_a.until(lambda user: "up" in user.kinds())
    await user_b.until(lambda user: "up" in user.kinds())
    sent = [cancel(str(number)) for number in range(500)]
    assert all(a.send(B, message) for message in sent)
    assert b.send(A, Announce(replicas=()))
    await user_b.until(lambda user: len(user.messages()) == 500)
    await user_a.until(lambda user: len(user.messages()) == 1)
    assert user_b.messages() == sent
    (row,) = a.rows()
    assert (row.node, row.state, row.reason, row.links) == ("b", "up", "", 1)
    await a.close()
    await user_b.until(lambda user: "down" in user.kinds())
    assert user_a.kinds()[-1] == "down"
    assert not a.send(B, cancel("late"))
    assert user_b.kinds() == ["up", *["message"] * 500, "down"]


async def test_messages_sent_from_link_up_arrive_first(cluster: Cluster) -> None:
    user_a, user_b = Recorder(), Recorder()
    b = await cluster.node("b", user_b, peers={A: ("127.0.0.1", 1)})
    user_b.link_up = lambda peer, incarnation: b.send(peer, Announce(replicas=()))  # type: ignore[method-assign,assignment]
    await cluster.node("a", user_a, peers={B: ("127.0.0.1", b.port)}, dial=(B,))
    await user_a.until(lambda user: len(user.messages()) == 1)
    assert user_a.kinds() == ["up", "message"]


async def test_nodelay_is_set(cluster: Cluster) -> None:
    user_a, user_b = Recorder(), Recorder()
    a, b = await cluster.pair(user_a, user_b)
    await user_a.until(lambda user: "up" in user.kinds())
    await user_b.until(lambda user: "up" in user.kinds())
    for links in (a, b):
        (link,) = links._connections
        assert link._transport is not None
        assert link._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_busy_port_names_the_address(cluster: Cluster) -> None:
    first = await cluster.node("b", Recorder())
    with pytest.raises(AddressBusy, match=f"127.0.0.1:{first.port}"):
        await cluster.node("c", Recorder(), port=first.port)


async def test_an_address_of_another_machine_is_a_fault_of_the_topology(cluster: Cluster) -> None:
    with pytest.raises(TopologyInvalid, match=r"192\.0\.2\.1"):
        await cluster.node("b", Recorder(), host="192.0.2.1")


async def test_a_peer_that_comes_later_is_found(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reservation:
        port = reservation.getsockname()[1]
    user_a, user_b = Recorder(), Recorder()
    a = await cluster.node("a", user_a, peers={B: ("127.0.0.1", port)}, dial=(B,))
    await until(lambda: "cannot connect" in a.rows()[0].reason)
    assert a.rows()[0].state == "connecting"
    await cluster.node("b", user_b, port=port, peers={A: ("127.0.0.1", 1)})
    await user_a.until(lambda user: "up" in user.kinds())


async def test_a_restarted_peer_comes_back_with_its_new_incarnation(cluster: Cluster) -> None:
    user_a, user_b = Recorder(), Recorder()
    a, b = await cluster.pair(user_a, user_b)
    await user_a.until(lambda user: user.kinds() == ["up"])
    port = b.port
    await b.close()
    await cluster.node("b", Recorder(), port=port, peers={A: ("127.0.0.1", 1)})
    await user_a.until(lambda user: user.kinds() == ["up", "down", "up"])
    first, down, second = user_a.heard
    assert first[2] == down[2] != second[2]
    assert a.counters.reconnects == 1
    assert a.rows()[0].links == 2


async def test_a_new_link_replaces_the_old_one_even_of_the_same_incarnation(
    acceptor: tuple[Links, Recorder], raw: RawPeer
) -> None:
    links, user = acceptor
    await raw.authenticate()
    await user.until(lambda user: user.kinds() == ["up"])
    second = await RawPeer.connect(links.port)
    await second.authenticate()
    await user.until(lambda user: user.kinds() == ["up", "down", "up"])
    assert user.reasons() == ["replaced by a new link of the same node"]
    await raw.rest()
    raw.write(cancel("from the replaced link"))
    second.write(cancel("from the new link"))
    await user.until(lambda user: len(user.messages()) == 1)
    assert user.messages() == [cancel("from the new link")]
    await second.close()
    await user.until(lambda user: user.kinds()[-1] == "down")
    assert user.kinds().count("down") == 2


async def test_silence_takes_a_link_down(cluster: Cluster) -> None:
    user = Recorder()
    links = await cluster.node("b", user, peers={A: ("127.0.0.1", 1)}, silence_s=0.06)
    raw = await RawPeer.connect(links.port)
    await raw.authenticate()
    await user.until(lambda user: user.kinds() == ["up", "down"])
    assert "silent" in user.reasons()[0]
    await raw.close()


async def test_heartbeats_keep_an_idle_link_up(cluster: Cluster) -> None:
    user_a, user_b = Recorder(), Recorder()
    await cluster.pair(user_a, user_b, silence_s=0.5)
    await user_a.until(lambda user: "up" in user.kinds())
    loads = 0

    def count(message: Message) -> None:
        nonlocal loads
        loads += isinstance(message, Load)
        user_a.changed.set()

    user_a.on_message = count
    await user_a.until(lambda user: loads > 40)
    assert user_a.kinds() == ["up"]


async def test_a_cut_link_comes_back(cluster: Cluster) -> None:
    user_a, user_b = Recorder(), Recorder()
    a, _ = await cluster.pair(user_a, user_b)
    await user_a.until(lambda user: user.kinds() == ["up"])
    a.cut(B, "it did not answer")
    assert user_a.kinds() == ["up", "down"]
    assert not a.send(B, cancel("after the cut"))
    await user_a.until(lambda user: user.kinds() == ["up", "down", "up"])
    assert user_a.reasons() == ["it did not answer"]


async def test_a_handler_that_raises_closes_the_link_as_an_internal_error(
    acceptor: tuple[Links, Recorder], raw: RawPeer
) -> None:
    links, user = acceptor

    def fail(message: Message) -> None:
        raise ZeroDivisionError("oops")

    user.on_message = fail
    await raw.authenticate()
    raw.write(cancel("one"), cancel("two"))
    await user.until(lambda user: "down" in user.kinds())
    assert user.kinds() == ["up", "message", "down"]
    assert "ZeroDivisionError" in user.reasons()[0]
    assert links.counters.internal_errors == 1
    again = await RawPeer.connect(links.port)
    await again.authenticate()
    await user.until(lambda user: user.kinds()[-1] == "up")
    await again.close()


async def test_link_down_comes_even_where_it_cannot_be_logged(
    acceptor: tuple[Links, Recorder], raw: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, user = acceptor
    await raw.authenticate()
    await user.until(lambda user: user.kinds() == ["up"])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(links_module.log, "info", full)
    with pytest.raises(OSError, match="No space"):
        links.cut(A, "it did not answer")
    assert user.kinds() == ["up", "down"]


async def test_a_peer_that_does_not_read_is_closed(cluster: Cluster) -> None:
    user = Recorder()
    links = await cluster.node("b", user, peers={A: ("127.0.0.1", 1)}, max_unsent_bytes=100_000)
    raw = await RawPeer.connect(links.port)
    await raw.authenticate()
    await user.until(lambda user: "up" in user.kinds())
    big = cancel("x" * 1_000_000)
    sent = 0
    while links.send(A, big):
        sent += 1
        assert sent < 1000, "kernel buffers are not that large"
    assert user.kinds() == ["up"], "link_down never comes from inside send"
    assert not links.send(A, cancel("small"))
    await user.until(lambda user: user.kinds() == ["up", "down"])
    assert "does not read" in user.reasons()[0]
    await raw.close()


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 64, b"\x04\x00\x00\x00abcd", b"\0" * 8]
)
async def test_junk_before_the_handshake(acceptor: tuple[Links, Recorder], raw: RawPeer, junk: bytes) -> None:
    links, user = acceptor
    raw.writer.write(junk)
    assert [type(message) for message in await raw.rest()] == [Hello]
    assert links.counters.bad_handshakes == 1
    assert user.heard == []


async def test_only_the_handshake_is_listened_to_before_it_is_done(
    acceptor: tuple[Links, Recorder], raw: RawPeer
) -> None:
    links, user = acceptor
    raw.write(cancel("from nobody"))
    await raw.rest()
    assert user.heard == []
    assert links.counters.bad_handshakes == 1


async def test_handshake_messages_after_it_close_the_link(acceptor: tuple[Links, Recorder], raw: RawPeer) -> None:
    links, user = acceptor
    handshake = await raw.authenticate()
    raw.write(handshake.hello)
    await user.until(lambda user: user.kinds() == ["up", "down"])
    assert "Hello after the handshake" in user.reasons()[0]
    assert links.counters.protocol_errors == 1


async def test_junk_after_the_handshake_closes_the_link(acceptor: tuple[Links, Recorder], raw: RawPeer) -> None:
    links, user = acceptor
    await raw.authenticate()
    raw.write(cancel("good"))
    raw.writer.write(b"\x01\x00\x00\x00\xc1")
    await user.until(lambda user: user.kinds() == ["up", "message", "down"])
    assert links.counters.protocol_errors == 1


async def test_the_wrong_key_is_refused_with_a_reason(acceptor: tuple[Links, Recorder], raw: RawPeer) -> None:
    links, user = acceptor
    handshake = Handshake(
        side=Side.DIALER, node=A, incarnation=new_incarnation(), cluster="test", key=b"x" * 32, expected=(B,)
    )
    raw.write(handshake.hello)
    hello = await raw.receive()
    assert isinstance(hello, Hello)
    raw.write(*handshake.receive(hello))
    _, refusal = await raw.rest()
    assert isinstance(refusal, Refusal)
    assert refusal.code == "wrong_key"
    assert links.rows()[0].state == "refused"
    assert user.heard == []


async def test_a_recorded_handshake_is_worth_nothing(acceptor: tuple[Links, Recorder], raw: RawPeer) -> None:
    links, user = acceptor
    handshake = Handshake(
        side=Side.DIALER, node=A, incarnation=new_incarnation(), cluster="test", key=KEY, expected=(B,)
    )
    raw.write(handshake.hello)
    hello = await raw.receive()
    assert isinstance(hello, Hello)
    (proof,) = handshake.receive(hello)
    raw.write(proof)
    await user.until(lambda user: user.kinds() == ["up"])
    replay = await RawPeer.connect(links.port)
    replay.write(handshake.hello, proof)
    messages = await replay.rest()
    assert [type(message) for message in messages] == [Hello, Proof, Refusal]
    assert user.kinds() == ["up"], "the true link lives on"
    await replay.close()


async def test_a_slow_handshake_is_cut_off(cluster: Cluster) -> None:
    links = await cluster.node("b", Recorder(), handshake_s=0.05)
    raw = await RawPeer.connect(links.port)
    raw.writer.write(b"\x40")
    assert [type(message) for message in await raw.rest()] == [Hello]
    assert links.counters.bad_handshakes == 1
    await raw.close()


async def test_half_open_connections_are_bounded_and_do_not_keep_a_true_peer_out(
    acceptor: tuple[Links, Recorder],
) -> None:
    links, user = acceptor
    crowd = [await RawPeer.connect(links.port) for _ in range(MAX_HALF_OPEN + 10)]
    for raw in crowd:
        await raw.receive() if not raw.reader.at_eof() else None
    true_peer = await RawPeer.connect(links.port)
    await true_peer.authenticate()
    await user.until(lambda user: user.kinds() == ["up"])
    assert len(links._half_open) <= MAX_HALF_OPEN
    assert links.counters.half_open_evicted >= 10
    for raw in [*crowd, true_peer]:
        await raw.close()


async def test_a_dialer_says_why_it_is_refused(cluster: Cluster) -> None:
    user_a, user_b = Recorder(), Recorder()
    a, _ = await cluster.pair(user_a, user_b, cluster="other")
    await until(lambda: a.rows()[0].state == "refused")
    assert "cluster" in a.rows()[0].reason
    assert user_a.heard == user_b.heard == []


async def test_close_does_not_wait_for_a_peer_that_does_not_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "CLOSE_S", 0.05)
    user = Recorder()
    links = await cluster.node("b", user, peers={A: ("127.0.0.1", 1)}, max_unsent_bytes=1 << 30)
    raw = await RawPeer.connect(links.port)
    await raw.authenticate()
    await user.until(lambda user: "up" in user.kinds())
    for _ in range(20):
        assert links.send(A, cancel("x" * 1_000_000))
    await links.close()
    assert user.kinds() == ["up", "down"]
    await raw.close()


def test_the_same_on_uvloop() -> None:
    async def talk() -> None:
        cluster, user_a, user_b = Cluster(), Recorder(), Recorder()
        a, b = await cluster.pair(user_a, user_b)
        await user_a.until(lambda user: "up" in user.kinds())
        await user_b.until(lambda user: "up" in user.kinds())
        with pytest.raises(AddressBusy):
            await cluster.node("c", Recorder(), port=b.port)
        a.send(B, cancel("x" * 1_000_000))
        await a.close()
        await user_b.until(lambda user: user.kinds() == ["up", "message", "down"])
        await b.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk())
