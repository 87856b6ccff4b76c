"""Races between a request's two sides, each put together by hand: what one daemon does before it hears of the other."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from simulated_cluster import Cluster, Violation, expected
from simulated_daemon import Daemon
from simulated_schedule import Shape, replica, topology

from pdd.base.errors import RemoteProtocolError
from pdd.base.ids import Immediate, NodeName, ReplicaName, RequestId
from pdd.daemon.readiness import readiness
from pdd.lifecycle.request import GenerateRequest, SamplingParams
from pdd.topology.model import Handoff, OnHandoffFailure, Role, Verify
from pdd.wire import messages as wire
from pdd.wire.codec import Decoder, encode

PROMPT = list(range(100, 121))
"""More than the decoder prefills itself."""
DECODE, PREFILL = NodeName("decode0"), NodeName("prefill0")

Start = Callable[..., Cluster]


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes a cluster of one prefiller and one decoder, or of one node with both; it is connected."""
    started: list[Cluster] = []

    def make(
        prefill: Shape | None = None,
        decode: Shape | None = None,
        *,
        together: bool = False,
        max_queue: int = 8,
        fences: bool = True,
        **handoff: object,
    ) -> Cluster:
        prefiller = replica(Role.PREFILL, prefill or Shape(chunk_tokens=32))
        decoder = replica(Role.DECODE, decode or Shape(chunk_tokens=32))
        nodes = {"decode0": (decoder, prefiller)} if together else {"decode0": (decoder,), "prefill0": (prefiller,)}
        policy = Handoff(**{"local_prefill_tokens": 2, "lease_s": 10.0} | handoff)  # type: ignore[arg-type]
        cluster = Cluster(topology(nodes, handoff=policy, max_queue=max_queue), fences=fences)
        started.append(cluster)
        cluster.settle()
        return cluster

    yield make
    for cluster in started:
        cluster.close()


def answer(cluster: Cluster, request: str = "r") -> str:
    """Ends everything, checks all there is to check, and says how the request ended."""
    cluster.finish()
    client = next(it for it in cluster.clients if it.request.id == request)
    if client.end == "finished":
        assert tuple(client.tokens) == expected(client.request.prompt, client.request.sampling.max_tokens)
    assert client.end is not None
    return client.end


def story(cluster: Cluster, node: str, request: str) -> list[str]:
    """The reasons of what a request has been through on a node."""
    daemon = cluster.daemons[NodeName(node)].node
    found, *_ = daemon.stories.find(daemon.running(), request, 0.0)
    return [line.reason for line in found.lines]


def prefill_set(cluster: Cluster) -> ReplicaName:
    return next(name for daemon in cluster.daemons.values() for name, one in daemon.node.replicas.items()
                if one.role is Role.PREFILL)  # fmt: skip


def compute_all_but_the_report(cluster: Cluster) -> None:
    """The prefiller's executor has answered, and its daemon has not heard of it."""
    (one,) = cluster.daemons[PREFILL].sets
    cluster.step("prefill0: compute")
    while one.ranks.step is not None:
        cluster.step("prefill0: compute")


# The path without faults, in all shapes.


