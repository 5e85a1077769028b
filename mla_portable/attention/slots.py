# SPDX-License-Identifier: Apache-2.0
"""SlotAttention: one layer's attention where the engine's indexer names slots of the cache, not positions in a request.

Nothing is converted, gathered or planned: every token is a row with its own list of slots. Rows of a decode batch go through
sparse_decode with a schedule of their number. Rows of prefills, and more rows than the spec allows, go through sparse_prefill
on the cache itself, or through sparse_decode where nothing else reads the cache in place. Unless the slots are promised to be
clean, the implementations check each of them.

With `spec.extra_topk` each call has a second cache and a second list (DeepSeek-V4: a sliding window and compressed tokens).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, NoReturn

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention.bound_route import decode_parts
from mla_portable.attention.checks import check_layer_cache, check_layer_rows, check_sink
from mla_portable.attention.converter import skips_missing_keys
from mla_portable.attention.layer_registry import ForcedBackend, LayerRegistry
from mla_portable.attention.route_decision import RouteDecision, RoutePart, check_decided
from mla_portable.attention.routes import choose_route
from mla_portable.attention.spec import AttentionSpec
from mla_portable.choose import Registry
from mla_portable.choose.bound import Bound
from mla_portable.contracts import (
    DecodeSchedule,
    DeviceFacts,
    InvalidArgument,
    LengthsPlanner,
    ScheduleKind,
    ScheduleLimits,
    SchedulePlanner,
    StepLengths,
)
from mla_portable.contracts.primitive import F, Primitive
from mla_portable.contracts.values import check_count, check_scale, check_type, describe, device_of, refuse
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.kit.rules import check_dense
from mla_portable.kit.second_cache import second_cache
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import Cache
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL

TENSORS: Final = TensorTable(
    "SlotAttention.forward",
    {
        "q": Axes("T H key", torch.bfloat16),
        "kv": Checked(),
        "slots": Axes("T K", torch.int32, not_empty="K"),
        "lengths": Axes("T", torch.int32, optional=True),
        "attn_sink": Axes("H", torch.float32, optional=True),
        "extra_kv_cache": Checked(optional=True),
        "extra_slots": Axes("T E", torch.int32, optional=True, not_empty="E"),
        "extra_lengths": Axes("T", torch.int32, optional=True),
        "out": Axes("T H value", torch.bfloat16, optional=True, written=True),
    },
    given="H key value",
)
_ATTENTION: Final = (SPARSE_DECODE, SPARSE_PREFILL)
_MOST_WIDTHS: Final = 4
"""Pairs of list widths that schedules are kept for, the spec's among them: each pair has scratch of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class _ByLengths(Generic[F]):
    """A bound primitive: for calls without lengths, and for calls with them where it is faster for it (None: it is not)."""

    plain: Bound[F]
    skipping: Bound[F] | None

    def take(self, lengths: Tensor | None, more: _Second) -> tuple[F, Tensor | None, Mapping[str, Any]]:
        """What serves a call, the lengths that it is given, and its keywords for a second cache."""
        if lengths is None or self.skipping is None:
            return self.plain.call, None, second_cache(more.cache, more.slots, None)
        return self.skipping.call, lengths, second_cache(more.cache, more.slots, more.lengths)


class _Second(NamedTuple):
    """The second cache of a call; None three times where there is none."""

    cache: Cache | None
    slots: Tensor | None
    lengths: Tensor | None

    def tokens(self) -> _Second:
        """For sparse_decode: every row is a batch row of one token."""
        slots, lengths = (None if each is None else each.unsqueeze(1) for each in (self.slots, self.lengths))
        return _Second(self.cache, slots, lengths)


def choose_slot_route(
    spec: AttentionSpec, device: DeviceFacts, registry: LayerRegistry, *, clean_slots: bool = False
) -> RouteDecision:
    """The route of a SlotAttention: "direct", or "fused" where nothing but sparse_decode reads the cache in place."""
    direct = choose_route(replace(spec, route="direct"), device, registry, clean_slots=clean_slots)
    if direct.chosen is not None:
        return direct
    fused = choose_route(replace(spec, route="fused"), device, registry, clean_slots=clean_slots)
    return direct if fused.chosen is None else fused


