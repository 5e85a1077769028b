# SPDX-License-Identifier: Apache-2.0
"""Probes: right implementations pass, and each way of being wrong is rejected with a reason that names the symptom.

The misbehaving implementations are the reference with one fault each; a wrapper that changes nothing must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_faults import Model
from fake_plugins import make_plugin
from faulty import (
    BOTH,
    CONVERT,
    DECODE,
    GATHER,
    INDEXER,
    KEYS,
    MERGE,
    PREFILL,
    QUANTIZE,
    RAGGED,
    RIGHT,
    SELECT,
    WRITE,
    Kernel,
    candidate,
    change,
    drop,
    in_place,
    probe,
    registry,
    symptoms,
)
from machines import CPU
from torch import Tensor

from mla_portable.choose import Registry
from mla_portable.choose.faults import blame, is_fatal
from mla_portable.choose.probe import probe_implementation, require_no_capture
from mla_portable.contracts import DeviceFacts, Implementation, InvalidArgument, PluginError, Primitive, Reason, Request
from mla_portable.judge.problems.attention import SOFTMAX_SCALE
from mla_portable.judge.problems.probe import probe_cases, probe_layouts
from mla_portable.layouts import FP8_DS_MLA

WIDTH = 96
"""Positions that the block table of the smallest convert_indices problem has room for."""

# What is right passes


@pytest.mark.parametrize("primitive", Primitive.all())
def test_a_right_implementation_passes(primitive: Primitive):
    report = probe(candidate(primitive, RIGHT[primitive]))
    assert (report.ok, report.stage, report.reasons) == (True, "compare", ()), symptoms(report)
    assert 0 < report.seconds < 60


@pytest.mark.parametrize(
    "limits",
    [
        {"num_heads": (64, 128), "topk_multiple": 64, "block_sizes": (64,), "max_query_len": 1},
        {"max_heads": 1, "block_size_multiple": 32, "kv_layouts": ("fp8_ds_mla",)},
        {"padded_heads": (64,), "topk_multiple": 128, "block_sizes": (1, 16), "scale_formats": ("pow2",)},
        {"max_topk": 32, "lse": False, "attn_sink": False, "lengths": False},
    ],
)
@pytest.mark.parametrize("primitive", [DECODE, PREFILL, GATHER, CONVERT])
def test_problems_stay_within_what_is_declared(primitive: Primitive, limits: dict[str, Any]):
    """Every request that a probe binds is one that the Support accepts, and the call is no wider than its request."""
    asked: list[Request] = []
    calls: list[set[str]] = []
    made = candidate(primitive, RIGHT[primitive], **limits)

    def bind(request: Request) -> Kernel:
        asked.append(request)
        return change(primitive, before=lambda call: calls.append(set(call["kwargs"])))

    report = probe(Implementation(made.name, primitive, made.support, bind=bind))
    assert report.ok, symptoms(report)
    for request in asked:
        assert made.support.reasons(request) == ()
    assert {("lengths" in keywords, "attn_sink" in keywords) for keywords in calls} == {(r.lengths, r.attn_sink) for r in asked}


@pytest.mark.parametrize("primitive", Primitive.all())
def test_problems_are_the_same_every_time_and_leave_the_global_generator_alone(primitive: Primitive):
    made = candidate(primitive, RIGHT[primitive])
    state = torch.get_rng_state()
    for layout in probe_layouts(made, None):
        first, second = (list(probe_cases(made, registry(made).facts("cpu"), layout)) for _ in range(2))
        for left, right in zip(first, second, strict=True):
            a, b = left.build(torch.device("cpu")), right.build(torch.device("cpu"))
            for name, value in a.args.items():
                if not isinstance(value, Tensor):
                    continue
                assert value.data_ptr() != b.args[name].data_ptr()
                assert torch.equal(*(v.contiguous().view(-1).view(torch.uint8) for v in (value, b.args[name]))), name
    assert torch.equal(state, torch.get_rng_state())


# What is wrong is rejected


def transposed_scales(call: dict[str, Any]) -> tuple[Any, ...]:
    q, kv, indices = call["args"]
    if kv.dtype == torch.uint8:  # each group of 128 takes its neighbour's scale
        kv = kv.clone()
        scales = kv[..., 512:528].contiguous().view(torch.float32).roll(1, dims=-1)
        kv[..., 512:528] = scales.view(torch.uint8)
    return q, kv, indices


ATTENTION_FAULTS = {
    "out not 0 on empty rows": (
        lambda r, *a, **k: in_place(r, out=r[0] + torch.isinf(r[1])[..., None].to(r[0].dtype)),
        "out of a row without valid entries is not 0 (case holes, row 2)",
    ),
    "lse NaN on empty rows": (
        lambda r, *a, **k: in_place(r, lse=torch.where(torch.isinf(r[1]), torch.nan, r[1])),
        "lse of a row without valid entries is nan, expected -inf",
    ),
    "lse shifted": (lambda r, *a, **k: in_place(r, lse=r[1] + 1.0), "lse is"),
    "lse NaN where valid": (
        lambda r, *a, **k: in_place(r, lse=torch.where(torch.isinf(r[1]), r[1], torch.nan)),
        "lse is nan where entries are valid",
    ),
    "out scaled": (lambda r, *a, **k: in_place(r, out=r[0] * 1.05), "out is off by"),
    "out of another dtype": (lambda r, *a, **k: (r[0].float(), r[1]), "`out` that it was given"),
    "ignores lse_out": (lambda r, *a, **k: (r[0], r[1].clone()), "another tensor than the `lse`"),
    "no lse": (lambda r, *a, **k: r[0], "returned Tensor, expected (out, lse)"),
    "lse None": (lambda r, *a, **k: (r[0], None), "returned NoneType as lse, expected a tensor"),
    "three results": (lambda r, *a, **k: (*r, r[0]), "returned a tuple of 3, expected (out, lse)"),
}


@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
@pytest.mark.parametrize("primitive", [DECODE, PREFILL])
def test_wrong_attention_is_rejected_by_symptom(primitive: Primitive, fault: str):
    after, symptom = ATTENTION_FAULTS[fault]
    report = probe(candidate(primitive, change(primitive, after=after)), layout="fp8_ds_mla")
    assert not report.ok
    assert symptom in symptoms(report)


ATTENTION = (DECODE, PREFILL)
MISTAKES = [
    # of conformance_faults.Model: fault, primitives, what a probe says of it
    ("+inf on empty rows", ATTENTION, "lse of a row without valid entries is inf, expected -inf (case holes, row 2)"),
    ("lse in base 2", ATTENTION, "(it looks like base 2) (case holes, row 0)"),
    ("leaks NaN", ATTENTION, "out holds NaN or inf (inputs that do not count hold NaN) (case holes, row 1)"),
    ("allocates instead of out=", ATTENTION, "returned another tensor than the `out` that it was given to write"),
    ("changes its indices", ATTENTION, "it changed its input indices (case holes)"),
    (
        "reads -1 as slot 0",
        ATTENTION,
        "lse is nan where entries are valid (inputs that do not count hold NaN) (case holes",
    ),
    ("reads past the cache", ATTENTION, "lse is nan where entries are valid"),
    (
        "drops the last index",
        ATTENTION,
        "lse is -inf where entries are valid",
    ),
    ("ignores lengths", ATTENTION, "case lengths and sink, row 0"),
    ("counts the sink in lse", ATTENTION, "(it looks as if the sink were counted in) (case lengths and sink, row 3)"),
    ("ignores the sink", ATTENTION, "(case lengths and sink, row 3) | probe wrong values: out is off by"),
    ("takes an infinite sink for none", ATTENTION, "(case infinite sinks, row "),
    ("believes the table", (CONVERT,), "position 35 became slot 3, expected -1 (case holes, row 0)"),
    ("limits the workspace by the table", (CONVERT,), "position 96 became slot -1, expected 96 (case workspace, row 3)"),
    ("compacts out of order", (CONVERT,), "entry 0 of a compacted row is 16, expected 19 (case compact, row 0)"),
    ("counts without the last", (CONVERT,), "the count is 61, expected 62 (case workspace, row 3)"),
    ("writes whole blocks", (GATHER,), "expected nan (case ragged, row 22, column 0)"),
    ("skips invalid blocks", (GATHER,), "out is nan, expected 0 (case ragged, row 25, column 0)"),
    ("writes skipped tokens", (WRITE,), "byte 0 of block 2, offset 14 is"),
    ("floor instead of ceil", (WRITE,), "(case skip, pow2 scales, byte 0: latent 0, byte 0)"),
    (
        "multiplies dead parts by 0",
        (MERGE,),
        "(inputs that do not count hold NaN) (case empty parts, row ",
    ),
    ("knows no empty part of +inf", (MERGE,), "lse is inf where entries are valid"),
    ("truncates", (QUANTIZE,), "rounded (case odd size, element [0, 4])"),
    ("no relu", (INDEXER,), "below 0 though no weight is: it looks as if the ReLU were missing"),
    ("relu after the weights", (INDEXER,), "expected 0 (case ragged, row 2)"),
    ("reads the block behind the cache", (INDEXER,), "expected -inf (case ragged, row"),
    ("reads the block behind the cache", (SELECT,), "expected a position that the token sees"),
    ("looks ahead", (INDEXER,), "expected -inf (case ragged, row 0)"),
    ("leaves the unseen", (INDEXER,), "is nan, expected -inf (case ragged, row 0)"),
    ("scores tokens of nobody", (INDEXER,), "expected -inf (case ragged, row 4)"),
    ("takes pages for rows of 132 bytes", (INDEXER,), "(case ragged, row"),
    ("takes the scale of the token before", (INDEXER,), "(case ragged, row"),
    ("ignores the start", (RAGGED,), "the logit of position 0 is"),
    ("ignores the end", (RAGGED,), "expected -inf (case mixed, row 2)"),
    ("ignores the scales of keys", (RAGGED,), "(case mixed, row"),
    ("takes the lowest", (SELECT,), "a lower score was chosen (case ragged, row"),
    ("relu after the weights", (SELECT,), "a lower score was chosen (case ragged, row"),
    ("takes pages for rows of 132 bytes", (SELECT,), "(case ragged, row"),
    ("looks ahead", (SELECT,), "expected a position that the token sees"),
    ("drops the last position", (SELECT,), "expected a position that the token sees"),
    ("leaves positions unsorted", (SELECT,), "expected a position that the token sees, above the one before it (case ragged"),
    ("leaves rows of nobody", (SELECT,), "expected -1 (case ragged, row 4)"),
    ("writes scales beside rows", (KEYS,), "cache["),
    ("lets scales be 0", (KEYS,), "(case skip, amax scales"),
    ("writes skipped tokens", (KEYS,), "cache["),
]


@pytest.mark.parametrize(("fault", "primitive", "symptom"), [(f, p, s) for f, primitives, s in MISTAKES for p in primitives])
def test_a_mistake_of_the_conformance_suite_is_rejected_by_its_symptom(fault: str, primitive: Primitive, symptom: str):
    report = probe(candidate(primitive, getattr(Model(fault), str(primitive))))
    assert (report.ok, report.stage) == (False, "compute" if "allocates" in fault else "compare")
    assert symptom in symptoms(report)
    assert ("ReLU" in symptoms(report)) == (fault == "no relu")


@pytest.mark.parametrize("fault", ["reads one position too many", "limits no workspace"])
def test_lengths_are_tried_where_they_are_declared(fault: str):
    """In a problem of their own, and in that of a request that has them, as a layer's has."""
    here = registry().facts("cpu")  # what another device would compute, nobody can try
    asked = Request(CONVERT, here, topk=64, block_size=16, compact=True, prefill_workspace=True)
    wrong, right = (candidate(CONVERT, Model(*faults).convert_indices, seq_lens=True) for faults in ((fault,), ()))
    silent = candidate(CONVERT, Model(fault).convert_indices)  # never called with them
    for each, chosen in ((wrong, None), (right, "faulty.v1")):
        assert registry(each).decide(asked.but(seq_lens=True), backend="faulty").chosen == chosen
    assert registry(silent).decide(asked, backend="faulty").chosen == "faulty.v1"
    assert probe(wrong).failed == (("lengths",) if fault == "reads one position too many" else ())
    assert probe(right).ok and probe(silent).ok


