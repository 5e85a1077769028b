# SPDX-License-Identifier: Apache-2.0
"""Invented implementations of merge_states that note when the registry looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fake_plugins import ANYWHERE, implementation, make_plugin

from mla_portable.choose import Registry
from mla_portable.contracts import (
    DeviceFacts,
    Reason,
    Request,
    Support,
)
from mla_portable.primitives import MERGE_STATES

GPU_ONLY = Support(source="a test", device_types=("cuda",))
WIDE = Support(source="a test", device_types=("cpu", "cuda"), topk_multiple=64)


@dataclass
class Vendor:
    """Implementations of merge_states that note when they are looked at; `missing` and `wrong` say what is found."""

    name: str
    preference: float = 10
    support: Support = ANYWHERE
    missing: tuple[Reason, ...] = ()
    wrong: bool = False
    checked: list[str] = field(default_factory=list)
    bound: list[Request] = field(default_factory=list)

    def check(self, device: DeviceFacts) -> Iterable[Reason]:
        self.checked.append(device.name)
        return self.missing

    def bind(self, request: Request) -> Callable[..., Any]:
        self.bound.append(request)

        def merge(outs: Any, lses: Any) -> Any:
            if self.wrong:
                raise RuntimeError("not implemented for this build")
            return MERGE_STATES.reference(outs, lses)

        return merge

    def plugin(self) -> tuple[str, object]:
        made = implementation(
            f"{self.name}.v1", support=self.support, bind=self.bind, check=self.check, preference=self.preference
        )
        return self.name, make_plugin(made)


def registry(*vendors: Vendor, **fields: Any) -> Registry:
    return Registry(plugins=[vendor.plugin() for vendor in vendors], **{"environ": {}, **fields})


def merge(reg: Registry, **fields: Any) -> Request:
    return Request(MERGE_STATES, reg.facts("cpu"), **fields)


ABSENT = Reason("libfast", "not found", "needs 2.1", "pip install libfast")
