# SPDX-License-Identifier: Apache-2.0
"""Bad arguments: each is refused with argument, got and expected, before anything could run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from machines import CPU
from recorder import Recorder, registry_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_portable
from mla_portable.contracts import InvalidArgument, PlanMismatch, Request, SplitSchedule, Support
from mla_portable.dispatch import serving
from mla_portable.primitives import SPARSE_DECODE
from mla_portable_nvidia.tile_schedules import TileSchedule

BF16, INT32, UINT8 = torch.bfloat16, torch.int32, torch.uint8
B, S, H, K = 3, 2, 4, 8
T, P, W = 5, 2, 40
BLOCKS, BLOCK = 6, 16

Arguments = dict[str, Any]


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def bf16(*shape: int) -> Tensor:
    return zeros(*shape)


def f32(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.float32)


def i32(*shape: int) -> Tensor:
    return zeros(*shape, dtype=INT32)


def i64(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int64)


def u8(*shape: int) -> Tensor:
    return zeros(*shape, dtype=UINT8)


def on_a_gpu(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor that says it lives on a GPU; none is needed for that."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")


def fp8_cache() -> Tensor:
    return zeros(BLOCKS, BLOCK, 656, dtype=UINT8)


def raw_cache(block_stride: int, offset: int = 0) -> Tensor:
    """[3, 16, 656] whose blocks lie `block_stride` bytes apart, from byte `offset` on."""
    return u8(40_000).as_strided((3, 16, 656), (block_stride, 656, 1), offset)


def good(primitive: str) -> Arguments:
    """Arguments that are in order, every optional one among them."""
    return {
        "cache_write": lambda: {
            "kv_c": zeros(T, 512),
            "k_pe": zeros(T, 64),
            "kv_cache": fp8_cache(),
            "slot_mapping": zeros(T, dtype=torch.int64),
            "scale_format": "amax",
        },
        "convert_indices": lambda: {
            "topk_indices": zeros(T, K, dtype=INT32),
            "req_id_per_token": zeros(T, dtype=INT32),
            "block_table": zeros(3, 7, dtype=INT32),
            "block_size": BLOCK,
            "num_slots": BLOCKS * BLOCK,
            "prefill_request_ids": zeros(T, dtype=INT32),
            "prefill_workspace_starts": zeros(P, dtype=INT32),
            "compact": True,
            "out": (zeros(T, K, dtype=INT32), zeros(T, dtype=INT32)),
        },
        "gather_upconvert": lambda: {
            "kv_cache": fp8_cache(),
            "block_table": zeros(P, 7, dtype=INT32),
            "seq_lens": zeros(P, dtype=INT32),
            "workspace_starts": zeros(P, dtype=INT32),
            "out": zeros(W, 576),
        },
        "sparse_decode": lambda: {
            "q": zeros(B, S, H, 576),
            "kv_cache": fp8_cache(),
            "indices": zeros(B, S, K, dtype=INT32),
            "softmax_scale": 0.1,
            "lengths": zeros(B, S, dtype=INT32),
            "attn_sink": zeros(H, dtype=torch.float32),
            "schedule": split_schedule(),
            "out": zeros(B, S, H, 512),
            "lse_out": zeros(B, S, H, dtype=torch.float32),
        },
        "sparse_prefill": lambda: {
            "q": zeros(T, H, 576),
            "kv": zeros(W, 576),
            "indices": zeros(T, K, dtype=INT32),
            "softmax_scale": 0.1,
            "lengths": zeros(T, dtype=INT32),
            "attn_sink": zeros(H, dtype=torch.float32),
            "out": zeros(T, H, 512),
            "lse_out": zeros(T, H, dtype=torch.float32),
        },
        "merge_states": lambda: {"outs": zeros(3, T, H, 16), "lses": zeros(3, T, H, dtype=torch.float32)},
        "quantize_per_tensor": lambda: {"x": zeros(T, H), "dtype": torch.float8_e4m3fn},
        "topk_select": lambda: {
            "logits": f32(T, 99),
            "row_starts": i32(T),
            "row_ends": i32(T),
            "topk": K,
            "out": i32(T, K),
        },
        "indexer_logits": lambda: {
            "q": zeros(T, H, 128),
            "weights": zeros(T, H, dtype=torch.float32),
            "index_cache": zeros(BLOCKS, BLOCK, 128),
            "query_start_loc": zeros(P + 1, dtype=INT32),
            "seq_lens": zeros(P, dtype=INT32),
            "block_table": zeros(P, 7, dtype=INT32),
            "out": zeros(T, 99, dtype=torch.float32),
        },
    }[primitive]()


def split_schedule(**changes: Any) -> SplitSchedule:
    fields = {
        "num_rows": B * S,
        "num_heads": H,
        "topk": K,
        "num_splits": 2,
        "split_len": 4,
        "partial_out": zeros(2, B * S, H, 512, dtype=torch.float32),
        "partial_lse": zeros(2, B * S, H, dtype=torch.float32),
    }
    return SplitSchedule(**{**fields, **changes})


def tile_schedule(**changes: Any) -> TileSchedule:
    fields = {
        "num_rows": B,
        "query_len": S,
        "num_heads": 64,
        "topk": K,
        "num_sm_parts": 5,
        "tile_scheduler_metadata": zeros(5, 8, dtype=INT32),
        "num_splits": zeros(B + 1, dtype=INT32),
    }
    return TileSchedule(**{**fields, **changes})


def strided(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A tensor with these strides in memory that is large enough."""
    return zeros(1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)), dtype=dtype).as_strided(
        shape, strides
    )


