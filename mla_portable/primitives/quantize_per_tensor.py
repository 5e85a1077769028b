# SPDX-License-Identifier: Apache-2.0
"""quantize_per_tensor: one scale for a whole tensor.

It is for callers who multiply in FP8 with one scale for each operand, as torch's scaled products take them: the absorbed
projections of an MLA layer, or activations in front of them. Layers of this project multiply in bfloat16 and never call it;
`mla-portable run` tries and times it at the step's tokens beside what the layer calls.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import refuse
from mla_portable.dispatch import find, opaque
from mla_portable.kit.rules import check_dense, check_resolved
from mla_portable.primitives._reference import isolated

__all__ = ["QUANTIZED_DTYPES", "QUANTIZE_PER_TENSOR", "QuantizePerTensor", "quantize_per_tensor"]

QUANTIZED_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
_LEAST_AMAX: Final = 1e-10


class QuantizePerTensor(Protocol):
    """One scale for a tensor: x ~= x_q * scale, scale = max(amax(|x|), 1e-10) / max(dtype), a 0-d float32 tensor."""

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]: ...


@opaque
def quantize_per_tensor(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise a tensor with one scale: x ~= x_q * scale. For products in FP8 outside of the layers, which do not call it.

    Args:
        x: bf16, fp16 or float32, any shape. dtype: of the result, one of `QUANTIZED_DTYPES`.
        backend: see `mla_portable.primitives`.
    Returns: (x_q of `dtype`, scale 0-d float32), scale = max(amax(|x|), 1e-10) / greatest finite value of `dtype`.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Allocates its results; no read-back.
    """
    where = "quantize_per_tensor"
    check_dense(where, "x", x, "of any shape")
    check_resolved(where, "x", x)
    if x.dtype not in _FLOATS:
        refuse(where, "x", x.dtype, "torch.bfloat16, torch.float16 or torch.float32")
    if dtype not in QUANTIZED_DTYPES:
        refuse(where, "dtype", dtype, " or ".join(map(str, QUANTIZED_DTYPES)))
    return find(QUANTIZE_PER_TENSOR, backend, x, ()).call(x, dtype)  # the shape does not affect the choice


@isolated
def reference(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x_q and scale with x ~= x_q * scale.

    Args:
        x: floating point, any shape. dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    Returns: x_q of `dtype`, x / scale in float32 rounded to nearest, ties to even; scale, 0-d float32. The quotient of
        the largest |x| is max(dtype) within a float32 step, so nothing overflows.
    """
    amax = x.detach().abs().amax().float() if x.numel() else torch.zeros((), dtype=torch.float32, device=x.device)
    # tensor / tensor: on GPUs torch multiplies by the reciprocal of a Python number, which may differ by a bit
    scale = amax.clamp(min=_LEAST_AMAX) / torch.full_like(amax, torch.finfo(dtype).max)
    return (x.float() / scale).to(dtype), scale


QUANTIZE_PER_TENSOR: Final = Primitive[QuantizePerTensor](
    "quantize_per_tensor",
    module=__name__,
    results=("x_q", "scale"),
    reference=reference,
)
