# SPDX-License-Identifier: Apache-2.0
"""Schedules that depend on how long the step's sequences are: what their planner is given, and that each step's is used.

The kind here is an invented one. Its schedule says how many keys each row has, in memory that the planner keeps, and its
sparse_decode reads no more of a row than that: planned with the lengths of another step, it loses keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import kernel_bench
import numpy as np
import pytest
import torch
from attention_steps import BATCHES, BLOCK, HEADS, REFERENCE, SPEC, TOPK, Step, assert_matches, make_step
from machines import CPU
from recorder import Recorder, registry_of
from torch import Tensor

import mla_portable
import mla_portable.reference as reference
from mla_portable.attention import SlotAttention, SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.contracts import (
    Batch,
    DecodeSchedule,
    Implementation,
    InvalidArgument,
    PlanMismatch,
    Registrar,
    Request,
    ScheduleKind,
    ScheduleLimits,
    StepLengths,
    StepPlan,
    Support,
    hookimpl,
)
from mla_portable.contracts.share import ContextShare
from mla_portable.dispatch import serving
from mla_portable.judge.problems.bench import KernelCase
from mla_portable.kit.rules import extent
from mla_portable.kit.split_kv import SplitSchedule
from mla_portable.layouts import LAYOUTS
from mla_portable.planner import Planner
from mla_portable.primitives import SPARSE_DECODE
from mla_portable.primitives.sparse_decode import reference as sparse_decode

NAMES = [name for name, (requests, _, _) in BATCHES.items() if requests]


@dataclass(frozen=True, eq=False)
class KeyCounts(DecodeSchedule):
    """counts: [B] int32, a view of what the planner keeps."""

    batch: int
    query_len: int
    counts: Tensor

    def check(self, where: str, batch: int, query_len: int, num_heads: int, topk: int, device: torch.device) -> None:
        if (batch, query_len) != (self.batch, self.query_len):
            raise PlanMismatch(f"{where}: {batch} x {query_len}, made for {self.batch} x {self.query_len}")


class KeyCountPlanner:
    """seen: what every `get` was given, as lists."""

    def __init__(self, limits: ScheduleLimits) -> None:
        self.memory = torch.full((limits.max_num_rows,), -1, dtype=torch.int32, device=limits.device)
        self.seen: list[tuple[list[int] | None, list[int] | None]] = []
        self.known: dict[tuple[int, int], KeyCounts] = {}

    def get(self, batch: int, query_len: int, lengths: StepLengths) -> KeyCounts:
        host, device = lengths.host, lengths.device
        self.seen.append((None if host is None else host.tolist(), None if device is None else device.tolist()))
        lengths.copy_to(self.memory[:batch])
        return self.known.setdefault((batch, query_len), KeyCounts(batch, query_len, self.memory[:batch]))

    def invalidate(self) -> None: ...


class Plugin:
    """sparse_decode of the kind; everything else is the reference's. `given`: the schedule of each call."""

    def __init__(self) -> None:
        self.planners: list[KeyCountPlanner] = []
        self.given: list[DecodeSchedule | None] = []
        self.kind = ScheduleKind("key_counts", KeyCounts, self._planner, needs_lengths=True)

    def _planner(self, limits: ScheduleLimits) -> KeyCountPlanner:
        self.planners.append(KeyCountPlanner(limits))
        return self.planners[-1]

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        support = Support(source="a test", device_types=("cpu",), kv_layouts=tuple(LAYOUTS), extra_cache=True)
        registrar.add(Implementation("lengths.test", SPARSE_DECODE, support, self._bind, schedule_kind=self.kind))

    def _bind(self, request: Request) -> Any:
        def call(q: Tensor, kv_cache: Tensor, indices: Tensor, *, lengths=None, schedule=None, **others: Any):
            self.given.append(schedule)
            if schedule is not None:
                counts = schedule.counts.unsqueeze(1) + torch.arange(1 - q.shape[1], 1, dtype=torch.int32)
                counts = counts.clamp(0, indices.shape[-1])
                lengths = counts if lengths is None else torch.minimum(lengths, counts)
            return sparse_decode(q, kv_cache, indices, lengths=lengths, **others)

        return call


