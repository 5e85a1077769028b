# SPDX-License-Identifier: Apache-2.0
"""Kernels that start before the one in front has ended: who lets them, and what their machine code does around the wait.

The rule is stated at `early_start.can_wait`. NVRTC comes with requirements-dev.txt, cuobjdump in Triton's wheel.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
import torch
import torch_reference as reference
from compiled_passes import compile_passes
from fa3_standins import installed as installed_fa3
from flashmla_standins import installed
from kept_images import kept_image, kept_listing
from simulated_gpu import FACTS, registry
from sm90_model import EmulatedSm90
from source_on_cpu import COMPILER
from test_nvidia_native import SCALE, cache, problem

from mla_portable.contracts import Request
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.torch_passes import TorchBoundary
from mla_portable_nvidia import native
from mla_portable_nvidia.fa3.sparse_attention import bind_fa3_decode, bind_fa3_prefill
from mla_portable_nvidia.flashmla import row_parts
from mla_portable_nvidia.flashmla.row_parts import RowParts
from mla_portable_nvidia.native.attention_sm90 import ARCHS
from mla_portable_nvidia.native.build_choice import BUILDS, LARGE, MANY, SMALL
from mla_portable_nvidia.native.kernel_build import compile_build
from mla_portable_nvidia.native.runtime.nvrtc import compile_cubin
from mla_portable_nvidia.native.sparse_decode import Tensors, prepare
from mla_portable_nvidia.native.topk_select import FEW_ROWS, MANY_ROWS
from mla_portable_nvidia.passes import boundary
from mla_portable_nvidia.passes.boundary import Boundary

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(@!?U?P\w+ +)?([A-Z][\w.]*)([^;]*);")
"""Of cuobjdump's listing: address, predicate, operation, operands."""
MEMORY = re.compile(r"(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG|UBLK\w+|UTMA\w+)(\.|$)")
"""Operations that may be on global memory."""


def faults(code: str) -> list[str]:
    """What of a kernel's machine code breaks the rule of an early start."""
    listed = [(int(at, 16), bool(when), name, operands) for at, when, name, operands in INSTRUCTION.findall(code)]
    waits = [(at, when) for at, when, name, _ in listed if name.startswith("ACQBULK")]
    if len(waits) != 1 or waits[0][1]:
        return [f"waits {len(waits)} times, {sum(when for _, when in waits)} of them not in all threads"]
    wait, found = waits[0][0], []
    for at, _, name, operands in listed:
        if at < wait and MEMORY.match(name):
            found.append(f"{name} at {at:#x}, before the wait at {wait:#x}")
        if at < wait and (name.startswith(("CALL", "JMP", "BRX", "EXIT", "RET"))):
            found.append(f"{name} at {at:#x} may pass by the wait")
        if at < wait and name.startswith("BRA") and any(int(to, 16) > wait for to in re.findall(r"0x[0-9a-f]+", operands)):
            found.append(f"{name} at {at:#x} passes by the wait")
        if ".CONSTANT" in name:
            found.append(f"{name} at {at:#x} reads what changes as if it were constant")
    return found


SOURCE = files(native).joinpath("topk_select.cu").read_text(encoding="utf-8")
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("build", [FEW_ROWS, MANY_ROWS], ids=lambda build: build.label)
def test_topk_select_reads_nothing_before_it_waits_and_nothing_as_constant(build, arch):
    assert faults(kept_listing(kept_image(build, arch))) == []


@pytest.mark.parametrize(
    ("correct", "broken", "fault"),
    [
        ("own[32 * j]", "__ldg(own + 32 * j)", "as if it were constant"),
        ("*reinterpret_cast<const float4*>(aligned)", "__ldg(reinterpret_cast<const float4*>(aligned))", "as if it were"),
        (WAIT, "", "waits 0 times"),
        (WAIT, f"if (threadIdx.x == 0) {WAIT}", "before the wait|passes by the wait|not in all threads"),
        (WAIT, f"const int early = *ends; {WAIT} if (early < 0) return;", "before the wait"),
    ],
    ids=["scores", "sample", "no wait", "one thread", "bounds"],
)
def test_a_source_that_breaks_the_rule_is_found(correct, broken, fault):
    assert correct in SOURCE
    found = faults(kept_listing(compile_cubin(SOURCE.replace(correct, broken), "sm_90", FEW_ROWS.defines)))
    assert found and all(re.search(fault, each) for each in found)


