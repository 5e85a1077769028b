# SPDX-License-Identifier: Apache-2.0
"""The matrix: what runs prove, what would run where, the generated page, and what it takes to edit a file."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims import uncovered, untested
from fake_plugins import implementation, make_plugin
from machines import PROFILES
from matrix import generated, matrix_text, page, read_runs
from matrix import main as write_matrix
from proofs import Results, proofs_of, results_of
from suite import LIST, ListedSuite, TodaysSuite, suite_of_release, write_list
from typer.testing import CliRunner

from mla_portable.capability.detail import offers_on
from mla_portable.capability.matrix import Matrix, Proof, States, proven_by_ci, read_matrix
from mla_portable.capability.model import RecordError
from mla_portable.capability.profiles import load_profiles, parse_profile, profile_named, profile_of
from mla_portable.capability.run import Case, Comparison, Run, new_run, suite_of, write_run
from mla_portable.capability.table import COLUMNS, make_matrix
from mla_portable.choose import Registry
from mla_portable.cli.app import app
from mla_portable.contracts import Implementation, Support
from mla_portable.primitives import INDEXER_SELECT, MERGE_STATES, SPARSE_DECODE

ROOT = Path(__file__).parents[1]
CAPABILITY = ROOT / "capability"
NEWEST = max(folder.parent.name for folder in CAPABILITY.glob("*/h200-*.json.gz"))
COMMIT = "0123456789" * 4
MERGES = Support(source="a test", device_types=("cuda",), archs=("sm80", "sm90"))
DECODES = Support(
    source="a test",
    archs=("sm90",),
    kv_layouts=("bf16", "fp8_ds_mla"),
    num_heads=(16,),
    max_topk=2048,
    block_sizes=(64,),
    context_parallel=True,
    batch_invariant=True,
)


def registry(*offered: Implementation) -> Registry:
    return Registry(plugins=[("acme", make_plugin(*offered))], environ={}, probe=False)


ACME = registry(implementation("acme.v1", MERGE_STATES, MERGES))
TODAY = TodaysSuite(ACME.implementations(), PROFILES)
QUICK = tuple(TODAY.cases("merge_states", "acme.v1", "sm90", "quick"))


def ran(*ids: str, failed: str = "", name: str = "NVIDIA H200", **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "schema": 1,
        "release": "0.1.0",
        "commit": COMMIT,
        "dirty": [],
        "who": "somebody",
        "date": "2026-11-20",
        "device": {"name": name, "arch": PROFILES["h200"].arch},
        "versions": {},
        "level": "quick",
    }
    cases = [Case(id=each, status="failed" if each == failed else "passed", message="x") for each in ids]
    return new_run({**fields, **changes}).model_copy(update={"cases": cases, "suite": suite_of(cases)})


def proofs(*runs: Run) -> list[Proof]:
    return [proof for each in results_of(runs, PROFILES) for proof in proofs_of(each, TODAY)]


def states(*runs: Run, slug: str = "h200", ci: dict[str, list[str]] | None = None) -> States:
    names = {each.slug: each.short_name for each in PROFILES.values()}
    return States(slug, PROFILES[slug].arch, proofs(*runs), ci or {}, names)


# ---------------------------------------------------------------------- what runs prove


def test_a_whole_suite_is_verified() -> None:
    (proof,) = proofs(ran(*QUICK))
    assert proof.complete and (proof.level, proof.passed, proof.missing, proof.failed) == ("quick", len(QUICK), 0, 0)
    assert (proof.device, proof.implementation, proof.primitive, proof.commit) == ("h200", "acme.v1", "merge_states", COMMIT)
    assert states(ran(*QUICK)).of("acme.v1", "merge_states", None) == "verified in 0.1.0"


def test_cases_of_several_runs_count_together_and_the_newest_says_what_became_of_one() -> None:
    halves = ran(*QUICK[:5]), ran(*QUICK[5:], who="another", date="2026-11-21")
    (proof,) = proofs(*halves)
    assert proof.complete and proof.who == ["another", "somebody"] and proof.date == "2026-11-21"
    broken = ran(*QUICK, failed=QUICK[0])
    repaired = ran(QUICK[0], date="2026-11-22")
    assert [proof.failed for proof in proofs(broken)] == [1] and proofs(broken)[0].first_failed == QUICK[0]
    assert [proof.complete for proof in proofs(repaired, broken)] == [True]


@pytest.mark.parametrize(
    ("run", "state"),
    [
        (ran(*QUICK[1:]), "run in part in 0.1.0"),
        (ran(*QUICK, failed=QUICK[3]), "1 cases failed in 0.1.0"),
        (ran(*QUICK, name="NVIDIA H100 80GB HBM3"), "not run"),
        (ran(*QUICK, target="sm80"), "not run"),
        (ran(*QUICK, release="0.10.0"), "verified in 0.10.0"),
    ],
)
def test_what_is_less_is_said(run: Run, state: str) -> None:
    assert states(run).of("acme.v1", "merge_states", None) == state


def test_the_newest_release_speaks() -> None:
    assert states(ran(*QUICK, release="0.9.0"), ran(*QUICK[1:], release="0.10.0")).of("acme.v1", "merge_states", None) == (
        "run in part in 0.10.0"
    )


def test_older_code_on_a_newer_gpu_speaks_for_the_older_ones() -> None:
    older = tuple(TODAY.cases("merge_states", "acme.v1", "sm80", "quick"))
    run, ci = ran(*older, target="sm80"), {"acme.v1 / merge_states": ["sm80"]}
    a100 = states(run, slug="a100-80g", ci=ci)
    assert a100.of("acme.v1", "merge_states", None) == "its SM80 code ran on an H200"
    assert states(ran(*older[1:], target="sm80"), slug="a100-80g", ci=ci).of("acme.v1", "merge_states", None) == "CI"
    assert states(slug="a100-80g", ci=ci).of("acme.v2", "merge_states", None) == "not run"


def test_a_device_without_a_profile_is_an_error() -> None:
    with pytest.raises(RecordError, match=r"device 'Nova 9': no profile matches; .*docs/dev/evidence\.md"):
        results_of([ran(*QUICK, name="Nova 9")], PROFILES)


# ---------------------------------------------------------------------- claims


def results(*runs: Run) -> Results:
    (found,) = results_of(runs, PROFILES)
    return found


def over(offered: Implementation, *runs: Run) -> list[str]:
    declared = registry(offered).implementations()
    return uncovered(declared, results(*runs), TodaysSuite(declared, PROFILES), PROFILES)


DECODE = implementation("acme.v1", SPARSE_DECODE, DECODES)
ALL = TodaysSuite([DECODE], PROFILES).cases("sparse_decode", "acme.v1", "sm90", "quick")


def test_a_claim_that_every_case_of_it_passed_is_covered() -> None:
    assert over(DECODE, ran(*ALL)) == []
    first = next(iter(ALL))
    for run in (ran(*ALL, failed=first), ran(*list(ALL)[1:])):
        (line,) = over(DECODE, run)
        assert line == (
            f"acme.v1 / sparse_decode on h200 in 0.1.0: 1 of {len(ALL)} cases did not pass or did not run, {first} first"
        )


@pytest.mark.parametrize("more", [{"num_heads": (16, 24)}, {"max_topk": 4096}, {"block_sizes": (64, 16)}, {"graph": False}])
def test_a_claim_that_grew_is_not_covered_and_one_that_shrank_is(more: dict[str, Any]) -> None:
    changed = implementation("acme.v1", SPARSE_DECODE, replace(DECODES, **more))
    lines = over(changed, ran(*ALL))
    if "num_heads" in more:
        assert len(lines) == 1 and "-h24-" in lines[0], "CI says which"
    today = set(TodaysSuite([changed], PROFILES).cases("sparse_decode", "acme.v1", "sm90", "quick"))
    assert bool(lines) == bool(today - set(ALL))


def test_only_what_ran_is_held_against_its_declaration() -> None:
    assert over(implementation("acme.v2", SPARSE_DECODE, DECODES), ran(*ALL)) == []


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ({}, ""),
        ({"max_topk": 5000}, "max_topk 5000"),
        ({"max_query_len": 77}, "max_query_len 77"),
    ],
)
def test_a_limit_that_no_case_reaches_is_untested(more: dict[str, Any], limit: str) -> None:
    offered = implementation("acme.v1", SPARSE_DECODE, replace(DECODES, **more))
    found = untested([offered], {"h200": PROFILES["h200"]})
    assert [limit in line for line in found] == [True] * bool(limit), found


def test_ci_proves_what_is_in_its_list_alone(tmp_path: Path) -> None:
    """A plugin of somebody else that declares a CPU, and another implementation in a plugin of this project, are not there."""
    listed = proven_by_ci()
    assert "sm86" in listed["nvidia.native_sm80 / sparse_decode"] and "sm90" not in listed["nvidia.native_sm80 / sparse_decode"]
    assert {"gfx942", "cpu"} <= set(listed["triton.portable / sparse_decode"])
    assert listed["reference.torch / merge_states"] == ["cpu"]
    assert not any("flashmla" in name or name.startswith(("ascend", "iluvatar")) for name in listed)
    declared = Support(source="a test", device_types=("cuda", "cpu"), archs=("sm80", "cpu"))
    mine = make_plugin(implementation("triton.mine", MERGE_STATES, declared))
    acme = make_plugin(implementation("acme.v1", MERGE_STATES, declared))
    plugins = [("triton", mine), ("acme", acme), ("reference", "mla_portable.reference")]
    offered = Registry(plugins=plugins, environ={}, probe=False)
    made = make_matrix(tmp_path, offered)
    assert made.ci == {name: archs for name, archs in listed.items() if name.startswith("reference.torch")}
    for device in ("cpu", "a100-80g"):
        offers = offers_on(PROFILES[device], made, offered, lambda *_: None)
        states = {each.implementation: each.state for each in offers if each.primitive == "merge_states"}
        assert states["triton.mine"] == states["acme.v1"] == "not run"
        assert device != "cpu" or states["reference.torch"] == "CI"


def test_a_list_of_ci_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"ci\.json: cannot be read"):
        proven_by_ci(tmp_path)
    (tmp_path / "ci.json").write_text('{"triton.portable / sparse_decode": "sm80"}')
    with pytest.raises(RecordError, match="valid array"):
        proven_by_ci(tmp_path)


# ---------------------------------------------------------------------- the list of a release


def test_the_list_of_a_release_says_what_its_suite_had(tmp_path: Path) -> None:
    path = write_list(tmp_path / "0.1.0", TODAY)
    listed = suite_of_release(tmp_path / "0.1.0", ACME)  # pyright: ignore
    assert isinstance(listed, ListedSuite) and suite_of_release(tmp_path / "0.2.0", TODAY) is TODAY
    for level in ("quick", "full"):
        for arch in ("sm80", "sm90", "sm89"):
            key = "merge_states", "acme.v1", arch, level
            assert listed.cases(*key) == TODAY.cases(*key), key
    path.write_bytes(gzip.compress(b"quick\tsm90\tmerge_states[acme.v1-p1]\n"))
    with pytest.raises(RecordError, match=r"cases\.tsv\.gz:1: expected levels"):
        ListedSuite(path)


def test_the_list_that_is_kept_has_every_case_that_ran() -> None:
    from mla_portable.capability.run import runs_in

    of_release: dict[Path, set[str]] = {}
    for path, run in runs_in(CAPABILITY):
        of_release.setdefault(path.parent, set()).update(case.id for case in run.cases)
    for folder, ids in of_release.items():
        if (folder / LIST).exists():  # a release in the making has none
            assert ids <= ListedSuite(folder / LIST).ids
    assert len(of_release[CAPABILITY / "0.1.0"]) > 4000


# ---------------------------------------------------------------------- the generated files


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return make_matrix(CAPABILITY)


def test_the_page_answers_in_few_lines(matrix: Matrix) -> None:
    lines = page(matrix).splitlines()
    assert len(lines) <= 120
    rows = {line.split(" | ")[0]: line for line in lines}
    assert rows["| device"] == (
        "| device | decode FP8, 128 rows | decode BF16, 128 rows | prefill, 1,024 rows | indexer, 64 rows | cache operations |"
    )
    h200 = rows["| NVIDIA H200 (sm90)"].split(" | ")
    assert re.fullmatch(rf"nvidia\.native\w*, verified in {NEWEST}, [\d.]+ us", h200[1])
    assert h200[5] == f"triton.portable, verified in {NEWEST} |"
    a100 = rows["| NVIDIA A100 80GB (sm80)"].split(" | ")
    assert a100[1] == "nvidia.native_sm80, its SM80 code ran on an H200"
    mi300x = rows["| AMD Instinct MI300X (gfx942)"]
    assert mi300x.count("triton.portable, CI") == len(COLUMNS) - 2 and mi300x.count("amd.mla_gfx942, not run") == 2  # BF16
    assert "iluvatar.flash_mla_sparse_v2, not run" in rows["| Iluvatar BI-V150 (ivcore11)"]
    assert rows["| Iluvatar TG-V200 (ivcore20)"].split(" | ")[1] == "a deciding fact is not published"


def test_comparisons_that_failed_are_named_under_the_runs(tmp_path: Path, matrix: Matrix) -> None:
    (line,) = (line for line in page(matrix).splitlines() if "12 of 12 of hyv4" in line)
    assert line.startswith(f"- {NEWEST}, h200, vllm 0.30.0, other models: 12 of 12 of hyv4; `hyv4-triton-fp8-eager` against")
    assert "glm53" not in line and "short 0.321" in line
    assert sum(line.startswith("- 0.") for line in page(matrix).splitlines()) == 1
    shutil.copytree(CAPABILITY / "profiles", tmp_path / "profiles")
    compared = [
        Comparison(engine="e 1", suite="s", name=name, passed=passed, text="0.5")
        for name, passed in (("a-x", True), ("a-y", False), ("b", True), ("c", None))
    ]
    write_run(
        tmp_path / "0.1.0" / "h200-2026-11-20-somebody.json.gz", ran(comparisons=[each.model_dump() for each in compared])
    )
    ((run,), _) = read_runs(tmp_path, ACME, PROFILES)
    assert run.failed_comparisons == ("e 1, s: 1 of 2 of a; `a-y` 0.5",)


def test_what_is_shown_is_what_would_run(matrix: Matrix) -> None:
    """Not what is best proven: on a device without measured costs the declared cost decides."""
    registry = Registry(environ={}, probe=False, costs="measured")
    for row in matrix.devices:
        (request,) = COLUMNS[0].requests(PROFILES[row.slug].device_facts())
        if row.cells[0].implementation:
            assert row.cells[0].implementation == registry.decide(request, probe=False).chosen, row.slug


def test_an_indexer_that_needs_whole_tables_is_shown(tmp_path: Path) -> None:
    """Engines promise them."""
    support = Support(source="a test", archs=("sm90",), kv_layouts=("index_fp8",), needs_whole_tables=True)
    offered = registry(implementation("acme.v1", INDEXER_SELECT, support))
    made = make_matrix(tmp_path, offered)
    (h200,) = (row for row in made.devices if row.slug == "h200")
    assert [cell.implementation for cell in h200.cells] == ["", "", "", "acme.v1", ""]
    offers = offers_on(PROFILES["h200"], made, offered, lambda *_: None)
    assert [(each.implementation, each.chosen) for each in offers] == [("acme.v1", True)]


def test_a_time_is_that_of_the_costs(matrix: Matrix) -> None:
    (h200,) = (row for row in matrix.devices if row.slug == "h200")
    text = (ROOT / "backends/nvidia/src/mla_portable_nvidia/costs/h200.json").read_text()
    rows = json.loads(text)["times"]
    wanted = {"implementation": h200.cells[0].implementation, "layout": "fp8_ds_mla", "heads": 64, "topk": 2048}
    (row,) = (row for row in rows if row["primitive"] == "sparse_decode" and wanted.items() <= row.items())
    assert h200.cells[0].us == row["us"]["128"]


def test_the_files_are_written_and_read(tmp_path: Path, matrix: Matrix) -> None:
    shutil.copytree(CAPABILITY / "profiles", tmp_path / "profiles")
    write_run(tmp_path / "0.1.0" / "h200-2026-11-20-somebody.json.gz", ran(*QUICK))
    data, text, _ = generated(tmp_path, ACME).items()
    for path, content in (data, text):
        path.write_text(content)
    whole = read_matrix(tmp_path)
    assert matrix_text(whole) == data[1] and whole.proofs == tuple(proofs(ran(*QUICK)))
    assert f"| 0.1.0 | h200 | {len(QUICK)} cases at level quick | {COMMIT[:12]} | 2026-11-20 | somebody |" in text[1]
    assert text[1].endswith("1 runs by 1 party.\n")
    shutil.rmtree(tmp_path / "0.1.0")
    assert make_matrix(tmp_path, ACME) == whole, "a wheel has no runs"
    data[0].write_text("{}")
    with pytest.raises(RecordError, match=r"matrix\.json: plugins: Field required"):
        read_matrix(tmp_path)


def test_a_run_of_another_release_or_two_profiles_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path / "0.2.0" / "run.json.gz", ran(*QUICK))
    with pytest.raises(RecordError, match=r"0\.2\.0/run\.json\.gz: a run of release 0\.1\.0"):
        generated(tmp_path, ACME)


def test_runs_count_where_the_matrix_was_made_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What users have reads matrix.json alone: of runs without it the error says what makes it."""
    wanted = ran(*QUICK)
    write_run(tmp_path / "0.1.0" / "h200-2026-11-20-somebody.json.gz", wanted)
    words = "h200", "--records", str(tmp_path)
    said = " ".join(run_command(*words, code=1).split())
    assert "has runs and no matrix.json; `ci/release/matrix.py --records" in said
    assert write_matrix(["--records", str(tmp_path)]) == 0 and "matrix.json" in capsys.readouterr().out
    assert json.loads(run_command(*words, "--json"))["ok"]
    assert [proof.passed for proof in read_matrix(tmp_path).proofs] == [len(QUICK)]
    (tmp_path / "0.1.0" / "h200-2026-11-20-somebody.json.gz").rename(tmp_path / "0.1.0" / "nowhere.json.gz")
    (tmp_path / "0.1.0" / "nowhere.json.gz").write_bytes(b"")
    assert write_matrix(["--records", str(tmp_path)]) == 1 and "nowhere.json.gz" in capsys.readouterr().err


