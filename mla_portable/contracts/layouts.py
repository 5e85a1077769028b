# SPDX-License-Identifier: Apache-2.0
"""How a cached token lies in memory, described once: offsets, scale formats, packing and unpacking.

`bf16`        576 bfloat16: 512 of the compressed latent, then 64 of the rotary key.
`fp8_ds_mla`  656 bytes: 512 e4m3 | 4 float32 scales, one per 128 latent values | 64 bfloat16 rope, not quantised.
              Source: FlashMLA README, "FP8 with scale"; vLLM `concat_and_cache_mla`.

Scale formats of the FP8 row. Readers must accept both; they differ only in how a writer picks the scale:
`pow2`        2 ** ceil(log2(max(amax / 448, 1e-4)))   vLLM >= 0.33, FlashMLA's own quantiser
`amax`        max(amax / 448, smallest normal float32) vLLM <= 0.26
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts.errors import InvalidArgument

__all__ = [
    "BF16",
    "E4M3_MAX",
    "FP8_DS_MLA",
    "HEAD_SIZE",
    "INDEX_HEAD_SIZE",
    "KV_LORA_RANK",
    "LAYOUTS",
    "QK_ROPE_HEAD_DIM",
    "SCALE_FORMATS",
    "SCALE_GROUP",
    "CacheLayout",
    "layout_of",
    "pack_fp8",
    "tile_scales",
    "unpack_fp8",
]

KV_LORA_RANK: Final = 512
QK_ROPE_HEAD_DIM: Final = 64
HEAD_SIZE: Final = KV_LORA_RANK + QK_ROPE_HEAD_DIM
INDEX_HEAD_SIZE: Final = 128
"""Of the indexer's queries and keys."""
SCALE_GROUP: Final = 128
"""Latent values that share a float32 scale."""
NUM_SCALES: Final = KV_LORA_RANK // SCALE_GROUP
E4M3_MAX: Final = 448.0
SCALE_FORMATS: Final = ("pow2", "amax")
POW2_MIN_EXPONENT: Final = -13
"""ceil(log2(1e-4)): the least exponent of a `pow2` scale, also that of an all-zero group."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One row format of the paged cache `[blocks, block_size, row_width]`.

    Offsets are in bytes from the start of a row; `row_width` counts elements of `dtype`, `row_bytes` bytes.
    `scale_offset` is None where a row carries no scales.
    """

    name: str
    dtype: torch.dtype
    row_width: int
    row_bytes: int
    latent_offset: int
    scale_offset: int | None
    rope_offset: int

    @property
    def is_quantized(self) -> bool:
        return self.scale_offset is not None


BF16: Final = CacheLayout(
    name="bf16",
    dtype=torch.bfloat16,
    row_width=HEAD_SIZE,
    row_bytes=2 * HEAD_SIZE,
    latent_offset=0,
    scale_offset=None,
    rope_offset=2 * KV_LORA_RANK,
)
FP8_DS_MLA: Final = CacheLayout(
    name="fp8_ds_mla",
    dtype=torch.uint8,
    row_width=KV_LORA_RANK + 4 * NUM_SCALES + 2 * QK_ROPE_HEAD_DIM,
    row_bytes=KV_LORA_RANK + 4 * NUM_SCALES + 2 * QK_ROPE_HEAD_DIM,
    latent_offset=0,
    scale_offset=KV_LORA_RANK,
    rope_offset=KV_LORA_RANK + 4 * NUM_SCALES,
)
LAYOUTS: Final[dict[str, CacheLayout]] = {layout.name: layout for layout in (BF16, FP8_DS_MLA)}


