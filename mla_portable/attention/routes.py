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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final

from mla_portable.attention.converter import Converter
from mla_portable.attention.layer_registry import LayerRegistry, forced_but_unused
from mla_portable.attention.route_decision import NOT_OFFERED, NOT_SERVED, RouteDecision, RoutePart, RouteVerdict
from mla_portable.attention.spec import AUTO_ROUTE, AttentionSpec
from mla_portable.choose.select import Ranking
from mla_portable.contracts import Decision, DeviceFacts, Reason, Request
from mla_portable.contracts.decision import grouped
from mla_portable.planner.config import least_workspace
from mla_portable.primitives import CONVERT_INDICES, GATHER_UPCONVERT, SPARSE_DECODE, SPARSE_PREFILL
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
    cache, in_place, gathered = spec.cache_facts(), spec.attention_facts(in_place=True), spec.attention_facts(in_place=False)
    # a small deployment is served by who is fast at its size, where that was measured
    rows = spec.max_num_reqs * spec.decode_query_len
    decode = Request(SPARSE_DECODE, device, **in_place, **cache, query_len=spec.decode_query_len, rows=rows, graph=spec.graph)
    seen = spec.cache_facts(as_rows=not spec.layout.in_place)  # by sparse_prefill
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
        "cache_prefill": Request(SPARSE_PREFILL, device, **in_place, **seen),
        "bf16_prefill": Request(SPARSE_PREFILL, device, **gathered, kv_layout=spec.layout.workspace.name),
        "gather": Request(GATHER_UPCONVERT, device, **cache),
    }


