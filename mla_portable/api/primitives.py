# SPDX-License-Identifier: Apache-2.0
"""The primitives as plain functions: check the arguments, find who serves them, call.

Each call validates everything that is known on the host, asks a cache for the bound implementation (the registry on the
first call of a kind), and hands over. What is called in every step binds once instead: `SparseMLAAttention`, or
`get_registry().bind(request)`.

What all functions share:
- `backend` names a backend ("triton") or one of its variants ("triton.portable"); None lets `use(...)`, the environment, the
  policy file and the costs decide. A demanded backend never falls back.
- InvalidArgument: the arguments break the contract, whoever serves. UnknownBackend: nobody carries that name.
  UnsupportedRequest: nothing here, or not the demanded backend, can serve; `.decision` holds all reasons. All three come
  before anything runs; what a kernel or driver raises travels up unchanged.
- Graph-safe means: with the outputs given, a call allocates nothing and reads nothing back, so a CUDA graph may capture it
  once a call of the same kind has run outside. Implementations that are not are passed over during capture.
- A call runs on the device of its tensors. What `bind` returned is launched on the current device, which then must be that one.
- Axes, absent indices, lse and sinks: `mla_portable.primitives`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_portable.api.dispatch import find
from mla_portable.contracts import (
    DecodeSchedule,
    PlanMismatch,
    validate,
)
from mla_portable.layouts import LAYOUTS

__all__ = [
    "cache_write",
    "convert_indices",
    "gather_upconvert",
    "indexer_logits",
    "merge_states",
    "quantize_per_tensor",
    "sparse_decode",
    "sparse_prefill",
]


def cache_write(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scale_format: str = "pow2",
    backend: str | None = None,
) -> None:
    """Write new tokens into the paged cache.

    Args:
        kv_c: [T, 512] bf16 or fp16, the compressed latent. k_pe: [T, 64] of the same dtype, the rotary key.
        kv_cache: [blocks, block_size, 576] bf16 or [blocks, block_size, 656] uint8, written in place; blocks may lie
            further apart than a block is long.
        slot_mapping: [T] int64; a slot that is negative or past the cache is skipped.
        scale_format: how FP8 scales are made: "pow2" (powers of two) or "amax" (amax / 448). A bf16 cache has none.
        backend: see the module.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe. Row formats: `mla_portable.layouts`.
    """
    place = validate.cache_write(kv_c, k_pe, kv_cache, slot_mapping, scale_format)
    facts = (*place, scale_format if LAYOUTS[place[0]].is_quantized else None)
    call = find("cache_write", backend, kv_c, facts).call
    call(kv_c, k_pe, kv_cache, slot_mapping, scale_format=scale_format)


def convert_indices(
    topk_indices: Tensor,
    req_id_per_token: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_slots: int | None = None,
    prefill_request_ids: Tensor | None = None,
    prefill_workspace_starts: Tensor | None = None,
    compact: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn positions within a request into global cache slots, or into rows of the prefill workspace.

    Args:
        topk_indices: [T, K] int32, positions; negative = absent. req_id_per_token: [T] int32, rows of `block_table`.
        block_table: [R, columns] int32, block of each run of `block_size` positions; negative = no block.
        block_size: tokens in a block. num_slots: blocks * block_size of the cache; slots past it become -1.
        prefill_request_ids: [T] int32; a token whose entry is 0 or more gets prefill_workspace_starts[entry] + position.
        prefill_workspace_starts: [P] int32, first workspace row of each prefill request; the two are given together.
        compact: valid entries come first, in their order, -1 after them.
        out: (indices [T, K], counts [T]) int32, written; they overlap no input.
        backend: see the module.
    Returns: (indices, counts): indices [T, K] int32, -1 = absent; counts [T] int32, the valid entries of each row.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe with `out`.
    """
    topk = validate.convert_indices(
        topk_indices,
        req_id_per_token,
        block_table,
        block_size,
        num_slots,
        prefill_request_ids,
        prefill_workspace_starts,
        compact,
        out,
    )
    facts = (topk, block_size, prefill_request_ids is not None, compact)
    return find("convert_indices", backend, topk_indices, facts).call(
        topk_indices,
        req_id_per_token,
        block_table,
        block_size=block_size,
        num_slots=num_slots,
        prefill_request_ids=prefill_request_ids,
        prefill_workspace_starts=prefill_workspace_starts,
        compact=compact,
        out=out,
    )


