# SPDX-License-Identifier: Apache-2.0
"""Environment variables of an engine's plugin: read when they are needed, and checked there."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mla_portable.registry.settings import check_variables, value_of


def read(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The value without the spaces around it, "" where it is not set. Raises: InvalidArgument for one that is not allowed."""
    value = value_of(os.environ if environ is None else environ, name)
    check_variables({name: value})
    return value
