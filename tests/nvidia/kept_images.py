# SPDX-License-Identifier: Apache-2.0
"""Machine code of the builds, compiled once for all tests and processes: like the plugin, they keep it on disk."""

from __future__ import annotations

from functools import partial

from mla_portable_nvidia.native import build as native_build
from mla_portable_nvidia.native.images import compile_kept

__all__ = ["kept_image"]

kept_image = partial(native_build.compile_build, compiler=compile_kept)
"""`compile_build` whose image comes from MLA_PORTABLE_NVIDIA_CACHE or the user's cache where it is there."""
