# SPDX-License-Identifier: Apache-2.0
"""The detector, and finding the vendor's operations: on invented devices, and on torch's privateuse1 renamed to "npu"."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from ascend_machine import A2, registry
from ascend_ops import SCHEMAS, Operations, torch_npu, vllm_ascend
from torch.utils import backend_registration

from mla_portable.accelerator import is_device_error
from mla_portable.contracts import Request
from mla_portable.primitives import SPARSE_PREFILL
from mla_portable_ascend import PROVIDERS
from mla_portable_ascend.detector import arch_of, detect, is_override

HERE = Path(__file__).parent
TESTS = HERE.parents[2] / "tests"


@pytest.mark.parametrize(
    ("name", "soc", "arch"),
    [
        *((name, None, "ascend910b") for name in ("Ascend910B1", "Ascend910B2C", "Ascend910B3", "Ascend910B4-1")),
        *((name, None, "ascend910_93") for name in ("Ascend910_9391", "Ascend910_9362")),
        ("Ascend950PR_9589", None, "ascend950"),
        ("", 222, "ascend910b"),
        ("a new name", 255, "ascend910_93"),
        ("a new name", 260, "ascend950"),
        ("Ascend910B", 104, "Ascend910B"),
        ("Ascend910ProA", 101, "Ascend910ProA"),
        ("Ascend310P3", 202, "Ascend310P3"),
        ("", None, "npu"),
    ],
)
def test_the_architecture_follows_from_the_soc(name, soc, arch):
    assert arch_of(name, soc) == arch


def npu(**functions) -> ModuleType:
    module = ModuleType("torch.npu")
    module.current_device = lambda: 1
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def test_facts_are_what_the_runtime_reports(monkeypatch):
    properties = SimpleNamespace(cube_core_num=24, total_memory=64 << 30)
    module = npu(
        get_device_name=lambda index: f"Ascend910B{index}",
        get_device_properties=lambda index: properties,
        get_soc_version=lambda: 222,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.delenv("MLA_PORTABLE_ASCEND", raising=False)
    facts = detect(SimpleNamespace(type="npu", index=3))
    assert (facts.vendor, facts.name, facts.arch, facts.device_type) == ("ascend", "Ascend910B3", "ascend910b", "npu")
    assert (facts.num_sms, facts.memory_bytes, facts.has_bf16, facts.has_fp64) == (24, 64 << 30, True, False)
    assert detect(SimpleNamespace(type="npu", index=None)).name == "Ascend910B1"
    assert detect(torch.device("cpu")) is None and detect(torch.device("cuda", 0)) is None


def test_an_unknown_soc_is_served_where_the_variable_names_its_family(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: npu(get_device_name=lambda index: "Ascend990"))
    where = SimpleNamespace(type="npu", index=0)
    monkeypatch.delenv("MLA_PORTABLE_ASCEND", raising=False)
    unknown = detect(where)
    assert (unknown.arch, unknown.has_bf16) == ("Ascend990", False)
    assert all("arch" in {r.subject for r in each.implementation().support.device_reasons(unknown)} for each in PROVIDERS)
    monkeypatch.setenv("MLA_PORTABLE_ASCEND", "ascend910_93")
    assert detect(where).arch == "ascend910_93"
    monkeypatch.setenv("MLA_PORTABLE_ASCEND", "off")
    assert detect(where) is None
    assert not is_override("910b") and is_override("off")


def reasons(machine, name: str = "ascend.sfa_copied"):
    request = Request(SPARSE_PREFILL, A2, kv_layout="bf16", num_heads=4, topk=64)
    decision = machine.decide(request, backend=name, thorough=True)
    return [reason for verdict in decision.verdicts if verdict.implementation == name for reason in verdict.reasons]


def test_a_library_that_is_missing_is_named():
    (reason,) = reasons(registry())
    assert (reason.subject, reason.given) == ("library", "vllm_ascend") and "vllm-ascend" in reason.remedy
    (reason,) = reasons(registry(), "ascend.sfa_copied_torch_npu")
    assert (reason.subject, reason.given) == ("library", "torch_npu")


def test_an_operation_that_is_missing_is_named():
    with torch_npu(Operations(), names=()):
        (reason,) = reasons(registry(), "ascend.sfa_copied_torch_npu")
    assert (reason.subject, reason.given) == ("operation", "torch_npu.npu_sparse_flash_attention")


def test_an_operator_of_an_older_convention_is_refused_before_it_is_called(monkeypatch):
    name = "npu_sparse_flash_attention"
    older = SCHEMAS[name].replace("bool return_softmax_lse=False", "int inner_precise=0")
    monkeypatch.setitem(SCHEMAS, name, older)
    found = Operations()
    with vllm_ascend(found):
        (reason,) = reasons(registry())
    assert reason.subject == "calling convention" and "return_softmax_lse" in reason.limit and not found.calls


def test_vllm_ascend_registers_its_operators_when_it_is_asked(monkeypatch):
    found, opened = Operations(), []
    library = ModuleType("vllm_ascend.utils")

    def enable_custom_op():
        opened.append(vllm_ascend(found))
        opened[-1].__enter__()

    library.enable_custom_op = enable_custom_op
    monkeypatch.setitem(sys.modules, "vllm_ascend", ModuleType("vllm_ascend"))
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", library)
    try:
        assert reasons(registry()) == [] and len(opened) == 1
    finally:
        for each in opened:
            each.__exit__(None, None, None)


def test_wrong_arguments_are_no_fault_of_the_device_and_a_lost_core_is():
    words = "operator():compiler_depend.ts:88 NPU function error: call aclnnSparseFlashAttention failed, error code is"
    assert not is_device_error(RuntimeError(f"{words} 161002"), "npu")
    assert is_device_error(RuntimeError(f"{words} 507015\n[ERROR] 2026-08-05"), "npu")
    assert is_device_error(RuntimeError("NPU error: lost"), "npu")


def test_nothing_of_the_vendor_is_imported_on_another_machine():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, mla_portable_ascend as a; a.PROVIDERS; print('torch_npu' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "False", done.stderr


LAYER = """
import sys
import numpy as np
import torch
import another_device
from ascend_machine import registry as on_cpu
from ascend_ops import Operations, vllm_ascend
import mla_portable as mp
import mla_portable_ascend
from mla_portable import reference
from mla_portable.choose import Registry
from mla_portable.contracts import Batch
from mla_portable.layouts import LAYOUTS

