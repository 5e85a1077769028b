# SPDX-License-Identifier: Apache-2.0
"""What is chosen on machines that are not here, with every reason against the others; and how facts are read off torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import fake_plugins.acme
import fake_plugins.handy
import fake_plugins.plain
import pytest
import torch
from fake_plugins import implementation, make_plugin
from machines import A100, B200, BI_V150, CPU, H200, MACHINES, MI300X, RTX_4090, RTX_5090

from mla_portable.accelerator import Accelerator
from mla_portable.attention import AttentionSpec
from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.attention.routes import choose_route
from mla_portable.choose import Policy, Registry, use
from mla_portable.choose import facts as facts_module
from mla_portable.choose.facts import RawDevice, collect, interpret
from mla_portable.choose.machine import Machine
from mla_portable.choose.select import decide as decide_purely
from mla_portable.contracts import DeviceFacts, InvalidArgument, Reason, Request, Support, UnsupportedRequest
from mla_portable.primitives import GATHER_UPCONVERT, MERGE_STATES, SPARSE_DECODE

PLUGINS = [("plain", fake_plugins.plain), ("acme", fake_plugins.acme), ("handy", fake_plugins.handy)]
DECODE = {"kv_layout": "fp8_ds_mla", "num_heads": 128, "topk": 2048, "block_size": 64, "query_len": 1, "lse": True}


def decide(machine: DeviceFacts, **fields: object):
    registry = Registry(plugins=PLUGINS, facts={machine.device_type: machine}, environ={})
    request = Request(SPARSE_DECODE, registry.facts(machine.device_type), **{**DECODE, **fields})
    return registry.decide(request, thorough=True)


def reasons(decision) -> dict[str, list[tuple[str, str, str]]]:
    return {v.implementation: [(r.subject, r.given, r.limit) for r in v.reasons] for v in decision.verdicts}


NO_ACME = "supports sm90, sm100"
NO_NATIVE_FP8 = ("e4m3 conversion", "not in hardware", "required")
NEEDS_128K = "needs 131072"

PORTABLE = {"handy.portable": [], "plain.torch": []}
SMALL = ("shared memory", "101376 bytes", NEEDS_128K)
EXPECTED: dict[str, dict[str, list[tuple[str, str, str]]]] = {
    "H200": {"acme.fused": [], "handy.native": [], **PORTABLE},
    "B200": {"acme.fused": [], "handy.native": [], **PORTABLE},
    "A100": {**PORTABLE, "acme.fused": [("arch", "sm80", NO_ACME)], "handy.native": [NO_NATIVE_FP8]},
    "RTX 4090": {**PORTABLE, "acme.fused": [("arch", "sm89", NO_ACME)], "handy.native": [SMALL]},
    "RTX 5090": {**PORTABLE, "acme.fused": [("arch", "sm120", NO_ACME)], "handy.native": [SMALL]},
    "MI300X": {
        **PORTABLE,
        "acme.fused": [("vendor", "amd", "supports nvidia"), ("arch", "gfx942", NO_ACME)],
        "handy.native": [NO_NATIVE_FP8, ("shared memory", "65536 bytes", NEEDS_128K)],
    },
    "BI-V150": {
        **PORTABLE,
        "acme.fused": [("vendor", "iluvatar", "supports nvidia"), ("arch", "ivcore11", NO_ACME)],
        "handy.native": [NO_NATIVE_FP8],
    },
    "CPU": {
        "plain.torch": [],
        "acme.fused": [("device type", "cpu", "supports cuda"), ("vendor", "cpu", "supports nvidia"), ("arch", "cpu", NO_ACME)],
        "handy.native": [("device type", "cpu", "supports cuda"), NO_NATIVE_FP8],
        "handy.portable": [("device type", "cpu", "supports cuda")],
    },
}
"""By machine: the implementations, best first and those that cannot run last, with the reasons against each."""


@pytest.mark.parametrize("name", MACHINES)
def test_what_decodes_128_heads_and_why_not_the_others(name: str):
    decision = decide(MACHINES[name])
    assert decision.chosen == next(iter(EXPECTED[name]))
    assert list(reasons(decision).items()) == list(EXPECTED[name].items())
    assert (decision.control, decision.forced) == ("default", None)


def test_a_graph_is_refused_where_the_device_cannot_capture():
    decision = decide(BI_V150, graph=True)
    assert decision.chosen is None
    assert all(("graph", "requested", "Iluvatar BI-V150 cannot capture graphs") in each for each in reasons(decision).values())
    assert decide(H200, graph=True).chosen == "acme.fused"


def test_a_forced_backend_that_cannot_serve_says_everything():
    registry = Registry(plugins=PLUGINS, facts={"cuda": A100}, environ={})
    request = Request(SPARSE_DECODE, A100, **{**DECODE, "num_heads": 16})
    with pytest.raises(UnsupportedRequest) as refusal:
        registry.select(request, backend="acme")
    decision = refusal.value.decision
    assert (decision.chosen, decision.forced, decision.control) == (None, "acme", "argument")
    assert decision.verdicts[0].implementation == "acme.fused", "the forced one comes first"
    text = str(refusal.value)
    for part in (
        "acme (forced by argument) cannot run sparse_decode",
        "num_heads=16 topk=2048 block_size=64",
        "on NVIDIA A100-SXM4-80GB (sm80)",
        "arch sm80 (supports sm90, sm100); num_heads 16 (supports 64, 128)",
        "1 implementation for other devices, 2 other implementations",
        "remedy",
    ):
        assert part in text
    assert "handy.portable" not in text, "the others are folded"
    assert "handy.portable" in decision.failure_text(all=True)


def test_simulated_devices_answer_for_every_index_and_the_rest_is_refused():
    registry = Registry(plugins=PLUGINS, facts={"cuda:1": A100, "cuda": H200}, environ={})
    assert registry.facts("cuda:0") is registry.facts(torch.device("cuda", 7)) is registry.facts("cuda") is H200
    assert registry.facts("cuda:1") is A100
    with pytest.raises(InvalidArgument, match="simulated"):
        registry.probe(registry.implementations(SPARSE_DECODE)[0], torch.device("cuda:1"))


# Facts of what torch names


RAW = {
    "H200": RawDevice("cuda", "NVIDIA H200", (9, 0), "", 132, 232_448, 32, H200.memory_bytes),
    "B200": RawDevice("cuda", "NVIDIA B200", (10, 0), "", 148, 232_448, 32, B200.memory_bytes),
    "A100": RawDevice("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), "", 108, 166_912, 32, A100.memory_bytes),
    "RTX 4090": RawDevice("cuda", "NVIDIA GeForce RTX 4090", (8, 9), "", 128, 101_376, 32, RTX_4090.memory_bytes),
    "RTX 5090": RawDevice("cuda", "NVIDIA GeForce RTX 5090", (12, 0), "", 170, 101_376, 0, RTX_5090.memory_bytes),
    "MI300X": RawDevice(
        "cuda", "AMD Instinct MI300X", (9, 4), "gfx942:sramecc+:xnack-", 304, 65_536, 0, MI300X.memory_bytes, hip=True
    ),
    "CPU": RawDevice("cpu", "CPU"),
}


@pytest.mark.parametrize("name", RAW)
def test_facts_follow_from_what_torch_says(name: str):
    assert interpret(RAW[name]) == MACHINES[name]


@pytest.mark.parametrize(
    ("arch", "warp_size", "native"),
    [
        ("gfx906:sramecc-:xnack-", 64, False),
        ("gfx90a:sramecc+:xnack-", 64, False),
        ("gfx942:sramecc+:xnack-", 64, False),  # its e4m3 is the FNUZ format
        ("gfx950:sramecc+:xnack-", 64, True),
        ("gfx1100", 32, False),
        ("gfx1201", 32, True),
        ("gfx1030", 32, False),
    ],
)
@pytest.mark.parametrize("bf16", [True, False])
def test_amd_architectures(arch: str, warp_size: int, native: bool, bf16: bool):
    facts = interpret(RawDevice("cuda", "AMD Radeon", (9, 4), arch, hip=True, bf16=bf16))
    assert (facts.vendor, facts.arch) == ("amd", arch.partition(":")[0])
    assert (facts.warp_size, facts.has_bf16, facts.has_fp8_conversion) == (warp_size, bf16, native)


@pytest.mark.parametrize(
    ("name", "arch", "vendor"),
    [
        ("", "gfx928:sramecc+:xnack-", "hygon"),
        ("", "gfx936", "hygon"),
        ("", "gfx938", "hygon"),
        ("Hygon C86", "gfx906", "hygon"),
        ("DCU Z100L", "gfx906", "hygon"),
        ("K100_AI", "gfx9xx", "hygon"),
        ("BW1000_H", "gfx9xx", "hygon"),
        ("BW", "gfx9xx", "hygon"),
        ("AMD Instinct MI300X", "gfx942", "amd"),
        ("AMD Radeon RX 7900 XTX", "gfx1100", "amd"),
        ("", "gfx90a", "amd"),
    ],
)
def test_hygon_is_no_amd(name: str, arch: str, vendor: str):
    facts = interpret(RawDevice("cuda", name, (9, 3), arch, hip=True))
    assert (facts.vendor, facts.arch, facts.warp_size == 64, facts.has_bf16) == (
        vendor, arch.partition(":")[0], arch.startswith("gfx9"), True,
    )  # fmt: skip
    assert vendor == "amd" or not facts.has_fp8_conversion


@pytest.mark.parametrize(
    ("hip", "says", "has_bf16"),
    [("6.4", lambda including_emulation: not including_emulation, True), ("6.4", lambda: False, False), ("6.4", None, True)],
)
def test_a_hip_device_is_asked_whether_it_computes_in_bfloat16(
    hip: str, says: Callable[..., bool] | None, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
):
    properties = SimpleNamespace(name="DCU", major=9, minor=3, gcnArchName="gfx936", total_memory=1 << 36)
    module = SimpleNamespace(device=lambda index: nullcontext(), get_device_properties=lambda index: properties)
    if says is not None:
        module.is_bf16_supported = says
    where = Accelerator.__new__(Accelerator)
    where.module, where.index, where.device = module, 0, torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(facts_module, "resolve_device", lambda device: device)
    monkeypatch.setattr(facts_module, "accelerator", lambda device: where)
    found = interpret(collect(torch.device("cuda", 0)))
    assert (found.vendor, found.arch, found.has_bf16) == ("hygon", "gfx936", has_bf16)


@pytest.mark.parametrize(
    ("capability", "has_bf16", "native"), [((7, 5), False, False), ((8, 6), True, False), ((8, 9), True, True)]
)
def test_nvidia_generations(capability: tuple[int, int], has_bf16: bool, native: bool):
    facts = interpret(RawDevice("cuda", "Tesla T4", capability))
    assert (facts.vendor, facts.has_bf16, facts.has_fp8_conversion) == ("nvidia", has_bf16, native)


def test_a_look_alike_is_not_taken_for_nvidia():
    """Same device type and capability as an A100: without its vendor's detector it is unknown, and no arch list has it."""
    facts = interpret(RawDevice("cuda", "Iluvatar TG-V200 OAM", (8, 0), "", 16, 49_152, 64))
    assert (facts.vendor, facts.arch, facts.has_fp8_conversion, facts.has_fp64) == ("unknown", "cc80", False, False)
    decision = decide(facts)
    assert decision.chosen == "handy.portable"
    assert ("vendor", "unknown", "supports nvidia") in reasons(decision)["acme.fused"]


