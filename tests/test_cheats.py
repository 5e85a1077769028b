# SPDX-License-Identifier: Apache-2.0
"""Every known way to make evidence say more than what ran, and the gate that refuses it.

Each begins with the same repository, whose evidence passes every gate, and changes one thing. What no gate can see is in
docs/matrix.md, with what holds instead.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from machines import H200
from reporting import ROOT
from test_bench_records import HEADER

from mla_portable.primitives import MERGE_STATES
from mla_portable.registry import get_registry
from mla_portable.tools.conformance import CaseResult, cases_for, tolerances
from mla_portable.tools.conformance import Report as Results
from mla_portable.tools.matrix import records
from mla_portable.tools.matrix.claims import Declarations, collect_declarations
from mla_portable.tools.matrix.generated import differences, generate
from mla_portable.tools.matrix.levels import Hashes
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.profiles import load_profiles
from mla_portable.tools.matrix.record import benchmark_report, conformance_report
from mla_portable.tools.matrix.reports import unpacked, write_report
from mla_portable.tools.provenance import Provenance

PROFILES = load_profiles(ROOT / "capability" / "profiles")
NAME = "triton.portable"
FACTS = replace(H200, memory_bytes=143156 << 20, has_fp8_conversion=True)
HASHED = """
import pathlib
print(pathlib.Path("hashes.json").read_text())
"""
Document = dict[str, Any]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_gates", ROOT / "ci" / "gates.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GATES = script()


class Repository:
    """A checkout with evidence, and the gates of this repository on it."""

    def __init__(self, root: Path) -> None:
        self.root, self.capability = root, root / "capability"

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        return subprocess.run(["git", *who, *words], cwd=self.root, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, message: str = "change") -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", message, "--allow-empty")
        return self.git("rev-parse", "HEAD")

    def index(self) -> None:
        for path, text in records.index_of(self.capability, load_profiles(self.capability / "profiles")).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def reports(self, kind: str) -> dict[Path, Document]:
        found = {path: json.loads(unpacked(path)) for path in sorted((self.capability / "reports").glob("*.json.gz"))}
        return {path: document for path, document in found.items() if document["kind"] == kind}

    def spoil(self, kind: str, change: Callable[[Document], object]) -> None:
        """Replace one report by a changed one, under its right name, and the records by what follows."""
        path, document = next(iter(self.reports(kind).items()))
        change(document)
        path.unlink()
        write_report(self.capability, document)
        self.index()

    def refused(self, gate: str, base: str | None = None) -> list[str]:
        for name in ("records", "reports", "hashes_at", "limits_of"):
            getattr(GATES, name).cache_clear()
        try:
            return GATES.GATES[gate](argparse.Namespace(base=base, arch=[]))
        except RecordError as error:
            return [str(error)]


def suite(**run: Any) -> Document:
    """A run of the suite on an H200, as it would be if all of it passed."""
    registry = get_registry()
    (kernel,) = [each for each in registry.implementations(MERGE_STATES) if each.name == NAME]
    limits = {quantity: row.rel or row.abs for (p, _, quantity), row in tolerances().items() if p == MERGE_STATES}
    limit = next(each for each in limits.values() if each)
    results = [
        CaseResult(case, "passed", {"out": 0.5 * limit}, {"out": limit}, "", 0.01 * number)
        for number, case in enumerate(cases_for(kernel, FACTS, "quick"), start=1)
    ]
    versions = (("python", "3.12.0"), ("torch", "2.11.0"), ("triton", "3.6.0"))
    document = conformance_report(Results("triton", "quick", FACTS, versions, tuple(results)), DECLARED, at(), driver="580.1")
    return document | run


def at() -> Provenance:
    return Provenance("2026-11-02T10:00:00Z", "python ci/record_evidence.py conform triton", "0" * 16, "0" * 40, {})


def timed(us: float = 50.0, **run: Any) -> Document:
    """A run of the benchmark."""
    (claim,) = [each for each in DECLARED.claims if each.primitive == MERGE_STATES]
    shared = {"primitive": "merge_states", "layout": None, "heads": 16, "topk": None, "rows": 64, "overlap": 0, "shape": "T 64"}
    figures = {"bytes": 86_000_000, "flops": 1000, "bound_us": 20.0, "wrong": [], "failure": "", "runs": 30}
    both = [(NAME, "implementation", us), ("other.v1", "baseline", 80.0)]
    lines = [
        {**shared, **figures, "name": name, "role": role, "median_us": t, "p10_us": 0.99 * t, "p90_us": 1.01 * t}
        | {"source_hash": HASHES.sources[NAME, "merge_states", "sm90"] if role == "implementation" else None}
        for name, role, t in both
    ]
    return benchmark_report(HEADER | {"device": suite()["device"], "machine": "0" * 16}, lines, Declarations((claim,))) | run


EVERYTHING = collect_declarations(get_registry(), PROFILES)
DECLARED = Declarations(tuple(c for c in EVERYTHING.claims if c.implementation == NAME and c.primitive == MERGE_STATES))
HASHES: Hashes = records.hashes_of(DECLARED, [profile.arch for profile in PROFILES.values()])


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite and a benchmark of one kernel on an H200, at a commit whose sources have their hashes."""
    repository = Repository(tmp_path_factory.mktemp("honest"))
    repository.git("init", "-q", "-b", "work")
    shutil.copytree(ROOT / "capability" / "profiles", repository.capability / "profiles")
    (repository.root / "ci").mkdir()
    (repository.root / "ci" / "record_evidence.py").write_text(HASHED)
    told = {"sources": {"/".join(name): sha for name, sha in HASHES.sources.items()}, "suite": dict(HASHES.suite)}
    (repository.root / "hashes.json").write_text(json.dumps(told))
    code = repository.commit("code")
    for document in (suite(), timed()):
        write_report(repository.capability, document | {"commit": code, "recorded": after(repository, code)})
    repository.index()
    repository.commit("evidence")
    return repository.root