layout, chosen = sys.argv[1:]
torch.npu.get_device_name = lambda index: "Ascend910B3"
on_npu = Registry(plugins=[("reference", reference), ("ascend", mla_portable_ascend)], environ={})
facts = on_npu.facts("npu")
assert (facts.vendor, facts.arch, facts.device_type) == ("ascend", "ascend910b", "npu"), facts
assert on_npu.default_device() == torch.device("npu:0")
spec = mp.AttentionSpec(num_heads=4, kv_layout=layout, block_size=16, topk=32, softmax_scale=0.1, max_num_tokens=8,
                        max_num_reqs=4, max_model_len=64, graph=False, need_lse=True,
                        scale_format="amax" if LAYOUTS[layout].is_quantized else None)
starts, lengths = np.array([0, 1, 4], dtype=np.int32), np.array([9, 30], dtype=np.int32)
table = torch.tensor([[4, 0], [3, 1]], dtype=torch.int32)
torch.manual_seed(1)
latent, rope = torch.randn(80, 512).bfloat16(), torch.randn(80, 64).bfloat16()
rows = LAYOUTS[layout]
held = [(each.dtype, each.width) for each in rows.tensors] or [(rows.dtype, rows.row_width)]
q, positions = torch.randn(4, 4, 576).bfloat16(), torch.full((4, 32), -1, dtype=torch.int32)
for row, own in enumerate((9, 28, 29, 30)):
    positions[row, 5 : 5 + min(own, 20)] = torch.randperm(own)[:20].to(torch.int32)


def step(device, registry, **options):
    layer = mp.SparseMLAAttention(spec, device=device, registry=registry, **options)
    serving = {str(part.decision.request.primitive): part.decision.chosen for part in layer.route_decision.verdict.parts}
    caches = [torch.zeros(5, 16, width, dtype=dtype).to(device) for dtype, width in held]
    kv = tuple(caches) if rows.tensors else caches[0]
    layer.cache_write(latent.to(device), rope.to(device), kv, torch.arange(80).to(device))
    plan = mp.Planner(layer.planner_config()).plan(Batch(starts, lengths, table.to(device)))
    out, lse = layer.forward(q.to(device), kv, positions.to(device), plan)
    assert out.device.type == lse.device.type == torch.device(device).type
    return serving, out.cpu(), lse.cpu()


found = Operations()
with vllm_ascend(found):
    serving, out, lse = step("npu", on_npu)
    assert serving["sparse_decode"] == chosen and found.calls, serving
    of_cpu, same_out, same_lse = step("cpu", on_cpu())
    assert of_cpu == serving
    assert torch.equal(out, same_out) and torch.equal(lse, same_lse)
    _, want, want_lse = step("cpu", on_cpu(), backend="reference")
torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=2e-2)
torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-2)  # codes are multiplied as bf16
"""


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no backend in Python",
)
@pytest.mark.parametrize(
    ("layout", "chosen"), [("bf16", "ascend.sfa_copied"), ("ascend.split", "ascend.sfa"), ("ascend.c8", "ascend.quant_sfa")]
)
def test_a_layer_on_an_npu_runs_through_the_operations(layout, chosen):
    """Bit for bit as on a CPU that pretends to be the device; in a process of its own, as torch renames privateuse1 once."""
    done = subprocess.run(
        [sys.executable, "-c", LAYER, layout, chosen],
        cwd=TESTS,
        env={
            **os.environ,
            "MLA_TEST_DEVICE_TYPE": "npu",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(HERE), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
