# SPDX-License-Identifier: Apache-2.0
"""The float64 oracles of all primitives, by their names."""

from __future__ import annotations

from typing import Any

from mla_portable.contracts import Primitive


def __getattr__(name: str) -> Any:
    try:
        return Primitive.named(name).problems.oracle
    except ValueError:
        raise AttributeError(name) from None