@pytest.mark.parametrize("pages", [(4, 4), (16, 32), (32, 16)])
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_any_shape_hands_over_to_any_other(start: Start, tp: tuple[int, int], pages: tuple[int, int]) -> None:
    prefill, decode = (
        Shape(tp=tp[at], page_tokens=pages[at], num_pages=128 // pages[at], chunk_tokens=32) for at in range(2)
    )
    cluster = start(prefill, decode)
    prompt = list(range(500, 570))
    cluster.submit("decode0", prompt, "r")
    assert answer(cluster) == "finished"
    assert cluster.states("prefill0", "r")[-1] == "sent"
    cluster.submit("decode0", [*prompt, 7, 8, 9, *range(40)], "again")  # its beginning is cached on both sides
    assert answer(cluster, "again") == "finished"
    assert cluster.states("prefill0", "again")[-1] == "sent"


def test_a_node_hands_over_to_itself(start: Start) -> None:
    cluster = start(together=True)
    cluster.submit("decode0", PROMPT, "r")
    assert answer(cluster) == "finished"
    assert len(cluster.tickets) == 1


# Cancels.


@pytest.mark.parametrize("num_computed", range(5))
@pytest.mark.parametrize("who", ["client", "decode0", "prefill0"])
def test_a_cancel_at_any_time_of_the_step(start: Start, num_computed: int, who: str) -> None:
    """The pages of a sequence stay its own until the step and the writes that use them have ended."""
    cluster = start()
    client = cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    for _ in range(num_computed):
        cluster.step("prefill0: compute")
        cluster.settle("prefill0: compute", "fabric")
    if who == "client":
        cluster.call("decode0", lambda _: client.leave())
    else:
        cluster.cancel(who, "r")
    cluster.settle("prefill0: compute")
    assert answer(cluster) == ("finished" if who == "prefill0" else "cancelled")


@pytest.mark.parametrize("by_lease", [False, True])
def test_a_cancel_between_the_last_write_and_the_report(start: Start, by_lease: bool) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    compute_all_but_the_report(cluster)
    cluster.settle("prefill0: compute")
    assert cluster.states("prefill0", "r")[-1] == "prefilling", "all is sent, and the daemon knows of no end"
    if by_lease:
        cluster.pass_time("prefill0", "_lease_over")
    else:
        cluster.cancel("prefill0", "r")
    assert cluster.states("prefill0", "r")[-1] == "cancelled"
    assert answer(cluster) == "finished"


def test_a_cancelled_ticket_leaves_room_for_the_next_of_the_same_request(start: Start) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: plan")
    cluster.pass_time("decode0", "_lease_over")
    cluster.settle("prefill0: plan")
    assert len(cluster.tickets) == 2
    assert cluster.states("prefill0", "r") == ["received", "allocated"], "the second was not rejected"
    assert answer(cluster) == "finished"


def test_the_same_request_comes_again_while_a_step_still_uses_its_pages(start: Start) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    cluster.pass_time("decode0", "_lease_over")
    cluster.settle("prefill0: compute")
    assert cluster.states("prefill0", "r") == ["received"]
    assert answer(cluster) == "finished"
    assert (cluster.states("prefill0", "r")[-1], len(cluster.tickets)) == ("sent", 2)


@pytest.mark.parametrize("full", [False, True])
def test_one_that_waits_for_an_earlier_step_of_its_own_is_stopped(start: Start, full: bool) -> None:
    """The pages of that step stay its own until it has ended, and then are nobody's."""
    cluster = start(Shape(chunk_tokens=32, max_sequences=1), max_queue=0)
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    cluster.pass_time("decode0", "_lease_over")
    cluster.settle("prefill0: compute")
    if full:
        cluster.submit("decode0", [1, *PROMPT], "s")
        cluster.settle("prefill0: compute")
    cluster.cancel("prefill0", "r")
    cluster.settle("prefill0: compute")
    assert cluster.states("prefill0", "r") == ["received", "cancelled"]
    assert cluster.daemons[PREFILL].sets[0].set.pool.num_owned == 5
    assert answer(cluster) == "finished"


# Tickets.


def test_a_full_prefiller_is_passed_by(start: Start) -> None:
    cluster = start(Shape(chunk_tokens=32, max_sequences=1), max_queue=0)
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    cluster.submit("decode0", [1, *PROMPT], "s")
    cluster.settle("prefill0: compute")
    assert cluster.states("decode0", "s")[-1] in {"ready", "decoding", "finished"}
    assert [answer(cluster, "r"), answer(cluster, "s")] == ["finished", "finished"]
    assert [ticket.request for ticket in cluster.tickets] == ["r", "s", "s"]


def test_without_recomputing_a_full_prefiller_is_told_to_the_client(start: Start) -> None:
    cluster = start(Shape(chunk_tokens=32, max_sequences=1), max_queue=0, on_failure=OnHandoffFailure.ERROR)
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    cluster.submit("decode0", [1, *PROMPT], "s")
    assert [answer(cluster, "r"), answer(cluster, "s")] == ["finished", "queue_full"]


@pytest.mark.parametrize(
    "change",
    [
        {"shape_digest": "none"},
        {"target_pages": (0,)},
        {"start_token": -4},
        {"target_replica": "decode0/9"},
        {"source_replica": "prefill0/9"},
        {"immediates": (1 << 40,)},
        {"lease_s": float("nan")},
        {"target_incarnation": "another"},
        {"prompt": (1,)},
        {"prompt": (1 << 40,) * 21},
        {"prompt": (-1,) * 21},
        {"prompt": ()},
    ],
)
def test_a_bad_ticket_is_rejected_and_forgotten(start: Start, change: dict[str, object]) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    assert answer(cluster) == "finished"
    bad = msgspec.structs.replace(cluster.tickets[0], request="bad", **change)
    incarnation = cluster.daemons[DECODE].links.incarnation
    cluster.call("prefill0", lambda daemon: daemon.node.message(DECODE, incarnation, bad))
    assert answer(cluster) == "finished"
    assert all(record.id != "bad" for record in cluster.daemons[PREFILL].node.running())


def test_a_ticket_that_names_no_handoff_is_no_message(start: Start) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("fabric")
    decoder = Decoder()
    decoder.authenticated()
    with pytest.raises(RemoteProtocolError, match="immediates"):
        list(decoder.feed(encode(msgspec.structs.replace(cluster.tickets[0], immediates=()))))


@pytest.mark.parametrize("held", ["prefill0: plan", "prefill0: compute", "fabric", ""])
def test_the_same_ticket_twice(start: Start, held: str) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle(*[held] * bool(held))
    (ticket,) = cluster.tickets
    incarnation = cluster.daemons[DECODE].links.incarnation
    cluster.call("prefill0", lambda daemon: daemon.node.message(DECODE, incarnation, ticket))
    assert answer(cluster) == "finished"


def test_another_ticket_for_a_request_that_runs_is_rejected(start: Start) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    other = msgspec.structs.replace(cluster.tickets[0], immediates=(cluster.tickets[0].immediates[0] + 128,))
    incarnation = cluster.daemons[DECODE].links.incarnation
    cluster.call("prefill0", lambda daemon: daemon.node.message(DECODE, incarnation, other))
    assert answer(cluster) == "finished"
    assert cluster.states("prefill0", "r")[-1] == "sent"


@pytest.mark.parametrize(("on_failure", "end"), [("recompute", "finished"), ("error", "handoff_failed")])
def test_a_ticket_on_a_link_that_is_just_ending(start: Start, on_failure: str, end: str) -> None:
    cluster = start(on_failure=OnHandoffFailure(on_failure))
    cluster.daemons[DECODE].links.up[PREFILL].close("ending", "silent")
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("lost")
    assert answer(cluster) == end


# Ends that cross.


@pytest.mark.parametrize("polled_first", [False, True])
def test_stopped_crosses_arrived(start: Start, polled_first: bool) -> None:
    """The prefiller stops when everything is on its way: it arrives, whatever the prefiller says."""
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    compute_all_but_the_report(cluster)
    assert cluster.fabric.step()  # posts it all
    cluster.cancel("prefill0", "r")
    cluster.settle("decode0: poll", "decode0<-prefill0")
    assert cluster.states("prefill0", "r")[-1] == "cancelled"
    cluster.settle("decode0<-prefill0" if polled_first else "decode0: poll")
    assert "draining" not in cluster.states("decode0", "r")
    assert answer(cluster) == "finished"
    assert len(cluster.tickets) == 1, "what has arrived is used, whichever news is read first"


def test_a_stopped_handoff_whose_pieces_are_late(start: Start) -> None:
    """Pages of a client that is gone belong to nobody until the last piece that was posted has been counted."""
    cluster = start()
    client = cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    cluster.step("prefill0: compute")
    cluster.step("prefill0: compute")
    (target,) = cluster.daemons[DECODE].ports
    cluster.fabric.hold(target)
    cluster.settle("prefill0: compute")
    cluster.call("decode0", lambda _: client.leave())
    cluster.settle()
    assert cluster.daemons[DECODE].sets[0].set.pool.num_quarantined == 6
    assert answer(cluster) == "cancelled"


@pytest.mark.parametrize("together", [False, True])
def test_a_piece_that_never_comes(start: Start, together: bool) -> None:
    """After two leases the prefiller is shut out, also one of the same node; then the prompt is computed again."""
    cluster = start(together=together, retries=0)
    cluster.submit("decode0", PROMPT, "r")
    cluster.fabric.drop(1)
    assert answer(cluster) == "finished"
    cluster.submit("decode0", [1, *PROMPT], "s")
    assert answer(cluster, "s") == "finished"
    assert len(cluster.tickets) == 2, "it is used again afterwards"


def test_preempted_before_the_first_step(start: Start) -> None:
    """The pages of a request that has just become ready may go to an older one that grows."""
    cluster = start(decode=Shape(page_tokens=2, num_pages=7, chunk_tokens=32))
    cluster.submit("decode0", [1, 2], "old", max_tokens=8)
    cluster.settle("decode0: plan", "decode0: compute")
    cluster.submit("decode0", PROMPT[:7], "young", max_tokens=2)
    cluster.settle("decode0: plan", "decode0: compute", "fabric")
    while len(cluster.clients[0].tokens) < 5:
        cluster.settle("decode0: plan", "fabric")
        if len(cluster.clients[0].tokens) < 5:
            cluster.step("decode0: plan")
    cluster.settle("decode0: plan")
    assert cluster.states("decode0", "young")[-1] == "ready"
    cluster.settle()
    assert cluster.states("decode0", "young").count("ready") > 1
    assert [answer(cluster, "old"), answer(cluster, "young")] == ["finished", "finished"]


def test_pages_that_come_back_between_steps_let_a_starved_sequence_go_on(start: Start) -> None:
    """Nothing else would wake the loop: no step runs, and nobody else is admitted."""
    cluster = start(decode=Shape(page_tokens=2, num_pages=7, chunk_tokens=32))
    starved = cluster.submit("decode0", [1, 2], "starved", max_tokens=8)
    cluster.settle("decode0: plan", "decode0: compute")
    client = cluster.submit("decode0", PROMPT[:7], "in flight")
    cluster.settle("prefill0: compute")
    assert cluster.states("decode0", "in flight")[-1] == "prefilling"
    assert starved.end is None
    cluster.call("decode0", lambda _: client.leave())
    cluster.settle()
    assert starved.end == "finished"
    assert answer(cluster, "starved") == "finished"


def test_without_a_fence_pages_wait_for_late_writes(start: Start) -> None:
    """The prefiller that was shut out does not know it, and what it posts is still placed."""
    cluster = start(fences=False)
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    cluster.daemons[DECODE].links.up[PREFILL].close("ending", "silent")
    cluster.settle("prefill0: compute", "prefill0<-decode0", "dial")
    cluster.cancel("decode0", "r")
    cluster.step("prefill0: compute")
    cluster.step("prefill0: compute")
    (target,) = cluster.daemons[DECODE].ports
    cluster.settle("prefill0: compute", "prefill0<-decode0", "dial")
    assert target.arrived(cluster.tickets[0].immediates[0]), "late writes came"
    pool = cluster.daemons[DECODE].sets[0].set.pool
    assert pool.num_quarantined == 6
    cluster.pass_time("decode0", "_expire")
    assert pool.num_quarantined == 0
    reasons = story(cluster, "decode0", "r")
    assert any("late writes may come for 10 s" in reason for reason in reasons)
    assert "the time of its late writes is over" in reasons[-1]
    assert answer(cluster) == "cancelled"


def test_without_a_fence_each_handoff_of_a_request_waits_for_its_own_late_writes(start: Start) -> None:
    """Those of the first have completed it. The time that they would have had does not end the second."""
    cluster = start(Shape(chunk_tokens=32, prefix_cache=False), fences=False, retries=1)
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    compute_all_but_the_report(cluster)
    (target,) = cluster.daemons[DECODE].ports
    cluster.fabric.hold(target)
    cluster.settle()
    assert cluster.states("prefill0", "r")[-1] == "sent", "all is on its way"
    cluster.daemons[DECODE].links.up[PREFILL].close("ending", "silent")
    cluster.settle()
    assert cluster.states("decode0", "r")[-1] == "draining"
    cluster.call("decode0", lambda _: cluster.fabric.let_go(target))
    cluster.settle("prefill0: compute")
    assert cluster.states("decode0", "r")[-1] == "prefilling", "again"
    cluster.daemons[DECODE].links.up[PREFILL].close("ending", "silent")
    cluster.settle("prefill0: compute")
    cluster.pass_time("decode0", "_expire")
    assert cluster.states("decode0", "r")[-1] == "draining"
    cluster.pass_time("decode0", "_expire")
    assert cluster.states("decode0", "r")[-1] != "draining"
    assert answer(cluster) == "finished"


def test_without_a_fence_a_failed_replica_goes_down_all_the_same(start: Start) -> None:
    cluster = start(fences=False)
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    cluster.call("decode0", lambda daemon: daemon.fail(daemon.replicas[0]))
    cluster.step("decode0: timer shut out", cluster.timers())
    cluster.pass_time("decode0", "_expire")
    assert answer(cluster) in {"replica_failed", "finished"}


# A fabric that loses what it carries, while the links live.


def lose_writes(cluster: Cluster) -> None:
    """Some pieces of what the prefiller sends now arrive, the others never will."""
    (port,) = cluster.daemons[PREFILL].ports
    while not port.outbox:
        cluster.step("prefill0: compute")
        cluster.call("prefill0", lambda _: cluster.fabric.step())
    cluster.call("prefill0", lambda _: cluster.fabric.fail_writes(port, errno.ETIMEDOUT))


def lose(cluster: Cluster, request: str) -> None:
    """The writes of a request's only handoff get lost."""
    cluster.submit("decode0", [len(request), *map(ord, request), *PROMPT], request)
    cluster.settle("prefill0: compute", "fabric")
    lose_writes(cluster)
    cluster.settle()


@pytest.mark.parametrize("fences", [True, False])
def test_writes_that_fail_are_fenced_over_the_living_link(start: Start, fences: bool) -> None:
    """Nothing waits for a lease where keys fence, the link stays, and the new keys work."""
    cluster = start(Shape(chunk_tokens=32, prefix_cache=False), retries=0, fences=fences)
    link = cluster.daemons[DECODE].links.up[PREFILL]
    client = cluster.submit("decode0", PROMPT, "r")
    other = cluster.submit("decode0", [1, *PROMPT], "s")
    cluster.settle("prefill0: compute", "fabric")
    lose_writes(cluster)
    cluster.settle()
    if not fences:
        assert client.end is None
        cluster.pass_time("decode0", "_expire")
        cluster.settle()
    while other.end is None:  # if it was under way, its time of late writes is the same
        cluster.pass_time("decode0", "_expire")
        cluster.settle()
    assert (client.end, other.end) == ("finished", "finished")
    assert cluster.daemons[DECODE].links.up[PREFILL] is link
    assert any("writes of prefill0/0 failed" in reason for reason in story(cluster, "decode0", "r"))
    cluster.submit("decode0", [2, *PROMPT], "t")
    assert answer(cluster, "t") == "finished"
    assert cluster.states("prefill0", "t")[-1] == "sent"


def test_a_handoff_whose_writes_failed_is_tried_again(start: Start) -> None:
    cluster = start(Shape(chunk_tokens=32, prefix_cache=False), retries=1)
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute", "fabric")
    lose_writes(cluster)
    assert answer(cluster) == "finished"
    assert len(cluster.tickets) == 2
    assert cluster.states("prefill0", "r")[-1] == "sent"


def test_a_prefiller_whose_pages_do_not_arrive_is_left_out_for_a_while(start: Start) -> None:
    cluster = start(Shape(chunk_tokens=32, prefix_cache=False), retries=0)
    node = cluster.daemons[DECODE].node
    lose(cluster, "a")
    assert readiness(node).reason == "serving, prefill and decode apart", "once is no rule"
    lose(cluster, "b")
    assert "pages do not arrive from prefill0/0 in decode0/0: writes of" in readiness(node).reason
    assert "prompts are prefilled on the decoder" in readiness(node).reason
    cluster.submit("decode0", PROMPT, "here")
    cluster.settle()
    assert len(cluster.tickets) == 2
    assert any("pages do not arrive" in reason for reason in story(cluster, "decode0", "here"))
    cluster.daemons[DECODE].loop._now_s += 1.0
    lose(cluster, "c")
    cluster.daemons[DECODE].loop._now_s += 1.0
    cluster.submit("decode0", [1, *PROMPT], "here, too")
    cluster.settle()
    assert len(cluster.tickets) == 3, "the pause is longer now"
    cluster.daemons[DECODE].loop._now_s += 1.0
    cluster.submit("decode0", [2, *PROMPT], "probe")
    cluster.submit("decode0", [3, *PROMPT], "beside")
    assert answer(cluster, "probe") == "finished"
    assert len(cluster.tickets) == 4, "one request finds out"
    assert readiness(node).reason == "serving, prefill and decode apart"


def test_where_prompts_may_not_be_recomputed_the_only_prefiller_is_asked_all_the_same(start: Start) -> None:
    cluster = start(Shape(chunk_tokens=32, prefix_cache=False), retries=0, on_failure=OnHandoffFailure.ERROR)
    lose(cluster, "a")
    lose(cluster, "b")
    cluster.submit("decode0", PROMPT, "r")
    assert answer(cluster) == "finished"


# Replicas of several sets.


@pytest.mark.parametrize("where", ["decode0", "prefill0"])
@pytest.mark.parametrize("joint", [False, True])
def test_a_rank_of_one_set_takes_the_replica_down(start: Start, joint: bool, where: str) -> None:
    two = Shape(dp=2, joint=joint, chunk_tokens=32, max_sequences=1)
    cluster = start(two, two)
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    for name in ("decode0", "prefill0"):
        cluster.call(name, lambda daemon: daemon.beat())
    cluster.settle("prefill0: compute")
    cluster.submit("decode0", [1, *PROMPT], "s")
    cluster.settle("prefill0: compute")
    assert all(one.set.admission.num_admitted for one in cluster.daemons[NodeName(where)].sets), "each has a request"
    cluster.call(where, lambda daemon: cluster.fabric.fail(daemon.ports[1], 5))
    ends = {answer(cluster, "r"), answer(cluster, "s")}
    assert ends <= ({"finished"} if where == "prefill0" else {"replica_failed", "no_path"})
    cluster.submit("decode0", [2, *PROMPT], "t")
    assert answer(cluster, "t") == "finished"
    assert cluster.states("prefill0", "t")[-1] == "sent", "both sets are there again"


def test_sets_with_joint_steps_wait_for_each_other(start: Start) -> None:
    cluster = start(Shape(dp=2, joint=True, chunk_tokens=32))
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    busy, idle = sorted(cluster.daemons[PREFILL].sets, key=lambda one: -one.set.admission.num_admitted)
    assert (busy.in_step, idle.in_step) == (True, True), "the one without work takes part"
    (loop,) = cluster.daemons[PREFILL].replicas[0].loops
    while idle.computing:
        cluster.call("prefill0", lambda _: loop.compute(idle))
    cluster.submit("decode0", [1, *PROMPT], "s")
    cluster.settle("prefill0: compute")
    assert not loop.may_plan
    assert [answer(cluster, "r"), answer(cluster, "s")] == ["finished", "finished"]


# Fabric endpoints that break, and replicas that start anew.


@pytest.mark.parametrize("held", ["prefill0<-decode0: PrefillRequest", "prefill0: plan", "prefill0: compute", "fabric"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["decode0", "prefill0"])
def test_a_port_breaks(start: Start, where: str, rank: int, held: str) -> None:
    two = Shape(tp=2, chunk_tokens=32)
    cluster = start(two, two)
    cluster.submit("decode0", PROMPT, "r")
    cluster.submit("decode0", [1, *PROMPT], "s")
    cluster.settle(held)
    cluster.call(where, lambda daemon: cluster.fabric.fail(daemon.ports[rank], 5))
    cluster.settle(held)
    ends = {answer(cluster, "r"), answer(cluster, "s")}
    assert ends <= ({"finished"} if where == "prefill0" else {"finished", "replica_failed"})
    cluster.submit("decode0", [2, *PROMPT], "t")
    assert answer(cluster, "t") == "finished"
    assert cluster.states("prefill0", "t")[-1] == "sent", "both are there again"


def test_a_replica_whose_port_breaks_while_it_is_taken_down(start: Start) -> None:
    cluster = start()

    def fail(daemon: Daemon) -> None:
        cluster.fabric.fail(daemon.ports[0], 5)
        daemon.fail(daemon.replicas[0])

    cluster.call("decode0", fail)
    cluster.step("decode0: take down")
    cluster.submit("decode0", PROMPT, "r")
    assert answer(cluster) in {"no_path", "finished"}


@pytest.mark.parametrize("name", ["decode0", "prefill0"])
def test_a_daemon_dies_and_comes_back(start: Start, name: str) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    cluster.step("prefill0: compute")
    cluster.step("prefill0: compute")
    cluster.settle("prefill0: compute", "fabric")
    cluster.kill(NodeName(name))
    cluster.start(NodeName(name))
    assert answer(cluster) == ("gone" if name == "decode0" else "finished")
    cluster.submit("decode0", PROMPT, "s")
    assert answer(cluster, "s") == "finished"


@pytest.mark.parametrize("held", ["prefill0: compute", "decode0: compute", "fabric"])
def test_a_flood_of_the_same_news_leaves_no_trace(start: Start, held: str) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle(held)
    (ticket,) = cluster.tickets
    named: dict[str, Any] = {"request": ticket.request, "immediate": ticket.immediates[0]}
    decoder, prefiller = (cluster.daemons[name].links.incarnation for name in (DECODE, PREFILL))
    for message in (
        wire.PrefillAccepted(**named),
        wire.PrefillEnded(**named, num_cached_tokens=0, compute_s=0.0),
        wire.PrefillRejected(**named, code="", reason="no"),
        wire.PrefillStopped(**named, num_pieces=(-1,), reason="no"),
    ):
        for _ in range(20):
            cluster.call("decode0", lambda it, message=message: it.node.message(PREFILL, prefiller, message))  # type: ignore[misc]
    for again in (wire.CancelPrefill(**named), ticket):
        for _ in range(20):
            cluster.call("prefill0", lambda it, again=again: it.node.message(DECODE, decoder, again))  # type: ignore[misc]
    for name in ("decode0", "prefill0"):
        assert len(cluster.states(name, "r")) < 12
    for daemon in cluster.daemons.values():
        for one in daemon.sets:
            one.set.messenger._counters.contradictions = 0
            for port in one.set.messenger._ranks:
                port.counters.contradictions = 0
    assert answer(cluster) == "finished"


def test_a_peer_that_announces_ever_more_replicas_is_not_remembered(start: Start) -> None:
    cluster = start()
    node = cluster.daemons[PREFILL].node
    incarnation = cluster.daemons[DECODE].links.incarnation
    (info,) = node.peers.known(DECODE).replicas.values()
    for number in range(50):
        name = ReplicaName(f"decode0/{number}")
        grant = wire.Grant(replica=name, rank=0, address=b"")
        announce = wire.Announce(replicas=(msgspec.structs.replace(info, name=name),))
        for message in (announce, grant, msgspec.structs.replace(grant, rank=number + 1)):
            cluster.call("prefill0", lambda it, message=message: it.node.message(DECODE, incarnation, message))  # type: ignore[misc]
    (known,) = cluster.daemons[PREFILL].sets[0].set.messenger._replicas.values()
    assert list(known.grants) == [0]


def test_nobody_speaks_for_another_node(start: Start) -> None:
    cluster = start()
    node, incarnation = cluster.daemons[DECODE].node, cluster.daemons[PREFILL].links.incarnation
    (info,) = node._announcement().replicas
    cluster.call("decode0", lambda _: node.message(PREFILL, incarnation, wire.Announce(replicas=(info,))))
    assert node.peers.known(PREFILL).replicas == {}


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ()},
        {"prompt": (-1, 2, 3)},
        {"prompt": (1, 50_000, 3)},
        {"prompt": (1,) * 600},
        {"timeout_s": float("nan")},
        {"timeout_s": -1.0},
        {"sampling": SamplingParams(max_tokens=0)},
        {"sampling": SamplingParams(max_tokens=1, temperature=float("nan"))},
        {"sampling": SamplingParams(max_tokens=1, logit_bias={1: float("inf")})},
    ],
)
def test_a_peer_submits_what_nobody_could_serve(start: Start, change: dict[str, Any]) -> None:
    cluster = start()
    request = GenerateRequest(id=RequestId("bad"), prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=1))
    submit = wire.Submit(replica=ReplicaName("decode0/0"), request=msgspec.structs.replace(request, **change))
    incarnation = cluster.daemons[PREFILL].links.incarnation
    cluster.call("decode0", lambda daemon: daemon.node.message(PREFILL, incarnation, submit))
    assert not list(cluster.daemons[DECODE].node.running())
    cluster.finish()