# ---------------------------------------------------------------------- one device


def test_a_device_shows_every_implementation_and_what_changed_since(matrix: Matrix) -> None:
    asked: list[tuple[str, str]] = []

    def changed(name: str, commit: str) -> int | None:
        asked.append((name, commit))
        return 3 if name == "nvidia.native" else None

    registry = Registry(environ={}, probe=False, costs="measured")
    offers = offers_on(PROFILES["h200"], matrix, registry, changed)
    decode = [each for each in offers if (each.primitive, each.layout) == ("sparse_decode", "fp8_ds_mla")]
    assert {"nvidia.native", "nvidia.native_wide", "nvidia.flashmla", "triton.portable"} <= {
        each.implementation for each in decode
    }
    assert [each.chosen for each in decode].count(True) == 1
    (native,) = (each for each in decode if each.implementation == "nvidia.native")
    proven = rf"verified in {NEWEST}: {native.passed} cases passed at level full on [\d-]{{10}}, commit [0-9a-f]{{12}}; "
    assert re.fullmatch(f"{proven}files changed since: 3", native.words)
    (portable,) = (each for each in decode if each.implementation == "triton.portable")
    assert portable.words.endswith("files changed since: unknown")
    assert len(asked) == len(set(asked))


def run_command(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["matrix", *words])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output + done.stderr


