# SPDX-License-Identifier: Apache-2.0
"""The float64 oracles of all primitives under one name."""

from mla_portable.problems.cache_write import cache_write
from mla_portable.problems.convert_indices import convert_indices
from mla_portable.problems.gather_upconvert import gather_upconvert
from mla_portable.problems.indexer_logits import indexer_logits
from mla_portable.problems.merge_states import merge_states
from mla_portable.problems.quantize_per_tensor import quantize_per_tensor
from mla_portable.problems.sparse_decode import sparse_decode
from mla_portable.problems.sparse_prefill import sparse_prefill

__all__ = [
    "cache_write",
    "convert_indices",
    "gather_upconvert",
    "indexer_logits",
    "merge_states",
    "quantize_per_tensor",
    "sparse_decode",
    "sparse_prefill",
]
