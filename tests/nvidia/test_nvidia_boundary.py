# SPDX-License-Identifier: Apache-2.0
"""The kernels of the boundary against what they are to write, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from flashmla_standins import installed
from simulated_gpu import FACTS

from mla_portable.primitives import SPARSE_DECODE
from mla_portable_nvidia import support
from mla_portable_nvidia.attention import check_kernel
from mla_portable_nvidia.boundary import Boundary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("topk", "width"), [(1, 64), (64, 64), (100, 128), (1100, 1152)])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("num_slots", [1, 50, 2**31 + 7])
def test_sanitise(topk, width, with_lengths, num_slots):
    g = torch.Generator().manual_seed(topk)
    wide = torch.randint(-5, 60, (3, 4, topk + 8), generator=g, dtype=torch.int32)
    wide[0, 0, 0], wide[0, 2, 0] = 2**31 - 1, -(2**31)
    indices = wide[:, ::2, :topk].to(DEVICE)
    lengths = torch.tensor([[0, topk], [5, -3], [topk + 9, topk // 2]], dtype=torch.int32).to(DEVICE)
    got = torch.full((3, 2, width), 77, dtype=torch.int32, device=DEVICE)
    Boundary().sanitise(got, indices, lengths if with_lengths else None, num_slots)
    limit = lengths.clamp(0, topk) if with_lengths else torch.full_like(lengths, topk)
    expected = torch.full_like(got, -1)
    for b in range(3):
        for s in range(2):
            for k in range(int(limit[b, s])):
                index = int(indices[b, s, k])
                expected[b, s, k] = index if 0 <= index < num_slots else -1
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("heads", "kernel_heads", "in_place"), [(3, 64, False), (16, 64, False), (64, 64, False), (64, 64, True)]
)
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("base_2", [False, True])
def test_finish(heads, kernel_heads, in_place, with_sink, base_2):
    g = torch.Generator().manual_seed(heads)
    result = torch.randn(3, 2, kernel_heads, 512, generator=g).bfloat16()
    lse = torch.randn(3, kernel_heads, 2, generator=g).transpose(1, 2)
    lse[1, 0], lse[2, 1] = math.inf, -math.inf
    result[1, 0] = math.nan  # what a kernel leaves in an empty row is nobody's business
    sink = None
    if with_sink:
        sink = torch.randn(heads, generator=g)
        sink[0], sink[1] = math.inf, -math.inf
        sink = sink.to(DEVICE)
    memory = torch.full((3, 2, heads + 1, 528), math.nan, dtype=torch.bfloat16, device=DEVICE)
    out = memory[:, :, :heads, :512]
    lse_memory = torch.full((3, 2, heads + 1), math.nan, device=DEVICE)
    if in_place:
        out.copy_(result)
    lse_given = lse.transpose(1, 2).to(DEVICE)
    Boundary().finish(out, lse_memory[..., :heads], None if in_place else result.to(DEVICE), lse_given, sink, base_2)
    assert memory[..., 512:].isnan().all() and memory[:, :, heads].isnan().all() and lse_memory[..., heads].isnan().all()
    expected = lse[..., :heads] * (math.log(2) if base_2 else 1)
    empty = expected.isinf()
    torch.testing.assert_close(lse_memory[..., :heads].cpu(), expected.masked_fill(empty, -math.inf), atol=1e-6, rtol=1e-6)
    weight = 1.0 if sink is None else torch.sigmoid(expected - sink.cpu()).unsqueeze(-1)
    values = (result[:, :, :heads].float() * weight).masked_fill(empty.unsqueeze(-1), 0.0)
    torch.testing.assert_close(out.float().cpu(), values, atol=0, rtol=0 if sink is None else 2**-7)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mla_portable_nvidia.boundary import _finish_kernel, _lse_kernel, _sanitise_kernel

def check(kernel, types, arch, **constants):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    places = {(names.index(n),): value for n, value in constants.items()}
    assert compile(ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", arch, 32)).asm["ptx"]

for arch in (90, 100):
    pointers = {"out_ptr": "*i32", "indices_ptr": "*i32", "lengths_ptr": "*i32"}
    check(_sanitise_kernel, pointers, arch, TOPK=100, WIDTH=128, HAS_LENGTHS=True, BLOCK_K=1024)
    pointers = {"out_ptr": "*bf16", "result_ptr": "*bf16", "lse_out_ptr": "*fp32", "lse_ptr": "*fp32", "sink_ptr": "*fp32"}
    check(_finish_kernel, pointers, arch, SINK=True, BASE_2=True, WIDTH=512, BLOCK_H=8)
    check(_finish_kernel, pointers, arch, SINK=False, BASE_2=False, WIDTH=512, BLOCK_H=8)
    check(_lse_kernel, pointers, arch, BASE_2=True, WIDTH=512, BLOCK=256, COLUMNS=32, EARLY=True)
print("compiled")
"""


def test_the_kernels_compile_for_hopper_and_blackwell(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    environ["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr


def test_a_machine_without_triton_is_told_so(monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    with installed("flash_mla 2025"):
        (reason,) = check_kernel(SPARSE_DECODE, FACTS["sm90"])
        monkeypatch.undo()
        assert not check_kernel(SPARSE_DECODE, FACTS["sm90"])
    assert "triton is not installed" in str(reason)
