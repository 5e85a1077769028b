# SPDX-License-Identifier: Apache-2.0
"""PrefillTimes: whether a chunk of a prefill is gathered to BF16 rows first or reads the cache itself, by measured times."""

from __future__ import annotations

from dataclasses import dataclass

from mla_portable.times.rows import Times


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
