# SPDX-License-Identifier: Apache-2.0
"""BoundRoute: the callables of a layer's route and how they are called, made once from the verdict on the route."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.attention.route_decision import RoutePart, RouteVerdict
from mla_portable.attention.spec import AttentionSpec
from mla_portable.contracts import Implementation, Request, ScheduleKind, StepPlan
from mla_portable.contracts.primitive import F, Primitive
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
class BoundAttention(Generic[F]):
    """sparse_decode or sparse_prefill. call: the bound implementation. with_lengths: it is given lengths."""

    call: F
    with_lengths: bool


@dataclass(frozen=True, slots=True, eq=False)
class BoundRoute:
    """What `SparseMLAAttention.forward` calls.

    Attributes:
        convert: convert_indices. compact: what it is asked for. takes_seq_lens: it is given the plan's lengths where there are
            such. share_arguments: its keywords for the spec's `ContextShare`.
        decoders: sparse_decode, one for each range of rows, ascending; () where sparse_prefill serves all tokens.
        max_rows: rows of each decoder but the last, which has no limit.
        gather: gather_upconvert. prefill_gathered: sparse_prefill on what it wrote. None on a route without a workspace.
        prefill_in_place: sparse_prefill on the cache itself; None where all is gathered, or sparse_decode serves all tokens.
        prefill_takes_decodes: sparse_decode is the same kernel as `prefill_in_place`: in a step with prefills, one call for
            both fills the device better than two.
        schedule_kind: of the last decoder. decode_request: what that is bound for, with its configuration. None without one.
    """

    convert: ConvertIndices
    compact: bool
    takes_seq_lens: bool
    share_arguments: Mapping[str, Any]
    decoders: tuple[BoundAttention[SparseDecode], ...]
    max_rows: tuple[int, ...]
    gather: GatherUpconvert | None
    prefill_gathered: BoundAttention[SparsePrefill] | None
    prefill_in_place: BoundAttention[SparsePrefill] | None
    prefill_takes_decodes: bool
    schedule_kind: ScheduleKind | None
    decode_request: Request[SparseDecode] | None

    def decoder(self, rows: int) -> BoundAttention[SparseDecode]:
        """The sparse_decode for a batch of so many rows."""
        return self.decoders[bisect_left(self.max_rows, rows)]

    def decodes(self, plan: StepPlan) -> bool:
        """The plan's decode tokens are served by sparse_decode, not by the sparse_prefill that serves what follows them."""
        if not self.decoders:
            return False
        if not self.prefill_takes_decodes or plan.num_prefill_tokens == 0:
            return True
        chunks = plan.prefill_chunks
        return bool(chunks) and chunks[0].tokens.start <= plan.num_decode_tokens  # a gathered chunk follows the decodes


def bind_route(spec: AttentionSpec, verdict: RouteVerdict, registry: LayerRegistry) -> BoundRoute:
    """Bind the parts of a route, each for the request that was decided on, with the promises that a layer can make.

    Slots of the cache come from convert_indices, which makes every slot outside of the cache -1. Rows of a workspace may lie
    past its end, so for them nothing is promised. Decode tokens come first, so the kernel in front of sparse_decode is that of
    convert_indices.

    A token early in its sequence has fewer than K keys. Implementations that accept `lengths` skip the missing keys, with the
    counts of compacted indices as lengths. A sparse_decode whose schedule assumes K keys in every row is not given any.

    Args:
        verdict: on a route that can serve, of `choose_route` for this spec and `registry`.
    Raises: UnsupportedRequest.
    """
    convert, gather, decode = verdict.part("convert"), verdict.part("gather"), verdict.part("decode")
    assert convert is not None  # of every route
    prefill = None if verdict.route == "fused" else verdict.part("prefill")
    gathered, in_place = (prefill, verdict.part("in_place")) if gather else (None, prefill)
    decoding = [part for part in verdict.parts if part.role == "decode"]
    decoding.sort(key=lambda part: part.most_rows is None)  # stable: the one without a limit comes last

    converter = registry.chosen(convert.decision)
    compacts = converter is not None and converter.support.compact
    takes_seq_lens = converter is not None and converter.support.seq_lens

    def requested(part: RoutePart, primitive: Primitive[F], *, clean: bool = True) -> Request[F]:
        request = part.decision.request.of(primitive)
        if clean:
            request = request.but(clean_indices=True)
        takes = compacts and skips_missing_keys(registry.chosen(part.decision))
        return request.but(lengths=True, clean_lengths=True) if takes else request

    in_order = converter is not None and converter.support.ends_in_order
    decode_requests = [requested(part, SPARSE_DECODE).but(follows_in_order=in_order) for part in decoding]
    gathered_request = requested(gathered, SPARSE_PREFILL, clean=False) if gathered else None
    in_place_request = requested(in_place, SPARSE_PREFILL) if in_place else None
    attention = (*decode_requests, gathered_request, in_place_request)
    compact = any(request.lengths for request in attention if request)
    convert_request = convert.decision.request.of(CONVERT_INDICES).but(compact=compact, seq_lens=takes_seq_lens)

    def bound(request: Request[F]) -> BoundAttention[F]:
        return BoundAttention(registry.bind(request), request.lengths)

    decoder = registry.chosen(decode.decision) if decode else None
    return BoundRoute(
        convert=registry.bind(convert_request),
        compact=compact,
        takes_seq_lens=takes_seq_lens,
        share_arguments=spec.share.arguments,
        gather=registry.bind(gather.decision.request.of(GATHER_UPCONVERT)) if gather else None,
        prefill_gathered=bound(gathered_request) if gathered_request else None,
        prefill_in_place=bound(in_place_request) if in_place_request else None,
        decoders=tuple(map(bound, decode_requests)),
        max_rows=tuple(part.most_rows for part in decoding if part.most_rows is not None),
        prefill_takes_decodes=bool(
            decoder and in_place and not spec.batch_invariant and decoder.prefills_as == in_place.decision.chosen
        ),
        schedule_kind=decoder.schedule_kind if decoder else None,
        decode_request=registry.configured(decoder, decode_requests[-1]) if decoder else None,
    )


def skips_missing_keys(found: Implementation | None) -> bool:
    """It reads only as many entries of a row as lengths say, and is faster for it."""
    if found is None or not found.support.lengths:
        return False
    kind = found.schedule_kind if found.primitive is SPARSE_DECODE else None
    return kind is None or not kind.assumes_topk
