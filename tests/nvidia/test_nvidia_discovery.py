# SPDX-License-Identifier: Apache-2.0
"""Which provider serves, why not the others, and what the plugin costs where there is none."""

from __future__ import annotations

import math
import subprocess
import sys
import types

import pytest
import torch
from flashmla_standins import Library, installed, modules, operators, schedule_object_module
from machines import MACHINES
from simulated_gpu import FACTS, registry

import mla_portable_nvidia
from mla_portable import flash_mla
from mla_portable.choose import Registry
from mla_portable.contracts import MLAPortableError, Request, UnsupportedRequest
from mla_portable.judge.conformance import cases_for
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_nvidia.flashmla import discovery
from mla_portable_nvidia.flashmla.attention import NOPE_NAME, check_kernel
from mla_portable_nvidia.flashmla.discovery import LIBRARY_VARIABLE, find_kernel
from mla_portable_nvidia.flashmla.support import TRUNCATION_VARIABLE
from mla_portable_nvidia.machine import PROVIDER_VARIABLE

SM90 = FACTS["sm90"]
DECODE, PREFILL = SPARSE_DECODE, SPARSE_PREFILL


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.delenv(PROVIDER_VARIABLE, raising=False)
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    discovery.forget()
    yield
    discovery.forget()


def decode_request(**changes) -> Request:
    request = Request(
        DECODE, SM90, kv_layout="fp8_ds_mla", num_heads=16, topk=2048, block_size=64, query_len=1, scale_format="pow2", lse=True
    )
    return request.but(**changes)


def nvidia_verdicts(decision) -> dict[str, str]:
    return {
        v.implementation: "; ".join(map(str, v.reasons)) for v in decision.verdicts if v.implementation.startswith("nvidia")
    }


# ---------------------------------------------------------------------------------------------------- the order


def test_the_first_provider_in_order_serves_and_a_forced_one_is_asked_alone():
    with installed("vllm 0.33"), installed("sgl_kernel 0.4.5"), installed("flash_mla 2026"):
        assert find_kernel(DECODE, SM90, {}).provider == "flash_mla"
        for name in ("vllm", "sgl_kernel"):
            found = find_kernel(PREFILL, SM90, {PROVIDER_VARIABLE: name})
            assert found.provider == name and found.reasons == ()
        found = find_kernel(DECODE, SM90, {PROVIDER_VARIABLE: "sgl_flash_mla"})
        assert found.provider is None
        assert [reason.subject for reason in found.reasons] == ["provider sgl_flash_mla"]
        assert PROVIDER_VARIABLE in found.reasons[0].remedy


@pytest.mark.parametrize("primitive", [DECODE, PREFILL])
def test_this_projects_own_flash_mla_is_no_provider(primitive):
    """It would be asked for the kernels that it asks for."""
    flash_mla.install()
    try:
        found = find_kernel(primitive, SM90, {PROVIDER_VARIABLE: "flash_mla"})
        assert found.provider is None and "own stand-in for FlashMLA" in str(found.reasons[0])
    finally:
        flash_mla.uninstall()


def test_the_environment_forces_a_provider_for_the_whole_plugin(monkeypatch):
    with installed("vllm 0.33") as vllm, installed("flash_mla 2026") as upstream:
        monkeypatch.setenv(PROVIDER_VARIABLE, "vllm")
        registry().bind(decode_request(), backend="nvidia")
        assert vllm.calls and not upstream.calls


def test_a_provider_of_an_unknown_name_is_an_error_that_lists_the_names():
    found = find_kernel(DECODE, SM90, {PROVIDER_VARIABLE: "flashmla"})
    assert found.provider is None
    assert "flashmla" in str(found.reasons[0]) and "sgl_kernel" in str(found.reasons[0])


