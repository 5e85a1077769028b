# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's functions of the DSA indexer, by its names, on every device: scores of FP8 queries against FP8 keys.

An engine that calls DeepGEMM for its indexer can call these instead where DeepGEMM has no kernels. Arguments are DeepGEMM's, up
to version 2.8. Differences: what a query token does not see is always -inf, so `clean_logits` and `schedule_meta` change
nothing; FP4 and MX scales are refused.
Source: DeepGEMM `csrc/apis/attention.hpp`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts.values import refuse
from mla_portable.primitives import indexer_logits, indexer_logits_ragged

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]

_ROW_ALIGNMENT: Final = 256
"""Rows of scores are whole multiples of 1024 bytes apart, as DeepGEMM's are: top-k kernels read them in wide loads."""
_SCRATCH_ELEMENTS: Final = 1 << 24
"""Scores that are held besides the result when it is compressed: 64 MiB."""


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | int = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """Scores of gathered keys, of a range of them for each query token.

    Args:
        q: [M, H, 128] float8_e4m3fn, and None: the scales of q are in `weights` [M, H] float32.
        kv: [N, 128] float8_e4m3fn, and their scales [N] float32.
        cu_seq_len_k_start, cu_seq_len_k_end: [M] int32, the first key of each token and the one behind its last.
        clean_logits: ignored. An int in its place is `max_seqlen_k`, which DeepGEMM 2.8 has there.
        max_seqlen_k: 0, or an upper bound of the keys of a token, which compresses the result.
        logits_dtype: of the result. schedule_meta: ignored.
    Returns: [M, N], column s is key s. Compressed: [M, max_seqlen_k], column s is key cu_seq_len_k_start[m] + s. -inf where the
        token does not see the key.
    Raises: InvalidArgument, UnsupportedRequest. Graph-safe.
    """
    queries = _fp8(q, "fp8_fp4_mqa_logits")
    keys, scales = kv
    if not isinstance(clean_logits, bool):
        max_seqlen_k = clean_logits
    num_tokens, num_keys = queries.shape[0], keys.shape[0]
    if not max_seqlen_k:
        out = _rows(num_tokens, num_keys, queries.device)
        ranges = cu_seq_len_k_start, cu_seq_len_k_end
        return indexer_logits_ragged(queries, weights, keys, scales, *ranges, out=out).to(logits_dtype)
    compressed = _rows(num_tokens, max_seqlen_k, queries.device)
    if num_keys == 0:
        return compressed.fill_(-torch.inf).to(logits_dtype)
    column = torch.arange(max_seqlen_k, dtype=torch.int64, device=queries.device)
    step = max(1, _SCRATCH_ELEMENTS // (num_keys + 3 * max_seqlen_k))  # scores, and 64-bit columns with their mask
    for begin in range(0, num_tokens, step):
        some = slice(begin, min(begin + step, num_tokens))
        starts, ends = cu_seq_len_k_start[some], cu_seq_len_k_end[some]
        scores = _rows(some.stop - begin, num_keys, queries.device)
        indexer_logits_ragged(queries[some], weights[some], keys, scales, starts, ends, out=scores)
        taken = starts.clamp(min=0).unsqueeze(1) + column  # [m, max_seqlen_k]
        found = scores.gather(1, taken.clamp(max=num_keys - 1))
        compressed[some] = found.masked_fill_(taken >= num_keys, -torch.inf)
    return compressed.to(logits_dtype)


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None) -> Tensor:
    """The `schedule_meta` of `fp8_fp4_paged_mqa_logits`: [num_sms + 1, 2] int32, zeros, because nothing here reads it."""
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores of the cached keys of each request, for its last query tokens.

    Args:
        q: [B, next_n, H, 128] float8_e4m3fn, and None: the scales of q are in `weights` [B * next_n, H] float32.
        kv_cache: [blocks, block_kv, 1, 132] uint8 (`index_fp8`).
        context_lens: int32, [B, next_n]: the keys that each query token sees; or [B]: those that the last one sees, each
            token before it one fewer.
        block_table: [B, columns] int32. max_context_len: columns of the result.
        schedule_meta, clean_logits, indices: ignored. logits_dtype: of the result.
    Returns: [B * next_n, max_context_len], column s is position s; -inf where the token does not see the key.
    Raises: InvalidArgument, UnsupportedRequest. Graph-safe.
    """
    queries = _fp8(q, "fp8_fp4_paged_mqa_logits")
    batch, next_n, heads, width = queries.shape
    rows, device = batch * next_n, queries.device
    if context_lens.dim() == 1:
        starts = torch.arange(0, rows + 1, next_n, dtype=torch.int32, device=device)
        lengths, table = context_lens, block_table
    else:  # any length for each token: each one is a request of its own
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lengths = context_lens.reshape(-1)
        table = block_table if next_n == 1 else block_table.repeat_interleave(next_n, dim=0)
    out = _rows(rows, max_context_len, device)
    pages = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    indexer_logits(queries.reshape(rows, heads, width), weights, pages, starts, lengths, table, out=out)
    return out.to(logits_dtype)


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """`fp8_fp4_mqa_logits` by its older name, with q [M, H, 128] alone."""
    return fp8_fp4_mqa_logits((q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """`fp8_fp4_paged_mqa_logits` by its older name, with q [B, next_n, H, 128] alone."""
    return fp8_fp4_paged_mqa_logits((q, None), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len)


def _fp8(q: tuple[Tensor, Tensor | None], where: str) -> Tensor:
    values, scales = q
    if scales is not None:
        remedy = "Multiply the scales of FP8 queries into weights; leave the indexer's cache in FP8."
        refuse(where, "q", "queries with scales of their own (FP4 or MX)", "(float8_e4m3fn, None)", remedy)
    return values


def _rows(num_rows: int, width: int, device: torch.device) -> Tensor:
    """[num_rows, width] float32, not filled."""
    stride = -(-width // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return torch.empty((num_rows, stride), dtype=torch.float32, device=device)[:, :width]
