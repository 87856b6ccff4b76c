"""The decode half of a messenger: keys for peers, armed counts, and when a page is safe again.

A page that a peer may write into is given up only for one of three reasons: every piece that was posted has been
counted, nothing was ever posted, or the peer's key is closed (and its late writes are fenced, or their time is over).
"""

from __future__ import annotations

from pdd.base.errors import FabricError, InvariantBroken
from pdd.base.ids import Immediate, Incarnation, RequestId
from pdd.fabric.immediate import NUM_SLOTS, ImmediateSlots
from pdd.fabric.port import CountReached, FabricPort, RegisteredMemory
from pdd.memory.layout import KvLayout
from pdd.transfer.events import Arrived, Drained
from pdd.transfer.half import Half
from pdd.transfer.target import Target


class Receiving(Half):
    def __init__(self, port: FabricPort, layout: KvLayout, arena_address: int, arena_fd: int) -> None:
        super().__init__(port, layout, arena_address, arena_fd)
        self._grants: dict[Incarnation, RegisteredMemory] = {}
        self._slots = ImmediateSlots()
        self._targets: dict[RequestId, Target] = {}
        self._by_immediate: dict[Immediate, Target] = {}

    def grant(self, peer: Incarnation) -> RegisteredMemory:
        """A key to the arena for that peer alone; the same one until it is revoked. Raises FabricError."""
        if peer not in self._grants:
            self._grants[peer] = self._port.register(self._arena_address, self._layout.arena_bytes)
        return self._grants[peer]

    def arm(self, request: RequestId, peer: Incarnation, num_pieces: int, num_bytes: int) -> Immediate:
        """Arms the count of a handoff; the ticket may leave afterwards. A count of no pieces is complete at once.

        Raises QueueFull or FabricError.
        """
        self.require_port()
        if request in self._targets or peer not in self._grants or num_pieces < 0:
            raise InvariantBroken(
                f"{request}: cannot arm {num_pieces} pieces for peer {peer}: "
                f"armed already: {request in self._targets}, peer has a key: {peer in self._grants}"
            )
        immediate = self._slots.take()
        try:
            self._port.expect(immediate, num_pieces)
        except FabricError:
            self._slots.give_back(immediate)
            raise
        target = Target(request=request, immediate=immediate, peer=peer, num_pieces=num_pieces, num_bytes=num_bytes)
        self._targets[request] = self._by_immediate[immediate] = target
        return immediate

    def disarm(self, request: RequestId) -> None:
        """Takes an `arm` back: the ticket has not left. No event follows."""
        target = self._targets[request]
        self._port.unexpect(target.immediate)
        self._release(target)

    def arrived(self, request: RequestId) -> tuple[int, int]:
        """Pieces in place, and expected; (0, 0) for an unknown handoff."""
        target = self._targets.get(request)
        if target is None:
            return 0, 0
        return target.num_pieces if target.arrived else self._port.arrived(target.immediate), target.num_pieces

    def stopped(self, request: RequestId, immediate: Immediate, num_pieces: int) -> None:
        """The prefiller posted that many pieces and posts no more: Drained once they are counted."""
        target = self._open_target(request, immediate)
        if target is None or target.num_posted is not None:
            self.counters.ignored += 1
        elif not self._port.arrived(immediate) <= num_pieces <= target.num_pieces:
            self.counters.contradictions += 1
        else:
            target.num_posted = num_pieces
            self._port.change_expected(immediate, num_pieces)  # all may have arrived: the next poll says so

    def rejected(self, request: RequestId, immediate: Immediate) -> None:
        """Nothing was or will be posted: Drained."""
        target = self._open_target(request, immediate)
        if target is None:
            self.counters.ignored += 1
        elif self._port.arrived(immediate):
            self.counters.contradictions += 1
        else:
            self._drained(target, fenced=False)

    def revoke(self, peer: Incarnation) -> None:
        """Closes the peer's key. Where the provider fences (`info.fences`), its handoffs are drained by that; elsewhere
        each waits for `expire`, or for the count if that is still reached."""
        grant = self._grants.pop(peer, None)
        if grant is None:
            return
        fenced = self._port.info.fences
        try:
            self._port.release(grant.memory)
        except FabricError:
            fenced = False  # nobody knows what that peer can do now: the port has failed, and PortBroken comes
        for target in [it for it in self._targets.values() if it.peer == peer and not it.arrived]:
            if fenced:
                self._drained(target, fenced=True)
            else:
                target.shut_out = True

    def expire(self, request: RequestId) -> None:
        """The provider's own bound for late writes of a revoked peer has passed: Drained. Others are left alone."""
        target = self._targets.get(request)
        if target is not None and target.shut_out and not target.arrived:
            self._drained(target, fenced=True)

    def forget(self, request: RequestId) -> None:
        """Frees what an arrived handoff still holds; unknown ones hold nothing."""
        target = self._targets.get(request)
        if target is None:
            return
        if not target.arrived:
            raise InvariantBroken(f"{request}: forgotten while {target.peer} may still write into its pages")
        self._release(target)

    def _count_reached(self, event: CountReached) -> None:
        target = self._by_immediate.get(event.immediate)
        if target is None or target.arrived:
            self.counters.ignored += 1
        elif target.draining:
            self._drained(target, fenced=False)
        else:
            target.arrived = True
            self._port.unexpect(target.immediate)
            arrived = Arrived(
                request=target.request,
                immediate=target.immediate,
                num_pieces=target.num_pieces,
                num_bytes=target.num_bytes,
                first_s=event.first_s,
                last_s=event.last_s,
            )
            self._events.append(arrived)

    def _revoke_all(self) -> None:
        for peer in list(self._grants):
            self.revoke(peer)

    def _drain_all(self) -> None:
        """Nothing can arrive any more: the port is closed now, and with it every key."""
        self._grants.clear()
        for target in [it for it in self._targets.values() if not it.arrived]:
            self._drained(target, fenced=True)

    def _open_target(self, request: RequestId, immediate: Immediate) -> Target | None:
        target = self._targets.get(request)
        return target if target is not None and target.immediate == immediate and not target.arrived else None

    def _drained(self, target: Target, *, fenced: bool) -> None:
        self._port.unexpect(target.immediate)
        self._release(target)
        self._events.append(Drained(request=target.request, immediate=target.immediate, fenced=fenced))

    def _release(self, target: Target) -> None:
        del self._targets[target.request], self._by_immediate[target.immediate]
        self._slots.give_back(target.immediate)

    def _check_targets(self) -> list[str]:
        num_taken = NUM_SLOTS - self._slots.num_free
        problems = [
            f"{target.request}: its peer {target.peer} has no key and is not shut out"
            for target in self._targets.values()
            if not (target.arrived or target.shut_out or target.peer in self._grants)
        ]
        if self._by_immediate != {target.immediate: target for target in self._targets.values()}:
            problems.append("the armed immediates are not those of the open handoffs")
        if len(self._targets) != num_taken:
            problems.append(f"{len(self._targets)} handoffs hold {num_taken} slots")
        return problems
