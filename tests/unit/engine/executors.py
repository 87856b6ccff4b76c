"""Executors as real processes, seen from the daemon's end, for tests."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from pdd.base.ids import SequenceId
from pdd.engine.protocol import (
    ExecutorConfig,
    ExecutorFailed,
    ExecutorReady,
    FromExecutor,
    Row,
    Sampled,
    StartSequence,
    Step,
    StepDone,
)
from pdd.lifecycle.request import SamplingParams
from pdd.memory.arena import Arena, LayerCounter, WakeFd

WORKER = ("-m", "pdd.engine.worker")


class Executor:
    """The daemon's end, blocking."""

    def __init__(self, program: tuple[str, ...] = WORKER) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        command = [sys.executable, *program, "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        theirs.close()

    def send(self, message: object) -> None:
        self.send_body(msgspec.msgpack.encode(message))

    def send_body(self, body: bytes) -> None:
        self.socket.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self) -> tuple[FromExecutor, list[int]]:
        data, fds, _, _ = socket.recv_fds(self.socket, 4, 16)
        while len(data) < 4:
            data += self.socket.recv(4 - len(data))
        body = b""
        while len(body) < int.from_bytes(data, "little"):
            body += self.socket.recv(int.from_bytes(data, "little") - len(body))
        return msgspec.msgpack.decode(body, type=FromExecutor), fds

    def failure(self) -> ExecutorFailed:
        message, _ = self.receive()
        assert isinstance(message, ExecutorFailed), message
        return message

    def end(self) -> tuple[int, str]:
        """Close, and wait for exit code and stderr."""
        self.socket.close()
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr.decode()

    def kill(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.communicate()


def executor_config(model_dir: Path, rendezvous: Path, **changes: object) -> ExecutorConfig:
    values = ExecutorConfig(
        replica="node/0", rank=0, tp=1, dp=1, ep=1, rendezvous=str(rendezvous), role="colocated",
        model_dir=str(model_dir), dtype="float32", page_tokens=4, kv_bytes=1 << 20, chunk_tokens=64, max_sequences=4,
        cores=(), threads=1, num_wakes=1,
    )  # fmt: skip
    return msgspec.structs.replace(values, **changes)


class ReplicaOfRanks:
    """All executors of a replica, ready. `programs`: what to run instead of the worker, by rank."""

    def __init__(
        self, model_dir: Path, rendezvous: Path, tp: int, *, dp: int = 1, ep: int = 1,
        programs: dict[int, tuple[str, ...]] | None = None, **changes: object,
    ) -> None:  # fmt: skip
        self.tp, self.dp = tp, dp
        self.executors = [Executor((programs or {}).get(rank, WORKER)) for rank in range(dp * tp)]
        for rank, one in enumerate(self.executors):
            one.send(
                executor_config(model_dir, rendezvous, rank=rank, tp=tp, dp=dp, ep=ep, num_wakes=2 * tp, **changes)
            )
        self.arenas: list[Arena] = []
        self.counters: list[LayerCounter] = []
        """Of each set's lead."""
        self.wakes: list[WakeFd] = []
        self._number = 0
        for rank, one in enumerate(self.executors):
            message, fds = one.receive()
            assert isinstance(message, ExecutorReady), message
            assert len(fds) == (1 if rank % tp else 2 + 2 * tp)
            self.arenas.append(Arena.map(fds[0], message.layout))
            if rank % tp == 0:
                self.counters.append(LayerCounter.map(fds[1]))
                self.wakes += [WakeFd(fd) for fd in fds[2:]]

    def send(self, rows: list[Row], start: list[StartSequence], set_index: int = 0, joint: bool = False) -> None:
        self._number += 1
        for one in self.of_set(set_index):
            one.send(Step(number=self._number, release=[], start=start, rows=rows, joint=joint))

    def receive(self, set_index: int = 0) -> list[Sampled]:
        """The lead's answer, after all ranks have answered; the others' must be empty."""
        answers = [one.receive()[0] for one in self.of_set(set_index)]
        for tp_rank, answer in enumerate(answers):
            assert isinstance(answer, StepDone), answer
            assert tp_rank == 0 or not answer.sampled
        return answers[0].sampled  # type: ignore[union-attr]

    def step(self, rows: list[Row], start: list[StartSequence]) -> list[Sampled]:
        self.send(rows, start)
        return self.receive()

    def of_set(self, set_index: int) -> list[Executor]:
        return self.executors[set_index * self.tp : (set_index + 1) * self.tp]

    def generate(
        self, prompts: dict[int, list[int]], pages: list[int], chunk: int, num_tokens: int
    ) -> dict[int, list[Sampled]]:
        """Every set its own prompt, all in step; a set that is done, or has no prompt, takes part with empty steps."""
        answers: dict[int, list[Sampled]] = {at: [] for at in prompts}
        rounds = {at: _rounds(prompt, pages, chunk, num_tokens, answers[at]) for at, prompt in prompts.items()}
        while steps := {at: step for at, one in rounds.items() if (step := next(one, None))}:
            for at in range(self.dp):
                rows, start = steps.get(at, ([], []))
                self.send(rows, start, at, joint=self.dp > 1)
            for at in range(self.dp):
                sampled = self.receive(at)
                if at in steps:
                    answers[at] += sampled
        return answers

    def kv(self, rank: int) -> npt.NDArray[np.uint8]:
        """A copy of a rank's arena: [layers, pages, bytes]."""
        layout = self.arenas[rank].layout
        data = np.frombuffer(bytes(self.arenas[rank].buffer()), np.uint8)
        return data.reshape(layout.num_layers, layout.num_pages, -1)

    def close(self) -> None:
        for one in self.executors:
            one.kill()
        for mapped in (*self.arenas, *self.counters, *self.wakes):
            mapped.close()


def _rounds(
    prompt: list[int], pages: list[int], chunk: int, num_tokens: int, answers: list[Sampled]
) -> Iterator[tuple[list[Row], list[StartSequence]]]:
    """One sequence's steps: the prompt in chunks, without its last token, and then token by token."""
    sequence = SequenceId(len(prompt))
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, num_logprobs=4)
    start = [StartSequence(sequence, prompt, [], pages, sampling)]
    last = len(prompt) - 1
    for at in range(0, last, chunk):
        yield [Row(sequence, at, prompt[at : min(at + chunk, last)], [], False)], start
        start = []
    for at in range(num_tokens):
        token = answers[-1].token if answers else prompt[-1]
        yield [Row(sequence, last + at, [token], [], True)], start
        start = []


@contextmanager
def replica_of_ranks(model_dir: Path, rendezvous: Path, tp: int, **options: object) -> Iterator[ReplicaOfRanks]:
    replica = ReplicaOfRanks(model_dir, rendezvous, tp, **options)  # type: ignore[arg-type]
    try:
        yield replica
    finally:
        replica.close()
