# SPDX-License-Identifier: Apache-2.0
"""A DSA indexer layer from vLLM's real classes: SparseAttnIndexer, its cache and its metadata builder, on the CPU.

Only the projections are missing: queries, keys and weights are invented. vLLM's Triton kernels, which prepare what its own
kernels read, are switched off; the fused path must not need them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_engine import BLOCK, CPU, MAX_LEN, MAX_REQS, MAX_TOKENS, make_config

HEADS, WIDTH, TOPK = 8, 128, 16
NAME = "model.layers.0.self_attn.indexer.k_cache"
LAYER = "vllm.model_executor.layers.sparse_attn_indexer"
BUILDER = "vllm.v1.attention.backends.mla.indexer"


@dataclass
class IndexerEngine:
    """One indexer with its builder and cache."""

    config: Any
    layer: Any
    builder: Any
    topk: Tensor
    kv_cache: Tensor


class _NoKernel:
    """Stands for a Triton kernel of vLLM's, however it is launched."""

    def __getitem__(self, grid: Any) -> _NoKernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = importlib.import_module(BUILDER)
    names = ("_BUILD_PREFILL_CHUNK_METADATA_KERNEL", "_PREPARE_UNIFORM_DECODE_KERNEL", "_prepare_uniform_decode_kernel")
    present = [name for name in names if hasattr(builder, name)]
    assert len(present) == 2
    for name in present:
        monkeypatch.setattr(builder, name, _NoKernel())
    monkeypatch.setattr(builder, "num_compute_units", lambda index: 4)


