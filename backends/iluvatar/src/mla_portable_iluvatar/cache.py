# SPDX-License-Identifier: Apache-2.0
"""cache_write on a bf16 cache through the vendor's op, which ignores dtype and scale arguments and knows no FP8 row.

The op is handed slots that exist or -1. A cache whose blocks lie apart is seen as rows that follow one another, with slots
counted in those rows; where that cannot be, the rows are stored one by one by torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_portable.layouts import HEAD_SIZE, KV_LORA_RANK
from mla_portable_iluvatar.resolve import Op
from mla_portable_iluvatar.rows import flat_rows


def bind_cache_write(op: Op) -> Callable[..., None]:
    """cache_write through concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)."""

    def cache_write(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2") -> None:
        if slot_mapping.shape[0] == 0 or kv_cache.numel() == 0:
            return
        cache = flat_rows(kv_cache)
        valid = (slot_mapping >= 0) & (slot_mapping < cache.num_slots)
        if cache.rows is None:
            where = slot_mapping[valid]
            tokens = torch.cat([kv_c[valid], k_pe[valid]], dim=-1).to(kv_cache.dtype)
            kv_cache[where // cache.block_size, where % cache.block_size] = tokens
            return
        slots = torch.where(valid, cache.row_of(slot_mapping), -1)
        kv_c, k_pe = (tensor.to(torch.bfloat16).contiguous() for tensor in (kv_c, k_pe))
        scale = torch.ones(1, dtype=torch.float32, device=kv_c.device)  # an argument that the op does not read
        apart = cache.block_rows != cache.block_size
        target = cache.rows.unsqueeze(1) if apart else kv_cache  # [N, 1, 576]: blocks of one row
        op(kv_c, k_pe, target, slots.contiguous(), "auto", scale)

    return cache_write


def cache_write_trial(op: Op, device: torch.device) -> None:
    """One call on a small problem."""
    tokens = torch.zeros((64, HEAD_SIZE), dtype=torch.bfloat16, device=device)
    bind_cache_write(op)(
        tokens[:, :KV_LORA_RANK],
        tokens[:, KV_LORA_RANK:],
        tokens.new_zeros((1, 64, HEAD_SIZE)),
        torch.arange(64, device=device),
    )