def choose_route(
    spec: AttentionSpec, device: DeviceFacts, registry: LayerRegistry, *, clean_slots: bool | None = None
) -> RouteDecision:
    """Rank the routes for `spec` on `device`; a pure function of what `registry` answers.

    Each part is decided on the very request that it is bound for, promises included (`Converter`), so that what is chosen is
    what runs.

    A forced route (`spec.route`) is considered alone. An automatic choice takes the first by `Ranking` that can serve, ties
    by the smaller workspace, then in the order direct, split, fused, upconvert. Without any implementation of sparse_decode,
    `direct` gives decode tokens to sparse_prefill as well. A route that leaves out a primitive for which a backend is forced is
    refused (`forced_but_unused`).

    Args:
        clean_slots: None where convert_indices makes the slots. Where the caller gives them, whether they are promised to be
            clean (`Request.clean_indices`); lengths are then left to the caller.
    """
    requests = route_requests(spec, device)
    workspace_bytes = spec.workspace_rows * spec.layout.workspace.row_bytes
    memory_share = workspace_bytes / device.memory_bytes if device.memory_bytes else 0.0
    converts = clean_slots is None
    to_slots = Converter.of(requests["convert"], registry) if converts else None

    def attention(request: Request, converter: Converter | None = to_slots, *, clean: bool = True) -> Decision:
        """On sparse_decode or sparse_prefill, over the indices of that converter, or over those of the caller."""
        if converter is not None:
            return converter.followed_by(request, registry, clean=clean)
        return registry.decide(request.but(clean_indices=bool(clean_slots)))

    def behind(converter: Converter | None, *parts: RoutePart) -> tuple[RoutePart, ...]:
        """All parts of a route, the conversion of its indices first."""
        if converter is None:
            return parts
        return RoutePart("convert", converter.decision(part.decision for part in parts)), *parts

    # what only routes with a workspace have is asked for where one is considered: each answer may take a probe

    def to_rows() -> Converter | None:
        return Converter.of(requests["workspace_convert"], registry) if converts else None

    def gathered() -> Decision:
        return attention(requests["bf16_prefill"], to_rows(), clean=False)

    def gather() -> Decision:
        return registry.decide(requests["gather"])

    decode = attention(requests["decode"])
    in_place = attention(requests["cache_prefill"])

    def fused() -> RouteVerdict:
        kind = registry.schedule_kind(decode)
        least = kind.fused_below_heads if kind else 0
        few = spec.num_heads < least
        prefill = RoutePart("prefill", decode, _FUSED_PREFILL_FEW_HEADS if few else _OTHER_KERNEL)
        note = f"fewer than {least} heads: prefill tokens need no kernel of their own" if few else ""
        return _verdict("fused", behind(to_slots, RoutePart("decode", decode, 1.0), prefill), note=note)

    def direct() -> RouteVerdict:
        against = _gaps_between_blocks(spec)
        if decode.chosen:
            parts = RoutePart("decode", decode, 1.0), RoutePart("prefill", in_place, 1.0)
            return _verdict("direct", behind(to_slots, *parts), against)
        both = attention(requests["cache_prefill"].but(graph=spec.graph))
        parts = behind(to_slots, RoutePart("prefill", both, _OTHER_KERNEL))
        return _verdict("direct", parts, against, note="sparse_prefill serves decode tokens too")

    def split() -> RouteVerdict:
        of_cache = [attention(requests[name], to_rows()) for name in ("decode", "cache_prefill")]
        parts = RoutePart("decode", of_cache[0], 1.0), RoutePart("prefill", gathered(), 1.0)
        parts = *parts, RoutePart("gather", gather(), _GATHER_PREFILL)
        times = prefill_times(of_cache[1])
        against = *_gather_without_use(spec), *_workspace_too_small(spec, times)
        if times is None:
            return _verdict("split", behind(to_rows(), *parts), against)
        parts = *parts, RoutePart("in_place", of_cache[1])
        note = "a chunk that is faster on the cache itself, by the times on record, is not gathered"
        return replace(_verdict("split", behind(to_rows(), *parts), against, note=note), prefill_times=times)

    def prefill_times(of_cache: Decision) -> PrefillTimes | None:
        """Of the two ways of a prefill, where both and the gather were timed and results may depend on the batch."""
        if spec.route != AUTO_ROUTE or spec.batch_invariant or not spec.layout.in_place:
            return None
        us = [registry.times(each) for each in (of_cache, gathered(), gather())]
        return PrefillTimes(*map(Times, us)) if all(us) else None

    def upconvert() -> RouteVerdict:
        parts = RoutePart("prefill", gathered(), _OTHER_KERNEL), RoutePart("gather", gather(), 1.0)
        against = *_gather_without_use(spec), *_workspace_too_small(spec, None)
        if spec.graph:
            limit = "upconvert gathers as many rows as the batch has, which no graph can"
            against = (*against, Reason("graph", "yes", limit, "set graph=False, or take another route"))
        note = "every step gathers every context"
        return _verdict("upconvert", behind(to_rows(), *parts), against, fixed_cost=_EVERY_STEP, note=note)

    def completed(verdict: RouteVerdict) -> RouteVerdict:
        """The verdict with its workspace, and a reason for each forced backend that the route does not use."""
        if verdict.part("gather"):
            verdict = replace(verdict, workspace_bytes=workspace_bytes, memory_share=memory_share)
        forcible = [decode, in_place if in_place.chosen else gathered()]
        if spec.route == AUTO_ROUTE and spec.layout.in_place:
            forcible.append(gather())
        present = [each.decision for each in verdict.parts]
        against = [reason for decision in forcible for reason in forced_but_unused(decision, present)]
        return replace(verdict, reasons=(*verdict.reasons, *against)) if against else verdict

    routes = {"direct": direct, "split": split, "fused": fused, "upconvert": upconvert}
    forced = None if spec.route == AUTO_ROUTE else spec.route
    considered = [completed(route()) for name, route in routes.items() if forced in (None, name)]
    best, *others = _ranked(considered)
    largest = best.part("decode")
    if best.can_run and largest and not spec.batch_invariant:
        converter = to_rows() if best.part("gather") else to_slots
        fewer = _by_rows(requests["decode"], largest.decision, registry, partial(attention, converter=converter))
        if fewer:
            kept = [part for part in best.parts if part.role != "convert"]
            best = replace(best, parts=behind(converter, *kept, *fewer))
    return RouteDecision(spec, device, best.route if best.can_run else None, forced, (best, *others))


def _by_rows(
    request: Request, largest: Decision, registry: LayerRegistry, ask: Callable[[Request], Decision]
) -> tuple[RoutePart, ...]:
    """What serves batches with fewer rows than `request`, where the registry chooses something else at their size.

    `ask` decides on decode batches as for the largest one.

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
            decision = ask(request.but(rows=rows))
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
    if spec.layout.in_place or spec.route != AUTO_ROUTE:
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
    if spec.layout.in_place or spec.contiguous_blocks:
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
