# SPDX-License-Identifier: Apache-2.0
"""Scores of candidate blocks of keys alone, of MXFP8 or MXFP4 numbers: the second level of DeepSeek-V4.1's indexer.

Metadata is made once a step, of lists of blocks, and serves each layer that scores them: [2, M, B] int32 as bytes, the first
slot of each block, -1 for none, and its keys that are seen.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts.values import INT32_MAX, describe, refuse, rounded_rows
from mla_portable.deep_gemm.arguments import integer, pair, score_rows
from mla_portable.dispatch import opaque, unchecked
from mla_portable.kit.rules import check_dense, check_tensor, shape_of
from mla_portable.primitives import INDEXER_LOGITS_BLOCKS
from mla_portable.primitives.indexer_logits_blocks import MX_WIDTHS

_SPARSE_BLOCKS: Final = (8, 16)
"""Keys of a candidate block."""
_MX_QUERIES: Final = "float8_e4m3fn, or int8 of two e2m1 numbers each"


def get_sparse_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    num_kv_tokens: int,
    sparse_kv_block_indices: Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
    use_unaligned_ks: bool = False,
) -> Tensor:
    """The `metadata` of `fp8_fp4_sparse_mqa_logits`: where the candidate blocks of each query token are among gathered keys.

    Args:
        cu_seq_len_k_start, cu_seq_len_k_end: [M] int32, the first key of each token and the one behind its last.
        num_kv_tokens: N. sparse_block_kv: S, keys of a block, 8 or 16.
        sparse_kv_block_indices: [M, B] int32, ascending; block i has the keys from i * S on, S of them. Only the first
            min(B, ceil(keys of the token / S)) count, and of these a block that is not above the one before it is padding.
        qk_dtype: of the queries and keys, float8_e4m3fn or int8 (two e2m1 numbers).
        use_unaligned_ks: block i has the keys from i * S + cu_seq_len_k_start % S on. Without it starts are multiples of S: a
            block that begins before its token's first key is not scored.
    Returns: [8 * M * B] uint8, for one call with these numbers of tokens and blocks, or for several with the same lists.
    Raises: InvalidArgument. Reads nothing back; graph-safe.
    """
    where = "get_sparse_mqa_logits_metadata"
    blocks = _candidates(where, sparse_kv_block_indices, qk_dtype, sparse_block_kv)
    num_tokens, device = sparse_kv_block_indices.shape[0], sparse_kv_block_indices.device
    for name, each in (("cu_seq_len_k_start", cu_seq_len_k_start), ("cu_seq_len_k_end", cu_seq_len_k_end)):
        check_tensor(where, name, each, torch.int32, (num_tokens,), device, "[M]")
    num_keys = integer(where, "num_kv_tokens", num_kv_tokens)
    begin = cu_seq_len_k_start.to(torch.int64).clamp(0, num_keys).unsqueeze(1)  # [M, 1]
    end = cu_seq_len_k_end.to(torch.int64).clamp(max=num_keys).unsqueeze(1)
    slots = blocks * sparse_block_kv  # [M, B]
    if use_unaligned_ks:
        slots = slots + begin % sparse_block_kv
    lengths = _seen(blocks, end - begin, sparse_block_kv).where(slots >= begin, 0)
    return _metadata(slots, lengths.minimum(end - slots))


def get_paged_sparse_mqa_logits_metadata(
    context_lens: Tensor,
    block_table: Tensor,
    indices: Tensor,
    page_kv: int,
    sparse_kv_block_indices: Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
) -> Tensor:
    """The `metadata` of `fp8_fp4_paged_sparse_mqa_logits`: where the candidate blocks of each query token are in the cache.

    Args:
        context_lens: int32, [M] or of M elements, the keys that each query token sees. block_table: [M, columns] int32, a row
            for each token. indices: [M] int32, the request of each token; it changes nothing.
        page_kv: keys of a page, a multiple of sparse_block_kv: S, 8 or 16.
        sparse_kv_block_indices: [M, B] int32, ascending; block i has positions i * S and the next S - 1. What counts:
            see `get_sparse_mqa_logits_metadata`. qk_dtype: as there.
    Returns: [8 * M * B] uint8, as there.
    Raises: InvalidArgument. Reads nothing back; graph-safe.
    """
    where = "get_paged_sparse_mqa_logits_metadata"
    blocks = _candidates(where, sparse_kv_block_indices, qk_dtype, sparse_block_kv)
    num_tokens, device = sparse_kv_block_indices.shape[0], sparse_kv_block_indices.device
    check_dense(where, "context_lens", context_lens, "[M]")
    if context_lens.numel() != num_tokens:
        refuse(where, "context_lens", f"shape {list(context_lens.shape)}", f"M = {num_tokens} elements")
    check_tensor(where, "context_lens", context_lens, torch.int32, context_lens.shape, device, "[M]")
    columns = shape_of(where, "block_table", block_table, 2, "[M, columns]")[1]
    check_tensor(where, "block_table", block_table, torch.int32, (num_tokens, columns), device, "[M, columns]")
    check_tensor(where, "indices", indices, torch.int32, (num_tokens,), device, "[M]")
    page_kv = integer(where, "page_kv", page_kv, least=1)
    if page_kv % sparse_block_kv:
        refuse(where, "page_kv", page_kv, f"a multiple of sparse_block_kv = {sparse_block_kv}")
    seen = context_lens.reshape(-1, 1).to(torch.int64)  # [M, 1]
    positions = blocks * sparse_block_kv  # [M, B]
    column = positions // page_kv
    pages = torch.nn.functional.pad(block_table, (0, 1), value=-1)  # what no column has is absent
    pages = pages.gather(1, column.clamp(0, columns)).to(torch.int64)
    slots = (pages * page_kv + positions % page_kv).where(pages >= 0, -1)
    return _metadata(slots, _seen(blocks, seen, sparse_block_kv).minimum(seen - positions))


@opaque
def fp8_fp4_sparse_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    metadata: Tensor,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
    use_unaligned_ks: bool = False,
) -> Tensor:
    """Scores of gathered keys, of the candidate blocks of each query token alone.

    Args:
        q: [M, H, 128] float8_e4m3fn or [M, H, 64] int8 (two e2m1 numbers each, the first in the lower half), and their scales
            [M, H] int32: four e8m0 each, of 32 numbers, the first in the lowest byte.
        kv: [N, 128] or [N, 64] of the same dtype, and their scales [N] int32. weights: [M, H] bf16.
        metadata: of `get_sparse_mqa_logits_metadata`, which knows use_unaligned_ks; here it changes nothing.
        num_max_sparse_blocks: B. sparse_block_kv: S, keys of a block, 8 or 16.
    Returns: [M, B * S] bf16; column b * S + o is key o of the token's block b, -inf for what is padding or not seen.
    Raises: InvalidArgument, UnsupportedRequest. Graph-safe.
    """
    where = "fp8_fp4_sparse_mqa_logits"
    queries, scales = _mx_queries(where, q, "[M, H, width]")
    keys, key_scales = pair(where, "kv", kv, "([N, width], [N] int32)")
    width = queries.shape[-1]
    num_keys = shape_of(where, "kv[0]", keys, 2, f"[N, {width}]")[0]
    check_tensor(where, "kv[0]", keys, queries.dtype, (num_keys, width), queries.device, f"[N, {width}]")
    check_tensor(where, "kv[1]", key_scales, torch.int32, (num_keys,), queries.device, "[N]")
    pages = keys.unsqueeze(0), key_scales.unsqueeze(0)
    return _sparse_scores(where, queries, scales, weights, pages, metadata, num_max_sparse_blocks, sparse_block_kv)


@opaque
def fp8_fp4_paged_sparse_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    metadata: Tensor,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
) -> Tensor:
    """Scores of cached keys, of the candidate blocks of each query token alone.

    Args:
        q: [M, 1, H, width] and scales [M, 1, H] int32, else as in `fp8_fp4_sparse_mqa_logits`. weights: [M, H] bf16.
        kv_cache: [pages, page_kv, 1, width + 4] uint8: each page has the numbers of its keys, then the scales of each, four
            bytes. Pages may lie apart, by multiples of 4 bytes.
        metadata: of `get_paged_sparse_mqa_logits_metadata`. num_max_sparse_blocks: B. sparse_block_kv: S, 8 or 16.
    Returns: [M, B * S] bf16, likewise.
    Raises: InvalidArgument, UnsupportedRequest. Graph-safe.
    """
    where = "fp8_fp4_paged_sparse_mqa_logits"
    queries, scales = _mx_queries(where, q, "[M, 1, H, width]")
    width = queries.shape[-1]
    if queries.shape[1] != 1:
        refuse(where, "q[0]", f"shape {list(queries.shape)}", "[M, 1, H, width]: a row for each query token")
    pages = _mx_pages(where, kv_cache, width, queries.dtype, queries.device)
    arguments = queries.squeeze(1), scales.squeeze(1), weights, pages, metadata
    return _sparse_scores(where, *arguments, num_max_sparse_blocks, sparse_block_kv)


def _candidates(where: str, indices: Tensor, qk_dtype: Any, sparse_block_kv: Any) -> Tensor:
    """[M, B] int64 of the lists of candidate blocks, with -1 for padding."""
    shape = shape_of(where, "sparse_kv_block_indices", indices, 2, "[M, B]")
    check_tensor(where, "sparse_kv_block_indices", indices, torch.int32, shape, indices.device, "[M, B]")
    if qk_dtype not in MX_WIDTHS:
        got = qk_dtype if isinstance(qk_dtype, torch.dtype) else describe(qk_dtype)
        refuse(where, "qk_dtype", got, " or ".join(map(str, MX_WIDTHS)))
    _check_block(where, sparse_block_kv)
    blocks = indices.to(torch.int64)
    before = torch.nn.functional.pad(blocks[:, :-1], (1, 0), value=-1)
    return blocks.where(blocks > before, -1)


def _check_block(where: str, sparse_block_kv: Any) -> None:
    if sparse_block_kv not in _SPARSE_BLOCKS or isinstance(sparse_block_kv, bool):
        refuse(where, "sparse_block_kv", describe(sparse_block_kv), " or ".join(map(str, _SPARSE_BLOCKS)))


def _seen(blocks: Tensor, keys: Tensor, size: int) -> Tensor:
    """[M, B] int64: `size` for the blocks that count, 0 for the others. keys: [M, 1], of each token."""
    place = torch.arange(blocks.shape[1], dtype=torch.int64, device=blocks.device)
    return torch.full_like(blocks, size).where((blocks >= 0) & (place * size < keys), 0)


def _metadata(slots: Tensor, lengths: Tensor) -> Tensor:
    """Bytes of [2, M, B] int32: the first slot of each block, -1 where it has none, and its keys that are seen."""
    there = (slots >= 0) & (slots <= INT32_MAX) & (lengths > 0)
    return torch.stack([slots.where(there, -1), lengths.where(there, 0)]).to(torch.int32).flatten().view(torch.uint8)


def _mx_queries(where: str, q: Any, axes: str) -> tuple[Tensor, Tensor]:
    """The queries of a pair of them and their scales, of the dimensions in `axes`."""
    values, scales = pair(where, "q", q, f"({axes} {_MX_QUERIES}, {axes.replace(', width', '')} int32)")
    if scales is None:
        refuse(where, "q", "queries without scales", "a pair with scales, four e8m0 in an int32 for each head")
    shape = shape_of(where, "q[0]", values, axes.count(",") + 1, axes)
    width = MX_WIDTHS.get(values.dtype)
    if width is None:
        refuse(where, "q[0]", values.dtype, _MX_QUERIES)
    check_tensor(where, "q[0]", values, values.dtype, (*shape[:-1], width), values.device, axes.replace("width", str(width)))
    if 0 in shape[1:]:
        refuse(where, "q[0]", f"shape {list(shape)}", f"{axes} with at least one head")
    check_tensor(where, "q[1]", scales, torch.int32, tuple(shape[:-1]), values.device, axes.replace(", width", ""))
    return values, scales


def _mx_pages(where: str, kv_cache: Any, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """[pages, page_kv, width] of `dtype` and [pages, page_kv] int32, views of a cache [pages, page_kv, 1, width + 4] uint8."""
    axes = f"[pages, page_kv, 1, {width + 4}] uint8"
    pages, size, *_ = shape = shape_of(where, "kv_cache", kv_cache, 4, axes)
    check_tensor(where, "kv_cache", kv_cache, torch.uint8, (pages, size, 1, width + 4), device, axes)
    stride = kv_cache.stride(0) if pages > 1 else size * (width + 4)
    if size > 1 and kv_cache.stride(1) != width + 4:
        refuse(where, "kv_cache", f"strides {list(kv_cache.stride())}", f"{axes} with whole pages")
    if stride % 4 or kv_cache.storage_offset() % 4 or stride < size * (width + 4):
        got = f"pages {stride} bytes apart from byte {kv_cache.storage_offset()}"
        refuse(where, "kv_cache", got, f"multiples of 4 bytes, at least {shape[1] * (width + 4)} apart")
    flat = kv_cache.as_strided((pages, size * (width + 4)), (stride, 1))
    numbers, scales = flat.split([size * width, size * 4], dim=1)
    return numbers.unflatten(1, (size, width)).view(dtype), scales.view(torch.int32)


def _sparse_scores(
    where: str,
    queries: Tensor,
    scales: Tensor,
    weights: Tensor,
    pages: tuple[Tensor, Tensor],
    metadata: Any,
    num_max_sparse_blocks: Any,
    sparse_block_kv: Any,
) -> Tensor:
    """[M, B * S] bf16, with rows that are whole multiples of 1024 bytes apart."""
    num_tokens, num_heads, _ = queries.shape
    device = queries.device
    check_tensor(where, "weights", weights, torch.bfloat16, (num_tokens, num_heads), device, "[M, H]")
    _check_block(where, sparse_block_kv)
    num_blocks = integer(where, "num_max_sparse_blocks", num_max_sparse_blocks, least=1)
    size = 8 * num_tokens * num_blocks
    if not isinstance(metadata, Tensor) or metadata.dtype is not torch.uint8 or metadata.shape != (size,):
        got = f"{metadata.dtype} {list(metadata.shape)}" if isinstance(metadata, Tensor) else describe(metadata)
        wanted = f"[{size}] uint8, made for M = {num_tokens} tokens and B = {num_blocks} blocks"
        refuse(where, "metadata", got, wanted, "Metadata is made for one number of tokens and blocks: make it again.")
    check_tensor(where, "metadata", metadata, torch.uint8, (size,), device, "[bytes]")
    if metadata.data_ptr() % 4:
        refuse(where, "metadata", "an address that is no multiple of 4", "a tensor of get_(paged_)sparse_mqa_logits_metadata")
    starts, lengths = metadata.view(torch.int32).view(2, num_tokens, num_blocks)
    out = score_rows(num_tokens, num_blocks * sparse_block_kv, device, torch.bfloat16)
    call = unchecked(INDEXER_LOGITS_BLOCKS, queries, num_heads=num_heads, rows=rounded_rows(num_tokens))
    return call(queries, scales, weights, *pages, starts, lengths, block_tokens=int(sparse_block_kv), out=out)