def gather_upconvert(
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    *,
    out: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Copy the cached tokens of each prefill request into consecutive bf16 rows, undoing the FP8 scales.

    Args:
        kv_cache: [blocks, block_size, 656] uint8 or [blocks, block_size, 576] bf16.
        block_table: [P, columns] int32. seq_lens: [P] int32, tokens to copy. workspace_starts: [P] int32, first row in `out`.
        out: [W, 576] bf16, written. Rows that no request owns stay as they were, nothing is written past W.
        backend: see the module.
    Returns: `out`: latent = bf16(e4m3 * float32 scale), rope bit for bit, zeros for a token without a block.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe.
    """
    facts = validate.gather_upconvert(kv_cache, block_table, seq_lens, workspace_starts, out)
    call = find("gather_upconvert", backend, kv_cache, facts).call
    return call(kv_cache, block_table, seq_lens, workspace_starts, out=out)


def sparse_decode(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    schedule: DecodeSchedule | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of B x S query tokens over chosen slots of the paged cache.

    Args:
        q: [B, S, H, 576] bf16. kv_cache: [blocks, block_size, 656] uint8 or [blocks, block_size, 576] bf16.
        indices: [B, S, K] int32, global slots; negative or past the cache = absent; duplicates count each time.
        softmax_scale: factor on q.k. lengths: [B, S] int32, only that many leading entries of a row are read.
        attn_sink: [H] float32; out is multiplied by exp(lse) / (exp(lse) + exp(sink)).
        schedule: from a planner, for B * S rows of H heads and width K; its scratch is used instead of fresh memory.
        out: [B, S, H, 512] bf16, lse_out: [B, S, H] float32, written; they overlap no input.
        backend: see the module.
    Returns: (out, lse): lse is the natural logarithm, without the sink; a row without a valid index has 0 and -inf.
    Raises: InvalidArgument, PlanMismatch (a schedule made for other shapes or another kind of kernel), UnknownBackend,
        UnsupportedRequest. Graph-safe with `out`, `lse_out` and, where the kernel takes one, `schedule`.
    """
    shape = validate.sparse_decode(q, kv_cache, indices, softmax_scale, lengths, attn_sink, schedule, out, lse_out)
    served = find("sparse_decode", backend, q, (*shape, lengths is not None, attn_sink is not None, True))
    if schedule is not None and served.schedule_type is not None and not isinstance(schedule, served.schedule_type):
        raise PlanMismatch(
            f"sparse_decode: schedule is a {type(schedule).__name__}, {served.name} takes a {served.schedule_type.__name__}. "
            "Plan with the schedule_kind of the implementation that serves, or force the one that was planned for."
        )
    return served.call(
        q,
        kv_cache,
        indices,
        softmax_scale=softmax_scale,
        lengths=lengths,
        attn_sink=attn_sink,
        schedule=schedule,
        out=out,
        lse_out=lse_out,
    )


def sparse_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of T query tokens over chosen rows of a workspace, of a flat bf16 cache, or of the paged FP8 cache.

    Args:
        q: [T, H, 576] bf16. kv: [W, 576] bf16, or the paged [blocks, block_size, 656] uint8.
        indices: [T, K] int32, rows of kv or slots of the cache; negative or past the end = absent.
        softmax_scale, lengths [T] int32, attn_sink [H] float32: as in `sparse_decode`.
        out: [T, H, 512] bf16, lse_out: [T, H] float32, written; they overlap no input.
        backend: see the module.
    Returns: (out, lse) as in `sparse_decode`.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe with `out` and `lse_out`.
    """
    shape = validate.sparse_prefill(q, kv, indices, softmax_scale, lengths, attn_sink, out, lse_out)
    served = find("sparse_prefill", backend, q, (*shape, lengths is not None, attn_sink is not None, True))
    return served.call(
        q,
        kv,
        indices,
        softmax_scale=softmax_scale,
        lengths=lengths,
        attn_sink=attn_sink,
        out=out,
        lse_out=lse_out,
    )


def merge_states(outs: Tensor, lses: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Merge P partial attention results over disjoint sets of keys (split-KV, context parallelism).

    Args:
        outs: [P, ..., D] bf16, fp16 or float32. lses: [P, ...] float32, natural logarithm; -inf = nothing in that part,
            whatever its `outs` hold. backend: see the module.
    Returns: (out [..., D] in the dtype of outs, lse [...] float32); where all parts are empty, 0 and -inf.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Allocates its results.
    """
    validate.merge_states(outs, lses)
    return find("merge_states", backend, outs, ()).call(outs, lses)


def quantize_per_tensor(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise a tensor with one scale: x ~= x_q * scale.

    Args:
        x: bf16, fp16 or float32, any shape. dtype: of the result, one of `contracts.validate.QUANTIZED_DTYPES`.
        backend: see the module.
    Returns: (x_q of `dtype`, scale 0-d float32), scale = max(amax(|x|), 1e-10) / greatest finite value of `dtype`.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Allocates its results; no read-back.
    """
    validate.quantize_per_tensor(x, dtype)
    return find("quantize_per_tensor", backend, x, ()).call(x, dtype)


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    out: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Score the cached tokens of each request for each of its query tokens: what the top-k is taken of.

    Args:
        q: [T, H, 128] bf16. weights: [T, H] float32, of either sign. H are the indexer's own heads, 64 in DeepSeek-V3.2.
        index_cache: [blocks, block_size, 128] bf16, the indexer's keys; blocks may lie further apart than a block is long.
        query_start_loc: [R + 1] int32, ascending: the first token of each request, and the end of the last one. Token t of
            request r is at position seq_lens[r] - query_start_loc[r + 1] + t. On a CPU the values must lie in [0, T]. On a GPU
            they are not read back: tokens outside of [0, T) do not exist and shift no position.
        seq_lens: [R] int32, context and query; a length counts as at most columns * block_size.
        block_table: [R, columns] int32.
        out: [T, N] float32, written; column s is position s of the token's request.
        backend: see the module.
    Returns: `out` = sum over heads of weights * max(q.k, 0); -inf where a token sees no key: past its own position, without
        a block, or where the token belongs to no request.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe.
    """
    facts = validate.indexer_logits(q, weights, index_cache, query_start_loc, seq_lens, block_table, out)
    call = find("indexer_logits", backend, q, facts).call
    return call(q, weights, index_cache, query_start_loc, seq_lens, block_table, out=out)
