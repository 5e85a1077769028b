# SPDX-License-Identifier: Apache-2.0
"""StagingRing: page-locked buffers from which a step's numbers travel to the device, never rewritten under a copy.

A copy out of pinned memory returns before it has run, behind the stream's other work. So each buffer has a fence, recorded
behind its copy, and is taken again only once that fence was passed. If the device lags further than the ring is long, the ring
grows; only at its limit does taking a buffer wait, for the oldest copy, which is then `limit` steps behind the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_portable.accelerator import accelerator

_DEPTH: Final = 4
_LIMIT: Final = 32
_MOST_VIEWS: Final = 256


class Fence(Protocol):
    """A point in a stream. torch.Event has these methods; tests bring their own."""

    def record(self) -> None:
        """Record the fence behind everything enqueued so far."""
        ...

    def query(self) -> bool:
        """Whether it was passed, or never recorded. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait until it was passed."""
        ...


class StagingBuffer:
    """One buffer of a ring.

    Attributes:
        words: [n] int32, what the host writes; zero at first. tensor: the same memory, the source of the copy.
    """

    __slots__ = ("fence", "tensor", "views", "words")

    def __init__(self, num_words: int, *, pinned: bool, fence: Fence | None) -> None:
        self.tensor = torch.zeros(num_words, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.words: npt.NDArray[np.int32] = self.tensor.numpy()
        self.fence = fence
        self.views: dict[int, tuple[Tensor, Tensor]] = {}  # end -> target[:end], tensor[:end]: a slice takes 1 us


class StagingRing:
    """Staging buffers for one tensor on a device, each of its size, taken in turn.

    `take`, fill, `send`, once per step and on the stream that uses the result. Where no memory can be pinned there is one
    buffer, and plain copies.
    """

    def __init__(
        self,
        target: Tensor,
        *,
        depth: int = _DEPTH,
        limit: int = _LIMIT,
        make_fence: Callable[[], Fence] | None = None,
    ) -> None:
        """target: [n] int32. depth, limit: buffers at first, and at most. make_fence overrides the kind of fence."""
        self._target = target
        self._pinned = accelerator(target.device).can_pin()
        self._limit = limit
        self._make_fence = make_fence or (partial(_EventFence, target.device) if self._pinned else None)
        self._buffers = [self._new() for _ in range(depth if self._make_fence else 1)]
        self._next = 0
        self.num_copies = 0

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self) -> StagingBuffer:
        """A buffer that no copy reads any more. Waits only when `limit` copies are under way."""
        buffer = self._buffers[self._next]
        if buffer.fence is not None and not buffer.fence.query():
            if len(self._buffers) < self._limit:
                buffer = self._new()
                self._buffers.insert(self._next, buffer)  # before the oldest, whose turn comes next
            else:
                buffer.fence.synchronize()
        self._next = (self._next + 1) % len(self._buffers)
        return buffer

    def send(self, buffer: StagingBuffer, end: int) -> None:
        """Enqueue target[:end] = buffer[:end] on the current stream of the target's device."""
        views = buffer.views.get(end)
        if views is None:
            if len(buffer.views) >= _MOST_VIEWS:
                buffer.views.clear()
            views = buffer.views[end] = self._target[:end], buffer.tensor[:end]
        views[0].copy_(views[1], non_blocking=self._pinned)
        if buffer.fence is not None:
            buffer.fence.record()
        self.num_copies += 1

    def _new(self) -> StagingBuffer:
        fence = None if self._make_fence is None else self._make_fence()
        return StagingBuffer(self._target.numel(), pinned=self._pinned, fence=fence)


class _EventFence:
    """An event on whatever stream of `device` is current when it is recorded, the one a copy to it runs on."""

    __slots__ = ("_current_stream", "_event", "_index")

    def __init__(self, device: torch.device) -> None:
        self._index = device.index  # with an index alone torch finds the stream in less time
        where = accelerator(device)
        self._event = where.event()
        self._current_stream = where.module.current_stream

    def record(self) -> None:
        self._event.record(self._current_stream(self._index))

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()
