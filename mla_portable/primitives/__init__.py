# SPDX-License-Identifier: Apache-2.0
"""The primitives, one module each: names, signatures and their one meaning, whatever a vendor does inside.

Axes: T tokens, H query heads of this rank, K top-k width, N cache slots, R requests, P prefill requests, W workspace
rows, N logits of a row, B x S decode rows (S query tokens for each of B batch rows). A slot is block * block_size + offset.

- An index that is negative, or out of range for the block table or the cache, is absent: `-1` on output, contributes
  nothing on input. Duplicates count each time.
- `lengths`, where given, says that only the first `lengths[t]` entries of row t are read (clamped to [0, K]).
- lse is the natural logarithm of the sum over valid entries of exp(softmax_scale * q.k), without the sink. A row with
  no valid entry has out = 0 and lse = -inf. `attn_sink` [H] float32 multiplies out by exp(lse) / (exp(lse) + exp(sink)).
- Whoever is bound for a Request may leave out an lse that it does not ask for, and take its promises (`clean_indices`,
  `clean_lengths`) at their word. The public functions ask for the lse and promise nothing.
- indexer_logits: what a token does not see has the score -inf, so that a top-k never prefers it.
- NaN in rows that no index names never reaches an output.
- Addresses are 64-bit. Any block size, any stride between blocks, any K.
- With `out` (and `lse_out`, `schedule`) given: no allocation, no host synchronisation, safe to capture in a CUDA graph.

An implementation is a callable of exactly its Protocol below: the public function without `backend=`.
"""

from typing import Any, Final

from mla_portable.contracts.primitive import Primitive
from mla_portable.primitives.cache_write import CACHE_WRITE, CacheWrite
from mla_portable.primitives.convert_indices import CONVERT_INDICES, ConvertIndices
from mla_portable.primitives.gather_upconvert import GATHER_UPCONVERT, GatherUpconvert
from mla_portable.primitives.indexer_logits import INDEXER_LOGITS, IndexerLogits
from mla_portable.primitives.merge_states import MERGE_STATES, MergeStates
from mla_portable.primitives.quantize_per_tensor import QUANTIZE_PER_TENSOR, QuantizePerTensor
from mla_portable.primitives.sparse_decode import SPARSE_DECODE, SparseDecode
from mla_portable.primitives.sparse_prefill import SPARSE_PREFILL, SparsePrefill

__all__ = [
    "CACHE_WRITE",
    "CONVERT_INDICES",
    "GATHER_UPCONVERT",
    "INDEXER_LOGITS",
    "MERGE_STATES",
    "PRIMITIVES",
    "QUANTIZE_PER_TENSOR",
    "SPARSE_DECODE",
    "SPARSE_PREFILL",
    "CacheWrite",
    "ConvertIndices",
    "GatherUpconvert",
    "IndexerLogits",
    "MergeStates",
    "QuantizePerTensor",
    "SparseDecode",
    "SparsePrefill",
]

PRIMITIVES: Final[tuple[Primitive[Any], ...]] = (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    INDEXER_LOGITS,
)
