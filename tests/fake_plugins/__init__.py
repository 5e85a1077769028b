# SPDX-License-Identifier: Apache-2.0
"""Plugins that exist only in tests: well-behaved ones, and one module for each way in which a plugin can be broken."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from mla_portable.contracts import Detector, Implementation, Primitive, Registrar, Request, Support, hookimpl
from mla_portable.primitives import MERGE_STATES

ANYWHERE = Support(source="a test", device_types=("cpu", "cuda"), kv_layouts=("bf16", "fp8_ds_mla"))


def refuse_to_run(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a test called a kernel that exists only to be chosen")


def never_runs(request: Request) -> Callable[..., Any]:
    return refuse_to_run


def implementation(
    name: str, primitive: Primitive = MERGE_STATES, support: Support = ANYWHERE, **fields: Any
) -> Implementation:
    """An implementation that can be chosen; it computes nothing unless `bind` is given."""
    return Implementation(name=name, primitive=primitive, support=support, **{"bind": never_runs, **fields})


def make_plugin(*implementations: Implementation, detectors: tuple[Detector, ...] = ()) -> ModuleType:
    """A module with a hook that registers just these."""

    @hookimpl
    def mla_portable_register(registrar: Registrar) -> None:
        for each in implementations:
            registrar.add(each)
        for detector in detectors:
            registrar.add_detector(detector)

    module = ModuleType("made_by_a_test")
    vars(module)["mla_portable_register"] = mla_portable_register
    return module
