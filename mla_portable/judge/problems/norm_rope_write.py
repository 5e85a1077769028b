# SPDX-License-Identifier: Apache-2.0
"""How norm_rope_write is tried and judged: its results by value, and every byte of both caches, guards and gaps included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request, Support
from mla_portable.judge.problems import draw
from mla_portable.judge.problems.base import STRENGTH, Params, Problems
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.cache_write import cache_write, skip
from mla_portable.judge.problems.compare import BITS, Finding, Tolerance, limit_of, same_bits
from mla_portable.judge.problems.draw import generator, paged_cache, shuffled
from mla_portable.judge.problems.exact import plugin_layout
from mla_portable.judge.problems.indexer_cache_write import indexer_cache_write
from mla_portable.judge.problems.rotary import (
    NEAR,
    NEAR_BF16,
    ROUNDED,
    Exact,
    angles,
    close_rounded,
    close_rows,
    drawn_positions,
    drawn_tokens,
    layer_norm,
    rms_norm,
    rotated,
    table_of,
)
from mla_portable.judge.problems.shapes import (
    MANY_ROWS,
    block_sizes,
    can_capture,
    can_hold_many,
    plain_axes,
    storage_asked,
    storages,
)
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.layouts import FP8_DS_MLA, INDEX, INDEX_FP8, INDEX_HEAD_SIZE, LAYOUTS, Cache, layout_names
from mla_portable.primitives import NORM_ROPE_WRITE

TOLERANCES: Final = {
    ("any", "q_out"): ROUNDED,
    ("any", "latent_out"): ROUNDED,
    ("any", "k_rope_out"): ROUNDED,
    ("any", "kv_cache"): BITS,
    ("any", "index_cache"): BITS,
    ("bf16", "kv_cache next to it"): NEAR_BF16,
    ("any", "kv_cache next to it"): NEAR,
    ("bf16", "index_cache next to it"): NEAR_BF16,
    ("any", "index_cache next to it"): NEAR,
}
NUM_TOKENS: Final = 9
_TABLE: Final = 48
"""Positions of the table of cosines and sines."""
_EPS: Final = 1e-6
_INDEX_EPS: Final = 1e-5
"""Another one, so that neither is taken for the other."""
_ROPE: Final = 64
_JUDGED_TOKENS: Final = 16


class Wanted(NamedTuple):
    """Results before the last rounding, None where the call has no such part: of q_a, of the latent, of its rotary part, of the
    indexer's key. certain_key: of each token, whether the norm of its indexer's key is rounded as here."""

    q: Exact | None = None
    latent: Exact | None = None
    rope: Exact | None = None
    key: Exact | None = None
    certain_key: Tensor | None = None


def norm_rope_write(
    q_a: Tensor | None,
    latent: Tensor | None,
    index_key: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor | None,
    *,
    q_norm: Tensor | None,
    kv_norm: Tensor | None,
    index_norm: tuple[Tensor, Tensor] | None = None,
    eps: float,
    index_eps: float | None = None,
    rope_style: str = "interleaved",
    index_rope_style: str = "neox",
    index_rope_at: str = "first",
    **written: Any,
) -> Wanted:
    """What is written, in float64; `written`, the caches and outputs themselves, is left alone."""
    q = rope = normed = key = certain = None
    cos, sin = (None, None) if cos_sin is None else angles(cos_sin.cpu(), positions.cpu())
    if q_a is not None and q_norm is not None:
        q = rms_norm(q_a, q_norm, eps)
    if latent is not None and kv_norm is not None:
        width = kv_norm.shape[0]
        normed, rope = rms_norm(latent[:, :width], kv_norm, eps), latent[:, width:].cpu().double()
        rope = Exact(rope, torch.zeros_like(rope))
        if cos is not None and sin is not None and rope.values.shape[1]:
            rope = rotated(latent[:, width:], cos, sin, rope_style, 0, 2 * cos.shape[1])
    if index_key is not None and index_norm is not None and cos is not None and sin is not None:
        before = layer_norm(index_key, *index_norm, _or(index_eps, eps))
        rotary = 2 * cos.shape[1]
        first = 0 if index_rope_at == "first" else index_key.shape[1] - rotary
        key, certain = rotated(before.rounded, cos, sin, index_rope_style, first, rotary), before.certain
    return Wanted(q, normed, rope, key, certain)


def _or(value: float | None, usual: float) -> float:
    return usual if value is None else value


def findings(
    storage: str, got: Mapping[str, Tensor], want: Mapping[str, Any], *, tolerances: Mapping[Any, Tolerance] = TOLERANCES
) -> Iterator[Finding]:
    """Outputs by value; storages of caches byte by byte; tokens whose rounding is not certain (`... next to it`) by value."""
    for name, expected in want.items():
        limit = limit_of(tolerances, storage, name)
        if isinstance(expected, Exact):
            yield from close_rounded(name, got[name], expected, limit)
        elif limit.exact:
            yield same_bits(name, got[name], expected)
        else:
            yield from close_rows(name, got[name], expected, limit)


class Numbers(NamedTuple):
    """What a token's row is made of: latent [T, V] and rope [T, R] float64, rounded to bfloat16 already.

    certain: [T] bool: whatever computes them in float32 gets the same numbers, and none of them is NaN.
    """

    latent: Tensor
    rope: Tensor
    certain: Tensor


class Cached:
    """A small cache of a problem: placed on the stage, and what must be in it afterwards."""

    def __init__(self, name: str, layout: str, num_blocks: int, block_size: int, stage: Stage, *, strided: bool) -> None:
        self.name, self.layout = name, LAYOUTS[layout]
        made = paged_cache(self.layout, num_blocks, block_size, strided=strided, alignment=self.layout.alignment)
        self._made = made.tensors if isinstance(made, draw.PagedTensors) else (made,)
        several = len(self._made) > 1
        self._names = [f"{name}[{at}]" if several else name for at in range(len(self._made))]
        self.original: Cache = made.view
        placed = [stage.adopt(each, made.storage, made.view) for each, made in zip(self._names, self._made, strict=True)]
        self.view: Cache = tuple(placed) if several else placed[0]

    def findings(
        self, results: Results, slots: Tensor, write: Callable[[Cache, Tensor, Tensor], Cache], numbers: Numbers
    ) -> Iterator[Finding]:
        """Every byte, but for tokens whose rounding is not certain: these are compared as numbers.

        Args:
            slots: [T] int64. write: the oracle: (cache, latent, rotary part) -> the cache as it must be.
        """
        views = self._views(write(self.original, numbers.latent.nan_to_num(nan=0.0), numbers.rope.nan_to_num(nan=0.0)))
        kept = tuple(self._over(results[name], made) for name, made in zip(self._names, self._made, strict=True))
        blocks, block_size = views[0].shape[:2]
        loose = ~numbers.certain & (slots >= 0) & (slots < blocks * block_size)  # [T]
        at = slots[loose] // block_size, slots[loose] % block_size
        rows = [self.layout.joined([part[at] for part in self._parts(each)]) for each in (kept, views)]
        got, wanted = (torch.cat(self.layout.split(each, torch.float64), dim=1) for each in rows)
        known = torch.cat([numbers.latent, numbers.rope], dim=1)[loose]
        storage = "any" if self.layout.is_quantized else "bf16"
        wanted = {f"{self.name} next to it": torch.where(known.isnan(), known, wanted)}
        yield from findings(storage, {f"{self.name} next to it": got}, wanted)
        for part, mine in zip(self._parts(views), self._parts(kept), strict=True):
            part[at] = mine[at]
        for name, made, view in zip(self._names, self._made, views, strict=True):
            expected = made.storage.clone()
            self._over(expected, made).copy_(view)
            yield from findings("any", {self.name: results[name].view(torch.uint8)}, {self.name: expected})

    def _views(self, cache: Cache) -> tuple[Tensor, ...]:
        return cache if isinstance(cache, tuple) else (cache,)

    def _parts(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.layout.parts(views if self.layout.tensors else views[0])

    @staticmethod
    def _over(storage: Tensor, made: draw.Paged) -> Tensor:
        """The cache as a view of a storage."""
        return storage.view(made.view.dtype).as_strided(made.view.shape, made.view.stride(), made.view.storage_offset())


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRopeWriteParams(Params):
    """One norm_rope_write call.

    Attributes:
        kv, scale_format, block_size: layout of attention's cache. index: that of the indexer's.
        weights: dtype of those of the norms.
        parts: which of "q", "kv" and "index" there are, joined by "+". tokens: T. q_width: Q.
        rotary: R where kv has no rotary part of its own.
        outputs: "none"; "all", latent_out and k_rope_out too; "only", these and no attention cache.
        skips: see `cache_write.WriteParams`. values: see `rotary.drawn_tokens`. positions: see `rotary.drawn_positions`.
        table: see `rotary.table_of`. style, index_style: rope_style and index_rope_style. index_at: index_rope_at.
        inputs: "packed"; "views"; "slices", of one projection. blocks: "packed" or "strided", by whole rows.
    """

    primitive = NORM_ROPE_WRITE
    says = (
        "{kv}! {scale_format} {index}! b{block_size}! weights_{weights} {parts}! t{tokens} q{q_width} r{rotary} out_{outputs} "
        "skips_{skips} {values} at_{positions} {table} {style} index_{index_style} {index_at} in{inputs} {blocks}"
    )
    asks = "kv_layout=kv index_layout=index block_size rows=tokens scale_format"
    kv: str
    scale_format: str | None
    index: str
    block_size: int
    weights: str = "bfloat16"
    parts: str = "q+kv+index"
    tokens: int = NUM_TOKENS
    q_width: int = 256
    rotary: int = _ROPE
    outputs: str = "none"
    skips: str = "none"
    values: str = "plain"
    positions: str = "plain"
    table: str = "float32"
    style: str = "interleaved"
    index_style: str = "neox"
    index_at: str = "first"
    inputs: str = "slices"
    blocks: str = "packed"

    @classmethod
    def asked(cls, device: DeviceFacts, values: Mapping[str, Any]) -> Request:
        """See Params; a part that is absent asks for no layout."""
        request, parts = super(NormRopeWriteParams, cls).asked(device, values), values.get("parts", "q+kv+index").split("+")
        has_cache = "kv" in parts and values.get("outputs") != "only"
        if not has_cache:
            request = request.but(kv_layout=None, scale_format=None)
        return request if "index" in parts else request.but(index_layout=None)

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, parts, layout = generator(seed), Stage(device), self.parts.split("+"), LAYOUTS[self.kv]
        rope = layout.rope_width
        if not rope and self.outputs == "only":
            rope = self.rotary  # of an output alone
        rotary, count, value_width = rope or self.rotary, self.tokens, layout.value_width
        widths = {"q_a": self.q_width, "latent": value_width + rope, "index_key": INDEX_HEAD_SIZE}
        drawn = {name: drawn_tokens(self.values, count, width, g) for name, width in widths.items()}
        tensors = self._placed(stage, drawn)
        positions = drawn_positions(self.positions, count, _TABLE, g)
        table = table_of(self.table, _TABLE, rotary)
        args: dict[str, Any] = {name: tensors[name] if part in parts else None for name, part in _INPUTS.items()}
        args |= {"positions": stage.read("positions", positions), "cos_sin": stage.read("cos_sin", table)}

        shapes = {"q_norm": self.q_width, "kv_norm": value_width, "weight": INDEX_HEAD_SIZE, "bias": INDEX_HEAD_SIZE}
        known = {
            name: (torch.randn(width, generator=g) * 0.3 + 1).to(getattr(torch, self.weights)) for name, width in shapes.items()
        }
        given = {name: stage.read(name, each) for name, each in known.items()}
        num_blocks = max(3, -(-2 * count // self.block_size))
        slots = shuffled(num_blocks * self.block_size, g)[:count]
        slots = skip(self.skips, slots, num_blocks * self.block_size)
        has = {"q": "q" in parts, "kv": "kv" in parts, "index": "index" in parts}
        kv = index = None
        if has["kv"] and self.outputs != "only":
            kv = Cached("kv_cache", self.kv, num_blocks, self.block_size, stage, strided=self.blocks == "strided")
        if has["index"]:
            own = LAYOUTS[self.index].block_size or self.block_size
            blocks = -(-num_blocks * self.block_size // own)
            index = Cached("index_cache", self.index, blocks, own, stage, strided=self.blocks == "strided")
        strided = self.inputs != "packed"
        outputs = {"q_out": has["q"] and self.q_width} | {
            name: has["kv"] and self.outputs != "none" and width
            for name, width in (("latent_out", value_width), ("k_rope_out", rope))
        }
        written = {
            name: None if width is False else stage.write(name, (count, width), torch.bfloat16, strided=strided)
            for name, width in outputs.items()
        }
        keywords: dict[str, Any] = {
            "q_norm": given["q_norm"] if has["q"] else None,
            "kv_norm": given["kv_norm"] if has["kv"] else None,
            "index_norm": (given["weight"], given["bias"]) if has["index"] else None,
            "eps": _EPS,
            "index_eps": _INDEX_EPS,
            "kv_cache": None if kv is None else kv.view,
            "slot_mapping": None if kv is None and index is None else stage.read("slot_mapping", slots),
            "index_cache": None if index is None else index.view,
            "rope_style": self.style,
            "index_rope_style": self.index_style,
            "index_rope_at": self.index_at,
            "scale_format": self.scale_format or "pow2",
            **written,
        }
        kv_scale = None
        if kv is not None and layout.tensor_scale:
            kv_scale = draw.tensor_scale()
            keywords["kv_scale"] = stage.read("kv_scale", kv_scale)
        q_a, latent, index_key = (drawn[name] if part in parts else None for name, part in _INPUTS.items())
        want = norm_rope_write(
            q_a,
            latent,
            index_key,
            positions,
            table,
            q_norm=known["q_norm"] if has["q"] else None,
            kv_norm=known["kv_norm"] if has["kv"] else None,
            index_norm=(known["weight"], known["bias"]) if has["index"] else None,
            eps=_EPS,
            index_eps=_INDEX_EPS,
            rope_style=self.style,
            index_rope_style=self.index_style,
            index_rope_at=self.index_at,
        )

        def write_kv(cache: Cache, latent: Tensor, rope: Tensor) -> Cache:
            scales = self.scale_format or "pow2"
            return cache_write(latent, rope, cache, slots, scale_format=scales, kv_scale=kv_scale, kv_layout=self.kv)

        def write_index(cache: Cache, key: Tensor, rope: Tensor) -> Cache:
            scales = LAYOUTS[self.index].scale_format_near("pow2")
            assert isinstance(cache, Tensor)
            return indexer_cache_write(key, cache, slots, scale_format=scales, kv_layout=self.index)

        def judge(results: Results) -> Iterator[Finding]:
            found: dict[str, Tensor] = {}
            for name, view in written.items():
                if view is not None:
                    yield stage.writes[name].outside(name, results[name])
                    found[name] = results[name].as_strided(view.shape, view.stride(), view.storage_offset())
            exact = {"q_out": want.q, "latent_out": want.latent, "k_rope_out": want.rope}
            yield from findings("any", found, {name: exact[name] for name in found})
            if kv is not None and want.latent is not None and want.rope is not None:
                yield from kv.findings(results, slots, write_kv, _numbers(want.latent, want.rope, found))
            if index is not None and want.key is not None and want.certain_key is not None:
                key = want.key.rounded.double()
                numbers = Numbers(key, key[:, :0], want.certain_key & want.key.certain)
                yield from index.findings(results, slots, write_index, numbers)

        return Problem(stage, args, keywords, {}, judge)

    def _placed(self, stage: Stage, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs: apart, or side by side in one tensor, with something in front, between and behind."""
        if self.inputs != "slices":
            return {name: stage.read(name, each, strided=self.inputs == "views") for name, each in drawn.items()}
        gap = torch.full((self.tokens, 8), float("nan"), dtype=torch.bfloat16)
        whole = stage.read("projection", torch.cat([gap, *(x for each in drawn.values() for x in (each, gap))], dim=1))
        placed, first = dict[str, Tensor](), gap.shape[1]
        for name, each in drawn.items():
            placed[name] = whole[:, first : first + each.shape[1]]
            first += each.shape[1] + gap.shape[1]
        return placed