def test_the_cpu_of_this_machine():
    facts = Machine().facts("cpu")
    assert (facts.vendor, facts.arch, facts.device_type, facts.num_sms) == ("cpu", "cpu", "cpu", 0)
    assert facts.graph_capture is False
    assert dict(facts.libraries)["torch"].startswith(torch.__version__.partition("+")[0])
    assert Machine().facts(torch.device("cpu")) == facts


@pytest.fixture
def one_fake_gpu(monkeypatch: pytest.MonkeyPatch):
    """torch as it looks with one H200, as far as facts are concerned."""
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=232_448,
        warp_size=32,
        total_memory=H200.memory_bytes,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)  # of a CUDA build without a driver
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    return properties


def test_facts_of_a_gpu_are_collected_from_torch(one_fake_gpu: SimpleNamespace):
    facts = Machine().facts("cuda")
    assert (facts.name, facts.arch, facts.num_sms, facts.shared_memory) == ("NVIDIA H200", "sm90", 132, 232_448)
    del one_fake_gpu.shared_memory_per_block_optin, one_fake_gpu.warp_size  # as in builds of torch that lack them
    facts = Machine().facts("cuda:0")
    assert (facts.shared_memory, facts.warp_size) == (49_152, 32)


def test_a_gpu_that_is_not_there_is_an_error(one_fake_gpu: SimpleNamespace):
    with pytest.raises(InvalidArgument, match=r"got cuda:3, expected one of the 1 cuda devices"):
        Machine().facts("cuda:3")
    with pytest.raises(InvalidArgument, match="got 'gpu', expected a torch device"):
        Machine().facts("gpu")


