# SPDX-License-Identifier: Apache-2.0
"""Times by rows: what a call of any size takes, from the sizes that were timed.

Linear in rows between two sizes: a kernel takes a constant time and so much for each row. Not in their logarithms, by which
times of half the rows are overestimated. Below all sizes the least one, above all of them the largest in proportion.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence


def time_spent(us: Iterable[float]) -> float:
    """By what several sizes are ranked where one choice serves them all: their sum, for time is spent on large steps."""
    return sum(us)


def shares(sizes: Sequence[int], rows: int) -> dict[int, float]:
    """Row count that was timed -> its share in the time of a call with `rows`.

    Args:
        sizes: the row counts that were timed, ascending; at least one.
    """
    at = bisect_right(sizes, rows)
    if at == 0:
        return {sizes[0]: 1.0}
    before = sizes[at - 1]
    if at == len(sizes):
        return {before: rows / before}
    share = (rows - before) / (sizes[at] - before)
    return {before: 1 - share, sizes[at]: share} if share else {before: 1.0}


class Times:
    """Microseconds by rows, as far as they were measured."""

    def __init__(self, us: Mapping[int, float]) -> None:
        """us: rows -> microseconds; at least one."""
        self._us = dict(us)
        self._rows = sorted(us)

    @property
    def least(self) -> int:
        """The fewest rows that were timed."""
        return self._rows[0]

    def us(self, rows: int) -> float:
        """What a call with `rows` takes."""
        return sum(share * self._us[size] for size, share in shares(self._rows, rows).items())
