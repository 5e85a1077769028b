# SPDX-License-Identifier: Apache-2.0
"""How indexer_logits_blocks is tried and judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request, Support
from mla_portable.judge.problems.base import STRENGTH, Params, Problems
from mla_portable.judge.problems.compare import Finding, Tolerance, close, limit_of
from mla_portable.judge.problems.draw import generator
from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN, e4m3_values
from mla_portable.judge.problems.indexer_pages import score
from mla_portable.judge.problems.shapes import MANY_ROWS, can_capture, can_hold_many, heads
from mla_portable.judge.problems.stage import Problem, Stage
from mla_portable.layouts import INDEX_HEAD_SIZE
from mla_portable.primitives import INDEXER_LOGITS_BLOCKS

_MXFP8, _MXFP4 = FORMS = ("mxfp8", "mxfp4")
_GROUP: Final = 32
"""Numbers of a scale."""
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes without a sign."""
TOLERANCES: Final = {
    ("any", "out"): Tolerance(
        1e-3, 2.0**-8 + 2.0**-13, "a bfloat16, rounded once, of float32 sums whose terms may cancel", "row"
    ),
}


def indexer_logits_blocks(
    q: Tensor,
    q_scales: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    block_tokens: int,
    out: Tensor,
) -> Tensor:
    """[T, B * block_tokens] float64, key by key; of `out` only the shape is looked at."""
    queries, factors = _values(q, q_scales), weights.cpu().double()
    values = _values(keys, key_scales).flatten(0, 1)  # [slots, 128]
    logits = torch.full(out.shape, -math.inf, dtype=torch.float64, device="cpu")
    for token, (first, count) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        columns, slots = [], []
        for block, (start, length) in enumerate(zip(first, count, strict=True)):
            for offset in range(min(length, block_tokens) if start >= 0 else 0):
                if start + offset < len(values):
                    columns.append(block * block_tokens + offset)
                    slots.append(start + offset)
        scores, _ = score(queries[token], factors[token], values[slots])
        logits[token, columns] = scores.masked_fill(scores.isnan(), -math.inf)
    return logits


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """[..., 128] float64 on the CPU of [..., 128] e4m3 or [..., 64] int8 and [...] int32."""
    numbers = codes.cpu().contiguous().view(torch.uint8)
    if codes.dtype == torch.float8_e4m3fn:
        values = e4m3_values(numbers)
    else:
        nibbles = torch.empty((*numbers.shape[:-1], INDEX_HEAD_SIZE), dtype=torch.int64, device="cpu")
        nibbles[..., 0::2], nibbles[..., 1::2] = numbers % 16, numbers // 16
        values = torch.tensor([*_E2M1, *(-size for size in _E2M1)], dtype=torch.float64, device="cpu")[nibbles]
    factors = torch.empty((*scales.shape, INDEX_HEAD_SIZE), dtype=torch.float64, device="cpu")
    for group in range(INDEX_HEAD_SIZE // _GROUP):
        byte = (scales.cpu().long() >> 8 * group) & 255
        factor = torch.where(byte == 255, math.nan, torch.exp2(byte.double() - 127))
        factors[..., group * _GROUP : (group + 1) * _GROUP] = factor.unsqueeze(-1)
    return values * factors


def findings(storage: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[Finding]:
    """out [T, N]."""

    def symptom(where: tuple[int, ...]) -> tuple[str, str]:
        values = float(got["out"][where]), float(want["out"][where])
        return f"the logit of column {where[1]} is {values[0]:g}, expected {values[1]:g}", f"row {where[0]}"

    yield close("out", got["out"].cpu().double(), want["out"], limit_of(TOLERANCES, storage, "out"), symptom=symptom)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerLogitsBlocksParams(Params):
    """One indexer_logits_blocks call.

    Attributes:
        form: "mxfp8" or "mxfp4". heads: H. tokens: T. blocks: B. block_tokens: keys of a block.
        pages: P and page, "1x300" for gathered keys.
        chosen: "prefix", ascending blocks of which the last one is short, then absent ones; "any", in any order, across
            pages; "edges", starts and lengths at the edges of int32 and of the keys.
        inputs, outputs: "packed"; "views" of wider tensors, and for pages those of a cache, whose scales lie behind the keys.
        absent: "none"; "nan_scale", every fifth key has scales that are NaN.
    """

    primitive = INDEXER_LOGITS_BLOCKS
    says = (
        "{form}! h{heads}! t{tokens}! n{blocks}! b{block_tokens}! p{pages}! {chosen}! in{inputs} out{outputs} absent_{absent}"
    )
    asks = "num_heads=heads"
    form: str = _MXFP8
    heads: int
    tokens: int = 6
    blocks: int = 5
    block_tokens: int = 8
    pages: str = "6x16"
    chosen: str = "prefix"
    inputs: str = "packed"
    outputs: str = "packed"
    absent: str = "none"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage = generator(seed), Stage(device)
        count, page = map(int, self.pages.split("x"))
        width, dtype = (INDEX_HEAD_SIZE, torch.float8_e4m3fn) if self.form == _MXFP8 else (INDEX_HEAD_SIZE // 2, torch.int8)

        def rows(*shape: int) -> tuple[Tensor, Tensor]:
            """Codes [*shape, width] as bytes, no NaN among them, and scales [*shape] of 2**-3 to 2**3."""
            codes = torch.randint(0, 256, (*shape, width), generator=g).to(torch.uint8)
            codes = codes.masked_fill((codes & 0x7F) == 0x7F, 0x30) if self.form == _MXFP8 else codes
            if self.form == _MXFP8:  # magnitudes of at most 1.875, as quantised numbers are small beside 448
                codes = torch.where(codes & 0x7F < 0x40, codes, codes & 0xBF)
            return codes, torch.randint(124, 131, (*shape, 4), generator=g).to(torch.uint8)

        q, q_scales = rows(self.tokens, self.heads)
        keys, key_scales = rows(count, page)
        if self.absent == "nan_scale":
            key_scales.view(-1, 4)[2::5, 1] = 255
        starts, lengths = self._chosen(g, count * page)
        weights = torch.randn(self.tokens, self.heads, generator=g).bfloat16()
        apart = self.inputs == "views"
        cache = torch.cat([keys.flatten(1), key_scales.flatten(1)], dim=1)  # [P, page * (width + 4)]
        cache = torch.cat([cache, cache.new_full((count, 64 if apart else 0), 0xFF)], dim=1)
        placed = stage.read("keys", cache)
        in_page = page * width
        arguments: dict[str, Any] = {
            "q": stage.read("q", q.view(dtype), strided=apart),
            "q_scales": stage.read("q_scales", q_scales.view(torch.int32).squeeze(-1), strided=apart),
            "weights": stage.read("weights", weights, strided=apart),
            "keys": placed[:, :in_page].unflatten(1, (page, width)).view(dtype),
            "key_scales": placed[:, in_page : in_page + 4 * page].view(torch.int32),
            "starts": stage.read("starts", starts, strided=apart),
            "lengths": stage.read("lengths", lengths, strided=apart),
        }
        columns = self.blocks * self.block_tokens
        out = stage.write("out", (self.tokens, columns), torch.bfloat16, strided=self.outputs == "views")
        own = {
            "q": q.view(dtype),
            "q_scales": q_scales.view(torch.int32).squeeze(-1),
            "weights": weights,
            "keys": keys.view(dtype),
            "key_scales": key_scales.view(torch.int32).squeeze(-1),
        }
        want = {
            "out": indexer_logits_blocks(
                **own, starts=starts, lengths=lengths, block_tokens=self.block_tokens, out=torch.empty(out.shape, device="cpu")
            )
        }
        keywords = {"block_tokens": self.block_tokens, "out": out}
        judge = partial(findings, "any", want=want)
        return Problem(stage, arguments, keywords, {"out": (tuple(out.shape), torch.bfloat16)}, judge)

    def _chosen(self, g: torch.Generator, num_slots: int) -> tuple[Tensor, Tensor]:
        """starts and lengths [T, B]."""
        shape, size = (self.tokens, self.blocks), self.block_tokens
        if self.chosen == "any":
            starts = torch.randint(0, num_slots, shape, generator=g)
            lengths = torch.randint(-1, size + 2, shape, generator=g)
        elif self.chosen == "edges":
            ends = torch.tensor([INT32_MIN, INT32_MAX, -1, num_slots - 1, num_slots, 0, INT32_MAX - 3])
            starts = ends[torch.randint(0, len(ends), shape, generator=g)]
            counts = torch.tensor([INT32_MAX, INT32_MIN, 0, 1, size])
            lengths = counts[torch.randint(0, len(counts), shape, generator=g)]
        else:
            starts = torch.arange(self.blocks).mul(2 * size).remainder(max(num_slots, 1)).expand(shape).clone()
            lengths = torch.full(shape, size)
            for token in range(self.tokens):
                lengths[token, token % self.blocks] = size - 3
                lengths[token, token % self.blocks + 1 :] = 0
        return starts.to(torch.int32), lengths.to(torch.int32)


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[IndexerLogitsBlocksParams]:
    """What a level asks of an implementation of indexer_logits_blocks."""
    axes: dict[str, list[Any]] = {
        "form": list(FORMS),
        "heads": heads(implementation, facts, level),
        "tokens": [6, 0, 1],
        "blocks": [5, 1, 40],
        "block_tokens": [8, 16],
        "pages": ["6x16", "1x300", "9x64"],
        "chosen": ["prefix", "any"],
        "inputs": ["packed", "views"],
        "outputs": ["packed", "views"],
        "run": ["once", "repeat"],
    }
    covered = IndexerLogitsBlocksParams.covering(implementation, facts, axes, strength=STRENGTH[level])
    yield from covered
    if not covered or level == "smoke":
        return
    for form in axes["form"]:
        base = IndexerLogitsBlocksParams(form=form, heads=axes["heads"][-1])
        yield replace(base, chosen="edges")
        yield replace(base, chosen="any", absent="nan_scale")
        yield replace(base, pages="0x16", chosen="edges")
        yield replace(base, heads=32, block_tokens=5, pages="7x24", chosen="any")
        if can_capture(implementation, facts):
            yield replace(base, run="graph")
        if can_hold_many(facts, level):
            yield replace(base, heads=axes["heads"][0], tokens=MANY_ROWS, blocks=1)


def _of_request(request: Request, name: str) -> IndexerLogitsBlocksParams:
    form = name if name in FORMS else _MXFP8
    return IndexerLogitsBlocksParams(form=form, heads=request.num_heads or 1, chosen="any")


def _variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    """Both number formats: a request does not state one."""
    yield from ((form, request) for form in FORMS)


PROBLEMS: Final = Problems(
    primitive=INDEXER_LOGITS_BLOCKS,
    oracle=indexer_logits_blocks,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("num_heads",),
    variants=_variants,
    rows=6,
)
