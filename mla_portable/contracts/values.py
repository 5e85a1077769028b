# SPDX-License-Identifier: Apache-2.0
"""The checks of plain values: the fields of the dataclasses that a user fills in, integers, flags and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor

from mla_portable.accelerator import device_count
from mla_portable.errors import InvalidArgument

INT32_MAX: Final = 2**31 - 1
_LEAST_SCALE: Final = 2.0**-126
_MOST_SCALE: Final = (2.0 - 2.0**-23) * 2.0**127
"""The normal numbers of float32."""
CACHE_ALIGNMENT: Final = 16
"""Bytes that divide the address and the block stride of a cache of whole rows in memory from torch: the usual case, and the
greatest alignment that is distinguished."""
_NO_LIMITS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType({})
_TEXTS: Final = {"str": str, "str | None": str}


def rounded_rows(rows: int) -> int:
    """The power of two that is nearest by ratio, 1 for none: the rows that a call says of itself (`Request.rows`).

    Calls of nearly as many rows are of one kind, so that few kinds are kept.
    """
    return 1 << ((rows * rows).bit_length() >> 1)


def refuse(where: str, argument: str, got: object, expected: str, remedy: str = "") -> NoReturn:
    """Raise InvalidArgument; a function so that callers stay one line."""
    raise InvalidArgument(where, argument, got=got, expected=expected, remedy=remedy)


def describe(value: Any) -> str:
    """A value in few words: dtype, shape and device of a tensor, otherwise its type, and the value of a plain one."""
    if isinstance(value, Tensor):
        kind = "nested" if value.is_nested else "" if value.layout is torch.strided else str(value.layout)
        return f"{value.dtype} {kind or list(value.shape)} on {value.device}"
    if not isinstance(value, (bool, int, float, str)):
        return "None" if value is None else type(value).__name__
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = "of too many digits"
    text = text if len(text) <= 40 else f"{text[:40]}..."
    return text if type(value) is int else f"{type(value).__name__} {text}"


def check_fields(value: Any, limits: Mapping[str, tuple[int, int]] = _NO_LIMITS) -> None:
    """The fields of a dataclass that are annotated int, bool or str, or a tuple of these (or None) hold exactly that type.

    A bool is not an integer here, and neither is a float or a number of numpy. Integers are at least 0.

    Args:
        limits: field -> (least, greatest) for integers with other limits, those in tuples included.
    Raises: InvalidArgument, which names the class and the first field that does not comply.
    """
    where = type(value).__name__
    for field in fields(value):
        given, kind = getattr(value, field.name), field.type
        if given is None and str(kind).endswith("| None"):
            continue
        if kind in ("int", "int | None"):
            check_count(where, field.name, given, *limits.get(field.name, (0,)))
        elif kind == "bool":
            check_flag(where, field.name, given)
        elif kind in _TEXTS and type(given) is not str:
            refuse(where, field.name, describe(given), "a string")
        elif str(kind).startswith("tuple[int, ...]"):
            check_type(where, field.name, given, tuple, "a tuple of integers")
            for each in cast(tuple[Any, ...], given):
                check_count(where, field.name, each, *limits.get(field.name, (0,)))
        elif str(kind).startswith("tuple[str, ...]"):
            check_type(where, field.name, given, tuple, "a tuple of strings")
            for each in cast(tuple[Any, ...], given):
                check_type(where, field.name, each, str, "strings in the tuple")


def check_type(where: str, argument: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """An instance of `kind`; `expected` says in words what may be passed."""
    if not isinstance(value, kind):
        refuse(where, argument, describe(value), expected)


def check_count(where: str, argument: str, value: Any, least: int, most: int | None = None) -> None:
    """A plain integer of at least `least`, and at most `most` where that is given."""
    if type(value) is int and value >= least and (most is None or value <= most):  # bool is excluded on purpose
        return
    limit = "" if most is None else f" and at most {most}"
    refuse(where, argument, describe(value), f"an integer of at least {least}{limit}")


def check_flag(where: str, argument: str, value: Any) -> None:
    """True or False, and nothing that is merely true or false in a condition."""
    if value is not True and value is not False:
        refuse(where, argument, describe(value), "True or False")


def check_scale(where: str, argument: str, value: Any) -> None:
    """A positive number on the host that float32 can hold; a tensor would have to be read back."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if _LEAST_SCALE <= value <= _MOST_SCALE:
            return
        limit = f"a finite number above 0 that float32 holds, {_LEAST_SCALE:.3g} to {_MOST_SCALE:.3g}"
        refuse(where, argument, describe(value), limit)
    remedy = "Read it once, outside the step: float(value)." if isinstance(value, Tensor) else ""
    refuse(where, argument, describe(value), "a Python float", remedy)


def check_alignment(where: str, value: Any) -> None:
    """`cache_alignment`: a power of two from 1 to 16, in bytes."""
    if type(value) is int and 1 <= value <= CACHE_ALIGNMENT and not value & (value - 1):
        return
    refuse(where, "cache_alignment", describe(value), f"a power of two from 1 to {CACHE_ALIGNMENT}, in bytes")


def device_of(where: str, device: Any) -> torch.device:
    """The device with its index, as tensors on it have it: "cuda" becomes "cuda:0".

    Raises: InvalidArgument for what names no device that torch can use here.
    """
    expected = "a device that torch can use here, such as 'cpu' or 'cuda:0'"
    if not isinstance(device, (str, torch.device)):
        refuse(where, "device", describe(device), expected)
    try:
        if torch.device(device).type == "meta":
            refuse(where, "device", repr(str(device)), expected)
        index = cast("int | None", torch.device(device).index)  # None for a bare type, whatever torch's stub says
        if index is not None and index >= device_count(torch.device(device).type):
            refuse(where, "device", repr(str(device)), expected)
        return torch.empty(0, dtype=torch.uint8, device=device).device
    except (RuntimeError, AssertionError) as error:  # what torch raises for an unknown name and for a missing device
        message = str(error).strip().partition("\n")[0]
        raise InvalidArgument(where, "device", got=repr(str(device)), expected=expected, remedy=message) from error
