# SPDX-License-Identifier: Apache-2.0
"""The oracle: what each primitive must compute, in float64 on the CPU, slowly and in the most obvious way.

It judges every backend, the reference among them, so it shares no code with any of them: e4m3 is decoded by the formula
of the format, rounding is a search for the nearest value, attention walks over one query row at a time. It reads the very
bytes that a kernel reads: what quantisation lost is not charged to the kernel.

The functions take the arguments of their primitive, wherever these live, and return new CPU tensors. Indices, counts and
bytes are exact; attention results are float64. Inputs are taken as well-formed.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

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

_INT32_MAX: Final = 2147483647


def _minifloat(code: int, *, mantissa_bits: int, bias: int) -> float:
    """The value of a sign-less small float: (1.m) * 2**(e - bias), or (0.m) * 2**(1 - bias) where e is 0."""
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


def _e4m3(byte: int) -> float:
    """One e4m3 (fn) byte: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, NaN when all seven are set."""
    if byte & 0x7F == 0x7F:
        return math.nan
    value = _minifloat(byte & 0x7F, mantissa_bits=3, bias=7)
    return -value if byte & 0x80 else value


_E4M3: Final = torch.tensor([_e4m3(byte) for byte in range(256)], dtype=torch.float64, device="cpu")
# finite values without sign, by code: what float8 formats can round to
_CODES: Final = {
    torch.float8_e4m3fn: [_minifloat(code, mantissa_bits=3, bias=7) for code in range(0x7F)],
    torch.float8_e5m2: [_minifloat(code, mantissa_bits=2, bias=15) for code in range(0x7C)],
}


def _nearest_code(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of the values of a float8 `dtype` nearest to x float64; a tie goes to the even code, the excess to the last."""
    codes = _CODES[dtype]
    midpoints = torch.tensor([(low + high) / 2 for low, high in pairwise(codes)], dtype=torch.float64, device="cpu")
    size = x.abs().contiguous()
    below = torch.searchsorted(midpoints, size, right=False)  # midpoints strictly below: ties stay at the lower code
    tie = (below < len(midpoints)) & (size == midpoints[below.clamp(max=len(midpoints) - 1)])
    code = torch.where(tie & (below % 2 == 1), below + 1, below)
    code = torch.where(size.isnan(), 0x7F, code)
    return torch.where(torch.signbit(x), code + 0x80, code).to(torch.uint8)


def _float32(x: Tensor) -> Tensor:
    """x rounded to float32 and back. Products and quotients of float32 numbers come out as float32 arithmetic has them."""
    return x.to(torch.float32).to(torch.float64)


def _scale(group: Tensor, scale_format: str) -> float:
    """The scale of 128 latent values."""
    amax = float(group.abs().max())
    if scale_format == "pow2":
        return 2.0 ** math.ceil(math.log2(max(amax / 448.0, 1e-4)))
    if scale_format == "amax":
        return float(_float32(torch.tensor(max(amax / 448.0, 2.0**-126), dtype=torch.float64, device="cpu")))
    raise ValueError(f"oracle: scale_format {scale_format!r}, expected 'pow2' or 'amax'")


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _fp8_row(latent: Tensor, rope: Tensor, scale_format: str) -> Tensor:
    """The 656 bytes of one token: latent [512] and rope [64] float64."""
    groups = latent.reshape(4, 128)
    scales = torch.tensor([_scale(group, scale_format) for group in groups], dtype=torch.float64, device="cpu")
    codes = _nearest_code(_float32(groups / scales[:, None]), torch.float8_e4m3fn)
    return torch.cat([codes.reshape(512), _bytes(scales.to(torch.float32)), _bytes(rope.to(torch.bfloat16))])


def _latent(rows: Tensor) -> Tensor:
    """The latent [n, 512] float64 of stored rows [n, 576] bf16 or [n, 656] uint8, products not rounded."""
    if rows.dtype == torch.bfloat16:
        return rows[:, :512].double()
    scales = rows[:, 512:528].contiguous().view(torch.float32).double()  # [n, 4]
    return _E4M3[rows[:, :512].long()] * scales.repeat_interleave(128, dim=1)


def _rope(rows: Tensor) -> Tensor:
    """The rotary part [n, 64] bfloat16 of stored rows, bit for bit."""
    return rows[:, 512:] if rows.dtype == torch.bfloat16 else rows[:, 528:].contiguous().view(torch.bfloat16)