_INPUTS: Final = {"q_a": "q", "latent": "kv", "index_key": "index"}
"""Which part of a call each input is."""


def _numbers(latent: Exact, rope: Exact, found: Mapping[str, Tensor]) -> Numbers:
    """What attention's rows are made of: of the outputs, where there are both."""
    if {"latent_out", "k_rope_out"} <= found.keys():
        both = found["latent_out"].double(), found["k_rope_out"].double()
        return Numbers(*both, ~torch.cat(both, dim=1).isnan().any(dim=1))
    return Numbers(latent.rounded.double(), rope.rounded.double(), latent.certain & rope.certain)


def _index_layouts(support: Support) -> list[str]:
    return [name for name in layout_names(INDEX) if name in support.layouts]


def _holds_nan(choice: Mapping[str, Any]) -> bool:
    """A layout of the core has NaN; what a plugin's makes of it is its own affair."""
    if choice.get("values") != "nan":
        return True
    storage = choice.get("storage", (FP8_DS_MLA.name, None))
    return all(plugin_layout(name) is None for name in (storage[0], choice.get("index", INDEX_FP8.name)))


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[NormRopeWriteParams]:
    """What a level asks of an implementation of norm_rope_write."""
    axes: dict[str, list[Any]] = {
        "storage": storages(implementation),
        "index": _index_layouts(implementation.support),
        "block_size": block_sizes(implementation, facts, level),
        "parts": ["q+kv+index", "q", "kv", "index", "kv+index", "q+kv"],
        "values": ["plain", "nan", "zero", "equal"],
        "outputs": ["none", "all", "only"],
        "skips": ["none", "some", "corpus"],
        "inputs": ["slices", "packed", "views"],
        "q_width": [256, 1_536, 100],
        "table": ["float32", "bfloat16", "yarn"],
        "positions": ["plain", "outside"],
        "style": ["interleaved", "neox"],
        "index_style": ["neox", "interleaved"],
        "index_at": ["first", "last"],
        "weights": ["bfloat16", "float32"],
        "blocks": ["packed", "strided"],
        "run": ["once", "repeat"],
    }
    yield from NormRopeWriteParams.covering(implementation, facts, axes, strength=STRENGTH[level], allowed=_holds_nan)
    for params in NormRopeWriteParams.covering(implementation, facts, plain_axes(axes), strength=1):
        yield replace(params, tokens=0)
        if level == "smoke":
            continue
        yield replace(params, tokens=1, outputs="all")
        yield replace(params, parts="q+index", rotary=24, index_at="last")
        yield replace(params, parts="index", rotary=INDEX_HEAD_SIZE)
        if can_hold_many(facts, level):
            yield replace(params, tokens=MANY_ROWS, q_width=8)
        if can_capture(implementation, facts):
            yield replace(params, run="graph", skips="corpus", outputs="all")


