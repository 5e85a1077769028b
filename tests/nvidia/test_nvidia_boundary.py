# SPDX-License-Identifier: Apache-2.0
"""The kernels of the boundary compile for the architectures that have FlashMLA, and need Triton."""

from __future__ import annotations

import os
import subprocess
import sys

from flashmla_standins import installed
from simulated_gpu import FACTS

from mla_portable.primitives import SPARSE_DECODE
from mla_portable_nvidia import support
from mla_portable_nvidia.attention import check_kernel

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