OTHER_FAULTS: dict[str, tuple[Primitive, object, str]] = {
    "mixes up scales": (DECODE, change(DECODE, before=transposed_scales), "wrong values"),
    "wants another keyword": (DECODE, lambda q, kv, indices, *, scale: None, "compute raised TypeError"),
    "not implemented": (
        PREFILL,
        change(PREFILL, before=lambda call: 1 / 0),
        "compute raised ZeroDivisionError: division by zero (case holes)",
    ),
    "no callable": (DECODE, "kernel", "bind returned str, expected a callable"),
    "-1 becomes a slot": (
        CONVERT,
        change(CONVERT, after=lambda r, *a, **k: in_place(r, r[0].where(a[0] != -1, torch.tensor(127, dtype=torch.int32)))),
        "wrong values: position -1 became slot 127, expected -1 (case holes, row 0)",
    ),
    "position past the table": (
        CONVERT,
        change(CONVERT, after=lambda r, *a, **k: in_place(r, r[0].where(a[0] < WIDTH, torch.tensor(7, dtype=torch.int32)))),
        "position 96 became slot 7, expected -1 (case holes, row 0)",
    ),
    "ignores num_slots": (CONVERT, change(CONVERT, before=drop("num_slots")), "expected -1"),
    "ignores the workspace": (
        CONVERT,
        change(CONVERT, before=drop("prefill_request_ids", "prefill_workspace_starts")),
        "case workspace, row 3",
    ),
    "int64 indices": (
        CONVERT,
        change(CONVERT, after=lambda r, *a, **k: r if "out" in k else (r[0].long(), r[1])),
        "indices has dtype int64, expected int32",
    ),
    "indices of another shape": (
        CONVERT,
        change(CONVERT, after=lambda r, *a, **k: r if "out" in k else (r[0][:, None], r[1])),
        "indices has shape [6, 1, 64], expected [6, 64]",
    ),
    "clears the gap": (GATHER, change(GATHER, after=lambda r, *a, **k: r.nan_to_num()), "another tensor than the `out`"),
    "clears the gap in place": (
        GATHER,
        change(GATHER, after=lambda r, *a, **k: r.nan_to_num_()),
        "out is 0, expected nan (case ragged, row 0, column 0)",
    ),
    "rounds twice": (GATHER, change(GATHER, after=lambda r, *a, **k: r.copy_(r.half() * 1.01)), "case ragged, row 0"),
    "always pow2": (
        WRITE,
        change(WRITE, before=lambda call: call["kwargs"].update(scale_format="pow2") if call["kwargs"] else None),
        "(case skip, amax scales, byte ",
    ),
    "writes a slot that no token names": (
        WRITE,
        change(WRITE, after=lambda r, *a, **k: a[2][0, 0].fill_(1)),
        "byte 0 of block 0, offset 0 is 1, expected 255",
    ),
    "a slot past the cache wraps around": (
        WRITE,
        change(WRITE, before=lambda call: (*call["args"][:3], call["args"][3] % 48)),
        "byte 0 of block 0, offset 0 is",
    ),
    "does not write": (WRITE, lambda *a, **k: None, "is 255, expected"),
    "merge drops the dtype": (
        MERGE,
        change(MERGE, after=lambda r, *a, **k: (r[0].bfloat16(), r[1])),
        "out has dtype bfloat16, expected float32",
    ),
    "inverse scale": (QUANTIZE, change(QUANTIZE, after=lambda r, *a, **k: (r[0], 1 / r[1])), "(it looks like the inverse)"),
    "codes of the FNUZ format": (
        QUANTIZE,
        change(QUANTIZE, after=lambda r, *a, **k: ((r[0].view(torch.uint8) + 8).view(r[0].dtype), r[1])),
        "x_q is",
    ),
}


