"""Daemons, links and fabric as one machine that moves one action at a time, and what must hold after each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from unittest import mock

import msgspec
import structlog
from simulated_daemon import Client, Daemon, Observer
from simulated_links import End, SimulatedLinks, connect
from simulated_port import WatchedPort
from simulated_ranks import MODEL
from simulated_replica import max_sequence_tokens
from simulated_stranger import STRANGER, Stranger

from pdd.base.ids import Incarnation, NodeName, RequestId
from pdd.engine.toy import continuation
from pdd.fabric.loopback import LoopbackFabric
from pdd.lifecycle.request import GenerateRequest, SamplingParams, TokenOutput
from pdd.memory.layout import KvLayout
from pdd.topology.model import Topology
from pdd.wire import messages as wire

NEVER_S = 1e5
"""Timers that are due later are deadlines that nothing should need."""
MAX_SETTLING = 20_000
MAX_TIMERS = 200
TO_STRANGERS = ("replicas do not fit", "corrupt pages", "a drain waits for nothing")
"""Errors in a log that a stranger's words may bring about."""
_LAYOUT = KvLayout(
    num_layers=MODEL.num_layers, num_kv_heads=2, head_dim=MODEL.head_dim, page_tokens=4, dtype="float32", num_pages=1
)


class Violation(AssertionError):
    """Something does not hold that always must."""


class Action(msgspec.Struct, frozen=True):
    label: str
    """`who: what`, `to<-from: what` for links."""
    run: Callable[[], object]
    daemon: Daemon | None = None


