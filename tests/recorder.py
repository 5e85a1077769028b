# SPDX-License-Identifier: Apache-2.0
"""A backend that serves everything and only writes down that it was called, in a registry of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from machines import CPU

from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, Implementation, Primitive, Registrar, Request, ScheduleKind, Support, hookimpl
from mla_portable.layouts import KV_LORA_RANK, LAYOUTS
from mla_portable.primitives import SPARSE_DECODE


class Recorder:
    """The plugin: `calls` holds (primitive, args, kwargs) of every call, `called` for which request its callable was bound, and
    `bound` every request that was bound."""

    def __init__(
        self,
        name: str = "recorder.tape",
        schedule_kind: ScheduleKind | None = None,
        preference: float = 10.0,
        support: Mapping[str, Any] | None = None,
        primitives: Collection[Primitive] = tuple(Primitive.all()),
        prefills_as: str = "",
    ):
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.called: list[Request] = []
        self.bound: list[Request] = []
        self.name, self.schedule_kind, self.preference = name, schedule_kind, preference
        self.support = {"device_types": ("cpu", "cuda"), "kv_layouts": tuple(LAYOUTS), **(support or {})}
        self.primitives, self.prefills_as = primitives, prefills_as

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        for primitive in self.primitives:
            registrar.add(
                Implementation(
                    name=self.name,
                    primitive=primitive,
                    support=Support(source="a test", **self.support),
                    bind=self._bind,
                    preference=self.preference,
                    schedule_kind=self.schedule_kind,
                    prefills_as=self.prefills_as if primitive is SPARSE_DECODE else "",
                )
            )

    def _bind(self, request: Request):
        self.bound.append(request)

        def call(*args: Any, **kwargs: Any) -> tuple[object, object]:
            self.calls.append((str(request.primitive), args, kwargs))
            self.called.append(request)
            if kwargs.get("out", self) is None:  # of attention, which makes one
                return args[0][..., :KV_LORA_RANK], self
            return self, self

        return call


def registry_of(*plugins: Recorder, facts: Mapping[str, DeviceFacts] | None = None) -> Registry:
    """A registry of these plugins alone, on a simulated CPU, without probes and deaf to the environment."""
    named = [(plugin.name.partition(".")[0], plugin) for plugin in plugins]
    return Registry(plugins=named, facts=facts or {"cpu": CPU}, environ={}, probe=False)
