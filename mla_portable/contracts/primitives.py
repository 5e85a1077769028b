# SPDX-License-Identifier: Apache-2.0
"""The primitives: names, signatures and their one meaning, whatever a vendor does inside.

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

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_portable.contracts.schedule import DecodeSchedule

__all__ = [
    "BoundPrimitive",
    "CacheWrite",
    "ConvertIndices",
    "GatherUpconvert",
    "IndexerLogits",
    "MergeStates",
    "Primitive",
    "QuantizePerTensor",
    "SparseDecode",
    "SparsePrefill",
]


class Primitive(str, Enum):
    """The verbs that the registry chooses implementations for."""

    CACHE_WRITE = "cache_write"
    CONVERT_INDICES = "convert_indices"
    GATHER_UPCONVERT = "gather_upconvert"
    SPARSE_DECODE = "sparse_decode"
    SPARSE_PREFILL = "sparse_prefill"
    MERGE_STATES = "merge_states"
    QUANTIZE_PER_TENSOR = "quantize_per_tensor"
    INDEXER_LOGITS = "indexer_logits"

    def __str__(self) -> str:
        return self.value


class CacheWrite(Protocol):
    """Write new tokens into the paged cache.

    kv_c [T, 512] bf16/fp16, k_pe [T, 64] same dtype; kv_cache [blocks, block_size, 576] bf16 or [.., 656] uint8, written;
    slot_mapping [T] int64, a negative or out-of-range slot is skipped; scale_format "pow2" or "amax" (FP8 only).
    """

    def __call__(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2"
    ) -> None: ...


class ConvertIndices(Protocol):
    """Positions in a request -> global slots (decode) or rows of the prefill workspace, and how many are valid.

    topk_indices [T, K] int32; req_id_per_token [T] int32, rows of block_table [R, columns] int32. A token whose
    prefill_request_ids entry [T] int32 is >= 0 maps to prefill_workspace_starts[id] + position instead. With
    compact=True the valid entries come first, in their order. out = (indices [T, K], counts [T]), int32, written.
    """

    def __call__(
        self,
        topk_indices: Tensor,
        req_id_per_token: Tensor,
        block_table: Tensor,
        *,
        block_size: int,
        num_slots: int | None = None,
        prefill_request_ids: Tensor | None = None,
        prefill_workspace_starts: Tensor | None = None,
        compact: bool = False,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class GatherUpconvert(Protocol):
    """Copy each request's cached tokens into consecutive bf16 rows of a workspace, undoing the FP8 scales.

    kv_cache as in CacheWrite; block_table [P, columns] int32; seq_lens [P] int32; workspace_starts [P] int32, first row
    of each request in `out` [W, 576] bf16. latent = bf16(e4m3 * float32 scale), rope bit for bit. Rows that no request
    owns stay as they were; a token whose table entry is invalid becomes a row of zeros; rows below 0 or past W are not written.
    """

    def __call__(
        self, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor, *, out: Tensor
    ) -> Tensor: ...


class SparseDecode(Protocol):
    """Attention of B x S query tokens over chosen slots of the paged cache.

    q [B, S, H, 576] bf16; kv_cache [blocks, block_size, 576] bf16 or [.., 656] uint8; indices [B, S, K] int32 global slots;
    lengths [B, S] int32; attn_sink [H] float32; schedule made for B * S rows, H heads and this K. Returns out
    [B, S, H, 512] bf16 and lse [B, S, H] float32, which are `out` and `lse_out` where given.
    """

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        schedule: DecodeSchedule | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class SparsePrefill(Protocol):
    """Attention of T query tokens over chosen rows of a workspace, or of the paged cache itself.

    q [T, H, 576] bf16; kv [W, 576] bf16 (a workspace or a flattened BF16 cache) or the paged FP8 cache itself
    [blocks, block_size, 656] uint8; indices [T, K] int32 rows of kv (slots of a paged cache), those past W are absent;
    lengths [T] int32; attn_sink [H] float32. Returns out [T, H, 512] bf16 and lse [T, H] float32, which are `out` and
    `lse_out` where given.
    """

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class MergeStates(Protocol):
    """Merge P partial attention results over disjoint key sets (split-KV, context parallelism).

    outs [P, ..., D] bf16/fp16/float32, lses [P, ...] float32 natural. out = sum_p exp(lse_p - lse) * out_p with
    lse = logsumexp_p(lse_p); a part with lse = -inf contributes nothing, whatever its `out` holds; where all are -inf,
    out = 0 and lse = -inf. out has the dtype of outs.
    """

    def __call__(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]: ...


class QuantizePerTensor(Protocol):
    """One scale for a tensor: x ~= x_q * scale, scale = max(amax(|x|), 1e-10) / max(dtype), a 0-d float32 tensor."""

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]: ...


class IndexerLogits(Protocol):
    """How much each query token wants each cached token of its request: what the top-k is taken of.

    q [T, H, 128] bf16 and weights [T, H] float32, of the indexer's own heads; index_cache [blocks, block_size, 128] bf16;
    query_start_loc [R + 1] int32, ascending; seq_lens [R] int32; block_table [R, columns] int32. A length counts as one in
    [0, columns * block_size]. Token t belongs to the request r with query_start_loc[r] <= t < query_start_loc[r + 1], at
    position seq_lens[r] - query_start_loc[r + 1] + t. The first value may be below or above 0 and the last above or below T:
    such values are not clamped, so the last token of a request is at its last position, though only tokens 0 to T - 1 exist.
    Values that do not ascend give unspecified scores, and no access outside of the arguments.
    Returns out [T, N] float32: out[t, s] = sum_h weights[t, h] * max(q[t, h] . k[s], 0) for positions s up to the token's
    own. All else is -inf: later positions, those without a block in the cache, and tokens that belong to no request.
    """

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        out: Tensor,
    ) -> Tensor: ...


BoundPrimitive = Callable[..., Any]
"""A callable of one of the Protocols above, chosen and configured for one Request."""