def test_a_device_is_found_by_the_beginning_of_its_name() -> None:
    assert profile_named("a100", PROFILES).slug == "a100-80g" and profile_named("H200", PROFILES).slug == "h200"
    assert profile_named("NVIDIA A100-SXM4-80GB", PROFILES).slug == "a100-80g"
    for name, question in (
        ("rtx", "did you mean rtx3090 or rtx4090 or rtx5090 or rtxpro6000"),
        ("h2000", "did you mean h200"),
        ("?", "expected one of a10"),
    ):
        with pytest.raises(RecordError) as caught:
            profile_named(name, PROFILES)
        assert question in str(caught.value)
    assert "NVIDIA A100 80GB (sm80), profile a100-80g" in run_command("a100")
    document = json.loads(run_command("h200", "--json"))
    assert document["ok"] and document["device"]["slug"] == "h200"
    (native,) = (x for x in document["offers"] if (x["implementation"], x["primitive"]) == ("nvidia.native", "topk_select"))
    assert native["state"] == f"verified in {NEWEST}" and native["release"] == NEWEST and native["missing"] == 0
    assert "(got 'h2000'). Did you mean 'h200'?" in run_command("h2000", code=2)
    assert json.loads(CliRunner().invoke(app, ["matrix", "h2000", "--json"]).stdout)["error"]["type"] == "InvalidArgument"


