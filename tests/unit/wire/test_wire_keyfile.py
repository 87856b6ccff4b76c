"""The cluster key file."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdd.base.errors import KeyFileInvalid
from pdd.wire.keyfile import MAX_KEY_BYTES, MIN_KEY_BYTES, ensure_key, load_key


def write(path: Path, key: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(key)
    path.chmod(mode)
    return path


def test_a_good_file(tmp_path: Path) -> None:
    assert load_key(write(tmp_path / "key", b"k" * MIN_KEY_BYTES)) == b"k" * MIN_KEY_BYTES
    assert load_key(write(tmp_path / "readonly", b"k" * MAX_KEY_BYTES, 0o400)) == b"k" * MAX_KEY_BYTES


@pytest.mark.parametrize("size", [0, MIN_KEY_BYTES - 1, MAX_KEY_BYTES + 1])
def test_a_bad_size_is_told_and_the_key_is_not(tmp_path: Path, size: int) -> None:
    with pytest.raises(KeyFileInvalid, match="bytes") as caught:
        load_key(write(tmp_path / "key", b"secret!!" * 1000 if size > 8000 else (b"secret!!" * 1000)[:size]))
    assert "secret!!" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_file_that_others_can_use(tmp_path: Path, mode: int) -> None:
    with pytest.raises(KeyFileInvalid, match="chmod 600"):
        load_key(write(tmp_path / "key", b"k" * 32, mode))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyFileInvalid, match=str(tmp_path / "none")):
        load_key(tmp_path / "none")
    with pytest.raises(KeyFileInvalid, match="regular file"):
        load_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileInvalid, match="regular file"):
        load_key(tmp_path / "pipe")


def test_ensure_makes_a_private_random_key_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    key = ensure_key(path)
    assert len(key) == MIN_KEY_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_key(path) == load_key(path) == key
    assert ensure_key(tmp_path / "other") != key
    assert list(path.parent.iterdir()) == [path], "no draft is left"


def test_ensure_does_not_replace_a_bad_file(tmp_path: Path) -> None:
    path = write(tmp_path / "key", b"short")
    with pytest.raises(KeyFileInvalid):
        ensure_key(path)
    assert path.read_bytes() == b"short"


def test_ensure_where_nothing_can_be_made(tmp_path: Path) -> None:
    write(tmp_path / "file", b"")
    with pytest.raises(KeyFileInvalid, match="cannot make"):
        ensure_key(tmp_path / "file" / "key")


def test_racers_get_one_key(tmp_path: Path) -> None:
    for attempt in range(20):
        path = tmp_path / str(attempt) / "key"
        with ThreadPoolExecutor(4) as pool:
            keys = set(pool.map(lambda _, path=path: ensure_key(path), range(4)))
        assert len(keys) == 1
