# SPDX-License-Identifier: Apache-2.0
"""Layers without an indexer attend to the selection of an earlier layer, whose slots are converted once for all of them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.worker import workspace
from vllm.v1.worker.utils import AttentionGroup
from vllm_engine import CPU, MAX_TOKENS, TOPK, make_engine, make_layer, make_step

from mla_portable.engines.vllm import selections
from mla_portable.engines.vllm.backend import MLAPortableBackend

INDEXERS = (True, False, False, True, False)
"""As `indexer_types` of hy_v4 or `index_topk_pattern` of GLM-5.2 say it: whether a layer selects."""


class Model:
    """The layers of a model with caches of their own, as vLLM builds them; `builders` of each group of layers."""

    def __init__(
        self, indexers: tuple[bool, ...], groups: list[list[int]] | None = None, dtype: str = "fp8", **more: Any
    ) -> None:
        first = make_engine(dtype, with_indexer=indexers[0], **more)
        first.builder = None
        self.engine, self.engines = first, [first]
        for number, has in list(enumerate(indexers))[1:]:
            layer = make_layer(first.config, first.topk, number, with_indexer=has)
            self.engines.append(replace(first, layer=layer, kv_cache=first.kv_cache.clone()))
        self.groups = groups or [list(range(len(indexers)))]
        self.make_builders()

    def make_builders(self, microbatches: int = 1) -> None:
        self.builders: list[list[Any]] = []
        for numbers in self.groups:
            layers = [self.engines[n].layer for n in numbers]
            with set_current_vllm_config(self.engine.config):
                spec = layers[0].get_kv_cache_spec(self.engine.config)
                group = AttentionGroup(MLAPortableBackend, [layer.layer_name for layer in layers], spec, 0)
                many = {"num_metadata_builders": microbatches}
                group.create_metadata_builders(self.engine.config, CPU, kernel_block_size=self.engine.block, **many)
            self.builders.append([group.get_metadata_builder(n) for n in range(microbatches)])

    def run(self, step: Any, *, microbatch: int = 0, select: bool = True) -> list[torch.Tensor]:
        """All layers' outputs; those that select do so again."""
        metadata = {}
        for numbers, builders in zip(self.groups, self.builders, strict=True):
            metadata |= dict.fromkeys(numbers, builders[microbatch].build(0, step.common))
        outs = []
        for number, engine in enumerate(self.engines):
            if select and engine.impl.has_indexer:
                engine.topk[: len(step.topk)] = torch.where(step.topk % (number + 2) == 1, -1, step.topk)
            outs.append(engine.impl.forward_mqa(step.q, engine.kv_cache, metadata[number], engine.layer)[0])
            spoil_workspace()
        return outs


def spoil_workspace() -> None:
    """As MoE does between two layers: it has the whole of vLLM's workspace."""
    if workspace.is_workspace_manager_initialized():
        manager = workspace.current_workspace_manager()
        size = max(each.numel() for each in manager._current_workspaces if each is not None)
        manager.get_simultaneous(((size,), torch.uint8))[0].fill_(0xFF)


@pytest.fixture(params=["workspace", "none"])
def shared_workspace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """vLLM's workspace, which other layers write; and a process without one."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    if request.param == "workspace":
        workspace.init_workspace_manager(CPU)
    yield
    workspace.reset_workspace_manager()


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each call of convert_indices."""
    from mla_portable.attention import buffers

    found: list[int] = []
    remember = buffers.StepBuffers.remember
    monkeypatch.setattr(buffers.StepBuffers, "remember", lambda *given: (found.append(1), remember(*given))[1])
    return found


def alone(model: Model, step: Any, **more: Any) -> list[torch.Tensor]:
    """The outputs where every layer converts."""
    same = [engine.impl.same_selection for engine in model.engines]
    for engine in model.engines:
        engine.impl.same_selection = False
    try:
        return model.run(step, **more)
    finally:
        for engine, value in zip(model.engines, same, strict=True):
            engine.impl.same_selection = value


GROUPS = {"one builder": None, "a builder for each role": [[0, 3], [1, 2, 4]]}
"""Up to 0.29 the layers have one cache spec; from 0.30 on it says which have an indexer, so that there are two builders."""


@pytest.mark.parametrize("dtype", ["fp8", "auto"])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_selection_is_converted_once(groups: str, dtype: str, shared_workspace: None, conversions: list[int]):
    model = Model(INDEXERS, GROUPS[groups], dtype=dtype)
    for seed, lengths in enumerate([[100, 64, 9], [65, 33]]):
        step = make_step(model.engines[0], [1] * len(lengths), lengths, seed=seed)
        fill(model)
        wanted = alone(model, step)
        conversions.clear()
        found = model.run(step)
        assert len(conversions) == sum(INDEXERS)
        for out, expected in zip(found, wanted, strict=True):
            assert torch.equal(out, expected)
        assert not torch.equal(found[2], found[4])  # the two selections differ


def fill(model: Model) -> None:
    """Give all layers the rows of the first one's cache, in another order of its values."""
    for number, engine in enumerate(model.engines[1:], 1):
        engine.kv_cache.copy_(model.engines[0].kv_cache)
        if engine.kv_cache.dtype != torch.uint8:
            engine.kv_cache.mul_(1 + number / 8)


