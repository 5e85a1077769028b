# SPDX-License-Identifier: Apache-2.0
"""The environment of processes that compile Triton's kernels, apart from tests, which interpret them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["compiling"]


def compiling(cache: Path) -> dict[str, str]:
    """This process's variables, without Triton's interpreter.

    cache: where Triton keeps what it compiles, unless TRITON_CACHE_DIR says so already: `.ci/run` sets it, so that no kernel is
        compiled twice for a target.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {"TRITON_CACHE_DIR": str(cache)} | kept
