# SPDX-License-Identifier: Apache-2.0
"""FORM: how the indexer's kernels store and multiply q and keys. Read by their declaration too, where Triton may be missing.

BF16         bfloat16 numbers
FP8          e4m3 bytes as they are, on targets whose matrix units take them
FP8_WORDS    words of two e4m3 bytes, by NVIDIA's instructions, into float16: 2**-8 of the even and of the odd columns
FP8_DECODED  e4m3 bytes, one by one by integers, into bfloat16, which holds each of them exactly
"""

from __future__ import annotations

from typing import Any, Final

from mla_portable.contracts import Request
from mla_portable.layouts import LAYOUTS

__all__ = ["BF16", "FP8", "FP8_DECODED", "FP8_WORDS", "form_of", "form_of_request"]

BF16: Final = 0
FP8: Final = 1
FP8_WORDS: Final = 2
FP8_DECODED: Final = 3
_FP8_HEADS: Final = 8
"""From so many heads on e4m3 is multiplied as it is. Hopper's sums of such products keep 13 bits below the largest, and the
sum over few heads does not average that: with one head scores were off by 2^-12 of the terms' magnitudes on an H200."""


def form_of(quantized: bool, arch: str, has_fp8_conversion: bool, num_heads: int) -> int:
    """FORM for a layout, a target and a head count.

    Other vendors' e4m3 is another format than the type of Triton's that PTX knows. Few heads are multiplied as bfloat16.
    """
    if not quantized:
        return BF16
    if not arch.startswith("sm"):
        return FP8_DECODED
    multiplied = has_fp8_conversion and int(arch.removeprefix("sm")) >= 89 and num_heads >= _FP8_HEADS
    return FP8 if multiplied else FP8_WORDS


def form_of_request(request: Request[Any]) -> int:
    """FORM for a request, on its device and not in Triton's interpreter."""
    quantized, device = request.kv_layout is not None and LAYOUTS[request.kv_layout].is_quantized, request.device
    return form_of(quantized, device.arch, device.has_fp8_conversion, request.num_heads or 1)
