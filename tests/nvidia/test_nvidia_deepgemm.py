# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's scores against strict stand-ins of its builds: found, tried, closed around what they leave open, judged."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from deepgemm_standins import BUILDS, Build, installed, score
from flashmla_standins import modules
from simulated_gpu import FACTS, conforms, registry

from mla_portable.contracts import InvalidArgument, MLAPortableError, PlanMismatch, Request, ScheduleLimits, StepLengths
from mla_portable.dispatch import serving
from mla_portable.judge.conformance.report import CaseResult
from mla_portable.judge.conformance.runner import run_case
from mla_portable.judge.problems.base import cases_for
from mla_portable.layouts import INDEX_FP8
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, INDEXER_SELECT
from mla_portable.primitives.topk_select import reference as topk_select
from mla_portable_common.deep_gemm import schedules
from mla_portable_common.deep_gemm.conventions import DeepGemm
from mla_portable_common.deep_gemm.discovery import forget_deepgemm
from mla_portable_common.deep_gemm.indexer_logits import PagedLogits, PagedScores, RaggedLogits
from mla_portable_common.deep_gemm.indexer_select import DeepGemmSelect
from mla_portable_common.deep_gemm.pages import Pages, row_lengths
from mla_portable_common.deep_gemm.schedules import IndexSchedule
from mla_portable_common.deep_gemm.torch_passes import TorchIndexPasses
from mla_portable_nvidia.deepgemm.discovery import deepgemm_reasons, find_deepgemm
from mla_portable_nvidia.deepgemm.implementations import (
    DEEPGEMM_ROWS,
    deepgemm_implementations,
    scratch_of,
    select_implementations,
)
from mla_portable_nvidia.native.topk_select import NativeTopkSelect

PRIMITIVES = (INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, INDEXER_SELECT)
E4M3 = torch.float8_e4m3fn


def suite(arch: str, level: str):
    on_cpu = {"device_types": ("cpu",)}
    machine = registry(arch, offered=(*deepgemm_implementations(**on_cpu), *select_implementations(**on_cpu)))
    with serving(machine):  # the top-k of a selection is chosen there
        return conforms(machine, "nvidia.deepgemm", level, *PRIMITIVES)


@pytest.mark.parametrize("arch", FACTS)
@pytest.mark.parametrize("name", BUILDS)
def test_every_build_conforms(name, arch):
    with installed(name, arch=arch, num_sms=FACTS[arch].num_sms) as build:
        suite(arch, "smoke")
        assert build.paged_rows and build.ragged_rows


@pytest.mark.parametrize("level", ["quick", "full"])
def test_the_suite_passes_a_schedule_and_a_planner_of_other_lengths_fails(level, monkeypatch):
    on_cpu = {"device_types": ("cpu",)}
    offered = {each.primitive: each for each in (*deepgemm_implementations(**on_cpu), *select_implementations(**on_cpu))}
    cases = [
        case
        for each in offered.values()
        for case in cases_for(each, FACTS["sm90"], level)
        if "scheduled" in case.params.words()
    ]
    assert {(case.primitive, case.params.batch) for case in cases} == {
        (primitive, batch) for primitive in (INDEXER_LOGITS, INDEXER_SELECT) for batch in ("decode", "drafts")
    }
    with installed("deep_gemm 2026") as build, serving(registry("sm90", offered=offered.values())):

        def results() -> Iterator[CaseResult]:
            for case in cases:
                bound, before = offered[case.primitive].bind(case.request), len(build.plans)
                yield run_case(case, bound, torch.device("cpu"))
                assert len(build.plans) == before + 1, "the planner's alone, for both calls"

        assert {(result.status, result.message) for result in results()} == {("passed", "")}
        monkeypatch.setattr(schedules, "row_lengths", lambda seen, query_len: row_lengths(seen + 1, query_len))
        assert all(result.status == "error" and "a schedule of other lengths" in result.message for result in results())


@pytest.mark.parametrize("name", ["vllm 0.26", "vllm 0.33"])
def test_the_quick_level_passes(name):
    with installed(name) as build:
        words = suite("sm90", "quick")
        assert {next_n for _, next_n in build.paged_rows} == {1, 2}
    assert {"table_holes", "starts_outside", "overlong", "h32", "h64", "mixed", "amax", "narrow", "wide"} <= words
    assert "absent_nan_scale" in words and "absent_nan" not in words, "DeepGEMM makes 0 of a number that is NaN"


