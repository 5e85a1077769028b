# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: it passes what is right, catches what is wrong, and asks for exactly what is claimed."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from conformance_faults import CPU, Model
from engine_kernels import load_file
from machines import H200

from mla_portable.accelerator import Accelerator
from mla_portable.capability.matrix import proven_by_ci
from mla_portable.choose import get_registry
from mla_portable.contracts import DeviceFacts, InvalidArgument, Primitive, UnknownBackend
from mla_portable.judge.conformance import cases_for, run_case, run_suite, runner
from mla_portable.judge.conformance.poison import poisoned
from mla_portable.judge.problems import Tolerance, tolerances
from mla_portable.judge.problems.attention_problem import AttentionParams, DecodeParams
from mla_portable.judge.problems.compare import close, field_of, same_bits
from mla_portable.judge.problems.cover import covering
from mla_portable.judge.problems.draw import corpus, hole_mask
from mla_portable.judge.problems.stage import guarded
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.primitives import (
    CACHE_WRITE,
    CONCAT_MLA_K,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_CACHE_WRITE,
    INDEXER_LOGITS,
    INDEXER_LOGITS_BLOCKS,
    INDEXER_LOGITS_RAGGED,
    INDEXER_SELECT,
    MASKED_PREFILL,
    MERGE_STATES,
    NORM_ROPE_WRITE,
    PACK_SELECTION,
    QUANTIZE_PER_TENSOR,
    ROPE_QUANTIZE_QUERIES,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)

P = Primitive


def complaints(report):
    return "\n".join(f"{r.case.id}: {r.message}" for r in report.results if r.status != "passed")


# ---------------------------------------------------------------------------------------------- what is right passes


def test_the_reference_passes_at_quick_and_exercises_every_tolerance():
    """One test, so that processes that share the tests run the suite once; `ci/conformance` runs it on Triton's kernels."""
    report = run_suite(get_registry(), "reference", device="cpu", level="quick")
    assert report.ok, complaints(report)
    assert report.skipped == 0
    assert {r.case.primitive for r in report.results} == set(Primitive.all())
    measured = {(r.case.primitive, quantity) for r in report.results for quantity in r.errors}
    assert {(primitive, quantity) for primitive, _, quantity in tolerances()} <= measured
    assert {primitive for primitive, _, _ in tolerances()} == set(Primitive.all())
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["totals"]["cases"] == data["totals"]["passed"] == len(data["cases"]) > 200
    assert data["totals"]["skipped"] == data["totals"]["failed"] == 0 and data["ok"]
    assert {row["quantity"] for row in data["worst"]} >= {"out", "out cosine", "lse"}
    proven = load_file("proven", str(Path(__file__).parents[1] / "ci" / "proven.py"))
    ran = proven.of_conformance(data)
    assert proven.problems(proven_by_ci(), ran) == [] and len(ran) == len(Primitive.all())


def test_a_report_of_failures_is_plain_data():
    model = Model("+inf on empty rows")
    failing = run_suite(model, "model", device="cpu", level="smoke", primitives=[SPARSE_PREFILL], match="absent")
    assert failing.failed and json.dumps(failing.as_dict(), allow_nan=False)


@pytest.mark.parametrize("variant", [("bf16 probabilities",), ("scales rounded to bf16", "bf16 probabilities")])
def test_what_vendors_may_do_stays_within_the_tolerances(variant):
    """The two roundings that tensor-core kernels make, and FlashMLA on Hopper: judged by the table, not by luck."""
    model = Model(*variant)
    for primitive in (SPARSE_DECODE, SPARSE_PREFILL):
        implementation = model.implementation(primitive)
        cases = [c for c in cases_for(implementation, CPU, "quick") if isinstance(c.params, AttentionParams)]
        cases = [c for c in cases if c.params.topk <= 128 and not c.params.vast]
        assert {c.params.scale_format for c in cases} == {None, "pow2", "amax"}
        if variant and "scales" in variant[0]:
            cases = [c for c in cases if c.params.scale_format]
        for case in cases:
            result = run_case(case, implementation.bind(case.request), torch.device("cpu"))
            assert result.status == "passed", f"{case.id}: {result.message}"


# ---------------------------------------------------------------------------------------------- what is wrong is caught

