# SPDX-License-Identifier: Apache-2.0
"""AITER's operations on a CPU, as strict as its public source at e4048607: signatures, dtypes, shapes, strides, limits.

What the source leaves undefined is filled with numbers that betray their use.

Where the source leaves a choice, that which an adapter is least likely to survive is taken: rows behind the end of a list are
multiplied by 0, scratch holds NaN, the unstable top-k lists in a random order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ARCH = "gfx950"
"""Of the device that is played: `aiter_machine` sets it."""
KERNELS = {"gfx942": (8, 16, 32, 128), "gfx950": (8, 16, 32, 64, 128)}
"""bf16, not persistent, one query token: hsa/<arch>/mla/mla_asm.csv, as the dispatch in asm_mla.cu asks for them."""
FP8_KERNELS = (8, 16, 128)
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}
REACH = 1 << 31
_TILE = 16
_HEADS_WITHOUT_MERGE = (32, 64, 128)


def fp8() -> torch.dtype:
    """aiter.dtypes.fp8."""
    return torch.float8_e4m3fnuz if ARCH == "gfx942" else torch.float8_e4m3fn


def _int32(*tensors: Tensor) -> None:
    for each in tensors:
        assert each.dtype == torch.int32 and each.is_contiguous(), (each.dtype, each.stride())


def mla_decode_fwd(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    page_size=1,
    nhead_kv=1,
    sm_scale=None,
    logit_cap=0.0,
    num_kv_splits=None,
    num_kv_splits_indptr=None,
    work_meta_data=None,
    work_indptr=None,
    work_info_set=None,
    reduce_indptr=None,
    reduce_final_map=None,
    reduce_partial_map=None,
    q_scale=None,
    kv_scale=None,
    intra_batch_mode=False,
    return_logits=False,
    return_lse=False,
    g_kv_indptr=None,
    cp_world_size=1,
    cp_rank=0,
    causal=True,
):
    """Split-KV attention, one token of one request at a time; writes o, and returns its scratch and the lse."""
    assert logit_cap <= 0 and page_size == 1 and nhead_kv == 1 and max_seqlen_q == 1 and work_meta_data is None
    tokens, heads, width = q.shape
    codes = q.dtype == fp8()
    assert q.dtype == kv_buffer.dtype in (torch.bfloat16, fp8()) and o.dtype == torch.bfloat16
    assert q.is_contiguous() and o.is_contiguous()
    factor = 1.0
    for scale in (q_scale, kv_scale) if codes else ():
        assert scale.dtype == torch.float32 and scale.numel() == 1
        factor *= float(scale)
    assert kv_buffer.dim() == 4 and kv_buffer.shape[1:] == (1, 1, width) and kv_buffer.stride(3) == 1 and width == 576
    assert tuple(o.shape) == (tokens, heads, 512) and heads in (FP8_KERNELS if codes else KERNELS[ARCH]), (
        f"no kernel of {heads} heads on {ARCH}"
    )
    assert (
        kv_buffer.data_ptr() % 16 == 0 and kv_buffer.stride(0) * kv_buffer.element_size() % 16 == 0 and q.data_ptr() % 16 == 0
    )
    _int32(qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    assert torch.equal(qo_indptr, torch.arange(tokens + 1, dtype=torch.int32))
    assert kv_last_page_lens.shape == (tokens,) and bool((kv_last_page_lens == 1).all())
    assert kv_indptr.shape == (tokens + 1,) and kv_indptr[0] == 0 and bool((kv_indptr.diff() >= 0).all())
    assert kv_indptr[-1] <= kv_indices.shape[0]
    assert bool(((kv_indices >= 0) & (kv_indices < kv_buffer.shape[0])).all()), "the kernel reads any page that it is given"
    assert kv_buffer.shape[0] * kv_buffer.stride(0) <= REACH, "wraps around"
    splits = num_kv_splits
    if splits is None or num_kv_splits_indptr is None:
        splits = splits or max(1, min(16, COMPUTE_UNITS[ARCH] // tokens))
    else:
        assert torch.equal(num_kv_splits_indptr, torch.arange(0, (tokens + 1) * splits, splits, dtype=torch.int32))
    lse = torch.full((tokens, heads), math.nan)
    o.fill_(math.nan)
    for token in range(tokens):
        begin, end = int(kv_indptr[token]), int(kv_indptr[token + 1])
        if begin == end:
            continue
        last = min(begin + -(-(end - begin) // _TILE) * _TILE, kv_indices.shape[0])
        keys = kv_buffer[kv_indices[begin:last].long(), 0, 0].float()
        scores = q[token].float() @ keys.T * (sm_scale * factor)
        scores[:, end - begin :] = -math.inf
        weights = (scores - scores[:, : end - begin].amax(1, keepdim=True)).exp()
        weights[:, end - begin :] = 0  # of a tile that reaches beyond the end; 0 times NaN is NaN
        total = weights.sum(1, keepdim=True)
        weights = weights.to(q.dtype).float()  # as the values are
        o[token] = (weights @ keys[:, :512] / total * (float(kv_scale) if codes else 1.0)).bfloat16()
        lse[token] = scores[:, : end - begin].logsumexp(1)
    scratch = torch.full((tokens, splits, heads, 512), 777.0)
    if not return_lse:
        return scratch, None
    if splits == 1 and (codes or heads in _HEADS_WITHOUT_MERGE):
        lse.fill_(12345.0)  # torch.empty: the pass that writes it is left out
    return scratch, lse


def deepgemm_fp8_paged_mqa_logits(
    q_fp8,
    kv_cache,
    weights,
    out_logits,
    context_lens,
    kv_indices,
    max_model_len,
    Preshuffle=False,
    KVBlockSize=1,
    ChunkK=256,
    TotalCuCount=None,
    WavePerEU=2,
    VarCtxSchedule=None,
):
    """Scores of pages, into out_logits; what no token of a request sees is written up to the end of its block alone."""
    batch, next_n, heads, width = q_fp8.shape
    blocks, block_size, one, row = kv_cache.shape
    assert width == 128 and row == 132 and one == 1 and heads % 32 == 0 and kv_cache.dtype == torch.uint8
    assert q_fp8.dtype == fp8() and weights.dtype == torch.float32 and out_logits.dtype == torch.float32
    assert ChunkK % KVBlockSize == 0 or KVBlockSize % ChunkK == 0
    assert block_size == KVBlockSize and VarCtxSchedule is None
    assert KVBlockSize % 16 == 0 if Preshuffle else KVBlockSize == 1, "the other kernel knows pages of one key alone"
    assert q_fp8.stride(3) == 1 and weights.stride(1) == 1 and out_logits.stride(1) == 1
    assert weights.shape == (batch * next_n, heads) and out_logits.shape[0] == batch * next_n
    assert all(q_fp8.stride(axis) % 16 == 0 for axis in range(3)) and q_fp8.data_ptr() % 16 == 0
    _int32(context_lens, kv_indices)
    assert context_lens.shape == (batch,) and kv_indices.shape[0] == batch and out_logits.shape[1] >= max_model_len
    if not Preshuffle:
        assert (blocks - 1) * kv_cache.stride(0) < 2**31
    pages = kv_cache.view(-1, KVBlockSize * row)
    codes, scales = pages[:, : KVBlockSize * width].view(fp8()), pages[:, KVBlockSize * width :].view(torch.float32)
    for request in range(batch):
        length = int(context_lens[request])
        assert 0 <= length <= max_model_len and length <= kv_indices.shape[1] * KVBlockSize
        if length == 0:
            continue
        named = kv_indices[request, : -(-length // KVBlockSize)].long()
        assert bool(((named >= 0) & (named < blocks)).all()), "the kernel reads any page that it is given"
        keys = codes[named].float()
        if Preshuffle:
            keys = keys.view(-1, KVBlockSize // 16, width // 16, 16, 16).transpose(2, 3)
        keys, scale = keys.reshape(-1, width), scales[named].reshape(-1)
        for n in range(next_n):
            each = q_fp8[request, n].float() @ keys.T * scale
            each = torch.fmax(each, torch.zeros(())) * weights[request * next_n + n].unsqueeze(1)  # drops NaN
            found = each.sum(0)
            found[torch.arange(found.shape[0]) > length - next_n + n] = -math.inf
            out_logits[request * next_n + n, : found.shape[0]] = found


def fp8_mqa_logits(Q, KV, kv_scales, weights, cu_starts, cu_ends, clean_logits=True):
    """Scores of gathered keys, in new memory whose rows lie 256 numbers apart; uncleaned, what is out of range is anything."""
    tokens, heads, width = Q.shape
    assert heads & (heads - 1) == 0 and heads >= 16 and width == 128 and KV.shape[1] == width
    assert Q.dtype in (torch.float8_e4m3fn, fp8()) and KV.dtype == Q.dtype
    assert weights.shape == (tokens, heads) and weights.dtype == torch.float32 == kv_scales.dtype and kv_scales.is_contiguous()
    _int32(cu_starts, cu_ends)
    count = KV.shape[0]
    assert tokens and count and bool(((cu_starts >= 0) & (cu_starts <= count) & (cu_ends <= count)).all())
    factor = 1.0
    if fp8() == torch.float8_e4m3fnuz and Q.dtype != fp8():
        Q, KV, factor = (Q.float() * 0.5).to(fp8()), (KV.float() * 0.5).to(fp8()), 4.0
    width = -(-count // 256) * 256
    logits = torch.full((tokens, width), -math.inf if clean_logits else math.nan)[:, :count]
    each = torch.einsum("thd,nd->thn", Q.float(), KV.float()) * (kv_scales * factor)
    found = (torch.fmax(each, torch.zeros(())) * weights.unsqueeze(2)).sum(1)
    column = torch.arange(count)
    inside = (column >= cu_starts.unsqueeze(1)) & (column < cu_ends.unsqueeze(1))
    return torch.where(inside, found, logits)


def top_k_per_row_prefill(logits, rowStarts, rowEnds, indices, values, numRows, stride0, stride1, k=2048, stable=False):
    """Absolute columns of the k largest by bits, NaN above all; ascending and the lower of ties if stable, else anyhow."""
    assert logits.dtype == torch.float32 and stride1 == 1 == logits.stride(1) and stride0 == logits.stride(0) and values is None
    assert numRows == logits.shape[0] == rowStarts.shape[0] == rowEnds.shape[0]
    assert indices.dtype == torch.int32 and indices.is_contiguous() and tuple(indices.shape) == (numRows, k)
    _int32(rowStarts, rowEnds)
    assert bool(((rowStarts >= 0) & (rowEnds <= logits.shape[1])).all()), "the kernel reads whatever it is given"
    bits = logits.contiguous().view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # ascending with the number; +NaN above +inf, -0.0 below 0.0
    for row in range(numRows):
        start, end = int(rowStarts[row]), int(rowEnds[row])
        length = max(0, end - start)
        indices[row] = -1
        if length <= k:
            indices[row, :length] = torch.arange(start, start + length, dtype=torch.int32)
            continue
        some = torch.arange(length) if stable else torch.randperm(length)
        order = keys[row, start:end].long()[some].sort(descending=True, stable=True).indices
        chosen = some[order[:k]]
        indices[row] = ((chosen.sort().values if stable else chosen[torch.randperm(k)]) + start).to(torch.int32)


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    """Tokens side by side at their slots; negative ones are skipped, and those past the cache written where they point."""
    assert kv_c.dtype == k_pe.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert (kv_cache_dtype, kv_cache.dtype) in (("auto", kv_c.dtype), ("fp8", fp8()))
    assert scale.dtype == torch.float32 and scale.numel() == 1
    assert slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous()
    assert kv_cache.dim() == 3 and kv_cache.shape[2] == kv_c.shape[1] + k_pe.shape[1] and kv_cache.stride(2) == 1
    for each in (kv_c, k_pe):
        assert each.stride(1) == 1 and each.data_ptr() % 16 == 0 and each.stride(0) * each.element_size() % 16 == 0
    blocks, size, _ = kv_cache.shape
    assert bool((slot_mapping < blocks * size).all()), "writes past the cache"
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            row = torch.cat([kv_c[token], k_pe[token]])
            if kv_cache_dtype == "fp8":
                largest = torch.finfo(fp8()).max
                row = (row.float() * (1 / float(scale))).clamp(-largest, largest).to(fp8())
            kv_cache[slot // size, slot % size] = row


def indexer_k_quant_and_cache(k, kv_cache, slot_mapping, quant_block_size, scale_fmt, preshuffle=False):
    """Keys as codes of the device's e4m3 with a scale behind the block; blocks follow one another, whatever the strides say."""
    tokens, width = k.shape
    assert k.dtype in (torch.bfloat16, torch.float16) and k.is_contiguous() and k.data_ptr() % 16 == 0
    assert kv_cache.dtype == fp8() and quant_block_size == width == 128 and scale_fmt in ("ue8m0", "")
    blocks, size, row = kv_cache.shape
    assert row == width + 4 and kv_cache.is_contiguous(), "the kernel does not read the strides"
    assert slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous() and slot_mapping.shape == (tokens,)
    assert bool((slot_mapping < blocks * size).all()), "writes past the cache"
    assert not preshuffle or size % 16 == 0
    largest = torch.finfo(fp8()).max
    scale = k.float().abs().amax(1).clamp(min=1e-4) / largest
    if scale_fmt == "ue8m0":
        scale = scale.log2().ceil().exp2()
    codes = (k.float() * (1 / scale).unsqueeze(1)).clamp(-largest, largest).to(fp8()).view(torch.uint8)
    pages = kv_cache.view(torch.uint8).view(blocks, size * row)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, at = pages[slot // size], slot % size
        if preshuffle:
            place = page[at // 16 * 16 * width :][: 16 * width].view(width // 16, 16, 16)[:, at % 16]
            place.copy_(codes[token].view(width // 16, 16))
        else:
            page[at * width : (at + 1) * width] = codes[token]
        page[size * width + 4 * at :][:4] = scale[token : token + 1].view(torch.uint8)
