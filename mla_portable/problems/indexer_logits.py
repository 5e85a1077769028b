# SPDX-License-Identifier: Apache-2.0
"""How indexer_logits is tried and judged: who sees which key, what an unseen one holds, and the values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.layouts import INDEX_BF16, LAYOUTS
from mla_portable.primitives import INDEXER_LOGITS
from mla_portable.problems.base import Problems, one_variant
from mla_portable.problems.compare import Finding, close, limit_of
from mla_portable.problems.cover import Choice, covering
from mla_portable.problems.draw import PAIR_BLOCK
from mla_portable.problems.indexer_pages import SCORES, PageParams, format_of, page_axes, scored
from mla_portable.problems.shapes import can_capture, can_hold_vast
from mla_portable.problems.stage import Problem, Results, Stage

__all__ = ["PROBLEMS", "IndexerLogitsParams", "findings", "indexer_logits"]

TOLERANCES: Final = SCORES


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    out: Tensor,
) -> Tensor:
    """[T, N] float64; of `out` only the shape is looked at."""
    return scored(q, weights, index_cache, query_start_loc, seq_lens, block_table, out.shape[1])[0]


def findings(storage: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[Finding]:
    """out [T, N]. want: "out", "terms" for FP8, and "weights" [T, H], for what an error may come from."""
    out, expected = got["out"].cpu().double(), want["out"]

    def symptom(where: tuple[int, ...]) -> tuple[str, str]:
        bare = (expected != -math.inf) & (out < 0) & (want["weights"] >= 0).all(dim=1, keepdim=True)
        hint = " (below 0 though no weight is: it looks as if the ReLU were missing)" if bare.any() else ""
        values = f"the logit of position {where[1]} is {float(out[where]):g}, expected {float(expected[where]):g}"
        return values + hint, f"row {where[0]}"

    yield close("out", out, expected, limit_of(TOLERANCES, storage, "out"), steps=want.get("terms"), symptom=symptom)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerLogitsParams(PageParams):
    """One indexer_logits call.

    Attributes:
        width: of out: "exact", the longest context; "narrow", less; "wide", more than the table holds.
    """

    primitive = INDEXER_LOGITS
    says = (
        "{kv}! {scale_format} h{heads}! b{block_size}! {batch}! tail{tail} starts_{starts} table_{table} {width} "
        "in{inputs} out{outputs} {blocks}"
    )
    width: str = "exact"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        stage = Stage(device)
        pages = self.pages(seed, stage)
        width = {"exact": pages.longest, "narrow": 3, "wide": pages.capacity + 5}[self.width]
        out = stage.write("out", (pages.args["q"].shape[0], width), torch.float32, strided=self.outputs == "views")
        expected, terms = scored(**pages.arguments, width=width)
        want = {"out": expected, "terms": terms, "weights": pages.arguments["weights"]}
        storage = format_of(pages.arguments["q"])

        def judge(results: Results, stage: Stage) -> Iterator[Finding]:
            yield from findings(storage, results, want)

        return Problem(stage, dict(pages.args), {"out": out}, {"out": (tuple(out.shape), torch.float32)}, judge)


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[IndexerLogitsParams]:
    """What a level asks of an implementation of indexer_logits."""
    axes: dict[str, list[Any]] = {**page_axes(implementation, facts, level), "width": ["exact", "narrow", "wide"]}
    if not all(axes.values()):
        return

    def allowed(choice: Choice) -> bool:
        return IndexerLogitsParams.claimed(implementation, facts, choice)

    for choice in covering(axes, strength={"smoke": 1, "quick": 2, "full": 3}[level], allowed=allowed):
        yield IndexerLogitsParams.of(choice)
    if level == "smoke":
        return
    for kv, scale_format in axes["storage"]:
        base = IndexerLogitsParams(kv=kv, scale_format=scale_format, heads=axes["heads"][-1], block_size=axes["block_size"][-1])
        yield from (replace(base, starts=starts) for starts in ("late", "outside"))
        yield from (replace(base, batch=batch, tail=1) for batch in ("chunk", "long"))
        if base.block_size >= PAIR_BLOCK:
            yield replace(base, blocks="pair")
        if can_hold_vast(kv, facts, level):
            yield replace(base, blocks="address")
        if can_capture(implementation, facts):
            yield replace(base, run="graph", table="holes", tail=2)
        yield replace(base, heads=64, block_size=64, batch="published")


def _of_request(request: Request, name: str) -> IndexerLogitsParams:
    layout = LAYOUTS[request.kv_layout or INDEX_BF16.name]
    return IndexerLogitsParams(
        kv=layout.name,
        scale_format=(request.scale_format or "amax") if layout.is_quantized else None,
        heads=request.num_heads or 1,
        block_size=request.block_size or 1,
        batch="ragged",
        tail=1,
        table="near",
    )


PROBLEMS: Final = Problems(
    primitive=INDEXER_LOGITS,
    oracle=indexer_logits,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("num_heads", "block_size"),
    variants=one_variant("ragged"),
    rows=5,
)
