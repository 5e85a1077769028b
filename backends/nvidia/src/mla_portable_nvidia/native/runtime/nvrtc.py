# SPDX-License-Identifier: Apache-2.0
"""Compiling CUDA C++ to machine code at run time with NVRTC, the compiler library that torch's CUDA builds depend on.

No toolkit, no host compiler and no header of theirs takes part: sources state their types and instructions themselves.
Compiling works on a machine without a GPU too, wherever the library is installed.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

__all__ = ["CompilationFailed", "NvrtcNotFound", "compile_cubin", "nvrtc_identity", "nvrtc_version"]

_MAJORS = ("13", "12")


class NvrtcNotFound(RuntimeError):
    """There is no NVRTC on this machine."""


class CompilationFailed(RuntimeError):
    """NVRTC refused a source; the message is its log."""


def _places() -> Iterator[str]:
    """Where the library may be, torch's own CUDA version first: a driver loads no image of a newer major version than its own.

    For each version the wheels that torch depends on, then the loader's own search.
    """
    own = (torch.version.cuda or "").split(".")[0]
    majors = sorted(_MAJORS if own in ("", *_MAJORS) else (own, *_MAJORS), key=lambda major: major != own)  # else their order
    for name in (*(f"libnvrtc.so.{major}" for major in majors), "libnvrtc.so"):
        for folder in sys.path:
            for parent in (*(f"nvidia/cu{major}/lib" for major in majors), "nvidia/cuda_nvrtc/lib"):
                path = Path(folder) / parent / name
                if path.exists():
                    yield str(path)
        yield name


def _load(place: str) -> ctypes.CDLL:
    """The library at `place`. It opens its built-in headers by name alone, so those beside it are loaded first."""
    if Path(place).is_absolute():
        for builtins in Path(place).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
    return ctypes.CDLL(place)


@functools.cache
def _library() -> ctypes.CDLL:
    """The first library that loads; its name is the place that it was found at."""
    tried: list[str] = []
    for place in _places():
        try:
            return _load(place)
        except OSError as error:
            tried.append(f"{place}: {error}")
    raise NvrtcNotFound(f"no NVRTC among {'; '.join(tried)}; install the package nvidia-cuda-nvrtc or a CUDA build of torch")


def nvrtc_version() -> tuple[int, int]:
    """(major, minor). Raises: NvrtcNotFound."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def nvrtc_identity() -> str:
    """Version, file name and size of this NVRTC; patch releases have the same version. Raises: NvrtcNotFound."""
    place = Path(_library()._name)
    size = place.stat().st_size if place.is_absolute() else 0
    return f"{nvrtc_version()} {place.name} {size}"


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    """The log, or the machine code, of a program."""
    library, size = _library(), ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _strings(words: Collection[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(words))(*(word.encode() for word in words))


def compile_cubin(
    source: str,
    arch: str,
    defines: Sequence[tuple[str, int | str]],
    headers: Mapping[str, str] | None = None,
    *,
    more: Sequence[str] = (),
) -> bytes:
    """Machine code of `source` for `arch` ("sm_90a"), or PTX ("compute_80").

    headers: name in an #include -> text. more: options of NVRTC.

    Raises: NvrtcNotFound; CompilationFailed with the compiler's log.
    """
    library, program = _library(), ctypes.c_void_p()
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines), *more]
    names, texts = (_strings(words) for words in ((headers or {}).keys(), (headers or {}).values()))
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", len(names), texts, names)
    try:
        if library.nvrtcCompileProgram(program, len(options), _strings(options)) != 0:
            log = _text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CompilationFailed(f"NVRTC for {arch}: {log.strip() or 'no log'}")
        return _text(program, "PTX" if arch.startswith("compute_") else "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
