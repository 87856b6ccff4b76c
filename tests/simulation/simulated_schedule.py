"""One seed, one run: a topology, requests, and faults at moments of the seed's choice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
from simulated_cluster import NEVER_S, Action, Cluster, Violation, expected
from simulated_daemon import Client, Daemon
from simulated_ranks import MODEL
from simulated_stranger import STRANGER

from pdd.base.ids import NodeName, RequestId
from pdd.fabric.loopback_port import LoopbackPort
from pdd.topology.model import Cluster as ClusterConfig
from pdd.topology.model import (
    Handoff,
    Http,
    Limits,
    Node,
    OnHandoffFailure,
    Parallel,
    Replica,
    Role,
    Topology,
    Verify,
)
from pdd.topology.model import Model as ModelConfig

LEASE_S = 10.0
MAX_ACTIONS = 2_000
_LIGHT = ("leave", "stop", "operator", "timer", "cut", "hold", "lose")
_GRAVE = ("drop", "kill", "executors", "give", "break", "drain")
"""Faults after which little is left that could go wrong."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    tp: int = 1
    dp: int = 1
    joint: bool = False
    """The sets of a replica step together: their ranks share experts."""
    page_tokens: int = 4
    num_pages: int = 16
    chunk_tokens: int = 8
    max_sequences: int = 3
    prefix_cache: bool = True


