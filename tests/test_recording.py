# SPDX-License-Identifier: Apache-2.0
"""Evidence is made from what really ran, on the sources that ran; the commands that read records do so from any folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from acme_records import acme_claim
from reporting import PROFILES, RUN, derived
from typer.testing import CliRunner

from mla_portable import sources
from mla_portable.contracts import Implementation, Registrar, Support, hookimpl
from mla_portable.dispatch import serving
from mla_portable.primitives import MERGE_STATES
from mla_portable.registry import Registry
from mla_portable.tools.cli.app import app
from mla_portable.tools.conformance import run_suite
from mla_portable.tools.matrix.claims import Declarations, collect_declarations
from mla_portable.tools.matrix.evidence import append_evidence, problems_of
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.profiles import profile_of, shared_memory_limit
from mla_portable.tools.matrix.record import compiled_report, conformance_report, kernels_of, mode_of
from mla_portable.tools.matrix.records import read_records
from mla_portable.tools.matrix.reports import digest, read_reports, sign, signed_by, unpacked, write_report
from mla_portable.tools.provenance import _files, provenance_of, settled

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
KERNEL = """
from torch_reference import merge_states
def bind(request):
    return merge_states
def helper(): ...
def add_kernel(): ...
"""


class Plugin:
    """One implementation, all of whose code is a file outside of this checkout."""

    def __init__(self, *names: str, **limits: Any) -> None:
        self.sources, self.limits = names or ("kernel_of_a_test",), limits

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        kernels = import_module("kernel_of_a_test")
        support = Support(source="this test", device_types=("cpu", "cuda"), **self.limits)
        registrar.add(Implementation("acme.v1", MERGE_STATES, support, kernels.bind, sources=self.sources))


@pytest.fixture
def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kernel_of_a_test.py"
    path.write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kernel_of_a_test", raising=False)
    sources._top.cache_clear()
    return path


def registry(*plugins: object) -> Registry:
    return Registry(plugins=[("acme", plugin) for plugin in plugins], environ={}, probe=False)


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
    (record,) = derived(conformance_report(report, declared, RUN, environ={"TRITON_INTERPRET": "1"}))
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
    (record,) = derived(conformance_report(report, declared, RUN, environ={"TRITON_INTERPRET": "1"}))
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
    return derived(compiled_report(lines, declared.claims[0].module, declared, PROFILES, RUN))


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
    assert kernels_of(claim) == {"add_kernel": "kernel_of_a_test::add_kernel", "plain": name, "bounded": name}


def test_what_no_profile_knows_cannot_be_recorded() -> None:
    assert shared_memory_limit("sm80", PROFILES) == 163 << 10
    with pytest.raises(RecordError, match="no profile says"):
        shared_memory_limit("sm79", PROFILES)
    for name in ("NVIDIA GeForce GTX 1080", ""):
        with pytest.raises(RecordError, match="no profile matches"):
            profile_of(name, PROFILES)


# where it ran, and from which code


def git(folder: Path, *words: str, made: str | None = None) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    if made is not None:
        environ["GIT_COMMITTER_DATE"] = made
    who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, env=environ, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one kernel."""
    git(tmp_path, "init", "-q")
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "kernel.py").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "text", "counts"),
    [
        ("ci/new.py", "", True),
        ("ci/kernel.py", "two", True),
        ("ci/kernel.cu", "", True),
        ("capability/new.py", "", False),
        ("tests/test_new.py", "", False),
        ("ci/costs.json", "{}", False),
    ],
)
def test_what_a_tree_has_changed_is_in_the_report_with_or_without_git(tree: Path, path: str, text: str, counts: bool) -> None:
    (tree / path).parent.mkdir(exist_ok=True)
    (tree / path).write_text(text)
    here = provenance_of(tree, "x", CPU)
    assert here.commit == git(tree, "rev-parse", "HEAD").strip() and here.files is None
    blob = git(tree, "hash-object", path).strip()
    assert here.changed == ({path: blob} if counts else {})
    copy = tree.parent / f"{tree.name}-copy"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git"))
    away = provenance_of(copy, "x", CPU)
    assert (away.commit, away.changed) == (None, None) and away.files
    assert settled(away, tree).changed == here.changed, "uncommitted changes stay, whoever enters the report"
    assert settled(here, tree) == here


@pytest.mark.parametrize(("made", "counts"), [("2026-01-01T00:00:00Z", True), ("2090-01-01T00:00:00Z", False)])
def test_a_run_is_of_the_commit_that_holds_what_ran_if_that_was_made_before(tree: Path, made: str, counts: bool) -> None:
    (tree / "ci" / "kernel.py").write_text("two")
    run = provenance_of(tree, "x", CPU)
    git(tree, "commit", "-qam", "what ran", made=made)
    (tree / "ci" / "kernel.py").write_text("three")
    git(tree, "commit", "-qam", "what came after it", made=made)
    found = settled(run, tree)
    assert found == (replace(run, commit=git(tree, "rev-parse", "HEAD^").strip(), changed={}) if counts else run)


def test_a_file_that_is_gone_is_a_change(tree: Path) -> None:
    (tree / "ci" / "kernel.py").unlink()
    assert provenance_of(tree, "x", CPU).changed == {"ci/kernel.py": ""}
    assert provenance_of(None, "x", CPU).changed == {}, "what was installed is what its distribution says"


