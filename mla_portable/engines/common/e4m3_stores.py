# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Triton kernels of an engine that store e4m3, where Triton has no e4m3, which is below compute capability 8.9.

Triton refuses even a pointer to e4m3 there. So the engine's own kernel runs with wider numbers in the place of e4m3, and the
codes are made from its results. What is stored is a value divided by its scale: float32 holds it, and so does bfloat16 where
the value is bfloat16 and the scale a power of two. Nothing is lost, and a code is rounded once, as by the kernel:

    queries   by torch's conversion, which is integer arithmetic on these devices
    keys      by `indexer_cache_write`, the primitive that writes every other indexer's keys

Kernels are called as the engine calls them, and arguments are changed by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.common import index_keys

ONE_PAGE: Final = {"BUF_NUMEL_PER_PAGE": 0, "S_OFFSET_NBYTES_IN_PAGE": 0}
"""With a page of `ONE_PAGE_ROWS`: keys and scales lie densely in the order of their slots, whatever buffers a kernel gets."""
ONE_PAGE_ROWS: Final = 1 << 30

Kernel = Callable[..., None]
"""A kernel of the engine with its grid; arguments by name."""
Serve = Callable[[Kernel, dict[str, Any]], None]
"""Gets the kernel with its grid, and the arguments of a call by name."""


class StandIn:
    """Takes the place of a Triton kernel of the engine that stores e4m3, and is launched like it."""

    def __init__(self, kernel: Any, serve: Serve) -> None:
        self.kernel, self._serve = kernel, serve

    @property
    def arg_names(self) -> list[str]:
        """The kernel's."""
        return self.kernel.arg_names

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            self._serve(self.kernel[grid], dict(zip(self.arg_names, args, strict=False)) | named)

        return launch


def replace_kernels(module: Any, served_by: Mapping[str, Serve]) -> None:
    """Put a StandIn in the place of the module's kernels of these names; calling it again changes nothing."""
    for name, serve in served_by.items():
        kernel = getattr(module, name)
        if not isinstance(kernel, StandIn):
            setattr(module, name, StandIn(kernel, serve))


def convert(kernel: Kernel, call: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    """Run a kernel whose argument `name` are codes, float8_e4m3fn: it stores `dtype`, and torch converts that to the codes."""
    codes: Tensor = call[name]
    values = torch.empty_like(codes, dtype=dtype)
    kernel(**call | {name: values})
    codes.copy_(values)


def key_rows(slots: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """For a key [N, width] bf16 and its scale [N] of each slot: keys are unwritten, a scale of 0 is one that nothing wrote."""
    keys = torch.empty((slots.numel(), width), dtype=torch.bfloat16, device=slots.device)
    return keys, torch.zeros(slots.numel(), dtype=torch.float32, device=slots.device)


def write_keys(keys: Tensor, scales: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write keys [N, 128] bf16, divided by scales [N] that are powers of two, to slots of the pages; negative = skip.

    pages: [pages, rows, 132] uint8. Those with a scale of 0 are skipped too.
    """
    whole = keys * scales.to(keys.dtype).unsqueeze(1)  # what was rotated
    written = torch.where(scales > 0, slots.flatten().to(torch.int64), -1)
    index_keys.key_writer(pages)(whole, pages, written, scale_format="pow2")


def write_pools(kernel: Kernel, call: dict[str, Any], pages: Tensor, engine: str) -> None:
    """`_kpool_softmax_rotate_write_cache_kernel`: a pool a program, for the cache, for the caller or for both.

    loc_ptr [pools] int64: slots of `pages`. write_mask_ptr [pools] bool: the pools to write, where HAS_WRITE_MASK.
    """
    check_scales(call, engine)
    slots: Tensor = call["loc_ptr"]
    keys, scales = key_rows(slots, call["HEAD_DIM"])
    returned = call["compressed_k_ptr"], call["compressed_scale_ptr"]
    own = {"compressed_k_ptr": keys, "compressed_scale_ptr": scales, "RETURN_COMPRESSED": True}
    kernel(**call | own | {"buf_fp8_ptr": call["buf_fp8_ptr"].view(torch.uint8), "WRITE_CACHE": False})
    if call["WRITE_CACHE"]:
        write_keys(keys, scales, pages, torch.where(call["write_mask_ptr"], slots, -1) if call["HAS_WRITE_MASK"] else slots)
    if call["RETURN_COMPRESSED"]:
        returned[0].copy_(keys)
        returned[1].copy_(scales)


def check_scales(call: dict[str, Any], engine: str) -> None:
    """Raise InvalidArgument for keys whose scales are not powers of two."""
    if not call["ROUND_SCALE"]:
        expected = "powers of two, whose quotients bfloat16 holds; others need Triton's e4m3, from compute capability 8.9 on"
        raise InvalidArgument(engine, "ROUND_SCALE", got="scales that are not rounded", expected=expected)