# ---------------------------------------------------------------------- profiles


SAMPLE = {
    "name": "Nova 9",
    "vendor": "nova",
    "arch": "nv9",
    "device_type": "cuda",
    "pattern": "Nova 9.*",
    "facts": {"num_sms": 64},
    "sources": {"arch": "a page", "num_sms": "a page"},
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"device_type": None}, "device_type"),
        ({"sources": {"arch": "a page"}}, "num_sms: each fact, and the arch, has a source"),
        ({"pattern": "("}, "pattern '\\('"),
        ({"facts": {"num_sms": "64"}}, "facts/num_sms"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_profile_is_whole_or_an_error(changes: dict[str, Any], problem: str) -> None:
    table = {name: value for name, value in (SAMPLE | changes).items() if value is not None}
    if not problem:
        nova = parse_profile("nova9", table)
        assert nova.matches("Nova 9 Pro") and nova.device_facts().num_sms == 64 and "shared_memory" in nova.unknown_facts
        return
    with pytest.raises(RecordError, match=f"profile nova9: .*{problem}"):
        parse_profile("nova9", table)


def test_the_sample_on_the_page_is_a_profile(tmp_path: Path) -> None:
    text = (ROOT / "docs/dev/evidence.md").read_text()
    sample = text.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "nova9.toml").write_text(sample)
    (profile,) = load_profiles(tmp_path).values()
    assert profile.device_type == "cuda" and profile_of("Nova 9 80GB", {"nova9": profile}) is profile


