# SPDX-License-Identifier: Apache-2.0
"""The attention problem that InfiniCore publishes: what a kernel was shown elsewhere, it is shown here too.

The shapes are those of its test of FP8 sparse MLA (test/infiniop/fp8_sparse_mla.py, at 2cec6ce6): 2 tokens, 2 heads, 70 indices
into 80 cached tokens, scale 0.04, lengths 5 and 70, a -1 and an index past the cache among them. Its values are random; here
they are drawn from the case's own seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from mla_portable.contracts import DeviceFacts, Implementation
from mla_portable.judge.problems.attention_problem import (
    AttentionParams,
    DecodeParams,
    Drawn,
    DrawnKeys,
    PrefillParams,
    problem_of,
)
from mla_portable.judge.problems.draw import cached_rows, generator, paged_cache
from mla_portable.judge.problems.shapes import accepted, storages, workspace_of
from mla_portable.judge.problems.stage import Problem, Stage
from mla_portable.layouts import LAYOUTS
from mla_portable.primitives import SPARSE_DECODE

_TOKENS: Final = 2
_CACHED: Final = 80
_SLOTS: Final = 96
"""The last block holds NaN, which is what stands past each length."""
_LENGTHS: Final = (5, 70)
_HOLE: Final = 2
_PAST_THE_CACHE: Final = 40


class _Published:
    """What is other than in a problem of its own sizes: the tensors, the scale, and the words of an id."""

    __slots__ = ()
    says = "{pattern}! {kv_layout}! {scale_format} h{heads}! k{topk}! lengths{lengths}"
    softmax_scale = 0.04

    def build(self: AttentionParams, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:  # pyright: ignore[reportGeneralTypeIssues]
        """See Params. Without `lengths`, what lies past them is -1."""
        g, stage, layout = generator(seed), Stage(device), LAYOUTS[self.kv_layout]
        block_size = self.block_size or _SLOTS
        cache = paged_cache(layout, _SLOTS // block_size, block_size, alignment=self.alignment)
        cache.put(torch.arange(_CACHED), cached_rows(_CACHED, layout, self.scale_format, g))
        kv = cache.view if self.block_size else cache.view[0]
        q = torch.randn(_TOKENS, self.heads, layout.key_width, generator=g).bfloat16()
        indices = torch.stack([torch.randperm(_CACHED, generator=g)[: self.topk] for _ in range(_TOKENS)]).to(torch.int32)
        indices[:, _HOLE] = -1
        indices[1, _PAST_THE_CACHE] = _SLOTS
        lengths = torch.tensor(_LENGTHS, dtype=torch.int32)
        past = torch.arange(self.topk) >= lengths.unsqueeze(1)
        indices = indices.masked_fill(past, _CACHED if self.lengths else -1)
        keys = DrawnKeys(stage.read_cache("kv", kv), kv, indices, indices, lengths if self.lengths else None)
        return problem_of(self, Drawn(q, keys), stage, g, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDecode(_Published, DecodeParams):
    """Through sparse_decode, one query a batch row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPrefill(_Published, PrefillParams):
    """Through sparse_prefill, on a paged FP8 cache or a flat workspace of rows without scales."""


def published_attention(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[AttentionParams]:
    """The published case on every cache, with and without lengths, at every level but the smallest."""
    if level == "smoke":
        return
    decode = implementation.primitive is SPARSE_DECODE
    for layout, scale_format in storages(implementation):
        if LAYOUTS[layout].tensor_scale:
            continue  # the published cache has none
        flat = not decode and not LAYOUTS[layout].in_place
        for lengths in accepted(implementation, facts, "lengths", [True, False]):
            yield (PublishedDecode if decode else PublishedPrefill)(
                kv=workspace_of(layout) if flat else layout,
                scale_format=scale_format,
                heads=2,
                topk=70,
                block_size=None if flat else 16,
                query_len=1 if decode else None,
                rows=_TOKENS,
                pattern="published",
                lengths=lengths,
                with_lse=implementation.support.lse,
            )