def make_indexer(
    *, drafts: int = 0, blocks: int = 40, gap: int = 0, buffer_width: int = TOPK, layer_class: Any = None
) -> IndexerEngine:
    """An indexer whose cache holds NaN. `gap`: rows between its blocks. layer_class: SparseAttnIndexer where None."""
    indexer, deepseek = importlib.import_module(LAYER), importlib.import_module("vllm.model_executor.models.deepseek_v2")
    config = make_config(drafts=drafts)
    config.compilation_config.custom_ops = ["all"]
    topk = torch.full((MAX_TOKENS, buffer_width), 77, dtype=torch.int32)
    with set_current_vllm_config(config):
        cache = deepseek.DeepseekV32IndexerCache(WIDTH + 4, torch.uint8, NAME, config.cache_config)
        layer_class = layer_class or indexer.SparseAttnIndexer
        layer = layer_class(cache, WIDTH, "ue8m0", TOPK, WIDTH, MAX_LEN, 40 * MAX_LEN, topk)
        spec = cache.get_kv_cache_spec(config).copy_with_new_block_size(BLOCK)
        kind = cache.get_attn_backend().get_builder_cls()
        ranks = config.parallel_config.decode_context_parallel_size
        builder = kind(spec, [NAME], config, CPU, block_table_width=-(-MAX_LEN // BLOCK // ranks))
    cache.kv_cache = torch.full((blocks, BLOCK + gap, WIDTH + 4), 0xFF, dtype=torch.uint8)[:, :BLOCK]
    return IndexerEngine(config, layer, builder, topk, cache.kv_cache)


@dataclass
class IndexerStepInputs:
    """A batch: `common` as vLLM's runner describes it, and what a layer is called with. `keys` of every request's positions."""

    common: CommonAttentionMetadata
    requests: list[int]
    positions: list[int]
    keys: list[Tensor]
    q: Tensor
    k: Tensor
    weights: Tensor


def make_batch(
    engine: IndexerEngine,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    padded_tokens: int | None = None,
    padded_reqs: int | None = None,
    shared_blocks: int = 0,
    seed: int = 0,
) -> IndexerStepInputs:
    """Requests whose earlier tokens are in the cache, and whose new ones come with the call.

    shared_blocks: blocks that every request begins with, as with prefix caching.
    """
    random = torch.Generator().manual_seed(seed)
    num_tokens, num_reqs = sum(query_lens), len(query_lens)
    tokens, reqs = padded_tokens or num_tokens, padded_reqs or num_reqs
    table = torch.zeros((reqs, MAX_LEN // BLOCK), dtype=torch.int32)
    free = (1 + torch.randperm(len(engine.kv_cache) - 1, generator=random)).tolist()
    prefix = [free.pop() for _ in range(shared_blocks)]
    first_keys = torch.randn((shared_blocks * BLOCK, WIDTH), generator=random).to(torch.bfloat16)
    keys: list[Tensor] = []
    slots, k, requests, positions = [], [], [], []
    for r, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        used = -(-length // BLOCK)
        blocks = [*prefix, *(free.pop() for _ in range(used - len(prefix)))]
        table[r, :used] = torch.tensor(blocks[:used], dtype=torch.int32)
        own = torch.randn((length - len(first_keys), WIDTH), generator=random).to(torch.bfloat16)
        keys.append(torch.cat([first_keys, own]))
        its_slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)]
        write(engine.kv_cache, keys[r][: length - query], its_slots[: length - query])
        slots += its_slots[length - query :]
        k.append(keys[r][length - query :])
        requests += [r] * query
        positions += range(length - query, length)
    starts = torch.zeros(reqs + 1, dtype=torch.int32)
    starts[1 : num_reqs + 1] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
    starts[num_reqs + 1 :] = num_tokens
    lengths = torch.zeros(reqs, dtype=torch.int32)
    lengths[:num_reqs] = torch.tensor(seq_lens, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=lengths.clone(),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=reqs,
        num_actual_tokens=tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots + [-1] * (tokens - num_tokens)),
    )
    q = torch.randn((tokens, HEADS, WIDTH), generator=random).to(torch.float8_e4m3fn)
    weights = torch.randn((tokens, HEADS), generator=random, dtype=torch.float32)
    new = torch.cat([*k, torch.full((tokens - num_tokens, WIDTH), float("nan"))]).to(torch.bfloat16)
    assert max(seq_lens) <= MAX_LEN and tokens <= MAX_TOKENS and reqs <= MAX_REQS
    return IndexerStepInputs(common, requests, positions, keys, q, new, weights)


def write(kv_cache: Tensor, keys: Tensor, slots: Sequence[int]) -> None:
    """Put keys into pages as vLLM does, by its rule, one token at a time."""
    for key, slot in zip(keys, slots, strict=True):
        codes, scale = quantised(key)
        page, offset = kv_cache[slot // BLOCK].view(-1), slot % BLOCK
        page[offset * WIDTH : (offset + 1) * WIDTH] = codes.view(torch.uint8)
        page[BLOCK * WIDTH + 4 * offset : BLOCK * WIDTH + 4 * offset + 4] = scale.view(torch.uint8)


def quantised(key: Tensor) -> tuple[Tensor, Tensor]:
    """[128] e4m3 and [1] float32: a power of two."""
    scale = torch.exp2(torch.ceil(torch.log2(key.float().abs().amax().clamp(min=1e-4) / 448)))
    return (key.float() / scale).to(torch.float8_e4m3fn), scale.reshape(1)


def expected(step: IndexerStepInputs) -> list[list[int]]:
    """For each token the positions of the largest scores in float64, ascending."""
    chosen: list[list[int]] = []
    for token, (request, position) in enumerate(zip(step.requests, step.positions, strict=True)):
        values = []
        for key in step.keys[request][: position + 1]:
            codes, scale = quantised(key)
            products = step.q[token].double() @ (codes.double() * scale.double())
            values.append(float((step.weights[token].double() * products.clamp(min=0)).sum()))
        best = sorted(range(position + 1), key=lambda p: -values[p])[:TOPK]
        chosen.append(sorted(best))
    return chosen


def run(engine: IndexerEngine, step: IndexerStepInputs, *, capture: bool = False) -> Any:
    """Build the metadata and call the layer, as the model does. Returns: the metadata."""
    build = engine.builder.build_for_cudagraph_capture if capture else lambda common: engine.builder.build(0, common)
    metadata = build(step.common)
    call(engine, step, {NAME: metadata})
    return metadata


def call(engine: IndexerEngine, step: IndexerStepInputs, metadata: Any, rows: int | None = None) -> Tensor:
    """`rows`: of every tensor, where a piecewise graph pads them."""
    more = (rows or len(step.q)) - len(step.q)
    hidden = torch.zeros((len(step.q) + more, 4), dtype=torch.bfloat16)
    k = torch.cat([step.k, torch.full((more, WIDTH), float("nan"), dtype=torch.bfloat16)])
    with set_forward_context(metadata, engine.config):
        return engine.layer(hidden, step.q, k, step.weights)


def check(engine: IndexerEngine, step: IndexerStepInputs) -> None:
    """The buffer holds what the oracle chose, then -1; rows of padding hold -1."""
    wanted = expected(step)
    for token in range(len(step.q)):
        row = engine.topk[token, :TOPK].tolist()
        best = wanted[token] if token < len(wanted) else []
        assert row == best + [-1] * (TOPK - len(best)), f"token {token}"