ATTENTION = [replace(build, lists=lists) for of_rows in BUILDS.values() for build in of_rows for lists in (1, 2)]


@pytest.mark.parametrize("build", ATTENTION, ids=lambda build: build.label)
def test_attention_touches_no_memory_before_it_waits_and_reads_nothing_as_constant(build):
    code = kept_listing(kept_image(build, ARCHS["sm90"]))
    assert faults(code) == []
    assert "PREEXIT" not in code, "it lets nothing start early"


IN_FRONT = "wait_for_kernel_in_front();\n\n"


@pytest.mark.parametrize(
    ("build", "correct", "broken", "fault"),
    [
        (MANY, IN_FRONT, "", "waits 0 times"),
        (LARGE, IN_FRONT, f"if (warp == 0) {IN_FRONT}", "before the wait|passes by the wait|not in all threads"),
        (SMALL, IN_FRONT, f"const int early = *indices; {IN_FRONT} if (early == 77) return;", "before the wait"),
        (SMALL, IN_FRONT, f"if (lengths && *lengths < 0) lse_out[0] = 0.f; {IN_FRONT}", "before the wait"),
        (SMALL, "const u16* q,", "const u16* __restrict__ q,", "as if it were constant"),
    ],
    ids=["no wait", "one warp", "indices", "a store", "q"],
)
def test_a_source_of_attention_that_breaks_the_rule_is_found(build, correct, broken, fault):
    def changed(source, *arguments):
        assert source.count(correct) == 1
        return compile_cubin(source.replace(correct, broken), *arguments)

    found = faults(kept_listing(compile_build(build, ARCHS["sm90"], changed)))
    assert found and all(re.search(fault, each) for each in found)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("build", [SMALL, LARGE, MANY], ids=lambda build: build.label)
def test_attention_starts_before_its_inputs_are_written(build):
    """They are once every thread waits for the kernel in front, which still reads what attention then writes."""
    torch.manual_seed(0)
    rows, heads = 2, build.heads - 3
    kv, (q, indices) = cache(5, 16), problem(rows, 1, heads, 150, 80)
    extra_kv, (_, extra_indices) = cache(3, 16), problem(rows, 1, 1, 40, 40)
    lengths, extra_lengths = (torch.tensor(each, dtype=torch.int32).view(rows, 1) for each in ((140, 20), (40, 7)))
    inputs = (q, kv, indices, lengths, torch.randn(heads), extra_kv, extra_indices, extra_lengths)
    written = [each.clone() for each in inputs]
    for each in inputs:
        each.view(torch.uint8).fill_(0x7F)  # codes and queries that are NaN, slots and lengths far out of range
    out, lse = torch.full((rows, 1, heads, 512), 3.0).bfloat16(), torch.full((rows, 1, heads), 3.0)
    ended = []

    def in_front():
        assert (out == 3).all() and (lse == 3).all()
        for each, value in zip(inputs, written, strict=True):
            each.copy_(value)
        ended.append(True)

    build = replace(build, lists=2)
    tensors = Tensors(q, kv, indices, out, lse, lengths, extra_kv, extra_indices, extra_lengths)
    launch = prepare(EmulatedSm90(0, build, in_front), build, tensors, cluster=2, starts_early=True)
    launch(*[each.data_ptr() for each in (out, lse, *inputs)], SCALE * math.log2(math.e))
    assert ended == [True]
    options = dict(zip(("extra_kv_cache", "extra_indices", "extra_lengths"), inputs[5:], strict=True))
    wanted, wanted_lse = reference.sparse_decode(
        q, kv, indices, softmax_scale=SCALE, lengths=lengths, attn_sink=inputs[4], **options
    )  # fmt: skip
    torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=2e-3)


def test_tritons_passes_read_nothing_before_they_wait_and_nothing_as_constant(tmp_path):
    made = compile_passes(tmp_path, "_lse_kernel", "_merge_kernel")
    assert {(each.kernel, each.arch) for each in made} == {
        (kernel, arch) for kernel in ("_lse_kernel", "_merge_kernel") for arch in (90, 100)
    }
    for each in made:
        assert faults(kept_listing(each.cubin)) == [], each.kernel


