# SPDX-License-Identifier: Apache-2.0
"""The cases of cache_write: every byte of the cache, its guards and its gaps is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import (
    E4M3_MAX,
    KV_LORA_RANK,
    LAYOUTS,
    SCALE_GROUP,
    CacheLayout,
    DeviceFacts,
    Implementation,
    Request,
)
from mla_portable.primitives import CACHE_WRITE
from mla_portable.reference import oracle
from mla_portable.tools.conformance.compare import Finding, field_of, same_bits
from mla_portable.tools.conformance.cover import Choice, covering
from mla_portable.tools.conformance.inputs import INT32_MAX, INT32_MIN, PAIR_BLOCK, generator, paged, shuffled, vast
from mla_portable.tools.conformance.params import Params, block_sizes, can_capture, can_hold_vast, storages
from mla_portable.tools.conformance.problem import Guarded, Problem, Stage

__all__ = ["CacheWriteParams", "cache_write_params"]

NUM_TOKENS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWriteParams(Params):
    """One cache_write call.

    Attributes:
        layout, scale_format, block_size: of the cache. dtype: of the tokens. tokens: T.
        skips: "none"; "some" negative slots; "corpus", negative and too large ones of every size.
        values: "plain"; "edges": zeros, signed zeros, a group's maximum on and next to a power of two, ties, extremes.
        inputs: "packed", or "views" of a wider projection. blocks: "packed"; "strided"; "pair", two that
            lie apart.
        scene: "" or "address".
    """

    primitive = CACHE_WRITE
    layout: str
    scale_format: str | None
    block_size: int
    dtype: torch.dtype = torch.bfloat16
    tokens: int = NUM_TOKENS
    skips: str = "none"
    values: str = "plain"
    inputs: str = "packed"
    blocks: str = "packed"
    scene: str = ""

    def words(self) -> list[str]:
        """See Params."""
        remarks = {
            "fp16": self.dtype == torch.float16,
            f"t{self.tokens}": self.tokens != NUM_TOKENS,
            f"skips_{self.skips}": self.skips != "none",
            self.values: self.values != "plain",
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
            rows=self.tokens,
            scale_format=self.scale_format,
            graph=self.run == "graph",
        )

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, layout = generator(seed), Stage(device), LAYOUTS[self.layout]
        width = layout.key_width
        values = _edges(self.tokens, width, g) if self.values == "edges" else torch.randn(self.tokens, width, generator=g) * 3
        kv_c, k_pe = values.to(self.dtype).split([layout.value_width, layout.rope_width], dim=-1)
        apart = self.inputs == "views"
        kv_c_placed = stage.read("kv_c", kv_c.contiguous(), strided=apart)
        k_pe_placed = stage.read("k_pe", k_pe.contiguous(), strided=apart)
        scale_format = self.scale_format or "pow2"
        if self.scene == "address":
            return self._vast(stage, layout, kv_c, k_pe, kv_c_placed, k_pe_placed)

        num_blocks = 2 if self.blocks == "pair" else max(3, -(-3 * NUM_TOKENS // self.block_size))
        cache = paged(layout, num_blocks, self.block_size, strided=self.blocks != "packed")
        num_slots = num_blocks * self.block_size
        slots = torch.cat([torch.tensor([0, num_slots - 1]), shuffled(num_slots - 2, g) + 1])[: self.tokens]
        slots = _skip(self.skips, slots, num_slots)[shuffled(self.tokens, g)]
        slots_placed = stage.read("slot_mapping", slots)
        written = stage.adopt("kv_cache", cache.storage, cache.view)
        want = cache.storage.clone()
        want_view = want.view(layout.dtype).as_strided(cache.view.shape, cache.view.stride(), cache.view.storage_offset())
        want_view.copy_(oracle.cache_write(kv_c, k_pe, cache.view, slots, scale_format=scale_format))
        first_row, row_bytes = self.block_size, layout.row_bytes  # the guard is one block

        def explain(where: tuple[int, ...]) -> str:
            row, byte = divmod(where[0], row_bytes)
            return f"{_name_row(row - first_row, cache.rows)}, {field_of(layout, byte)}"

        def call(bound: Callable[..., Any]) -> tuple[Tensor, ...]:
            bound(kv_c_placed, k_pe_placed, written, slots_placed, scale_format=scale_format)
            return ()

        def judge(results: tuple[Tensor, ...], writes: dict[str, Guarded]) -> Iterator[Finding]:
            yield same_bits("cache", writes["kv_cache"].storage.view(torch.uint8), want, explain=explain)

        return Problem(stage, call, judge)

    def _vast(
        self, stage: Stage, layout: CacheLayout, kv_c: Tensor, k_pe: Tensor, kv_c_placed: Tensor, k_pe_placed: Tensor
    ) -> Problem:
        """Slots on both sides of element 2**31; what is written there is compared, and the neighbours in between."""
        view, rows, slots = vast(layout, self.block_size, stage.device)
        targets = slots[:: len(slots) // self.tokens][: self.tokens].contiguous()
        scale_format = self.scale_format or "pow2"
        near = torch.cat([slots, targets.clamp(max=view.shape[0] * self.block_size - 2) + 1]).unique()
        near_rows = ((near // self.block_size).to(stage.device), (near % self.block_size).to(stage.device))
        rows[near_rows] = 0xFF
        targets_placed = stage.read("slot_mapping", targets)
        small = paged(layout, len(near), 1)
        want = oracle.cache_write(kv_c, k_pe, small.view, torch.searchsorted(near, targets), scale_format=scale_format)
        want_rows = want.view(torch.uint8).view(len(near), layout.row_bytes)

        def call(bound: Callable[..., Any]) -> tuple[Tensor, ...]:
            bound(kv_c_placed, k_pe_placed, view, targets_placed, scale_format=scale_format)
            return ()

        def judge(results: tuple[Tensor, ...], writes: dict[str, Guarded]) -> Iterator[Finding]:
            def explain(where: tuple[int, ...]) -> str:
                return f"slot {int(near[where[0]])}, {field_of(layout, where[1])}"

            yield same_bits("cache", rows[near_rows], want_rows, explain=explain)

        return Problem(stage, call, judge)


def _name_row(row: int, rows: Tensor) -> str:
    """Which part of the cache a row of its storage is."""
    num_blocks, block_size, row_bytes = rows.shape
    block, offset = divmod(row, rows.stride(0) // row_bytes)
    if row < 0 or block >= num_blocks:
        return "outside of the cache"
    return f"block {block}, offset {offset}" if offset < block_size else f"the gap after block {block}"


def _skip(skips: str, slots: Tensor, num_slots: int) -> Tensor:
    """Replace some slots by ones that must be skipped."""
    if skips == "none":
        return slots
    bad = [-1] if skips == "some" else [-1, INT32_MIN, num_slots, num_slots + 114514, INT32_MAX, 2**40, -(2**40)]
    slots = slots.clone()
    for i, value in enumerate(bad):
        slots[(2 + i) :: len(bad) + 2] = value
    return slots


def _edges(count: int, width: int, generator: torch.Generator) -> Tensor:
    """[count, width] float32 whose groups hold what rounding and scaling stumble over."""
    values = torch.randn(count, width, generator=generator)
    for i, group in enumerate(g for token in values[:, :KV_LORA_RANK].split(1) for g in token[0].split(SCALE_GROUP)):
        kind, exponent = i % 6, 2.0 ** (i % 11 - 7)
        if kind == 0:
            group.zero_()
            group[::2] = -0.0
        elif kind == 1:  # amax / 448 is a power of two: values that are e4m3 already, ties between them, none to clip
            group.copy_(torch.arange(SCALE_GROUP) * 3.5 * exponent)
            group[-1] = E4M3_MAX * exponent
        elif kind == 2:  # just above: the next power of two
            group.mul_(0.01)
            group[7] = -E4M3_MAX * exponent * (1 + 2**-7)
        elif kind == 3:  # too small for the least pow2 scale
            group.mul_(2.0**-12)
        elif kind == 4:  # one value drowns the others
            group.mul_(2.0**-8)
            group[64] = 30000.0
        else:
            group.copy_(torch.linspace(-1, 1, SCALE_GROUP) * exponent)
    return values


def cache_write_params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[CacheWriteParams]:
    """What a level asks of an implementation of cache_write."""
    axes: dict[str, list[Any]] = {
        "storage": storages(implementation),
        "block_size": block_sizes(implementation, facts, level),
        "values": ["plain", "edges"],
        "skips": ["none", "some", "corpus"],
        "dtype": [torch.bfloat16, torch.float16],
        "inputs": ["packed", "views"],
        "blocks": ["packed", "strided"],
        "run": ["once", "repeat"],
    }
    if not all(axes.values()):
        return

    def make(choice: Choice) -> CacheWriteParams:
        layout, scale_format = choice["storage"]
        return CacheWriteParams(layout=layout, scale_format=scale_format, **{k: v for k, v in choice.items() if k != "storage"})

    def allowed(choice: Choice) -> bool:
        layout, scale_format = choice.get("storage", (None, None))
        request = Request(CACHE_WRITE, facts, layout, block_size=choice.get("block_size"), scale_format=scale_format)
        return not any(True for _ in implementation.support.shape_reasons(request))

    strength = {"smoke": 1, "quick": 2, "full": 3}[level]
    for choice in covering(axes, strength=strength, allowed=allowed):
        yield make(choice)
    plain = {name: values[:1] for name, values in axes.items()} | {
        "storage": axes["storage"], "block_size": axes["block_size"][-1:],
    }  # fmt: skip
    for choice in covering(plain, strength=1, allowed=allowed):
        params = make(choice)
        yield replace(params, tokens=0)
        if level != "smoke" and params.block_size >= PAIR_BLOCK:
            yield replace(params, blocks="pair")
        if can_hold_vast(params.layout, facts, level):
            yield replace(params, scene="address")
        if level != "smoke" and can_capture(implementation, facts):
            yield replace(params, run="graph", skips="corpus")
