# SPDX-License-Identifier: Apache-2.0
"""Sparse attention that can be trained, in plain torch: what an indexer chooses, and attention over it with its gradient.

Scores of all pairs are one matrix product, and so is every gradient. Softmax and its derivative are computed on the chosen
keys alone, [T, K], and spread over a zeroed [rows, T] for the next product. That is many more products than needed and far less
traffic than gathering keys, of which each token has others: on a GPU whose matrix units outrun its memory it is the faster
form, and its sums have one order. One sequence at a time; T tokens, K chosen keys of each, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

_PAIRS: Final = 1 << 28
"""Scores of pairs, heads counted, that are in memory at a time."""
_ROWS: Final = 1024


def spans(length: int, heads: int, topk: int) -> Iterator[tuple[int, int]]:
    """(first, end) of rows that are computed at a time. The first span has at least `topk` rows: K keys can be seen from it."""
    rows = max(topk, min(_ROWS, _PAIRS // (heads * length)))
    for first in range(0, length, rows):
        yield first, min(first + rows, length)


def causal(first: int, end: int, device: torch.device) -> Tensor:
    """[end - first, end] bool: what each row may see."""
    return torch.arange(end, device=device)[None, :] <= torch.arange(first, end, device=device)[:, None]


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[t, S] float32 of q [t, Hi, D], k [S, D] and weights [t, Hi]: sum over heads of weight * relu(q . k)."""
    products = torch.relu_(q.flatten(0, 1) @ k.T).view(*q.shape[:2], -1)
    return torch.bmm(weights[:, None].to(products.dtype), products).squeeze(1).float()


@torch.no_grad()
def choose(q: Tensor, k: Tensor, weights: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The `topk` keys of the highest scores of each token: positions [T, K] int64, distinct, and which of them it may see.

    q: [T, Hi, D]. k: [T, D]. weights: [T, Hi]. K is T where that is less.
    """
    length = len(q)
    found = torch.empty(length, min(topk, length), dtype=torch.int64, device=q.device)
    for first, end in spans(length, q.shape[1], topk):
        scores = index_scores(q[first:end], k[:end], weights[first:end])
        scores.masked_fill_(~causal(first, end, q.device), -math.inf)
        found[first:end] = scores.topk(found.shape[1], sorted=False).indices
    return found, found <= torch.arange(length, device=q.device)[:, None]


class _ChosenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads, length, _ = q.shape
        out = q.new_empty(heads, length, v.shape[-1])
        p = q.new_empty(heads, length, keys.shape[1])
        shares = torch.empty(keys.shape, dtype=torch.float32, device=q.device)
        for first, end in spans(length, heads, keys.shape[1]):
            rows = slice(first, end)
            near = keys[rows].expand(heads, -1, -1)
            pairs = q[:, rows] @ k[:, :end].mT
            exact = (pairs.gather(-1, near).float() * scale).masked_fill_(~seen[rows], -math.inf).softmax(-1)
            shares[rows] = exact.mean(0)
            p[:, rows] = exact
            out[:, rows] = pairs.zero_().scatter_(-1, near, p[:, rows]) @ v[:, :end]
        ctx.save_for_backward(q, k, v, keys, p)
        ctx.scale = scale
        ctx.mark_non_differentiable(shares)
        return out, shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, p = ctx.saved_tensors
        d_out = grads[0].to(q.dtype)
        heads, length, _ = q.shape
        d_q = torch.empty_like(q)
        d_k, d_v = (torch.zeros(each.shape, dtype=torch.float32, device=q.device) for each in (k, v))
        for first, end in spans(length, heads, keys.shape[1]):
            rows = slice(first, end)
            near, here = keys[rows].expand(heads, -1, -1), p[:, rows].float()
            pairs = d_out[:, rows] @ v[:, :end].mT
            d_p = pairs.gather(-1, near).float()
            d_scores = here * (d_p - (here * d_p).sum(-1, keepdim=True)) * ctx.scale
            pairs.zero_().scatter_(-1, near, d_scores.to(q.dtype))
            d_q[:, rows] = pairs @ k[:, :end]
            d_k[:, :end] += pairs.mT @ q[:, rows]
            pairs.zero_().scatter_(-1, near, p[:, rows])
            d_v[:, :end] += pairs.mT @ d_out[:, rows]
        return d_q, d_k.to(k.dtype), d_v.to(v.dtype), None, None, None


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of each token over the keys chosen for it.

    Args:
        q, k: [H, T, D]. v: [H, T, V], of one dtype. keys, seen: as `choose` returns them; each token sees one of them at least.
    Returns: [H, T, V], and the probabilities of the chosen keys, the mean over heads, [T, K] float32 without a gradient.
    """
    return _ChosenAttention.apply(q, k, v, keys, seen, scale)  # pyright: ignore[reportReturnType]


def _divergence(target: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """Sum over rows of KL(target || softmax(scores)) over the seen keys. All [t, n]."""
    log_q = scores.masked_fill(~seen, -1e30).log_softmax(-1)
    return (torch.xlogy(target, target) - target * log_q).sum()


def loss_on_chosen(q: Tensor, k: Tensor, weights: Tensor, keys: Tensor, seen: Tensor, target: Tensor) -> Tensor:
    """Mean over tokens of the divergence of the indexer from `target` [T, K] on the chosen keys. q, k, weights: of `choose`."""

    def rows(q: Tensor, weights: Tensor, keys: Tensor, seen: Tensor, target: Tensor) -> Tensor:
        # gathered in float32, as the gradients of a key that thousands of tokens chose are added in its dtype
        near = k.float().index_select(0, keys.flatten()).view(*keys.shape, -1).to(q.dtype)
        products = torch.relu_(torch.bmm(q, near.mT))
        scores = torch.bmm(weights[:, None].to(q.dtype), products).squeeze(1).float()
        return _divergence(target, scores, seen)

    total = q.new_zeros((), dtype=torch.float32)
    for first in range(0, len(q), _ROWS):
        part = slice(first, first + _ROWS)
        total = total + checkpoint(rows, q[part], weights[part], keys[part], seen[part], target[part], use_reentrant=False)
    return total / len(q)


def loss_on_all(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Mean over tokens of the divergence of the indexer from dense attention, over all keys that a token may see.

    q, k: [H, T, D], of attention, taken as they are. index_q, index_k, weights: as of `choose`.
    """
    total = q.new_zeros((), dtype=torch.float32)
    for first, end in spans(q.shape[1], max(len(q), index_q.shape[1]), 1):
        rows, seen = slice(first, end), causal(first, end, q.device)
        with torch.no_grad():
            pairs = (q[:, rows] @ k[:, :end].mT).float() * scale
            target = pairs.masked_fill_(~seen, -math.inf).softmax(-1).mean(0)
            del pairs

        def part(own: Tensor, key: Tensor, weights: Tensor, target: Tensor = target, seen: Tensor = seen) -> Tensor:
            return _divergence(target, index_scores(own, key, weights), seen)

        total = total + checkpoint(part, index_q[rows], index_k[:end], weights[rows], use_reentrant=False)
    return total / q.shape[1]
