# SPDX-License-Identifier: Apache-2.0
"""What builders hold and for how long: profiling, microbatches, graphs, sleep mode, caches whose blocks lie apart."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.v1.worker import workspace
from vllm_engine import (
    BLOCK,
    CPU,
    LATENT,
    ROPE,
    assert_close,
    attend,
    check_step,
    expected,
    make_builder,
    make_engine,
    make_step,
)

from mla_portable.attention import SparseMLAAttention, UnsupportedRoute
from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import compat, model, settings
from mla_portable.layouts import FP8_DS_MLA
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES


@pytest.mark.parametrize("microbatches", [False, True])
def test_what_a_dropped_builder_held_is_released(microbatches: bool, monkeypatch: pytest.MonkeyPatch):
    """vLLM makes a first set of builders to profile CUDA graphs, and drops it."""
    monkeypatch.setenv(settings.ENV_ROUTE, "split")
    engine = make_engine("fp8", microbatches=microbatches)
    attention, held = weakref.ref(engine.builder.attention), weakref.ref(engine.builder.attention.buffers.workspace)
    address = held().data_ptr()
    engine.builder = None
    gc.collect()
    assert attention() is None
    if not microbatches:
        assert held() is None
        with pytest.raises(InvalidArgument, match="a layer without a metadata builder"):
            make_step(engine, [1], [70])
    engine.builder = make_builder(engine)
    if microbatches:  # the layer reserved them, so they were part of the memory profile
        assert engine.builder.attention.buffers.workspace.data_ptr() == address
    check_step(engine, [1, 1, 9], [100, 64, 9])


def test_a_builder_binds_the_decision_by_which_the_layers_were_configured(monkeypatch: pytest.MonkeyPatch):
    resolved, resolve = [], model.resolve
    monkeypatch.setattr(model, "resolve", lambda *given, **named: resolved.append(resolve(*given, **named)) or resolved[-1])
    attention = make_builder(make_engine("fp8")).attention
    assert attention.route_decision is resolved[-1].decision and attention.spec is resolved[-1].spec


def test_the_latest_builder_writes_the_cache(monkeypatch: pytest.MonkeyPatch):
    engine, wrote = make_engine("fp8"), []
    first, latest = engine.builder, make_builder(engine)
    for name, builder in (("first", first), ("latest", latest)):
        monkeypatch.setattr(builder.attention, "cache_write", lambda *given, name=name: wrote.append(name))
    arguments = torch.zeros(1, LATENT), torch.zeros(1, 1, ROPE), engine.kv_cache, torch.tensor([70])
    engine.impl.do_kv_cache_update(*arguments, engine.layer.kv_cache_dtype, torch.ones(()))
    assert wrote == ["latest"]


def test_microbatches_share_scratch_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    """Attention of the one runs while the other's MoE is under way: vLLM's workspace would be the other's."""
    monkeypatch.setenv(settings.ENV_ROUTE, "split")
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace.init_workspace_manager(CPU, num_ubatches=2)
    try:
        engine = make_engine("fp8", microbatches=True)
        builders = [engine.builder, make_builder(engine)]
        one, two = (builder.attention.buffers for builder in builders)
        for name in ("indices", "counts", "lse", "query", "workspace"):
            assert getattr(one, name).data_ptr() == getattr(two, name).data_ptr(), name
        assert one is not two and builders[0].planner is not builders[1].planner
        pool = workspace.current_workspace_manager().get_simultaneous(((1,), torch.uint8))[0].untyped_storage()
        assert one.indices.untyped_storage().data_ptr() != pool.data_ptr()
    finally:
        workspace.reset_workspace_manager()
    steps = [make_step(engine, [1, 1, 9], [100, 64, 9], seed=0)]
    cache, topk = engine.kv_cache.clone(), engine.topk.clone()
    steps.append(make_step(engine, [1, 30], [200, 60], seed=1))
    caches, topks = [cache, engine.kv_cache], [topk, engine.topk.clone()]
    metadata = [builder.build(0, step.common) for builder, step in zip(builders, steps, strict=True)]
    for which in (0, 1, 0, 1):  # layer by layer in turn, on one stream
        engine.kv_cache = caches[which]
        engine.topk.copy_(topks[which])
        out, _ = attend(engine, metadata[which], steps[which].q)
        assert_close(out, expected(engine, steps[which])[0], len(steps[which].requests))


def test_microbatch_scratch_is_kept_by_size_and_released(monkeypatch: pytest.MonkeyPatch):
    engine, other = make_engine("auto", microbatches=True), make_engine("auto", microbatches=True)
    address = engine.builder.attention.buffers.indices.data_ptr()
    assert other.builder.attention.buffers.indices.data_ptr() == address
    other.config.scheduler_config.max_num_batched_tokens += 64
    assert make_builder(other).attention.buffers.indices.data_ptr() != address
    held = weakref.ref(engine.builder.attention.buffers.indices)
    del engine, other
    gc.collect()
    assert held() is None


def test_captures_of_one_shape_are_kept_once(monkeypatch: pytest.MonkeyPatch):
    """vLLM drops the metadata of a capture, while the graph goes on reading the schedule of its plan."""
    own = SparseMLAAttention.planner_config
    monkeypatch.setattr(
        SparseMLAAttention,
        "planner_config",
        lambda self: replace(own(self), schedule_kind=FLASHMLA_TILES, num_sms=132, arch="sm90"),
    )
    engine = make_engine("fp8")
    schedules = []
    for query_lens in ([1, 1], [1, 1, 1], [1, 1], [1, 1, 1]):
        step = make_step(engine, query_lens, [100] * len(query_lens))
        schedule = engine.builder.build_for_cudagraph_capture(step.common).plan.decode_schedule
        schedules.append(weakref.ref(schedule.tile_scheduler_metadata))
        engine.builder.build(0, step.common)
    assert len(engine.builder._captured) == 2
    del schedule, engine.builder.planner  # which remembers schedules as well, though not for good
    gc.collect()
    assert all(schedule() is not None for schedule in schedules)


