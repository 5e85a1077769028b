# SPDX-License-Identifier: Apache-2.0
"""Telling a kernel from a slow twin; finding ops where a generation puts them."""

from __future__ import annotations

import sys

import pytest
import torch
from corex_machine import installed

from mla_portable_iluvatar import native
from mla_portable_iluvatar.native import FLOOR, LIMIT, Trial, not_native
from mla_portable_iluvatar.resolve import Place, parameter_names

CPU = torch.device("cpu")


def nothing() -> None:
    return None


class Clock:
    """Time passes where a test says so, not while the machine is busy with something else."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(native, "time", made)
    return made


def test_a_kernel_is_no_twin(clock):
    assert list(not_native("op", Trial(nothing, lambda: clock.sleep(1e-3), CPU))) == []


def test_a_slow_op_is_one(clock):
    (reason,) = not_native("op", Trial(lambda: clock.sleep(20 * FLOOR), nothing, CPU))
    assert reason.subject == "speed" and "op took" in reason.given and f"{LIMIT:g} times" in reason.limit


def test_slow_runs_are_forgiven_for_a_fast_one(clock):
    """A busy machine slows single runs: the op's best counts."""
    runs = iter([0.0, 0.1, 0.0, *[0.1] * 9])
    assert list(not_native("op", Trial(lambda: clock.sleep(next(runs)), nothing, CPU))) == []


def test_a_yardstick_that_is_slowed_once_hides_nothing(clock):
    runs = iter([0.0, 0.2, *[0.0] * 20])
    found = list(not_native("op", Trial(lambda: clock.sleep(0.03), lambda: clock.sleep(next(runs)), CPU)))
    assert [reason.subject for reason in found] == ["speed"]


def test_a_few_microseconds_are_no_reason(clock):
    assert list(not_native("op", Trial(lambda: clock.sleep(FLOOR / 4), nothing, CPU))) == []


def ref_op() -> None:
    return None


def test_a_twin_is_told_by_its_name_however_deep_and_fast():
    def op() -> None:
        (lambda: ref_op())()

    (reason,) = not_native("op", Trial(op, nothing, CPU))
    assert "ref_op" in reason.given


def test_the_profile_hook_of_others_is_given_back():
    def theirs(frame, event, argument):
        return None

    sys.setprofile(theirs)
    try:
        list(not_native("op", Trial(nothing, nothing, CPU)))
        assert sys.getprofile() is theirs
    finally:
        sys.setprofile(None)


def test_a_stream_under_capture_is_not_disturbed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    (reason,) = not_native("op", Trial(lambda: pytest.fail("it ran"), nothing, torch.device("cuda")))
    assert "before capturing" in reason.remedy


def test_an_attribute_of_an_extension_is_found_behind_a_dotted_name():
    with installed({"ixtriturbo._C:ops.thing": nothing}):
        assert Place("ixtriturbo._C.ops", "thing").find() is nothing
        assert [r.subject for r in Place("ixtriturbo._C.ops", "other").missing()] == ["symbol"]
        assert [r.subject for r in Place("ixtriturbo._D.ops", "thing").missing()] == ["library"]
        assert [r.subject for r in Place("ixtriturbo._C.cuda", "thing").missing()] == ["library"]


def test_vllm_is_imported_before_packages_that_need_it(tmp_path, monkeypatch):
    """As the real ones, whose circular import fails otherwise."""
    (tmp_path / "vllm_iluvatar").mkdir()
    (tmp_path / "vllm.py").write_text("READY = True\n")
    (tmp_path / "vllm_iluvatar" / "__init__.py").write_text(
        "import sys\nif 'vllm' not in sys.modules:\n    raise ImportError('circular')\ndef thing(): return 1\n"
    )
    with installed({}):
        for name in ("vllm", "vllm_iluvatar"):
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert [r.subject for r in Place("vllm_iluvatar", "thing").missing()] == ["library"]
        assert list(Place("vllm_iluvatar", "thing", before=("vllm",)).missing()) == []


def test_parameters_are_read_where_they_can_be():
    def op(a, b, *, c=None): ...

    def anything(*args, **kwargs): ...

    assert parameter_names(op) == ("a", "b", "c")
    assert parameter_names(anything) is None
    assert parameter_names(torch.ops.aten.relu.default) == ("self",)
    assert parameter_names(torch.relu) is None


def test_a_compiled_op_without_a_signature_is_judged_by_its_results():
    with installed({"ixformer.functions:op": torch.relu}):
        assert list(Place("ixformer.functions", "op", parameters=("x", "y")).missing()) == []
