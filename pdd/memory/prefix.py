"""Which pages hold the KV of which tokens: the lookup behind prefix sharing, used by pool.py alone.

A full page is named by a digest over its tokens and the digest of the page before it, so that one digest stands for
everything from position 0 on (KV depends on all earlier tokens):

    ROOT --tokens 0..15--> d0 --tokens 16..31--> d1 --tokens 32..47--> d2

Digests are 32-byte BLAKE2b over the parent's digest and the token ids as 64-bit integers. Two different prefixes with
one digest cannot be found even on purpose (2^128 work), so equal digests count as equal tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from pdd.base.ids import PageId


class Chain(msgspec.Struct, frozen=True):
    """How far an owner's pages have been named: the digest of its first `num_pages` pages."""

    num_pages: int = 0
    digest: bytes = b""


ROOT = Chain()


class PrefixCache:
    """One page for each digest, one digest for each page."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._pages: dict[bytes, PageId] = {}
        self._digests: dict[PageId, bytes] = {}

    def __contains__(self, page: PageId) -> bool:
        return page in self._digests

    def match(self, tokens: Sequence[int], max_tokens: int) -> tuple[list[PageId], Chain]:
        """The longest known prefix of full pages within the first `max_tokens` tokens. Stops hashing at the first
        page that is not known."""
        pages: list[PageId] = []
        chain = ROOT
        for link in self._links(ROOT, tokens, max_tokens):
            page = self._pages.get(link.digest)
            if page is None:
                break
            pages.append(page)
            chain = link
        return pages, chain

    def publish(self, chain: Chain, pages: Sequence[PageId], tokens: Sequence[int], num_tokens: int) -> Chain:
        """Names the full pages after `chain` that hold the first `num_tokens` of `tokens`, and returns the longer
        chain. A digest that another page has already stays with that page."""
        for link in self._links(chain, tokens, num_tokens):
            page = pages[link.num_pages - 1]
            if link.digest not in self._pages:
                self._pages[link.digest] = page
                self._digests[page] = link.digest
            chain = link
        return chain

    def forget(self, page: PageId) -> None:
        """The page's content is about to be overwritten."""
        digest = self._digests.pop(page, None)
        if digest is not None:
            del self._pages[digest]

    def check(self) -> list[str]:
        """Contradictions between the two tables, as sentences; empty when all is well."""
        if self._pages == {digest: page for page, digest in self._digests.items()}:
            return []
        return [f"prefix tables differ: {len(self._pages)} digests, {len(self._digests)} pages"]

    def _links(self, chain: Chain, tokens: Sequence[int], num_tokens: int) -> Iterator[Chain]:
        """The chains that lengthen `chain` page by page, as far as `num_tokens` fill whole pages."""
        for index in range(chain.num_pages, num_tokens // self._page_tokens):
            start = index * self._page_tokens
            packed = array("q", tokens[start : start + self._page_tokens]).tobytes()
            chain = Chain(index + 1, hashlib.blake2b(chain.digest + packed, digest_size=32).digest())
            yield chain


class NullPrefixCache(PrefixCache):
    """Knows nothing and learns nothing: prefix sharing is off."""

    def match(self, tokens: Sequence[int], max_tokens: int) -> tuple[list[PageId], Chain]:
        return [], ROOT

    def publish(self, chain: Chain, pages: Sequence[PageId], tokens: Sequence[int], num_tokens: int) -> Chain:
        return chain
