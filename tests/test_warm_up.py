# SPDX-License-Identifier: Apache-2.0
"""After a layer's warm-up no step needs a compilation: of decodes, prefills, prompts behind contexts, an indexer's lists.

Triton's keys are compared before and after; kernels are not run while that is done.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from launch_keys import record_launches
from torch import Tensor

from mla_portable.attention import AttentionSpec, HeadDims, PromptAttention, SparseMLAAttention
from mla_portable.attention.slots import SlotAttention
from mla_portable.choose import get_registry
from mla_portable.contracts import Batch, Request
from mla_portable.contracts.values import INT32_MAX
from mla_portable.engines.common import warm_up
from mla_portable.layouts import LAYOUTS
from mla_portable.planner import Planner
from mla_portable.planner.prompts import plan_prompts
from mla_portable.primitives import INDEXER_SELECT
from mla_portable_triton import bind_indexer

HEADS, TOPK, BLOCK = 4, 64, 64
CPU = torch.device("cpu")


def spec(layout: str = "fp8_ds_mla", **changes: Any) -> AttentionSpec:
    given: dict[str, Any] = {
        "num_heads": HEADS,
        "softmax_scale": 0.1,
        "max_num_tokens": 48,
        "max_num_reqs": 16,
        "max_model_len": 256,
        "kv_layout": layout,
        "block_size": BLOCK,
        "topk": TOPK,
        "need_lse": False,
        "scale_format": "pow2" if LAYOUTS[layout].is_quantized else None,
    }
    return AttentionSpec(**given | changes)


def no_further(monkeypatch: pytest.MonkeyPatch, warm: Any, steps: Any) -> dict[str, int]:
    """The compilations that warm-up makes, by kernel; asserts that the steps make no other."""
    keys = record_launches(monkeypatch, runs=False)
    warm()
    made = set(keys.keys)
    assert made
    steps()
    late = {(kernel, key) for kernel, key in keys.keys if (kernel, key) not in made}
    assert not late, sorted(late)
    return keys.by_kernel()


STEPS = {
    "decodes": [([1] * count, [1 + 15 * r for r in range(count)]) for count in (1, 2, 3, 5, 7, 16)],
    "drafts": [([2] * count, [2 + 16 * r for r in range(count)]) for count in (1, 3, 8)],
    "prefills": [([7], [7]), ([40], [200]), ([20, 28], [20, 256]), ([3, 9], [250, 9])],
    "mixed": [([1, 1, 30], [5, 256, 130]), ([1, 9, 33], [200, 9, 33]), ([2, 2, 8], [70, 2, 8])],
}


def attend(layer: SparseMLAAttention, planner: Planner, query_lens: list[int], seq_lens: list[int], at: int) -> None:
    """One step, whose tables and lengths begin `at` elements into an engine's."""
    of, tokens = layer.spec, sum(query_lens)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    table = torch.zeros((16 + at, 5), dtype=torch.int32)[at : at + len(seq_lens), :4]
    lengths = torch.tensor([0] * at + seq_lens, dtype=torch.int32)[at:]
    plan = planner.plan(Batch(starts, np.array(seq_lens, np.int32), table, tokens, lengths))
    cache = torch.zeros((5, BLOCK, of.layout.row_width), dtype=of.layout.dtype)
    lists = torch.full((tokens + at, TOPK), -1, dtype=torch.int32)[at:]
    halves = [torch.zeros((tokens, HEADS, width), dtype=torch.bfloat16) for width in (512, of.rope_width)]
    layer.cache_write(halves[0][:, 0], halves[1][:, 0], cache, torch.full((tokens,), -1, dtype=torch.int64))
    layer.forward((halves[0], halves[1]), cache, lists, plan)


@pytest.mark.parametrize("route", ["direct", "split", "upconvert", "fused"])
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
def test_no_step_of_a_layer_compiles_after_its_warm_up(layout: str, route: str, monkeypatch: pytest.MonkeyPatch):
    layer = SparseMLAAttention(spec(layout, route=route, decode_query_len=2), device=CPU, backend="triton")
    planner = Planner(layer.planner_config())

    def steps() -> None:
        for kind in STEPS.values():
            for number, (query_lens, seq_lens) in enumerate(kind):
                attend(layer, planner, query_lens, seq_lens, number)

    made = no_further(monkeypatch, lambda: warm_up.warm_layer(layer), steps)
    assert "convert_indices_kernel" in made and "cache_write_kernel" in made
    assert ("gather_upconvert_kernel" in made) is (route in ("split", "upconvert"))


