# SPDX-License-Identifier: Apache-2.0
"""Head padding: queries of few heads in a buffer of as many as the kernel wants, whose other heads stay zero.

One buffer serves all calls of a thread on a stream, so only the heads that are there are copied. A call under CUDA graph
capture gets memory of the graph's own instead: a replay must not share a buffer with eager calls that may have outgrown it.
"""

from __future__ import annotations

import threading
from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts import HEAD_SIZE
from mla_portable_common.streams import stream_of

KERNEL_HEADS: Final = (64, 128)
"""Head counts that FlashMLA's kernels have on every path."""


def kernel_heads(num_heads: int, counts: tuple[int, ...] = KERNEL_HEADS) -> int:
    """The least head count of a kernel that serves `num_heads`; those that are more than all are left as they are.

    counts: that the kernel has, in ascending order.
    """
    return next((count for count in counts if num_heads <= count), num_heads)


class PaddedQueries(threading.local):
    """Buffers of [rows, heads, width] bf16, by device, stream, head counts and width."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def take(self, rows: int, num_heads: int, heads: int, device: torch.device, width: int = HEAD_SIZE) -> Tensor:
        """[rows, heads, width] bf16; heads from `num_heads` on are zero, the others are for the caller to write.

        Valid until the next call of this thread on this stream.
        """
        if device.type != "cuda":
            stream, is_capturing = stream_of(device)
        else:  # the same, in less time
            stream, is_capturing = torch.cuda.current_stream(device).cuda_stream, torch.cuda.is_current_stream_capturing()
        if is_capturing:
            return torch.zeros((rows, heads, width), dtype=torch.bfloat16, device=device)
        return self._kept((device, stream, num_heads, heads), (rows, heads, width), device)

    def _kept(self, key: tuple[object, ...], shape: tuple[int, int, int], device: torch.device) -> Tensor:
        key = (*key, shape[2])
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < shape[0]:
            buffer = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            self._buffers[key] = buffer
        return buffer[: shape[0]]
