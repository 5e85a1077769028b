# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""GLM-5.3-Flash's pools of keys where Triton has no e4m3, which is below compute capability 8.9.

vLLM's kernels rotate the indexer's queries, make a key of each pool and store both as e4m3. Triton refuses even a pointer to
e4m3 there. What they store is a bfloat16 value divided by a power of two, which is a bfloat16 value again. So vLLM's own
kernels run with bfloat16 in the place of e4m3, and lose nothing. The codes are made from their results:

    queries   by torch's conversion, which is integer arithmetic on these devices
    keys      by `indexer_cache_write`, the primitive that writes every other indexer's keys

Kernels are called as vLLM calls them, and arguments are changed by name: 0.30 to 0.33 were read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.vllm import indexer

_ONE_PAGE: Final = 1 << 30
"""Rows of a page, where all rows of a step are to lie in the first one."""

Kernel = Callable[..., None]
"""A kernel of vLLM's with its grid; arguments by name."""


class InBfloat16:
    """Takes the place of a Triton kernel of vLLM's that stores e4m3, and is launched like it.

    serve: gets the kernel with its grid, and the arguments of the call by name.
    """

    def __init__(self, kernel: Any, serve: Callable[[Kernel, dict[str, Any]], None]) -> None:
        self.kernel, self._serve = kernel, serve

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            self._serve(self.kernel[grid], dict(zip(self.kernel.arg_names, args, strict=False)) | named)

        return launch


def quantize_queries(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_fwht_quant_kernel`: qout_ptr [rows, 128] float8_e4m3fn and sout_ptr [rows, 1] float32 are written."""
    codes: Tensor = call["qout_ptr"]
    values = torch.empty_like(codes, dtype=torch.bfloat16)
    kernel(**call | {"qout_ptr": values})
    codes.copy_(values)


def write_pools(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_kpool_softmax_rotate_write_cache_kernel`: a pool a program, for the cache, for the caller or for both.

    loc_ptr [pools] int64: slots. write_mask_ptr [pools] bool: the pools to write, where HAS_WRITE_MASK.
    """
    _check_scales(call)
    slots: Tensor = call["loc_ptr"]
    keys, scales = _rows(slots, call)
    returned = call["compressed_k_ptr"], call["compressed_scale_ptr"]
    own = {"compressed_k_ptr": keys, "compressed_scale_ptr": scales, "RETURN_COMPRESSED": True}
    kernel(**call | own | {"buf_fp8_ptr": call["buf_fp8_ptr"].view(torch.uint8), "WRITE_CACHE": False})
    if call["WRITE_CACHE"]:
        written = torch.where(call["write_mask_ptr"], slots, -1) if call["HAS_WRITE_MASK"] else slots
        _write(keys, scales, call["buf_fp8_ptr"], written)
    if call["RETURN_COMPRESSED"]:
        returned[0].copy_(keys)
        returned[1].copy_(scales)


def update_pools(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_kpool_decode_update_batched_kernel`: new tokens go into their requests' rings, pools that they complete into the cache.

    slot_mapping_ptr, positions_ptr: [requests, tokens of each], a slot is that of the pool, negative = skip.
    """
    _check_scales(call)
    slots, positions = call["slot_mapping_ptr"], call["positions_ptr"]
    keys, scales = _rows(slots, call)
    row = torch.arange(slots.numel(), dtype=slots.dtype, device=slots.device).view_as(slots)
    own = {"buf_fp8_ptr": keys, "buf_fp32_ptr": scales, "slot_mapping_ptr": torch.where(slots >= 0, row, -1)}
    kernel(**call | own | {"PAGE_SIZE": _ONE_PAGE, "BUF_NUMEL_PER_PAGE": 0, "S_OFFSET_NBYTES_IN_PAGE": 0})
    pool = call["POOL_SIZE"]
    complete = (positions >= 0) & (positions % pool == pool - 1)  # other rows of `keys` were not written
    _write(keys, scales, call["buf_fp8_ptr"], torch.where(complete, slots, -1))


def _rows(slots: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """For a key and its scale of each slot, unwritten."""
    keys = torch.empty((slots.numel(), call["HEAD_DIM"]), dtype=torch.bfloat16, device=slots.device)
    return keys, torch.empty(slots.numel(), dtype=torch.float32, device=slots.device)


def _write(keys: Tensor, scales: Tensor, codes: Tensor, slots: Tensor) -> None:
    """Write keys [N, 128] bf16, divided by scales [N], to slots of the pages behind `codes`."""
    pages = codes.view(torch.uint8)
    whole = keys * scales.to(keys.dtype).unsqueeze(1)  # a power of two, so this is what was rotated
    indexer.key_writer(pages)(whole, pages, slots.flatten().to(torch.int64), scale_format="pow2")


def _check_scales(call: dict[str, Any]) -> None:
    if not call["ROUND_SCALE"]:
        expected = "powers of two, whose quotients bfloat16 holds; others need Triton's e4m3, from compute capability 8.9 on"
        raise InvalidArgument("vLLM", "ROUND_SCALE", got="scales that are not rounded", expected=expected)


SERVED_BY: Final[dict[str, Callable[[Kernel, dict[str, Any]], None]]] = {
    "_fwht_quant_kernel": quantize_queries,
    "_kpool_softmax_rotate_write_cache_kernel": write_pools,
    "_kpool_decode_update_batched_kernel": update_pools,
}
"""Kernels of vLLM's kpool_compress.py that store e4m3."""


def store_codes(module: Any) -> None:
    """Put the above in the place of the module's kernels."""
    for name, serve in SERVED_BY.items():
        kernel = getattr(module, name)
        if not isinstance(kernel, InBfloat16):
            setattr(module, name, InBfloat16(kernel, serve))


def as_bytes(function: Callable[..., Tensor], **zero: int) -> Callable[..., Tensor]:
    """`function` of a tensor that it moves and pads, with e4m3 handed over as bytes. zero: its argument that pads with 0."""

    def moved(x: Tensor, *args: Any, **named: Any) -> Tensor:
        if x.dtype != torch.float8_e4m3fn:
            return function(x, *args, **named)
        return function(x.view(torch.uint8), *args, **named | zero).view(x.dtype)

    return moved
