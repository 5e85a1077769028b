# SPDX-License-Identifier: Apache-2.0
"""Layouts that no plugin of this repository has: rows as wide as the core's that the core cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_portable.layouts import BF16, INDEX_BF16, CacheLayout, CacheTensor, add_layout, base
from mla_portable.layouts.base import INDEX


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Codes(CacheLayout):
    """512 int8 codes, 64 bfloat16, then a float32 scale for each 128 codes: the 656 bytes of fp8_ds_mla, otherwise."""

    def pack(self, latent: Tensor, rope: Tensor, scale_format: str | None = None) -> Tensor:
        groups = latent.float().unflatten(-1, (4, 128))
        scales = groups.abs().amax(dim=-1).clamp(min=1e-9) / 127
        codes = (groups / scales.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8).flatten(-2)
        parts = codes, rope.to(torch.bfloat16).contiguous(), scales
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        codes, rope, scales = (part.contiguous() for part in rows.split([512, 128, 16], dim=-1))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = codes.view(torch.int8).to(wide).unflatten(-1, (4, 128)) * scales.view(torch.float32).to(wide).unsqueeze(-1)
        return values.flatten(-2).to(dtype), rope.view(torch.bfloat16).to(dtype)


INT8 = Int8Codes(
    name="int8_656",
    dtype=torch.uint8,
    row_width=656,
    value_width=512,
    rope_width=64,
    rope_offset=512,
    scale_offset=640,
    scale_formats=("int8",),
    alignment=4,
    upconverted=BF16,
    contents="512 int8 codes, 64 bfloat16 and 4 float32 scales",
    inferred=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Keys(CacheLayout):
    """128 int8 codes, then a float32 scale: the 132 bytes of index_fp8, which stay together here."""

    def pack(self, latent: Tensor, rope: Tensor | None = None, scale_format: str | None = None) -> Tensor:
        scale = latent.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / 127
        codes = (latent.float() / scale).round().to(torch.int8)
        return torch.cat([codes.view(torch.uint8), scale.flatten().view(torch.uint8).view(-1, 4)], dim=-1)

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        codes, scale = (part.contiguous() for part in rows.split([128, 4], dim=-1))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        latent = (codes.view(torch.int8).to(wide) * scale.view(torch.float32).to(wide)).to(dtype)
        return latent, latent[..., :0]


INT8_KEYS = Int8Keys(
    name="int8_132",
    cache=INDEX,
    dtype=torch.uint8,
    row_width=132,
    value_width=128,
    rope_offset=128,
    scale_offset=128,
    scale_formats=("int8",),
    alignment=4,
    upconverted=INDEX_BF16,
    contents="128 int8 codes and a float32 scale",
    inferred=False,
)


SPLIT = CacheLayout(
    name="bf16_split",
    dtype=torch.bfloat16,
    row_width=576,
    value_width=512,
    rope_width=64,
    rope_offset=1024,
    alignment=2,
    tensors=(CacheTensor("latent", torch.bfloat16, 512), CacheTensor("rope", torch.bfloat16, 64)),
    upconverted=BF16,
    contents="512 bfloat16 in one tensor and 64 in another",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCodes(CacheLayout):
    """512 int8 codes, 64 bfloat16 and a float32 scale, in three tensors."""

    def pack(self, latent: Tensor, rope: Tensor, scale_format: str | None = None) -> tuple[Tensor, ...]:
        scale = (latent.float().abs().amax(dim=-1) / 127).clamp(min=1e-9).unsqueeze(-1)
        codes = (latent.float() / scale).round().to(torch.int8)
        return codes.view(torch.uint8), rope.to(torch.bfloat16), scale

    def split(self, rows: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        codes, rope, scale = rows
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (codes.contiguous().view(torch.int8).to(wide) * scale.to(wide)).to(dtype), rope.to(dtype)


SPLIT_INT8 = SplitCodes(
    name="int8_split",
    dtype=torch.uint8,
    row_width=512 + 128 + 4,
    value_width=512,
    rope_width=64,
    rope_offset=512,
    scale_offset=640,
    scale_formats=("int8",),
    alignment=1,
    tensors=(
        CacheTensor("codes", torch.uint8, 512),
        CacheTensor("rope", torch.bfloat16, 64),
        CacheTensor("scales", torch.float32, 1),
    ),
    upconverted=BF16,
    contents="512 int8 codes, 64 bfloat16 and a float32 scale, apart",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class E4m3(CacheLayout):
    """576 e4m3 codes, which count `kv_scale` times."""

    def pack(self, latent: Tensor, rope: Tensor, scale_format: str | None = None) -> Tensor:
        codes = torch.cat([latent, rope], dim=-1).float().clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8)

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        values = rows.contiguous().view(torch.float8_e4m3fn).float().to(dtype)
        return values[..., :512], values[..., 512:]


SCALED = E4m3(
    name="e4m3_576",
    dtype=torch.uint8,
    row_width=576,
    value_width=512,
    rope_width=64,
    rope_offset=512,
    alignment=1,
    tensor_scale=True,
    upconverted=BF16,
    contents="576 e4m3 codes",
    inferred=False,
)


@contextmanager
def known(*layouts: CacheLayout) -> Iterator[None]:
    """These layouts beside the core's, for a test alone. Those of plugins, which may have the same rows, are left out."""
    before = dict(base._layouts), dict(base._by_rows)
    core = {name: layout for name, layout in base._layouts.items() if "." not in name}
    base._layouts.clear()
    base._by_rows.clear()
    for layout in core.values():
        add_layout(layout)
    for layout in layouts:
        add_layout(layout)
    try:
        yield
    finally:
        for table, kept in zip((base._layouts, base._by_rows), before, strict=True):
            table.clear()
            table.update(kept)
