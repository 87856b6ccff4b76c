"""Shapes for the tests of transfer/."""

from __future__ import annotations

from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape, heads_of


def make_shape(
    tp: int = 1,
    num_kv_heads: int = 1,
    page_tokens: int = 4,
    *,
    num_planes: int = 2,
    num_layers: int = 2,
    head_dim: int = 4,
    num_pages: int = 8,
    dtype: str = "float32",
) -> KvShape:
    layout = KvLayout(
        num_layers=num_layers,
        num_kv_heads=len(heads_of(0, tp, num_kv_heads)),
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=dtype,
        num_pages=num_pages,
        num_planes=num_planes,
    )
    return KvShape(tp=tp, num_kv_heads=num_kv_heads, layout=layout)
