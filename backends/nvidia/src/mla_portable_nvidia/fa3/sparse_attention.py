# SPDX-License-Identifier: Apache-2.0
"""sparse_decode and sparse_prefill on BF16 rows by FlashAttention 3, with pages of one token.

The kernel computes tiles of 64 heads by 64 keys of any head count. It reads the leading pages of a row's list and follows
them unchecked, so indices pass through `page_lists` first, unless the request promises that what is in front of the lengths
are rows of kv. It has no sink for heads of these widths: that is applied afterwards. It has no build for rows without a rotary
part either: rows of `bf16_nope` take as long as those with one (`operators`).

Splits: the kernel cuts the keys of rows that leave multiprocessors idle, by the lengths that it reads on the device, even if a
small last wave follows. The largest number of splits is an argument. vLLM passes 0. The kernel then allocates 28 accumulators
for each row, as if all but one row were short: 0.9 GiB for 256 rows of 64 heads. It also launches the kernel that merges them
every time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import (
    DEFAULT_SCRATCH_BYTES,
    DeviceFacts,
    Implementation,
    MLAPortableError,
    Reason,
    Request,
    Support,
)
from mla_portable.layouts import BF16, BF16_NOPE, KV_LORA_RANK
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparseDecode, SparsePrefill
from mla_portable_common.alignment import aligned
from mla_portable_common.flat_rows import FlatDecode, FlatPrefill
from mla_portable_common.libraries import triton_missing
from mla_portable_nvidia.fa3.operators import IDLE_QUERY_BYTES, FA3Operator, Halves, find_fa3, halves_of
from mla_portable_nvidia.passes.block_times import TILE_HEADS, predicted_us

if TYPE_CHECKING:
    from mla_portable_nvidia.fa3.page_lists import PageLists
    from mla_portable_nvidia.passes.boundary import Boundary

NAME: Final = "nvidia.flash_attention3"
_TILE: Final = 64
"""Keys of a tile."""
_MARGIN: Final = 1.1
"""By this much more work for each multiprocessor than there is, the kernel counts, where it decides on splits."""
_MOST_SPLITS: Final = 256
_MOST_ROWS: Final = 992
"""The kernel does not split larger batches."""
_DECODE, _PREFILL = 8.5, 9.5
"""Decode: behind the kernel of few heads, before the one of many, which takes 1.1 to 1.9 times as long. Prefill: before
FlashMLA, which takes 1.00 to 1.04 times as long with 64 and 128 heads, and 1.3 to 1.4 times where it pads them."""


@lru_cache(maxsize=4096)
def most_splits(rows: int, heads: int, topk: int, num_sms: int, scratch_bytes: int = DEFAULT_SCRATCH_BYTES) -> int:
    """How many splits the kernel may cut a row into: of what it would take itself where every row has `topk` keys, and of
    what scratch allows, the number that is predicted to be fastest.
    """
    tiles, blocks = rows * -(-heads // TILE_HEADS), -(-topk // _TILE)
    own = -(-blocks // max(math.ceil(tiles * blocks * _MARGIN / num_sms), 1))
    if rows > _MOST_ROWS or own <= 1:
        return 1
    most = max(min(own, _MOST_SPLITS, scratch_bytes // accumulator_bytes(rows, heads)), 1)
    return min(range(1, most + 1), key=lambda splits: predicted_us(tiles, splits, _TILE * -(-blocks // splits), num_sms))


def accumulator_bytes(rows: int, heads: int) -> int:
    """Of one split: float32 sums and an lse for each head of each row."""
    return 4 * rows * heads * (KV_LORA_RANK + 1)


class FlashAttention3:
    """Attention of rows of one query token over flat BF16 rows: what `FlatDecode` and `FlatPrefill` call.

    Graph-safe where `out` and `lse_out` are given.
    """

    def __init__(
        self,
        operator: FA3Operator,
        boundary: Boundary,
        page_lists: PageLists,
        *,
        num_sms: int,
        lists: bool = True,
        finishes: bool = True,
        max_scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
    ) -> None:
        """Decide what every call does.

        Args:
            lists: False where indices and lengths are promised to be clean: they are lists of pages then.
            finishes: False where neither an lse nor a sink is asked for: the kernel's `out` is the result.
            max_scratch_bytes: bound on accumulators, and on lists and idle queries.
        """
        self._operator, self._boundary, self._page_lists = operator, boundary, page_lists
        self._num_sms, self._lists, self._finishes = num_sms, lists, finishes
        self._max_scratch_bytes, self._no_lse = max_scratch_bytes, torch.empty(0)

    def view_of(self, kv: Tensor) -> Halves:
        """kv [W, 576] or [W, 512] bf16 as a call takes it."""
        return halves_of(kv)

    def __call__(
        self,
        q: Tensor,
        kv: Halves,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """List, attend and finish, as far as there is need; in chunks of tokens where lists or idle queries would be large.

        Args: as of sparse_decode with one query token a row, but kv: `view_of` the rows that the indices count.
        Returns: as asked; where nothing is finished, a tensor without elements as lse, and `lse_out` stays as it was.
        """
        num_tokens, _, num_heads, width = q.shape
        if out is None:
            out = torch.empty((num_tokens, 1, num_heads, KV_LORA_RANK), dtype=q.dtype, device=q.device)
        if not self._finishes:
            lse_out = self._no_lse
        elif lse_out is None:
            lse_out = torch.empty((num_tokens, 1, num_heads), dtype=torch.float32, device=q.device)
        num_rows = kv[0].shape[0]
        if num_tokens == 0:
            return out, lse_out
        if num_rows == 0:
            return out.zero_(), lse_out.fill_(-math.inf)
        indices = indices.squeeze(1)
        lengths = None if lengths is None else lengths.squeeze(1)
        topk = indices.shape[1]
        clean = not self._lists and lengths is not None and indices.stride(1) == 1
        token_bytes = (0 if clean else 4 * topk) + (IDLE_QUERY_BYTES * num_heads if width == KV_LORA_RANK else 0)
        rows = min(num_tokens, max(self._max_scratch_bytes // token_bytes, 1)) if token_bytes else num_tokens
        pages = counts = None
        if not clean:
            pages = torch.empty((rows, topk), dtype=torch.int32, device=q.device)
            counts = torch.empty(rows, dtype=torch.int32, device=q.device)
        for begin in range(0, num_tokens, rows):
            part = slice(begin, min(begin + rows, num_tokens))
            some, used = indices[part], None if lengths is None else lengths[part]
            if pages is not None and counts is not None:
                listed, counted = pages[: part.stop - begin], counts[: part.stop - begin]
                self._page_lists(listed, counted, some, used, num_rows)
                some, used = listed, counted
            assert used is not None
            lse_part = lse_out[part] if self._finishes else lse_out
            self._attend(q[part], kv, some, used.contiguous(), softmax_scale, attn_sink, out[part], lse_part)
        return out, lse_out

    def _attend(
        self,
        q: Tensor,
        kv: Halves,
        pages: Tensor,
        counts: Tensor,
        softmax_scale: float,
        attn_sink: Tensor | None,
        out: Tensor,
        lse_out: Tensor,
    ) -> None:
        """One call of the kernel."""
        num_tokens, _, num_heads, _ = q.shape
        splits = most_splits(num_tokens, num_heads, pages.shape[1], self._num_sms, self._max_scratch_bytes)
        in_place = out.is_contiguous() and out.data_ptr() % 16 == 0
        target = out if in_place else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        if q.data_ptr() % 16 or not q.is_contiguous():
            q = aligned(q)
        lse = self._operator(q, kv, pages, counts, softmax_scale, splits, target)
        if self._finishes:
            # what prepares lengths is launched normally; the kernel waits for it, and the combine's last block for the kernel:
            # vllm-project/flash-attention 617264c, hopper/flash_prepare_scheduler.cu, flash_fwd_combine_kernel.h
            self._boundary.finish(out, lse_out, None if in_place else target, lse, attn_sink, False, early=True)
        elif not in_place:
            out.copy_(target)


def _check(device: DeviceFacts) -> tuple[Reason, ...]:
    """Every package's reason why it cannot serve; where one can, what its passes lack."""
    operator, reasons = find_fa3()
    return triton_missing() if operator is not None else reasons


