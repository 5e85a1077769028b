# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's schedule of a decode batch, made once a step for all layers: how rows of these lengths are dealt out.

DeepGEMM reads it with the lengths that it was made from; with others it follows table entries that were never written. So it is
used where a call has exactly these: one call of the kernel has all tokens, and no length is cut by the width of the result.
Elsewhere the adapter makes a schedule in each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts import (
    DecodeSchedule,
    InvalidArgument,
    PlanMismatch,
    ScheduleKind,
    ScheduleLimits,
    StepLengths,
)
from mla_portable.kit.rules import check_tensor
from mla_portable.primitives import INDEXER_LOGITS
from mla_portable_nvidia.deepgemm.conventions import DeepGemm, find_deepgemm
from mla_portable_nvidia.deepgemm.pages import row_lengths


@dataclass(frozen=True, slots=True, eq=False)
class IndexSchedule(DecodeSchedule):
    """A schedule of `num_requests` requests of `query_len` tokens each; kind "deepgemm_rows".

    Attributes:
        metadata: [num_sms + 1, 2] int32 on the device, DeepGEMM's own; the planner writes it in every step.
        num_sms: multiprocessors that it is for. longest: no sequence is longer; None where lengths were not exact, so that the
            schedule is not used.
    """

    num_requests: int
    query_len: int
    metadata: Tensor
    num_sms: int
    longest: int | None

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
        shape = (self.num_sms + 1, 2)
        check_tensor(where, "schedule.metadata", self.metadata, torch.int32, shape, device, "[num_sms + 1, 2]")

    def metadata_for(self, width: int, positions: int, num_sms: int) -> Tensor | None:
        """The metadata for a call, None where its lengths or multiprocessors may be others.

        width: columns of the result. positions: that a row of the block table reaches.
        """
        exact = self.longest is not None and self.longest <= width == positions
        return self.metadata if exact and self.num_sms == num_sms else None


class IndexSchedules:
    """The LengthsPlanner of kind "deepgemm_rows": DeepGEMM's own planner, on the lengths that the device has."""

    def __init__(self, limits: ScheduleLimits) -> None:
        """Raises: InvalidArgument without `limits.request`; MLAPortableError where DeepGEMM is not here."""
        if limits.request is None:
            expected = "the request that the implementation is bound for"
            raise InvalidArgument("IndexSchedules", "limits.request", got="None", expected=expected)
        self._kernel: DeepGemm = find_deepgemm(INDEXER_LOGITS, limits.request.device)
        self._device = limits.device
        self._metadata: dict[int, Tensor] = {}

    def get(self, batch: int, query_len: int, lengths: StepLengths) -> IndexSchedule:
        """See LengthsPlanner. Not used, and nothing is computed, unless lengths are on the device and bounds on the host."""
        num_sms = self._kernel.num_sms()
        metadata = self._metadata.get(num_sms)
        if metadata is None:
            metadata = torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=self._device)
            self._metadata[num_sms] = metadata
        if lengths.host is None or lengths.device is None:
            return IndexSchedule(batch, query_len, metadata, num_sms, None)
        seen = torch.empty(batch, dtype=torch.int32, device=self._device)
        lengths.copy_to(seen)
        metadata.copy_(self._kernel.schedule(row_lengths(seen, query_len)))
        return IndexSchedule(batch, query_len, metadata, num_sms, int(lengths.host.max(initial=0)))

    def invalidate(self) -> None:
        """See LengthsPlanner. Every step writes all of it."""


DEEPGEMM_ROWS: Final = ScheduleKind("deepgemm_rows", IndexSchedule, IndexSchedules, needs_lengths=True)