def after(repository: Repository, commit: str, seconds: int = 60) -> str:
    """A minute after a commit was made."""
    from datetime import datetime, timezone

    made = int(repository.git("show", "-s", "--format=%ct", commit)) + seconds
    return datetime.fromtimestamp(made, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture
def repository(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    shutil.copytree(honest, tmp_path / "copy")
    made = Repository(tmp_path / "copy")
    monkeypatch.setattr(GATES, "ROOT", made.root)
    monkeypatch.setattr(GATES, "CAPABILITY", made.capability)
    monkeypatch.setattr(records, "collect_declarations", lambda registry, profiles: DECLARED)
    monkeypatch.setattr(records, "hashes_of", lambda declared, archs: HASHES)
    monkeypatch.setattr(records, "find_records", lambda given=None: given or made.capability)
    yield made


CONTRIBUTED = ("schema", "reports", "commits", "history")


@pytest.mark.parametrize("gate", CONTRIBUTED)
def test_honest_evidence_passes(repository: Repository, gate: str) -> None:
    assert repository.refused(gate, "HEAD~1") == []


def line_of(repository: Repository, **changes: Any) -> str:
    text = (repository.capability / "evidence" / "h200" / "triton.jsonl").read_text().splitlines()[0]
    return json.dumps(json.loads(text) | changes, sort_keys=True) + "\n"


def typed(repository: Repository, **changes: Any) -> None:
    path = repository.capability / "evidence" / "b200" / "triton.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    device = {"profile": "b200", "name": "NVIDIA B200", "arch": "sm100"}
    path.write_text(line_of(repository, **({"device": device} | changes)))


def first(change: Callable[[Document], object]) -> Callable[[Document], object]:
    """A change of the first case, or line."""
    return lambda report: change(report["cases"][0] if "cases" in report else report["lines"][0])


def failing(case: Document) -> None:
    case.update(status="failed", message="out: off")


def widen_a_pattern(repository: Repository) -> None:
    path = repository.capability / "profiles" / "a10.toml"
    path.write_text(
        "\n".join("pattern = 'NVIDIA .*A10|NVIDIA RTX 3050'" if "pattern =" in x else x for x in path.read_text().split("\n"))
    )
    repository.spoil("conformance", lambda r: r["device"].update(name="NVIDIA RTX 3050", arch="sm86", num_sms=20))


def again(repository: Repository, **changes: Any) -> None:
    """The same figures once more, as another report."""
    document = next(iter(repository.reports("conformance").values()))
    write_report(repository.capability, document | changes)
    repository.index()


def fail_then_delete(repository: Repository) -> None:
    document = copy.deepcopy(next(iter(repository.reports("conformance").values())))
    failing(document["cases"][0])
    document["recorded"] = after(repository, "HEAD", 120)
    path = write_report(repository.capability, document)
    repository.index()
    repository.commit("a failing run")
    path.unlink()
    repository.index()
    repository.commit("no failing run")


def own_key(repository: Repository) -> None:
    again(repository, machine="f" * 16)
    (repository.capability / "signers").write_text("me@example.invalid ssh-ed25519 AAAA\n")
    repository.commit()


WRITING = "no report, or no record, is made of it"
Cheat = Callable[[Repository], object]
CHEATS: dict[str, tuple[str, Cheat]] = {
    # records
    "a record that is typed": ("reports", lambda r: typed(r, report=None)),
    "a record of a report that is not there": ("reports", lambda r: typed(r, report="e" * 64)),
    "a record of a report that says less": ("reports", lambda r: typed(r)),
    "a record that is edited": (
        "reports",
        lambda r: (r.capability / "evidence/h200/triton.jsonl").write_text(
            line_of(r, cases={"passed": 9999, "failed": 0, "skipped": 0})
        ),
    ),
    "a record that is deleted": ("reports", lambda r: (r.capability / "evidence/h200/triton.jsonl").write_text(line_of(r))),
    "a device without a profile": ("schema", lambda r: (r.capability / "profiles/h200.toml").unlink()),
    # commits
    "a commit that does not exist": ("commits", lambda r: r.spoil("conformance", lambda d: d.update(commit="deadbeef" * 5))),
    "a commit of a branch that was never merged": (
        "commits",
        lambda r: r.spoil("benchmark", lambda d: d.update(commit=r.git("commit-tree", "-m", "x", "HEAD^{tree}"))),
    ),
    "another commit's sources": (
        "commits",
        lambda r: r.spoil("conformance", lambda d: d["claims"][0].update(source_hash="0" * 64)),
    ),
    "another commit's suite": (
        "commits",
        lambda r: r.spoil("conformance", lambda d: d["claims"][0].update(suite_hash="0" * 64)),
    ),
    "a run before its commit": (
        "commits",
        lambda r: r.spoil("conformance", lambda d: d.update(recorded="2020-01-01T00:00:00Z")),
    ),
    "a run of no commit": (
        "commits",
        lambda r: r.spoil("conformance", lambda d: d.update(commit=None)),
    ),
    # dates
    "a day that no calendar has": ("schema", lambda r: typed(r, recorded="2026-99-99T00:00:00Z")),
    "a pass from the future": (
        "reports",
        lambda r: r.spoil("conformance", lambda d: d.update(recorded="9998-01-01T00:00:00Z")),
    ),
    "an old pass once more, with a new date": ("reports", lambda r: again(r, recorded=after(r, "HEAD", 90))),
    "an old pass once more, from another machine": ("reports", lambda r: again(r, machine="f" * 16)),
    # cases
    "one case": ("reports", lambda r: r.spoil("conformance", lambda d: d.update(cases=d["cases"][:1]))),
    "no case": ("reports", lambda r: r.spoil("conformance", lambda d: d.update(cases=[]))),
    "a case fewer": ("reports", lambda r: r.spoil("conformance", lambda d: d["cases"].pop())),
    "a case that the suite has not": (
        "reports",
        lambda r: r.spoil("conformance", first(lambda c: c.update(id="merge_states[easy]"))),
    ),
    "a case twice": ("reports", lambda r: r.spoil("conformance", lambda d: d["cases"].append(d["cases"][0]))),
    "a level that did not run": ("reports", lambda r: r.spoil("conformance", lambda d: d.update(level="full"))),
    "an error beyond its tolerance": (
        "reports",
        lambda r: r.spoil("conformance", first(lambda c: c["errors"].update(out=5.0))),
    ),
    "an error that is no number": ("reports", lambda r: r.spoil("conformance", first(lambda c: c["errors"].update(out="nan")))),
    "an error below zero": ("reports", lambda r: r.spoil("conformance", first(lambda c: c["errors"].update(out=-1.0)))),
    "another tolerance": ("reports", lambda r: r.spoil("conformance", first(lambda c: c["tolerances"].update(out=10.0)))),
    "a tolerance without an error": ("reports", lambda r: r.spoil("conformance", first(lambda c: c["errors"].clear()))),
    "a failure without a message": ("reports", lambda r: r.spoil("conformance", first(lambda c: c.update(status="failed")))),
    "a field of no schema": (WRITING, lambda r: r.spoil("conformance", lambda d: d["claims"][0].update(mode="verified"))),
    # devices
    "another device's name": (
        "reports",
        lambda r: r.spoil("conformance", lambda d: d["device"].update(name="NVIDIA H100 80GB HBM3")),
    ),
    "a pattern that another device matches": ("reports", widen_a_pattern),
    "a stand-in called native": (
        "reports",
        lambda r: r.spoil(
            "conformance", lambda d: d["device"].update(name="CPU x86_64", arch="cpu", device_type="cpu", vendor="cpu")
        ),
    ),
    # times
    "a time of nothing": ("reports", lambda r: r.spoil("benchmark", first(lambda t: t.update(median_us=1e-3, p10_us=1e-3)))),
    "a time below what the device can do": (
        "reports",
        lambda r: r.spoil("benchmark", first(lambda t: t.update(median_us=17.0, p10_us=17.0))),
    ),
    "quantiles out of order": ("reports", lambda r: r.spoil("benchmark", first(lambda t: t.update(p10_us=60.0)))),
    "a bound that is not its bytes'": ("reports", lambda r: r.spoil("benchmark", first(lambda t: t.update(bound_us=1e-3)))),
    "a machine faster than its data sheet": (
        "reports",
        lambda r: r.spoil("benchmark", lambda d: d["ceilings"].update(bytes_per_second=9e12)),
    ),
    "no run": ("reports", lambda r: r.spoil("benchmark", first(lambda t: t.update(runs=0)))),
    "a device of unknown speed": (
        "reports",
        lambda r: r.spoil("benchmark", lambda d: d["device"].update(name="NVIDIA B200", arch="sm100", num_sms=148)),
    ),
    # reports
    "a report that is edited in its place": (
        "schema",
        lambda r: next(iter(r.reports("benchmark"))).write_bytes(next(iter(r.reports("conformance"))).read_bytes()),
    ),
    "a report that is deleted": ("history", lambda r: (next(iter(r.reports("conformance"))).unlink(), r.index())),
    "a failing report that is deleted on the same branch": ("history", fail_then_delete),
    "a key of one's own": ("history", own_key),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_refused(repository: Repository, name: str) -> None:
    gate, cheat = CHEATS[name]
    start = repository.git("rev-parse", "HEAD")
    if gate == WRITING:
        with pytest.raises(RecordError):
            cheat(repository)
        return
    cheat(repository)
    repository.commit()
    gates = (gate, "reports") if gate == "schema" else (gate,)
    assert [problem for each in gates for problem in repository.refused(each, start)]


def test_a_failing_run_may_be_contributed(repository: Repository) -> None:
    def fails(document: Document) -> None:
        failing(document["cases"][0])
        document["recorded"] = after(repository, "HEAD", 120)
        document["cases"][0]["seconds"] = 9.0

    document = copy.deepcopy(next(iter(repository.reports("conformance").values())))
    fails(document)
    write_report(repository.capability, document)
    repository.index()
    start = repository.git("rev-parse", "HEAD")
    repository.commit()
    assert [problem for gate in CONTRIBUTED for problem in repository.refused(gate, start)] == []
    (problem, *_) = repository.refused("claims")
    assert "failing" in problem


def test_files_that_are_generated_are_compared(repository: Repository) -> None:
    registry = get_registry()
    for path, text in generate(repository.capability, registry).items():
        path.write_text(text)
    assert differences(generate(repository.capability, registry)) == []
    (repository.capability / "MATRIX.md").write_text("# All is verified\n")
    (problem,) = differences(generate(repository.capability, registry))
    assert problem.startswith("MATRIX.md")


# what no gate sees


def test_a_report_that_is_invented_whole_passes_and_is_self_reported(repository: Repository) -> None:
    """Every case, every error, every time is consistent: nothing but another run tells it from a real one.

    What holds: it is *self-reported*, and the matrix says so. Two of them that agree would be *reproduced*:
    whoever merges contributions should know who ran them, and a run of the project's own contradicts them in public.
    """
    found = records.read_records(repository.capability)
    (cell,) = [each for each in found.cells() if each.device == "h200"]
    assert (cell.state, cell.trust) == ("measured", "self-reported")


# tests that do not run


HIDDEN = {
    "test_mark_skipif.py": "@pytest.mark.skipif(True, reason='r')\ndef test_it(): assert 0",
    "test_mark_skip.py": "@pytest.mark.skip\ndef test_it(): assert 0",
    "test_call_skip.py": "def test_it():\n    pytest.skip('later')",
    "test_importorskip.py": "pytest.importorskip('no_such_module')\ndef test_it(): assert 0",
    "test_xfail.py": "@pytest.mark.xfail(reason='r')\ndef test_it(): assert 0",
    "test_xfail_lenient.py": "@pytest.mark.xfail(strict=0)\ndef test_it(): assert 0",
    "test_xfail_words.py": "@pytest.mark.xfail(**{'strict': False})\ndef test_it(): assert 0",
    "test_if_false.py": "if False:\n    def test_it(): assert 0",
    "test_unittest.py": "import unittest\n@unittest.skip('r')\ndef test_it(): assert 0",
    "test_no_parameter.py": "@pytest.mark.parametrize('x', [])\ndef test_it(x): assert 0",
    "test_shadowed.py": "def test_it(): assert 0\ndef test_it(): pass",
    "test_ignored.py": "def test_it(): assert 0",
    "test_deselected.py": "def test_it(): assert 0",
    "test_by_option.py": "def test_it(): assert 0",
    "test_some.py": "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.skip)])\ndef test_it(x): assert x",
    "test_class.py": "class TestIt:\n    def test_it(self):\n        pytest.skip('later')",
}
CONFTEST = """
collect_ignore = ["test_ignored.py"]
def pytest_collection_modifyitems(items):
    items[:] = [each for each in items if "deselected" not in each.nodeid]
"""


def test_a_test_that_does_not_run_is_noticed_however_it_was_kept_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import check_tests

    (tmp_path / "tests").mkdir()
    for name, text in (HIDDEN | {"test_good.py": "def test_it(): pass"}).items():
        (tmp_path / "tests" / name).write_text(f"import pytest\n{text}\n")
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --ignore=tests/test_by_option.py\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "--junitxml=report.xml"]
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, "pytest itself has nothing to say"
    tests = check_tests.written(["tests"], tmp_path)
    ran = check_tests.outcomes((tmp_path / "report.xml").read_text())
    said = list(check_tests.problems(tests, ran, {}))
    caught = {name for name in HIDDEN if any(name in problem for problem in said)}
    assert caught == {*HIDDEN} and not any("test_good" in problem for problem in said)
    excused = {test: "a reason" for test in tests if "test_good" not in test and "shadowed" not in test}
    assert [problem.partition(":")[0] for problem in check_tests.problems(tests, ran, excused)] == ["tests/test_shadowed.py"]
    assert any("not written" in problem for problem in check_tests.problems(tests, ran, {"tests/test_x.py::test_gone": "r"}))
