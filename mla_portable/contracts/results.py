# SPDX-License-Identifier: Apache-2.0
"""Where an attention primitive writes to."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_portable.layouts import layout_of


def attention_results(q: Tensor, kv: Tensor, out: Tensor | None, lse_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The caller's tensors, and fresh ones for those that were not given.

    Args:
        q: [..., H, key width]. kv: the cache or workspace. out: [..., H, value width] bf16. lse_out: [..., H] float32.
    """
    if out is None:
        shape = (*q.shape[:-1], layout_of(kv).value_width)
        out = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
    if lse_out is None:
        lse_out = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return out, lse_out
