# SPDX-License-Identifier: Apache-2.0
"""The data-movement primitives bound to their kernels: everything that a call need not decide is decided here.

Each `bind_<primitive>(request)` returns a callable of that primitive's Protocol in `mla_portable.contracts`. It trusts its
arguments, reads no environment and nothing back from the device, and allocates only what the caller did not give. Kernels,
and triton with them, are imported when a primitive is bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_portable.contracts import InvalidArgument, Request
from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.layouts import KV_LORA_RANK, LAYOUTS
from mla_portable.primitives import CacheWrite, ConvertIndices, GatherUpconvert, QuantizePerTensor
from mla_portable_triton.support import interpreter_is_on

_E5M2 = {torch.float8_e4m3fn: False, torch.float8_e5m2: True}


def bind_cache_write(request: Request) -> CacheWrite:
    """cache_write on the layout that each cache shows; graph-safe."""
    from mla_portable_triton.kernels import cache_write as kernel
    from mla_portable_triton.kernels.e4m3_encode import encodes_natively

    config = kernel.config_for(kernel.CONFIGS, request.device.arch)
    bf16_native = not interpreter_is_on()
    e4m3_native = bf16_native and encodes_natively(request.device.arch, request.device.has_fp8_conversion)

    def cache_write(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2") -> None:
        kernel.launch(
            kv_c,
            k_pe,
            kv_cache,
            slot_mapping,
            pow2=scale_format == "pow2",
            e4m3_native=e4m3_native,
            bf16_native=bf16_native,
            config=config,
        )

    return cache_write


def bind_convert_indices(request: Request) -> ConvertIndices:
    """convert_indices, compacting or not; graph-safe where `out` is given."""
    from mla_portable_triton.kernels import convert_indices as kernel
    from mla_portable_triton.kernels.early_start import lets_next_start

    config = kernel.config_for(kernel.CONFIGS, request.device.arch)
    let_next = lets_next_start(request.device.arch)

    def convert_indices(
        topk_indices: Tensor,
        req_id_per_token: Tensor,
        block_table: Tensor,
        *,
        block_size: int,
        num_slots: int | None = None,
        prefill_request_ids: Tensor | None = None,
        prefill_workspace_starts: Tensor | None = None,
        seq_lens: Tensor | None = None,
        compact: bool = False,
        dcp_size: int = 1,
        dcp_rank: int = 0,
        interleave: int = 1,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if out is None:
            device = topk_indices.device
            indices = torch.empty(topk_indices.shape, dtype=torch.int32, device=device)
            counts = torch.empty(topk_indices.shape[:1], dtype=torch.int32, device=device)
        else:
            indices, counts = out
        kernel.launch(
            indices,
            counts,
            topk_indices,
            req_id_per_token,
            block_table,
            prefill_request_ids,
            prefill_workspace_starts,
            seq_lens,
            block_size=block_size,
            last_slot=kernel.INT32_MAX if num_slots is None else min(num_slots - 1, kernel.INT32_MAX),
            compact=compact,
            share=WHOLE if dcp_size == 1 else ContextShare(dcp_size, dcp_rank, interleave),
            config=config,
            lets_next_start=let_next,
        )
        return indices, counts

    return convert_indices


def bind_gather_upconvert(request: Request) -> GatherUpconvert:
    """gather_upconvert from the layout that each cache shows; graph-safe."""
    from mla_portable_triton.kernels import gather_upconvert as kernel

    config = kernel.config_for(kernel.CONFIGS, request.device.arch)
    bf16_native = not interpreter_is_on()
    e4m3_native = bf16_native and request.device.has_fp8_conversion
    latent = KV_LORA_RANK if request.kv_layout is None else LAYOUTS[request.kv_layout].value_width

    def gather_upconvert(
        kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor, *, out: Tensor
    ) -> Tensor:
        kernel.launch(
            out,
            kv_cache,
            block_table,
            seq_lens,
            workspace_starts,
            latent=latent,
            e4m3_native=e4m3_native,
            bf16_native=bf16_native,
            config=config,
        )
        return out

    return gather_upconvert


def bind_quantize_per_tensor(request: Request) -> QuantizePerTensor:
    """quantize_per_tensor to e4m3 or e5m2; graph-safe, its results and scratch come from the caching allocator."""
    from mla_portable_triton.kernels import quantize_per_tensor as kernel

    config = kernel.config_for(kernel.CONFIGS, request.device.arch)
    bf16_native = not interpreter_is_on()

    def quantize_per_tensor(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
        e5m2 = _E5M2.get(dtype)
        if e5m2 is None:
            raise InvalidArgument("quantize_per_tensor", "dtype", got=dtype, expected=" or ".join(map(str, _E5M2)))
        dense = x.contiguous()
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        num_parts = kernel.num_parts(x.numel(), config)
        parts = torch.empty((num_parts,), dtype=torch.int32, device=x.device)
        kernel.launch(codes, scale, parts, dense, e5m2=e5m2, bf16_native=bf16_native, config=config)
        return codes.view(dtype), scale

    return quantize_per_tensor