class NativeStandIn(NativeTopkSelect):
    """The reference in the native top-k's name, which is not built here."""

    def __init__(self) -> None: ...

    def __call__(self, *tensors: torch.Tensor, topk: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return topk_select(*tensors, topk=topk, out=out)


def batch(build: Build, tokens: int, lengths: list[int], heads: int = 32, columns: int = 3):
    """(arguments of indexer_logits by position, its scores where nothing is absent)."""
    g = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, heads, 128, generator=g).to(E4M3)
    weights = torch.randn(tokens, heads, generator=g)
    blocks = len(lengths) * columns
    keys = torch.randn(blocks, 64, 128, generator=g).to(E4M3)
    scales = torch.rand(blocks, 64, generator=g) + 0.5
    pages = torch.cat([keys.flatten(1).view(torch.uint8), scales.view(torch.uint8)], dim=1).view(
        blocks, 64, INDEX_FP8.row_width
    )
    table = torch.randperm(blocks, generator=g).int().view(len(lengths), columns)
    each = tokens // len(lengths)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * each
    lens = torch.tensor(lengths, dtype=torch.int32)
    want = torch.full((tokens, columns * 64), -math.inf)
    for t in range(tokens):
        r = t // each
        seen = lengths[r] - (each - 1 - t % each)
        chosen = table[r].long()
        want[t, :seen] = score(q[t], weights[t], keys[chosen].float().view(-1, 128), scales[chosen].flatten())[:seen]
    return (q, weights, pages, starts, lens, table), want


@pytest.mark.parametrize(("tokens", "lengths"), [(40, [170]), (41, [192]), (12, [100, 150, 64])])
def test_few_tokens_at_a_time_give_the_same_bits_in_bounded_scratch(tokens, lengths):
    with installed("deep_gemm 2026") as build:
        kernel = find_deepgemm(INDEXER_LOGITS, FACTS["sm90"])
        arguments, want = batch(build, tokens, lengths)
        build.logits = 0
        whole, parts = (torch.full_like(want, math.nan) for _ in range(2))
        PagedLogits(kernel, TorchIndexPasses())(*arguments, out=whole)
        torch.testing.assert_close(whole, want)
        build.paged_rows.clear()
        build.logits, limit = 0, 8 << 10
        PagedLogits(kernel, TorchIndexPasses(), scratch_bytes=limit)(*arguments, out=parts)
        assert torch.equal(parts, whole)
        assert len(build.paged_rows) > 1 and build.logits <= limit
        assert sum(rows * next_n for rows, next_n in build.paged_rows) == tokens


@pytest.mark.parametrize(("tokens", "lengths"), [(41, [192]), (12, [100, 150, 64])])
def test_selection_holds_few_scores_at_a_time_and_leaves_absent_blocks_out(tokens, lengths):
    with installed("deep_gemm 2026") as build:
        kernel = find_deepgemm(INDEXER_LOGITS, FACTS["sm90"])
        arguments, want = batch(build, tokens, lengths)
        table = arguments[-1]
        table[0, 0], table[-1, 1] = -1, 1000
        each = tokens // len(lengths)
        want[:each, :64], want[-each:, 64:128] = -math.inf, -math.inf
        starts, ends = torch.zeros(tokens, dtype=torch.int32), torch.full((tokens,), want.shape[1], dtype=torch.int32)
        expected = topk_select(want, starts, ends, topk=20)
        build.paged_rows.clear()
        build.logits, limit = 0, 100 << 10
        select = DeepGemmSelect(kernel, TorchIndexPasses(), topk_select, scratch_bytes=limit)
        assert torch.equal(select(*arguments, topk=20), expected)
        assert max(rows for rows, _ in build.paged_rows) == 1, "64 KiB a token are the top-k's"
        build.paged_rows.clear()
        native = DeepGemmSelect(
            kernel, TorchIndexPasses(), NativeStandIn(), topk_bytes=scratch_of(NativeStandIn()), scratch_bytes=limit
        )
        assert torch.equal(native(*arguments, topk=20), expected)
        assert max(rows for rows, _ in build.paged_rows) > 1, "the native top-k takes no scratch"


