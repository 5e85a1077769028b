# SPDX-License-Identifier: Apache-2.0
"""Where an attention primitive writes to."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_portable.layouts import LAYOUTS, Cache, layout_of


def head_results(q: Tensor, width: int, out: Tensor | None, lse_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The caller's tensors, and fresh ones for those that were not given.

    Args:
        q: [..., H, key width]. width: of a head's values. out: [..., H, width] bf16. lse_out: [..., H] float32.
    """
    if out is None:
        out = torch.empty((*q.shape[:-1], width), dtype=torch.bfloat16, device=q.device)
    if lse_out is None:
        lse_out = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return out, lse_out


def attention_results(
    q: Tensor, kv: Cache, out: Tensor | None, lse_out: Tensor | None, *, kv_layout: str | None = None
) -> tuple[Tensor, Tensor]:
    """Likewise over cached rows.

    Args:
        q: [..., H, key width]. kv: the cache or workspace. out: [..., H, value width] bf16. lse_out: [..., H] float32.
        kv_layout: of the cache, as the request says that was bound; None infers it, for layouts that can be inferred.
    """
    if out is None:
        layout = layout_of(kv) if kv_layout is None else LAYOUTS[kv_layout]
        return head_results(q, layout.value_width, out, lse_out)
    return head_results(q, 0, out, lse_out)
