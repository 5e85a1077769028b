# SPDX-License-Identifier: Apache-2.0
"""The engines that read the prompts of a trained model, as jobs of the vLLM kit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import faults
from jobs import KV_DTYPES, REHEARSALS, Job

PROMPTS: Final = "prompts.json"
_TOKENS: Final = 8
"""That each prompt is continued with: an answer of four digits, and what follows."""
_CHUNKS: Final = {"": 8192, "small": 2048}
"""Tokens of a step: matrix products of other sizes round otherwise."""


@dataclass(frozen=True)
class Asked:
    """What an engine is, beside its job.

    Attributes:
        model: a Form's name. cache: bf16 or fp8. per_head: prompts may go over keys of each head.
        variant: what else is different, "" where nothing is: `small` chunks, or a fault.
    """

    model: str
    who: str
    cache: str
    per_head: bool
    variant: str = ""

    @property
    def name(self) -> str:
        way = "heads" if self.per_head else "latent"
        return "-".join(filter(None, (self.model, self.who, self.cache, way, self.variant)))

    @property
    def is_stock(self) -> bool:
        """One of vLLM's own backends: `stock` the one that is named, `choice` the one that vLLM takes by itself."""
        return self.who in ("stock", "choice")

    @property
    def fault(self) -> str:
        return self.variant if self.variant in faults.FAULTS else ""

    def job(self, heads: int) -> Job:
        kv = KV_DTYPES[0] if self.cache == "fp8" else KV_DTYPES[1]
        options: dict[str, Any] = {"model": self.model, "prompts": PROMPTS, "tokens": _TOKENS, "by_default": self.per_head}
        if self.fault:
            options["fault"] = self.fault
        arguments = {"max_model_len": 33_280, "max_num_batched_tokens": _CHUNKS.get(self.variant, _CHUNKS[""])}
        arguments["kv_cache_memory_bytes"] = 2 << 30  # several of the longest prompts: preempted ones would be read again
        rehearsal = REHEARSALS.get(self.who, {})
        given: dict[str, Any] = {"arguments": arguments, "options": options, "rehearsal": rehearsal, "seconds": 420}
        return Job(self.name, "score", self.who, kv, heads, "eager", **given)


def engines(model: str) -> list[Asked]:
    """Of one trained model. Those that others are judged by come first, then one of each kind."""
    caches = ("bf16", "fp8")
    found = [Asked(model, "stock", cache, False) for cache in caches]
    found += [Asked(model, "stock", cache, False, "small") for cache in caches]
    found += [Asked(model, "plugin", cache, True) for cache in caches]
    found += [Asked(model, "stock", cache, True) for cache in caches]
    found += [Asked(model, who, cache, False) for who, cache in product(("plugin", "triton"), caches)]
    if model == "v32":
        found.append(Asked(model, "choice", "bf16", False))
        found += [Asked(model, "plugin", "bf16", False, fault) for fault in faults.FAULTS]
        found += [Asked(model, who, cache, True) for cache, who in product(caches, ("sm80", "sm89"))]
        found += [Asked(model, "triton", cache, True) for cache in caches]
    return found
