# SPDX-License-Identifier: Apache-2.0
"""The command line: what each command prints, as text and as JSON, and the code it exits with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer
from commands import RUNNER, document, in_a_process, invoke, missing_library
from spoiled import WRONG, WRONG_TIMED, Spoiled, registry_with

from mla_portable.attention.spec import AUTO_ROUTE
from mla_portable.capability.matrix import installed_matrix
from mla_portable.capability.run import read_run
from mla_portable.choose import Registry
from mla_portable.choose.settings import REMOVED
from mla_portable.cli.app import app
from mla_portable.cli.conform import conform
from mla_portable.cli.kernels import kernels
from mla_portable.cli.output import digits
from mla_portable.cli.step import run
from mla_portable.contracts import ROUTES, Primitive, Request
from mla_portable.dispatch import serving
from mla_portable.judge.problems import LEVELS
from mla_portable.judge.problems.bench import timed_primitives
from mla_portable.judge.problems.step import default_shape
from mla_portable.layouts import SCALE_FORMATS
from mla_portable.primitives import (
    CONCAT_MLA_K,
    INDEXER_SELECT,
    MASKED_PREFILL,
    MERGE_STATES,
    NORM_ROPE_WRITE,
    PACK_SELECTION,
    ROPE_QUANTIZE_QUERIES,
)

pytestmark = pytest.mark.usefixtures("a_bare_machine")

SIZES = "--heads 2 --topk 48 --decodes 3 --prefills 2 --prefill-tokens 6 --context 90 --block-size 16 --repeat 1 --check-rows 0"
SMALL = SIZES.split()
BESIDE_A_STEP = (PACK_SELECTION, CONCAT_MLA_K, MASKED_PREFILL, NORM_ROPE_WRITE, ROPE_QUANTIZE_QUERIES)
OF_A_STEP = [str(each) for each in timed_primitives() if each not in BESIDE_A_STEP]
"""What `run` runs: a layer computes prompts over latent rows, and its projections are an engine's."""


# ---------------------------------------------------------------------- help and usage


def test_the_matrix_is_read_without_torch_where_it_is_of_the_installed_plugins(monkeypatch):
    matrix = installed_matrix()
    assert matrix is not None and "h200 (sm90)" in invoke("matrix").stdout
    code = "import sys; from mla_portable.cli import main\ntry: main()\nfinally: sys.exit(int('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, "matrix"], capture_output=True, text=True)
    assert done.returncode == 0 and "h200 (sm90)" in done.stdout, done.stderr
    monkeypatch.setattr("mla_portable.capability.matrix.entry_points", lambda group: ())
    assert installed_matrix() is None


@pytest.mark.parametrize("words", [[], ["run"], ["doctor"], ["explain"], ["conform"], ["bench", "kernels"]])
def test_help_needs_no_torch(words):
    code = "import sys; from mla_portable.cli import main\ntry: main()\nfinally: sys.exit(int('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_an_unknown_primitive_is_answered_with_every_name():
    text = invoke("explain", "decode", code=2).output.replace("│", " ")
    assert set(Primitive.all()) <= set(text.replace(",", " ").replace(";", " ").split())


def test_version():
    import mla_portable

    assert invoke("--version").stdout.strip() == mla_portable.__version__


@pytest.mark.parametrize(
    "words",
    [
        "nonsense",
        "run --device nonsense",
        "run --device cuda:99",
        "run --device meta",
        "run --device cpu:3",
        "run --seed 99999999999999999999",
        "run --block-size 1000000",
        "run --heads 100000",
        "run --topk 0",
        "run --repeat 0",
        "run --route sideways",
        "run --backend nobody",
        "run --backend sparse_decode=reference --backend reference",
        "run --backend sparse_decode=reference --backend sparse_decode=reference",
        "run --backend sparse_dekode=reference",
        "explain sparse_dekode",
        "explain sparse_decode --heads 0",
        "explain route --rows 0",
        "explain merge_states --heads 16",
        "explain route --compact",
        "explain sparse_decode --layout fp4",
        "explain sparse_decode --backend nobody",
        "conform nobody",
        "conform reference --level thorough",
        "conform spoiled --level thorough",  # which nothing here offers
        "conform reference --jobs 0",
        "conform reference --jobs 2",  # of a registry that worker processes cannot build
        "conform reference --primitive sparse_dekode",
        "bench kernels --device nonsense",
    ],
)
def test_invalid_arguments_are_code_2_in_words_and_a_document_with_json(words):
    done = invoke(*words.split(), code=2)
    assert done.stdout == "" and done.stderr.startswith("error: ") and "Try 'mla-portable" in done.stderr
    answer = document(*words.split(), code=2)
    assert answer["ok"] is False and answer["error"]["type"] in ("InvalidArgument", "UnknownBackend")
    assert f"error: {answer['error']['message']}" in done.stderr


