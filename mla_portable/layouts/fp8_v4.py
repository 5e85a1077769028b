# SPDX-License-Identifier: Apache-2.0
"""`fp8_v4`: 512 numbers that are key and value alike (DeepSeek-V4), 448 as e4m3 with a scale for every 64, 64 as bfloat16.

A block of n tokens is n rows of 576 bytes (448 e4m3 | 64 bfloat16), then n times 8 bytes of scales: 7 e8m0, of 64 columns each,
and a byte of padding. The tensor is [blocks, n, 584] uint8, in which no token lies at a distance of 584. Engines round the
stride between blocks up to a multiple of `V4_ROW_BYTES`; any multiple of 8 is read.

Source: FlashMLA tests/quant.py (`MODEL1_FP8Sparse`). A number is e4m3 * 2 ** (e8m0 - 127); e8m0 255 is NaN. Writers choose
2 ** ceil(log2(max(amax / 448, 1e-4))), the `pow2` of fp8_ds_mla. The padding is written as 0 and never read.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.errors import InvalidArgument
from mla_portable.layouts.base import CacheLayout, add_layout
from mla_portable.layouts.bf16_nope import BF16_NOPE
from mla_portable.layouts.fp8_ds_mla import E4M3_MAX, POW2_MIN_EXPONENT, decode_e4m3, e4m3_scales

V4_CODES: Final = 448
"""Leading numbers of a row that are stored as e4m3; the other 64 are bfloat16."""
V4_SCALE_GROUP: Final = 64
"""Numbers that share an e8m0 scale."""
V4_ROW_BYTES: Final = V4_CODES + 2 * (BF16_NOPE.value_width - V4_CODES)
"""Of a row without its scales."""
V4_SCALE_BYTES: Final = 8
"""Of the scales of a token, a byte of padding included."""
_NUM_SCALES: Final = V4_CODES // V4_SCALE_GROUP
_FORMATS: Final = ("pow2",)
_LEAST_AMAX: Final = E4M3_MAX * 2.0**POW2_MIN_EXPONENT


class Fp8V4(CacheLayout):
    """Rows of e4m3 codes and bfloat16, with e8m0 scales behind the rows of their block."""

    __slots__ = ()

    def pack(self, latent: Tensor, rope: Tensor | None = None, scale_format: str | None = None) -> Tensor:
        """[T, 512] as [T, 584] uint8; there is no rotary part beside the latent.

        Values are divided by their scale in float32 and rounded to the nearest e4m3, ties to even, saturating at 448.
        """
        if (scale_format or _FORMATS[0]) not in _FORMATS:
            raise InvalidArgument("fp8_v4", "scale_format", got=repr(scale_format), expected="'pow2'")
        groups = latent[:, :V4_CODES].float().unflatten(-1, (_NUM_SCALES, V4_SCALE_GROUP))
        amax = groups.abs().amax(dim=-1)  # [T, 7]
        scales = e4m3_scales(amax.clamp(min=_LEAST_AMAX), _FORMATS[0])
        codes = (groups / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
        padding = exponents.new_zeros((exponents.shape[0], V4_SCALE_BYTES - _NUM_SCALES))
        plain = latent[:, V4_CODES:].to(torch.bfloat16).contiguous()
        return torch.cat([codes.view(torch.uint8), plain.view(torch.uint8), exponents, padding], dim=-1)

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[..., 584] uint8, each row with its scales behind it, as [..., 512] and [..., 0] of `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows = rows.clone() if rows.storage_offset() % 2 else rows.contiguous()  # for views of wider numbers
        flat = rows.view(-1, self.row_width)
        exponents = flat[:, V4_ROW_BYTES : V4_ROW_BYTES + _NUM_SCALES].to(torch.int32)  # [n, 7]
        # 2 ** -127 is no normal number of float32
        bits = torch.where(exponents == 0, 1 << 22, exponents << 23)
        scales = bits.masked_fill(exponents == 255, 0x7FC00000).view(torch.float32).to(wide)
        latent = torch.empty((len(flat), self.value_width), dtype=wide, device=flat.device)
        codes = decode_e4m3(flat[:, :V4_CODES]).to(wide).unflatten(1, (_NUM_SCALES, V4_SCALE_GROUP))
        torch.mul(codes, scales.unsqueeze(-1), out=latent[:, :V4_CODES].unflatten(1, (_NUM_SCALES, V4_SCALE_GROUP)))
        latent[:, V4_CODES:] = flat[:, V4_CODES:V4_ROW_BYTES].view(torch.bfloat16).to(wide)
        latent, lead = latent.to(dtype), rows.shape[:-1]
        return latent.view(*lead, self.value_width), latent.new_empty((*lead, 0))


FP8_V4: Final = add_layout(
    Fp8V4(
        name="fp8_v4",
        dtype=torch.uint8,
        row_width=V4_ROW_BYTES + V4_SCALE_BYTES,
        value_width=BF16_NOPE.value_width,
        rope_offset=V4_CODES,
        scale_offset=V4_ROW_BYTES,
        scale_formats=_FORMATS,
        apart_bytes=V4_SCALE_BYTES,
        alignment=8,
        upconverted=BF16_NOPE,
        contents="448 e4m3 bytes and 64 bfloat16; 8 bytes of scales for each lie behind the rows of the block",
    )
)