DECODE, PREFILL, BOTH = (SPARSE_DECODE,), (SPARSE_PREFILL,), (SPARSE_DECODE, SPARSE_PREFILL)
SCORES, RAGGED, SELECT = (INDEXER_LOGITS,), (INDEXER_LOGITS_RAGGED,), (INDEXER_SELECT,)
FAULTS = [
    # fault, primitives, words that the ids of cases have which all catch it, what their messages say
    ("reads -1 as slot 0", BOTH, "front", "got nan"),
    ("leaks NaN", BOTH, "holes !t0", "got nan"),
    ("reads past the cache", BOTH, "corpus", "got nan"),
    ("lse in base 2", BOTH, "dense", "lse["),
    ("+inf on empty rows", BOTH, "absent", "got inf, expected -inf"),
    ("leaves empty rows", BOTH, "absent", "rows without a valid entry"),
    ("ignores the sink", BOTH, "dense sink_finite", "out["),
    ("counts the sink in lse", BOTH, "dense sink_finite", "lse["),
    ("takes an infinite sink for none", BOTH, "dense sink_plus_inf", "out["),
    ("ignores lengths", BOTH, "lengths !promised", "got nan"),
    ("knows one softmax scale", BOTH, "published", "lse["),
    ("lse in base 2", BOTH, "promised holes", "lse["),
    ("leaves empty rows", BOTH, "promised absent", "rows without a valid entry"),
    ("reads -1 as slot 0", BOTH, "promised absent", "got nan"),
    *(
        (f"{kind}32-bit addresses", primitives, blocks, message)
        for primitives, message in (
            (DECODE, "out["),
            (PREFILL, "out["),
            ((CACHE_WRITE,), "cache["),
            ((GATHER_UPCONVERT,), "latent["),
            ((INDEXER_CACHE_WRITE,), "cache["),
            ((INDEXER_LOGITS,), "out["),
            ((INDEXER_SELECT,), "a chosen score is"),
        )
        for kind, blocks in (("", "address"), ("", "slab"), ("unsigned ", "slab"))
    ),
    ("ignores the block stride", PREFILL, "slab", "out["),
    ("ignores the block stride", (GATHER_UPCONVERT,), "slab", "latent["),
    ("allocates instead of out=", BOTH, "out_packed", "returned another tensor than the `out`"),
    ("ignores the strides of out", BOTH, "out_views", "memory around out"),
    ("pads heads wrongly", BOTH, "h8 dense", "out["),
    ("drops the last index", BOTH, "last", "lse["),
    ("counts duplicates once", BOTH, "duplicates", "lse["),
    ("ignores the block stride", BOTH, "dense strided !k1", "got nan"),
    ("takes two blocks for adjacent", BOTH, "pair", "got nan"),
    ("takes two blocks for adjacent", (CACHE_WRITE,), "pair", "cache["),
    ("takes two blocks for adjacent", (GATHER_UPCONVERT,), "pair", "latent["),
    ("takes no maximum off", BOTH, "large dense", "expected"),
    ("one exponent for all heads", BOTH, "loud_head", "out["),
    ("one exponent for all keys", BOTH, "loud_keys", "out["),
    ("one exponent for the groups of a key", BOTH, "loud_group", "lse["),
    ("divides by the exponential of a rounded lse", (MERGE_STATES,), "huge", "out["),
    ("scales cut to powers of two", BOTH, "amax dense", "out["),
    ("changes its indices", BOTH, "corpus !inviews", "input indices"),
    ("differs from run to run", BOTH, "repeat dense", "second run"),
    ("writes whole blocks", (GATHER_UPCONVERT,), "gaps lens_borders", "rows that no request owns"),
    ("skips invalid blocks", (GATHER_UPCONVERT,), "table_holes lens_borders", "rope["),
    ("believes the table", (CONVERT_INDICES,), "table_holes !workspace_all !last !first !absent !k1", "indices["),
    ("compacts out of order", (CONVERT_INDICES,), "holes compact", "indices["),
    ("reads one position too many", (CONVERT_INDICES,), "seq_lens !workspace_all !workspace_mixed", "indices["),
    ("limits no workspace", (CONVERT_INDICES,), "seq_lens workspace_all", "indices["),
    ("counts without the last", (CONVERT_INDICES,), "last !workspace_all !table_huge !table_holes", "counts["),
    ("limits the workspace by the table", (CONVERT_INDICES,), "corpus workspace_all !seq_lens", "indices["),
    ("writes skipped tokens", (CACHE_WRITE,), "skips_some", "cache["),
    ("floor instead of ceil", (CACHE_WRITE,), "pow2", "cache["),
    ("truncates", (CACHE_WRITE,), "pow2", ": latent "),
    ("multiplies dead parts by 0", (MERGE_STATES,), "dead_some", "got nan"),
    ("knows no empty part of +inf", (MERGE_STATES,), "dead_mixed", "got nan"),
    ("truncates", (QUANTIZE_PER_TENSOR,), "plain rows", "x_q["),
    ("divides by zero", (QUANTIZE_PER_TENSOR,), "zeros", "scale"),
    ("takes later ties", (TOPK_SELECT,), "equal !n1 !ranges_mixed", "out"),
    ("chooses what is absent", (TOPK_SELECT,), "absent", "out"),
    ("counts from column 0", (TOPK_SELECT,), "ranges_mixed !absent !n1", "out"),
    ("keeps negative starts", (TOPK_SELECT,), "ranges_mixed !absent", "out"),
    ("loses count of ties", (TOPK_SELECT,), "parted", "out"),
    ("ranks -0.0 below 0.0", (TOPK_SELECT,), "n300 zeros", "out"),
    ("takes two blocks for adjacent", (INDEXER_CACHE_WRITE,), "pair", "cache["),
    ("writes skipped tokens", (INDEXER_CACHE_WRITE,), "skips_some", "cache["),
    ("writes scales beside rows", (INDEXER_CACHE_WRITE,), "index_fp8 !t0 !b1", "cache["),
    ("lets scales be 0", (INDEXER_CACHE_WRITE,), "index_fp8 zero", "cache["),
    ("floor instead of ceil", (INDEXER_CACHE_WRITE,), "pow2 !t0", "cache["),
    ("truncates", (INDEXER_CACHE_WRITE,), "index_fp8 !t0", "cache["),
    ("no relu", SCORES, "prefill !table_holes", "out["),
    ("relu after the weights", SCORES, "decode !table_holes", "out["),
    ("looks ahead", SCORES, "prefill !narrow !table_holes", "expected -inf"),
    ("leaves the unseen", SCORES, "wide prefill", "expected -inf"),
    ("scores tokens of nobody", SCORES, "tail1 chunk", "expected -inf"),
    ("counts tokens from the first start", SCORES, "starts_late", "expected"),
    ("counts tokens from the first start", SCORES, "starts_outside", "expected"),
    ("ends requests with the tokens", SCORES, "starts_outside", "expected"),
    ("scores tokens of nobody", SCORES, "starts_late", "expected -inf"),
    ("believes the table", SCORES, "table_holes prefill !narrow", "expected -inf"),
    ("reads the block behind the cache", SCORES, "table_near", "expected -inf"),
    ("ignores the block stride", SCORES, "strided prefill !table_holes", "got -inf"),
    ("takes two blocks for adjacent", SCORES, "pair", "got -inf"),
    ("takes pages for rows of 132 bytes", SCORES, "index_fp8 address", "out["),
    ("takes the scale of the token before", SCORES, "index_fp8 chunk", "out["),
    ("leaves NaN", (*SCORES, *RAGGED), "absent_nan", "got nan, expected -inf"),
    ("leaves NaN", (*SCORES, *RAGGED), "absent_nan_scale", "got nan, expected -inf"),
    ("makes 0 of NaN", (*SCORES, *RAGGED), "absent_nan", "expected -inf"),
    ("makes 0 of NaN", SELECT, "absent_nan chunk", "order["),
    ("makes 0 of NaN", SELECT, "absent_nan share_first_of_2", "order["),
    ("no relu", RAGGED, "t6 n300", "out["),
    ("ignores the scales of keys", RAGGED, "index_fp8 !t0 !n0", "out["),
    ("ignores the start", RAGGED, "t37 mixed !n0 !n1", "expected -inf"),
    ("ignores the end", RAGGED, "t37 mixed !n0 !n1", "expected -inf"),
    ("shares the range of a tile", RAGGED, "t6 n300", "expected -inf"),
    ("no relu", SELECT, "chunk !order_none", "a chosen score is"),
    ("takes the lowest", SELECT, "chunk", "a chosen score is"),
    ("takes pages for rows of 132 bytes", SELECT, "index_fp8 address", "a chosen score is"),
    ("takes the scale of the token before", SELECT, "index_fp8 address", "a chosen score is"),
    ("takes two blocks for adjacent", SELECT, "index_bf16 pair", "a chosen score is"),
    ("looks ahead", SELECT, "starts_late", "order["),
    ("drops the last position", SELECT, "prefill !k1", "order["),
    ("leaves positions unsorted", SELECT, "chunk !order_none", "order["),
    ("scores tokens of nobody", SELECT, "starts_late", "expected -1"),
    ("leaves rows of nobody", SELECT, "tail2 out_views", "expected -1"),
    ("counts tokens from the first start", SELECT, "starts_outside", "order["),
    ("ends requests with the tokens", SELECT, "starts_outside", "order["),
    ("believes the table", SELECT, "table_near", "order["),
    ("reads the block behind the cache", SELECT, "table_near", "order["),
    ("owns the rest of a round", SELECT, "share_first_of_3 stale", "order["),
    ("owns the rest of a round", SELECT, "share_first_of_2_by_block stale", "order["),
    ("reaches its own share", SELECT, "full share_first_of_3", "order["),
    ("reads the lower half twice", (INDEXER_LOGITS_BLOCKS,), "mxfp4 prefix !t0 !p0x16", "out["),
    ("takes one scale for a row", (INDEXER_LOGITS_BLOCKS,), "prefix !t0", "out["),
    ("ignores the lengths", (INDEXER_LOGITS_BLOCKS,), "prefix !t0", "out["),
    ("takes NaN for 0", (INDEXER_LOGITS_BLOCKS,), "absent_nan_scale", "out["),
    ("adds bits", (PACK_SELECTION,), "duplicates !starts_mixed !k1 !w1", "out["),
    ("wraps around", (PACK_SELECTION,), "corpus starts_mixed w300 !k1", "out["),
    ("wraps around", (PACK_SELECTION,), "limits", "out["),
    ("fills the last word", (PACK_SELECTION,), "w300 !absent !k1 !duplicates !t0", "out["),
    ("ignores starts", (PACK_SELECTION,), "w300 starts_mixed !absent !k1 !t0", "out["),
    ("reads packed rows", (CONCAT_MLA_K,), "inslices !t1 !t0", "out["),
    ("computes with the columns", (CONCAT_MLA_K,), "t131", "out["),
    ("leaves the heads past 16", (CONCAT_MLA_K,), "h20 !t0", "out["),
    ("ignores out", (CONCAT_MLA_K,), "out_views", "returned another tensor than the `out`"),
    ("multiplies what is masked by 0", (MASKED_PREFILL,), "ragged selected_few", "got nan"),
    ("multiplies what is masked by 0", (MASKED_PREFILL,), "ragged held_fewer !unseen_plain", "got nan"),
    ("reads bits past the row", (MASKED_PREFILL,), "ragged held_fewer !unseen_plain", "got nan"),
    ("reads bits past the row", (MASKED_PREFILL,), "ragged held_fewer unseen_plain", "lse["),
    ("aligns queries to the first key", (MASKED_PREFILL,), "corners", "out["),
    ("aligns queries to the first key", (MASKED_PREFILL,), "ragged !full !selected_few", "out["),
    ("takes no maximum off", (MASKED_PREFILL,), "ragged large", "got nan"),
    ("lse in base 2", (MASKED_PREFILL,), "ragged", "lse["),
    ("leaves empty rows", (MASKED_PREFILL,), "keyless", "rows without a valid entry"),
    ("leaves empty rows", (MASKED_PREFILL,), "fewer !full", "rows without a valid entry"),
    ("drops eps", (NORM_ROPE_WRITE,), "q !t0 !nan !zero", "q_out["),
    ("rounds before the weight", (NORM_ROPE_WRITE,), "q !t0 !nan !zero !equal", "q_out["),
    ("norms all tokens alike", (NORM_ROPE_WRITE,), "nan q", "got nan, expected a number"),
    ("reads packed rows", (NORM_ROPE_WRITE,), "q !inpacked !t0 !t1 !zero !nan", "q_out"),
    ("norms written tokens alone", (NORM_ROPE_WRITE,), "skips_some q+kv+index", "q_out"),
    ("writes skipped tokens", (NORM_ROPE_WRITE,), "skips_some kv+index !nan", "cache["),
    ("knows one style", (NORM_ROPE_WRITE,), "neox kv out_all", "k_rope_out["),
    ("norms the rotary part", (NORM_ROPE_WRITE,), "kv out_all !t0", "k_rope_out["),
    ("turns the other way", (NORM_ROPE_WRITE,), "kv out_only", "k_rope_out["),
    ("takes positions as they are", (NORM_ROPE_WRITE,), "at_outside index", "index_cache"),
    ("norms keys without their mean", (NORM_ROPE_WRITE,), "index !t0 !nan", "index_cache"),
    ("drops the bias", (NORM_ROPE_WRITE,), "index !t0 !nan", "index_cache"),
    ("rounds a key once", (NORM_ROPE_WRITE,), "q+kv+index index_bf16 !t0 !t1 !nan !zero !equal", "index_cache["),
    ("knows one place", (NORM_ROPE_WRITE,), "last index !t0 !zero", "index_cache"),
    ("writes whole queries", (ROPE_QUANTIZE_QUERIES,), "q !t0", "latent part of q_out"),
    ("turns the other way", (ROPE_QUANTIZE_QUERIES,), "q+index !t0 !t1", "q_out["),
    ("takes positions as they are", (ROPE_QUANTIZE_QUERIES,), "at_outside q", "q_out["),
    ("codes numbers that are not rounded", (ROPE_QUANTIZE_QUERIES,), "q+index !t1 !zero !equal", "index_q_out["),
    ("one scale for all heads", (ROPE_QUANTIZE_QUERIES,), "q+index i4 !t0 !zero !nan", "index_q_out["),
    ("floor instead of ceil", (ROPE_QUANTIZE_QUERIES,), "index i4 !t0", "index_q_out["),
    ("leaves the scale out of weights", (ROPE_QUANTIZE_QUERIES,), "index i4 !t0", "index_weights_out["),
    ("allocates instead of out=", SELECT, "out_views", "returned another tensor than the `out`"),
]


