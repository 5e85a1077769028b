# SPDX-License-Identifier: Apache-2.0
"""What the host does for a layer of a step beside its kernels, counted: operations of torch, and what is looked at again.

In steps that are no CUDA graph the GPU waits for the host, so a view or an allocation in each layer is time of the step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_steps import BLOCKS, HEADS, SPEC, TOPK, make_step, plan_for, recorded_layer
from recorder import Recorder, registry_of
from test_prompts import DIMS, Prompts, make_prompts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_portable.accelerator import Accelerator
from mla_portable.attention import PromptAttention, SparseMLAAttention, checks
from mla_portable.contracts import InvalidArgument
from mla_portable.kit.split_kv import SPLIT_KV
from mla_portable.planner import prompts as prompt_plans
from mla_portable.planner.prompts import plan_prompts


class Host(TorchDispatchMode):
    """Counts views, allocations and other operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates = "empty" in func.name()
        self.kinds["view" if func.is_view else "allocation" if allocates else "operation"] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Any) -> dict[str, int]:
    """Of a second layer of a step."""
    call()
    with Host() as host:
        call()
    return dict(host.kinds)


class Kernels(Recorder):
    """A Recorder whose kernels return tensors where the layer goes on with them."""

    def _bind(self, request: Any) -> Any:
        call = super()._bind(request)
        kind = str(request.primitive)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            recorded = call(*args, **kwargs)
            if kind == "concat_mla_k":
                return args[0]
            if kind == "merge_states":
                return args[0][0], args[1][0]
            return recorded

        return kernel


def prompt_step(name: str, *, key_rows: int = 64) -> tuple[Prompts, PromptAttention, Tensor]:
    step = make_prompts(name, key_rows=key_rows)
    spec = replace(SPEC, max_num_tokens=32)
    plugin = Kernels(support={"head_dims": ((DIMS.query, DIMS.value),)})
    layer = PromptAttention(spec, DIMS, device="cpu", registry=registry_of(plugin), key_rows=max(key_rows, 32))
    return step, layer, torch.empty(len(step.q), HEADS, DIMS.value, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "key_rows", "most"),
    [
        # the projection by heads, then keys and values, in one operation
        ("short", 64, {"view": 2}),
        # and the latent and rotary columns of the gathered rows, which new tokens are copied to
        ("short with context", 64, {"view": 3, "allocation": 1, "operation": 2}),
        # and the selection of the step's tokens
        ("long with context", 128, {"view": 4, "allocation": 1, "operation": 2}),
    ],
)
def test_prompts_of_a_layer_make_few_views_and_one_buffer(name: str, key_rows: int, most: dict[str, int]):
    step, layer, out = prompt_step(name, key_rows=key_rows)
    projected = torch.empty(128, HEADS * (DIMS.nope + DIMS.value), dtype=torch.bfloat16)
    whole = {rows: projected[:rows] for rows in range(len(projected) + 1)}

    def call() -> None:
        layer(step.q, step.latent, step.rope, lambda rows: whole[rows.shape[0]], step.kv_cache, step.topk, step.plan, out=out)

    assert len(step.plan.parts) == 1
    assert counted(call) == most


def test_parts_of_the_keys_are_merged_with_two_copies_each_and_the_last_with_one():
    step, layer, out = prompt_step("long with context", key_rows=34)
    parts = len(step.plan.parts)
    assert parts == 4
    projected = torch.empty(128, HEADS * (DIMS.nope + DIMS.value), dtype=torch.bfloat16)
    whole = {rows: projected[:rows] for rows in range(len(projected) + 1)}

    def call() -> None:
        layer(step.q, step.latent, step.rope, lambda rows: whole[rows.shape[0]], step.kv_cache, step.topk, step.plan, out=out)

    # allocated: the rows of three parts, the last one has no context, and two for the partial results
    assert counted(call) == {"view": 20, "allocation": 3 + 2, "operation": 2 * (parts - 2) + 1}


@pytest.mark.parametrize(
    ("route", "most"), [("fused", {"view": 3}), ("direct", {"view": 7}), ("split", {"view": 9}), ("upconvert", {"view": 7})]
)
def test_a_layer_makes_views_of_what_is_its_own_alone(route: str, most: dict[str, int]):
    """The query and the result of each part, and the rows of the selection; all others are made once a step."""
    layer = SparseMLAAttention(
        replace(SPEC, route=route, decode_query_len=2, need_lse=False),
        device="cpu",
        registry=registry_of(Recorder(schedule_kind=SPLIT_KV)),
    )
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    plan, out = plan_for(layer, step.batch), torch.empty(14, HEADS, 512).bfloat16()
    assert counted(lambda: layer(step.q, step.kv_cache, step.topk_indices, plan, out=out)) == most


def test_a_cache_is_looked_at_once(monkeypatch: pytest.MonkeyPatch):
    looked: list[Any] = []
    own = checks.check_layer_cache
    monkeypatch.setattr(checks, "check_layer_cache", lambda *given, **named: looked.append(given[2]) or own(*given, **named))
    _, layer = recorded_layer("direct")
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    plan = plan_for(layer, step.batch)
    other = torch.zeros_like(step.kv_cache)
    for cache in (step.kv_cache, other, step.kv_cache, other.view(other.shape)):
        layer(step.q, cache, step.topk_indices, plan)
    assert [each.data_ptr() for each in looked] == [step.kv_cache.data_ptr(), other.data_ptr()]


def test_a_cache_that_passed_is_refused_once_it_is_another(monkeypatch: pytest.MonkeyPatch):
    """The same object, and the same address: what the check reads is compared, not who asks."""
    _, layer = recorded_layer("direct")
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    plan, cache = plan_for(layer, step.batch), step.kv_cache
    layer(step.q, cache, step.topk_indices, plan)
    for other in (cache[..., :640], cache.view(torch.int8), cache.flatten(0, 1)[:, None], cache.to("meta"), cache[:, ::2]):
        with pytest.raises(InvalidArgument, match="kv_cache"):
            layer(step.q, other, step.topk_indices, plan)
    cache.resize_(BLOCKS, cache.shape[1] // 2, cache.shape[2])
    with pytest.raises(InvalidArgument, match="kv_cache"):
        layer(step.q, cache, step.topk_indices, plan)


def test_whether_memory_can_be_pinned_is_found_out_once(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    prompt_plans._pins.cache_clear()
    monkeypatch.setattr(Accelerator, "can_pin", lambda self: bool(asked.append(self)))
    lengths, table = np.array([9, 5], dtype=np.int32), torch.zeros((2, 4), dtype=torch.int32)
    for _ in range(3):
        plan_prompts(lengths, lengths, table, topk=TOPK, key_rows=64)
    prompt_plans._pins.cache_clear()
    assert len(asked) == 1
