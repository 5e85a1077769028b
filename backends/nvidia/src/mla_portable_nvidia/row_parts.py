# SPDX-License-Identifier: Apache-2.0
"""The passes around a kernel that gets each query row several times, each time with a part of its keys; in plain torch.

Before: the row's query for every part, in as many heads as the kernel wants. After: the parts become one result.
The same passes as a Triton kernel each, for GPUs: `row_part_kernels`.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import torch
from torch import Tensor

_LN2: Final = math.log(2.0)


class RowParts(Protocol):
    """The passes; both write what they are given, and neither synchronises."""

    def spread(self, queries: Tensor, limits: Tensor | None, q: Tensor, lengths: Tensor | None, part: int) -> None:
        """Queries and lengths of the parts.

        Args:
            queries: [T, P, H' >= H, 576] bf16 contiguous, written; heads from H on become zero. q: [T, H, 576] bf16.
            limits: [T, P] int32 contiguous, written: what of a row's length falls to each part, 0 to `part`; where
                lengths [T] int32 are given. part: keys of a part.
        """
        ...

    def merge(self, out: Tensor, parts: Tensor, lses: Tensor, attn_sink: Tensor | None, base_2: bool) -> None:
        """The parts, weighted by their shares of the sum of exponentials.

        Args:
            out: [T, H, 512] bf16, written; zeros where no part has a valid entry.
            parts: [T, P, H' >= H, 512] bf16 contiguous. lses: [T, P, H'] float32 contiguous, infinite (of either sign) where
                a part has no valid entry, whatever `parts` hold there; to base 2 if base_2.
            attn_sink: [H] float32, to be applied.
        """
        ...


class TorchRowParts:
    """Both passes in torch operations; any device."""

    def spread(self, queries: Tensor, limits: Tensor | None, q: Tensor, lengths: Tensor | None, part: int) -> None:
        """See RowParts."""
        num_heads = q.shape[1]
        queries[:, :, :num_heads] = q.unsqueeze(1)
        queries[:, :, num_heads:] = 0
        if limits is not None and lengths is not None:
            starts = part * torch.arange(limits.shape[1], device=limits.device)
            limits.copy_((lengths.unsqueeze(1) - starts).clamp(0, part))

    def merge(self, out: Tensor, parts: Tensor, lses: Tensor, attn_sink: Tensor | None, base_2: bool) -> None:
        """See RowParts."""
        num_heads = out.shape[1]
        lses, parts = lses[:, :, :num_heads], parts[:, :, :num_heads]
        natural = (lses * _LN2 if base_2 else lses).masked_fill(lses.isinf(), -math.inf)
        lse = natural.logsumexp(dim=1)  # [T, H]
        weights = torch.exp(natural - lse.unsqueeze(1)).masked_fill(lses.isinf(), 0.0).unsqueeze(-1)
        merged = (weights * parts.float().masked_fill(weights == 0, 0.0)).sum(dim=1)
        if attn_sink is not None:
            merged *= torch.sigmoid(lse - attn_sink).masked_fill(lse.isinf(), 0.0).unsqueeze(-1)
        out.copy_(merged)


def row_parts_for(device_type: str) -> RowParts:
    """One Triton kernel for each pass on a GPU where triton is importable; torch operations elsewhere."""
    if device_type == "cuda":
        try:
            from mla_portable_nvidia.row_part_kernels import TritonRowParts
        except ImportError:
            return TorchRowParts()
        return TritonRowParts()
    return TorchRowParts()
