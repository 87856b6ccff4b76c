"""Which prefiller a prompt goes to: one that is reachable, large enough, and whose pages have lately arrived here."""

from __future__ import annotations

from pdd.base.errors import NoPath
from pdd.base.ids import ReplicaName
from pdd.daemon.balance import Candidate, Choice, choose_prefiller
from pdd.daemon.peers import Peer
from pdd.daemon.records import DecodeRequest, Handoff
from pdd.daemon.side import Control
from pdd.topology.model import Handoff as HandoffPolicy
from pdd.topology.model import OnHandoffFailure, Role

_PREFILL_ROLES = frozenset({Role.PREFILL.value})


class Prefillers:
    """As one decode replica sees them: `ours`."""

    def __init__(self, control: Control, ours: ReplicaName, policy: HandoffPolicy) -> None:
        self._control = control
        self._ours = ours
        self._policy = policy

    def choose(self, record: DecodeRequest) -> tuple[Choice, Peer]:
        """Another prefiller than the one that failed, where there is another. Raises NoPath."""
        reachable = self._control.peers.candidates(_PREFILL_ROLES)
        num_tokens = len(record.prompt) - 1
        candidates = [it for it in reachable if it.num_tokens >= num_tokens]
        if reachable and not candidates:
            raise NoPath(f"no reachable prefiller has KV memory for {num_tokens} tokens")
        candidates = self._awake(candidates)
        others = [it for it in candidates if record.handoff is None or it.name != record.handoff.prefiller]
        choice = choose_prefiller(others or candidates, record.prompt)
        peer = self._control.peers.owner(choice.name) if choice else None
        if choice is None or peer is None:
            raise NoPath("no prefiller is reachable")
        return choice, peer

    def _awake(self, candidates: list[Candidate]) -> list[Candidate]:
        """Without those whose pages do not arrive. Raises NoPath when nobody else is there and we can do without."""
        paths, now_s = self._control.peers.paths, self._control.clock.now_s()
        resting = {it.name for it in candidates if paths.rests(self._ours, it.name, now_s)}
        if len(resting) == len(candidates) and self._policy.on_failure is OnHandoffFailure.ERROR:
            return candidates
        self._control.metrics.prefillers_left_out.inc(len(resting))
        if resting and len(resting) == len(candidates):
            raise NoPath("; ".join(reason for theirs, reason in paths.broken() if theirs in resting))
        return [it for it in candidates if it.name not in resting]

    def asked(self, record: DecodeRequest, name: ReplicaName) -> None:
        """A handoff begins. It counts there at once: of a burst, the next one may go to another."""
        self._control.peers.paths.tried(self._ours, name, self._control.clock.now_s())
        self._control.peers.sent(name, record.id, len(record.prompt) - 1 - record.num_cached_tokens)

    def ended(self, record: DecodeRequest, handoff: Handoff) -> None:
        """However it ended."""
        self._control.peers.unsent(handoff.prefiller, record.id)

    def lost(self, handoff: Handoff, reason: str) -> None:
        """Pages of it did not arrive, and its link lives."""
        now_s = self._control.clock.now_s()
        self._control.peers.paths.failed(self._ours, handoff.prefiller, handoff.incarnation, reason, now_s)

    def worked(self, handoff: Handoff) -> None:
        self._control.peers.paths.worked(self._ours, handoff.prefiller)
