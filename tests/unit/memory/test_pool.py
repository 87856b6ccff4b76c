from __future__ import annotations

from collections.abc import Callable

import pytest

from pdd.base.errors import InvariantBroken, OutOfPages
from pdd.base.ids import RequestId
from pdd.memory.pool import PagePool

A, B, C, D = map(RequestId, "abcd")
PROMPT = list(range(100, 110))
"""Two full pages of 4 tokens and half of a third."""


@pytest.fixture
def pool() -> PagePool:
    return PagePool(8, 4, prefix_cache=True)


def compute(pool: PagePool, owner: RequestId, tokens: list[int]) -> list[int]:
    """Allocates, computes and publishes all of `tokens`."""
    pages = pool.allocate(owner, tokens, len(tokens)).pages
    pool.publish(owner, tokens, len(tokens))
    return [int(page) for page in pages]


def test_a_second_request_shares_the_full_pages_of_the_first(pool: PagePool) -> None:
    first = compute(pool, A, PROMPT)
    second = pool.allocate(B, [*PROMPT, 7], 11)
    assert second.pages[:2] == first[:2]
    assert second.pages[2] != first[2]
    assert second.num_cached_tokens == 8
    assert (pool.num_owned, pool.num_free) == (4, 4)
    assert (pool.num_hit_tokens, pool.num_looked_up_tokens) == (8, 21)
    pool.release(A)
    assert (pool.num_owned, pool.num_cached, pool.num_free) == (3, 0, 5)
    assert pool.check() == []


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_never_cached(pool: PagePool, num_tokens: int, num_cached: int) -> None:
    compute(pool, A, PROMPT)
    pool.release(A)
    assert pool.allocate(B, PROMPT[:num_tokens], num_tokens).num_cached_tokens == num_cached


def test_a_prefiller_without_the_last_token_may_find_everything_cached(pool: PagePool) -> None:
    compute(pool, A, PROMPT)
    allocation = pool.allocate(B, PROMPT[:9], 8)
    assert allocation.num_cached_tokens == 8
    assert len(allocation.pages) == 2


def test_a_one_token_prompt_of_a_prefiller_needs_no_page(pool: PagePool) -> None:
    assert pool.allocate(A, [5], 0).pages == []
    pool.publish(A, [5], 0)
    pool.release(A)
    assert pool.num_free == 8


def test_the_same_tokens_after_other_tokens_are_another_prefix(pool: PagePool) -> None:
    compute(pool, A, [1, 1, 1, 1, 9, 9, 9, 9])
    assert pool.match([2, 2, 2, 2, 9, 9, 9, 9], 8) == []
    assert pool.match([9, 9, 9, 9], 4) == []


def test_what_is_not_published_is_not_found(pool: PagePool) -> None:
    pool.allocate(A, PROMPT, 10)
    pool.publish(A, PROMPT, 7)
    assert len(pool.match(PROMPT, 10)) == 1
    pool.release(A)
    assert (pool.num_cached, pool.num_free) == (1, 7)


def test_out_of_pages_changes_nothing_and_names_the_numbers(pool: PagePool) -> None:
    compute(pool, A, PROMPT)
    pool.release(A)
    before = pool.num_free, pool.num_cached, pool.match(PROMPT, 9)
    with pytest.raises(OutOfPages, match=r"7 pages are needed and 6 can be had: of 8"):
        pool.allocate(B, [*PROMPT[:8], *range(28)], 36)
    assert (pool.num_free, pool.num_cached, pool.match(PROMPT, 9)) == before
    assert pool.owners() == {}
    pool.allocate(B, [*PROMPT[:8], *range(24)], 32)
    with pytest.raises(OutOfPages):
        pool.extend(B, 1)
    assert pool.owners() == {B: 8}
    assert pool.check() == []


def test_an_allocation_can_leave_a_reserve(pool: PagePool) -> None:
    with pytest.raises(OutOfPages):
        pool.allocate(A, PROMPT, 10, reserve_pages=6)
    pool.allocate(A, PROMPT, 10, reserve_pages=5)
    assert pool.available == 5


def test_pages_are_evicted_least_recently_used_and_deepest_first(pool: PagePool) -> None:
    old, recent = list(range(12)), list(range(50, 62))
    compute(pool, A, old)
    compute(pool, B, recent)
    pool.release(A)
    pool.release(B)
    pool.allocate(C, old[:5], 5)  # touches the first old page
    pool.release(C)
    assert (pool.num_free, pool.num_cached) == (2, 6)
    pool.allocate(D, [0] * 17, 17)  # evicts three: the two deep old pages and the deepest recent one
    assert len(pool.match(old, 12)) == 1
    assert len(pool.match(recent, 12)) == 2
    assert pool.check() == []


def test_equal_pages_computed_twice_stay_apart_and_the_first_is_kept(pool: PagePool) -> None:
    first = pool.allocate(A, PROMPT, 10).pages
    second = pool.allocate(B, PROMPT, 10).pages
    pool.publish(A, PROMPT, 10)
    pool.publish(B, PROMPT, 10)
    assert not set(first) & set(second)
    assert pool.match(PROMPT, 10) == first[:2]
    pool.release(B)
    assert (pool.num_owned, pool.num_free, pool.num_cached) == (3, 5, 0)
    assert pool.check() == []


