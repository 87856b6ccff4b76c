"""Who holds each page of an arena. A request meets the pool when it is admitted, when it grows, and when it ends.

A page is in exactly one place:

    free --allocate, extend--> owned --release--> cached   (its content has been published)
     ^                           |        `-----> free     (it has not)
     |                           `--quarantine--> quarantined --absolve--> free
     `--- evicted, least recently used first, when free pages run out --- cached

Owned pages that were published can be shared: they are reference counted, and only unpublished pages are written to.
A quarantined page may still be written by a peer, so it belongs to nobody until that is over.
Pure bookkeeping: page numbers only, no memory. All work is proportional to the pages of the one request concerned.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

import msgspec

from pdd.base.errors import InvariantBroken, OutOfPages
from pdd.base.ids import PageId, RequestId
from pdd.memory.prefix import Chain, NullPrefixCache, PrefixCache


class Allocation(msgspec.Struct, frozen=True):
    pages: list[PageId]
    """In order of position."""
    num_cached_tokens: int
    """Leading tokens whose KV is already in the first pages; whole pages, always less than all tokens."""


class _Holding:
    """The page table of one owner."""

    __slots__ = ("chain", "pages")

    def __init__(self, pages: list[PageId], chain: Chain) -> None:
        self.pages = pages
        self.chain = chain


class PagePool:
    """`num_pages` pages of `page_tokens` tokens; with `prefix_cache` the content of released pages is kept findable."""

    def __init__(self, num_pages: int, page_tokens: int, prefix_cache: bool) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise InvariantBroken(f"a pool of {num_pages} pages of {page_tokens} tokens holds nothing")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._prefixes = PrefixCache(page_tokens) if prefix_cache else NullPrefixCache(page_tokens)
        self._free: deque[PageId] = deque(PageId(page) for page in range(num_pages))
        self._cached: OrderedDict[PageId, None] = OrderedDict()
        """Least recently used first."""
        self._holdings: dict[RequestId, _Holding] = {}
        self._references = [0] * num_pages
        self._quarantined: dict[RequestId, list[PageId]] = {}
        self._generations = [0] * num_pages
        self.num_looked_up_tokens = 0
        """Tokens of all allocations so far; the denominator of the prefix cache's hit rate."""
        self.num_hit_tokens = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return sum(len(pages) for pages in self._quarantined.values())

    @property
    def num_owned(self) -> int:
        """A shared page counts once."""
        return self.num_pages - self.num_free - self.num_cached - self.num_quarantined

    @property
    def available(self) -> int:
        """Pages that an allocation can have: free ones and, by eviction, cached ones."""
        return len(self._free) + len(self._cached)

    def owners(self) -> dict[RequestId, int]:
        """Pages in each owner's table; a shared page counts for each."""
        return {owner: len(holding.pages) for owner, holding in self._holdings.items()}

    def quarantines(self) -> dict[RequestId, int]:
        return {owner: len(pages) for owner, pages in self._quarantined.items()}

    def pages_of(self, owner: RequestId) -> tuple[PageId, ...]:
        """The owner's page table. Raises InvariantBroken when it holds none."""
        return tuple(self._holding(owner).pages)

    def generation(self, page: PageId) -> int:
        """Raised each time the page is handed out to be written anew; joining a shared page does not raise it."""
        return self._generations[page]

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def match(self, tokens: Sequence[int], max_tokens: int) -> list[PageId]:
        """Pages of the longest cached prefix within the first `max_tokens` tokens. Changes nothing."""
        return self._prefixes.match(tokens, max_tokens)[0]

    def allocate(self, owner: RequestId, tokens: Sequence[int], num_tokens: int, reserve_pages: int = 0) -> Allocation:
        """Pages for the first `num_tokens` positions of `tokens`, the cached prefix shared. The last token never
        counts as cached: computing it is what yields the next one.

        Raises OutOfPages when fewer than `reserve_pages` would stay available, InvariantBroken when the owner has
        pages already; nothing has changed then.
        """
        if owner in self._holdings:
            raise InvariantBroken(f"{owner} asks for pages but holds {len(self._holdings[owner].pages)} already")
        shared, chain = self._prefixes.match(tokens, min(num_tokens, len(tokens) - 1))
        num_fresh = self.num_pages_for(num_tokens) - len(shared)
        num_revived = sum(page in self._cached for page in shared)
        self._require(num_fresh, self.available - num_revived - reserve_pages)
        for page in shared:
            self._cached.pop(page, None)
            self._references[page] += 1
        pages = shared + self._take(num_fresh)
        self._holdings[owner] = _Holding(pages, chain)
        num_cached_tokens = len(shared) * self.page_tokens
        self.num_looked_up_tokens += len(tokens)
        self.num_hit_tokens += num_cached_tokens
        return Allocation(list(pages), num_cached_tokens)

    def extend(self, owner: RequestId, num_pages: int) -> list[PageId]:
        """More pages at the end of the owner's table. Raises OutOfPages; nothing has changed then."""
        holding = self._holding(owner)
        self._require(num_pages, self.available)
        pages = self._take(num_pages)
        holding.pages += pages
        return pages

    def publish(self, owner: RequestId, tokens: Sequence[int], num_tokens: int) -> None:
        """The KV of the first `num_tokens` of `tokens` is in place in the owner's pages: full ones become findable
        and must not be written again. Costs nothing where no further page has become full."""
        holding = self._holding(owner)
        if num_tokens > len(tokens) or self.num_pages_for(num_tokens) > len(holding.pages):
            raise InvariantBroken(
                f"{owner} publishes {num_tokens} of {len(tokens)} tokens but holds {len(holding.pages)} pages "
                f"of {self.page_tokens} tokens"
            )
        holding.chain = self._prefixes.publish(holding.chain, holding.pages, tokens, num_tokens)

    def release(self, owner: RequestId) -> None:
        """Drops all references of the owner. An owner without pages is fine (a preempted one has none); what it has
        in quarantine stays there."""
        holding = self._holdings.pop(owner, None)
        if holding is not None:
            self._drop(holding.pages)

    def quarantine(self, owner: RequestId) -> None:
        """Ends the ownership while a peer may still write: pages that only this owner holds and that were never
        published wait under its name for `absolve`. Nobody writes to published ones: they are released.

        Raises InvariantBroken when the name has pages in quarantine already; nothing has changed then.
        """
        if owner in self._quarantined:
            raise InvariantBroken(f"{owner} has {len(self._quarantined[owner])} pages in quarantine already")
        pages = self._holding(owner).pages
        del self._holdings[owner]
        writable = [page for page in pages if page not in self._prefixes]
        for page in writable:
            self._references[page] -= 1
        self._quarantined[owner] = writable
        self._drop([page for page in pages if page in self._prefixes])

    def absolve(self, owner: RequestId) -> None:
        """Nobody can write into the owner's quarantined pages any more: they are free."""
        if owner not in self._quarantined:
            raise InvariantBroken(f"{owner} has no pages in quarantine")
        self._free.extend(self._quarantined.pop(owner))

    def check(self) -> list[str]:
        """Broken invariants as sentences; empty when all is well. Walks the whole pool."""
        faults = self._prefixes.check()
        references = Counter(page for holding in self._holdings.values() for page in holding.pages)
        quarantined = [page for pages in self._quarantined.values() for page in pages]
        places = Counter([*self._free, *self._cached, *quarantined, *references])
        for page in map(PageId, range(self.num_pages)):
            if places[page] != 1:
                faults.append(f"page {page} is in {places[page]} places")
            if self._references[page] != references[page]:
                faults.append(f"page {page} counts {self._references[page]} references, has {references[page]}")
            if references[page] > 1 and page not in self._prefixes:
                faults.append(f"page {page} is shared but was never published")
            if (page in self._cached) and page not in self._prefixes:
                faults.append(f"page {page} is cached but cannot be found")
        faults += [f"free page {page} can still be found" for page in self._free if page in self._prefixes]
        faults += [f"quarantined page {page} can be found" for page in quarantined if page in self._prefixes]
        return faults

    def _holding(self, owner: RequestId) -> _Holding:
        holding = self._holdings.get(owner)
        if holding is None:
            raise InvariantBroken(f"{owner} holds no pages")
        return holding

    def _require(self, num_pages: int, available: int) -> None:
        if num_pages > available:
            raise OutOfPages(
                f"{num_pages} pages are needed and {max(available, 0)} can be had: of {self.num_pages}, "
                f"{self.num_owned} are owned, {self.num_quarantined} quarantined, {self.available} free or cached"
            )

    def _take(self, num_pages: int) -> list[PageId]:
        """Free pages for a first owner, evicting where needed; the caller has made sure that there are enough."""
        pages = []
        for _ in range(num_pages):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._cached.popitem(last=False)
                self._prefixes.forget(page)
            self._references[page] = 1
            self._generations[page] += 1
            pages.append(page)
        return pages

    def _drop(self, pages: list[PageId]) -> None:
        """Takes one reference from each page. Deep pages come first, so that they are evicted before the pages
        without which nobody would find them."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._prefixes:
                    self._cached[page] = None
                else:
                    self._free.append(page)
