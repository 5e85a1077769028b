# SPDX-License-Identifier: Apache-2.0
"""What FlashMLA's functions have in common among their arguments: the value width, the scale, the one head of keys."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Final

from torch import Tensor

from mla_portable.contracts.values import check_scale, describe, refuse
from mla_portable.kit.rules import check_dense, shape_of
from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4

VALUE_WIDTH: Final = 512
_LAYOUTS: Final = {(each.dtype, each.row_width): each.name for each in (BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4)}
"""(dtype, row width) -> the layout that FlashMLA has for it; a plugin's layouts may have rows like these."""


def layout_name(where: str, argument: str, rows: Tensor) -> str:
    """FlashMLA's layout for such rows. Raises: InvalidArgument for rows that it does not know, whatever plugins have."""
    name = _LAYOUTS.get((rows.dtype, rows.shape[-1]))
    if name is None:
        alike = [kind for kind in _LAYOUTS if kind[0] == rows.dtype] or list(_LAYOUTS)
        expected = " or ".join(f"{dtype} rows of {width} ({_LAYOUTS[dtype, width]})" for dtype, width in alike)
        refuse(where, argument, f"{rows.dtype} rows of {rows.shape[-1]}", expected)
    return name


def scale_of(where: str, argument: str, value: Any, width: int) -> float:
    """The factor on scores; None is one over the square root of the width, a number of numpy is a number."""
    if value is None:
        return width**-0.5
    scale: Any = float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
    check_scale(where, argument, scale)
    return scale


def check_value_width(where: str, argument: str, value: Any) -> None:
    """The width of values is FlashMLA's."""
    if not isinstance(value, Integral) or value != VALUE_WIDTH:
        refuse(where, argument, describe(value), str(VALUE_WIDTH))


def without_head(where: str, argument: str, value: Any, rank: int, axes: str) -> Tensor:
    """A tensor without its axis of key heads, the last but one, which has length 1."""
    check_dense(where, argument, value, axes)
    shape = shape_of(where, argument, value, rank, axes)
    if shape[-2] != 1:
        refuse(where, argument, f"shape {list(shape)}", f"{axes}: one head of keys")
    return value.select(-2, 0)
