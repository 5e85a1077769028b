# SPDX-License-Identifier: Apache-2.0
"""What the oracles share: exact arithmetic in float64 on the CPU, in the most obvious way.

The oracles judge every backend, the reference among them, so they share no code with any of them: e4m3 is decoded by the
formula of the format, rounding is a search for the nearest value. They read the very bytes that a kernel reads: what
quantisation lost is not charged to the kernel.

Rows of a layout that a plugin brings are what the plugin says that they are: its `pack`, `split` and `parts`, in float64.
Whether those are right, its own tests must show.

An oracle takes the arguments of its primitive, wherever these live, and returns new CPU tensors. Indices, counts and bytes are
exact; attention results are float64. Inputs are taken as well-formed.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.layouts import (
    BF16,
    BF16_NOPE,
    FP8_DS_MLA,
    FP8_NOPE,
    FP8_V4,
    INDEX_BF16,
    INDEX_FP8,
    KV_LORA_RANK,
    LAYOUTS,
    SCALE_GROUP,
    V4_CODES,
    V4_ROW_BYTES,
    V4_SCALE_BYTES,
    V4_SCALE_GROUP,
    Cache,
    CacheLayout,
)

INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1
_DECODED_HERE: Final = frozenset(each.name for each in (BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4, INDEX_BF16, INDEX_FP8))


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


_ROPE: Final = KV_LORA_RANK + 4 * (KV_LORA_RANK // SCALE_GROUP)
"""Offset of the rotary part of an fp8_ds_mla row; the float32 scales lie between it and the latent."""
_E4M3: Final = torch.tensor([_e4m3(byte) for byte in range(256)], dtype=torch.float64, device="cpu")
# finite values without sign, by code: what float8 formats can round to
_CODES: Final = {
    torch.float8_e4m3fn: [_minifloat(code, mantissa_bits=3, bias=7) for code in range(0x7F)],
    torch.float8_e5m2: [_minifloat(code, mantissa_bits=2, bias=15) for code in range(0x7C)],
}


def e4m3_values(codes: Tensor) -> Tensor:
    """float64 values of e4m3 bytes, on the CPU."""
    return _E4M3[codes.cpu().long()]


def nearest_code(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of the values of a float8 `dtype` nearest to x float64; a tie goes to the even code, the excess to the last."""
    codes = _CODES[dtype]
    midpoints = torch.tensor([(low + high) / 2 for low, high in pairwise(codes)], dtype=torch.float64, device="cpu")
    size = x.abs().contiguous()
    below = torch.searchsorted(midpoints, size, right=False)  # midpoints strictly below: ties stay at the lower code
    tie = (below < len(midpoints)) & (size == midpoints[below.clamp(max=len(midpoints) - 1)])
    code = torch.where(tie & (below % 2 == 1), below + 1, below)
    code = torch.where(size.isnan(), 0x7F, code)
    return torch.where(torch.signbit(x), code + 0x80, code).to(torch.uint8)


def float32(x: Tensor) -> Tensor:
    """x rounded to float32 and back. Products and quotients of float32 numbers come out as float32 arithmetic has them."""
    return x.to(torch.float32).to(torch.float64)


def _scale(group: Tensor, scale_format: str) -> float:
    """The scale of 128 latent values."""
    amax = float(group.abs().max())
    if scale_format == "pow2":
        return 2.0 ** math.ceil(math.log2(max(amax / 448.0, 1e-4)))
    if scale_format == "amax":
        return float(float32(torch.tensor(max(amax / 448.0, 2.0**-126), dtype=torch.float64, device="cpu")))
    raise ValueError(f"oracle: scale_format {scale_format!r}, expected 'pow2' or 'amax'")


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def fp8_row(compressed: Tensor, rotary: Tensor, scale_format: str) -> Tensor:
    """The bytes of one token of fp8_ds_mla: compressed [512] and rotary [64] float64."""
    groups = compressed.reshape(-1, SCALE_GROUP)
    scales = torch.tensor([_scale(group, scale_format) for group in groups], dtype=torch.float64, device="cpu")
    codes = nearest_code(float32(groups / scales[:, None]), torch.float8_e4m3fn)
    return torch.cat([codes.flatten(), _bytes(scales.to(torch.float32)), _bytes(rotary.to(torch.bfloat16))])


def v4_row(values: Tensor) -> Tensor:
    """The bytes of one token of fp8_v4 [584], its scales behind it: 512 float64."""
    groups = values[:V4_CODES].reshape(-1, V4_SCALE_GROUP)
    scales = torch.tensor([_scale(group, "pow2") for group in groups], dtype=torch.float64, device="cpu")
    codes = nearest_code(float32(groups / scales[:, None]), torch.float8_e4m3fn)
    exponents = torch.zeros(V4_SCALE_BYTES, dtype=torch.uint8, device="cpu")
    exponents[: len(scales)] = (scales.log2() + 127).to(torch.uint8)
    return torch.cat([codes.flatten(), _bytes(values[V4_CODES:].to(torch.bfloat16)), exponents])


def _is_v4(kv: Tensor) -> bool:
    return kv.dtype == torch.uint8 and kv.shape[-1] == FP8_V4.row_width


def greatest(dtype: torch.dtype) -> float:
    """The largest finite value of a float8 dtype."""
    return _CODES[dtype][-1]


