# SPDX-License-Identifier: Apache-2.0
"""How far a result may lie from the oracle, and the comparisons: what differs, at which coordinate, by how much.

`storage` is what the numbers were read from: "bf16", or the scale format of an FP8 cache, "pow2" or "amax"; for primitives
without a cache it is the dtype, or "any".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts import CacheLayout


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A limit on the distance to the oracle: `|got - expected| <= max(abs, rel * magnitude)`.

    Attributes:
        abs, rel: both 0 means bit for bit.
        magnitude: what `rel` multiplies: the "row"'s largest expected absolute value, the "element"'s own, its "step", half the
            distance between neighbours of the target dtype, or its "terms", the sum of the magnitudes of what is added.
        cosine: limit on 1 - 2 sum(x y) / sum(x x + y y) over the whole tensor; None where it is not judged.
        origin: where the figures come from.
    """

    abs: float
    rel: float
    origin: str
    magnitude: str = "element"
    cosine: float | None = None

    @property
    def exact(self) -> bool:
        return self.abs == 0 and self.rel == 0


BITS: Final = Tolerance(0, 0, "the contract defines every bit")


def limit_of(table: Mapping[tuple[str, str], Tolerance], storage: str, quantity: str) -> Tolerance:
    """The row of (storage, quantity); a row for "any" storage holds for all. Raises: KeyError."""
    return table.get((storage, quantity)) or table["any", quantity]


Symptom = Callable[[tuple[int, ...]], tuple[str, str]]
"""The first wrong coordinate -> (what that looks like, in words without the coordinate; where it is, for a reader)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison.

    Attributes:
        quantity: what was compared. error: what was measured. limit: what it may be.
        message: what is wrong, with coordinate and both values; empty when it holds.
        symptom, place: the same in few words, and the row; both may be empty.
    """

    quantity: str
    error: float
    limit: float
    message: str = ""
    symptom: str = ""
    place: str = ""


def _said(symptom: Symptom | None, where: tuple[int, ...]) -> tuple[str, str, str]:
    """Symptom, place, and both as a remark in parentheses."""
    if symptom is None:
        return "", "", ""
    what, place = symptom(where)
    return what, place, f" ({', '.join(filter(None, (what, place)))})"


def _at(name: str, coordinate: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, coordinate))}]"


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _bytes(tensor: Tensor) -> Tensor:
    """[..., element size] uint8 on the CPU."""
    flat = tensor.detach().cpu().contiguous()
    return flat.reshape(-1).view(torch.uint8).view(*flat.shape, flat.element_size())


def same_bits(quantity: str, got: Tensor, want: Tensor, *, symptom: Symptom | None = None) -> Finding:
    """Every bit agrees, NaN and the sign of zero included; `error` counts the elements that do not.

    Args:
        symptom: says more about the first coordinate that differs.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        message = f"{quantity}: got {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
        return Finding(quantity, math.inf, 0, message)
    differs = (_bytes(got) != _bytes(want)).any(dim=-1)
    count = int(differs.sum())
    if count == 0:
        return Finding(quantity, 0, 0)
    where = _first(differs)
    what, place, remark = _said(symptom, where)
    message = (
        f"{_at(quantity, where)}: got {got[where].item()}, expected {want[where].item()}{remark}; "
        f"{count} of {differs.numel()} differ"
    )
    return Finding(quantity, count, 0, message, what, place)


def field_of(layout: CacheLayout, byte: int) -> str:
    """Which field of a cache row a byte belongs to, e.g. "byte 515: scale 0, byte 3"."""
    fields = (
        (layout.rope_offset, "rope" if layout.rope_width else "bfloat16", 2),
        (-1 if layout.scale_offset is None else layout.scale_offset, "scale", 1 if layout.apart_bytes else 4),
        (0, "latent", 1 if layout.is_quantized else 2),
    )
    offset, name, size = max(field for field in fields if 0 <= field[0] <= byte)
    inside = byte - offset
    return f"byte {byte}: {name} {inside // size}, byte {inside % size}"


def close(
    quantity: str,
    got: Tensor,
    want: Tensor,
    limit: Tolerance,
    *,
    steps: Tensor | None = None,
    rows: Tensor | None = None,
    symptom: Symptom | None = None,
) -> Finding:
    """`got` lies within the tolerance of `want`; infinities must agree exactly and NaN never does.

    Args:
        want: float64. steps: for tolerances in steps, half a step at each element; of terms, these; for others a magnitude
            that each element has at least.
        rows: where only some rows are compared, which ones; the message then names those.
        symptom: says more about the coordinate of the largest error, of the rows that are compared.
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
    elif limit.magnitude in ("step", "terms"):
        assert steps is not None, "a tolerance in steps, or of terms, needs them"
        magnitude = steps
    elif steps is not None:
        magnitude = magnitude.maximum(steps)
    least = limit.abs / limit.rel if limit.rel else 1.0
    error = torch.where(finite, (got - want).abs() / magnitude.clamp(min=max(least, torch.finfo(torch.float64).tiny)), 0.0)
    error = torch.where(finite | (got == want), error, math.inf).nan_to_num(nan=math.inf, posinf=math.inf)
    bound = limit.rel if limit.rel else limit.abs
    worst, wrong = float(error.max()), error > bound
    if not wrong.any():
        return Finding(quantity, worst, bound)
    where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    named = where if rows is None else (int(rows[where[0]]), *where[1:])
    what, place, remark = _said(symptom, where)
    message = (
        f"{_at(quantity, named)}: got {got[where].item():.6g}, expected {want[where].item():.6g}, "
        f"error {worst:.3g} of {limit.magnitude} magnitude, limit {bound:.3g}; "
        f"{int(wrong.sum())} of {wrong.numel()} exceed it{remark}"
    )
    return Finding(quantity, worst, bound, message, what, place)


def cosine(quantity: str, got: Tensor, want: Tensor, limit: float) -> Finding:
    """1 - 2 sum(x y) / sum(x x + y y) over the finite part of `want` stays within `limit`."""
    x, y = got.detach().cpu().double(), want.double()
    total = float((x * x + y * y).sum())
    error = 1 - 2 * float((x * y).sum()) / total if total else 0.0
    error = math.inf if math.isnan(error) else max(error, 0.0)
    message = "" if error <= limit else f"{quantity}: {error:.3g}, limit {limit:.3g}"
    return Finding(quantity, error, limit, message)
