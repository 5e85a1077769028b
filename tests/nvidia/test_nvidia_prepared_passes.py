# SPDX-License-Identifier: Apache-2.0
"""Prepared launches of Triton's kernels: what is packed, when Triton is asked, and what the kernels take, as compiled."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mla_portable_nvidia import prepared_passes
from mla_portable_nvidia.prepared_passes import Arguments, PreparedPass, can_wait, layout, prepared

PARAMETERS = [(0, 8), (8, 8), (16, 4), (24, 8), (32, 8), (40, 8)]
"""(offset, size) of two pointers, 5 as i32, 2**40 as i64, two scratch pointers."""
INTEGERS = (5, 1, 2**40)


def compiled(**changes):
    """What a launch through Triton returns: the second integer was 1, so it is a constant."""
    plain = {"global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1, "launch_cooperative_grid": False}
    metadata = SimpleNamespace(**{**plain, "launch_pdl": False, "num_warps": 8, "shared": 48, **changes})
    types = {"a_ptr": "*bf16", "b_ptr": "*fp32", "n": "i32", "one": "constexpr", "big": "i64", "WIDTH": "constexpr"}
    return SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature=types), function=7, name="a_kernel")


@pytest.fixture
def driver(monkeypatch):
    """A driver that knows a kernel's parameters; `parameters` may be changed. Kernels record how they were prepared."""
    state = SimpleNamespace(parameters=list(PARAMETERS), prepared=[], launched=[])

    def ask(function, place, offset, size):
        if place.value >= len(state.parameters):
            return 1
        offset._obj.value, size._obj.value = state.parameters[place.value]
        return 0

    class Kernel:
        def __init__(self, module, function, name, changing, fixed, threads, shared, device):
            self.made = (function.value, name, changing, fixed, threads, shared, device)

        def prepare(self, grid, cluster, *fixed, starts_early):
            state.prepared.append((*self.made, grid, cluster, fixed, starts_early))
            return lambda *addresses: state.launched.append(addresses)

    monkeypatch.setattr(prepared_passes, "_parameter_info", lambda: ask)
    monkeypatch.setattr(prepared_passes, "Kernel", Kernel)
    return state


def test_what_a_kind_of_call_decides_is_packed_once(driver):
    launch = prepared(compiled(), (6, 3), 2, INTEGERS, 1, starts_early=True)
    assert launch is not None
    launch(64, 128)
    assert driver.prepared == [(7, "a_kernel", "QQ", "iqQQ", 256, 48, 1, (6, 3), 1, (5, 2**40, 0, 0), True)]
    assert driver.launched == [(64, 128)]


@pytest.mark.parametrize(
    "parameters", [PARAMETERS[:-1], [*PARAMETERS, (48, 8)], [*PARAMETERS[:2], (16, 8), *PARAMETERS[3:]], [(0, 8), (12, 8)]]
)
def test_a_kernel_that_takes_something_else_is_not_prepared(driver, parameters):
    driver.parameters[:] = parameters
    assert prepared(compiled(), (6, 3), 2, INTEGERS, 0) is None


@pytest.mark.parametrize(
    "change", [{"global_scratch_size": 64}, {"profile_scratch_size": 1}, {"num_ctas": 2}, {"launch_cooperative_grid": True}]
)
def test_a_kernel_that_triton_launches_in_another_way_is_not_prepared(driver, change):
    assert prepared(compiled(**change), (6, 3), 2, INTEGERS, 0) is None


def test_nothing_is_prepared_without_a_driver_or_by_the_interpreter(monkeypatch):
    monkeypatch.setattr(prepared_passes, "_parameter_info", lambda: None)
    assert prepared(compiled(), (6, 3), 2, INTEGERS, 0) is None
    assert prepared(None, (6, 3), 2, INTEGERS, 0) is None


