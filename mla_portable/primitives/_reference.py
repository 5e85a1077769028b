# SPDX-License-Identifier: Apache-2.0
"""What the references of several primitives share: arithmetic that no switch changes, and reading rows of a paged cache.

A float32 matrix product is whatever `torch.set_float32_matmul_precision` allows: TF32 on a GPU, bfloat16 on some CPUs. So
products are taken in float64, which no switch touches, or in float32 element by element where a device's float64 cannot be
trusted. Autocast and autograd are off inside a reference, and every new tensor names its dtype and device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from mla_portable.accelerator import without_autocast
from mla_portable.layouts import KV, Cache, layout_of

_P = ParamSpec("_P")
_R = TypeVar("_R")


def isolated(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` without autocast and autograd, on the device type of its first tensor.

    In inference mode where a tensor of the call was made there: torch writes those nowhere else, as a kernel would.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given = (each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, tuple) else (value,)))
        tensors = [each for each in given if isinstance(each, Tensor)]
        mode = torch.inference_mode() if any(each.is_inference() for each in tensors) else torch.no_grad()
        with mode, without_autocast(tensors[0].device.type):
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


class CacheRows:
    """The rows of `kv` by slot number, read without a copy of anything that is not asked for.

    Attributes:
        layout: of a row. num_slots: rows there are; a slot is block * block_size + offset, or the row of a workspace.
    """

    def __init__(self, kv: Cache, cache: str = KV, kv_layout: str | None = None) -> None:
        """Look at `kv`: a paged cache [blocks, block_size, row width] with any strides, in one tensor or several, or flat rows
        [W, row width].

        cache: KV or INDEX. kv_layout: the name of its layout, None to infer it.
        """
        self.layout = layout_of(kv, name=kv_layout, where="reference.torch", argument="kv", cache=cache)
        parts = self.layout.parts(kv if isinstance(kv, tuple) or kv.dim() == 3 else kv.unsqueeze(0))
        blocks, self._block_size = parts[0].shape[:2]
        self.num_slots = blocks * self._block_size
        self._parts = [_Part(part) for part in parts]

    def raw(self, slots: Tensor) -> Cache:
        """The rows as they are stored.

        Args:
            slots: [n] int64, each in [0, num_slots).
        Returns: [n, row_width] of the layout's dtype, contiguous; one for each tensor of a cache in several.
        """
        return self.layout.joined([part.rows(slots, self._block_size) for part in self._parts])

    def values(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rows as numbers of `dtype`, FP8 latents multiplied by their scales. Takes slots as `raw` does.

        Returns: latent [n, value width] and rope [n, rope width]; apart, for joining them would be one more pass.
        """
        return self.layout.split(self.raw(slots), dtype)


class _Part:
    """[blocks, block_size, width]: rows, or what of them lies together."""

    def __init__(self, paged: Tensor) -> None:
        blocks, block_size, width = paged.shape
        block_stride, row_stride, element_stride = paged.stride()
        # One index must reach every row, though blocks may lie apart: a view whose rows start at each common divisor
        # of the two strides (and so overlap) has them all. index_select on it copies whole rows, which on a CPU is
        # twenty times faster than indexing by (block, offset).
        unit = math.gcd(block_stride, row_stride) or 1
        self._block_step, self._row_step = block_stride // unit, row_stride // unit
        reach = (blocks - 1) * self._block_step + (block_size - 1) * self._row_step + 1
        self._rows = paged.as_strided((reach if blocks * block_size else 0, width), (unit, element_stride))

    def rows(self, slots: Tensor, block_size: int) -> Tensor:
        if self._block_step == block_size * self._row_step:
            return self._rows.index_select(0, slots * self._row_step)
        start = slots // block_size * self._block_step + slots % block_size * self._row_step
        return self._rows.index_select(0, start)
