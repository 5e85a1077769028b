# SPDX-License-Identifier: Apache-2.0
"""How indexer_logits is tried and judged: who sees which key, what an unseen one holds, and the values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request, Support
from mla_portable.judge.problems.base import Problems
from mla_portable.judge.problems.compare import Finding, close, limit_of
from mla_portable.judge.problems.indexer_pages import (
    SCORES,
    PageParams,
    format_of,
    needs_a_promise,
    page_of_request,
    page_params,
    scored,
    written,
)
from mla_portable.judge.problems.shapes import storages
from mla_portable.judge.problems.stage import Problem, Stage
from mla_portable.primitives import INDEXER_LOGITS

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
    kv_layout: str | None = None,
) -> Tensor:
    """[T, N] float64; of `out` only the shape is looked at."""
    pages = q, weights, index_cache, query_start_loc, seq_lens, block_table
    return written(*scored(*pages, out.shape[1], kv_layout=kv_layout))[0]


def findings(storage: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[Finding]:
    """out [T, N]. want: "out", "terms" for FP8, and "weights" [T, H], for what an error may come from."""
    out, expected = got["out"].cpu().double(), want["out"]

    def symptom(where: tuple[int, ...]) -> tuple[str, str]:
        negative = out.isfinite() & (out < 0) & (expected != -math.inf)  # -inf is a score of NaN, or one left out
        bare = negative & (want["weights"] >= 0).all(dim=1, keepdim=True)
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
        "in{inputs} out{outputs} {blocks} stale{stale} absent_{absent} promised{promised} scheduled{scheduled}"
    )
    width: str = "exact"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        stage = Stage(device)
        pages = self.pages(seed, stage)
        width = {"exact": pages.longest, "narrow": 3, "wide": pages.capacity + 5}[self.width]
        out = stage.write("out", (pages.args["q"].shape[0], width), torch.float32, strided=self.outputs == "views")
        expected, terms = written(*scored(**pages.arguments, width=width, share=self.held, kv_layout=self.kv))
        want = {"out": expected, "terms": terms, "weights": pages.arguments["weights"]}
        judge = partial(findings, format_of(pages.arguments["q"]), want=want)
        keywords: dict[str, Any] = {"out": out, **self.planned(pages, device, facts)}
        return Problem(stage, dict(pages.args), keywords, {"out": (tuple(out.shape), torch.float32)}, judge)


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[IndexerLogitsParams]:
    """What a level asks of an implementation of indexer_logits."""
    widths = {"width": ["exact", "narrow", "wide"]}
    whole = {"width": "wide"}
    yield from page_params(IndexerLogitsParams, implementation, facts, level, widths, plain={}, few={}, whole=whole)
    for kv, scale_format in () if level == "smoke" else storages(implementation):
        promised = needs_a_promise(implementation.support)
        yield IndexerLogitsParams(
            kv=kv, scale_format=scale_format, heads=64, block_size=64, batch="published", promised=promised
        )


def _variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    needs = {"whole_tables": support.needs_whole_tables, "uniform_query_len": support.needs_uniform_query_len}
    yield "ragged", request.but(**needs)


PROBLEMS: Final = Problems(
    primitive=INDEXER_LOGITS,
    oracle=indexer_logits,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=lambda request, name: page_of_request(IndexerLogitsParams, request),
    sizes=("num_heads", "block_size"),
    variants=_variants,
    rows=5,
)
