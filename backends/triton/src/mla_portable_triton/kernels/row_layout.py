# SPDX-License-Identifier: Apache-2.0
"""The cache's row layouts as compile-time constants of kernels; `mla_portable.layouts` is where they are defined.

LATENT in elements; GROUP latent values share each of GROUPS scales; SCALE_BYTE, ROPE_BYTE and ROW_BYTES
place things in an FP8 row. The width of
the rotary part, 0 where a layout has none, is a parameter of kernels: ROPE.
"""

from __future__ import annotations

import triton.language as tl

from mla_portable.layouts import FP8_DS_MLA, KV_LORA_RANK, SCALE_GROUP

LATENT = tl.constexpr(KV_LORA_RANK)
GROUP = tl.constexpr(SCALE_GROUP)
GROUPS = tl.constexpr(KV_LORA_RANK // SCALE_GROUP)
SCALE_BYTE = tl.constexpr(FP8_DS_MLA.scale_offset)
ROPE_BYTE = tl.constexpr(FP8_DS_MLA.rope_offset)
ROW_BYTES = tl.constexpr(FP8_DS_MLA.row_bytes)
