# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's schedule of a decode batch, made once a step for all layers: how rows of these lengths are dealt out.

DeepGEMM reads it with the lengths that it was made from; with others it follows table entries that were never written. So it is
used where a call has exactly these: one call of the kernel has all tokens, and no length is cut by the width of the result.
Elsewhere the adapter makes a schedule in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_portable.contracts import (
    DecodeSchedule,
    DeviceFacts,
    InvalidArgument,
    PlanMismatch,
    Primitive,
    ScheduleKind,
    ScheduleLimits,
    StepLengths,
)
from mla_portable.kit.rules import check_tensor
from mla_portable.primitives import INDEXER_LOGITS
from mla_portable_common.deep_gemm.conventions import Scores
from mla_portable_common.deep_gemm.pages import row_lengths

Find = Callable[[Primitive[Any], DeviceFacts], Scores]
"""(primitive, facts) -> the library's functions, as `find_scores`; raises MLAPortableError where it is not here."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexSchedule(DecodeSchedule):
    """A schedule of `num_requests` requests of `query_len` tokens each; kind "deepgemm_rows".

    Attributes:
        metadata: on the device, of the library's own shape; the planner writes it in every step. None where lengths were not
            exact: the adapter then makes a schedule in each call.
        num_sms: multiprocessors that it is for. longest: no sequence is longer.
    """

    num_requests: int
    query_len: int
    metadata: Tensor | None
    num_sms: int
    longest: int

    def check(self, where: str, batch: int, query_len: int, num_heads: int, topk: int, device: torch.device) -> None:
        """Raises: PlanMismatch: attention takes no such schedule."""
        raise PlanMismatch(
            f"{where}: its schedule, an IndexSchedule, was made for the indexer. Plan with the kind that serves."
        )

    def check_indexer(
        self, where: str, num_tokens: int, num_requests: int, num_heads: int, topk: int | None, device: torch.device
    ) -> None:
        """See DecodeSchedule; heads and K make no difference."""
        if (num_tokens, num_requests) != (self.num_requests * self.query_len, self.num_requests):
            made_for = f"{self.num_requests} of {self.query_len} tokens each"
            given = f"{num_tokens} tokens of {num_requests} requests"
            raise PlanMismatch(f"{where}: the call has {given}, its schedule was made for {made_for}. Plan again.")
        metadata = self.metadata
        if metadata is not None:
            shape = tuple(metadata.shape)
            check_tensor(where, "schedule.metadata", metadata, metadata.dtype, shape, device, str(list(shape)))

    def metadata_for(self, width: int, positions: int, num_sms: int) -> Tensor | None:
        """The metadata for a call, None where its lengths or multiprocessors may be others.

        width: columns of the result. positions: that a row of the block table reaches.
        """
        return self.metadata if self.longest <= width == positions and self.num_sms == num_sms else None


class IndexSchedules:
    """The LengthsPlanner of kind "deepgemm_rows": the library's own planner, on the lengths that the device has."""

    def __init__(self, find: Find, limits: ScheduleLimits) -> None:
        """Raises: InvalidArgument without `limits.request`; MLAPortableError where the library is not here."""
        if limits.request is None:
            expected = "the request that the implementation is bound for"
            raise InvalidArgument("IndexSchedules", "limits.request", got="None", expected=expected)
        self._kernel = find(INDEXER_LOGITS, limits.request.device)
        self._device = limits.device
        self._metadata: dict[tuple[int, torch.Size], Tensor] = {}

    def get(self, batch: int, query_len: int, lengths: StepLengths) -> IndexSchedule:
        """See LengthsPlanner. Not used, and nothing is computed, unless lengths are on the device and bounds on the host."""
        num_sms = self._kernel.num_sms()
        if lengths.host is None or lengths.device is None:
            return IndexSchedule(batch, query_len, None, num_sms, 0)
        seen = torch.empty(batch, dtype=torch.int32, device=self._device)
        lengths.copy_to(seen)
        made = self._kernel.schedule(row_lengths(seen, query_len))
        key = num_sms, made.shape
        metadata = self._metadata.get(key)
        if metadata is None:
            metadata = self._metadata[key] = torch.empty_like(made)
        metadata.copy_(made)
        return IndexSchedule(batch, query_len, metadata, num_sms, int(lengths.host.max(initial=0)))

    def invalidate(self) -> None:
        """See LengthsPlanner. Every step writes all of it."""


def deepgemm_rows(find: Find) -> ScheduleKind:
    """The kind of the schedules of a library's paged scores. find: the library, for a primitive on a device."""
    return ScheduleKind("deepgemm_rows", IndexSchedule, partial(IndexSchedules, find), needs_lengths=True)
