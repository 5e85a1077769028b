# SPDX-License-Identifier: Apache-2.0
"""What a process of `ci/gpu_sglang` does first, and how it reports: a JSON line for each thing that was tried.

process.py PROGRAM      loads the plugin as SGLang does, then runs a program of this folder
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

ROOT: Final = Path(__file__).parents[2]
ARCH: Final = os.environ.get("MLA_GPU_SGLANG_ARCH", "")
"""The older GPU that this process rehearses, "" for the one that is there."""
DEVICE: Final = os.environ.get("MLA_TEST_SGLANG_DEVICE", "cuda")
_OUT: Final = os.environ.get("MLA_GPU_SGLANG_OUT")


def start() -> None:
    """Rehearse the older GPU, stand in for SGLang's kernel package, load the plugin. Before SGLang's layers are imported."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "sglang"), str(ROOT / "ci" / "vllm_gpu")]
    stand_in_for_sgl_kernel()
    if ARCH:
        _rehearse(ARCH)
    from sglang.srt.plugins import load_plugins

    load_plugins()


class _Nothing(Loader, MetaPathFinder):
    """Finds the package `sgl_kernel` and what is inside of it; every name there is a mock."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "sgl_kernel" else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = lambda name: MagicMock(name=name)


def stand_in_for_sgl_kernel() -> None:
    """As SGLang's own kit does, where its kernel package cannot be imported. The attention that is tested needs none of it."""
    try:
        import_module("sgl_kernel")
    except (ImportError, OSError):
        sys.meta_path.insert(0, _Nothing())


def _rehearse(arch: str) -> None:
    """torch reports the older GPU; Triton and the native kernels compile for it, and the driver takes their PTX.

    SGLang compiles its own CUDA kernels for the GPU that is there: they are asked for the architecture first.
    """
    from sglang.kernels.jit.utils import arch as jit

    jit.get_jit_cuda_arch()
    import rehearse

    loaded = Path(os.environ["MLA_GPU_SGLANG_KERNELS"])
    gpu = rehearse.GPUS[arch]
    rehearse.hide(rehearse.PACKAGES["flashmla"] + rehearse.PACKAGES["deep_gemm"])
    rehearse.report_to_torch(gpu)
    rehearse.compile_for(gpu, loaded)


def tell(name: str, **found: Any) -> None:
    """Add a line to this process's report. found: "passed" is True, False, or None for what only informs."""
    line = json.dumps({"name": name, "arch": ARCH or "here", **found})
    print(line, flush=True)
    if _OUT:
        with Path(_OUT).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@contextmanager
def trying(name: str, found: dict[str, Any]) -> Iterator[None]:
    """Tell of the block what it put into `found`; one that raises has failed, with the error's words.

    What is skipped, or needs a package of someone else that is not installed, was not run: neither passed nor failed.
    """
    from unittest import SkipTest

    try:
        yield
    except SkipTest as reason:
        tell(name, **{**found, "passed": None, "not_run": str(reason)[:300]})
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("sglang", "mla_portable"):
            traceback.print_exc()
            tell(name, **{**found, "passed": False, "error": str(error)})
        else:
            tell(name, **{**found, "passed": None, "not_run": str(error)})
    except Exception as error:  # the next case says whether the device still works
        traceback.print_exc()
        tell(name, **{**found, "passed": False, "error": f"{type(error).__name__}: {error}"[:600]})
    else:
        tell(name, **{"passed": True, **found})


@contextmanager
def refused(words: str, found: dict[str, Any]) -> Iterator[None]:
    """SGLang itself refuses the block, with an assertion of these words. Where it no longer does, the plan has to change."""
    try:
        yield
    except AssertionError as error:
        if words not in str(error):
            raise
        found["refused_by_sglang"] = str(error)[:100]
    else:
        raise RuntimeError(f"SGLang was expected to refuse this with {words!r}")


if __name__ == "__main__":
    start()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