def scratch_in_one_place() -> SplitSchedule:
    return split_schedule(partial_out=zeros(1, B * S, H, 512, dtype=torch.float32).expand(2, -1, -1, -1))


def jagged(part: Tensor) -> Tensor:
    return torch.nested.nested_tensor([part], layout=torch.jagged)


def sinks_in_the_last_column(arguments: Arguments) -> Tensor:
    """An lse output with gaps between its rows; the sinks begin at the last element of its last row."""
    pool = f32(64)
    lse = pool.as_strided((B, S, H), (16, 8, 1))
    last = 16 * (B - 1) + 8 * (S - 1) + H - 1
    arguments["attn_sink"] = pool[last : last + H]
    return lse


def over_the_sinks(arguments: Arguments) -> Tensor:
    """An lse output in which the sinks lie; small enough that only one comparison can notice."""
    pool = f32(B * S * H)
    arguments["attn_sink"] = pool[-H:]
    return pool.view(B, S, H)


def overlay(name: str, dtype: torch.dtype, *shape: int, skip: int = 0) -> Callable[[Arguments], Tensor]:
    """A tensor that lies over the first bytes (after `skip`) of another argument."""

    def view(arguments: Arguments) -> Tensor:
        raw = arguments[name].view(-1).view(UINT8)[skip:]
        return raw[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    return view


# primitive, what is wrong, the argument, its value (or how to make it from good ones), a part of "got", of "expected"
BAD = [
    ("cache_write", "float32 latent", "kv_c", f32(T, 512), "float32", "bfloat16"),
    ("cache_write", "latent of 448", "kv_c", bf16(T, 448), f"[{T}, 448]", f"[{T}, 512]"),
    ("cache_write", "no tensor", "kv_c", [1.0], "list", "a tensor [T, 512]"),
    ("cache_write", "rope of another type", "k_pe", zeros(T, 64, dtype=torch.float16), "float16", "bfloat16"),
    ("cache_write", "rope with a head axis", "k_pe", bf16(T, 1, 64), f"[{T}, 1, 64]", f"[{T}, 64]"),
    ("cache_write", "rope of fewer tokens", "k_pe", bf16(T - 1, 64), f"[{T - 1}, 64]", f"[{T}, 64]"),
    ("cache_write", "transposed latent", "kv_c", bf16(512, T).T, "strides", "contiguous"),
    ("cache_write", "int32 slots", "slot_mapping", i32(T), "int32", "int64"),
    ("cache_write", "slots on a GPU", "slot_mapping", on_a_gpu(T, dtype=torch.int64), "cuda", "cpu"),
    ("cache_write", "unknown scales", "scale_format", "e8m0", "'e8m0'", "'pow2' or 'amax'"),
    ("cache_write", "cache on a GPU", "kv_cache", on_a_gpu(2, 16, 656, dtype=UINT8), "cuda", "cpu"),
    ("cache_write", "truncated rows", "kv_cache", u8(6, 16, 640), "640", "656"),
    ("cache_write", "cache over its input", "kv_cache", overlay("kv_c", UINT8, 1, 4, 656), "overlaps kv_c", "of its own"),
    ("convert_indices", "int64 positions", "topk_indices", i64(T, K), "int64", "int32"),
    ("convert_indices", "positions of one axis", "topk_indices", i32(K), f"[{K}]", "[T, K]"),
    ("convert_indices", "no positions", "topk_indices", i32(T, 0), f"[{T}, 0]", "at least 1"),
    ("convert_indices", "every other position", "topk_indices", i32(T, 2 * K)[:, ::2], "strides", "contiguous"),
    ("convert_indices", "ids of more tokens", "req_id_per_token", i32(T + 1), f"[{T + 1}]", f"[{T}]"),
    ("convert_indices", "int64 table", "block_table", i64(3, 7), "int64", "int32"),
    ("convert_indices", "flat table", "block_table", i32(7), "[7]", "[R, columns]"),
    ("convert_indices", "transposed table", "block_table", i32(7, 3).T, "strides", "contiguous"),
    ("convert_indices", "table on a GPU", "block_table", on_a_gpu(3, 7, dtype=INT32), "cuda", "cpu"),
    ("convert_indices", "negative block size", "block_size", -64, "-64", "at least 1"),
    ("convert_indices", "block size zero", "block_size", 0, "0", "at least 1"),
    ("convert_indices", "block size of a half", "block_size", 0.5, "0.5", "integer"),
    ("convert_indices", "block size as a truth", "block_size", True, "True", "integer"),
    ("convert_indices", "negative cache", "num_slots", -1, "-1", "at least 0"),
    ("convert_indices", "ids without starts", "prefill_workspace_starts", None, "None", "because prefill_request_ids"),
    ("convert_indices", "starts without ids", "prefill_request_ids", None, "None", "because prefill_workspace_starts"),
    ("convert_indices", "ids of fewer tokens", "prefill_request_ids", i32(T - 1), f"[{T - 1}]", f"[{T}]"),
    ("convert_indices", "starts of two axes", "prefill_workspace_starts", i32(P, 1), f"[{P}, 1]", "[P]"),
    ("convert_indices", "one output", "out", i32(T, K), "Tensor", "tuple"),
    ("convert_indices", "counts too few", "out[1]", (i32(T, K), i32(T - 1)), f"[{T - 1}]", f"[{T}]"),
    ("convert_indices", "int64 output", "out[0]", (i64(T, K), i32(T)), "int64", "int32"),
    ("convert_indices", "in place", "out[0]", lambda a: (a["topk_indices"], i32(T)), "overlaps topk_indices", "of its own"),
    ("gather_upconvert", "float32 workspace", "out", f32(W, 576), "float32", "bfloat16"),
    ("gather_upconvert", "workspace of latents", "out", bf16(W, 512), f"[{W}, 512]", f"[{W}, 576]"),
    ("gather_upconvert", "workspace of padded rows", "out", bf16(W, 640)[:, :576], "strides", "contiguous"),
    ("gather_upconvert", "workspace on a GPU", "out", on_a_gpu(W, 576), "cuda", "cpu"),
    ("gather_upconvert", "lengths of fewer requests", "seq_lens", i32(P - 1), f"[{P - 1}]", f"[{P}]"),
    ("gather_upconvert", "int64 starts", "workspace_starts", i64(P), "int64", "int32"),
    ("gather_upconvert", "float32 table", "block_table", f32(P, 7), "float32", "int32"),
    ("gather_upconvert", "cache with a head axis", "kv_cache", u8(6, 16, 1, 656), "[6, 16, 1, 656]", "[blocks, block_size"),
    ("gather_upconvert", "workspace in the cache", "out", overlay("kv_cache", BF16, W, 576), "overlaps kv_cache", "of its own"),
    ("sparse_decode", "float32 query", "q", f32(B, S, H, 576), "float32", "bfloat16"),
    ("sparse_decode", "query without rope", "q", bf16(B, S, H, 512), f"[{B}, {S}, {H}, 512]", "576]"),
    ("sparse_decode", "query without S", "q", bf16(B, H, 576), f"[{B}, {H}, 576]", "[B, S, H, 576]"),
    ("sparse_decode", "no heads", "q", bf16(B, S, 0, 576), f"[{B}, {S}, 0, 576]", "H of at least 1"),
    ("sparse_decode", "transposed query", "q", bf16(B, S, 576, H).mT, "strides", "contiguous"),
    ("sparse_decode", "numpy query", "q", np.zeros((B, S, H, 576)), "ndarray", "a tensor"),
    ("sparse_decode", "truncated rows", "kv_cache", u8(6, 16, 640), "640", "656"),
    ("sparse_decode", "float8 rows", "kv_cache", fp8_cache().view(torch.float8_e4m3fn), "float8_e4m3fn", "uint8"),
    ("sparse_decode", "cache without blocks", "kv_cache", u8(96, 656), "[96, 656]", "[blocks, block_size"),
    ("sparse_decode", "a slice of wider rows", "kv_cache", u8(6, 16, 700)[:, :, :656], "strides", "whole rows"),
    ("sparse_decode", "every other token", "kv_cache", u8(6, 32, 656)[:, ::2], "strides", "whole rows"),
    ("sparse_decode", "blocks that overlap", "kv_cache", raw_cache(656), "[656, 656, 1]", "10496 or more"),
    ("sparse_decode", "blocks of no token", "kv_cache", u8(6, 0, 656), "block_size 0", "at least 1"),
    ("sparse_decode", "odd block stride", "kv_cache", raw_cache(10498), "10498", "multiples of 4"),
    ("sparse_decode", "odd address", "kv_cache", raw_cache(10496, offset=2), "address", "multiples of 4"),
    ("sparse_decode", "cache on a GPU", "kv_cache", on_a_gpu(2, 16, 656, dtype=UINT8), "cuda:0", "cpu"),
    ("sparse_decode", "indices of two axes", "indices", i32(B * S, K), f"[{B * S}, {K}]", "[B, S, K]"),
    ("sparse_decode", "indices of other rows", "indices", i32(B, S + 1, K), f"[{B}, {S + 1}, {K}]", f"[{B}, {S}, {K}]"),
    ("sparse_decode", "int64 indices", "indices", i64(B, S, K), "int64", "int32"),
    ("sparse_decode", "no indices", "indices", i32(B, S, 0), f"[{B}, {S}, 0]", "at least 1"),
    ("sparse_decode", "indices on a GPU", "indices", on_a_gpu(B, S, K, dtype=INT32), "cuda", "cpu"),
    ("sparse_decode", "scale zero", "softmax_scale", 0.0, "0.0", "above 0"),
    ("sparse_decode", "scale NaN", "softmax_scale", float("nan"), "nan", "finite"),
    ("sparse_decode", "scale inf", "softmax_scale", float("inf"), "inf", "finite"),
    ("sparse_decode", "scale in a tensor", "softmax_scale", torch.tensor(0.1), "float32 []", "Python float"),
    ("sparse_decode", "scale in words", "softmax_scale", "0.1", "str", "Python float"),
    ("sparse_decode", "lengths per batch row", "lengths", i32(B), f"[{B}]", f"[{B}, {S}]"),
    ("sparse_decode", "bf16 sink", "attn_sink", bf16(H), "bfloat16", "float32"),
    ("sparse_decode", "sinks of other heads", "attn_sink", f32(2 * H), f"[{2 * H}]", f"[{H}]"),
    ("sparse_decode", "float32 output", "out", f32(B, S, H, 512), "float32", "bfloat16"),
    ("sparse_decode", "output as wide as q", "out", bf16(B, S, H, 576), "576]", "512]"),
    ("sparse_decode", "output on a GPU", "out", on_a_gpu(B, S, H, 512), "cuda", "cpu"),
    ("sparse_decode", "lse with swapped axes", "lse_out", f32(B, H, S), f"[{B}, {H}, {S}]", f"[{B}, {S}, {H}]"),
    ("sparse_decode", "bf16 lse", "lse_out", bf16(B, S, H), "bfloat16", "float32"),
    ("sparse_decode", "output inside q", "out", lambda a: a["q"][..., :512], "overlaps q", "of its own"),
    (
        "sparse_decode",
        "output in the cache",
        "out",
        overlay("kv_cache", BF16, B, S, H, 512, skip=64),
        "overlaps kv",
        "of its own",
    ),
    ("sparse_decode", "lse in the output", "lse_out", overlay("out", torch.float32, B, S, H), "overlaps out", "of its own"),
    ("sparse_decode", "lse over the sinks", "lse_out", over_the_sinks, "overlaps attn_sink", "of its own"),
    ("sparse_decode", "lse ends in the sinks", "lse_out", sinks_in_the_last_column, "overlaps attn_sink", "of its own"),
    ("sparse_decode", "scratch gone", "schedule.partial_out", split_schedule(partial_out=None), "None", "float32"),
    ("sparse_decode", "scratch too small", "schedule.partial_lse", split_schedule(partial_lse=f32(1, 6, H)), "[1, 6", "[2, 6"),
    (
        "sparse_decode",
        "tiles of one part",
        "schedule.tile_scheduler_metadata",
        tile_schedule(num_sm_parts=1),
        "[5, 8]",
        "[1, 8]",
    ),
    ("sparse_decode", "tiles of more rows", "schedule.num_splits", tile_schedule(num_splits=i32(9)), "[9]", "[4]"),
    ("sparse_prefill", "float16 query", "q", zeros(T, H, 576, dtype=torch.float16), "float16", "bfloat16"),
    ("sparse_prefill", "query of decode", "q", bf16(T, 1, H, 576), f"[{T}, 1, {H}, 576]", "[T, H, 576]"),
    ("sparse_prefill", "no heads", "q", bf16(T, 0, 576), f"[{T}, 0, 576]", "at least 1"),
    ("sparse_prefill", "flat FP8 rows", "kv", u8(W, 656), f"[{W}, 656]", "[blocks, block_size, 656]"),
    ("sparse_prefill", "paged bf16 rows", "kv", bf16(BLOCKS, BLOCK, 576), "[6, 16, 576]", "[W, 576]"),
    ("sparse_prefill", "truncated workspace", "kv", bf16(W, 500), "rows of 500", "rows of 576"),
    ("sparse_prefill", "workspace of another layout", "q", bf16(T, H, 512), f"[{T}, {H}, 512]", f"[{T}, {H}, 576]"),
    ("sparse_prefill", "truncated FP8 rows", "kv", u8(BLOCKS, BLOCK, 640), "640", "656"),
    ("sparse_prefill", "float8 workspace", "kv", zeros(W, 576, dtype=torch.float8_e4m3fn), "float8_e4m3fn", "bfloat16"),
    ("sparse_prefill", "workspace with gaps", "kv", bf16(2 * W, 576)[::2], "strides", "contiguous"),
    ("sparse_prefill", "workspace on a GPU", "kv", on_a_gpu(W, 576), "cuda", "cpu"),
    ("sparse_prefill", "indices of three axes", "indices", i32(T, 1, K), f"[{T}, 1, {K}]", "[T, K]"),
    ("sparse_prefill", "indices of other tokens", "indices", i32(T + 1, K), f"[{T + 1}, {K}]", f"[{T}, {K}]"),
    ("sparse_prefill", "no indices", "indices", i32(T, 0), f"[{T}, 0]", "at least 1"),
    ("sparse_prefill", "negative scale", "softmax_scale", -0.1, "-0.1", "above 0"),
    ("sparse_prefill", "int64 lengths", "lengths", i64(T), "int64", "int32"),
    ("sparse_prefill", "one sink", "attn_sink", f32(1), "[1]", f"[{H}]"),
    ("sparse_prefill", "output of fewer tokens", "out", bf16(T - 1, H, 512), f"[{T - 1}, {H}, 512]", f"[{T}, {H}, 512]"),
    ("sparse_prefill", "bf16 lse", "lse_out", bf16(T, H), "bfloat16", "float32"),
    ("sparse_prefill", "output inside q", "out", lambda a: a["q"][..., :512], "overlaps q", "of its own"),
    ("sparse_prefill", "output in the workspace", "out", overlay("kv", BF16, T, H, 512), "overlaps kv", "of its own"),
    ("merge_states", "float64 parts", "outs", zeros(3, T, H, 16, dtype=torch.float64), "float64", "float32"),
    ("merge_states", "one axis", "outs", bf16(3), "[3]", "[P, ..., D]"),
    ("merge_states", "no parts", "outs", bf16(0, T, H, 16), f"[0, {T}, {H}, 16]", "at least 1"),
    ("merge_states", "a list of parts", "outs", [bf16(T, H, 16)], "list", "a tensor [P, ..., D]"),
    ("merge_states", "transposed parts", "outs", bf16(3, T, 16, H).mT, "strides", "contiguous"),
    ("merge_states", "lse of other axes", "lses", f32(3, H, T), f"[3, {H}, {T}]", f"[3, {T}, {H}]"),
    ("merge_states", "bf16 lse", "lses", bf16(3, T, H), "bfloat16", "float32"),
    ("merge_states", "lse on a GPU", "lses", on_a_gpu(3, T, H, dtype=torch.float32), "cuda", "cpu"),
    ("topk_select", "bf16 scores", "logits", bf16(T, 99), "bfloat16", "float32"),
    ("topk_select", "one start too few", "row_starts", i32(T - 1), f"[{T - 1}]", f"[{T}]"),
    ("topk_select", "long ends", "row_ends", zeros(T, dtype=torch.int64), "int64", "int32"),
    ("topk_select", "no K", "topk", 0, "0", "at least 1"),
    ("topk_select", "results of another width", "out", i32(T, K + 1), f"[{T}, {K + 1}]", f"[{T}, {K}]"),
    ("indexer_logits", "a head of another size", "q", bf16(T, H, 64), f"[{T}, {H}, 64]", f"[{T}, {H}, 128]"),
    ("indexer_logits", "no heads", "q", bf16(T, 0, 128), f"[{T}, 0, 128]", "H of at least 1"),
    ("indexer_logits", "bf16 weights", "weights", bf16(T, H), "bfloat16", "float32"),
    ("indexer_logits", "an FP8 cache", "index_cache", u8(BLOCKS, BLOCK, 132), "uint8", "bfloat16"),
    ("indexer_logits", "rows apart", "index_cache", bf16(BLOCKS, BLOCK, 256)[..., :128], "strides", "whole rows"),
    ("indexer_logits", "an empty block", "index_cache", bf16(BLOCKS, 0, 128), "block_size 0", "at least 1"),
    ("indexer_logits", "one start a request", "query_start_loc", i32(P), f"[{P}]", f"[{P + 1}]"),
    ("indexer_logits", "a negative start", "query_start_loc", torch.tensor([-1, *[0] * P]).int(), "from -1 to 0", f"T = {T}"),
    ("indexer_logits", "an end past T", "query_start_loc", torch.tensor([*[0] * P, T + 1]).int(), f"to {T + 1}", f"T = {T}"),
    ("indexer_logits", "long lengths", "seq_lens", zeros(P, dtype=torch.int64), "int64", "int32"),
    ("indexer_logits", "bf16 results", "out", bf16(T, 99), "bfloat16", "float32"),
    ("sparse_decode", "meta indices", "indices", i32(B, S, K).to("meta"), "on meta", "on cpu"),
    ("sparse_decode", "a meta cache", "kv_cache", fp8_cache().to("meta"), "on meta", "on cpu"),
    ("sparse_decode", "rows of the output in one place", "out", bf16(1, S, H, 512).expand(B, S, H, 512), "[0, ", "of its own"),
    (
        "sparse_decode",
        "heads of the output overlap",
        "out",
        strided(BF16, (B, S, H, 512), (9999, 4000, 511, 1)),
        "511",
        "its own",
    ),
    ("sparse_decode", "rows of the lse in one place", "lse_out", f32(S, H).expand(B, S, H), "[0, ", "of its own"),
    (
        "sparse_decode",
        "lse of overlapping rows",
        "lse_out",
        strided(torch.float32, (B, S, H), (S * H, H - 1, 1)),
        "3",
        "its own",
    ),
    ("sparse_decode", "a schedule in words", "schedule", "x", "str 'x'", "a schedule from a planner"),
    ("sparse_decode", "scratch in one place", "schedule.partial_out", scratch_in_one_place(), "strides", "contiguous"),
    ("sparse_decode", "a negated query", "q", torch._neg_view(bf16(B, S, H, 576)), "negative bit", "without"),
    ("sparse_decode", "a sparse query", "q", bf16(B, S, H, 576).to_sparse(), "sparse", "a dense tensor"),
    ("sparse_decode", "nested indices", "indices", jagged(i32(S, K)), "nested", "a dense tensor"),
    ("sparse_decode", "a sparse cache", "kv_cache", fp8_cache().to_sparse(), "sparse", "a dense tensor"),
    ("sparse_decode", "scale past float32", "softmax_scale", 1e39, "1e+39", "float32"),
    ("sparse_decode", "scale past float64", "softmax_scale", 10**400, "1000", "float32"),
    ("sparse_decode", "scale below float32", "softmax_scale", 1e-60, "1e-60", "float32"),
    ("sparse_decode", "scale as a truth", "softmax_scale", True, "bool True", "Python float"),
    ("sparse_decode", "no scale", "softmax_scale", None, "None", "Python float"),
    ("sparse_decode", "a list of backends", "backend", ["triton"], "list", "the name of a backend"),
    ("sparse_decode", "a number of a backend", "backend", 5, "5", "the name of a backend"),
    ("sparse_prefill", "rows of the output in one place", "out", bf16(1, H, 512).expand(T, H, 512), "[0, ", "of its own"),
    ("convert_indices", "rows of the output in one place", "out[0]", (i32(1, K).expand(T, K), i32(T)), "[0, 1]", "of its own"),
    ("convert_indices", "counts in one place", "out[1]", (i32(T, K), i32(1).expand(T)), "strides", "contiguous"),
    ("convert_indices", "compact in words", "compact", "no", "str 'no'", "True or False"),
    ("convert_indices", "compact as a number", "compact", 1, "1", "True or False"),
    ("convert_indices", "a huge block", "block_size", 2**31, "2147483648", "at most"),
    ("gather_upconvert", "meta lengths", "seq_lens", i32(P).to("meta"), "on meta", "on cpu"),
    ("indexer_logits", "rows of the scores in one place", "out", f32(1, 99).expand(T, 99), "[0, 1]", "of its own"),
    ("merge_states", "sparse parts", "outs", bf16(3, T, H, 16).to_sparse(), "sparse", "a dense tensor"),
    ("merge_states", "negated parts", "outs", torch._neg_view(bf16(3, T, H, 16)), "negative bit", "without"),
    ("quantize_per_tensor", "a negated tensor", "x", torch.zeros(4, dtype=torch.complex64).conj().imag, "negative", "without"),
    ("quantize_per_tensor", "a sparse tensor", "x", bf16(3, 3).to_sparse(), "sparse", "a dense tensor"),
    ("quantize_per_tensor", "a nested tensor", "x", jagged(bf16(3)), "nested", "a dense tensor"),
    ("quantize_per_tensor", "integers", "x", i32(T, H), "int32", "bfloat16"),
    ("quantize_per_tensor", "a number", "x", 1.0, "float", "a tensor"),
    ("quantize_per_tensor", "a wide type", "dtype", BF16, "bfloat16", "float8_e4m3fn"),
]


def spoiled(primitive: str, argument: str, value: Any) -> Arguments:
    """Good arguments but for one; `argument` may name a part of it ("out[0]", "schedule.num_splits")."""
    arguments = good(primitive)
    name = argument.partition("[")[0].partition(".")[0]
    made = value(arguments) if callable(value) else value  # may change other arguments, to lie in them
    return {**arguments, name: made}


@pytest.fixture
def recorder():
    plugin = Recorder()
    with serving(registry_of(plugin)):
        yield plugin


def call(primitive: str, arguments: Arguments) -> Any:
    return getattr(mla_portable, primitive)(**arguments)


@pytest.mark.parametrize(
    ("primitive", "argument", "value", "got", "expected"),
    [pytest.param(p, a, v, g, e, id=f"{p}: {what}") for p, what, a, v, g, e in BAD],
)
def test_bad_argument_is_refused_before_anything_runs(recorder, primitive, argument, value, got, expected):
    with pytest.raises(InvalidArgument) as caught:
        call(primitive, spoiled(primitive, argument, value))
    error = caught.value
    assert (error.where, error.argument) == (primitive, argument)
    assert got in error.got
    assert expected in error.expected
    assert str(error).startswith(f"{primitive}: {argument}: got {error.got}, expected {error.expected}.")
    assert recorder.calls == []


PRIMITIVES = list(dict.fromkeys(case[0] for case in BAD))


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_good_arguments_reach_the_implementation(recorder, primitive):
    arguments = good(primitive)
    call(primitive, arguments)
    ((name, args, kwargs),) = recorder.calls
    assert name == primitive
    handed = [*args, *kwargs.values()]
    assert all(any(value is given for given in handed) for value in arguments.values())


REQUIRED = {
    "convert_indices": ("topk_indices", "req_id_per_token", "block_table", "block_size"),
    "sparse_decode": ("q", "kv_cache", "indices", "softmax_scale"),
    "sparse_prefill": ("q", "kv", "indices", "softmax_scale"),
}


@pytest.mark.parametrize("primitive", REQUIRED)
def test_optional_arguments_may_be_left_out(recorder, primitive):
    arguments = good(primitive)
    call(primitive, {name: arguments[name] for name in REQUIRED[primitive]})
    assert len(recorder.calls) == 1


def with_(**changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, **changes}


def neighbours(arguments: Arguments) -> Arguments:
    """Query and output side by side in one buffer."""
    pool = bf16(2, B, S, H, 576)
    return {**arguments, "q": pool[0], "out": pool[1].view(-1)[: B * S * H * 512].view(B, S, H, 512)}


def interleaved_inputs(arguments: Arguments) -> Arguments:
    """Inputs may overlap: indices and lengths as columns of one buffer."""
    pool = i32(B, S, K + 1)
    return {**arguments, "indices": pool[..., 1:], "lengths": pool.view(-1)[: B * S].view(B, S)}


NO_TOKENS = {"q": bf16(0, H, 576), "indices": i32(0, K), "lengths": None, "out": bf16(0, H, 512), "lse_out": f32(0, H)}
NO_ROWS = {"q": bf16(0, 1, H, 576), "indices": i32(0, 1, K), "lengths": None, "out": None, "lse_out": None, "schedule": None}
GOOD = [
    ("cache_write", "float16 tokens", with_(kv_c=bf16(T, 512).half(), k_pe=bf16(T, 64).half())),
    ("cache_write", "tokens cut from wider rows", with_(kv_c=bf16(T, 576)[:, :512], k_pe=bf16(T, 576)[:, 512:])),
    ("cache_write", "no tokens", with_(kv_c=bf16(0, 512), k_pe=bf16(0, 64), slot_mapping=i64(0))),
    ("cache_write", "bf16 cache", with_(kv_cache=bf16(6, 16, 576))),
    ("cache_write", "blocks that lie apart", with_(kv_cache=u8(6, 20, 656)[:, :16])),
    ("cache_write", "blocks of one token", with_(kv_cache=u8(6, 3, 656)[:, :1])),
    ("cache_write", "one token a block, any row stride", with_(kv_cache=u8(9000).as_strided((6, 1, 656), (1312, 8, 1)))),
    ("cache_write", "a block alone, any block stride", with_(kv_cache=u8(11000).as_strided((1, 16, 656), (4, 656, 1)))),
    ("convert_indices", "a table cut from a wider one", with_(block_table=i32(3, 9)[:, :7])),
    (
        "convert_indices",
        "no tokens",
        with_(topk_indices=i32(0, K), req_id_per_token=i32(0), prefill_request_ids=i32(0), out=None),
    ),
    ("gather_upconvert", "no requests", with_(block_table=i32(0, 7), seq_lens=i32(0), workspace_starts=i32(0))),
    ("gather_upconvert", "no rows", with_(out=bf16(0, 576))),
    ("sparse_decode", "heads cut from wider rows", with_(q=bf16(B, S, H, 640)[..., :576])),
    ("sparse_decode", "inputs in one buffer", interleaved_inputs),
    ("sparse_decode", "output beside the query", neighbours),
    ("sparse_decode", "no rows", with_(**NO_ROWS)),
    ("sparse_decode", "an empty cache", with_(kv_cache=u8(0, 16, 656))),
    ("sparse_decode", "one index", with_(indices=i32(B, S, 1), schedule=None)),
    ("sparse_decode", "an integer for the scale", with_(softmax_scale=1)),
    ("sparse_decode", "a tile schedule", with_(schedule=tile_schedule())),
    ("sparse_decode", "tiles of several calls", with_(schedule=tile_schedule(rows_per_call=2, num_splits=i32(3)))),
    (
        "sparse_decode",
        "no scratch",
        with_(schedule=split_schedule(num_splits=1, split_len=8, partial_out=None, partial_lse=None)),
    ),
    ("sparse_prefill", "the paged cache itself", with_(kv=fp8_cache())),
    ("sparse_prefill", "an empty workspace", with_(kv=bf16(0, 576))),
    ("sparse_prefill", "no tokens", with_(**NO_TOKENS)),
    ("merge_states", "two axes", with_(outs=bf16(3, 16), lses=f32(3))),
    ("indexer_logits", "blocks apart", with_(index_cache=bf16(BLOCKS, 2 * BLOCK, 128)[:, :BLOCK])),
    ("indexer_logits", "wider rows", with_(out=torch.zeros(T, 120)[:, :99])),
    ("indexer_logits", "no requests", with_(query_start_loc=i32(1), seq_lens=i32(0), block_table=i32(0, 7))),
    ("quantize_per_tensor", "nothing", with_(x=bf16(0))),
    ("quantize_per_tensor", "e5m2", with_(dtype=torch.float8_e5m2)),
]


@pytest.mark.parametrize(("primitive", "change"), [pytest.param(p, change, id=f"{p}: {what}") for p, what, change in GOOD])
def test_what_the_contract_allows_is_let_through(recorder, primitive, change):
    call(primitive, change(good(primitive)))
    assert len(recorder.calls) == 1


@pytest.mark.parametrize(
    ("schedule", "made_for"),
    [
        (split_schedule(num_rows=7), f"7 rows, {H} heads and topk {K}"),
        (split_schedule(num_heads=8), f"{B * S} rows, 8 heads and topk {K}"),
        (split_schedule(topk=4), f"{B * S} rows, {H} heads and topk 4"),
        (tile_schedule(num_rows=B + 1), f"{(B + 1) * S} rows, 64 heads and topk {K}"),
        (tile_schedule(num_rows=B * S, query_len=1), f"{B * S} rows, 64 heads and topk {K}"),
        (tile_schedule(num_heads=2), f"{B * S} rows, 2 heads and topk {K}"),
        (tile_schedule(topk=2048), f"{B * S} rows, 64 heads and topk 2048"),
    ],
)
def test_a_schedule_made_for_another_call_is_a_plan_mismatch(recorder, schedule, made_for):
    with pytest.raises(PlanMismatch) as caught:
        call("sparse_decode", {**good("sparse_decode"), "schedule": schedule})
    assert f"the call has {B * S} rows, {H} heads and topk {K}" in str(caught.value)
    assert made_for in str(caught.value)
    assert recorder.calls == []


def test_remedies_say_what_to_do():
    remedies = {
        ("sparse_decode", "kv_cache", lambda: zeros(6, 16, 1, 656, dtype=UINT8)): "kv_cache.squeeze(2)",
        ("sparse_decode", "kv_cache", lambda: fp8_cache().view(torch.float8_e4m3fn)): "view(torch.uint8)",
        ("sparse_prefill", "kv", lambda: zeros(BLOCKS, BLOCK, 576)): "view(-1, 576)",
        ("sparse_prefill", "q", lambda: zeros(T, 576, H).mT): "q.contiguous()",
    }
    with serving(registry_of(Recorder())):
        for (primitive, argument, make), remedy in remedies.items():
            with pytest.raises(InvalidArgument) as caught:
                call(primitive, {**good(primitive), argument: make()})
            assert remedy in caught.value.remedy


# values that users fill in


def request(**changes: Any) -> Request:
    return Request(**{"primitive": SPARSE_DECODE, "device": CPU, **changes})


def support(**changes: Any) -> Support:
    return Support(**{"source": "a test", **changes})


NO_INTEGERS = (1.5, True, "8", float("nan"), [8], torch.tensor(8), np.int64(8))


@pytest.mark.parametrize("value", NO_INTEGERS, ids=[type(value).__name__ for value in NO_INTEGERS])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (request, "num_heads"),
        (request, "rows"),
        (support, "topk_multiple"),
        (support, "max_heads"),
        (support, "min_shared_memory"),
        (split_schedule, "num_splits"),
        (split_schedule, "num_rows"),
        (tile_schedule, "rows_per_call"),
    ],
)
def test_integer_fields_hold_integers(make: Callable[..., object], field: str, value: Any):
    with pytest.raises(InvalidArgument, match="expected an integer of at least") as caught:
        make(**{field: value})
    assert caught.value.argument == field


