# SPDX-License-Identifier: Apache-2.0
"""sparse_decode on FlashMLA's decode kernel: every quirk of the vendor ends in this file and the passes it calls.

The kernel serves a few head counts, lists of a width that is a multiple of 64, and indices that are slots or -1. It allocates
float32 accumulators for B + parts rows of S tokens, so many tokens are given to it as batch rows of one token, a bounded number
at a time, never as one row of many.

Of `fp8_v4` it also takes lengths, one for all S tokens of a row. They are not used: a schedule that its planner has not made
for just these lengths would be read wrongly, and tokens of one row have lengths of their own here.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mla_portable.contracts import DEFAULT_SCRATCH_BYTES, DecodeSchedule, PlanMismatch
from mla_portable.kit.results import head_results
from mla_portable.layouts import FP8_DS_MLA, KV_LORA_RANK, CacheLayout
from mla_portable_common.alignment import aligned
from mla_portable_common.flash_mla.cache_view import CacheView
from mla_portable_common.flash_mla.conventions import (
    BoundaryPasses,
    DecodeKernel,
    Parts,
    Plan,
    PreparedDecode,
    SecondCache,
    absent_behind,
    marks_of_empty,
    padded_sink,
)
from mla_portable_common.flash_mla.head_padding import KERNEL_HEADS, PaddedQueries, kernel_heads
from mla_portable_common.flash_mla.tile_schedules import TileSchedule, accumulator_bytes

TOPK_MULTIPLE: Final = 64
_PADDED_QUERIES: Final = PaddedQueries()

_Plain = tuple[DecodeSchedule | None, tuple[int, ...], PreparedDecode | None]
"""Of a call whose tensors go to the kernel as they are: its schedule, the shape of q, the kernel with the provider's plan."""


def rows_per_call(parts: Parts, *, query_len: int, heads: int, max_bytes: int = DEFAULT_SCRATCH_BYTES) -> int:
    """Batch rows of `query_len` tokens whose accumulators, and those of the kernel's parts, stay within `max_bytes`.

    Less than 1 where not even a single row does.
    """
    return max_bytes // accumulator_bytes(query_len, heads) - parts(query_len=query_len, num_heads=heads)


class _List(NamedTuple):
    """What rows attend to: a cache as CacheView has it, indices [B, S, K], and lengths [B, S] or None."""

    kv: Tensor
    indices: Tensor
    lengths: Tensor | None

    def rows(self, part: slice) -> _List:
        """That of some batch rows."""
        return _List(self.kv, self.indices[part], None if self.lengths is None else self.lengths[part])

    def tokens(self, b: int) -> _List:
        """That of the S tokens of a batch row, each as a row of one token."""
        lengths = None if self.lengths is None else self.lengths[b].unsqueeze(1)
        return _List(self.kv, self.indices[b].unsqueeze(1), lengths)


