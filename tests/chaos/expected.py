"""What the toy says, without any daemon."""

from __future__ import annotations

from pathlib import Path

from cluster import TOY_MODEL

from pdd.engine.pack import pack
from pdd.engine.toy import continuation
from pdd.memory.layout import KvLayout


class Toy:
    def __init__(self, cache: Path, model: Path = TOY_MODEL) -> None:
        self.config = pack(model, "float32", cache).config
        self.layout = KvLayout(
            num_layers=self.config.num_layers, num_kv_heads=self.config.num_kv_heads, head_dim=self.config.head_dim,
            page_tokens=16, dtype="float32", num_pages=1,
        )  # fmt: skip

    def tokens(self, ids: list[int], num: int) -> list[int]:
        return continuation(self.config, self.layout, ids, num)

    def text(self, ids: list[int], num: int) -> str:
        return bytes(token for token in self.tokens(ids, num) if token < 256).decode(errors="replace")