def test_a_provider_without_code_for_the_device_gives_way_to_the_next():
    """As the releases of FlashMLA do that dropped Hopper."""
    with installed("vllm 0.33"), installed("flash_mla 2026", prefill_heads=()) as library:
        library.decode = lambda *args: library.need(False, "SM90 is not supported")
        for primitive in (DECODE, PREFILL):
            found = find_kernel(primitive, SM90, {})
            assert found.provider == "vllm"
            assert [reason.subject for reason in found.reasons] == ["provider flash_mla"]
        assert "SM90 is not supported" in str(find_kernel(DECODE, SM90, {}).reasons[0])


def test_a_provider_that_computes_something_else_is_not_used():
    library = Library()
    real = library.decode

    def decode(*args, **options):
        out, lse, *plan = real(*args, **options)
        return out, lse + 1, *plan

    library.decode = decode
    with modules(flash_mla=schedule_object_module("flash_mla", library)):
        found = find_kernel(DECODE, SM90, {})
        assert found.provider is None
        assert "expected ln 512 or log2 512" in str(found.reasons[0])


def test_a_device_fault_is_raised_and_not_taken_for_a_reason():
    with installed("flash_mla 2026") as library:

        def decode(*args, **options):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        library.decode = decode
        with pytest.raises(RuntimeError, match="illegal memory access"):
            find_kernel(DECODE, SM90, {})


def test_conventions_are_told_by_what_is_there():
    expected = {
        "flash_mla 2026": ("ScheduleObjectDecode", False, True, False),
        "flash_mla with out": ("ScheduleObjectDecode", True, True, False),
        "flash_mla 2025": ("TensorsDecode", False, False, True),
        "vllm 0.24": ("OperatorDecode", False, True, False),
        "vllm 0.33": ("OperatorDecode", True, True, False),
        "sgl_kernel 0.4.5": ("OperatorDecode", False, True, True),
    }
    for generation, (adapter, takes_out, takes_sink, prefill_base_2) in expected.items():
        with installed(generation):
            decode, prefill = find_kernel(DECODE, SM90, {}), find_kernel(PREFILL, SM90, {})
            told = (type(decode.kernel).__name__, decode.kernel.takes_out, decode.kernel.takes_sink, prefill.traits.lse_base_2)
            assert told == (adapter, takes_out, takes_sink, prefill_base_2), generation
            assert decode.traits.lse_base_2 is False


def test_an_operator_with_an_argument_of_unknown_meaning_is_refused():
    with operators("_flashmla_C", Library(), decode=", Tensor page_rotation"):
        found = find_kernel(DECODE, SM90, {PROVIDER_VARIABLE: "vllm"})
        assert found.provider is None and "page_rotation" in str(found.reasons[0])
    with operators("_flashmla_C", Library(), decode=", Tensor? out_=None, bool fast_path=False"):
        discovery.forget()
        assert find_kernel(DECODE, SM90, {PROVIDER_VARIABLE: "vllm"}).provider == "vllm"


# ------------------------------------------------------------------------------------------------ a library by path


def test_a_library_by_path_is_loaded_and_asked_first(tmp_path, monkeypatch):
    path = tmp_path / "_flashmla_C.abi3.so"
    path.write_bytes(b"not an ELF file")
    environ = {LIBRARY_VARIABLE: str(path)}
    reason = str(find_kernel(DECODE, SM90, environ).reasons[0])
    assert str(path) in reason and "does not load" in reason
    missing = find_kernel(DECODE, SM90, {LIBRARY_VARIABLE: str(tmp_path / "nothing.so")})
    assert "is no file" in str(missing.reasons[0])
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    with installed("vllm 0.26"), installed("flash_mla 2026"):
        assert find_kernel(DECODE, SM90, environ).provider == "library"
        assert find_kernel(DECODE, SM90, {}).provider == "flash_mla"
    assert loaded == [path]


def test_a_package_library_is_loaded_without_importing_the_package(tmp_path, monkeypatch):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "_flashmla_C.abi3.so").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.MonkeyPatch.context() as patch:
        stack = []

        def load(path):
            stack.append(operators("_flashmla_C", Library()))
            stack[-1].__enter__()
            stack.append(path)

        patch.setattr(torch.ops, "load_library", load)
        try:
            assert find_kernel(DECODE, SM90, {PROVIDER_VARIABLE: "vllm"}).provider == "vllm"
            assert stack[1] == package / "_flashmla_C.abi3.so"
        finally:
            if stack:
                stack[0].__exit__(None, None, None)
        assert "vllm" not in sys.modules