REJECTED_EARLIER = {
    "wants another keyword": "compute",
    "not implemented": "compute",
    "no callable": "bind",
    "int64 indices": "compute",
    "indices of another shape": "compute",
    "clears the gap": "compute",
    "merge drops the dtype": "compute",
}


@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_each_fault_is_rejected_at_its_stage_by_its_symptom(fault: str):
    primitive, kernel, symptom = OTHER_FAULTS[fault]
    report = probe(candidate(primitive, kernel))
    assert not report.ok
    assert symptom in symptoms(report)
    assert report.stage == REJECTED_EARLIER.get(fault, "compare")


def test_a_write_outside_the_cache_is_seen():
    def kernel(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, **kwargs: Any) -> None:
        RIGHT[WRITE](kv_c, k_pe, kv_cache, slot_mapping, **kwargs)
        behind = kv_cache.as_strided((1,), (1,), kv_cache.storage_offset() + kv_cache.numel() + 5)
        behind.fill_(1)

    report = probe(candidate(WRITE, kernel), layout="fp8_ds_mla")
    assert "byte 5 outside the cache was written" in symptoms(report)


def test_two_scale_formats_are_two_cases():
    """A writer that declares pow2 only is not asked for amax."""
    forced = change(WRITE, before=lambda call: call["kwargs"].update(scale_format="pow2") if call["kwargs"] else None)
    assert not probe(candidate(WRITE, forced)).ok
    assert probe(candidate(WRITE, forced, scale_formats=("pow2",))).ok


