# SPDX-License-Identifier: Apache-2.0
"""The cases of gather_upconvert: values of the rows that requests own, and that no other row changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_portable.contracts import (
    LAYOUTS,
    DeviceFacts,
    Implementation,
    Request,
)
from mla_portable.primitives import GATHER_UPCONVERT
from mla_portable.reference import oracle
from mla_portable.tools.conformance.compare import Finding, close, same_bits, same_object
from mla_portable.tools.conformance.cover import Choice, covering
from mla_portable.tools.conformance.inputs import INT32_MIN, PAIR_BLOCK, cached_rows, generator, paged, shuffled, vast
from mla_portable.tools.conformance.params import Params, block_sizes, can_capture, can_hold_vast, storages
from mla_portable.tools.conformance.problem import Guarded, Problem, Stage
from mla_portable.tools.conformance.tolerances import tolerance

__all__ = ["GatherUpconvertParams", "gather_upconvert_params"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherUpconvertParams(Params):
    """One gather_upconvert call.

    Attributes:
        layout, scale_format, block_size: of the cache.
        lens: "borders", lengths on and next to those of blocks, an empty request between them; "long", one request of
            many blocks; "empty", requests without tokens; "none", no request at all.
        table: "plain"; "holes", negative entries and blocks past the cache, whose tokens become rows of zeros.
        placing: "tight", requests one after the other; "gaps", in another order with unowned rows between; "short", the
            last request runs past the workspace.
        inputs: "packed", or "views" of wider tables. blocks: "packed"; "strided"; "pair", two that lie
            apart, all of one request. scene: "" or "address".
    """

    primitive = GATHER_UPCONVERT
    layout: str
    scale_format: str | None
    block_size: int
    lens: str = "borders"
    table: str = "plain"
    placing: str = "tight"
    inputs: str = "packed"
    blocks: str = "packed"
    scene: str = ""

    def words(self) -> list[str]:
        """See Params."""
        remarks = {
            f"lens_{self.lens}": True,
            f"table_{self.table}": self.table != "plain",
            self.placing: self.placing != "tight",
            "inviews": self.inputs == "views",
            self.blocks: self.blocks != "packed",
            self.scene: bool(self.scene),
            self.run: self.run != "once",
        }
        kv = [word for word in (self.layout, self.scale_format) if word]
        return [*kv, f"b{self.block_size}", *(word for word, said in remarks.items() if said)]

    def request(self, device: DeviceFacts) -> Request:
        """See Params."""
        return Request(
            primitive=self.primitive,
            device=device,
            kv_layout=self.layout,
            block_size=self.block_size,
            scale_format=self.scale_format,
            graph=self.run == "graph",
        )

    def _lengths(self) -> list[int]:
        block = self.block_size
        if self.blocks == "pair":
            return [2 * block - 1]
        kinds = {
            "borders": [1, block, 0, block + 1, 2 * block - 1, 2 * block + 3],
            "long": [3 * block + 37],
            "empty": [0, 0, 0],
            "none": [],
        }
        return kinds[self.lens]

    def _starts(self, lens: list[int]) -> tuple[list[int], int]:
        """First rows of the requests, and W."""
        order = list(range(len(lens)))
        gap = 0
        if self.placing == "gaps":
            order, gap = order[::-1], 3
        starts, row = [0] * len(lens), gap
        for i in order:
            starts[i] = row
            row += lens[i] + gap
        return starts, max(1, row - sum(lens) // 3 if self.placing == "short" else row)

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, layout = generator(seed), Stage(device), LAYOUTS[self.layout]
        kinds = self._lengths()
        lens = [kinds[i] for i in shuffled(len(kinds), g).tolist()]
        starts, num_rows = self._starts(lens)
        more_columns, more_blocks = (0, 0) if self.blocks == "pair" else (1, 3)
        columns = max([-(-n // self.block_size) for n in lens], default=0) + more_columns
        owned = len(lens) * columns
        num_blocks = owned + more_blocks
        blocks = shuffled(num_blocks, g)[:owned]
        table = blocks.view(len(lens), columns).to(torch.int32)
        block_range = torch.arange(self.block_size)
        slots = (blocks[:, None] * self.block_size + block_range).flatten()
        tokens = cached_rows(len(slots), layout, self.scale_format, g)
        cache = paged(layout, num_blocks, self.block_size, strided=self.blocks != "packed")
        cache.put(slots, tokens)
        original, table_original = cache.view, table
        if self.scene == "address":
            kv_placed, device_rows, far = vast(layout, self.block_size, device)
            far_blocks = (far // self.block_size).unique()
            picks = torch.arange(owned) % len(far_blocks)
            table = far_blocks[picks].view(len(lens), columns).to(torch.int32)
            table_original = blocks[picks].view(len(lens), columns).to(torch.int32)
            device_rows[far_blocks.to(device)] = cache.rows[blocks[: len(far_blocks)]].to(device)
        else:
            kv_placed = stage.read("kv_cache", original)
        if self.table == "holes":
            for i, bad in enumerate((-1, num_blocks, INT32_MIN, num_blocks + 114514)):
                table.view(-1)[i::7] = bad
            table_original = table
        table_placed = stage.read("block_table", table, strided=self.inputs == "views")
        lens_placed = stage.read("seq_lens", torch.tensor(lens, dtype=torch.int32))
        starts_placed = stage.read("workspace_starts", torch.tensor(starts, dtype=torch.int32))
        out = stage.write("out", (num_rows, layout.key_width), torch.bfloat16)
        want = oracle.gather_upconvert(
            original,
            table_original,
            torch.tensor(lens, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            out=stage.writes["out"].view.cpu(),
        )
        is_owned = torch.zeros(num_rows, dtype=torch.bool)
        for start, length in zip(starts, lens, strict=True):
            is_owned[start : start + length] = True

        def call(bound: Callable[..., Any]) -> tuple[Tensor, ...]:
            return (bound(kv_placed, table_placed, lens_placed, starts_placed, out=out),)

        def judge(results: tuple[Tensor, ...], writes: dict[str, Guarded]) -> Iterator[Finding]:
            yield same_object("out identity", results[0], writes["out"].view)
            yield writes["out"].outside("out")
            got, width = writes["out"].view.cpu(), layout.value_width
            yield same_bits("rows that no request owns", got[~is_owned], want[~is_owned])
            yield same_bits("rope", got[is_owned, width:], want[is_owned, width:])
            latent, expected = got[is_owned, :width], want[is_owned, :width]
            limit = tolerance(self.primitive, self.scale_format or "bf16", "latent")
            yield same_bits("latent", latent, expected) if limit.exact else close("latent", latent, expected, limit)

        return Problem(stage, call, judge)


def gather_upconvert_params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[GatherUpconvertParams]:
    """What a level asks of an implementation of gather_upconvert."""
    axes: dict[str, list[Any]] = {
        "storage": storages(implementation),
        "block_size": block_sizes(implementation, facts, level),
        "lens": ["borders", "long", "empty", "none"],
        "table": ["plain", "holes"],
        "placing": ["tight", "gaps", "short"],
        "inputs": ["packed", "views"],
        "blocks": ["packed", "strided"],
        "run": ["once", "repeat"],
    }
    if not all(axes.values()):
        return

    def make(choice: Choice) -> GatherUpconvertParams:
        layout, scale_format = choice["storage"]
        rest = {name: value for name, value in choice.items() if name != "storage"}
        return GatherUpconvertParams(layout=layout, scale_format=scale_format, **rest)

    def allowed(choice: Choice) -> bool:
        if choice.get("lens") in ("empty", "none") and choice.get("placing") == "short":
            return False
        layout, scale_format = choice.get("storage", (None, None))
        request = Request(GATHER_UPCONVERT, facts, layout, block_size=choice.get("block_size"), scale_format=scale_format)
        return not any(True for _ in implementation.support.shape_reasons(request))

    strength = {"smoke": 1, "quick": 2, "full": 3}[level]
    for choice in covering(axes, strength=strength, allowed=allowed):
        yield make(choice)
    if level == "smoke":
        return
    plain = {name: values[:1] for name, values in axes.items()} | {
        "storage": axes["storage"], "block_size": axes["block_size"][-1:],
    }  # fmt: skip
    for choice in covering(plain, strength=1, allowed=allowed):
        params = make(choice)
        if params.block_size >= PAIR_BLOCK:
            yield replace(params, blocks="pair")
        if can_hold_vast(params.layout, facts, level):
            yield replace(params, scene="address")
        if can_capture(implementation, facts):
            yield replace(params, run="graph", placing="gaps", table="holes")