@cache
def quick_cases(primitive):
    """(case, the words of its id), cheapest first."""
    cases = cases_for(Model().implementation(primitive), CPU, "quick")
    cases = sorted(cases, key=lambda case: getattr(case.params, "heads", 1) * getattr(case.params, "topk", 1))
    return [(case, set(re.split(r"[\[\]-]", case.id))) for case in cases]


@cache
def honest_result(case):
    return run_case(case, getattr(Model(), str(case.primitive)), torch.device("cpu"))


def cases_named(primitive, words):
    """The cheapest cases whose ids contain all the words, but none that follows a "!"."""
    wanted = {word for word in words.split() if word[0] != "!"}
    unwanted = {word[1:] for word in words.split() if word[0] == "!"}
    return [case for case, said in quick_cases(primitive) if wanted <= said and not unwanted & said][:3]


@pytest.mark.parametrize(("fault", "primitives", "words", "message"), FAULTS, ids=[f"{f} {p[0]}" for f, p, _, _ in FAULTS])
def test_a_fault_is_caught_by_the_cases_made_for_it(fault, primitives, words, message):
    for primitive in primitives:
        cases = cases_named(primitive, words)
        assert cases, f"no case of {primitive} is named {words}"
        for case in cases:
            honest = honest_result(case)
            assert honest.status == "passed", f"{case.id}: {honest.message}"
            faulty = run_case(case, getattr(Model(fault), str(primitive)), torch.device("cpu"))
            assert faulty.status == "failed" and message in faulty.message, f"{case.id}: {faulty.status} {faulty.message}"


