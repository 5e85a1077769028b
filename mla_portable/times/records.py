# SPDX-License-Identifier: Apache-2.0
"""Records of times: one median, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from mla_portable.contracts import DeviceFacts


@dataclass(frozen=True, slots=True)
class Measurement:
    """Where times come from.

    Attributes:
        device: its name. names: patterns of `fnmatch` for the names that its drivers report, besides `device` itself.
        recorded: the day. release: of what was timed, "" where it is not known. versions: (name, version) of the software
            that ran, sorted.
    """

    device: str
    names: tuple[str, ...] = ()
    recorded: str = ""
    release: str = ""
    versions: tuple[tuple[str, str], ...] = ()

    def matches(self, name: str) -> bool:
        """A device of that name is this one."""
        return name == self.device or any(fnmatchcase(name, pattern) for pattern in self.names)

    def text(self, device: DeviceFacts) -> str:
        """Day, device and release, and every library of `device` that has another version than the one that ran.

        Local parts of versions ("+cu130") are not compared: not every build of one version has one.
        """
        installed = dict(device.libraries)
        both = [(name, then, installed[name]) for name, then in self.versions if name in installed]
        differing = [f"{name} {then}, here {now}" for name, then, now in both if _public(then) != _public(now)]
        where = " ".join(filter(None, ("measured", self.recorded, "on", self.device)))
        return "; ".join((where + (f" with {self.release}" if self.release else ""), *differing))


Configuration = tuple[tuple[str, int], ...]
"""As in Request: names and values as the plugin defined them."""


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """One median. `us`: microseconds. The rest as in Request; topk is None where it chooses nothing but what `form` says.

    configuration: that the kernel was bound with and is to be bound with, None for the shipped one. Such a time ranks nothing:
    it was taken beside other configurations of the same kernel.
    """

    implementation: str
    primitive: str
    layout: str | None
    heads: int | None
    topk: int | None
    rows: int
    us: float
    measurement: Measurement
    form: str = ""
    configuration: Configuration | None = None


def _public(version: str) -> str:
    return version.partition("+")[0]
