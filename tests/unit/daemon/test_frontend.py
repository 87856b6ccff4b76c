"""Requests whose decode replica is lost or full: those of which clients have nothing are asked of another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from pdd.base.errors import DeadlineExceeded, NoPath, PddError, QueueFull, ReplicaFailed
from pdd.base.ids import Incarnation, NodeName, ReplicaName, RequestId
from pdd.daemon.frontend import Frontend
from pdd.daemon.metrics import Metrics
from pdd.daemon.peers import PeerBook
from pdd.lifecycle.events import error_info
from pdd.lifecycle.request import FinishReason, GenerateRequest, SamplingParams, TokenOutput
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape
from pdd.topology.model import Role
from pdd.wire import messages as wire

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_tokens=16, dtype="float32", num_pages=64)
SHAPE = KvShape(tp=1, num_kv_heads=1, layout=LAYOUT)
REQUEST = GenerateRequest(id=RequestId("r"), prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=4))


class Clock:
    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


class Cluster:
    """A frontend and decode nodes d0, d1, ... with a replica each."""

    def __init__(self, num_decoders: int, retries: int = 1) -> None:
        self.clock = Clock()
        self.sent: list[tuple[NodeName, wire.Message]] = []
        self.metrics = Metrics()
        self.peers = PeerBook()
        for number in range(num_decoders):
            node = NodeName(f"d{number}")
            self.peers.up(node, Incarnation(f"life {number}"))
            info = wire.ReplicaInfo(
                name=ReplicaName(f"{node}/0"), role=Role.DECODE, model_digest="m", shape=SHAPE, ranks=(),
                max_sequences=4,
            )  # fmt: skip
            self.peers.announce(node, wire.Announce(replicas=(info,)))
        self.frontend = Frontend(
            self.peers, self.send, clock=self.clock, metrics=self.metrics, retries=retries, timeout_s=60.0
        )

    def send(self, node: NodeName, message: wire.Message) -> bool:
        self.sent.append((node, message))
        return True

    def asked(self) -> tuple[NodeName, wire.Submit]:
        """The latest attempt."""
        node, message = self.sent[-1]
        assert isinstance(message, wire.Submit)
        return node, message

    def answer(self, *, token: int | None = None, error: PddError | None = None, last: bool = False) -> None:
        node, submit = self.asked()
        self.frontend.output(
            node,
            TokenOutput(
                request=submit.request.id,
                tokens=() if token is None else (token,),
                error=error_info(error) if error else None,
                finish_reason=FinishReason.LENGTH if last else None,
            ),
        )

    def moved(self, code: str) -> float:
        return self.metrics.registry.get_sample_value("pdd:requests_moved_total", {"code": code}) or 0.0


async def asked_for(cluster: Cluster) -> tuple[AsyncGenerator[TokenOutput, None], asyncio.Future[TokenOutput]]:
    """An answer of which nothing has come yet, and its first output."""
    stream = cluster.frontend.generate(REQUEST)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    return stream, reading


async def first_output(cluster: Cluster, *errors: PddError) -> TokenOutput:
    """Where one attempt after the other is answered with these errors, and the next with a token."""
    stream, reading = await asked_for(cluster)
    for error in errors:
        cluster.answer(error=error)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    if not reading.done():
        cluster.answer(token=5, last=True)
    output = await reading
    await stream.aclose()
    assert len(cluster.frontend) == 0
    return output


@pytest.mark.parametrize("error", [ReplicaFailed("dead"), NoPath("draining")])
async def test_another_replica_is_asked_under_another_name(error: PddError) -> None:
    cluster = Cluster(2)
    cluster.clock.at_s = 10.0
    output = await first_output(cluster, error)
    assert (output.tokens, output.request) == ((5,), "r")
    (first, one), (second, other) = cluster.sent
    assert {first, second} == {"d0", "d1"}
    assert isinstance(one, wire.Submit)
    assert isinstance(other, wire.Submit)
    assert (one.request.id, other.request.id) == ("r", "r~1")
    assert one.request.sampling == other.request.sampling
    assert other.replica == f"{second}/0"
    assert str(error) in other.reason
    assert cluster.moved(error.code) == 1


async def test_a_lost_link_moves_what_it_carried() -> None:
    cluster = Cluster(2)
    stream, reading = await asked_for(cluster)
    lost, _ = cluster.asked()
    cluster.peers.down(lost)
    cluster.frontend.peer_down(lost, "killed")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert cluster.asked()[0] != lost
    cluster.answer(token=5, last=True)
    assert (await reading).tokens == (5,)
    await stream.aclose()


async def test_what_the_first_replica_still_says_is_not_heard() -> None:
    cluster = Cluster(2)
    stream, reading = await asked_for(cluster)
    first, _ = cluster.asked()
    cluster.answer(error=ReplicaFailed("dead"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cluster.frontend.output(first, TokenOutput(request=REQUEST.id, tokens=(9,)))
    cluster.answer(token=5, last=True)
    assert (await reading).tokens == (5,)
    await stream.aclose()


async def test_each_replica_is_asked_once_and_only_so_often() -> None:
    cluster = Cluster(4, retries=2)
    output = await first_output(cluster, *(ReplicaFailed(f"dead {number}") for number in range(3)))
    assert output.error is not None
    assert output.error.message == "dead 2"
    assert len({node for node, message in cluster.sent if isinstance(message, wire.Submit)}) == 3


async def test_without_another_replica_the_error_stands() -> None:
    output = await first_output(Cluster(1), ReplicaFailed("dead"))
    assert output.error is not None
    assert output.error.code == "replica_failed"


async def test_an_answer_of_a_healthy_replica_stands() -> None:
    cluster = Cluster(2)
    output = await first_output(cluster, DeadlineExceeded("late"))
    assert output.error is not None
    assert output.error.code == DeadlineExceeded.code
    assert len(cluster.sent) == 1


async def test_a_full_replica_is_not_the_only_one() -> None:
    cluster = Cluster(2, retries=0)
    output = await first_output(cluster, QueueFull("busy", 1.0))
    assert output.tokens == (5,)
    assert cluster.moved(QueueFull.code) == 1


async def test_when_all_are_full_the_client_is_sent_away() -> None:
    cluster = Cluster(8)
    output = await first_output(cluster, *(QueueFull(f"busy {number}", 1.0) for number in range(8)))
    assert output.error is not None
    assert (output.error.code, output.error.retry_after_s) == ("queue_full", 1.0)
    assert len({node for node, message in cluster.sent if isinstance(message, wire.Submit)}) == 4, "a few are asked"


async def test_what_was_sent_counts_until_the_next_load_tells_of_it() -> None:
    """Prompts with the same beginning would meet at one replica, had it no work."""
    cluster = Cluster(2)
    streams = [cluster.frontend.generate(msgspec.structs.replace(REQUEST, id=RequestId(f"r{it}"))) for it in range(8)]
    reading = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    assert sorted(node for node, _ in cluster.sent) == ["d0"] * 4 + ["d1"] * 4
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    assert [it.num_queued for it in cluster.peers.candidates(frozenset({"decode"}))] == [0, 0], "they have ended"


async def test_a_load_takes_the_place_of_what_was_counted() -> None:
    cluster = Cluster(1)
    stream, reading = await asked_for(cluster)
    decoders = frozenset({"decode"})
    [counted] = cluster.peers.candidates(decoders)
    assert (counted.num_queued, counted.free_pages) == (1, 63)
    load = wire.ReplicaLoad(
        name=counted.name, ready=True, free_pages=60, num_queued=0, num_running=3, queued_tokens=0
    )  # fmt: skip
    cluster.peers.load(NodeName("d0"), wire.Load(sequence=1, replicas=(load,)))
    [told] = cluster.peers.candidates(decoders)
    assert (told.num_queued, told.num_running, told.free_pages) == (0, 3, 60)
    cluster.answer(token=5, last=True)
    await reading
    await stream.aclose()


async def test_what_the_client_has_not_got_begins_anew() -> None:
    cluster = Cluster(3, retries=2)
    stream, reading = await asked_for(cluster)
    cluster.answer(token=5)
    first = await reading
    assert (first.tokens, first.anew) == ((5,), False)
    reading = asyncio.ensure_future(anext(stream))
    for error in (ReplicaFailed("dead"), NoPath("draining")):
        cluster.answer(error=error)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    cluster.answer(token=6)
    again = await reading
    assert (again.tokens, again.anew, again.request) == ((6,), True, "r")
    cluster.answer(token=7, last=True)
    last = await anext(stream)
    assert (last.tokens, last.anew) == ((7,), False), "it is told once"
    assert len({node for node, message in cluster.sent}) == 3
    await stream.aclose()


async def test_a_replica_cannot_make_an_answer_begin_anew() -> None:
    cluster = Cluster(1)
    stream, reading = await asked_for(cluster)
    node, submit = cluster.asked()
    cluster.frontend.output(node, TokenOutput(request=submit.request.id, tokens=(5,), anew=True))
    assert not (await reading).anew
    await stream.aclose()


async def test_once_something_was_shown_there_is_no_way_back() -> None:
    cluster = Cluster(2)
    stream, reading = await asked_for(cluster)
    cluster.answer(token=5)
    assert (await reading).tokens == (5,)
    cluster.frontend.shown(REQUEST.id)
    cluster.answer(error=ReplicaFailed("dead"))
    output = await anext(stream)
    assert output.error is not None
    assert len(cluster.sent) == 1
    await stream.aclose()


async def test_a_second_attempt_has_the_time_that_is_left() -> None:
    cluster = Cluster(2)
    stream, reading = await asked_for(cluster)
    assert cluster.asked()[1].request.timeout_s is None
    cluster.clock.at_s = 45.0
    cluster.answer(error=ReplicaFailed("dead"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert cluster.asked()[1].request.timeout_s == 15.0
    cluster.answer(token=5, last=True)
    await reading
    await stream.aclose()


async def test_a_client_that_leaves_cancels_the_present_attempt() -> None:
    cluster = Cluster(2)
    _stream, reading = await asked_for(cluster)
    cluster.answer(error=ReplicaFailed("dead"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    node, submit = cluster.asked()
    cluster.frontend.stop(REQUEST.id)
    assert cluster.sent[-1] == (node, wire.Cancel(request=submit.request.id, stopped=True))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert cluster.sent[-1] == (node, wire.Cancel(request=submit.request.id, stopped=False))
    assert len(cluster.frontend) == 0


async def test_nobody_to_ask_is_an_error_at_once() -> None:
    with pytest.raises(NoPath, match="no decode replica is reachable"):
        await anext(Cluster(0).frontend.generate(REQUEST))
