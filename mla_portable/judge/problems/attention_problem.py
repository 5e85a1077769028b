# SPDX-License-Identifier: Apache-2.0
"""One attention problem: its parameters, and from them queries, a cache full of NaN but for the tokens that are named, indices,
the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, DeviceFacts, ScheduleKind, ScheduleLimits, StepLengths
from mla_portable.contracts.values import CACHE_ALIGNMENT
from mla_portable.judge.problems import draw
from mla_portable.judge.problems.attention import LOW, LOW_QUERIES, SOFTMAX_SCALE, attend, findings, score_terms
from mla_portable.judge.problems.base import Params
from mla_portable.judge.problems.compare import Finding
from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN
from mla_portable.judge.problems.shapes import layout_of_storage
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.kit.split_kv import SplitSchedule, split_kv
from mla_portable.layouts import LAYOUTS, Cache
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL

JUDGED_ROWS: Final = 96
"""Of a problem with very many rows the first, the last and others between are compared."""
_FAR_BELOW: Final = -300
"""A length that is several tiles of keys below 0: one that is not clamped shortens another list by them."""
EDGES: Final = (
    *((INT32_MIN, None), (None, INT32_MIN), (INT32_MIN + 1, None), (None, INT32_MIN + 1), (_FAR_BELOW, None)),
    *((None, _FAR_BELOW), (INT32_MAX, None), (None, INT32_MAX), (INT32_MAX, INT32_MAX), (INT32_MIN, INT32_MIN)),
)
"""Lengths of the first list and of the second, whose sums, and what they are rounded up to, may wrap; None: all of its list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams(Params):
    """One attention call.

    Attributes:
        kv: a layout (paged), or `workspace_of` one (flat rows). scale_format: of an FP8 cache.
        heads, topk, block_size, query_len: H, K, tokens a block (None for a workspace), S (None for prefill).
        rows: query rows, B * S or T.
        pattern: where indices are invalid (`draw.PATTERNS`), MIXED for a probe.
        sink: "none", "finite"; "minus_inf" and "plus_inf" give heads -inf, +inf and finite sinks in turn, starting
            with that one.
        lengths: pass them; 0, K and values outside of [0, K] among them.
        limits: "mixed"; "edges", the lengths are EDGES in turn, of a second cache too.
        inputs, outputs: "packed" or "views" into larger memory; outputs also "fresh", allocated by the callee.
        blocks: "packed"; "strided", further apart than they are long; "pair", so, and a cache of two blocks only; "address", a
            cache of more than 2**31 elements; "slab", a layer of a buffer of all layers, of more than 2**32. A second cache
            likewise.
        size: magnitudes of queries and tokens (`draw.SIZES`).
        schedule: the kind to pass, None for no schedule.
        with_lse: it is asked for.
        promised: indices are clean, as the request then says; what is absent is -1, past a length, 0 to K, as well.
        extra_topk: K of a second cache, None for none. extra_block_size: its block size, None where kv is flat.
        extra_pattern, extra_lengths: as `pattern` and `lengths`, of its list.
        nope: queries are as wide as the latent, and the rotary part of the rows is not read.
        scaled: queries are e4m3 and have a scale.
        alignment: bytes, of blocks of either cache at least; those of fp8_v4 lie at multiples of 8 where nothing pads them.
    """

    says = (
        "{kv}! {scale_format} h{heads}! k{topk}! b{block_size} s{query_len} {pattern}! t{unusual_rows} sink_{sink} "
        "lengths{lengths} limits_{limits} in{inputs} out_{outputs} {blocks} {size} scheduled{scheduled} promised{promised} "
        "extra{extra_topk} extra_b{extra_block_size} extra_{extra_pattern} extra_lengths{extra_lengths} nope{nope} "
        "scaled{scaled}"
    )
    asks = (
        "kv_layout=kv num_heads=heads topk block_size query_len rows scale_format lse=with_lse attn_sink=sink lengths "
        "clean_indices=promised extra_topk extra_block_size extra_lengths nope q_scale=scaled cache_alignment"
    )
    softmax_scale: ClassVar[float] = SOFTMAX_SCALE
    kv: str
    scale_format: str | None
    heads: int
    topk: int
    block_size: int | None
    query_len: int | None
    rows: int
    pattern: str = "dense"
    sink: str = "none"
    lengths: bool = False
    limits: str = "mixed"
    inputs: str = "packed"
    outputs: str = "fresh"
    blocks: str = "packed"
    size: str = "plain"
    schedule: ScheduleKind | None = None
    with_lse: bool = True
    promised: bool = False
    extra_topk: int | None = None
    extra_block_size: int | None = None
    extra_pattern: str = "dense"
    extra_lengths: bool = False
    nope: bool = False
    scaled: bool = False
    alignment: int = 1

    @property
    def cache_alignment(self) -> int:
        """What the caches have, as in a Request."""
        layout, bits = LAYOUTS[self.kv_layout], CACHE_ALIGNMENT
        for block_size in (self.block_size, self.extra_block_size if self.extra_topk is not None else None):
            if block_size is not None:
                for stride in draw.block_strides(layout, block_size, strided=self.strided, alignment=self.alignment):
                    bits |= stride
        return bits & -bits

    @property
    def strided(self) -> bool:
        """Blocks lie further apart than they are long."""
        return self.blocks in ("strided", "pair")

    @property
    def vast(self) -> bool:
        """The cache has more than 2**31 elements."""
        return self.blocks in ("address", "slab")

    @property
    def kv_layout(self) -> str:
        """The layout of the rows that are read."""
        return layout_of_storage(self.kv)

    @property
    def unusual_rows(self) -> int | None:
        """The rows where their number is worth a word of the id."""
        return self.rows if self.rows == 0 or self.rows > 4 else None

    @property
    def scheduled(self) -> bool:
        return self.schedule is not None

    @property
    def storage_name(self) -> str:
        """What the tolerance table calls it."""
        return LOW if self.accuracy == "low" else LAYOUTS[self.kv_layout].tolerance_of(self.scale_format)

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        return build_attention(self, seed, device, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParams(AttentionParams):
    """sparse_decode."""

    primitive = SPARSE_DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillParams(AttentionParams):
    """sparse_prefill."""

    primitive = SPARSE_PREFILL


@dataclass(frozen=True, slots=True, eq=False)
class DrawnKeys:
    """A cache and its list: kv on the device, indices [rows, K] and lengths [rows] on the CPU.

    Attributes:
        original_kv, original_indices: on the CPU, for the oracle: a cache with the same tokens, and their places in it.
    """

    kv: Cache
    original_kv: Cache
    indices: Tensor
    original_indices: Tensor
    lengths: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The tensors of a call: q [rows, H, key width] on the CPU, what it attends to, and a second cache or None."""

    q: Tensor
    keys: DrawnKeys
    extra: DrawnKeys | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _KV:
    """The cache on the device; on the CPU one with the same tokens for the oracle; the slots that hold tokens, in each."""

    placed: Cache
    original: Cache
    used: Tensor
    original_used: Tensor
    unused: Tensor
    limit: int


def build_attention(params: AttentionParams, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
    """The problem that `params` describe; see AttentionParams."""
    g, stage = draw.generator(seed), Stage(device)
    layout = LAYOUTS[params.kv_layout]
    kv = _kv(params, stage, "kv", g)
    q = draw.queries(params.rows, params.heads, layout, params.size, g)
    if params.accuracy == "low":
        q = q * LOW_QUERIES
    if params.nope:
        q = q[..., : layout.value_width].contiguous()
    if params.scaled:
        q = q.to(torch.float8_e4m3fn)
    keys, extra = _drawn(params, kv, g, 0), None
    if params.extra_topk is not None:
        own = replace(
            params,
            topk=params.extra_topk,
            block_size=params.extra_block_size,
            pattern=params.extra_pattern,
            lengths=params.extra_lengths,
        )
        extra = _drawn(own, _kv(own, stage, "extra_kv", g), g, 1)
    return problem_of(params, Drawn(q, keys, extra), stage, g, facts)


def _drawn(params: AttentionParams, kv: _KV, g: torch.Generator, number: int) -> DrawnKeys:
    """The list of a cache. number: 0, or 1 of the second cache."""
    rows, topk = params.rows, params.topk
    lengths = _lengths(params, g, number) if params.lengths else None
    picks = torch.arange(len(kv.used))
    unused = len(picks) + torch.arange(len(kv.unused))
    names = draw.index_rows(params.pattern, rows, topk, picks, unused, kv.limit, lengths, g)  # into used, then unused
    if params.promised:
        names = names.masked_fill(names >= len(picks), -1).clamp(min=-1)
    indices = _renamed(names, torch.cat([kv.used, kv.unused]), params)
    original_indices = _renamed(names, torch.cat([kv.original_used, kv.unused]), params)

    if params.promised and lengths is not None and params.pattern == draw.MIXED:  # compacted rows and their counts
        order = (indices < 0).to(torch.uint8).argsort(dim=1, stable=True)
        indices, original_indices = indices.gather(1, order), original_indices.gather(1, order)
        lengths = (indices >= 0).sum(1, dtype=torch.int32)
    elif params.promised and lengths is not None:
        lengths = lengths.clamp(0, topk)
    return DrawnKeys(kv.placed, kv.original, indices, original_indices, lengths)


def problem_of(params: AttentionParams, drawn: Drawn, stage: Stage, g: torch.Generator, facts: DeviceFacts) -> Problem:
    """The call on what was drawn, with outputs, sinks and schedule as `params` want them, and its judge."""
    rows, heads, device = params.rows, params.heads, stage.device
    layout, q, oracle = LAYOUTS[params.kv_layout], drawn.q, _Oracle(params, drawn)
    shape = (rows // params.query_len, params.query_len) if params.query_len else (rows,)
    sink = _sink(params, oracle, g)
    apart = params.inputs == "views"
    kv_name = "kv_cache" if params.query_len else "kv"

    def listed(name: str, keys: DrawnKeys) -> Iterator[tuple[str, Tensor]]:
        """indices and, where they are passed, lengths."""
        yield f"{name}indices", stage.read(f"{name}indices", keys.indices.view(*shape, keys.indices.shape[-1]), strided=apart)
        if keys.lengths is not None:
            yield f"{name}lengths", stage.read(f"{name}lengths", keys.lengths.view(shape), strided=apart)

    args: dict[str, Any] = {"q": stage.read("q", q.view(*shape, heads, q.shape[-1]), strided=apart), kv_name: drawn.keys.kv}
    lists = dict(listed("", drawn.keys))
    args["indices"] = lists.pop("indices")
    keywords: dict[str, Any] = {"softmax_scale": params.softmax_scale, **lists}
    scales = scales_of_call(params)
    keywords |= {name: stage.read(name, scale) for name, scale in scales.items()}
    if sink is not None:
        keywords["attn_sink"] = stage.read("attn_sink", sink)
    if drawn.extra is not None:
        keywords |= {"extra_kv_cache": drawn.extra.kv, **dict(listed("extra_", drawn.extra))}
    if params.outputs != "fresh":
        strided = params.outputs == "views"
        keywords["out"] = stage.write("out", (*shape, heads, layout.value_width), torch.bfloat16, strided=strided)
        if params.with_lse or params.promised or params.pattern == draw.MIXED:
            keywords["lse_out"] = stage.write("lse", (*shape, heads), torch.float32, strided=strided)
    if params.schedule is not None and rows:
        keywords["schedule"] = make_schedule(params, device, facts)

    judged = torch.linspace(0, rows - 1, JUDGED_ROWS).long() if rows > JUDGED_ROWS else torch.arange(rows)
    want_out, want_lse = oracle.expected(judged, sink)

    def part(bound: Callable[..., Any], some: slice) -> tuple[Tensor, ...]:
        whole, by_row = (
            ("softmax_scale", "attn_sink", "extra_kv_cache", "kv_scale", "q_scale"),
            ("lengths", "extra_indices", "extra_lengths"),
        )
        own = {name: value for name, value in keywords.items() if name in whole}
        own |= {name: value[some] for name, value in keywords.items() if name in by_row}
        if "schedule" in keywords:
            own["schedule"] = make_schedule(params, device, facts, num_rows=args["q"][some].shape[:-2].numel())
        results = tuple(bound(args["q"][some], args[kv_name], args["indices"][some], **own))
        return results if params.with_lse else results[:1]

    def judge(results: Results) -> Iterator[Finding]:
        got = {name: value.flatten(0, len(shape) - 1)[judged] for name, value in results.items()}
        if not params.with_lse and "lse" in got:  # NaN says that it is none
            got["lse"] = torch.where(got["lse"].isnan(), want_lse, got["lse"])
        want = {"out": want_out, "lse": want_lse}
        yield from findings(params.storage_name, got, want, rows=judged, sink=sink, terms=lambda: oracle.terms(judged))

    returns = {"out": ((*shape, heads, layout.value_width), torch.bfloat16), "lse": ((*shape, heads), torch.float32)}
    outputs, untold = frozenset({"out", "lse_out"}), frozenset(() if params.with_lse else ("lse",))
    return Problem(stage, args, keywords, returns, judge, outputs, untold, part)


def scales_of_call(params: AttentionParams) -> dict[str, Tensor]:
    """The scales of whole tensors that the call is given."""
    named = {"kv_scale": LAYOUTS[params.kv_layout].tensor_scale, "q_scale": params.scaled}
    return {name: draw.tensor_scale() for name, given in named.items() if given}


class _Oracle:
    """The oracle's results of some rows of a problem."""

    def __init__(self, params: AttentionParams, drawn: Drawn) -> None:
        self._drawn = drawn
        self._stated: dict[str, Any] = {"softmax_scale": params.softmax_scale, "kv_layout": params.kv_layout}
        self._stated |= scales_of_call(params)

    def _of(self, rows: Tensor) -> tuple[tuple[Tensor, Any, Tensor], dict[str, Any]]:
        """Arguments for rows [n]: queries [n, H, key width], cache and indices [n, K]; lengths [n] and the second cache."""

        def listed(name: str, keys: DrawnKeys) -> dict[str, Any]:
            limits = None if keys.lengths is None else keys.lengths[rows]
            return {f"{name}indices": keys.original_indices[rows], f"{name}lengths": limits}

        keys, extra, more = self._drawn.keys, self._drawn.extra, listed("", self._drawn.keys)
        if extra is not None:
            more |= {"extra_kv_cache": extra.original_kv, **listed("extra_", extra)}
        return (self._drawn.q[rows], keys.original_kv, more.pop("indices")), more | self._stated

    def expected(self, rows: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """out [n, H, 512] and lse [n, H], float64."""
        args, more = self._of(rows)
        return attend(*args, **more, attn_sink=sink)

    def terms(self, rows: Tensor) -> Tensor:
        """`score_terms`."""
        args, more = self._of(rows)
        return score_terms(*args, **more)


def _kv(params: AttentionParams, stage: Stage, name: str, g: torch.Generator) -> _KV:
    """A small cache (a workspace is one block of it), most of whose slots hold tokens at shuffled places; or a vast one."""
    if params.vast:
        return _vast_kv(params, stage, g)
    layout = LAYOUTS[params.kv_layout]
    wanted = 2 * draw.MIXED_TOKENS if params.pattern == draw.MIXED else params.topk + params.topk // 4 + 10
    block_size = params.block_size or wanted
    if params.block_size is None or params.blocks == "pair":
        num_blocks = 1 if params.block_size is None else 2
    else:
        num_blocks = max(3, -(-wanted // block_size) + 1)
    limit = num_blocks * block_size
    order = draw.shuffled(limit - 2, g) + 1  # slot 0 and the last slot are special
    edge = torch.tensor([0, limit - 1] if params.pattern == "dense" else [limit - 1])
    count = min(draw.MIXED_TOKENS if params.pattern == draw.MIXED else params.topk + params.topk // 8, limit - 8)
    used = torch.cat([edge, order])[:count]
    unused = torch.cat([torch.tensor([], dtype=torch.int64) if params.pattern == "dense" else torch.tensor([0]), order[-6:]])
    cache = draw.paged_cache(layout, num_blocks, block_size, strided=params.strided, alignment=params.alignment)
    cache.put(used, draw.cached_rows(count, layout, params.scale_format, g, size=params.size))
    view = cache.view
    if params.block_size is None and isinstance(view, Tensor):
        view = view[0]
    return _KV(stage.read_cache(name, view), view, used, used, unused, limit)


def _vast_kv(params: AttentionParams, stage: Stage, g: torch.Generator) -> _KV:
    """A cache of more than 2**31 elements, and a small one with the same tokens in order for the oracle."""
    layout = LAYOUTS[params.kv_layout]
    block_size = params.block_size or 1
    in_slab = 1 if params.block_size is None else draw.SLAB_LAYERS  # flat rows lie side by side
    layers = in_slab if params.blocks == "slab" else 0
    placed, device_rows, used = draw.vast(layout, block_size, stage.device, layers=layers, alignment=params.alignment)
    tokens = draw.cached_rows(len(used), layout, params.scale_format, g)
    draw.put_rows(layout, device_rows, used, tokens)
    small = draw.paged_cache(layout, len(used), 1)
    original_used = torch.arange(len(used))
    small.put(original_used, tokens)
    nothing = torch.tensor([], dtype=torch.int64)
    limit = placed.shape[0] * block_size
    flat = params.block_size is None
    return _KV(placed.flatten(0, 1) if flat else placed, small.view, used, original_used, nothing, limit)


def _renamed(names: Tensor, slots: Tensor, params: AttentionParams) -> Tensor:
    """Positions in `slots` -> slots; what `index_rows` put in as invalid stays as it is."""
    valid = (names >= 0) & (names < len(slots))
    return torch.where(valid, slots[names.clamp(0, len(slots) - 1).long()], names).to(torch.int32)


def _lengths(params: AttentionParams, g: torch.Generator, number: int) -> Tensor:
    """[rows] int32: nothing, everything, and values that are clamped to [0, topk]; which row has which depends on the seed.

    number: of the list.
    """
    rows, topk = params.rows, params.topk
    if params.limits == "edges":
        return edge_lengths(rows, topk, number)
    if params.pattern == draw.MIXED:
        kinds = {"full": -(-topk // 2), "holes": topk - topk // 4}
        return torch.tensor([kinds.get(kind, topk) for kind in draw.mixed_kinds(rows, topk)], dtype=torch.int32)
    values = torch.randint(1, topk + 1, (rows,), generator=g, dtype=torch.int32)
    fixed = [max(1, topk // 2), topk + 7, 0, topk, _FAR_BELOW]
    turn = g.initial_seed() % len(fixed) if rows > 1 else 0  # never the same twice when a graph is replayed on the next seed
    fixed = fixed[turn:] + fixed[:turn]
    if params.pattern == "last":  # of which a shorter first row would show nothing
        fixed = [topk, topk + 7, 0, max(1, topk // 2)]
    values[: len(fixed)] = torch.tensor(fixed, dtype=torch.int32)[:rows]
    return values


def edge_lengths(rows: int, topk: int, number: int) -> Tensor:
    """[rows] int32: EDGES in turn. number: of the list, whose width is `topk`."""
    given = [EDGES[row % len(EDGES)][number] for row in range(rows)]
    return torch.tensor([topk if each is None else each for each in given], dtype=torch.int32)


def _sink(params: AttentionParams, oracle: _Oracle, g: torch.Generator) -> Tensor | None:
    """[H] float32, finite ones near the lse of the first row that has one, so that they change its result visibly."""
    if params.sink == "none":
        return None
    sink = torch.randn(params.heads, generator=g)
    for row in range(params.rows):
        _, lse = oracle.expected(torch.tensor([row]), None)
        if lse.isfinite().all():
            sink += lse[0].float()
            break
    if params.sink != "finite":
        minus, plus = (0, 1) if params.sink == "minus_inf" else (1, 0)
        sink[minus::3] = -math.inf
        sink[plus::3] = math.inf
    return sink


def make_schedule(
    params: AttentionParams, device: torch.device, facts: DeviceFacts, *, num_rows: int | None = None
) -> DecodeSchedule:
    """A schedule for the decode call that `params` describe; its scratch holds NaN. A CPU gets that of 16 processors.

    Args:
        num_rows: rows of another call, whose rows a split-KV schedule cuts as it does for all of them.
    """
    num_rows = params.rows if num_rows is None else num_rows
    heads, topk, query_len = params.heads, params.topk, params.query_len or 1
    num_sms = facts.num_sms or 16
    assert params.schedule is not None
    if params.schedule.schedule_type is not SplitSchedule:
        limits = ScheduleLimits(
            device, heads, topk, params.rows, query_len, num_sms, facts.arch, extra_topk=params.extra_topk or 0
        )
        batch = params.rows // query_len
        # rows of at least K keys: an adapter may rely on no row of the lists being longer than its sequence
        lengths = StepLengths(np.full(batch, topk + query_len, dtype=np.int32))
        return params.schedule.schedule(params.schedule.planner(limits), batch, query_len, lengths)
    extra_topk = params.extra_topk or 0
    num_splits = split_kv(num_rows=params.rows, num_heads=heads, topk=topk, num_sms=num_sms, extra_topk=extra_topk)
    partial_out = partial_lse = None
    if num_splits > 1:
        partial_out = torch.full((num_splits, num_rows, heads, LAYOUTS[params.kv_layout].value_width), math.nan, device=device)
        partial_lse = torch.full((num_splits, num_rows, heads), math.nan, device=device)
    return SplitSchedule(num_rows, heads, topk, num_splits, partial_out, partial_lse, extra_topk=extra_topk)
