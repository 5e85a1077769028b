# SPDX-License-Identifier: Apache-2.0
"""The vendor's layouts of the cache of attention.

`ascend.split`: two bfloat16 tensors, the latent [blocks, block_size, 512] and the rotary key [blocks, block_size, 64].
`ascend.c8`: 656 bytes in one tensor, 512 int8 codes | 64 bfloat16 of the rotary key | 4 float32 scales, one per 128 codes. The
widths are those of `fp8_ds_mla`, which has the scales in front of the rotary key. `ascend.c8_e4m3`: the same with e4m3 codes.
Source: op-plugin 517f2e7d, torch_npu-npu_kv_quant_sparse_flash_attention; the test of that operation in vllm-ascend 182b75ea,
and the caches of `sfa_v1.py` there.

Packed ones are always named, because rows of 656 bytes are others' in the core and in other vendors' plugins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.layouts import BF16, KV_LORA_RANK, QK_ROPE_HEAD_DIM, SCALE_GROUP, CacheLayout, CacheTensor, add_layout

_NUM_SCALES: Final = KV_LORA_RANK // SCALE_GROUP
_SCALE_OFFSET: Final = KV_LORA_RANK + 2 * QK_ROPE_HEAD_DIM
_ROW_BYTES: Final = _SCALE_OFFSET + 4 * _NUM_SCALES


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(CacheLayout):
    """Rows of codes of one byte, the rotary part, and a scale for each 128 codes: amax / the greatest code.

    Attributes:
        codes: their dtype.
    """

    codes: torch.dtype

    @property
    def greatest(self) -> float:
        """The greatest code."""
        return float((torch.finfo if self.codes.is_floating_point else torch.iinfo)(self.codes).max)

    def pack(self, latent: Tensor, rope: Tensor, scale_format: str | None = None) -> Tensor:
        groups = latent.float().unflatten(-1, (_NUM_SCALES, SCALE_GROUP))
        amax = groups.abs().amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny * self.greatest)
        scales = amax / torch.full_like(amax, self.greatest)  # by a tensor: torch may multiply by the reciprocal of a number
        codes = (groups / scales.unsqueeze(-1)).flatten(-2)
        if not self.codes.is_floating_point:
            codes = codes.round()
        parts = codes.clamp(-self.greatest, self.greatest).to(self.codes), rope.to(torch.bfloat16).contiguous(), scales
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sizes = [KV_LORA_RANK, _SCALE_OFFSET - KV_LORA_RANK, 4 * _NUM_SCALES]
        codes, rope, scales = (part.contiguous() for part in rows.split(sizes, dim=-1))
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        groups = codes.view(self.codes).to(exact).unflatten(-1, (_NUM_SCALES, SCALE_GROUP))
        latent = (groups * scales.view(torch.float32).to(exact).unsqueeze(-1)).flatten(-2)
        return latent.to(dtype), rope.view(torch.bfloat16).to(dtype)


_PACKED: Final[dict[str, Any]] = {
    "dtype": torch.uint8,
    "row_width": _ROW_BYTES,
    "value_width": KV_LORA_RANK,
    "rope_width": QK_ROPE_HEAD_DIM,
    "rope_offset": KV_LORA_RANK,
    "scale_offset": _SCALE_OFFSET,
    "scale_formats": ("amax",),
    "alignment": 4,
    "upconverted": BF16,
    "inferred": False,
}
SPLIT: Final = add_layout(
    CacheLayout(
        name="ascend.split",
        dtype=torch.bfloat16,
        row_width=KV_LORA_RANK + QK_ROPE_HEAD_DIM,
        value_width=KV_LORA_RANK,
        rope_width=QK_ROPE_HEAD_DIM,
        rope_offset=2 * KV_LORA_RANK,
        tensors=(
            CacheTensor("latent", torch.bfloat16, KV_LORA_RANK),
            CacheTensor("rope", torch.bfloat16, QK_ROPE_HEAD_DIM),
        ),
        alignment=2,
        upconverted=BF16,
        contents="512 bfloat16 of the latent and, in another tensor, 64 of the rotary key",
    )
)
C8: Final = Packed(name="ascend.c8", codes=torch.int8, contents="512 int8 codes, 64 bfloat16 and 4 float32 scales", **_PACKED)
C8_E4M3: Final = Packed(
    name="ascend.c8_e4m3", codes=torch.float8_e4m3fn, contents="512 e4m3 codes, 64 bfloat16 and 4 float32 scales", **_PACKED
)
for _layout in (C8, C8_E4M3):
    add_layout(_layout)
CODES: Final = {each.name: each.codes for each in (C8, C8_E4M3)}
"""Name of a packed layout -> the dtype that the operation wants its bytes to have."""
