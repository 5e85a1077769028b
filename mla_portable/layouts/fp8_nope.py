# SPDX-License-Identifier: Apache-2.0
"""`fp8_nope`: 528 bytes, 512 e4m3 | 4 float32 scales, one per 128 values. Keys have no rotary part (GLM-5.3-Flash in SGLang).

A row is an `fp8_ds_mla` row without its rotary part, and its scales are chosen in the same ways. Source: SGLang 0.5.23,
`dsa_quant_k_cache.quantize_k_cache_separate` with a rotary part of 0; FlashMLA calls the format "V32_NO_ROPE". Rows of
FlashMLA's "V41" have 528 bytes too, but 16 e8m0 scales: nothing in a tensor tells them apart, and they are not of this layout.
"""

from __future__ import annotations

from typing import Final

from mla_portable.layouts.base import add_layout
from mla_portable.layouts.bf16_nope import BF16_NOPE
from mla_portable.layouts.fp8_ds_mla import FP8_DS_MLA, Fp8DsMla

FP8_NOPE: Final = add_layout(
    Fp8DsMla(
        name="fp8_nope",
        dtype=FP8_DS_MLA.dtype,
        row_width=FP8_DS_MLA.rope_offset,
        value_width=FP8_DS_MLA.value_width,
        rope_offset=FP8_DS_MLA.rope_offset,
        scale_offset=FP8_DS_MLA.scale_offset,
        scale_formats=FP8_DS_MLA.scale_formats,
        alignment=FP8_DS_MLA.alignment,
        upconverted=BF16_NOPE,
        contents="512 e4m3 bytes and 4 float32 scales",
    )
)
