# SPDX-License-Identifier: Apache-2.0
"""`bf16_128_32`: 160 bfloat16, 128 of the compressed latent and then 32 of the rotary key (A.X-K2). Not quantised.

Source: transformers 5.24, `AXK2Config`: kv_lora_rank 128, qk_rope_head_dim 32.
"""

from __future__ import annotations

from typing import Final

import torch

from mla_portable.layouts.base import CacheLayout, add_layout

_LATENT: Final = 128
_ROPE: Final = 32

BF16_128_32: Final = add_layout(
    CacheLayout(
        name="bf16_128_32",
        dtype=torch.bfloat16,
        row_width=_LATENT + _ROPE,
        value_width=_LATENT,
        rope_width=_ROPE,
        rope_offset=2 * _LATENT,
        alignment=2,
        contents="128 bfloat16 of the latent and 32 of the rotary key",
    )
)
