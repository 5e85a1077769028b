# SPDX-License-Identifier: Apache-2.0
"""A layout is named where dtype and row width do not tell it: in every public function, and in layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from invented_layouts import INT8, INT8_KEYS, known
from torch import Tensor

import mla_portable
from mla_portable.attention import AttentionSpec, SlotAttention, SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.contracts import Batch, InvalidArgument, Primitive
from mla_portable.engines.common.index_keys import facts_of_pages
from mla_portable.kit.rules import check_cache
from mla_portable.layouts import BF16, FP8_DS_MLA, INDEX, INDEX_FP8, KV, CacheLayout, layout_of
from mla_portable.planner import Planner

CPU = torch.device("cpu")
BLOCKS, BLOCK, HEADS, TOPK = 6, 4, 3, 5
TOKENS = BLOCKS * BLOCK


@pytest.fixture(autouse=True)
def invented() -> Iterator[None]:
    with known(INT8, INT8_KEYS):
        yield


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def cached(layout: CacheLayout) -> Tensor:
    """[BLOCKS, BLOCK, row width], written by the layout itself."""
    rows = layout.pack(normal(TOKENS, 512), normal(TOKENS, 64, seed=2), layout.scale_formats[0])
    return rows.view(BLOCKS, BLOCK, layout.row_width)


def index_pages(layout: CacheLayout) -> Tensor:
    pages = torch.zeros(BLOCKS, BLOCK, layout.row_width, dtype=layout.dtype)
    rows = layout.pack(normal(TOKENS, 128), normal(TOKENS, 0), layout.scale_formats[0]).view(BLOCKS, BLOCK, -1)
    parts = layout.parts(pages)
    for part, values in zip(parts, rows.split([part.shape[2] for part in parts], dim=2), strict=True):
        part.copy_(values)
    return pages


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention(cache: Tensor, decode: bool, **keywords: Any) -> Tensor:
    q = normal(2, HEADS, 576, seed=3)
    indices = int32([0, 3, -1, 23, 7], [9, 9, 1, -1, -1])
    if decode:
        return mla_portable.sparse_decode(q[:, None], cache, indices[:, None], softmax_scale=0.1, **keywords)[0]
    return mla_portable.sparse_prefill(q, cache, indices, softmax_scale=0.1, **keywords)[0]


def scored(pages: Tensor, select: bool, **keywords: Any) -> Tensor:
    q = normal(2, HEADS, 128, seed=3).to(torch.float8_e4m3fn)
    arguments = q, torch.ones(2, HEADS), pages, int32(0, 2), int32(TOKENS), torch.arange(BLOCKS, dtype=torch.int32)[None]
    if select:
        return mla_portable.indexer_select(*arguments, topk=TOPK, **keywords)
    return mla_portable.indexer_logits(*arguments, out=torch.empty(2, TOKENS), **keywords)


def gathered(cache: Tensor, **keywords: Any) -> Tensor:
    table = torch.arange(BLOCKS, dtype=torch.int32)[None]
    out = torch.zeros(TOKENS, 576, dtype=torch.bfloat16)
    return mla_portable.gather_upconvert(cache, table, int32(TOKENS), int32(0), out=out, **keywords)


def written(cache: Tensor, **keywords: Any) -> Tensor:
    cache = cache.clone()
    mla_portable.cache_write(normal(2, 512, seed=4), normal(2, 64, seed=5), cache, torch.tensor([3, 20]), **keywords)
    return cache


def keys_written(pages: Tensor, **keywords: Any) -> Tensor:
    pages = pages.clone()
    mla_portable.indexer_cache_write(normal(2, 128, seed=4), pages, torch.tensor([3, 20]), **keywords)
    return pages


def rows_made(cache: Tensor, **keywords: Any) -> Tensor:
    """Of numbers that are 1 or -1, which a norm leaves alone, and keys that are not turned."""
    cache, latent = cache.clone(), torch.cat([normal(2, 512, seed=4).sign(), normal(2, 64, seed=5)], dim=1)
    table, slots = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], dim=1), torch.tensor([3, 20])
    mla_portable.norm_rope_write(
        *(None, latent, None, torch.zeros(2, dtype=torch.int64), table), q_norm=None, kv_norm=torch.ones(512), eps=1e-30,
        kv_cache=cache, slot_mapping=slots, q_out=None, **keywords,
    )  # fmt: skip
    return cache


CALLS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "sparse_decode": (KV, lambda cache, **keywords: attention(cache, True, **keywords)),
    "sparse_prefill": (KV, lambda cache, **keywords: attention(cache, False, **keywords)),
    "gather_upconvert": (KV, gathered),
    "cache_write": (KV, written),
    "indexer_cache_write": (INDEX, keys_written),
    "norm_rope_write": (KV, rows_made),
    "indexer_logits": (INDEX, lambda pages, **keywords: scored(pages, False, **keywords)),
    "indexer_select": (INDEX, lambda pages, **keywords: scored(pages, True, **keywords)),
}
OF_CACHE = {KV: (FP8_DS_MLA, INT8, cached), INDEX: (INDEX_FP8, INT8_KEYS, index_pages)}


def test_every_public_function_over_a_cache_takes_a_name():
    over_caches = {str(primitive) for primitive in Primitive.all() if primitive.cache and primitive.reference}
    assert over_caches == CALLS.keys() | {"indexer_logits_ragged"}
    for name in over_caches:
        assert inspect.signature(getattr(mla_portable, name)).parameters["kv_layout"].default is None


@pytest.mark.parametrize("name", CALLS)
def test_a_named_layout_is_read_as_that_and_no_name_as_the_cores(name: str):
    cache, call = CALLS[name]
    core, invented, make = OF_CACHE[cache]
    writes = {"scale_format": "int8"} if name.endswith("write") else {}
    of_core, of_invented = call(make(core)), call(make(invented), kv_layout=invented.name, **writes)
    assert torch.equal(call(make(core), kv_layout=core.name), of_core)
    if not writes:
        assert not torch.equal(call(make(invented)), of_invented)  # without a name they are read as the core's
    if not writes and name != "indexer_select":  # the same tokens, coded otherwise
        finite = of_core.isfinite()
        torch.testing.assert_close(
            of_invented[finite].float(), of_core[finite].float(), rtol=0.2, atol=4.0 if cache == INDEX else 0.2
        )
    if writes:
        tokens, rope = (
            (normal(2, 128, seed=4), normal(2, 0)) if cache == INDEX else (normal(2, 512, seed=4), normal(2, 64, seed=5))
        )
        if name == "norm_rope_write":
            tokens = tokens.sign()
        rows = of_invented.view(TOKENS, -1)[[3, 20]]
        assert torch.equal(rows, invented.pack(tokens, rope))


@pytest.mark.parametrize("name", CALLS)
def test_where_several_layouts_fit_the_error_lists_them(name: str):
    cache, call = CALLS[name]
    core, invented, make = OF_CACHE[cache]
    with known(replace(invented, name="other", inferred=True)):
        with pytest.raises(
            InvalidArgument, match=f"{core.name} and other have such rows.*Pass kv_layout=, one of '{core.name}', 'other'"
        ):
            call(make(core))
        call(make(core), kv_layout=core.name)


@pytest.mark.parametrize("name", CALLS)
def test_a_name_that_does_not_fit_is_refused(name: str):
    cache, call = CALLS[name]
    core, _, make = OF_CACHE[cache]
    narrow = "bf16" if cache == KV else "index_bf16"
    with pytest.raises(InvalidArgument, match=rf"uint8 rows of .*expected torch.bfloat16 rows of .*\({narrow}\)"):
        call(make(core), kv_layout=narrow)
    with pytest.raises(InvalidArgument, match=r"kv_layout: got 'nothing', expected one of"):
        call(make(core), kv_layout="nothing")
    other_cache = "index_fp8" if cache == KV else "fp8_ds_mla"
    with pytest.raises(InvalidArgument, match=f"kv_layout: got '{other_cache}', expected one of"):
        call(make(core), kv_layout=other_cache)


def test_a_layout_that_is_never_inferred_is_named_in_the_error():
    lonely = replace(INT8, name="lonely", row_width=660)
    with known(lonely), pytest.raises(InvalidArgument, match=r"Pass kv_layout='lonely', which is never inferred"):
        layout_of(torch.zeros(1, 660, dtype=torch.uint8))


def test_a_second_cache_has_the_layout_of_the_first():
    q, slots = normal(2, 1, HEADS, 576, seed=3), int32([[0, 3]], [[9, 1]])
    extra = {"extra_kv_cache": cached(INT8), "extra_indices": slots}
    out, _ = mla_portable.sparse_decode(q, cached(INT8), slots, softmax_scale=0.1, kv_layout=INT8.name, **extra)
    alone, _ = mla_portable.sparse_decode(q, cached(INT8), slots, softmax_scale=0.1, kv_layout=INT8.name)
    torch.testing.assert_close(out, alone)  # every key twice
    with pytest.raises(InvalidArgument, match=r"extra_kv_cache: .*expected torch.bfloat16 rows of 576 \(bf16\)"):
        mla_portable.sparse_decode(q, torch.zeros(2, 4, 576).bfloat16(), slots, softmax_scale=0.1, **extra)


def spec(layout: CacheLayout, **changes: Any) -> AttentionSpec:
    given = {"kv_layout": layout.name, "block_size": BLOCK, "topk": TOPK, "num_heads": HEADS, "softmax_scale": 0.1}
    return AttentionSpec(**given, max_num_tokens=8, max_num_reqs=4, max_model_len=TOKENS, **changes)


@pytest.mark.parametrize("route", ["direct", "split", "fused", "upconvert"])
def test_a_layer_uses_its_specs_layout_on_every_route(route: str):
    layer = SparseMLAAttention(spec(INT8, route=route), device="cpu", registry=Registry(environ={}), backend="reference")
    cache = torch.zeros(BLOCKS, BLOCK, INT8.row_width, dtype=torch.uint8)
    latent, rope = normal(TOKENS, 512), normal(TOKENS, 64, seed=2)
    layer.cache_write(latent, rope, cache, torch.arange(TOKENS))
    assert torch.equal(cache, cached(INT8))
    table = torch.arange(BLOCKS, dtype=torch.int32).view(2, 3)
    starts, seq_lens = np.array([0, 1, 5], dtype=np.int32), np.array([9, 12], dtype=np.int32)
    plan = Planner(layer.planner_config()).plan(Batch(starts, seq_lens, table))
    positions = torch.stack([torch.randperm(9)[:TOPK] for _ in range(5)]).to(torch.int32)
    q = normal(5, HEADS, 576, seed=3)
    out, _ = layer.forward(q, cache, positions, plan)
    request = torch.tensor([0, 1, 1, 1, 1])[:, None]
    slots = table[request, positions // BLOCK] * BLOCK + positions % BLOCK
    want, _ = mla_portable.sparse_prefill(q, cache, slots, softmax_scale=0.1, kv_layout=INT8.name, backend="reference")
    torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)


def test_slot_attention_uses_its_specs_layout():
    layer = SlotAttention(spec(INT8, need_lse=False), device="cpu", registry=Registry(environ={}), backend="reference")
    q, slots = normal(2, HEADS, 576, seed=3), int32([0, 3, -1, 23, 7], [9, 9, 1, -1, -1])
    want = attention(cached(INT8), False, kv_layout=INT8.name, backend="reference")
    for decodes in (False, True):
        out = layer.forward(q, cached(INT8), slots, softmax_scale=0.1, decodes=decodes)
        assert torch.equal(out, want)


def test_the_facts_of_a_cache_are_worked_out_once():
    found = check_cache("test", "kv_cache", cached(INT8), CPU, kv_layout=INT8.name)
    assert found._asdict() == {"kv_layout": "int8_656", "block_size": BLOCK, "cache_alignment": 16, "uneven_blocks": False}
    padded = torch.zeros(BLOCKS, BLOCK * 656 + 16, dtype=torch.uint8)[:, :-16].unflatten(1, (BLOCK, 656))
    assert check_cache("test", "kv_cache", padded, CPU).uneven_blocks


@pytest.mark.parametrize(("block_size", "uneven"), [(64, False), (32, False), (16, True)])
def test_blocks_of_index_keys_are_uneven_by_the_distance_between_rows(block_size: int, uneven: bool):
    pages = torch.zeros(3, block_size, INDEX_FP8.row_width, dtype=torch.uint8)
    assert (block_size * INDEX_FP8.row_width) % INDEX_FP8.row_pitch == (64 if uneven else 0)
    assert facts_of_pages(pages, "test")["uneven_blocks"] is uneven
    assert check_cache("test", "index_cache", pages, CPU, INDEX).uneven_blocks is uneven


def test_upconverted_rows_keep_the_layout_of_the_workspace():
    out = gathered(cached(INT8), kv_layout=INT8.name)
    latent, rope = INT8.split(cached(INT8).view(TOKENS, -1), torch.bfloat16)
    assert torch.equal(out, torch.cat([latent, rope], dim=1))
    assert layout_of(out) is BF16