# ----------------------------------------------------------------------------------------------- what is refused, and why


def test_without_a_provider_every_one_is_named_with_its_remedy():
    decision = registry().decide(decode_request(), thorough=True)
    assert decision.chosen == "reference.torch"
    verdict = next(v for v in decision.verdicts if v.implementation == "nvidia.flashmla")
    assert [reason.subject for reason in verdict.reasons] == [
        "provider flash_mla", "provider vllm", "provider sgl_kernel", "provider sgl_flash_mla",
    ]  # fmt: skip
    assert all(reason.remedy.startswith("install") for reason in verdict.reasons)
    with pytest.raises(UnsupportedRequest, match=r"remedy    .*install vLLM"):
        registry().bind(decode_request(), backend="nvidia")
    with pytest.raises(MLAPortableError, match="provider flash_mla"):
        mla_portable_nvidia.flashmla.attention.bind_sparse_decode(decode_request())


def a_module(*members: str) -> types.ModuleType:
    module = types.ModuleType("flash_mla")
    for name in members:
        setattr(module, name, lambda *args: None)
    return module


UNKNOWN = {
    "flash_mla": ("neither FlashMLASchedMeta nor get_mla_metadata", "October 2025 to August 2026"),
    "vllm": ("wants an argument first_token, whose meaning is not known here", "install vLLM 0.24 to 0.33"),
    "sgl_kernel": ("wants an argument first_token, whose meaning is not known here", "install sglang-kernel 0.4.3 to 0.4.5"),
    "sgl_flash_mla": ("wants an argument first_token, whose meaning is not known here", "install sgl-flash-mla 1.0"),
}


@pytest.mark.parametrize("provider", UNKNOWN)
def test_an_unknown_convention_is_refused_with_the_versions_that_are_known(provider):
    """A generation before those that are known, and one after them."""
    why, versions = UNKNOWN[provider]
    namespace = {"vllm": "_flashmla_C", "sgl_kernel": "sgl_kernel", "sgl_flash_mla": "flash_mla_legacy"}.get(provider)
    unknown = (
        modules(flash_mla=a_module("flash_mla_with_kvcache", "flash_mla_sparse_fwd"))
        if namespace is None
        else operators(namespace, Library(), decode=", int first_token")
    )
    with unknown:
        (reason,) = find_kernel(DECODE, SM90, {PROVIDER_VARIABLE: provider}).reasons
    assert why in str(reason) and versions in reason.remedy


def test_a_machine_without_triton_is_told_so(monkeypatch):
    monkeypatch.setattr("mla_portable_common.libraries.find_spec", lambda name: None)
    with installed("flash_mla 2025"):
        (reason,) = check_kernel(SPARSE_DECODE, FACTS["sm90"])
        monkeypatch.undo()
        assert not check_kernel(SPARSE_DECODE, FACTS["sm90"])
    assert "triton is not installed" in str(reason)


def test_a_request_gets_all_reasons_at_once():
    with installed("vllm 0.33"):
        asked = decode_request(num_heads=192, kv_layout="bf16", scale_format=None)
        reasons = nvidia_verdicts(registry().decide(asked, thorough=True))
        assert "num_heads 192 (supports padded to 64, 128)" in reasons["nvidia.flashmla"]
        assert "kv_layout bf16 (supports fp8_ds_mla)" in reasons["nvidia.flashmla"]
        assert "arch sm90 (supports sm100)" in reasons["nvidia.flashmla_sm100"]
        prefill = Request(PREFILL, SM90, kv_layout="fp8_ds_mla", num_heads=16, topk=100, lse=True)
        reasons = nvidia_verdicts(registry().decide(prefill, thorough=True))
        assert "kv_layout fp8_ds_mla (supports bf16)" in reasons["nvidia.flashmla"]
        assert "topk" not in reasons["nvidia.flashmla"]


