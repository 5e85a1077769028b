# SPDX-License-Identifier: Apache-2.0
"""The source of a kernel, compiled for a CPU with what stands in for the device. It needs g++."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from importlib.resources import as_file, files
from pathlib import Path

from mla_portable_nvidia import native

__all__ = ["COMPILER", "compiled"]

COMPILER = shutil.which("g++")


def compiled(source: str, emulator: str, defines: Iterable[tuple[str, object]], *arguments: type) -> ctypes.CDLL:
    """The source included by an emulator, a file beside this one, as `KERNEL`. arguments: the types that `launch` takes."""
    assert not re.search(r"\basm\b", source)
    with tempfile.TemporaryDirectory() as folder, as_file(files(native)) as headers:
        kernel, library = Path(folder) / "kernel.h", Path(folder) / "kernel.so"
        kernel.write_text(source, encoding="utf-8")
        known = [f"-D{name}={value}" for name, value in (*defines, ("KERNEL", f'"{kernel}"'))]
        # compiling takes longer than the tests: with -O2 half as long again
        options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{headers}", *known, "-o", str(library)]
        subprocess.run([str(COMPILER), *options, str(Path(__file__).with_name(emulator))], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.launch.argtypes, loaded.launch.restype = arguments, None
    return loaded
