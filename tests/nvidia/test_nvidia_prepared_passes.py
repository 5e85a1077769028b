# SPDX-License-Identifier: Apache-2.0
"""Prepared launches of Triton's kernels: what is packed, when Triton is asked, and what the kernels take, as compiled."""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace

import pytest
import torch
from compiled_passes import compile_passes

from mla_portable.kit.triton_launcher import OPTIONS
from mla_portable_nvidia.fa3 import page_lists
from mla_portable_nvidia.fa3.page_lists import PageLists
from mla_portable_nvidia.passes import boundary, early_start, prepared_passes
from mla_portable_nvidia.passes.boundary import Boundary
from mla_portable_nvidia.passes.early_start import can_wait
from mla_portable_nvidia.passes.prepared_passes import Arguments, PreparedPass, layout, prepared

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


def test_no_kernel_of_an_older_triton_waits_by_itself(monkeypatch):
    """One before 3.4: passes start when the kernel in front has ended, as any kernel does."""
    monkeypatch.setattr(early_start, "wait_for_kernel_in_front", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not can_wait(SimpleNamespace(is_cuda=True, device="cuda:0"))


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


def pointer(name: str, place: int, *, anywhere: bool) -> SimpleNamespace:
    """A parameter of a kernel, as Triton describes it."""
    named = {"name": name, "num": place, "is_constexpr": False, "do_not_specialize": False}
    return SimpleNamespace(**named, do_not_specialize_on_alignment=anywhere)


def test_the_first_call_of_a_kind_goes_through_triton_and_the_others_to_the_driver(driver):
    kernel = Through(compiled())
    kernel.params = [pointer("lengths_ptr", 0, anywhere=True), pointer("out_ptr", 1, anywhere=False)]
    of = PreparedPass(kernel)
    tensors = call(of, 3, 64, 128)
    assert kernel.calls == [((3, 1), (*tensors, *INTEGERS), {"num_warps": 8, **OPTIONS})]
    call(of, 3, 160, 256)
    assert (len(kernel.calls), driver.launched) == (1, [(160, 256)])
    call(of, 4, 64, 128)  # another kind
    call(of, 3, 64, 132)  # Triton compiles addresses that are no multiples of 16 for themselves
    call(of, 3, 64, 128, device=1)
    assert (len(kernel.calls), len(driver.launched)) == (4, 1)
    call(of, 3, 64, 140)
    call(of, 3, 68, 140)  # the first of them serves from any address
    assert (len(kernel.calls), driver.launched[1:]) == (4, [(64, 140), (68, 140)])


def test_every_call_goes_through_triton_where_nothing_can_be_prepared(driver):
    kernel = Through(compiled(num_ctas=2))
    of = PreparedPass(kernel)
    for _ in range(3):
        call(of, 3, 64, 128)
    cpu = Through(None)
    for _ in range(2):
        call(PreparedPass(cpu), 3, 64, 128, device=-1)
    assert (len(kernel.calls), len(cpu.calls), driver.prepared) == (3, 2, [])


def test_kernels_compile_for_hopper_and_blackwell_and_take_what_is_packed(tmp_path):
    assert len({made.kernel for made in compile_passes(tmp_path)}) == 6


class Contiguous(Tensor):
    """Such a tensor with a shape."""

    def stride(self, axis=None):
        strides = [math.prod(self.shape[place + 1 :]) for place in range(len(self.shape))]
        return tuple(strides) if axis is None else strides[axis]


def on_device(*shape: int) -> Contiguous:
    return Contiguous(shape=shape, at=1024, device=0)


PASSES_OF_LENGTHS = {
    "_list": (page_lists, lambda rows: PageLists()(on_device(3, 128), on_device(3), on_device(3, 128), None, rows)),
    "_sanitise": (boundary, lambda rows: Boundary().sanitise(on_device(3, 1, 128), on_device(3, 1, 128), None, rows)),
}


@pytest.mark.parametrize("name", PASSES_OF_LENGTHS)
def test_workspaces_of_a_thousand_lengths_leave_one_prepared_launch(driver, monkeypatch, name):
    """A prefill's workspace is as long as its step needs. Preparing a launch goes through Triton: 50 us of the host."""
    module, prefill = PASSES_OF_LENGTHS[name]
    parameters = getattr(module, name)._kernel.arg_names
    pointers = sum(each.endswith("_ptr") for each in parameters)
    made = compiled()
    types = ["*i32"] * pointers + ["constexpr" if each.isupper() else "i32" for each in parameters[pointers:]]
    made.src.signature = dict(zip(parameters, types, strict=True))
    through = Through(made)
    of = PreparedPass(through)
    monkeypatch.setattr(module, name, of)
    monkeypatch.setattr(prepared_passes, "_takes", lambda function, codes: True)
    for num_rows in range(1, 1001):
        prefill(num_rows)
    assert (len(of._launches), len(through.calls), len(driver.launched)) == (1, 1, 999)
    last_rows = [through.calls[0][1][pointers], *(given[pointers] for given in driver.launched)]
    assert last_rows == list(range(1000)), "each call has its own"


def test_an_integer_that_changes_is_given_to_each_launch_and_the_others_are_packed(driver):
    kernel = Through(compiled())
    of = PreparedPass(kernel)
    tensors = tuple(Tensor(at=address, device=0) for address in (64, 128))
    for changing in (5, 6):
        of((), tensors, lambda: Arguments((1, 1), INTEGERS[1:], {}), (changing,))
    assert kernel.calls == [((1, 1), (*tensors, *INTEGERS), OPTIONS)] and driver.launched == [(64, 128, 6)]
    assert driver.prepared == [(7, "a_kernel", "QQi", "qQQ", 256, 48, 0, (1, 1), 1, (2**40, 0, 0), False)]


def test_nothing_is_prepared_where_triton_made_a_constant_of_what_changes(driver):
    assert prepared(compiled(), (6, 3), 2, INTEGERS[2:], 0, changing=2) is None


def test_codes_are_those_of_the_native_structures():
    codes, values = layout(compiled(), 2, INTEGERS)
    assert (codes, values) == ("QQiqQQ", (5, 2**40, 0, 0))
    offsets = [struct.calcsize(codes[: place + 1]) - struct.calcsize(code) for place, code in enumerate(codes)]
    assert list(zip(offsets, map(struct.calcsize, codes), strict=True)) == PARAMETERS