def _named_rows(kv: Tensor, slots: Tensor) -> Tensor:
    """Stored rows of a workspace [W, width] or a paged cache [blocks, block_size, width]; slots [n] int64, all valid."""
    if kv.dim() == 2:
        return kv[slots]
    return kv[slots // kv.shape[1], slots % kv.shape[1]]


def cache_write(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2") -> Tensor:
    """The cache [blocks, block_size, width], contiguous, as it must be after the write; `kv_cache` is left alone."""
    latent, rope = kv_c.cpu().double(), k_pe.cpu().double()
    cache = kv_cache.detach().cpu().clone(memory_format=torch.contiguous_format)
    blocks, block_size, _ = cache.shape
    for token, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < blocks * block_size:
            continue
        if cache.dtype == torch.bfloat16:
            row = torch.cat([latent[token], rope[token]]).to(torch.bfloat16)
        else:
            row = _fp8_row(latent[token], rope[token], scale_format)
        cache[slot // block_size, slot % block_size] = row
    return cache


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
) -> tuple[Tensor, Tensor]:
    """indices [T, K] and counts [T], int32."""
    positions, table = topk_indices.cpu().long(), block_table.cpu().long()
    requests = req_id_per_token.tolist()
    prefills = [-1] * len(requests) if prefill_request_ids is None else prefill_request_ids.tolist()
    starts: list[int] = [] if prefill_workspace_starts is None else prefill_workspace_starts.tolist()
    indices = torch.full(positions.shape, -1, dtype=torch.int32, device="cpu")
    counts = torch.zeros(positions.shape[0], dtype=torch.int32, device="cpu")
    for token, (request, prefill) in enumerate(zip(requests, prefills, strict=True)):
        pos = positions[token]
        place = torch.nonzero(pos >= 0)[:, 0]  # columns of the row that may hold a valid entry
        if prefill >= 0:
            place = place if prefill < len(starts) else place[:0]
            found = pos[place] + (starts[prefill] if prefill < len(starts) else 0)
        else:
            place = place if 0 <= request < table.shape[0] else place[:0]
            place = place[pos[place] // block_size < table.shape[1]]
            block = table[request, pos[place] // block_size] if place.numel() else pos[place]
            place, block = place[block >= 0], block[block >= 0]
            found = block * block_size + pos[place] % block_size
            inside = found < num_slots if num_slots is not None else found >= 0
            place, found = place[inside], found[inside]
        fits = (found >= 0) & (found <= _INT32_MAX)
        place, found = place[fits], found[fits].to(torch.int32)
        counts[token] = found.numel()
        if compact:
            indices[token, : found.numel()] = found
        else:
            indices[token, place] = found
    return indices, counts


def gather_upconvert(
    kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor, *, out: Tensor
) -> Tensor:
    """The workspace [W, 576] bf16 as it must be afterwards; `out` gives the rows that no request owns, and is left alone."""
    cache, table = kv_cache.detach().cpu(), block_table.cpu().long()
    workspace = out.detach().cpu().clone(memory_format=torch.contiguous_format)
    num_blocks, block_size, _ = cache.shape
    for request, (length, start) in enumerate(zip(seq_lens.tolist(), workspace_starts.tolist(), strict=True)):
        for position in range(max(0, -start), min(length, workspace.shape[0] - start)):
            column = position // block_size
            block = int(table[request, column]) if column < table.shape[1] else -1
            if 0 <= block < num_blocks:
                row = cache[block, position % block_size][None]
                # the product is taken in float32, then rounded to bf16
                latent = _latent(row).to(torch.float32).to(torch.bfloat16)
                workspace[start + position] = torch.cat([latent, _rope(row)], dim=1)[0]
            else:
                workspace[start + position] = 0.0
    return workspace


def _attend_row(q: Tensor, rows: Tensor, softmax_scale: float, attn_sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """out [H, 512] and lse [H] of one query row q [H, 576] float64 over the stored rows [n, width] that it names."""
    if rows.shape[0] == 0:
        return q.new_zeros(q.shape[0], 512), q.new_full((q.shape[0],), -math.inf)
    latent = _latent(rows)  # [n, 512]
    keys = torch.cat([latent, _rope(rows).double()], dim=1)  # [n, 576]
    scores = softmax_scale * (q @ keys.T)  # [H, n]
    top = scores.max(dim=1, keepdim=True).values
    weights = torch.exp(scores - top)
    total = weights.sum(dim=1, keepdim=True)  # [H, 1]
    lse = (top + total.log())[:, 0]
    if attn_sink is not None:  # the sink is one more entry of the sum, with a value of zero
        total = total + torch.exp(attn_sink[:, None] - top)
    return (weights @ latent) / total, lse


def sparse_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, H, 512] and lse [T, H], float64; kv is a workspace or a paged cache."""
    queries, cache, index = q.detach().cpu().double(), kv.detach().cpu(), indices.cpu().long()
    sink = None if attn_sink is None else attn_sink.detach().cpu().double()
    limits = [index.shape[1]] * index.shape[0] if lengths is None else lengths.tolist()
    num_slots = cache.shape[0] if cache.dim() == 2 else cache.shape[0] * cache.shape[1]
    out = torch.empty((*queries.shape[:2], 512), dtype=torch.float64, device="cpu")
    lse = torch.empty(queries.shape[:2], dtype=torch.float64, device="cpu")
    for token, limit in enumerate(limits):
        named = index[token, : max(0, limit)]
        named = named[(named >= 0) & (named < num_slots)]
        out[token], lse[token] = _attend_row(queries[token], _named_rows(cache, named), softmax_scale, sink)
    return out, lse


def sparse_decode(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, S, H, 512] and lse [B, S, H], float64: each of the B x S query tokens stands alone."""
    out, lse = sparse_prefill(
        q.flatten(0, 1),
        kv_cache,
        indices.flatten(0, 1),
        softmax_scale=softmax_scale,
        lengths=None if lengths is None else lengths.flatten(),
        attn_sink=attn_sink,
    )
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """out [..., D] and lse [...], float64."""
    parts, part_lses = outs.detach().cpu().double(), lses.detach().cpu().double()
    total = torch.zeros(part_lses.shape[1:], dtype=torch.float64, device="cpu")
    out = torch.zeros(parts.shape[1:], dtype=torch.float64, device="cpu")
    top = part_lses.amax(dim=0) if part_lses.shape[0] else total
    for part, part_lse in zip(parts, part_lses, strict=True):
        counts = part_lse != -math.inf
        weight = torch.where(counts, torch.exp(part_lse - top), 0.0)
        total = total + weight
        out = out + torch.where(counts[..., None], weight[..., None] * part, 0.0)
    empty = total == 0
    lse = torch.where(empty, -math.inf, top + total.log())
    return torch.where(empty[..., None], 0.0, out / total[..., None]), lse


def quantize_per_tensor(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x_q of `dtype`, float8_e4m3fn or float8_e5m2, and its scale, 0-d float32."""
    values = x.detach().cpu().double()
    amax = float(values.abs().max()) if values.numel() else 0.0
    least = float(torch.tensor(1e-10, dtype=torch.float32, device="cpu"))
    scale = _float32(torch.tensor(max(amax, least) / _CODES[dtype][-1], dtype=torch.float64, device="cpu"))
    return _nearest_code(_float32(values / scale), dtype).view(dtype), scale.to(torch.float32)


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    out: Tensor,
) -> Tensor:
    """[T, N] float64; of `out` only the shape is looked at."""
    queries, factors = q.detach().cpu().double(), weights.detach().cpu().double()
    cache, table = index_cache.detach().cpu(), block_table.cpu()
    num_blocks, block_size, _ = cache.shape
    logits = torch.full(tuple(out.shape), -math.inf, dtype=torch.float64, device="cpu")
    starts = query_start_loc.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        last = min(max(length, 0), table.shape[1] * block_size) - 1  # position of the request's last token
        for token in range(max(starts[request], 0), min(starts[request + 1], logits.shape[0])):
            own = last - (starts[request + 1] - 1 - token)
            for column in range(-(-(own + 1) // block_size)):
                block = int(table[request, column])
                if not 0 <= block < num_blocks:
                    continue
                keys = cache[block].double()  # [block_size, 128]
                value = (factors[token][:, None] * (queries[token] @ keys.T).clamp(min=0)).sum(dim=0)
                begin = column * block_size
                end = min(begin + block_size, own + 1, logits.shape[1])
                if end > begin:
                    logits[token, begin:end] = value[: end - begin]
    return logits
