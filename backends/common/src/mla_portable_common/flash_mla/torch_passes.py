# SPDX-License-Identifier: Apache-2.0
"""The passes around FlashMLA's calls in plain torch."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts.values import INT32_MAX
from mla_portable_common.flash_mla.conventions import BoundaryPasses

_LN2: Final = math.log(2.0)


class TorchBoundary(BoundaryPasses):
    """Small kernels of torch's, for devices without Triton; see BoundaryPasses. They never start early."""

    def sanitise(self, out: Tensor, indices: Tensor, lengths: Tensor | None, num_slots: int) -> None:
        """See BoundaryPasses."""
        topk = indices.shape[-1]
        absent = (indices < 0) | (indices > min(num_slots - 1, INT32_MAX))
        if lengths is not None:
            absent |= torch.arange(topk, device=indices.device) >= lengths.unsqueeze(-1)
        out[..., topk:] = -1
        out[..., :topk] = indices.masked_fill(absent, -1)

    def finish(
        self,
        out: Tensor,
        lse_out: Tensor,
        result: Tensor | None,
        lse: Tensor,
        attn_sink: Tensor | None,
        base_2: bool,
        *,
        early: bool,
    ) -> None:
        """See BoundaryPasses."""
        num_heads = out.shape[2]
        lse = lse[:, :num_heads].transpose(1, 2)
        empty = lse.isinf()
        natural = (lse * _LN2 if base_2 else lse).masked_fill(empty, -math.inf)
        value = out if result is None else result[:, :, :num_heads]
        if attn_sink is not None:
            value = value * torch.sigmoid(natural - attn_sink).unsqueeze(-1)
        out.copy_(value.masked_fill(empty.unsqueeze(-1), 0.0))
        lse_out.copy_(natural)
