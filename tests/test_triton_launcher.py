# SPDX-License-Identifier: Apache-2.0
"""TritonLauncher against Triton's own way of telling calls apart; what it launches is a stand-in, for there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_portable.kit.triton_launcher as module
from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, create_function_from_signature


def _kernel(a_ptr, b_ptr, c_ptr, scale, stride, size, count, FLAG: tl.constexpr, WIDTH: tl.constexpr):
    """Never runs."""


class Machine:
    """What `kernel[grid]` and `compiled[grid]` are asked for; each compilation knows what Triton made it for."""

    class Compiled:
        def __init__(self, machine: Machine, meaning: object) -> None:
            self.machine, self.meaning = machine, meaning

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any) -> None:
                named = dict(zip(("FLAG", "WIDTH"), arguments[7:], strict=True))
                assert _same(self.machine.meaning(*arguments[:7], **named), self.meaning)
                self.machine.again.append((grid, arguments))

            return launch

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        function = JITFunction(_kernel, do_not_specialize=["size", "count"], **at_any_address("b_ptr"))
        self.params, self.first, self.again = function.params, 0, []
        self.compiled: dict[str, Machine.Compiled] = {}
        backend = backends["nvidia"].compiler(GPUTarget("cuda", 90, 32))
        self.binder = create_function_from_signature(function.signature, function.params, backend)

    def meaning(self, *arguments: Any, **named: Any) -> object:
        return self.binder(*arguments, **named)[1]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Any:
            self.first += 1
            options = {name: named.pop(name) for name in ("num_warps", "enable_fp_fusion") if name in named}
            self.options.append(options)
            meaning = self.meaning(*arguments, **named)
            return self.compiled.setdefault(repr(meaning), self.Compiled(self, meaning))

        return launch


def _same(one: object, other: object) -> bool:
    """Triton's own key is their text: 1, 1.0 and True are equal and three constants."""
    return repr(one) == repr(other)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(module, "_machine_code", lambda device_type: Machine.Compiled)
    return Machine()


