# SPDX-License-Identifier: Apache-2.0
"""Scores of all keys that a query token sees: FP8 queries against FP8 keys that have a float32 scale each."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator, default_device
from mla_portable.contracts.values import describe, refuse, rounded_rows
from mla_portable.deep_gemm.arguments import integer, pair, score_rows
from mla_portable.dispatch import opaque, unchecked
from mla_portable.errors import InvalidArgument
from mla_portable.kit.rules import check_cache, check_dense, check_tensor, shape_of
from mla_portable.layouts import INDEX, INDEX_FP8, INDEX_HEAD_SIZE
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, IndexerLogitsRagged

_SCRATCH_ELEMENTS: Final = 1 << 24
"""Scores that are held besides the result when it is compressed: 64 MiB."""
_E4M3: Final = torch.float8_e4m3fn
_LENGTHS: Final = "[B, next_n] or [B]"
_LOGITS_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""They hold -inf, which float8 formats of queries do not."""


@opaque
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
        logits_dtype: of the result, float32, bfloat16 or float16. schedule_meta: ignored.
    Returns: [M, N], column s is key s. Compressed: [M, max_seqlen_k], column s is key cu_seq_len_k_start[m] + s. -inf where the
        token does not see the key.
    Raises: InvalidArgument, UnsupportedRequest. Graph-safe.
    """
    where = "fp8_fp4_mqa_logits"
    queries = _queries(where, q, "[M, H, 128]")
    num_tokens, num_heads, _ = queries.shape
    keys, scales = pair(where, "kv", kv, "([N, 128] float8_e4m3fn, [N] float32)")
    num_keys = shape_of(where, "kv[0]", keys, 2, "[N, 128]")[0]
    check_tensor(where, "kv[0]", keys, _E4M3, (num_keys, INDEX_HEAD_SIZE), queries.device, "[N, 128]")
    check_tensor(where, "kv[1]", scales, torch.float32, (num_keys,), queries.device, "[N]")
    check_tensor(where, "weights", weights, torch.float32, (num_tokens, num_heads), queries.device, "[M, H]")
    for name, each in (("cu_seq_len_k_start", cu_seq_len_k_start), ("cu_seq_len_k_end", cu_seq_len_k_end)):
        check_tensor(where, name, each, torch.int32, (num_tokens,), queries.device, "[M]")
    if not isinstance(clean_logits, bool):
        max_seqlen_k = integer(where, "clean_logits", clean_logits)
    max_seqlen_k = integer(where, "max_seqlen_k", max_seqlen_k)
    _check_logits_dtype(where, logits_dtype)
    if max_seqlen_k == 0:
        out = score_rows(num_tokens, num_keys, queries.device)
        ranges = cu_seq_len_k_start, cu_seq_len_k_end
        return _ragged(queries)(queries, weights, keys, scales, *ranges, out=out).to(logits_dtype)
    try:
        compressed = score_rows(num_tokens, max_seqlen_k, queries.device)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):  # says so itself
            raise
        size = f"{max_seqlen_k} for {num_tokens} query tokens, {num_tokens * max_seqlen_k / 2**28:.0f} GiB of scores"
        raise InvalidArgument(where, "max_seqlen_k", got=size, expected="scores that fit in memory") from error
    num_columns = min(max_seqlen_k, num_keys)  # behind them no token sees a key
    compressed[:, num_columns:].fill_(-torch.inf)
    column = torch.arange(num_columns, dtype=torch.int64, device=queries.device)
    step = max(1, _SCRATCH_ELEMENTS // max(1, num_keys + 3 * num_columns))  # scores, and 64-bit columns with their mask
    for begin in range(0, num_tokens if num_columns else 0, step):
        some = slice(begin, min(begin + step, num_tokens))
        starts, ends = cu_seq_len_k_start[some], cu_seq_len_k_end[some]
        scores = score_rows(some.stop - begin, num_keys, queries.device)
        _ragged(queries[some])(queries[some], weights[some], keys, scales, starts, ends, out=scores)
        taken = starts.clamp(min=0).unsqueeze(1) + column  # [m, num_columns]
        found = scores.gather(1, taken.clamp(max=num_keys - 1))
        compressed[some, :num_columns] = found.masked_fill_(taken >= num_keys, -torch.inf)
    return compressed.to(logits_dtype)


def get_num_sms() -> int:
    """The multiprocessors of the first accelerator, for `get_paged_mqa_logits_metadata`; 1 where it states none."""
    properties = accelerator(default_device()).properties()
    return getattr(properties, "multi_processor_count", 0) or 1


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None) -> Tensor:
    """The `schedule_meta` of `fp8_fp4_paged_mqa_logits`: [num_sms + 1, 2] int32, zeros, because nothing here reads it.

    Args:
        context_lens: int32, [B, next_n] or [B]. block_kv, num_sms: at least 1. indices: ignored.
    Raises: InvalidArgument.
    """
    where = "get_paged_mqa_logits_metadata"
    check_dense(where, "context_lens", context_lens, _LENGTHS)
    if context_lens.dim() not in (1, 2):
        refuse(where, "context_lens", f"shape {list(context_lens.shape)}", _LENGTHS)
    check_tensor(where, "context_lens", context_lens, torch.int32, context_lens.shape, context_lens.device, _LENGTHS)
    integer(where, "block_kv", block_kv, least=1)
    num_sms = integer(where, "num_sms", num_sms, least=1)
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


@opaque
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
        block_table: [B, columns] int32. As DeepGEMM requires, each entry that a context reaches names a block of the cache
            (`Request.whole_tables`). max_context_len: columns of the result.
        schedule_meta, clean_logits, indices: ignored. logits_dtype: of the result, float32, bfloat16 or float16.
    Returns: [B * next_n, max_context_len], column s is position s; -inf where the token does not see the key.
    Raises: InvalidArgument, UnsupportedRequest. Graph-safe.
    """
    where = "fp8_fp4_paged_mqa_logits"
    queries = _queries(where, q, "[B, next_n, H, 128]")
    batch, next_n, heads, width = queries.shape
    rows, device = batch * next_n, queries.device
    pages, facts = _pages(where, kv_cache, device)
    check_tensor(where, "weights", weights, torch.float32, (rows, heads), device, "[B * next_n, H]")
    check_dense(where, "context_lens", context_lens, _LENGTHS)
    lengths_shape = (batch,) if context_lens.dim() == 1 else (batch, next_n)
    check_tensor(where, "context_lens", context_lens, torch.int32, lengths_shape, device, _LENGTHS)
    columns = shape_of(where, "block_table", block_table, 2, "[B, columns]")[1]
    check_tensor(where, "block_table", block_table, torch.int32, (batch, columns), device, "[B, columns]")
    max_context_len = integer(where, "max_context_len", max_context_len)
    _check_logits_dtype(where, logits_dtype)
    if context_lens.dim() == 1:
        starts = torch.arange(0, rows + 1, next_n, dtype=torch.int32, device=device)
        lengths, table = context_lens, block_table
    else:  # any length for each token: each one is a request of its own
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lengths = context_lens.reshape(-1).contiguous()  # of one column of a wider tensor, reshape makes a strided view
        table = block_table if next_n == 1 else block_table.repeat_interleave(next_n, dim=0)
    out = score_rows(rows, max_context_len, device)
    promised = "uniform_query_len", "whole_tables"
    score = unchecked(INDEXER_LOGITS, queries, *promised, num_heads=heads, rows=rounded_rows(rows), **facts)
    score(queries.reshape(rows, heads, width), weights, pages, starts, lengths, table, out=out)
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


