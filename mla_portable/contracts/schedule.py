# SPDX-License-Identifier: Apache-2.0
"""Decode schedules: how the keys of each query row are divided among thread blocks, and the scratch that takes.

An implementation of sparse_decode that wants a schedule brings its kind (`Implementation.schedule_kind`), and with it the
planner that makes such schedules. They depend on shapes alone, so a step needs no read-back to plan them. The core looks at
no more of a schedule than whether it fits a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import torch

from mla_portable.errors import PlanMismatch

if TYPE_CHECKING:
    from mla_portable.contracts.request import Request

DEFAULT_SCRATCH_BYTES: Final = 64 << 20
"""Bound on the scratch of a decode call where the caller sets none."""


class DecodeSchedule:
    """Base class of every kind of schedule."""

    __slots__ = ()

    extra_topk: int = 0
    """K of a second cache (`extra_indices`), 0 where calls have none."""

    def check(self, where: str, batch: int, query_len: int, num_heads: int, topk: int, device: torch.device) -> None:
        """The schedule was made for a call of `batch` x `query_len` rows of these heads and width, and its tensors fit it.

        Raises: PlanMismatch with both sides; InvalidArgument for its tensors. `where` begins the message.
        """
        raise NotImplementedError

    def scratch(self, where: str, value_width: int) -> Mapping[str, tuple[int, int]]:
        """The address ranges that a call with results of `value_width` writes beside them, by name; asked for after `check`.

        A call is refused where one of its tensors lies there.

        Raises: InvalidArgument where the scratch is that of results of another width, or overlaps itself.
        """
        return {}


def refuse_schedule(where: str, given: tuple[int, int, int], made_for: tuple[int, int, int]) -> NoReturn:
    """Raise PlanMismatch: a call of `given` (rows, heads, topk) got a schedule that was made for other numbers."""
    words = [f"{rows} rows, {heads} heads and topk {topk}" for rows, heads, topk in (given, made_for)]
    raise PlanMismatch(
        f"{where}: the call has {words[0]}, its schedule was made for {words[1]}. A plan serves one batch: plan again."
    )


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """What holds for all decode calls that a SchedulePlanner serves.

    Attributes:
        device: where schedules live, with its index. num_heads: H, of the call. topk: K.
        max_num_rows: most query rows, B * S, of a call. max_query_len: greatest S.
        extra_topk: K of a second cache, 0 where calls have none.
        num_sms: multiprocessors, 0 for a CPU. arch: `DeviceFacts.arch`, "" where unknown.
        max_scratch_bytes: bound on what a call needs beside its tensors.
        batch_invariant: a row's sums have the same order in every batch.
        request: what the implementation is bound for, with its configuration; None where a planner is used without a layer.
    """

    device: torch.device
    num_heads: int
    topk: int
    max_num_rows: int
    max_query_len: int = 1
    num_sms: int = 0
    arch: str = ""
    max_scratch_bytes: int = DEFAULT_SCRATCH_BYTES
    batch_invariant: bool = False
    request: Request | None = None
    extra_topk: int = 0


class SchedulePlanner(Protocol):
    """The schedules of one engine on one device and stream."""

    def get(self, batch: int, query_len: int) -> DecodeSchedule:
        """The schedule of a call of `batch` requests of `query_len` tokens each, both at least 1.

        Called once a step, outside of graph capture: it looks a known shape up, and neither waits nor reads anything back. A
        captured graph keeps the schedule that it was captured with, so a schedule's memory must not be written again for
        another shape unless it is scratch.
        """
        ...

    def invalidate(self) -> None:
        """Forget what the device memory holds: its contents were lost."""
        ...


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A kind of decode schedule.

    Attributes:
        name: for people: in reports and on the command line. schedule_type: of its schedules, what `schedule=` must be.
        planner: makes the planner of such schedules. Raises InvalidArgument for limits that it cannot plan for.
        assumes_topk: work is divided as if every row had K keys, so that `lengths` make no call faster.
        fused_below_heads: with fewer query heads than this, a sparse_decode with such schedules serves prefill tokens better
            than a kernel for prefill; 0 where it never does. Ranks the route "fused".
    """

    name: str
    schedule_type: type[DecodeSchedule]
    planner: Callable[[ScheduleLimits], SchedulePlanner]
    assumes_topk: bool = False
    fused_below_heads: int = 0