def _of_request(request: Request, name: str) -> NormRopeWriteParams:
    """What a probe asks: slots that are invalid by little, both caches, and all outputs."""
    parts = "q+kv+index" if request.index_layout is not None else "q+kv" if request.kv_layout is not None else "q"
    if request.kv_layout is None and request.index_layout is not None:
        parts = "q+index"
    return NormRopeWriteParams(
        **storage_asked(request, FP8_DS_MLA, "pow2"),
        index=request.index_layout or INDEX_FP8.name,
        block_size=request.block_size or 16,
        parts=parts,
        skips="near",
        positions="outside",
    )


def _variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    """What a probe tries: the cache of attention with each of the indexer's that is declared."""
    layouts = _index_layouts(support)
    if not layouts:
        yield "write", request
    for name in layouts:
        yield f"write, {name}", request.but(index_layout=name)


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case that is timed: DeepSeek-V3.2's widths, slices of one projection."""
    layout, tokens, block_size = LAYOUTS[case.kv_layout or FP8_DS_MLA.name], case.rows, workshop.block_size
    rope = layout.rope_width
    widths = [_BENCH_Q, layout.key_width, INDEX_HEAD_SIZE]
    q_a, latent, index_key = workshop.normal(tokens, sum(widths)).split(widths, dim=1)
    blocks = -(-tokens // block_size)
    caches = [workshop.empty(blocks, block_size, each.row_width, dtype=each.dtype) for each in (layout, INDEX_FP8)]
    slots = workshop.permutation(blocks * block_size)[:tokens]
    positions = workshop.permutation(max(tokens, _BENCH_POSITIONS))[:tokens] % _BENCH_POSITIONS
    cos_sin = table_of("yarn", _BENCH_POSITIONS, rope or _ROPE).to(workshop.device)
    weights: dict[str, Any] = {"q_norm": workshop.normal(_BENCH_Q), "kv_norm": workshop.normal(layout.value_width)}
    index_norm = workshop.normal(INDEX_HEAD_SIZE).float(), workshop.normal(INDEX_HEAD_SIZE).float()
    q_out = workshop.empty(tokens, _BENCH_Q, dtype=torch.bfloat16)
    judged = spread(tokens, _JUDGED_TOKENS, workshop.device)

    def judge(results: Results) -> Iterator[Finding]:
        inputs = q_a[judged], latent[judged], index_key[judged], positions[judged]
        want = norm_rope_write(*inputs, cos_sin, **weights, index_norm=index_norm, eps=_EPS, index_eps=_EPS)
        yield from findings("any", {"q_out": results["q_out"][judged].cpu()}, {"q_out": want.q})
        assert want.latent is not None and want.rope is not None and want.key is not None
        count = judged.shape[0]
        latent_of, rope_of, key_of = (each.rounded.double() for each in (want.latent, want.rope, want.key))
        at = torch.arange(count)
        blank = torch.zeros(count, 1, layout.row_width, dtype=layout.dtype)
        packed = cache_write(latent_of, rope_of, blank, at, scale_format=case.scale_format, kv_layout=layout.name)
        rows = packed[:, 0]
        keys = indexer_cache_write(key_of, torch.zeros(count, 1, INDEX_FP8.row_width, dtype=torch.uint8), at)[:, 0]
        for name, own, cached, wanted in (("kv_cache", layout, caches[0], rows), ("index_cache", INDEX_FP8, caches[1], keys)):
            taken = draw.taken_rows(own, cached, slots[judged]).cpu()
            got, known = (torch.cat(own.split(each, torch.float64), dim=1) for each in (taken, wanted))
            name, storage = f"{name} next to it", "any" if own.is_quantized else "bf16"
            yield from findings(storage, {name: got}, {name: known})

    arguments = {
        "q_a": q_a,
        "latent": latent,
        "index_key": index_key,
        "positions": positions,
        "cos_sin": cos_sin,
        **weights,
        "index_norm": index_norm,
        "eps": _EPS,
        "kv_cache": caches[0],
        "slot_mapping": slots,
        "index_cache": caches[1],
        "scale_format": case.scale_format,
        "q_out": q_out,
    }
    request = workshop.request(case, block_size=block_size, index_layout=INDEX_FP8.name)
    read = sum(widths) * 2 + 16 + 4 * cos_sin.shape[1]  # with position, slot and a row of the table
    moved = tokens * (read + 2 * _BENCH_Q + layout.row_bytes + INDEX_FP8.row_bytes)
    targets = {"q_out": q_out, "kv_cache": caches[0], "index_cache": caches[1]}
    return BenchProblem(case, request, arguments, 5, targets, moved, 0, judge)


_BENCH_Q: Final = 1_536
_BENCH_POSITIONS: Final = 4_096

PROBLEMS: Final = Problems(
    primitive=NORM_ROPE_WRITE,
    oracle=norm_rope_write,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("block_size",),
    variants=_variants,
    bench=Bench(rows=(1, 16, 64, 1_024, 8_192), layouts=("fp8_ds_mla",), make=_make, shape=lambda case: f"T {case.rows}"),
)
