# SPDX-License-Identifier: Apache-2.0
"""ci/interpreter.py: Triton's interpreter computes the same bits with less work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
if sys.argv[1] == "quick":
    import interpreter
from triton.runtime import interpreter
replace, times = interpreter._patch_lang, []

def counted(function):
    times.append(function)
    return replace(function)

interpreter._patch_lang = counted
import torch
from mla_portable.conformance import run_case
from mla_portable.problems.attention_problem import DecodeParams
from mla_portable.problems.base import Case
from mla_portable.registry import get_registry

torch.set_num_threads(1)
registry = get_registry()
offered = registry.implementations()
made = next(each for each in offered if (each.name, str(each.primitive)) == ("triton.portable", "sparse_decode"))
for kv, scale_format in (("fp8_ds_mla", "pow2"), ("bf16", None)):
    params = DecodeParams(
        kv=kv, scale_format=scale_format, heads=16, topk=64, block_size=16, query_len=1, rows=2, pattern="holes"
    )
    case = Case(made.name, params, params.request(registry.facts("cpu")))
    bound = made.bind(case.request)

    def call(*arguments, **options):
        results = bound(*arguments, **options)
        print(kv, *(hash(each.contiguous().view(torch.uint8).numpy().tobytes()) for each in results if each is not None))
        return results

    result = run_case(case, call, torch.device("cpu"))
    assert result.status == "passed", result.message
print("replaced", len(times))
"""


def run(way: str) -> list[str]:
    paths = [str(ROOT / "ci"), *filter(None, sys.path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, way], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_same_bits_with_the_language_replaced_once_a_launch():
    plain, quick = run("plain"), run("quick")
    assert plain[:-1] == quick[:-1] and len(quick) == 3
    every_call, every_launch = (int(lines[-1].split()[1]) for lines in (plain, quick))
    assert 10 * every_launch < every_call
