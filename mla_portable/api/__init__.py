# SPDX-License-Identifier: Apache-2.0
"""The convenience API: the primitives as plain functions that check, choose and call, and `explain` for their choices."""

from mla_portable.api.dispatch import current_registry, serving
from mla_portable.api.explaining import explain
from mla_portable.api.primitives import (
    cache_write,
    convert_indices,
    gather_upconvert,
    indexer_logits,
    merge_states,
    quantize_per_tensor,
    sparse_decode,
    sparse_prefill,
)

__all__ = [
    "cache_write",
    "convert_indices",
    "current_registry",
    "explain",
    "gather_upconvert",
    "indexer_logits",
    "merge_states",
    "quantize_per_tensor",
    "serving",
    "sparse_decode",
    "sparse_prefill",
]
