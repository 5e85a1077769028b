# SPDX-License-Identifier: Apache-2.0
"""Choosing a route: which composition of primitives serves a layer, ranked like implementations, with reasons as data.

A route's cost is the sum of what serves its decode tokens, its prefill tokens and its gather: the cost of the implementation
that the registry chose times a weight. Weights are judgements about work, the same on every device.

A workspace has a price: the cost grows by the share of the device's memory that it takes (0 where the memory is not known).
A route is measured if its parts are, but for a tenth of their weights, and it has no fixed cost. `Ranking` then ranks routes
as it ranks implementations, and within a tie the smaller workspace comes first. A route whose costs are of both scales is
ranked by their sum, as a declared 10 stands for a vendor's kernel and a measured 10 for the fastest.

Where both ways to serve a prefill were timed, and the gather, `split` takes the faster one in each step: see `PrefillTimes`.
Where several implementations of sparse_decode were timed, a decode batch is served by the one that the registry chooses for its
number of rows; the cost is that of the largest batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from mla_portable.attention.layer_registry import LayerRegistry, forced_but_unused
from mla_portable.attention.route_decision import NOT_OFFERED, NOT_SERVED, Role, RouteDecision, RoutePart, RouteVerdict
from mla_portable.attention.spec import AUTO_ROUTE, AttentionSpec
from mla_portable.contracts import Decision, DeviceFacts, Reason, Request
from mla_portable.contracts.decision import grouped
from mla_portable.planner.config import least_workspace
from mla_portable.primitives import CONVERT_INDICES, GATHER_UPCONVERT, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.registry.select import Ranking
from mla_portable.times.prefill import PrefillTimes
from mla_portable.times.rows import Times

_OTHER_KERNEL: Final = 2.0
"""Prefill tokens through sparse_decode, or decode tokens through sparse_prefill."""
_FUSED_PREFILL_FEW_HEADS: Final = 0.5
"""Prefill tokens through sparse_decode with fewer heads than `ScheduleKind.fused_below_heads`."""
_GATHER_PREFILL: Final = 0.02
"""The gather of prefill contexts, of a prefill's time. A judgement, too, by 8 to 16 rows a token and 64 heads on an H200; where
the gather was timed, `PrefillTimes` decides in each step."""
_EVERY_STEP: Final = 200.0
"""What upconvert costs beyond its parts: it is for devices where only the reference (cost 1000) decodes FP8."""
WEIGHTS_TEXT: Final = (
    "cost of a route: the sum of its parts, each times its weight in a step. "
    f"x {_OTHER_KERNEL:g}: prefill through a decode kernel, or decode through one for prefill; "
    f"x {_GATHER_PREFILL:g}: the gather before a prefill; + {_EVERY_STEP:g}: every context is gathered in every step"
)
_TERMS: Final = 2
"""Of a route's cost: what serves decode tokens, mostly the same on every route, and what serves prefill tokens."""


def route_requests(spec: AttentionSpec, device: DeviceFacts) -> Mapping[str, Request]:
    """The requests to the registry for a layer's routes, by name.

    "cache_prefill" reads the cache itself, "bf16_prefill" a bf16 workspace.
    """
    attention: dict[str, Any] = {
        "device": device,
        "num_heads": spec.num_heads,
        "topk": spec.topk,
        "lse": spec.need_lse,
        "attn_sink": spec.attn_sink,
        "batch_invariant": spec.batch_invariant,
    }
    layout = spec.layout
    cache: dict[str, Any] = {
        "kv_layout": spec.kv_layout,
        "block_size": spec.block_size,
        "scale_format": spec.scale_format if layout.is_quantized else None,
        "cache_alignment": spec.cache_alignment,
        "uneven_blocks": not spec.contiguous_blocks,
    }
    in_place = {**attention, "nope": spec.nope}
    if spec.extra_topk:
        in_place |= {"extra_topk": spec.extra_topk, "extra_block_size": spec.extra_block_size}
    # a small deployment is served by who is fast at its size, where that was measured
    rows = spec.max_num_reqs * spec.decode_query_len
    decode = Request(SPARSE_DECODE, **in_place, **cache, query_len=spec.decode_query_len, rows=rows, graph=spec.graph)
    # sparse_prefill sees a cache without scales as flat rows
    flat: dict[str, Any] = {"kv_layout": layout.name, "cache_alignment": spec.cache_alignment}
    seen = cache if layout.is_quantized else flat
    convert = Request(
        CONVERT_INDICES,
        device,
        topk=spec.topk,
        block_size=spec.block_size,
        context_parallel=spec.share.size > 1,
        graph=spec.graph,
    )
    return {
        "convert": convert,
        "workspace_convert": convert.but(prefill_workspace=True),
        "decode": decode,
        "cache_prefill": Request(SPARSE_PREFILL, **in_place, **seen),
        "bf16_prefill": Request(SPARSE_PREFILL, **attention, kv_layout=layout.workspace.name),
        "gather": Request(GATHER_UPCONVERT, device, **cache),
    }


