# SPDX-License-Identifier: Apache-2.0
"""Run the code that Triton or NVRTC makes for an older NVIDIA architecture on the GPU that is there.

They compile for the older architecture, Triton with its ptxas, so what that architecture lacks is refused. The PTX is then
given to the driver in place of the binary, and the driver compiles it for the chip.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver as triton_driver


def ptx_of(kernel: Any, capability: int) -> bytes:
    """The PTX of a compiled kernel. Raises: RuntimeError when it is for another architecture."""
    text = kernel.asm["ptx"]
    if f".target sm_{capability}" not in text:
        raise RuntimeError(f"{kernel.name}: the PTX is not for sm_{capability}; an older copy in Triton's cache?")
    return text.encode()


@cache
def load_ptx_instead(capability: int, loaded: Path) -> None:
    """From now on Triton compiles for `capability` (80 is sm_80) in this process, and hands PTX to the driver.

    The file `loaded`, which processes may share, gets the name of every kernel: a run that loaded none has shown nothing.
    """
    target = GPUTarget("cuda", capability, 32)
    triton_driver.active.get_current_target = lambda: target
    make = CompiledKernel.__init__

    def make_then_replace(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.kernel = ptx_of(self, capability)
        with loaded.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {self.name}\n")

    CompiledKernel.__init__ = make_then_replace


@cache
def load_native_ptx_instead(capability: int, loaded: Path) -> None:
    """Likewise for kernels of mla_portable_nvidia; GPUs say that they are of that capability, which is how it finds one."""
    from mla_portable_nvidia.native import kernel_build as native

    make = native.compile_build
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)

    def make_ptx(build: native.KernelBuild, arch: str, *compiler: Any) -> bytes:
        if f"sm{capability}" not in build.archs:
            raise RuntimeError(f"{build.label}: it is not for sm{capability}")
        text = make(build, f"compute_{capability}", *compiler)
        with loaded.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {build.label}\n")
        return text

    native.compile_build = make_ptx
