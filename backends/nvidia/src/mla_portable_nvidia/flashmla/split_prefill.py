# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's prefill kernel on few tokens of many keys: a token's keys are cut into parts, which are tokens to the kernel.

Each part costs a copy of its queries and a place for its result, and both ends a launch; `block_times` says when that pays.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mla_portable.layouts import KV_LORA_RANK
from mla_portable.primitives import SparsePrefill
from mla_portable_common.flash_mla.conventions import PrefillKernel
from mla_portable_common.flash_mla.head_padding import KERNEL_HEADS
from mla_portable_common.flash_mla.sparse_prefill import SCRATCH_BYTES, TOPK_MULTIPLE
from mla_portable_nvidia.passes.block_times import TILE_HEADS, predicted_us

if TYPE_CHECKING:
    from mla_portable_nvidia.flashmla.row_parts import RowParts

_COUNTS: Final = (1, 2, 4, 8, 16)


@lru_cache(maxsize=4096)
def num_parts(tokens: int, heads: int, topk: int, num_sms: int) -> int:
    """Into how many parts to cut the keys of `tokens` tokens of 64 or 128 heads: the count that is predicted to be fastest.

    The parts are wholes of what the kernel's K must be a multiple of.
    """
    tiles = tokens * (heads // TILE_HEADS)
    counts = (parts for parts in _COUNTS if topk % (TOPK_MULTIPLE * parts) == 0 or parts == 1)
    return min(counts, key=lambda parts: predicted_us(tiles, parts, topk // parts, num_sms))


class SplitPrefill:
    """Attention of rows of one query token, what `FlatDecode` calls. Graph-safe where results are given."""

    def __init__(
        self,
        whole: SparsePrefill,
        kernel: PrefillKernel,
        passes: RowParts,
        *,
        base_2: bool,
        heads: Collection[int],
        num_sms: int,
        sanitises: bool,
        with_lse: bool,
    ) -> None:
        """Decide what every call does.

        Args:
            whole: serves what is not worth to be cut, or has to be masked first. kernel, base_2, heads: as calibrated.
            sanitises: False where indices are promised to be clean. with_lse: an lse is asked for.
        """
        self._whole, self._kernel, self._passes, self._base_2 = whole, kernel, passes, base_2
        self._heads = sorted(set(heads) & set(KERNEL_HEADS))
        self._num_sms, self._sanitises, self._with_lse, self._no_lse = num_sms, sanitises, with_lse, torch.empty(0)
        self._cuts: dict[tuple[int, int, int, int], tuple[int, int]] = {}

    def view_of(self, kv: Tensor) -> Tensor:
        """kv [W, 576] or [W, 512] bf16 as a call takes it, with an axis of one head."""
        return kv.unsqueeze(1)

    def _cut(self, num_tokens: int, num_heads: int, topk: int, width: int) -> tuple[int, int]:
        """With how many heads and in how many parts the kernel computes rows of this shape; 0 parts where `whole` does."""
        heads = next((count for count in self._heads if num_heads <= count), 0)
        if not heads or topk % TOPK_MULTIPLE:
            return heads, 0
        parts = num_parts(num_tokens, heads, topk, self._num_sms)
        # one part of padded heads: the pass before pads as well
        pads = heads != num_heads and 2 * num_tokens * heads * (width + KV_LORA_RANK) <= SCRATCH_BYTES
        return heads, parts if parts > 1 or pads else 0

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One call of the kernel in any case.

        Args: as of sparse_decode with one query token a row, but kv: `view_of` the rows that the indices count.
        Returns: out and lse; a tensor without elements as lse where none is asked for, and `lse_out` stays as it was.
        """
        (num_tokens, _, num_heads, width), topk = q.shape, indices.shape[2]
        shape = num_tokens, num_heads, topk, width
        cut = self._cuts.get(shape)
        if cut is None:
            cut = self._cuts[shape] = self._cut(*shape)
        heads, parts = cut
        masks = (self._sanitises and lengths is not None) or not indices.is_contiguous()
        if self._with_lse and lse_out is None:
            lse_out = torch.empty((num_tokens, 1, num_heads), dtype=torch.float32, device=q.device)
        lse = lse_out if self._with_lse else None
        returned = self._no_lse if lse is None else lse
        if parts == 0 or masks or kv.shape[0] == 0 or num_tokens == 0:
            result, _ = self._whole(
                q.squeeze(1),
                kv.squeeze(1),
                indices.squeeze(1),
                softmax_scale=softmax_scale,
                lengths=None if lengths is None else lengths.squeeze(1),
                attn_sink=attn_sink,
                out=None if out is None else out.squeeze(1),
                lse_out=None if lse_out is None else lse_out.squeeze(1),
            )
            return result.unsqueeze(1) if out is None else out, returned
        if out is None:
            out = torch.empty((num_tokens, 1, num_heads, KV_LORA_RANK), dtype=q.dtype, device=q.device)
        kernel, rows, part = self._kernel, num_tokens * parts, topk // parts
        queries = torch.empty((rows, heads, width), dtype=q.dtype, device=q.device)
        limits = None
        if lengths is not None and kernel.takes_lengths:
            limits = torch.empty(rows, dtype=torch.int32, device=q.device)
        self._passes.spread(queries, limits, q, lengths, part)
        results, lses = kernel(queries, kv, indices.view(rows, 1, part), softmax_scale, lengths=limits)
        self._passes.merge(out, lse, results, lses.contiguous(), attn_sink, self._base_2)
        return out, returned
