# SPDX-License-Identifier: Apache-2.0
"""RecordError: a capability record that cannot be believed. Stands alone so that reading records needs no torch."""

from __future__ import annotations

__all__ = ["RecordError"]


class RecordError(ValueError):
    """A record is malformed, or says what cannot be. `where` names the file and line or the profile."""

    def __init__(self, where: str, problem: str) -> None:
        self.where, self.problem = where, problem
        super().__init__(f"{where}: {problem}")
