# SPDX-License-Identifier: Apache-2.0
"""Compare a result with what was expected and say, where it differs, at which coordinate and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_portable.contracts import CacheLayout
from mla_portable.tools.conformance.tolerances import Tolerance

__all__ = ["Finding", "attributes", "close", "cosine", "field_of", "same_bits", "same_object"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison.

    Attributes:
        quantity: what was compared. error: what was measured. limit: what it may be.
        message: what is wrong, with coordinate and both values; empty when it holds.
    """

    quantity: str
    error: float
    limit: float
    message: str = ""


def _at(name: str, coordinate: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, coordinate))}]"


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _bytes(tensor: Tensor) -> Tensor:
    """[..., element size] uint8 on the CPU."""
    flat = tensor.detach().cpu().contiguous()
    return flat.reshape(-1).view(torch.uint8).view(*flat.shape, flat.element_size())


def same_bits(quantity: str, got: Tensor, want: Tensor, *, explain: Callable[[tuple[int, ...]], str] | None = None) -> Finding:
    """Every bit agrees, NaN and the sign of zero included; `error` counts the elements that do not.

    Args:
        explain: says more about the first coordinate that differs.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        message = f"{quantity}: got {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
        return Finding(quantity, math.inf, 0, message)
    differs = (_bytes(got) != _bytes(want)).any(dim=-1)
    count = int(differs.sum())
    if count == 0:
        return Finding(quantity, 0, 0)
    where = _first(differs)
    remark = f" ({explain(where)})" if explain else ""
    message = (
        f"{_at(quantity, where)}: got {got[where].item()}, expected {want[where].item()}{remark}; "
        f"{count} of {differs.numel()} differ"
    )
    return Finding(quantity, count, 0, message)


def field_of(layout: CacheLayout, byte: int) -> str:
    """Which field of a cache row a byte belongs to, e.g. "byte 515: scale 0, byte 3"."""
    if byte >= layout.rope_offset:
        inside = byte - layout.rope_offset
        return f"byte {byte}: rope {inside // 2}, byte {inside % 2}"
    if layout.scale_offset is not None and byte >= layout.scale_offset:
        inside = byte - layout.scale_offset
        return f"byte {byte}: scale {inside // 4}, byte {inside % 4}"
    size = 1 if layout.is_quantized else 2
    return f"byte {byte}: latent {byte // size}, byte {byte % size}"


def close(
    quantity: str, got: Tensor, want: Tensor, limit: Tolerance, *, steps: Tensor | None = None, rows: Tensor | None = None
) -> Finding:
    """`got` lies within the tolerance of `want`; infinities must agree exactly and NaN never does.

    Args:
        want: float64. steps: for tolerances in steps, half a step at each element.
        rows: where only some rows are compared, which ones; the message then names those.
    """
    if got.shape != want.shape:
        return Finding(quantity, math.inf, limit.rel, f"{quantity}: got shape {list(got.shape)}, expected {list(want.shape)}")
    got, want = got.detach().cpu().double(), want.double()
    if want.numel() == 0:
        return Finding(quantity, 0, limit.rel)
    finite = want.isfinite()
    magnitude = torch.where(finite, want, 0).abs()
    if limit.magnitude == "row":
        magnitude = magnitude.amax(dim=-1, keepdim=True).expand_as(want)
    elif limit.magnitude == "step":
        assert steps is not None, "a tolerance in steps needs them"
        magnitude = steps
    floor = limit.abs / limit.rel if limit.rel else 1.0
    error = torch.where(finite, (got - want).abs() / magnitude.clamp(min=max(floor, torch.finfo(torch.float64).tiny)), 0.0)
    error = torch.where(finite | (got == want), error, math.inf).nan_to_num(nan=math.inf, posinf=math.inf)
    bound = limit.rel if limit.rel else limit.abs
    worst, wrong = float(error.max()), error > bound
    if not wrong.any():
        return Finding(quantity, worst, bound)
    where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    place = where if rows is None else (int(rows[where[0]]), *where[1:])
    message = (
        f"{_at(quantity, place)}: got {got[where].item():.6g}, expected {want[where].item():.6g}, "
        f"error {worst:.3g} of {limit.magnitude} magnitude, limit {bound:.3g}; {int(wrong.sum())} of {wrong.numel()} exceed it"
    )
    return Finding(quantity, worst, bound, message)


def cosine(quantity: str, got: Tensor, want: Tensor, limit: float) -> Finding:
    """1 - 2 sum(x y) / sum(x x + y y) over the finite part of `want` stays within `limit`."""
    x, y = got.detach().cpu().double(), want.double()
    total = float((x * x + y * y).sum())
    error = 1 - 2 * float((x * y).sum()) / total if total else 0.0
    error = math.inf if math.isnan(error) else max(error, 0.0)
    message = "" if error <= limit else f"{quantity}: {error:.3g}, limit {limit:.3g}"
    return Finding(quantity, error, limit, message)


def attributes(quantity: str, got: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Finding:
    """A result is a tensor of this shape, dtype and device."""
    wanted = f"{dtype} {list(shape)} on {device.type}"
    if not isinstance(got, Tensor):
        return Finding(quantity, math.inf, 0, f"{quantity}: got {type(got).__name__}, expected a tensor {wanted}")
    if tuple(got.shape) == shape and got.dtype == dtype and got.device.type == device.type:
        return Finding(quantity, 0, 0)
    found = f"{got.dtype} {list(got.shape)} on {got.device.type}"
    return Finding(quantity, math.inf, 0, f"{quantity}: got {found}, expected {wanted}")


def same_object(quantity: str, got: object, given: Tensor) -> Finding:
    """The result is the tensor that the caller passed for it, not another one."""
    if got is given:
        return Finding(quantity, 0, 0)
    return Finding(quantity, math.inf, 0, f"{quantity}: a tensor was given to write to, another one was returned")
