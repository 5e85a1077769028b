# SPDX-License-Identifier: Apache-2.0
"""BoundRoute: the callables of a layer's route and how they are called, made once from the verdict on the route."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.attention.route_decision import RoutePart, RouteVerdict
from mla_portable.attention.spec import AttentionSpec
from mla_portable.choose.bound import Bound
from mla_portable.contracts import Decision, Request, ScheduleKind, StepPlan
from mla_portable.primitives import (
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    ConvertIndices,
    GatherUpconvert,
    SparseDecode,
    SparsePrefill,
)


@dataclass(frozen=True, slots=True, eq=False)
class BoundRoute:
    """What `SparseMLAAttention.forward` calls.

    Attributes:
        convert: convert_indices. share_arguments: its keywords for the spec's `ContextShare`.
        decoders: sparse_decode, one for each range of rows, ascending; () where sparse_prefill serves all tokens.
        apart: likewise, for calls that do not come right behind a conversion: without the promise `follows_in_order`.
        max_rows: rows of each decoder but the last, which has no limit.
        gather: gather_upconvert. prefill_gathered: sparse_prefill on what it wrote. None on a route without a workspace.
        prefill_in_place: sparse_prefill on the cache itself; None where all is gathered, or sparse_decode serves all tokens.
        prefill_takes_decodes: sparse_decode is the same kernel as `prefill_in_place`: in a step with prefills, one call for
            both fills the device better than two.
    """

    convert: Bound[ConvertIndices]
    share_arguments: Mapping[str, Any]
    decoders: tuple[Bound[SparseDecode], ...]
    apart: tuple[Bound[SparseDecode], ...]
    max_rows: tuple[int, ...]
    gather: Bound[GatherUpconvert] | None
    prefill_gathered: Bound[SparsePrefill] | None
    prefill_in_place: Bound[SparsePrefill] | None
    prefill_takes_decodes: bool

    @property
    def schedule_kind(self) -> ScheduleKind | None:
        """Of the decoders: several take no schedule."""
        return self.decoders[-1].implementation.schedule_kind if self.decoders else None

    @property
    def decode_request(self) -> Request[SparseDecode] | None:
        """What the decoder of the largest batches was made for."""
        return self.decoders[-1].request if self.decoders else None

    def decoder(self, rows: int, *, apart: bool) -> Bound[SparseDecode]:
        """The sparse_decode for a batch of so many rows. `apart`: it does not come right behind convert_indices."""
        return (self.apart if apart else self.decoders)[bisect_left(self.max_rows, rows)]

    def decodes(self, plan: StepPlan) -> bool:
        """The plan's decode tokens are served by sparse_decode, not by the sparse_prefill that serves what follows them."""
        if not self.decoders:
            return False
        if not self.prefill_takes_decodes or plan.num_prefill_tokens == 0:
            return True
        chunks = plan.prefill_chunks
        return bool(chunks) and chunks[0].tokens.start <= plan.num_decode_tokens  # a gathered chunk follows the decodes


def bind_route(spec: AttentionSpec, verdict: RouteVerdict, registry: LayerRegistry) -> BoundRoute:
    """Bind the parts of a route, each by the decision on it.

    Args:
        verdict: on a route that can serve, of `choose_route` for this spec and `registry`.
    Raises: what the implementations' own `bind` raises.
    """
    convert, gather = verdict.part("convert"), verdict.part("gather")
    assert convert is not None  # of every route of a layer
    prefill = None if verdict.route == "fused" else verdict.part("prefill")
    gathered, in_place = (prefill, verdict.part("in_place")) if gather else (None, prefill)
    decoding = decode_parts(verdict)
    decoders = tuple(registry.bound(part.decision, SPARSE_DECODE) for part in decoding)
    from_cache = registry.bound(in_place.decision, SPARSE_PREFILL) if in_place else None
    same_kernel = decoders and from_cache and decoders[-1].implementation.prefills_as == from_cache.implementation.name
    return BoundRoute(
        convert=registry.bound(convert.decision, CONVERT_INDICES),
        share_arguments=spec.share.arguments,
        decoders=decoders,
        apart=tuple(registry.bound(_without_order(part.decision), SPARSE_DECODE) for part in decoding),
        max_rows=tuple(part.most_rows for part in decoding if part.most_rows is not None),
        gather=registry.bound(gather.decision, GATHER_UPCONVERT) if gather else None,
        prefill_gathered=registry.bound(gathered.decision, SPARSE_PREFILL) if gathered else None,
        prefill_in_place=from_cache,
        prefill_takes_decodes=bool(same_kernel) and not spec.batch_invariant,
    )


def _without_order(decision: Decision) -> Decision:
    """The same choice, bound without the promise about the kernel in front: promises never decide what can run."""
    return replace(decision, request=decision.request.but(follows_in_order=False))


def decode_parts(verdict: RouteVerdict) -> list[RoutePart]:
    """Those that serve decode tokens, ascending by rows; the one without a limit comes last."""
    return sorted((part for part in verdict.parts if part.role == "decode"), key=lambda part: part.most_rows is None)
