# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels of this plugin as machine code, compiled without a GPU and apart from tests, which interpret them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from compiling import compiling

__all__ = ["CompiledPass", "compile_passes"]

PROGRAM = r"""
import re, sys
from itertools import product
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mla_portable_nvidia.passes import boundary
from mla_portable_nvidia.fa3 import page_lists
from mla_portable_nvidia.flashmla import row_parts
from mla_portable_nvidia.passes.prepared_passes import PreparedPass, layout

folder, only = Path(sys.argv[1]), sys.argv[2:]
OWN = {
    "_spread_kernel": dict(PARTS=2, KERNEL_HEADS=64, BLOCK=4096),
    "_merge_kernel": dict(PARTS=2, KERNEL_HEADS=64, BLOCK_H=4, LSE=True, EARLY=True),
    "_sanitise_kernel": dict(BLOCK_K=1024),
    "_finish_kernel": dict(BLOCK_H=8),
    "_lse_kernel": dict(BLOCK=256, COLUMNS=32, EARLY=True),
    "_page_list_kernel": dict(BLOCK_K=128),
}
CHANGING = {"_sanitise_kernel": ["last_slot"], "_page_list_kernel": ["last_row"]}
BF16 = ("queries_ptr", "q_ptr", "parts_ptr", "result_ptr")
INTS = ("limits_ptr", "lengths_ptr", "indices_ptr", "pages_ptr", "counts_ptr")
values = [value for module in (boundary, page_lists, row_parts) for value in vars(module).values()]
passes = [each for each in values if isinstance(each, PreparedPass)]
assert {each._kernel.__name__ for each in passes} == set(OWN)
for arch, asked, each in product((90, 100), (True, False), passes):
    kernel = each._kernel
    if only and kernel.__name__ not in only:
        continue
    shared = dict(WIDTH=512, TOPK=100, BASE_2=asked, SINK=asked, HAS_LENGTHS=asked)
    names, constants = kernel.arg_names, {**shared, **OWN[kernel.__name__]}
    pointers = [name for name in names if name.endswith("_ptr")]
    integers = [name for name in names if name.islower() and name not in pointers]
    assert names[: len(pointers) + len(integers)] == pointers + integers, names
    changing = CHANGING.get(kernel.__name__, [])
    assert integers[: len(changing)] == changing, integers
    # Triton makes a constant of an integer that is 1, unless it may not
    assert all(each.do_not_specialize for each in kernel.params if each.name in changing)
    out = "*i32" if kernel.__name__ == "_sanitise_kernel" else "*bf16"
    types = {name: "*bf16" if name in BF16 else "*i32" if name in INTS else "*fp32" for name in pointers} | {"out_ptr": out}
    one = integers[-1]  # as if it had been 1
    signature = {name: types.get(name, "i32") if name.islower() and name != one else "constexpr" for name in names}
    places = {(names.index(name),): 1 if name == one else constants[name] for name in names if signature[name] == "constexpr"}
    made = compile(ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", arch, 32))
    fixed = tuple(range(2, len(integers) - len(changing) + 1)) + (1,)
    codes, values = layout(made, len(pointers), fixed, len(changing))
    assert ("griddepcontrol.wait" in made.asm["ptx"]) is constants.get("EARLY", False)
    entry = made.asm["ptx"].split(".visible .entry", 1)[1].split(")", 1)[0]
    taken = re.findall(r"\.param \.([bu]\d+)", entry)
    assert [size[1:] for size in taken] == ["32" if code == "i" else "64" for code in codes], (kernel.__name__, taken, codes)
    assert len(values) == len(codes) - len(pointers) - len(changing)
    (folder / f"{kernel.__name__}-{arch}-{asked}.cubin").write_bytes(made.asm["cubin"])
"""


class CompiledPass(NamedTuple):
    """kernel: its name. arch: 90 or 100. cubin: its machine code."""

    kernel: str
    arch: int
    cubin: bytes


def compile_passes(folder: Path, *kernels: str) -> list[CompiledPass]:
    """Those kernels, or all, as layers ask for them; it is asserted that they take what a prepared launch packs.

    folder: an empty one, for the program and what it makes.
    """
    program = folder / "compile_passes.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, str(program), str(folder), *kernels]
    done = subprocess.run(command, env=compiling(folder / "cache"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = [(file.stem.split("-"), file.read_bytes()) for file in sorted(folder.glob("*.cubin"))]
    return [CompiledPass(name, int(arch), cubin) for (name, arch, _), cubin in made]
