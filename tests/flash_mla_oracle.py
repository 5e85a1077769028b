# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's conventions in float64, written from its tests/ref.py and tests/quant.py: no code of this project is used."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

INVALID = (-2147483648, -123456, -1, 114514, 1919810, 2147480000, 2147483647)
"""Indices that FlashMLA's prefill tests use for absent keys."""


def draw(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * spread


def cut_from_larger(tensor: Tensor) -> Tensor:
    """The same numbers with strides as FlashMLA's tests have them: each dimension one longer, the last 128; NaN between."""
    filler = float("nan") if tensor.dtype.is_floating_point else 2147480000
    shape = [size + 1 for size in tensor.shape[:-1]] + [tensor.shape[-1] + 128]
    larger = torch.full(shape, filler, dtype=tensor.dtype)
    view = larger[tuple(slice(0, size) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def v32_cache(rows: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Rows [n, 576] as V3.2's cache [blocks, page, 1, 656] uint8, with blocks page + 1 rows apart, and as [n, 576] float64.

    A tile of 128 numbers has a power of two as its scale. Bytes between the blocks are 0xFF, NaN in every format.
    """
    count = len(rows)
    scales = torch.exp2((rows[:, :512].float().abs().view(count, 4, 128).amax(-1) / 448).clamp(min=1e-4).log2().ceil())
    codes = (rows[:, :512].float().view(count, 4, 128) / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    rope = rows[:, 512:].to(torch.bfloat16)
    packed = torch.cat([codes.reshape(count, 512).view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], dim=1)
    larger = torch.full((count // page, page + 1, 656), 0xFF, dtype=torch.uint8)
    larger[:, :page] = packed.view(-1, page, 656)
    latent = (codes.double() * scales.double().unsqueeze(-1)).view(count, 512)
    return larger[:, :page].unsqueeze(2), torch.cat([latent, rope.double()], dim=1)


def v4_cache(rows: Tensor, page: int, gap: int = 0) -> tuple[Tensor, Tensor]:
    """Rows [n, 512] as V4's cache [blocks, page, 1, 584] uint8, and as [n, 512] float64.

    A block is page rows of 576 bytes (448 e4m3, 64 bf16), then page times 7 e8m0 and a byte 0xFF; blocks lie a multiple of
    576 bytes apart, `gap` of these more than needed. Bytes between the blocks are 0xFF.
    """
    blocks = len(rows) // page
    groups = rows[:, :448].float().view(blocks, page, 7, 64)
    exponents = (groups.abs().amax(-1) / 448).clamp(min=1e-4).log2().ceil()
    scales = torch.exp2(exponents)
    codes = (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    plain = rows[:, 448:].to(torch.bfloat16).view(blocks, page, 64)
    larger = torch.full((blocks, (-(-page * 584 // 576) + gap) * 576), 0xFF, dtype=torch.uint8)
    of_rows = larger[:, : page * 576].view(blocks, page, 576)
    of_rows[:, :, :448] = codes.view(torch.uint8).flatten(2)
    of_rows[:, :, 448:] = plain.view(torch.uint8)
    larger[:, page * 576 : page * 584].view(blocks, page, 8)[:, :, :7] = (exponents + 127).to(torch.uint8)
    latent = torch.cat([(codes.double() * scales.double().unsqueeze(-1)).flatten(2), plain.double()], dim=2)
    return larger[:, : page * 584].view(blocks, page, 1, 584), latent.view(len(rows), 512)


def v4_without_unused(cache: Tensor, indices: Tensor, page: int) -> None:
    """Rows that no index names, and their scales, become 0xFF bytes."""
    blocks = len(cache)
    unused = torch.ones(blocks * page, dtype=torch.bool)
    named = indices.flatten().long()
    unused[named[(named >= 0) & (named < len(unused))]] = False
    block_bytes = cache.as_strided((blocks, page * 584), (cache.stride(0), 1))
    block_bytes[:, : page * 576].view(blocks, page, 576)[unused.view(blocks, page)] = 0xFF
    block_bytes[:, page * 576 :].view(blocks, page, 8)[unused.view(blocks, page)] = 0xFF


def without_unused(cache: Tensor, indices: Tensor, page: int) -> None:
    """Rows that no index names become 0xFF bytes."""
    unused = torch.ones(cache.shape[0] * page, dtype=torch.bool)
    named = indices.flatten().long()
    unused[named[(named >= 0) & (named < len(unused))]] = False
    cache[unused.view(-1, page)] = 0xFF


@dataclass
class Attended:
    """out [T, H, 512], max_logits and lse [T, H], in float64."""

    out: Tensor
    max_logits: Tensor
    lse: Tensor


def attend(
    q: Tensor,
    lists: list[tuple[Tensor, Tensor, Tensor | None]],
    scale: float,
    sink: Tensor | None = None,
) -> Attended:
    """Attention of q [T, H, D] over the union of lists, each of rows [n, D], indices [T, K] and lengths [T] or None.

    Absent: an index outside of [0, n), and every one from its token's length on. Nothing valid: out 0, max_logits -inf and
    lse +inf.
    """
    num_tokens, num_heads, width = q.shape
    out = torch.zeros((num_tokens, num_heads, 512), dtype=torch.float64)
    greatest = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), math.inf, dtype=torch.float64)
    for token in range(num_tokens):
        keys: list[Tensor] = []
        for rows, indices, lengths in lists:
            read = indices.shape[1] if lengths is None else max(0, min(int(lengths[token]), indices.shape[1]))
            keys += [rows[at].double() for at in indices[token, :read].tolist() if 0 <= at < len(rows)]
        if not keys:
            continue
        selected = torch.stack(keys)  # [n, D]
        assert selected.shape[1] == width
        scores = (q[token].double() @ selected.T) * scale  # [H, n]
        greatest[token], lse[token] = scores.amax(dim=1), scores.logsumexp(dim=1)
        out[token] = scores.softmax(dim=1) @ selected[:, :512]
        if sink is not None:
            out[token] /= (1.0 + torch.exp(sink.double() - lse[token])).unsqueeze(1)
    return Attended(out, greatest, lse)


def assert_out(found: Tensor, wanted: Tensor) -> None:
    """As FlashMLA's tests judge it: 1e-3, or 2.01/128 of the value."""
    assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
    assert not found.isnan().any()
    torch.testing.assert_close(found.double(), wanted, atol=1e-3, rtol=2.01 / 128)


def assert_statistic(found: Tensor, wanted: Tensor) -> None:
    """The same infinities, and elsewhere 1e-6 or 2.01/65536 of the value."""
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    assert torch.equal(found == math.inf, wanted == math.inf) and torch.equal(found == -math.inf, wanted == -math.inf)
    finite = wanted.isfinite()
    torch.testing.assert_close(found[finite].double(), wanted[finite], atol=1e-6, rtol=2.01 / 65536)
