# SPDX-License-Identifier: Apache-2.0
"""SlotAttention: one layer's attention where the engine's indexer names slots of the cache, not positions in a request.

Nothing is converted, gathered or planned: every token is a row with its own list of slots. Rows of a decode batch go through
sparse_decode with a schedule of their number. Rows of prefills, and more rows than the spec allows, go through sparse_prefill
on the cache itself, or through sparse_decode where nothing else reads the cache in place. Nothing is promised about slots: the
implementations check each of them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention.bound_route import skips_missing_keys
from mla_portable.attention.layer_registry import BackendChoice, LayerRegistry
from mla_portable.attention.route_decision import RouteDecision, RoutePart
from mla_portable.attention.routes import choose_route
from mla_portable.attention.spec import AttentionSpec
from mla_portable.contracts import (
    DecodeSchedule,
    DeviceFacts,
    InvalidArgument,
    ScheduleLimits,
    SchedulePlanner,
    neutral_defaults,
)
from mla_portable.contracts.primitive import F, Primitive
from mla_portable.contracts.values import check_type, device_of, refuse
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparsePrefill
from mla_portable.primitives.sparse_decode import check as check_decode
from mla_portable.primitives.sparse_prefill import check as check_prefill
from mla_portable.registry import Registry, get_registry


@dataclass(frozen=True, slots=True, eq=False)
class _Bound(Generic[F]):
    """A bound primitive: for calls without lengths, and for calls with them where it is faster for it (None: it is not)."""

    plain: F
    skipping: F | None

    def take(self, lengths: Tensor | None) -> tuple[F, Tensor | None]:
        """What serves a call, and the lengths that it is given."""
        return (self.plain, None) if lengths is None or self.skipping is None else (self.skipping, lengths)


def choose_slot_route(spec: AttentionSpec, device: DeviceFacts, registry: LayerRegistry) -> RouteDecision:
    """The route of a SlotAttention: "direct", or "fused" where nothing but sparse_decode reads the cache in place."""
    direct = choose_route(replace(spec, route="direct"), device, registry)
    if direct.chosen is not None:
        return direct
    fused = choose_route(replace(spec, route="fused"), device, registry)
    return direct if fused.chosen is None else fused


class SlotAttention:
    """Attention over given slots. Not thread-safe: its decode calls share scratch, so they follow one another on one stream.

    Attributes:
        spec, device: as built. A row counts as a request, so `spec.max_num_reqs` bounds the rows of a decode batch.
        facts: `DeviceFacts` of the device. route_decision: what serves, and why.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        device: torch.device | str,
        registry: Registry | None = None,
        backend: BackendChoice = None,
    ) -> None:
        """Choose and bind what serves; allocate the scratch of decode batches.

        Args:
            spec: with decode_query_len 1, no lse and no share: nothing else is served. device, registry, backend: as of
                SparseMLAAttention.
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
        registry = get_registry() if registry is None else registry
        self.facts = registry.facts(self.device)
        self._accelerator = accelerator(self.device)
        demand = LayerRegistry(registry, backend)
        self.route_decision = choose_slot_route(spec, self.facts, demand)
        verdict = self.route_decision.verdict  # raises where there is none
        decoding = sorted((p for p in verdict.parts if p.role == "decode"), key=lambda part: part.most_rows is None)
        self._decoders = tuple(_bound(part, SPARSE_DECODE, demand) for part in decoding)
        self._most_rows = tuple(part.most_rows for part in decoding if part.most_rows is not None)
        prefill = verdict.part("prefill")
        assert prefill is not None  # of both routes
        self._prefill: _Bound[SparsePrefill] | None = None
        if verdict.route == "direct":
            self._prefill = _bound(prefill, SPARSE_PREFILL, demand)
        self._planner = self._schedule_planner(decoding, demand)
        self._schedules: dict[int, DecodeSchedule] = {}

    def _schedule_planner(self, decoding: list[RoutePart], demand: LayerRegistry) -> SchedulePlanner | None:
        decoder = demand.chosen(decoding[-1].decision) if decoding else None
        if decoder is None or decoder.schedule_kind is None:
            return None
        spec, request = self.spec, decoding[-1].decision.request
        limits = ScheduleLimits(
            device=self.device,
            num_heads=spec.num_heads,
            topk=spec.topk,
            max_num_rows=spec.max_num_reqs,
            num_sms=self.facts.num_sms,
            arch=self.facts.arch,
            max_scratch_bytes=spec.max_scratch_bytes,
            batch_invariant=spec.batch_invariant,
            request=demand.configured(decoder, request),
        )
        with neutral_defaults():
            return decoder.schedule_kind.planner(limits)

    def explain(self) -> str:
        """What serves decode and prefill rows, with the reasons against the others."""
        return self.route_decision.text()

    def prepare(self, num_rows: int) -> None:
        """Make the schedule of a decode batch of so many rows; outside of graph capture, before the first layer of the step.

        Numbers that no schedule is made for are passed over. A shape that was prepared before costs a look-up.
        """
        if self._planner is not None and 0 < num_rows <= self.spec.max_num_reqs and num_rows not in self._schedules:
            with neutral_defaults():
                self._schedules[num_rows] = self._planner.get(num_rows, 1)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        slots: Tensor,
        *,
        softmax_scale: float,
        decodes: bool,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
    ) -> Tensor:
        """Attention of rows over the slots that they name.

        Args:
            q: [T, H, V + R] bf16. slots: [T, K] int32, negative or past the cache = absent; duplicates count each time.
            kv: the paged cache [blocks, block_size, row width] of a quantised layout, else rows [W, row width]: a flat cache or
                a workspace. Slots of rows that are no whole number of blocks are served as prefills.
            softmax_scale: factor on q.k. decodes: the rows are a decode batch, one to a few tokens of each request.
            lengths: [T] int32: from there on every slot of a row is absent. Implementations that are faster for it read only so
                many; the others read all. None where that is not known. attn_sink: [H] float32, where `spec.attn_sink`.
        Returns: [T, H, V] bf16, fresh. A row without a valid slot has zeros.
        Raises: InvalidArgument before anything runs.
        Graph-safe for decode batches that were prepared: no look-up in the registry and no read-back.
        """
        num_tokens = q.shape[0]
        layout, block_size = self.spec.layout, self.spec.block_size
        decodes = decodes and num_tokens <= self.spec.max_num_reqs
        paged = layout.is_quantized or kv.shape[0] % block_size == 0
        if self._prefill is None or (decodes and paged and self._decoders):
            if not paged:
                refuse(
                    "SlotAttention", "kv", f"{kv.shape[0]} rows", f"a multiple of {block_size}: sparse_decode serves all rows"
                )
            cache = kv if layout.is_quantized else kv.view(-1, block_size, layout.row_width)
            return self._decode(q, cache, slots, softmax_scale, lengths, attn_sink)
        check_prefill(q, kv, slots, softmax_scale, lengths, attn_sink, None, None, None, None, None)
        self._check_sink(attn_sink)
        call, lengths = self._prefill.take(lengths)
        out = self._empty(q)
        if num_tokens:
            call(q, kv, slots, softmax_scale=softmax_scale, lengths=lengths, attn_sink=attn_sink, out=out)
        return out

    def _decode(
        self, q: Tensor, cache: Tensor, slots: Tensor, scale: float, lengths: Tensor | None, attn_sink: Tensor | None
    ) -> Tensor:
        num_rows = q.shape[0]
        schedule = self._schedule(num_rows)
        rows, indices = q.unsqueeze(1), slots.unsqueeze(1)
        counts = None if lengths is None else lengths.unsqueeze(1)
        check_decode(rows, cache, indices, scale, counts, attn_sink, None, None, None, schedule, None, None)
        self._check_sink(attn_sink)
        call, counts = self._decoders[bisect_left(self._most_rows, num_rows)].take(counts)
        out = self._empty(q)
        if num_rows:
            call(
                rows,
                cache,
                indices,
                softmax_scale=scale,
                lengths=counts,
                attn_sink=attn_sink,
                schedule=schedule,
                out=out.unsqueeze(1),
            )
        return out

    def _schedule(self, num_rows: int) -> DecodeSchedule | None:
        """That of a decode batch; None where the implementation takes none, or makes one for the call alone."""
        if self._planner is None or not 0 < num_rows <= self.spec.max_num_reqs:
            return None
        schedule = self._schedules.get(num_rows)
        if schedule is None and not self._accelerator.is_capturing():
            self.prepare(num_rows)
            schedule = self._schedules[num_rows]
        return schedule

    def _check_sink(self, attn_sink: Tensor | None) -> None:
        if attn_sink is not None and not self.spec.attn_sink:
            raise InvalidArgument("SlotAttention", "attn_sink", got="a tensor", expected="None, as spec.attn_sink is False")

    def _empty(self, q: Tensor) -> Tensor:
        shape = (*q.shape[:2], self.spec.layout.value_width)
        return torch.empty(shape, dtype=torch.bfloat16, device=q.device)


def _bound(part: RoutePart, primitive: Primitive[F], demand: LayerRegistry) -> _Bound[F]:
    """What a part's decision chose, for calls without lengths and, where it skips missing keys, with them."""
    request = part.decision.request.of(primitive)
    skips = skips_missing_keys(demand.chosen(part.decision))
    return _Bound(demand.bind(request), demand.bind(request.but(lengths=True)) if skips else None)
