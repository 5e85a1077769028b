# SPDX-License-Identifier: Apache-2.0
"""The cases of indexer_logits: who sees which key, what an unseen one holds, and the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import INDEX_HEAD_SIZE, DeviceFacts, Implementation, Request
from mla_portable.primitives import INDEXER_LOGITS
from mla_portable.reference import oracle
from mla_portable.tools.conformance.compare import Finding, close, same_object
from mla_portable.tools.conformance.cover import covering
from mla_portable.tools.conformance.inputs import INT32_MIN, PAIR_BLOCK, generator, shuffled
from mla_portable.tools.conformance.params import Params, block_sizes, can_capture, heads
from mla_portable.tools.conformance.problem import Guarded, Problem, Stage, guarded
from mla_portable.tools.conformance.tolerances import tolerance

__all__ = ["IndexerLogitsParams", "indexer_logits_params"]

_FEW: Final = 70
"""Tokens of context that are more than one block of 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerLogitsParams(Params):
    """One indexer_logits call.

    Attributes:
        heads, block_size: H, of the index cache.
        batch: "decode", one token a request; "prefill", several, on and next to the borders of blocks; "overlong", more
            tokens than context, a length past the table and a negative one; "empty", requests without tokens or context;
            "none", no tokens at all; "published", that of `published`.
        tail: tokens of no request after the last one's.
        starts: "zero", the first request starts at token 0; "late", two tokens of no request come before it; "outside", it
            starts at token -1, and the last one ends after the last token.
        table: "plain"; "holes", negative entries and blocks past the cache.
        width: of out: "exact", the longest context; "narrow", less; "wide", more than the table holds.
        inputs: "packed" or "views" of wider tensors; so are outputs. blocks: "packed"; "strided";
            "pair", two that lie apart, all of one request.
    """

    primitive = INDEXER_LOGITS
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

    def words(self) -> list[str]:
        """See Params."""
        remarks = {
            self.batch: True,
            f"tail{self.tail}": self.tail > 0,
            f"starts_{self.starts}": self.starts != "zero",
            f"table_{self.table}": self.table != "plain",
            self.width: self.width != "exact",
            "inviews": self.inputs == "views",
            "outviews": self.outputs == "views",
            self.blocks: self.blocks != "packed",
            self.run: self.run != "once",
        }
        return [f"h{self.heads}", f"b{self.block_size}", *(word for word, said in remarks.items() if said)]

    def request(self, device: DeviceFacts) -> Request:
        """See Params."""
        return Request(
            primitive=self.primitive,
            device=device,
            num_heads=self.heads,
            block_size=self.block_size,
            graph=self.run == "graph",
        )

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
        }
        return kinds[self.batch]

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage = generator(seed), Stage(device)
        pair = self.blocks == "pair"
        columns = 2 if pair else -(-(max(_FEW, self.block_size + 5)) // self.block_size)
        batch = self._batch(columns)
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
        length_of_block, cpu = self.block_size * INDEX_HEAD_SIZE, torch.device("cpu")
        cache = guarded((num_blocks, length_of_block), torch.bfloat16, cpu, strided=self.blocks != "packed").view
        rows = cache.unflatten(1, (self.block_size, INDEX_HEAD_SIZE))  # NaN until a token is stored
        for request, length in enumerate(lengths):
            position = torch.arange(min(max(length, 0), columns * self.block_size))
            keys = torch.randn(len(position), INDEX_HEAD_SIZE, generator=g).bfloat16()
            rows[table[request, position // self.block_size].long(), position % self.block_size] = keys
        if self.table == "holes":
            for i, bad in enumerate((-1, num_blocks, INT32_MIN, num_blocks + 114514)):
                table.view(-1)[i::7] = bad
        starts = torch.tensor([first, *queries]).cumsum(0).to(torch.int32)
        apart = self.inputs == "views"
        # bf16 numbers, so that an op which takes them so loses nothing
        weights = torch.randn(num_tokens, self.heads, generator=g).bfloat16().float()
        arguments = {
            "q": torch.randn(num_tokens, self.heads, INDEX_HEAD_SIZE, generator=g).bfloat16(),
            "weights": weights,
            "index_cache": rows,
            "query_start_loc": starts,
            "seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "block_table": table,
        }
        placed = [
            stage.read(name, tensor, strided=apart and name in ("q", "weights", "block_table"))
            for name, tensor in arguments.items()
        ]
        capacity = columns * self.block_size
        width = {"exact": max(_FEW, self.block_size + 5), "narrow": 3, "wide": capacity + 5}[self.width]
        out = stage.write("out", (num_tokens, width), torch.float32, strided=self.outputs == "views")
        want = oracle.indexer_logits(*arguments.values(), out=out)

        def call(bound: Callable[..., Any]) -> tuple[Tensor, ...]:
            return (bound(*placed, out=out),)

        def judge(results: tuple[Tensor, ...], writes: dict[str, Guarded]) -> Iterator[Finding]:
            yield same_object("out identity", results[0], writes["out"].view)
            yield writes["out"].outside("out")
            yield close("out", writes["out"].view, want, tolerance(self.primitive, "any", "out"))

        return Problem(stage, call, judge)


def indexer_logits_params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[IndexerLogitsParams]:
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
