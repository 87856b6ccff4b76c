"""The examples and the schema that are shipped: loadable, valid against each other, and equal to the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tokenizers import Tokenizer

from pdd.base.errors import TopologyInvalid
from pdd.topology.check import warnings
from pdd.topology.load import load
from pdd.topology.schema import schema, schema_text

DIRECTORY = Path(__file__).parents[3] / "topology"
EXAMPLES = sorted(DIRECTORY.glob("*.yaml"))
TOY = DIRECTORY / "toy-model"


def test_there_are_examples() -> None:
    assert {path.name for path in EXAMPLES} >= {"local.yaml", "colocated.yaml", "toy.yaml", "two-machines.yaml"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load_without_warnings_and_fit_the_schema(path: Path) -> None:
    assert warnings(load(path)) == []
    jsonschema.validate(yaml.safe_load(path.read_text()), schema())


def test_the_shipped_schema_is_the_export() -> None:
    shipped = (DIRECTORY / "schema.json").read_text()
    assert shipped == schema_text(), "run: pdctl topology schema > topology/schema.json"


def test_the_schema_explains_fields() -> None:
    fields = schema()["$defs"]["Handoff"]["properties"]
    assert fields["local_prefill_tokens"]["description"].startswith("A prompt with at most this many tokens")


GOOD: dict[str, Any] = yaml.safe_load((DIRECTORY / "local.yaml").read_text())


@pytest.mark.parametrize(
    ("key", "value"),
    [("kv_bites", 1), ("kv_bytes", "512MB"), ("kv_bytes", 0), ("role", "both"), ("cores", 0), ("prefix_cache", "yes")],
)
def test_schema_and_loader_refuse_the_same(tmp_path: Path, key: str, value: object) -> None:
    tree = json.loads(json.dumps(GOOD))
    tree["nodes"]["decode0"]["replicas"][0][key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, schema())
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(TopologyInvalid, match=key):
        load(path)


def test_the_toy_s_tokens_are_the_bytes_of_utf_8() -> None:
    tokenizer = Tokenizer.from_file(str(TOY / "tokenizer.json"))
    config = json.loads((TOY / "config.json").read_text())
    text = "Hé 🎉\n\x00"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|eos|>") == config["eos_token_id"]