def test_a_detector_speaks_before_torch_does(one_fake_gpu: SimpleNamespace):
    one_fake_gpu.name = "Iluvatar BI-V150"
    asked: list[torch.device] = []

    def recognise(device: torch.device) -> DeviceFacts | None:
        asked.append(device)
        return BI_V150 if device.type == "cuda" else None

    machine = Machine(detectors=[("nosy", lambda device: None), ("iluvatar", recognise)])
    assert machine.facts("cuda") == BI_V150
    assert asked == [torch.device("cuda:0")], "the index is filled in"
    assert machine.facts("cpu").vendor == "cpu"


# Plain torch on an accelerator

REFERENCE = ("reference", "mla_portable.reference")


def accelerated(machine: DeviceFacts = A100, *, environ: dict[str, str] | None = None, **fields: object) -> Registry:
    made = implementation("kernels.v1", SPARSE_DECODE, **fields)
    other = implementation("kernels.v1", MERGE_STATES, Support(source="a test", archs=("sm120",)))
    plugins = [REFERENCE, ("kernels", make_plugin(made, other))]
    return Registry(plugins=plugins, facts={machine.device_type: machine}, environ=environ or {})


SHAPES = {"support": Support(source="a test", kv_layouts=("bf16",))}


@pytest.mark.parametrize(
    ("environ", "fields", "cause"),
    [
        ({}, SHAPES, "kv_layout fp8_ds_mla (supports bf16)"),
        ({"MLA_PORTABLE_DISABLE": "kernels.v1"}, {}, "disabled by MLA_PORTABLE_DISABLE"),
    ],
    ids=["shape", "disabled"],
)
def test_the_reference_does_not_take_the_place_of_a_kernel_that_fits_the_device(environ, fields, cause):
    registry = accelerated(environ=environ, **fields)
    request = Request(SPARSE_DECODE, A100, **DECODE)
    decision = registry.decide(request)
    assert decision.chosen is None
    assert [v.implementation for v in decision.causes] == ["kernels.v1", "reference.torch"]
    assert [r.subject for r in decision.causes[-1].reasons] == ["device type"]
    with pytest.raises(UnsupportedRequest) as refusal:
        registry.bind(request)
    text = str(refusal.value)
    assert text.index(cause) < text.index("remedy") < text.index('backend="reference"')
    for forced in ("reference", "reference.torch"):
        assert registry.decide(request, backend=forced).chosen == "reference.torch"
    with use("reference"):
        assert registry.decide(request).chosen == "reference.torch"
    named = accelerated(environ={**environ, "MLA_PORTABLE_BACKEND_SPARSE_DECODE": "reference"}, **fields)
    assert named.decide(request).chosen == "reference.torch"