def choose_route(spec: AttentionSpec, device: DeviceFacts, registry: LayerRegistry) -> RouteDecision:
    """Rank the routes for `spec` on `device`; a pure function of what `registry` answers.

    A forced route (`spec.route`) is considered alone. An automatic choice takes the first by `Ranking` that can serve, ties
    by the smaller workspace, then in the order direct, split, fused, upconvert. Without any implementation of sparse_decode,
    `direct` gives decode tokens to sparse_prefill as well. A route that leaves out a primitive for which a backend is forced is
    refused (`forced_but_unused`).
    """
    requests = route_requests(spec, device)
    workspace_bytes = spec.workspace_rows * spec.layout.workspace.row_bytes
    memory_share = workspace_bytes / device.memory_bytes if device.memory_bytes else 0.0
    decisions: dict[str, Decision] = {}

    def decide(name: str, *, graph: bool = False) -> Decision:
        key = f"{name}+graph" if graph else name
        if key not in decisions:
            decisions[key] = registry.decide(requests[name].but(graph=True) if graph else requests[name])
        return decisions[key]

    def part(role: Role, name: str, weight: float = 0.0, *, graph: bool = False) -> RoutePart:
        return RoutePart(role, decide(name, graph=graph), weight)

    def fused() -> RouteVerdict:
        decode = part("decode", "decode", 1.0)
        kind = registry.schedule_kind(decode.decision)
        least = kind.fused_below_heads if kind else 0
        few = spec.num_heads < least
        prefill = part("prefill", "decode", _FUSED_PREFILL_FEW_HEADS if few else _OTHER_KERNEL)
        note = f"fewer than {least} heads: prefill tokens need no kernel of their own" if few else ""
        return _verdict("fused", (part("convert", "convert"), decode, prefill), note=note)

    def direct() -> RouteVerdict:
        convert, decode = part("convert", "convert"), part("decode", "decode", 1.0)
        against = _gaps_between_blocks(spec)
        if decode.decision.chosen:
            return _verdict("direct", (convert, decode, part("prefill", "cache_prefill", 1.0)), against)
        prefill = part("prefill", "cache_prefill", _OTHER_KERNEL, graph=spec.graph)
        return _verdict("direct", (convert, prefill), against, note="sparse_prefill serves decode tokens too")

    def split() -> RouteVerdict:
        parts = (
            part("convert", "workspace_convert"),
            part("decode", "decode", 1.0),
            part("prefill", "bf16_prefill", 1.0),
            part("gather", "gather", _GATHER_PREFILL),
        )
        times = prefill_times()
        against = *_gather_without_use(spec), *_workspace_too_small(spec, times)
        if times is None:
            return _verdict("split", parts, against)
        parts = *parts, part("in_place", "cache_prefill")
        note = "a chunk that is faster on the cache itself, by the times on record, is not gathered"
        return replace(_verdict("split", parts, against, note=note), prefill_times=times)

    def prefill_times() -> PrefillTimes | None:
        """Of the two ways of a prefill, where both and the gather were timed and results may depend on the batch."""
        if spec.route != AUTO_ROUTE or spec.batch_invariant or not spec.layout.is_quantized:
            return None
        us = [registry.times(decide(name)) for name in ("cache_prefill", "bf16_prefill", "gather")]
        return PrefillTimes(*map(Times, us)) if all(us) else None

    def upconvert() -> RouteVerdict:
        parts = (
            part("convert", "workspace_convert"),
            part("prefill", "bf16_prefill", _OTHER_KERNEL),
            part("gather", "gather", 1.0),
        )
        against = *_gather_without_use(spec), *_workspace_too_small(spec, None)
        if spec.graph:
            limit = "upconvert gathers as many rows as the batch has, which no graph can"
            against = (*against, Reason("graph", "yes", limit, "set graph=False, or take another route"))
        return _verdict("upconvert", parts, against, fixed_cost=_EVERY_STEP, note="every step gathers every context")

    def completed(verdict: RouteVerdict) -> RouteVerdict:
        """The verdict with its workspace, and a reason for each forced backend that the route does not use."""
        if verdict.part("gather"):
            verdict = replace(verdict, workspace_bytes=workspace_bytes, memory_share=memory_share)
        prefill = decide("cache_prefill")
        forcible = [decide("decode"), prefill if prefill.chosen else decide("bf16_prefill")]
        if spec.route == AUTO_ROUTE and spec.layout.is_quantized:
            forcible.append(decide("gather"))
        present = [each.decision for each in verdict.parts]
        against = [reason for decision in forcible for reason in forced_but_unused(decision, present)]
        return replace(verdict, reasons=(*verdict.reasons, *against)) if against else verdict

    routes = {"direct": direct, "split": split, "fused": fused, "upconvert": upconvert}
    forced = None if spec.route == AUTO_ROUTE else spec.route
    considered = [completed(route()) for name, route in routes.items() if forced in (None, name)]
    best, *others = _ranked(considered)
    decode = best.part("decode")
    if best.can_run and decode and not spec.batch_invariant:
        best = replace(best, parts=(*best.parts, *_by_rows(requests["decode"], decode.decision, registry)))
    return RouteDecision(spec, device, best.route if best.can_run else None, forced, (best, *others))


