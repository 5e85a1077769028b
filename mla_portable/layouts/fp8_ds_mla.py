# SPDX-License-Identifier: Apache-2.0
"""`fp8_ds_mla`: 656 bytes, 512 e4m3 | 4 float32 scales, one per 128 latent values | 64 bfloat16 rope, not quantised.

Source: FlashMLA README, "FP8 with scale"; vLLM `concat_and_cache_mla`. Readers must accept both scale formats; they differ
only in how a writer picks the scale:
`pow2`        2 ** ceil(log2(max(amax / 448, 1e-4)))   vLLM >= 0.33, FlashMLA's own quantiser
`amax`        max(amax / 448, smallest normal float32) vLLM <= 0.26
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from mla_portable.errors import InvalidArgument
from mla_portable.layouts.base import CacheLayout, add_layout
from mla_portable.layouts.bf16 import BF16, KV_LORA_RANK, QK_ROPE_HEAD_DIM

SCALE_GROUP: Final = 128
"""Latent values that share a float32 scale."""
E4M3_MAX: Final = 448.0
SCALE_FORMATS: Final = ("pow2", "amax")
POW2_MIN_EXPONENT: Final = -13
"""ceil(log2(1e-4)): the least exponent of a `pow2` scale, also that of an all-zero group."""
_LEAST_AMAX: Final = {"pow2": E4M3_MAX * 2.0**POW2_MIN_EXPONENT, "amax": E4M3_MAX * torch.finfo(torch.float32).tiny}
"""The magnitude that a smaller one counts as."""
_NUM_SCALES: Final = KV_LORA_RANK // SCALE_GROUP
_ROPE_OFFSET: Final = KV_LORA_RANK + 4 * _NUM_SCALES
_ROW_BYTES: Final = _ROPE_OFFSET + 2 * QK_ROPE_HEAD_DIM


class Fp8DsMla(CacheLayout):
    """Rows of e4m3 codes with float32 scales, and of a rotary part or none (`fp8_nope`)."""

    __slots__ = ()

    def pack(self, latent: Tensor, rope: Tensor, scale_format: str | None = None) -> Tensor:
        """[T, 512] and [T, 64 or 0] as [T, 656 or 528] uint8.

        Values are divided by their scale in float32 and rounded to the nearest e4m3, ties to even, saturating at 448; the
        rotary part is stored as bfloat16.
        """
        scales = tile_scales(latent, scale_format or SCALE_FORMATS[0])  # [T, 4]
        scaled = latent.float().unflatten(-1, (_NUM_SCALES, SCALE_GROUP)) / scales.unsqueeze(-1)
        codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)  # [T, 512]
        rope = rope.to(torch.bfloat16).contiguous()
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], dim=-1)

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[..., 656 or 528] uint8 as [..., 512] and [..., 64 or 0] of `dtype`; the rotary part is exact."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows = rows.clone() if rows.storage_offset() % 4 else rows.contiguous()  # for views of wider numbers
        flat = rows.view(-1, self.row_width)
        latent = decode_e4m3(flat[:, :KV_LORA_RANK]).to(wide)
        scales = flat[:, KV_LORA_RANK:_ROPE_OFFSET].view(torch.float32).to(wide)  # [n, 4]
        latent.unflatten(1, (_NUM_SCALES, SCALE_GROUP)).mul_(scales.unsqueeze(-1))
        rope = flat[:, _ROPE_OFFSET:].view(torch.bfloat16)
        lead = rows.shape[:-1]
        return latent.to(dtype).view(*lead, KV_LORA_RANK), rope.to(dtype).view(*lead, self.rope_width)


FP8_DS_MLA: Final = add_layout(
    Fp8DsMla(
        name="fp8_ds_mla",
        dtype=torch.uint8,
        row_width=_ROW_BYTES,
        value_width=KV_LORA_RANK,
        rope_width=QK_ROPE_HEAD_DIM,
        rope_offset=_ROPE_OFFSET,
        scale_offset=KV_LORA_RANK,
        scale_formats=SCALE_FORMATS,
        alignment=4,
        upconverted=BF16,
        contents="512 e4m3 bytes, 4 float32 scales and 64 bfloat16",
    )
)


def tile_scales(latent: Tensor, scale_format: str) -> Tensor:
    """The scale of each group of 128 latent values.

    Args:
        latent: [..., 512] floating point. scale_format: "pow2" or "amax" (module docstring).
    Returns: [..., 4] float32 on the same device.
    """
    if scale_format not in SCALE_FORMATS:
        raise InvalidArgument("tile_scales", "scale_format", got=repr(scale_format), expected="'pow2' or 'amax'")
    amax = latent.float().unflatten(-1, (_NUM_SCALES, SCALE_GROUP)).abs().amax(dim=-1)  # [..., 4]
    return e4m3_scales(amax.clamp(min=_LEAST_AMAX[scale_format]), scale_format)


def e4m3_scales(amax: Tensor, scale_format: str) -> Tensor:
    """amax / 448 for "amax", 2 ** ceil(log2(amax / 448)) for "pow2".

    Args:
        amax: float32, the largest magnitude of each group of values, at least 448 * 2**-126.
    Returns: float32 of the same shape and device.

    "pow2" is computed on the bits of amax, without a logarithm or a division, so that every writer gets the same
    byte: with amax = m * 2**e and 1 <= m < 2, amax / 448 = (m / 1.75) * 2**(e - 8).
    """
    if scale_format == "amax":
        # divided by a tensor: on GPUs torch multiplies by the reciprocal of a Python number, which may differ by a bit
        return amax / torch.full_like(amax, E4M3_MAX)
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    return ((exponent + 127) << 23).view(torch.float32)


@cache
def _e4m3_pairs() -> Tensor:
    """[65536] int64 on the CPU: for each 16-bit pattern the float32 values of its two e4m3 bytes, as 64 bits."""
    patterns = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.uint16)
    return patterns.view(torch.float8_e4m3fn).float().view(torch.int64)


def decode_e4m3(data: Tensor) -> Tensor:
    """The float32 values of e4m3 bytes, all 256 of them exact, NaN included.

    Args:
        data: [n, m] uint8, m even, rows at even distances from an even offset.
    Returns: [n, m] float32. On a CPU by a table of byte pairs, which costs a quarter of torch's own conversion.
    """
    if not data.is_cpu:
        return data.view(torch.float8_e4m3fn).float()
    pairs = data.view(torch.uint16).to(torch.int32).flatten()
    return _e4m3_pairs().index_select(0, pairs).view(torch.float32).view(data.shape)
