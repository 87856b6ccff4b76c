"""`pdd bench engine`: the executor's runner against a plain torch loop of the same dtype and threads.

The plain loop is what one writes first: a contiguous KV cache of a slot per sequence, F.linear, torch's attention. Both
run in this process, in turn, so that a ratio means something even where absolute figures wander.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from pdd.base.ids import SequenceId
from pdd.engine.config import ModelConfig
from pdd.engine.models.llama import load_llama, load_tensors
from pdd.engine.models.rope import rope_table
from pdd.engine.pack import PackedModel, pack
from pdd.engine.parallel import Parallel
from pdd.engine.protocol import Row, StartSequence, Step
from pdd.engine.runner import LayerProgress, Runner
from pdd.lifecycle.request import SamplingParams
from pdd.memory.arena import Arena, LayerCounter, WakeFd
from pdd.memory.layout import KvLayout

Run = Callable[[], None]
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a Hugging Face directory or a .gguf file")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1500])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--repeat", type=int, default=5, help="runs of each measurement; the median is shown")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/pdd"), help="where packed models live")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    packed = pack(args.model, args.dtype, args.cache.expanduser())
    print(f"machine: {platform.machine()}, {_processor()}, {args.threads} threads, torch {torch.__version__}")
    print(f"model: {args.model.name}, {args.dtype}, pages of {args.page_tokens}, chunks of {args.chunk_tokens}")
    print(f"tokens/s, median (min-max) of {args.repeat}\n")
    print(f"{'':24}{'pdd':>24}{'plain torch':>24}{'ratio':>8}")
    longest = max(args.contexts) + args.repeat + 2
    paged = Paged(packed, args, max(args.batches) * longest)
    plain = Plain(packed, max(args.batches), longest)
    with torch.inference_mode():
        for context in args.contexts:
            _compare(f"prefill {context}", context, args.repeat, paged.prefill(context), plain.prefill(context))
        for context in args.contexts:
            for batch in args.batches:
                runs = (paged.decode(context, batch), plain.decode(context, batch))
                _compare(f"decode {batch} at {context}", batch, args.repeat, *runs)
    return 0


def _compare(name: str, num_tokens: int, repeat: int, ours: Run, theirs: Run) -> None:
    """Alternates, so that both see the same weather; the first run of each is not counted."""
    times_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat + 1):
        for one, into in zip((ours, theirs), times_s, strict=True):
            started_s = time.perf_counter()
            one()
            into.append(time.perf_counter() - started_s)
    rates = [[num_tokens / seconds for seconds in into[1:]] for into in times_s]
    texts = [f"{statistics.median(one):8.1f} ({min(one):.1f}-{max(one):.1f})" for one in rates]
    ratio = statistics.median(a / b for a, b in zip(*rates, strict=True))
    print(f"{name:24}{texts[0]:>24}{texts[1]:>24}{ratio:>8.2f}", flush=True)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def _prompt(length: int) -> list[int]:
    return [(7 * index) % 1000 + 10 for index in range(length)]


class Paged:
    """The runner of an executor, fed steps as a daemon would. KV bytes of decode contexts are left at zero."""

    def __init__(self, packed: PackedModel, args: argparse.Namespace, num_tokens: int) -> None:
        config = packed.config
        layout = KvLayout(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            page_tokens=args.page_tokens, dtype=args.dtype, num_pages=num_tokens // args.page_tokens + 64,
        )  # fmt: skip
        arena = Arena.create(layout)
        self._layout = layout
        self._chunk_tokens = args.chunk_tokens
        progress = LayerProgress(LayerCounter.create(), [WakeFd.create()])
        self._model = load_llama(packed, arena, progress, Parallel.solo(), args.threads)
        self._runner = Runner(self._model, layout, config)
        arena.buffer()[:] = bytes(layout.arena_bytes)  # touched, as in service
        self._pages = torch.randperm(layout.num_pages).tolist()

    def prefill(self, length: int) -> Run:
        prompt = _prompt(length)

        def once() -> None:
            starts = range(0, length, self._chunk_tokens)
            for start in starts:
                tokens = prompt[start : start + self._chunk_tokens]
                row = Row(SequenceId(0), start, tokens, [], start == starts[-1])
                begin = [self._start(0, prompt, 1)] if start == 0 else []
                self._runner.step(Step(number=0, release=[], start=begin, rows=[row]))

        return once

    def decode(self, context: int, batch: int) -> Run:
        starts = [self._start(index, _prompt(context), context + 1) for index in range(batch)]
        self._runner.step(Step(number=0, release=[], start=starts, rows=[]))
        rows = [Row(SequenceId(index), context, [11 + index], [], True) for index in range(batch)]
        step = Step(number=0, release=[], start=[], rows=rows)

        def once() -> None:
            self._runner.step(step)

        return once

    def _start(self, index: int, prompt: list[int], room: int) -> StartSequence:
        count = self._layout.num_pages_for(max(len(prompt), room))
        return StartSequence(SequenceId(index), prompt, [], self._pages[index * count : (index + 1) * count], _GREEDY)


class Plain:
    """What one writes first: [layers, 2, batch, kv_heads, positions, head_dim] and F.linear."""

    def __init__(self, packed: PackedModel, batch: int, positions: int) -> None:
        config: ModelConfig = packed.config
        self._config = config
        self._weights = load_tensors(packed.weights)
        self._table = rope_table(config.rope, config.head_dim, positions)
        shape = (config.num_layers, 2, batch, config.num_kv_heads, positions, config.head_dim)
        self._cache = torch.zeros(shape, dtype=self._weights["embed"].dtype)

    def prefill(self, length: int) -> Run:
        tokens = torch.tensor([_prompt(length)])
        return lambda: self._forward(tokens, 0)

    def decode(self, context: int, batch: int) -> Run:
        tokens = torch.arange(11, 11 + batch)[:, None]
        return lambda: self._forward(tokens, context)

    def _forward(self, tokens: torch.Tensor, start: int) -> None:
        weights, config = self._weights, self._config
        x = functional.embedding(tokens, weights["embed"])
        for layer in range(config.num_layers):
            own = {name: weights.get(f"layers.{layer}.{name}") for name in _LAYER}
            hidden = functional.rms_norm(x, (config.hidden_size,), own["attention_norm"], config.rms_norm_eps)
            qkv = functional.linear(hidden, _some(own["qkv"]), own["qkv_bias"])
            attended = self._attend(layer, qkv, start, own)
            x = x + functional.linear(attended, _some(own["output"]), own["output_bias"])
            hidden = functional.rms_norm(x, (config.hidden_size,), own["mlp_norm"], config.rms_norm_eps)
            gate, up = functional.linear(hidden, _some(own["gate_up"]), own["gate_up_bias"]).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, _some(own["down"]), own["down_bias"])
        x = functional.rms_norm(x[:, -1], (config.hidden_size,), weights["final_norm"], config.rms_norm_eps)
        functional.linear(x, weights["embed" if config.tied_embeddings else "head"]).argmax(-1).tolist()

    def _attend(self, layer: int, qkv: torch.Tensor, start: int, own: dict[str, torch.Tensor | None]) -> torch.Tensor:
        config, (batch, length, _) = self._config, qkv.shape
        heads = qkv.view(batch, length, -1, config.head_dim).transpose(1, 2)
        q, k, v = heads.split_with_sizes([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if own["q_norm"] is not None:
            q = functional.rms_norm(q, (config.head_dim,), own["q_norm"], config.rms_norm_eps)
            k = functional.rms_norm(k, (config.head_dim,), own["k_norm"], config.rms_norm_eps)
        cos, sin = self._table[start : start + length].to(q.dtype).chunk(2, dim=-1)
        cache = self._cache[layer, :, :batch]
        cache[0, :, :, start : start + length] = _rotated(k, cos, sin)
        cache[1, :, :, start : start + length] = v
        seen = cache[..., : start + length, :]
        attended = functional.scaled_dot_product_attention(
            _rotated(q, cos, sin), seen[0], seen[1], is_causal=length > 1, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(batch, length, -1)


_LAYER = (
    "attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias", "mlp_norm", "gate_up",
    "gate_up_bias", "down", "down_bias",
)  # fmt: skip


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _some(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
