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
from collections import Counter
from triton.runtime import interpreter
times = Counter()

def count(where, name):
    function = getattr(where, name)

    def counted(*arguments):
        times[name] += 1
        return function(*arguments)

    setattr(where, name, counted)

count(interpreter, "_patch_lang")
count(interpreter.TritonSemantic, "device_assert")  # what becomes of a sum that is out of range
count(interpreter.tl.core, "validate_block_shape")  # of each block type that is made
count(interpreter.TritonSemantic, "computation_type_impl")  # what two operands are converted to
import torch
from mla_portable.judge.conformance import run_case
from mla_portable.judge.problems.attention_problem import DecodeParams
from mla_portable.judge.problems.base import Case
from mla_portable.choose import get_registry

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
print(times["_patch_lang"], times["device_assert"], times["validate_block_shape"], times["computation_type_impl"])
"""


def run(way: str) -> list[str]:
    paths = [str(ROOT / "ci"), *filter(None, sys.path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, way], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_same_bits_with_less_work():
    plain, quick = run("plain"), run("quick")
    assert plain[:-1] == quick[:-1] and len(quick) == 3
    before, after = ([int(count) for count in lines[-1].split()] for lines in (plain, quick))
    replaced, asserted, made, converted = zip(after, before, strict=True)
    assert 10 * replaced[0] < replaced[1]
    assert asserted[0] == 0 < asserted[1]
    assert 10 * made[0] < made[1]
    assert 2 * converted[0] < converted[1]