def test_without_prefix_cache_released_pages_are_free() -> None:
    pool = PagePool(8, 4, prefix_cache=False)
    compute(pool, A, PROMPT)
    assert pool.allocate(B, PROMPT, 10).num_cached_tokens == 0
    pool.release(A)
    pool.release(B)
    assert (pool.num_free, pool.num_cached) == (8, 0)


def test_generation_rises_with_each_owner_that_may_write(pool: PagePool) -> None:
    pages = pool.allocate(A, PROMPT, 10).pages
    before = [pool.generation(page) for page in pages]
    pool.publish(A, PROMPT, 10)
    pool.release(A)
    shared = pool.allocate(B, PROMPT, 10).pages
    assert [pool.generation(page) for page in pages[:2]] == before[:2]
    pool.release(B)
    pool.allocate(C, [0] * 32, 32)
    assert shared[:2] == pages[:2]
    assert all(pool.generation(page) > generation for page, generation in zip(pages, before, strict=True))


def test_quarantine_keeps_what_a_peer_may_still_write_and_releases_the_rest(pool: PagePool) -> None:
    compute(pool, A, PROMPT)
    pages = pool.allocate(B, [*PROMPT, 7, 7, 7], 13).pages
    pool.quarantine(B)
    assert pool.quarantines() == {B: 2}
    assert (pool.num_owned, pool.num_quarantined, pool.available) == (3, 2, 3)
    pool.release(B)  # the request ends; its quarantine does not
    assert pool.num_quarantined == 2
    others = pool.allocate(C, [3] * 12, 12).pages
    assert not set(others) & set(pages[2:])
    pool.absolve(B)
    assert (pool.num_quarantined, pool.num_free) == (0, 2)
    assert pool.check() == []


def test_a_request_whose_pages_are_quarantined_can_be_tried_again(pool: PagePool) -> None:
    pool.allocate(A, PROMPT, 10)
    pool.quarantine(A)
    pool.allocate(A, PROMPT, 10)
    with pytest.raises(InvariantBroken, match="3 pages in quarantine already"):
        pool.quarantine(A)
    assert pool.owners() == {A: 3}
    pool.absolve(A)
    pool.quarantine(A)
    assert pool.check() == []


def test_published_pages_of_a_quarantined_owner_stay_useful(pool: PagePool) -> None:
    compute(pool, A, PROMPT)
    pool.quarantine(A)
    assert (pool.num_cached, pool.num_quarantined) == (2, 1)


def test_misuse_is_named(pool: PagePool) -> None:
    pool.allocate(A, PROMPT, 10)
    with pytest.raises(InvariantBroken, match="a asks for pages but holds 3 already"):
        pool.allocate(A, PROMPT, 10)
    with pytest.raises(InvariantBroken, match="b holds no pages"):
        pool.extend(B, 1)
    with pytest.raises(InvariantBroken, match="publishes 13 of 13 tokens but holds 3 pages"):
        pool.publish(A, [0] * 13, 13)
    with pytest.raises(InvariantBroken, match="publishes 11 of 10 tokens"):
        pool.publish(A, PROMPT, 11)
    with pytest.raises(InvariantBroken, match="b has no pages in quarantine"):
        pool.absolve(B)
    with pytest.raises(InvariantBroken, match="holds nothing"):
        PagePool(0, 4, prefix_cache=True)
    pool.release(B)  # a preempted request holds nothing: that is fine
    assert pool.owners() == {A: 3}
    assert pool.check() == []


@pytest.mark.parametrize(
    ("damage", "faults"),
    [
        (lambda pool: pool._free.append(2), ["page 2 is in 2 places"]),
        (lambda pool: pool._free.pop(), ["page 7 is in 0 places"]),
        (lambda pool: pool._references.__setitem__(0, 3), ["page 0 counts 3 references, has 1"]),
        (lambda pool: pool._cached.update({pool._free.pop(): None}), ["page 7 is cached but cannot be found"]),
        (lambda pool: pool._prefixes._digests.clear(), ["prefix tables differ: 2 digests, 0 pages"]),
    ],
)
def test_check_tells_what_is_wrong(pool: PagePool, damage: Callable[[PagePool], None], faults: list[str]) -> None:
    compute(pool, A, PROMPT)
    assert pool.check() == []
    damage(pool)
    assert pool.check() == faults


def test_a_large_pool_is_handed_out_and_taken_back() -> None:
    pool = PagePool(100_000, 16, prefix_cache=True)
    tokens = list(range(1_600_000))
    pool.allocate(A, tokens, len(tokens))
    pool.publish(A, tokens, len(tokens))
    pool.release(A)
    assert pool.num_cached == 100_000
    assert pool.allocate(B, tokens, len(tokens)).num_cached_tokens == 1_600_000 - 16
