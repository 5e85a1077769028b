# SPDX-License-Identifier: Apache-2.0
"""Arguments of every primitive that are in order, and short names for the tensors that tests spoil them with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_portable.kit.split_kv import SplitSchedule
from mla_portable_common.flash_mla.tile_schedules import TileSchedule

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


def e4m3(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.float8_e4m3fn)


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
        "indexer_cache_write": lambda: {
            "k": bf16(T, 128),
            "index_cache": u8(BLOCKS, BLOCK, 132),
            "slot_mapping": i64(T),
            "scale_format": "amax",
        },
        "indexer_logits": lambda: {
            "q": bf16(T, H, 128),
            "weights": f32(T, H),
            "index_cache": bf16(BLOCKS, BLOCK, 128),
            "query_start_loc": i32(P + 1),
            "seq_lens": i32(P),
            "block_table": i32(P, 7),
            "out": f32(T, 99),
        },
        "indexer_logits_ragged": lambda: {
            "q": e4m3(T, H, 128),
            "weights": f32(T, H),
            "keys": e4m3(W, 128),
            "key_scales": f32(W),
            "row_starts": i32(T),
            "row_ends": i32(T),
            "out": f32(T, W),
        },
        "indexer_logits_blocks": lambda: {
            "q": e4m3(T, H, 128),
            "q_scales": i32(T, H),
            "weights": bf16(T, H),
            "keys": e4m3(BLOCKS, BLOCK, 128),
            "key_scales": i32(BLOCKS, BLOCK),
            "starts": i32(T, 3),
            "lengths": i32(T, 3),
            "block_tokens": 8,
            "out": bf16(T, 24),
        },
        "pack_selection": lambda: {"topk_indices": i32(T, K), "width": 99, "starts": i32(T), "out": i32(T, 4)},
        "concat_mla_k": lambda: {"k_nope": bf16(W, H, 128), "k_rope": bf16(W, 64), "out": bf16(W, H, 192)},
        "masked_prefill": lambda: {
            "q": bf16(T, H, 192),
            "k": bf16(W, H, 192),
            "v": bf16(W, H, 128),
            "query_start_loc": i32(P + 1),
            "key_start_loc": i32(P + 1),
            "softmax_scale": 0.1,
            "max_query_len": T,
            "max_key_len": W,
            "causal": True,
            "selection": i32(T, 2),
            "out": bf16(T, H, 128),
            "lse_out": f32(T, H),
        },
        "norm_rope_write": lambda: {
            "q_a": bf16(T, 96),
            "latent": bf16(T, 576),
            "index_key": bf16(T, 128),
            "positions": i64(T),
            "cos_sin": f32(9, 64),
            "q_norm": bf16(96),
            "kv_norm": bf16(512),
            "index_norm": (f32(128), f32(128)),
            "eps": 1e-6,
            "index_eps": 1e-5,
            "kv_cache": fp8_cache(),
            "slot_mapping": i64(T),
            "index_cache": u8(BLOCKS, BLOCK, 132),
            "rope_style": "neox",
            "index_rope_style": "interleaved",
            "index_rope_at": "last",
            "scale_format": "amax",
            "q_out": bf16(T, 96),
            "latent_out": bf16(T, 512),
            "k_rope_out": bf16(T, 64),
        },
        "rope_quantize_queries": lambda: {
            "q": bf16(T, H, 192),
            "index_q": bf16(T, 3, 128),
            "index_weights": bf16(T, 3),
            "positions": i64(T),
            "cos_sin": f32(9, 64),
            "q_out": bf16(T, H, 576),
            "index_q_out": e4m3(T, 3, 128),
            "index_weights_out": f32(T, 3),
            "index_scale": 0.1,
            "rope_style": "neox",
            "index_rope_style": "interleaved",
            "index_rope_at": "last",
        },
        "indexer_select": lambda: {
            "q": e4m3(T, H, 128),
            "weights": f32(T, H),
            "index_cache": u8(BLOCKS, BLOCK, 132),
            "query_start_loc": i32(P + 1),
            "seq_lens": i32(P),
            "block_table": i32(P, 7),
            "topk": K,
            "out": i32(T, K),
        },
    }[primitive]()


def split_schedule(**changes: Any) -> SplitSchedule:
    fields = {
        "num_rows": B * S,
        "num_heads": H,
        "topk": K,
        "num_splits": 2,
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
