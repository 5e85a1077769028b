# SPDX-License-Identifier: Apache-2.0
"""`bf16`: 576 bfloat16, 512 of the compressed latent and then 64 of the rotary key. Not quantised."""

from __future__ import annotations

from typing import Final

import torch

from mla_portable.layouts.base import CacheLayout, add_layout

KV_LORA_RANK: Final = 512
QK_ROPE_HEAD_DIM: Final = 64
HEAD_SIZE: Final = KV_LORA_RANK + QK_ROPE_HEAD_DIM

BF16: Final = add_layout(
    CacheLayout(
        name="bf16",
        dtype=torch.bfloat16,
        row_width=HEAD_SIZE,
        value_width=KV_LORA_RANK,
        rope_width=QK_ROPE_HEAD_DIM,
        rope_offset=2 * KV_LORA_RANK,
        alignment=2,
        contents="512 bfloat16 of the latent and 64 of the rotary key",
    )
)
