# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: a kernel says that the one behind it may begin before its own end.

`let_next_start` is None in a Triton without the instruction, which is one before 3.4: Triton looks up whatever a kernel names,
in a branch that is not taken too.
"""

from typing import Final

import triton
import triton.language as tl

__all__ = ["let_next_start", "lets_next_start"]

_ARCHS: Final = frozenset({"sm90", "sm100", "sm103", "sm120", "sm121"})


if hasattr(getattr(getattr(tl, "extra", None), "cuda", None), "gdc_launch_dependents"):

    @triton.jit
    def let_next_start():
        """What is launched to start early may do so once all programs have come here. It waits by itself for their end."""
        tl.extra.cuda.gdc_launch_dependents()
else:
    let_next_start = None


def lets_next_start(arch: str) -> bool:
    """Kernels can call `let_next_start` there: the architecture has the instruction, and so has Triton."""
    return arch in _ARCHS and let_next_start is not None
