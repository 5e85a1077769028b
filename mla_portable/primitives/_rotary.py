# SPDX-License-Identifier: Apache-2.0
"""What the primitives between the projections share: norms, rotary embedding, and the checks of their arguments.

The arithmetic is that of engines whose model code is compiled, or fused: sums, products and the rotation in float32, and one
rounding to bfloat16 where the engine has a bfloat16 tensor, which is behind a norm and behind a rotation.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts.values import describe, refuse
from mla_portable.kit.rules import check_dense, check_tensor, shape_of

STYLES: Final = ("interleaved", "neox")
"""Which numbers are rotated together: 2i and 2i + 1, or i and i + R / 2."""
PLACES: Final = ("first", "last")
"""Where the rotary numbers of an indexer's query or key are."""
_WEIGHTS: Final = (torch.bfloat16, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, n] bf16 -> x / sqrt(mean(x * x) + eps) * weight, [T, n] bf16."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(torch.bfloat16)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [T, n] bf16 -> (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, [T, n] bf16. The variance is that of n numbers."""
    wide = torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps)
    return wide.to(torch.bfloat16)


def cosines_and_sines(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """[T, R / 2] float32 each. A position outside of the table is taken for the nearest one in it."""
    cos, sin = cos_sin[positions.clamp(0, cos_sin.shape[0] - 1)].float().chunk(2, dim=-1)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """x [..., R] bf16, rotated by angles whose cosines and sines [..., R / 2] are float32; bf16 of the same shape."""
    wide = x.float()
    if style == "interleaved":
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    both = torch.stack(turned, dim=-1).flatten(-2) if style == "interleaved" else torch.cat(turned, dim=-1)
    return both.to(torch.bfloat16)


def rotate_at(x: Tensor, cos: Tensor, sin: Tensor, style: str, at: str) -> Tensor:
    """x [..., n] bf16 with its first or last R numbers rotated; a copy."""
    width = 2 * cos.shape[-1]
    place = slice(width) if at == "first" else slice(x.shape[-1] - width, None)
    turned = x.clone()
    turned[..., place] = rotate(x[..., place], cos, sin, style)
    return turned


def check_choice(where: str, argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        refuse(where, argument, describe(value), " or ".join(map(repr, allowed)))


def check_weights(where: str, argument: str, value: Any, size: int, device: torch.device) -> None:
    """Weights [size] of a norm, bf16 or float32."""
    axes = f"[{size}]"
    check_dense(where, argument, value, axes)
    if value.dtype not in _WEIGHTS:
        refuse(where, argument, value.dtype, "torch.bfloat16 or torch.float32")
    check_tensor(where, argument, value, value.dtype, (size,), device, axes)


def check_cos_sin(where: str, value: Any, device: torch.device) -> int:
    """[P, R] bf16 or float32, of at least one position; returns R, which is even."""
    axes = "[P, R], R / 2 cosines and then R / 2 sines of each position"
    shape = shape_of(where, "cos_sin", value, 2, axes)
    if value.dtype not in _WEIGHTS:
        refuse(where, "cos_sin", value.dtype, "torch.bfloat16 or torch.float32")
    if shape[0] < 1 or shape[1] < 2 or shape[1] % 2:
        refuse(where, "cos_sin", f"shape {list(shape)}", f"{axes}, with P of at least 1 and R even, at least 2")
    check_tensor(where, "cos_sin", value, value.dtype, tuple(shape), device, axes)
    return shape[1]


def check_given(where: str, part: Any, name: str, needed: dict[str, Any], others: dict[str, Any]) -> None:
    """What belongs to a part of the call is there with it, and nothing of it without.

    Args:
        part, name: the part's input, None where the call has no such part. needed: arguments by name that it must have.
        others: that it may have.
    """
    for argument, value in {**needed, **others}.items():
        if part is None and value is not None:
            refuse(where, argument, describe(value), f"None, because {name} is None", f"Pass {name} too, or neither.")
    for argument, value in needed.items():
        if part is not None and value is None:
            refuse(where, argument, "None", f"a value, because there is {name}")
