# SPDX-License-Identifier: Apache-2.0
"""How indexer_logits_ragged is tried and judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.judge.problems.base import STRENGTH, Params, Problems, one_variant
from mla_portable.judge.problems.draw import generator
from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN
from mla_portable.judge.problems.indexer_logits import findings
from mla_portable.judge.problems.indexer_pages import SCORES, format_of, query_values, score, spoil, spoiled, written
from mla_portable.judge.problems.shapes import MANY_ROWS, can_capture, can_hold_many, heads
from mla_portable.judge.problems.stage import Problem, Stage
from mla_portable.layouts import INDEX_BF16, INDEX_HEAD_SIZE, LAYOUTS, index_query_dtype
from mla_portable.primitives import INDEXER_LOGITS_RAGGED


def indexer_logits_ragged(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    row_starts: Tensor,
    row_ends: Tensor,
    *,
    out: Tensor,
) -> Tensor:
    """[T, N] float64; of `out` only the shape is looked at."""
    return written(*_scored(q, weights, keys, key_scales, row_starts, row_ends))[0]


def _scored(
    q: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor | None, row_starts: Tensor, row_ends: Tensor
) -> tuple[Tensor, Tensor]:
    queries, factors, values = query_values(q), weights.cpu().double(), query_values(keys)
    if key_scales is not None:
        values = values * key_scales.cpu().double().unsqueeze(1)
    logits = torch.full((q.shape[0], keys.shape[0]), -math.inf, dtype=torch.float64, device="cpu")
    added = torch.zeros_like(logits)
    for token, (begin, end) in enumerate(zip(row_starts.tolist(), row_ends.tolist(), strict=True)):
        begin, end = max(begin, 0), min(end, values.shape[0])
        if begin < end:
            here = slice(begin, end)
            logits[token, here], added[token, here] = score(queries[token], factors[token], values[here])
    return logits, added


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerLogitsRaggedParams(Params):
    """One indexer_logits_ragged call.

    Attributes:
        kv: the layout whose number format q and keys have. heads: H. tokens: T. keys: N.
        ranges: "causal", each token sees one key more than the one before it; "mixed", starts and ends past both ends of the
            keys, empty ranges, single keys; "edges", at the edges of int32.
        inputs, outputs: "packed", or "views" of wider tensors.
        absent: as of `PageParams`, of all keys.
    """

    primitive = INDEXER_LOGITS_RAGGED
    says = "{kv}! h{heads}! t{tokens}! n{keys}! {ranges} in{inputs} out{outputs} absent_{absent}"
    asks = "kv_layout=kv num_heads=heads"
    kv: str
    heads: int
    tokens: int = 6
    keys: int = 300
    ranges: str = "causal"
    inputs: str = "packed"
    outputs: str = "packed"
    absent: str = "none"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, layout = generator(seed), Stage(device), LAYOUTS[self.kv]
        dtype, tokens, apart = index_query_dtype(layout), self.tokens, self.inputs == "views"
        turn = torch.arange(tokens)
        if self.ranges == "causal":
            starts, ends = torch.zeros(tokens).long(), self.keys - tokens + 1 + turn
        elif self.ranges == "edges":
            starts = torch.tensor([INT32_MIN, 5, INT32_MAX, INT32_MIN + 1, 5, INT32_MAX])[turn % 6]
            ends = torch.tensor([INT32_MAX, INT32_MIN, INT32_MIN + 1, 2, INT32_MAX, INT32_MAX])[turn % 6]
        else:
            starts = torch.tensor([0, -7, 5, self.keys - 1, self.keys + 9, 70])[turn % 6]
            ends = torch.tensor([self.keys, self.keys + 100, 5, self.keys, self.keys + 20, 71])[turn % 6]
        arguments: dict[str, Any] = {
            "q": torch.randn(tokens, self.heads, INDEX_HEAD_SIZE, generator=g).to(dtype),
            "weights": torch.randn(tokens, self.heads, generator=g),
            "keys": torch.randn(self.keys, INDEX_HEAD_SIZE, generator=g).to(dtype),
            "key_scales": torch.rand(self.keys, generator=g) + 0.1 if layout.is_quantized else None,
            "row_starts": starts.to(torch.int32),
            "row_ends": ends.to(torch.int32),
        }
        keys, scales = arguments["keys"], arguments["key_scales"]
        numbers = keys.view(torch.uint8) if layout.is_quantized else keys
        spoil(self.absent, numbers, None if scales is None else scales.view(torch.uint8).view(-1, 4))
        args = {
            name: value if value is None else stage.read(name, value, strided=apart and name in ("q", "weights", "keys"))
            for name, value in arguments.items()
        }
        out = stage.write("out", (tokens, self.keys), torch.float32, strided=self.outputs == "views")
        expected, terms = written(*_scored(**arguments))
        want = {"out": expected, "terms": terms, "weights": arguments["weights"]}
        judge = partial(findings, format_of(arguments["q"]), want=want)
        return Problem(stage, args, {"out": out}, {"out": (tuple(out.shape), torch.float32)}, judge)


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[IndexerLogitsRaggedParams]:
    """What a level asks of an implementation of indexer_logits_ragged."""
    axes: dict[str, list[Any]] = {
        "kv": list(implementation.layouts),
        "heads": heads(implementation, facts, level),
        "tokens": [6, 0, 1, 37],
        "keys": [300, 1, 0, 2100],
        "ranges": ["causal", "mixed"],
        "inputs": ["packed", "views"],
        "outputs": ["packed", "views"],
        "run": ["once", "repeat"],
    }
    covered = IndexerLogitsRaggedParams.covering(implementation, facts, axes, strength=STRENGTH[level])
    yield from covered
    if covered and level != "smoke":
        base = IndexerLogitsRaggedParams(kv=axes["kv"][-1], heads=axes["heads"][-1], ranges="mixed")
        yield replace(base, ranges="edges")
        for kv in axes["kv"]:
            each = (replace(base, kv=kv, heads=count, tokens=37) for count in (axes["heads"][0], axes["heads"][-1]))
            yield from spoiled(implementation, facts, *each)
        if can_capture(implementation, facts):
            yield replace(base, run="graph")
    if covered and can_hold_many(facts, level):
        for kv in axes["kv"]:
            yield IndexerLogitsRaggedParams(kv=kv, heads=axes["heads"][0], tokens=MANY_ROWS, keys=70, ranges="mixed")


def _of_request(request: Request, name: str) -> IndexerLogitsRaggedParams:
    kv = request.kv_layout or INDEX_BF16.name
    return IndexerLogitsRaggedParams(kv=kv, heads=request.num_heads or 1, ranges="mixed")


PROBLEMS: Final = Problems(
    primitive=INDEXER_LOGITS_RAGGED,
    oracle=indexer_logits_ragged,
    tolerances=SCORES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("num_heads",),
    variants=one_variant("mixed"),
    rows=6,
)