def test_a_kernel_that_fails_on_the_device_does_not_hand_over_to_the_reference():
    candidates = [
        each
        for each in accelerated(check=lambda device: ()).implementations(SPARSE_DECODE)
        if each.backend in ("kernels", "reference")
    ]
    wrong = Reason("probe", "wrong values", "they must agree")
    request = Request(SPARSE_DECODE, A100, **DECODE)
    for looks in ({"check": lambda i: (wrong,) * (i.backend == "kernels")}, {"probe": lambda i: (wrong,)}):
        decision = decide_purely(request, candidates, Policy(), **looks)
        assert decision.chosen is None and wrong in decision.causes[0].reasons


def test_the_reference_serves_where_nothing_fits_the_device_and_on_a_cpu():
    assert accelerated().decide(Request(MERGE_STATES, A100)).chosen == "reference.torch"
    assert accelerated().decide(Request(GATHER_UPCONVERT, A100)).chosen == "reference.torch"
    decision = accelerated(CPU, **SHAPES).decide(Request(SPARSE_DECODE, CPU, **DECODE))
    assert decision.chosen == "reference.torch"


def test_a_route_that_only_the_reference_could_serve_is_not_taken():
    spec = AttentionSpec(
        num_heads=128,
        kv_layout="fp8_ds_mla",
        block_size=64,
        topk=2048,
        softmax_scale=0.1,
        max_num_tokens=8,
        max_num_reqs=4,
        max_model_len=64,
    )
    registry = accelerated(**SHAPES)  # decodes bf16 alone; every other primitive is the reference's
    decision = choose_route(spec, A100, LayerRegistry(registry, None))
    assert decision.chosen == "direct" and decision.verdict.part("decode") is None, "sparse_prefill serves all tokens"
    refused = {v.route: [r.subject for r in v.reasons] for v in decision.verdicts if v.reasons}
    assert refused == {"fused": ["sparse_decode"], "split": ["sparse_decode"]}