def test_codes_of_the_inverse_scale_pass_and_a_step_apart_does_not():
    """Dividing by the scale and multiplying by its inverse round differently, where a value lies between two codes."""

    def inverse(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
        scale = RIGHT[QUANTIZE](x, dtype)[1]
        return (x.float() * (1 / scale)).clamp(-448, 448).to(dtype), scale

    def shifted(result: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        codes = result[0].view(torch.uint8)
        room = (codes & 0x7F) < 0x70
        return torch.where(room, codes + 1, codes).view(result[0].dtype), result[1]

    assert probe(candidate(QUANTIZE, inverse)).ok
    assert "x_q is" in symptoms(probe(candidate(QUANTIZE, change(QUANTIZE, after=shifted))))


def test_rounding_of_bf16_passes():
    noisy = change(
        DECODE, after=lambda r, *a, **k: in_place(r, out=(r[0].float() * (1 + 2**-9)).bfloat16(), lse=r[1] * 1.00005)
    )
    assert probe(candidate(DECODE, noisy)).ok


def test_the_same_symptom_in_every_case_is_told_once():
    def bind(request: Request) -> Kernel:
        raise ImportError("no module named acme")

    made = Implementation("faulty.v1", DECODE, candidate(DECODE, max).support, bind=bind)
    report = probe(made)
    assert [r.given for r in report.reasons] == ["bind raised ImportError: no module named acme"]
    assert report.stage == "bind"


def test_a_library_that_exits_is_at_fault_itself():
    """In bind or in a call, the process of the user goes on."""
    for bind, stage in ((lambda request: exit("no licence"), "bind"), (lambda request: lambda *a, **k: exit(3), "compute")):
        made = Implementation("faulty.v1", DECODE, candidate(DECODE, max).support, bind=bind)
        report = probe(made)
        assert (report.ok, report.stage) == (False, stage)
        assert f"{stage} raised SystemExit: " in symptoms(report)


# Checks


class Unreadable(RuntimeError):
    def __str__(self) -> str:
        raise GeneratorExit


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda facts: [Reason("acme", "0.9", "needs 1.0 or newer")], "acme 0.9 (needs 1.0 or newer)"),
        (lambda facts: [Reason("acme", "\x1b[2J0.9", "needs 1.0")], r"acme \x1b[2J0.9 (needs 1.0)"),
        (
            lambda facts: [Reason("acme", Unreadable(), "needs 1.0")],
            "acme (its text cannot be read: GeneratorExit) (needs 1.0)",
        ),
        (lambda facts: ["not found"], "check returned str, expected Reasons"),
        (lambda facts: None, "check raised TypeError"),
        (lambda facts: [][0], "check raised IndexError"),
        (lambda facts: exit("no licence"), "check raised SystemExit: no licence"),
    ],
)
def test_what_a_check_says_or_raises_is_a_reason(check: Callable[[DeviceFacts], Any], text: str):
    made = Implementation("faulty.v1", DECODE, candidate(DECODE, max).support, bind=lambda request: max, check=check)
    report = probe(made)
    assert (report.ok, report.stage) == (False, "check")
    assert text in symptoms(report)


