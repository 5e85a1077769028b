# SPDX-License-Identifier: Apache-2.0
"""The source of a kernel, compiled for a CPU with what stands in for the device. It needs g++."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path

from compiling import KEPT

from mla_portable_nvidia import native
from mla_portable_nvidia.native.runtime.images import compile_kept

__all__ = ["COMPILER", "compiled"]

COMPILER = shutil.which("g++")


def compiled(source: str, emulator: str, defines: Iterable[tuple[str, object]], *arguments: type) -> ctypes.CDLL:
    """The source included by an emulator, a file beside this one, as `KERNEL`. arguments: the types that `launch` takes.

    Compiling takes longer than the tests: it happens once for all processes, as for machine code.
    """
    assert not re.search(r"\basm\b", source)
    here = Path(__file__).parent
    with as_file(files(native)) as headers:
        included = (here / emulator, *sorted(here.glob("*.h")), *sorted(headers.glob("*.cuh")))
        texts = {path.name: path.read_text(encoding="utf-8") for path in included}
    code = compile_kept(source, emulator, [*defines], texts, environ=KEPT, compiler=_shared_library)
    with tempfile.NamedTemporaryFile(suffix=".so") as library:
        library.write(code)
        library.flush()
        loaded = ctypes.CDLL(library.name)
    loaded.launch.argtypes, loaded.launch.restype = arguments, None
    return loaded


def _shared_library(source: str, emulator: str, defines: Sequence[tuple[str, object]], headers: Mapping[str, str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        kernel, library = Path(folder) / "kernel.h", Path(folder) / "kernel.so"
        kernel.write_text(source, encoding="utf-8")
        for name, text in headers.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        known = [f"-D{name}={value}" for name, value in (*defines, ("KERNEL", f'"{kernel}"'))]
        # with -O2 compiling takes half as long again
        options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *known, "-o", str(library)]
        subprocess.run([str(COMPILER), *options, str(Path(folder) / emulator)], check=True)
        return library.read_bytes()
