# SPDX-License-Identifier: Apache-2.0
"""Run the code that Triton makes for an older NVIDIA architecture on the GPU that is there.

Triton compiles for the older architecture, ptxas for it included, so what that architecture lacks is refused. The PTX is then
given to the driver in place of the binary, and the driver compiles it for the chip.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

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
