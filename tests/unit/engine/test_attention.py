"""The C kernels and the chunk path against attention written out in torch, on pages in random order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd._attention import ffi, lib
from pdd.base.ids import SequenceId
from pdd.engine.attention import BatchPlan, HeadNorm, PagedAttention
from pdd.engine.protocol import StartSequence
from pdd.engine.runner import BatchRow, SequenceState
from pdd.memory.arena import Arena
from pdd.memory.layout import KvLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What the last len(q) of the positions see, in float64: [tokens, heads, head_dim].

    q: [tokens, heads, head_dim], k and v: [positions, kv_heads, head_dim].
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(one.double().repeat_interleave(group, dim=1) for one in (k, v))
    scores = torch.einsum("thd,phd->htp", q, k) * q.shape[2] ** -0.5
    unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("htp,phd->thd", scores.masked_fill(unseen, -torch.inf).softmax(dim=-1), v).float()


class Cache:
    """One layer of pages, filled with known K and V for some sequences."""

    def __init__(self, lengths: list[int], page_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        counts = [-(-length // page_tokens) for length in lengths]
        self.pages = torch.full((sum(counts) + 2, 2, kv_heads, page_tokens, head_dim), float("nan")).to(dtype)
        order = np.random.permutation(len(self.pages)).astype(np.int32)
        self.tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
        self.kv = [torch.randn(length, 2, kv_heads, head_dim).to(dtype) for length in lengths]
        for table, kv in zip(self.tables, self.kv, strict=True):
            for position, token in enumerate(kv):
                self.pages[table[position // page_tokens], :, :, position % page_tokens] = token
        self.addresses = np.array([table.ctypes.data for table in self.tables], np.uint64)
        self.lengths = np.array(lengths, np.int32)

    def decode(self, q: torch.Tensor, isa: int, threads: int) -> torch.Tensor:
        heads, head_dim = q.shape[1:]
        _, _, kv_heads, page_tokens, _ = self.pages.shape
        element = lib.PDD_FLOAT32 if q.dtype == torch.float32 else lib.PDD_BFLOAT16
        cache = ffi.new(
            "struct pdd_cache *",
            (self.pages.data_ptr(), element, heads, kv_heads, page_tokens, head_dim, isa, threads),
        )
        out = torch.full(q.shape, 7.0)
        lib.pdd_decode(
            cache, q.data_ptr(), q.stride(0), len(q), self.addresses.ctypes.data, self.lengths.ctypes.data,
            head_dim**-0.5, out.data_ptr(),
        )  # fmt: skip
        return out


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    page_tokens=st.sampled_from([1, 3, 16, 33, 256]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([2, 6, 8, 20, 64, 80, 128]),
    dtype=st.sampled_from(list(TOLERANCE)),
    isa=st.sampled_from([lib.PDD_ISA_BEST, lib.PDD_ISA_PORTABLE]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_decode_equals_plain_attention(
    lengths: list[int], page_tokens: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype,
    isa: int, threads: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    cache = Cache(lengths, page_tokens, kv_heads, head_dim, dtype)
    padded = torch.randn(len(lengths), kv_heads * group + 3, head_dim).to(dtype)  # rows lie apart, as in qkv
    q = padded[:, : kv_heads * group]
    out = cache.decode(q, isa, threads)
    for row, kv, actual in zip(q, cache.kv, out, strict=True):
        torch.testing.assert_close(actual[None], reference(row[None], kv[:, 0], kv[:, 1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", [lib.PDD_ISA_BEST, lib.PDD_ISA_PORTABLE])
def test_large_scores_neither_overflow_nor_vanish(isa: int) -> None:
    cache = Cache([50], 16, 1, 8, torch.float32)
    cache.pages[:, 0].nan_to_num_().mul_(1e4)
    cache.kv[0][:, 0] *= 1e4
    q = torch.randn(1, 2, 8)
    expected = reference(q, cache.kv[0][:, 0], cache.kv[0][:, 1])
    torch.testing.assert_close(cache.decode(q, isa, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", [lib.PDD_ISA_BEST, lib.PDD_ISA_PORTABLE])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_key_is_not_hidden(isa: int, poison: float) -> None:
    for position in (0, 7, 20):
        cache = Cache([21, 5], 4, 1, 8, torch.float32)
        cache.pages[cache.tables[0][position // 4], 0, 0, position % 4] = poison
        out = cache.decode(torch.ones(2, 1, 8), isa, 1)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()


def rope_reference(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim], angles: [tokens, head_dim / 2]; complex numbers instead of halves."""
    a, b = x.double().chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