WORDS = {
    "explain sparse_decode --heads 0": "--heads must be at least 1 (got 0)",
    "explain sparse_decode --heads x": "--heads must be an integer (got 'x')",
    "run --max-seconds x": "--max-seconds must be a number (got 'x')",
    "run --heads 10000": "--heads must be 1 to 512 (got 10000)",
    "conform reference --level most": "--level must be one of smoke, quick, full (got 'most')",
    "matrix h2000": "DEVICE must be one of a10, a100-80g",
    "run --device cuda": "No CUDA device: this torch",
    "explain merge_states --device a100-40g": "Did you mean 'a100-80g'?",
    "matrix --write": "No such option: --write",
    "explain": "Missing argument 'primitive'",
    "explain --nonsense": "No such option: --nonsense",
    "nonsense": "No such command 'nonsense'",
    "bench nonsense": "No such command 'nonsense'",
    "bench page": "No such command 'page'",
    "bench kernels --primitive indexer_logits": "--primitive must be one of cache_write, concat_mla_k, convert_indices",
    "tune --primitive topk_select": "--primitive must be one of sparse_decode, sparse_prefill (got 'topk_select')",
}


@pytest.mark.parametrize(("words", "expected"), WORDS.items())
def test_an_invalid_value_is_refused_in_one_style(words, expected):
    done = invoke(*words.split(), code=2)
    assert expected in done.stderr
    assert not any(word in done.stderr for word in ("Value error", "InvalidArgument", "Input should", "╭"))
    assert document(*words.split(), code=2)["error"]["message"] in done.stderr


def test_a_run_that_is_not_there_is_refused_in_the_same_style():
    said = invoke("bench", "costs", "nowhere.json.gz", code=2).stderr
    assert said.startswith("error: RUN must be a file that is there (got 'nowhere.json.gz')")


@pytest.mark.parametrize("command", ["bench kernels", "tune"])
def test_a_benchmark_takes_every_name_that_it_lists(command):
    listed = invoke(*command.split(), "--primitive", "nosuch", code=2).stderr
    names = listed[listed.index("one of ") + 7 : listed.index(" (got")].split(", ")
    assert {"sparse_decode", "sparse_prefill"} <= {*names} < {str(each) for each in Primitive.all()}
    for name in names:
        done = RUNNER.invoke(app, [*command.split(), "--primitive", name, "--rows", "0"])
        assert "rows" in done.stderr and "--primitive" not in done.stderr, name


@pytest.mark.parametrize("words", ["doctor", "matrix", "explain merge_states", "--help"])
def test_a_width_of_0_is_no_width(words):
    done = in_a_process(*words.split(), COLUMNS="0")
    assert len(done.stdout) > 200


@pytest.mark.parametrize("out", ["/proc/nope/tuned.json", "{tmp}/file/tuned.json", "{tmp}", "/proc/self/comm", "/dev/null"])
def test_an_unwritable_table_is_refused_before_the_work(tmp_path, monkeypatch, out):
    (tmp_path / "file").write_text("a file, no folder")
    monkeypatch.setattr("mla_portable.bench.tune.tune", lambda *args, **options: pytest.fail("it was tuned first"))
    done = invoke("tune", "--device", "cpu", "--out", out.format(tmp=tmp_path), code=2)
    assert "--out" in done.stderr and done.stdout == "" and "Traceback" not in done.stderr


def test_an_unwritable_file_of_times_is_refused_before_the_work(monkeypatch):
    monkeypatch.setattr("mla_portable.bench.kernels.time_kernels", lambda *args, **options: pytest.fail("it was timed"))
    done = invoke("bench", "kernels", "--out", "/proc/nope/times", code=2)
    assert "--out must be a file that can be written (got /proc/nope/times" in done.stderr


