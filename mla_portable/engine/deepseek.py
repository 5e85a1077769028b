# SPDX-License-Identifier: Apache-2.0
"""What would serve DeepSeek-V3.2's layers in an engine, for `doctor`: nothing is computed but probes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, Final, NamedTuple

from mla_portable.attention import AttentionSpec, RouteDecision
from mla_portable.engine.routing import served_by

HEADS: Final = (16, 128)
"""DeepSeek-V3.2's 128 query heads over eight ranks, and on one."""

DEEP_GEMM_ARCHS: Final = ("sm90", "sm10", "sm12")
"""What engines say of DeepGEMM: it serves Hopper, and both families of Blackwell."""


class Choice(NamedTuple):
    """The route and what serves each of its primitives; None and the reasons where nothing serves."""

    kv_layout: str
    num_heads: int
    route: str | None
    served_by: str


def choices(
    decide: Callable[[AttentionSpec], RouteDecision], named: Callable[[RouteDecision], str] = served_by
) -> tuple[Choice, ...]:
    """One for each cache layout and heads of a rank. decide: the engine's way to a route. named: what serves it, in words."""
    found: list[Choice] = []
    for layout, heads in product(("fp8_ds_mla", "bf16"), HEADS):
        limits: dict[str, Any] = {"max_num_tokens": 8192, "max_num_reqs": 256, "max_model_len": 163840}
        spec = AttentionSpec(num_heads=heads, softmax_scale=192**-0.5, kv_layout=layout, need_lse=False, **limits)
        decision = decide(spec)
        found.append(Choice(layout, heads, decision.chosen, named(decision)))
    return tuple(found)
