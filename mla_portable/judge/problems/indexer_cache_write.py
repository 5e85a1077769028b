# SPDX-License-Identifier: Apache-2.0
"""How indexer_cache_write is tried and judged: every byte of the cache, its guards and its gaps is compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from mla_portable.judge.problems.base import Problems
from mla_portable.judge.problems.cache_write import WriteParams, findings, write_of_request, write_params, write_variants
from mla_portable.judge.problems.compare import BITS
from mla_portable.judge.problems.exact import float32, nearest_code, plugin_layout, put_token
from mla_portable.layouts import INDEX_FP8, INDEX_HEAD_SIZE
from mla_portable.primitives import INDEXER_CACHE_WRITE


def scale_of_key(key: Tensor, scale_format: str) -> float:
    """The scale of 128 numbers of the indexer."""
    share = max(float(key.abs().max()), float(torch.tensor(1e-4))) / 448.0
    return 2.0 ** math.ceil(math.log2(share)) if scale_format == "pow2" else float(float32(torch.tensor(share).double()))


def indexer_cache_write(
    k: Tensor, index_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2", kv_layout: str | None = None
) -> Tensor:
    """The cache [blocks, block_size, width], contiguous, as it must be after the write; `index_cache` is left alone."""
    keys = k.cpu().double()
    cache = index_cache.detach().cpu().clone(memory_format=torch.contiguous_format)
    own, (blocks, size, width) = plugin_layout(kv_layout), cache.shape
    pages = cache.view(blocks, size * width)
    for token, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < blocks * size:
            continue
        if own is not None:
            put_token(cache, slot, keys[token], keys[token, :0], scale_format, own)
            continue
        page, at = pages[slot // size], slot % size
        if cache.dtype == torch.bfloat16:
            page[at * width : (at + 1) * width] = keys[token].to(torch.bfloat16)
        else:
            scale = scale_of_key(keys[token], scale_format)
            row = slice(at * INDEX_HEAD_SIZE, (at + 1) * INDEX_HEAD_SIZE)
            page[row] = nearest_code(float32(keys[token] / scale), torch.float8_e4m3fn)
            behind = size * INDEX_HEAD_SIZE + 4 * at
            page[behind : behind + 4] = torch.tensor([scale], dtype=torch.float32).view(torch.uint8)
    return cache


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerCacheWriteParams(WriteParams):
    """One indexer_cache_write call."""

    primitive = INDEXER_CACHE_WRITE
    names = ("k", "index_cache")


PROBLEMS: Final = Problems(
    primitive=INDEXER_CACHE_WRITE,
    oracle=indexer_cache_write,
    tolerances={("any", "cache"): BITS},
    findings=findings,
    params=partial(write_params, IndexerCacheWriteParams, values=["plain", "edges", "zero"]),
    of_request=partial(write_of_request, IndexerCacheWriteParams, INDEX_FP8),
    sizes=("block_size",),
    variants=write_variants,
)
