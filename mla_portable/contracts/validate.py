# SPDX-License-Identifier: Apache-2.0
"""What every primitive requires of its arguments, whatever backend runs it: one function per primitive.

Each takes the primitive's own arguments, raises before any kernel can run, reads nothing back from a device, and returns
the few facts that choosing an implementation depends on. Axes are those of `mla_portable.primitives`. Values
that live on a device (indices, lengths, tables) are not looked at: the primitives define what every value means.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts.rules import (
    check_cache,
    check_dense,
    check_disjoint,
    check_resolved,
    check_tensor,
    rows_alignment,
    shape_of,
)
from mla_portable.contracts.schedule import DecodeSchedule
from mla_portable.contracts.values import INT32_MAX, check_count, check_flag, check_scale, describe, refuse
from mla_portable.layouts import (
    INDEX_HEAD_SIZE,
    CacheLayout,
    layout_of,
    scale_formats,
)

__all__ = [
    "QUANTIZED_DTYPES",
    "cache_write",
    "convert_indices",
    "gather_upconvert",
    "indexer_logits",
    "merge_states",
    "quantize_per_tensor",
    "sparse_decode",
    "sparse_prefill",
]

QUANTIZED_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF: Final = (torch.bfloat16, torch.float16)
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)


def cache_write(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale_format: str
) -> tuple[str, int, int, bool]:
    """Returns (kv_layout, block_size, cache_alignment, uneven_blocks)."""
    where = "cache_write"
    num_tokens, _ = shape_of(where, "kv_c", kv_c, 2, "[T, 512]")
    dtype, device = kv_c.dtype, kv_c.device
    if dtype not in _HALF:
        refuse(where, "kv_c", dtype, "torch.bfloat16 or torch.float16")
    layout, block_size, apart, alignment = check_cache(where, "kv_cache", kv_cache, device)
    value_width, rope_width = layout.value_width, layout.rope_width
    check_tensor(where, "kv_c", kv_c, dtype, (num_tokens, value_width), device, f"[T, {value_width}]")
    check_tensor(where, "k_pe", k_pe, dtype, (num_tokens, rope_width), device, f"[T, {rope_width}]")
    check_tensor(where, "slot_mapping", slot_mapping, torch.int64, (num_tokens,), device, "[T]")
    formats = layout.scale_formats or scale_formats()
    if scale_format not in formats:
        refuse(where, "scale_format", repr(scale_format), " or ".join(map(repr, formats)))
    read = {"kv_c": kv_c, "k_pe": k_pe, "slot_mapping": slot_mapping}
    check_disjoint(where, {"kv_cache": kv_cache}, read)
    return layout.name, block_size, alignment, bool(apart % layout.row_width)


def convert_indices(
    topk_indices: Tensor,
    req_id_per_token: Tensor,
    block_table: Tensor,
    block_size: int,
    num_slots: int | None,
    prefill_request_ids: Tensor | None,
    prefill_workspace_starts: Tensor | None,
    compact: bool,
    out: tuple[Tensor, Tensor] | None,
) -> int:
    """Returns K."""
    where, int32 = "convert_indices", torch.int32
    num_tokens, topk = shape_of(where, "topk_indices", topk_indices, 2, "[T, K]")
    device = topk_indices.device
    check_tensor(where, "topk_indices", topk_indices, int32, (num_tokens, topk), device, "[T, K]")
    if topk < 1:
        refuse(where, "topk_indices", f"shape {[num_tokens, topk]}", "[T, K] with K of at least 1")
    check_tensor(where, "req_id_per_token", req_id_per_token, int32, (num_tokens,), device, "[T]")
    table_shape = shape_of(where, "block_table", block_table, 2, "[R, columns]")
    check_tensor(where, "block_table", block_table, int32, table_shape, device, "[R, columns]")
    check_count(where, "block_size", block_size, 1, INT32_MAX)
    check_flag(where, "compact", compact)
    if num_slots is not None:
        check_count(where, "num_slots", num_slots, 0)
    if prefill_request_ids is not None or prefill_workspace_starts is not None:
        if prefill_workspace_starts is None:
            refuse(where, "prefill_workspace_starts", "None", "[P] int32, because prefill_request_ids is given")
        if prefill_request_ids is None:
            refuse(where, "prefill_request_ids", "None", "[T] int32, because prefill_workspace_starts is given")
        check_tensor(where, "prefill_request_ids", prefill_request_ids, int32, (num_tokens,), device, "[T]")
        starts_shape = shape_of(where, "prefill_workspace_starts", prefill_workspace_starts, 1, "[P]")
        check_tensor(where, "prefill_workspace_starts", prefill_workspace_starts, int32, starts_shape, device, "[P]")
    if out is not None:
        if not _is_pair(out):
            refuse(where, "out", type(out).__name__, "a tuple (indices [T, K], counts [T])")
        indices, counts = out
        check_tensor(where, "out[0]", indices, int32, (num_tokens, topk), device, "[T, K]")
        check_tensor(where, "out[1]", counts, int32, (num_tokens,), device, "[T]")
        read = {
            "topk_indices": topk_indices,
            "req_id_per_token": req_id_per_token,
            "block_table": block_table,
            "prefill_request_ids": prefill_request_ids,
            "prefill_workspace_starts": prefill_workspace_starts,
        }
        check_disjoint(where, {"out[0]": indices, "out[1]": counts}, read)
    return topk


def _is_pair(out: Any) -> bool:
    return isinstance(out, tuple) and len(out) == 2  # pyright: ignore[reportUnknownArgumentType]


def gather_upconvert(
    kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor, out: Tensor
) -> tuple[str, int, int, bool]:
    """Returns (kv_layout, block_size, cache_alignment, uneven_blocks).

    How many rows `out` needs is known on the device only; rows past it are not written.
    """
    where, int32 = "gather_upconvert", torch.int32
    shape_of(where, "kv_cache", kv_cache, 3, "[blocks, block_size, row width]")
    device = kv_cache.device
    layout, block_size, apart, alignment = check_cache(where, "kv_cache", kv_cache, device)
    table_shape = shape_of(where, "block_table", block_table, 2, "[P, columns]")
    num_prefills = table_shape[0]
    check_tensor(where, "block_table", block_table, int32, table_shape, device, "[P, columns]")
    check_tensor(where, "seq_lens", seq_lens, int32, (num_prefills,), device, "[P]")
    check_tensor(where, "workspace_starts", workspace_starts, int32, (num_prefills,), device, "[P]")
    _check_rows(where, "out", out, layout.workspace, device)
    read = {"kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens, "workspace_starts": workspace_starts}
    check_disjoint(where, {"out": out}, read)
    return layout.name, block_size, alignment, bool(apart % layout.row_width)


def _check_rows(where: str, argument: str, rows: Tensor, layout: CacheLayout, device: torch.device) -> None:
    """[W, row width] of a layout without scales, whose rows follow one another."""
    width = layout.row_width
    axes = f"[W, {width}]"
    num_rows, _ = shape_of(where, argument, rows, 2, axes)
    check_tensor(where, argument, rows, layout.dtype, (num_rows, width), device, axes)
    if num_rows > 1 and rows.stride()[0] != width:
        refuse(where, argument, f"strides {list(rows.stride())}", f"{axes} contiguous", f"Pass {argument}.contiguous().")


def sparse_decode(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    lengths: Tensor | None,
    attn_sink: Tensor | None,
    schedule: DecodeSchedule | None,
    out: Tensor | None,
    lse_out: Tensor | None,
) -> tuple[str, int, int, int, int, int, bool]:
    """Returns (kv_layout, H, K, block_size, S, cache_alignment, uneven_blocks).

    Raises: PlanMismatch when `schedule` was made for other shapes.
    """
    where = "sparse_decode"
    check_dense(where, "q", q, "[B, S, H, key width]")
    device = q.device
    layout, block_size, apart, alignment = check_cache(where, "kv_cache", kv_cache, device)
    axes = f"[B, S, H, {layout.key_width}]"
    batch, query_len, num_heads, _ = shape_of(where, "q", q, 4, axes)
    check_tensor(where, "q", q, torch.bfloat16, (batch, query_len, num_heads, layout.key_width), device, axes)
    if query_len < 1 or num_heads < 1:
        refuse(where, "q", f"shape {list(q.shape)}", f"{axes} with S and H of at least 1")
    topk = shape_of(where, "indices", indices, 3, "[B, S, K]")[2]
    check_tensor(where, "indices", indices, torch.int32, (batch, query_len, topk), device, "[B, S, K]")
    if topk < 1:
        refuse(where, "indices", f"shape {list(indices.shape)}", "[B, S, K] with K of at least 1")
    check_scale(where, "softmax_scale", softmax_scale)
    if lengths is not None:
        check_tensor(where, "lengths", lengths, torch.int32, (batch, query_len), device, "[B, S]")
    if attn_sink is not None:
        check_tensor(where, "attn_sink", attn_sink, torch.float32, (num_heads,), device, "[H]")
    if schedule is not None:
        if not isinstance(schedule, DecodeSchedule):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(where, "schedule", describe(schedule), "a schedule from a planner, or None")
        schedule.check(where, batch, query_len, num_heads, topk, device)
    if out is not None or lse_out is not None:
        if out is not None:
            shape = (batch, query_len, num_heads, layout.value_width)
            check_tensor(where, "out", out, torch.bfloat16, shape, device, f"[B, S, H, {layout.value_width}]")
        if lse_out is not None:
            check_tensor(where, "lse_out", lse_out, torch.float32, (batch, query_len, num_heads), device, "[B, S, H]")
        read = {"q": q, "kv_cache": kv_cache, "indices": indices, "lengths": lengths, "attn_sink": attn_sink}
        check_disjoint(where, {"out": out, "lse_out": lse_out}, read)
    return layout.name, num_heads, topk, block_size, query_len, alignment, bool(apart % layout.row_width)


def sparse_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    softmax_scale: float,
    lengths: Tensor | None,
    attn_sink: Tensor | None,
    out: Tensor | None,
    lse_out: Tensor | None,
) -> tuple[str, int, int, int | None, int, bool]:
    """Returns (kv_layout, H, K, block_size, cache_alignment, uneven_blocks).

    block_size is None for bfloat16 rows, which are flat.
    """
    where = "sparse_prefill"
    check_dense(where, "q", q, "[T, H, key width]")
    device = q.device
    block_size = None
    check_dense(where, "kv", kv, "[W, row width] or [blocks, block_size, row width]")
    layout = layout_of(kv, where=where, argument="kv")
    width = layout.row_width
    if layout.is_quantized:
        remedy = "Pass the paged cache itself: FP8 rows are read in place."
        shape_of(where, "kv", kv, 3, f"[blocks, block_size, {width}]", remedy)
        _, block_size, apart, alignment = check_cache(where, "kv", kv, device)
    else:
        shape_of(where, "kv", kv, 2, f"[W, {width}]", f"Flatten a bfloat16 cache: kv_cache.view(-1, {width}).")
        _check_rows(where, "kv", kv, layout, device)
        apart, alignment = 0, rows_alignment(kv)
    axes = f"[T, H, {layout.key_width}]"
    num_tokens, num_heads, _ = shape_of(where, "q", q, 3, axes)
    check_tensor(where, "q", q, torch.bfloat16, (num_tokens, num_heads, layout.key_width), device, axes)
    if num_heads < 1:
        refuse(where, "q", f"shape {list(q.shape)}", f"{axes} with H of at least 1")
    topk = shape_of(where, "indices", indices, 2, "[T, K]")[1]
    check_tensor(where, "indices", indices, torch.int32, (num_tokens, topk), device, "[T, K]")
    if topk < 1:
        refuse(where, "indices", f"shape {list(indices.shape)}", "[T, K] with K of at least 1")
    check_scale(where, "softmax_scale", softmax_scale)
    if lengths is not None:
        check_tensor(where, "lengths", lengths, torch.int32, (num_tokens,), device, "[T]")
    if attn_sink is not None:
        check_tensor(where, "attn_sink", attn_sink, torch.float32, (num_heads,), device, "[H]")
    if out is not None or lse_out is not None:
        if out is not None:
            shape = (num_tokens, num_heads, layout.value_width)
            check_tensor(where, "out", out, torch.bfloat16, shape, device, f"[T, H, {layout.value_width}]")
        if lse_out is not None:
            check_tensor(where, "lse_out", lse_out, torch.float32, (num_tokens, num_heads), device, "[T, H]")
        read = {"q": q, "kv": kv, "indices": indices, "lengths": lengths, "attn_sink": attn_sink}
        check_disjoint(where, {"out": out, "lse_out": lse_out}, read)
    return layout.name, num_heads, topk, block_size, alignment, bool(apart % layout.row_width)


def merge_states(outs: Tensor, lses: Tensor) -> None:
    """The shapes do not affect the choice of an implementation."""
    where = "merge_states"
    check_dense(where, "outs", outs, "[P, ..., D]")
    if outs.dim() < 2:
        refuse(where, "outs", f"shape {list(outs.shape)}", "[P, ..., D]")
    shape = tuple(outs.shape)
    if outs.dtype not in _FLOATS:
        refuse(where, "outs", outs.dtype, "torch.bfloat16, torch.float16 or torch.float32")
    if shape[0] < 1 or shape[-1] < 1:
        refuse(where, "outs", f"shape {list(shape)}", "[P, ..., D] with P and D of at least 1")
    device = outs.device
    check_tensor(where, "outs", outs, outs.dtype, shape, device, "[P, ..., D]")
    check_tensor(where, "lses", lses, torch.float32, shape[:-1], device, "[P, ...]")


def quantize_per_tensor(x: Tensor, dtype: torch.dtype) -> None:
    """The shape does not affect the choice of an implementation."""
    where = "quantize_per_tensor"
    check_dense(where, "x", x, "of any shape")
    check_resolved(where, "x", x)
    if x.dtype not in _FLOATS:
        refuse(where, "x", x.dtype, "torch.bfloat16, torch.float16 or torch.float32")
    if dtype not in QUANTIZED_DTYPES:
        refuse(where, "dtype", dtype, " or ".join(map(str, QUANTIZED_DTYPES)))


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
) -> tuple[int, int]:
    """Returns (H, block_size)."""
    where, int32, axes = "indexer_logits", torch.int32, "[blocks, block_size, 128]"
    num_tokens, num_heads, _ = shape_of(where, "q", q, 3, "[T, H, 128]")
    device = q.device
    check_tensor(where, "q", q, torch.bfloat16, (num_tokens, num_heads, INDEX_HEAD_SIZE), device, "[T, H, 128]")
    if num_heads < 1:
        refuse(where, "q", f"shape {list(q.shape)}", "[T, H, 128] with H of at least 1")
    check_tensor(where, "weights", weights, torch.float32, (num_tokens, num_heads), device, "[T, H]")
    blocks, block_size, _ = shape_of(where, "index_cache", index_cache, 3, axes)
    check_tensor(where, "index_cache", index_cache, torch.bfloat16, (blocks, block_size, INDEX_HEAD_SIZE), device, axes)
    if block_size < 1:
        refuse(where, "index_cache", f"block_size {block_size}", "a block of at least 1 token")
    block_stride, row_stride, _ = index_cache.stride()
    length = block_size * INDEX_HEAD_SIZE
    if (row_stride != INDEX_HEAD_SIZE and block_size > 1) or (block_stride < length and blocks > 1):
        limit = f"[{length} or more, {INDEX_HEAD_SIZE}, 1]: whole rows, one after the other within a block"
        refuse(where, "index_cache", f"strides {list(index_cache.stride())}", limit, "Slice the cache by blocks only.")
    num_reqs, columns = shape_of(where, "block_table", block_table, 2, "[R, columns]")
    check_tensor(where, "query_start_loc", query_start_loc, int32, (num_reqs + 1,), device, "[R + 1]")
    if query_start_loc.is_cpu:  # nothing has to be read back
        first, last = int(query_start_loc[0]), int(query_start_loc[-1])
        if first < 0 or last > num_tokens:
            refuse(where, "query_start_loc", f"values from {first} to {last}", f"values from 0 to T = {num_tokens}")
    check_tensor(where, "seq_lens", seq_lens, int32, (num_reqs,), device, "[R]")
    check_tensor(where, "block_table", block_table, int32, (num_reqs, columns), device, "[R, columns]")
    width = shape_of(where, "out", out, 2, "[T, N]")[1]
    check_tensor(where, "out", out, torch.float32, (num_tokens, width), device, "[T, N]")
    read = {
        "q": q,
        "weights": weights,
        "index_cache": index_cache,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_table": block_table,
    }
    check_disjoint(where, {"out": out}, read)
    return num_heads, block_size