def test_a_forced_backend_of_another_vendor_is_only_let_go():
    registry = registry_with(("acme", "fake_plugins.acme"))
    text = invoke("run", *SMALL, "--backend", "acme", registry=registry, code=1).stderr
    assert "acme is forced by argument" in text
    assert re.findall(r"remedy +(.*)", text) == ["leave out the backend to let the registry choose"]


def test_an_error_is_a_document_too():
    answer = document("run", "--topk", "9999999", code=2)
    assert answer["ok"] is False and answer["error"]["type"] == "InvalidArgument" and "topk" in answer["error"]["message"]


# ---------------------------------------------------------------------- run


def test_run_prints_who_served_each_primitive_and_how_well():
    text = invoke("run", *SMALL).stdout
    assert "x_q is in half steps between values of its FP8 dtype" in text
    for line in (*OF_A_STEP, "the whole step", "planning the step"):
        assert line in text
    assert "reference.torch" in text and "route   direct" in text and "All errors are within" in text


def test_run_as_json():
    answer = document("run", *SMALL, "--query-len", "2", "--seed", "3")
    assert answer["ok"] and answer["route"] == "direct" and answer["failures"] == []
    assert answer["shape"]["decode_query_len"] == 2 and answer["shape"]["seed"] == 3
    assert {row["primitive"] for row in answer["primitives"]} == set(OF_A_STEP)
    for row in answer["primitives"]:
        assert row["ok"] and row["implementation"] == "reference.torch" and row["timing"]["n"] == 1
        assert all(finding["error"] <= finding["limit"] for finding in row["findings"])
        assert row["decision"]["control"] == "default"
    assert answer["step"]["findings"] and answer["step"]["timing"]["median_ms"] > 0 and answer["plan"]["n"] >= 20


@pytest.mark.parametrize("options", ["--kv-layout bf16", "--scale-format amax --route split", "--route upconvert"])
def test_run_with_other_options(options):
    answer = document("run", *SMALL, *options.split())
    assert answer["ok"]
    assert answer["shape"]["kv_layout"] == ("bf16" if "bf16" in options else "fp8_ds_mla")


def test_run_names_no_kernel_of_another_vendor_as_the_next_best():
    plugins = [("reference", "mla_portable.reference"), ("acme", "fake_plugins.acme")]
    text = invoke("run", *SMALL, "--all", registry=Registry(plugins=plugins, environ={})).stdout
    assert "there is no other candidate for this device" in text and "acme" not in text


def test_run_fails_when_a_result_is_wrong():
    registry = registry_with(("spoiled", Spoiled({"sparse_prefill": WRONG["sparse_prefill"]})), probe=False)
    answer = document("run", *SMALL, registry=registry, code=1)
    assert answer["ok"] is False
    assert {row["primitive"] for row in answer["primitives"] if not row["ok"]} == {"sparse_prefill"}
    text = invoke("run", *SMALL, registry=registry, code=1).stdout
    assert "WRONG" in text and "sparse_prefill (cache): out[" in text and "All errors" not in text


def test_the_probe_keeps_a_wrong_backend_from_being_used():
    registry = registry_with(("spoiled", Spoiled(WRONG_TIMED)))
    answer = document("run", *SMALL, registry=registry)
    assert {row["implementation"] for row in answer["primitives"]} == {"reference.torch"}
    text = invoke("run", *SMALL, "--all", registry=registry).stdout
    assert "wrong values" in " ".join(text.split())


def test_run_with_a_forced_backend_that_cannot_serve():
    registry = registry_with(("spoiled", Spoiled(only=[MERGE_STATES])))
    done = invoke("run", *SMALL, "--backend", "spoiled", registry=registry, code=1)
    assert done.stdout == "" and "sparse_decode" in done.stderr and "spoiled offers merge_states" in done.stderr


def test_run_with_a_backend_for_one_primitive():
    registry = registry_with(("spoiled", Spoiled()))
    answer = document("run", *SMALL, "--backend", "merge_states=reference", registry=registry)
    who = {row["primitive"]: (row["implementation"], row["decision"]["control"]) for row in answer["primitives"]}
    assert who["merge_states"] == ("reference.torch", "argument") and who["sparse_decode"] == ("spoiled.torch", "default")


def test_a_plugin_that_prints_does_not_spoil_the_document():
    registry = registry_with(("spoiled", Spoiled(loud=True)))
    with serving(registry):
        done = RUNNER.invoke(app, ["run", *SMALL, "--json"])
    assert json.loads(done.stdout)["ok"]
    assert "binding sparse_decode" in done.stderr


