# SPDX-License-Identifier: Apache-2.0
"""Bad arguments: each is refused with argument, got and expected, before anything could run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from arguments import (
    BF16,
    BLOCK,
    BLOCKS,
    UINT8,
    Arguments,
    B,
    H,
    K,
    P,
    S,
    T,
    W,
    bf16,
    e4m3,
    f32,
    fp8_cache,
    good,
    i32,
    i64,
    on_a_gpu,
    raw_cache,
    split_schedule,
    strided,
    tile_schedule,
    u8,
    zeros,
)
from recorder import Recorder, registry_of
from torch import Tensor

import mla_portable
from mla_portable.contracts import InvalidArgument, PlanMismatch
from mla_portable.dispatch import serving
from mla_portable.kit.split_kv import SplitSchedule


def scratch_in_one_place() -> SplitSchedule:
    return split_schedule(partial_out=zeros(1, B * S, H, 512, dtype=torch.float32).expand(2, -1, -1, -1))


def scratch_within_scratch() -> SplitSchedule:
    whole = split_schedule()
    assert whole.partial_out is not None
    return split_schedule(
        partial_out=whole.partial_out, partial_lse=whole.partial_out.view(-1)[: 2 * B * S * H].view(2, B * S, H)
    )


def narrow_scratch() -> SplitSchedule:
    return split_schedule(value_width=5, partial_out=f32(2, B * S, H, 5))


def in_the_scratch(arguments: Arguments) -> Tensor:
    return arguments["schedule"].partial_out[0].view(BF16).view(B, S, H, 1024)[..., :512]


def sinks_in_the_scratch(arguments: Arguments) -> Tensor:
    """Without outputs: the scratch is written all the same."""
    arguments.update(out=None, lse_out=None)
    return arguments["schedule"].partial_lse[1, -1]


def huge_topk(arguments: Arguments) -> int:
    """Whose results are not given memory."""
    arguments["out"] = None
    return 2**31 - 1


def short_bound(arguments: Arguments) -> int:
    """A request has one query more than that."""
    arguments["query_start_loc"] = torch.tensor([0, 2, 5]).int()
    return 2


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


def over_the_columns(arguments: Arguments) -> Tensor:
    """Keys whose first columns are the input."""
    keys = bf16(W, H, 192)
    arguments["k_nope"] = keys[..., :128]
    return keys


def overlay(name: str, dtype: torch.dtype, *shape: int, skip: int = 0) -> Callable[[Arguments], Tensor]:
    """A tensor that lies over the first bytes (after `skip`) of another argument."""

    def view(arguments: Arguments) -> Tensor:
        raw = arguments[name].view(-1).view(UINT8)[skip:]
        return raw[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    return view


def odd_index_pages() -> Tensor:
    """Blocks whose scales do not start at multiples of 4 bytes."""
    return u8(10_000).as_strided((3, 16, 132), (16 * 132 + 2, 132, 1))


def with_bf16_keys(arguments: Arguments) -> Tensor:
    arguments["q"], arguments["keys"] = bf16(T, H, 128), bf16(W, 128)
    return f32(W)


def with_second_cache(indices: Tensor | None) -> Callable[[Arguments], Tensor | None]:
    def second(arguments: Arguments) -> Tensor | None:
        arguments["extra_kv_cache"] = u8(3, 2, 656)
        return indices

    return second


def with_second_list(cache: Tensor) -> Callable[[Arguments], Tensor]:
    def second(arguments: Arguments) -> Tensor:
        arguments["extra_indices"] = i32(B, S, 3)
        return cache

    return second


# primitive, what is wrong, the argument, its value (or how to make it from good ones), a part of "got", of "expected"
BAD = [
    ("cache_write", "float32 latent", "kv_c", f32(T, 512), "float32", "bfloat16"),
    ("cache_write", "latent of 448", "kv_c", bf16(T, 448), f"[{T}, 448]", f"[{T}, 512]"),
    ("cache_write", "rope of another type", "k_pe", zeros(T, 64, dtype=torch.float16), "float16", "bfloat16"),
    ("cache_write", "int32 slots", "slot_mapping", i32(T), "int32", "int64"),
    ("cache_write", "unknown scales", "scale_format", "e8m0", "'e8m0'", "'pow2' or 'amax'"),
    ("cache_write", "cache on a GPU", "kv_cache", on_a_gpu(2, 16, 656, dtype=UINT8), "cuda", "cpu"),
    ("cache_write", "truncated rows", "kv_cache", u8(6, 16, 640), "640", "656"),
    ("cache_write", "cache over its input", "kv_cache", overlay("kv_c", UINT8, 1, 4, 656), "overlaps kv_c", "of its own"),
    ("convert_indices", "int64 positions", "topk_indices", i64(T, K), "int64", "int32"),
    ("convert_indices", "no positions", "topk_indices", i32(T, 0), f"[{T}, 0]", "at least 1"),
    ("convert_indices", "int64 table", "block_table", i64(3, 7), "int64", "int32"),
    ("convert_indices", "transposed table", "block_table", i32(7, 3).T, "strides", "contiguous"),
    ("convert_indices", "negative block size", "block_size", -64, "-64", "at least 1"),
    ("convert_indices", "block size as a truth", "block_size", True, "True", "integer"),
    ("convert_indices", "negative cache", "num_slots", -1, "-1", "at least 0"),
    ("convert_indices", "ids without starts", "prefill_workspace_starts", None, "None", "because prefill_request_ids"),
    ("convert_indices", "starts without ids", "prefill_request_ids", None, "None", "because prefill_workspace_starts"),
    ("convert_indices", "starts of two axes", "prefill_workspace_starts", i32(P, 1), f"[{P}, 1]", "[P]"),
    ("convert_indices", "lengths of other requests", "seq_lens", i32(2), "[2]", "[3]"),
    ("convert_indices", "int64 lengths", "seq_lens", i64(3), "int64", "int32"),
    ("convert_indices", "counts too few", "out[1]", (i32(T, K), i32(T - 1)), f"[{T - 1}]", f"[{T}]"),
    ("convert_indices", "int64 output", "out[0]", (i64(T, K), i32(T)), "int64", "int32"),
    ("convert_indices", "in place", "out[0]", lambda a: (a["topk_indices"], i32(T)), "overlaps topk_indices", "of its own"),
    ("gather_upconvert", "workspace of latents", "out", bf16(W, 512), f"[{W}, 512]", f"[{W}, 576]"),
    ("gather_upconvert", "lengths of fewer requests", "seq_lens", i32(P - 1), f"[{P - 1}]", f"[{P}]"),
    ("gather_upconvert", "int64 starts", "workspace_starts", i64(P), "int64", "int32"),
    ("gather_upconvert", "cache with a head axis", "kv_cache", u8(6, 16, 1, 656), "[6, 16, 1, 656]", "[blocks, block_size"),
    ("gather_upconvert", "workspace in the cache", "out", overlay("kv_cache", BF16, W, 576), "overlaps kv_cache", "of its own"),
    ("sparse_decode", "float32 query", "q", f32(B, S, H, 576), "float32", "bfloat16"),
    ("sparse_decode", "query of 448", "q", bf16(B, S, H, 448), f"[{B}, {S}, {H}, 448]", "576]"),
    ("sparse_decode", "second list alone", "extra_indices", i32(B, S, K), "int32", "None without extra_kv_cache"),
    ("sparse_decode", "second lengths alone", "extra_lengths", i32(B, S), "int32", "None without extra_kv_cache"),
    ("sparse_decode", "second cache alone", "extra_indices", with_second_cache(None), "None", "slots of extra_kv_cache"),
    ("sparse_decode", "int64 second list", "extra_indices", with_second_cache(i64(B, S, K)), "int64", "int32"),
    ("sparse_decode", "second list too long", "extra_indices", with_second_cache(i32(B + 1, S, K)), f"[{B + 1}, ", f"[{B}, "),
    ("sparse_decode", "second cache of V4", "extra_kv_cache", with_second_list(u8(3, 2, 584)), "fp8_v4", "fp8_ds_mla"),
    ("sparse_decode", "no heads", "q", bf16(B, S, 0, 576), f"[{B}, {S}, 0, 576]", "H of at least 1"),
    ("sparse_decode", "transposed query", "q", bf16(B, S, 576, H).mT, "strides", "contiguous"),
    ("sparse_decode", "numpy query", "q", np.zeros((B, S, H, 576)), "ndarray", "a tensor"),
    ("sparse_decode", "truncated rows", "kv_cache", u8(6, 16, 640), "640", "656"),
    ("sparse_decode", "float8 rows", "kv_cache", fp8_cache().view(torch.float8_e4m3fn), "float8_e4m3fn", "uint8"),
    ("sparse_decode", "a slice of wider rows", "kv_cache", u8(6, 16, 700)[:, :, :656], "strides", "whole rows"),
    ("sparse_decode", "blocks that overlap", "kv_cache", raw_cache(656), "[656, 656, 1]", "10496 or more"),
    ("sparse_decode", "blocks of no token", "kv_cache", u8(6, 0, 656), "block_size 0", "at least 1"),
    ("sparse_decode", "odd block stride", "kv_cache", raw_cache(10498), "10498", "multiples of 4"),
    ("sparse_decode", "odd address", "kv_cache", raw_cache(10496, offset=2), "address", "multiples of 4"),
    ("sparse_decode", "cache on a GPU", "kv_cache", on_a_gpu(2, 16, 656, dtype=UINT8), "cuda:0", "cpu"),
    ("sparse_decode", "indices of two axes", "indices", i32(B * S, K), f"[{B * S}, {K}]", "[B, S, K]"),
    ("sparse_decode", "int64 indices", "indices", i64(B, S, K), "int64", "int32"),
    ("sparse_decode", "no indices", "indices", i32(B, S, 0), f"[{B}, {S}, 0]", "at least 1"),
    ("sparse_decode", "scale zero", "softmax_scale", 0.0, "0.0", "above 0"),
    ("sparse_decode", "scale NaN", "softmax_scale", float("nan"), "nan", "finite"),
    ("sparse_decode", "scale in a tensor", "softmax_scale", torch.tensor(0.1), "float32 []", "Python float"),
    ("sparse_decode", "lengths per batch row", "lengths", i32(B), f"[{B}]", f"[{B}, {S}]"),
    ("sparse_decode", "sinks of other heads", "attn_sink", f32(2 * H), f"[{2 * H}]", f"[{H}]"),
    ("sparse_decode", "output as wide as q", "out", bf16(B, S, H, 576), "576]", "512]"),
    ("sparse_decode", "lse with swapped axes", "lse_out", f32(B, H, S), f"[{B}, {H}, {S}]", f"[{B}, {S}, {H}]"),
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
    ("sparse_prefill", "flat FP8 rows", "kv", u8(W, 656), f"[{W}, 656]", "[blocks, block_size, 656]"),
    ("sparse_prefill", "paged bf16 rows", "kv", bf16(BLOCKS, BLOCK, 576), "[6, 16, 576]", "[W, 576]"),
    ("sparse_prefill", "workspace of another layout", "q", bf16(T, H, 512), f"[{T}, {H}, 512]", f"[{T}, {H}, 576]"),
    ("sparse_prefill", "float8 workspace", "kv", zeros(W, 576, dtype=torch.float8_e4m3fn), "float8_e4m3fn", "bfloat16"),
    ("sparse_prefill", "workspace with gaps", "kv", bf16(2 * W, 576)[::2], "strides", "contiguous"),
    ("sparse_prefill", "indices of other tokens", "indices", i32(T + 1, K), f"[{T + 1}, {K}]", f"[{T}, {K}]"),
    ("sparse_prefill", "negative scale", "softmax_scale", -0.1, "-0.1", "above 0"),
    ("sparse_prefill", "int64 lengths", "lengths", i64(T), "int64", "int32"),
    ("sparse_prefill", "one sink", "attn_sink", f32(1), "[1]", f"[{H}]"),
    ("sparse_prefill", "bf16 lse", "lse_out", bf16(T, H), "bfloat16", "float32"),
    ("sparse_prefill", "output inside q", "out", lambda a: a["q"][..., :512], "overlaps q", "of its own"),
    ("sparse_prefill", "output in the workspace", "out", overlay("kv", BF16, T, H, 512), "overlaps kv", "of its own"),
    ("pack_selection", "int64 positions", "topk_indices", i64(T, K), "int64", "int32"),
    ("pack_selection", "no positions", "topk_indices", i32(T, 0), f"[{T}, 0]", "at least 1"),
    ("pack_selection", "no width", "width", 0, "0", "at least 1"),
    ("pack_selection", "a wide width", "width", 2**31, "2147483648", "at most"),
    ("pack_selection", "a start too few", "starts", i32(T - 1), f"[{T - 1}]", f"[{T}]"),
    ("pack_selection", "words of another width", "out", i32(T, 3), f"[{T}, 3]", f"[{T}, 4]"),
    (
        "pack_selection",
        "words in the positions",
        "out",
        lambda a: a["topk_indices"][:, :4],
        "overlaps topk_indices",
        "of its own",
    ),
    ("concat_mla_k", "float16 columns", "k_nope", zeros(W, H, 128, dtype=torch.float16), "float16", "bfloat16"),
    ("concat_mla_k", "columns of other tokens", "k_rope", bf16(W + 1, 64), f"[{W + 1}, 64]", f"[{W}, "),
    ("concat_mla_k", "no shared columns", "k_rope", bf16(W, 0), f"[{W}, 0]", "R of at least 1"),
    ("concat_mla_k", "no columns of its own", "k_nope", bf16(W, H, 0), f"[{W}, {H}, 0]", "P of at least 1"),
    ("concat_mla_k", "a head's axis in the shared columns", "k_rope", bf16(W, 1, 64), f"[{W}, 1, 64]", "[N, R]"),
    ("concat_mla_k", "transposed columns", "k_nope", bf16(W, 128, H).mT, "strides", "contiguous"),
    ("concat_mla_k", "keys as wide as the columns", "out", bf16(W, H, 128), f"[{W}, {H}, 128]", f"[{W}, {H}, 192]"),
    ("concat_mla_k", "keys over the columns", "out", over_the_columns, "overlaps k_nope", "of its own"),
    ("norm_rope_write", "float16 latents", "latent", zeros(T, 576, dtype=torch.float16), "float16", "bfloat16"),
    ("norm_rope_write", "latents without a rotary part", "latent", bf16(T, 512), "512]", "576]"),
    ("norm_rope_write", "queries of other tokens", "q_a", bf16(T + 1, 96), f"[{T + 1}, 96]", f"[{T}, "),
    ("norm_rope_write", "no weights", "q_norm", None, "None", "there is q_a"),
    ("norm_rope_write", "weights of another width", "q_norm", bf16(95), "[95]", "[96]"),
    ("norm_rope_write", "float16 weights", "kv_norm", zeros(512, dtype=torch.float16), "float16", "bfloat16 or torch.float32"),
    ("norm_rope_write", "a weight without its bias", "index_norm", f32(128), "float32", "a tuple (weight"),
    ("norm_rope_write", "int32 positions", "positions", i32(T), "int32", "int64"),
    ("norm_rope_write", "a narrow table", "cos_sin", f32(9, 32), "[9, 32]", "rotary part of latent is 64 wide"),
    ("norm_rope_write", "half a pair", "cos_sin", f32(9, 63), "[9, 63]", "R even"),
    ("norm_rope_write", "an empty table", "cos_sin", f32(0, 64), "[0, 64]", "P of at least 1"),
    ("norm_rope_write", "no table", "cos_sin", None, "None", "there are keys to rotate"),
    ("norm_rope_write", "no slots", "slot_mapping", None, "None", "there is a cache"),
    ("norm_rope_write", "no cache for the key", "index_cache", None, "None", "there is index_key"),
    ("norm_rope_write", "no eps", "eps", 0.0, "0.0", "above 0"),
    ("norm_rope_write", "an unknown style", "rope_style", "gptj", "'gptj'", "'interleaved' or 'neox'"),
    ("norm_rope_write", "an unknown place", "index_rope_at", "middle", "'middle'", "'first' or 'last'"),
    ("norm_rope_write", "unknown scales", "scale_format", "ue8m0", "'ue8m0'", "'pow2' or 'amax'"),
    ("norm_rope_write", "an index cache of latents", "index_cache", fp8_cache(), "rows of 656", "(index_fp8)"),
    ("norm_rope_write", "results over their input", "q_out", lambda a: a["q_a"], "overlaps q_a", "of its own"),
    ("norm_rope_write", "a key's output of another width", "k_rope_out", bf16(T, 63), "63]", "64]"),
    ("rope_quantize_queries", "float16 queries", "q", zeros(T, H, 192, dtype=torch.float16), "float16", "bfloat16"),
    ("rope_quantize_queries", "queries without a rotary part", "q", bf16(T, H, 63), "63]", "at least R = 64"),
    ("rope_quantize_queries", "results of other heads", "q_out", bf16(T, H + 1, 576), f"[{T}, {H + 1}, ", f"[{T}, {H}, "),
    ("rope_quantize_queries", "codes in bytes", "index_q_out", u8(T, 3, 128), "uint8", "float8_e4m3fn"),
    ("rope_quantize_queries", "no codes", "index_q_out", None, "None", "there is index_q"),
    ("rope_quantize_queries", "weights of other heads", "index_weights", bf16(T, 4), f"[{T}, 4]", f"[{T}, 3]"),
    ("rope_quantize_queries", "float16 weights", "index_weights", bf16(T, 3).half(), "float16", "bfloat16 or torch.float32"),
    ("rope_quantize_queries", "a scale of 0", "index_scale", 0.0, "0.0", "above 0"),
    ("rope_quantize_queries", "an unknown place", "index_rope_at", "middle", "'middle'", "'first' or 'last'"),
    ("rope_quantize_queries", "a wide table", "cos_sin", f32(9, 130), "[9, 130]", "at most 128"),
    ("rope_quantize_queries", "codes over the queries", "q_out", lambda a: a["q"], "overlaps q", "of its own"),
    ("masked_prefill", "float16 queries", "q", zeros(T, H, 192, dtype=torch.float16), "float16", "bfloat16"),
    ("masked_prefill", "keys of other heads", "k", bf16(W, H + 1, 192), f"[{W}, {H + 1}, 192]", f"[{W}, {H}, 192]"),
    ("masked_prefill", "keys as wide as values", "k", bf16(W, H, 128), "128]", "192]"),
    ("masked_prefill", "values of other keys", "v", bf16(W + 1, H, 128), f"[{W + 1}, ", f"[{W}, "),
    ("masked_prefill", "values of no width", "v", bf16(W, H, 0), f"[{W}, {H}, 0]", "at least 1"),
    ("masked_prefill", "transposed values", "v", bf16(W, 128, H).mT, "strides", "contiguous"),
    ("masked_prefill", "no starts", "query_start_loc", i32(0), "[0]", "at least one value"),
    ("masked_prefill", "starts of fewer requests", "key_start_loc", i32(P), f"[{P}]", f"[{P + 1}]"),
    (
        "masked_prefill",
        "a start past the tokens",
        "query_start_loc",
        torch.tensor([0, 2, T + 1]).int(),
        f"to {T + 1}",
        f"T = {T}",
    ),
    ("masked_prefill", "a start past the keys", "key_start_loc", torch.tensor([0, 2, W + 1]).int(), f"to {W + 1}", f"N = {W}"),
    ("masked_prefill", "decreasing starts", "key_start_loc", torch.tensor([0, 9, 4]).int(), "decreasing", "not decreasing"),
    ("masked_prefill", "a short bound", "max_query_len", short_bound, "2", "at least 3"),
    ("masked_prefill", "a bound below 0", "max_key_len", -1, "-1", "at least 0"),
    ("masked_prefill", "causal in words", "causal", "yes", "str 'yes'", "True or False"),
    ("masked_prefill", "scale zero", "softmax_scale", 0.0, "0.0", "above 0"),
    ("masked_prefill", "bits in bytes", "selection", u8(T, 8), "uint8", "int32"),
    ("masked_prefill", "a selection of other tokens", "selection", i32(T + 1, 2), f"[{T + 1}, 2]", f"[{T}, "),
    ("masked_prefill", "a selection without words", "selection", i32(T, 0), f"[{T}, 0]", "at least 1"),
    ("masked_prefill", "output as wide as q", "out", bf16(T, H, 192), "192]", "128]"),
    ("masked_prefill", "output inside q", "out", lambda a: a["q"][..., :128], "overlaps q", "of its own"),
    ("masked_prefill", "bf16 lse", "lse_out", bf16(T, H), "bfloat16", "float32"),
    ("merge_states", "float64 parts", "outs", zeros(3, T, H, 16, dtype=torch.float64), "float64", "float32"),
    ("merge_states", "no parts", "outs", bf16(0, T, H, 16), f"[0, {T}, {H}, 16]", "at least 1"),
    ("merge_states", "transposed parts", "outs", bf16(3, T, 16, H).mT, "strides", "contiguous"),
    ("merge_states", "lse of other axes", "lses", f32(3, H, T), f"[3, {H}, {T}]", f"[3, {T}, {H}]"),
    ("merge_states", "lse on a GPU", "lses", on_a_gpu(3, T, H, dtype=torch.float32), "cuda", "cpu"),
    ("topk_select", "bf16 scores", "logits", bf16(T, 99), "bfloat16", "float32"),
    ("topk_select", "one start too few", "row_starts", i32(T - 1), f"[{T - 1}]", f"[{T}]"),
    ("topk_select", "long ends", "row_ends", zeros(T, dtype=torch.int64), "int64", "int32"),
    ("topk_select", "a huge K", "topk", huge_topk, "2147483647", f"at most {(2**31 - 1) // T} for {T} rows"),
    ("indexer_select", "a huge K", "topk", huge_topk, "2147483647", f"at most {(2**31 - 1) // T} for {T} rows"),
    ("topk_select", "no K", "topk", 0, "0", "at least 1"),
    ("topk_select", "results over the scores", "out", overlay("logits", torch.int32, T, K), "overlaps logits", "of its own"),
    ("topk_select", "results of another width", "out", i32(T, K + 1), f"[{T}, {K + 1}]", f"[{T}, {K}]"),
    ("indexer_logits", "a head of another size", "q", bf16(T, H, 64), f"[{T}, {H}, 64]", f"[{T}, {H}, 128]"),
    ("indexer_logits", "bf16 weights", "weights", bf16(T, H), "bfloat16", "float32"),
    ("indexer_logits", "queries of two axes", "q", bf16(T, 128), f"[{T}, 128]", "[T, H, 128]"),
    ("indexer_logits", "e4m3 queries of bf16 keys", "q", e4m3(T, H, 128), "float8_e4m3fn", "bfloat16"),
    ("indexer_logits", "no queries", "q", None, "None", "a tensor [T, H, 128]"),
    ("indexer_logits_blocks", "bf16 queries", "q", bf16(T, H, 128), "bfloat16", "float8_e4m3fn or torch.int8"),
    ("indexer_logits_blocks", "keys of another format", "keys", zeros(BLOCKS, BLOCK, 128, dtype=torch.int8), "int8", "float8"),
    ("indexer_logits_blocks", "half queries", "q", e4m3(T, H, 64), f"[{T}, {H}, 64]", f"[{T}, {H}, 128]"),
    ("indexer_logits_blocks", "no heads", "q", e4m3(T, 0, 128), f"[{T}, 0, 128]", "H of at least 1"),
    ("indexer_logits_blocks", "float scales", "q_scales", f32(T, H), "float32", "int32"),
    ("indexer_logits_blocks", "float weights", "weights", f32(T, H), "float32", "bfloat16"),
    ("indexer_logits_blocks", "keys without pages", "keys", e4m3(W, 128), f"[{W}, 128]", "[P, page, 128]"),
    ("indexer_logits_blocks", "scales of other pages", "key_scales", i32(BLOCKS, BLOCK + 1), "17]", f"{BLOCK}]"),
    ("indexer_logits_blocks", "starts of other tokens", "starts", i32(T + 1, 3), f"[{T + 1}, 3]", f"[{T}, "),
    ("indexer_logits_blocks", "no starts", "starts", None, "None", "a tensor [T, B]"),
    ("indexer_logits_blocks", "lengths of fewer blocks", "lengths", i32(T, 2), f"[{T}, 2]", f"[{T}, 3]"),
    ("indexer_logits_blocks", "blocks of no keys", "block_tokens", 0, "0", "at least 1"),
    ("indexer_logits_blocks", "blocks of a half", "block_tokens", 1.5, "1.5", "integer"),
    ("indexer_logits_blocks", "results of other blocks", "out", bf16(T, 16), f"[{T}, 16]", f"[{T}, 24]"),
    ("indexer_logits_blocks", "float results", "out", f32(T, 24), "float32", "bfloat16"),
    ("indexer_logits_blocks", "results over the keys", "out", overlay("keys", BF16, T, 24), "overlaps keys", "own"),
    ("indexer_logits_ragged", "a list of queries", "q", [bf16(H, 128)], "list", "a tensor [T, H, 128]"),
    ("indexer_select", "numpy queries", "q", np.zeros((T, H, 128)), "ndarray", "a tensor [T, H, 128]"),
    ("indexer_logits", "weights of other heads", "weights", f32(T, H + 1), f"[{T}, {H + 1}]", f"[{T}, {H}]"),
    ("indexer_logits", "a cache of latents", "index_cache", bf16(BLOCKS, BLOCK, 576), "rows of 576", "(index_bf16)"),
    ("indexer_logits", "a cache on a GPU", "index_cache", on_a_gpu(2, 16, 128), "cuda", "cpu"),
    ("indexer_logits", "a table of one axis", "block_table", i32(7), "[7]", "[R, columns]"),
    ("indexer_logits", "a table of int64", "block_table", i64(P, 7), "int64", "int32"),
    ("indexer_logits", "lengths of fewer requests", "seq_lens", i32(P - 1), f"[{P - 1}]", f"[{P}]"),
    ("indexer_logits", "long starts", "query_start_loc", i64(P + 1), "int64", "int32"),
    ("indexer_logits", "results of fewer tokens", "out", f32(T - 1, 99), f"[{T - 1}, 99]", f"[{T}, 99]"),
    ("indexer_logits", "results of one axis", "out", f32(T), f"[{T}]", "[T, N]"),
    ("indexer_logits", "results over the weights", "out", overlay("weights", torch.float32, T, H), "overlaps weights", "own"),
    ("indexer_select", "bf16 queries of e4m3 keys", "q", bf16(T, H, 128), "bfloat16", "float8_e4m3fn for index_fp8 keys"),
    ("indexer_select", "a cache of other rows", "index_cache", u8(BLOCKS, BLOCK, 656), "rows of 656", "rows of 132"),
    ("indexer_select", "a cache with a head axis", "index_cache", u8(6, 16, 1, 132), "[6, 16, 1, 132]", "132] uint8"),
    ("indexer_select", "scales at odd places", "index_cache", odd_index_pages(), "2114", "multiples of 4"),
    ("indexer_select", "an end past T", "query_start_loc", torch.tensor([*[0] * P, T + 1]).int(), f"to {T + 1}", f"T = {T}"),
    ("indexer_select", "no K", "topk", 0, "0", "at least 1"),
    ("indexer_select", "K as a truth", "topk", True, "True", "integer"),
    ("indexer_select", "results of another width", "out", i32(T, K + 1), f"[{T}, {K + 1}]", f"[{T}, {K}]"),
    ("indexer_select", "long results", "out", i64(T, K), "int64", "int32"),
    (
        "indexer_select",
        "results over the table",
        "out",
        overlay("index_cache", torch.int32, T, K),
        "overlaps index_cache",
        "own",
    ),
    ("indexer_logits_ragged", "keys of three axes", "keys", e4m3(1, W, 128), f"[1, {W}, 128]", "[N, 128]"),
    ("indexer_logits_ragged", "keys in bytes", "keys", u8(W, 128), "uint8", "bfloat16 or torch.float8_e4m3fn"),
    ("indexer_logits_ragged", "wide keys", "keys", e4m3(W, 132), f"[{W}, 132]", f"[{W}, 128]"),
    ("indexer_logits_ragged", "no scales", "key_scales", None, "None", "[N] float32 for e4m3 keys"),
    ("indexer_logits_ragged", "scales of bf16 keys", "key_scales", with_bf16_keys, "a tensor", "None for bf16 keys"),
    ("indexer_logits_ragged", "a scale too few", "key_scales", f32(W - 1), f"[{W - 1}]", f"[{W}]"),
    ("indexer_logits_ragged", "bf16 queries", "q", bf16(T, H, 128), "bfloat16", "float8_e4m3fn"),
    ("indexer_logits_ragged", "bf16 weights", "weights", bf16(T, H), "bfloat16", "float32"),
    ("indexer_logits_ragged", "a start too few", "row_starts", i32(T - 1), f"[{T - 1}]", f"[{T}]"),
    ("indexer_logits_ragged", "long ends", "row_ends", i64(T), "int64", "int32"),
    ("indexer_logits_ragged", "results of fewer keys", "out", f32(T, W - 1), f"[{T}, {W - 1}]", f"[{T}, {W}]"),
    ("indexer_logits_ragged", "results over the keys", "out", overlay("keys", torch.float32, T, W), "overlaps keys", "own"),
    ("indexer_cache_write", "float32 keys", "k", f32(T, 128), "float32", "bfloat16 or torch.float16"),
    ("indexer_cache_write", "keys with a rope", "k", bf16(T, 192), f"[{T}, 192]", f"[{T}, 128]"),
    ("indexer_cache_write", "a cache of latents", "index_cache", fp8_cache(), "rows of 656", "(index_fp8)"),
    ("indexer_cache_write", "int32 slots", "slot_mapping", i32(T), "int32", "int64"),
    ("indexer_cache_write", "unknown scales", "scale_format", "ue8m0", "'ue8m0'", "'pow2' or 'amax'"),
    ("indexer_cache_write", "cache over its input", "index_cache", overlay("k", UINT8, 1, 4, 132), "overlaps k", "of its own"),
    ("indexer_logits", "rows apart", "index_cache", bf16(BLOCKS, BLOCK, 256)[..., :128], "strides", "whole rows"),
    ("indexer_logits", "an empty block", "index_cache", bf16(BLOCKS, 0, 128), "block_size 0", "at least 1"),
    ("indexer_logits", "one start a request", "query_start_loc", i32(P), f"[{P}]", f"[{P + 1}]"),
    ("indexer_logits", "a negative start", "query_start_loc", torch.tensor([-1, *[0] * P]).int(), "from -1 to 0", f"T = {T}"),
    ("indexer_logits", "an end past T", "query_start_loc", torch.tensor([*[0] * P, T + 1]).int(), f"to {T + 1}", f"T = {T}"),
    ("indexer_logits", "long lengths", "seq_lens", zeros(P, dtype=torch.int64), "int64", "int32"),
    ("indexer_logits", "bf16 results", "out", bf16(T, 99), "bfloat16", "float32"),
    (
        "sparse_decode",
        "heads of the output overlap",
        "out",
        strided(BF16, (B, S, H, 512), (9999, 4000, 511, 1)),
        "511",
        "its own",
    ),
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
    ("sparse_decode", "scratch within scratch", "schedule.partial_lse", scratch_within_scratch(), "overlaps schedule", "own"),
    (
        "sparse_decode",
        "scratch of another width",
        "schedule.value_width",
        narrow_scratch(),
        "5",
        "512, the width of the call's",
    ),
    ("sparse_decode", "output in the scratch", "out", in_the_scratch, "overlaps schedule.partial_out", "of its own"),
    ("sparse_decode", "sinks in the scratch", "attn_sink", sinks_in_the_scratch, "overlaps schedule.partial_lse", "of its own"),
    ("sparse_decode", "sinks of oneDNN", "attn_sink", f32(H).to_mkldnn(), "_mkldnn", "a dense tensor"),
    ("sparse_decode", "a negated query", "q", torch._neg_view(bf16(B, S, H, 576)), "negative bit", "without"),
    ("sparse_decode", "a sparse query", "q", bf16(B, S, H, 576).to_sparse(), "sparse", "a dense tensor"),
    ("sparse_decode", "nested indices", "indices", jagged(i32(S, K)), "nested", "a dense tensor"),
    ("sparse_decode", "scale past float32", "softmax_scale", 1e39, "1e+39", "float32"),
    ("sparse_decode", "scale past float64", "softmax_scale", 10**400, "1000", "float32"),
    ("sparse_decode", "scale below float32", "softmax_scale", 1e-60, "1e-60", "float32"),
    ("sparse_decode", "scale as a truth", "softmax_scale", True, "bool True", "Python float"),
    ("sparse_decode", "a list of backends", "backend", ["triton"], "list", "the name of a backend"),
    ("sparse_prefill", "rows of the output in one place", "out", bf16(1, H, 512).expand(T, H, 512), "[0, ", "of its own"),
    ("convert_indices", "rows of the output in one place", "out[0]", (i32(1, K).expand(T, K), i32(T)), "[0, 1]", "of its own"),
    ("convert_indices", "counts in one place", "out[1]", (i32(T, K), i32(1).expand(T)), "strides", "contiguous"),
    ("convert_indices", "compact in words", "compact", "no", "str 'no'", "True or False"),
    ("convert_indices", "a huge block", "block_size", 2**31, "2147483648", "at most"),
    ("indexer_logits", "rows of the scores in one place", "out", f32(1, 99).expand(T, 99), "[0, 1]", "of its own"),
    ("merge_states", "negated parts", "outs", torch._neg_view(bf16(3, T, H, 16)), "negative bit", "without"),
    ("quantize_per_tensor", "a negated tensor", "x", torch.zeros(4, dtype=torch.complex64).conj().imag, "negative", "without"),
    ("quantize_per_tensor", "integers", "x", i32(T, H), "int32", "bfloat16"),
    ("quantize_per_tensor", "a wide type", "dtype", BF16, "bfloat16", "float8_e4m3fn"),
    ("sparse_prefill", "no heads", "q", bf16(T, 0, 576), f"[{T}, 0, 576]", "at least 1"),
    ("sparse_prefill", "no indices", "indices", i32(T, 0), f"[{T}, 0]", "at least 1"),
    ("sparse_prefill", "output of fewer tokens", "out", bf16(T - 1, H, 512), f"[{T - 1}, {H}, 512]", f"[{T}, {H}, 512]"),
    ("indexer_logits", "no heads", "q", bf16(T, 0, 128), f"[{T}, 0, 128]", "H of at least 1"),
    ("merge_states", "one axis", "outs", bf16(3), "[3]", "[P, ..., D]"),
    ("merge_states", "a list of parts", "outs", [bf16(T, H, 16)], "list", "a tensor [P, ..., D]"),
    ("quantize_per_tensor", "a number", "x", 1.0, "float", "a tensor"),
    ("convert_indices", "a list of outputs", "out", [i32(T, K), i32(T)], "list", "a tuple"),
    ("convert_indices", "ids of more tokens", "req_id_per_token", i32(T + 1), f"[{T + 1}]", f"[{T}]"),
    ("convert_indices", "ids of fewer tokens", "prefill_request_ids", i32(T - 1), f"[{T - 1}]", f"[{T}]"),
    ("gather_upconvert", "float32 table", "block_table", f32(P, 7), "float32", "int32"),
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
def test_tensors_without_data_are_refused(recorder, primitive):
    arguments = good(primitive)
    call(primitive, arguments)  # the choice for a CPU, which is kept, does not serve them
    recorder.calls.clear()
    without = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), arguments)
    with pytest.raises(InvalidArgument, match=r"on meta, expected a tensor .* on a device that holds data"):
        call(primitive, {name: each for name, each in without.items() if name != "schedule"})
    assert recorder.calls == []


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_nested_tensors_are_refused(recorder, primitive):
    arguments = good(primitive)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() and value.dtype is not torch.float8_e4m3fn:  # torch has no nested ones
            for layout in (torch.strided, torch.jagged):
                nested = torch.nested.nested_tensor([value[:1].clone()], dtype=value.dtype, layout=layout)
                with pytest.raises(InvalidArgument) as caught:
                    call(primitive, {**arguments, name: nested})
                assert caught.value.argument == name and "nested" in str(caught.value)
    assert recorder.calls == []


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
ABSENT = dict.fromkeys(("latent", "kv_norm", "kv_cache", "latent_out", "k_rope_out", "index_key", "index_norm", "index_cache"))
INDEX_QUERIES = "index_q", "index_weights", "index_q_out", "index_weights_out"
GOOD = [
    ("cache_write", "float16 tokens", with_(kv_c=bf16(T, 512).half(), k_pe=bf16(T, 64).half())),
    ("cache_write", "no tokens", with_(kv_c=bf16(0, 512), k_pe=bf16(0, 64), slot_mapping=i64(0))),
    ("cache_write", "bf16 cache", with_(kv_cache=bf16(6, 16, 576))),
    ("cache_write", "blocks that lie apart", with_(kv_cache=u8(6, 20, 656)[:, :16])),
    ("cache_write", "one token a block, any row stride", with_(kv_cache=u8(9000).as_strided((6, 1, 656), (1312, 8, 1)))),
    ("cache_write", "a block alone, any block stride", with_(kv_cache=u8(11000).as_strided((1, 16, 656), (4, 656, 1)))),
    ("convert_indices", "a table cut from a wider one", with_(block_table=i32(3, 9)[:, :7])),
    (
        "convert_indices",
        "no tokens",
        with_(topk_indices=i32(0, K), req_id_per_token=i32(0), prefill_request_ids=i32(0), out=None),
    ),
    ("gather_upconvert", "no requests", with_(block_table=i32(0, 7), seq_lens=i32(0), workspace_starts=i32(0))),
    ("sparse_decode", "heads cut from wider rows", with_(q=bf16(B, S, H, 640)[..., :576])),
    ("sparse_decode", "inputs in one buffer", interleaved_inputs),
    ("sparse_decode", "output beside the query", neighbours),
    ("sparse_decode", "no rows", with_(**NO_ROWS)),
    ("sparse_decode", "an integer for the scale", with_(softmax_scale=1)),
    ("sparse_decode", "a tile schedule", with_(schedule=tile_schedule())),
    ("sparse_decode", "tiles of several calls", with_(schedule=tile_schedule(rows_per_call=2, num_splits=i32(3)))),
    (
        "sparse_decode",
        "no scratch",
        with_(schedule=split_schedule(num_splits=1, partial_out=None, partial_lse=None)),
    ),
    ("sparse_prefill", "the paged cache itself", with_(kv=fp8_cache())),
    ("sparse_prefill", "no tokens", with_(**NO_TOKENS)),
    ("pack_selection", "no output, no starts", with_(out=None, starts=None)),
    ("concat_mla_k", "no output", with_(out=None)),
    ("concat_mla_k", "no tokens", with_(k_nope=bf16(0, H, 128), k_rope=bf16(0, 64), out=None)),
    ("concat_mla_k", "slices", with_(k_nope=bf16(W, H, 256)[..., :128], k_rope=bf16(W, 576)[:, 512:])),
    ("norm_rope_write", "a norm alone", with_(**ABSENT, cos_sin=None, slot_mapping=None)),
    ("norm_rope_write", "no indexer", with_(index_key=None, index_norm=None, index_cache=None)),
    ("norm_rope_write", "outputs alone", with_(kv_cache=None)),
    ("norm_rope_write", "slices", with_(q_a=bf16(T, 800)[:, :96], latent=bf16(T, 800)[:, 96:672])),
    ("norm_rope_write", "no rotary part", with_(latent=bf16(T, 512), kv_cache=bf16(3, 4, 512), k_rope_out=None)),
    ("rope_quantize_queries", "queries alone", with_(**dict.fromkeys(INDEX_QUERIES))),
    ("rope_quantize_queries", "the indexer alone", with_(q=None, q_out=None)),
    ("rope_quantize_queries", "heads in front of tokens", with_(q=bf16(H, T, 192).transpose(0, 1))),
    ("masked_prefill", "no requests", with_(query_start_loc=i32(1), key_start_loc=i32(1))),
    ("masked_prefill", "no keys, no selection", with_(k=bf16(0, H, 192), v=bf16(0, H, 128), selection=None, out=None)),
    ("masked_prefill", "heads in front of tokens", with_(k=bf16(H, W, 192).transpose(0, 1))),
    ("masked_prefill", "any width of heads", with_(q=bf16(T, H, 7), k=bf16(W, H, 7), v=bf16(W, H, 5), out=None)),
    ("merge_states", "two axes", with_(outs=bf16(3, 16), lses=f32(3))),
    ("indexer_logits", "wider rows", with_(out=torch.zeros(T, 120)[:, :99])),
    ("indexer_logits", "no requests", with_(query_start_loc=i32(1), seq_lens=i32(0), block_table=i32(0, 7))),
    ("indexer_select", "no output", with_(out=None)),
    ("indexer_select", "pages that lie apart", with_(index_cache=u8(6, 20, 132)[:, :16])),
    ("indexer_logits_blocks", "no keys", with_(keys=e4m3(0, BLOCK, 128), key_scales=i32(0, BLOCK))),
    ("indexer_logits_blocks", "no blocks", with_(starts=i32(T, 0), lengths=i32(T, 0), out=bf16(T, 0))),
    (
        "indexer_logits_blocks",
        "two numbers in a byte",
        with_(q=zeros(T, H, 64, dtype=torch.int8), keys=zeros(BLOCKS, BLOCK, 64, dtype=torch.int8)),
    ),
    ("indexer_logits_ragged", "no keys", with_(keys=e4m3(0, 128), key_scales=f32(0), out=f32(T, 0))),
    ("indexer_logits_ragged", "bf16 keys", with_(q=bf16(T, H, 128), keys=bf16(W, 128), key_scales=None)),
    ("indexer_cache_write", "a bf16 cache, float16 keys", with_(index_cache=bf16(BLOCKS, BLOCK, 128), k=bf16(T, 128).half())),
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
        ("indexer_select", "q", lambda: bf16(T, H, 128)): "Quantise q, and multiply weights by its scales.",
        ("indexer_select", "index_cache", lambda: e4m3(BLOCKS, BLOCK, 132)): "index_cache.view(torch.uint8)",
        ("indexer_select", "index_cache", lambda: u8(BLOCKS, BLOCK, 128)): "128 e4m3 bytes",
    }
    with serving(registry_of(Recorder())):
        for (primitive, argument, make), remedy in remedies.items():
            with pytest.raises(InvalidArgument) as caught:
                call(primitive, {**good(primitive), argument: make()})
            assert remedy in caught.value.remedy
