# SPDX-License-Identifier: Apache-2.0
"""`bf16_nope`: 512 bfloat16, the compressed latent alone. Keys have no rotary part (GLM-5.3-Flash). Not quantised."""

from __future__ import annotations

from typing import Final

import torch

from mla_portable.layouts.base import CacheLayout, add_layout

_LATENT: Final = 512

BF16_NOPE: Final = add_layout(
    CacheLayout(
        name="bf16_nope",
        dtype=torch.bfloat16,
        row_width=_LATENT,
        value_width=_LATENT,
        rope_offset=2 * _LATENT,
        alignment=2,
        contents="512 bfloat16 of the latent",
    )
)
