# SPDX-License-Identifier: Apache-2.0
"""Compile every build of the plugin's own kernels for the architectures that are named, and hold each against the device.

    python -m mla_portable_nvidia.compile_all [--quick] [--json] [sm90]

It needs NVRTC and no GPU. What a build takes of registers and stack is read by the cuobjdump of Triton's wheel; without that
it is unknown. The exit status is 1 when a build does not compile or does not fit, 2 where there is no NVRTC.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mla_portable_nvidia.native import sparse_decode_sm80
from mla_portable_nvidia.native.build_choice import BUILDS
from mla_portable_nvidia.native.indexer_logits import DECODE, PREFILL
from mla_portable_nvidia.native.kernel_build import BLOCK_RESERVE, SM_SHARED_MEMORY, KernelBuild, compile_build
from mla_portable_nvidia.native.masked_prefill import BUILDS as MASKED_PREFILL
from mla_portable_nvidia.native.pack_selection import BUILD as PACK_SELECTION
from mla_portable_nvidia.native.runtime.nvrtc import CompilationFailed, NvrtcNotFound, nvrtc_version
from mla_portable_nvidia.native.topk_select import FEW_ROWS, MANY_ROWS

_WIDE: Final = ("sparse_decode_fp8", "sparse_decode_bf16", "sparse_decode_wide")
_SM80: Final = ("sparse_decode_sm80", "merge_splits")
_SCORES: Final = ("indexer_logits_decode", "indexer_logits_prefill")
KERNELS: Final[dict[str, tuple[str, ...]]] = {
    **{f"nvidia.{name} / sparse_{kind}": _WIDE for name in ("native", "native_wide") for kind in ("decode", "prefill")},
    **{f"nvidia.native_sm80 / sparse_{kind}": _SM80 for kind in ("decode", "prefill")},
    "nvidia.native / topk_select": ("topk_select",),
    "nvidia.native / indexer_logits": _SCORES,
    "nvidia.native / indexer_select": (*_SCORES, "topk_select"),
    "nvidia.native / pack_selection": ("pack_selection",),
    "nvidia.native / masked_prefill": ("masked_prefill",),
}
"""What `ci/proven.py` reads: "implementation / primitive" -> the kernels that it launches. FlashMLA's and vLLM's kernels come
as machine code and are not here."""
SHARED_MEMORY: Final = {arch: size - BLOCK_RESERVE for arch, size in SM_SHARED_MEMORY.items() if arch != "sm103"}
"""DeviceFacts.arch -> bytes one thread block may use. Code for sm100 runs on sm103."""
TARGETS: Final = tuple(sorted(SHARED_MEMORY, key=lambda arch: int(arch[2:])))
_BUILDS: Final[tuple[KernelBuild, ...]] = (
    *(build for builds in BUILDS.values() for build in builds),
    *(replace(build, lists=2) for builds in BUILDS.values() for build in builds),
    *(build for builds in sparse_decode_sm80.BUILDS.values() for build in builds),
    *(replace(build, lists=2) for builds in sparse_decode_sm80.BUILDS.values() for build in builds),
    *sparse_decode_sm80.MERGES,
    *(FEW_ROWS, MANY_ROWS),
    *(*DECODE.values(), *PREFILL.values()),
    PACK_SELECTION,
    *MASKED_PREFILL.values(),
)
_QUICK: Final = tuple({build.kernel: build for build in _BUILDS}.values())
"""The last build of each kernel."""


def cuobjdump(cubin: bytes, option: str) -> str | None:
    """What the cuobjdump of Triton's wheel says of machine code; None without that wheel."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    tool = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], check=True, capture_output=True, text=True).stdout


def compile_arch(arch: str, builds: Sequence[KernelBuild] = _BUILDS) -> Iterator[dict[str, Any]]:
    """A record for each build that is for `arch`: what it takes of the device, seconds, and error ("" when all is well)."""
    limit, version = SHARED_MEMORY[arch], ".".join(map(str, nvrtc_version()))
    for build in builds:
        if arch not in build.archs:
            continue
        record: dict[str, Any] = {
            "arch": arch,
            "label": build.label,
            "kernel": build.kernel,
            "limit": limit,
            "error": "",
            "shared": build.shared_bytes,
            "registers": None,
            "spilled": None,
            "versions": {"nvrtc": version},
        }
        begin = time.perf_counter()
        try:
            usage = cuobjdump(compile_build(build, build.archs[arch]), "-res-usage")
        except CompilationFailed as error:
            record["error"] = str(error)
        else:
            found = re.search(r"REG:(\d+) STACK:(\d+)", usage or "")
            if found is not None:
                record |= {"registers": int(found[1]), "spilled": int(found[2])}
            if record["shared"] > limit:
                record["error"] = f"{record['shared']} bytes of shared memory, {arch} has {limit}: choose fewer stages"
        yield record | {"seconds": round(time.perf_counter() - begin, 3)}


def _line(record: dict[str, Any]) -> str:
    usage = f"shared {record['shared']:>6}  registers {record['registers']}  spilled {record['spilled']}"
    return f"{record['arch']:<8} {record['label']:<48} {record['seconds']:6.2f} s  {record['error'] or usage}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mla_portable_nvidia.compile_all", description="Compile every build.")
    parser.add_argument("arch", nargs="*", help=f"among {', '.join(TARGETS)}; all of them where none is named")
    parser.add_argument("--quick", action="store_true", help="only one build of each kernel")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    unknown = [arch for arch in options.arch if arch not in TARGETS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected {', '.join(TARGETS)}")
    try:
        nvrtc_version()
    except NvrtcNotFound as error:
        parser.error(str(error))
    failed = False
    for arch in options.arch or TARGETS:
        for record in compile_arch(arch, _QUICK if options.quick else _BUILDS):
            failed |= bool(record["error"])
            sys.stdout.write(f"{json.dumps(record) if options.json else _line(record)}\n")
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
