# SPDX-License-Identifier: Apache-2.0
"""The attention problem that InfiniCore publishes: what a kernel was shown elsewhere, it is shown here too.

The shapes are those of its test of FP8 sparse MLA (test/infiniop/fp8_sparse_mla.py, at 2cec6ce6): 2 tokens, 2 heads, 70 indices
into 80 cached tokens, scale 0.04, lengths 5 and 70, a -1 and an index past the cache among them. Its values are random; here
they are drawn from the case's own seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.layouts import LAYOUTS
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.problems.attention import attend, findings
from mla_portable.problems.base import Params
from mla_portable.problems.compare import Finding
from mla_portable.problems.draw import cached_rows, generator, paged_cache
from mla_portable.problems.shapes import accepted, storages
from mla_portable.problems.stage import Problem, Results, Stage

__all__ = ["PublishedDecode", "PublishedPrefill", "published_attention"]

_TOKENS: Final = 2
_HEADS: Final = 2
_TOPK: Final = 70
_CACHED: Final = 80
_BLOCK: Final = 16
_SLOTS: Final = 96
"""The last block holds NaN, which is what stands past each length."""
_SCALE: Final = 0.04
_LENGTHS: Final = (5, 70)
_HOLE: Final = 2
_PAST_THE_CACHE: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _PublishedAttention(Params):
    """The published attention problem.

    Attributes:
        kv_layout, scale_format: of the cache. lengths: pass them; without, what lies past them is -1.
        with_lse: the implementation claims to return it.
    """

    kv_layout: str
    scale_format: str | None
    lengths: bool
    with_lse: bool

    @property
    def is_flat(self) -> bool:
        """Rows of a workspace instead of a paged cache."""
        return self.primitive is SPARSE_PREFILL and not LAYOUTS[self.kv_layout].is_quantized

    def words(self) -> list[str]:
        """See Params."""
        kv = [word for word in (self.kv_layout, self.scale_format) if word]
        return ["published", *kv, f"h{_HEADS}", f"k{_TOPK}", *(["lengths"] if self.lengths else [])]

    def request(self, device: DeviceFacts) -> Request:
        """See Params."""
        return Request(
            self.primitive,
            device,
            kv_layout=self.kv_layout,
            num_heads=_HEADS,
            topk=_TOPK,
            block_size=None if self.is_flat else _BLOCK,
            query_len=1 if self.primitive is SPARSE_DECODE else None,
            rows=_TOKENS,
            scale_format=self.scale_format,
            lengths=self.lengths,
            lse=self.with_lse,
        )

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, layout = generator(seed), Stage(device), LAYOUTS[self.kv_layout]
        shape = (_TOKENS, 1) if self.primitive is SPARSE_DECODE else (_TOKENS,)
        cache = paged_cache(layout, _SLOTS // _BLOCK, _BLOCK)
        cache.put(torch.arange(_CACHED), cached_rows(_CACHED, layout, self.scale_format, g))
        kv = cache.view.view(_SLOTS, layout.row_width) if self.is_flat else cache.view
        q = torch.randn(*shape, _HEADS, layout.key_width, generator=g).bfloat16()
        indices = torch.stack([torch.randperm(_CACHED, generator=g)[:_TOPK] for _ in range(_TOKENS)]).to(torch.int32)
        indices[:, _HOLE] = -1
        indices[1, _PAST_THE_CACHE] = _SLOTS
        lengths = torch.tensor(_LENGTHS, dtype=torch.int32)
        past = torch.arange(_TOPK) >= lengths.unsqueeze(1)
        indices = indices.masked_fill(past, _CACHED if self.lengths else -1)
        limits = lengths if self.lengths else None
        rows = q.view(_TOKENS, _HEADS, layout.key_width)
        want_out, want_lse = attend(rows, kv, indices, softmax_scale=_SCALE, lengths=limits, attn_sink=None)
        args = {
            "q": stage.read("q", q),
            "kv": stage.read("kv", kv),
            "indices": stage.read("indices", indices.view(*shape, _TOPK)),
        }
        keywords: dict[str, Any] = {"softmax_scale": _SCALE}
        if self.lengths:
            keywords["lengths"] = stage.read("lengths", lengths.view(shape))

        def judge(results: Results, stage: Stage) -> Iterator[Finding]:
            got = {name: value.flatten(0, len(shape) - 1) for name, value in results.items() if name == "out" or self.with_lse}
            yield from findings(self.scale_format or "bf16", got, {"out": want_out, "lse": want_lse})

        returns = {"out": ((*shape, _HEADS, layout.value_width), torch.bfloat16), "lse": ((*shape, _HEADS), torch.float32)}
        return Problem(stage, args, keywords, returns, judge, untold=frozenset(() if self.with_lse else ("lse",)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDecode(_PublishedAttention):
    """Through sparse_decode, one query a batch row."""

    primitive = SPARSE_DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPrefill(_PublishedAttention):
    """Through sparse_prefill, on the paged FP8 cache or a bf16 workspace."""

    primitive = SPARSE_PREFILL


def published_attention(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[Params]:
    """The published case on every cache, with and without lengths, at every level but the smallest."""
    if level == "smoke":
        return
    kind = PublishedDecode if implementation.primitive is SPARSE_DECODE else PublishedPrefill
    for kv_layout, scale_format in storages(implementation):
        for lengths in accepted(implementation, facts, "lengths", [True, False]):
            yield kind(kv_layout=kv_layout, scale_format=scale_format, lengths=lengths, with_lse=implementation.support.lse)
