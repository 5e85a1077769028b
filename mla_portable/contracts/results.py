# SPDX-License-Identifier: Apache-2.0
"""Where an attention primitive writes to."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_portable.contracts.layouts import KV_LORA_RANK

__all__ = ["attention_results"]


def attention_results(q: Tensor, out: Tensor | None, lse_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The caller's tensors, and fresh ones for those that were not given.

    Args:
        q: [..., H, 576]. out: [..., H, 512] bf16. lse_out: [..., H] float32.
    """
    if out is None:
        out = torch.empty((*q.shape[:-1], KV_LORA_RANK), dtype=torch.bfloat16, device=q.device)
    if lse_out is None:
        lse_out = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return out, lse_out
