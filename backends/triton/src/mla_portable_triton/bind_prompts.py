# SPDX-License-Identifier: Apache-2.0
"""The primitives of attention over keys of each head bound to their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_portable.contracts import Request
from mla_portable.kit.results import head_results
from mla_portable.primitives import ConcatMlaK, MaskedPrefill, PackSelection
from mla_portable_triton.support import interpreter_is_on
from mla_portable_triton.tile_rows import tile_arch


def bind_pack_selection(request: Request[PackSelection]) -> PackSelection:
    """pack_selection for any K and width; graph-safe with `out`."""
    from mla_portable_triton.kernels import pack_selection as kernel

    def pack_selection(topk_indices: Tensor, *, width: int, starts: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            shape = topk_indices.shape[0], -(-width // 32)
            out = torch.empty(shape, dtype=torch.int32, device=topk_indices.device)
        kernel.launch(out, topk_indices, starts, width=width)
        return out

    return pack_selection


def bind_concat_mla_k(request: Request[ConcatMlaK]) -> ConcatMlaK:
    """concat_mla_k for any widths and number of heads; graph-safe with `out`."""
    from mla_portable_triton.kernels import concat_mla_k as kernel
    from mla_portable_triton.kernels.config import config_for

    config = config_for(kernel.CONFIGS, request.device.arch)

    def concat_mla_k(k_nope: Tensor, k_rope: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            shape = *k_nope.shape[:2], k_nope.shape[2] + k_rope.shape[1]
            out = torch.empty(shape, dtype=torch.bfloat16, device=k_nope.device)
        kernel.launch(out, k_nope, k_rope, config=config)
        return out

    return concat_mla_k


def bind_masked_prefill(request: Request[MaskedPrefill]) -> MaskedPrefill:
    """masked_prefill for up to 128 heads; graph-safe with `out` and `lse_out`."""
    from mla_portable_triton.kernels import masked_prefill as kernel

    arch, bf16_native = tile_arch(request.device), not interpreter_is_on()

    def masked_prefill(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        *,
        softmax_scale: float,
        max_query_len: int,
        max_key_len: int,
        causal: bool = True,
        selection: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse_out = head_results(q, v.shape[2], out, lse_out)
        kernel.launch(
            out,
            lse_out,
            q,
            k,
            v,
            query_start_loc,
            key_start_loc,
            softmax_scale=softmax_scale,
            max_query_len=max_query_len,
            max_key_len=max_key_len,
            causal=causal,
            selection=selection,
            config=kernel.config_for(arch, v.shape[2]),
            bf16_native=bf16_native,
        )
        return out, lse_out

    return masked_prefill
