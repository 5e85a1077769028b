# SPDX-License-Identifier: Apache-2.0
"""convert_indices: positions in a request -> slots in the cache or workspace rows, and how many of them are valid.

decode    slot = block_table[req_id, pos // block_size] * block_size + pos % block_size
prefill   row = workspace_starts[prefill_id] + pos, where prefill_id >= 0
absent    -1: pos < 0; req_id, prefill_id or the table's column out of range; a negative table entry; a slot past the
          cache; a sum past int32; with seq_lens, pos not below that of req_id
share     with DCP_SIZE > 1, positions of other ranks are absent, and pos is the place among the own ones
compact   a valid entry moves to the place that a running count of valid entries gives it; the rest of the row is -1

One program owns a row and walks it in tiles, so the count, the prefix sum and the rows of any K need no second launch.
Cost: 8 B per index; table entries come from L2. 128 rows of 2048 indices are 2.1 MB: the launch dominates.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.early_start import let_next_start, lets_next_start

INT32_MAX: Final = 2**31 - 1
_INT32_MAX = tl.constexpr(INT32_MAX)
INDICES_PER_WARP: Final = 128
"""Four indices a thread: 16-byte loads. A narrow row takes fewer warps than its configuration allows."""

CONFIGS: Final = {"default": Config(tile=2048, num_warps=8)}  # tile: indices; untuned


# the strides of the index rows follow from K, which a model fixes; what a batch changes is not specialised on
@triton.jit(
    do_not_specialize=["num_reqs", "table_width", "table_stride", "num_prefills", "last_slot"],
    **at_any_address("counts_ptr", "req_id_ptr", "table_ptr", "prefill_id_ptr", "prefill_start_ptr", "seq_lens_ptr"),
)
def convert_indices_kernel(
    indices_ptr,
    counts_ptr,
    topk_ptr,
    req_id_ptr,
    table_ptr,
    prefill_id_ptr,
    prefill_start_ptr,
    seq_lens_ptr,  # None: positions are limited by the table alone
    topk_stride,
    indices_stride,
    num_reqs,
    table_width,
    table_stride,
    num_prefills,
    last_slot,
    TOPK: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    PREFILL: tl.constexpr,
    COMPACT: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    DCP_RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LETS_NEXT_START: tl.constexpr,
):
    """One program a token. `last_slot` is the greatest slot there is; PREFILL says that the prefill pointers are given."""
    if LETS_NEXT_START:
        let_next_start()
    # int64 before the first product: token * topk_stride passes 2**31 at 1 048 576 tokens of 2048
    token = tl.program_id(0).to(tl.int64)
    topk_row = topk_ptr + token * topk_stride
    indices_row = indices_ptr + token * indices_stride

    req_id = tl.load(req_id_ptr + token)  # int32
    table_row = table_ptr + req_id.to(tl.int64) * table_stride
    has_table = (req_id >= 0) & (req_id < num_reqs)
    if seq_lens_ptr is not None:
        length = tl.load(seq_lens_ptr + req_id, mask=has_table, other=0)  # int32
    to_workspace = False
    has_workspace = False
    last_index = last_slot
    if PREFILL:
        prefill_id = tl.load(prefill_id_ptr + token)  # int32
        to_workspace = prefill_id >= 0
        has_workspace = to_workspace & (prefill_id < num_prefills)
        has_table = has_table & (prefill_id < 0)
        first_row = tl.load(prefill_start_ptr + prefill_id, mask=has_workspace, other=0).to(tl.int64)
        last_index = tl.where(to_workspace, _INT32_MAX, last_slot)

    count = 0
    for begin in range(0, TOPK, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        in_row = k < TOPK  # [BLOCK_K]
        pos = tl.load(topk_row + k, mask=in_row, other=-1)  # [BLOCK_K] int32
        if DCP_SIZE > 1:
            run = pos // INTERLEAVE  # [BLOCK_K]
            owned = (pos >= 0) & (run % DCP_SIZE == DCP_RANK)  # [BLOCK_K]
            pos = tl.where(owned, run // DCP_SIZE * INTERLEAVE + pos % INTERLEAVE, -1)
        column = pos // CACHE_BLOCK  # [BLOCK_K]; meaningless where pos < 0
        in_table = has_table & (pos >= 0) & (column < table_width)  # [BLOCK_K]
        block = tl.load(table_row + column, mask=in_table, other=-1).to(tl.int64)  # [BLOCK_K]
        # int64: a garbage block id must fail the range test, not wrap around into it
        index = block * CACHE_BLOCK + pos % CACHE_BLOCK  # [BLOCK_K]
        valid = block >= 0  # [BLOCK_K]
        if PREFILL:
            index = tl.where(to_workspace, first_row + pos, index)
            valid = valid | (has_workspace & (pos >= 0))
        valid = valid & (index >= 0) & (index <= last_index)
        if seq_lens_ptr is not None:
            valid = valid & (pos < length)  # here, so that no load of the table waits for the length

        ones = valid.to(tl.int32)
        if COMPACT:
            place = count + tl.cumsum(ones, 0) - 1  # [BLOCK_K]
            tl.store(indices_row + place, index.to(tl.int32), mask=valid)
        else:
            tl.store(indices_row + k, tl.where(valid, index, -1).to(tl.int32), mask=in_row)
        count += tl.sum(ones, 0)

    if COMPACT:
        # disjoint from what was stored above, so the order between threads does not matter
        for begin in range(0, TOPK, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)  # [BLOCK_K]
            tl.store(indices_row + k, tl.full([BLOCK_K], -1, tl.int32), mask=(k >= count) & (k < TOPK))
    tl.store(counts_ptr + token, count)


_launch = TritonLauncher(convert_indices_kernel)


def launch(
    indices: Tensor,
    counts: Tensor,
    topk_indices: Tensor,
    req_id_per_token: Tensor,
    block_table: Tensor,
    prefill_request_ids: Tensor | None,
    prefill_workspace_starts: Tensor | None,
    seq_lens: Tensor | None,
    *,
    block_size: int,
    last_slot: int,
    compact: bool,
    share: ContextShare = WHOLE,
    config: Config,
    lets_next_start: bool = False,
) -> None:
    """Write `indices` [T, K] and `counts` [T], int32. Graph-safe.

    Rows of `topk_indices`, `indices` and `block_table` may lie apart; everything else is contiguous. `last_slot` is below
    2**31. `share`: what the cache holds. The two prefill tensors are given together or not at all. lets_next_start: a kernel
    behind this one that is launched to start early may do so once all programs have begun.
    """
    num_tokens, topk = topk_indices.shape
    if num_tokens == 0:
        return
    block_k = min(triton.next_power_of_2(topk), config.tile)
    _launch(
        (num_tokens,),
        indices,
        counts,
        topk_indices,
        req_id_per_token,
        block_table,
        prefill_request_ids,
        prefill_workspace_starts,
        seq_lens,
        topk_indices.stride(0),
        indices.stride(0),
        block_table.shape[0],
        block_table.shape[1],
        block_table.stride(0),
        0 if prefill_workspace_starts is None else prefill_workspace_starts.shape[0],
        last_slot,
        TOPK=topk,
        CACHE_BLOCK=block_size,
        PREFILL=prefill_request_ids is not None,
        COMPACT=compact,
        DCP_SIZE=share.size,
        DCP_RANK=share.rank,
        INTERLEAVE=share.interleave,
        BLOCK_K=block_k,
        LETS_NEXT_START=lets_next_start and indices.is_cuda,
        num_warps=max(1, min(config.num_warps, block_k // INDICES_PER_WARP)),
        num_stages=1,
    )


def aot_variants(arch: str = "default") -> list[AotVariant]:
    """Decode tokens in place; limited by lengths and compacted, prefill tokens and decode tokens of the second of two ranks."""
    config = config_for(CONFIGS, arch)
    pointers = dict.fromkeys(["indices_ptr", "counts_ptr", "topk_ptr", "req_id_ptr", "table_ptr"], "*i32")
    constants = {"TOPK": 2048, "CACHE_BLOCK": 64, "BLOCK_K": config.tile, "INTERLEAVE": 1}
    constants["LETS_NEXT_START"] = lets_next_start(arch)
    kinds = {"": (False, False, 1), "-prefill-compact": (True, True, 1), "-dcp-compact": (False, True, 2)}
    return [
        variant(
            convert_indices_kernel,
            f"convert_indices{name}",
            config.num_warps,
            **pointers,
            prefill_id_ptr="*i32" if prefill else None,
            prefill_start_ptr="*i32" if prefill else None,
            seq_lens_ptr="*i32" if compact else None,
            PREFILL=prefill,
            COMPACT=compact,
            DCP_SIZE=dcp_size,
            DCP_RANK=dcp_size - 1,
            **constants,
        )
        for name, (prefill, compact, dcp_size) in kinds.items()
    ]
