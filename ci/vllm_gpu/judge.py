# SPDX-License-Identifier: Apache-2.0
"""What the results say: comparisons of log-probabilities, of layers in shadow mode, of times. Pure functions of the results.

Greedy texts can be compared up to the first token that differs, because from there on they have different pasts. That token
may differ where both runs hold both candidates for about equally likely. Prompts shorter than top-k attend to everything, so
only rounding tells two runs apart; the report tells beside them what the model makes of rounding alone. Longer ones are
compared with what stock shows against itself, whose near-ties flip as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["SHADOW_LIMIT", "TOLERANCE", "Agreement", "Run", "Shadow", "agree", "limit", "noise", "read_shadow", "worst"]

TOLERANCE: Final = 0.1
"""Log-probabilities of two correct implementations differ by no more where nothing is selected away."""
NOISE_FACTOR: Final = 1.5
SHADOW_LIMIT: Final = 1e-2

Run = Sequence[dict[str, Any]]
"""Of each prompt its length, tokens, and log-probabilities by token at each."""


@dataclass(frozen=True)
class Agreement:
    """Two runs over some prompts: the largest difference of log-probabilities, tokens that were compared, texts that part.

    parted: [(prompt length, token, how far the two candidates are apart, inf where a run does not list both)].
    """

    difference: float
    compared: int
    parted: tuple[tuple[int, int, float], ...]

    def within(self, limit: float) -> bool:
        """Nothing differs by more than `limit`, and texts part only where candidates are no further apart than twice that."""
        return self.compared > 0 and self.difference <= limit and all(gap <= 2 * limit for _, _, gap in self.parted)

    def __str__(self) -> str:
        ties = f", {len(self.parted)} texts part" if self.parted else ""
        return f"{self.difference:.3f} over {self.compared} tokens{ties}"


def _difference(one: dict[str, float], other: dict[str, float]) -> float:
    """Of tokens that both list; inf where they list none in common, or one is no number."""
    found = [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
    return max(found) if found and all(map(math.isfinite, found)) else math.inf


def _gap(one: dict[str, float], other: dict[str, float], pair: tuple[str, str]) -> float:
    if any(token not in run for token in pair for run in (one, other)):
        return math.inf
    return max(abs(run[pair[0]] - run[pair[1]]) for run in (one, other))


def agree(one: Run, other: Run, *, shortest: int = 0, longest: int = 2**31) -> Agreement:
    """Compare the prompts whose whole text, prompt and tokens, has `shortest` to `longest` tokens.

    Raises: ValueError when the runs are not over the same prompts.
    """
    lengths = [[(p["length"], len(p["tokens"])) for p in run] for run in (one, other)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"the runs are over other prompts: {lengths[0]} and {lengths[1]}")
    largest, compared = 0.0, 0
    parted: list[tuple[int, int, float]] = []
    for a, b in zip(one, other, strict=True):
        if not shortest <= a["length"] + len(a["tokens"]) <= longest:
            continue
        for at, (token, its) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            compared += 1
            largest = max(largest, _difference(a["logprobs"][at], b["logprobs"][at]))
            if token != its:
                parted.append((a["length"], at, _gap(a["logprobs"][at], b["logprobs"][at], (str(token), str(its)))))
                break
    return Agreement(largest, compared, tuple(parted))


def noise(*pairs: tuple[Run, Run], shortest: int) -> float:
    """The largest difference that stock shows against itself on long prompts; 0 where there is nothing to compare."""
    found = [agree(one, other, shortest=shortest) for one, other in pairs]
    return max((agreement.difference for agreement in found), default=0.0)


def limit(difference: float) -> float:
    """What may differ where stock differs from itself by `difference`; an infinite one allows nothing."""
    return max(TOLERANCE, NOISE_FACTOR * difference) if math.isfinite(difference) else TOLERANCE


@dataclass(frozen=True)
class Shadow:
    """What shadow mode recorded: how many layers' steps, of how many layers, and the largest relative errors."""

    records: int
    layers: int
    relative: float
    worst_row: float

    @property
    def passed(self) -> bool:
        return self.records > 0 and self.relative < SHADOW_LIMIT

    def __str__(self) -> str:
        return f"{self.relative:.1e} (row {self.worst_row:.1e}) in {self.records} records of {self.layers} layers"


def read_shadow(lines: Sequence[str]) -> Shadow:
    """Of shadow mode's file; an error that is no number counts as infinite."""
    records = [json.loads(line) for line in lines]
    return Shadow(
        len(records),
        len({record["layer"] for record in records}),
        worst(record["relative"] for record in records),
        worst(record["worst_row"] for record in records),
    )


def worst(numbers: Any) -> float:
    """The largest, 0 of none, inf where one is no number."""
    return max((number if math.isfinite(number) else math.inf for number in numbers), default=0.0)