def machine() -> tuple[Plugin, Registry]:
    plugin = Plugin()
    return plugin, Registry(
        plugins=[("lengths", plugin), ("reference", reference)], facts={"cpu": CPU}, environ={}, probe=False
    )


def layer_of(route: str, query_len: int, **changes: Any) -> tuple[Plugin, SparseMLAAttention, Planner]:
    plugin, registry = machine()
    spec = replace(SPEC, route=route, decode_query_len=query_len, **changes)
    layer = SparseMLAAttention(spec, device="cpu", registry=registry)
    return plugin, layer, Planner(layer.planner_config())


def run(layer: SparseMLAAttention, step: Step, plan: StepPlan) -> None:
    assert_matches(step, *layer(step.q, step.kv_cache, step.topk_indices, plan))


def with_lengths(batch: Batch) -> Batch:
    return replace(batch, seq_lens_device=torch.from_numpy(batch.seq_lens.copy()))


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("route", ["fused", "split", "direct"])
def test_every_row_is_planned_with_the_keys_that_it_sees(route: str, name: str, on_device: bool):
    requests, query_len, padded = BATCHES[name]
    step = make_step(name, "fp8_ds_mla")
    plugin, layer, planner = layer_of(route, query_len)
    plan = planner.plan(with_lengths(step.batch) if on_device else step.batch)
    run(layer, step, plan)
    if plan.num_decode_tokens == 0:
        return
    ((host, device),) = plugin.planners[0].seen
    schedule = plan.decode_schedule
    assert isinstance(schedule, KeyCounts) and plugin.given == [schedule]
    tokens = [total - query + 1 + i for query, total in requests for i in range(query)]  # keys that each token sees
    tokens += [0] * ((padded or len(tokens)) - len(tokens))
    rows = tokens[plan.decode_query_len - 1 : plan.num_decode_tokens : plan.decode_query_len]
    assert schedule.counts.tolist() == rows
    assert host == rows[: len(host)] and not any(rows[len(host) :])
    one_for_one = all(query for query, _ in requests[: plan.num_decodes])
    one_for_one &= plan.decode_query_len == requests[0][0] and (route != "fused" or "prefills" not in name)
    one_for_one &= name != "mixed, padded" or route != "fused"
    if on_device and device is not None:
        assert device == host
    assert (device is not None) is (on_device and one_for_one and name != "prefills alone")


def test_the_lengths_of_each_step_are_used_and_lie_where_they_lay():
    plugin, layer, planner = layer_of("split", 1)
    long, one = make_step("decodes", "fp8_ds_mla"), make_step("decodes, padded", "fp8_ds_mla")
    swapped = replace(long, batch=replace(long.batch, seq_lens=long.batch.seq_lens[::-1].copy()))
    plans = []
    for step in (long, one, swapped, long):
        plans.append(planner.plan(step.batch))
        if step is not swapped:
            run(layer, step, plans[-1])
    assert [host for host, _ in plugin.planners[0].seen] == [[17, 1, 48], [17, 30], [48, 1, 17], [17, 1, 48]]
    assert plans[0].decode_schedule is plans[3].decode_schedule, "a graph reads the schedule of the step that replays it"
    with pytest.raises(PlanMismatch, match="later plan"):
        run(layer, long, plans[2])


def test_a_captured_schedule_holds_the_lengths_of_the_step_that_replays_it():
    _, layer, planner = layer_of("direct", 1)
    captured = planner.plan(replace(make_step("nothing, padded", "fp8_ds_mla").batch, num_padded_tokens=5)).decode_schedule
    step = make_step("decodes, padded", "fp8_ds_mla")
    plan = planner.plan(with_lengths(step.batch))
    assert isinstance(captured, KeyCounts) and captured.counts.tolist() == [17, 30, 0, 0, 0]
    run(layer, step, replace(plan, decode_schedule=captured))


