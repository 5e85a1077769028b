# SPDX-License-Identifier: Apache-2.0
"""The main job: its inputs are what they say, its checks pass where all is right and name the one that is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from spoiled import WRONG_IN_STEP, Spoiled, inexact_merge_states, registry_with, wrong_lse

from mla_portable.bench.step import run_step
from mla_portable.bench.timing import measure, quantiles, run_and_measure
from mla_portable.contracts import InvalidArgument, UnsupportedRequest
from mla_portable.judge.problems.step import StepShape, default_shape, make_inputs, step_bytes, step_cases
from mla_portable.primitives import CACHE_WRITE, GATHER_UPCONVERT, MERGE_STATES

CPU = torch.device("cpu")
SMALL = StepShape(num_heads=2, topk=48, decodes=3, prefills=2, prefill_tokens=6, context=90, block_size=16)
SHAPES = {
    "mixed": SMALL,
    "bf16 cache": StepShape(num_heads=2, topk=48, decodes=3, prefills=2, prefill_tokens=6, context=90, kv_layout="bf16"),
    "amax scales, blocks of 1": StepShape(
        num_heads=1, topk=20, decodes=2, prefill_tokens=3, context=40, block_size=1, scale_format="amax"
    ),
    "speculative decodes only": StepShape(num_heads=2, topk=33, decodes=3, decode_query_len=3, prefills=0, context=70),
    "prefills only": StepShape(num_heads=2, topk=33, decodes=0, prefills=3, prefill_tokens=5, context=70),
    "no context": StepShape(num_heads=2, topk=16, decodes=2, prefills=1, prefill_tokens=40, context=0),
}


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(SMALL, CPU)


def test_a_seed_means_the_same_step(inputs):
    again, other = make_inputs(SMALL, CPU), make_inputs(replace(SMALL, seed=1), CPU)
    for name in ("q", "kv_c", "k_pe", "history_kv_c", "slot_mapping", "topk_indices"):
        assert torch.equal(getattr(inputs, name), getattr(again, name)), name
    assert not torch.equal(inputs.q, other.q)


def test_topk_positions_are_causal_distinct_and_as_many_as_there_are(inputs):
    for position, row in zip(inputs.positions.tolist(), inputs.topk_indices, strict=True):
        count = min(SMALL.topk, position + 1)
        assert (row[count:] == -1).all()
        chosen = row[:count].tolist()
        assert len(set(chosen)) == count and min(chosen) >= 0 and max(chosen) <= position


def test_some_rows_have_fewer_positions_than_topk_and_some_choose(inputs):
    available = inputs.positions + 1
    assert (available < SMALL.topk).any() and (available > SMALL.topk).any()


def test_the_longest_request_and_a_fresh_one_are_there(inputs):
    query_lens = inputs.batch.query_start_loc[1:] - inputs.batch.query_start_loc[:-1]
    contexts = inputs.batch.seq_lens - query_lens
    assert contexts.max() == SMALL.context and contexts[SMALL.decodes] == 0
    assert (contexts[: SMALL.decodes] >= SMALL.context // 8).all()


def test_every_token_has_a_slot_of_its_own(inputs):
    slots = torch.cat([inputs.history_slots, inputs.slot_mapping])
    assert len(slots.unique()) == len(slots) == int(inputs.batch.seq_lens.sum())
    assert slots.max() < inputs.kv_cache.shape[0] * SMALL.block_size


def test_the_cache_starts_as_nan_in_every_reading(inputs):
    raw = inputs.kv_cache
    assert raw.view(torch.float8_e4m3fn).float().isnan().all()
    assert raw.view(torch.bfloat16).isnan().all() and raw.view(torch.float32).isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decodes": 0, "prefills": 0}, "at least one request"),
        ({"decode_query_len": 4, "prefill_tokens": 4}, "prefill_tokens.*served as a decode"),
        ({"kv_layout": "fp4"}, "kv_layout"),
        ({"scale_format": "x"}, "scale_format"),
        ({"seed": 1 << 63}, r"seed: got \d+, expected \d+ to \d+"),
        ({"context": -1}, r"context: got -1, expected \d+ to \d+"),
        ({"block_size": 1_000_000}, r"block_size: got 1000000, expected \d+ to \d+"),
        ({"num_heads": 0}, r"num_heads: got 0, expected \d+ to \d+"),
        ({"topk": 1 << 21}, r"topk: got \d+, expected \d+ to \d+"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(SMALL, **changes)


def test_a_gpu_gets_more_work_than_a_cpu():
    assert default_shape("cuda").num_heads > default_shape("cpu").num_heads
    assert default_shape("cuda").topk == default_shape("cpu").topk == 2048


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("route", ["auto", "split", "fused", "upconvert"])
def test_every_primitive_agrees_with_the_oracle(shape, route):
    if shape.kv_layout == "bf16" and route == "upconvert":
        route = "direct"
    report = run_step(shape, device=CPU, registry=registry_with(), route=route, repeat=1, check_rows=0)
    assert report.ok, report.failures()
    served = {str(result.decision.request.primitive) for result in report.primitives if result.findings}
    assert served == set(WRONG_IN_STEP)
    assert all(result.timing is not None and result.timing.n == 1 for result in report.primitives)
    assert report.route == (route if route != "auto" else "direct")


@pytest.mark.parametrize("primitive", WRONG_IN_STEP)
@pytest.mark.parametrize("route", ["direct", "split"])
def test_the_primitive_that_is_wrong_is_named(primitive, route):
    registry = registry_with(("spoiled", Spoiled({primitive: WRONG_IN_STEP[primitive]})), probe=False)
    report = run_step(SMALL, device=CPU, registry=registry, route=route, repeat=1, check_rows=0)
    assert not report.ok
    assert {str(result.decision.request.primitive) for result in report.primitives if not result.ok} == {primitive}
    on_route = {str(result.decision.request.primitive) for result in report.primitives if result.on_route}
    spoils_the_step = primitive in on_route - {"cache_write"}  # attention is judged by the bytes that are in the cache
    assert bool([finding for finding in report.findings if finding.message]) == spoils_the_step
    assert all(line.startswith(("step: ", *WRONG_IN_STEP)) for line in report.failures())


def test_a_wrong_lse_is_found():
    registry = registry_with(("spoiled", Spoiled({"sparse_decode": wrong_lse})), probe=False)
    report = run_step(SMALL, device=CPU, registry=registry, repeat=1)
    assert any(line.startswith("sparse_decode: lse") for line in report.failures())


def test_a_merge_is_judged_by_its_own_tolerance():
    registry = registry_with(("spoiled", Spoiled({"merge_states": inexact_merge_states})), probe=False)
    report = run_step(SMALL, device=CPU, registry=registry, repeat=1)
    assert len(report.failures()) == 1 and report.failures()[0].startswith("merge_states: lse[")


def test_judged_rows_hold_decodes_and_prefills():
    report = run_step(SMALL, device=CPU, registry=registry_with(), repeat=1, check_rows=4)
    assert report.checked == "4 of 15 rows"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_primitives_are_timed_at_the_sizes_of_the_step(shape):
    inputs, cases = make_inputs(shape, CPU), step_cases(shape)
    assert cases["cache_write"].rows == cases["convert_indices"].rows == shape.num_tokens == len(inputs.q)
    prefilled = inputs.batch.seq_lens[shape.decodes if shape.prefills else 0 :]
    assert cases["gather_upconvert"].rows == prefilled.sum()
    decode, prefill = cases["sparse_decode"], cases["sparse_prefill (cache)"]
    assert shape.decodes in (0, decode.rows) and (not shape.decodes or decode.query_len == shape.decode_query_len)
    assert prefill.rows == (shape.prefills * shape.prefill_tokens or shape.num_tokens)
    assert {each.kv_layout for each in (decode, prefill)} == {shape.kv_layout}
    assert decode.width == prefill.width == max(int(inputs.batch.seq_lens.sum()), shape.topk)
    assert ("sparse_prefill (workspace)" in cases) == (shape.kv_layout != "bf16")


def test_off_the_route_nothing_need_serve():
    from mla_portable.contracts import Primitive

    without = [p for p in Primitive.all() if p not in (GATHER_UPCONVERT, MERGE_STATES)]
    registry = registry_with(("spoiled", Spoiled(only=without)))
    each = {str(primitive): "spoiled" for primitive in Primitive.all()}
    report = run_step(SMALL, device=CPU, registry=registry, backend=each, repeat=1, check_rows=2)
    unserved = {result.name for result in report.primitives if result.implementation is None}
    assert unserved == {"gather_upconvert", "merge_states"}
    assert report.ok and report.route == "direct"
    report = run_step(SMALL, device=CPU, registry=registry, backend="spoiled", repeat=1, check_rows=2)
    automatic = {result.name for result in report.primitives if result.implementation == "reference.torch"}
    assert report.ok and automatic == unserved, "a name for everything holds for what it offers"


def test_on_the_route_something_must():
    from mla_portable.contracts import Primitive

    registry = registry_with(("spoiled", Spoiled(only=[p for p in Primitive.all() if p is not CACHE_WRITE])))
    with pytest.raises(UnsupportedRequest, match="cache_write"):
        run_step(SMALL, device=CPU, registry=registry, backend={"cache_write": "spoiled"}, repeat=1)


def test_progress_counts_up_to_the_number_of_parts():
    parts: list[tuple[str, int, int]] = []
    run_step(SMALL, device=CPU, registry=registry_with(), repeat=1, check_rows=1, progress=lambda *part: parts.append(part))
    assert [done for _, done, _ in parts] == list(range(len(parts)))
    assert {total for _, _, total in parts} == {len(parts)}


@pytest.mark.parametrize("bad", [{"repeat": 0}, {"check_rows": -1}])
def test_counts_are_checked_first(bad):
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        run_step(SMALL, device=CPU, registry=registry_with(), **bad)


def test_measure_makes_as_many_runs_as_it_says():
    calls: list[int] = []
    timing = measure(lambda: calls.append(1), device=CPU, repeat=7, warmup=2)
    assert len(calls) == 9 and timing.n == 7 and timing.clock == "perf_counter" and not timing.cold_l2
    assert 0 <= timing.p10_ms <= timing.median_ms <= timing.p90_ms


def test_measure_stops_at_its_bound_but_runs_once():
    assert measure(lambda: None, device=CPU, repeat=1000, warmup=0, max_seconds=0.0).n == 1


def test_a_slow_first_call_is_the_only_one():
    calls: list[int] = []
    result, timing = run_and_measure(lambda: calls.append(1) or len(calls), device=CPU, repeat=5, max_seconds=0.0)
    assert (result, timing.n, len(calls)) == (1, 1, 1)
    result, timing = run_and_measure(lambda: calls.append(1) or len(calls), device=CPU, repeat=5)
    assert (result, timing.n, len(calls)) == (2, 5, 7)


def test_quantiles_are_linear_between_neighbours():
    assert quantiles([3.0, 1.0, 2.0])[0] == 2.0
    assert quantiles([0.0, 10.0]) == pytest.approx((5.0, 1.0, 9.0))
    assert quantiles([4.0]) == (4.0, 4.0, 4.0)


@pytest.mark.parametrize("bad", [{"repeat": 0}, {"repeat": 1, "warmup": -1}])
def test_measure_refuses_counts_that_mean_nothing(bad):
    with pytest.raises(InvalidArgument):
        measure(lambda: None, device=CPU, **bad)


def test_a_step_that_does_not_fit_is_refused_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr("mla_portable.bench.step.make_inputs", lambda *given: pytest.fail("drawn"))
    monkeypatch.setattr("mla_portable.bench.step._host_memory", lambda: 1 << 30)
    with pytest.raises(InvalidArgument, match=r"about \d+\.\d GiB, expected no more than the 1\.0 GiB"):
        run_step(replace(SMALL, decodes=20, block_size=1 << 16), device=CPU, registry=registry_with())


def test_the_estimate_covers_what_is_drawn():
    shape = replace(SMALL, context=500, decodes=5)
    inputs = make_inputs(shape, CPU)
    drawn = [
        getattr(inputs, name) for name in ("kv_cache", "history_kv_c", "history_k_pe", "kv_c", "k_pe", "q", "topk_indices")
    ]
    total = sum(tensor.nbytes for tensor in drawn)
    assert total <= step_bytes(shape) <= 10 * total
