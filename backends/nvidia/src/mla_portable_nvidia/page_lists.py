# SPDX-License-Identifier: Apache-2.0
"""The pass in front of FlashAttention 3, in plain torch: chosen rows become lists of pages.

The kernel reads a leading part of each list and follows whatever stands in it, so what is absent has to leave the list.
The same pass as a Triton kernel, for GPUs: `page_list_kernels`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class PageLists(Protocol):
    """The pass; it writes what it is given and does not synchronise."""

    def __call__(self, pages: Tensor, counts: Tensor, indices: Tensor, lengths: Tensor | None, num_rows: int) -> None:
        """Bring the indices that count to the front, in their order.

        Args:
            pages: [T, K] int32 contiguous, written; what stands past a row's count is undefined. counts: [T] int32, written.
            indices: [T, K] int32; those that are negative, `num_rows` or more, or past the row's length do not count.
            lengths: [T] int32.
        """
        ...


class TorchPageLists:
    """The pass in torch operations; any device."""

    def __call__(self, pages: Tensor, counts: Tensor, indices: Tensor, lengths: Tensor | None, num_rows: int) -> None:
        """See PageLists."""
        absent = (indices < 0) | (indices.long() >= num_rows)
        if lengths is not None:
            absent |= torch.arange(indices.shape[1], device=indices.device) >= lengths.unsqueeze(1)
        order = absent.to(torch.uint8).argsort(dim=1, stable=True)
        pages.copy_(indices.gather(1, order))
        counts.copy_((~absent).sum(dim=1))


def page_lists_for(device_type: str) -> PageLists:
    """One Triton kernel on a GPU where triton is importable; torch operations elsewhere."""
    if device_type == "cuda":
        try:
            from mla_portable_nvidia.page_list_kernels import TritonPageLists
        except ImportError:
            return TorchPageLists()
        return TritonPageLists()
    return TorchPageLists()
