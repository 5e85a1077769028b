# SPDX-License-Identifier: Apache-2.0
"""Evidence is made from what really ran, on the sources that ran; the commands that read records do so from any folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from acme_records import acme_claim
from torch_reference import merge_states
from typer.testing import CliRunner

from mla_portable import sources
from mla_portable.contracts import Implementation, Registrar, Request, Support, hookimpl
from mla_portable.dispatch import serving
from mla_portable.primitives import MERGE_STATES
from mla_portable.registry import Registry
from mla_portable.tools.cli.app import app
from mla_portable.tools.conformance import run_suite
from mla_portable.tools.matrix import RecordError, read_records
from mla_portable.tools.matrix.claims import Declarations, collect_declarations
from mla_portable.tools.matrix.evidence import append_evidence, problems_of
from mla_portable.tools.matrix.profiles import load_profiles
from mla_portable.tools.matrix.record import (
    Origin,
    compiled_records,
    conformance_records,
    kernels_of,
    mode_of,
    origin_of,
    profile_of,
    shared_memory_limit,
)

ROOT = Path(__file__).parents[1]
PROFILES = load_profiles(ROOT / "capability" / "profiles")
ORIGIN = Origin("0" * 40, False, "2026-11-01T00:00:00Z", "pytest")
CPU = torch.device("cpu")
KERNEL = "def helper(): ...\ndef add_kernel(): ...\n"


class Plugin:
    """One implementation whose kernel is a file of the test."""

    def __init__(self, *names: str, **limits: Any) -> None:
        self.sources, self.limits = names or ("kernel_of_a_test",), limits

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        def bind(request: Request) -> Any:
            return merge_states

        support = Support(source="this test", device_types=("cpu", "cuda"), **self.limits)
        registrar.add(Implementation("acme.v1", MERGE_STATES, support, bind, sources=self.sources))


@pytest.fixture
def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kernel_of_a_test.py"
    path.write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    sources._top.cache_clear()
    return path


def registry(*plugins: object) -> Registry:
    return Registry(plugins=[(f"p{number}", plugin) for number, plugin in enumerate(plugins)], environ={}, probe=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "records"


def states(folder: Path, chosen: Registry) -> dict[str, str]:
    mine = [cell for cell in read_records(folder, chosen).cells() if cell.implementation == "acme.v1"]
    return {cell.device: cell.state for cell in mine}


def test_a_run_of_the_suite_becomes_evidence_that_an_edit_or_a_wider_claim_outgrows(folder: Path, kernel_file: Path) -> None:
    chosen = registry(Plugin(attn_sink=False))
    declared = collect_declarations(chosen, PROFILES)
    report = run_suite(chosen, "acme", device=CPU, level="quick")
    assert report.ok
    (record,) = conformance_records(report, declared, PROFILES, ORIGIN, environ={"TRITON_INTERPRET": "1"})
    assert (record["mode"], record["device"]["profile"], record["layout"]) == ("interpreter", "cpu", None)
    assert record["cases"] == {"passed": len(report.results), "failed": 0, "skipped": 0}
    append_evidence(folder / "cpu" / "acme.jsonl", [record], PROFILES)
    for text, shown in ((KERNEL, "interpreted"), (KERNEL + "x = 1\n", "stale"), (KERNEL + "# edited\n", "interpreted")):
        kernel_file.write_text(text)
        assert set(states(folder, chosen).values()) == {shown}
    assert set(states(folder, registry(Plugin(attn_sink=True))).values()) == {"partial"}


@pytest.mark.parametrize(
    ("device", "core", "interpreted", "mode"),
    [
        ("cuda", False, False, "native"),
        ("cpu", True, True, "native"),
        ("cpu", False, True, "interpreter"),
        ("cpu", False, False, "stand_in"),
    ],
)
def test_how_an_implementation_ran(device: str, core: bool, interpreted: bool, mode: str) -> None:
    assert mode_of(acme_claim(core=core), device, {"TRITON_INTERPRET": "1"} if interpreted else {}) == mode


def test_the_core_itself_is_native_on_a_cpu_and_verified_there_alone(folder: Path) -> None:
    chosen = Registry(environ={}, probe=False)
    report = run_suite(chosen, "reference", device=CPU, level="quick", primitives=[MERGE_STATES])
    declared = collect_declarations(chosen, PROFILES)
    (record,) = conformance_records(report, declared, PROFILES, ORIGIN, environ={"TRITON_INTERPRET": "1"})
    assert record["mode"] == "native"
    append_evidence(folder / "reference.jsonl", [record], PROFILES)
    found = [
        c for c in read_records(folder, chosen).cells() if (c.implementation, c.primitive) == ("reference.torch", MERGE_STATES)
    ]
    mine = {cell.device: cell.state for cell in found}
    assert mine.pop("cpu") == "verified"
    assert set(mine.values()) == {"declared"}


# what compilers print


def compiling(*plugins: object) -> Declarations:
    """Declarations of plugins that compile for sm86."""
    declared = collect_declarations(registry(*plugins), PROFILES)
    return Declarations(tuple(replace(claim, targets=("sm86",)) for claim in declared.claims if not claim.core))


def made(declared: Declarations, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    return compiled_records(lines, declared.claims[0].module, declared, PROFILES, ORIGIN)


def line(**changes: Any) -> dict[str, Any]:
    usage = {"shared": 1000, "registers": 40, "spilled": 0, "error": ""}
    return {"arch": "sm86", "label": "add-1", "kernel": "add_kernel", **usage} | changes


def test_compiler_output_becomes_evidence(kernel_file: Path) -> None:
    declared = compiling(Plugin())
    (record,) = made(declared, line(), line(label="add-2", shared=2000, registers=50))
    assert problems_of(record, PROFILES) == []
    assert record["kernels"]["add_kernel"] == {"variants": 2, "shared": 2000, "registers": 50, "spilled": 0}
    assert record["shared_memory_limit"] == 99 << 10
    (record,) = made(declared, line(versions={"acmecc": "7.1"}))
    assert record["versions"]["acmecc"] == "7.1" and "torch" in record["versions"]
    assert made(Declarations(tuple(replace(claim, targets=()) for claim in declared.claims)), line()) == []
    with pytest.raises(RecordError, match="not compiled: add_kernel"):
        made(declared, line(kernel="other_kernel"))


@pytest.mark.parametrize(
    ("spoiled", "word"),
    [({"shared": (99 << 10) + 1}, "bytes of shared memory, sm86 has 101376"), ({"error": "no way"}, "no way")],
)
def test_what_does_not_fit_or_compile_is_a_failure(kernel_file: Path, folder: Path, spoiled: dict[str, Any], word: str) -> None:
    (record,) = made(compiling(Plugin()), line(), line(**spoiled))
    assert record["cases"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert word in record["failures"][0]
    append_evidence(folder / "acme.jsonl", [record], PROFILES)
    found = states(folder, registry(Plugin()))
    assert {found[slug] for slug, profile in PROFILES.items() if profile.arch == "sm86"} == {"failing"}
    assert found["h200"] == "declared"


def test_a_file_beside_a_package_has_kernels_of_its_own(kernel_file: Path) -> None:
    kernel_file.with_name("device code.cu").write_text("""
        __device__ int helper(int x) { return x; }
        extern "C" __global__ void plain(int* to) { *to = helper(1); }
        extern "C" __global__ void __launch_bounds__(THREADS, 2) bounded(int* to) {}
    """)
    name = "kernel_of_a_test:device code.cu"
    (claim,) = compiling(Plugin("kernel_of_a_test", "kernel_of_a_test::helper", name)).claims
    assert kernels_of(claim) == {"add_kernel": "kernel_of_a_test", "plain": name, "bounded": name}


def test_what_no_profile_knows_cannot_be_recorded() -> None:
    assert shared_memory_limit("sm80", PROFILES) == 163 << 10
    with pytest.raises(RecordError, match="no profile says"):
        shared_memory_limit("sm79", PROFILES)
    for name in ("NVIDIA GeForce GTX 1080", ""):
        with pytest.raises(RecordError, match="no profile matches"):
            profile_of(name, PROFILES)


# commits


def test_a_tree_is_dirty_as_soon_as_something_but_the_records_differs(tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*words: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, env=environ)

    assert origin_of(tmp_path, "x").commit is None and origin_of(tmp_path, "x").dirty
    git("init", "-q")
    kernel = tmp_path / "kernel.py"
    kernel.write_text("one")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "capability").mkdir()
    (tmp_path / "capability" / "new.jsonl").write_text("{}")
    assert not origin_of(tmp_path, "x").dirty
    (tmp_path / "new.py").write_text("")
    assert origin_of(tmp_path, "x").dirty
    (tmp_path / "new.py").unlink()
    assert not origin_of(tmp_path, "x").dirty
    kernel.write_text("two")
    assert origin_of(tmp_path, "x").dirty


def test_records_from_a_machine_without_git_are_bound_to_the_commit_with_their_sources(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import record_evidence

    chosen = Registry(environ={}, probe=False)
    report = run_suite(chosen, "reference", device=CPU, level="smoke", primitives=[MERGE_STATES])
    path = tmp_path / "unbound.jsonl"
    record_evidence.write_unbound(path, conformance_records(report, collect_declarations(chosen, PROFILES), PROFILES, ORIGIN))
    record = json.loads(path.read_text())
    assert "commit: null" in problems_of(record, PROFILES)[0]
    folder.mkdir()
    found = read_records(folder, chosen)
    for changes, origin, word in (
        ({}, Origin("1" * 40, True, ORIGIN.recorded, ""), "uncommitted changes"),
        ({"source_hash": "0" * 64}, ORIGIN, "the sources that ran"),
        ({"suite_hash": "0" * 64}, ORIGIN, "the conformance suite that ran"),
    ):
        with pytest.raises(SystemExit, match=word):
            record_evidence.bind(record | changes, found, origin)
    record_evidence.bind(record, found, ORIGIN)
    assert problems_of(record, PROFILES) == []
    assert (record["commit"], record["dirty"]) == (ORIGIN.commit, False)


# commands


def command(*words: str, code: int = 0) -> str:
    answer = CliRunner().invoke(app, list(words))
    assert answer.exit_code == code, answer.output
    return answer.stdout


def test_matrix_check_and_its_exit_codes(folder: Path) -> None:
    folder.mkdir()
    mine = ("--records", str(folder))
    command("matrix", *mine, "--check", code=1)
    command("matrix", *mine, "--write")
    assert [path.name for path in folder.iterdir()] == ["MATRIX.md"]
    command("matrix", *mine, "--check")
    for words in (["--format", "md"], ["--json"], ["--vendor", "amd"], ["--device", "h200"], []):
        command("matrix", *mine, *words)
    for words in (["--device", "h20000"], ["--format", "html"]):
        command("matrix", *mine, *words, code=2)
    (folder / "x.jsonl").write_text("{}\n")
    command("matrix", *mine, code=1)
    command("matrix", "--records", str(folder / "nowhere"), code=1)


def test_a_plugin_outside_of_the_tree_keeps_profiles_and_evidence_of_its_own(
    folder: Path, kernel_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its implementation runs on the CPU and is in the matrix of its own folder; a device of its own is there as well."""
    (folder / "profiles").mkdir(parents=True)
    text = (ROOT / "capability" / "profiles" / "bi-v150.toml").read_text()
    (folder / "profiles" / "acme-1.toml").write_text(text.replace("BI-V150", "ACME-1"))
    chosen = registry(Plugin())
    with serving(chosen):
        words = ["conform", "acme", "--device", "cpu", "--level", "quick", "--evidence", str(folder / "acme.jsonl")]
        command(*words)
        record = json.loads((folder / "acme.jsonl").read_text())
        assert (record["commit"], record["dirty"], record["mode"]) == (None, False, "interpreter") or record[
            "mode"
        ] == "stand_in"
        assert str(folder) not in record["command"]
        assert states(folder, chosen)["cpu"] == "interpreted"
        answer = json.loads(command("explain", "merge_states", "--device", "acme-1", "--records", str(folder), "--json"))
        assert "ACME-1" in answer["request"]
    command("explain", "merge_states", "--device", "acme-1", code=2)