def replica(role: Role, shape: Shape) -> Replica:
    token_bytes = MODEL.num_layers * 2 * (MODEL.num_kv_heads // shape.tp) * MODEL.head_dim * 4
    return Replica(
        role=role,
        parallel=Parallel(tp=shape.tp, dp=shape.dp, ep=shape.tp * shape.dp if shape.joint else 1),
        page_tokens=shape.page_tokens,
        kv_bytes=shape.num_pages * shape.page_tokens * token_bytes,
        chunk_tokens=shape.chunk_tokens,
        max_sequences=shape.max_sequences,
        prefix_cache=shape.prefix_cache,
    )


def topology(nodes: Mapping[str, tuple[Replica, ...]], handoff: Handoff | None = None, max_queue: int = 8) -> Topology:
    """HTTP is on a node without replicas, where there is one, else on the first that decodes."""
    front = next((name for name, it in nodes.items() if not it and name != STRANGER), None)
    front = front or next(name for name, it in nodes.items() if any(one.role is not Role.PREFILL for one in it))
    return Topology(
        version=1,
        cluster=ClusterConfig(key_file=Path("/nonexistent")),
        model=ModelConfig(name="toy", path=Path("/nonexistent")),
        handoff=handoff or Handoff(local_prefill_tokens=2, lease_s=LEASE_S),
        limits=Limits(max_queue=max_queue),
        nodes={
            NodeName(name): Node(control_port=1, http=Http(port=1) if name == front else None, replicas=it)
            for name, it in nodes.items()
        },
    )


class RandomRun:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self._rates = self._fault_rates()
        self._overloaded = self.random.random() < 0.12
        """Requests come in bursts, long and short ones, more than the lines take."""
        if self._overloaded and self._rates:
            self._rates.setdefault("timer", 0.01)
        self.cluster = Cluster(self._topology(), seed, fences=self.random.random() < 0.75)
        self._front = next(name for name, it in self.cluster.topology.nodes.items() if it.http)
        self._num_requests = self.random.randint(12, 24) if self._overloaded else self.random.randint(2, 8)
        self._num_submitted = 0
        self._speeds: dict[str, float] = {}
        self._stems = [[self.random.randrange(MODEL.vocab_size) for _ in range(24)] for _ in range(2)]

    @property
    def calm(self) -> bool:
        """Nothing goes wrong in this run, though a stranger may say what it likes."""
        return not self._rates

    def run(self) -> None:
        """Raises Violation."""
        cluster, rng = self.cluster, self.random
        if self.calm or rng.random() < 0.8:
            cluster.settle()
        while len(cluster.trace) < MAX_ACTIONS and not self._over():
            actions = cluster.actions() + list(self._steps_of_clients()) + list(self._faults())
            cluster.do(rng.choices(actions, [self._weight(it.label) for it in actions])[0])
        cluster.finish()
        if self.calm:
            served = {"finished", "stopped"} | ({"queue_full"} if self._overloaded else set())
            if cluster.stranger is not None:  # it takes places in line, and handoffs that it does not make
                served.add("queue_full")
                if cluster.topology.handoff.on_failure is OnHandoffFailure.ERROR:
                    served |= {"handoff_failed", "no_path"}
            unserved = [f"{it.request.id}: {it.end}" for it in cluster.clients if it.end not in served]
            if unserved:
                raise Violation(f"nothing went wrong, yet {unserved}")

    def _over(self) -> bool:
        given_up = len(self.cluster.trace) > MAX_ACTIONS // 2 and self._front not in self.cluster.daemons
        submitted = self._num_submitted >= self._num_requests or given_up
        return (
            submitted
            and all(it.end for it in self.cluster.clients)
            and not any(True for daemon in self.cluster.daemons.values() for _ in daemon.node.running())
        )

    # The cluster.

    def _topology(self) -> Topology:
        rng = self.random
        page_tokens = {role: rng.choice((2, 4, 4)) for role in Role}
        nodes: dict[str, tuple[Replica, ...]] = {"a": (self._replica(Role.DECODE, page_tokens),)}
        if rng.random() < 0.2:  # a node that is its own peer
            nodes["a"] += (self._replica(Role.PREFILL, page_tokens),)
        for name, roles in (("b", [Role.PREFILL]), ("c", [Role.PREFILL, Role.DECODE, Role.DECODE, Role.COLOCATED])):
            if name == "b" or rng.random() < 0.5:
                nodes[name] = (self._replica(rng.choice(roles), page_tokens),)
        if rng.random() < 0.4:
            nodes["front"] = ()
        if rng.random() < (0.5 if self.calm else 0.15):
            nodes[STRANGER] = ()
        order = list(nodes)
        rng.shuffle(order)
        handoff = Handoff(
            local_prefill_tokens=rng.choice((0, 2, 6)),
            lease_s=LEASE_S,
            verify=rng.choice(list(Verify)),
            retries=rng.choice((0, 1, 1, 3)),
            on_failure=rng.choice((*OnHandoffFailure, OnHandoffFailure.RECOMPUTE)),
        )
        max_queue = 10 if self.calm else rng.choice((0, 2, 8))
        return topology({name: nodes[name] for name in order}, handoff=handoff, max_queue=max_queue)

    def _replica(self, role: Role, page_tokens: dict[Role, int]) -> Replica:
        rng = self.random
        shape = Shape(
            tp=rng.choice((1, 1, 2)),
            dp=(dp := rng.choice((1, 1, 1, 2))),
            joint=dp > 1 and rng.random() < 0.7,
            page_tokens=page_tokens[role],
            num_pages=rng.choice((32, 48, 80)) // page_tokens[role],
            chunk_tokens=rng.choice((4, 8, 32)),
            max_sequences=rng.choice((1, 2, 3, 6)),
            prefix_cache=rng.random() < 0.6,
        )
        return replica(role, shape)

    def _fault_rates(self) -> dict[str, float]:
        """By the first word of a fault; those that are absent do not happen. A few often tell more than many."""
        rng = self.random
        style = rng.random()
        if style < 0.1:
            return {}
        if style < 0.6:
            kinds = rng.sample(_LIGHT, rng.randint(1, 3))
        else:
            kinds = [kind for kind in (*_LIGHT, *_GRAVE) if rng.random() < 0.4]
        rates = {kind: 10 ** rng.uniform(-2.5, -0.5) / (30 if kind in _GRAVE else 1) for kind in kinds}
        return rates | dict.fromkeys(("start", "release", "resume"), 1.0)

    # What clients and the world do.

    def _weight(self, label: str) -> float:
        """Some things are slow and some are fast, for as long as the run lasts."""
        who, _, what = label.partition(": ")
        kind = f"{who}: {what.split()[0]}" if "<-" not in who else who
        if kind not in self._speeds:
            self._speeds[kind] = 10 ** self.random.uniform(-1.3, 0.7)
        return self._speeds[kind] * self._rates.get(who, 0.05 if what == "beat" else 1.0)

    def _steps_of_clients(self) -> Iterator[Action]:
        front = self.cluster.daemons.get(self._front)
        if front is not None and self._num_submitted < self._num_requests and self._is_served(front):
            yield Action("client: submit", self._burst if self._overloaded else self._submit)
        for daemon in self.cluster.daemons.values():
            yield Action(f"{daemon.name}: beat", daemon.beat, daemon)
        if self.cluster.stranger is not None:
            yield Action(f"{STRANGER}: speak", self.cluster.stranger.speak)

    def _is_served(self, front: Daemon) -> bool:
        return bool(front.node.peers.candidates(frozenset({Role.DECODE.value}))) or self.random.random() < 0.01

    def _burst(self) -> None:
        for _ in range(min(self.random.randint(2, 8), self._num_requests - self._num_submitted)):
            self._submit()

    def _submit(self) -> None:
        rng = self.random
        stem = rng.choice(self._stems)[: rng.randint(0, 16)]
        prompt = stem + [rng.randrange(MODEL.vocab_size) for _ in range(rng.randint(1, 10))]
        if self._overloaded:
            prompt = prompt[-4:] if rng.random() < 0.7 else [*self._stems[0], *prompt[-3:]]
        max_tokens = rng.randint(1, 6)
        stops = (rng.choice(expected(tuple(prompt), max_tokens)),) if rng.random() < 0.2 else ()
        is_short = rng.random() < 0.2 and "timer" in self._rates
        timeout_s = rng.uniform(0.1, 3) * LEASE_S if is_short else 10 * NEVER_S
        self._num_submitted += 1
        request = f"r{self._num_submitted}"
        self.cluster.submit(
            self._front, prompt, request, max_tokens=max_tokens, stop_token_ids=stops, timeout_s=timeout_s,
            streams=self._num_submitted % 2 == 0,
        )  # fmt: skip

    # Faults.

    def _faults(self) -> Iterator[Action]:
        makers: dict[str, Callable[[], Iterator[Action]]] = {
            "leave": self._leaving,
            "stop": self._stopping,
            "operator": self._operator,
            "timer": self._timers,
            "cut": self._cuts,
            "kill": partial(self._each, "kill", lambda it: self.cluster.kill(it.name)),
            "executors": self._executors,
            "give": partial(self._each, "give", lambda it: it.give_up_draining()),
            "start": self._starts,
            "hold": partial(self._each_port, "hold", self.cluster.fabric.hold),
            "release": partial(self._each_port, "release", self.cluster.fabric.let_go),
            "break": partial(self._each, "break", self._break),
            "lose": partial(self._each_port, "lose", lambda port: self.cluster.fabric.fail_writes(port, 110)),
            "drop": self._drop,
            "drain": partial(self._each, "drain", partial(self._drain, draining=True)),
            "resume": partial(self._each, "resume", partial(self._drain, draining=False)),
        }
        for kind in self._rates:
            yield from makers[kind]()

    def _clients(self) -> list[Client]:
        return [it for it in self.cluster.clients if it.end is None]

    def _leaving(self) -> Iterator[Action]:
        for client in self._clients():
            yield Action(f"leave: {client.request.id}", client.leave, client.daemon)

    def _stopping(self) -> Iterator[Action]:
        for client in self._clients():
            if client.tokens:
                yield Action(f"stop: {client.request.id}", client.stop, client.daemon)

    def _operator(self) -> Iterator[Action]:
        for daemon in self.cluster.daemons.values():
            for record in daemon.node.running():
                yield Action(f"operator: {record.id} on {daemon.name}", partial(_cancel, daemon, record.id), daemon)

    def _timers(self) -> Iterator[Action]:
        for action in self.cluster.timers():
            yield Action(f"timer: {action.label}", action.run, action.daemon)

    def _cuts(self) -> Iterator[Action]:
        for daemon in self.cluster.daemons.values():
            for end in daemon.links.ends:
                if end.state == "up":
                    yield Action(
                        f"cut: {daemon.name} from {end.peer.node}", partial(end.close, "ending", "cut"), daemon
                    )

    def _each(self, kind: str, fault: Callable[[Daemon], object]) -> Iterator[Action]:
        for daemon in self.cluster.daemons.values():
            if not daemon.going_down and daemon.node.draining == (kind == "resume"):
                yield Action(f"{kind}: {daemon.name}", partial(fault, daemon), daemon)

    def _each_port(self, kind: str, fault: Callable[[LoopbackPort], object]) -> Iterator[Action]:
        for daemon in self.cluster.daemons.values():
            for number, port in enumerate(daemon.ports):
                if (port in self.cluster.fabric._held) == (kind == "release"):
                    yield Action(f"{kind}: {daemon.name} port {number}", partial(fault, port))

    def _executors(self) -> Iterator[Action]:
        for daemon in self.cluster.daemons.values():
            for one in daemon.replicas:
                if not one.failed:
                    yield Action(f"executors: of {one.name} die", partial(daemon.fail, one), daemon)

    def _starts(self) -> Iterator[Action]:
        for name in self.cluster.topology.nodes:
            if name not in self.cluster.daemons and name != STRANGER:
                yield Action(f"start: {name}", partial(self.cluster.start, name))

    def _break(self, daemon: Daemon) -> None:
        if daemon.ports:
            self.cluster.fabric.fail(self.random.choice(daemon.ports), 5)

    def _drop(self) -> Iterator[Action]:
        yield Action("drop: the next piece", partial(self.cluster.fabric.drop, 1))

    def _drain(self, daemon: Daemon, draining: bool) -> None:
        daemon.node.draining = draining


def _cancel(daemon: Daemon, request: RequestId) -> None:
    daemon.node.cancel(request, "by an operator")
