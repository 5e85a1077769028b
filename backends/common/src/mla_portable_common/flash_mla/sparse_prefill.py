# SPDX-License-Identifier: Apache-2.0
"""sparse_prefill on FlashMLA's BF16 kernel: head counts, K multiples, lengths and lse conventions end in this file.

The kernel leaves out what is negative or past the workspace by itself, so indices of a fitting width go to it as they are.
Lengths do not: it may multiply a masked key by a probability of zero, and that key may be NaN, so entries past a length
become -1 first, unless they are promised to be, and the length then only saves work.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.kit.results import head_results
from mla_portable.layouts import KV_LORA_RANK
from mla_portable_common.alignment import aligned
from mla_portable_common.flash_mla.conventions import BoundaryPasses, PrefillKernel, absent_behind, marks_of_empty, padded_sink
from mla_portable_common.flash_mla.head_padding import KERNEL_HEADS, PaddedQueries, kernel_heads

TOPK_MULTIPLE: Final = 128
SCRATCH_BYTES: Final = 128 << 20
"""Bound on padded queries, results and masked indices of one kernel call: about 900 tokens of 64 heads, 7 per SM."""
_PADDED_QUERIES: Final = PaddedQueries()


class FlashMLAPrefill:
    """The callable; see `mla_portable.contracts.SparsePrefill`. Graph-safe where `out` and `lse_out` are given."""

    def __init__(
        self,
        kernel: PrefillKernel,
        boundary: BoundaryPasses,
        *,
        lse_base_2: bool,
        heads: Collection[int],
        native_heads: Collection[int] = (),
        full_heads: tuple[int, ...] = KERNEL_HEADS,
        topk_multiple: int = TOPK_MULTIPLE,
        compacts: bool = False,
        sanitises: bool = True,
        clamps: bool = True,
        finishes: bool = True,
        max_scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """Decide what every call does.

        Args:
            kernel, lse_base_2, heads: as calibrated. native_heads: counts to leave unpadded where the kernel has them.
            full_heads: those to pad to, in ascending order. topk_multiple: what the width of the kernel's lists must be one of.
            compacts: the kernel takes absent indices behind the others alone.
            sanitises, clamps: False where indices, and lengths, are promised to be clean.
            finishes: False where no lse is asked for and what the kernel leaves in `out` is the result.
            max_scratch_bytes: of what one kernel call needs.
        """
        self._kernel, self._boundary, self._base_2 = kernel, boundary, lse_base_2
        self._sanitises, self._clamps, self._finishes, self._no_lse = sanitises, clamps, finishes, torch.empty(0)
        self._full, self._topk_multiple, self._compacts = full_heads, topk_multiple, compacts
        self._calibrated = tuple(sorted(count for count in heads if count in full_heads))
        self._native = frozenset(heads) & frozenset(native_heads)
        self._max_scratch_bytes = max_scratch_bytes

    def _heads_for(self, num_heads: int) -> int:
        """The head count that the kernel runs with."""
        if num_heads in self._native:
            return num_heads
        return next((count for count in self._calibrated if num_heads <= count), kernel_heads(num_heads, self._full))

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
        """Mask, pad, call and finish, as far as there is need; in chunks of tokens where heads are padded or indices masked.

        Returns: as asked; where nothing is finished or the kernel has no lse, a tensor without elements as lse. Where nothing
            is finished, `lse_out` stays as it was.
        """
        num_tokens, num_heads, key_width = q.shape
        heads, topk = self._heads_for(num_heads), indices.shape[1]
        width = -(-topk // self._topk_multiple) * self._topk_multiple
        masks = (self._sanitises and lengths is not None) or topk != width or not indices.is_contiguous() or self._compacts
        whole, empty = not masks and heads == num_heads, num_tokens == 0 or kv.shape[0] == 0
        if self._finishes:
            out, lse_out = head_results(q, KV_LORA_RANK, out, lse_out)
        else:
            lse_out = self._no_lse
            if out is None and (empty or not whole):  # else the kernel's own result is returned
                out = torch.empty((num_tokens, num_heads, KV_LORA_RANK), dtype=q.dtype, device=q.device)
        if empty:
            assert out is not None
            lse_out.fill_(-math.inf)
            return out.zero_(), lse_out if self._kernel.has_lse else self._no_lse
        kv = kv.unsqueeze(1)
        if lengths is not None and self._kernel.takes_lengths:  # which reads them as contiguous
            lengths = lengths.clamp(0, topk) if self._clamps else lengths.contiguous()
        indices = indices.unsqueeze(1)
        if whole:
            out = self._attend(aligned(q), kv, indices, softmax_scale, lengths, attn_sink, out, lse_out)
            return out, lse_out if self._kernel.has_lse else self._no_lse
        assert out is not None
        row_bytes = (4 * width if masks else 0) + (2 * heads * (key_width + KV_LORA_RANK) if heads != num_heads else 0)
        rows = min(num_tokens, max(self._max_scratch_bytes // row_bytes, 1))
        padded = masked = None
        if heads != num_heads:
            padded = _PADDED_QUERIES.take(rows, num_heads, heads, q.device, key_width)
        if masks:
            masked = torch.empty((rows, 1, width), dtype=torch.int32, device=q.device)
        for begin in range(0, num_tokens, rows):
            part = slice(begin, min(begin + rows, num_tokens))
            count, query, chosen, limits = part.stop - begin, q[part], indices[part], None if lengths is None else lengths[part]
            if masked is not None:
                self._boundary.sanitise(masked[:count], chosen, None if limits is None else limits.unsqueeze(1), kv.shape[0])
                chosen = absent_behind(masked[:count]) if self._compacts else masked[:count]
            if padded is not None:
                query = padded[:count]
                query[:, :num_heads].copy_(q[part])
            lse_part = lse_out[part] if self._finishes else lse_out
            self._attend(aligned(query), kv, chosen, softmax_scale, limits, attn_sink, out[part], lse_part)
        return out, lse_out if self._kernel.has_lse else self._no_lse

    def _attend(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        softmax_scale: float,
        lengths: Tensor | None,
        attn_sink: Tensor | None,
        out: Tensor | None,
        lse_out: Tensor,
    ) -> Tensor:
        """One call of the kernel, on as many heads as q has, for those of `out`. Returns: `out`, else what the kernel made."""
        kernel, is_padded = self._kernel, out is not None and q.shape[1] != out.shape[1]
        in_kernel = kernel.takes_sink and not is_padded
        in_place = out is not None and kernel.takes_out and not is_padded and out.is_contiguous()
        options: dict[str, Any] = {"out": out} if in_place else {}
        if attn_sink is not None and not kernel.has_lse:  # without which no pass can apply it
            attn_sink, in_kernel = padded_sink(attn_sink, q.shape[1]), True
        if in_kernel:
            options["attn_sink"] = attn_sink
        if lengths is not None and kernel.takes_lengths:
            options["lengths"] = lengths
        got, lse = kernel(q, kv, indices, softmax_scale, **options)
        if out is None:
            return got
        if self._finishes:
            if lse is None:
                lse = marks_of_empty([indices.squeeze(1)], out.shape[1], kv.shape[0])
            self._boundary.finish(
                out.unsqueeze(1),
                lse_out.unsqueeze(1),
                None if in_place else got.unsqueeze(1),
                lse.unsqueeze(2),
                None if in_kernel else attn_sink,
                self._base_2,
                early=True,  # the kernel is launched normally, and is the last of its call (FlashMLA 9241ae3)
            )
        elif not in_place:
            out.copy_(got[:, : out.shape[1]])
        return out
