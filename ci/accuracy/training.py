# SPDX-License-Identifier: Apache-2.0
"""Training in the stages of the DeepSeek-V3.2 report: dense attention, the indexer alone, then both under its choice.

1. dense: language modelling over all keys, at last over long contexts.
2. warm: the model is frozen, the indexer learns the attention of all heads together.
3. sparse: attention over the chosen keys. The model learns from the text, the indexer from attention on what it chose; the
   gradient of neither reaches the other.

Short contexts among the first teach to find a fact sooner. A stage has a number of steps, and a share of the time: where the
GPU is slower it has fewer steps, and time that a stage leaves goes to the next. The seed fixes samples and initial weights.
Sums of the fused attention's gradient have no fixed order, so that the weights of two trainings differ as if rounded
differently.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from corpus import Corpus
from network import Mode, Network
from questions import batch
from torch import Tensor
from torch.nn import functional

_RATE, _INDEX_RATE = 2e-3, 1e-3
_WARM_STEPS: Final = 30
_FACTS: Final = 0.6
"""Share of the samples with facts and questions."""


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        tokens: of a step. lengths: contexts, one for each step in turn. share: of the training's time that it may take.
        rates: factors on the model's learning rate, at the begin and the end; index_rates: on the indexer's. 0, 0: frozen.
    """

    name: str
    mode: Mode
    steps: int
    tokens: int
    lengths: tuple[int, ...]
    share: float
    rates: tuple[float, float]
    index_rates: tuple[float, float]


STAGES: Final = (
    Stage("dense", "dense", 1300, 65_536, (512, 2048), 0.4, (1.0, 0.25), (0.0, 0.0)),
    Stage("dense, long", "dense", 64, 65_536, (8192, 16_384, 32_768), 0.08, (0.25, 0.1), (0.0, 0.0)),
    Stage("warm", "warm", 120, 32_768, (4096,), 0.1, (0.0, 0.0), (1.0, 0.3)),
    Stage("sparse", "sparse", 400, 32_768, (4096,) * 10 + (16_384, 32_768), 0.42, (0.15, 0.0), (0.3, 0.03)),
)
TOY: Final = (
    Stage("dense", "dense", 4, 256, (128,), 0.4, (1.0, 0.3), (0.0, 0.0)),
    Stage("warm", "warm", 3, 256, (128,), 0.3, (0.0, 0.0), (1.0, 0.3)),
    Stage("sparse", "sparse", 3, 256, (128, 256), 0.3, (0.15, 0.0), (0.3, 0.03)),
)


def factor(rates: tuple[float, float], done: float, step: int) -> float:
    """Of a learning rate: linear over the first steps, and from one of `rates` to the other on a cosine. done: 0 to 1."""
    high, low = rates
    return min(1.0, (step + 1) / _WARM_STEPS) * (low + (high - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def text_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean over all tokens, and the mean over those of plain text. logits: [B, T, vocabulary]."""
    each = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
    plain = weights == 1
    return (each * weights).sum() / weights.sum(), (each.detach() * plain).sum() / plain.sum()


class Trainer:
    """A network with its optimizers."""

    def __init__(self, network: Network, corpus: Corpus, *, seed: int) -> None:
        self.network, self.corpus, self.rng = network, corpus, random.Random(seed)
        self.device = next(network.parameters()).device
        model, indexers = network.parts()
        fused: dict[str, Any] = {"fused": True} if self.device.type == "cuda" else {}
        groups = [
            {"params": [p for p in model if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizers = [
            torch.optim.AdamW(groups, lr=_RATE, betas=(0.9, 0.95), **fused),
            torch.optim.AdamW(indexers, lr=_INDEX_RATE, betas=(0.9, 0.95), weight_decay=0.0, **fused),
        ]
        self.parts = [model, indexers]

    def run(self, stage: Stage, seconds: float) -> dict[str, Any]:
        """Train one stage, for so many seconds at most. Returns: its row of the log."""
        begin, step, found = time.monotonic(), 0, dict[str, Any]()
        learns = [any(rates) for rates in (stage.rates, stage.index_rates)]
        for part, does in zip(self.parts, learns, strict=True):
            for parameter in part:
                parameter.requires_grad_(does)
        printed = begin
        while step < stage.steps and (step == 0 or time.monotonic() - begin < seconds):
            done = max(step / stage.steps, (time.monotonic() - begin) / seconds)
            for optimizer, base, rates in zip(
                self.optimizers, (_RATE, _INDEX_RATE), (stage.rates, stage.index_rates), strict=True
            ):
                for group in optimizer.param_groups:
                    group["lr"] = base * factor(rates, done, step)
            length = stage.lengths[step % len(stage.lengths)]
            figures = self._step(stage, length, learns)
            step += 1
            if step in (1, stage.steps) or time.monotonic() - printed > 5:
                printed = time.monotonic()
                loss, divergence = (None if each is None else round(float(each), 4) for each in figures)
                rate = round(step * stage.tokens / (printed - begin))
                found = {"stage": stage.name, "step": step, "text": loss, "indexer": divergence, "tokens_s": rate}
                found["seconds"] = round(printed - begin, 1)
                if self.device.type == "cuda":
                    found["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
                print(json.dumps(found), flush=True)
        return {**found, "step": step, "seconds": round(time.monotonic() - begin, 1)}

    def _step(self, stage: Stage, length: int, learns: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        """One step. Returns: the loss of plain text, None where the model is frozen, and the indexer's."""
        arrays = batch(self.rng, self.corpus, max(1, stage.tokens // length), length, facts=_FACTS)
        tokens, weights = (torch.from_numpy(each).to(self.device, non_blocking=True) for each in arrays)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits, divergence = self.network(tokens[:, :-1], stage.mode)
            plain: Tensor | None = None
            total = divergence
            if learns[0]:
                loss, plain = text_loss(logits, tokens[:, 1:], weights)
                total = loss if divergence is None else loss + divergence
            assert total is not None
            total.backward()
        for optimizer, part, does in zip(self.optimizers, self.parts, learns, strict=True):
            if does:
                torch.nn.utils.clip_grad_norm_(part, 1.0)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return plain, None if divergence is None else divergence.detach()


def train(network: Network, corpus: Corpus, stages: Sequence[Stage], *, seed: int, seconds: float) -> list[dict[str, Any]]:
    """All stages, in `seconds` together. Returns: the log, a row for each stage."""
    trainer, log = Trainer(network, corpus, seed=seed), list[dict[str, Any]]()
    end = time.monotonic()
    for stage in stages:
        end += stage.share * seconds
        log.append({**trainer.run(stage, max(1.0, end - time.monotonic())), "of": asdict(stage)})
        if trainer.device.type == "cuda":
            torch.cuda.empty_cache()
    return log
