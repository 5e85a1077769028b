# SPDX-License-Identifier: Apache-2.0
"""Schedules: how the keys of each query row are divided among thread blocks, and the scratch that takes.

An implementation of sparse_decode, indexer_logits or indexer_select that wants a schedule brings its kind
(`Implementation.schedule_kind`), and with it the planner that makes such schedules. They depend on shapes alone, or on the
lengths of the step's sequences too (`ScheduleKind.needs_lengths`), which are on the host already: a step needs no read-back to
plan them. The core looks at no more of a schedule than whether it fits a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.contracts.values import refuse
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

    def check_indexer(
        self, where: str, num_tokens: int, num_requests: int, num_heads: int, topk: int | None, device: torch.device
    ) -> None:
        """As `check`, for a call of the indexer, whose tensors are of `num_tokens` query tokens and `num_requests` requests.

        topk: of indexer_select, None in indexer_logits. A schedule of attention fits no such call.
        """
        made = f"its schedule, a {type(self).__name__}, was made for attention"
        raise PlanMismatch(f"{where}: {made}. Plan with the schedule_kind of the implementation that serves.")

    def scratch(self, where: str, value_width: int) -> Mapping[str, tuple[int, int]]:
        """The address ranges that a call with results of `value_width` writes beside them, by name; asked for after `check`.

        value_width: 0 in calls of the indexer.

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
    """What holds for all calls that a SchedulePlanner serves.

    Attributes:
        device: where schedules live, with its index. num_heads: H, of the call. topk: K, 0 for indexer_logits.
        max_num_rows: most query rows, B * S, of a call. max_query_len: greatest S.
        extra_topk: K of a second cache, 0 where calls have none.
        num_sms: multiprocessors, 0 for a CPU. arch: `DeviceFacts.arch`, "" where unknown.
        max_scratch_bytes: bound on what a call needs beside its tensors.
        batch_invariant: a row's sums have the same order in every batch.
        request: what the implementation is bound for, with its configuration; None where a planner is used without a layer.
            Of the indexer it is always there, and says which primitive is planned for.
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


@dataclass(frozen=True, slots=True, eq=False)
class StepLengths:
    """How many keys the rows of a call may see in this step. Valid while the planner that gets it is called.

    A call has B batch rows of S tokens. Entry b counts the keys that the cache holds up to the last token of row b, that token
    included: the sequence length of a request whose tokens are the row, and the position + 1 of a token that is a row of its
    own. Of one row, each token before the last sees one key less. Selection leaves at most topk of them: that is not applied
    here. With a ContextShare the keys are those in the rank's own cache. There may be fewer than B entries: the rows behind
    them are padding of a CUDA graph and see nothing.

    Attributes:
        host: [n] int32, n <= B. Upper bounds where the engine knows no better before the last step has ended on the device.
            None where it has none on the host.
        device: [n] int32, exact, the engine's own tensor. Another step may have another address: a planner writes what a graph
            reads into memory of its own. None where the engine has none, or where rows are not its requests one for one: with
            an empty request among the decodes, and where tokens of prefills are rows (route "fused").
    Raises: InvalidArgument where both are None.
    """

    host: npt.NDArray[np.int32] | None
    device: Tensor | None = None

    def __post_init__(self) -> None:
        if self.host is None and self.device is None:
            refuse("StepLengths", "host, device", "None, None", "lengths on the host, on the device, or both")

    def copy_to(self, out: Tensor) -> None:
        """Write the lengths to `out` [B] int32, and 0 for rows of padding: for planners that need them on the device.

        The exact ones where the engine has them on the device, else those of the host, in a copy that nothing waits for.
        """
        lengths = self.device
        if lengths is None:
            assert self.host is not None
            lengths = torch.from_numpy(self.host)
            if not out.is_cpu and accelerator(out.device).can_pin():
                # torch's allocator of page-locked memory gives it to nobody else before the copy has been made
                lengths = lengths.pin_memory()
        out[: len(lengths)].copy_(lengths, non_blocking=True)
        out[len(lengths) :].zero_()


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


class LengthsPlanner(Protocol):
    """A SchedulePlanner of a kind with `needs_lengths`."""

    def get(self, batch: int, query_len: int, lengths: StepLengths) -> DecodeSchedule:
        """The schedule of a call of `batch` rows of `query_len` tokens each, both at least 1, whose lengths are `lengths`.

        Called once in every step, outside of graph capture, also in front of the replay of a graph. It writes the schedule
        into memory that it keeps: schedules of one (batch, query_len) are the same object, or share their tensors' addresses,
        because a captured graph reads the schedule of the step that replays it. What it writes is ordered on the current
        stream, behind the kernels that read the last one; it neither waits nor reads anything back. The schedule must hold
        for any lengths up to the planner's longest sequence, because a graph is captured with lengths of no meaning.
        """
        ...

    def invalidate(self) -> None:
        """Forget what the device memory holds: its contents were lost."""
        ...


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A kind of schedule.

    Attributes:
        name: for people: in reports and on the command line. schedule_type: of its schedules, what `schedule=` must be.
        planner: makes the planner of such schedules. Raises InvalidArgument for limits that it cannot plan for.
        assumes_topk: work is divided as if every row had K keys, so that `lengths` make no call faster.
        fused_below_heads: with fewer query heads than this, a sparse_decode with such schedules serves prefill tokens better
            than a kernel for prefill; 0 where it never does. Ranks the route "fused".
        needs_lengths: the planner is a LengthsPlanner: schedules depend on how long the step's sequences are. A plan is then
            good until the next one alone, whatever its shape.
    """

    name: str
    schedule_type: type[DecodeSchedule]
    planner: Callable[[ScheduleLimits], SchedulePlanner | LengthsPlanner]
    assumes_topk: bool = False
    fused_below_heads: int = 0
    needs_lengths: bool = False

    def __str__(self) -> str:
        return self.name

    def schedule(
        self, planner: SchedulePlanner | LengthsPlanner, batch: int, query_len: int, lengths: StepLengths | None = None
    ) -> DecodeSchedule:
        """What `planner`, made by this kind, gives for a call; `lengths` are looked at where the kind needs them.

        Raises: InvalidArgument where it needs them and they are None; what the planner raises.
        """
        if not self.needs_lengths:
            return cast("SchedulePlanner", planner).get(batch, query_len)
        if lengths is None:
            expected = f"StepLengths: schedule_kind {self.name} plans with the lengths of the step's sequences"
            remedy = "Plan with them, or call without a schedule: the implementation then makes one for the call alone."
            refuse("ScheduleKind.schedule", "lengths", "None", expected, remedy)
        return cast("LengthsPlanner", planner).get(batch, query_len, lengths)
