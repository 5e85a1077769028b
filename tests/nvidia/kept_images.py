# SPDX-License-Identifier: Apache-2.0
"""What is compiled of the native kernels, once for all tests and processes: like the plugin, they keep it on disk."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from mla_portable_nvidia.native import build as native_build
from mla_portable_nvidia.native.images import VARIABLE, compile_kept

__all__ = ["KEPT", "kept_image"]

_BESIDE = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
"""Where Triton keeps what it compiles; `.ci/run` gives it a folder of its own."""

KEPT = {VARIABLE: str(Path(_BESIDE) / "mla_portable_nvidia")}
"""The environment of `compile_kept`."""

kept_image = partial(native_build.compile_build, compiler=partial(compile_kept, environ=KEPT))
"""`compile_build` whose image comes from disk where it is there."""
