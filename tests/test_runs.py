# SPDX-License-Identifier: Apache-2.0
"""The file of a run: what is written is read again, results are added, and a broken or forged file is described in words."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
import zlib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from check import check_run
from machines import PROFILES
from suite import ListedSuite

import mla_portable
from mla_portable.capability import history, run
from mla_portable.capability.model import RecordError
from mla_portable.capability.run import Baseline, Case, Comparison, Run, Time, combined, new_run, read_run, run_text, suite_of
from mla_portable.choose import Registry
from mla_portable.cli import recording
from mla_portable.contracts import InvalidArgument
from mla_portable.times.adding import add_to_file
from mla_portable.times.records import MeasuredTime, Measurement

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "capability" / "0.1.0"
COMMIT = "0123456789" * 4
DEVICE: dict[str, Any] = {
    "vendor": "nvidia",
    "name": "NVIDIA H200",
    "arch": "sm90",
    "device_type": "cuda",
    "num_sms": 132,
    "shared_memory": 232448,
    "warp_size": 32,
    "memory_bytes": 150_000_000_000,
    "graph_capture": None,
}
IDS = ("merge_states[acme.v1-p1]", "merge_states[acme.v1-p2-repeat]")
CASE = Case(id=IDS[0], status="passed", errors={"out": 1e-3})
TIME = Time(
    implementation="acme.v1",
    primitive="merge_states",
    layout=None,
    heads=16,
    topk=None,
    rows=4,
    us=20.0,
    p10=19.0,
    p90=22.0,
    bound=10.0,
    baseline=Baseline(name="other.v1", us=30.0),
)


def made(**changes: Any) -> Run:
    fields: dict[str, Any] = {
        "schema": 1,
        "release": "0.1.0",
        "commit": COMMIT,
        "dirty": [],
        "who": "somebody",
        "date": "2026-11-20",
        "device": DEVICE,
        "driver": "580.1",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    }
    cases: list[Case] = changes.pop("cases", [])
    found = new_run({**fields, **changes})
    return found.model_copy(update={"cases": cases, "suite": suite_of(cases), "times": changes.get("times", [])})


def both(*cases: Case, **changes: Any) -> Run:
    return made(level="quick", cases=list(cases) or [CASE, CASE.model_copy(update={"id": IDS[1]})], **changes)


# ---------------------------------------------------------------------- reading and writing


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json.gz"
    wrong = Case(id=IDS[1], status="failed", errors={"out": "nan", "lse": 0.5}, message="out[0]: got nan\nexpected 1")
    comparison = Comparison(engine="vllm 1.0", suite="features", name="greedy", passed=None, text="7 of 8")
    whole = both(CASE, wrong).model_copy(update={"times": [TIME], "comparisons": [comparison], "clocks": {"clocks.sm": 1980.0}})
    run.write_run(path, whole)
    assert read_run(path) == whole
    text = gzip.decompress(path.read_bytes()).decode()
    assert text.count("\n") == len(run_text(whole).splitlines()) > 10, "a line for each result"
    run.write_run(path, whole)
    assert [each.name for each in path.parent.iterdir()] == ["run.json.gz"], "nothing is left beside it"


def test_the_runs_that_are_kept_are_read_again() -> None:
    for path in RELEASE.glob("*.json.gz"):
        assert gzip.decompress(path.read_bytes()).decode() == run_text(read_run(path)), path.name
    assert sum(path.stat().st_size for path in (ROOT / "capability").rglob("*") if path.is_file()) < 2_000_000


def test_a_write_that_is_interrupted_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json.gz"
    run.write_run(path, both())

    def interrupted(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.write_run(path, made())
    assert read_run(path) == both() and [each.name for each in tmp_path.iterdir()] == ["run.json.gz"]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 8]) + data[middle + 8 :]


GOOD = gzip.compress(run_text(both()).encode())
BROKEN: dict[str, tuple[bytes, str]] = {
    "not packed": (run_text(both()).encode(), "cannot be read: Not a gzipped file"),
    "no JSON": (gzip.compress(b'{"schema": 1,'), "no JSON document"),
    "nested too deeply": (gzip.compress(b"[" * 200_000 + b"]" * 200_000), "nested too deeply"),
    "an integer that is too long": (gzip.compress(b'{"schema": ' + b"9" * 5000 + b"}"), "no JSON document: Exceeds the limit"),
    "flipped bytes": (flipped(GOOD), "cannot be read"),
    "cut off": (GOOD[:-20], "cannot be read"),
    "no UTF-8": (gzip.compress(b"\xff\xfe{}"), "no UTF-8"),
    "a list": (gzip.compress(b"[1]"), "expected a JSON object, got list"),
    "an unknown field": (
        gzip.compress(run_text(both()).replace('"who"', '"whom"').encode()),
        "who: Field required; whom: Extra",
    ),
    "a field twice": (
        gzip.compress(run_text(both()).replace('"who"', '"date": "2026-11-19", "who"').encode()),
        "one of them twice",
    ),
    "very many fields": (gzip.compress(json.dumps({str(i): 0 for i in range(10_000)}).encode()), "more than 200 fields"),
    "NaN": (gzip.compress(run_text(both()).replace("0.001", "NaN").encode()), "cases/0/errors/out"),
    "no id": (gzip.compress(run_text(both()).replace(IDS[0], "../../x").encode()), "no id of a case"),
    "a case that is gone": (
        gzip.compress(run_text(both()).replace("-p1]", "-p9]").encode()),
        "cases were added or removed by hand",
    ),
    "a day that no calendar has": (gzip.compress(run_text(both()).replace("-11-20", "-11-31").encode()), "date: "),
}


@pytest.mark.parametrize(("data", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_an_error_in_words(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(data)
    with pytest.raises(RecordError) as caught:
        read_run(path)
    assert "run.json.gz: " in str(caught.value) and problem in str(caught.value)


def test_what_is_no_file_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "folder.json.gz").mkdir()
    (tmp_path / "real").write_bytes(GOOD)
    (tmp_path / "link.json.gz").symlink_to(tmp_path / "real")
    for name, kind in (("folder", "a folder"), ("link", "a symbolic link"), ("absent", "No such file")):
        with pytest.raises(RecordError, match=kind):
            read_run(tmp_path / f"{name}.json.gz")


def test_no_more_is_unpacked_than_a_run_can_have(tmp_path: Path) -> None:
    """2 GiB of spaces in 2 MB, read by a process that may take 1.5 GiB, torch among it."""
    path = tmp_path / "bomb.json.gz"
    packer = zlib.compressobj(wbits=31)
    first, again = (packer.compress(b" " * (1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    path.write_bytes(first + 2046 * again + packer.compress(b" " * (1 << 20)) + packer.flush())
    code = "\n".join(
        [
            "import resource, sys",
            "from pathlib import Path",
            "from mla_portable.capability.run import MAX_BYTES, unpacked",
            "held = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()",
            "resource.setrlimit(resource.RLIMIT_AS, (held + 8 * MAX_BYTES,) * 2)",
            "unpacked(Path(sys.argv[1]))",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("bomb.json.gz: has more than 16 MiB when it is unpacked")


@pytest.mark.parametrize("row", ["0", "{}", '{"id": 1}'])
def test_what_is_wrong_a_million_times_is_said_once(tmp_path: Path, row: str) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(gzip.compress(run_text(both()).replace('"cases": [', f'"cases": [{f"{row}, " * 1_000_000}').encode(), 1))
    before = time.process_time()
    with pytest.raises(RecordError) as caught:
        read_run(path)
    assert "cases/0" in str(caught.value) and "cases/1" not in str(caught.value)
    assert time.process_time() - before < 10


# ---------------------------------------------------------------------- adding to a file


def test_results_are_added_to_a_run() -> None:
    other = Case(id=IDS[1], status="passed")
    whole = combined(combined(both(CASE), both(other)), made(times=[TIME]))
    assert (whole.cases, whole.times, whole.level) == ([CASE, other], [TIME], "quick")
    assert whole.suite == suite_of([other, CASE]), "of the ids, whatever their order"
    faster = TIME.model_copy(update={"us": 15.0, "p10": 15.0})
    assert combined(whole, made(times=[faster])).times == [faster]


def test_a_case_that_failed_once_stays_failed() -> None:
    failed = Case(id=IDS[0], status="failed", message="out[0]")
    for first, second in ((CASE, failed), (failed, CASE)):
        assert combined(both(first), both(second)).cases == [failed]


def test_what_had_uncommitted_changes_once_stays_so() -> None:
    assert combined(both(dirty=["a.py"]), both(dirty=["b.py"])).dirty == ["a.py", "b.py"]
    assert combined(both(dirty=["a.py"]), both(dirty=None)).dirty is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"release": "0.2.0"}, "holds results of release 0.1.0, these are of 0.2.0"),
        ({"commit": "f" * 40}, "holds results of commit 0123456789"),
        ({"commit": None}, "these are of None"),
        ({"device": {**DEVICE, "name": "NVIDIA H100 80GB HBM3"}}, "device NVIDIA H200, these are of NVIDIA H100"),
        ({"target": "sm80"}, "target None, these are of sm80"),
        ({"who": "another"}, "who somebody, these are of another"),
        ({"versions": {"torch": "2.13.0"}}, "versions {'torch': '2.11.0'"),
        ({"driver": "590"}, "driver 580.1, these are of 590"),
    ],
)
def test_what_is_of_something_else_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecordError, match="write them to another file") as caught:
        combined(both(), both(**changes))
    assert problem in str(caught.value)


def test_cases_of_two_levels_do_not_mix() -> None:
    with pytest.raises(RecordError, match="level quick, these are of full"):
        combined(both(), made(level="full", cases=[CASE]))


CPU = torch.device("cpu")
REGISTRY = Registry(plugins=[("reference", "mla_portable.reference")], environ={})


def test_a_recorder_refuses_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json.gz"
    first = recording.recorder(path, REGISTRY, CPU, who="Some Body").add(level="quick", cases=[CASE])
    assert (first.who, first.release, first.device["arch"]) == ("some_body", mla_portable.__version__, "cpu")
    with pytest.raises(RecordError, match=r"run\.json\.gz: holds results of who some_body"):
        recording.recorder(path, REGISTRY, CPU, who="other")
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="cannot be written"):
        recording.recorder(tmp_path / "file" / "run.json.gz", REGISTRY, CPU)
    with pytest.raises(InvalidArgument, match="which git says"):
        recording.recorder(tmp_path / "new.json.gz", REGISTRY, CPU, commit="f" * 40)
    times = tmp_path / "times"
    own = Registry(environ={"MLA_PORTABLE_TIMES": str(times)}, probe=False)
    what = ("reference.torch", "merge_states", None, None, None, 1, 2.0)
    for device, refused in (("another", False), (own.facts(CPU).name, True)):
        origin = Measurement(device, (device,))
        add_to_file(times / f"{device}.json", [MeasuredTime(*what, origin, configuration=(("BLOCK", 16),))])
        own.reload_policy()
        if refused:
            with pytest.raises(RecordError, match="may configure kernels"):
                recording.recorder(tmp_path / "new.json.gz", own, CPU)
        else:
            recording.recorder(tmp_path / "new.json.gz", own, CPU)


def test_without_git_a_commit_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_git", lambda *arguments: None)
    unknown = recording.recorder(tmp_path / "a.json.gz", REGISTRY, CPU).add(level="quick", cases=[CASE])
    named = recording.recorder(tmp_path / "b.json.gz", REGISTRY, CPU, commit=COMMIT).add(level="quick", cases=[CASE])
    assert (unknown.commit, unknown.dirty, named.commit) == (None, None, COMMIT)


def test_an_interrupted_suite_keeps_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from mla_portable.cli.app import app
    from mla_portable.judge.conformance import runner

    real, count = runner._bind_and_run, 0

    def third_time_interrupts(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(runner, "_bind_and_run", third_time_interrupts)
    path = tmp_path / "run.json.gz"
    words = ["conform", "reference", "--device", "cpu", "--level", "quick", "--primitive", "merge_states", "--out", str(path)]
    assert CliRunner().invoke(app, words).exit_code != 0
    assert [case.status for case in read_run(path).cases] == ["passed", "passed"]


# ---------------------------------------------------------------------- git


def test_git_counts_the_files_that_changed_since(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        named = ["-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    plugin, other = tmp_path / "src" / "plugin", tmp_path / "other.py"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("A = 1\n")
    other.write_text("B = 1\n")
    assert history.code_of([plugin]) is None, "no checkout"
    git("init", "-q")
    assert history.code_of([plugin]) is None, "not tracked"
    git("add", ".")
    git("commit", "-qm", "first")
    code = history.code_of([plugin])
    assert code is not None and code.paths == ("src/plugin",)
    commit = code.commit()
    assert commit == git("rev-parse", "HEAD").strip()
    assert (code.dirty(), code.changed_since(commit)) == ([], 0)
    other.write_text("B = 2\n")
    assert (code.dirty(), code.changed_since(commit)) == ([], 0), "the code of something else"
    (plugin / "__init__.py").write_text("A = 2  # a comment\n")
    (plugin / "new.py").touch()
    assert code.dirty() == ["src/plugin/__init__.py", "src/plugin/new.py"]
    git("add", ".")
    git("commit", "-qm", "second")
    assert (code.dirty(), code.changed_since(commit), code.changed_since("f" * 40)) == ([], 2, None)


def test_the_core_counts_for_every_plugin_of_this_checkout() -> None:
    code = recording.plugins_code(Registry(environ={}, probe=False), ["triton.portable"])
    assert code is not None and code.root == ROOT
    assert {"backends/triton/src/mla_portable_triton", *history.CORE} == set(code.paths)


def test_what_a_plugin_shares_with_others_counts_for_it() -> None:
    code = recording.plugins_code(Registry(environ={}, probe=False), ["nvidia.flashmla"])
    assert code is not None
    packages = {path for path in code.paths if path.startswith("backends/")}
    assert packages == {f"backends/{name}/src/mla_portable_{name}" for name in ("common", "nvidia")}


# ---------------------------------------------------------------------- the contributor's check


def suite(tmp_path: Path, *ids: str) -> ListedSuite:
    path = tmp_path / "cases.tsv.gz"
    path.write_bytes(gzip.compress("".join(f"quick,full\tsm80,sm90\t\t{each}\n" for each in ids).encode()))
    return ListedSuite(path)


def problems(tmp_path: Path, found: Run, name: str = "h200-2026-11-20-somebody.json.gz") -> str:
    listed = suite(tmp_path, *IDS)
    return "\n".join(check_run(Path(name), found, PROFILES, listed, date(2026, 11, 21)))


def test_a_good_run_passes_the_check(tmp_path: Path) -> None:
    whole = both(times=[TIME])
    assert problems(tmp_path, whole) == ""
    assert problems(tmp_path, whole, "h200-2026-11-20-somebody-second.json.gz") == ""
    assert problems(tmp_path, both(target="sm80")) == ""


def test_everything_that_is_kept_passes_the_check() -> None:
    listed = ListedSuite(RELEASE / "cases.tsv.gz")
    for path in RELEASE.glob("*.json.gz"):
        assert check_run(path, read_run(path), PROFILES, listed, date(2026, 12, 31)) == [], path.name


FORGED: dict[str, tuple[Run, str]] = {
    "another name": (both(who="other"), "name it h200-2026-11-20-other.json.gz"),
    "no profile": (both(device={**DEVICE, "name": "Nova 9"}), "no profile matches; add or correct one"),
    "another device": (both(device={**DEVICE, "num_sms": 108}), "device/num_sms is 108, that of h200 is 132"),
    "half the memory": (both(device={**DEVICE, "memory_bytes": 70 << 30}), "h200 has 141 GiB"),
    "no such architecture": (both(target="sm79"), "target 'sm79'"),
    "its own architecture": (both(target="sm90"), "target 'sm90'"),
    "of tomorrow's tomorrow": (both(date="2026-11-23"), "in the future"),
    "no commit": (both(commit=None), "commit is unknown"),
    "changes": (both(dirty=["a.py", "b.py"]), "2 files had uncommitted changes, a.py first"),
    "nothing": (made(), "has no result"),
    "too few cases": (both(CASE), f"1 cases of level quick did not run, {IDS[1]} first"),
    "an invented case": (both(CASE, CASE.model_copy(update={"id": "merge_states[acme.v1-p7]"})), "are none of the suite's"),
    "smoke": (made(level="smoke", cases=[CASE]), "level smoke proves nothing; run quick or full"),
    "twice": (both(CASE, CASE), "1 cases are there twice"),
    "NaN passed": (both(Case(id=IDS[0], status="passed", errors={"out": "nan"})), "passed, with an error that is no number"),
    "no message": (both(Case(id=IDS[0], status="error")), "error, without a message"),
    "below the bound": (
        made(times=[TIME.model_copy(update={"bound": 19.5})]),
        "bound 19.5, p10 19, median 20, p90 22 us",
    ),
    "no bound": (made(times=[TIME.model_copy(update={"bound": 0.0})]), "bound 0,"),
    "quantiles": (made(times=[TIME.model_copy(update={"p90": 19.5})]), "acme.v1 / merge_states, heads 16, rows 4: bound"),
    "a time of an unknown kernel": (
        made(times=[TIME.model_copy(update={"implementation": "acme.v2"})]),
        "no case for it on sm90",
    ),
}


@pytest.mark.parametrize(("found", "problem"), FORGED.values(), ids=FORGED)
def test_a_forged_or_incomplete_run_does_not(tmp_path: Path, found: Run, problem: str) -> None:
    assert problem in problems(tmp_path, found)


def test_the_script_checks_files(tmp_path: Path) -> None:
    folder = tmp_path / "0.1.0"
    run.write_run(folder / "h200-2026-11-20-somebody.json.gz", both(dirty=["a.py"]))
    (folder / "broken.json.gz").write_bytes(GOOD[:-20])
    suite(folder, *IDS)
    files = sorted(map(str, folder.glob("*.json.gz")))
    done = subprocess.run([str(ROOT / "ci/check_runs"), *files], capture_output=True, text=True)
    assert done.returncode == 1 and "0.1.0/broken.json.gz: broken.json.gz: cannot be read" in done.stdout
    assert "0.1.0/h200-2026-11-20-somebody.json.gz: 1 files had uncommitted changes" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 runs, 2 problems"
    assert json.loads(run_text(both()))["dirty"] == []
