# SPDX-License-Identifier: Apache-2.0
"""quantize_per_tensor: one scale for a whole tensor."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts.primitive import Primitive

__all__ = ["QUANTIZE_PER_TENSOR", "QuantizePerTensor"]


class QuantizePerTensor(Protocol):
    """One scale for a tensor: x ~= x_q * scale, scale = max(amax(|x|), 1e-10) / max(dtype), a 0-d float32 tensor."""

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]: ...


QUANTIZE_PER_TENSOR: Final = Primitive[QuantizePerTensor]("quantize_per_tensor", module=__name__, results=("x_q", "scale"))
