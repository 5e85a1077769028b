# SPDX-License-Identifier: Apache-2.0
"""Configurations: with what a kernel is bound, where records name the configuration that was fastest on a device.

A record holds for exactly its device, implementation, primitive, layout and head count, and for its top-k where it names one.
It says nothing of how one implementation compares with another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mla_portable.contracts import Request
from mla_portable.times.files import TimesFile
from mla_portable.times.records import Configuration, MeasuredTime


@dataclass(frozen=True, slots=True)
class Configured:
    """A configuration, and the file that names it."""

    configuration: Configuration
    file: str


class Configurations:
    """Those of some files, of which a later one replaces an earlier one."""

    def __init__(self, files: Iterable[TimesFile]) -> None:
        self._known: dict[tuple[str, str, str | None, int | None], list[tuple[MeasuredTime, Configured]]] = {}
        for file in files:
            for each in file.times:
                if each.configuration is not None:
                    key = each.implementation, each.primitive, each.layout, each.heads
                    self._known.setdefault(key, []).append((each, Configured(each.configuration, file.name)))

    def of(self, implementation: str, request: Request) -> Configured | None:
        """For `implementation` ("<backend>.<variant>") and a request; None where no file has one."""
        known = self._known.get((implementation, str(request.primitive), request.kv_layout, request.num_heads), ())
        for time, configured in reversed(known):
            if time.topk in (None, request.topk) and time.measurement.matches(request.device.name):
                return configured
        return None