SERVED = {
    "H200": ("nvidia.native", "nvidia.flashmla", "nvidia.native_wide"),
    "B200": ("nvidia.flashmla_sm100", "nvidia.native_sm80"),
    **dict.fromkeys(("A100", "RTX 4090", "RTX 5090"), ("nvidia.native_sm80",)),
}
"""Who can serve 16 heads on an FP8 cache, by preference; elsewhere nobody of this plugin."""


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_is_served_or_told_why_not(name):
    facts = MACHINES[name]
    machine = Registry(
        plugins=[("reference", "mla_portable.reference"), ("nvidia", mla_portable_nvidia)],
        facts={facts.device_type: facts},
        environ={},
    )
    decision = machine.decide(decode_request(device=facts), thorough=True)
    served = SERVED.get(name, ())
    assert decision.chosen == (*served, "reference.torch")[0]
    for implementation, reasons in nvidia_verdicts(decision).items():
        assert (reasons == "") == (implementation in served)
        other_layout = reasons.startswith(tuple(f"kv_layout fp8_ds_mla (supports {other}" for other in ("bf16", "fp8_v4")))
        assert reasons == "" or other_layout or f"arch {facts.arch} (supports sm" in reasons


def test_blackwell_refuses_scales_that_it_would_cut_down_unless_allowed():
    with installed("vllm 0.33", arch="sm100", num_sms=148):
        request = decode_request(device=FACTS["sm100"], scale_format="amax")
        refused = nvidia_verdicts(registry("sm100").decide(request, thorough=True))["nvidia.flashmla_sm100"]
        assert refused == "scale_format amax (supports pow2)"
        unknown = nvidia_verdicts(registry("sm100").decide(request.but(scale_format=None), thorough=True))
        assert "unknown, read as amax" in unknown["nvidia.flashmla_sm100"]
        allowing = registry("sm100", {TRUNCATION_VARIABLE: "allow"})
        for scale_format in ("amax", None, "pow2"):
            assert allowing.select(request.but(scale_format=scale_format))[0].name == "nvidia.flashmla_sm100"


def test_what_is_allowed_is_not_claimed():
    (implementation,) = [
        i
        for i in registry("sm100", {TRUNCATION_VARIABLE: "allow"}).implementations(DECODE)
        if i.name == "nvidia.flashmla_sm100"
    ]
    assert implementation.support.scale_formats == ("pow2",)
    cases = cases_for(implementation, FACTS["sm100"], "quick")
    assert cases and {case.params.scale_format for case in cases} == {"pow2"}
    refused = implementation.support.reasons(decode_request(device=FACTS["sm100"], num_heads=200, scale_format="amax"))
    assert [reason.subject for reason in refused] == ["num_heads"]


# ------------------------------------------------------------------------------------------------------- it costs nothing


def test_importing_and_registering_load_nothing_and_touch_no_device():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from mla_portable.choose import Registry\n"
        "import mla_portable_nvidia\n"
        "r = Registry(plugins=[('nvidia', mla_portable_nvidia)], environ={})\n"
        "assert all(report.ok for report in r.plugin_reports) and r.implementations()\n"
        "print(sorted(m for m in ('triton', 'vllm', 'flash_mla', 'sgl_kernel') if m in set(sys.modules) - before))\n"
        "print(torch.cuda.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["[]", "False"], done.stderr


def test_what_ships_claims_gpus_of_nvidia_alone():
    machine = Registry(plugins=[("nvidia", mla_portable_nvidia)], environ={})
    for implementation in machine.implementations():
        support = implementation.support
        assert support.device_types == ("cuda",) and support.vendors == ("nvidia",)
        assert support.source
        if implementation.primitive in (DECODE, PREFILL):
            other = implementation.name == "nvidia.native_sm80"
            both = implementation.name == NOPE_NAME  # a library has it for either, or for none
            assert both or support.archs in (("sm90",), ("sm100",)) or (other and "sm90" not in (support.archs or ("sm90",)))
        assert math.isfinite(implementation.preference)
