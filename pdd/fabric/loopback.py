"""A network for simulations: real bytes inside one process, no time of its own, and faults on command.

Nothing moves until `step` or `run`. Each posted piece then completes locally (its source is read) and later is placed
at its target; which piece moves next is the seed's choice. Equal seeds and equal calls give equal runs.
"""

from __future__ import annotations

import random

from pdd.fabric.loopback_port import LoopbackPort, Message


class LoopbackFabric:
    """Ports that reach each other, and the hand on their faults. A fault names the port that suffers it."""

    def __init__(self, seed: int, reorder: bool = True, fences: bool = True) -> None:
        """`reorder`: pieces overtake each other; else those of one port arrive in the order of their posting.
        `fences`: see ProviderInfo; without them LoopbackPort.end_late ends what may still come."""
        self._random = random.Random(seed)  # noqa: S311 (a simulation repeats itself)
        self._reorder = reorder
        self.fences = fences
        self._ports: list[LoopbackPort] = []
        self._held: set[LoopbackPort] = set()
        self._dead: set[LoopbackPort] = set()
        self._num_to_drop = 0
        self._num_to_duplicate = 0
        self.num_steps = 0
        """Also the clock: `first_s` and `last_s` of CountReached are numbers of steps."""

    def open_port(self, max_writes: int = 4096) -> LoopbackPort:
        port = LoopbackPort(len(self._ports), self._random, max_writes, self.fences)
        self._ports.append(port)
        return port

    def hold(self, port: LoopbackPort) -> None:
        """Delay: nothing is placed at this port until `let_go`; its peers' local completions go on."""
        self._held.add(port)

    def let_go(self, port: LoopbackPort) -> None:
        self._held.discard(port)

    def kill(self, port: LoopbackPort) -> None:
        """Its process is gone: what it sent stays away, what is sent to it neither completes nor arrives."""
        self._dead.add(port)

    def drop(self, num_pieces: int) -> None:
        """The next pieces are lost after they completed locally."""
        self._num_to_drop += num_pieces

    def duplicate(self, num_pieces: int) -> None:
        """The next pieces are placed and counted twice."""
        self._num_to_duplicate += num_pieces

    def fail_writes(self, port: LoopbackPort, error: int) -> None:
        """The port's paths break: what has not completed is lost, its writes end with the error. Later ones work."""
        port.fail_writes(error)

    def fail(self, port: LoopbackPort, error: int) -> None:
        """The port's endpoint breaks for good."""
        port.fail(error)

    @property
    def num_in_flight(self) -> int:
        return sum(len(port.outbox) for port in self._ports)

    def step(self) -> bool:
        """Posts what the counters allow, then completes or places one piece. False: nothing could move."""
        self.num_steps += 1
        alive = [port for port in self._ports if port not in self._dead]
        for port in alive:
            port.post()
        sent = [(port, message) for port in alive for message in port.outbox]
        first = self._random.randrange(len(sent)) if sent and self._reorder else 0
        for port, message in sent[first:] + sent[:first]:
            if self._can_move(message):
                self._move(port, message)
                return True
        return False

    def run(self) -> None:
        """Steps until nothing moves any more."""
        while self.step():
            pass

    def _target(self, message: Message) -> LoopbackPort | None:
        return next((port for port in self._ports if port.listens_at(message.to)), None)

    def _can_move(self, message: Message) -> bool:
        target = self._target(message)
        return target not in self._dead and (message.content is None or target not in self._held)

    def _move(self, source: LoopbackPort, message: Message) -> None:
        if message.content is None:
            source.complete(message)
            return
        source.outbox.remove(message)
        if self._num_to_drop:
            self._num_to_drop -= 1
            return
        target = self._target(message)
        if target is None:
            return
        target.place(message, float(self.num_steps))
        if self._num_to_duplicate:
            self._num_to_duplicate -= 1
            target.place(message, float(self.num_steps))
