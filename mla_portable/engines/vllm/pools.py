# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""GLM-5.3-Flash's pools of keys where Triton has no e4m3, which is below compute capability 8.9.

vLLM's kernels rotate the indexer's queries, make a key of each pool and store both as e4m3. What they store is a bfloat16 value
divided by a power of two, so they run with bfloat16 in the place of e4m3 (`mla_portable.engines.common.e4m3_stores`).

0.30 to 0.33 were read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.engines.common import e4m3_stores
from mla_portable.engines.common.e4m3_stores import Kernel, Serve


def quantize_queries(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_fwht_quant_kernel`: qout_ptr [rows, 128] float8_e4m3fn and sout_ptr [rows, 1] float32 are written."""
    e4m3_stores.convert(kernel, call, "qout_ptr", torch.bfloat16)


def write_pools(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_kpool_softmax_rotate_write_cache_kernel`."""
    e4m3_stores.write_pools(kernel, call, call["buf_fp8_ptr"].view(torch.uint8), "vLLM")


def update_pools(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_kpool_decode_update_batched_kernel`: new tokens go into their requests' rings, pools that they complete into the cache.

    slot_mapping_ptr, positions_ptr: [requests, tokens of each], a slot is that of the pool, negative = skip.
    """
    e4m3_stores.check_scales(call, "vLLM")
    slots: Tensor = call["slot_mapping_ptr"]
    keys, scales = e4m3_stores.key_rows(slots, call["HEAD_DIM"])
    row = torch.arange(slots.numel(), dtype=slots.dtype, device=slots.device).view_as(slots)
    own = {"buf_fp8_ptr": keys, "buf_fp32_ptr": scales, "slot_mapping_ptr": torch.where(slots >= 0, row, -1)}
    kernel(**call | own | e4m3_stores.ONE_PAGE | {"PAGE_SIZE": e4m3_stores.ONE_PAGE_ROWS})
    e4m3_stores.write_keys(keys, scales, call["buf_fp8_ptr"].view(torch.uint8), slots)


SERVED_BY: Final[dict[str, Serve]] = {
    "_fwht_quant_kernel": quantize_queries,
    "_kpool_softmax_rotate_write_cache_kernel": write_pools,
    "_kpool_decode_update_batched_kernel": update_pools,
}
"""Kernels of vLLM's kpool_compress.py that store e4m3."""


def store_codes(module: Any) -> None:
    """Put the above in the place of the module's kernels."""
    e4m3_stores.replace_kernels(module, SERVED_BY)


def as_bytes(function: Callable[..., Tensor], **zero: int) -> Callable[..., Tensor]:
    """`function` of a tensor that it moves and pads, with e4m3 handed over as bytes. zero: its argument that pads with 0."""

    def moved(x: Tensor, *args: Any, **named: Any) -> Tensor:
        if x.dtype != torch.float8_e4m3fn:
            return function(x, *args, **named)
        return function(x.view(torch.uint8), *args, **named | zero).view(x.dtype)

    return moved