def test_the_reference_is_checked_and_not_probed():
    reg = registry(candidate(DECODE, RIGHT[DECODE]))
    for implementation in reg.implementations():
        if implementation.backend == "reference":
            report = reg.probe(implementation, "cpu")
            assert (report.ok, report.stage) == (True, "check")


def test_values_are_compared_without_a_reference_too():
    made = candidate(DECODE, change(DECODE, after=lambda r, *a, **k: in_place(r, out=r[0] * 2)))
    report = registry(made, with_reference=False).probe(made, "cpu")
    assert not report.ok and "out is off by" in symptoms(report)


# What is remembered


def test_a_probe_runs_once_per_layout_and_only_for_the_layout_that_is_asked_for():
    seen: list[str | None] = []
    made = candidate(DECODE, RIGHT[DECODE])
    spy = Implementation("faulty.v1", DECODE, made.support, bind=lambda r: seen.append(r.kv_layout) or RIGHT[DECODE])
    reg = registry(spy)
    request = Request(DECODE, reg.facts("cpu"), kv_layout="bf16", num_heads=16, topk=64, block_size=16, query_len=1)
    assert reg.decide(request).chosen == "faulty.v1"
    assert seen == ["bf16"]
    seen.clear()
    report = reg.probe(spy, torch.device("cpu"))
    assert (report.layout, report.ok) == (None, True) and set(seen) == set(BOTH)
    once = len(seen)
    reg.probe(spy, "cpu", layout="fp8_ds_mla")
    assert len(seen) == once


