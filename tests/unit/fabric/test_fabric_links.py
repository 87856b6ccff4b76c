"""A port with two NICs, and a cable of its own between each and the peer's: both carry, and one may fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from child_process import Child
from namespaces import Namespaces, NoNamespaces, namespaces_or_skip

PAGE_BYTES = 64 * 1024
NUM_PAGES = 256
ARENA_BYTES = NUM_PAGES * PAGE_BYTES
FILL = 7
PATIENCE_S = 30.0
"""More than the 5 s of silence after which a path is given up, and than its pause afterwards."""


class Two:
    """A source and a target in namespaces of their own, two cables between them."""

    def __init__(self, cables: Namespaces, children: ExitStack) -> None:
        self.cables = cables
        self.source = self._child(children, cables.prefill, cables.prefill_hosts, FILL)
        self.target = self._child(children, cables.decode, cables.decode_hosts, 0)
        self.peer = self.source.call("connect", address=self.target.hello["address"])
        self._num_writes = 0

    def _child(self, children: ExitStack, namespace: str, hosts: list[str], fill: int) -> Child:
        child = Child("tcp", ARENA_BYTES, fill, hosts, ("ip", "netns", "exec", namespace))
        children.callback(child.kill)
        return child

    def begin(self, number: int) -> None:
        self.source.call("write", peer=self.peer, num_writes=number, num_pages=NUM_PAGES, page_bytes=PAGE_BYTES,
                         first=self._num_writes)  # fmt: skip
        self._num_writes += number

    def ends(self, number: int) -> list[tuple[int, int, int]]:
        """Token, error and pieces of writes, all of which end."""
        ends: list[tuple[int, int, int]] = self.source.call("ends", number=number, patience_s=PATIENCE_S)
        assert len(ends) == number
        return ends

    def deliver(self) -> None:
        """One write, counted by the target."""
        number = self._num_writes
        self.target.call("expect", number=number, num_pieces=NUM_PAGES)
        self.begin(1)
        [(token, error, num_pieces)] = self.ends(1)
        assert (token, error, num_pieces) == (number, 0, NUM_PAGES)
        assert self.target.call("counted", number=number, patience_s=PATIENCE_S)

    def sent_bytes(self) -> list[int]:
        return [nic["num_bytes"] for nic in self.source.call("nics")]

    def num_open(self) -> int:
        way = self.source.call("way", peer=self.peer)
        assert (way["copies"], way["num_paths"]) == (False, 2)
        return int(way["num_open"])

    def until(self, holds: Callable[[], bool]) -> None:
        """Delivers one write after the other."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, (self.source.call("nics"), self.source.call("statistics"))
            self.deliver()


@pytest.fixture
def two() -> Iterator[Two]:
    with namespaces_or_skip(num_cables=2) as cables, ExitStack() as children:
        yield Two(cables, children)


def gained(before: list[int], after: list[int]) -> list[int]:
    return [new - old for old, new in zip(before, after, strict=True)]


def test_both_nics_carry_and_both_count(two: Two) -> None:
    for _ in range(8):
        two.deliver()
    sent = two.sent_bytes()
    assert sum(sent) == 8 * ARENA_BYTES
    assert min(sent) > sum(sent) / 5
    arrived = [nic["num_arrived"] for nic in two.target.call("nics")]
    assert [it * PAGE_BYTES for it in arrived] == sent
    assert all(two.target.call("page_is", page=page, page_bytes=PAGE_BYTES, fill=FILL) for page in range(NUM_PAGES))
    assert two.num_open() == 2
    assert two.source.call("statistics")["num_failed_paths"] == 0


def test_a_slow_link_carries_less(two: Two) -> None:
    two.deliver()
    try:
        two.cables.slow(1, "100mbit")
    except NoNamespaces as reason:
        pytest.skip(str(reason))
    before = two.sent_bytes()
    two.begin(20)
    assert not any(error for _, error, _ in two.ends(20))
    two.deliver()
    fast, slow = gained(before, two.sent_bytes())
    assert fast > 2 * slow
    assert two.source.call("statistics")["num_failed_paths"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "swallow"])
def test_a_link_fails_in_the_middle_of_writes_and_comes_back(two: Two, fault: str) -> None:

    def num_failures() -> int:
        return int(two.source.call("statistics")["num_failed_paths"])

    two.deliver()
    two.begin(100)
    getattr(two.cables, fault)(1)
    ends = two.ends(100)
    failed = [end for end in ends if end[1]]
    assert failed, "a cut that nothing was on its way at shows nothing"
    assert all(num_pieces == NUM_PAGES for _, error, num_pieces in ends if not error)
    assert two.num_open() == 1
    assert num_failures() >= 1
    two.until(lambda: num_failures() > 1)  # it was tried again, in vain, and no write with it
    assert two.num_open() == 1
    assert [nic["num_failed_paths"] > 0 for nic in two.source.call("nics")] == [False, True]
    two.cables.mend(1)
    before = two.sent_bytes()
    two.until(lambda: all(gained(before, two.sent_bytes())) and two.num_open() == 2)


@pytest.mark.slow
def test_the_other_link_may_fail_when_the_first_is_back(two: Two) -> None:
    for cable in (0, 1):
        two.deliver()
        two.begin(50)
        two.cables.cut(cable)
        two.ends(50)
        two.deliver()
        two.cables.mend(cable)
        two.until(lambda: two.num_open() == 2)


@pytest.mark.slow
def test_without_any_link_writes_end_and_with_one_they_pass(two: Two) -> None:
    two.deliver()
    two.begin(50)
    for cable in (0, 1):
        two.cables.cut(cable)
    ends = two.ends(50)
    assert any(error for _, error, _ in ends)
    two.begin(1)
    [(_, error, _)] = two.ends(1)
    assert error
    two.cables.mend(0)

    def passes() -> bool:
        two.begin(1)
        [(_, error, _)] = two.ends(1)
        return error == 0

    deadline_s = time.monotonic() + PATIENCE_S
    while not passes():
        assert time.monotonic() < deadline_s
        two.source.call("ends", number=1, patience_s=0.05)  # nothing: writes that end at once would be thousands
    two.deliver()
