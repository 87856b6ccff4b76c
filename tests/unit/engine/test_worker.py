"""The executor as a real process, with the toy model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from executors import Executor, executor_config

from pdd.engine.config import ModelConfig, Rope, TextConfig
from pdd.engine.protocol import (
    ExecutorConfig,
    ExecutorReady,
    Row,
    StartSequence,
    Step,
    StepDone,
)
from pdd.engine.toy import continuation
from pdd.lifecycle.request import SamplingParams
from pdd.memory.arena import Arena, LayerCounter, WakeFd

MODEL = ModelConfig(
    architecture="toy", num_layers=3, hidden_size=0, num_heads=2, num_kv_heads=2, head_dim=8, intermediate_size=0,
    vocab_size=256, max_position=512, rms_norm_eps=1e-5, rope=Rope(base=1e4), qkv_bias=False, output_bias=False,
    mlp_bias=False, qk_norm=False, tied_embeddings=True,
)  # fmt: skip


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor()
    yield executor
    executor.kill()


def config(tmp_path: Path, **changes: object) -> ExecutorConfig:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(MODEL))
    (tmp_path / "text.json").write_bytes(msgspec.json.encode(TextConfig(kind="toy")))
    changes.setdefault("cores", tuple(os.sched_getaffinity(0))[:1])
    return msgspec.structs.replace(executor_config(tmp_path, tmp_path / "meet"), **changes)


def ready(executor: Executor, tmp_path: Path) -> tuple[Arena, LayerCounter, WakeFd]:
    executor.send(config(tmp_path))
    message, (arena_fd, counter_fd, wake_fd) = executor.receive()
    assert isinstance(message, ExecutorReady)
    assert message.layout.num_pages == (1 << 20) // (3 * message.layout.page_bytes)
    assert message.resident_bytes > 1 << 20
    return Arena.map(arena_fd, message.layout), LayerCounter.map(counter_fd), WakeFd(wake_fd)


def test_steps_give_the_toys_text_and_raise_the_counter(executor: Executor, tmp_path: Path) -> None:
    arena, counter, wake = ready(executor, tmp_path)
    prompt, pages = list(b"one page is not enough"), [9, 3, 7, 1, 8, 2, 0, 4, 6]
    expected = continuation(MODEL, arena.layout, prompt, 3)
    start = StartSequence(1, prompt, [], pages, SamplingParams(max_tokens=3))  # type: ignore[arg-type]
    executor.send(Step(number=1, release=[], start=[start], rows=[Row(1, 0, prompt, [], True)]))  # type: ignore[arg-type]
    text = []
    for number in (1, 2, 3):
        message, _ = executor.receive()
        assert isinstance(message, StepDone)
        assert message.number == number
        assert counter.read() == 3 * number
        text += [sampled.token for sampled in message.sampled]
        row = Row(1, len(prompt) + number - 1, text[-1:], [], True)  # type: ignore[arg-type]
        executor.send(Step(number=number + 1, release=[], start=[], rows=[row]))
    assert text == expected
    executor.receive()
    assert wake.drain() == 12
    executor.send(Step(number=9, release=[1], start=[], rows=[]))  # type: ignore[list-item]
    message, _ = executor.receive()
    assert isinstance(message, StepDone)
    assert (message.number, message.sampled) == (9, [])
    assert counter.read() == 12
    for one in (arena, counter, wake):
        one.close()
    assert executor.end() == (0, "")


def test_end_of_file_before_the_first_frame_is_a_quiet_exit(executor: Executor) -> None:
    assert executor.end() == (0, "")


def test_the_toy_needs_no_torch() -> None:
    command = "import sys, pdd.engine.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


@pytest.mark.parametrize("frame", [b"garbage", msgspec.msgpack.encode({"replica": 3}), b""])
def test_a_malformed_frame_ends_the_executor_with_a_reason(executor: Executor, frame: bytes) -> None:
    executor.send_body(frame)
    assert "no ExecutorConfig" in executor.failure().message
    code, stderr = executor.end()
    assert code == 1
    assert "Traceback" in stderr


def test_a_stderr_that_takes_nothing_does_not_hide_the_reason() -> None:
    full = "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 2); os.execv(sys.executable, "
    worker = "[sys.executable, '-m', 'pdd.engine.worker', *sys.argv[1:]])"
    executor = Executor(("-c", full + worker))
    try:
        executor.send_body(b"\xc1")
        assert "no ExecutorConfig" in executor.failure().message
    finally:
        executor.kill()


def test_an_oversized_frame_is_refused_unread(executor: Executor) -> None:
    executor.socket.sendall((1 << 31).to_bytes(4, "little"))
    assert "2147483648 bytes" in executor.failure().message
    assert executor.end()[0] == 1


def test_a_row_of_an_unknown_sequence_is_an_error(executor: Executor, tmp_path: Path) -> None:
    for one in ready(executor, tmp_path):
        one.close()
    executor.send(Step(number=1, release=[], start=[], rows=[Row(5, 0, [1], [], False)]))  # type: ignore[arg-type]
    assert "sequence 5" in executor.failure().message
    assert executor.end()[0] == 1


@pytest.mark.parametrize(
    ("changes", "words", "exit_code"),
    [
        ({"kv_bytes": 1000}, "kv_bytes is 1000", 4),
        ({"model_dir": "/nonexistent"}, "/nonexistent/config.json", 4),
        ({"cores": (4095,)}, "cores [4095]", 1),
    ],
)
def test_faults_of_the_operator_are_told(
    executor: Executor, tmp_path: Path, changes: dict[str, object], words: str, exit_code: int
) -> None:
    executor.send(config(tmp_path, **changes))
    message = executor.failure()
    assert words in message.message
    assert message.exit_code == executor.end()[0] == exit_code


def test_an_interrupt_is_ignored_and_a_termination_is_not(executor: Executor, tmp_path: Path) -> None:
    for one in ready(executor, tmp_path):
        one.close()
    executor.process.send_signal(signal.SIGINT)
    executor.send(Step(number=1, release=[], start=[], rows=[]))
    assert isinstance(executor.receive()[0], StepDone)
    executor.process.send_signal(signal.SIGTERM)
    assert executor.process.wait(60) == -signal.SIGTERM
