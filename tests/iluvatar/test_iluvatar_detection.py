# SPDX-License-Identifier: Apache-2.0
"""Whose device is it? Machines written down as signals; and the detector on a torch that says what they say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mla_portable_iluvatar import detector
from mla_portable_iluvatar.detection import Evidence, Signals, arch_named, characterise, recognise

TAG = ("2.10.0", "2.10.0+corex.4.5.0")
A100 = Signals("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912, torch_versions=("2.13.0+cu130", "2.13.0"), cuda="13.0")
TG_V200 = Signals("cuda", "TG-V200 OAM", (8, 0), torch_corex=True, torch_versions=TAG, cuda="10.2")
BI_V150 = Signals("cuda", "Iluvatar BI-V150", (7, 1), 16, torch_corex=True, torch_versions=TAG, cuda="10.2")
COREX_SET = (("COREX_HOME", "/usr/local/corex"),)

CASES = {
    "an A100": (A100, None),
    "a TG-V200, of the same capability": (TG_V200, "torch.corex"),
    "an A100 in a container that has CoreX's variables": (replace(A100, corex_variables=COREX_SET), None),
    "an A100 with CUDA 10.2 and CoreX's variables": (replace(A100, corex_variables=COREX_SET, cuda="10.2"), None),
    "an A100 whose torch has an attribute corex": (replace(A100, torch_corex=True), None),
    "an A100 beside a torch tagged corex": (replace(A100, torch_versions=TAG), None),
    "a TG-V200 without torch.corex": (replace(TG_V200, torch_corex=False), "+corex tag"),
    "a TG-V200 whose torch hides its tag": (replace(TG_V200, torch_corex=False, torch_versions=("2.7.1",)), "device name"),
    "a tag in the distribution alone": (replace(BI_V150, torch_corex=False, name="GPU"), "+corex tag"),
    "only the variables, and CoreX's CUDA": (
        Signals("cuda", "unnamed", (7, 1), corex_variables=COREX_SET, cuda="10.2"), "environment",
    ),
    "only the variables, and another CUDA": (Signals("cuda", "unnamed", (7, 1), corex_variables=COREX_SET, cuda="12.8"), None),
    "an unnamed device of capability 8.0": (Signals("cuda", "unnamed", (8, 0), cuda="12.8"), None),
    "a Tesla V100, of a BI-V100's capability": (Signals("cuda", "Tesla V100-SXM2-32GB", (7, 0), cuda="12.6"), None),
    "an AMD device": (Signals("cuda", "", (9, 4), hip="7.0", torch_versions=TAG), None),
    "a CPU": (Signals("cpu", "Iluvatar BI-V150", torch_corex=True), None),
    "switched off": (replace(BI_V150, override="off"), None),
    "switched on": (replace(A100, override="on"), "override"),
    "an architecture by hand": (replace(A100, override="ivcore20"), "override"),
    "an override that is nonsense": (replace(A100, override="maybe"), None),
}  # fmt: skip


@pytest.mark.parametrize(("signals", "rule"), CASES.values(), ids=CASES)
def test_recognise(signals, rule):
    found = recognise(signals)
    assert (found.rule if found else None) == rule


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Iluvatar BI-V100", "ivcore10"), ("BI-V150", "ivcore11"), ("BI-V150 OAM", "ivcore11"), ("BI-V150S", "ivcore11"),
        ("MR-V100", "ivcore11"), ("MR-V50", "ivcore11"), ("TG-V200 OAM", "ivcore20"), ("TG-V300X-72-A2", "ivcore30"),
    ],
)  # fmt: skip
def test_published_names_tell_the_architecture(name, arch):
    assert arch_named(name) == arch


@pytest.mark.parametrize("name", ["Tesla V100-SXM2", "NVIDIA A100", "BI-V1500", "XBI-V150", "AMD BI-V150", "", "V100"])
def test_other_names_are_no_part(name):
    assert arch_named(name) is None


def test_the_name_tells_the_architecture_before_the_capability_does():
    assert characterise(TG_V200, Evidence("torch.corex"), graph_capture=None).arch == "ivcore20"
    assert characterise(replace(TG_V200, name="TG-V300X-72-A2"), Evidence("torch.corex"), graph_capture=None).arch == "ivcore30"
    assert characterise(replace(TG_V200, name="GPU"), Evidence("torch.corex"), graph_capture=None).arch == "ivcore20"
    assert characterise(replace(TG_V200, name="GPU", capability=(9, 9)), Evidence("x"), graph_capture=None).arch == "ivcore"
    assert characterise(TG_V200, Evidence("override", "ivcore11"), graph_capture=None).arch == "ivcore11"


def test_what_all_parts_share_and_what_torch_leaves_out():
    facts = characterise(BI_V150, Evidence("torch.corex"), graph_capture=False)
    assert (facts.vendor, facts.warp_size, facts.has_fp8_conversion, facts.has_fp64) == ("iluvatar", 64, False, False)
    assert facts.shared_memory == 128 << 10 and facts.graph_capture is False and facts.num_sms == 16
    assert characterise(replace(BI_V150, shared_memory=99), Evidence("x"), graph_capture=None).shared_memory == 99


class FakeProperties(SimpleNamespace):
    pass


@pytest.fixture
def corex_torch(monkeypatch):
    """A torch that speaks of a BI-V150, as far as the detector asks."""
    properties = FakeProperties(name="Iluvatar BI-V150", major=7, minor=1, multi_processor_count=16, total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "corex", True, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "10.2")
    monkeypatch.setattr(detector, "can_capture", lambda device: False)
    monkeypatch.setattr(detector, "computes_bf16", lambda device: False)
    for name in ("COREX_HOME", "COREX_PATH", "COREX_VERSION", "MLA_PORTABLE_ILUVATAR"):
        monkeypatch.delenv(name, raising=False)
    return properties


def test_the_detector_reads_what_torch_says(corex_torch):
    facts = detector.detect(torch.device("cuda", 0))
    assert (facts.vendor, facts.arch, facts.num_sms, facts.memory_bytes) == ("iluvatar", "ivcore11", 16, 16 << 30)
    assert facts.graph_capture is False and facts.has_bf16 is False and dict(facts.libraries)["torch"]


def test_the_detector_leaves_other_devices_alone(corex_torch):
    assert detector.detect(torch.device("cpu")) is None
    corex_torch.name = "NVIDIA H200"
    assert detector.detect(torch.device("cuda", 0)) is None


def test_the_environment_can_switch_it_off(corex_torch, monkeypatch):
    monkeypatch.setenv("MLA_PORTABLE_ILUVATAR", "0")
    assert detector.detect(torch.device("cuda", 0)) is None


def test_the_registry_asks_it_before_it_believes_torch(corex_torch, monkeypatch):
    import mla_portable_iluvatar
    from mla_portable.choose import Registry

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    machine = Registry(plugins=[("iluvatar", mla_portable_iluvatar)], environ={})
    assert machine.facts("cuda:0").arch == "ivcore11"
    assert not [report for report in machine.plugin_reports if not report.ok]


@pytest.mark.parametrize("lacks_newer_name", [False, True], ids=["torch 2.5 and later", "torch 2.1, as with CoreX 4.2"])
def test_a_capture_that_the_driver_refuses_is_a_fact(monkeypatch, lacks_newer_name):
    def refuse(*args):
        raise RuntimeError("CUDA error: operation not supported (ixErrorNotSupported)")

    if lacks_newer_name:
        monkeypatch.delattr(torch, "OutOfMemoryError")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", refuse)
    assert detector.can_capture(torch.device("cuda", 0)) is False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert detector.can_capture(torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("product", "found"),
    [
        (lambda a, b: torch.matmul(a, b), True),
        (lambda a, b: torch.zeros_like(a), False),
        (RuntimeError("BI-V150 has no bfloat16"), False),
        (NotImplementedError("no kernel"), False),
        (torch.cuda.OutOfMemoryError("busy"), True),
    ],
    ids=["right", "zeros", "refused", "missing", "out of memory"],
)
def test_bfloat16_is_what_the_device_computes(monkeypatch, product, found):
    def multiply(a, b):
        if a.dtype is not torch.bfloat16:
            return torch.matmul(a, b)
        if isinstance(product, Exception):
            raise product
        return product(a, b)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply)
    assert detector.computes_bf16(torch.device("cpu")) is found
