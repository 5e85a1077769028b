# SPDX-License-Identifier: Apache-2.0
"""The layouts of the paged caches, one module each, and what a layout is (`base`)."""

from typing import Final

from mla_portable.layouts.base import (
    INDEX,
    KV,
    LAYOUTS,
    TOLERANCES,
    Cache,
    CacheLayout,
    CacheTensor,
    add_layout,
    layout_names,
    layout_of,
    scale_formats,
)
from mla_portable.layouts.bf16 import BF16, HEAD_SIZE, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from mla_portable.layouts.bf16_128_32 import BF16_128_32
from mla_portable.layouts.bf16_nope import BF16_NOPE
from mla_portable.layouts.fp8_ds_mla import (
    E4M3_MAX,
    FP8_DS_MLA,
    POW2_MIN_EXPONENT,
    SCALE_FORMATS,
    SCALE_GROUP,
    decode_e4m3,
    tile_scales,
)
from mla_portable.layouts.fp8_nope import FP8_NOPE
from mla_portable.layouts.fp8_v4 import FP8_V4, V4_CODES, V4_ROW_BYTES, V4_SCALE_BYTES, V4_SCALE_GROUP
from mla_portable.layouts.index import INDEX_BF16, INDEX_FP8, INDEX_HEAD_SIZE, INDEX_LEAST_AMAX, index_query_dtype

CORE_LAYOUTS: Final = frozenset(LAYOUTS)
"""Names of the core's; plugins add others later."""

__all__ = [
    "BF16",
    "BF16_128_32",
    "BF16_NOPE",
    "CORE_LAYOUTS",
    "E4M3_MAX",
    "FP8_DS_MLA",
    "FP8_NOPE",
    "FP8_V4",
    "HEAD_SIZE",
    "INDEX",
    "INDEX_BF16",
    "INDEX_FP8",
    "INDEX_HEAD_SIZE",
    "INDEX_LEAST_AMAX",
    "KV",
    "KV_LORA_RANK",
    "LAYOUTS",
    "POW2_MIN_EXPONENT",
    "QK_ROPE_HEAD_DIM",
    "SCALE_FORMATS",
    "SCALE_GROUP",
    "TOLERANCES",
    "V4_CODES",
    "V4_ROW_BYTES",
    "V4_SCALE_BYTES",
    "V4_SCALE_GROUP",
    "Cache",
    "CacheLayout",
    "CacheTensor",
    "add_layout",
    "decode_e4m3",
    "index_query_dtype",
    "layout_names",
    "layout_of",
    "scale_formats",
    "tile_scales",
]