def test_calls_are_about_as_long_as_each_other():
    pages, one = (
        Pages(*(torch.zeros(shape, dtype=torch.int32) for shape in ((r + 1,), (r,), (r, 4))), num_blocks=8, width=256)
        for r in (2, 1)
    )
    scores, each = PagedScores(None, TorchIndexPasses()), 4 * (256 + 4 + 4)
    assert list(scores.calls(41, pages, 20 * each)) == [(0, 14), (14, 14), (28, 13)]
    assert list(scores.calls(41, one, 20 * each)) == [(0, 14), (14, 14), (28, 12), (40, 1)], "two a row, the last alone"
    assert list(scores.calls(3, pages, 1)) == [(0, 1), (1, 1), (2, 1)]
    assert [count for _, count in scores.calls(5, one, 3 * each)] == [2, 2, 1]


def test_tokens_of_one_request_go_two_a_row():
    with installed("deep_gemm 2026") as build:
        kernel = find_deepgemm(INDEXER_LOGITS, FACTS["sm90"])
        for tokens, lengths, expected in ((9, [150], [(4, 2), (1, 1)]), (1, [150], [(1, 1)]), (4, [150, 90], [(4, 1)])):
            arguments, want = batch(build, tokens, lengths)
            build.paged_rows.clear()
            PagedLogits(kernel, TorchIndexPasses())(*arguments, out=torch.empty_like(want))
            assert build.paged_rows == expected


def planned(lengths: list[int], query_len: int, bounds: list[int] | None = None, on_device: bool = True) -> IndexSchedule:
    """What the planner of the kind makes for a step whose requests have `query_len` tokens each."""
    limits = ScheduleLimits(torch.device("cpu"), 32, 0, 512, request=Request(INDEXER_LOGITS, FACTS["sm90"]))
    step = StepLengths(
        np.array(lengths if bounds is None else bounds, dtype=np.int32),
        torch.tensor(lengths, dtype=torch.int32) if on_device else None,
    )
    return DEEPGEMM_ROWS.schedule(DEEPGEMM_ROWS.planner(limits), len(lengths), query_len, step)


