# SPDX-License-Identifier: Apache-2.0
"""Run the conformance suite on what Triton or NVRTC makes for an older NVIDIA architecture, on a newer GPU; or time that code.

    python ci/run_older_ptx.py sm80 BACKEND [--level smoke] [--primitive P] [--jobs N] [--who NAME] [--commit C] --out FILE
    python ci/run_older_ptx.py sm80 --bench kernels|prompts [ARGUMENTS of that command of `mla-portable bench`]

BACKEND is `triton`, or an implementation whose kernels the nvidia plugin compiles itself, `nvidia.native_sm80`: those of
libraries cannot be run this way. The compiler makes PTX for the older architecture, and the driver compiles that for the chip
(`vllm_gpu/older_ptx.py`). Kernels are configured as for a device of that architecture (its profile).
The result speaks of the numerics of that code path: shared memory and registers of the older device are checked when it is
compiled (`ci/compile`), and its speed is not known from here.

FILE is that of a run (docs/dev/evidence.md) whose `target` is the older architecture: "its SM80 code ran on an H200". Times
compare kernels on one chip, cut for its multiprocessors; they are of a device that no profile has, and so are never kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import triton
from vllm_gpu.older_ptx import load_native_ptx_instead, load_ptx_instead

from mla_portable.capability.matrix import proven_by_ci
from mla_portable.capability.profiles import Profile, all_profiles
from mla_portable.choose import Registry, get_registry
from mla_portable.choose.facts import resolve_device
from mla_portable.choose.settings import ENV_BACKEND
from mla_portable.cli.app import app
from mla_portable.cli.recording import Recorder, case_of, recorder
from mla_portable.contracts import Primitive
from mla_portable.dispatch import serving
from mla_portable.judge.conformance import Case, CaseResult, run_suite
from mla_portable.judge.conformance.runner import run_installed


def run_older(capability: int, loaded: Path, case: Case, device: torch.device) -> CaseResult:
    """In a worker process: one case, on code for `capability`."""
    load_older(capability, loaded)
    return run_installed(case, device)


def load_older(capability: int, loaded: Path) -> None:
    """From now on this process compiles for `capability`, whichever compiler a kernel is for."""
    load_ptx_instead(capability, loaded)
    if find_spec("mla_portable_nvidia") is not None:
        load_native_ptx_instead(capability, loaded)


def older_profile(arch: str) -> Profile:
    """A profile of an older NVIDIA architecture. Raises: SystemExit when no profile has it, or no GPU is here."""
    if not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU that is newer than the architecture")
    older = next((profile for profile in all_profiles().values() if profile.arch == arch), None)
    if older is None or not arch.startswith("sm"):
        raise SystemExit(f"{arch}: no NVIDIA profile has this architecture")
    return older


def libraries_of(backend: str, older: Profile, registry: Registry) -> list[str]:
    """The implementations of a backend that a device would run, and whose kernels nobody here compiles for it."""
    compiled, facts = proven_by_ci(), older.device_facts()
    offers = [each for each in registry.implementations() if backend in (each.name, each.backend)]
    declared = [f"{each.name} / {each.primitive}" for each in offers if not [*each.support.device_reasons(facts)]]
    return [name for name in declared if older.arch not in compiled.get(name, ())]


@contextmanager
def kept(file: Recorder, level: str, loaded: Path) -> Generator[list[CaseResult]]:
    """A list for the results of cases: those in it are added to a run, also where something ends the rest.

    loaded: the file with the names of kernels that were loaded. Raises: SystemExit where there is none.
    """
    results: list[CaseResult] = []
    try:
        yield results
    finally:
        kernels = len(loaded.read_text(encoding="utf-8").splitlines())
        if kernels and results:
            file.add(level=level, cases=[case_of(each.as_dict()) for each in results])
            print(f"{kernels} kernels loaded as PTX; {len(results)} cases added to the run")
    if not kernels:
        raise SystemExit("loaded no kernel: nothing of the older architecture ran")


def bench(older: Profile, words: Sequence[str]) -> None:
    """Time the code for an older architecture. Raises: SystemExit, as the command ends."""
    here = get_registry().facts("cuda")
    cut = {"num_sms": here.num_sms, "memory_bytes": here.memory_bytes}
    facts = replace(older.device_facts(), name=f"{older.arch} code on {here.name}", **cut)
    with tempfile.TemporaryDirectory() as folder, serving(Registry(facts={"cuda": facts}, environ={}, probe=False)):
        loaded = Path(folder) / "loaded"
        loaded.touch()
        load_older(int(older.arch.removeprefix("sm")), loaded)
        name, *more = words or ["kernels"]
        app(["bench", name, "--device", "cuda", *(["--no-baselines"] if name == "kernels" else []), *more])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", help="sm80, sm86 or sm89")
    parser.add_argument("backend", nargs="?")
    parser.add_argument("--level", default="quick", choices=("smoke", "quick", "full"))
    parser.add_argument("--primitive", action="append", type=Primitive.named, help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes on the GPU; one that dies is a failed case")
    parser.add_argument("--out", type=Path, help="the file of a run; results are added to it")
    parser.add_argument("--who", help="who runs this; default: git's user.name, or the login")
    parser.add_argument("--commit", help="of the code, where git is not there to say it")
    parser.add_argument("--bench", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="time it instead")
    options = parser.parse_args()
    older = older_profile(options.arch)
    if options.bench is not None:
        bench(older, options.bench)
    if options.backend is None or options.out is None:
        parser.error("a run of the suite needs BACKEND and --out FILE")
    os.environ[ENV_BACKEND] = options.backend  # also for the parts of its implementations: no other plugin has older code here
    here = get_registry().facts("cuda")
    libraries = libraries_of(options.backend, older, get_registry())
    if libraries:
        raise SystemExit(f"{', '.join(libraries)}: not compiled here for {options.arch}; name an implementation that is")
    capability = int(options.arch.removeprefix("sm"))
    if here.vendor != "nvidia" or int(here.arch.removeprefix("sm")) <= capability:
        raise SystemExit(f"{here} is no NVIDIA GPU newer than {options.arch}")
    device, named = resolve_device("cuda"), {"who": options.who, "commit": options.commit}
    file = recorder(options.out, get_registry(), device, backends=[options.backend], target=options.arch, **named)
    registry = Registry(facts={"cuda": older.device_facts()}, environ={}, probe=False)
    with tempfile.TemporaryDirectory() as folder:
        loaded = Path(folder) / "loaded"
        loaded.touch()
        load_older(capability, loaded)  # here too, for the checks of implementations
        how = {"device": "cuda", "level": options.level, "primitives": options.primitive, "jobs": options.jobs}
        with kept(file, options.level, loaded) as results:
            how |= {
                "worker": partial(run_older, capability, loaded),
                "progress": lambda done, total, each: results.append(each),
            }
            report = run_suite(registry, options.backend, **how)
    for bad in (result for result in report.results if result.status != "passed"):
        print(f"{bad.status} {bad.case.id}: {bad.message}")
    print(f"{options.arch} code on {here}, triton {triton.__version__}: {report.passed} passed, {report.failed} failed")
    return int(not report.ok)


if __name__ == "__main__":
    sys.exit(main())
