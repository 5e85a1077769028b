# SPDX-License-Identifier: Apache-2.0
"""Time the code that is made for an older NVIDIA architecture side by side on a newer GPU: native kernels beside Triton's.

    python ci/time_older_ptx.py sm80 [--layout L] [--heads N,N] [--rows N,N] [--prefill N] [--repeat N]

Both are loaded as PTX, as in `run_older_ptx.py`, and cut for the multiprocessors of the GPU that is there. What it prints
compares two kernels on one chip; it says nothing of the time on the older device, and is never recorded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from record_evidence import read
from run_older_ptx import load_older, older_profile

from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.problems.bench import kernel_cases
from mla_portable.registry import Registry, get_registry
from mla_portable.tools.bench.kernels import time_kernels

NATIVE, PORTABLE = "nvidia.native_sm80", "triton.portable"


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", help="sm80, sm86 or sm89")
    parser.add_argument("--layout", action="append", choices=("fp8_ds_mla", "bf16"))
    parser.add_argument("--heads", type=numbers, default=[16, 64, 128])
    parser.add_argument("--rows", type=numbers, default=[16, 64, 128], help="of a decode")
    parser.add_argument("--prefill", type=numbers, default=[1024], help="tokens")
    parser.add_argument("--repeat", type=int, default=11)
    options = parser.parse_args()
    older = older_profile(options.arch, read())
    here = get_registry().facts("cuda")
    facts = replace(older.device_facts(), num_sms=here.num_sms, memory_bytes=here.memory_bytes)
    layouts = options.layout or ["fp8_ds_mla", "bf16"]
    cases = [
        *kernel_cases([SPARSE_DECODE], heads=options.heads, rows=options.rows, layouts=layouts),
        *kernel_cases([SPARSE_PREFILL], heads=options.heads, rows=options.prefill, layouts=layouts),
    ]
    with tempfile.TemporaryDirectory() as folder:
        loaded = Path(folder) / "loaded"
        loaded.touch()
        load_older(int(options.arch.removeprefix("sm")), loaded)
        registry = Registry(facts={"cuda": facts}, environ={}, probe=False)
        backends = (NATIVE, PORTABLE)
        report = time_kernels(cases, device=torch.device("cuda"), registry=registry, backends=backends, repeat=options.repeat)
    print(f"{options.arch} code on {here}: us, median of {options.repeat} graph replays, L2 flushed")
    for case in report.cases:
        found = {each.name: each.median_us for each in case.times if each.ok}
        native, portable = found.get(NATIVE), found.get(PORTABLE)
        times = "  ".join(f"{name.partition('.')[0]} {'-' if us is None else f'{us:8.1f}'}" for name, us in found.items())
        ratio = f"  {portable / native:.2f}x" if native and portable else ""
        print(f"{case.case}:  {times}  bound {case.bound_us:.1f}{ratio}")
    defects = report.defects()
    print("\n".join(defects))
    return int(bool(defects))


if __name__ == "__main__":
    sys.exit(main())
