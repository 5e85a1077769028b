# SPDX-License-Identifier: Apache-2.0
"""Writes what an interpreted kernel stores under masks of which one operand is a scalar."""

import sys

import torch
import triton
import triton.language as tl

from mla_portable.kit.triton_launcher import TritonLauncher


@triton.jit
def _copy_kernel(to_ptr, from_ptr, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    given = (size >= 0) & (at < size)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=given, other=0), mask=(size > 0) & (at < BLOCK))


to = torch.full((4,), -1.0)
TritonLauncher(_copy_kernel)((1,), to, torch.arange(1.0, 5.0), 3, BLOCK=4)
sys.stdout.write(f"{to.tolist()}\n")
