# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs, as far as a CPU shows them: what is made before a capture, what a capture may not do, what a replay keeps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from machines import H200
from recorder import Recorder, registry_of
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang_kit import cases, fixture, server_of, small
from sglang_version import SELECTORS

from mla_portable.contracts import ScheduleKind, ScheduleLimits, StepLengths
from mla_portable.engines.sglang import serving
from mla_portable.kit.split_kv import SPLIT_KV, SplitSchedule, SplitSchedules

CASE = small(cases()["dsa_sparse_decode_ragged_prefix"])
VERIFY = replace(CASE, name="verify", forward_mode=ForwardMode.TARGET_VERIFY, extend_lens=(3, 3, 3))
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@pytest.fixture(autouse=True)
def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are counted here. Those of the warm-up have tests of their own."""
    monkeypatch.setattr(serving, "warm_slots", lambda layer: None)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What serves only writes down how it was called, on what claims to be an H200."""
    plugin = Recorder(schedule_kind=SPLIT_KV)
    registry = registry_of(plugin, facts={"cpu": H200})
    monkeypatch.setattr("mla_portable.attention.layer_registry.get_registry", lambda: registry)
    monkeypatch.setattr(serving, "_shared", functools.cache(dict))
    return plugin


@contextmanager
def capturing(server: serving.BackendLayers) -> Iterator[None]:
    """The stream is captured: nothing may be read back."""

    def refuse(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor is read during capture")

    with pytest.MonkeyPatch.context() as patches:
        for name in READS:
            patches.setattr(torch.Tensor, name, refuse)
        for each in server.attentions:
            patches.setattr(each._accelerator, "is_capturing", lambda: True)
        yield


def attend(built: Any) -> None:
    """One layer, as SGLang calls it between its metadata and its next layer."""
    module = built.actual_module
    (q_nope, q_rope), (k_nope, k_rope) = module.project_q(built.input_hidden), module.project_k(built.input_hidden)
    named = {"k_rope": k_rope, "q_rope": q_rope, "topk_indices": built.topk_indices, "save_kv_cache": False}
    module.attn(q_nope, k_nope, k_nope, built.forward_batch, **named)


@pytest.mark.parametrize("impl", ["flashmla_kv", "flashmla_sparse", "fa3"])
@pytest.mark.parametrize("case", [CASE, VERIFY], ids=["decode", "target verify"])
def test_a_captured_step_finds_its_schedule_and_reads_nothing_back(case: Any, impl: str, recorder: Recorder):
    built = fixture(case, dsa_decode_backend=impl, disable_cuda_graph=False)
    backend, rows = built.backend, case.num_input_tokens
    server = server_of(backend)
    assert server is not None
    backend.init_cuda_graph_state(8, 8 * 3)
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata_out_graph(built.forward_batch, in_capture=True)
        with capturing(server):
            attend(built)
        backend.init_forward_metadata_out_graph(built.forward_batch)
        with capturing(server):
            attend(built)
    names = [name for name, _, _ in recorder.calls]
    assert names == ["sparse_decode"] * 2
    first, again = (kwargs for _, _, kwargs in recorder.calls)
    assert first["schedule"] is again["schedule"] and first["schedule"].num_rows == rows
    if SELECTORS or impl != "flashmla_sparse":  # which is given none there
        assert first["lengths"].data_ptr() == again["lengths"].data_ptr()  # a replay reads the captured address


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("case", [CASE, VERIFY], ids=["decode", "target verify"])
def test_schedules_are_made_from_the_keys_that_each_row_sees(case: Any, in_graph: bool, monkeypatch: pytest.MonkeyPatch):
    given: list[StepLengths] = []

    class Lengths:
        def __init__(self, limits: ScheduleLimits) -> None:
            self.shapes = SplitSchedules(limits)

        def get(self, batch: int, query_len: int, lengths: StepLengths) -> SplitSchedule:
            given.append(lengths)
            return self.shapes.get(batch, query_len)

        def invalidate(self) -> None: ...

    plugin = Recorder(schedule_kind=ScheduleKind("by_lengths", SplitSchedule, Lengths, needs_lengths=True))
    registry = registry_of(plugin, facts={"cpu": H200})
    monkeypatch.setattr("mla_portable.attention.layer_registry.get_registry", lambda: registry)
    monkeypatch.setattr(serving, "_shared", functools.cache(dict))
    built = fixture(case, dsa_decode_backend="flashmla_kv", disable_cuda_graph=False)
    backend = built.backend
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        if in_graph:
            backend.init_cuda_graph_state(8, 8 * 3)
            backend.init_forward_metadata_out_graph(built.forward_batch, in_capture=True)
            given.clear()
            backend.init_forward_metadata_out_graph(built.forward_batch)
        else:
            backend.init_forward_metadata(built.forward_batch)
        attend(built)
    totals = built.forward_batch.seq_lens.tolist()  # without the drafts that a verification adds
    want = totals if case is CASE else [total + 1 + i for total in totals for i in range(3)]
    assert given and all(each.host is None and each.device.tolist() == want for each in given)
    assert [kwargs["schedule"].num_rows for _, _, kwargs in plugin.calls] == [len(want)]


def test_flashmla_s_metadata_has_the_shapes_that_sglang_slices_and_copies(recorder: Recorder):
    backend = fixture(CASE, dsa_decode_backend="flashmla_kv").backend
    lengths = torch.ones(5, dtype=torch.int32)
    made = backend._compute_flashmla_metadata(cache_seqlens=lengths, seq_len_q=1)
    assert made.num_splits.shape == (6,) and made.num_splits.dtype == torch.int32
    of_three = made.slice(slice(0, 4))
    of_three.copy_(backend._compute_flashmla_metadata(cache_seqlens=lengths[:3], seq_len_q=1))
    assert of_three.num_splits.data_ptr() == made.num_splits.data_ptr() and of_three.num_splits.shape == (4,)


def test_a_draft_s_objects_are_served_too(recorder: Recorder):
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnMultiStepBackend

    built = fixture(CASE)
    steps = DeepseekSparseAttnMultiStepBackend(built.runner, topk=1, speculative_num_steps=3)
    assert len(steps.attn_backends) == 2
    servers = [server_of(each) for each in steps.attn_backends]
    assert all(server is not None for server in servers)
    assert servers[0].attentions[0] is server_of(built.backend).attentions[0]
