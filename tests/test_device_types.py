# SPDX-License-Identifier: Apache-2.0
"""Portable Triton kernels on device types that Triton's own drivers are not for. The devices are simulated by their facts."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from machines import CPU, H200, MI300X

from mla_portable.choose import Registry
from mla_portable.choose.policy import Policy
from mla_portable.choose.select import decide
from mla_portable.contracts import DeviceFacts, Implementation, Primitive, Reason, Request, Support
from mla_portable.layouts import CORE_LAYOUTS, INDEX_BF16, INDEX_FP8, layout_names
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT, MERGE_STATES, SPARSE_DECODE
from mla_portable_triton import support

TYPES = ("npu", "xpu", "musa", "mlu")
LAYOUTS_OF = {"kv": tuple(name for name in layout_names() if name in CORE_LAYOUTS), "index": (INDEX_BF16.name, INDEX_FP8.name)}
PLUGINS = [("reference", "mla_portable.reference"), ("triton", "mla_portable_triton")]


def simulated(device_type: str, **known: object) -> DeviceFacts:
    """What the core says of a device whose module of torch reports nothing."""
    return DeviceFacts(vendor=device_type, name=device_type, arch=device_type, device_type=device_type, **known)


def chosen(facts: DeviceFacts, primitive: Primitive, **shapes: object) -> str | None:
    registry = Registry(plugins=PLUGINS, facts={facts.device_type: facts}, environ={})
    return registry.decide(Request(primitive, facts, **shapes)).chosen


@pytest.mark.parametrize("device_type", TYPES)
def test_triton_is_offered_for_every_primitive_and_layout(device_type: str):
    facts = simulated(device_type)
    found = {str(primitive): chosen(facts, primitive) for primitive in Primitive.all()}
    assert len(found) == 18 and set(found.values()) == {"triton.portable"}, found
    for primitive in (each for each in Primitive.all() if each.cache):
        layouts = LAYOUTS_OF[primitive.cache]
        served = {name: chosen(facts, primitive, kv_layout=name) for name in layouts}
        assert set(served.values()) == {"triton.portable"}, (primitive, served)


def test_what_a_device_lacks_is_still_refused():
    """No kernel is refused for a missing conversion of e4m3: it decodes the bits."""
    assert chosen(simulated("npu", has_fp8_conversion=False), SPARSE_DECODE, kv_layout="fp8_ds_mla") == "triton.portable"
    without = {str(each) for each in Primitive.all() if chosen(simulated("npu", has_bf16=False), each) == "triton.portable"}
    assert without == {"convert_indices", "pack_selection", "quantize_per_tensor", "topk_select"}
    small = simulated("npu", shared_memory=32 << 10)
    assert chosen(small, SPARSE_DECODE) == "reference.torch" and chosen(small, CONVERT_INDICES) == "triton.portable"


@pytest.mark.parametrize(("size", "refused"), [(0, False), (1, True), (49_151, True), (49_152, False)])
@pytest.mark.parametrize("facts", [H200, MI300X, CPU, simulated("npu")], ids=str)
def test_shared_memory_refuses_only_where_it_is_known(facts: DeviceFacts, size: int, refused: bool):
    """torch says it of every "cuda" device; a profile of one that does not is no forecast of what needs some."""
    needs = Support(source="a test", device_types=None, min_shared_memory=49_152)
    refused = refused or (size == 0 and facts.device_type == "cuda")
    found = [reason.subject for reason in needs.device_reasons(replace(facts, shared_memory=size))]
    assert found == (["shared memory"] if refused else [])


class Drivers:
    """triton.runtime.driver; each access of `active` makes the driver."""

    def __init__(self, make):
        self._make = make

    @property
    def active(self):
        return self._make()


def driver_for(device_type: str):
    return SimpleNamespace(get_active_torch_device=lambda: SimpleNamespace(type=device_type))


def no_driver():
    raise RuntimeError("0 active drivers ([]). There should only be one.")


def lost():
    raise RuntimeError("NPU error: lost")


def with_drivers(monkeypatch: pytest.MonkeyPatch, drivers: object, version: str = "3.2.0") -> None:
    """A Triton without its interpreter on, whose drivers are these."""
    fake, runtime = ModuleType("triton"), ModuleType("triton.runtime")
    fake.__version__, runtime.driver = version, drivers
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.parametrize("check", [support.check, support.check_triton_3])
@pytest.mark.parametrize("device_type", TYPES)
def test_the_check_asks_triton_for_its_driver(check, device_type: str, monkeypatch: pytest.MonkeyPatch):
    facts = simulated(device_type)
    with_drivers(monkeypatch, Drivers(lambda: driver_for(device_type)))
    assert list(check(facts)) == []
    with_drivers(monkeypatch, Drivers(lambda: object()))  # which does not say: the probe decides
    assert list(check(facts)) == []

    remedy = f"install the Triton that the vendor of {device_type} devices ships, in place of this one"
    with_drivers(monkeypatch, Drivers(lambda: driver_for("cuda")))
    says = "triton 3.2.0 drives device type cuda"
    assert list(check(facts)) == [Reason("device type", device_type, says, remedy)]
    with_drivers(monkeypatch, Drivers(no_driver))
    says = "triton 3.2.0 has no driver for it: 0 active drivers ([]). There should only be one."
    assert list(check(facts)) == [Reason("device type", device_type, says, remedy)]


def test_a_triton_that_drives_cuda_alone_says_so(monkeypatch: pytest.MonkeyPatch):
    with_drivers(monkeypatch, SimpleNamespace(), "2.1.0")
    (reason,) = support.check(simulated("npu"))
    assert reason.limit == "triton 2.1.0 has drivers for device type cuda alone; 3.0 and newer take others"
    assert list(support.check(H200)) == []


@pytest.mark.parametrize("version", [None, "2.0.0", "2.1.0"])
def test_plain_torch_serves_another_device_type_without_a_triton_that_runs(
    version: str | None, monkeypatch: pytest.MonkeyPatch
):
    """2.1 is too old for some primitives only, which `check_triton_3` says; torch's "cuda" is to be repaired."""
    npu = simulated("npu")
    with_drivers(monkeypatch, Drivers(lambda: driver_for("npu")), version or "3.2.0")
    if version is None:
        monkeypatch.setitem(sys.modules, "triton", None)
    for check in (support.check_triton_3,) if version == "2.1.0" else (support.check, support.check_triton_3):
        (reason,) = check(npu)
        assert (reason.subject, reason.given) == ("device type", "npu") and "or newer" in reason.limit
        assert reason.remedy == "install the Triton that the vendor of npu devices ships"
        assert {each.subject for facts in (H200, CPU) for each in check(facts)} == {"triton"}
        assert decided({"portable.v1": (reason,)}, facts=npu).chosen == "reference.torch"


