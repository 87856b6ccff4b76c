"""The decode kernel over a latent cache, whose rows are K and V at once, against attention written out in torch."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd._attention import ffi, lib

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    page_tokens=st.sampled_from([1, 3, 16, 32]),
    num_heads=st.sampled_from([1, 3, 4, 5, 16]),
    row_dim=st.sampled_from([6, 32, 70, 576]),
    dtype=st.sampled_from(list(TOLERANCE)),
    isa=st.sampled_from([lib.PDD_ISA_BEST, lib.PDD_ISA_PORTABLE]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_decode_equals_plain_attention(
    lengths: list[int],
    page_tokens: int,
    num_heads: int,
    row_dim: int,
    dtype: torch.dtype,
    isa: int,
    threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    counts = [-(-length // page_tokens) for length in lengths]
    pages = torch.full((sum(counts) + 2, page_tokens, row_dim), float("nan")).to(dtype)
    order = np.random.default_rng(seed).permutation(len(pages)).astype(np.int32)
    tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    rows = [torch.randn(length, row_dim).to(dtype) for length in lengths]
    for table, own in zip(tables, rows, strict=True):
        for position, row in enumerate(own):
            pages[table[position // page_tokens], position % page_tokens] = row
    q = torch.randn(len(lengths), num_heads, row_dim).to(dtype)
    element = lib.PDD_FLOAT32 if dtype == torch.float32 else lib.PDD_BFLOAT16
    shape = (num_heads, 1, page_tokens, row_dim)
    cache = ffi.new("struct pdd_cache *", (pages.data_ptr(), element, *shape, isa, threads, 1))
    addresses = np.array([table.ctypes.data for table in tables], np.uint64)
    counted = np.array(lengths, np.int32)
    out, scale = torch.full(q.shape, 7.0), row_dim**-0.5
    lib.pdd_decode(
        cache, q.data_ptr(), q.stride(0), len(q), addresses.ctypes.data, counted.ctypes.data, scale, out.data_ptr()
    )
    for own, query, actual in zip(rows, q, out, strict=True):
        weights = (query.double() @ own.double().T * scale).softmax(dim=-1)
        expected = (weights @ own.double()).float()
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