@pytest.mark.parametrize(
    ("tokens", "lengths"), [(3, [100, 150, 64]), (12, [100, 150, 64]), (2, [170]), (1, [170]), (4, [192]), (6, [1, 2, 192])]
)
def test_a_step_s_schedule_serves_every_layer(tokens, lengths):
    with installed("deep_gemm 2026") as build:
        kernel = find_deepgemm(INDEXER_LOGITS, FACTS["sm90"])
        arguments, want = batch(build, tokens, lengths)
        schedule = planned(lengths, tokens // len(lengths))
        build.plans, made = build.plans[-1:], 1
        logits, select = PagedLogits(kernel, TorchIndexPasses()), DeepGemmSelect(kernel, TorchIndexPasses(), topk_select)
        for _ in range(3):
            torch.testing.assert_close(logits(*arguments, schedule=schedule, out=torch.empty_like(want)), want)
            chosen = select(*arguments, topk=20, schedule=schedule)
        assert torch.equal(chosen, select(*arguments, topk=20, out=None)), "one that was made in the call"
        assert len(build.plans) == made + 1


def test_a_schedule_that_may_be_of_other_lengths_is_not_used():
    """DeepGEMM would follow it to table entries that nobody wrote: the stand-in refuses."""
    with installed("deep_gemm 2026", num_sms=132) as build:
        kernel = find_deepgemm(INDEXER_LOGITS, FACTS["sm90"])
        arguments, want = batch(build, 6, [100, 150, 64])
        logits = PagedLogits(kernel, TorchIndexPasses())

        def plans(schedule: IndexSchedule, width: int = 192, scratch: int = 64 << 20) -> int:
            before = len(build.plans)
            call = PagedLogits(kernel, TorchIndexPasses(), scratch_bytes=scratch) if scratch != 64 << 20 else logits
            out = call(*arguments, schedule=schedule, out=torch.empty(6, width))
            torch.testing.assert_close(out[:, :192], want[:, :width])
            return len(build.plans) - before

        exact = planned([100, 150, 64], 2)
        assert plans(exact) == 0
        assert plans(exact, width=120) == 1, "lengths that the result cuts"
        assert plans(exact, scratch=3 << 10) > 1, "some tokens at a time"
        assert plans(planned([100, 150, 64], 2, bounds=[101, 192, 66])) == 0, "bounds within the table"
        assert plans(planned([100, 150, 64], 2, bounds=[100, 193, 64])) == 1, "longer than the table, for all the host knows"
        assert plans(planned([100, 150, 64], 2, on_device=False)) == 1, "bounds alone"
        build.num_sms = 100
        assert plans(exact) == 1, "of other multiprocessors"


def test_rows_of_padding_are_planned_as_the_call_describes_them():
    with installed("deep_gemm 2026") as build:
        kernel = find_deepgemm(INDEXER_LOGITS, FACTS["sm90"])
        (q, weights, pages, starts, lens, table), want = batch(build, 4, [100, 64, 3, 9])
        lens[2:] = 0
        want[2:] = -math.inf
        limits = ScheduleLimits(torch.device("cpu"), 32, 0, 512, request=Request(INDEXER_LOGITS, FACTS["sm90"]))
        planner = DEEPGEMM_ROWS.planner(limits)
        captured = planner.get(4, 1, StepLengths(np.full(4, 192, np.int32), torch.full((4,), 192, dtype=torch.int32)))
        planner.get(4, 1, StepLengths(np.array([100, 64], np.int32), lens[:2]))  # in front of the replay
        before = len(build.plans)
        out = PagedLogits(kernel, TorchIndexPasses())(
            q, weights, pages, starts, lens, table, schedule=captured, out=torch.empty_like(want)
        )
        torch.testing.assert_close(out, want)
        assert len(build.plans) == before


@pytest.mark.parametrize("primitive", [INDEXER_LOGITS, INDEXER_SELECT])
def test_the_indexer_s_schedules_fit_calls_of_as_many_tokens_and_requests(primitive):
    with installed("deep_gemm 2026"):
        schedule = planned([100, 150], 2)
    place = str(primitive), 4, 2, 32, None, torch.device("cpu")
    schedule.check_indexer(*place)
    for tokens, requests in ((6, 2), (4, 4), (4, 1)):
        with pytest.raises(PlanMismatch, match=f"the call has {tokens} tokens of {requests} requests, .* 2 of 2 tokens each"):
            schedule.check_indexer(place[0], tokens, requests, *place[3:])
    with pytest.raises(PlanMismatch, match="made for the indexer"):
        schedule.check("sparse_decode", 4, 1, 32, 2048, torch.device("cpu"))
    with pytest.raises(InvalidArgument, match=r"schedule\.metadata"):
        schedule.check_indexer(*place[:-1], torch.device("meta"))


def test_the_stride_of_a_single_block_means_nothing():
    with installed("deep_gemm 2026") as build:
        kernel = find_deepgemm(INDEXER_LOGITS, FACTS["sm90"])
        (q, weights, cache, *others), want = batch(build, 2, [40], columns=1)
        cache = cache.as_strided(cache.shape, (7, INDEX_FP8.row_width, 1))
        out = PagedLogits(kernel, TorchIndexPasses())(q, weights, cache, *others, out=torch.empty_like(want))
        torch.testing.assert_close(out, want)


def test_a_call_of_gathered_keys_has_work_for_every_multiprocessor():
    with installed("deep_gemm 2026", num_sms=2) as build:
        kernel = find_deepgemm(INDEXER_LOGITS_RAGGED, FACTS["sm90"])
        g = torch.Generator().manual_seed(0)
        q, weights = torch.randn(37, 64, 128, generator=g).to(E4M3), torch.randn(37, 64, generator=g)
        keys, scales = torch.randn(50, 128, generator=g).to(E4M3), torch.rand(50, generator=g)
        ranges = torch.zeros(37, dtype=torch.int32), torch.full((37,), 50, dtype=torch.int32)
        out, found = torch.empty(37, 50), []
        for scratch in (1, 5 * 4 * 562, 64 << 20):
            build.ragged_rows.clear()
            RaggedLogits(kernel, TorchIndexPasses(), 2, scratch_bytes=scratch)(q, weights, keys, scales, *ranges, out=out)
            found.append((max(build.ragged_rows), sum(build.ragged_rows)))
        assert found == [(4, 37), (4, 37), (37, 37)]


def test_what_is_not_here_is_a_reason():
    forget_deepgemm()
    (reason,) = deepgemm_reasons(INDEXER_LOGITS, FACTS["sm90"])
    assert "import deep_gemm" in str(reason) and "vllm.third_party.deep_gemm" in str(reason) and "nvcc" in reason.remedy
    with pytest.raises(MLAPortableError, match="DeepGEMM cannot serve here"):
        find_deepgemm(INDEXER_LOGITS, FACTS["sm90"])
    forget_deepgemm()


def test_this_projects_own_functions_are_not_deepgemm():
    def fp8_fp4_mqa_logits() -> None: ...

    fp8_fp4_mqa_logits.__module__ = "mla_portable.deep_gemm"
    module = types.ModuleType("deep_gemm")
    module.fp8_fp4_mqa_logits = fp8_fp4_mqa_logits
    with modules(deep_gemm=module):
        forget_deepgemm()
        (reason,) = deepgemm_reasons(INDEXER_LOGITS, FACTS["sm90"])
        assert "own stand-in" in str(reason)
    forget_deepgemm()


@pytest.mark.parametrize("primitive", PRIMITIVES[:2])
def test_a_build_that_scores_something_else_is_left_out(primitive, monkeypatch):
    monkeypatch.setattr("deepgemm_standins.score", lambda *arguments: score(*arguments) * 2)
    with installed("deep_gemm 2026"):
        (reason,) = deepgemm_reasons(primitive, FACTS["sm90"])
        assert "was refused: ValueError: scores" in str(reason)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [("q: torch.Tensor, kv: torch.Tensor", "known is"), ("", "known is"), (None, "neither clean_logits nor max_seqlen_k")],
)
def test_a_signature_that_is_not_known_is_refused(parameters, message):
    with installed("deep_gemm 2026"):
        module = sys.modules["deep_gemm"]
        function = module.fp8_fp4_mqa_logits
        if parameters is None:
            parameters = function.__doc__.partition("(")[2].partition(", clean_logits")[0]
        function.__doc__ = f"fp8_fp4_mqa_logits({parameters}) -> torch.Tensor"
        forget_deepgemm()
        (reason,) = deepgemm_reasons(INDEXER_LOGITS_RAGGED, FACTS["sm90"])
        assert message in str(reason)