class Recorded:
    """A pass that records how it would be launched."""

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __call__(self, kind, tensors, arguments, changing=()) -> None:
        self.launches.append((kind, arguments()))


@pytest.mark.parametrize("device_can", [False, True])
def test_an_lse_pass_starts_early_where_its_caller_and_the_device_let_it(monkeypatch, device_can):
    recorded = Recorded()
    monkeypatch.setattr(boundary, "_lse", recorded)
    monkeypatch.setattr(boundary, "can_wait", lambda tensor: device_can)
    out, lse = torch.zeros(2, 1, 64, 512, dtype=torch.bfloat16), torch.zeros(2, 64, 1)
    for early in (False, True):
        Boundary().finish(out, torch.zeros(2, 1, 64), None, lse, None, False, early=early)
    (kind, late), (other, soon) = recorded.launches
    assert kind != other, "they are launched differently"
    assert (late.named["EARLY"], late.starts_early) == (False, False)
    assert (soon.named["EARLY"], soon.starts_early) == (device_can, device_can)


def test_the_pass_that_merges_parts_starts_early_where_the_device_lets_it(monkeypatch):
    recorded = Recorded()
    monkeypatch.setattr(row_parts, "_merge", recorded)
    monkeypatch.setattr(row_parts, "can_wait", lambda tensor: True)
    out = torch.zeros(2, 1, 64, 512, dtype=torch.bfloat16)
    RowParts().merge(out, None, torch.zeros(4, 64, 512, dtype=torch.bfloat16), torch.zeros(4, 64), None, False)
    ((_, arguments),) = recorded.launches
    assert arguments.named["EARLY"] and arguments.starts_early


@pytest.fixture
def asked(monkeypatch) -> list[bool]:
    """What adapters say of the kernel in front of their lse pass."""
    said: list[bool] = []
    finish = TorchBoundary.finish

    def recorded(self, *args, early):
        said.append(early)
        finish(self, *args, early=early)

    monkeypatch.setattr(TorchBoundary, "finish", recorded)
    return said


def flashmla(primitive, arch, **features):
    request = Request(primitive, FACTS[arch], num_heads=64, topk=128, lse=True, **features)
    return registry(probe=False).bind(request, backend="nvidia")


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_nothing_starts_early_behind_flashmlas_decode(asked, arch):
    """Its combine returns without a wait where no row is split, and the attention in front of it may still be writing."""
    q = torch.randn(2, 1, 64, 576).bfloat16()
    cache, indices = torch.zeros(2, 64, 656, dtype=torch.uint8), torch.zeros(2, 1, 128, dtype=torch.int32)
    with installed("vllm 0.33"):
        decode = flashmla(SPARSE_DECODE, arch, kv_layout="fp8_ds_mla", block_size=64, query_len=1, scale_format="pow2")
        decode(q, cache, indices, softmax_scale=0.1)
    assert asked[-1:] == [False] and not any(asked)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_an_lse_pass_starts_early_behind_flashmlas_prefill(asked, arch):
    q, kv = torch.randn(2, 64, 576).bfloat16(), torch.randn(256, 576).bfloat16()
    with installed("vllm 0.33"):
        prefill = flashmla(SPARSE_PREFILL, arch, kv_layout="bf16")
        prefill(q, kv, torch.zeros(2, 128, dtype=torch.int32), softmax_scale=0.1)
    assert asked[-1:] == [True] and all(asked)


@pytest.mark.parametrize("primitive", [SPARSE_DECODE, SPARSE_PREFILL])
def test_an_lse_pass_starts_early_behind_flash_attention_3(asked, primitive):
    request = Request(primitive, FACTS["sm90"], kv_layout="bf16", num_heads=64, topk=128, lse=True)
    q, indices = torch.randn(2, 1, 64, 576).bfloat16(), torch.zeros(2, 1, 128, dtype=torch.int32)
    kv = torch.randn(4, 64, 576).bfloat16()
    with installed_fa3():
        if primitive is SPARSE_DECODE:
            bind_fa3_decode(request)(q, kv, indices, softmax_scale=0.1)
        else:
            bind_fa3_prefill(request)(q[:, 0], kv.view(-1, 576), indices[:, 0], softmax_scale=0.1)
    assert asked == [True]