def test_a_stale_message_changes_nothing(start: Start) -> None:
    cluster = start()
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle("prefill0: compute")
    late_immediate = Immediate(cluster.tickets[0].immediates[0] + 128)
    incarnation = cluster.daemons[PREFILL].links.incarnation
    for late in (
        wire.PrefillRejected(request=cluster.tickets[0].request, immediate=late_immediate, code="", reason=""),
        wire.PrefillStopped(request=cluster.tickets[0].request, immediate=late_immediate, num_pieces=(0,), reason=""),
    ):
        cluster.call("decode0", lambda daemon, late=late: daemon.node.message(PREFILL, incarnation, late))  # type: ignore[misc]
    assert answer(cluster) == "finished"
    assert len(cluster.tickets) == 1


# Verified pages.


@pytest.mark.parametrize("who", ["client", "decode0", "prefill0"])
@pytest.mark.parametrize("held", ["decode0: thread", "prefill0: thread", "PrefillDigests", ": thread"])
def test_a_cancel_while_pages_are_compared(start: Start, held: str, who: str) -> None:
    cluster = start(verify=Verify.PAGES)
    client = cluster.submit("decode0", PROMPT, "r")
    cluster.settle(held)
    assert client.end is None
    if who == "client":
        cluster.call("decode0", lambda _: client.leave())
    else:
        cluster.cancel(who, "r")
    cluster.settle(held)
    assert answer(cluster) == ("finished" if who == "prefill0" else "cancelled")


def test_pages_that_differ_are_computed_again(start: Start) -> None:
    cluster = start(verify=Verify.PAGES, retries=0)
    cluster.submit("decode0", PROMPT, "r")
    cluster.settle(": thread")
    (one,) = cluster.daemons[DECODE].sets
    one.ranks.memories[0].buffer()[one.set.layout.page_bytes] ^= 1  # of the second page
    cluster.settle(": thread")
    with pytest.raises(Violation, match="corrupt pages"):
        cluster.settle()
    assert answer(cluster) == "finished"
    assert "draining" in cluster.states("decode0", "r")
