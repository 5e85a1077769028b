# SPDX-License-Identifier: Apache-2.0
"""The error of FlashMLA's functions that have a name here and no implementation."""

from __future__ import annotations

from mla_portable.errors import MLAPortableError


class NotServed(MLAPortableError, NotImplementedError):
    """A function of FlashMLA that nothing here implements: the name exists so that programs can be imported."""

    def __init__(self, function: str, what: str, remedy: str) -> None:
        """function: its name in `flash_mla`. what: what it computes. remedy: what to do instead."""
        super().__init__(f"flash_mla.{function}: {what} is not served by mla_portable. {remedy}")
