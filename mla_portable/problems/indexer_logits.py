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
from mla_portable.layouts import INDEX_HEAD_SIZE
from mla_portable.primitives import INDEXER_LOGITS
from mla_portable.problems.base import Params, Problems, one_variant
from mla_portable.problems.compare import Finding, Tolerance, close, limit_of
from mla_portable.problems.cover import covering
from mla_portable.problems.draw import PAIR_BLOCK, generator, paged, shuffled
from mla_portable.problems.exact import INT32_MIN
from mla_portable.problems.shapes import block_sizes, can_capture, heads
from mla_portable.problems.stage import Problem, Results, Stage

__all__ = ["PROBLEMS", "IndexerLogitsParams", "indexer_logits"]

_FEW: Final = 70
"""Tokens of context that are more than one block of 64."""
_GAP_BYTES: Final = 32
"""Between strided blocks: no whole row."""
TOLERANCES: Final = {
    ("any", "out"): Tolerance(
        1e-4, 1e-3, "float32 sums of exact products, over 128 channels and then over heads, whose terms may cancel", "row"
    )
}


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
    queries, factors = q.detach().cpu().double(), weights.detach().cpu().double()
    cache, table = index_cache.detach().cpu(), block_table.cpu()
    num_blocks, block_size, _ = cache.shape
    logits = torch.full(tuple(out.shape), -math.inf, dtype=torch.float64, device="cpu")
    starts = query_start_loc.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        last = min(max(length, 0), table.shape[1] * block_size) - 1  # position of the request's last token
        for token in range(max(starts[request], 0), min(starts[request + 1], logits.shape[0])):
            own = last - (starts[request + 1] - 1 - token)
            for column in range(-(-(own + 1) // block_size)):
                block = int(table[request, column])
                if not 0 <= block < num_blocks:
                    continue
                keys = cache[block].double()  # [block_size, 128]
                value = (factors[token][:, None] * (queries[token] @ keys.T).clamp(min=0)).sum(dim=0)
                begin = column * block_size
                end = min(begin + block_size, own + 1, logits.shape[1])
                if end > begin:
                    logits[token, begin:end] = value[: end - begin]
    return logits


def findings(storage: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[Finding]:
    """out [T, N]. want: "out", and "weights" [T, H], for what an error may come from."""
    out, expected = got["out"].cpu().double(), want["out"]

    def symptom(where: tuple[int, ...]) -> tuple[str, str]:
        bare = (expected != -math.inf) & (out < 0) & (want["weights"] >= 0).all(dim=1, keepdim=True)
        hint = " (below 0 though no weight is: it looks as if the ReLU were missing)" if bare.any() else ""
        values = f"the logit of position {where[1]} is {float(out[where]):g}, expected {float(expected[where]):g}"
        return values + hint, f"row {where[0]}"

    yield close("out", out, expected, limit_of(TOLERANCES, storage, "out"), symptom=symptom)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerLogitsParams(Params):
    """One indexer_logits call.

    Attributes:
        heads, block_size: H, of the index cache.
        batch: "decode", one token a request; "prefill", several, on and next to the borders of blocks; "overlong", more
            tokens than context, a length past the table and a negative one; "empty", requests without tokens or context;
            "none", no tokens at all; "published", one request of 4 tokens and no context, as in InfiniCore's test
            test/infinicore/ops/dsa.py; "ragged", that of a probe: weights of one sign in each row, three blocks.
        tail: tokens of no request after the last one's.
        starts: "zero", the first request starts at token 0; "late", two tokens of no request come before it; "outside", it
            starts at token -1, and the last one ends after the last token.
        table: "plain"; "holes", negative entries and blocks past the cache; "near", past it by little.
        width: of out: "exact", the longest context; "narrow", less; "wide", more than the table holds.
        inputs: "packed" or "views" of wider tensors; so are outputs. blocks: "packed"; "strided";
            "pair", two that lie apart, all of one request.
    """

    primitive = INDEXER_LOGITS
    says = "h{heads}! b{block_size}! {batch}! tail{tail} starts_{starts} table_{table} {width} in{inputs} out{outputs} {blocks}"
    asks = "num_heads=heads block_size"
    heads: int
    block_size: int
    batch: str = "prefill"
    tail: int = 0
    starts: str = "zero"
    table: str = "plain"
    width: str = "exact"
    inputs: str = "packed"
    outputs: str = "packed"
    blocks: str = "packed"

    def _batch(self, columns: int) -> list[tuple[int, int]]:
        """(query tokens, length) of each request."""
        block = self.block_size
        if self.blocks == "pair":
            return [(3, 2 * block - 1)]
        kinds = {
            "decode": [(1, 1), (1, block), (1, block + 1), (1, _FEW)],
            "prefill": [(3, 3), (2, block + 1), (5, block + 5), (1, _FEW)],
            "overlong": [(4, 2), (2, columns * block + 9), (1, -5), (2, INT32_MIN)],
            "empty": [(0, _FEW), (2, 0), (0, 0), (1, 1)],
            "none": [(0, 0), (0, _FEW)],
            "published": [(4, 4)],
            "ragged": [(3, 2 * block + min(3, block)), (1, 1)],
        }
        return kinds[self.batch]

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage = generator(seed), Stage(device)
        pair, longest = self.blocks == "pair", max(_FEW, self.block_size + 5)
        columns = {"pair": 2, "ragged": 3}.get("pair" if pair else self.batch, -(-longest // self.block_size))
        batch = self._batch(columns)
        if self.batch != "ragged":
            batch = [batch[i] for i in shuffled(len(batch), g).tolist()]
        if self.starts == "outside":  # requests of several tokens at both ends, so that parts of them are cut off
            *rest, large, largest = sorted(batch)
            batch = [large, *rest, largest]
        queries, lengths = ([each[i] for each in batch] for i in (0, 1))
        first, more = {"zero": (0, 0), "late": (2, 2), "outside": (-1, -2)}[self.starts]
        num_tokens = sum(queries) + self.tail + more
        owned = len(batch) * columns
        num_blocks = owned + (0 if pair else 2)
        table = shuffled(num_blocks, g)[:owned].view(len(batch), columns).to(torch.int32)
        gap = 0 if self.blocks == "packed" else _GAP_BYTES
        rows = paged(
            torch.bfloat16, INDEX_HEAD_SIZE, num_blocks, self.block_size, gap_bytes=gap
        ).view  # NaN until a token is stored
        for request, length in enumerate(lengths):
            position = torch.arange(min(max(length, 0), columns * self.block_size))
            keys = torch.randn(len(position), INDEX_HEAD_SIZE, generator=g).bfloat16()
            rows[table[request, position // self.block_size].long(), position % self.block_size] = keys
        if self.table == "near":
            table[0, 1], table[1, 1], table[1, 2] = -1, num_blocks, -1
        elif self.table == "holes":
            for i, bad in enumerate((-1, num_blocks, INT32_MIN, num_blocks + 114514)):
                table.view(-1)[i::7] = bad
        starts = torch.tensor([first, *queries]).cumsum(0).to(torch.int32)
        apart = self.inputs == "views"
        # bf16 numbers, so that an op which takes them so loses nothing
        weights = torch.randn(num_tokens, self.heads, generator=g).bfloat16().float()
        if self.batch == "ragged":  # logits of the first two tokens can only be negative without the ReLU
            weights[:2], weights[2] = weights[:2].abs(), -weights[2].abs()
        arguments = {
            "q": torch.randn(num_tokens, self.heads, INDEX_HEAD_SIZE, generator=g).bfloat16(),
            "weights": weights,
            "index_cache": rows,
            "query_start_loc": starts,
            "seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "block_table": table,
        }
        args = {
            name: stage.read(name, tensor, strided=apart and name in ("q", "weights", "block_table"))
            for name, tensor in arguments.items()
        }
        capacity = columns * self.block_size
        width = {"exact": capacity if self.batch == "ragged" else longest, "narrow": 3, "wide": capacity + 5}[self.width]
        out = stage.write("out", (num_tokens, width), torch.float32, strided=self.outputs == "views")
        want = {"out": indexer_logits(*arguments.values(), out=out), "weights": weights}

        def judge(results: Results, stage: Stage) -> Iterator[Finding]:
            yield from findings("any", results, want)

        return Problem(stage, args, {"out": out}, {"out": ((num_tokens, width), torch.float32)}, judge)


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[IndexerLogitsParams]:
    """What a level asks of an implementation of indexer_logits."""
    axes: dict[str, list[Any]] = {
        "heads": heads(implementation, facts, level),
        "block_size": block_sizes(implementation, facts, level),
        "batch": ["prefill", "decode", "overlong", "empty", "none"],
        "tail": [0, 2],
        "table": ["plain", "holes"],
        "width": ["exact", "narrow", "wide"],
        "inputs": ["packed", "views"],
        "outputs": ["packed", "views"],
        "blocks": ["packed", "strided"],
        "run": ["once", "repeat"],
    }
    if not all(axes.values()):
        return
    for choice in covering(axes, strength={"smoke": 1, "quick": 2, "full": 3}[level]):
        yield IndexerLogitsParams(**choice)
    base = IndexerLogitsParams(heads=axes["heads"][-1], block_size=axes["block_size"][-1])
    if level == "smoke":
        return
    yield from (replace(base, starts=starts) for starts in ("late", "outside"))
    if base.block_size >= PAIR_BLOCK:
        yield replace(base, blocks="pair")
    if can_capture(implementation, facts):
        yield replace(base, run="graph", table="holes", tail=2)
    yield IndexerLogitsParams(heads=64, block_size=64, batch="published")


def _of_request(request: Request, name: str) -> IndexerLogitsParams:
    return IndexerLogitsParams(
        heads=request.num_heads or 1, block_size=request.block_size or 1, batch="ragged", tail=1, table="near"
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