class FlashMLADecode:
    """The callable; see `mla_portable.contracts.SparseDecode` for the shapes.

    Where it neither sanitises nor finishes, nor pads, a call is FlashMLA's own launches and nothing else. What was checked and
    decided for the last such call is kept, for in eager steps of few rows the GPU waits for the host.

    With `out`, `lse_out` and `schedule` given it synchronises nothing and runs no planner; FlashMLA's accumulators, the
    sanitised indices and, where heads are padded, the kernel's own result come from torch's allocator, which a captured
    graph keeps for itself.
    """

    def __init__(
        self,
        kernel: DecodeKernel,
        boundary: BoundaryPasses,
        *,
        lse_base_2: bool,
        takes_plan: bool,
        parts: Parts,
        layout: CacheLayout = FP8_DS_MLA,
        whole_rows: bool = False,
        heads: tuple[int, ...] = KERNEL_HEADS,
        topk_multiple: int = TOPK_MULTIPLE,
        sanitises: bool = True,
        compacts: bool = False,
        finishes: bool = True,
        max_scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
    ) -> None:
        """Decide what every call does.

        Args:
            kernel, lse_base_2, takes_plan: as calibrated for `layout`, that of the caches.
            parts: of a call, for the bound on accumulators. whole_rows: the kernel wants blocks whole rows apart.
            heads: counts that the kernel has, in ascending order. topk_multiple: what the width of its lists must be one of.
            compacts: the kernel takes absent indices behind the others alone, so it sanitises as well.
            sanitises: False where indices are promised to be clean, of a width that the kernel takes; contiguous ones then go
                to it as they are. finishes: False where no lse is asked for and what the kernel leaves in `out` is the result.
            max_scratch_bytes: bound on accumulators without a schedule.
        """
        self._kernel, self._boundary = kernel, boundary
        self._base_2, self._takes_plan = lse_base_2, takes_plan
        self._sanitises, self._finishes = sanitises, finishes
        self._parts, self._max_scratch_bytes = parts, max_scratch_bytes
        self._heads, self._topk_multiple, self._compacts = heads, topk_multiple, compacts
        self._cache_view = CacheView(layout, whole_rows=whole_rows)
        self._no_lse = torch.empty(0)
        self._is_plain = not sanitises and not finishes and kernel.takes_out and kernel.takes_sink
        self._last: _Plain = (None, (), None)  # no q has a shape without axes

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv_cache: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        schedule: DecodeSchedule | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sanitise, pad, call and finish, as far as there is need, chunk by chunk.

        Returns: as asked; where nothing is finished or the kernel has no lse, a tensor without elements as lse. Where nothing
            is finished, `lse_out` stays as it was.
        Raises: PlanMismatch for a schedule of another kind or another padding; InvalidArgument for a cache whose alignment
            the kernel cannot read. Nothing has run then.
        """
        planned, shape, kernel = self._last
        if (
            schedule is planned
            and kernel is not None
            and out is not None
            and q.shape == shape
            and q.is_contiguous()
            and q.data_ptr() % 16 == 0
            and out.is_contiguous()
            and indices.is_contiguous()
            and (extra_indices is None or extra_indices.is_contiguous())
        ):
            rows = self._cache_view.known(kv_cache)
            extra_rows = None if extra_kv_cache is None else self._cache_view.known(extra_kv_cache)
            if rows is not None and (extra_rows is None) == (extra_indices is None):
                extra = None if extra_rows is None or extra_indices is None else SecondCache(extra_rows, extra_indices)
                kernel(q, rows, indices, softmax_scale, attn_sink, out, extra)
                return out, self._no_lse
        batch, query_len, num_heads, _ = q.shape
        if self._finishes:
            out, lse_out = head_results(q, KV_LORA_RANK, out, lse_out)
        else:
            lse_out = self._no_lse
        lists = [
            _List(self._cache_view.of(cache), slots, limits)
            for cache, slots, limits in ((kv_cache, indices, lengths), (extra_kv_cache, extra_indices, extra_lengths))
            if cache is not None and slots is not None and cache.shape[0]
        ]
        if batch == 0 or not lists:
            out = _fresh(q) if out is None else out
            lse_out.fill_(-math.inf)
            return out.zero_(), lse_out if self._kernel.has_lse else self._no_lse
        tiles = None
        if schedule is not None:
            tiles = self._checked(schedule, batch, kernel_heads(num_heads, self._heads), extra_indices)
            rows = tiles.rows_per_call or batch
            if len(lists) < 1 + (extra_indices is not None):  # a cache without blocks: made for both lists, it fits none
                tiles = None
        else:
            rows = self._rows_per_call(query_len, num_heads)
        if rows >= batch:
            if self._is_plain and num_heads == kernel_heads(num_heads, self._heads):
                self._last = schedule, q.shape, self._kernel.prepared(self._plan_of(tiles))
            out = self._attend(q, lists, softmax_scale, attn_sink, tiles, out, lse_out)
            return out, lse_out if self._kernel.has_lse else self._no_lse
        out = _fresh(q) if out is None else out
        if rows >= 1:
            self._in_parts(q, lists, softmax_scale, attn_sink, tiles, rows, out, lse_out)
            return out, lse_out if self._kernel.has_lse else self._no_lse
        rows = max(self._rows_per_call(1, num_heads), 1)
        for b in range(batch):  # [S, H, key width] of one row viewed as S rows of one token, whatever the strides
            self._in_parts(
                q[b].unsqueeze(1), [each.tokens(b) for each in lists], softmax_scale, attn_sink, None, rows,
                out[b].unsqueeze(1), lse_out[b].unsqueeze(1) if self._finishes else lse_out,
            )  # fmt: skip
        return out, lse_out if self._kernel.has_lse else self._no_lse

    def _rows_per_call(self, query_len: int, num_heads: int) -> int:
        heads = kernel_heads(num_heads, self._heads)
        return rows_per_call(self._parts, query_len=query_len, heads=heads, max_bytes=self._max_scratch_bytes)

    def _plan_of(self, tiles: TileSchedule | None) -> Plan | None:
        """What the provider is given of a schedule."""
        return (tiles.tile_scheduler_metadata, tiles.num_splits) if tiles is not None and self._takes_plan else None

    @staticmethod
    def _checked(schedule: DecodeSchedule, batch: int, heads: int, extra_indices: Tensor | None) -> TileSchedule:
        """A tile schedule for this many kernel heads and these lists, with a tail where the last call is shorter."""
        if not isinstance(schedule, TileSchedule):
            raise PlanMismatch(
                f"sparse_decode: FlashMLA got a {type(schedule).__name__}, it takes a TileSchedule. Plan with the "
                "implementation's own schedule_kind."
            )
        if schedule.num_heads != heads:
            raise PlanMismatch(
                f"sparse_decode: FlashMLA runs with {heads} heads, the plan was made for {schedule.num_heads}. Plan with "
                "the implementation's own schedule_kind."
            )
        extra_topk = 0 if extra_indices is None else extra_indices.shape[2]
        if schedule.extra_topk != extra_topk:
            raise PlanMismatch(
                f"sparse_decode: the call has extra_topk {extra_topk}, its schedule was made for {schedule.extra_topk}. Plan "
                "with the extra_topk of the calls."
            )
        rest = batch % (schedule.rows_per_call or batch)
        if rest and (schedule.tail is None or schedule.tail.num_rows != rest):
            made = "none" if schedule.tail is None else f"one for {schedule.tail.num_rows}"
            raise PlanMismatch(f"sparse_decode: the last call has {rest} rows and needs a tail for them; the plan has {made}.")
        return schedule

    def _in_parts(
        self,
        q: Tensor,
        lists: list[_List],
        softmax_scale: float,
        attn_sink: Tensor | None,
        tiles: TileSchedule | None,
        rows: int,
        out: Tensor,
        lse_out: Tensor,
    ) -> None:
        """`rows` batch rows at a time; what one call allocated serves the next."""
        batch = q.shape[0]
        for begin in range(0, batch, rows):
            part = slice(begin, begin + rows)
            if tiles is not None and tiles.tail is not None and begin + rows > batch:
                tiles = tiles.tail
            some = [each.rows(part) for each in lists]
            self._attend(q[part], some, softmax_scale, attn_sink, tiles, out[part], lse_out[part])

    def _attend(
        self,
        q: Tensor,
        lists: list[_List],
        softmax_scale: float,
        attn_sink: Tensor | None,
        tiles: TileSchedule | None,
        out: Tensor | None,
        lse_out: Tensor,
    ) -> Tensor:
        """One call of the kernel, on one list or two. Returns `out`, or without one whatever holds the result."""
        kernel, num_heads = self._kernel, q.shape[2]
        heads = kernel_heads(num_heads, self._heads)
        is_padded = heads != num_heads
        kv, indices = lists[0].kv, self._clean(lists[0])
        extra = None if len(lists) == 1 else SecondCache(lists[1].kv, self._clean(lists[1]))
        target = None
        if is_padded:
            out = _fresh(q) if out is None else out
            batch, query_len, _, width = q.shape
            query = _PADDED_QUERIES.take(batch * query_len, num_heads, heads, q.device, width)
            query = query.view(batch, query_len, heads, width)
            query[:, :, :num_heads].copy_(q)
            if kernel.takes_out:
                target = _fresh(query)
        else:
            query = aligned(q)
            if kernel.takes_out and out is not None and out.is_contiguous():
                target = out
        in_kernel = kernel.takes_sink and not is_padded
        if attn_sink is not None and not kernel.has_lse:  # without which no pass can apply it
            attn_sink, in_kernel = padded_sink(attn_sink, heads), True
        plan = self._plan_of(tiles)
        result, lse = kernel(query, kv, indices, softmax_scale, attn_sink if in_kernel else None, plan, target, extra)
        if out is None:
            return result
        if self._finishes:
            sink = None if in_kernel else attn_sink
            if lse is None:
                lse = marks_of_empty([indices] if extra is None else [indices, extra.indices], num_heads).transpose(1, 2)
            # its combine starts early and, where no row is split, returns without a wait: the attention may still be writing
            # (FlashMLA 9241ae3, csrc/smxx/decode/combine/combine.cu)
            self._boundary.finish(out, lse_out, None if target is out else result, lse, sink, self._base_2, early=False)
        elif target is not out:
            out.copy_(result[:, :, :num_heads])
        return out

    def _clean(self, keys: _List) -> Tensor:
        """Indices as the kernel may be shown them: slots or -1, nothing past a length, of a width that it takes."""
        given = keys.indices
        if not self._sanitises and given.is_contiguous():
            return given
        batch, query_len, topk = given.shape
        width = -(-topk // self._topk_multiple) * self._topk_multiple
        indices = torch.empty((batch, query_len, width), dtype=torch.int32, device=given.device)
        self._boundary.sanitise(indices, given, keys.lengths, keys.kv.shape[0] * keys.kv.shape[1])
        return absent_behind(indices) if self._compacts else indices


def _fresh(q: Tensor) -> Tensor:
    """Where the result of q [B, S, H, key width] goes: [B, S, H, 512] bf16."""
    return torch.empty((*q.shape[:-1], KV_LORA_RANK), dtype=torch.bfloat16, device=q.device)
