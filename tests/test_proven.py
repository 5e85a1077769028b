# SPDX-License-Identifier: Apache-2.0
"""ci/proven.py: the list of what continuous integration proves says what ran, no more and no less."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kernels import load_file
from fake_plugins import implementation, make_plugin

from mla_portable.capability.matrix import proven_by_ci
from mla_portable.choose import Registry, get_registry
from mla_portable.contracts import Primitive, Support
from mla_portable.judge.conformance import run_case
from mla_portable.judge.problems import cases_for
from mla_portable.primitives import MERGE_STATES, SPARSE_PREFILL
from mla_portable_triton import compile_all

proven: Any = load_file("proven", str(Path(__file__).parents[1] / "ci" / "proven.py"))
MERGES = "triton.portable / merge_states"
MINE = Support(source="a test", device_types=("cuda", "cpu"))


def offered(*names: str) -> list[Any]:
    plugin = make_plugin(*(implementation(name, MERGE_STATES, MINE) for name in names))
    return list(Registry(plugins=[("triton", plugin)], environ={}, probe=False).implementations())


def record(arch: str, kernel: str, error: str = "") -> dict[str, str]:
    return {"arch": arch, "label": kernel, "kernel": kernel, "error": error}


def test_what_compiled_is_proven_of_the_implementations_that_launch_it() -> None:
    ran = proven.of_compilation([record("sm80", "merge_states_kernel")], offered("triton.portable", "triton.mine"))
    assert ran == {MERGES: {"sm80": True}}, "of triton.mine nothing is known"
    for records in (
        [record("sm80", "merge_states_kernel", "does not fit"), record("sm80", "merge_states_kernel")],
        [record("sm80", "cache_write_kernel")],
    ):
        assert proven.of_compilation(records, offered("triton.portable")) == {MERGES: {"sm80": False}}


def test_the_suite_proves_what_it_passed_on_a_cpu() -> None:
    report = {
        "device": {"device_type": "cpu", "name": "a CPU"},
        "level": "quick",
        "unavailable": [{"implementation": "a.v1", "primitive": "cache_write"}],
        "cases": [
            {"implementation": "a.v1", "primitive": primitive, "status": status}
            for primitive, status in (("merge_states", "passed"), ("topk_select", "failed"), ("topk_select", "passed"))
        ],
    }
    ran = proven.ran_in(json.dumps(report, indent=1), ())
    assert ran == {
        "a.v1 / cache_write": {"cpu": False},
        "a.v1 / merge_states": {"cpu": True},
        "a.v1 / topk_select": {"cpu": False},
    }
    for change in ({"level": "smoke"}, {"device": {"device_type": "cuda", "name": "a GPU"}}):
        with pytest.raises(SystemExit, match="expected a CPU"):
            proven.of_conformance(report | change)


def test_a_list_that_says_more_or_less_is_refused_and_corrected() -> None:
    ran = {MERGES: {"sm80": True, "sm86": False}, "a.v1 / merge_states": {"cpu": False}}
    listed = {MERGES: ["gfx942", "sm86"], "a.v1 / merge_states": ["cpu"], "b.v1 / merge_states": ["cpu"]}
    assert proven.problems(listed, ran) == [
        f"{MERGES}, sm80: proven, and not listed",
        f"{MERGES}, sm86: listed, and not proven by this run",
        "a.v1 / merge_states, cpu: listed, and not proven by this run",
    ]
    corrected = proven.corrected(listed, ran)
    assert corrected == {"b.v1 / merge_states": ["cpu"], MERGES: ["gfx942", "sm80"]}
    assert proven.problems(corrected, ran) == []


def test_the_command_checks_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    names = (name for kernels in compile_all.KERNELS.values() for name in kernels)
    (tmp_path / "records").write_text("".join(json.dumps(record("sm80", name)) + "\n" for name in names))
    (tmp_path / "ci.json").write_text("{}")
    monkeypatch.setattr(proven, "CAPABILITY", tmp_path)
    for options, status in (([], 1), (["--write"], 0), ([], 0)):
        monkeypatch.setattr("sys.argv", ["proven.py", *options, str(tmp_path / "records")])
        assert proven.main() == status, capsys.readouterr().out
    assert proven_by_ci(tmp_path) == {entry: ["sm80"] for entry in sorted(compile_all.KERNELS)}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of kernels that Triton's interpreter launches."""
    from triton.runtime import interpreter

    names: set[str] = set()
    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        names.add(self.fn.__name__)
        run(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    yield names


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
@pytest.mark.parametrize("primitive", list(Primitive.all()), ids=str)
def test_what_an_implementation_launches_is_what_compiles_for_it(primitive: Primitive[Any], launched: set[str]) -> None:
    registry = get_registry()
    here = registry.facts("cpu")
    (mine,) = (each for each in registry.implementations(primitive) if each.name == "triton.portable")
    kernels = set(compile_all.KERNELS[f"{mine.name} / {primitive}"])
    of_each_layout = {case.request.kv_layout: case for case in reversed(cases_for(mine, here, "smoke"))}
    for case in of_each_layout.values():
        assert run_case(case, mine.bind(case.request), torch.device("cpu")).status == "passed", case.id
    assert launched and launched <= kernels
    assert primitive != SPARSE_PREFILL or launched == kernels


def test_every_kernel_that_compiles_is_launched_by_something() -> None:
    modules = compile_all.kernel_modules()
    compiled = {variant.kernel.__name__ for module in modules for variant in compile_all.variants_of(module, "sm80")}
    assert compiled == {name for kernels in compile_all.KERNELS.values() for name in kernels}
    registry = get_registry()
    assert set(compile_all.KERNELS) == {
        f"{e.name} / {e.primitive}" for e in registry.implementations() if e.backend == "triton"
    }
