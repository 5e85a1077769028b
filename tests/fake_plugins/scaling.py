# SPDX-License-Identifier: Apache-2.0
"""A plugin with a primitive of its own, and two implementations of it."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from mla_portable.contracts import Implementation, Primitive, Registrar, Support, hookimpl


class ScaleRows(Protocol):
    def __call__(self, x: Tensor, factor: float) -> Tensor: ...


SCALE_ROWS: Final = Primitive[ScaleRows]("scale_rows", module=__name__, facts=("num_heads",), results=("out",))
SUPPORT = Support("a test", device_types=("cpu",), max_heads=8)


def plain(x: Tensor, factor: float) -> Tensor:
    return x * factor


def fast(x: Tensor, factor: float) -> Tensor:
    return x.mul(factor)


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    registrar.add(Implementation("scaling.plain", SCALE_ROWS, SUPPORT, lambda request: plain, preference=90))
    registrar.add(Implementation("scaling.fast", SCALE_ROWS, SUPPORT, lambda request: fast, preference=10))
