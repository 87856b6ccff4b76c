"""Where a page of KV cache lies in an arena.

An arena is `[num_layers, num_pages, num_planes, num_kv_heads, page_tokens, head_dim]` (HND). There are two planes, K
and V, or one where the cache is a latent (MLA: one "head" of `kv_lora_rank + rope` numbers). A page index names the
same slot in every layer, so one list of indices describes a request in all of them:

    layer 0: | page 0 | page 1 | ... | page n-1 |
    layer 1: | page 0 | page 1 | ... | page n-1 |
"""

from __future__ import annotations

import hashlib

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one rank's arena. All sizes in bytes unless the name says otherwise."""

    num_layers: int
    num_kv_heads: int
    """Of this rank."""
    head_dim: int
    page_tokens: int
    dtype: str
    """A key of DTYPE_BYTES."""
    num_pages: int
    num_planes: int = 2
    """2: K and V. 1: a latent from which both are made (MLA)."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer: all planes of `page_tokens` tokens."""
        return self.num_planes * self.num_kv_heads * self.page_tokens * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head in one plane."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def arena_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def offset_bytes(self, layer: int, page: int) -> int:
        """Start of a page of a layer, from the start of the arena."""
        return layer * self.layer_bytes + page * self.page_bytes

    def row_offset_bytes(self, plane: int, head: int, token: int) -> int:
        """Start of a token of one of this rank's heads, from the start of its page; the next token follows."""
        return ((plane * self.num_kv_heads + head) * self.page_tokens + token) * self.row_bytes

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def digest(self) -> str:
        """16 hex digits over everything that the bytes of a page depend on (so not `num_pages`)."""
        fields = (self.num_layers, self.num_planes, self.num_kv_heads, self.head_dim, self.page_tokens, self.dtype)
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]