def layout_of(kv: Tensor, *, where: str = "layout_of", argument: str = "kv_cache") -> CacheLayout:
    """The layout of a cache or workspace, told by dtype and row width.

    Args:
        kv: [..., 576] bfloat16 or [..., 656] uint8.
        where, argument: names for the error message.
    Raises: InvalidArgument when the pair (dtype, last dimension) is neither.
    """
    dtype, width = kv.dtype, kv.shape[-1] if kv.dim() else 0
    if dtype == torch.uint8 and width == FP8_DS_MLA.row_width:
        return FP8_DS_MLA
    if dtype == torch.bfloat16 and width == BF16.row_width:
        return BF16
    remedy = ""
    if dtype in (torch.float8_e4m3fn, torch.int8) and width == FP8_DS_MLA.row_width:
        remedy = "Pass the same bytes as uint8: kv_cache.view(torch.uint8)."
    elif dtype == torch.uint8:
        remedy = "A row holds 512 e4m3 bytes, 4 float32 scales and 64 bfloat16: do not slice it."
    raise InvalidArgument(
        where,
        argument,
        got=f"{dtype} rows of {width}",
        expected="torch.bfloat16 rows of 576 (bf16) or torch.uint8 rows of 656 (fp8_ds_mla)",
        remedy=remedy,
    )


def tile_scales(latent: Tensor, scale_format: str) -> Tensor:
    """The scale of each group of 128 latent values.

    Args:
        latent: [..., 512] floating point. scale_format: "pow2" or "amax" (module docstring).
    Returns: [..., 4] float32 on the same device.

    "pow2" is computed on the bits of amax, without a logarithm or a division, so that every writer gets the same
    byte: with amax = m * 2**e and 1 <= m < 2, amax / 448 = (m / 1.75) * 2**(e - 8).
    """
    if scale_format not in SCALE_FORMATS:
        raise InvalidArgument("tile_scales", "scale_format", got=repr(scale_format), expected="'pow2' or 'amax'")
    amax = latent.float().unflatten(-1, (NUM_SCALES, SCALE_GROUP)).abs().amax(dim=-1)  # [..., 4]
    if scale_format == "amax":
        # divided by a tensor: on GPUs torch multiplies by the reciprocal of a Python number, which may differ by a bit
        return (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    return ((exponent.clamp(min=POW2_MIN_EXPONENT) + 127) << 23).view(torch.float32)


def pack_fp8(kv_c: Tensor, k_pe: Tensor, *, scale_format: str = "pow2") -> Tensor:
    """Quantise tokens to `fp8_ds_mla` rows.

    Args:
        kv_c: [T, 512] floating point latent. k_pe: [T, 64] rotary key. scale_format: "pow2" or "amax".
    Returns: [T, 656] uint8. Values are divided by their scale in float32 and rounded to the nearest e4m3, ties to
        even, saturating at 448; the rotary part is stored as bfloat16.
    """
    scales = tile_scales(kv_c, scale_format)  # [T, 4]
    scaled = kv_c.float().unflatten(-1, (NUM_SCALES, SCALE_GROUP)) / scales.unsqueeze(-1)
    latent = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)  # [T, 512]
    rope = k_pe.to(torch.bfloat16).contiguous()
    return torch.cat([latent.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], dim=-1)


def unpack_fp8(rows: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """De-quantise `fp8_ds_mla` rows.

    Args:
        rows: [..., 656] uint8, any strides. dtype: of the result; the product e4m3 * float32 scale is taken in
        float32 (in float64 when that is asked for) and rounded once.
    Returns: [..., 576] of `dtype`; the rotary part is exact.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    flat = rows.contiguous()
    latent = flat[..., :KV_LORA_RANK].contiguous().view(torch.float8_e4m3fn).to(wide)
    scales = flat[..., KV_LORA_RANK : FP8_DS_MLA.rope_offset].contiguous().view(torch.float32).to(wide)
    rope = flat[..., FP8_DS_MLA.rope_offset :].contiguous().view(torch.bfloat16)
    product = latent.unflatten(-1, (NUM_SCALES, SCALE_GROUP)) * scales.unsqueeze(-1)
    return torch.cat([product.flatten(-2).to(dtype), rope.to(dtype)], dim=-1)