class Cluster(Observer):
    """All daemons of a topology, started and not yet connected. `trace` tells what was done."""

    def __init__(self, topology: Topology, seed: int = 0, *, fences: bool = True) -> None:
        self.topology = topology
        self.random = random.Random(seed)
        self.fabric = LoopbackFabric(seed, fences=fences)
        self.trace: list[str] = []
        self.clients: list[Client] = []
        self.tickets: list[wire.PrefillRequest] = []
        self.daemons: dict[NodeName, Daemon] = {}
        self._num_lives = dict.fromkeys(topology.nodes, 0)
        self._by_key: dict[bytes, WatchedPort] = {}
        self._problems: list[str] = []
        self._ended: set[RequestId] = set()
        self._fabric_rests = False
        self.finishing = False
        self._max_sequence_tokens = max_sequence_tokens(topology)
        self._logs = structlog.testing.capture_logs()
        self._log = self._logs.__enter__()
        self.stranger: Stranger | None = None
        for name in topology.nodes:
            if name == STRANGER:
                self.stranger = Stranger(self, self.random)
            else:
                self.start(name)

    def close(self) -> None:
        for daemon in list(self.daemons.values()):
            daemon.vanish()
        self._logs.__exit__(None, None, None)

    # What a daemon's life is made of.

    def start(self, name: NodeName) -> Daemon:
        self._num_lives[name] += 1
        incarnation = Incarnation(f"{name}.{self._num_lives[name]}")
        with mock.patch("pdd.daemon.handoff.secrets.randbits", self.random.getrandbits):
            daemon = Daemon(self.topology, name, incarnation, self.fabric, self._by_key, self)
        self.daemons[name] = daemon
        return daemon

    def kill(self, name: NodeName) -> None:
        self.daemons.pop(name).vanish()

    def exit(self, name: NodeName) -> None:
        self.daemons[name].exit()
        self.kill(name)

    def submit(
        self,
        node: str,
        prompt: list[int],
        request: str,
        *,
        max_tokens: int = 3,
        stop_token_ids: tuple[int, ...] = (),
        timeout_s: float = 10 * NEVER_S,
        streams: bool = True,
    ) -> Client:
        generate = GenerateRequest(
            id=RequestId(request),
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
            timeout_s=timeout_s,
        )
        daemon = self.daemons[NodeName(node)]
        submit = partial(daemon.submit, generate, streams=streams)
        self.do(Action(f"{node}: submit {request}", lambda: self.clients.append(submit()), daemon))
        return self.clients[-1]

    # What can happen next, by itself.

    def actions(self) -> list[Action]:
        found = [action for daemon in self.daemons.values() for action in self._daemon_actions(daemon)]
        if self.stranger is not None:
            found += self._all_link_actions(self.stranger.links, None)
        found += self._dials()
        ports = [port for daemon in self.daemons.values() for port in daemon.ports]
        if not self._fabric_rests and any(port.may_move for port in ports):
            found.append(Action("fabric: step", self._move_pieces))
        return found

    def _daemon_actions(self, daemon: Daemon) -> Iterator[Action]:
        name = daemon.name
        if daemon.going_down:
            yield Action(f"{name}: exit", lambda: self.exit(name), daemon)
        if daemon.loop.soon:
            yield Action(f"{name}: turn", daemon.loop.turn, daemon)
        if daemon.loop.has_threads:
            yield Action(f"{name}: thread", daemon.loop.run_thread, daemon)
        for port in daemon.ports:
            if port.has_news:
                yield Action(f"{name}: poll", partial(daemon.loop.read, port.fileno()), daemon)
        there = {replica.name for replica in daemon.replicas}
        for down in [it for it in daemon.node.down if it not in there]:
            yield Action(f"{name}: bring up {down}", partial(daemon.bring_up, down), daemon)
        for replica in daemon.replicas:
            if replica.failed and daemon.is_idle(replica):
                yield Action(f"{name}: take down", partial(daemon.take_down, replica), daemon)
            if not replica.failed and replica.broken:
                yield Action(f"{name}: fail", partial(daemon.fail, replica), daemon)
            for loop in replica.loops:
                if loop.may_plan:
                    yield Action(f"{name}: plan", loop.plan, daemon)
                for one in loop.sets:
                    if one.computing:
                        yield Action(f"{name}: compute", partial(loop.compute, one), daemon)
        for client in daemon.clients:
            if client.has_news:
                yield Action(f"{name}: read {client.request.id}", client.read, daemon)
        yield from self._all_link_actions(daemon.links, daemon)

    def _all_link_actions(self, links: SimulatedLinks, daemon: Daemon | None) -> Iterator[Action]:
        links.forget_closed()
        for end in links.ends:
            yield from self._link_actions(end, daemon)

    def _link_actions(self, end: End, daemon: Daemon | None) -> Iterator[Action]:
        label = f"{end.links.node}<-{end.peer.node}"
        if end.state == "ending" or (end.other.closed and not (end.state == "up" and end.inbox)):
            yield Action(f"{label}: lost", end.lose, daemon)
        elif end.state == "opening":
            yield Action(f"{label}: open", end.open, daemon)
        elif end.inbox:
            yield Action(f"{label}: {end.inbox[0][0]}", end.deliver, daemon)

    def _dials(self) -> Iterator[Action]:
        every = [daemon.links for daemon in self.daemons.values()]
        if self.stranger is not None and not self.finishing:
            every.append(self.stranger.links)
        for index, dialer in enumerate(every):
            for acceptor in every[index + 1 :]:
                if not dialer.connects(acceptor.node):
                    dial = partial(connect, dialer, acceptor, self.random)
                    yield Action(f"{dialer.node}: dial {acceptor.node}", dial)

    def _move_pieces(self) -> None:
        for _ in range(self.random.choice((1, 2, 8))):
            if not self.fabric.step():
                self._fabric_rests = True

    # Doing it.

    def do(self, action: Action) -> None:
        self.trace.append(action.label)
        self._fabric_rests = False
        loop = action.daemon.loop if action.daemon else None
        try:
            if loop is None:
                action.run()
            else:
                with loop.running():
                    action.run()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{action.label}: {type(error).__name__}: {error}") from error
        self.check([action.daemon] if action.daemon else [])

    def settle(self, *held: str) -> None:
        """Does what can be done until nothing is left, except for what is named by a part of its label."""
        for _ in range(MAX_SETTLING):
            possible = [it for it in self.actions() if not any(part in it.label for part in held)]
            if not possible:
                return
            self.do(self.random.choice(possible))
        raise Violation("it never settles")

    def step(self, label: str, among: Iterable[Action] | None = None) -> None:
        """Does one action, given by its label."""
        possible = list(among if among is not None else self.actions())
        action = next((it for it in possible if it.label == label), None)
        assert action is not None, f"{label} is none of {[it.label for it in possible]}"
        self.do(action)

    def call(self, node: str, what: Callable[[Daemon], object]) -> None:
        """Does something to a daemon that is nobody's action."""
        daemon = self.daemons[NodeName(node)]
        self.do(Action(f"{node}: call", lambda: what(daemon), daemon))

    def cancel(self, node: str, request: str) -> None:
        """By an operator of that node."""
        self.call(node, lambda daemon: daemon.node.cancel(RequestId(request), "by an operator"))

    def states(self, node: str, request: str) -> list[str]:
        """What a request has been through on a node, whether it runs or has ended: its present life, or the last."""
        daemon = self.daemons[NodeName(node)].node
        story, *_ = daemon.stories.find(daemon.running(), request, 0.0)
        return [line.state for line in story.lines]

    def pass_time(self, node: str, callback: str) -> None:
        """Until the next timer of a daemon, which must be that one."""
        self.step(f"{node}: timer {callback}", self.timers())

    def finish(self) -> None:
        """Heals the network, lets everything come to its end, and looks at what is left. The stranger says no more."""
        self.finishing = True
        for daemon in self.daemons.values():
            daemon.node.draining = daemon.going_down
            for port in daemon.ports:
                self.fabric.let_go(port)
        self.settle()
        for daemon in self.daemons.values():
            self.do(Action(f"{daemon.name}: beat", daemon.beat, daemon))
        self.settle()
        for _ in range(MAX_TIMERS):
            due = list(self.timers())
            if not due:
                break
            self.do(self.random.choice(due))
            self.settle()
        self._check_end()

    def timers(self) -> Iterator[Action]:
        """Of each daemon the next that is due; clocks run apart."""
        for daemon in self.daemons.values():
            timer = daemon.loop.next_timer()
            if timer is not None and timer.when() < NEVER_S:
                what = getattr(timer._callback, "__name__", "")  # type: ignore[attr-defined]
                yield Action(f"{daemon.name}: timer {what}", partial(daemon.loop.fire, timer), daemon)
            for replica in daemon.replicas:
                if replica.failed and not replica.shut_out and not daemon.is_idle(replica):
                    yield Action(f"{daemon.name}: timer shut out", partial(daemon.shut_out, replica), daemon)

    # What must hold.

    def complain(self, problem: str) -> None:
        self._problems.append(problem)

    def output_sent(self, peer: NodeName, output: TokenOutput) -> None:
        if peer == STRANGER:
            return  # it may call its requests what it likes
        if output.request in self._ended:
            self.complain(f"{output.request} has an output after its last: {output}")
        if output.last:
            self._ended.add(output.request)

    def ticket_sent(self, node: NodeName, ticket: wire.PrefillRequest) -> None:
        self.tickets.append(ticket)
        one = next(it for it in self.daemons[node].sets if it.set.name == ticket.target_replica)
        for port, immediate in zip(one.ports, ticket.immediates, strict=True):
            port.tickets[immediate] = ticket

    def check(self, changed: Iterable[Daemon]) -> None:
        """What the fabric does is watched by the ports; the rest is seen in the daemon that has done something."""
        problems = self._problems + [it for daemon in changed for it in daemon.problems()]
        told = TO_STRANGERS if self.stranger is not None else ()
        problems += [str(it) for it in self._log if it["log_level"] == "error" and it["event"] not in told]
        self._log.clear()
        for client in self.clients:
            if client.daemon not in changed:
                continue
            expected = self._expected(client.request)
            if tuple(client.tokens) != expected[: len(client.tokens)]:
                problems.append(f"{client.request.id} has {client.tokens}, not {expected}")
        if problems:
            raise Violation("\n".join(problems))

    def _check_end(self) -> None:
        self.check(self.daemons.values())
        remains = [what for daemon in self.daemons.values() for what in daemon.remains()]
        remains += [f"{client.request.id} waits for ever" for client in self.clients if client.end is None]
        remains += [f"{client.request.id} is not whole: {client.tokens}" for client in self.clients
                    if client.end == "finished" and tuple(client.tokens) != self._expected(client.request)]  # fmt: skip
        stories = [f"{record.id} ({record.side}): {record.machine.tell()}" for daemon in self.daemons.values()
                   for record in daemon.node.running()]  # fmt: skip
        if remains:
            raise Violation("\n".join(["when all is over there remain:", *remains, *stories]))

    def _expected(self, request: GenerateRequest) -> tuple[int, ...]:
        most = min(request.sampling.max_tokens, self._max_sequence_tokens - len(request.prompt))
        return expected(request.prompt, max(most, 1), request.sampling.stop_token_ids)


@lru_cache(4096)
def expected(prompt: tuple[int, ...], max_tokens: int, stop_token_ids: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The right answer, its stop token included."""
    tokens = continuation(MODEL, _LAYOUT, list(prompt), max_tokens)
    end = next((at + 1 for at, token in enumerate(tokens) if token in stop_token_ids), max_tokens)
    return tuple(tokens[:end])