class Layer:
    """A PagedAttention of one layer with its arena."""

    def __init__(self, page_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, DTYPES[dtype]
        layout = KvLayout(
            num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens, dtype=dtype,
            num_pages=1200 // page_tokens + 8,
        )  # fmt: skip
        self.page_tokens = page_tokens
        self.arena = Arena.create(layout)
        self.angles = torch.rand(1200, head_dim // 2, dtype=torch.double) * 6
        table = torch.cat((self.angles.cos(), self.angles.sin()), dim=1).float()
        self.attention = PagedAttention(self.arena, self.dtype, heads, table, 1)
        self.pages = torch.randperm(layout.num_pages).tolist()

    def sequence(self, length: int) -> SequenceState:
        count = -(-length // self.page_tokens)
        pages, self.pages = self.pages[:count], self.pages[count:]
        return SequenceState(StartSequence(SequenceId(0), [], [], pages, None))

    def qkv(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, (self.heads + 2 * self.kv_heads) * self.head_dim).to(self.dtype)

    def expected(self, qkv: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
        """What tokens 0, 1, ... of one sequence see: [tokens, heads, head_dim]."""
        rows = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = rows.split_with_sizes([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if norm:
            q = torch.nn.functional.rms_norm(q.double(), (self.head_dim,), norm.q.double(), norm.epsilon)
            k = torch.nn.functional.rms_norm(k.double(), (self.head_dim,), norm.k.double(), norm.epsilon)
        q, k = (rope_reference(one, self.angles[: len(qkv)]) for one in (q, k))
        return reference(q, k, v)


def run(layer: Layer, rows: list[tuple[SequenceState, int, torch.Tensor]], norm: HeadNorm | None) -> list[torch.Tensor]:
    """One step over (sequence, start, qkv of its tokens); what each row sees."""
    batch = [BatchRow(sequence, start, [0] * len(qkv), True) for sequence, start, qkv in rows]
    plan = BatchPlan(batch, layer.page_tokens)
    order = [batch.index(row) for row in plan.rows]
    together = torch.cat([rows[at][2] for at in order])
    layer.attention.store(0, plan, together, norm)
    seen = layer.attention.attend(0, plan, together).view(len(together), layer.heads, layer.head_dim)
    by_row = dict(zip(order, seen.split_with_sizes([len(rows[at][2]) for at in order]), strict=True))
    last = layer.attention.attend_queries(0, plan.sampled, together[plan.sampled.indices])
    torch.testing.assert_close(
        last.view(-1, layer.heads, layer.head_dim),
        torch.stack([by_row[at][-1] for at in order]),
        rtol=TOLERANCE[layer.dtype],
        atol=TOLERANCE[layer.dtype],
    )
    return [by_row[at] for at in range(len(rows))]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_cut_of_a_sequence_sees_the_same(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    head_dim = data.draw(st.sampled_from([4, 16, 20]))
    layer = Layer(data.draw(st.sampled_from([1, 5, 16])), kv_heads * group, kv_heads, head_dim, dtype)
    norm = None
    if data.draw(st.booleans()):
        weights = (torch.rand(2, head_dim) + 0.5).to(layer.dtype)
        norm = HeadNorm(weights[0], weights[1], 1e-5)
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    qkvs = [layer.qkv(length) for length in lengths]
    sequences = [layer.sequence(length) for length in lengths]
    done, seen = [0] * len(lengths), [[] for _ in lengths]  # type: list[int], list[list[torch.Tensor]]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        rows: dict[int, tuple[SequenceState, int, torch.Tensor]] = {}
        for index, length in enumerate(lengths):
            if done[index] < length:
                size = data.draw(st.integers(1, length - done[index]))
                rows[index] = (sequences[index], done[index], qkvs[index][done[index] :][:size].clone())
        for index, one in zip(rows, run(layer, list(rows.values()), norm), strict=True):
            seen[index].append(one)
            done[index] += len(one)
    for qkv, parts in zip(qkvs, seen, strict=True):
        tolerance = TOLERANCE[layer.dtype] * 2
        torch.testing.assert_close(torch.cat(parts).float(), layer.expected(qkv, norm), rtol=tolerance, atol=tolerance)
    layer.arena.close()


@pytest.mark.parametrize("start", [0, 1, 300])
def test_a_chunk_longer_than_a_block_of_queries(start: int) -> None:
    layer = Layer(16, 4, 2, 16, "float32")
    qkv, sequence = layer.qkv(1000), layer.sequence(1000)
    parts = [qkv[:start].clone(), qkv[start:].clone()] if start else [qkv.clone()]
    seen, at = [], 0
    for part in parts:
        seen += run(layer, [(sequence, at, part)], None)
        at += len(part)
    torch.testing.assert_close(torch.cat(seen), layer.expected(qkv, None), rtol=1e-4, atol=1e-4)
    layer.arena.close()


def test_the_arena_holds_what_the_layout_says() -> None:
    layer = Layer(4, 2, 2, 8, "float32")
    sequence = layer.sequence(10)
    qkv = layer.qkv(10)
    k, v = qkv.view(10, 6, 8)[:, 2:].split_with_sizes([2, 2], dim=1)
    k = rope_reference(k, layer.angles[:10]).float()
    run(layer, [(sequence, 0, qkv)], None)
    shape: Any = (layer.arena.layout.num_pages, 2, 2, 4, 8)
    pages = torch.frombuffer(bytearray(layer.arena.buffer()), dtype=torch.float32).view(shape)
    for position in range(10):
        page = int(sequence.pages.first(3)[position // 4])
        assert torch.equal(pages[page, 1, :, position % 4], v[position])
        torch.testing.assert_close(pages[page, 0, :, position % 4], k[position])
    layer.arena.close()
