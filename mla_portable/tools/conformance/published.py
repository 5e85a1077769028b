# SPDX-License-Identifier: Apache-2.0
"""Cases whose inputs others have published: what a kernel was shown elsewhere, it is shown here too.

convert_indices   req, table and positions of InfiniCore's test of sparse-attention operators (test/infinicore/ops/dsa.py, at
                  2cec6ce6). That test compares two implementations; the slots expected here follow from
                  table[req, position // 64] * 64 + position % 64.
attention         the shapes of InfiniCore's test of FP8 sparse MLA (test/infiniop/fp8_sparse_mla.py): 2 tokens, 2 heads, 70
                  indices into 80 cached tokens, scale 0.04, lengths 5 and 70, a -1 and an index past the cache among them.
                  Its values are random; here they are drawn from the case's own seed.
indexer_logits    the shapes of the first of these tests: one request of 4 tokens and no context, 64 heads, blocks of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import (
    LAYOUTS,
    DeviceFacts,
    Implementation,
    Request,
)
from mla_portable.primitives import CONVERT_INDICES, INDEXER_LOGITS, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.reference import oracle
from mla_portable.tools.conformance.compare import Finding, attributes, close, same_bits
from mla_portable.tools.conformance.indexer_logits import IndexerLogitsParams
from mla_portable.tools.conformance.inputs import cached_rows, generator, paged
from mla_portable.tools.conformance.params import Params, accepted, storages
from mla_portable.tools.conformance.problem import Guarded, Problem, Stage
from mla_portable.tools.conformance.tolerances import tolerance

__all__ = ["PublishedConvert", "PublishedDecode", "PublishedPrefill", "published_params"]

_CONVERT_BLOCK: Final = 64
_TABLE: Final = [[2, 3], [5, 6]]
_CONVERT_ROWS: Final = (
    (0, [0, 63, 64, -1], [128, 191, 192, -1]),
    (0, [1, 65, -1, -1], [129, 193, -1, -1]),
    (1, [0, 64, -1, -1], [320, 384, -1, -1]),
    (1, [3, 66, -1, -1], [323, 386, -1, -1]),
)
"""(request, positions, expected slots)."""
_CONVERT_PARTS: Final = {"prefill": (0, 1, 2, 3), "decode": (0, 3)}

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
class PublishedConvert(Params):
    """The published positions. part: "prefill", all four rows; "decode", one of each request."""

    primitive = CONVERT_INDICES
    part: str

    def words(self) -> list[str]:
        """See Params."""
        return ["published", f"k{len(_CONVERT_ROWS[0][1])}", f"b{_CONVERT_BLOCK}", self.part]

    def request(self, device: DeviceFacts) -> Request:
        """See Params."""
        rows = len(_CONVERT_PARTS[self.part])
        return Request(self.primitive, device, topk=len(_CONVERT_ROWS[0][1]), block_size=_CONVERT_BLOCK, rows=rows)

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params. Nothing is random."""
        stage = Stage(device)
        requests, positions, slots = zip(*(_CONVERT_ROWS[i] for i in _CONVERT_PARTS[self.part]), strict=True)
        placed = stage.read("topk_indices", torch.tensor(positions, dtype=torch.int32))
        owner = stage.read("req_id_per_token", torch.tensor(requests, dtype=torch.int32))
        table = stage.read("block_table", torch.tensor(_TABLE, dtype=torch.int32))
        want = torch.tensor(slots, dtype=torch.int32)

        def call(bound: Callable[..., Any]) -> tuple[Tensor, ...]:
            return tuple(bound(placed, owner, table, block_size=_CONVERT_BLOCK))

        def judge(results: tuple[Tensor, ...], writes: dict[str, Guarded]) -> Iterator[Finding]:
            yield same_bits("indices", results[0].cpu(), want)
            yield same_bits("counts", results[1].cpu(), (want >= 0).sum(1, dtype=torch.int32))

        return Problem(stage, call, judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PublishedAttention(Params):
    """The published attention problem.

    Attributes:
        kv_layout, scale_format: of the cache. lengths: pass them; without, what lies past them is -1.
        with_lse: the implementation claims to tell it.
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
        cache = paged(layout, _SLOTS // _BLOCK, _BLOCK)
        cache.put(torch.arange(_CACHED), cached_rows(_CACHED, layout, self.scale_format, g))
        kv = cache.view.view(_SLOTS, layout.row_width) if self.is_flat else cache.view
        q = torch.randn(*shape, _HEADS, layout.key_width, generator=g).bfloat16()
        indices = torch.stack([torch.randperm(_CACHED, generator=g)[:_TOPK] for _ in range(_TOKENS)]).to(torch.int32)
        indices[:, _HOLE] = -1
        indices[1, _PAST_THE_CACHE] = _SLOTS
        lengths = torch.tensor(_LENGTHS, dtype=torch.int32)
        past = torch.arange(_TOPK) >= lengths.unsqueeze(1)
        indices = indices.masked_fill(past, _CACHED if self.lengths else -1)
        indices = indices.view(*shape, _TOPK)
        solve = oracle.sparse_decode if self.primitive is SPARSE_DECODE else oracle.sparse_prefill
        want_out, want_lse = solve(q, kv, indices, softmax_scale=_SCALE, lengths=lengths.view(shape) if self.lengths else None)
        q_placed, kv_placed, indices_placed = stage.read("q", q), stage.read("kv", kv), stage.read("indices", indices)
        keywords: dict[str, Any] = {"softmax_scale": _SCALE}
        if self.lengths:
            keywords["lengths"] = stage.read("lengths", lengths.view(shape))
        storage = self.scale_format or "bf16"

        def call(bound: Callable[..., Any]) -> tuple[Tensor, ...]:
            results = tuple(bound(q_placed, kv_placed, indices_placed, **keywords))
            return results if self.with_lse else results[:1]

        def judge(results: tuple[Tensor, ...], writes: dict[str, Guarded]) -> Iterator[Finding]:
            yield attributes("out tensor", results[0], (*shape, _HEADS, layout.value_width), torch.bfloat16, device)
            yield close("out", results[0].cpu(), want_out, tolerance(self.primitive, storage, "out"))
            if self.with_lse:
                yield close("lse", results[1].cpu(), want_lse, tolerance(self.primitive, storage, "lse"))

        return Problem(stage, call, judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDecode(_PublishedAttention):
    """Through sparse_decode, one query a batch row."""

    primitive = SPARSE_DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPrefill(_PublishedAttention):
    """Through sparse_prefill, on the paged FP8 cache or a bf16 workspace."""

    primitive = SPARSE_PREFILL


def published_params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[Params]:
    """The published cases of a primitive, at every level but the smallest."""
    if level == "smoke":
        return
    if implementation.primitive is CONVERT_INDICES:
        yield from (PublishedConvert(part=part) for part in _CONVERT_PARTS)
        return
    if implementation.primitive is INDEXER_LOGITS:
        yield IndexerLogitsParams(heads=64, block_size=64, batch="published")
        return
    kinds = {SPARSE_DECODE: PublishedDecode, SPARSE_PREFILL: PublishedPrefill}
    kind = kinds.get(implementation.primitive)
    if kind is None:
        return
    for kv_layout, scale_format in storages(implementation):
        for lengths in accepted(implementation, facts, "lengths", [True, False]):
            yield kind(kv_layout=kv_layout, scale_format=scale_format, lengths=lengths, with_lse=implementation.support.lse)
