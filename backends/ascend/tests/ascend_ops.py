# SPDX-License-Identifier: Apache-2.0
"""Strict stand-ins of the vendor's public operations, on a CPU: what their documents state, and nothing else.

Sources: vllm-ascend 182b75ea, csrc/attention (READMEs, adapters of torch, kernels) and its test of the quantised attention;
op-plugin 517f2e7d, docs/zh/custom_APIs/torch_npu and test/test_custom_ops. What a document forbids is an error here; what it
leaves open is the harmless reading, or one that the seed of the case decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

FOREVER = 2**63 - 1
LATENT, ROPE, PACKED, INDEX_WIDTH = 512, 64, 656, 128
A2_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
_STEP = 32
"""Query tokens that are computed at a time."""


def refuse_unless(holds: bool, words: str) -> None:
    if not holds:
        raise RuntimeError(f"NPU function error: call aclnn failed, error code is 161002\n[ERROR] {words}")


def dense(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], *, stride0: bool = False):
    """What every operation wants of a tensor. stride0: the first axis may be strided."""
    refuse_unless(isinstance(value, Tensor), f"{name} must be provided")
    refuse_unless(value.dtype in dtypes, f"{name} is {value.dtype}, expected one of {dtypes}")
    fits = value.dim() == len(shape) and all(want in (None, got) for got, want in zip(value.shape, shape, strict=True))
    refuse_unless(fits, f"{name} has shape {list(value.shape)}, expected {list(shape)}")
    refuse_unless(value.numel() > 0, f"{name} is empty")
    whole = value[0].is_contiguous() if stride0 else value.is_contiguous()
    refuse_unless(whole, f"{name} is not contiguous: strides {value.stride()}")


def lengths_of(name: str, value: Tensor, batch: int | None, *, cumulative: bool) -> list[int]:
    """Tokens of each request."""
    dense(name, value, (torch.int32,), (batch,))
    numbers = value.tolist()
    lengths = [b - a for a, b in zip([0, *numbers[:-1]], numbers, strict=True)] if cumulative else numbers
    refuse_unless(min(lengths) >= 0, f"{name}: {numbers}")
    return lengths


def owners(queries: list[int], keys: list[int], sparse_mode: int) -> tuple[Tensor, Tensor]:
    """Of each query token, its request, and how many positions of it count: all, or up to its own (rightDownCausal)."""
    owner = [request for request, count in enumerate(queries) for _ in range(count)]
    limit = []
    for count, length in zip(queries, keys, strict=True):
        limit += [length if sparse_mode == 0 else min(max(length - count + i + 1, 0), length) for i in range(count)]
    return torch.tensor(owner, dtype=torch.int64), torch.tensor(limit, dtype=torch.int64)


def pages_of(table: Tensor, keys: list[int], blocks: int, block_size: int) -> None:
    """Each request has the blocks of its whole length."""
    dense("block_table", table, (torch.int32,), (len(keys), None))
    refuse_unless(block_size % 16 == 0 and 0 < block_size <= 1024, f"block_size {block_size}")
    for row, length in zip(table.tolist(), keys, strict=True):
        needed = row[: -(-length // block_size)]
        refuse_unless(len(needed) * block_size >= length, "block_table is too narrow")
        refuse_unless(all(0 <= block < blocks for block in needed), f"block_table names {needed} of {blocks} blocks")


def listed(indices: Tensor, limit: Tensor) -> Tensor:
    """[T, K] bool: which entries an attention reads: before the first -1 and the first `limit` ones, of positions below it."""
    ended = (indices == -1).cumsum(1) > 0
    refuse_unless(bool((indices[ended] == -1).all()), "a valid index stands behind an invalid one")
    refuse_unless(bool((indices >= -1).all()), "an index below -1")
    entry = torch.arange(indices.shape[1])
    return ~ended & (entry < limit.unsqueeze(1)) & (indices < limit.unsqueeze(1))


def attended(q: Tensor, keys: Tensor, reads: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of q [t, H, 576] and the keys [t, K, 576] that were gathered: out [t, H, 512] float32, maximum and sum [t, H]."""
    keys = keys.masked_fill(~reads.unsqueeze(-1), 0)
    scores = torch.bmm(q.float(), keys.transpose(1, 2)) * scale
    scores.masked_fill_(~reads.unsqueeze(1), -math.inf)
    peak = scores.amax(-1)
    weights = (scores - peak.unsqueeze(-1)).exp()  # NaN in a row of nothing: no document says what that gives
    total = weights.sum(-1)
    return torch.bmm(weights / total.unsqueeze(-1), keys[..., :LATENT]), peak, total