def test_lengths_on_the_device_are_exact_where_those_of_the_host_are_bounds():
    plugin, layer, planner = layer_of("split", 2)
    step = make_step("decodes of two tokens", "fp8_ds_mla")
    exact = with_lengths(step.batch)
    plan = planner.plan(replace(exact, seq_lens=np.minimum(step.batch.seq_lens + 5, SPEC.max_model_len)))
    assert plugin.planners[0].seen == [([22, 7, 48], [17, 2, 48])]
    assert isinstance(plan.decode_schedule, KeyCounts) and plan.decode_schedule.counts.tolist() == [17, 2, 48]
    run(layer, step, plan)


def test_lengths_of_a_share_are_those_of_the_ranks_own_cache():
    plugin, layer, _ = layer_of("fused", 1)
    planner = Planner(replace(layer.planner_config(), share=ContextShare(2, 1, 4), block_size=None))
    planner.plan(make_step("decodes", "fp8_ds_mla").batch)
    assert plugin.planners[-1].seen == [([8, 0, 24], None)]


def test_without_lengths_such_a_kind_plans_nothing():
    kind = Plugin().kind
    planner = kind.planner(ScheduleLimits(torch.device("cpu"), HEADS, TOPK, 4))
    with pytest.raises(InvalidArgument, match="lengths: got None, expected StepLengths: schedule_kind key_counts"):
        kind.schedule(planner, 4, 1)
    with pytest.raises(InvalidArgument, match="on the host, on the device, or both"):
        StepLengths(None)


def test_slot_attention_has_a_schedule_for_a_step_that_was_prepared_with_its_lengths():
    plugin, registry = machine()
    spec = replace(SPEC, need_lse=False, concat_query=False, max_num_reqs=8, kv_layout="bf16", scale_format=None)
    layer = SlotAttention(spec, device="cpu", registry=registry)
    kv = torch.randn(3 * BLOCK, 576, generator=torch.Generator().manual_seed(1)).bfloat16()

    def scheduled(rows: int) -> KeyCounts | None:
        q, slots = torch.zeros(rows, HEADS, 576).bfloat16(), torch.arange(TOPK, dtype=torch.int32).expand(rows, -1).contiguous()
        layer.forward(q, kv.view(3, BLOCK, 576), slots, softmax_scale=1.0, decodes=True)
        schedule = plugin.given[-1]
        assert schedule is None or isinstance(schedule, KeyCounts)
        return schedule

    assert scheduled(3) is None, "no lengths: the implementation makes a schedule in the call"
    layer.prepare(3, lengths=StepLengths(None, torch.tensor([7, 1, 9], dtype=torch.int32)))
    first = scheduled(3)
    assert first is not None and first.counts.tolist() == [7, 1, 9]
    layer.prepare(3, lengths=StepLengths(np.array([8, 2], dtype=np.int32)))
    assert scheduled(3) is first and first.counts.tolist() == [8, 2, 0]
    layer.prepare(2, lengths=StepLengths(np.array([4, 4], dtype=np.int32)))
    assert scheduled(2) is not None and scheduled(3) is None, "the lengths of an earlier step"
    layer.prepare(2)
    assert scheduled(2) is None
    with pytest.raises(InvalidArgument, match=r"prepare: lengths: got list"):
        layer.prepare(2, lengths=[1, 2])


# the indexer's primitives


@dataclass(frozen=True, eq=False)
class TokenRows(DecodeSchedule):
    """Of `tokens` tokens of `requests` requests; `scratch_at` is written by a call."""

    tokens: int
    requests: int
    topk: int | None
    scratch_at: Tensor | None = None

    def check_indexer(
        self, where: str, num_tokens: int, num_requests: int, num_heads: int, topk: int | None, device: torch.device
    ) -> None:
        if (num_tokens, num_requests, topk) != (self.tokens, self.requests, self.topk):
            raise PlanMismatch(f"{where}: {num_tokens} tokens, made for {self.tokens}")

    def scratch(self, where: str, value_width: int) -> dict[str, tuple[int, int]]:
        assert value_width == 0
        return {} if self.scratch_at is None else {"schedule.scratch_at": extent(self.scratch_at)}


