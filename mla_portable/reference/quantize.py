# SPDX-License-Identifier: Apache-2.0
"""quantize_per_tensor in plain torch: a whole tensor to float8 with one float32 scale."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.reference.arithmetic import isolated

__all__ = ["quantize_per_tensor"]

_LEAST_AMAX: Final = 1e-10


@isolated
def quantize_per_tensor(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x_q and scale with x ~= x_q * scale; `primitives.QuantizePerTensor`.

    Args:
        x: floating point, any shape. dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    Returns: x_q of `dtype`, x / scale in float32 rounded to nearest, ties to even; scale, 0-d float32. The quotient of
        the largest |x| is max(dtype) within a float32 step, so nothing overflows.
    """
    amax = x.detach().abs().amax().float() if x.numel() else torch.zeros((), dtype=torch.float32, device=x.device)
    # tensor / tensor: on GPUs torch multiplies by the reciprocal of a Python number, which may differ by a bit
    scale = amax.clamp(min=_LEAST_AMAX) / torch.full_like(amax, torch.finfo(dtype).max)
    return (x.float() / scale).to(dtype), scale
