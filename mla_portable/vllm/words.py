# SPDX-License-Identifier: Apache-2.0
"""A route's decision in one line, for logs and `doctor`."""

from __future__ import annotations

from mla_portable.attention import RouteDecision

__all__ = ["served_by"]


def served_by(decision: RouteDecision) -> str:
    """What serves each primitive of the chosen route; where nothing serves, the reasons against every route."""
    if decision.chosen is None:
        return "; ".join(f"{verdict.route}: {verdict}" for verdict in decision.verdicts)
    parts = decision.verdict.parts
    return ", ".join(dict.fromkeys(f"{part.decision.request.primitive} {part.decision.chosen}" for part in parts))
