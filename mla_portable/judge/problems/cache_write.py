# SPDX-License-Identifier: Apache-2.0
"""How cache_write is tried and judged: every byte of the cache, its guards and its gaps is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request, Support
from mla_portable.judge.problems import draw
from mla_portable.judge.problems.base import STRENGTH, Params, Problems
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import BITS, Finding, Symptom, field_of, same_bits
from mla_portable.judge.problems.draw import (
    PAIR_BLOCK,
    SLAB_LAYERS,
    generator,
    guard_rows,
    near,
    paged,
    paged_cache,
    shuffled,
    vast,
)
from mla_portable.judge.problems.exact import (
    INT32_MAX,
    INT32_MIN,
    blocks_of,
    copied,
    float32,
    fp8_row,
    plugin_layout,
    put_row,
    put_token,
    v4_row,
)
from mla_portable.judge.problems.shapes import (
    block_sizes,
    can_capture,
    can_hold_vast,
    plain_axes,
    scales_of,
    storage_asked,
    storages,
)
from mla_portable.judge.problems.stage import Judge, Problem, Results, Stage
from mla_portable.layouts import E4M3_MAX, FP8_DS_MLA, FP8_V4, KV_LORA_RANK, LAYOUTS, SCALE_GROUP, Cache, CacheLayout
from mla_portable.primitives import CACHE_WRITE

W = TypeVar("W", bound="WriteParams")
_Write = Callable[[Cache, Tensor], Any]
"""The oracle, given the tokens: (cache, slots) -> the cache as it must be."""

NUM_TOKENS: Final = 12
_JUDGED_TOKENS: Final = 64
"""Tokens of a timed write that the oracle judges."""


def cache_write(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Cache,
    slot_mapping: Tensor,
    *,
    scale_format: str = "pow2",
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> Any:
    """The cache [blocks, block_size, width], contiguous, as it must be after the write; `kv_cache` is left alone."""
    latent, rope = kv_c.cpu().double(), k_pe.cpu().double()
    if kv_scale is not None:  # a quotient of float32 numbers, rounded to float32
        latent, rope = (float32(each / kv_scale.cpu().double()) for each in (latent, rope))
    cache, own, (blocks, block_size) = copied(kv_cache), plugin_layout(kv_layout), blocks_of(kv_cache)
    for token, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < blocks * block_size:
            continue
        if own is not None:
            put_token(cache, slot, latent[token], rope[token], scale_format, own)
            continue
        if cache.dtype == torch.bfloat16:
            row = torch.cat([latent[token], rope[token]]).to(torch.bfloat16)
        elif cache.shape[2] == FP8_V4.row_width:
            row = v4_row(latent[token])
        else:
            row = fp8_row(latent[token], rope[token], scale_format)
        put_row(cache, slot, row)
    return cache


def findings(
    storage: str, got: dict[str, Tensor], want: dict[str, Tensor], *, symptom: Symptom | None = None
) -> Iterator[Finding]:
    """Caches, their storages or some of their rows, byte by byte."""
    yield same_bits("cache", got["cache"], want["cache"], symptom=symptom)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteParams(Params):
    """One call that writes tokens to a paged cache: of cache_write or indexer_cache_write.

    Attributes:
        kv, scale_format, block_size: layout of the cache. dtype: of the tokens. tokens: T.
        skips: "none"; "some" negative slots; "corpus", negative and too large ones of every size; "near", by little.
        values: "plain"; "edges": zeros, signed zeros, a group's maximum on and next to a power of two, ties, extremes;
            "zero": the first group of a token that is written is 0.
        inputs: "packed", or "views" of a wider projection. blocks: "packed"; "strided", by whole rows; "odd", by a few bytes;
            "pair", two that lie apart; "address", of a cache of more than 2**31 elements; "slab", of a layer of a buffer of all
            layers, of more than 2**32.
    """

    names: ClassVar[tuple[str, ...]]
    """The arguments but the slots: latent, rotary part where there is one, cache."""
    further: ClassVar[tuple[str, ...]] = ()
    """Kinds of `blocks` that get a case each where they are possible."""
    says = "{kv}! {scale_format} b{block_size}! {dtype} t{tokens} skips_{skips} {values} in{inputs} {blocks}"
    asks = "kv_layout=kv block_size rows=tokens scale_format"
    kv: str
    scale_format: str | None
    block_size: int
    dtype: torch.dtype = torch.bfloat16
    tokens: int = NUM_TOKENS
    skips: str = "none"
    values: str = "plain"
    inputs: str = "packed"
    blocks: str = "packed"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, layout = generator(seed), Stage(device), LAYOUTS[self.kv]
        width, scale_format = layout.key_width, self.scale_format or "pow2"
        values = edges(self.tokens, width, g) if self.values == "edges" else torch.randn(self.tokens, width, generator=g) * 3
        values = values.to(self.dtype)
        far = self.blocks in ("address", "slab")
        num_blocks = 2 if self.blocks == "pair" else max(3, -(-3 * NUM_TOKENS // self.block_size))
        slots = torch.empty(0).long() if far else self._slots(num_blocks * self.block_size, g)
        if self.values == "zero":
            written = (slots >= 0) & (slots < num_blocks * self.block_size)
            values[written.nonzero()[:1, 0], :SCALE_GROUP] = 0
        parts = values.split([layout.value_width, layout.rope_width], dim=-1)
        tokens = {name: part.contiguous() for name, part in zip(self.names[:-1], parts, strict=False)}
        args: dict[str, Any] = {name: stage.read(name, part, strided=self.inputs == "views") for name, part in tokens.items()}
        write = partial(self.primitive.problems.oracle, *tokens.values(), scale_format=scale_format, kv_layout=self.kv)
        keywords: dict[str, Any] = {"scale_format": scale_format}
        if layout.tensor_scale:
            scale = draw.tensor_scale()
            keywords["kv_scale"], write = stage.read("kv_scale", scale), partial(write, kv_scale=scale)
        if far:
            view, slots, judge = self._far(layout, stage, write)
        else:
            view, judge = self._near(layout, num_blocks, slots, stage, write)
        args |= {self.names[-1]: view, "slot_mapping": stage.read("slot_mapping", slots)}
        return Problem(stage, args, keywords, {}, judge)

    def _slots(self, num_slots: int, g: torch.Generator) -> Tensor:
        """[T] int64, some of them to be skipped."""
        slots = torch.cat([torch.tensor([0, num_slots - 1]), shuffled(num_slots - 2, g) + 1])[: self.tokens]
        if self.skips == "near":  # what wraps around meets a slot that nobody writes
            slots = shuffled(num_slots - 4, g)[: self.tokens] + 2
        return skip(self.skips, slots, num_slots)[shuffled(self.tokens, g)]

    def _near(self, layout: CacheLayout, num_blocks: int, slots: Tensor, stage: Stage, write: _Write) -> tuple[Cache, Judge]:
        """A small cache, all of whose memory is compared."""
        if layout.tensors:
            return self._near_tensors(layout, num_blocks, slots, stage, write)
        gap = {"packed": 0, "odd": layout.alignment}.get(self.blocks, 3 * layout.row_bytes)
        cache = paged(layout.dtype, layout.row_width, num_blocks, self.block_size, gap_bytes=gap)
        want = cache.storage.clone()
        want_view = want.view(layout.dtype).as_strided(cache.view.shape, cache.view.stride(), cache.view.storage_offset())
        want_view.copy_(write(cache.view, slots))

        def judge(results: Results) -> Iterator[Finding]:
            got = results[self.names[-1]].view(torch.uint8)

            def symptom(where: tuple[int, ...]) -> tuple[str, str]:
                row, byte = divmod(where[0], layout.row_bytes)
                row -= guard_rows(self.block_size)
                field, name = field_of(layout, byte), _name_row(row, cache.rows)
                if name is None:
                    return f"byte {byte} outside the cache was written", f"{field}, a slot that is negative or past the cache"
                return f"byte {byte} of {name} is {int(got[where])}, expected {int(want[where])}", field

            known = None if layout.apart_bytes else symptom  # of rows whose bytes lie together
            yield from findings("any", {"cache": got}, {"cache": want}, symptom=known)

        return stage.adopt(self.names[-1], cache.storage, cache.view), judge

    def _near_tensors(
        self, layout: CacheLayout, num_blocks: int, slots: Tensor, stage: Stage, write: _Write
    ) -> tuple[Cache, Judge]:
        """Likewise of a cache in several tensors."""
        rows = {"packed": 0, "odd": 0}.get(self.blocks, 3)
        made = [
            paged(
                each.dtype,
                each.width,
                num_blocks,
                self.block_size,
                gap_bytes=rows * each.width * each.dtype.itemsize
                or (max(layout.alignment, each.dtype.itemsize) if self.blocks == "odd" else 0),
            )
            for each in layout.tensors
        ]
        wanted = [each.storage.clone() for each in made]
        for each, want, values in zip(made, wanted, write(tuple(each.view for each in made), slots), strict=True):
            view = want.view(each.view.dtype)
            view.as_strided(each.view.shape, each.view.stride(), each.view.storage_offset()).copy_(values)
        names = [f"{self.names[-1]}[{at}]" for at in range(len(made))]

        def judge(results: Results) -> Iterator[Finding]:
            for name, want in zip(names, wanted, strict=True):
                yield from findings("any", {"cache": results[name].view(torch.uint8)}, {"cache": want})

        placed = zip(names, made, strict=True)
        return tuple(stage.adopt(name, each.storage, each.view) for name, each in placed), judge

    def _far(self, layout: CacheLayout, stage: Stage, write: _Write) -> tuple[Tensor, Tensor, Judge]:
        """The slots that `vast` names; what is written there is compared, and the neighbours in between."""
        view, rows, slots = vast(layout, self.block_size, stage.device, layers=SLAB_LAYERS if self.blocks == "slab" else 0)
        targets = slots[:: len(slots) // self.tokens][: self.tokens].contiguous()
        beside = torch.cat([slots, targets.clamp(max=view.shape[0] * self.block_size - 2) + 1]).unique()
        draw.put_rows(layout, rows, beside, draw.poison(layout).expand(len(beside), -1))
        small = paged_cache(layout, -(-len(beside) // self.block_size), self.block_size)
        written = write(small.view, torch.searchsorted(beside, targets)).view(torch.uint8)
        want = draw.taken_rows(layout, written, torch.arange(len(beside)))

        def symptom(where: tuple[int, ...]) -> tuple[str, str]:
            return field_of(layout, where[1]), f"slot {int(beside[where[0]])}"

        def judge(results: Results) -> Iterator[Finding]:
            got = draw.taken_rows(layout, rows, beside)
            yield from findings("any", {"cache": got}, {"cache": want}, symptom=symptom)

        return view, targets, judge


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWriteParams(WriteParams):
    """One cache_write call."""

    primitive = CACHE_WRITE
    names = ("kv_c", "k_pe", "kv_cache")
    further = ("odd",)


def _name_row(row: int, rows: Tensor) -> str | None:
    """Which part of the cache a row of its storage is; None outside of it."""
    num_blocks, block_size, row_bytes = rows.shape
    block, offset = divmod(row, rows.stride(0) // row_bytes)
    if row < 0 or block >= num_blocks:
        return None
    return f"block {block}, offset {offset}" if offset < block_size else f"the gap after block {block}"


def skip(skips: str, slots: Tensor, num_slots: int) -> Tensor:
    """Replace some slots by ones that must be skipped."""
    if skips == "none":
        return slots
    every = [-1, INT32_MIN, num_slots, num_slots + 114514, INT32_MAX, 2**40, -(2**40), 2**63 - 1, -(2**63)]
    bad = {"some": [-1], "near": list(near(num_slots)), "corpus": every}[skips]
    slots = slots.clone()
    for i, value in enumerate(bad):
        slots[(2 + i) :: len(bad) + 2] = value
    return slots


def edges(count: int, width: int, generator: torch.Generator) -> Tensor:
    """[count, width] float32 whose groups hold what rounding and scaling stumble over."""
    values = torch.randn(count, width, generator=generator)
    for i, group in enumerate(g for token in values[:, :KV_LORA_RANK].split(1) for g in token[0].split(SCALE_GROUP)):
        kind, exponent = i % 6, 2.0 ** (i % 11 - 7)
        if kind == 0:
            group.zero_()
            group[::2] = -0.0
        elif kind == 1:  # amax / 448 is a power of two: values that are e4m3 already, ties between them, none to clip
            group.copy_(torch.arange(len(group)) * 3.5 * exponent)
            group[-1] = E4M3_MAX * exponent
        elif kind == 2:  # just above: the next power of two
            group.mul_(0.01)
            group[7] = -E4M3_MAX * exponent * (1 + 2**-7)
        elif kind == 3:  # too small for the least pow2 scale
            group.mul_(2.0**-12)
        elif kind == 4:  # one value drowns the others
            group.mul_(2.0**-8)
            group[len(group) // 2] = 30000.0
        else:
            group.copy_(torch.linspace(-1, 1, len(group)) * exponent)
    return values


def write_params(
    kind: type[W], implementation: Implementation, facts: DeviceFacts, level: str, *, values: list[str]
) -> Iterator[W]:
    """What a level asks of an implementation that writes a cache."""
    axes: dict[str, list[Any]] = {
        "storage": storages(implementation),
        "block_size": block_sizes(implementation, facts, level),
        "values": values,
        "skips": ["none", "some", "corpus"],
        "dtype": [torch.bfloat16, torch.float16],
        "inputs": ["packed", "views"],
        "blocks": ["packed", "strided"],
        "run": ["once", "repeat"],
    }
    yield from kind.covering(implementation, facts, axes, strength=STRENGTH[level])
    support = implementation.support
    for params in kind.covering(implementation, facts, plain_axes(axes), strength=1):
        yield replace(params, tokens=0)
        if level == "smoke":
            continue
        if params.block_size >= PAIR_BLOCK:
            yield replace(params, blocks="pair")
        if "odd" in kind.further and not support.needs_whole_rows and support.cache_alignment == 1:
            yield replace(params, blocks="odd")
        if can_hold_vast(params.kv, facts, level):
            yield replace(params, blocks="address")
        if can_hold_vast(params.kv, facts, level, slabs=1):
            yield replace(params, blocks="slab")
        if can_capture(implementation, facts):
            yield replace(params, run="graph", skips="corpus")


def write_variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    """What a probe writes: every scale format that is declared."""
    layout = None if request.kv_layout is None else LAYOUTS[request.kv_layout]
    if layout is not None and not layout.scale_formats:
        yield "skip", request
    else:
        for scale_format in support.scale_formats if layout is None else scales_of(support, layout):
            yield f"skip, {scale_format} scales", request.but(scale_format=scale_format)


def write_of_request(kind: type[W], usual: CacheLayout, request: Request, name: str) -> W:
    """What a probe writes: slots that are invalid by little, a group of zeros."""
    storage = storage_asked(request, usual, "pow2")
    return kind(**storage, block_size=request.block_size or 16, skips="near", values="zero")


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    block_size = workshop.block_size
    layout, tokens = LAYOUTS[case.kv_layout or FP8_DS_MLA.name], case.rows
    blocks = -(-tokens // block_size)
    cached = workshop.empty(blocks, block_size, layout.row_width, dtype=layout.dtype)
    kv_c, k_pe = workshop.normal(tokens, layout.value_width), workshop.normal(tokens, layout.rope_width)
    slots = workshop.permutation(blocks * block_size)[:tokens]
    judged = spread(tokens, _JUDGED_TOKENS, workshop.device)

    def judge(results: Results) -> Iterator[Finding]:
        count = judged.shape[0]
        blank = torch.zeros(count, 1, layout.row_width, dtype=layout.dtype)
        want = cache_write(
            kv_c[judged], k_pe[judged], blank, torch.arange(count), scale_format=case.scale_format, kv_layout=layout.name
        )
        got = draw.taken_rows(layout, results["cache"], slots[judged]).cpu()
        yield from findings(case.storage, {"cache": got}, {"cache": want[:, 0]})

    arguments = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": cached, "slot_mapping": slots, "scale_format": case.scale_format}
    request = workshop.request(case, block_size=block_size)
    moved = sum(each.nbytes for each in (kv_c, k_pe, slots)) + tokens * layout.row_bytes
    return BenchProblem(case, request, arguments, 4, {"cache": cached}, moved, 0, judge)


PROBLEMS: Final = Problems(
    primitive=CACHE_WRITE,
    oracle=cache_write,
    tolerances={("any", "cache"): BITS},
    findings=findings,
    params=partial(write_params, CacheWriteParams, values=["plain", "edges"]),
    of_request=partial(write_of_request, CacheWriteParams, FP8_DS_MLA),
    sizes=("block_size",),
    variants=write_variants,
    bench=Bench(rows=(16, 128, 1_024, 4_096), layouts=("fp8_ds_mla",), make=_make, shape=lambda case: f"T {case.rows}"),
)