def test_a_build_of_2025_is_refused_with_the_versions_that_serve():
    module = types.ModuleType("deep_gemm")
    module.fp8_mqa_logits = module.fp8_paged_mqa_logits = lambda q, kv, weights, *others: None
    with modules(deep_gemm=module):
        forget_deepgemm()
        (reason,) = deepgemm_reasons(INDEXER_LOGITS, FACTS["sm90"])
    forget_deepgemm()
    assert "deep_gemm has no fp8_fp4_mqa_logits" in str(reason)
    assert reason.remedy == "install DeepGEMM of April 2026 or later, or vLLM 0.24 to 0.33, which bring it, and CUDA's nvcc"


def test_the_stand_in_is_strict():
    """What the adapter must convert is refused by the stand-in, else the suite above would say nothing."""
    with installed("deep_gemm 2026") as build:
        kernel = DeepGemm(sys.modules["deep_gemm"])
        (q, weights, pages, _, _, table), _ = batch(build, 2, [130, 70])
        pages = pages.unsqueeze(2)

        def call(lens, table=table, pages=pages, q=q):
            lens = torch.tensor(lens, dtype=torch.int32).view(2, 1)
            return kernel.paged(q.unsqueeze(1), pages, weights, lens, table, kernel.schedule(lens), 192)

        assert call([130, 70])[1, 70:192].eq(1e30).all(), "tails are not cleaned"
        with pytest.raises(RuntimeError, match="wild memory"):
            call([130, 70], table.clone().fill_(-1))
        for bad in ([0, 70], [193, 1], [-1, 70]):
            with pytest.raises(RuntimeError, match="no length of a row"):
                call(bad)
        with pytest.raises(RuntimeError, match="num_heads 16"):
            kernel.paged(q[:, None, :16].contiguous(), pages, weights[:, :16].contiguous(), *[torch.ones(2, 1).int()] * 3, 64)
        starts, ends = torch.tensor([5, 0], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)
        with pytest.raises(RuntimeError, match="wraps around"):
            kernel.ragged(q, torch.zeros(9, 128).to(E4M3), torch.ones(9), weights, starts, ends)
