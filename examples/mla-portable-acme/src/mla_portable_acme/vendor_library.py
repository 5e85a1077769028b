# SPDX-License-Identifier: Apache-2.0
"""Stands for the vendor's compiled library: strict about its arguments, with conventions of its own.

A real plugin has no such file: it imports the package that the vendor ships.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sparse_mla_fwd(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """q [T, 64, 576] bf16, kv [W, 1, 576] bf16, indices [T, 1, K] int32 with -1 for absent; out bf16, lse base 2."""
    if q.dtype != torch.bfloat16 or q.shape[1:] != (64, 576) or not q.is_contiguous():
        raise RuntimeError("acme: q must be contiguous bf16 [T, 64, 576]")
    if kv.dim() != 3 or kv.shape[1:] != (1, 576) or indices.dtype != torch.int32 or indices.shape[1] != 1:
        raise RuntimeError("acme: kv must be [W, 1, 576], indices int32 [T, 1, K]")
    if indices.shape[2] % 64:
        raise RuntimeError("acme: K must be a multiple of 64")
    chosen = indices[:, 0].long()  # [T, K]
    valid = chosen >= 0
    if bool((chosen >= kv.shape[0]).any()):
        raise RuntimeError("acme: index out of range")
    rows = kv[:, 0][chosen.clamp(min=0)].float().masked_fill(~valid.unsqueeze(-1), 0)  # [T, K, 576]
    scores = torch.einsum("thd,tkd->thk", q.float(), rows) * (sm_scale / math.log(2))
    scores = scores.masked_fill(~valid.unsqueeze(1), -math.inf)
    top = scores.amax(dim=-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp2(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.einsum("thk,tkd->thd", weights, rows[..., :512]) / total
    lse = torch.where(total > 0, top + torch.log2(total), math.inf).squeeze(-1)
    return out.to(torch.bfloat16), lse


def paged_mla_decode(q: Tensor, cache: Tensor, slots: Tensor, lengths: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """q [T, 64, 576] bf16, cache [blocks, 64, 576] bf16, slots [T, K] int32, lengths [T] int32, 1 to K; out bf16, lse natural.

    Reads all K slots, and gives those past a row's length a weight of 0: what they name must be finite, since 0 x NaN is NaN.
    """
    if q.dtype != torch.bfloat16 or q.shape[1:] != (64, 576) or not q.is_contiguous():
        raise RuntimeError("acme: q must be contiguous bf16 [T, 64, 576]")
    if cache.dim() != 3 or cache.shape[1:] != (64, 576) or slots.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise RuntimeError("acme: cache must be [blocks, 64, 576], slots and lengths int32")
    if slots.shape[1] % 64 or bool((lengths < 1).any()):
        raise RuntimeError("acme: K must be a multiple of 64, lengths at least 1")
    if bool(((slots < 0) | (slots >= cache.shape[0] * 64)).any()):
        raise RuntimeError("acme: slot out of range")
    rows = cache[slots.long() // 64, slots.long() % 64].float()  # [T, K, 576]
    scores = torch.einsum("thd,tkd->thk", q.float(), rows) * sm_scale
    beyond = torch.arange(slots.shape[1], device=q.device) >= lengths.unsqueeze(1)  # [T, K]
    scores = scores.masked_fill(beyond.unsqueeze(1), -math.inf)
    weights = torch.softmax(scores, dim=-1)
    out = torch.einsum("thk,tkd->thd", weights, rows[..., :512])
    return out.to(torch.bfloat16), torch.logsumexp(scores, dim=-1)
