# SPDX-License-Identifier: Apache-2.0
"""Reading chosen rows of a paged cache or a workspace, wherever its blocks lie, without touching the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_portable.layouts import layout_of

__all__ = ["CacheRows"]


class CacheRows:
    """The rows of `kv` by slot number, read without a copy of anything that is not asked for.

    Attributes:
        layout: of a row. num_slots: rows there are; a slot is block * block_size + offset, or the row of a workspace.
    """

    def __init__(self, kv: Tensor) -> None:
        """Look at `kv`: a paged cache [blocks, block_size, row width] with any strides, or flat rows [W, row width]."""
        self.layout = layout_of(kv, where="reference.torch", argument="kv")
        paged = kv if kv.dim() == 3 else kv.unsqueeze(0)
        self.num_slots, self._block_size = paged.shape[0] * paged.shape[1], paged.shape[1]
        self._parts = [_Part(part) for part in self.layout.parts(paged)]

    def raw(self, slots: Tensor) -> Tensor:
        """The rows as they are stored.

        Args:
            slots: [n] int64, each in [0, num_slots).
        Returns: [n, row_width] of the layout's dtype, contiguous.
        """
        parts = [part.rows(slots, self._block_size) for part in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

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
