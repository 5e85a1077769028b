# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the reference that none of torch's process-wide switches changes.

A float32 matrix product is whatever `torch.set_float32_matmul_precision` allows: TF32 on a GPU, bfloat16 on some CPUs. So
products are taken in float64, which no switch touches, or in float32 element by element where a device's float64 cannot be
trusted. Autocast and autograd are off inside a primitive, and every new tensor names its dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from mla_portable.accelerator import without_autocast

__all__ = ["isolated", "products"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def isolated(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` without autocast and autograd, on the device type of its first tensor."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.no_grad(), without_autocast(device.type):
            return function(*args, **kwargs)

    return call


def products(a: Tensor, b: Tensor) -> Tensor:
    """All dot products of rows: a [n, H, D] with b [n, K, D] or [K, D] -> [n, H, K], in the dtype of both.

    float64 is a matrix product. float32 multiplies and sums, head by head: it takes n * K * D elements of scratch.
    """
    if a.dtype == torch.float64:
        return torch.matmul(a, b.mT)
    result = torch.empty((*a.shape[:2], b.shape[-2]), dtype=a.dtype, device=a.device)
    for head in range(a.shape[1]):
        result[:, head] = (a[:, head : head + 1] * b).sum(dim=-1)
    return result
