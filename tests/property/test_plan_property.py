"""Whatever the chunks are, every page that the target lacks is sent exactly once, and never before it is complete."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdd.memory.layout import KvLayout
from pdd.transfer.plan import completed_pages, lacking_pages


@given(st.integers(1, 20), st.integers(1, 200), st.data())
def test_chunks_complete_each_page_once(page_tokens: int, num_tokens: int, data: st.DataObject) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_tokens=page_tokens, dtype="float32", num_pages=1)
    cuts = sorted({0, num_tokens, *data.draw(st.lists(st.integers(1, num_tokens), max_size=8))})
    sent = []
    for start, end in itertools.pairwise(cuts):
        for page in completed_pages(layout, start, end, last=end == num_tokens):
            assert min((page + 1) * page_tokens, num_tokens) <= end, "complete when it is sent"
            sent.append(page)
    assert sent == list(lacking_pages(layout, 0, num_tokens))
    start_page = data.draw(st.integers(0, (num_tokens - 1) // page_tokens))
    assert list(lacking_pages(layout, start_page * page_tokens, num_tokens)) == sent[start_page:]
