# SPDX-License-Identifier: Apache-2.0
"""Latents in place of keys and values of each head: what the attention layers of transformers hand to the attention function.

A layer caches latents and a rotary part, which all heads share. Right before attention it expands them with `kv_b_proj`, in
each step those of the whole sequence. Attention over latents needs no expansion: the weights are applied to query and output.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

BLOCK_SIZE: Final = 64
"""Tokens of a block of the cache that decode kernels read."""


def latent_rows(kv_nope: Tensor, k_rot: Tensor) -> Tensor:
    """Latents and rotary parts side by side, as rows of a cache in whole blocks.

    Args:
        kv_nope: [B, 1, T, C]. k_rot: [B, 1, T, R]. Of all tokens up to now, padding included.
    Returns: [B, 1, U, C + R], contiguous; U is T rounded up to a multiple of `BLOCK_SIZE`. Rows from T on are not written.
    """
    batch, heads, tokens, width = kv_nope.shape
    rows = kv_nope.new_empty((batch, heads, -(-tokens // BLOCK_SIZE) * BLOCK_SIZE, width + k_rot.shape[-1]))
    rows[:, :, :tokens, :width].copy_(kv_nope)
    rows[:, :, :tokens, width:].copy_(k_rot)
    return rows


def up_projection(kv_b_proj: Any, latent: Tensor, num_heads: int) -> Tensor:
    """The weights of a layer's `kv_b_proj` by head: [H, P + V, C] in the latents' dtype.

    Those of a plain Linear are read in place. Any other module (quantized, with an adapter, with hooks) is asked to project the
    unit vectors, C rows in each call: so nothing is kept that could become outdated.

    Args:
        latent: any tensor of the latents' dtype, device and width C.
    """
    width = latent.shape[-1]
    if _is_plain(kv_b_proj) and kv_b_proj.weight.dtype == latent.dtype:
        weight = kv_b_proj.weight  # [H * (P + V), C]
    else:
        weight = kv_b_proj(torch.eye(width, dtype=latent.dtype, device=latent.device)).to(latent.dtype).T
    return weight.unflatten(0, (num_heads, -1))


def _is_plain(module: Any) -> bool:
    """What the module computes is its weight, and nobody intervenes."""
    kind: Any = type(module)
    return (
        kind is nn.Linear
        and module.bias is None
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
