"""`python tests/tiny_models.py DIRECTORY`: the tiny random models that topology/small-*.yaml serve.

They are what transformers saves: config.json, safetensors, tokenizer.json. Their text means nothing; it is the same for
every shape of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_checkpoints import write_huggingface

COMMON = {"num_hidden_layers": 4, "max_position_embeddings": 1024, "tie_word_embeddings": False}
MODELS = {
    "tiny-deepseek-v3": ("deepseek_v3", COMMON),
    "tiny-qwen3-moe": ("qwen3_moe", {**COMMON, "num_key_value_heads": 2}),
}


def make(directory: Path) -> None:
    for name, (family, options) in MODELS.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        write_huggingface(directory / name, family, **options)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make(Path(sys.argv[1]).expanduser())