def latent(rows: Tensor) -> Tensor:
    """The latent [n, 512] float64 of stored rows [n, 576] bf16 or [n, 656 or 584] uint8, products not rounded."""
    if rows.dtype == torch.bfloat16:
        return rows[:, :KV_LORA_RANK].double()
    if _is_v4(rows):
        exponents = rows[:, V4_ROW_BYTES : V4_ROW_BYTES + V4_CODES // V4_SCALE_GROUP].double() - 127  # [n, 7]
        factors = torch.where(exponents == 128, math.nan, torch.exp2(exponents))
        coded = _E4M3[rows[:, :V4_CODES].long()] * factors.repeat_interleave(V4_SCALE_GROUP, dim=1)
        return torch.cat([coded, rows[:, V4_CODES:V4_ROW_BYTES].contiguous().view(torch.bfloat16).double()], dim=1)
    scales = rows[:, KV_LORA_RANK:_ROPE].contiguous().view(torch.float32).double()  # [n, 4]
    return _E4M3[rows[:, :KV_LORA_RANK].long()] * scales.repeat_interleave(SCALE_GROUP, dim=1)


def rope(rows: Tensor) -> Tensor:
    """The rotary part [n, 64] bfloat16 of stored rows, bit for bit."""
    if _is_v4(rows):
        return torch.empty((len(rows), 0), dtype=torch.bfloat16, device="cpu")
    return rows[:, KV_LORA_RANK:] if rows.dtype == torch.bfloat16 else rows[:, _ROPE:].contiguous().view(torch.bfloat16)


def named_rows(kv: Tensor, slots: Tensor) -> Tensor:
    """Stored rows of a workspace [W, width] or a paged cache [blocks, block_size, width]; slots [n] int64, all valid.

    Those of fp8_v4 with their scales behind them, wherever they lie in the cache.
    """
    if kv.dim() == 2:
        return kv[slots]
    block, offset = slots // kv.shape[1], slots % kv.shape[1]
    if not _is_v4(kv):
        return kv[block, offset]
    pages, block, offset = kv.flatten(1), block[:, None], offset[:, None]
    row = offset * V4_ROW_BYTES + torch.arange(V4_ROW_BYTES, device="cpu")
    scales = kv.shape[1] * V4_ROW_BYTES + offset * V4_SCALE_BYTES + torch.arange(V4_SCALE_BYTES, device="cpu")
    return torch.cat([pages[block, row], pages[block, scales]], dim=1)


def plugin_layout(kv_layout: str | None) -> CacheLayout | None:
    """The layout of that name where it decodes its rows itself; None for one of the core's, which are decoded here."""
    return None if kv_layout is None or kv_layout in _DECODED_HERE else LAYOUTS[kv_layout]


def token_values(kv: Any, slots: Tensor, own: CacheLayout | None) -> tuple[Tensor, Tensor]:
    """latent [n, V] float64 and rotary part [n, R], float64 or bit for bit, of the slots [n] int64 of a cache or workspace.

    own: of `plugin_layout`.
    """
    if own is None:
        rows = named_rows(kv, slots)
        return latent(rows), rope(rows)
    if isinstance(kv, Tensor) and kv.dim() == 2:
        return own.split(kv[slots], torch.float64)
    parts = own.parts(kv)
    block, offset = slots // parts[0].shape[1], slots % parts[0].shape[1]
    return own.split(own.joined([part[block, offset] for part in parts]), torch.float64)


def on_cpu(kv: Cache) -> Any:
    """A cache, whether in one tensor or several, on the CPU."""
    return tuple(each.detach().cpu() for each in kv) if isinstance(kv, tuple) else kv.detach().cpu()


def copied(kv: Cache) -> Any:
    """Likewise, in contiguous memory of its own."""
    if isinstance(kv, tuple):
        return tuple(copied(each) for each in kv)
    return kv.detach().cpu().clone(memory_format=torch.contiguous_format)


def blocks_of(kv: Cache) -> tuple[int, int]:
    """Number of blocks, and tokens in each, of a paged cache."""
    blocks, block_size = (kv[0] if isinstance(kv, tuple) else kv).shape[:2]
    return blocks, block_size


def put_token(kv: Cache, slot: int, latent: Tensor, rope: Tensor, scale_format: str | None, own: CacheLayout) -> None:
    """Store a token, latent [V] and rope [R] float64, in a paged cache of a plugin's layout."""
    parts = own.parts(kv)
    block, offset = divmod(slot, parts[0].shape[1])
    for part, row in zip(parts, own.pieces(own.pack(latent[None], rope[None], scale_format)), strict=True):
        part[block, offset] = row[0]


def put_row(kv: Tensor, slot: int, row: Tensor) -> None:
    """Store a row as `named_rows` has it in a paged cache whose memory is contiguous."""
    block, offset = divmod(slot, kv.shape[1])
    if not _is_v4(kv):
        kv[block, offset] = row
        return
    page, scales = kv.view(kv.shape[0], -1)[block], kv.shape[1] * V4_ROW_BYTES + offset * V4_SCALE_BYTES
    page[offset * V4_ROW_BYTES : (offset + 1) * V4_ROW_BYTES] = row[:V4_ROW_BYTES]
    page[scales : scales + V4_SCALE_BYTES] = row[V4_ROW_BYTES:]
