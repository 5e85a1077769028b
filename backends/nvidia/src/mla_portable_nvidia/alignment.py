# SPDX-License-Identifier: Apache-2.0
"""Tensors as the copy engine wants them: a copy only of what is not."""

from __future__ import annotations

import torch
from torch import Tensor


def mappable(x: Tensor) -> Tensor:
    """x [tokens, heads, columns] bf16 as the copy engine and 16-byte stores want it: a copy only where it is not.

    Its address and strides are multiples of 16 bytes, and no two tokens or heads share memory.
    """
    fits = x.data_ptr() % 16 == 0
    for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True):
        fits = fits and (size <= 1 or (stride > 0 and stride % 8 == 0))
    return x if fits else x.clone(memory_format=torch.contiguous_format)