def test_a_kernel_that_is_wrong_on_one_layout_serves_the_other():
    made = candidate(DECODE, change(DECODE, before=transposed_scales))
    reg = registry(made)
    request = Request(DECODE, reg.facts("cpu"), kv_layout="bf16", num_heads=16, topk=64, block_size=16, query_len=1)
    assert reg.decide(request).chosen == "faulty.v1"
    assert reg.decide(request.but(kv_layout=FP8_DS_MLA.name)).chosen == "reference.torch"
    report = reg.probe(made, "cpu")
    assert not report.ok and report.layout is None


# Variants that a layer binds, and sinks without bounds


@pytest.mark.parametrize("primitive", [DECODE, PREFILL])
def test_the_call_that_a_layer_binds_is_tried(primitive: Primitive):
    made = candidate(primitive, RIGHT[primitive])
    case = next(case for case in probe_cases(made, CPU, "bf16") if case.request.clean_indices)
    assert (case.request.lengths, case.request.clean_lengths, case.request.lse) == (True, True, False)
    call = case.build(torch.device("cpu"))
    indices, lengths = call.args["indices"].reshape(4, -1), call.kwargs["lengths"].reshape(4)
    slots = call.args["kv_cache" if primitive is DECODE else "kv"].flatten(0, -2).shape[0]
    assert ((indices >= -1) & (indices < slots)).all()
    assert [int(n) for n in lengths] == [32, 45, 0, 1] and (indices >= 0).sum(1).tolist() == lengths.tolist()
    assert all((row[: int(n)] >= 0).all() for row, n in zip(indices, lengths, strict=True)), "compacted"
    assert {"out", "lse_out"} <= set(call.kwargs)


def test_a_kernel_that_is_wrong_with_promises_only_is_rejected():
    def bind(request: Request) -> Kernel:
        return (
            change(DECODE, before=drop("lengths"), after=lambda r, *a, **k: in_place(r, out=r[0] * 2))
            if (request.clean_indices)
            else RIGHT[DECODE]
        )

    report = probe(Implementation("faulty.v1", DECODE, candidate(DECODE, max).support, bind=bind))
    assert "out is off by" in symptoms(report) and "case promises" in symptoms(report)


