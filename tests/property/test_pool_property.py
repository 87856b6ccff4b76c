"""The pool against a naive model: who holds which pages, and what every page contains.

A page's content is modelled as what KV depends on: for each slot, all tokens up to it.
"""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdd.base.errors import OutOfPages
from pdd.base.ids import PageId, RequestId
from pdd.memory.pool import PagePool

Content = tuple[int, ...]


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 12), page_tokens=st.integers(1, 4), prefix_cache=st.booleans())
    def build(self, num_pages: int, page_tokens: int, prefix_cache: bool) -> None:
        self.pool = PagePool(num_pages, page_tokens, prefix_cache)
        self.names = itertools.count()
        self.tables: dict[RequestId, list[int]] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.computed: dict[RequestId, int] = {}
        self.quarantined: dict[RequestId, int] = {}
        self.slots: dict[tuple[int, int], Content] = {}

    def slot(self, owner: RequestId, position: int) -> tuple[int, int]:
        page_tokens = self.pool.page_tokens
        return self.tables[owner][position // page_tokens], position % page_tokens

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), reserve=st.integers(0, 2))
    def allocate(self, tokens: list[int], reserve: int) -> None:
        owner = RequestId(f"r{next(self.names)}")
        before = self.state()
        matched = self.pool.match(tokens, len(tokens) - 1)
        try:
            allocation = self.pool.allocate(owner, tokens, len(tokens), reserve)
        except OutOfPages:
            assert self.state() == before
            held = {page for table in self.tables.values() for page in table}
            fresh = self.pool.num_pages_for(len(tokens)) - len(matched)
            assert fresh + len(set(matched) - held) + reserve > self.pool.available
            return
        assert allocation.num_cached_tokens == len(matched) * self.pool.page_tokens < len(tokens)
        assert allocation.pages[: len(matched)] == matched
        assert self.pool.available >= reserve
        self.check_generations(before, allocation.pages[len(matched) :])
        self.tables[owner], self.tokens[owner] = list(allocation.pages), tokens
        self.computed[owner] = allocation.num_cached_tokens
        for position in range(allocation.num_cached_tokens):
            assert self.slots[self.slot(owner, position)] == tuple(tokens[: position + 1])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_pages=st.integers(0, 3))
    def extend(self, data: st.DataObject, num_pages: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        before = self.state()
        try:
            pages = self.pool.extend(owner, num_pages)
        except OutOfPages:
            assert self.state() == before
            assert num_pages > self.pool.available
            return
        self.check_generations(before, pages)
        self.tables[owner] += pages
        self.tokens[owner] = self.tokens[owner] + [1] * (len(pages) * self.pool.page_tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def compute_and_publish(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        tokens = self.tokens[owner]
        end = data.draw(st.integers(self.computed[owner], len(tokens)))
        for position in range(self.computed[owner], end):
            self.slots[self.slot(owner, position)] = tuple(tokens[: position + 1])
        self.computed[owner] = end
        self.pool.publish(owner, tokens, end)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.release(owner)
        del self.tables[owner]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        before = self.pool.num_quarantined
        self.pool.quarantine(owner)
        del self.tables[owner]
        self.quarantined[owner] = self.pool.num_quarantined - before

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def absolve(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.quarantined)))
        free = self.pool.num_free
        self.pool.absolve(owner)
        assert self.pool.num_free == free + self.quarantined.pop(owner)

    def check_generations(self, before: tuple[object, ...], fresh: list[PageId]) -> None:
        """Exactly the pages that were handed out to be written have a new generation."""
        assert self.state()[-1] == [
            generation + (page in fresh)
            for page, generation in enumerate(before[-1])  # type: ignore[arg-type, var-annotated]
        ]

    def state(self) -> tuple[object, ...]:
        generations = [self.pool.generation(page) for page in range(self.pool.num_pages)]
        return self.pool.num_free, self.pool.num_cached, self.pool.num_quarantined, self.pool.owners(), generations

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.check() == []
        assert self.pool.owners() == {owner: len(table) for owner, table in self.tables.items()}
        assert self.pool.num_owned == len({page for table in self.tables.values() for page in table})
        assert self.pool.num_quarantined == sum(self.quarantined.values())

    @invariant()
    def computed_content_stays(self) -> None:
        for owner in getattr(self, "tables", {}):
            for position in range(self.computed[owner]):
                assert self.slots[self.slot(owner, position)] == tuple(self.tokens[owner][: position + 1])

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for owner in list(self.tables):
            self.pool.release(owner)
        for owner in list(self.quarantined):
            self.pool.absolve(owner)
        assert self.pool.check() == []
        assert self.pool.available == self.pool.num_pages


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