@pytest.mark.parametrize("kept", [True, False, lambda request: request.kv_layout == "index_bf16"])
def test_only_what_keeps_nan_has_keys_whose_numbers_are_nan(kept):
    for primitive in (*SCORES, *RAGGED, *SELECT):
        cases = cases_for(Model().implementation(primitive, nan_keys=kept), CPU, "quick")
        spoiled = {(case.request.kv_layout, case.params.absent) for case in cases if case.params.absent != "none"}
        numbers = {True: {"index_bf16", "index_fp8"}, False: set()}.get(kept, {"index_bf16"})
        assert spoiled == {("index_fp8", "nan_scale"), *((layout, "nan") for layout in numbers)}


def test_a_row_that_sees_at_most_k_keys_need_not_be_scored():
    """Unless its scores are asked for. Other rows choose no key of NaN in either case."""
    model = Model("scores no short row", "leaves NaN")
    cases = [case for case, said in quick_cases(INDEXER_SELECT) if {"absent_nan", "absent_nan_scale"} & said]
    status = {case.id: run_case(case, model.indexer_select, torch.device("cpu")).status for case in cases}
    asked = {case.id: case.params.share != "none" for case in cases}
    assert {asked[name] for name in status} == {True, False}
    assert all((found == "failed") == asked[name] for name, found in status.items()), status