class Allocations(TorchDispatchMode):
    """Keeps every tensor that is allocated while it is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not any(isinstance(arg, torch.Tensor) for arg in args):
            self.tensors.append(out)
        return out


@pytest.mark.parametrize("route", ["direct", "split", "fused", "upconvert"])
def test_sleep_mode_may_discard_what_builders_allocated(route: str, monkeypatch: pytest.MonkeyPatch):
    """Up to 0.28 vLLM makes builders inside of the pool of the KV cache, whose contents sleep(level=1) does not keep."""
    monkeypatch.setenv(settings.ENV_ROUTE, route)
    engine = make_engine("fp8")
    with Allocations() as pool:
        engine.builder = make_builder(engine)
    assert pool.tensors
    batch = [1] * 5, [70, 1, 200, 64, 256]
    check_step(engine, *batch)
    for tensor in pool.tensors:
        tensor.view(-1).view(torch.uint8).fill_(0x7F)
    check_step(engine, *batch, seed=1)
    check_step(engine, [1, 9], [70, 90], seed=2)


def other_layers_between(engine, dtype: str) -> None:
    """The cache as 0.33's layout BLHNC has it: pages of two other layers between the blocks."""
    blocks, size, width = engine.kv_cache.shape
    engine.config.cache_config.kv_cache_layout = "BLHNC"
    memory = torch.full((blocks, 3, size, width), 0xFF if dtype == "fp8" else float("nan"), dtype=engine.kv_cache.dtype)
    engine.kv_cache = engine.layer.kv_cache = memory[:, 1]
    engine.builder = make_builder(engine)


@pytest.mark.parametrize("dtype, route", [("auto", "fused"), ("fp8", "direct")])
def test_blocks_of_a_cache_may_lie_apart(dtype: str, route: str):
    engine = make_engine(dtype)
    other_layers_between(engine, dtype)
    if engine.builder.attention.facts.vendor != "iluvatar":  # whose bf16 kernel serves an FP8 cache's prefills
        assert engine.builder.attention.route == route
    check_step(engine, [1, 1, 9], [70, 200, 90])


def test_a_route_that_needs_adjacent_blocks_is_refused_before_a_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_ROUTE, "direct")
    engine = make_engine("auto")
    with pytest.raises(UnsupportedRoute, match="route 'direct' cannot serve"):
        other_layers_between(engine, "auto")


def test_gaps_between_blocks_are_read_from_the_configuration():
    engine = make_engine("fp8")
    with set_current_vllm_config(engine.config):
        spec = engine.layer.get_kv_cache_spec(engine.config).copy_with_new_block_size(BLOCK)
    page = BLOCK * FP8_DS_MLA.row_width
    assert spec.page_size_bytes == page
    assert compat.block_gap(engine.config, spec) == 0
    assert compat.block_gap(engine.config, replace(spec, page_size_padded=page + 512)) == 512
    engine.config.cache_config.kv_cache_layout = "LBNHC"
    assert compat.block_gap(engine.config, spec) == 0
    engine.config.cache_config.kv_cache_layout = "BLNHC"
    assert compat.block_gap(engine.config, spec) == (1 if compat._row_alignment() is None else None)


@pytest.mark.parametrize("route", ["direct", "split"])
def test_memory_that_the_workspace_has_outgrown_is_released(route: str, monkeypatch: pytest.MonkeyPatch):
    """Another layer asks for more while vLLM warms up; from then on it is locked, and not asked again."""
    monkeypatch.setenv(settings.ENV_ROUTE, route)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace.init_workspace_manager(CPU)
    try:
        engine, manager = make_engine("fp8"), workspace.current_workspace_manager()
        (first,) = manager.get_simultaneous(((1,), torch.uint8))
        storage, size = weakref.ref(first.untyped_storage()), first.untyped_storage().nbytes()
        del first
        check_step(engine, [1, 9], [70, 90])
        (grown,) = manager.get_simultaneous(((2 * size,), torch.uint8))
        with torch.inference_mode():
            engine.builder.build(0, make_step(engine, [1], [70]).common)
        check_step(engine, [1, 9], [70, 90], seed=1)
        gc.collect()
        assert storage() is None
        buffers = engine.builder.attention.buffers
        held = [t for t in (buffers.indices, buffers.counts, buffers.lse, buffers.query, buffers.workspace) if t is not None]
        assert all(t.untyped_storage().data_ptr() == grown.untyped_storage().data_ptr() for t in held)
        assert len({t.data_ptr() for t in held}) == len(held)
        workspace.lock_workspace()
        monkeypatch.setattr(manager, "get_simultaneous", lambda *given: pytest.fail("asked in a step"))
        check_step(engine, [1, 1], [70, 90], seed=2)
    finally:
        workspace.reset_workspace_manager()


def test_a_workspace_that_is_locked_and_too_small_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace.init_workspace_manager(CPU)
    try:
        workspace.lock_workspace()
        with pytest.raises(InvalidArgument, match=r"vLLM: workspace: .*locked.*Lower --max-num-batched-tokens"):
            make_engine("fp8")
    finally:
        workspace.reset_workspace_manager()
