# SPDX-License-Identifier: Apache-2.0
"""How rope_quantize_queries is tried and judged: rotated queries by value, codes of certain rounding bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.judge.problems.base import STRENGTH, Params, Problems, one_variant
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import BITS, Finding, Tolerance, close, same_bits
from mla_portable.judge.problems.draw import generator
from mla_portable.judge.problems.exact import e4m3_values, float32, nearest_code
from mla_portable.judge.problems.indexer_cache_write import scale_of_key
from mla_portable.judge.problems.rotary import (
    NEAR,
    ROUNDED,
    Exact,
    angles,
    close_rounded,
    close_rows,
    drawn_positions,
    drawn_tokens,
    rotated,
    table_of,
)
from mla_portable.judge.problems.shapes import MANY_ROWS, accepted, can_capture, can_hold_many, heads
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.layouts import INDEX_HEAD_SIZE, KV_LORA_RANK
from mla_portable.primitives import ROPE_QUANTIZE_QUERIES

TOLERANCES: Final = {
    ("any", "q_out"): ROUNDED,
    ("any", "index_q_out"): BITS,
    ("any", "index_weights_out"): Tolerance(0, 2.0**-21, "three products of float32 numbers"),
    ("any", "codes next to it"): NEAR,
}
NUM_TOKENS: Final = 9
_TABLE: Final = 48
_INDEX_SCALE: Final = 0.011
_JUDGED_TOKENS: Final = 8
WIDTHS: Final = ("128+64", "192+64", "0+64", "5+24")
"""P + R of DeepSeek-V3.2, of GLM-5, of queries that have no other part, and of odd sizes."""


class Wanted(NamedTuple):
    """Of q, its rotated part [T, H, R] before it is rounded; of index_q, likewise all of it [T, I, 128], its codes and its
    scales [T, I]. None where the call has no such part."""

    q: Exact | None = None
    index_q: Exact | None = None
    codes: Tensor | None = None
    scales: Tensor | None = None


def rope_quantize_queries(
    q: Tensor | None,
    index_q: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    rope_style: str = "interleaved",
    index_rope_style: str = "neox",
    index_rope_at: str = "first",
) -> Wanted:
    """What is written, in float64."""
    cos, sin = angles(cos_sin.cpu(), positions.cpu())
    width, turned, index, codes, scales = cos_sin.shape[1], None, None, None, None
    if q is not None:
        turned = rotated(q[..., q.shape[2] - width :], cos, sin, rope_style, 0, width)
    if index_q is not None:
        first = 0 if index_rope_at == "first" else INDEX_HEAD_SIZE - width
        index = rotated(index_q, cos, sin, index_rope_style, first, width)
        numbers = index.rounded.double().nan_to_num(nan=0.0)
        scales = torch.tensor([scale_of_key(each, "pow2") for each in numbers.flatten(0, 1)], dtype=torch.float64)
        scales = scales.view(numbers.shape[:2])
        codes = nearest_code(float32(numbers / scales[..., None]), torch.float8_e4m3fn)
    return Wanted(turned, index, codes, scales)


def findings(storage: str, got: Mapping[str, Tensor], want: Mapping[str, Any]) -> Iterator[Finding]:
    """Rotated queries by value; codes bit for bit; scaled weights, and what codes and weights say together, by value."""
    for name, expected in want.items():
        limit = TOLERANCES["any", name]
        if isinstance(expected, Exact):
            yield from close_rounded(name, got[name], expected, limit)
        elif limit.exact:
            yield same_bits(name, got[name], expected)
        elif name == "index_weights_out":
            yield close(name, got[name], expected, limit)
        else:
            yield from close_rows(name, got[name], expected, limit)


def judged(want: Wanted, weights: Tensor | None, found: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Results by name against what is wanted. weights: [T, I] float64, times index_scale."""
    if want.q is not None:
        width = want.q.values.shape[2]
        yield from findings("any", {"q_out": found["q_out"][..., -width:]}, {"q_out": want.q})
    if want.index_q is None or want.codes is None or want.scales is None or weights is None:
        return
    certain = want.index_q.certain  # [T, I]
    codes, scaled = found["index_q_out"].view(torch.uint8), found["index_weights_out"].double()
    yield from findings("any", {"index_q_out": codes[certain]}, {"index_q_out": want.codes[certain]})
    known = weights * want.scales
    yield from findings("any", {"index_weights_out": scaled[certain]}, {"index_weights_out": known[certain]})
    loose = ~certain & ~want.index_q.values.isnan().any(dim=-1)
    numbers = e4m3_values(codes)
    got, wanted = numbers[loose] * scaled[loose][:, None], e4m3_values(want.codes[loose]) * known[loose][:, None]
    yield from findings("any", {"codes next to it": got}, {"codes next to it": wanted})
    missing = want.index_q.values.isnan()
    yield same_bits("NaN of index_q_out", numbers.isnan()[missing], torch.ones(int(missing.sum()), dtype=torch.bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeQuantizeQueriesParams(Params):
    """One rope_quantize_queries call.

    Attributes:
        heads: H. index_heads: I. widths: a key of WIDTHS. weights: dtype of index_weights.
        parts: "q+index", "q" or "index". tokens: T.
        values: see `rotary.drawn_tokens`. positions: see `rotary.drawn_positions`. table: see `rotary.table_of`.
        style, index_style, index_at: rope_style, index_rope_style, index_rope_at.
        inputs: "packed"; "views"; "transposed", heads in front of tokens. outputs: "packed" or "views".
    """

    primitive = ROPE_QUANTIZE_QUERIES
    says = (
        "h{heads}! i{index_heads}! p{widths}! weights_{weights} {parts}! t{tokens} {values} at_{positions} {table} {style} "
        "index_{index_style} {index_at} in{inputs} out_{outputs}"
    )
    asks = "num_heads=heads rows=tokens"
    heads: int
    index_heads: int
    widths: str = WIDTHS[0]
    weights: str = "bfloat16"
    parts: str = "q+index"
    tokens: int = NUM_TOKENS
    values: str = "plain"
    positions: str = "plain"
    table: str = "float32"
    style: str = "interleaved"
    index_style: str = "neox"
    index_at: str = "first"
    inputs: str = "packed"
    outputs: str = "packed"

    @classmethod
    def asked(cls, device: DeviceFacts, values: Mapping[str, Any]) -> Request:
        """See Params; without q there are no heads."""
        request = super(RopeQuantizeQueriesParams, cls).asked(device, values)
        return request if "q" in values.get("parts", "q").split("+") else request.but(num_heads=None)

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, parts, count = generator(seed), Stage(device), self.parts.split("+"), self.tokens
        own, rotary = map(int, self.widths.split("+"))

        def heads_of(number: int, width: int) -> Tensor:
            flat = drawn_tokens(self.values, count * number, width, g)
            if self.inputs == "transposed":
                return flat.view(number, count, width).transpose(0, 1)
            return flat.view(count, number, width)

        q, index_q = heads_of(self.heads, own + rotary), heads_of(self.index_heads, INDEX_HEAD_SIZE)
        weights = torch.randn(count, self.index_heads, generator=g).to(getattr(torch, self.weights))
        positions = drawn_positions(self.positions, count, _TABLE, g)
        table = table_of(self.table, _TABLE, rotary)
        views = self.inputs == "views"
        args: dict[str, Any] = {
            "q": stage.read("q", q, strided=views) if "q" in parts else None,
            "index_q": stage.read("index_q", index_q, strided=views) if "index" in parts else None,
            "index_weights": stage.read("index_weights", weights, strided=views) if "index" in parts else None,
            "positions": stage.read("positions", positions),
            "cos_sin": stage.read("cos_sin", table),
        }
        outputs = {
            "q_out": ("q", (count, self.heads, KV_LORA_RANK + rotary), torch.bfloat16),
            "index_q_out": ("index", (count, self.index_heads, INDEX_HEAD_SIZE), torch.uint8),
            "index_weights_out": ("index", (count, self.index_heads), torch.float32),
        }
        written = {
            name: stage.write(name, shape, dtype, strided=self.outputs == "views") if part in parts else None
            for name, (part, shape, dtype) in outputs.items()
        }
        keywords: dict[str, Any] = dict(written)
        if (codes := keywords["index_q_out"]) is not None:
            keywords["index_q_out"] = codes.view(torch.float8_e4m3fn)
        keywords |= {
            "index_scale": _INDEX_SCALE,
            "rope_style": self.style,
            "index_rope_style": self.index_style,
            "index_rope_at": self.index_at,
        }
        want = rope_quantize_queries(
            q if "q" in parts else None,
            index_q if "index" in parts else None,
            positions,
            table,
            rope_style=self.style,
            index_rope_style=self.index_style,
            index_rope_at=self.index_at,
        )

        def judge(results: Results) -> Iterator[Finding]:
            found: dict[str, Tensor] = {}
            for name, view in written.items():
                if view is not None:
                    yield stage.writes[name].outside(name, results[name])
                    found[name] = results[name].as_strided(view.shape, view.stride(), view.storage_offset())
            if "q_out" in found:  # the absorbed product's columns
                kept = stage.writes["q_out"].initial.as_strided(found["q_out"].shape, found["q_out"].stride(), view_offset)
                yield same_bits("latent part of q_out", found["q_out"][..., :KV_LORA_RANK], kept[..., :KV_LORA_RANK])
            yield from judged(want, weights.double() * _INDEX_SCALE, found)

        view_offset = 0 if written["q_out"] is None else written["q_out"].storage_offset()
        return Problem(stage, args, keywords, {}, judge)


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[RopeQuantizeQueriesParams]:
    """What a level asks of an implementation of rope_quantize_queries."""
    counts = heads(implementation, facts, level)
    small = accepted(implementation, facts, "num_heads", (3, 1, 20)) or counts[:1]
    axes: dict[str, list[Any]] = {
        "heads": small if facts.device_type == "cpu" else sorted({*small, *counts}),
        "index_heads": [4, 1, 7] if facts.device_type == "cpu" else [64, 32, 1, 7],
        "widths": list(WIDTHS),
        "parts": ["q+index", "q", "index"],
        "values": ["plain", "nan", "zero", "equal"],
        "tokens": [NUM_TOKENS, 1],
        "table": ["float32", "bfloat16", "yarn"],
        "positions": ["plain", "outside"],
        "style": ["interleaved", "neox"],
        "index_style": ["neox", "interleaved"],
        "index_at": ["first", "last"],
        "inputs": ["packed", "views", "transposed"],
        "outputs": ["packed", "views"],
        "weights": ["bfloat16", "float32"],
        "run": ["once", "repeat"],
    }
    yield from RopeQuantizeQueriesParams.covering(implementation, facts, axes, strength=STRENGTH[level])
    if not axes["heads"]:
        return
    base = RopeQuantizeQueriesParams(heads=axes["heads"][0], index_heads=axes["index_heads"][0])
    yield replace(base, tokens=0)
    if can_hold_many(facts, level):
        yield replace(base, heads=1, index_heads=1, tokens=MANY_ROWS)
    if level != "smoke" and can_capture(implementation, facts):
        yield replace(base, run="graph")


def _of_request(request: Request, name: str) -> RopeQuantizeQueriesParams:
    return RopeQuantizeQueriesParams(heads=request.num_heads or 2, index_heads=4, positions="outside", outputs="views")


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case that is timed: DeepSeek-V3.2's widths and indexer."""
    count, tokens = case.num_heads or 1, case.rows
    own, rotary = map(int, WIDTHS[0].split("+"))
    q, index_q = workshop.normal(tokens, count, own + rotary), workshop.normal(tokens, _BENCH_HEADS, INDEX_HEAD_SIZE)
    weights = workshop.normal(tokens, INDEX_HEAD_SIZE + _BENCH_HEADS)[:, INDEX_HEAD_SIZE:]
    positions = workshop.permutation(max(tokens, _BENCH_POSITIONS))[:tokens] % _BENCH_POSITIONS
    cos_sin = table_of("yarn", _BENCH_POSITIONS, rotary).to(workshop.device)
    q_out = workshop.empty(tokens, count, KV_LORA_RANK + rotary, dtype=torch.bfloat16)
    codes = workshop.empty(tokens, _BENCH_HEADS, INDEX_HEAD_SIZE, dtype=torch.float8_e4m3fn)
    weights_out = workshop.empty(tokens, _BENCH_HEADS, dtype=torch.float32)
    looked_at = spread(tokens, _JUDGED_TOKENS, workshop.device)

    def judge(results: Results) -> Iterator[Finding]:
        want = rope_quantize_queries(q[looked_at], index_q[looked_at], positions[looked_at], cos_sin)
        found = {name: each.view(torch.uint8) if name == "index_q_out" else each for name, each in results.items()}
        found = {name: each[looked_at].cpu() for name, each in found.items()}
        yield from judged(want, weights[looked_at].cpu().double() * _INDEX_SCALE, found)

    arguments = {
        "q": q,
        "index_q": index_q,
        "index_weights": weights,
        "positions": positions,
        "cos_sin": cos_sin,
        "q_out": q_out,
        "index_q_out": codes,
        "index_weights_out": weights_out,
        "index_scale": _INDEX_SCALE,
    }
    # rotary parts in and out, queries and codes of the indexer, weights in and out, position and a row of the table
    moved = tokens * (count * 4 * rotary + _BENCH_HEADS * (3 * INDEX_HEAD_SIZE + 6) + 8 + 4 * rotary)
    targets = {"q_out": q_out, "index_q_out": codes, "index_weights_out": weights_out}
    return BenchProblem(case, workshop.request(case), arguments, 5, targets, moved, 0, judge)


_BENCH_HEADS: Final = 64
_BENCH_POSITIONS: Final = 4_096

PROBLEMS: Final = Problems(
    primitive=ROPE_QUANTIZE_QUERIES,
    oracle=rope_quantize_queries,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("num_heads",),
    variants=one_variant("both parts"),
    bench=Bench(
        rows=(1, 16, 64, 1_024, 8_192), heads=(16, 128), make=_make, shape=lambda case: f"T {case.rows}, H {case.num_heads}"
    ),
)