@pytest.mark.parametrize("primitive", BOTH, ids=str)
def test_promised_cases_are_clean_and_let_the_lse_go_untold(primitive):
    cases = [case for case, said in quick_cases(primitive) if "promised" in said and case.params.topk <= 128][:12]
    assert {case.params.pattern for case in cases} == {"absent", "holes", "dense"}
    assert {case.params.lengths for case in cases} == {False, True}
    assert all(case.request.clean_indices and not case.request.lse for case in cases)
    seen = []

    def telling(change):
        def call(q, kv, indices, *, lengths=None, **rest):
            slots = kv.shape[0] if kv.dim() == 2 else kv.shape[0] * kv.shape[1]
            limit = torch.full(indices.shape[:-1], indices.shape[-1]) if lengths is None else lengths
            past = torch.arange(indices.shape[-1]) >= limit.unsqueeze(-1)
            seen.append(bool(((indices >= -1) & (indices < slots)).all() and (indices[past] == -1).all()))
            out, lse = getattr(Model(), str(primitive))(q, kv, indices, lengths=lengths, **rest)
            return out, change(lse)

        return call

    for case in cases:
        for change in (lambda lse: torch.empty(0), lambda lse: torch.full_like(lse, math.nan), lambda lse: lse):
            result = run_case(case, telling(change), torch.device("cpu"))
            assert result.status == "passed", f"{case.id}: {result.message}"
        wrong = run_case(case, telling(lambda lse: lse + 1), torch.device("cpu"))
        assert wrong.status == "failed" and "lse[" in wrong.message, case.id
    assert all(seen)


class Recorded:
    """Stands in for a captured graph on a machine without one: replaying repeats the captured call, on the tensors of then.

    With `frozen`, the value that an argument had at the capture is used ever after: what a kernel does that reads it back.
    """

    def __init__(self, call, frozen=""):
        self.call, self.frozen = call, frozen

    def bound(self, *args, **kwargs):
        results = self.call(*args, **kwargs)
        self.args, self.results = args, results if isinstance(results, tuple) else (results,)
        self.kwargs = {name: value.clone() if name == self.frozen else value for name, value in kwargs.items()}
        return results

    def replay(self):
        again = self.call(*self.args, **self.kwargs)
        for result, value in zip(self.results, again if isinstance(again, tuple) else (again,), strict=True):
            if result is not None and result is not value:
                result.copy_(value)


