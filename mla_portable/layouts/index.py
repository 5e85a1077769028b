# SPDX-License-Identifier: Apache-2.0
"""The indexer's cache: `index_bf16`, rows of 128 bfloat16; `index_fp8`, pages of e4m3 bytes with a scale for each token.

A block of `index_fp8` is block_size * 128 e4m3 bytes, then block_size float32 scales: a tensor [blocks, block_size, 132] uint8.
Source: vLLM `indexer_k_quant_and_cache`, DeepGEMM `fp8_paged_mqa_logits`. Readers must accept both scale formats, which differ
only in how a writer picks the scale of a token:
`pow2`        2 ** ceil(log2(max(amax, 1e-4) / 448))   vLLM's "ue8m0"
`amax`        max(amax, 1e-4) / 448
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts.base import INDEX, CacheLayout, add_layout
from mla_portable.layouts.fp8_ds_mla import E4M3_MAX, SCALE_FORMATS, decode_e4m3, e4m3_scales

INDEX_HEAD_SIZE: Final = 128
"""Numbers of the indexer's queries and keys."""
INDEX_LEAST_AMAX: Final = 1e-4
"""The magnitude that a smaller one counts as."""
_SCALE_BYTES: Final = 4


class IndexFp8(CacheLayout):
    """Rows of 128 e4m3 codes and a float32 scale."""

    __slots__ = ()

    def pack(self, latent: Tensor, rope: Tensor | None = None, scale_format: str | None = None) -> Tensor:
        """[T, 128] as [T, 132] uint8.

        Values are divided by their scale in float32 and rounded to the nearest e4m3, ties to even, saturating at 448.
        """
        values = latent.float()
        amax = values.abs().amax(dim=-1, keepdim=True).clamp(min=INDEX_LEAST_AMAX)
        scales = e4m3_scales(amax, scale_format or SCALE_FORMATS[0])  # [T, 1]
        codes = (values / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=-1)

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[..., 132] uint8 as [..., 128] and [..., 0] of `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows = rows.clone() if rows.storage_offset() % _SCALE_BYTES else rows.contiguous()  # for views of wider numbers
        flat = rows.view(-1, self.row_width)
        scales = flat[:, INDEX_HEAD_SIZE:].view(torch.float32).to(wide)  # [n, 1]
        latent = decode_e4m3(flat[:, :INDEX_HEAD_SIZE]).to(wide).mul_(scales).to(dtype)
        lead = rows.shape[:-1]
        return latent.view(*lead, INDEX_HEAD_SIZE), latent.new_empty((*lead, 0))


INDEX_BF16: Final = add_layout(
    CacheLayout(
        name="index_bf16",
        cache=INDEX,
        dtype=torch.bfloat16,
        row_width=INDEX_HEAD_SIZE,
        value_width=INDEX_HEAD_SIZE,
        rope_offset=2 * INDEX_HEAD_SIZE,
        alignment=2,
        contents="128 bfloat16",
    )
)
INDEX_FP8: Final = add_layout(
    IndexFp8(
        name="index_fp8",
        cache=INDEX,
        dtype=torch.uint8,
        row_width=INDEX_HEAD_SIZE + _SCALE_BYTES,
        value_width=INDEX_HEAD_SIZE,
        rope_offset=INDEX_HEAD_SIZE,
        scale_offset=INDEX_HEAD_SIZE,
        scale_formats=SCALE_FORMATS,
        apart_bytes=_SCALE_BYTES,
        alignment=4,
        upconverted=INDEX_BF16,
        contents="128 e4m3 bytes; a float32 scale for each lies behind the rows of the block",
    )
)


def index_query_dtype(layout: CacheLayout) -> torch.dtype:
    """Of the queries that score keys of this layout: e4m3 where it is quantised, else bfloat16."""
    return torch.float8_e4m3fn if layout.is_quantized else torch.bfloat16