def _queries(where: str, q: Any, axes: str) -> Tensor:
    """The queries of a pair of them and None, of the dimensions in `axes`."""
    values, scales = pair(where, "q", q, f"({axes} float8_e4m3fn, None)")
    if scales is not None:
        remedy = "Multiply the scales of FP8 queries into weights; leave the indexer's cache in FP8."
        refuse(where, "q", "queries with scales of their own (FP4 or MX)", "(float8_e4m3fn, None)", remedy)
    shape = shape_of(where, "q[0]", values, axes.count(",") + 1, axes)
    check_tensor(where, "q[0]", values, _E4M3, (*shape[:-1], INDEX_HEAD_SIZE), values.device, axes)
    if 0 in shape[1:]:
        refuse(where, "q[0]", f"shape {list(shape)}", f"{axes} with at least one token and one head for each row")
    return values


def _ragged(queries: Tensor) -> IndexerLogitsRagged:
    """indexer_logits_ragged for [M, H, 128] e4m3 queries, whose arguments are checked."""
    num_tokens, num_heads, _ = queries.shape
    rows = rounded_rows(num_tokens)
    return unchecked(INDEXER_LOGITS_RAGGED, queries, kv_layout=INDEX_FP8.name, num_heads=num_heads, rows=rows)


def _pages(where: str, kv_cache: Any, device: torch.device) -> tuple[Tensor, dict[str, object]]:
    """[blocks, block_kv, 132] of a cache with an axis for the one head, or without; and what a Request says of it."""
    axes = f"[blocks, block_kv, 1, {INDEX_FP8.row_width}] uint8"
    check_dense(where, "kv_cache", kv_cache, axes)
    pages = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    if pages.dim() != 3 or pages.shape[2] != INDEX_FP8.row_width:
        refuse(where, "kv_cache", f"shape {list(kv_cache.shape)}", axes)
    if pages.dtype is not torch.uint8:
        refuse(where, "kv_cache", pages.dtype, axes)
    return pages, check_cache(where, "kv_cache", pages, device, INDEX, kv_layout=INDEX_FP8.name)._asdict()


def _check_logits_dtype(where: str, logits_dtype: Any) -> None:
    if logits_dtype not in _LOGITS_DTYPES:
        got = logits_dtype if isinstance(logits_dtype, torch.dtype) else describe(logits_dtype)
        refuse(where, "logits_dtype", got, " or ".join(map(str, _LOGITS_DTYPES)))
