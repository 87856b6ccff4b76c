"""Whatever the shapes and chunks are: bytes moved by the plan are those of a plain re-shard, each exactly once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.base.ids import Immediate, Incarnation, PageId, ReplicaName, RequestId
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape, heads_of
from pdd.transfer.outbound import Chunk, Outbound
from pdd.transfer.plan import completed_blocks, expected_bytes, expected_pieces, lacking_blocks
from pdd.wire.messages import PrefillRequest

Bytes = npt.NDArray[np.uint8]


@dataclass
class Case:
    source: KvShape
    target: KvShape
    num_tokens: int
    start_token: int
    cuts: list[int]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads = draw(st.integers(1, 6))
    common = {
        "num_layers": draw(st.integers(1, 2)),
        "head_dim": draw(st.integers(1, 2)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "num_planes": draw(st.integers(1, 2)),
    }
    small = draw(st.integers(1, 4))
    pages = draw(st.permutations([small, small * draw(st.integers(1, 4))]))
    num_tokens = draw(st.integers(1, 40))
    shapes = []
    for page_tokens in pages:
        tp = draw(st.sampled_from([n for n in range(1, 13) if num_kv_heads % n == 0 or n % num_kv_heads == 0]))
        layout = KvLayout(
            num_kv_heads=len(heads_of(0, tp, num_kv_heads)), page_tokens=page_tokens,
            num_pages=num_tokens // page_tokens + draw(st.integers(1, 3)), **common,
        )  # fmt: skip
        shapes.append(KvShape(tp=tp, num_kv_heads=num_kv_heads, layout=layout))
    source, target = shapes
    start_page = draw(st.integers(0, (num_tokens - 1) // target.layout.page_tokens))
    cuts = sorted({0, num_tokens, *draw(st.lists(st.integers(1, num_tokens), max_size=6))})
    return Case(source, target, num_tokens, start_page * target.layout.page_tokens, cuts, draw(st.integers(0, 1 << 62)))


def arena(layout: KvLayout, rng: np.random.Generator) -> Bytes:
    """[layer, page, plane, head, token, byte], of random bytes."""
    size = (
        layout.num_layers, layout.num_pages, layout.num_planes, layout.num_kv_heads, layout.page_tokens,
        layout.row_bytes,
    )  # fmt: skip
    return rng.integers(0, 256, size, np.uint8)


def tokens_of(layout: KvLayout, cache: Bytes, pages: list[PageId]) -> Bytes:
    """The pages as one tensor: [layer, plane, head, token, byte]."""
    taken = np.moveaxis(cache[:, pages], 1, 3)
    return taken.reshape(*taken.shape[:3], len(pages) * layout.page_tokens, layout.row_bytes)


def ticket_of(case: Case, target_pages: list[PageId]) -> PrefillRequest:
    return PrefillRequest(
        request=RequestId("r"), source_replica=ReplicaName("p/0"), target_replica=ReplicaName("d/0"),
        target_incarnation=Incarnation("d" * 16), shape_digest=case.target.digest(), seed=case.seed,
        prompt=(0,) * (case.num_tokens + 1), start_token=case.start_token, target_pages=tuple(target_pages),
        immediates=tuple(map(Immediate, range(case.target.tp))), lease_s=1.0,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(cases())
def test_moved_bytes_are_a_plain_reshard(case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    source, target = case.source.layout, case.target.layout
    model = rng.integers(  # every head's tokens: what the ranks of the source hold shards of
        0, 256, (source.num_layers, source.num_planes, case.source.num_kv_heads,
                 source.num_pages_for(case.num_tokens) * source.page_tokens, source.row_bytes), np.uint8,
    )  # fmt: skip
    source_pages = [
        PageId(int(it)) for it in rng.permutation(source.num_pages)[: source.num_pages_for(case.num_tokens)]
    ]
    sources = [arena(source, rng) for _ in range(case.source.tp)]
    for rank, cache in enumerate(sources):
        held = model[:, :, list(case.source.heads_of(rank))]
        by_page = held.reshape(*held.shape[:3], len(source_pages), source.page_tokens, source.row_bytes)
        cache[:, source_pages] = np.moveaxis(by_page, 3, 1)
    first_page = case.start_token // target.page_tokens
    num_pages = target.num_pages_for(case.num_tokens) - first_page
    target_pages = [PageId(int(it)) for it in rng.permutation(target.num_pages)[:num_pages]]
    targets = [arena(target, rng) for _ in range(case.target.tp)]
    before = [cache.copy() for cache in targets]
    written = [np.zeros_like(cache) for cache in targets]
    num_pieces = [0] * case.target.tp

    outbound = Outbound(ticket_of(case, target_pages), case.source, case.target)
    for start, end in itertools.pairwise(case.cuts):
        pages = tuple(source_pages[start // source.page_tokens : source.num_pages_for(end)])
        chunk = Chunk(start=start, end=end, last=end == case.num_tokens, pages=pages)
        for rank, parcels in outbound.parcels(chunk).items():
            assert rank in outbound.source_ranks
            for parcel in parcels:
                assert parcel.target_rank in outbound.targets_of(rank)
                for layer, pair, piece in itertools.product(
                    range(source.num_layers), zip(parcel.source_pages, parcel.target_pages, strict=True), parcel.pieces
                ):
                    read = source.offset_bytes(layer, pair[0]) + piece.source_offset_bytes
                    put = target.offset_bytes(layer, pair[1]) + piece.target_offset_bytes
                    run = sources[rank].reshape(-1)[read : read + piece.length_bytes]
                    targets[parcel.target_rank].reshape(-1)[put : put + piece.length_bytes] = run
                    written[parcel.target_rank].reshape(-1)[put : put + piece.length_bytes] += 1
                    num_pieces[parcel.target_rank] += 1
    assert outbound.complete

    size = min(source.page_tokens, target.page_tokens)
    end_token = -(-case.num_tokens // size) * size
    for rank in range(case.target.tp):
        heads = list(case.target.heads_of(rank))
        want = tokens_of(target, before[rank], target_pages)
        length = end_token - case.start_token
        want[:, :, :, :length] = model[:, :, heads, case.start_token : end_token]
        assert (tokens_of(target, targets[rank], target_pages) == want).all()
        marks = tokens_of(target, written[rank], target_pages)
        assert (marks[:, :, :, :length] == 1).all()
        assert written[rank].sum() == marks[:, :, :, :length].size
        blocks = lacking_blocks(case.source, case.target, case.start_token, case.num_tokens)
        assert written[rank].sum() == expected_bytes(case.source, case.target, blocks)
        assert num_pieces[rank] == expected_pieces(case.source, case.target, rank, blocks)


@given(cases())
def test_chunks_complete_each_block_once(case: Case) -> None:
    size = min(case.source.layout.page_tokens, case.target.layout.page_tokens)
    sent = []
    for start, end in itertools.pairwise(case.cuts):
        for block in completed_blocks(case.source, case.target, start, end, last=end == case.num_tokens):
            assert min((block + 1) * size, case.num_tokens) <= end, "complete when it is sent"
            sent.append(block)
    assert sent == list(lacking_blocks(case.source, case.target, 0, case.num_tokens))