class NoStream:
    def wait_stream(self, other):
        pass


@pytest.mark.parametrize("primitive", list(Primitive.all()), ids=str)
def test_a_replayed_graph_is_judged_on_the_inputs_it_was_replayed_with(primitive, monkeypatch):
    gpu = Accelerator(torch.device("cuda", 0))
    monkeypatch.setattr(runner, "accelerator", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: NoStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: NoStream())
    for context in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, context, lambda value: nullcontext())
    implementation = Model().implementation(primitive, device_types=("cuda",))
    cases = [case for case in cases_for(implementation, H200, "quick") if case.params.run == "graph"]
    assert cases

    def status(case, frozen=""):
        recorded = Recorded(getattr(Model(), str(primitive)), frozen)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: recorded)
        result = run_case(case, recorded.bound, torch.device("cpu"))
        assert result.status == "passed" or "replayed on other inputs: " in result.message, result.message
        return result.status

    for case in cases[:3]:
        assert status(case) == "passed"
    with_lengths = [case for case in cases if getattr(case.params, "lengths", False) and not case.params.promised]
    assert bool(with_lengths) == (primitive in BOTH)
    assert {status(case, frozen="lengths") for case in with_lengths} <= {"failed"}


def test_an_exception_is_an_error_of_its_case_and_the_run_goes_on():
    class Broken(Model):
        def merge_states(self, outs, lses):
            if len(outs) == 1:
                raise ZeroDivisionError("one part is none")
            return super().merge_states(outs, lses)

    seen = []
    report = run_suite(
        Broken(), "model", device="cpu", level="smoke", primitives=[MERGE_STATES], progress=lambda *step: seen.append(step)
    )
    broken = [r for r in report.results if r.status == "error"]
    assert broken and all("ZeroDivisionError: one part is none" in r.message for r in broken)
    assert all(r.traceback.startswith("Traceback") and "merge_states" in r.traceback for r in broken)
    assert report.passed == len(report.results) - len(broken) > 0
    assert report.failed == len(broken) and not report.ok
    assert [(done, total) for done, total, _ in seen] == [(i + 1, len(seen)) for i in range(len(report.results))]