MEMORY = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.int32)}
POINTERS = st.builds(lambda dtype, at: MEMORY[dtype][at:], st.sampled_from(list(MEMORY)), st.sampled_from([0, 1, 8, 16]))
INTEGERS = st.sampled_from(
    [0, 1, 2, 15, 16, 17, 32, 4096, 2**31 - 1, 2**31, 2**31 + 16, 2**40, -1, -16, -(2**31), -(2**31) - 1]
)
NUMBERS = INTEGERS | st.sampled_from([True, 1.0, 16.0, 0.5, 1e30])
CALLS = st.tuples(
    st.tuples(POINTERS, POINTERS, POINTERS | st.none(), st.sampled_from([0.5, 1.0, 1, True]), NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from([False, True, 1, 1.0]),
    st.sampled_from([64, 128, 1, True]),
)


@settings(deadline=None, max_examples=300)
@given(calls=st.lists(CALLS, min_size=2, max_size=12), repeats=st.integers(0, 11))
def test_a_call_gets_the_compilation_that_triton_would_choose(calls: list[Any], repeats: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_machine_code", lambda device_type: Machine.Compiled)
        machine = Machine()
        launch = TritonLauncher(machine)
        for arguments, flag, width in [*calls, *calls[: repeats + 1]]:
            launch((3,), *arguments, FLAG=flag, WIDTH=width, num_warps=4)
        assert machine.first + len(machine.again) == len(calls) + len(calls[: repeats + 1])


def test_only_what_triton_specialises_makes_a_call_another_one(machine: Machine):
    launch = TritonLauncher(machine)
    a, b = MEMORY[torch.bfloat16], MEMORY[torch.int32]

    def call(*, pointer: Any = a, index: Any = b, stride: int = 576, size: int = 7, count: int = 9, flag: bool = False) -> None:
        launch((5, 2), pointer, index, None, 0.5, stride, size, count, FLAG=flag, WIDTH=64, num_warps=4)

    call()
    call()
    for size in (1, 16, 2**31 - 1):
        call(size=size, count=-size)
    call(pointer=a.clone())
    call(index=b[1:])
    assert machine.first == 2 and len(machine.again) == 5
    assert machine.again[0][0] == (5, 2, 1, 1) and machine.again[0][1][4:] == (576, 1, -1, False, 64)
    for other in (
        {"pointer": a[1:]},
        {"pointer": a.half()},
        {"index": b.long()},
        {"stride": 577},
        {"flag": True},
        {"size": 2**31},
        {"count": -(2**40)},
    ):
        call(**other)
    assert machine.first == 9
    for first in (10, 11):
        call(size=2**31)
        assert machine.first == first, "beyond 32 bits Triton is asked every time"


@pytest.mark.parametrize("others", [(1.0, True), (True, 1), (1, 1.0)])
@pytest.mark.parametrize("name", ["scale", "stride", "size", "flag"])
def test_equal_values_of_another_type_get_their_own_compilation(machine: Machine, name: str, others: tuple[Any, Any]):
    launch, a = TritonLauncher(machine), MEMORY[torch.float32]
    for value in (*others, *others, *others):
        given = {"scale": 0.5, "stride": 16, "size": 5, "flag": False} | {name: value}
        launch((1,), a, a, a, given["scale"], given["stride"], given["size"], 5, FLAG=given["flag"], WIDTH=64)
    assert machine.first + len(machine.again) == 6, "Compiled.__getitem__ compares what each launch means"


def test_constants_in_another_order_are_not_taken_for_each_other(machine: Machine):
    launch, a = TritonLauncher(machine), MEMORY[torch.float32]
    one, other = {"FLAG": 1, "WIDTH": 64}, {"WIDTH": 1, "FLAG": 64}
    for named in (one, one, other, one, other):
        launch((1,), a, a, a, 0.5, 16, 5, 5, **named)
    assert (machine.first, len(machine.again)) == (4, 1), "Compiled.__getitem__ compares what each launch means"


def test_a_second_compilation_for_calls_that_look_alike_leaves_all_launches_to_triton(machine: Machine, caplog: Any):
    launch, a = TritonLauncher(machine), MEMORY[torch.float32]
    for count in range(1, 6):
        machine.compiled.clear()  # as if Triton told the calls apart by something else
        launch((1,), a, a, a, 0.5, 16, 5, 5, FLAG=True, WIDTH=64)
        assert machine.first == count and machine.again == []
    assert "compiled" in caplog.text and len(caplog.records) == 1


def test_another_device_has_a_compilation_of_its_own(machine: Machine):
    launch, a = TritonLauncher(machine), MEMORY[torch.bfloat16]
    for device, first in ((0, 1), (1, 2), (0, 3), (1, 4), (0, 4), (1, 4)):
        launch._current_index = lambda device=device: device
        launch((1,), a, a, None, 0.5, 16, 1, 1, FLAG=False, WIDTH=64, num_warps=4)
        assert machine.first == first


def test_where_nothing_is_known_of_triton_it_is_asked_every_time(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_machine_code", lambda device_type: None)
    launch, a = TritonLauncher(machine), MEMORY[torch.bfloat16]
    for first in (1, 2, 3):
        launch((1,), a, a, None, 0.5, 16, 1, 1, FLAG=False, WIDTH=64, num_warps=4)
        assert machine.first == first
    assert machine.again == []


@pytest.mark.parametrize(
    ("version", "hip", "kept"),
    [
        *(("3.4.0", None, False), ("3.5.1", None, True), ("3.6.0", None, True), ("3.7.1", None, True)),
        *(("3.8.0", None, True), ("3.9.0", None, True), ("3.10.0", None, False), ("4.0.0", None, False)),
        ("3.6.0", "6.4", False),
    ],
)
def test_which_tritons_are_known(version: str, hip: str | None, kept: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (module._machine_code.__wrapped__("cuda") is not None) is kept
    why = module.why_through_triton("cuda")
    assert why is None if kept else version in why or "ROCm" in why


def test_every_compilation_states_that_products_and_sums_are_fused(machine: Machine):
    """Triton warns where it is not stated, and its default changes with 3.10."""
    launch, a = TritonLauncher(machine), MEMORY[torch.bfloat16]
    for size in (1, 1, 2**31):  # the first two calls of a key, and one that Triton is always asked for
        launch((1,), a, a, None, 0.5, 16, size, 1, FLAG=False, WIDTH=64, num_warps=4)
    launch((1,), a, a, None, 0.5, 16.0, 1, 1, FLAG=False, WIDTH=64, num_warps=4)
    assert machine.options == [{"num_warps": 4, "enable_fp_fusion": True}] * 4


def test_what_is_kept_is_bounded(machine: Machine):
    launch, a = TritonLauncher(machine), MEMORY[torch.bfloat16]
    for stride in range(module._KEPT + 5):
        for _ in range(2):
            launch((1,), a, a, None, 0.5, stride, 1, 1, FLAG=False, WIDTH=64, num_warps=4)
    assert machine.first == 2 * (module._KEPT + 5) and len(launch._known) == 5
    for stride in range(module._KEPT + 5, 2 * module._KEPT + 10):
        launch((1,), a, a, None, 0.5, stride, 1, 1, FLAG=False, WIDTH=64, num_warps=4)
    assert len(launch._met) == 5


def test_interpreted_kernels_are_called_as_ever():
    calls = []

    class Interpreted:
        def __getitem__(self, grid):
            return lambda *arguments, **named: calls.append((grid, arguments, named))

    TritonLauncher(Interpreted())((2,), 1, 2, WIDTH=3)
    assert calls == [((2,), (1, 2), {"WIDTH": 3, "enable_fp_fusion": True})]


def test_a_mask_with_a_scalar_operand_is_taken_by_the_interpreter():
    """Triton 3.9's refuses it as it is. In a process of its own: Triton decides on the interpreter when it decorates."""
    script = Path(__file__).with_name("interpreted_mask.py")
    run = subprocess.run(
        [sys.executable, script], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.stdout == "[1.0, 2.0, 3.0, 0.0]\n", run.stderr