# What must not be swallowed


class Fault(RuntimeError):
    """Stands for torch.AcceleratorError, which only a device can raise."""


FATAL = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
]
DEVICE_FAULTS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("HIP error: unspecified launch failure"),
    RuntimeError("launch of decode, 4 x 1 blocks: an illegal memory access was encountered (CUDA driver error 700)"),
    RuntimeError("launch of decode, 4 x 1 blocks: unspecified launch failure (CUDA driver error 719)"),
]
REFUSED_LAUNCHES = [
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: invalid device function"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("cuModuleLoadData: no kernel image is available for execution on the device (CUDA driver error 209)"),
    RuntimeError("launch of decode, 4 x 1 blocks: cluster misconfiguration (CUDA driver error 912)"),
]
REASONS = [
    RuntimeError("q must have 64 or 128 heads"),
    *DEVICE_FAULTS,  # only texts: a CPU has no such faults
    *REFUSED_LAUNCHES,
    ImportError("undefined symbol: _ZN3c105"),
    NotImplementedError(),
    ValueError("CUDA error in the name only"),
]


def failing(stage: str, error: BaseException, calls: list[str]) -> Implementation:
    """Raises `error` in one of the stages, and notes that it did."""

    def fail(name: str) -> None:
        if name == stage:
            calls.append(name)
            raise error

    def kernel(*args: Any, **kwargs: Any) -> Any:
        fail("compute")

    def bind(request: Request) -> Kernel:
        fail("bind")
        return kernel

    support = candidate(DECODE, max).support
    return Implementation("faulty.v1", DECODE, support, bind=bind, check=lambda facts: fail("check") or (), preference=1)


class Panic(BaseException):
    """Stands for pyo3's PanicException."""


NO_EXCEPTIONS = {
    KeyboardInterrupt(): "KeyboardInterrupt",
    GeneratorExit(): "GeneratorExit",
    SystemExit(3): "SystemExit: 3",
    Panic("index out of bounds\nnote"): "Panic: index out of bounds",
    Unreadable(): "Unreadable: (its text cannot be read: GeneratorExit)",
    RuntimeError("\x1b[31mred\u202e"): r"RuntimeError: \x1b[31mred\u202e",
}


@pytest.mark.parametrize(("error", "text"), NO_EXCEPTIONS.items(), ids=NO_EXCEPTIONS.values())
@pytest.mark.parametrize("stage", ["check", "bind", "compute"])
def test_whatever_an_implementation_raises_the_next_one_serves(stage: str, error: BaseException, text: str):
    calls: list[str] = []
    reg = registry(failing(stage, error, calls))
    request = Request(DECODE, reg.facts("cpu"), kv_layout="bf16", num_heads=16, topk=64, block_size=16, query_len=1)
    for _ in range(2):
        chosen, decision = reg.select(request)
        assert chosen.name == "reference.torch" and calls == [stage], "asked once"
        (reason,) = next(v.reasons for v in decision.verdicts if v.implementation == "faulty.v1")
        assert reason.given == f"{stage} raised {text}"


def test_a_bind_that_raises_no_exception_outside_of_a_probe_names_the_implementation():
    reg = Registry(plugins=[("faulty", make_plugin(failing("bind", Panic("why"), [])))], environ={}, probe=False)
    request = Request(DECODE, reg.facts("cpu"), kv_layout="bf16", num_heads=16, topk=64, block_size=16, query_len=1)
    with pytest.raises(PluginError, match=r"Panic: why\nraised in bind by faulty.v1 / sparse_decode"):
        reg.bind(request)


@pytest.mark.parametrize("error", FATAL, ids=lambda e: f"{type(e).__name__} {str(e)[:24]}")
@pytest.mark.parametrize("stage", ["check", "bind", "compute"])
def test_out_of_memory_and_device_faults_are_raised(stage: str, error: Exception):
    calls: list[str] = []
    reg = registry(failing(stage, error, calls))
    request = Request(DECODE, reg.facts("cpu"), kv_layout="bf16", num_heads=16, topk=64, block_size=16, query_len=1)
    for attempt in (1, 2):
        with pytest.raises(type(error)) as raised:
            reg.select(request)
        assert raised.value is error
        assert len(calls) == attempt, "not remembered as a verdict, and no second candidate was tried in its place"
        assert str(error).count(f"raised in {stage} by faulty.v1 / sparse_decode") == 1, "once, however often it is raised"