def test_an_exception_is_located_at_the_line_of_the_plugin():
    """Not in torch: under a default device every call goes through a frame of torch's."""

    class Broken(Model):
        def merge_states(self, outs, lses):
            return torch.zeros(3).view(2, 2), lses  # this line

    report = run_suite(Broken(), "model", device="cpu", level="smoke", primitives=[MERGE_STATES])
    (line,) = (number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# this line"))
    assert report.results
    for result in report.results:
        assert f"(raised at {__file__}:{line}, in merge_states)" in result.message


# ---------------------------------------------------------------------------------------------- which cases there are


def everything(level, facts=CPU):
    model = Model()
    limits = {"device_types": ("cpu", "cuda")}
    return [c for p in Primitive.all() for c in cases_for(model.implementation(p, **limits), facts, level)]


def values(cases, name):
    return {getattr(case.params, name) for case in cases if hasattr(case.params, name)}


def test_quick_covers_what_the_contract_promises():
    cases = everything("quick")
    attention = [c for c in cases if c.primitive in BOTH]
    assert values(attention, "heads") >= {1, 8, 16, 32, 64, 128}
    assert values(attention, "topk") >= {64, 100, 128, 1024, 2048}
    assert values(cases, "block_size") >= {1, 16, 64}
    assert values(attention, "query_len") >= {1, 2, 4}
    assert values(attention, "sink") == {"none", "finite", "minus_inf", "plus_inf"}
    assert values(attention, "pattern") >= {"front", "middle", "end", "absent", "corpus", "duplicates"}
    assert values(attention, "kv") == {"workspace", "bf16", "fp8_ds_mla"}
    assert values(cases, "scale_format") == {None, "pow2", "amax"}
    for primitive in (SPARSE_DECODE, SPARSE_PREFILL, CACHE_WRITE, GATHER_UPCONVERT, *SCORES, *SELECT):
        mine = [c for c in cases if c.primitive is primitive]
        assert {"packed", "strided", "pair", "address", "slab"} <= values(mine, "blocks")
    for primitive in (*SCORES, *SELECT):
        mine = [c for c in cases if c.primitive is primitive]
        assert values(mine, "kv") == {"index_bf16", "index_fp8"}
    for primitive in (*BOTH, CONVERT_INDICES):
        assert "views" in values([c for c in cases if c.primitive is primitive], "outputs")
    assert any(c.request.rows == 0 for c in cases if c.primitive is SPARSE_DECODE)
    assert corpus(1000) == (-(2**31), -123456, -1, 1000, 115514, 2**31 - 1)


def test_every_two_values_of_attention_meet_at_quick():
    cases = [c.params for c in everything("quick", H200) if type(c.params) is DecodeParams and c.params.rows]
    for left, right in combinations(("kv", "heads", "topk", "block_size", "query_len", "pattern", "sink", "outputs"), 2):
        met = {(getattr(p, left), getattr(p, right)) for p in cases if p.topk > 1}
        assert met == set(product({a for a, _ in met}, {b for _, b in met})), f"{left} x {right}"


def test_ids_are_unique_and_seeds_are_stable():
    cases = everything("quick", H200)
    assert len({c.id for c in cases}) == len(cases)
    assert [c.id for c in cases] == [c.id for c in everything("quick", H200)]
    first = next(c for c in cases if c.primitive is MERGE_STATES)
    assert (first.id, first.seed) == ("merge_states[model.torch-p2-th-bf16]", 222140122410383963)


def test_only_what_is_claimed_is_asked_for_and_all_of_it():
    limits = {
        "num_heads": (64, 128), "padded_heads": (64, 128), "topk_multiple": 64, "block_sizes": (64, 256), "max_query_len": 2,
        "kv_layouts": ("fp8_ds_mla",), "scale_formats": ("pow2",), "lse": False, "attn_sink": False, "lengths": False,
    }  # fmt: skip
    implementation = Model().implementation(SPARSE_DECODE, **limits)
    for level in ("smoke", "quick", "full"):
        cases = cases_for(implementation, CPU, level)
        assert cases and not any(implementation.support.reasons(case.request) for case in cases)
        assert values(cases, "kv") == {"fp8_ds_mla"} and values(cases, "scale_format") == {"pow2"}
        assert values(cases, "sink") == {"none"} and values(cases, "lengths") == values(cases, "with_lse") == {False}
        if level != "smoke":
            assert values(cases, "heads") == {1, 8, 16, 24, 32, 63, 64, 127, 128}  # smaller ones are padded inside
            assert values(cases, "topk") == {64, 128, 1024, 2048}
            assert values(cases, "block_size") == {64, 256} and values(cases, "query_len") == {1, 2}


def test_an_odd_claim_gets_cases_too():
    implementation = Model().implementation(SPARSE_DECODE, num_heads=(48,), block_size_multiple=128, max_topk=512)
    cases = cases_for(implementation, CPU, "quick")
    assert values(cases, "heads") == {48} and values(cases, "block_size") == {128, 384}
    assert values(cases, "topk") == {1, 64, 100, 128, 512}  # topk_multiple is 1


def test_a_kernel_for_workspaces_alone_gets_no_paged_cache():
    implementation = Model().implementation(SPARSE_PREFILL, kv_layouts=("bf16",), block_sizes=())
    cases = cases_for(implementation, CPU, "quick")
    assert values(cases, "kv") == {"workspace"} and values(cases, "pattern") >= {"front", "middle", "end"}


def test_a_device_that_is_not_claimed_has_no_cases():
    assert cases_for(Model().implementation(SPARSE_DECODE), H200, "full") == ()
    report = run_suite(_Elsewhere(), "model", device="cpu", level="smoke")
    assert not report.results and not report.ok and report.skipped == 0
    assert {(u.primitive, str(u.reasons[0])) for u in report.unavailable} == {
        (p, "device type cpu (supports cuda)") for p in Primitive.all()
    }


def test_blocks_at_odd_strides_are_not_whole_rows_apart():
    case = next(case for case, said in quick_cases(CACHE_WRITE) if "odd" in said)
    cache = case.params.build(case.seed, torch.device("cpu"), CPU).args["kv_cache"]
    assert cache.stride(0) % cache.shape[2]


class _Elsewhere(Model):
    def implementations(self, primitive=None):
        return tuple(self.implementation(p, device_types=("cuda",)) for p in Primitive.all() if primitive in (None, p))


def test_gpus_get_graphs_and_large_problems():
    cases = everything("quick", H200)
    graphed = [c for c in cases if c.params.run == "graph"]
    assert {c.primitive for c in graphed} == set(Primitive.all()) and all(c.request.graph for c in graphed)
    paged = {SPARSE_DECODE, SPARSE_PREFILL, CACHE_WRITE, GATHER_UPCONVERT, INDEXER_CACHE_WRITE, *SCORES, *SELECT}
    for kind in ("address", "slab"):
        far = [c for c in cases if getattr(c.params, "blocks", "") == kind]
        assert {c.primitive for c in far} == paged
        assert {"workspace", "bf16", "fp8_ds_mla"} <= values(far, "kv")
    assert any(c.request.rows == 70_000 for c in everything("full", H200) if c.primitive is SPARSE_DECODE)
    assert any(c.request.rows == 148 and c.request.num_heads == 64 for c in everything("full", H200))
    small = DeviceFacts(vendor="nvidia", name="small", arch="sm89", memory_bytes=3 << 30, graph_capture=False)
    assert not any(
        c.params.run == "graph" or getattr(c.params, "blocks", "") in ("address", "slab") for c in everything("full", small)
    )


def test_a_cache_that_the_device_has_no_room_for_is_an_error_in_words(monkeypatch):
    """A case that cannot run is no case that passed."""
    case = next(case for case, said in quick_cases(GATHER_UPCONVERT) if "slab" in said)
    empty = torch.empty

    def full(*sizes, **options):
        if sizes[0] > 2**32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", full)
    result = run_case(case, Model().gather_upconvert, torch.device("cpu"))
    assert result.status == "error"
    assert re.search(r"the case needs a cache of \d\.\d GiB on cpu, which has less left: end what else uses it", result.message)


def test_the_levels_are_named():
    with pytest.raises(InvalidArgument, match="got 'thorough', expected one of smoke, quick, full"):
        cases_for(Model().implementation(MERGE_STATES), CPU, "thorough")
    with pytest.raises(UnknownBackend, match=r"got 'modle'\. Expected one of model, model\.torch"):
        run_suite(Model(), "modle", device="cpu")


# ---------------------------------------------------------------------------------------------- its parts


def test_covering_covers_and_respects_constraints():
    axes = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [0, 1, 2, 3]}

    def allowed(choice):
        return not (choice.get("a") == 3 and choice.get("b") == "y")

    found = covering(axes, strength=2, allowed=allowed)
    assert all(allowed(choice) for choice in found) and len(found) < 3 * 2 * 2 * 4
    for left, right in combinations(axes, 2):
        met = {(choice[left], choice[right]) for choice in found}
        assert met == set(product(axes[left], axes[right])) - ({(3, "y")} if (left, right) == ("a", "b") else set())
    assert covering(axes, strength=2, allowed=allowed) == found


