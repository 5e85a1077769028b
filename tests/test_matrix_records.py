# SPDX-License-Identifier: Apache-2.0
"""Evidence is made from what really ran, and the records of this repository are sound: recording, collecting, generating."""

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
from typer.testing import CliRunner

from mla_portable.contracts import Implementation, Registrar, Request, Support, hookimpl
from mla_portable.primitives import MERGE_STATES
from mla_portable.reference import merge_states
from mla_portable.registry import Registry
from mla_portable.tools.cli.app import app
from mla_portable.tools.conformance import run_suite
from mla_portable.tools.matrix import RecordError, read_records
from mla_portable.tools.matrix.claims import Declarations, wider
from mla_portable.tools.matrix.collect import collect_declarations, suite_cases, support_data
from mla_portable.tools.matrix.evidence import append_evidence, problems_of
from mla_portable.tools.matrix.gates import untested_claims
from mla_portable.tools.matrix.generated import differences, generate
from mla_portable.tools.matrix.hashes import module_file, source_hash
from mla_portable.tools.matrix.profiles import load_profiles
from mla_portable.tools.matrix.record import (
    Origin,
    compiled_records,
    conformance_records,
    kernels_of,
    origin_of,
    profile_of,
    shared_memory_limit,
)

ROOT = Path(__file__).parents[1]
PROFILES = load_profiles(ROOT / "capability" / "profiles")
ORIGIN = Origin("0" * 40, False, "2026-11-01T00:00:00Z", "pytest")
CLEAN_ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "MLA_PORTABLE"))}

KERNEL = """
def helper(): ...
def add_kernel(): ...
"""


class Plugin:
    """One implementation whose kernel is a file of the test."""

    def __init__(self, sources: tuple[str, ...] = ("kernel_of_a_test",), **limits: Any) -> None:
        self.sources, self.limits = sources, limits

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        def bind(request: Request) -> Any:
            return merge_states

        support = Support(source="this test", device_types=("cpu", "cuda"), **self.limits)
        registrar.add(Implementation("acme.v1", MERGE_STATES, support, bind, sources=self.sources))


@pytest.fixture
def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from mla_portable import sources

    path = tmp_path / "kernel_of_a_test.py"
    path.write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    sources._top.cache_clear()
    return path