@pytest.mark.parametrize("error", REASONS, ids=lambda e: f"{type(e).__name__} {str(e)[:30]}")
def test_a_refusal_is_a_reason(error: Exception):
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise error

    assert f"compute raised {type(error).__name__}" in symptoms(probe(candidate(DECODE, kernel)))


def test_torchs_own_device_errors_count_as_faults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "AcceleratorError", Fault, raising=False)
    assert is_fatal(Fault("an illegal instruction was encountered"), "cuda")
    assert not is_fatal(Fault("no kernel image is available for execution on the device"), "cuda")
    monkeypatch.delattr(torch, "AcceleratorError")
    assert not is_fatal(Fault("anything"), "cuda"), "torch without that class"


def test_the_words_of_runtime_and_driver_tell_a_fault_from_a_refused_launch():
    assert all(is_fatal(error, "cuda") for error in DEVICE_FAULTS)
    assert not any(is_fatal(error, "cuda") for error in REFUSED_LAUNCHES)
    assert not any(is_fatal(error, "cpu") for error in [*DEVICE_FAULTS, *REFUSED_LAUNCHES])


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("text", 7)])
def test_a_blamed_error_keeps_its_type_and_names_its_origin(error: Exception):
    more = error.args[1:]
    blame(error, "raised in bind by acme.v1 / merge_states")
    assert "raised in bind by acme.v1 / merge_states" in str(error) and error.args[1:] == more


def test_no_probe_under_graph_capture(monkeypatch: pytest.MonkeyPatch):
    made = candidate(DECODE, max)
    cases = probe_cases(made, CPU, "bf16")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    require_no_capture(made, torch.device("cpu"))
    with pytest.raises(InvalidArgument, match="Bind, or call once, before capturing"):
        require_no_capture(made, torch.device("cuda:0"))
    with pytest.raises(InvalidArgument, match="Bind, or call once, before capturing"):
        probe_implementation(made, torch.device("cuda:0"), "bf16", (), cases, 10.0)


# The tiny problems themselves


@pytest.mark.parametrize("layout", BOTH)
def test_the_attention_problem_has_the_traps_it_promises(layout: str):
    made = candidate(DECODE, RIGHT[DECODE])
    holes, lengths, *_ = probe_cases(made, registry(made).facts("cpu"), layout)
    call = holes.build(torch.device("cpu"))
    indices, cache = call.args["indices"].reshape(4, -1), call.args["kv_cache"]
    slots = cache.shape[0] * cache.shape[1]
    valid = (indices >= 0) & (indices < slots)
    assert [int(n) for n in valid.sum(-1)] == [64, 60, 0, 1]
    assert {int(i) for i in indices[1][~valid[1]]} == {-1, -2, slots, slots + 1}
    rows = (FP8_DS_MLA.unpack(cache) if layout == FP8_DS_MLA.name else cache).reshape(slots, 576)
    assert torch.isfinite(rows[indices[valid].long()]).all()
    unused = torch.ones(slots, dtype=torch.bool)
    unused[indices[valid].long()] = False
    assert torch.isnan(rows[unused].float()).any(dim=-1).sum() >= slots // 2
    call = lengths.build(torch.device("cpu"))
    counts, indices, cache = call.kwargs["lengths"].reshape(4), call.args["indices"].reshape(4, -1), call.args["kv_cache"]
    rows = (FP8_DS_MLA.unpack(cache) if layout == FP8_DS_MLA.name else cache).reshape(slots, 576)
    assert torch.isnan(rows[indices[0, int(counts[0])].long()].float()).any(), "past a length stands a NaN row"
    assert call.kwargs["softmax_scale"] == SOFTMAX_SCALE and call.kwargs["attn_sink"].shape == (2,)