def test_poison_fills_fresh_memory_and_leaves_no_trace():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert torch.empty(3).isnan().all() and torch.empty(3, dtype=torch.int32).eq(2**31 - 1).all()
    assert torch.are_deterministic_algorithms_enabled() == before
    with pytest.raises(KeyError), poisoned():
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() == before


def test_a_mismatch_names_its_place_and_both_values():
    got, want = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])
    assert same_bits("indices", got, want).message == "indices[1, 1]: got 4, expected 5; 1 of 4 differ"
    assert same_bits("x", torch.tensor([0.0]), torch.tensor([-0.0])).message
    assert not same_bits("x", torch.tensor([math.nan]), torch.tensor([math.nan])).message
    names = [field_of(FP8_DS_MLA, byte) for byte in (511, 515, 531)]
    assert names == ["byte 511: latent 511, byte 0", "byte 515: scale 0, byte 3", "byte 531: rope 1, byte 1"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.2])
def test_close_refuses_what_is_not_close(bad):
    limit = Tolerance(1e-6, 0.1, "a test", "row")
    want = torch.tensor([[1.0, 0.0], [-math.inf, 2.0]], dtype=torch.float64)
    assert not close("out", torch.tensor([[1.05, 0.09], [-math.inf, 1.9]]), want, limit).message
    wrong = torch.tensor([[bad, 0.0], [-math.inf, 2.0]])
    assert "out[0, 0]" in close("out", wrong, want, limit).message
    assert "out[70, 0]" in close("out", wrong, want, limit, rows=torch.tensor([70, 90])).message
    if bad != -math.inf:
        assert "out[1, 0]" in close("out", torch.tensor([[1.0, 0.0], [bad, 2.0]]), want, limit).message


def test_guards_notice_a_stray_write():
    written = guarded((3, 4), torch.float32, torch.device("cpu"), strided=True)
    written.view.fill_(1.0)
    assert not written.outside("out").message
    written.view.as_strided((1,), (1,), written.view.storage_offset() + 4).fill_(1.0)
    assert "memory around out" in written.outside("out").message


def test_hole_patterns_lie_where_their_names_say():
    g = torch.Generator().manual_seed(0)
    masks = {name: hole_mask(name, 2, 9, g)[1].tolist() for name in ("front", "middle", "end", "first", "last", "dense")}
    assert masks == {
        "front": [True] * 3 + [False] * 6, "middle": [False] * 3 + [True] * 3 + [False] * 3, "end": [False] * 6 + [True] * 3,
        "first": [False] + [True] * 8, "last": [True] * 8 + [False], "dense": [False] * 9,
    }  # fmt: skip
    assert hole_mask("absent", 4, 9, g).all(dim=1).tolist()[::2] == [True, True]