def test_scripts_learn_what_to_run_from_the_declarations() -> None:
    def claimed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "ci/claimed.py", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    found = json.loads(claimed("gpu", "h200,mi300x").stdout)
    assert {(cell["vendor"], cell["device"]) for cell in found} == {("nvidia", "h200"), ("amd", "mi300x")}
    assert "no such profile: h2000" in claimed("gpu", "h2000").stderr
    assert json.loads(claimed("gpu", "").stdout) == []
    assert (claimed("native").stdout.split(), claimed("interpreted").stdout.split()) == (["reference"], ["triton"])


def test_fold_rewrites_files_without_folders_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel_file: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import record_evidence

    chosen = registry(Plugin())
    report = run_suite(chosen, "acme", device=CPU, level="smoke")
    (record,) = conformance_records(report, collect_declarations(chosen, PROFILES), PROFILES, ORIGIN)
    shutil.copytree(ROOT / "capability" / "profiles", tmp_path / "capability" / "profiles")
    path = tmp_path / "capability" / "evidence" / "cpu" / "acme.jsonl"
    path.parent.mkdir(parents=True)
    later = record | {"recorded": "2026-11-02T00:00:00Z", "command": "conform --out /tmp/secret/x"}
    path.write_text("".join(json.dumps(each) + "\n" for each in (record, later)))
    monkeypatch.setattr(record_evidence, "CAPABILITY", tmp_path / "capability")
    monkeypatch.setattr(record_evidence, "get_registry", lambda: chosen)
    record_evidence.fold_all(record_evidence.argparse.Namespace())
    (kept,) = map(json.loads, path.read_text().splitlines())
    assert kept == later | {"command": "conform --out x"}
