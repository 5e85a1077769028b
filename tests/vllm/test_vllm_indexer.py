# SPDX-License-Identifier: Apache-2.0
"""The fused path: vLLM's own layer and builder, its operator served by mla_portable."""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_indexer
from vllm.forward_context import set_forward_context
from vllm_engine import CPU, MAX_LEN
from vllm_indexer import BLOCK, HEADS, NAME, TOPK, WIDTH, call, check, make_batch, make_indexer, run, without_kernels

from mla_portable import primitives, use
from mla_portable.contracts import ContextShare, DecodeSchedule, InvalidArgument, ScheduleKind, ScheduleLimits, StepLengths
from mla_portable.engines.vllm import indexer, indexer_choice, indexer_seams, settings


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_INDEXER, "on")
    indexer_choice.forget()
    indexer_seams.install()
    without_kernels(monkeypatch)
    yield
    indexer_choice.forget()
    indexer_seams.set_functions(ours=False)


@pytest.mark.parametrize(
    "query_lens, seq_lens",
    [
        ([1], [1]),
        ([1, 1, 1], [40, 5, 256]),  # decode
        ([7, 90], [7, 200]),  # prefill, with and without a context
        ([1, 1, 30, 5], [70, 129, 64, 200]),  # mixed; a chunk of a longer prompt
    ],
)
def test_every_token_gets_its_best_keys(query_lens: list[int], seq_lens: list[int]):
    engine = make_indexer()
    step = make_batch(engine, query_lens, seq_lens)
    run(engine, step)
    check(engine, step)


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("query_lens", ["uniform", "ragged", "mixed"])
def test_drafts_are_verified_at_their_own_positions(drafts: int, query_lens: str):
    engine = make_indexer(drafts=drafts)
    lens = {"uniform": [1 + drafts] * 3, "ragged": [1 + drafts, 1, drafts], "mixed": [1 + drafts, 1 + drafts, 40]}[query_lens]
    step = make_batch(engine, lens, [130, 9, 64])
    run(engine, step)
    check(engine, step)


@pytest.mark.parametrize("drafts", [0, 1])
def test_rows_of_padding_get_nothing(drafts: int):
    """A full CUDA graph: requests of length 0, and tokens that belong to no request."""
    engine = make_indexer(drafts=drafts)
    step = make_batch(engine, [1 + drafts] * 2, [33, 190], padded_reqs=4, padded_tokens=4 * (1 + drafts))
    run(engine, step, capture=True)
    check(engine, step)


def test_kernels_of_triton_serve_as_the_reference_does(monkeypatch: pytest.MonkeyPatch):
    logged: list[str] = []
    monkeypatch.setattr(indexer, "_indexers", functools.cache(dict))
    monkeypatch.setattr(indexer, "_log_server", lambda what, reason: logged.append(what))
    with use("triton"):
        engine = make_indexer(drafts=1)
        step = make_batch(engine, [2, 2, 20], [33, 190, 75])
        run(engine, step)
    assert logged and all("indexer_select triton.portable" in what for what in logged)
    check(engine, step)


def test_rows_past_the_step_are_cleared_and_no_others():
    """Piecewise graphs pad the rows of all tensors, not the metadata."""
    engine = make_indexer()
    step = make_batch(engine, [1, 1], [33, 190])
    metadata = engine.builder.build(0, step.common)
    call(engine, step, {NAME: metadata}, rows=6)
    check(engine, step)
    assert (engine.topk[2:6] == -1).all() and (engine.topk[6:] == 77).all()


def test_a_buffer_wider_than_the_top_k_is_cleared_behind_it():
    engine = make_indexer(buffer_width=TOPK + 8)
    step = make_batch(engine, [1, 20], [33, 60])
    run(engine, step)
    check(engine, step)
    assert (engine.topk[:21, TOPK:] == -1).all() and (engine.topk[21:] == 77).all()


def test_shared_prefixes_and_blocks_that_lie_apart():
    engine = make_indexer(gap=3)
    step = make_batch(engine, [1, 12, 100], [140, 150, 230], shared_blocks=2)
    run(engine, step)
    check(engine, step)


