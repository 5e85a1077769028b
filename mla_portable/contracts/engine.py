# SPDX-License-Identifier: Apache-2.0
"""What an adapter for an inference engine declares: the engine's name, and what `doctor` shows of the adapter in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch


class Choice(NamedTuple):
    """The route and what serves each of its primitives; None and the reasons where nothing serves."""

    kv_layout: str
    num_heads: int
    route: str | None
    served_by: str


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The adapter in an engine, as `doctor` sees it without importing the engine.

    Attributes:
        version: of the engine, None where it is not installed. registered: the engine will load the plugin, and can use it.
        mode: as it takes effect. note: what stands in the way, or what the mode means here.
        choices: for each cache layout and heads of a rank. indexer: whose indexer, or whose scores, and what serves them.
        models: (model, whose attention serves it) of those that are chosen for in another way.
        layer: whose layer stands around attention, and why, "" where the engine has one alone.
    """

    version: str | None
    registered: bool
    mode: str
    note: str
    choices: tuple[Choice, ...] = ()
    indexer: str = ""
    models: tuple[tuple[str, str], ...] = ()
    layer: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "choices": [choice._asdict() for choice in self.choices]}


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine, of which a plugin has the adapter.

    Attributes:
        name: as people write it; in small letters its key in `doctor --json`.
        status: (the registry, a device) -> the adapter's status there. Called by `mla-portable doctor` alone, so that what it
            needs is imported in it. It raises nothing for a variable with a wrong value: that is its note.
    """

    name: str
    status: Callable[[Any, torch.device], EngineStatus]
