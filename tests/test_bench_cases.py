# SPDX-License-Identifier: Apache-2.0
"""The cases of the kernel benchmark and their problems: they are what they claim, and judge what is computed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch_reference as reference
from kernel_bench import SMALL, TIMED, workshop
from spoiled import WRONG_TIMED

from mla_portable.contracts import InvalidArgument
from mla_portable.judge.problems.bench import KernelCase, kernel_cases
from mla_portable.layouts import CORE_LAYOUTS, LAYOUTS
from mla_portable.primitives import (
    CACHE_WRITE,
    CONCAT_MLA_K,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_LOGITS,
    INDEXER_SELECT,
    MERGE_STATES,
    NORM_ROPE_WRITE,
    PACK_SELECTION,
    QUANTIZE_PER_TENSOR,
    ROPE_QUANTIZE_QUERIES,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)


def test_the_default_sweep_has_the_sizes_of_a_serving_rank():
    decode = kernel_cases([SPARSE_DECODE], layouts=["fp8_ds_mla"])
    assert [case.num_heads for case in decode[::6]] == [16, 32, 64, 128]
    assert [case.rows for case in decode[:6]] == [1, 4, 16, 64, 128, 256]
    assert all(case.width // case.rows >= 2048 for case in decode), "each row has a context of its own"
    prefill = kernel_cases([SPARSE_PREFILL], layouts=["bf16"], overlaps=(0, 80))
    assert {(case.rows, case.width) for case in prefill} == {(256, 8192), (1024, 8192), (4096, 65536)}
    assert {case.overlap for case in prefill} == {0, 80}
    assert {case.primitive for case in kernel_cases()} == set(TIMED)
    for case in kernel_cases():  # a time with heads would rank nothing where a request has none
        assert (case.num_heads is not None) == ("num_heads" in case.primitive.facts), case


def test_a_selection_alone_has_neither_layout_nor_heads_and_every_width():
    cases = kernel_cases([TOPK_SELECT], heads=(64,), rows=(1, 16), widths=(4096, 32768))
    assert [(case.rows, case.width) for case in cases] == [(1, 4096), (16, 4096), (1, 32768), (16, 32768)]
    assert {(case.kv_layout, case.num_heads, case.topk) for case in cases} == {(None, None, 2048)}


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"rows": (0,)}, "rows"),
        ({"heads": (0,)}, "num_heads"),
        ({"topk": 64, "widths": (63,)}, "width"),
        ({"overlaps": (101,)}, "overlap"),
        ({"layouts": ("fp4",)}, "kv_layout"),
        ({"scale_format": "ue8m0"}, "scale_format"),
    ],
)
def test_a_size_that_cannot_be_made_is_refused(sizes, word):
    with pytest.raises(InvalidArgument, match=word):
        kernel_cases([SPARSE_PREFILL], **sizes)


def test_layouts_go_to_the_primitives_that_have_them():
    cases = kernel_cases(layouts=["bf16", "index_bf16"])
    assert {case.kv_layout for case in cases if case.primitive is INDEXER_SELECT} == {"index_bf16"}
    assert {case.kv_layout for case in cases if case.primitive is SPARSE_DECODE} == {"bf16"}
    assert {case.primitive for case in kernel_cases(layouts=["bf16"])} == set(TIMED) - {INDEXER_SELECT}
    with pytest.raises(InvalidArgument, match="got 'bf16', expected one of index_bf16, index_fp8"):
        kernel_cases([INDEXER_SELECT], layouts=["bf16"])


def test_selection_is_timed_as_decode_and_as_a_chunk_of_prefill():
    decode, prefill = (workshop().make(KernelCase(INDEXER_SELECT, rows, "index_fp8", 1, 8, 300)) for rows in (3, 256))
    assert decode.arguments["query_start_loc"].tolist() == [0, 1, 2, 3] and decode.arguments["block_table"].shape == (3, 5)
    assert prefill.arguments["query_start_loc"].tolist() == [0, 256] and prefill.arguments["block_table"].shape == (1, 5)
    scored = {problem: problem.flops for problem in (decode, prefill)}  # e4m3 products count half
    assert scored[decode] == 3 * 300 * 128 and scored[prefill] == sum(range(45, 301)) * 128
    for problem in (decode, prefill):
        assert not any(finding.message for finding in problem.check(problem.call(reference.indexer_select)))


def test_a_primitive_that_is_not_timed_is_refused():
    with pytest.raises(InvalidArgument, match="indexer_logits"):
        kernel_cases([INDEXER_LOGITS])


def test_decode_rows_read_contexts_of_their_own():
    problem = workshop().make(KernelCase(SPARSE_DECODE, 4, "bf16", 1, 16, 128))
    rows = problem.arguments["indices"][:, 0]
    assert rows.shape == (4, 16)
    assert len(rows.unique()) == 64
    assert (rows // 32 == torch.arange(4)[:, None]).all()


def test_where_the_cache_is_too_small_rows_share_it_and_its_bytes_count_once():
    case = KernelCase(SPARSE_DECODE, 8, "fp8_ds_mla", 1, 64, 64)
    problem = workshop().make(case)
    assert all(len(row.unique()) == 64 for row in problem.arguments["indices"][:, 0])
    q, out, lse, indices = (problem.arguments[name].nbytes for name in ("q", "out", "lse_out", "indices"))
    assert problem.bytes_moved == 64 * 656 + q + out + lse + indices
    assert problem.flops == 2 * 8 * 64 * (576 + 512)


@pytest.mark.parametrize("percent", [0, 50, 100])
def test_neighbouring_tokens_share_what_the_case_says(percent):
    problem = workshop().make(KernelCase(SPARSE_PREFILL, 4, "bf16", 1, 32, 256, percent))
    rows = [set(row.tolist()) for row in problem.arguments["indices"]]
    assert all(len(row) == 32 for row in rows)
    assert all(len(a & b) == 32 * percent // 100 for a, b in pairwise(rows))


CASES = [(p, layout) for p in TIMED for layout in p.layouts or (None,) if layout is None or layout in CORE_LAYOUTS]
"""Of the core's layouts: another test may have loaded a plugin that brings some of its own."""