class Operations:
    """The operations as they are on one family of devices.

    Attributes:
        strided: the first axis of a paged cache may be strided, and weights of the indexer are bf16 alone (A5). heads: that
            attention takes. index_heads: that the indexer takes.
        paged_lse: return_softmax_lse is taken with pages, as vllm-ascend's context parallelism calls it; False is what the
            documents say. calls: (operation, whether maximum and sum are asked for) of each call.
    """

    def __init__(self, *, strided: bool = False, heads: tuple[int, ...] = A2_HEADS, paged_lse: bool = True) -> None:
        self.strided, self.heads, self.paged_lse = strided, heads, paged_lse
        self.index_heads = (8, 16, 24, 32, 64) if strided else range(1, 65)
        self.calls: list[tuple[str, bool]] = []

    def npu_sparse_flash_attention(
        self, query, key, value, sparse_indices, scale_value, *, block_table=None, actual_seq_lengths_query=None,
        actual_seq_lengths_kv=None, query_rope=None, key_rope=None, sparse_block_size=1, layout_query="BSND",
        layout_kv="BSND", sparse_mode=3, pre_tokens=FOREVER, next_tokens=FOREVER, attention_mode=2, return_softmax_lse=False,
    ):  # fmt: skip
        self.calls.append(("npu_sparse_flash_attention", return_softmax_lse))
        refuse_unless((pre_tokens, next_tokens) == (FOREVER, FOREVER), "pre_tokens and next_tokens have one value")
        refuse_unless((sparse_block_size, attention_mode) == (1, 2), f"modes {sparse_block_size}, {attention_mode}")
        refuse_unless(sparse_mode in (0, 3), f"sparse_mode {sparse_mode}")
        refuse_unless(layout_query == "TND" and layout_kv in ("TND", "PA_BSND"), f"layouts {layout_query}, {layout_kv}")
        bf16, tokens, heads = (torch.bfloat16,), query.shape[0], query.shape[1]
        refuse_unless(heads in self.heads, f"N1 {heads}")
        dense("query", query, bf16, (None, None, LATENT))
        dense("query_rope", query_rope, bf16, (tokens, heads, ROPE))
        paged = layout_kv == "PA_BSND"
        shape = key.shape[:-1]
        for name, each, width in (("key", key, LATENT), ("value", value, LATENT), ("key_rope", key_rope, ROPE)):
            expected = (*shape[:2], 1, width) if paged else (shape[0], 1, width)
            dense(name, each, bf16, expected, stride0=paged and self.strided)
        refuse_unless(value.data_ptr() == key.data_ptr(), "value is not the tensor of key")
        latent, rope = (each.reshape(-1, each.shape[-1]) for each in (key, key_rope))
        rows = torch.cat([latent, rope], dim=-1).float()

        def gather(position: Tensor, owner: Tensor) -> Tensor:
            if paged:
                size = key.shape[1]
                block = block_table[owner.unsqueeze(1), position // size].long()
                return rows[block * size + position % size]
            return rows[position + starts[owner].unsqueeze(1)]

        queries = lengths_of("actual_seq_lengths_query", actual_seq_lengths_query, None, cumulative=True)
        keys = lengths_of("actual_seq_lengths_kv", actual_seq_lengths_kv, len(queries), cumulative=not paged)
        refuse_unless(sum(queries) == tokens, f"{tokens} query tokens, lengths {queries}")
        if paged:
            pages_of(block_table, keys, key.shape[0], key.shape[1])
            refuse_unless(self.paged_lse or not return_softmax_lse, "return_softmax_lse is not supported with PA_BSND")
        else:
            refuse_unless(block_table is None, "block_table with TND")
            refuse_unless(sum(keys) == key.shape[0], f"{key.shape[0]} keys, lengths {keys}")
        starts = torch.tensor([0, *keys[:-1]]).cumsum(0)
        q = torch.cat([query, query_rope], dim=-1)
        return self._attend(q, sparse_indices, scale_value, gather, queries, keys, sparse_mode, return_softmax_lse)

    def npu_kv_quant_sparse_flash_attention(
        self, query, key, value, sparse_indices, scale_value, *, key_quant_mode=1, value_quant_mode=1, key_dequant_scale=None,
        value_dequant_scale=None, block_table=None, actual_seq_lengths_query=None, actual_seq_lengths_kv=None,
        sparse_block_size=1, layout_query="BSND", layout_kv="BSND", sparse_mode=3, pre_tokens=FOREVER, next_tokens=FOREVER,
        attention_mode=2, quant_scale_repo_mode=1, tile_size=128, rope_head_dim=64, return_softmax_lse=False,
    ):  # fmt: skip
        self.calls.append(("npu_kv_quant_sparse_flash_attention", return_softmax_lse))
        refuse_unless((pre_tokens, next_tokens) == (FOREVER, FOREVER), "pre_tokens and next_tokens have one value")
        modes = key_quant_mode, value_quant_mode, quant_scale_repo_mode, tile_size, rope_head_dim, attention_mode
        refuse_unless(modes == (2, 2, 1, 128, 64, 2) and sparse_block_size == 1, f"modes {modes}, {sparse_block_size}")
        refuse_unless(sparse_mode in (0, 3), f"sparse_mode {sparse_mode}")
        refuse_unless(key_dequant_scale is None and value_dequant_scale is None, "reserved arguments")
        refuse_unless(layout_query == "TND" and layout_kv in ("TND", "PA_BSND"), f"layouts {layout_query}, {layout_kv}")
        tokens, heads, _ = query.shape
        refuse_unless(heads in (*A2_HEADS, *((48,) if self.strided else ())), f"Q_N {heads}")
        dense("query", query, (torch.bfloat16,), (None, None, LATENT + ROPE))
        paged, codes = layout_kv == "PA_BSND", (torch.int8, *((torch.float8_e4m3fn,) if self.strided else ()))
        shape = (*key.shape[:2], 1, PACKED) if paged else (key.shape[0], 1, PACKED)
        for name, each in (("key", key), ("value", value)):
            dense(name, each, codes, shape, stride0=paged and self.strided)
        refuse_unless(value.data_ptr() == key.data_ptr(), "value is not the tensor of key")
        queries = lengths_of("actual_seq_lengths_query", actual_seq_lengths_query, None, cumulative=True)
        keys = lengths_of("actual_seq_lengths_kv", actual_seq_lengths_kv, len(queries), cumulative=not paged)
        refuse_unless(sum(queries) == tokens, f"{tokens} query tokens, lengths {queries}")
        if paged:
            pages_of(block_table, keys, key.shape[0], key.shape[1])
        else:
            refuse_unless(block_table is None, "block_table with TND")
            refuse_unless(sum(keys) == key.shape[0], f"{key.shape[0]} keys, lengths {keys}")
        starts = torch.tensor([0, *keys[:-1]]).cumsum(0)

        def gather(position: Tensor, owner: Tensor) -> Tensor:
            if paged:
                size = key.shape[1]
                named = key[block_table[owner.unsqueeze(1), position // size].long(), position % size, 0]
            else:
                named = key[position + starts[owner].unsqueeze(1), 0]
            numbers, rope, scales = (
                part.contiguous() for part in named.view(torch.uint8).split([LATENT, 2 * ROPE, 16], dim=-1)
            )
            latent = numbers.view(key.dtype).float() * scales.view(torch.float32).repeat_interleave(tile_size, dim=-1)
            return torch.cat([latent.bfloat16().float(), rope.view(torch.bfloat16).float()], dim=-1)

        return self._attend(query, sparse_indices, scale_value, gather, queries, keys, sparse_mode, return_softmax_lse)

    def torch_npu_kv_quant_sparse_flash_attention(
        self, query, key, value, sparse_indices, scale_value, key_quant_mode, value_quant_mode, *, key_dtype=None,
        value_dtype=None, sinks=None, **keywords,
    ):  # fmt: skip
        """That of torch_npu: it returns the output alone."""
        refuse_unless(key_dtype is None and value_dtype is None and sinks is None, "hifloat8 and sinks are not simulated")
        modes = {"key_quant_mode": key_quant_mode, "value_quant_mode": value_quant_mode}
        refuse_unless("return_softmax_lse" not in keywords, "unexpected keyword argument 'return_softmax_lse'")
        call = self.npu_kv_quant_sparse_flash_attention
        return call(query, key, value, sparse_indices, scale_value, **modes, **keywords)[0]

    def _attend(self, q, sparse_indices, scale, gather, queries, keys, sparse_mode, lse):
        """Out [T, H, 512] bf16; maximum and sum [1, T, H] float32, or two empty tensors."""
        tokens, heads = q.shape[:2]
        dense("sparse_indices", sparse_indices, (torch.int32,), (tokens, 1, None))
        owner, limit = owners(queries, keys, sparse_mode)
        indices = sparse_indices[:, 0].long()
        reads = listed(indices, limit)
        out = q.new_empty((tokens, heads, LATENT))
        peak, total = (torch.empty((1, tokens, heads), dtype=torch.float32) for _ in range(2))
        for first in range(0, tokens, _STEP):
            part = slice(first, first + _STEP)
            rows = gather(torch.where(reads[part], indices[part], 0), owner[part])
            found, peak[0, part], total[0, part] = attended(q[part], rows, reads[part], scale)
            out[part] = found.to(out.dtype)
        return (out, peak, total) if lse else (out, torch.empty(0), torch.empty(0))

    def npu_lightning_indexer(
        self, query, key, weights, *, actual_seq_lengths_query=None, actual_seq_lengths_key=None, block_table=None,
        layout_query="BSND", layout_key="BSND", sparse_count=2048, sparse_mode=3, pre_tokens=FOREVER, next_tokens=FOREVER,
        return_value=False,
    ):  # fmt: skip
        self.calls.append(("npu_lightning_indexer", return_value))
        refuse_unless((pre_tokens, next_tokens) == (FOREVER, FOREVER), "pre_tokens and next_tokens have one value")
        refuse_unless((layout_query, layout_key) == ("TND", "PA_BSND"), f"layouts {layout_query}, {layout_key}")
        refuse_unless(sparse_mode in (0, 3), f"sparse_mode {sparse_mode}")
        refuse_unless(not return_value, "return_value is not supported with PA_BSND")
        refuse_unless(sparse_count in range(1, 2049) or sparse_count in range(3072, 8193, 1024), f"sparse_count {sparse_count}")
        bf16, (tokens, heads, _) = torch.bfloat16, query.shape
        refuse_unless(heads in self.index_heads, f"N1 {heads}")
        dense("query", query, (bf16,), (None, None, INDEX_WIDTH))
        dense("key", key, (bf16,), (None, None, 1, INDEX_WIDTH), stride0=self.strided)
        dense("weights", weights, (bf16,) if self.strided else (bf16, torch.float32), (tokens, heads))
        queries = lengths_of("actual_seq_lengths_query", actual_seq_lengths_query, None, cumulative=True)
        keys = lengths_of("actual_seq_lengths_key", actual_seq_lengths_key, len(queries), cumulative=False)
        refuse_unless(sum(queries) == tokens, f"{tokens} query tokens, lengths {queries}")
        pages_of(block_table, keys, key.shape[0], key.shape[1])
        _, limit = owners(queries, keys, sparse_mode)
        indices, first = torch.full((tokens, 1, sparse_count), -1, dtype=torch.int32), 0
        for request, (count, length) in enumerate(zip(queries, keys, strict=True)):
            blocks = block_table[request, : -(-length // key.shape[1])].long()
            rows = key[blocks].reshape(-1, INDEX_WIDTH)[:length].float()
            for token in range(first, first + count):
                seen = int(limit[token])
                scores = (query[token].float() @ rows[:seen].T).relu().T @ weights[token].float()
                chosen = torch.randperm(min(seen, sparse_count))  # no order is documented
                indices[token, 0, : len(chosen)] = scores.topk(len(chosen)).indices[chosen].to(torch.int32)
            first += count
        return indices, torch.empty(0, dtype=bf16)


SCHEMAS = {
    "npu_sparse_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *, Tensor? block_table=None, "
        "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, "
        "Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, "
        "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=2, "
        "bool return_softmax_lse=False) -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)"
    ),
    "npu_kv_quant_sparse_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *, int key_quant_mode=1, "
        "int value_quant_mode=1, Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None, Tensor? block_table=None, "
        "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, "
        "str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, int attention_mode=2, int quant_scale_repo_mode=1, int tile_size=128, "
        "int rope_head_dim=64, bool return_softmax_lse=False) "
        "-> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)"
    ),
    "npu_lightning_indexer": (
        "(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND', "
        "int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, "
        "bool return_value=False) -> (Tensor sparse_indices, Tensor sparse_values)"
    ),
}
"""Those of vllm-ascend's operators, as csrc/torch_binding.cpp defines them."""


@contextmanager
def vllm_ascend(operations: Operations, names: tuple[str, ...] = tuple(SCHEMAS)) -> Iterator[None]:
    """The operators of vllm-ascend, registered with torch."""
    with torch.library._scoped_library("_C_ascend", "FRAGMENT") as library:
        for name in names:
            library.define(name + SCHEMAS[name])
            library.impl(name, getattr(operations, name), "CPU")
        yield


@contextmanager
def torch_npu(operations: Operations, names: tuple[str, ...] = tuple(SCHEMAS)) -> Iterator[None]:
    """The functions of torch_npu, in sys.modules."""
    import sys

    module = ModuleType("torch_npu")
    for name in names:
        setattr(module, name, getattr(operations, f"torch_{name}", getattr(operations, name)))
    assert "torch_npu" not in sys.modules
    sys.modules["torch_npu"] = module
    try:
        yield
    finally:
        del sys.modules["torch_npu"]
