"""A request's story as a person reads it: where its time went, and how its KV pages came.

state          at          for
queued         0.0 ms      0.3 ms  |
prefilling     0.5 ms      790 ms  |█████████████████
transferring   791 ms     12.0 ms  |                 █
decoding       803 ms     1400 ms  |                 ████████████████████████████████
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from pdd.control.render import duration, mebibytes, plain, share, table
from pdd.wire.admin import Story, StoryLine

BAR_WIDTH = 40
MAX_COUNTED_S = 1e9
"""Times beyond this are nonsense and drawn as if they were this long."""


def story_text(story: Story, node: str, block: str = "█") -> str:
    """One side of one request; `block` is the character that bars are made of."""
    head = f"{plain(story.request)}: {plain(story.side)} side, {plain(story.replica)} on {plain(node)}"
    peer = f", with {plain(story.peer)}" if story.peer else ""
    cached = f" ({story.cached_tokens} of them cached)" if story.cached_tokens else ""
    tokens = f"prompt {story.prompt_tokens} tokens{cached}, answer {story.output_tokens} tokens"
    first = f", first token after {duration(story.ttft_s)}" if story.ttft_s is not None else ""
    parts = [head + peer, tokens + first, "", _timeline(story, block)]
    moved = list(_moved(story))
    if moved:
        width = max(len(name) for name, _ in moved)
        parts += ["", *(f"{name.ljust(width)}  {value}" for name, value in moved)]
    return "\n".join(parts)


def _timeline(story: Story, block: str) -> str:
    spans = list(_spans(story))
    start_s = min((at for _, at, _ in spans), default=0.0)
    total_s = max((at + length for _, at, length in spans), default=0.0) - start_s
    rows = []
    for line, at_s, length_s in spans:
        bar = ""
        if total_s > 0 and length_s > 0:
            left = min(round((at_s - start_s) / total_s * BAR_WIDTH), BAR_WIDTH - 1)
            bar = " " * left + block * max(1, round(length_s / total_s * BAR_WIDTH))
        spent = duration(length_s) if length_s > 0 else ""
        rows.append((line.state, duration(at_s) or "0.0 ms", spent, "|" + bar.ljust(BAR_WIDTH) + "|", line.reason))
    return table(("STATE", "AT", "FOR", "", "WHY"), rows)


def _spans(story: Story) -> Iterator[tuple[StoryLine, float, float]]:
    """(line, when it began, how long it lasted); the last line's length is what `seconds_in` has beyond the others."""
    spent: dict[str, float] = {}
    for line, following in zip_longest(story.lines, story.lines[1:]):
        at_s = _sane(line.at_s)
        if following is None:
            length_s = _sane(story.seconds_in.get(line.state, 0.0)) - spent.get(line.state, 0.0)
        else:
            length_s = _sane(following.at_s) - at_s
        length_s = max(0.0, length_s)
        spent[line.state] = spent.get(line.state, 0.0) + length_s
        yield line, at_s, length_s


def _sane(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_COUNTED_S)


def _moved(story: Story) -> Iterator[tuple[str, str]]:
    if not story.pieces and not story.bytes:
        return
    rate = f", {story.gigabytes_per_s:.3g} GB/s from the first to the last" if story.gigabytes_per_s is not None else ""
    yield "KV moved", f"{story.pieces} pieces, {mebibytes(story.bytes)}{rate}"
    if story.landed_before_prefill_end is not None:
        yield "in place before prefill ended", share(story.landed_before_prefill_end)
    if story.ready_after_prefill_end_s is not None:
        yield "ready after prefill ended", duration(story.ready_after_prefill_end_s)