def test_new_keys_are_written_once_and_only_where_there_is_a_slot():
    engine = make_indexer()
    step = make_batch(engine, [1, 1], [33, 190], padded_reqs=3, padded_tokens=3)
    before = engine.kv_cache.clone()
    run(engine, step)
    changed = (engine.kv_cache != before).view(len(before), -1).any(dim=1).nonzero().flatten().tolist()
    assert changed == sorted({int(slot) // BLOCK for slot in step.common.slot_mapping[:2]})


def test_a_cache_that_was_written_before_is_left_alone():
    engine = make_indexer()
    engine.layer.skip_k_cache_insert = True
    step = make_batch(engine, [1, 1], [33, 190])
    before = engine.kv_cache.clone()
    run(engine, step)
    assert torch.equal(engine.kv_cache, before)


def test_a_step_without_tokens():
    engine = make_indexer()
    step = make_batch(engine, [1], [10])
    empty = SimpleNamespace(**{**vars(step.common), "num_reqs": 0, "num_actual_tokens": 0})
    assert indexer.plan_step(empty, 0, 0) == (0, ())


def test_profiling_binds_and_shows_its_scratch(monkeypatch: pytest.MonkeyPatch):
    engine = make_indexer()
    engine.layer.k_cache.kv_cache = torch.tensor([])
    step = make_batch(engine, [1], [10])
    taken: list[int] = []
    empty = torch.empty

    def spy(*size: Any, **options: Any) -> torch.Tensor:
        taken.append(size[0])
        return empty(*(1 if size[0] == primitives.SELECT_SCRATCH_BYTES else each for each in size), **options)

    monkeypatch.setattr(torch, "empty", spy)
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(indexer, "warm_indexer", lambda select, pages, **kind: compiled.append({"pages": pages(3), **kind}))
    monkeypatch.setattr(indexer, "_indexers", functools.cache(dict))
    assert call(engine, step, None) is not None
    assert primitives.SELECT_SCRATCH_BYTES in taken and len(compiled) == 1
    kind = compiled[0]
    assert (kind["num_heads"], kind["topk"], kind["longest"], kind["share"]) == (HEADS, TOPK, MAX_LEN, ContextShare())
    assert kind["pages"].shape == (3, 64, 132)
    assert [key[:5] for key in indexer._indexers()] == [(CPU, HEADS, TOPK, "ue8m0", ContextShare())]
    assert (engine.topk == 77).all()


def test_tables_are_as_wide_as_the_step_outside_of_graphs_alone(monkeypatch: pytest.MonkeyPatch):
    engine = make_indexer()
    step = make_batch(engine, [1, 1, 30], [130, 5, 60])
    widths: list[int] = []

    def spy(q: Any, weights: Any, cache: Any, starts: Any, lengths: Any, table: Any, **options: Any) -> None:
        widths.append(table.shape[1])

    plan = indexer.plan_step(step.common, 2, 2)
    for capturing in (False, True):
        server = indexer.BoundIndexer(spy, None, None, True, TOPK, BLOCK, "ue8m0", ContextShare(), partial(bool, capturing))
        server.choose(step.q, step.weights, engine.kv_cache, plan, engine.topk)
    assert widths == [3, 1, 4, 4]


@pytest.mark.parametrize("padding", [{}, {"padded_reqs": 4, "padded_tokens": 24}], ids=["exact", "padded"])
def test_nothing_is_scored_where_nothing_is_selected_away(padding: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    engine = make_indexer()
    step = make_batch(engine, [1, 9, 12], [TOPK, 9, TOPK - 3], **padding)
    scored: list[int] = []
    bind = indexer._bind

    def watched(*arguments: Any) -> Any:
        server = bind(*arguments)
        select = lambda q, *rest, **named: (scored.append(len(q)), server.select(q, *rest, **named))  # noqa: E731
        return replace(server, select=select, is_capturing=lambda: capture)

    monkeypatch.setattr(indexer, "_bind", watched)
    monkeypatch.setattr(indexer, "_indexers", functools.cache(dict))
    for capture in (False, True):
        engine.topk.fill_(77)
        run(engine, step, capture=capture)
        check(engine, step)
        assert bool(scored) is capture, "a graph's later sequences may be longer"


class RowLengths(DecodeSchedule):
    """lengths: [R] int32, what the planner keeps."""

    def __init__(self, shape: tuple[int, int], lengths: torch.Tensor) -> None:
        self.shape, self.lengths = shape, lengths


class RowLengthsPlanner:
    def __init__(self, limits: ScheduleLimits) -> None:
        self.memory, self.most = torch.zeros(limits.max_num_rows, dtype=torch.int32), limits.max_query_len

    def get(self, batch: int, query_len: int, lengths: StepLengths) -> RowLengths:
        assert query_len <= self.most and lengths.host is not None and lengths.device is not None
        assert (lengths.host >= lengths.device.numpy()).all()
        lengths.copy_to(self.memory[:batch])
        return RowLengths((batch, query_len), self.memory[:batch])

    def invalidate(self) -> None: ...


def test_schedules_are_planned_once_a_step_by_each_builder_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    kind = ScheduleKind("row_lengths", RowLengths, RowLengthsPlanner, needs_lengths=True)
    given: list[RowLengths | None] = []
    capturing: list[bool] = []
    bind = indexer._bind

    def watched(*arguments: Any) -> Any:
        server = bind(*arguments)

        def select(*tensors: Any, schedule: RowLengths | None = None, **named: Any) -> torch.Tensor:
            given.append(schedule)
            return server.select(*tensors, **named)

        return replace(server, select=select, kind=kind, is_capturing=lambda: capturing[-1])

    monkeypatch.setattr(indexer, "_bind", watched)
    monkeypatch.setattr(indexer, "_indexers", functools.cache(dict))
    engine = make_indexer(drafts=1)

    def served(query_lens: list[int], seq_lens: list[int], *, capture: bool = False) -> list[RowLengths | None]:
        given.clear()
        step = make_batch(engine, query_lens, seq_lens)
        step.common.seq_lens_cpu_upper_bound[: len(seq_lens)] += 3
        metadata = engine.builder.build(0, step.common)
        capturing.append(capture)
        for _ in range(2):  # layers
            call(engine, step, {NAME: metadata})
        check(engine, step)
        return list(given)

    assert served([2, 2], [130, 90]) == [None, None], "nothing was bound before, as in vLLM's profiling run"
    first, again = served([2, 2], [130, 90])
    assert first is again and first is not None
    assert first.shape == (2, 2) and first.lengths.tolist() == [130, 90]
    decodes, prefill, *_ = served([2, 2, 40], [200, 80, 64])
    assert prefill is None and decodes is not None and decodes.lengths.tolist() == [200, 80]
    assert decodes.lengths.data_ptr() == first.lengths.data_ptr(), "a graph reads the step that replays it"
    one, alone = served([2, 1], [130, 90])[:2]
    assert one is not None and one.shape == (1, 2) and alone is None, "the second request is a prefill"
    assert set(served([2, 2], [130, 90], capture=True)) == {None}
    step = make_batch(engine, [2, 1], [130, 90])
    ragged = indexer.plan_step(step.common, 2, 3)
    indexer.IndexerSchedules(8, 2).plan(ragged, step.common, 2)
    assert not ragged.parts[0].schedules, "requests of other numbers of tokens"
    other = make_indexer(drafts=1).builder
    step = make_batch(engine, [2, 2], [77, 70])
    (schedule,) = getattr(other.build(0, step.common), indexer_seams._STEP).parts[0].schedules.values()
    assert schedule.lengths.tolist() == [77, 70] and first.lengths.tolist() != [77, 70], "a microbatch of its own"


def test_nothing_is_read_back_or_planned_by_vllms_kernels():
    """The device's numbers decide: those on the host are upper bounds, or stale."""
    engine = make_indexer()
    step = make_batch(engine, [1, 1, 20], [130, 5, 60])
    step.common.seq_lens_cpu_upper_bound[:] = torch.tensor([160, 20, 60])
    step.common.max_seq_len = 160
    run(engine, step)
    check(engine, step)


def test_the_operator_keeps_its_name_and_what_it_mutates():
    schema = torch.ops.vllm.sparse_attn_indexer.default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written - {"candidate_blocks"} == {"topk_indices_buffer"}  # the former of two-level selection, 0.33


def test_models_that_call_the_function_get_ours():
    """vLLM 0.30 and later: by keyword, past the operator."""
    engine, module = make_indexer(), importlib.import_module(vllm_indexer.LAYER)
    step = make_batch(engine, [1, 20], [100, 60])
    layer, metadata = engine.layer, {NAME: engine.builder.build(0, step.common)}
    fixed = [WIDTH, "ue8m0", TOPK, WIDTH, 256, 0, engine.topk]
    given = torch.zeros((21, 4)), NAME, engine.kv_cache, step.q, None, step.k, step.weights, *fixed
    with set_forward_context(metadata, engine.config):
        found = module.sparse_attn_indexer(
            *given, skip_k_cache_insert=False, use_pcp=layer.use_pcp, dense_mha_metadata_layer_name=""
        )
    assert found is engine.topk
    check(engine, step)


def test_a_compiled_model_calls_it_too():
    """As an opaque operator that mutates the buffer."""
    engine = make_indexer()
    step = make_batch(engine, [1, 9], [100, 30])
    metadata = {NAME: engine.builder.build(0, step.common)}
    compiled = torch.compile(engine.layer.forward_cuda, backend="aot_eager", fullgraph=True)
    with set_forward_context(metadata, engine.config):
        compiled(torch.zeros((10, 4)), step.q, step.k, step.weights)
    check(engine, step)


def test_what_is_computed_as_dense_attention_needs_no_selection(monkeypatch: pytest.MonkeyPatch):
    engine = make_indexer()
    engine.layer.dense_mha_metadata_layer_name = "layer"
    step = make_batch(engine, [20], [20])
    dense = SimpleNamespace(prefill=SimpleNamespace(use_dense_mha=True), num_decode_tokens=0)
    before = engine.kv_cache.clone()
    call(engine, step, {NAME: engine.builder.build(0, step.common), "layer": dense})
    assert (engine.topk == 77).all() and not torch.equal(engine.kv_cache, before)
    servers = {key: replace(server, is_capturing=lambda: True) for key, server in indexer._indexers().items()}
    with monkeypatch.context() as patch:
        patch.setattr(indexer, "_indexers", lambda: servers)
        call(engine, step, {NAME: engine.builder.build(0, step.common), "layer": dense})
    check(engine, step)  # a graph is replayed for steps that are not dense
    engine.topk.fill_(77)
    dense.num_decode_tokens = 1
    call(engine, step, {NAME: engine.builder.build(0, step.common), "layer": dense})
    check(engine, step)


def stock_called(engine: Any, metadata: Any, **more: Any) -> bool:
    """vLLM's function, not ours, is called with what we were called with."""
    module = importlib.import_module(vllm_indexer.LAYER)
    seen: list[tuple[Any, ...]] = []

    def stock(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        return engine.topk

    stock.__signature__ = inspect.signature(module.sparse_attn_indexer_fake)  # type: ignore[attr-defined]
    step = make_batch(engine, [1], [10])
    fixed = [WIDTH, "ue8m0", TOPK, WIDTH, 256, 0, engine.topk, False, False, ""]
    given = torch.zeros((1, 4)), NAME, engine.kv_cache, step.q, None, step.k, step.weights, *fixed
    if metadata == "built":
        metadata = {NAME: engine.builder.build(0, step.common)}
    with set_forward_context(metadata, engine.config):
        indexer_seams.operator(module, stock)(*given, **more)
    assert seen in ([], [(given, more)])
    return bool(seen)


@pytest.mark.parametrize("more", [{"use_fp4_cache": True}, {"use_pcp": True}, {"candidate_blocks": torch.zeros(1)}])
@pytest.mark.parametrize("metadata", [None, "built"])
def test_what_the_fused_path_does_not_do_is_vllms(metadata: Any, more: dict[str, Any]):
    if "use_pcp" in more:  # given by position in these tests
        assert indexer_seams._is_beyond_fused(more)
        return
    assert stock_called(make_indexer(), metadata, **more)
    assert not stock_called(make_indexer(), metadata)


def test_metadata_of_an_unknown_builder_goes_to_vllms_operator():
    engine = make_indexer()
    metadata = engine.builder.build(0, make_batch(engine, [1], [10]).common)
    delattr(metadata, indexer_seams._STEP)
    assert stock_called(engine, {NAME: metadata})


@pytest.mark.parametrize("mode", ["off", "auto"])  # there is no CUDA device here
def test_vllms_indexer_stays_where_ours_is_not_asked_for(mode: str, monkeypatch: pytest.MonkeyPatch):
    engine = make_indexer()
    monkeypatch.setenv(settings.ENV_INDEXER, mode)
    indexer_choice.choose(engine.config)
    assert stock_called(engine, "built")


def test_an_out_of_tree_platform_is_served_too(monkeypatch: pytest.MonkeyPatch):
    """vLLM's layer refuses there, except for a subclass that the platform's vendor brings."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_out_of_tree", lambda: True, raising=False)
    engine = make_indexer()
    step = make_batch(engine, [1, 9], [33, 190])
    run(engine, step)
    check(engine, step)
    monkeypatch.setenv(settings.ENV_INDEXER, "off")
    with pytest.raises(NotImplementedError, match="only implemented for CUDA, ROCm"):
        call(make_indexer(), step, None)


def test_graphs_are_refused_where_what_serves_cannot_be_captured(monkeypatch: pytest.MonkeyPatch):
    engine = make_indexer()
    server = indexer.BoundIndexer(lambda *_: None, None, None, True, TOPK, BLOCK, "ue8m0", ContextShare(), lambda: False)
    support = type(engine.builder).get_cudagraph_support
    monkeypatch.setattr(indexer, "_indexers", lambda: {(): server})
    assert support(engine.config, None).name == "UNIFORM_BATCH"
    monkeypatch.setattr(indexer, "_indexers", lambda: {(): replace(server, graph=False)})
    assert support(engine.config, None).name == "NEVER"
    monkeypatch.setenv(settings.ENV_INDEXER, "off")
    indexer_choice.choose(engine.config)
    assert support(engine.config, None).name == "UNIFORM_BATCH"


@pytest.mark.parametrize("fault", ["", "missing", "wrong", "elsewhere"])
def test_vllms_writer_is_tried_before_it_is_trusted(fault: str, monkeypatch: pytest.MonkeyPatch):
    def write(k: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, group: int, scale_format: str) -> None:
        assert (group, scale_format) == (WIDTH, "ue8m0")
        vllm_indexer.write(pages, k * 2 if fault == "wrong" else k, [int(s) for s in slots])
        if fault == "elsewhere":
            pages[0, 0, 0] = 1

    operators = SimpleNamespace() if fault == "missing" else SimpleNamespace(indexer_k_quant_and_cache=write)
    monkeypatch.setattr(indexer, "import_module", lambda name: operators)
    monkeypatch.setattr(indexer, "_vllm_write", indexer._vllm_write.__wrapped__)
    why_not = indexer.try_vllm_write.__wrapped__(CPU)
    assert bool(why_not) == bool(fault)
    assert fault != "wrong" or "came out as" in why_not
    monkeypatch.setattr(indexer, "try_vllm_write", lambda device: why_not)
    monkeypatch.setattr(indexer, "_indexers", functools.cache(dict))
    engine = make_indexer()
    step = make_batch(engine, [1, 9], [33, 190])
    call(engine, step, {NAME: engine.builder.build(0, step.common)}, rows=14)  # keys of padding are not written
    check(engine, step)
    assert all((server.write is None) == (not fault) for server in indexer._indexers().values())
    monkeypatch.setenv(settings.ENV_WRITER, "vllm")
    monkeypatch.setattr(indexer, "_indexers", functools.cache(dict))
    if fault:
        with pytest.raises(InvalidArgument, match=settings.ENV_WRITER):
            run(engine, step)
    else:
        run(engine, step)