# ---------------------------------------------------------------------- editing


@pytest.fixture
def copy_of_the_code(tmp_path: Path) -> Iterator[Path]:
    skipped = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in ("mla_portable", "backends", "capability"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skipped)
    yield tmp_path


SAYS = """
import json
from itertools import product
from pathlib import Path
from matrix import read_runs
from suite import TodaysSuite
from mla_portable.capability.table import make_matrix
from mla_portable.capability.profiles import all_profiles
from mla_portable.contracts import Request
from mla_portable.layouts import LAYOUTS
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.choose import Registry

registry = Registry(environ={}, probe=False, costs="measured")
profiles = dict(all_profiles(Path("capability")))
matrix = make_matrix(Path("capability"), registry, read_runs(Path("capability"), registry, profiles))
today = TodaysSuite(registry.implementations(), profiles)
some = (("sparse_decode", "nvidia.native"), ("merge_states", "triton.portable"))
ids = [case for one in some for case in today.cases(*one, "sm90", "quick")]
sizes = product(("h200", "h100"), (SPARSE_DECODE, SPARSE_PREFILL), ("bf16", "fp8_ds_mla"), (8, 16, 64, 128), (1, 16, 256))
decisions = [
    registry.decide(Request(each, profiles[slug].device_facts(), kv_layout=rows, num_heads=heads, topk=2048, rows=many)).text()
    for slug, each, rows, heads, many in sizes
]
assert any("measured" in text for text in decisions)
chosen = matrix.model_dump(mode="json", include={"devices", "proofs", "ci"})
print(json.dumps([[chosen, decisions], ids, len(LAYOUTS)]))
"""


