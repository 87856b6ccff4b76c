from __future__ import annotations

import ctypes
import os

import pytest

from pdd.base.errors import InvariantBroken, OperatorError
from pdd.memory.arena import Arena, LayerCounter, WakeFd
from pdd.memory.layout import KvLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_tokens=4, dtype="float32", num_pages=3)


def test_both_sides_see_the_same_bytes() -> None:
    ours = Arena.create(LAYOUT)
    theirs = Arena.map(os.dup(ours.fd), LAYOUT)
    at = LAYOUT.offset_bytes(1, 2)
    ours.buffer()[at : at + 4] = b"page"
    assert ctypes.string_at(theirs.address + at, 4) == b"page"
    assert len(theirs.buffer()) == LAYOUT.arena_bytes
    ours.close()
    ours.close()
    assert bytes(theirs.buffer()[at : at + 4]) == b"page"
    theirs.close()


def test_an_arena_can_neither_shrink_nor_grow() -> None:
    arena = Arena.create(LAYOUT)
    for num_bytes in (0, 2 * LAYOUT.arena_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, num_bytes)
    arena.close()


def test_a_foreign_descriptor_is_refused() -> None:
    unsealed = os.memfd_create("unsealed")
    with pytest.raises(InvariantBroken, match="0 bytes"):
        Arena.map(unsealed, LAYOUT)
    os.ftruncate(unsealed, LAYOUT.arena_bytes)
    with pytest.raises(InvariantBroken, match=r"no memfd|not sealed"):
        Arena.map(unsealed, LAYOUT)
    with pytest.raises(InvariantBroken, match="layer counter"):
        LayerCounter.map(unsealed)
    os.close(unsealed)


def test_an_impossible_size_is_the_operators_fault() -> None:
    with pytest.raises(OperatorError, match="shared memory"):
        Arena.create(
            KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_tokens=1, dtype="float32", num_pages=1 << 54)
        )


def test_the_counter_grows_for_both_sides() -> None:
    ours = LayerCounter.create()
    theirs = LayerCounter.map(os.dup(ours.fd))
    assert theirs.read() == 0
    assert ours.add(1) == 1
    assert ours.add(30) == 31
    assert theirs.read() == ours.read() == 31
    ours.close()
    theirs.close()


def test_wake_ups_add_up_until_drained() -> None:
    wake = WakeFd.create()
    assert wake.drain() == 0
    wake.notify()
    wake.notify()
    assert wake.drain() == 2
    assert wake.drain() == 0
    wake.close()
    wake.close()
