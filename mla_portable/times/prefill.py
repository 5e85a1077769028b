# SPDX-License-Identifier: Apache-2.0
"""PrefillTimes: whether a chunk of a prefill is gathered to BF16 rows first or reads the cache itself, by measured times."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass


class Times:
    """Microseconds by rows, as far as they were measured."""

    def __init__(self, us: Mapping[int, float]) -> None:
        """us: rows -> microseconds; at least one."""
        self._rows = sorted(us)
        self._us = [us[rows] for rows in self._rows]

    @property
    def least(self) -> int:
        """The fewest rows that were timed."""
        return self._rows[0]

    def us(self, rows: int) -> float:
        """Linear between two measured times; below all of them the first, above all of them the last in proportion."""
        at = bisect(self._rows, rows)
        if at == 0:
            return self._us[0]
        before, us = self._rows[at - 1], self._us[at - 1]
        if at == len(self._rows):
            return us * rows / before
        return us + (self._us[at] - us) * (rows - before) / (self._rows[at] - before)


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """What the two ways to serve a chunk take.

    Attributes:
        in_place: of sparse_prefill on the cache, by tokens. gathered: of sparse_prefill on BF16 rows, by tokens.
        gather: of gather_upconvert, by rows.
    """

    in_place: Times
    gathered: Times
    gather: Times

    def gathers(self, num_tokens: int, num_rows: int) -> bool:
        """Gathering `num_rows` rows of context for `num_tokens` query tokens is the faster way.

        Never for fewer tokens than were timed: kernels are not filled there, and times are not in proportion.
        """
        if num_tokens < max(self.in_place.least, self.gathered.least):
            return False
        return self.gather.us(num_rows) + self.gathered.us(num_tokens) < self.in_place.us(num_tokens)
