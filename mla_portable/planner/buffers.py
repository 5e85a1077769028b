# SPDX-License-Identifier: Apache-2.0
"""PlanBuffers: the int32 numbers of a step, where they live on the device and how they get there in one copy.

One device buffer with fixed sections, in this order, each mirrored by every staging buffer:

    req_ids | workspace_starts | seq_lens | prefill_ids

A step sends everything up to the end of its last number. Request ids are the section that every step has and that CUDA graphs
read: past the batch's last token they are zero. They are not sent again while the device holds them already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from mla_portable.planner.staging import Fence, StagingRing

_ALIGN_WORDS: Final = 64
"""Sections begin on 256 bytes, so kernels may use wide loads and never see a differently aligned pointer."""


class PlanBuffers:
    """Persistent device tensors of one planner, filled through a staging ring.

    Attributes:
        req_ids: [max_num_tokens]; workspace_starts, seq_lens: [max_num_reqs]; prefill_ids: [max_num_tokens]; int32 on the
            device. Without a workspace all but req_ids are empty.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        workspace: bool,
        device: torch.device,
        make_fence: Callable[[], Fence] | None = None,
    ) -> None:
        reqs, tokens = (max_num_reqs, max_num_tokens) if workspace else (0, 0)
        begins = [0]
        for size in (max_num_tokens, reqs, reqs, tokens):
            begins.append(begins[-1] + -(-size // _ALIGN_WORDS) * _ALIGN_WORDS)
        _, self._starts_at, self._lens_at, self._prefill_at, total = begins
        words = torch.zeros(total, dtype=torch.int32, device=device)
        self.req_ids = words[:max_num_tokens]
        self.workspace_starts = words[self._starts_at : self._starts_at + reqs]
        self.seq_lens = words[self._lens_at : self._lens_at + reqs]
        self.prefill_ids = words[self._prefill_at : self._prefill_at + tokens]
        self._ring = StagingRing(words, make_fence=make_fence)
        # What the device's request ids are: how many may not be zero, and the key that they were sent with.
        self._used = 0
        self._resident: tuple[int, int] | None = None

    @property
    def num_copies(self) -> int:
        """Host-to-device copies so far."""
        return self._ring.num_copies

    def invalidate(self) -> None:
        """The contents of device memory were lost: the next request ids are written completely."""
        self._resident, self._used = None, len(self.req_ids)

    def has_ids(self, key: tuple[int, int]) -> bool:
        """The device has the request ids that were sent with this key."""
        return self._resident == key

    def send_ids(self, ids: npt.NDArray[np.int32], key: tuple[int, int] | None) -> None:
        """Enqueue the copy of a step without chunks: request ids of the batch's tokens, [T].

        `key` identifies these ids for `has_ids`; None for ids that are not looked for again.
        """
        end = max(len(ids), self._used)
        if end:
            buffer = self._ring.take()
            buffer.words[: len(ids)] = ids
            buffer.words[len(ids) : end] = 0
            self._ring.send(buffer, end)
        self._used, self._resident = len(ids), key

    def send_chunks(
        self,
        ids: npt.NDArray[np.int32],
        prefill_ids: npt.NDArray[np.int32],
        workspace_starts: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
    ) -> None:
        """Enqueue the copy of a step with prefill chunks: ids [T], prefill_ids [padded], the others [prefills]."""
        buffer = self._ring.take()
        words = buffer.words
        words[: len(ids)] = ids
        words[len(ids) : self._starts_at] = 0
        words[self._starts_at : self._starts_at + len(workspace_starts)] = workspace_starts
        words[self._lens_at : self._lens_at + len(seq_lens)] = seq_lens
        end = self._prefill_at + len(prefill_ids)
        words[self._prefill_at : end] = prefill_ids
        self._ring.send(buffer, end)
        self._used, self._resident = len(ids), None