@pytest.mark.parametrize(
    ("is_cuda", "hip", "capability", "can"),
    [(True, None, (9, 0), True), (True, None, (12, 0), True), (True, None, (8, 9), False), (True, "7.0", (9, 4), False),
     (False, None, (9, 0), False)],
)  # fmt: skip
def test_only_kernels_from_hopper_on_wait_by_themselves(is_cuda, hip, capability, can, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert can_wait(SimpleNamespace(is_cuda=is_cuda, device="cuda:0")) is can


class Tensor(SimpleNamespace):
    """An address on a device."""

    def data_ptr(self):
        return self.at

    def get_device(self):
        return self.device


class Through:
    """A kernel of Triton's that records its launches."""

    def __init__(self, result) -> None:
        self.result, self.calls = result, []

    def __getitem__(self, grid):
        return lambda *arguments, **named: (self.calls.append((grid, arguments, named)), self.result)[1]


def call(of: PreparedPass, kind: int, *at: int, device: int = 0) -> list[Tensor]:
    tensors = [Tensor(at=address, device=device) for address in at]
    of((kind,), tuple(tensors), lambda: Arguments((kind, 1), INTEGERS, {"num_warps": 8}))
    return tensors


def test_the_first_call_of_a_kind_goes_through_triton_and_the_others_to_the_driver(driver):
    kernel = Through(compiled())
    of = PreparedPass(kernel)
    tensors = call(of, 3, 64, 128)
    assert kernel.calls == [((3, 1), (*tensors, *INTEGERS), {"num_warps": 8})]
    call(of, 3, 160, 256)
    assert (len(kernel.calls), driver.launched) == (1, [(160, 256)])
    call(of, 4, 64, 128)  # another kind
    call(of, 3, 64, 132)  # Triton compiles addresses that are no multiples of 16 for themselves
    call(of, 3, 64, 128, device=1)
    assert (len(kernel.calls), len(driver.launched)) == (4, 1)
    call(of, 3, 64, 140)
    assert (len(kernel.calls), driver.launched[1:]) == (4, [(64, 140)])


def test_every_call_goes_through_triton_where_nothing_can_be_prepared(driver):
    kernel = Through(compiled(num_ctas=2))
    of = PreparedPass(kernel)
    for _ in range(3):
        call(of, 3, 64, 128)
    cpu = Through(None)
    for _ in range(2):
        call(PreparedPass(cpu), 3, 64, 128, device=-1)
    assert (len(kernel.calls), len(cpu.calls), driver.prepared) == (3, 2, [])


COMPILE = r"""
import re
from itertools import product
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mla_portable_nvidia import boundary, page_lists, row_parts
from mla_portable_nvidia.prepared_passes import PreparedPass, layout

OWN = {
    "_spread_kernel": dict(PARTS=2, KERNEL_HEADS=64, BLOCK=4096),
    "_merge_kernel": dict(PARTS=2, KERNEL_HEADS=64, BLOCK_H=4, LSE=True, EARLY=True),
    "_sanitise_kernel": dict(BLOCK_K=1024),
    "_finish_kernel": dict(BLOCK_H=8),
    "_lse_kernel": dict(BLOCK=256, COLUMNS=32, EARLY=True),
    "_page_list_kernel": dict(BLOCK_K=128),
}
BF16 = ("queries_ptr", "q_ptr", "parts_ptr", "result_ptr")
INTS = ("limits_ptr", "lengths_ptr", "indices_ptr", "pages_ptr", "counts_ptr")
values = [value for module in (boundary, page_lists, row_parts) for value in vars(module).values()]
passes = [each for each in values if isinstance(each, PreparedPass)]
assert {each._kernel.__name__ for each in passes} == set(OWN)
for arch, asked, each in product((90, 100), (True, False), passes):
    kernel = each._kernel
    shared = dict(WIDTH=512, TOPK=100, BASE_2=asked, SINK=asked, HAS_LENGTHS=asked)
    names, constants = kernel.arg_names, {**shared, **OWN[kernel.__name__]}
    pointers = [name for name in names if name.endswith("_ptr")]
    integers = [name for name in names if name.islower() and name not in pointers]
    assert names[: len(pointers) + len(integers)] == pointers + integers, names
    out = "*i32" if kernel.__name__ == "_sanitise_kernel" else "*bf16"
    types = {name: "*bf16" if name in BF16 else "*i32" if name in INTS else "*fp32" for name in pointers} | {"out_ptr": out}
    one = integers[-1]  # as if it had been 1
    signature = {name: types.get(name, "i32") if name.islower() and name != one else "constexpr" for name in names}
    places = {(names.index(name),): 1 if name == one else constants[name] for name in names if signature[name] == "constexpr"}
    made = compile(ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", arch, 32))
    codes, values = layout(made, len(pointers), tuple(range(2, len(integers) + 1)) + (1,))
    assert ("griddepcontrol.wait" in made.asm["ptx"]) is constants.get("EARLY", False)
    entry = made.asm["ptx"].split(".visible .entry", 1)[1].split(")", 1)[0]
    taken = re.findall(r"\.param \.([bu]\d+)", entry)
    assert [size[1:] for size in taken] == ["32" if code == "i" else "64" for code in codes], (kernel.__name__, taken, codes)
    assert len(values) == len(codes) - len(pointers)
print("compiled", len(passes))
"""


def test_kernels_compile_for_hopper_and_blackwell_and_take_what_is_packed(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path / "compile_passes.py"
    script.write_text(COMPILE)
    environ["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled 6", done.stderr


def test_codes_are_those_of_the_native_structures():
    codes, values = layout(compiled(), 2, INTEGERS)
    assert (codes, values) == ("QQiqQQ", (5, 2**40, 0, 0))
    offsets = [struct.calcsize(codes[: place + 1]) - struct.calcsize(code) for place, code in enumerate(codes)]
    assert list(zip(offsets, map(struct.calcsize, codes), strict=True)) == PARAMETERS
