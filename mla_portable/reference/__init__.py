# SPDX-License-Identifier: Apache-2.0
"""The reference backend: every core primitive in plain torch, on any device; attention and the indexer in float64 where it can.

It is the embedded default: always there, never fast on a GPU. The oracle of each primitive (`mla_portable.judge.problems`)
judges it, and every other backend, in float64 on the CPU. What it computes is in
`mla_portable.primitives`, beside each primitive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, Final, cast

from mla_portable.contracts import Features, Implementation, Primitive, Registrar, Request, Support, hookimpl
from mla_portable.contracts.primitive import F

__all__ = ["mla_portable_register"]

_NAME: Final = "reference.torch"
_PREFERENCE: Final = 1000.0
_FEATURES: Final[dict[str, Any]] = dict.fromkeys((each.name for each in fields(Features)), True) | {
    "batch_invariant": False,  # torch's products may sum in another order for other numbers of rows
    "graph": False,  # it allocates as it goes, and loops on the host
}


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer `reference.torch` for every primitive, on every device that torch can use."""
    for primitive in Primitive.all():
        if primitive.reference is not None:
            registrar.add(_implementation(primitive, primitive.reference))


def _implementation(primitive: Primitive[F], reference: F) -> Implementation[F]:
    support = Support(
        source="mla_portable.primitives: plain torch, arithmetic in float64 or float32",
        device_types=None,
        kv_layouts=None if primitive.cache else (),
        extra_cache=True,
        needs_bf16=False,
        **_FEATURES,
    )
    named = tuple(name for name in ("kv_layout", "index_layout") if primitive.cache and name in primitive.facts)
    bind = _bind_to(reference, primitive.reference_float32, named)
    return Implementation(_NAME, primitive, support, bind, preference=_PREFERENCE)


def _bind_to(reference: F, in_float32: F | None, named: tuple[str, ...]) -> Callable[[Request[F]], F]:
    """A `bind`: one function for every shape; products in float32 where the device's float64 cannot be trusted.

    named: the fields of a request that it takes by name, the layouts of its caches.
    """

    def bind(request: Request[F]) -> F:
        function = reference if in_float32 is None or request.device.has_fp64 else in_float32
        layouts = {name: value for name in named if (value := getattr(request, name)) is not None}
        return cast(F, partial(cast("Callable[..., Any]", function), **layouts)) if layouts else function

    return bind
