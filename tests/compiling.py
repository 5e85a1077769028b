# SPDX-License-Identifier: Apache-2.0
"""The environment of processes that compile kernels: Triton's, apart from tests, which interpret them, and those in CUDA."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["EVERY_DEVICE", "KEPT", "compiling"]

EVERY_DEVICE = "MLA_TEST_EVERY_DEVICE" in os.environ
"""Set by `ci/compile --all`: kernels are compiled for more devices than in each run."""

_BESIDE = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
"""Where Triton keeps what it compiles; `.ci/run` gives it a folder of its own."""

KEPT = {"MLA_PORTABLE_NVIDIA_CACHE": str(Path(_BESIDE) / "mla_portable_nvidia")}
"""The variable that says where images of the CUDA kernels are kept, once for all tests and processes."""


def compiling(cache: Path) -> dict[str, str]:
    """This process's variables, without Triton's interpreter.

    cache: where Triton keeps what it compiles, unless TRITON_CACHE_DIR says so already: `.ci/run` sets it, so that no kernel is
        compiled twice for a target.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {"TRITON_CACHE_DIR": str(cache)} | kept