def registry(*plugins: object) -> Registry:
    return Registry(plugins=[(f"p{number}", plugin) for number, plugin in enumerate(plugins)], environ={}, probe=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Profiles of this repository, and no evidence."""
    shutil.copytree(ROOT / "capability" / "profiles", tmp_path / "capability" / "profiles")
    return tmp_path / "capability"


def states(folder: Path, chosen: Registry) -> dict[str, str]:
    found = read_records(folder, collect_declarations(chosen, PROFILES))
    return {cell.device: cell.state for cell in found.cells()}


def test_a_run_of_the_suite_becomes_evidence_that_an_edit_or_a_wider_claim_outgrows(folder: Path, kernel_file: Path) -> None:
    chosen = registry(Plugin(attn_sink=False))
    declared = collect_declarations(chosen, PROFILES)
    report = run_suite(chosen, "acme", device=torch.device("cpu"), level="quick")
    assert report.ok
    (record,) = conformance_records(report, declared, PROFILES, ORIGIN, environ={"TRITON_INTERPRET": "1"})
    assert (record["mode"], record["device"]["profile"], record["layout"]) == ("interpreter", "cpu", None)
    assert record["cases"] == {"passed": len(report.results), "failed": 0, "skipped": 0}
    append_evidence(folder / "evidence" / "cpu" / "acme.jsonl", [record], PROFILES)
    assert set(states(folder, chosen).values()) == {"interpreted"}
    kernel_file.write_text(KERNEL + "# edited\n")
    assert set(states(folder, chosen).values()) == {"stale"}
    kernel_file.write_text(KERNEL)
    assert set(states(folder, chosen).values()) == {"interpreted"}
    assert set(states(folder, registry(Plugin(attn_sink=True))).values()) == {"partial"}


def test_without_an_interpreter_a_foreign_plugin_on_a_cpu_ran_on_a_stand_in(kernel_file: Path) -> None:
    chosen = registry(Plugin())
    report = run_suite(chosen, "acme", device=torch.device("cpu"), level="smoke")
    declared = collect_declarations(chosen, PROFILES)
    (record,) = conformance_records(report, declared, PROFILES, ORIGIN, environ={})
    assert (record["mode"], record["level"]) == ("stand_in", "smoke")


def test_the_core_itself_is_native_on_a_cpu_and_verified_there_alone(folder: Path) -> None:
    chosen = Registry(environ={}, probe=False)
    declared = collect_declarations(chosen, PROFILES)
    report = run_suite(chosen, "reference", device=torch.device("cpu"), level="quick", primitives=[MERGE_STATES])
    (record,) = conformance_records(report, declared, PROFILES, ORIGIN, environ={"TRITON_INTERPRET": "1"})
    assert record["mode"] == "native"
    append_evidence(folder / "evidence" / "cpu" / "reference.jsonl", [record], PROFILES)
    found = read_records(folder, declared)
    mine = {c.device: c.state for c in found.cells() if (c.implementation, c.primitive) == ("reference.torch", "merge_states")}
    assert mine.pop("cpu") == "verified"
    assert set(mine.values()) == {"declared"}


def compiling(*plugins: object) -> Declarations:
    """Declarations of plugins that compile for sm86."""
    declared = collect_declarations(registry(*plugins), PROFILES)
    return Declarations(tuple(replace(claim, targets=("sm86",)) for claim in declared.claims), declared.missing)


def line(**changes: Any) -> dict[str, Any]:
    usage = {"shared": 1000, "registers": 40, "spilled": 0, "error": ""}
    return {"arch": "sm86", "label": "add-1", "kernel": "add_kernel", **usage} | changes


def test_compiler_output_becomes_evidence(kernel_file: Path) -> None:
    declared = compiling(Plugin())
    assert kernels_of(declared.claims[0]) == {"add_kernel": "kernel_of_a_test"}
    module = declared.claims[0].module
    lines = [line(), line(label="add-2", shared=2000, registers=50)]
    (record,) = compiled_records(lines, module, declared, PROFILES, ORIGIN)
    assert problems_of(record, PROFILES) == []
    assert record["kernels"]["add_kernel"] == {"variants": 2, "shared": 2000, "registers": 50, "spilled": 0}
    assert record["shared_memory_limit"] == 99 << 10
    (record,) = compiled_records([line(versions={"acmecc": "7.1"})], module, declared, PROFILES, ORIGIN)
    assert record["versions"]["acmecc"] == "7.1" and "torch" in record["versions"]
    uncompiled = collect_declarations(registry(Plugin()), PROFILES)
    assert compiled_records(lines, module, uncompiled, PROFILES, ORIGIN) == []


@pytest.mark.parametrize(
    ("spoiled", "word"),
    [({"shared": (99 << 10) + 1}, "bytes of shared memory, sm86 has 101376"), ({"error": "no way"}, "no way")],
)
def test_what_does_not_fit_or_compile_is_a_failure(kernel_file: Path, folder: Path, spoiled: dict[str, Any], word: str) -> None:
    chosen = registry(Plugin())
    declared = compiling(Plugin())
    (record,) = compiled_records([line(), line(**spoiled)], declared.claims[0].module, declared, PROFILES, ORIGIN)
    assert record["cases"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert word in record["failures"][0]
    append_evidence(folder / "evidence" / "compiled" / "acme.jsonl", [record], PROFILES)
    found = states(folder, chosen)
    assert {found[slug] for slug, profile in PROFILES.items() if profile.arch == "sm86"} == {"failing"}
    assert found["h200"] == "declared"


def test_a_kernel_that_was_left_out_is_refused(kernel_file: Path) -> None:
    declared = compiling(Plugin())
    with pytest.raises(RecordError, match="not compiled: add_kernel"):
        compiled_records([line(kernel="other_kernel")], declared.claims[0].module, declared, PROFILES, ORIGIN)


def test_the_limit_is_the_smallest_of_an_architecture_and_comes_from_a_profile() -> None:
    assert shared_memory_limit("sm80", PROFILES) == 163 << 10
    with pytest.raises(RecordError, match="no profile says"):
        shared_memory_limit("sm79", PROFILES)


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1080", ""])
def test_an_unknown_device_cannot_be_recorded(name: str) -> None:
    with pytest.raises(RecordError, match="no profile matches"):
        profile_of(name, PROFILES)


def test_a_tree_is_dirty_as_soon_as_something_but_the_records_differs(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, env=CLEAN_ENVIRONMENT)

    assert origin_of(tmp_path, "x").commit is None
    assert origin_of(tmp_path, "x").dirty
    git("init", "-q")
    (tmp_path / "kernel.py").write_text("one")
    git("add", ".")
    git("commit", "-qm", "one")
    assert not origin_of(tmp_path, "x").dirty
    (tmp_path / "capability").mkdir()
    (tmp_path / "capability" / "new.jsonl").write_text("{}")
    assert not origin_of(tmp_path, "x").dirty
    (tmp_path / "new.py").write_text("")
    assert origin_of(tmp_path, "x").dirty
    (tmp_path / "new.py").unlink()
    (tmp_path / "kernel.py").write_text("two")
    assert origin_of(tmp_path, "x").dirty


def test_the_hash_follows_every_byte_and_no_order(kernel_file: Path) -> None:
    both = ("kernel_of_a_test", "mla_portable.layouts.base")
    before = source_hash(both)
    assert source_hash(both[::-1]) == before
    kernel_file.write_text(KERNEL + " ")
    assert source_hash(both) != before
    with pytest.raises(RecordError, match="no such file"):
        source_hash(["mla_portable.nothing_here"])
    with pytest.raises(RecordError, match="not installed"):
        source_hash(["no_such_package.kernel"])


def test_a_file_beside_a_package_is_a_source_with_kernels_of_its_own(kernel_file: Path) -> None:
    device_code = kernel_file.with_name("device code.cu")
    device_code.write_text("""
        __device__ int helper(int x) { return x; }
        extern "C" __global__ void plain(int* to) { *to = helper(1); }
        extern "C" __global__ void __launch_bounds__(THREADS, 2) bounded(int* to) {}
    """)
    name = "kernel_of_a_test:device code.cu"
    assert module_file(name) == device_code
    before = source_hash(["kernel_of_a_test", name])
    assert before == source_hash([name, "kernel_of_a_test"]) != source_hash(["kernel_of_a_test"])
    declared = compiling(Plugin(("kernel_of_a_test", name)))
    assert kernels_of(declared.claims[0]) == {"add_kernel": "kernel_of_a_test", "plain": name, "bounded": name}
    device_code.write_text(device_code.read_text() + " ")
    assert source_hash(["kernel_of_a_test", name]) != before
    device_code.unlink()
    with pytest.raises(RecordError, match=r"file device code.cu of kernel_of_a_test: no such file: .*device code\.cu"):
        source_hash([name])
    with pytest.raises(RecordError, match="not installed"):
        module_file("no_such_package:device code.cu")


def test_gate_generated_catches_a_hand_edited_file(folder: Path) -> None:
    chosen = Registry(environ={}, probe=False)
    files = generate(folder, chosen)
    assert len(differences(files)) == len(files) == 3
    for path, text in files.items():
        path.write_text(text)
    assert differences(files) == []
    page = folder / "MATRIX.md"
    page.write_text(page.read_text().replace("**declared**", "**verified**", 1))
    (problem,) = differences(generate(folder, chosen))
    assert problem.startswith("MATRIX.md is not what the records say")
    # what was declared by hand counts no more than a level that was typed by hand
    page.write_text(files[page])
    declared = json.loads((folder / "declarations.json").read_text())
    declared["claims"][0]["support"]["attn_sink"] = "yes"
    (folder / "declarations.json").write_text(json.dumps(declared))
    (problem,) = differences(generate(folder, chosen))
    assert problem.startswith("declarations.json")


def test_the_gate_scripts_say_no_with_their_exit_status(folder: Path) -> None:
    root = folder.parent
    shutil.copytree(ROOT / "ci" / "gates", root / "ci" / "gates", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in generate(folder).items():
        path.write_text(text)
    (root / "tests").mkdir()
    (root / "pyproject.toml").write_text("xfail_strict = true\n")

    def gate(name: str) -> tuple[int, str]:
        command = [sys.executable, f"ci/gates/{name}.py"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=CLEAN_ENVIRONMENT)
        assert f"gate {name}: " in done.stdout, done.stderr
        return done.returncode, done.stdout

    assert gate("schema")[0] == gate("strict")[0] == gate("generated")[0] == gate("regressions")[0] == gate("staleness")[0] == 0
    code, said = gate("claims")
    assert code == 1
    assert "no run of the suite is recorded" in said
    (root / "tests" / "test_x.py").write_text("import pytest\n\n\n@pytest.mark.xfail(strict=False)\ndef test(): ...\n")
    assert gate("strict")[0] == 1
    (folder / "MATRIX.md").write_text("# All is verified\n")
    assert gate("generated")[0] == 1
    (folder / "evidence").mkdir()
    (folder / "evidence" / "x.jsonl").write_text('{"level": "verified"}\n')
    assert gate("schema")[0] == 1


def test_matrix_check_and_its_exit_codes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def matrix(*words: str) -> int:
        return CliRunner().invoke(app, ["matrix", "--records", str(folder), *words]).exit_code

    assert matrix("--check") == 1
    assert matrix("--write") == 0
    assert matrix("--check") == 0
    for words in (["--format", "html"], ["--format", "svg"], ["--json"], ["--vendor", "amd"], ["--device", "h200"], []):
        assert matrix(*words) == 0
    assert matrix("--device", "h20000") == 2
    assert matrix("--format", "pdf") == 2
    (folder / "evidence").mkdir()
    (folder / "evidence" / "x.jsonl").write_text("{}\n")
    assert matrix() == 1
    assert matrix("--records", str(folder / "evidence")) == 1


def test_explain_answers_for_a_device_that_is_not_here() -> None:
    words = ["explain", "--device", "a100-80g", "sparse_decode", "--heads", "16", "--json"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert "NVIDIA A100 80GB (sm80)" in document["request"]
    assert document["chosen"]
    route = CliRunner().invoke(app, ["explain", "route", "--device", "bi-v150", "--json"])
    assert route.exit_code == 0, route.output
    assert CliRunner().invoke(app, ["explain", "merge_states", "--device", "a1000"]).exit_code == 2


def test_the_suite_has_cases_for_every_core_claim() -> None:
    chosen = Registry(environ={}, probe=False)
    claims = [claim for claim in collect_declarations(chosen, PROFILES).claims if claim.core]
    few = {slug: PROFILES[slug] for slug in ("cpu", "h200")}
    only = [claim for claim in claims if claim.primitive in ("sparse_decode", "merge_states")]
    small = [type(c)(**{f: getattr(c, f) for f in c.__slots__} | {"devices": {s: c.devices[s] for s in few}}) for c in only]
    assert len(small) == 2
    assert untested_claims(small, few, suite_cases(chosen, "smoke")) == []


def test_a_declaration_as_data_leaves_nothing_out_that_limits() -> None:
    support = Support(source="s", num_heads=(64, 128), kv_layouts=("bf16",), archs=("sm90",), graph=False)
    data = support_data(support)
    assert json.loads(json.dumps(data)) == data
    assert set(Support.__slots__) - set(data) == {"workspace_bytes"}
    assert wider(data, support_data(Support(source="s", num_heads=(64,), kv_layouts=("bf16",), archs=("sm90",)))) == [
        "graph (evidence is without)"
    ]


def test_records_from_a_machine_without_git_are_bound_to_the_commit_with_their_sources(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import record_evidence

    chosen = Registry(environ={}, probe=False)
    declared = collect_declarations(chosen, PROFILES)
    only = [MERGE_STATES]
    report = run_suite(chosen, "reference", device=torch.device("cpu"), level="smoke", primitives=only)
    path = tmp_path / "unbound.jsonl"
    record_evidence.write_unbound(path, conformance_records(report, declared, PROFILES, ORIGIN))
    record = json.loads(path.read_text())
    assert "commit: null" in problems_of(record, PROFILES)[0]
    found = read_records(folder, declared)
    dirty = Origin("1" * 40, True, ORIGIN.recorded, "")
    with pytest.raises(SystemExit, match="uncommitted changes"):
        record_evidence.bind(dict(record), found, dirty)
    with pytest.raises(SystemExit, match="other sources"):
        record_evidence.bind(record | {"source_hash": "0" * 64}, found, ORIGIN)
    with pytest.raises(SystemExit, match="another conformance suite"):
        record_evidence.bind(record | {"suite_hash": "0" * 64}, found, ORIGIN)
    record_evidence.bind(record, found, ORIGIN)
    assert problems_of(record, PROFILES) == []
    assert (record["commit"], record["dirty"]) == (ORIGIN.commit, False)


def test_jobs_for_gpu_runners_come_from_the_profiles() -> None:
    def cells(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "ci/gpu_cells.py", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    found = json.loads(cells("h200,mi300x").stdout)
    assert {(cell["vendor"], cell["device"]) for cell in found} == {("nvidia", "h200"), ("amd", "mi300x")}
    assert "no such profile: h2000" in cells("h2000").stderr
    assert json.loads(cells("").stdout) == []