@pytest.mark.parametrize("value", ["no", 0, 1, None])
@pytest.mark.parametrize(("make", "field"), [(request, "lse"), (request, "uneven_blocks"), (support, "graph")])
def test_flags_are_true_or_false(make: Callable[..., object], field: str, value: Any):
    with pytest.raises(InvalidArgument, match="expected True or False") as caught:
        make(**{field: value})
    assert caught.value.argument == field


@pytest.mark.parametrize(
    ("make", "changes", "field"),
    [
        (request, {"topk": 0}, "topk"),
        (request, {"rows": -1}, "rows"),
        (request, {"num_heads": 2**31}, "num_heads"),
        (request, {"kv_layout": 3}, "kv_layout"),
        (request, {"scale_format": "e8m0"}, "scale_format"),
        (request, {"cache_alignment": 12}, "cache_alignment"),
        (request, {"device": "cpu"}, "device"),
        (request, {"primitive": "sparse_decode"}, "primitive"),
        (support, {"source": 5}, "source"),
        (support, {"block_size_multiple": 0}, "block_size_multiple"),
        (support, {"cache_alignment": 0}, "cache_alignment"),
        (split_schedule, {"num_splits": 0}, "num_splits"),
        (split_schedule, {"num_splits": -1}, "num_splits"),
        (split_schedule, {"split_len": 0}, "split_len"),
        (split_schedule, {"split_len": 3}, "split_len"),
        (tile_schedule, {"num_sm_parts": 0}, "num_sm_parts"),
    ],
)
def test_fields_stay_in_their_range(make: Callable[..., object], changes: dict[str, Any], field: str):
    with pytest.raises(InvalidArgument) as caught:
        make(**changes)
    assert caught.value.argument == field


@pytest.mark.parametrize("fields", [{"lse": "no"}, {"num_heads": "16"}, {"topk": 2048.0}, {"compact": 1}])
def test_explain_takes_values_of_the_right_types(fields: dict[str, Any]):
    with pytest.raises(InvalidArgument, match=f"Request: {next(iter(fields))}: "):
        mla_portable.explain("sparse_decode", device="cpu", **fields)


@pytest.mark.parametrize(
    ("declared", "asked", "subjects"),
    [
        ({}, {"cache_alignment": 1, "uneven_blocks": True}, []),
        ({"cache_alignment": 16, "needs_whole_rows": True}, {}, []),
        ({"cache_alignment": 16}, {"cache_alignment": 8}, ["cache_alignment"]),
        ({"cache_alignment": 4}, {"cache_alignment": 8}, []),
        ({"needs_whole_rows": True}, {"uneven_blocks": True}, ["uneven_blocks"]),
    ],
)
def test_reasons_against_a_cache_that_cannot_be_read(declared: dict[str, Any], asked: dict[str, Any], subjects: list[str]):
    reasons = support(device_types=("cpu",), **declared).reasons(request(**asked))
    assert [reason.subject for reason in reasons] == subjects
    assert all(reason.remedy for reason in reasons)
