# SPDX-License-Identifier: Apache-2.0
"""`flash_mla.flash_mla_interface`: the same functions, where FlashMLA defines them and SGLang imports the scheduler object."""

from mla_portable.flash_mla.decode import flash_mla_with_kvcache
from mla_portable.flash_mla.prefill import flash_mla_sparse_fwd
from mla_portable.flash_mla.schedule import FlashMLASchedMeta, get_mla_decoding_metadata, get_mla_metadata
from mla_portable.flash_mla.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]