def index_call(name: str) -> tuple[Any, dict[str, Any]]:
    """A primitive's public function and good arguments: 6 tokens of 3 requests."""
    tokens, requests = 6, 3
    arguments: dict[str, Any] = {
        "q": torch.randn(tokens, 4, 128, generator=torch.Generator().manual_seed(3)).bfloat16(),
        "weights": torch.ones(tokens, 4),
        "index_cache": torch.ones(requests, 8, 128).bfloat16(),
        "query_start_loc": torch.arange(0, tokens + 1, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([8, 2, 5], dtype=torch.int32),
        "block_table": torch.arange(requests, dtype=torch.int32).view(-1, 1),
    }
    if name == "indexer_logits":
        return mla_portable.indexer_logits, {**arguments, "out": torch.empty(tokens, 8)}
    return mla_portable.indexer_select, {**arguments, "topk": 3, "out": torch.empty(tokens, 3, dtype=torch.int32)}


@pytest.mark.parametrize("name", ["indexer_logits", "indexer_select"])
def test_the_indexer_passes_a_schedule_to_who_plans_with_its_kind(name: str):
    function, arguments = index_call(name)
    schedule = TokenRows(6, 3, arguments.get("topk"))
    given = []
    for kind in (ScheduleKind("rows", TokenRows, KeyCountPlanner, needs_lengths=True), None):
        plugin = Recorder(schedule_kind=kind)
        with serving(registry_of(plugin)):
            function(**arguments, schedule=schedule)
            function(**arguments)
        given.append([keywords.get("schedule", "absent") for _, _, keywords in plugin.calls])
        assert [request.rows for request in plugin.bound] == [None] * len(plugin.bound)
    assert given == [[schedule, "absent"], ["absent", "absent"]]
    with serving(REFERENCE):
        assert torch.equal(function(**arguments, schedule=schedule).clone(), function(**arguments))


@pytest.mark.parametrize("name", ["indexer_logits", "indexer_select"])
def test_a_schedule_of_another_call_is_refused_by_the_indexer(name: str):
    function, arguments = index_call(name)
    topk, written = arguments.get("topk"), arguments["out"]
    refused: list[tuple[Any, type[Exception], str]] = [
        (TokenRows(5, 3, topk), PlanMismatch, f"{name}: 6 tokens, made for 5"),
        (TokenRows(6, 2, topk), PlanMismatch, name),
        (TokenRows(6, 3, 7), PlanMismatch, name),
        (KeyCounts(3, 2, written), PlanMismatch, f"{name}: its schedule, a KeyCounts, was made for attention"),
        (SplitSchedule(6, 4, 3, 1), PlanMismatch, "a SplitSchedule, was made for attention"),
        ("x", InvalidArgument, "schedule: got str 'x', expected a schedule from a planner"),
        (TokenRows(6, 3, topk, scratch_at=written[2]), InvalidArgument, "out: .*overlaps schedule.scratch_at"),
        (TokenRows(6, 3, topk, scratch_at=arguments["weights"]), InvalidArgument, "weights: .*overlaps schedule.scratch_at"),
    ]
    plugin = Recorder(schedule_kind=ScheduleKind("others", OtherRows, KeyCountPlanner))
    with serving(registry_of(plugin)):
        for schedule, error, text in refused:
            with pytest.raises(error, match=text):
                function(**arguments, schedule=schedule)
        with pytest.raises(PlanMismatch, match=f"{name}: schedule is a TokenRows, recorder.tape takes a OtherRows"):
            function(**arguments, schedule=TokenRows(6, 3, topk))
    assert not plugin.calls


class OtherRows(TokenRows):
    """Another kind."""


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_benchmark_plans_for_sequences_that_hold_what_its_lists_name(query_len: int):
    plugin, registry = machine()
    case = KernelCase(SPARSE_DECODE, 2, "fp8_ds_mla", HEADS, 32, 128, query_len=query_len)
    (found,) = kernel_bench.run(case, registry=registry, backends=["lengths"]).cases
    (timed,) = found.times
    assert timed.ok and not timed.wrong and plugin.given
    ((host, device),) = plugin.planners[0].seen
    assert host == device == [32 + query_len] * 2
