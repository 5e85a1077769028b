# SPDX-License-Identifier: Apache-2.0
"""Config: how a data-movement kernel is cut into programs, as data.

Each kernel's file has a table CONFIGS, keyed by DeviceFacts.arch with a row "default"; it is read when a primitive is
bound, never per call. A row changes in review and names the sweep that chose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """tile: elements or rows one program handles at a time, a power of two; its unit stands beside each table."""

    tile: int
    num_warps: int


def config_for(configs: Mapping[str, Config], arch: str) -> Config:
    """The row of `arch`, or the default."""
    return configs.get(arch, configs["default"])