def test_an_edit_changes_no_choice_and_needs_no_new_run(copy_of_the_code: Path) -> None:
    """A comment, an error message, the size of a cache, and a new layout: choices, proofs and cases stay as they are."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            map(str, [copy_of_the_code, *copy_of_the_code.glob("backends/*/src"), ROOT / "ci/release"])
        ),
    }

    def says() -> Any:
        command = [sys.executable, "-c", SAYS]
        done = subprocess.run(command, cwd=copy_of_the_code, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    before = says()
    core = copy_of_the_code / "mla_portable"
    nvidia = copy_of_the_code / "backends/nvidia/src/mla_portable_nvidia"
    triton = copy_of_the_code / "backends/triton/src/mla_portable_triton"
    for path, old, new in (
        (core / "layouts/base.py", 'return f"{rows[0]} rows of {rows[1]}"', 'return f"rows of {rows[1]}, of {rows[0]}"'),
        (core / "layouts/base.py", '"add_layout", "layout"', '"add_layout", "the layout"'),
        (nvidia / "native/bound_attention.py", "for it was bound for", "because it was bound for"),
        (triton / "attention_configs.py", "from __future__", "# another comment\nfrom __future__"),
        (core / "accelerator.py", "from __future__", "# another comment\nfrom __future__"),
        (core / "kit/triton_launcher.py", "_KEPT: Final = 1024", "_KEPT: Final = 2048"),
        (nvidia / "native/sparse_decode.cuh", "\n", "\n// a comment\n"),
        (
            core / "layouts/__init__.py",
            "from mla_portable.layouts.index",
            "import mla_portable.layouts.bf16_640\nfrom mla_portable.layouts.index",
        ),
    ):
        text = path.read_text()
        assert old in text, path
        path.write_text(text.replace(old, new, 1))
    layout = (
        (core / "layouts/bf16_nope.py")
        .read_text()
        .replace("512", "640")
        .replace("bf16_nope", "bf16_640")
        .replace("NOPE", "640")
    )
    (core / "layouts/bf16_640.py").write_text(layout)
    after = says()
    assert after[:2] == before[:2] and after[2] == before[2] + 1 and len(before[1]) > 100