def _bound(request: Request) -> FlashAttention3:
    """The operator that is here. Raises: MLAPortableError where there is none."""
    from mla_portable_nvidia.fa3.page_lists import PageLists
    from mla_portable_nvidia.passes.boundary import Boundary

    operator, reasons = find_fa3()
    if operator is None:
        raise MLAPortableError(f"{request.primitive}: nothing brings FlashAttention 3 here: {'; '.join(map(str, reasons))}")
    device = request.device
    return FlashAttention3(
        operator,
        Boundary(),
        PageLists(),
        num_sms=device.num_sms or 1,
        lists=not (request.lengths and request.clean_indices and request.clean_lengths),
        finishes=request.lse or request.attn_sink,
    )


def bind_fa3_prefill(request: Request) -> SparsePrefill:
    """sparse_prefill on the operator that is here. Raises: MLAPortableError where there is none."""
    return FlatPrefill(_bound(request))


def bind_fa3_decode(request: Request) -> SparseDecode:
    """sparse_decode on the same kernel, each query token a row of its own. Raises: MLAPortableError where there is none."""
    return FlatDecode(_bound(request))


def fa3_implementations(*, device_types: tuple[str, ...] = ("cuda",)) -> Iterator[Implementation]:
    """sparse_decode and sparse_prefill of BF16 rows, for SM90. device_types: ("cuda",) but for tests with stand-ins."""
    common: dict[str, Any] = {
        "source": "vllm-project/flash-attention 617264c: hopper/flash_api.cpp; vLLM 0.26: flashattn_mla_sparse.py",
        "device_types": device_types,
        "vendors": ("nvidia",),
        "archs": ("sm90",),
        "kv_layouts": (BF16.name, BF16_NOPE.name),
        "max_heads": 128,
        "cache_alignment": 16,
    }
    yield Implementation(
        NAME,
        SPARSE_DECODE,
        Support(**common, needs_whole_rows=True),
        bind_fa3_decode,
        check=_check,
        preference=_DECODE,
        prefills_as=NAME,
    )
    yield Implementation(NAME, SPARSE_PREFILL, Support(**common), bind_fa3_prefill, check=_check, preference=_PREFILL)
