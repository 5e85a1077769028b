# SPDX-License-Identifier: Apache-2.0
"""Misbehaving ops: each is right but for one thing that vendor libraries are known to get wrong."""

from __future__ import annotations

import math

import corex_ops as ops
import torch


def ignores_lens(out, q, kv, indices, topk_lens, scale, attn_sink=None):
    """Reads -1 as slot 0, whatever the length says."""
    full = torch.full_like(topk_lens, indices.shape[2])
    ops.attend("faulty", out, q, kv[:, 0].nan_to_num(), indices[:, 0].clamp(min=0), full, scale)


def reads_past_the_row(out, q, kv, indices, topk_lens, scale, attn_sink=None):
    """Takes one index too many: -1 reaches back to the cache's last row."""
    lens = (topk_lens + 1).clamp(max=indices.shape[2])
    rows = kv[:, 0]
    ops.attend("faulty", out, q, rows, indices[:, 0].remainder(rows.shape[0]), lens, scale)


def writes_half(out, q, kv, indices, topk_lens, scale, attn_sink=None):
    half = -(-q.shape[0] // 2)
    whole = torch.empty_like(out)
    ops.flash_mla_sparse_v2(whole, q, kv, indices, topk_lens, scale)
    out[:half] = whole[:half]


def raises(out, q, kv, indices, topk_lens, scale, attn_sink=None):
    raise RuntimeError("ixErrorNotSupported: no kernel for this shape")


def forgets_the_scale(out, q, kv, indices, topk_lens, scale, attn_sink=None):
    ops.flash_mla_sparse_v2(out, q, kv, indices, topk_lens, 1.0)


def wants_64_heads(out, q, kv, indices, topk_lens, scale, attn_sink=None):
    if q.shape[1] % 64:
        raise RuntimeError("num_heads must be a multiple of 64")
    ops.flash_mla_sparse_v2(out, q, kv, indices, topk_lens, scale)


def ref_flash_mla_sparse_v2(out, q, kv, indices, topk_lens, scale):
    ops.flash_mla_sparse_v2(out, q, kv, indices, topk_lens, scale)


def falls_to_a_twin(out, q, kv, indices, topk_lens, scale, attn_sink=None):
    """The vendor's own twin behind the op's name: right, and no slower here than the stand-in itself."""
    ref_flash_mla_sparse_v2(out, q, kv, indices, topk_lens, scale)


def convert_loses_the_offset(req_id, block_table, token_indices, block_size, **more):
    indices, counts = ops.map_prefill_request_block_indices_to_global_blocks_perf(
        req_id, block_table, token_indices, block_size, **more
    )
    return torch.where(indices >= 0, indices // block_size * block_size, -1), counts


def convert_gives_absent_a_slot(req_id, block_table, token_indices, block_size, **more):
    """A -1 becomes slot 127: the adapter knows which places were absent, so this one is harmless."""
    indices, counts = ops.map_prefill_request_block_indices_to_global_blocks_perf(
        req_id, block_table, token_indices, block_size, **more
    )
    return torch.where(token_indices >= 0, indices, 127), counts


def convert_forgets_the_workspace(req_id, block_table, token_indices, block_size, **more):
    columns = token_indices.div(block_size, rounding_mode="floor")
    inside = torch.where(columns < block_table.shape[1], token_indices, -1)
    return ops.map_prefill_request_block_indices_to_global_blocks_perf(req_id, block_table, inside, block_size)


def concat_writes_skipped(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    """Skips nothing: -1 is the last slot."""
    kv_cache.view(-1, 576)[slot_mapping] = torch.cat([kv_c, k_pe], -1)


def logits_without_relu(q, cu_q, cu_kv, cache, block_table, weights, logits_out, max_q, max_kv, max_ctx):
    lens = (max_q, max_kv, max_ctx)
    ops.mqa_logits("faulty", q, cu_q, cu_kv, cache, block_table, weights, logits_out, lens, relu=False)


def logits_in_a_twin(q, cu_q, cu_kv, cache, block_table, weights, logits_out, max_q, max_kv, max_ctx):
    """As for a block size without a kernel."""
    lens = (max_q, max_kv, max_ctx)
    ops.ref_dsa_indexer_mqa_logits_with_blocks(q, cu_q, cu_kv, cache, block_table, weights, logits_out, lens)


def logits_half_written(q, cu_q, cu_kv, cache, block_table, weights, logits_out, max_q, max_kv, max_ctx):
    whole = torch.empty_like(logits_out)
    ops.compute_block_sparse_mqa_logits_perf(q, cu_q, cu_kv, cache, block_table, weights, whole, max_q, max_kv, max_ctx)
    logits_out.fill_(math.nan)
    logits_out[:, : max_ctx // 4] = whole[:, : max_ctx // 4]


def topk_writes_columns(logits, ks, ke, topk, buffer):
    """Not positions relative to a row's start. Harmless: all rows start at column 0."""
    ops.topk_indices(logits, ks, ke, topk, buffer, relative=False)


def topk_leaves_the_rest(logits, ks, ke, topk, buffer):
    """Writes no -1 behind the positions that it finds, and counts -inf among them. Harmless: the buffer is -1 before."""
    whole = torch.empty_like(buffer)
    ops.topk_indices(logits, ks, ke, topk, whole)
    buffer.copy_(torch.where(whole >= 0, whole, buffer))


def topk_takes_the_later_of_equal_scores(logits, ks, ke, topk, buffer):
    width = logits.shape[1]
    ops.topk_indices(logits.flip(1).contiguous(), width - ke, torch.full_like(ke, width), topk, buffer)
    buffer.copy_(torch.where(buffer >= 0, ke.unsqueeze(1) - 1 - buffer, -1))


def topk_ignores_the_end(logits, ks, ke, topk, buffer):
    """Searches whole rows. Harmless: what is past the end is -inf."""
    ops.topk_indices(logits, ks, torch.full_like(ke, logits.shape[1]), topk, buffer)


def topk_is_one_short(logits, ks, ke, topk, buffer):
    ops.topk_indices(logits, ks, ke, topk, buffer)
    buffer[:, -1] = -1
