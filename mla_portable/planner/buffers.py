# SPDX-License-Identifier: Apache-2.0
"""StepBuffers: the int32 numbers of a step, where they live on the device and how they get there in one copy.

One device buffer with fixed sections, in this order, each mirrored by every staging buffer:

    tiles | workspace_starts | seq_lens | req_ids | prefill_ids

A step sends the one span that covers what it changed, so a section inside the span must be right in the staging buffer as
well. Request ids are the section that every step has and that CUDA graphs read: past the batch's last token they are zero,
on the device and in each staging buffer, and they are not sent again while the device holds them already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_portable.planner.staging import Fence, StagingBuffer, StagingRing

__all__ = ["StepBuffers"]

_END_WORDS: Final = 1024
_VIEWS: Final = 256
_ALIGN_WORDS: Final = 64
"""Sections begin on 256 bytes, so kernels may use wide loads and never see a differently aligned pointer."""


class _Leading:
    """Cache of `tensor[:n]` views; creating one costs about 20 % of planning a decode step."""

    __slots__ = ("_known", "_whole")

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole
        self._known: dict[int, Tensor] = {}

    def first(self, end: int) -> Tensor:
        """`whole[:end]`."""
        view = self._known.get(end)
        if view is None:
            if len(self._known) >= _VIEWS:
                self._known.clear()
            view = self._known[end] = self._whole[:end]
        return view


class StepBuffers:
    """Persistent device tensors of one planner, filled through a staging ring.

    Attributes:
        tiles: [tile words], seq_lens: [max_num_reqs]; int32 on the device.
        workspace_starts, req_ids, prefill_ids: likewise, of which `first(n)` gives n, up to max_num_reqs, max_num_tokens,
            max_num_tokens. Without a workspace all but req_ids and tiles are empty.
    """

    def __init__(
        self,
        *,
        tile_words: int,
        max_num_reqs: int,
        max_num_tokens: int,
        workspace: bool,
        device: torch.device,
        make_fence: Callable[[], Fence] | None = None,
    ) -> None:
        reqs, tokens = (max_num_reqs, max_num_tokens) if workspace else (0, 0)
        sizes = (tile_words, reqs, reqs, max_num_tokens, tokens)
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGN_WORDS) * _ALIGN_WORDS)
        self._tiles_at, self._starts_at, self._lens_at, self._ids_at, self._prefill_at, self._total = offsets
        self._max_ids = max_num_tokens
        self._device_words = torch.zeros(self._total, dtype=torch.int32, device=device)
        self._ring = StagingRing(self._device_words, make_fence=make_fence)
        sections = [self._device_words[at : at + size] for at, size in zip(offsets, sizes, strict=False)]
        self.tiles, self.seq_lens = sections[0], sections[2]
        self.workspace_starts, self.req_ids, self.prefill_ids = (_Leading(sections[n]) for n in (1, 3, 4))
        self._open: StagingBuffer | None = None
        self._begin = self._end = 0
        # What the device's request ids are: how many may not be zero, and the key they were written under.
        self._used = 0
        self._resident: tuple[int, int] | None = None
        self._staged_ids: tuple[int, tuple[int, int] | None] | None = None

    @property
    def num_copies(self) -> int:
        """Host-to-device copies so far."""
        return self._ring.num_copies

    def invalidate(self) -> None:
        """The device holds none of what was sent to it: the next request ids are written whole."""
        self._resident, self._used = None, self._max_ids

    def holds(self, key: tuple[int, int]) -> bool:
        """The device has the request ids that were written under this key."""
        return self._resident == key

    def write_ids(self, ids: npt.NDArray[np.int32], key: tuple[int, int] | None) -> None:
        """Request ids of the batch's tokens, [T]; `key` names this content for `holds`, None if it has no name."""
        num_tokens = len(ids)
        buffer = self._widen(self._ids_at, self._ids_at + max(num_tokens, self._used))
        begin, end = self._ids_at, self._ids_at + num_tokens
        buffer.words[begin:end] = ids
        if buffer.used > num_tokens:
            buffer.words[end : begin + buffer.used] = 0
        buffer.used = num_tokens
        self._staged_ids = num_tokens, key

    def write_tiles(self, words: npt.NDArray[np.int32]) -> None:
        """The words of a tile schedule, from the start of the section."""
        begin, end = self._tiles_at, self._tiles_at + len(words)
        self._widen(begin, end).words[begin:end] = words

    def write_prefill_ids(self, ids: npt.NDArray[np.int32], decode_tokens: int, first_prefill: int, padded: int) -> None:
        """Prefill request ids [padded]: -1, but for tokens from `decode_tokens` to T their request less `first_prefill`.

        `ids` are the request ids [T]. They must be written in the same step, for they lie inside the span.
        """
        begin = self._prefill_at
        words = self._widen(begin, begin + padded).words
        words[begin : begin + decode_tokens] = -1
        np.subtract(ids[decode_tokens:], first_prefill, out=words[begin + decode_tokens : begin + len(ids)])
        if padded > len(ids):
            words[begin + len(ids) : begin + padded] = -1

    def staged_starts(self, num_prefills: int) -> npt.NDArray[np.int32]:
        """[num_prefills], to be filled with workspace starts."""
        begin, end = self._starts_at, self._starts_at + num_prefills
        return self._widen(begin, end).words[begin:end]

    def write_seq_lens(self, seq_lens: npt.NDArray[np.int32]) -> None:
        """Sequence lengths of the prefill requests."""
        begin, end = self._lens_at, self._lens_at + len(seq_lens)
        self._widen(begin, end).words[begin:end] = seq_lens

    def send(self) -> None:
        """Enqueue the step's copy, if anything was written."""
        if self._open is not None and self._end > self._begin:
            # Up to one of a few ends. What follows the span is read by nobody, or is zero in both places.
            end = self._ids_at if self._end <= self._ids_at else min(-(-self._end // _END_WORDS) * _END_WORDS, self._total)
            self._ring.send(self._open, self._begin, end)
        if self._staged_ids is not None:
            self._used, self._resident = self._staged_ids
        self._open = self._staged_ids = None

    def _widen(self, begin: int, end: int) -> StagingBuffer:
        """The step's staging buffer, its span grown to cover [begin, end)."""
        if self._open is None:
            self._open = self._ring.take()
            self._begin, self._end = begin, end
        else:
            self._begin, self._end = min(self._begin, begin), max(self._end, end)
        return self._open
