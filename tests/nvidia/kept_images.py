# SPDX-License-Identifier: Apache-2.0
"""What is compiled of the native kernels, once for all tests and processes: like the plugin, they keep it on disk."""

from __future__ import annotations

from functools import partial

from compiling import KEPT

from mla_portable_nvidia.compile_all import cuobjdump
from mla_portable_nvidia.native import kernel_build as native_build
from mla_portable_nvidia.native.runtime.images import compile_kept

__all__ = ["kept_image", "kept_listing"]

kept_image = partial(native_build.compile_build, compiler=partial(compile_kept, environ=KEPT))
"""`compile_build` whose image comes from disk where it is there."""


def kept_listing(cubin: bytes) -> str:
    """Machine code in words. Of a kernel of attention that takes cuobjdump half as long as the compiler takes to make it."""

    def listed(*_: object) -> bytes:
        listing = cuobjdump(cubin, "-sass")
        assert listing is not None, "Triton's wheel has no cuobjdump"
        return listing.encode()

    return compile_kept(cubin.hex(), "sass", (), environ=KEPT, compiler=listed).decode()