def _by_rows(request: Request, largest: Decision, registry: LayerRegistry) -> tuple[RoutePart, ...]:
    """What serves batches with fewer rows than `request`, where the registry chooses something else at their size.

    Between two sizes with different choices the last number of rows is searched for which the first choice holds: there their
    times, linear in between, cross. Only implementations that take no schedule stand in for one another, for a plan holds
    schedules of one kind.
    """
    most = request.rows
    if most is None or registry.schedule_kind(largest):
        return ()
    decided = {most: largest}

    def at(rows: int) -> Decision:
        if rows not in decided:
            decision = registry.decide(request.but(rows=rows))
            decided[rows] = largest if decision.chosen is None or registry.schedule_kind(decision) else decision
        return decided[rows]

    def changes(few: int, many: int) -> Iterator[int]:
        """The numbers of rows in [few, many) after which the choice is another one."""
        if at(few).chosen == at(many).chosen:
            return
        if many - few == 1:
            yield few
            return
        middle = (few + many) // 2
        yield from changes(few, middle)
        yield from changes(middle, many)

    sizes = [*(rows for rows in registry.timed_rows(request) if rows < most), most]
    return tuple(RoutePart("decode", at(rows), most_rows=rows) for pair in pairwise(sizes) for rows in changes(*pair))


def _ranked(verdicts: list[RouteVerdict]) -> tuple[RouteVerdict, ...]:
    """Best first; those that cannot serve last."""
    ranking = Ranking((v.standing for v in verdicts if v.can_run), terms=_TERMS)
    tied = [v for v in verdicts if v.can_run and ranking.tied(v.standing)]

    def with_note(verdict: RouteVerdict) -> RouteVerdict:
        if len(tied) < 2 or verdict not in tied:
            return verdict
        why = "a tie, the smaller workspace decides"
        return replace(verdict, note="; ".join(filter(None, (verdict.note, why))))

    def key(verdict: RouteVerdict) -> tuple[bool, tuple[bool, float], int]:
        return not verdict.can_run, ranking.key(verdict.standing), verdict.workspace_bytes

    return tuple(map(with_note, sorted(verdicts, key=key)))


def _gather_without_use(spec: AttentionSpec) -> tuple[Reason, ...]:
    """A bf16 cache is read in place; copying it to bf16 rows first is only done if the route is forced.

    Gathered rows have the rotary part that queries of `spec.nope` lack.
    """
    if spec.nope:
        why = "gathered rows have a rotary part, which only rows with scales are read without"
        return (Reason("nope", "yes", why, "take route direct or fused"),)
    if spec.layout.is_quantized or spec.route != AUTO_ROUTE:
        return ()
    return (
        Reason("kv_layout", spec.kv_layout, "the route would only copy it to a workspace", "force the route to use it anyway"),
    )


def _workspace_too_small(spec: AttentionSpec, times: PrefillTimes | None) -> tuple[Reason, ...]:
    """The route's planner would refuse the workspace."""
    if spec.workspace_rows >= least_workspace(spec.max_model_len, times):
        return ()
    limit = f"at least max_model_len = {spec.max_model_len}, so that any one sequence fits"
    return (Reason("prefill_workspace_tokens", str(spec.workspace_rows), limit, "enlarge it, or take route fused or direct"),)


def _gaps_between_blocks(spec: AttentionSpec) -> tuple[Reason, ...]:
    """sparse_prefill reads a cache without scales as flat rows."""
    if spec.layout.is_quantized or spec.contiguous_blocks:
        return ()
    why = f"a {spec.kv_layout} cache is read as flat rows"
    return (Reason("contiguous_blocks", "no", why, "take route fused, split or upconvert"),)


def _verdict(
    route: str, parts: tuple[RoutePart, ...], against: tuple[Reason, ...] = (), *, fixed_cost: float = 0.0, note: str = ""
) -> RouteVerdict:
    missing: dict[str, Reason] = {}
    for part in parts:
        decision = part.decision
        if decision.chosen is None:
            why = "; ".join(grouped(decision.causes))
            name = str(decision.request.primitive)
            missing[name] = Reason(name, NOT_SERVED, why or NOT_OFFERED, "`mla-portable doctor`")
    return RouteVerdict(route, parts, (*against, *missing.values()), fixed_cost, note)
