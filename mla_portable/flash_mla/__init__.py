# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's functions by its names, on every device: sparse decode, sparse prefill, and dense prefill of ragged batches.

A program that calls FlashMLA can call these instead where FlashMLA has no kernels, or is not installed. Arguments are those of
FlashMLA 9241ae3 and of sgl-flash-mla 1.0, results have FlashMLA's conventions: a row without a valid key has an lse of +inf.
Differences: any number of heads, any top-k, BF16 caches in decode, and no plan, so that scheduler objects hold nothing.

`install()` puts this package where `import flash_mla` finds it; `python -m mla_portable.flash_mla SCRIPT` runs a program so.
docs/flash_mla.md says what is served where.
Source: FlashMLA `flash_mla/flash_mla_interface.py`, `tests/ref.py`.
"""

from typing import Final

from mla_portable._version import __version__ as _version
from mla_portable.flash_mla import cuda, flash_mla_interface, fused_norm_rope_attn_rope_cast
from mla_portable.flash_mla.decode import flash_mla_with_kvcache
from mla_portable.flash_mla.installing import install, is_installed, uninstall
from mla_portable.flash_mla.prefill import flash_mla_sparse_fwd
from mla_portable.flash_mla.schedule import FlashMLASchedMeta, get_mla_decoding_metadata, get_mla_metadata
from mla_portable.flash_mla.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "FlashMLASchedMeta",
    "cuda",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_interface",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
    "install",
    "is_installed",
    "uninstall",
]

__version__: Final = f"1.0.0+mla.portable.{_version}"
"""FlashMLA's version, with a local part that tells this package from it."""


def has_legacy() -> bool:
    """Whether `use_legacy=True` is accepted, as sgl-flash-mla asks: the layouts that it stands for are those served here."""
    return True