# What a person reads


@pytest.mark.parametrize("forced", [None, "kernels", "other"])
def test_a_refusal_says_the_cause_first_in_ten_lines_or_less(forced: str | None):
    """Sixty implementations for other devices and sixteen of one vendor with the same reason do not hide the cause."""
    elsewhere = Support(source="a test", archs=("ivcore11",))
    fitting = Support(source="a test", kv_layouts=("bf16",))
    plugins = [
        ("other", make_plugin(*(implementation(f"other.v{n}", SPARSE_DECODE, elsewhere) for n in range(60)))),
        ("kernels", make_plugin(*(implementation(f"kernels.v{n}", SPARSE_DECODE, fitting) for n in range(16)))),
    ]
    registry = Registry(plugins=plugins, facts={"cuda": H200}, environ={})
    with pytest.raises(UnsupportedRequest) as refusal:
        registry.select(Request(SPARSE_DECODE, H200, **DECODE), backend=forced)
    decision, lines = refusal.value.decision, str(refusal.value).splitlines()
    assert len(decision.verdicts) == 76 and len(lines) <= 10
    cause = "arch sm90 (supports ivcore11)" if forced == "other" else "kv_layout fp8_ds_mla (supports bf16)"
    assert cause in lines[1]
    if forced != "other":
        assert "other.v" not in str(refusal.value) and "60 implementations for other devices" in lines[2]
    assert decision.failure_text(all=True).count("other.v") == decision.text().count("other.v") == 60