def test_a_fault_of_the_device_is_no_missing_driver(monkeypatch: pytest.MonkeyPatch):
    with_drivers(monkeypatch, Drivers(lost))
    with pytest.raises(RuntimeError, match="NPU error: lost"):
        list(support.check(simulated("npu")))


def offered(name: str, cost: float, **limits: object) -> Implementation:
    declared = Support(source="a test", **{"device_types": None, **limits})
    return Implementation(name, MERGE_STATES, declared, bind=lambda request: None, preference=cost)


NPU = simulated("npu")


def decided(found: dict[str, tuple[Reason, ...]], *, facts: DeviceFacts = NPU, **limits: object):
    candidates = [offered("portable.v1", 50, **limits), offered("reference.torch", 1000)]
    return decide(
        Request(MERGE_STATES, facts), candidates, Policy(), check=lambda each: found.get(each.name, ()), probe=lambda each: ()
    )


def test_plain_torch_serves_where_checks_say_that_nothing_else_runs_on_the_device_type():
    no_driver = Reason("device type", "npu", "triton 3.2.0 has no driver for it", "install another one")
    decision = decided({"portable.v1": (no_driver,)})
    assert decision.chosen == "reference.torch"
    assert decision.was_fallback and [verdict.reasons for verdict in decision.causes] == [(no_driver,)]
    for facts in (H200, simulated("npu")):  # what fits the device type and does not work is to be repaired
        decision = decided({"portable.v1": (Reason("triton", "1.0", "needs 2.1 or newer"),)}, facts=facts)
        assert decision.chosen is None and "plain torch serves an accelerator only" in decision.failure_text()
    assert decided({}).chosen == "portable.v1"


@pytest.mark.parametrize(
    ("primitive", "layout"), [(CACHE_WRITE, "ascend.split"), (CACHE_WRITE, "ascend.c8"), (GATHER_UPCONVERT, "ascend.split")]
)
@pytest.mark.parametrize("facts", [NPU, H200], ids=str)
def test_plain_torch_serves_a_cache_layout_that_nothing_else_reads(facts: DeviceFacts, primitive: Primitive, layout: str):
    pytest.importorskip("mla_portable_ascend")  # its import adds the layouts
    plugins = [*PLUGINS, ("ascend", "mla_portable_ascend")]
    registry = Registry(plugins=plugins, facts={facts.device_type: facts}, environ={}, probe=False)
    assert registry.decide(Request(primitive, facts, kv_layout=layout)).chosen == "reference.torch"
    served = registry.decide(Request(primitive, facts, kv_layout="bf16")).chosen
    assert served is not None and served != "reference.torch"
