"""Requests as an operator sees them: one row in a list, or the whole story. Keeps the latest that have ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from pdd.base.errors import BadRequest, NotFound
from pdd.daemon.records import Record
from pdd.lifecycle.table import DecodeState
from pdd.wire.admin import RequestRow, Story, StoryLine

_NUM_KEPT = 1000


class _Ended(msgspec.Struct, frozen=True):
    row: RequestRow
    story: Story
    end_s: float


class Stories:
    """Ended requests by (id, side), oldest first; the oldest are forgotten. Of each only what is told is kept."""

    def __init__(self) -> None:
        self._ended: OrderedDict[tuple[str, str], _Ended] = OrderedDict()

    def ended(self, record: Record, now_s: float) -> None:
        self._ended[record.id, record.side] = _Ended(_row(record, now_s), story(record, now_s), now_s)
        self._ended.move_to_end((record.id, record.side))
        if len(self._ended) > _NUM_KEPT:
            self._ended.popitem(last=False)

    def rows(self, running: Iterable[Record], now_s: float, num_ended: int = 20) -> tuple[RequestRow, ...]:
        """Those that run, then the latest that ended."""
        latest = [
            msgspec.structs.replace(it.row, state_s=now_s - it.end_s) for it in list(self._ended.values())[-num_ended:]
        ]
        return (*(_row(record, now_s) for record in running), *reversed(latest))

    def find(self, running: Iterable[Record], prefix: str, now_s: float) -> tuple[Story, ...]:
        """The story of the request whose id begins with `prefix`, of both sides where both are here.

        Raises NotFound, or BadRequest when several requests match.
        """
        matches = [story(record, now_s) for record in running if record.id.startswith(prefix)]
        matches += [it.story for (request, _), it in self._ended.items() if request.startswith(prefix)]
        ids = {match.request for match in matches}
        if not matches:
            raise NotFound(f"no request here has an id that begins with {prefix!r} (the latest {_NUM_KEPT} are kept)")
        if len(ids) > 1 and prefix not in ids:
            raise BadRequest(f"{len(ids)} requests have ids that begin with {prefix!r}: write more of it")
        return tuple(match for match in matches if len(ids) == 1 or match.request == prefix)


def _row(record: Record, now_s: float) -> RequestRow:
    entries = record.machine.story
    end_s = entries[-1].at_s if record.machine.terminal else now_s
    return RequestRow(
        request=record.id,
        side=record.side,
        state=str(record.machine.state),
        age_s=end_s - entries[0].at_s,
        state_s=now_s - entries[-1].at_s,
        prompt_tokens=len(record.prompt),
        output_tokens=record.num_output_tokens,
        pages=record.num_pages,
        peer=record.peer or "",
    )


def story(record: Record, now_s: float) -> Story:
    """The whole story of a record, running or ended."""
    start_s = record.machine.story[0].at_s
    moved = record.transfer
    lasted_s = moved.last_s - moved.first_s if moved.first_s is not None and moved.last_s is not None else 0.0
    return Story(
        request=record.id,
        side=record.side,
        replica=record.replica,
        peer=record.peer or "",
        prompt_tokens=len(record.prompt),
        cached_tokens=record.num_cached_tokens,
        output_tokens=record.num_output_tokens,
        lines=tuple(
            StoryLine(at_s=entry.at_s - start_s, state=str(entry.state), reason=entry.reason)
            for entry in record.machine.story
        ),
        seconds_in={str(state): seconds for state, seconds in record.machine.seconds_in(now_s).items()},
        pieces=moved.num_pieces,
        bytes=moved.num_bytes,
        gigabytes_per_s=moved.num_bytes / lasted_s / 1e9 if lasted_s > 0 else None,
        landed_before_prefill_end=moved.landed_share,
        ready_after_prefill_end_s=_ready_after_prefill_s(record),
        ttft_s=None if record.first_token_s is None else record.first_token_s - start_s,
    )


def _ready_after_prefill_s(record: Record) -> float | None:
    ready_s = record.machine.entered_s(DecodeState.READY)
    if record.side != "decode" or ready_s is None or record.transfer.prefill_done_s is None:
        return None
    return max(0.0, ready_s - record.transfer.prefill_done_s)
