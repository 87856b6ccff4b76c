"""A toy that is slow, and has much KV for each token: handoffs of it can be seen, and struck."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cluster import TOY_MODEL


@pytest.fixture
def wide_toy(tmp_path: Path) -> Path:
    directory = tmp_path / "wide-toy"
    shutil.copytree(TOY_MODEL, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "head_dim": 512, "hidden_size": 1024, "toy_layer_seconds": 0.1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
