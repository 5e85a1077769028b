# SPDX-License-Identifier: Apache-2.0
"""Bound: what serves a request, as one value, so that what was chosen is what runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from mla_portable.contracts import Decision, Implementation, Request
from mla_portable.contracts.primitive import F


@dataclass(frozen=True, slots=True, eq=False)
class Bound(Generic[F]):
    """What serves a request.

    Attributes:
        call: the callable, exactly as the implementation made it; it runs on the current device.
        implementation: that made it. request: what it was made for, with the configuration of the user's tuning table.
        decision: that chose the implementation.
    """

    call: F
    implementation: Implementation[F]
    request: Request[F]
    decision: Decision