# reports


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A report of the reference."""
    chosen = Registry(environ={}, probe=False)
    report = run_suite(chosen, "reference", device=CPU, level="smoke", primitives=[MERGE_STATES])
    return conformance_report(report, collect_declarations(chosen, PROFILES), RUN)


def test_a_report_is_one_file_of_the_same_bytes_and_is_never_edited(document: dict[str, Any], folder: Path) -> None:
    path = write_report(folder, document)
    data = path.read_bytes()
    assert write_report(folder, dict(reversed(document.items()))) == path and path.read_bytes() == data
    ((sha, report),) = read_reports(folder).items()
    assert sha == digest(unpacked(path)) and path.name == f"{sha[:16]}.json.gz"
    case = report.cases[0]
    assert case.params and case.errors.keys() == case.tolerances.keys() and case.id.startswith("merge_states[")
    path.write_bytes(write_report(folder / "other", document | {"machine": "f" * 16}).read_bytes())
    with pytest.raises(RecordError, match="never edited"):
        read_reports(folder)
    with pytest.raises(RecordError, match="cases"):
        write_report(folder, {name: value for name, value in document.items() if name != "cases"})


def test_a_signature_is_of_one_report_and_one_key(
    document: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runner", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    first, second = write_report(folder, document), write_report(folder, document | {"machine": "f" * 16})
    shas = [digest(unpacked(path)) for path in (first, second)]
    assert signed_by(folder, shas) == {}, "no key, no signature"
    (folder / "signers").write_text(f"runner@example.invalid {(tmp_path / 'runner.pub').read_text()}")
    sign(first, tmp_path / "runner")
    sign(second, tmp_path / "stranger")
    assert signed_by(folder, shas) == {shas[0]: "runner@example.invalid"}
    shutil.copy(first.with_suffix(".sig"), second.with_suffix(".sig"))
    assert signed_by(folder, shas) == {shas[0]: "runner@example.invalid"}
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(RecordError, match="ssh-keygen"):
        signed_by(folder, shas)
    with pytest.raises(RecordError, match="ssh-keygen"):
        sign(first, tmp_path / "runner")


def test_what_a_contribution_needs_is_asked_for_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "ci").mkdir()
    script, tools = shutil.copy(ROOT / "ci/contribute", tmp_path / "ci/contribute"), tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "git", "touch"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    (tools / "python").write_text("#!/usr/bin/env bash\ntouch ran\n")
    (tools / "python").chmod(0o755)

    def contribute() -> str:
        done = subprocess.run(
            [script], env={"PATH": str(tools), "HOME": str(tmp_path)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and not (tmp_path / "ran").exists()
        return done.stderr

    assert "a checkout without uncommitted changes" in contribute()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert "needs ssh-keygen" in contribute()


def test_a_report_from_a_machine_without_git_is_bound_to_the_commit_with_its_sources(
    monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], folder: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import record_evidence

    folder.mkdir()
    found = read_records(folder, Registry(environ={}, probe=False))
    away = provenance_of(ROOT, "", CPU)
    files = _files(ROOT)
    unbound = {name: value for name, value in document.items() if name != "changed"} | {"commit": None, "files": files}
    bound = record_evidence.settle(unbound, found)
    assert (bound["commit"], bound["changed"]) == (away.commit, dict(away.changed or {}))
    derived(bound)
    changed = record_evidence.settle(unbound | {"files": files | {"ci/added.py": "0" * 40}}, found)
    assert changed["changed"]["ci/added.py"] and derived(changed)[0]["dirty"], "a dirty tree stays dirty"
    for spoiled, word in (
        ({"source_hash": "0" * 64}, "other sources ran"),
        ({"suite_hash": "0" * 64}, "code of the suite ran"),
    ):
        with pytest.raises(SystemExit, match=word):
            record_evidence.settle(unbound | {"claims": [document["claims"][0] | spoiled]}, found)


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
    assert {path.name for path in folder.iterdir()} == {"MATRIX.md", "matrix.json", "matrix.svg"}
    command("matrix", *mine, "--check")
    for words in ("--format md", "--format html", "--json", "--all", "--evidence", "--vendor amd", "--device h200", ""):
        command("matrix", *mine, *words.split())
    for words in (["--device", "h20000"], ["--format", "pdf"]):
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
        assert record["mode"] in ("interpreter", "stand_in")
        assert (record["commit"], record["dirty"]) == (None, False), "installed, in no checkout"
        assert [*read_reports(folder)] == [record["report"]], "the report lies beside it"
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


def test_a_report_without_a_record_is_left_out_and_nothing_is_half_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import record_evidence

    shutil.copytree(ROOT / "capability" / "profiles", tmp_path / "profiles")
    monkeypatch.setattr(record_evidence, "CAPABILITY", tmp_path)
    records_of, empty = record_evidence.records_of, document | {"machine": "f" * 16}
    monkeypatch.setattr(record_evidence, "records_of", lambda *of: [] if of[0].machine == empty["machine"] else records_of(*of))
    with pytest.raises(RecordError, match="nothing in it is evidence"):
        record_evidence.keep([empty], record_evidence.read())
    assert read_reports(tmp_path) == {}
    assert len(record_evidence.keep([document, empty, document], record_evidence.read())) == 2
    assert len(read_reports(tmp_path)) == 1 and "left out" in capsys.readouterr().out


def test_fold_drops_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, document: dict[str, Any]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import record_evidence

    shutil.copytree(ROOT / "capability" / "profiles", tmp_path / "profiles")
    monkeypatch.setattr(record_evidence, "CAPABILITY", tmp_path)
    later = document | {"recorded": "2026-11-01T00:00:01Z"}
    for each in (document, later):
        write_report(tmp_path, each)
    record_evidence.write_index(record_evidence.read())
    path = tmp_path / "evidence" / "cpu" / "reference.jsonl"
    assert len(path.read_text().splitlines()) == 2
    record_evidence.fold_all(record_evidence.argparse.Namespace())
    (kept,) = map(json.loads, path.read_text().splitlines())
    assert kept["recorded"] == later["recorded"] and [*read_reports(tmp_path)] == [kept["report"]]
