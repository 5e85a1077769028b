# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's functions of the DSA indexer, by its names, on every device: scores of FP8 queries against FP8 keys.

An engine that calls DeepGEMM for its indexer can call these instead where DeepGEMM has no kernels. Arguments are DeepGEMM's, up
to version 2.8. Differences: what a query token does not see is always -inf, so `clean_logits` and `schedule_meta` change
nothing. `dense`: all keys that a token sees; FP4 and MX scales are refused. `sparse`: candidate blocks of keys alone, as MXFP8
or MXFP4, which DeepGEMM has for SM100.
Source: DeepGEMM `csrc/apis/attention.hpp`.
"""

from mla_portable.deep_gemm.dense import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_num_sms,
    get_paged_mqa_logits_metadata,
)
from mla_portable.deep_gemm.sparse import (
    fp8_fp4_paged_sparse_mqa_logits,
    fp8_fp4_sparse_mqa_logits,
    get_paged_sparse_mqa_logits_metadata,
    get_sparse_mqa_logits_metadata,
)

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "fp8_fp4_sparse_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_paged_sparse_mqa_logits_metadata",
    "get_sparse_mqa_logits_metadata",
]
