# SPDX-License-Identifier: Apache-2.0
"""`flash_mla.fused_norm_rope_attn_rope_cast` of DeepSeek-V4.1: names that SGLang imports. Each of them raises."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from mla_portable.flash_mla.absent import NotServed

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]

_MODULE: Final = "fused_norm_rope_attn_rope_cast"
_REMEDY: Final = "It needs SM100 and sgl-flash-mla. SGLang: choose an attention backend without MegaAttention."


def prefill(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: NotServed."""
    raise NotServed(f"{_MODULE}.prefill", "normalisation and rotation fused with sparse prefill", _REMEDY)


def decode(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: NotServed."""
    raise NotServed(f"{_MODULE}.decode", "normalisation and rotation fused with sparse decode", _REMEDY)


def permute_q_b_proj(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: NotServed."""
    raise NotServed(f"{_MODULE}.permute_q_b_proj", "the order of weights for the fused kernels", _REMEDY)


def permute_wv_proj(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: NotServed."""
    raise NotServed(f"{_MODULE}.permute_wv_proj", "the order of weights for the fused kernels", _REMEDY)
