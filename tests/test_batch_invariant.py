# SPDX-License-Identifier: Apache-2.0
"""`batch_invariant`: who offers it, what the planner hands out under it, and that the suite finds who breaks the promise."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conformance_faults import CPU, Model
from machines import H200
from recorder import Recorder, registry_of
from typer.testing import CliRunner

from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.cli.app import app
from mla_portable.contracts import Batch, Implementation, Primitive, Request
from mla_portable.judge.conformance import cases_for
from mla_portable.judge.conformance.runner import _bind_and_run
from mla_portable.judge.problems.attention_problem import make_schedule
from mla_portable.kit.split_kv import SPLIT_KV, SplitSchedule
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.planner import Planner, PlannerConfig
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL

DECODE, PREFILL = SPARSE_DECODE, SPARSE_PREFILL
CONFIG = PlannerConfig(
    device="cpu",
    route="direct",
    num_heads=16,
    topk=2048,
    max_num_reqs=64,
    max_num_tokens=64,
    max_model_len=64,
    schedule_kind=SPLIT_KV,
    num_sms=132,
)


@pytest.mark.parametrize("primitive", [DECODE, PREFILL])
def test_the_portable_kernels_are_taken_for_it(primitive: Primitive):
    registry = Registry(environ={}, probe=False)
    request = Request(primitive, H200, kv_layout="bf16", num_heads=64, topk=2048, batch_invariant=True)
    decision = registry.decide(request, thorough=True)
    offering = {
        each.implementation for each in decision.verdicts if not any(r.subject == "batch_invariant" for r in each.reasons)
    }
    assert decision.chosen in offering and "triton.portable" in offering
    assert (
        offering == {each.name for each in registry.implementations(primitive) if each.support.batch_invariant}
        and not {"reference.torch", "nvidia.flashmla"} & offering
    )


def test_explain_takes_it():
    words = ["explain", "--device", "h200", "--batch-invariant", "--json"]
    answer = CliRunner().invoke(app, [*words, "sparse_decode"])
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert "batch_invariant=yes" in document["request"]
    flashmla = next(each for each in document["candidates"] if each["implementation"] == "nvidia.flashmla")
    assert "batch_invariant" in json.dumps(flashmla["reasons"])
    route = CliRunner().invoke(app, [*words, "route"])
    assert route.exit_code == 0 and "batch_invariant=yes" in route.stdout


@pytest.mark.parametrize("words", [[], ["--batch-invariant"]])
def test_explain_asks_the_indexer_of_a_route_for_the_order_that_vllm_asks_for(words: list[str]):
    answer = CliRunner().invoke(app, ["explain", "route", "--device", "h200", "--json", *words])
    assert answer.exit_code == 0, answer.output
    assert ("ordered=yes" in json.loads(answer.stdout)["indexer"]["request"]) is bool(words)


def test_a_layer_is_served_by_who_offers_it_and_plans_for_it():
    fast, steady = Recorder("fast.tape"), Recorder("steady.tape", SPLIT_KV, 50.0, {"batch_invariant": True})
    spec = AttentionSpec(num_heads=4, softmax_scale=1.0, max_num_tokens=8, max_num_reqs=4, max_model_len=8, topk=16)
    for wanted, served in ((False, "fast.tape"), (True, "steady.tape")):
        layer = SparseMLAAttention(replace(spec, batch_invariant=wanted), device="cpu", registry=registry_of(fast, steady))
        parts = {part.role: part.decision for part in layer.route_decision.verdict.parts}
        assert {parts[role].chosen for role in ("decode", "prefill")} == {served}
        assert {parts[role].request.batch_invariant for role in ("decode", "prefill")} == {wanted}
        assert parts["convert"].chosen == "fast.tape", "it moves each row by itself"
        assert layer.planner_config().batch_invariant is wanted
    assert any(request.batch_invariant for request in steady.bound)


# ------------------------------------------------------------------ the planner


def splits(config: PlannerConfig, *row_counts: int) -> set[int]:
    found: set[int] = set()
    planner = Planner(config)
    for rows in row_counts:
        starts = np.arange(rows + 1, dtype=np.int32)
        plan = planner.plan(Batch(starts, np.full(rows, 9, dtype=np.int32), torch.zeros((rows, 1), dtype=torch.int32)))
        schedule = plan.decode_schedule
        assert isinstance(schedule, SplitSchedule) and schedule.num_rows == rows
        assert schedule.partial_out is None or schedule.partial_out.shape[:2] == (schedule.num_splits, rows)
        found.add(schedule.num_splits)
    return found


def test_a_row_is_cut_alike_in_every_batch():
    assert len(splits(CONFIG, 1, 20, 33, 64)) == 4
    steady = replace(CONFIG, batch_invariant=True)
    assert splits(steady, 1, 20, 33, 64) == {8}, "a row by itself is still cut"
    assert splits(replace(steady, max_num_tokens=8192, max_num_reqs=64), 1, 64) == {8}, "tokens are no decode rows"
    assert splits(replace(steady, max_scratch_bytes=9 << 20), 1, 64) == {4}, "what fits for 64 rows"
    assert splits(replace(steady, max_scratch_bytes=1 << 20), 1, 64) == {1}
    assert splits(replace(steady, route="fused", max_num_tokens=512), 1, 64) == {3}, "every token is a row"


def test_padding_beyond_the_largest_decode_batch_is_not_decoded():
    config = replace(CONFIG, batch_invariant=True, max_num_reqs=4)
    starts, lens = np.arange(4, dtype=np.int32), np.full(3, 9, dtype=np.int32)
    table = torch.zeros((3, 1), dtype=torch.int32)
    for padded, rows in ((4, 4), (5, 3)):
        plan = Planner(config).plan(Batch(starts, lens, table, padded))
        assert plan.num_decode_tokens == rows and plan.num_padded_tokens == padded


def test_a_prefill_of_few_tokens_stays_a_prefill():
    batch = Batch(np.array([0, 3], dtype=np.int32), np.array([9], dtype=np.int32), torch.zeros((1, 1), dtype=torch.int32))
    config = replace(CONFIG, few_tokens=16)
    assert Planner(config).plan(batch).num_decode_tokens == 3
    assert Planner(replace(config, batch_invariant=True)).plan(batch).num_decode_tokens == 0


# ------------------------------------------------------------------ the suite


class Promising(Model):
    """Promises it. With "counts rows" a row that is alone is summed in another order, told by one bit of its lse."""

    def implementation(self, primitive: Primitive, **limits: Any) -> Implementation:
        made = super().implementation(primitive, batch_invariant=True, max_heads=16, **limits)

        def bind(request: Request) -> Any:
            def call(q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
                out, lse = getattr(self, str(primitive))(q, *arguments, **options)
                counted = {"counts rows": q.shape[:-2].numel(), "asks for rows": request.rows}
                if any(fault in self.faults and rows == 1 for fault, rows in counted.items()):
                    bits = lse.view(torch.int32)
                    bits += lse.isfinite().int()
                return out, lse

            return call

        return replace(made, bind=bind)


@pytest.mark.parametrize("primitive", [DECODE, PREFILL])
@pytest.mark.parametrize("fault", ["counts rows", "asks for rows"])
def test_a_bit_that_depends_on_the_other_rows_is_found(primitive: Primitive, fault: str):
    made = Promising().implementation(primitive)
    cases = [case for case in cases_for(made, CPU, "quick") if case.params.run == "batches"]
    assert {case.request.kv_layout for case in cases} == {"bf16", "fp8_ds_mla"}
    assert all(case.request.batch_invariant and case.id.endswith("-batches]") for case in cases)
    cases = [case for case in cases if (case.params.query_len or 1) == 1][:2]
    for case in cases:
        honest = _bind_and_run(made, case, torch.device("cpu"))
        assert honest.status == "passed", honest.message
        faulty = _bind_and_run(Promising(fault).implementation(primitive), case, torch.device("cpu"))
        assert faulty.status == "failed" and "by themselves, result 1" in faulty.message, faulty.message


def test_who_promises_nothing_is_not_asked():
    made = Model().implementation(DECODE)
    assert not any(case.params.run == "batches" for case in cases_for(made, CPU, "full"))


def test_scheduled_rows_keep_their_cut():
    gpu = replace(H200, memory_bytes=0)
    made = replace(Promising().implementation(DECODE, device_types=("cuda",)), schedule_kind=SPLIT_KV)
    params = [case.params for case in cases_for(made, gpu, "quick") if case.params.run == "batches"]
    assert {each.schedule: each.rows >= 40 for each in params} == {None: True, SPLIT_KV: True}
    (one,) = [each for each in params if each.schedule is not None][:1]
    whole, alone = (make_schedule(one, torch.device("cpu"), gpu, num_rows=rows) for rows in (None, 1))
    assert isinstance(whole, SplitSchedule) and isinstance(alone, SplitSchedule)
    assert whole.num_splits == alone.num_splits > 1 and alone.partial_out is not None and alone.partial_out.shape[1] == 1


# ------------------------------------------------------------------ the kernels


def test_a_portable_decode_without_a_schedule_splits_no_row(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from mla_portable_triton import bind_attention
    from mla_portable_triton.kernels import merge_states, sparse_attention

    seen: list[int] = []
    monkeypatch.setattr(sparse_attention, "launch", lambda *a, num_splits, **more: seen.append(num_splits))
    monkeypatch.setattr(merge_states, "launch", lambda *a, **more: None)
    request = Request(DECODE, H200, kv_layout="bf16", num_heads=16, topk=2048, rows=1)
    q, indices = torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16), torch.zeros(1, 1, 2048, dtype=torch.int32)
    for asked in (request, request.but(batch_invariant=True)):
        bind_attention.bind_sparse_decode(asked)(q, torch.zeros(1, 64, 576, dtype=torch.bfloat16), indices, softmax_scale=1.0)
    assert seen[0] > 1 == seen[1]


GPU = torch.cuda.is_available()


@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"] if GPU else ["bf16"])
def test_portable_decode_gives_a_row_the_same_bits_in_every_batch_of_a_planner(layout: str):
    """The interpreter runs a small case for a device of two multiprocessors, which two rows fill by themselves."""
    pytest.importorskip("triton")
    device, sizes, topk, heads = ("cuda", (1, 2, 7, 64, 256), 2048, 16) if GPU else ("cpu", (1, 2), 320, 1)
    most = max(sizes)
    registry = Registry(facts=None if GPU else {"cpu": replace(H200, num_sms=1)}, environ={}, probe=False)
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(topk // 64, 64, 576, generator=generator).bfloat16()
    if layout == "fp8_ds_mla":
        rows = cache.view(-1, 576)
        cache = FP8_DS_MLA.pack(rows[:, :512], rows[:, 512:]).view(-1, 64, 656)
    queries = torch.randn(most, heads, 576, generator=generator).bfloat16().to(device)
    chosen = torch.stack([torch.randperm(topk, generator=generator) for _ in range(most)]).int().to(device)
    spec = AttentionSpec(
        num_heads=heads, softmax_scale=0.01, max_num_tokens=most, max_num_reqs=most, max_model_len=topk, kv_layout=layout,
        scale_format=None if layout == "bf16" else "pow2", topk=topk, batch_invariant=True,
    )  # fmt: skip
    layer = SparseMLAAttention(spec, device=device, registry=registry, backend="triton")
    planner = Planner(layer.planner_config())
    found: set[bytes] = set()
    for size in sizes:
        table = torch.arange(topk // 64, dtype=torch.int32, device=device).repeat(size, 1)
        plan = planner.plan(Batch(np.arange(size + 1, dtype=np.int32), np.full(size, topk, dtype=np.int32), table))
        assert isinstance(plan.decode_schedule, SplitSchedule) and plan.decode_schedule.num_splits > 1
        out, lse = layer(queries[:size], cache.to(device), chosen[:size], plan)
        assert lse is not None and out[0].isfinite().all()
        found.add(out[0].float().cpu().numpy().tobytes() + lse[0].cpu().numpy().tobytes())
    assert len(found) == 1