LOUD = """
import atexit, ctypes, os
from mla_portable.capability.matrix import installed_matrix
from mla_portable.capability.run import read_run
from mla_portable.contracts import Implementation, Support, hookimpl
from mla_portable.layouts import SCALE_FORMATS
from mla_portable.primitives import MERGE_STATES

def say(what):
    print("python: " + what)
    os.write(1, b"descriptor: " + what.encode() + b"\\n")
    ctypes.CDLL(None).printf(b"buffered by C: " + what.encode() + b"\\n")

def check(device):
    say("check")
    return []

def bind(request):
    say("probe")
    raise RuntimeError("loud")

@hookimpl
def mla_portable_register(registrar):
    support = Support(source="this test", device_types=("cpu",))
    registrar.add(Implementation("loud.v1", MERGE_STATES, support, bind, check=check, preference=1))

say("import")
atexit.register(say, "exit")
"""


@pytest.mark.parametrize("words", ["doctor", "matrix h200", "conform loud --level smoke --primitive merge_states"])
def test_the_document_is_alone_on_stdout_whatever_a_plugin_writes_there(tmp_path, words):
    (tmp_path / "loud_plugin.py").write_text(LOUD)
    dist = tmp_path / "loud-1.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1\n")
    (dist / "entry_points.txt").write_text("[mla_portable.backends]\nloud = loud_plugin\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "mla_portable", *words.split(), "--json"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert isinstance(answer["ok"], bool) and done.returncode == (0 if answer["ok"] else 1)
    for way in ("python", "descriptor", "buffered by C"):
        for what in ("import", "exit") if "matrix" in words else ("import", "check", "probe", "exit"):
            assert f"{way}: {what}\n" in done.stderr


@pytest.mark.parametrize("words", ["matrix --json", "matrix", "--help"])
def test_a_reader_that_leaves_early_causes_no_traceback(words):
    command = [sys.executable, "-m", "mla_portable", *words.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize("words", ["matrix", "matrix h200", "matrix nosuch", "matrix --records /nowhere", "matrix --write"])
def test_the_matrix_is_a_document_with_ok(words):
    done = RUNNER.invoke(app, [*words.split(), "--json"])
    assert json.loads(done.stdout)["ok"] is (done.exit_code == 0)


def test_a_defect_is_a_document_and_a_traceback():
    def breaks(*args, **options):
        raise ZeroDivisionError("a kernel divides by zero")

    registry = registry_with(("spoiled", Spoiled({"convert_indices": breaks})), probe=False)
    done = invoke("run", *SMALL, "--json", registry=registry, code=1)
    assert json.loads(done.stdout)["error"] == {"type": "ZeroDivisionError", "message": "a kernel divides by zero"}
    assert "in breaks" in done.stderr


# ---------------------------------------------------------------------- conform and bench


def test_conform_passes_and_is_kept(tmp_path):
    out = tmp_path / "new" / "cpu.json.gz"
    words = ["conform", "reference", "--level", "smoke", "--primitive", "merge_states", "--out", str(out), "--who", "A. Person"]
    answer = document(*words)
    assert answer["ok"] and answer["totals"]["passed"] == answer["totals"]["cases"] > 0
    assert {case["primitive"] for case in answer["cases"]} == {"merge_states"}
    first = read_run(out)
    assert [case.id for case in first.cases] == [case["id"] for case in answer["cases"]]
    assert (first.who, first.level, first.device["vendor"], len(first.commit or "")) == ("a._person", "smoke", "cpu", 40)
    invoke(*words[:-2], "--who", "somebody else", code=1)
    invoke("conform", "reference", "--level", "smoke", "--primitive", "quantize_per_tensor", *words[-4:])
    second = read_run(out)
    assert second.cases[: len(first.cases)] == first.cases and len(second.cases) > len(first.cases)


# ---------------------------------------------------------------------- the process


def in_a_shell(line: str) -> subprocess.CompletedProcess[str]:
    """`line`, in which MLA is the command."""
    environment = os.environ | {"MLA": f"{sys.executable} -m mla_portable"}
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)


FULL = "mla-portable: write error: No space left on device\n"
CLOSED = "mla-portable: stdout is closed, and results are written there\n"
STREAMS = {
    "$MLA --version >/dev/full": FULL,
    "$MLA --help >/dev/full": FULL,
    "$MLA matrix >/dev/full": FULL,
    "$MLA matrix --json >/dev/full": FULL,
    "$MLA --version >&-": CLOSED,
    "$MLA matrix >&-": CLOSED,
    "$MLA matrix --json >&-": CLOSED,
    "$MLA matrix >&- 2>&-": "",
    "$MLA explain sparse_decode --tp 3 2>/dev/full": "",
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the platform has no /dev/full")
@pytest.mark.parametrize(("line", "message"), STREAMS.items(), ids=STREAMS)
def test_results_that_cannot_be_written_are_a_line_and_a_failure(line: str, message: str):
    done = in_a_shell(line)
    assert done.returncode != 0 and done.stderr == message


@pytest.mark.parametrize("words", ["--version", "matrix h200", "matrix --json"])
def test_a_command_without_stderr_gives_its_results(words: str):
    done = in_a_shell(f"$MLA {words} 2>&-")
    assert done.returncode == 0 and done.stdout == in_a_shell(f"$MLA {words}").stdout != ""


def test_files_do_not_take_the_place_of_closed_streams():
    code = "from mla_portable.cli.process import open_streams; open_streams(); print(open('/dev/null').fileno())"
    done = subprocess.run(["bash", "-c", f'exec "{sys.executable}" -c "{code}" <&- 2>&-'], capture_output=True, text=True)
    assert int(done.stdout) > 2


@pytest.mark.parametrize("kind", ["Panic('odd \\x1b[2J text')", "OSError(28, 'full \\x1b[2J', 'table.json')", "SystemExit(3)"])
def test_what_nothing_has_handled_is_a_traceback_that_steers_no_terminal(kind: str):
    code = (
        "from mla_portable.cli.process import guarded\nclass Panic(BaseException): pass\n"
        f"def work(): raise {kind}\nguarded(work)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "SystemExit" in kind:
        assert (done.returncode, done.stderr) == (3, "")
        return
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and r"\x1b[2J" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_panic_is_a_document_too(monkeypatch: pytest.MonkeyPatch):
    class Panic(BaseException):
        pass

    def panics(*arguments: object, **options: object) -> None:
        raise Panic("odd")

    monkeypatch.setattr(Registry, "decide", panics)
    answer = document("explain", "merge_states", code=1)
    assert answer == {"ok": False, "error": {"type": "Panic", "message": "odd"}}


def test_an_end_of_file_that_a_plugin_meets_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch):
    def ends(*arguments: object, **options: object) -> None:
        raise EOFError("the table ends too early")

    monkeypatch.setattr(Registry, "decide", ends)
    answer = document("explain", "merge_states", code=1)
    assert answer == {"ok": False, "error": {"type": "EOFError", "message": "the table ends too early"}}


EARLY = {
    "explain sparse_dekode": "sparse_decode",
    "explain sparse_decode --layout fp4": "fp8_ds_mla",
    "explain sparse_decode --backend tritn": "Did you mean 'triton'",
    "explain sparse_decode --tp 3": "divisor",
    "explain sparse_decode --tp 8 --heads 16": "--heads",
    "explain indexer_logits --tp 8": "every rank",
    "run --route sideways": "upconvert",
    "run --topk 0": "--topk",
    "run --kv-layout fp4": "fp8_ds_mla",
    "run --backend sparse_dekode=triton": "sparse_decode",
    "conform tritn": "triton",
    "conform triton --level turbo": "quick",
    "conform triton --primitive sparse_dekode": "sparse_decode",
}


@pytest.mark.parametrize(("words", "expected"), EARLY.items())
def test_names_and_sizes_are_checked_before_torch_is_loaded(words, expected):
    code = (
        "import sys\nfrom mla_portable.cli.app import app\n"
        "try: app(sys.argv[1:])\nexcept SystemExit as end: assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0 and expected in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    assert done.stdout == ""


def test_choices_that_are_written_out_are_those_of_the_library():
    def choices(annotation) -> tuple[str, ...]:
        return tuple(name for each in (annotation, *get_args(annotation)) for name in get_args(each) if isinstance(name, str))

    assert choices(get_type_hints(conform)["level"]) == LEVELS
    assert {*choices(get_type_hints(run.__wrapped__)["route"])} == {AUTO_ROUTE, *ROUTES}
    assert choices(get_type_hints(kernels.__wrapped__)["scale_format"]) == SCALE_FORMATS
    assert choices(get_args(signature(run).parameters["scale_format"].annotation)[0]) == SCALE_FORMATS


def test_conform_in_processes_gives_what_one_process_gives():
    words = ["conform", "reference", "--level", "smoke", "--primitive", "quantize_per_tensor", "--device", "cpu", "--json"]
    alone, spread = document(*words[:-1]), json.loads(in_a_process(*words, "--jobs", "2").stdout)
    assert spread["ok"] and spread["totals"]["passed"] == alone["totals"]["passed"] > 4
    keys = ("id", "status", "errors", "tolerances")
    assert [[case[key] for key in keys] for case in spread["cases"]] == [[case[key] for key in keys] for case in alone["cases"]]


def test_conform_fails_and_names_the_cases():
    registry = registry_with(("spoiled", Spoiled({"merge_states": WRONG["merge_states"]})), probe=False)
    words = ["conform", "spoiled", "--level", "smoke", "--primitive", "merge_states", "--primitive", "quantize_per_tensor"]
    answer = document(*words, registry=registry, code=1)
    failed = {case["primitive"] for case in answer["cases"] if case["status"] != "passed"}
    assert failed == {"merge_states"} and answer["totals"]["passed"] > 0
    text = invoke(*words, registry=registry, code=1).stdout
    assert "FAILED merge_states[spoiled.torch" in text
    whole = invoke(*words, "--all", registry=registry, code=1).stdout
    assert whole.count("FAILED ") + whole.count("ERROR ") == answer["totals"]["failed"]


def test_conform_shows_tracebacks_on_request():
    def broken(outs, lses):
        raise ZeroDivisionError("one part is none")

    registry = registry_with(("spoiled", Spoiled({"merge_states": broken})), probe=False)
    words = ["conform", "spoiled", "--level", "smoke", "--primitive", "merge_states"]
    plain = invoke(*words, registry=registry, code=1).stdout
    whole = invoke(*words, "--verbose", registry=registry, code=1).stdout
    assert "Traceback" not in plain and f"(raised at {__file__}:" in plain.replace("\n", "")
    assert "Traceback (most recent call last)" in whole and 'raise ZeroDivisionError("one part is none")' in whole


def test_a_suite_that_ran_nothing_fails():
    registry = registry_with(("spoiled", Spoiled(check=missing_library)))
    answer = document("conform", "spoiled", "--level", "smoke", registry=registry, code=1)
    assert answer["totals"]["cases"] == 0 and len(answer["unavailable"]) == len(Primitive.all())
    text = invoke("conform", "spoiled", "--level", "smoke", registry=registry, code=1).stdout
    assert "No test case applied to this device." in text and "spoiled_kernels" in text
    assert document("conform", "reference", "--match", "no such case", code=1)["totals"]["cases"] == 0


def test_a_run_without_a_bound_makes_as_many_runs_as_it_says():
    answer = document("run", *SMALL, "--repeat", "3", "--max-seconds", "0")
    assert answer["ok"] and {row["timing"]["n"] for row in answer["primitives"]} == {3}


# ---------------------------------------------------------------------- the page


PAGE = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()


def options(command) -> Iterator[tuple[set[str], str | None]]:
    """(spellings, help) of each option of every command, subcommands included; --help is click's own."""
    for each in getattr(command, "commands", {}).values():
        yield from options(each)
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield {*parameter.opts, *parameter.secondary_opts}, parameter.help


def test_the_page_invents_no_option_and_help_explains_each():
    known = list(options(typer.main.get_command(app)))
    assert len(known) > 60 and [spellings for spellings, words in known if not words] == []
    named = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    engines = {"--enable-metrics", "--api-server-count"}
    assert len(named) > 20 and named - engines <= {"--help"}.union(*(spellings for spellings, _ in known))


def test_help_gives_the_defaults_that_hold():
    cpu, gpu = default_shape("cpu"), default_shape("cuda")
    text = " ".join(invoke("run", "--help").stdout.replace("│", " ").split())
    for here, there in (
        (cpu.num_heads, gpu.num_heads),
        (cpu.decodes, gpu.decodes),
        (cpu.prefill_tokens, gpu.prefill_tokens),
        (cpu.context, gpu.context),
    ):
        assert f"Default: {here} on a CPU, {there} on a GPU." in text
    assert (cpu.topk, cpu.decode_query_len, cpu.prefills) == (gpu.topk, gpu.decode_query_len, gpu.prefills)
    for value in (f"Indices per token. Default: {cpu.topk}.", f"Default: {cpu.prefills}.", f"Default: {cpu.block_size}."):
        assert value in text
    assert f"{cpu.kv_layout} (default) or bf16" in text and f"Kind of FP8 scales. Default: {cpu.scale_format}." in text


def test_the_page_lists_every_environment_variable():
    sources = [path.read_text() for path in (Path(__file__).parents[1] / "mla_portable").rglob("*.py")]
    used = {name.rstrip("_") for text in sources for name in re.findall(r"MLA_PORTABLE_[A-Z_]+", text)}
    table = PAGE[PAGE.index("## Environment variables") : PAGE.index("What is stronger")]
    assert used >= {"MLA_PORTABLE_BACKEND", "MLA_PORTABLE_DISABLE", *REMOVED}
    listed = {name.rstrip("_") for name in re.findall(r"`(MLA_PORTABLE_[A-Z_]+)", table)}
    assert used - {"MLA_PORTABLE", *REMOVED} <= listed


@pytest.mark.parametrize(
    ("value", "text"), [(359.346, "359"), (2177.68, "2178"), (28.6346, "28.6"), (1.3205, "1.32"), (0.0994, "0.099"), (0, "0")]
)
def test_times_have_three_digits(value, text):
    assert digits(value) == text


def test_conform_names_what_did_not_run_once_for_each_reason():
    lines = invoke("conform", "acme", registry=registry_with(("acme", "fake_plugins.acme")), code=1).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("not run: ")]
    assert "acme.fused / sparse_decode" in line and line.endswith("vendor cpu (supports nvidia)")


def test_conform_shows_a_line_for_each_implementation_unless_more_is_asked_for():
    words = ["conform", "reference", "--level", "smoke", "--primitive", "merge_states"]
    short, whole = invoke(*words).stdout, invoke(*words, "--all").stdout
    (row,) = [line for line in short.splitlines() if line.startswith("  merge_states ")]
    assert re.search(r"reference\.torch +\d+  out( cosine)? \d+%$", row.rstrip()) and "raised" not in short
    rows = [line.split() for line in whole.splitlines() if line.startswith("  merge_states ")]
    assert len(rows) == 4 and all(float(cells[-2]) <= float(cells[-1]) for cells in rows[1:])


def examples() -> Iterator[tuple[list[str], str]]:
    """The words that name a command, and each example in its help."""
    from mla_portable.cli.app import COMMANDS
    from mla_portable.cli.bench import EXAMPLES

    for command, lines in COMMANDS.items():
        yield from (([command.__name__], line) for line in lines)
    for name, lines in EXAMPLES.items():
        yield from ((["bench", name], line) for line in lines)


def test_every_command_has_examples():
    group = typer.main.get_command(app)
    commands = {*group.commands, *(f"bench {name}" for name in group.commands["bench"].commands)} - {"bench"}
    assert {" ".join(path) for path, _ in examples()} == commands


@pytest.mark.parametrize(("path", "line"), list(examples()), ids=lambda value: value if isinstance(value, str) else "")
def test_an_example_is_in_the_help_and_can_be_called(path, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run.json.gz", "serve.log", "glm.npz"):
        (tmp_path / name).touch()
    words = line.split()
    assert words[: len(path)] == path
    assert f"mla-portable {line}" in " ".join(RUNNER.invoke(app, [*path, "--help"], env={"COLUMNS": "200"}).stdout.split())
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    command.make_context(line, words[len(path) :])  # raises for an option or a value that there is not


# ---------------------------------------------------------------------- warm


def test_warm_runs_what_engines_run_and_says_what_is_new_in_the_caches(tmp_path, monkeypatch):
    from mla_portable.bench import warm as warming

    triton, own = tmp_path / "triton", tmp_path / "own"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton))
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    real = warming.SparseMLAAttention.forward

    def compiling(self, *given, **named):
        """As on a GPU: Triton and a plugin keep what they compile for the call."""
        (triton / "ABC").mkdir(parents=True, exist_ok=True)
        for name in ("decode_kernel.json", "__grp__decode_kernel.json", "decode_kernel.cubin"):
            (triton / "ABC" / name).touch()
        (own / "mla-portable" / "native").mkdir(parents=True, exist_ok=True)
        (own / "mla-portable" / "native" / "0.image").touch()
        return real(self, *given, **named)

    monkeypatch.setattr(warming.SparseMLAAttention, "forward", compiling)
    words = ["warm", "--device", "cpu", "--heads", "2", "--layout", "fp8_ds_mla"]
    answer = document(*words)
    assert answer["ok"] and [each["path"] for each in answer["caches"]] == [str(triton), str(own / "mla-portable")]
    assert [each["new"] for each in answer["caches"]] == [3, 1] and answer["caches"][0]["names"] == ["decode_kernel"]
    ran = {each["what"]: each["served"] for each in answer["ran"]}
    assert len(ran) == 4 and all("reference.torch" in served for served in ran.values())
    assert {"indexer", "layer of 2 heads, fp8_ds_mla, pow2 scales", "layer of 2 heads, fp8_ds_mla, amax scales"} < {*ran}
    text = invoke(*words).stdout
    assert "0 new files" in text and f"{triton}: 3 files, 0 of them new" in text


def watched_registry() -> tuple[Registry, list[Request]]:
    """A registry, and the requests that it decided on."""
    seen: list[Request] = []
    registry = registry_with(("acme", "fake_plugins.acme"))
    decide = registry.decide

    def deciding(request, *given, **named):
        seen.append(request)
        return decide(request, *given, **named)

    registry.decide = deciding
    return registry, seen


def test_prompts_are_timed_with_the_widths_of_the_model_that_is_named():
    words = ["bench", "prompts", "--device", "cpu", "--heads", "2", "--layout", "bf16", "--repeat", "1"]
    for model, widths in (("glm-5", (256, 256)), ("deepseek-v3.2", (192, 128))):
        registry, seen = watched_registry()
        assert document(*words, "--model", model, registry=registry)["ok"]
        assert {(each.qk_head_dim, each.v_head_dim) for each in seen if each.primitive == MASKED_PREFILL} == {widths}
    assert "--model" in invoke(*words, "--model", "deepseek-v4", code=2).stderr


def test_warm_runs_layers_of_the_model_that_is_named():
    """Widths of GLM-5's prompts and heads of its indexer; models whose layers are not those of a step are refused."""
    registry, seen = watched_registry()
    answer = document("warm", "--device", "cpu", "--model", "GLM-5", "--heads", "2", "--layout", "bf16", registry=registry)
    assert answer["ok"] and answer["model"] == "GLM-5"
    assert {each.num_heads for each in seen if each.primitive == INDEXER_SELECT} == {32}
    assert {(each.qk_head_dim, each.v_head_dim) for each in seen if each.primitive == MASKED_PREFILL} == {(256, 256)}
    refused = invoke("warm", "--device", "cpu", "--model", "deepseek-v4", code=2).stderr
    assert "--model" in refused and "glm-5, mistral-large-4 (got 'deepseek-v4')" in refused


def test_warm_fails_where_nothing_serves():
    registry = registry_with(("acme", "fake_plugins.acme"), environ={"MLA_PORTABLE_BACKEND_SPARSE_DECODE": "acme"})
    words = ["warm", "--device", "cpu", "--heads", "2", "--layout", "bf16"]
    answer = document(*words, registry=registry, code=1)
    assert answer["ok"] is False and any("acme" in each["error"] for each in answer["ran"])


@pytest.mark.parametrize(
    "words", ["warm --device cpu --layout fp4", "warm --heads 0", "warm --device cuda:99", "warm --device h200"]
)
def test_warm_needs_a_device_that_is_here_and_known_names(words):
    assert invoke(*words.split(), code=2).stderr.startswith("error: ")


@pytest.mark.parametrize("words", ["warm", "bench prompts"])
def test_layers_are_not_made_over_the_indexers_layouts(words):
    refused = invoke(*words.split(), "--device", "cpu", "--layout", "index_fp8", code=2).stderr
    assert "must be one of" in refused and "fp8_ds_mla" in refused and "(got 'index_fp8')" in refused


@pytest.mark.usefixtures("a_bare_machine")
def test_warm_does_not_take_a_cpu_for_the_device_that_serves():
    stderr = invoke("warm", code=2).stderr
    assert "--device must be given where there is no accelerator" in stderr and "compile_all" in stderr
