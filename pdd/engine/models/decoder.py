"""What all networks here share: embedding, a stack of layers, and a head; one `forward` a step.

A layer is an attention and an MLP, each of which gives this rank's *summand*: the ranks of a replica set hold parts of
the weights, and only the sum over them is the layer's output.

    x --norm--> attention.store --> attention.attend --sum over ranks--(+)--norm--> mlp --sum over ranks--(+)--> x
                   (K, V, or latents,                        |
                    are now in this rank's cache)     and now in every rank's: the layer counter is raised
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import embedding

from pdd.engine.attention import BatchPlan, Queries
from pdd.engine.config import ModelConfig
from pdd.engine.models.layers import linear, rms_norm
from pdd.engine.parallel import Parallel
from pdd.engine.protocol import Sampled
from pdd.engine.runner import BatchRow, LayerProgress
from pdd.engine.sampler import sample
from pdd.engine.sharding import vocabulary_of

Tensors = dict[str, torch.Tensor]
Mlp = Callable[[torch.Tensor], torch.Tensor]
"""From normed hidden states [tokens, hidden] to this rank's summand of the same shape. May be collective among
expert-parallel ranks, so every step calls it once in every layer, if need be with no tokens."""


class Attention(Protocol):
    """One layer's attention on this rank."""

    def store(self, plan: BatchPlan, x: torch.Tensor) -> torch.Tensor:
        """Put what later tokens need of `x` (normed hidden states of the step's tokens) into the cache. Returns what
        `attend` needs: [tokens, ...]."""
        ...

    def attend(self, plan: BatchPlan, stored: torch.Tensor) -> torch.Tensor:
        """What each token sees, projected: this rank's summand of [tokens, hidden]."""
        ...

    def attend_queries(self, queries: Queries, stored: torch.Tensor) -> torch.Tensor:
        """The same for some tokens, whose rows of `stored` these are."""
        ...


@dataclass(frozen=True)
class Layer:
    attention_norm: torch.Tensor
    attention: Attention
    mlp_norm: torch.Tensor
    mlp: Mlp


class Decoder:
    """A whole model on one rank. `tensors` holds `embed`, `final_norm` and, unless tied, `head`."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        layers: list[Layer],
        *,
        page_tokens: int,
        parallel: Parallel,
        progress: LayerProgress,
    ) -> None:
        self._config = config
        self._layers = layers
        self._page_tokens = page_tokens
        self._parallel = parallel
        self._progress = progress
        self._vocabulary = vocabulary_of(parallel.tp_rank, parallel.tp, config.vocab_size)
        self._embed = tensors["embed"][self._vocabulary]
        self._final_norm = tensors["final_norm"]
        self._head = self._embed if config.tied_embeddings else tensors["head"][self._vocabulary]

    def forward(self, rows: list[BatchRow]) -> list[Sampled]:
        """The lead's answer has the tokens, other ranks' nothing. Without rows, only takes part in what the other
        data-parallel ranks compute."""
        if not rows:
            self.stand_by()
            return []
        plan = BatchPlan(rows, self._page_tokens)
        logits = self.logits(plan)
        return [] if logits is None else sample(logits.numpy(), plan.sampled_rows)

    @torch.inference_mode()
    def stand_by(self) -> None:
        nothing = self._embed.new_empty(0, self._config.hidden_size)
        for layer in self._layers:
            layer.mlp(nothing)

    @torch.inference_mode()
    def logits(self, plan: BatchPlan) -> torch.Tensor | None:
        """float32 [rows that are sampled, vocabulary]; None where there are none, and on ranks that do not lead.
        Stores the KV of all rows, telling each layer.

        Of the last layer only K and V are needed, except for the tokens that are sampled.
        """
        x = self._embedded(plan.tokens)
        for layer in self._layers[:-1]:
            stored = self._store(layer, plan, x)
            x = self._mix(layer, x, layer.attention.attend(plan, stored))
        layer, sampled = self._layers[-1], plan.sampled
        stored = self._store(layer, plan, x)
        if not sampled.indices:
            self._parallel.synchronise()
            self._progress.layer_stored()
            layer.mlp(x[:0])
            return None
        seen = layer.attention.attend_queries(sampled, stored[sampled.indices])
        x = rms_norm(self._mix(layer, x[sampled.indices], seen), self._final_norm, self._config.rms_norm_eps)
        return self._parallel.gather_vocabulary(linear(x, self._head, None).float(), self._config.vocab_size)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]. Each token's embedding comes from the rank that holds it, and zeros from the others."""
        if self._parallel.tp == 1:
            return embedding(tokens, self._embed)
        first, last = self._vocabulary.start, self._vocabulary.stop
        x = self._embed.new_zeros(len(tokens), self._config.hidden_size)
        ours = (tokens >= first) & (tokens < last)
        x[ours] = self._embed[tokens[ours] - first]
        return self._parallel.all_reduce(x)

    def _store(self, layer: Layer, plan: BatchPlan, x: torch.Tensor) -> torch.Tensor:
        """What `attend` needs; the layer's part of this rank's cache is complete."""
        return layer.attention.store(plan, rms_norm(x, layer.attention_norm, self._config.rms_norm_eps))

    def _mix(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer after attention: both sums over the ranks, and both residuals.

        The first sum needs a summand of every rank, and each has stored its KV before: now the counter may be raised.
        """
        x = x + self._parallel.all_reduce(attended)
        self._progress.layer_stored()
        normed = rms_norm(x, layer.mlp_norm, self._config.rms_norm_eps)
        return x.add_(self._parallel.all_reduce(layer.mlp(normed)))
