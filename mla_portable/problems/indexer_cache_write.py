# SPDX-License-Identifier: Apache-2.0
"""How indexer_cache_write is tried and judged: every byte of the cache, its guards and its gaps is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request, Support
from mla_portable.layouts import INDEX_FP8, INDEX_HEAD_SIZE, LAYOUTS
from mla_portable.primitives import INDEXER_CACHE_WRITE
from mla_portable.problems.base import Params, Problems
from mla_portable.problems.cache_write import NUM_TOKENS, edges, findings, skip
from mla_portable.problems.compare import BITS, Finding
from mla_portable.problems.cover import Choice, covering
from mla_portable.problems.draw import PAIR_BLOCK, generator, paged_cache, shuffled
from mla_portable.problems.exact import float32, nearest_code
from mla_portable.problems.shapes import block_sizes, can_capture, storages
from mla_portable.problems.stage import Problem, Results, Stage

__all__ = ["PROBLEMS", "IndexerCacheWriteParams", "indexer_cache_write"]


def _scale(key: Tensor, scale_format: str) -> float:
    share = max(float(key.abs().max()), float(torch.tensor(1e-4))) / 448.0
    return 2.0 ** math.ceil(math.log2(share)) if scale_format == "pow2" else float(float32(torch.tensor(share).double()))


def indexer_cache_write(k: Tensor, index_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2") -> Tensor:
    """The cache [blocks, block_size, width], contiguous, as it must be after the write; `index_cache` is left alone."""
    keys = k.cpu().double()
    cache = index_cache.detach().cpu().clone(memory_format=torch.contiguous_format)
    blocks, size, width = cache.shape
    pages = cache.view(blocks, size * width)
    for token, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < blocks * size:
            continue
        page, at = pages[slot // size], slot % size
        if cache.dtype == torch.bfloat16:
            page[at * width : (at + 1) * width] = keys[token].to(torch.bfloat16)
        else:
            scale = _scale(keys[token], scale_format)
            row = slice(at * INDEX_HEAD_SIZE, (at + 1) * INDEX_HEAD_SIZE)
            page[row] = nearest_code(float32(keys[token] / scale), torch.float8_e4m3fn)
            behind = size * INDEX_HEAD_SIZE + 4 * at
            page[behind : behind + 4] = torch.tensor([scale], dtype=torch.float32).view(torch.uint8)
    return cache


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerCacheWriteParams(Params):
    """One indexer_cache_write call; the parameters are those of cache_write's, but for values "zero": a key that is all 0."""

    primitive = INDEXER_CACHE_WRITE
    says = "{kv}! {scale_format} b{block_size}! {dtype} t{tokens} skips_{skips} {values} in{inputs} {blocks}"
    asks = "kv_layout=kv block_size rows=tokens scale_format"
    kv: str
    scale_format: str | None
    block_size: int
    dtype: torch.dtype = torch.bfloat16
    tokens: int = NUM_TOKENS
    skips: str = "none"
    values: str = "plain"
    inputs: str = "packed"
    blocks: str = "packed"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, layout = generator(seed), Stage(device), LAYOUTS[self.kv]
        plain = torch.randn(self.tokens, INDEX_HEAD_SIZE, generator=g) * 3
        k = (edges(self.tokens, INDEX_HEAD_SIZE, g) if self.values == "edges" else plain).to(self.dtype)
        scale_format = self.scale_format or "pow2"
        num_blocks = 2 if self.blocks == "pair" else max(3, -(-3 * NUM_TOKENS // self.block_size))
        cache = paged_cache(layout, num_blocks, self.block_size, strided=self.blocks != "packed")
        num_slots = num_blocks * self.block_size
        slots = torch.cat([torch.tensor([0, num_slots - 1]), shuffled(num_slots - 2, g) + 1])[: self.tokens]
        if self.skips == "near":  # what wraps around meets a slot that nobody writes
            slots = shuffled(num_slots - 4, g)[: self.tokens] + 2
        slots = skip(self.skips, slots, num_slots)[shuffled(self.tokens, g)]
        if self.values == "zero":
            k[((slots >= 0) & (slots < num_slots)).nonzero()[:1, 0]] = 0
        args = {
            "k": stage.read("k", k, strided=self.inputs == "views"),
            "index_cache": stage.adopt("kv_cache", cache.storage, cache.view),
            "slot_mapping": stage.read("slot_mapping", slots),
        }
        want = cache.storage.clone()
        whole = want.view(layout.dtype).as_strided(cache.view.shape, cache.view.stride(), cache.view.storage_offset())
        whole.copy_(indexer_cache_write(k, cache.view, slots, scale_format=scale_format))

        def judge(results: Results, stage: Stage) -> Iterator[Finding]:
            got = stage.writes["kv_cache"].storage.view(torch.uint8).cpu()
            yield from findings(scale_format, {"kv_cache": got}, {"kv_cache": want})

        return Problem(stage, args, {"scale_format": scale_format}, {}, judge)


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[IndexerCacheWriteParams]:
    """What a level asks of an implementation of indexer_cache_write."""
    axes: dict[str, list[Any]] = {
        "storage": storages(implementation),
        "block_size": block_sizes(implementation, facts, level),
        "values": ["plain", "edges", "zero"],
        "skips": ["none", "some", "corpus"],
        "dtype": [torch.bfloat16, torch.float16],
        "inputs": ["packed", "views"],
        "blocks": ["packed", "strided"],
        "run": ["once", "repeat"],
    }
    if not all(axes.values()):
        return

    def allowed(choice: Choice) -> bool:
        return IndexerCacheWriteParams.claimed(implementation, facts, choice)

    for choice in covering(axes, strength={"smoke": 1, "quick": 2, "full": 3}[level], allowed=allowed):
        yield IndexerCacheWriteParams.of(choice)
    for kv, scale_format in axes["storage"]:
        base = IndexerCacheWriteParams(kv=kv, scale_format=scale_format, block_size=axes["block_size"][-1])
        yield replace(base, tokens=0)
        if level != "smoke" and base.block_size >= PAIR_BLOCK:
            yield replace(base, blocks="pair")
        if level != "smoke" and can_capture(implementation, facts):
            yield replace(base, run="graph", skips="corpus")


def _variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    """What a probe writes: every scale format that is declared."""
    if LAYOUTS[request.kv_layout or INDEX_FP8.name].is_quantized:
        for scale_format in support.scale_formats:
            yield f"skip, {scale_format} scales", request.but(scale_format=scale_format)
    else:
        yield "skip", request


def _of_request(request: Request, name: str) -> IndexerCacheWriteParams:
    layout = LAYOUTS[request.kv_layout or INDEX_FP8.name]
    return IndexerCacheWriteParams(
        kv=layout.name,
        scale_format=(request.scale_format or "pow2") if layout.is_quantized else None,
        block_size=request.block_size or 16,
        skips="near",
        values="zero",
    )


PROBLEMS: Final = Problems(
    primitive=INDEXER_CACHE_WRITE,
    oracle=indexer_cache_write,
    tolerances={("any", "cache"): BITS},
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("block_size",),
    variants=_variants,
)
