# SPDX-License-Identifier: Apache-2.0
"""Layouts of AITER: rows of e4m3 with one scale for the whole cache, and index pages where these are not `index_fp8`.

amd.fp8                 OCP (gfx950)    576 codes, which count `kv_scale` times: vLLM's `fp8` on AMD
amd.fp8_fnuz            fnuz (gfx942)   the same

Index pages of gfx942's e4m3, and of tiles of 16 x 16:

name                    e4m3            a block of n tokens
amd.index_fnuz          fnuz (gfx942)   n * 128 codes, then n float32 scales, as index_fp8
amd.index_tiles         OCP (gfx950)    16 * 128 codes as 8 tiles of 16 tokens x 16 numbers, then 16 scales
amd.index_fnuz_tiles    fnuz (gfx942)   the same

Tiles are AITER's `Preshuffle`, vLLM's "SHUFFLE". A block of more than 16 tokens has no uniform distance from token to token,
which `CacheLayout.parts` needs, so blocks of tiles have 16. Calls name all of these layouts: rows of index pages are as wide
as those of `index_fp8`, and other vendors have rows of 576 codes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts import (
    BF16,
    HEAD_SIZE,
    INDEX,
    INDEX_BF16,
    INDEX_FP8,
    INDEX_HEAD_SIZE,
    KV_LORA_RANK,
    LAYOUTS,
    QK_ROPE_HEAD_DIM,
    SCALE_FORMATS,
    Cache,
    CacheLayout,
    add_layout,
)

TILE: Final = 16
"""Tokens, and numbers of each, in a tile; tokens in a block of tiles."""
_LEAST_AMAX: Final = 1e-4
_SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rows(CacheLayout):
    """Rows of e4m3 codes, side by side, which count `kv_scale` times."""

    def pack(self, latent: Tensor, rope: Tensor, scale_format: str | None = None) -> Tensor:
        """[T, 512] and [T, 64], divided by `kv_scale`, as [T, 576] codes; what is beyond the largest becomes that."""
        largest = torch.finfo(self.dtype).max
        return torch.cat([latent, rope], dim=-1).float().clamp(-largest, largest).to(self.dtype)


def _add_rows(name: str, code: torch.dtype) -> CacheLayout:
    return add_layout(
        Fp8Rows(
            name=name,
            dtype=code,
            row_width=HEAD_SIZE,
            value_width=KV_LORA_RANK,
            rope_width=QK_ROPE_HEAD_DIM,
            rope_offset=KV_LORA_RANK,
            alignment=1,
            upconverted=BF16,
            contents=f"576 {code} that count kv_scale times",
            inferred=False,
            tensor_scale=True,
        )
    )


FP8: Final = _add_rows("amd.fp8", torch.float8_e4m3fn)
FP8_FNUZ: Final = _add_rows("amd.fp8_fnuz", torch.float8_e4m3fnuz)


def codes_of(name: str | None) -> torch.dtype | None:
    """The dtype of e4m3 rows; None for bf16 ones."""
    layout = LAYOUTS[name or BF16.name]
    return layout.dtype if layout.tensor_scale else None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPages(CacheLayout):
    """Rows of 128 e4m3 codes and a float32 scale.

    Attributes:
        code: torch's dtype of the codes. tiles: a block holds them as tiles.
    """

    code: torch.dtype
    tiles: bool

    def pack(self, latent: Tensor, rope: Tensor | None = None, scale_format: str | None = None) -> Tensor:
        """[T, 128] as [T, 132] uint8: the largest number of a token becomes the largest code, or up to half of it."""
        values, largest = latent.float(), torch.finfo(self.code).max
        scales = values.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST_AMAX) / largest  # [T, 1]
        if (scale_format or self.scale_formats[0]) == "pow2":
            scales = scales.log2().ceil().exp2()
        codes = (values / scales).clamp(-largest, largest).to(self.code)
        rows = [each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (codes, scales)]
        return torch.cat(rows, dim=-1)

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[..., 132] uint8 as [..., 128] and [..., 0] of `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes, scales = rows.split([INDEX_HEAD_SIZE, _SCALE_BYTES], dim=-1)
        codes, scales = (each.clone(memory_format=torch.contiguous_format) for each in (codes, scales))
        latent = codes.view(self.code).to(wide).mul_(scales.view(torch.float32).to(wide)).to(dtype)
        return latent, latent[..., :0]

    def parts(self, cache: Cache) -> tuple[Tensor, ...]:
        """See CacheLayout. Of tiles, [blocks, 16, 16] for each sixteen numbers."""
        if not self.tiles or isinstance(cache, tuple):
            return CacheLayout.parts(self, cache)
        codes, scales = INDEX_FP8.parts(cache)
        blocks, size, _ = cache.shape
        if size != TILE:
            raise ValueError(f"{self.name}: a block holds {TILE} tokens, got block_size {size}")
        tiles = codes.as_strided((blocks, INDEX_HEAD_SIZE // TILE, TILE, TILE), (cache.stride(0), TILE * TILE, TILE, 1))
        return (*tiles.unbind(1), scales)

    def pieces(self, rows: Cache) -> tuple[Tensor, ...]:
        """See CacheLayout. Of tiles, sixteen numbers each, then the scale."""
        if not self.tiles or isinstance(rows, tuple):
            return CacheLayout.pieces(self, rows)
        return rows.split([TILE] * (INDEX_HEAD_SIZE // TILE) + [_SCALE_BYTES], dim=-1)


def _add(name: str, code: torch.dtype, *, tiles: bool) -> CacheLayout:
    kind = "fnuz e4m3" if code == torch.float8_e4m3fnuz else "e4m3"
    where = ", in tiles of 16 tokens" if tiles else ""
    return add_layout(
        IndexPages(
            name=name,
            cache=INDEX,
            dtype=torch.uint8,
            row_width=INDEX_FP8.row_width,
            value_width=INDEX_HEAD_SIZE,
            rope_offset=INDEX_HEAD_SIZE,
            scale_offset=INDEX_HEAD_SIZE,
            scale_formats=SCALE_FORMATS,
            apart_bytes=_SCALE_BYTES,
            alignment=4,
            upconverted=INDEX_BF16,
            contents=f"128 {kind} bytes{where}; a float32 scale for each lies behind the rows of the block",
            block_size=TILE if tiles else None,
            inferred=False,
            code=code,
            tiles=tiles,
        )
    )


INDEX_FNUZ: Final = _add("amd.index_fnuz", torch.float8_e4m3fnuz, tiles=False)
INDEX_TILES: Final = _add("amd.index_tiles", torch.float8_e4m3fn, tiles=True)
INDEX_FNUZ_TILES: Final = _add("amd.index_fnuz_tiles", torch.float8_e4m3fnuz, tiles=True)


def pages_of(name: str | None) -> tuple[CacheLayout, torch.dtype, bool]:
    """An index layout that AITER reads, `index_fp8` for None; the dtype of its codes; whether they lie in tiles."""
    layout = LAYOUTS[name or INDEX_FP8.name]
    return (layout, layout.code, layout.tiles) if isinstance(layout, IndexPages) else (layout, torch.float8_e4m3fn, False)
