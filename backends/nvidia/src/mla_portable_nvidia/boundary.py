# SPDX-License-Identifier: Apache-2.0
"""The two passes around a FlashMLA call that give it this project's one meaning, in plain torch.

Before: indices that FlashMLA's decode may be shown. It knows one absent index, -1, and follows any other wherever it leads.
After: lse natural and -inf where nothing is valid, out zero there, the sink where the kernel could not apply it itself.
The same two passes as one Triton kernel each, for GPUs: `boundary_kernels`.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import torch
from torch import Tensor

_INT32_MAX: Final = 2**31 - 1
_LN2: Final = math.log(2.0)


class Boundary(Protocol):
    """The passes; both write what they are given, and neither synchronises."""

    def sanitise(self, out: Tensor, indices: Tensor, lengths: Tensor | None, num_slots: int) -> None:
        """Copy indices; what is negative, past the cache or past the row's length becomes -1, and so does the padding.

        Args:
            out: [B, S, K'] int32 contiguous, written, K' >= K. indices: [B, S, K] int32. lengths: [B, S] int32.
            num_slots: slots of the cache, at least 1.
        """
        ...

    def finish(
        self, out: Tensor, lse_out: Tensor, result: Tensor | None, lse: Tensor, attn_sink: Tensor | None, base_2: bool
    ) -> None:
        """Bring a kernel's results into `out` and `lse_out`.

        Args:
            out: [B, S, H, 512] bf16, written. lse_out: [B, S, H] float32, written.
            result: [B, S, H' >= H, 512] bf16, or None where the kernel wrote `out` itself.
            lse: [B, S, H' >= H] float32, infinite (of either sign) where a row has no valid entry. base_2: lse is to base 2.
            attn_sink: [H] float32 that the kernel has not applied.
        """
        ...


class TorchBoundary:
    """Both passes in torch operations; any device."""

    def sanitise(self, out: Tensor, indices: Tensor, lengths: Tensor | None, num_slots: int) -> None:
        """See Boundary."""
        topk = indices.shape[-1]
        absent = indices < 0
        if num_slots <= _INT32_MAX:
            absent |= indices >= num_slots
        if lengths is not None:
            absent |= torch.arange(topk, device=indices.device) >= lengths.unsqueeze(-1)
        out[..., topk:] = -1
        out[..., :topk] = indices.masked_fill(absent, -1)

    def finish(
        self, out: Tensor, lse_out: Tensor, result: Tensor | None, lse: Tensor, attn_sink: Tensor | None, base_2: bool
    ) -> None:
        """See Boundary."""
        num_heads = out.shape[2]
        lse = lse[..., :num_heads]
        empty = lse.isinf()
        natural = (lse * _LN2 if base_2 else lse).masked_fill(empty, -math.inf)
        value = out if result is None else result[:, :, :num_heads]
        if attn_sink is not None:
            value = value * torch.sigmoid(natural - attn_sink).unsqueeze(-1)
        out.copy_(value.masked_fill(empty.unsqueeze(-1), 0.0))
        lse_out.copy_(natural)


def boundary_for(device_type: str) -> Boundary:
    """One Triton kernel for each pass on a GPU where triton is importable; torch operations elsewhere."""
    if device_type == "cuda":
        try:
            from mla_portable_nvidia.boundary_kernels import TritonBoundary
        except ImportError:
            return TorchBoundary()
        return TritonBoundary()
    return TorchBoundary()