class SlotAttention:
    """Attention over given slots. Not thread-safe: its decode calls share scratch, so they follow one another on one stream.

    Attributes:
        spec, device: as built, the device with its index; calls run there, whether or not it is the current device. A row
            counts as a request, so `spec.max_num_reqs` bounds the rows of a decode batch.
        facts: `DeviceFacts` of the device. route_decision: what serves, and why.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        device: torch.device | str,
        registry: Registry | None = None,
        backend: ForcedBackend = None,
        clean_slots: bool = False,
        route_decision: RouteDecision | None = None,
    ) -> None:
        """Choose and bind what serves; allocate the scratch of decode batches. The device is the current one meanwhile.

        Args:
            spec: with decode_query_len 1, no lse and no share: nothing else is served. device, registry, backend: as of
                SparseMLAAttention. clean_slots: the promise `Request.clean_indices` about the slots of all calls: each is -1 or
                a row of the cache or workspace, lengths are 0 to K, and a slot past a length is -1. It may save a pass.
            route_decision: of `choose_slot_route` for this device, by the same registry and backend, with the same
                `clean_slots`: it is bound, and no route is chosen. `spec` is then the decision's. None to choose one.
        Raises: UnsupportedRoute with the reasons against every implementation; UnknownBackend; InvalidArgument.
        """
        check_type("SlotAttention", "spec", spec, AttentionSpec, "an AttentionSpec")
        for name, wanted in (("decode_query_len", 1), ("need_lse", False)):
            if getattr(spec, name) != wanted:
                raise InvalidArgument("SlotAttention", f"spec.{name}", got=getattr(spec, name), expected=str(wanted))
        if spec.share.size > 1:
            raise InvalidArgument("SlotAttention", "spec.share", got=spec.share, expected="the whole of each sequence")
        self.spec = spec
        self.device = device_of("SlotAttention", device)
        self._accelerator = accelerator(self.device)
        with self._accelerator.guard():  # what is tried and bound for a device runs on it
            demand = LayerRegistry(registry, backend, where="SlotAttention")
            self.facts = demand.facts(self.device)
            if route_decision is None:
                route_decision = choose_slot_route(spec, self.facts, demand, clean_slots=clean_slots)
            else:
                _check_decided(route_decision, spec, self.facts, clean_slots)
            self.route_decision = route_decision
            verdict = self.route_decision.verdict  # raises where there is none
            decoding = decode_parts(verdict)
            self._decoders = tuple(_bound(part, SPARSE_DECODE, demand) for part in decoding)
            self._most_rows = tuple(part.most_rows for part in decoding if part.most_rows is not None)
            prefill = verdict.part("prefill")
            assert prefill is not None  # of both routes
            self._prefill = _bound(prefill, SPARSE_PREFILL, demand) if verdict.route == "direct" else None
            decoder = self._decoders[-1].plain if self._decoders else None
            self._kind = decoder.implementation.schedule_kind if decoder else None
            self._limits = ScheduleLimits(
                device=self.device,
                num_heads=spec.num_heads,
                topk=spec.topk,
                extra_topk=spec.extra_topk,
                max_num_rows=spec.max_num_reqs,
                num_sms=self.facts.num_sms,
                arch=self.facts.arch,
                max_scratch_bytes=spec.max_scratch_bytes,
                batch_invariant=spec.batch_invariant,
                request=decoder.request if decoder else None,
            )
            self._planners: dict[tuple[int, int], SchedulePlanner | LengthsPlanner] = {}
            self._schedules: dict[tuple[int, int, int], DecodeSchedule] = {}
            with neutral_defaults():
                if self._kind is not None:
                    self._planner(self._kind, spec.topk, spec.extra_topk)
                # what is not asked for is written all the same
                self._lse = torch.empty((spec.max_num_tokens, spec.num_heads), dtype=torch.float32, device=self.device)

    def _planner(self, kind: ScheduleKind, topk: int, extra_topk: int) -> SchedulePlanner | LengthsPlanner | None:
        """Of the schedules for lists of these widths; None where schedules are kept for as many other widths as may be."""
        found = self._planners.get((topk, extra_topk))
        if found is None and len(self._planners) < _MOST_WIDTHS:
            found = kind.planner(replace(self._limits, topk=topk, extra_topk=extra_topk))
            self._planners[topk, extra_topk] = found
        return found

    @property
    def needs_lengths(self) -> bool:
        """Schedules depend on the step's lengths: `prepare` makes none without them."""
        return self._kind is not None and self._kind.needs_lengths

    def explain(self) -> str:
        """What serves decode and prefill rows, with the reasons against the others."""
        return self.route_decision.text()

    def prepare(
        self,
        num_rows: int,
        topk: int | None = None,
        extra_topk: int | None = None,
        *,
        lengths: StepLengths | None = None,
    ) -> None:
        """Make the schedule of a decode batch of so many rows; outside of graph capture, before the first layer of the step.

        Numbers that no schedule is made for are passed over. A shape that was prepared before costs a look-up, unless schedules
        depend on lengths (`ScheduleKind.needs_lengths`): then each step is prepared, those that replay a graph too.

        Args:
            topk, extra_topk: widths of the batch's lists where they are not the spec's. New widths allocate scratch, so
                schedules are kept for the spec's and the first few others; in calls of any others the implementation makes one
                for the call alone, as it does for shapes that are captured unprepared.
            lengths: of this step's rows. Where schedules depend on them and they are None, the implementation makes a schedule
                in each call of the step, without them.
        Raises: InvalidArgument.
        """
        spec, where = self.spec, "SlotAttention.prepare"
        if lengths is not None:
            check_type(where, "lengths", lengths, StepLengths, "StepLengths, or None")
        check_count(where, "num_rows", num_rows, 0)
        if topk is not None:
            check_count(where, "topk", topk, 1, spec.topk)
        if extra_topk is not None:
            check_count(where, "extra_topk", extra_topk, min(1, spec.extra_topk), spec.extra_topk)
        widths = spec.topk if topk is None else topk, spec.extra_topk if extra_topk is None else extra_topk
        shape = (num_rows, *widths)
        kind = self._kind
        if self.needs_lengths:
            # what other batches were prepared with are no lengths of this step
            self._schedules = {of: each for of, each in self._schedules.items() if of != shape and of[0] == num_rows}
            if lengths is None:
                return
        if kind is None or not 0 < num_rows <= spec.max_num_reqs or shape in self._schedules:
            return
        with neutral_defaults(), self._accelerator.guard():
            planner = self._planner(kind, *widths)
            if planner is not None:
                self._schedules[shape] = kind.schedule(planner, num_rows, 1, lengths)

    def forward(
        self,
        q: Tensor,
        kv: Cache,
        slots: Tensor,
        *,
        softmax_scale: float,
        decodes: bool,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv_cache: Cache | None = None,
        extra_slots: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of rows over the slots that they name.

        Args:
            q: [T, H, V + R] bf16. slots: [T, K] int32, K up to `spec.topk`, negative or past the cache = absent; duplicates
                count each time.
            kv: a paged cache [blocks, block_size, row width] of the spec's layout. Without scales also rows [W, row width]: a
                flat cache or a workspace; where these are no whole number of blocks, all calls are served as prefills.
            softmax_scale: factor on q.k. decodes: the rows are a decode batch, one to a few tokens of each request.
            lengths: [T] int32: from there on every slot of a row is absent. Implementations that are faster for it read only so
                many; the others read all. None where that is not known. attn_sink: [H] float32, where `spec.attn_sink`.
            extra_kv_cache, extra_slots, extra_lengths: where `spec.extra_topk`, a second cache as `kv`, in blocks of
                `spec.extra_block_size`, its slots [T, E] int32, E up to `spec.extra_topk`, and [T] int32 as `lengths`, given
                where those are. A row attends to both lists.
            out: [T, H, V] bf16, written; it overlaps no input. None for a fresh one, which some kernels make themselves: then
                nothing is copied.
        Returns: `out`. A row without a valid slot has zeros.
        Raises: InvalidArgument for what does not fit the spec, before anything runs.
        Graph-safe for decode batches that were prepared: no look-up in the registry and no read-back.
        """
        if not self._accelerator.is_current():
            with self._accelerator.guard():
                return self.forward(
                    q,
                    kv,
                    slots,
                    softmax_scale=softmax_scale,
                    decodes=decodes,
                    lengths=lengths,
                    attn_sink=attn_sink,
                    extra_kv_cache=extra_kv_cache,
                    extra_slots=extra_slots,
                    extra_lengths=extra_lengths,
                    out=out,
                )
        spec, second = self.spec, _Second(extra_kv_cache, extra_slots, extra_lengths)
        if not isinstance(q, Tensor) or q.device != self.device:  # pyright: ignore[reportUnnecessaryIsInstance]
            self._refuse_query(q)
        paged, rows = self._forms("kv", kv, spec.block_size)
        more, more_rows = self._second_forms(second, lengths)
        sizes = {"H": spec.num_heads, "key": spec.query_width, "value": spec.layout.value_width}
        TENSORS.check((q, kv, slots, lengths, attn_sink, *second, out), sizes)
        check_scale(TENSORS.where, "softmax_scale", softmax_scale)
        num_tokens, extra_topk = sizes["T"], 0 if extra_slots is None else sizes["E"]
        if sizes["K"] > spec.topk or extra_topk > spec.extra_topk or (attn_sink is None) == spec.attn_sink:
            self._refuse_numbers(sizes["K"], extra_topk, attn_sink)
        if num_tokens == 0:
            return self._empty(q) if out is None else out
        decodes = decodes and num_tokens <= spec.max_num_reqs
        in_blocks = paged is not None and (extra_kv_cache is None or more is not None)
        if self._prefill is None or (decodes and in_blocks and self._decoders):
            if paged is None or not in_blocks:
                second_at = "extra_kv_cache", extra_kv_cache, spec.extra_block_size
                name, cache, size = ("kv", kv, spec.block_size) if paged is None else second_at
                refuse(TENSORS.where, name, describe(cache), f"a multiple of {size} rows: sparse_decode serves all calls")
            schedule = self._schedule(num_tokens, sizes["K"], extra_topk)
            second = _Second(more, extra_slots, extra_lengths)
            return self._decode(q, paged, slots, softmax_scale, lengths, attn_sink, second, schedule, out)
        lse = self._lse_of(num_tokens)
        call, lengths, keywords = self._prefill.take(lengths, _Second(more_rows, extra_slots, extra_lengths))
        result, _ = call(
            q,
            rows,
            slots,
            softmax_scale=softmax_scale,
            lengths=lengths,
            attn_sink=attn_sink,
            out=out,
            lse_out=lse,
            **keywords,
        )
        return result if out is None else out

    def _decode(
        self,
        q: Tensor,
        cache: Cache,
        slots: Tensor,
        scale: float,
        lengths: Tensor | None,
        attn_sink: Tensor | None,
        second: _Second,
        schedule: DecodeSchedule | None,
        out: Tensor | None,
    ) -> Tensor:
        num_rows, lse = q.shape[0], self._lse_of(q.shape[0])
        counts = None if lengths is None else lengths.unsqueeze(1)
        call, counts, keywords = self._decoders[bisect_left(self._most_rows, num_rows)].take(counts, second.tokens())
        result, _ = call(
            q.unsqueeze(1),
            cache,
            slots.unsqueeze(1),
            softmax_scale=scale,
            lengths=counts,
            attn_sink=attn_sink,
            schedule=schedule,
            out=None if out is None else out.unsqueeze(1),
            lse_out=None if lse is None else lse.unsqueeze(1),
            **keywords,
        )
        return result.squeeze(1) if out is None else out

    def _forms(self, name: str, cache: Cache, block_size: int) -> tuple[Cache | None, Cache]:
        """A cache as sparse_decode reads it, None where rows are no whole number of blocks, and as sparse_prefill does."""
        spec, layout = self.spec, self.spec.layout
        if isinstance(cache, tuple) or layout.in_place:
            check_layer_cache(TENSORS.where, name, cache, spec, self.device, block_size=block_size)
            return cache, cache
        if isinstance(cache, Tensor) and cache.dim() == 3:  # pyright: ignore[reportUnnecessaryIsInstance]
            flat = self._prefill is not None
            check_layer_cache(TENSORS.where, name, cache, spec, self.device, block_size=block_size, flat=flat)
            return cache, cache.view(-1, layout.row_width) if flat else cache
        check_layer_rows(TENSORS.where, name, cache, spec, self.device)
        in_blocks = len(cache) % block_size == 0
        return cache.view(-1, block_size, layout.row_width) if in_blocks else None, cache

    def _second_forms(self, second: _Second, lengths: Tensor | None) -> tuple[Cache | None, Cache | None]:
        """Of the second cache, which is there where the spec says so, with its slots and, where `lengths` are, its lengths."""
        where, spec = TENSORS.where, self.spec
        if (second.cache is None) == bool(spec.extra_topk):
            refuse(where, "extra_kv_cache", describe(second.cache), f"what spec.extra_topk = {spec.extra_topk} says")
        if second.cache is None:
            for name, given in (("extra_slots", second.slots), ("extra_lengths", second.lengths)):
                if given is not None:
                    refuse(where, name, describe(given), "None without extra_kv_cache")
            return None, None
        if second.slots is None:
            refuse(where, "extra_slots", "None", "slots of extra_kv_cache")
        if (lengths is None) != (second.lengths is None):
            refuse(where, "extra_lengths", describe(second.lengths), "given where `lengths` are, and only there")
        return self._forms("extra_kv_cache", second.cache, spec.extra_block_size or 1)

    def _refuse_query(self, q: Tensor) -> NoReturn:
        check_dense(TENSORS.where, "q", q, f"[T, H, {self.spec.query_width}]")
        refuse(TENSORS.where, "q", f"a tensor on {q.device}", f"one on {self.device}, the layer's device")

    def _refuse_numbers(self, topk: int, extra_topk: int, attn_sink: Tensor | None) -> NoReturn:
        spec = self.spec
        check_sink(TENSORS.where, spec, attn_sink, self.device)
        name, got, most = ("slots", topk, spec.topk) if topk > spec.topk else ("extra_slots", extra_topk, spec.extra_topk)
        remedy = f"Build the layer with {'extra_topk' if name == 'extra_slots' else 'topk'}={got}."
        refuse(TENSORS.where, name, f"lists of {got}", f"at most {most}, as in the spec", remedy)

    def _schedule(self, num_rows: int, topk: int, extra_topk: int) -> DecodeSchedule | None:
        """That of a decode batch; None where the implementation takes none, or makes one for the call alone."""
        if self._kind is None or num_rows > self.spec.max_num_reqs:
            return None
        schedule = self._schedules.get((num_rows, topk, extra_topk))
        if schedule is None and not self.needs_lengths and not self._accelerator.is_capturing():
            self.prepare(num_rows, topk, extra_topk)
            schedule = self._schedules.get((num_rows, topk, extra_topk))
        return schedule

    def _lse_of(self, num_rows: int) -> Tensor | None:
        """Scratch for so many rows; None where they are more than the spec's, and the call allocates."""
        return self._lse[:num_rows] if num_rows <= self.spec.max_num_tokens else None

    def _empty(self, q: Tensor) -> Tensor:
        shape = (*q.shape[:2], self.spec.layout.value_width)
        return torch.empty(shape, dtype=torch.bfloat16, device=q.device)


def _check_decided(decision: RouteDecision, spec: AttentionSpec, facts: DeviceFacts, clean_slots: bool) -> None:
    """A decision that was made before is for these slots."""
    where = "SlotAttention"
    check_decided(where, decision, spec, facts, converts=False)
    attention = [p.decision.request for p in decision.verdict.parts if p.decision.request.primitive in _ATTENTION]
    if any(each.clean_indices != clean_slots for each in attention):
        refuse(where, "route_decision", f"a decision with clean_slots={not clean_slots}", f"clean_slots={clean_slots}")


def _bound(part: RoutePart, primitive: Primitive[F], demand: LayerRegistry) -> _ByLengths[F]:
    """What a part's decision chose, for calls without lengths and, where it skips missing keys, with them."""
    plain = demand.bound(part.decision, primitive)
    if not skips_missing_keys(plain.implementation):
        return _ByLengths(plain, None)
    skipping = demand.also(part.decision, lengths=True, extra_lengths=part.decision.request.extra_cache)
    return _ByLengths(plain, demand.bound(skipping, primitive) if skipping.request.lengths else None)
