# SPDX-License-Identifier: Apache-2.0
"""Strides as kernels get them: counted in units that keep their alignment visible.

A stride that changes with the batch is not specialised, or each batch would compile again; but then Triton cannot see that
it is a multiple of 16 bytes and would load bytes one by one. So it is handed over divided by a constexpr unit and
multiplied back inside the kernel.
"""

from __future__ import annotations


def stride_unit(*strides: int) -> int:
    """8 where every stride is a multiple of 8 elements (16 bytes of bf16), else 1."""
    union = 0
    for stride in strides:
        union |= stride
    return 1 if union & 7 else 8
