# SPDX-License-Identifier: Apache-2.0
"""What the references of several primitives share: arithmetic that no switch changes, and reading rows of a paged cache.

A float32 matrix product is whatever `torch.set_float32_matmul_precision` allows: TF32 on a GPU, bfloat16 on some CPUs. So
products are taken in float64, which no switch touches, or in float32 element by element where a device's float64 cannot be
trusted. Autocast and autograd are off inside a reference, and every new tensor names its dtype and device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from mla_portable.accelerator import without_autocast
from mla_portable.contracts import FP8_DS_MLA, KV_LORA_RANK, SCALE_GROUP, layout_of

__all__ = ["CacheRows", "decode_e4m3", "isolated", "products"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def isolated(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` without autocast and autograd, on the device type of its first tensor."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.no_grad(), without_autocast(device.type):
            return function(*args, **kwargs)

    return call


def products(a: Tensor, b: Tensor) -> Tensor:
    """All dot products of rows: a [n, H, D] with b [n, K, D] or [K, D] -> [n, H, K], in the dtype of both.

    float64 is a matrix product. float32 multiplies and sums, head by head: it takes n * K * D elements of scratch.
    """
    if a.dtype == torch.float64:
        return torch.matmul(a, b.mT)
    result = torch.empty((*a.shape[:2], b.shape[-2]), dtype=a.dtype, device=a.device)
    for head in range(a.shape[1]):
        result[:, head] = (a[:, head : head + 1] * b).sum(dim=-1)
    return result


@cache
def _e4m3_pairs() -> Tensor:
    """[65536] int64 on the CPU: for each 16-bit pattern the float32 values of its two e4m3 bytes, as 64 bits."""
    patterns = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.uint16)
    return patterns.view(torch.float8_e4m3fn).float().view(torch.int64)


def decode_e4m3(data: Tensor) -> Tensor:
    """The float32 values of e4m3 bytes, all 256 of them exact, NaN included.

    Args:
        data: [n, m] uint8, m even, rows at even distances from an even offset.
    Returns: [n, m] float32. On a CPU by a table of byte pairs, which costs a quarter of torch's own conversion.
    """
    if not data.is_cpu:
        return data.view(torch.float8_e4m3fn).float()
    pairs = data.view(torch.uint16).to(torch.int32).flatten()
    return _e4m3_pairs().index_select(0, pairs).view(torch.float32).view(data.shape)


class CacheRows:
    """The rows of `kv` by slot number, read without a copy of anything that is not asked for.

    Attributes:
        layout: of a row. num_slots: rows there are; a slot is block * block_size + offset, or the row of a workspace.
    """

    def __init__(self, kv: Tensor) -> None:
        """Look at `kv`: [blocks, block_size, 576 | 656] with any strides, or [W, 576 | 656]."""
        self.layout = layout_of(kv, where="reference.torch", argument="kv")
        paged = kv if kv.dim() == 3 else kv.unsqueeze(0)
        blocks, self._block_size, width = paged.shape
        self.num_slots = blocks * self._block_size
        block_stride, row_stride, element_stride = paged.stride()
        # One index must reach every row, though blocks may lie apart: a view whose rows start at each common divisor
        # of the two strides (and so overlap) has them all. index_select on it copies whole rows, which on a CPU is
        # twenty times faster than indexing by (block, offset).
        unit = math.gcd(block_stride, row_stride) or 1
        self._block_step, self._row_step = block_stride // unit, row_stride // unit
        reach = (blocks - 1) * self._block_step + (self._block_size - 1) * self._row_step + 1
        self._rows = paged.as_strided((reach if self.num_slots else 0, width), (unit, element_stride))

    def raw(self, slots: Tensor) -> Tensor:
        """The rows as they are stored.

        Args:
            slots: [n] int64, each in [0, num_slots).
        Returns: [n, row_width] of the layout's dtype, contiguous.
        """
        if self._block_step == self._block_size * self._row_step:
            return self._rows.index_select(0, slots * self._row_step)
        start = slots // self._block_size * self._block_step + slots % self._block_size * self._row_step
        return self._rows.index_select(0, start)

    def values(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rows as numbers of `dtype`, FP8 latents multiplied by their scales. Takes slots as `raw` does.

        Returns: latent [n, 512] and rope [n, 64], contiguous; apart, for joining them would be one more pass.
        """
        raw = self.raw(slots)
        if not self.layout.is_quantized:
            return raw[:, :KV_LORA_RANK].to(dtype), raw[:, KV_LORA_RANK:].to(dtype)
        latent = decode_e4m3(raw[:, :KV_LORA_RANK]).to(dtype)
        scales = raw[:, KV_LORA_RANK : FP8_DS_MLA.rope_offset].view(torch.float32).to(dtype)  # [n, 4]
        latent.unflatten(1, (KV_LORA_RANK // SCALE_GROUP, SCALE_GROUP)).mul_(scales.unsqueeze(-1))
        return latent, raw[:, FP8_DS_MLA.rope_offset :].view(torch.bfloat16).to(dtype)