@pytest.mark.parametrize("groups", GROUPS)
def test_a_step_of_prompts_is_converted_in_each_layer(groups: str, shared_workspace: None, conversions: list[int]):
    """What is kept is as large as a batch of decodes; a process without vLLM's workspace keeps all."""
    model = Model(INDEXERS, GROUPS[groups])
    kept = model.builders[0][0].attention.buffers.kept
    step = make_step(model.engines[0], [90, 1], [90, 40])
    fill(model)
    wanted = alone(model, step)
    conversions.clear()
    found = model.run(step)
    assert len(conversions) == (sum(INDEXERS) if len(kept[1]) >= 91 else len(INDEXERS))
    assert all(map(torch.equal, found, wanted))


def test_what_is_kept_is_no_part_of_the_workspace(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace.init_workspace_manager(CPU)
    try:
        with_groups, without = Model(INDEXERS), Model((True, True))
        buffers, spec = with_groups.builders[0][0].attention.buffers, with_groups.builders[0][0].attention.spec
        rows = min(spec.max_num_tokens, spec.max_num_reqs * spec.decode_query_len)
        assert [tensor.shape for tensor in buffers.kept] == [(rows, TOPK), (rows,)]
        pool = workspace.current_workspace_manager().get_simultaneous(((1,), torch.uint8))[0].untyped_storage()
        assert buffers.indices.untyped_storage().data_ptr() == pool.data_ptr()
        assert all(tensor.untyped_storage().data_ptr() != pool.data_ptr() for tensor in buffers.kept)
        assert without.builders[0][0].attention.buffers.kept is None
    finally:
        workspace.reset_workspace_manager()


def test_a_draft_that_changes_the_description_of_a_step_gets_a_plan_of_its_own():
    model = Model(INDEXERS, GROUPS["a builder for each role"])
    (first,), (second,) = model.builders
    step = make_step(model.engines[0], [1, 1], [100, 64])
    metadata = first.build(0, step.common)
    assert second.build(0, step.common) is metadata
    assert second.build(0, replace(step.common)) is not metadata  # another object, which may be of another step
    step.common.seq_lens = step.common.seq_lens + 1
    assert second.build(0, step.common) is not metadata


def test_microbatches_have_plans_and_slots_of_their_own(conversions: list[int]):
    model = Model(INDEXERS, GROUPS["a builder for each role"], microbatches=True)
    model.make_builders(microbatches=2)
    steps = [
        make_step(model.engines[0], [1, 1, 1], [100, 64, 9], seed=0),
        make_step(model.engines[0], [1, 1], [70, 30], seed=1),
    ]
    built = [[builders[n].build(0, step.common) for n, step in enumerate(steps)] for builders in model.builders]
    assert built[0][0] is built[1][0] and built[0][1] is built[1][1] and built[0][0] is not built[0][1]
    addresses = [metadata.attention.buffers.kept[0].data_ptr() for metadata in built[0]]
    assert len(set(addresses)) == 2


@pytest.mark.parametrize("groups", GROUPS)
def test_what_dropped_builders_of_a_group_held_is_released(groups: str):
    model = Model(INDEXERS, GROUPS[groups])
    step = make_step(model.engines[0], [1, 1], [100, 64])
    model.run(step)
    held = [weakref.ref(builder) for builders in model.builders for builder in builders]
    model.builders = []
    gc.collect()
    assert all(builder() is None for builder in held)
    model.make_builders()
    model.run(step)


def test_who_leads_whom():
    model = Model(INDEXERS)
    context = model.engine.config.compilation_config.static_forward_context
    impls = [engine.impl for engine in model.engines]
    assert selections.leaders(model.engine.config) == {impls[1]: impls[0], impls[2]: impls[0], impls[4]: impls[3]}
    names = [engine.layer.layer_name for engine in model.engines]
    for name in (names[0], names[3]):  # as on a later pipeline stage, whose first layers have none
        context.pop(name)
    assert selections.leaders(model.engine.config) == {impls[2]: impls[1], impls[4]: impls[1]}
    context.clear()
    foreign = SimpleNamespace(impl=SimpleNamespace(), indexer=SimpleNamespace())
    context |= {names[0]: model.engines[0].layer, names[1]: model.engines[1].layer, "another backend's": foreign}
    context |= {names[2]: model.engines[2].layer}
    assert selections.leaders(model.engine.config) == {impls[1]: impls[0]}
    impls[1].topk_indices_buffer = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)  # another model's
    assert selections.leaders(model.engine.config) == {}


def test_a_group_object_of_vllm_is_accepted_and_left_alone():
    """0.30 and later give every layer the object that makes groups for vLLM's own backends."""
    engine = make_engine("fp8")
    try:
        from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroupBuilder
    except ModuleNotFoundError:  # before 0.30
        made = SimpleNamespace(current_group=None)
    else:
        made = SparseMLAIndexGroupBuilder(engine.topk, 4)
    layers = [make_layer(engine.config, engine.topk, n, with_indexer=n == 1, index_group_builder=made) for n in (1, 2)]
    assert made.current_group is None  # no memory, no stream
    assert selections.leaders(engine.config) == {layers[1].impl: layers[0].impl}
