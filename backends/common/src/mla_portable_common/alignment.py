# SPDX-License-Identifier: Apache-2.0
"""Tensors as kernels' loads want them: a copy only of what is not."""

from __future__ import annotations

import torch
from torch import Tensor


def aligned(q: Tensor) -> Tensor:
    """q as the kernel's loads want it: addresses and strides in multiples of 16 bytes. A copy only where they are not."""
    odd = q.data_ptr() % 16
    for stride in q.stride()[:-1]:
        odd |= stride * q.element_size() % 16
    if odd == 0:
        return q
    return q.clone(memory_format=torch.contiguous_format)  # contiguous() keeps a whole tensor at an odd address