@pytest.mark.parametrize("dims", [HeadDims(128, 64, 128), HeadDims(256, 0, 256)], ids=["rope", "nope"])
def test_no_prompt_over_keys_of_each_head_compiles_after_warm_up(dims: HeadDims, monkeypatch: pytest.MonkeyPatch):
    of = spec("fp8_ds_mla" if dims.rope else "bf16_nope")
    attention = PromptAttention(of, dims, device=CPU, backend="triton")

    def project(rows: Tensor) -> Tensor:
        return torch.zeros((len(rows), HEADS * (dims.nope + dims.value)), dtype=torch.bfloat16)

    def attend_to(query_lens: list[int], seq_lens: list[int], at: int, key_rows: int, topk: int) -> None:
        new, table = sum(query_lens), torch.zeros((16 + at, 5), dtype=torch.int32)[at:, :4]
        lengths = np.array(query_lens, np.int32), np.array(seq_lens, np.int32)
        plan = plan_prompts(*lengths, table, topk=topk, key_rows=key_rows)
        query = torch.zeros((new, HEADS, dims.query), dtype=torch.bfloat16)
        latent = torch.zeros((new, 576), dtype=torch.bfloat16)
        cache = torch.zeros((5, BLOCK, of.layout.row_width), dtype=of.layout.dtype)
        lists = torch.full((new + at, TOPK), -1, dtype=torch.int32)[at:]
        attention.forward(query, latent[:, :512], latent[:, 512 : 512 + dims.rope], project, cache, lists, plan)

    def steps() -> None:
        prompts = [([7], [7]), ([40], [200]), ([20, 28], [20, 256]), ([3, 9], [250, 9]), ([5, 6, 7], [100, 101, 102])]
        for at, (query_lens, seq_lens) in enumerate(prompts):
            for key_rows in (attention.key_rows, 48):
                for topk in (TOPK, INT32_MAX):
                    attend_to(query_lens, seq_lens, at, key_rows, topk)

    made = no_further(monkeypatch, lambda: warm_up.warm_prompts(attention), steps)
    assert {"gather_upconvert_kernel", "masked_prefill_kernel", "merge_states_kernel", "pack_selection_kernel"} <= set(made)


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
def test_no_call_over_slots_compiles_after_warm_up(layout: str, monkeypatch: pytest.MonkeyPatch):
    layer = SlotAttention(spec(layout), device=CPU, backend="triton")
    cache = torch.zeros((5 * BLOCK, layer.spec.layout.row_width), dtype=layer.spec.layout.dtype)
    cache = cache.view(5, BLOCK, -1) if layer.spec.layout.is_quantized else cache

    def steps() -> None:
        for rows in (1, 2, 3, 5, 16, 40):
            query = torch.zeros((rows, HEADS, 576), dtype=torch.bfloat16)
            slots = torch.zeros((rows + 1, TOPK), dtype=torch.int32)[1:]
            for lengths in (None, torch.ones(rows + 1, dtype=torch.int32)[1:]):
                for decodes in (True, False):
                    layer.forward(query, cache, slots, softmax_scale=0.1, decodes=decodes, lengths=lengths)

    no_further(monkeypatch, lambda: warm_up.warm_slots(layer), steps)


@pytest.mark.parametrize("longest", [256, 10_000])
def test_no_width_of_an_indexers_lists_compiles_after_warm_up(longest: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bind_indexer, "bind_part", lambda request, own: own(request))
    facts = get_registry().facts(CPU)
    select = bind_indexer.bind_indexer_select(Request(INDEXER_SELECT, facts, kv_layout="index_fp8", topk=TOPK))
    made = partial(torch.zeros, dtype=torch.uint8)

    def warm() -> None:
        given: dict[str, Any] = {"num_heads": 64, "topk": TOPK, "longest": longest, "dtype": torch.float8_e4m3fn}
        warm_up.warm_indexer(select, lambda count: made((count, BLOCK, 132)), **given)

    def steps() -> None:
        for rows, requests in ((1, 1), (3, 3), (7, 1), (130, 130), (150, 2)):
            query, weights = made((rows, 64, 128)).view(torch.float8_e4m3fn), torch.zeros(rows, 64)
            for columns in sorted({1, 2, 3, 63, 64, 65, 100, 129, longest // BLOCK, -(-longest // BLOCK)}):
                if columns <= -(-longest // BLOCK):
                    starts, lengths = (
                        torch.zeros(requests + 2, dtype=torch.int32)[1:],
                        torch.ones(requests + 1, dtype=torch.int32),
                    )
                    table = torch.zeros((requests, columns + 1), dtype=torch.int32)[:, :columns]
                    select(query, weights, made((5, BLOCK, 132)), starts[1:], lengths[1:], table, topk=TOPK)

    no_further(monkeypatch, warm, steps)


def test_warm_up_writes_no_cache_of_the_engine_and_leaves_torchs_settings():
    layer = SparseMLAAttention(spec("bf16"), device=CPU, backend="reference")
    warm_up.warm_layer(layer)
    stride = BLOCK * 576 + 64
    cache = warm_up.scratch_cache(spec("bf16"), CPU, stride)
    assert cache.shape == (2, BLOCK, 576) and cache.stride() == (stride, 576, 1) and not cache.any()


def test_an_error_of_warm_up_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    layer = SparseMLAAttention(spec("bf16"), device=CPU, backend="reference")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(layer, "forward", fails)
    with pytest.raises(RuntimeError, match="no such kernel"):
        warm_up.warm_layer(layer)


@pytest.mark.parametrize(("limit", "ranges"), [(1, ()), (7, ()), (300, (5, 96)), (4096, (1024,))])
def test_rows_are_tried_on_both_sides_of_every_range(limit: int, ranges: tuple[int, ...]):
    rows = warm_up.row_counts(limit, ranges)
    assert rows == tuple(sorted(set(rows))) and rows[0] == 1 and max(rows) <= limit
    assert all(end in rows and end + 1 in rows for end in ranges if end < limit)