@pytest.mark.parametrize(("primitive", "layout"), CASES)
def test_the_reference_passes_and_what_is_spoiled_does_not(primitive, layout):
    case = replace(SMALL[primitive], kv_layout=layout)
    problem = workshop().make(case)
    problem.poison()
    assert not any(finding.message for finding in problem.check(problem.call(getattr(reference, str(primitive)))))
    assert any(finding.message for finding in problem.check(problem.call(WRONG_TIMED[str(primitive)])))


@pytest.mark.parametrize("primitive", [each for each in TIMED if each.layouts])
def test_fp8_rows_have_the_scales_that_the_case_says(primitive):
    layout, plain = (next(n for n in map(LAYOUTS.get, primitive.layouts) if n.is_quantized == is_so) for is_so in (True, False))
    one, other = (
        workshop().make(replace(SMALL[primitive], kv_layout=layout.name, scale_format=name)) for name in ("pow2", "amax")
    )
    for problem in (one, other):
        problem.poison()
        assert not any(finding.message for finding in problem.check(problem.call(getattr(reference, str(primitive)))))
        cache = next(problem.arguments[name] for name in ("kv", "kv_cache", "index_cache") if name in problem.arguments)
        rows = torch.cat([part.flatten(0, 1) for part in layout.parts(cache)], dim=1)
        rows = rows[problem.arguments.get("slot_mapping", torch.arange(3))]
        end = layout.rope_offset if layout.rope_width else layout.row_bytes
        mantissas = rows[:, layout.scale_offset : end].contiguous().view(torch.float32).frexp().mantissa
        assert bool((mantissas == 0.5).all()) == (problem.case.scale_format == "pow2")
        assert problem.request.scale_format == problem.case.scale_format
    assert other.case.shape == f"{one.case.shape}, amax scales", "a record of one is not compared with the other's"
    bf16 = replace(SMALL[primitive], kv_layout=plain.name, scale_format="amax")
    assert "amax" not in bf16.shape and workshop().make(bf16).request.scale_format is None


@pytest.mark.parametrize("primitive", [each for each in TIMED if each not in (MERGE_STATES, QUANTIZE_PER_TENSOR)])  # no `out`
def test_what_was_not_written_is_not_right(primitive):
    problem = workshop().make(SMALL[primitive])
    arguments = problem.arguments
    problem.call(getattr(reference, str(primitive)))
    problem.poison()
    left = {
        CACHE_WRITE: lambda: arguments["kv_cache"],
        GATHER_UPCONVERT: lambda: arguments["out"],
        TOPK_SELECT: lambda: arguments["out"],
        PACK_SELECTION: lambda: arguments["out"],
        CONCAT_MLA_K: lambda: arguments["out"],
        CONVERT_INDICES: lambda: arguments["out"],
        INDEXER_SELECT: lambda: arguments["out"],
        NORM_ROPE_WRITE: lambda: tuple(problem.targets.values()),
        ROPE_QUANTIZE_QUERIES: lambda: tuple(problem.targets.values()),
    }.get(primitive, lambda: (arguments["out"], arguments["lse_out"]))
    assert any(finding.message for finding in problem.check(left()))


def test_the_same_seed_makes_the_same_problem():
    one, other, third = (workshop(seed=seed).make(SMALL[SPARSE_DECODE]).arguments for seed in (1, 1, 2))
    assert torch.equal(one["q"], other["q"]) and torch.equal(one["kv_cache"], other["kv_cache"])
    assert not torch.equal(one["q"], third["q"])
