# SPDX-License-Identifier: Apache-2.0
"""Strict stand-ins for Iluvatar's ops: they refuse whatever the real ones are not known to take, and compute with torch.

Argument names and order, dtypes, shapes and contiguity as docs/iluvatar.md cites them. What is open is decided against the
caller: an absent index before a valid one, an index past the cache or a row of nothing is refused, and unread memory is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def need(op: str, name: str, tensor: object, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise RuntimeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")
    if tensor.dim() != len(shape) or any(w is not None and w != g for w, g in zip(shape, tensor.shape, strict=True)):
        raise RuntimeError(f"{op}: {name} must be {list(shape)}, got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise RuntimeError(f"{op}: {name} must be contiguous, got strides {list(tensor.stride())}")


def attend(op: str, out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, lens: Tensor | None, scale: float):
    """Write out [T, H, V]. Indices [T, K] come first in their rows, then -1."""
    if not isinstance(scale, float):
        raise TypeError(f"{op}: scale must be a float")
    value_width = out.shape[-1]
    if lens is None:
        lens = (indices >= 0).sum(1)
    if bool((lens < 1).any()) or bool((lens > indices.shape[1]).any()):
        raise RuntimeError(f"{op}: a row of nothing, or longer than K")
    used = torch.arange(indices.shape[1]) < lens[:, None]
    picked = indices[used]
    if bool((picked < 0).any()):
        raise RuntimeError(f"{op}: an absent index before the end of a row")
    if bool((picked >= rows.shape[0]).any()):
        raise RuntimeError(f"{op}: an index past the cache")
    keys = rows[torch.where(used, indices, 0).long()].float().masked_fill(~used.unsqueeze(-1), 0)  # [T, K, D]
    scores = torch.bmm(q.float(), keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(~used.unsqueeze(1), float("-inf"))
    out.copy_(torch.bmm(scores.softmax(-1), keys[..., :value_width]))


def need_sparse(op: str, out: Tensor, q: Tensor, kv: Tensor, indices: Tensor) -> None:
    tokens, heads = q.shape[0], q.shape[1]
    need(op, "q", q, torch.bfloat16, (None, None, 576))
    need(op, "kv", kv, torch.bfloat16, (None, 1, 576))
    need(op, "indices", indices, torch.int32, (tokens, 1, None))
    need(op, "out", out, torch.bfloat16, (tokens, heads, 512))
    if indices.shape[2] % 64:
        raise RuntimeError(f"{op}: K must be a multiple of 64")
    if tokens == 0:
        raise RuntimeError(f"{op}: no tokens")


def flash_mla_sparse_v2(out, q, kv, indices, topk_lens, scale, attn_sink=None):
    need_sparse("flash_mla_sparse_v2", out, q, kv, indices)
    need("flash_mla_sparse_v2", "topk_lens", topk_lens, torch.int32, (q.shape[0],))
    if attn_sink is not None:
        raise RuntimeError("flash_mla_sparse_v2: a sink is not modelled")
    attend("flash_mla_sparse_v2", out, q, kv[:, 0], indices[:, 0], topk_lens, scale)


def flash_mla_sparse_prefill(q, kv, topk, sm_scale):
    out = torch.empty((*q.shape[:2], 512), dtype=torch.bfloat16)
    need_sparse("flash_mla_sparse_prefill", out, q, kv, topk)
    attend("flash_mla_sparse_prefill", out, q, kv[:, 0], topk[:, 0], None, sm_scale)
    return out


def need_convert(op: str, req_id: Tensor, table: Tensor, positions: Tensor, block_size: int) -> None:
    need(op, "req_id", req_id, torch.int32, (positions.shape[0],))
    need(op, "block_table", table, torch.int32, (None, None))
    need(op, "token_indices", positions, torch.int32, (None, None))
    if not isinstance(block_size, int):
        raise TypeError(f"{op}: block_size must be an int")
    if bool((req_id < 0).any()) or bool((req_id >= table.shape[0]).any()):
        raise RuntimeError(f"{op}: a request past the table")


def to_slots(op: str, req_id: Tensor, table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """table[req, pos // size] * size + pos % size in 32 bits, as a kernel would; -1 stays -1; past the table is refused."""
    column = positions // block_size
    if bool((column >= table.shape[1]).any()):
        raise RuntimeError(f"{op}: a position past the table")
    block = table[req_id.long()].gather(1, column.clamp(min=0).long())
    slots = (block.long() * block_size + (positions % block_size).long()).to(torch.int32)
    return torch.where(positions >= 0, slots, -1)


def dsa_convert_req_index_to_global_index(req_id_per_token, block_table, topk_indices, block_size):
    need_convert("dsa_convert", req_id_per_token, block_table, topk_indices, block_size)
    return to_slots("dsa_convert", req_id_per_token, block_table, topk_indices, block_size)


def map_prefill_request_block_indices_to_global_blocks_perf(
    req_id,
    block_table,
    token_indices,
    block_size,
    has_prefill_workspace=False,
    prefill_workspace_request_ids=None,
    prefill_workspace_starts=None,
    return_valid_counts=False,
    out=None,
):
    op = "map_prefill"
    need_convert(op, req_id, block_table, token_indices, block_size)
    rows = token_indices
    to_workspace = torch.zeros(len(req_id), 1, dtype=torch.bool)
    if has_prefill_workspace:
        need(op, "prefill_workspace_request_ids", prefill_workspace_request_ids, torch.int32, (len(req_id),))
        need(op, "prefill_workspace_starts", prefill_workspace_starts, torch.int32, (None,))
        ids = prefill_workspace_request_ids
        if bool((ids >= prefill_workspace_starts.shape[0]).any()):
            raise RuntimeError(f"{op}: a prefill request past the starts")
        to_workspace = (ids >= 0)[:, None]
        starts = prefill_workspace_starts[ids.clamp(min=0).long()].long()
        rows = torch.where(token_indices >= 0, starts[:, None] + token_indices, -1).to(torch.int32)  # wraps past int32
    slots = to_slots(op, req_id, block_table, torch.where(to_workspace, -1, token_indices), block_size)
    indices = torch.where(to_workspace, rows, slots)
    return indices, ((indices >= 0).sum(1, dtype=torch.int32) if return_valid_counts else None)


def concat_and_cache_mla(kv, kpe, cache, slots, kv_cache_dtype, scale):
    """Of vllm_iluvatar: the scale is one float32."""
    need("concat_and_cache_mla", "scale", scale, torch.float32, (1,))
    vllm_concat_and_cache_mla(kv, kpe, cache, slots, kv_cache_dtype, scale)


def vllm_concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    op = "vllm_concat_and_cache_mla"
    need(op, "kv_c", kv_c, torch.bfloat16, (None, 512))
    need(op, "k_pe", k_pe, torch.bfloat16, (kv_c.shape[0], 64))
    need(op, "kv_cache", kv_cache, torch.bfloat16, (None, None, 576))
    need(op, "slot_mapping", slot_mapping, torch.int64, (kv_c.shape[0],))
    if kv_cache_dtype != "auto" or not isinstance(scale, Tensor):
        raise RuntimeError(f"{op}: kv_cache_dtype must be 'auto', scale a tensor")
    if bool((slot_mapping >= kv_cache.shape[0] * kv_cache.shape[1]).any()) or bool((slot_mapping < -1).any()):
        raise RuntimeError(f"{op}: a slot that is neither -1 nor in the cache")
    written = slot_mapping >= 0
    kv_cache.view(-1, 576)[slot_mapping[written]] = torch.cat([kv_c, k_pe], -1)[written]


def mqa_logits(op: str, q, cu_seqlens_q, cu_seqlens_kv, kv_cache, block_table, weights, logits, lens, *, relu=True) -> None:
    """Fill what each token sees of logits [T, max_context_len]; the rest stays as it is. Lengths are Python integers."""
    tokens, heads, _ = q.shape
    requests = block_table.shape[0]
    max_q_len, max_kv_len, max_context_len = lens
    need(op, "q", q, torch.bfloat16, (None, 64, 128))
    need(op, "cu_seqlens_q", cu_seqlens_q, torch.int32, (requests + 1,))
    need(op, "cu_seqlens_kv", cu_seqlens_kv, torch.int32, (requests + 1,))
    need(op, "kv_cache", kv_cache, torch.bfloat16, (None, None, 128))
    need(op, "block_table", block_table, torch.int32, (requests, None))
    need(op, "weights", weights, torch.bfloat16, (tokens, heads))
    need(op, "logits", logits, torch.float32, (tokens, max_context_len))
    if not all(isinstance(length, int) and length > 0 for length in lens):
        raise TypeError(f"{op}: lengths must be positive integers")
    ends_q, ends_kv = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
    if ends_q[0] or ends_kv[0] or ends_q[-1] != tokens:
        raise RuntimeError(f"{op}: running sums that do not begin at 0 or end elsewhere than the tokens")
    size = kv_cache.shape[1]
    for request in range(requests):
        first, last = ends_q[request], ends_q[request + 1]
        length = ends_kv[request + 1] - ends_kv[request]
        if length < max(1, last - first) or length > max_kv_len or last - first > max_q_len:
            raise RuntimeError(f"{op}: a request of {last - first} tokens and length {length}")
        position = torch.arange(length)
        blocks = block_table[request, position // size].long()
        if bool((blocks < 0).any()) or bool((blocks >= kv_cache.shape[0]).any()):
            raise RuntimeError(f"{op}: a block past the cache")
        keys = kv_cache[blocks, position % size].float()
        scores = q[first:last].float() @ keys.T  # [n, H, length]
        values = torch.einsum("th,thl->tl", weights[first:last].float(), scores.relu() if relu else scores)
        sees = position <= length - (last - first) + torch.arange(last - first)[:, None]
        logits[first:last, :length] = torch.where(sees, values, logits[first:last, :length])


def compute_block_sparse_mqa_logits_perf(q, cu_q, cu_kv, cache, block_table, weights, logits_out, max_q, max_kv, max_ctx):
    op = "compute_block_sparse_mqa_logits"
    if cache.shape[1] not in (16, 32, 64):
        raise RuntimeError(f"{op}: no kernel for blocks of {cache.shape[1]}")
    mqa_logits(op, q, cu_q, cu_kv, cache, block_table, weights, logits_out, (max_q, max_kv, max_ctx))


def ref_dsa_indexer_mqa_logits_with_blocks(*arguments):
    mqa_logits("dsa_indexer_mqa_logits_with_blocks", *arguments)


def dsa_indexer_mqa_logits_with_blocks(
    q,
    cu_seqlens_q,
    cu_seqlens_kv,
    kv_cache,
    block_table,
    weights,
    logits=None,
    max_q_len=None,
    max_kv_len=None,
    max_context_len=None,
):
    if logits is None:
        logits = torch.full((q.shape[0], max_context_len), float("nan"))
    lens = (max_q_len, max_kv_len, max_context_len)
    run = ref_dsa_indexer_mqa_logits_with_blocks
    if kv_cache.shape[1] in (16, 32, 64):
        run = lambda *arguments: mqa_logits("dsa_indexer_mqa_logits_with_blocks", *arguments)  # noqa: E731
    run(q, cu_seqlens_q, cu_seqlens_kv, kv_cache, block_table, weights, logits, lens)
    return logits


def topk_indices(logits, cu_seqlen_ks, cu_seqlen_ke, topk, topk_indices_buffer, *, relative: bool = True) -> None:
    """Whole rows of the buffer, the largest score first, then -1. relative: to a row's start, or columns."""
    op = "dsa_update_topk_indices"
    rows, width = logits.shape
    need(op, "logits", logits, torch.float32, (None, None))
    need(op, "cu_seqlen_ks", cu_seqlen_ks, torch.int32, (rows,))
    need(op, "cu_seqlen_ke", cu_seqlen_ke, torch.int32, (rows,))
    need(op, "topk_indices_buffer", topk_indices_buffer, torch.int32, (rows, topk))
    if not isinstance(topk, int) or topk > 2048:
        raise RuntimeError(f"{op}: topk must be an int of at most 2048")
    if bool(logits.isnan().any()):
        raise RuntimeError(f"{op}: a score of NaN")
    for row, (start, end) in enumerate(zip(cu_seqlen_ks.tolist(), cu_seqlen_ke.tolist(), strict=True)):
        if not 0 <= start < end <= width:
            raise RuntimeError(f"{op}: columns {start} to {end} of {width}")
        best = logits[row, start:end].sort(descending=True, stable=True).indices[:topk]
        topk_indices_buffer[row] = -1
        topk_indices_buffer[row, : len(best)] = best + (0 if relative else start)


def dsa_update_topk_indices(logits, cu_seqlen_ks, cu_seqlen_ke, topk, topk_indices_buffer):
    topk_indices(logits, cu_seqlen_ks, cu_seqlen_ke, topk, topk_indices_buffer)
