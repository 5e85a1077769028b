# SPDX-License-Identifier: Apache-2.0
"""The command line: what each command prints, as text and as JSON, and the code it exits with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from machines import H200
from spoiled import WRONG, HalfSpoiled, Spoiled, registry_with
from typer.testing import CliRunner

from mla_portable.api import serving
from mla_portable.contracts import Primitive, Reason
from mla_portable.primitives import INDEXER_LOGITS, MERGE_STATES
from mla_portable.registry import Registry
from mla_portable.tools.bench.inputs import default_shape
from mla_portable.tools.cli.app import app

RUNNER = CliRunner()
SIZES = "--heads 2 --topk 48 --decodes 3 --prefills 2 --prefill-tokens 6 --context 90 --block-size 16 --repeat 1 --check-rows 0"
SMALL = SIZES.split()
OF_A_STEP = [str(primitive) for primitive in Primitive.all() if primitive is not INDEXER_LOGITS]
"""What `run` runs: the indexer works before the step, whose positions are drawn at random."""


@pytest.fixture(autouse=True)
def a_bare_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU and no policy of whoever runs the tests, so that defaults are the same everywhere."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name in [name for name in os.environ if name.startswith("MLA_PORTABLE_")]:
        monkeypatch.delenv(name)
    yield


def invoke(*arguments: str, registry: Registry | None = None, code: int = 0):
    with serving(registry or registry_with()):
        done = RUNNER.invoke(app, list(arguments))
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def document(*arguments: str, registry: Registry | None = None, code: int = 0) -> dict:
    return json.loads(invoke(*arguments, "--json", registry=registry, code=code).stdout)


def in_a_process(*arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mla_portable", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


# ---------------------------------------------------------------------- help and usage


@pytest.mark.parametrize("words", [[], ["run"], ["doctor"], ["explain"], ["conform"], ["bench"], ["bench", "step"]])
def test_help_needs_no_torch(words):
    code = "import sys; from mla_portable.tools.cli import main\ntry: main()\nfinally: sys.exit(int('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_help_of_explain_names_every_primitive():
    text = invoke("explain", "--help").stdout.replace("│", " ")
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
        "bench plan --route sideways",
        "bench plan --schedule sideways",
        "bench dispatch --calls 0",
    ],
)
def test_what_cannot_be_meant_is_code_2(words):
    done = invoke(*words.split(), code=2)
    assert done.stdout == ""
    assert done.stderr


def test_an_error_is_a_document_too():
    answer = document("run", "--topk", "0", code=2)
    assert answer["ok"] is False and answer["error"]["type"] == "InvalidArgument" and "topk" in answer["error"]["message"]


# ---------------------------------------------------------------------- run


def test_run_prints_who_served_each_primitive_and_how_well():
    text = invoke("run", *SMALL).stdout
    for primitive in OF_A_STEP:
        assert primitive in text
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
    text = invoke("run", *SMALL, registry=Registry(plugins=plugins, environ={})).stdout
    assert "there is no other candidate for this device" in text and "acme" not in text


def test_run_fails_when_a_result_is_wrong():
    registry = registry_with(("spoiled", Spoiled({"sparse_prefill": WRONG["sparse_prefill"]})), probe=False)
    answer = document("run", *SMALL, registry=registry, code=1)
    assert answer["ok"] is False
    assert {row["primitive"] for row in answer["primitives"] if not row["ok"]} == {"sparse_prefill"}
    text = invoke("run", *SMALL, registry=registry, code=1).stdout
    assert "WRONG" in text and "sparse_prefill (cache): out[" in text and "All errors" not in text


def test_the_probe_keeps_a_wrong_backend_from_being_used():
    registry = registry_with(("spoiled", Spoiled(WRONG)))
    answer = document("run", *SMALL, registry=registry)
    assert {row["implementation"] for row in answer["primitives"]} == {"reference.torch"}
    text = invoke("run", *SMALL, registry=registry).stdout
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
from mla_portable.contracts import Implementation, Support, hookimpl
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


@pytest.mark.parametrize(
    "words", ["doctor", "explain merge_states", "matrix --check", "conform loud --level smoke --primitive merge_states"]
)
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


@pytest.mark.parametrize("words", ["matrix --json", "matrix --format md", "matrix", "--help"])
def test_a_reader_that_leaves_early_causes_no_traceback(words):
    command = [sys.executable, "-m", "mla_portable", *words.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize("words", ["matrix", "matrix --check", "matrix --records /nowhere"])
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


def test_run_in_a_process_of_its_own():
    done = in_a_process("run", "--device", "cpu", *SMALL, "--backend", "reference", "--json")
    assert json.loads(done.stdout)["ok"]


# ---------------------------------------------------------------------- explain


def simulated(**options) -> Registry:
    plugins = [(name, f"fake_plugins.{name}") for name in ("plain", "handy", "acme")]
    return Registry(plugins=plugins, facts={"cuda": H200}, environ={}, **options)


def test_explain_gives_every_reason_against_every_candidate():
    words = "explain sparse_decode --device cuda --heads 16 --topk 100 --sink"
    answer = document(*words.split(), registry=simulated())
    assert answer["ok"] and answer["chosen"] == "handy.native"
    acme = next(c for c in answer["candidates"] if c["implementation"] == "acme.fused")
    assert {reason["subject"] for reason in acme["reasons"]} == {"num_heads", "topk", "attn_sink"}
    text = invoke(*words.split(), registry=simulated()).stdout
    for words in (
        "num_heads 16 (supports 64, 128)",
        "topk 100 (a multiple of 64)",
        "attn_sink yes (supports no)",
        "plain.torch",
    ):
        assert words in text


def test_explain_says_when_nothing_can_serve():
    words = ["explain", "sparse_decode", "--device", "cuda", "--heads", "16", "--backend", "acme"]
    answer = document(*words, registry=simulated(), code=1)
    assert answer["ok"] is False and answer["chosen"] is None and answer["forced"] == "acme"
    text = invoke(*words, registry=simulated(), code=1).stdout
    assert "never falls back" in text and "num_heads 16 (supports 64, 128)" in text and "remedy" in text


def test_explain_asks_what_the_options_say():
    words = "explain sparse_decode --device cuda --heads 64 --query-len 2 --rows 7 --no-lse --graph --scale-format unknown"
    answer = document(*words.split(), registry=simulated())
    for words in ("num_heads=64", "query_len=2", "rows=7", "graph=yes", "topk=2048", "block_size=64"):
        assert words in answer["request"]
    assert "lse" not in answer["request"] and "scale_format" not in answer["request"]


@pytest.mark.parametrize("primitive", Primitive.all())
def test_explain_every_primitive(primitive):
    answer = document("explain", str(primitive))
    assert answer["ok"] and answer["primitive"] == str(primitive)
    assert ("lse=yes" in answer["request"]) == str(primitive).startswith("sparse_")


def test_explain_route():
    answer = document("explain", "route", "--device", "cuda", "--heads", "64", registry=simulated())
    assert answer["ok"] and {route["route"] for route in answer["routes"]} == {"fused", "split", "direct", "upconvert"}
    assert "route: " in invoke("explain", "route", "--device", "cuda", registry=simulated()).stdout


def test_explain_names_a_device_that_is_not_here():
    assert "cuda" in invoke("explain", "sparse_decode", "--device", "cuda:7", code=2).stderr


def test_the_environment_decides_in_a_process_of_its_own():
    done = in_a_process("explain", "merge_states", "--device", "cpu", "--json", MLA_PORTABLE_BACKEND_MERGE_STATES="reference")
    answer = json.loads(done.stdout)
    assert answer["chosen"] == "reference.torch" and answer["control"] == "MLA_PORTABLE_BACKEND_MERGE_STATES"


# ---------------------------------------------------------------------- explain, for a device that is not here


def installed() -> Registry:
    """Everything in this tree, without measured costs: what a process would have built."""
    return Registry(environ={})


def test_explain_for_a_profile_claims_no_more_than_the_declarations():
    words = "explain sparse_decode --device bi-v150 --layout bf16 --no-lse"
    answer = document(*words.split(), registry=installed())
    assert answer["ok"] and answer["checked"] is False and answer["chosen"].startswith("iluvatar.")
    candidates = {each["implementation"]: each for each in answer["candidates"]}
    assert candidates[answer["chosen"]]["can_run"] is None and candidates[answer["chosen"]]["matrix"] == "declared"
    assert all(each["can_run"] is (False if each["reasons"] else None) for each in candidates.values())
    text = invoke(*words.split(), registry=installed()).stdout
    assert "BI-V150 (profile bi-v150) is not here: declarations only, nothing was checked or probed" in text
    assert f"{answer['chosen']} would be tried first" in text and "matrix: declared" in text
    assert "chosen" not in text and "can run" not in text
    assert "nvidia.native" not in text and "for other devices; --json lists them" in text and "nvidia.native" in candidates


def test_explain_route_for_a_profile_claims_no_more_than_the_declarations():
    words = "explain route --device bi-v150 --layout bf16"
    answer = document(*words.split(), registry=installed())
    assert answer["ok"] and answer["checked"] is False
    assert {route["can_run"] for route in answer["routes"]} == {None, False}
    parts = [part for route in answer["routes"] for part in route["parts"]]
    assert parts and not any(each["can_run"] for part in parts for each in part["candidates"])
    text = invoke(*words.split(), registry=installed()).stdout
    assert "is not here" in text and "would be tried first" in text and "chosen" not in text and "can run" not in text


def test_explain_on_this_machine_says_that_it_checked():
    assert document("explain", "merge_states", "--device", "cpu")["checked"] is True


def test_explain_for_the_profile_of_a_device_that_is_here_says_how_to_examine_it(monkeypatch):
    monkeypatch.setattr("mla_portable.tools.cli.elsewhere.gpu_names", lambda: ["NVIDIA H200"])
    text = invoke("explain", "merge_states", "--device", "h200", registry=installed()).stdout
    assert "is not here" not in text and "--device with torch's name of it examines the one that is here" in text
    assert "is not here" in invoke("explain", "merge_states", "--device", "h100", registry=installed()).stdout


def test_explain_gives_what_was_asked_as_an_object():
    words = "explain sparse_decode --device cuda --heads 64 --rows 7 --graph"
    asked = document(*words.split(), registry=simulated())["arguments"]
    assert (asked["num_heads"], asked["rows"], asked["graph"], asked["kv_layout"]) == (64, 7, True, "fp8_ds_mla")
    asked = document("explain", "route", "--device", "cuda", "--rows", "7", registry=simulated())["arguments"]
    assert (asked["max_num_reqs"], asked["need_lse"]) == (7, False)


@pytest.mark.parametrize(("columns", "widest"), [("", 200), ("90", 90)])
def test_tables_in_a_pipe_are_as_wide_as_columns_says(monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", columns)
    lines = [line for line in invoke("matrix").stdout.splitlines() if line.startswith(("┃", "│"))]
    assert lines and max(map(len, lines)) <= widest
    assert widest == 90 or any(len(line) > 90 for line in lines)


def test_explain_route_asks_what_a_layer_in_vllm_asks():
    answer = document("explain", "route", "--device", "cuda", registry=simulated())
    decode = next(part for part in answer["routes"][0]["parts"] if part["role"] == "decode")["request"]
    assert "rows=256" in decode and "lse" not in decode
    assert "no lse (--lse)" in invoke("explain", "route", "--device", "cuda", registry=simulated()).stdout
    answer = document(
        *["explain", "route", "--device", "cuda", "--rows", "3", "--query-len", "2", "--lse"], registry=simulated()
    )
    decode = next(part for part in answer["routes"][0]["parts"] if part["role"] == "decode")["request"]
    assert "rows=6" in decode and "lse=yes" in decode


# ---------------------------------------------------------------------- doctor


def missing_library(device):
    return [Reason("library", "missing", "spoiled_kernels", "pip install spoiled-kernels")]


def test_doctor_is_content_with_a_sound_machine():
    answer = document("doctor")
    assert answer["ok"] and answer["problems"] == [] and answer["devices"][0][0] == "cpu"
    assert {row["primitive"] for row in answer["choices"]} == {str(primitive) for primitive in Primitive.all()}
    assert all(not row["reasons"] and row["probe"]["ok"] for row in answer["examined"])
    text = invoke("doctor").stdout
    assert "No problems found" in text and "torch" in text and "no backend is forced" in text


def test_doctor_tells_of_a_broken_plugin_that_nobody_selected():
    registry = registry_with(("raises_on_import", "fake_plugins.raises_on_import"))
    answer = document("doctor", registry=registry)
    assert answer["ok"]
    assert any("raises_on_import" in problem["what"] and problem["remedy"] for problem in answer["problems"])
    text = invoke("doctor", registry=registry).stdout
    assert "Traceback" not in text and "Nothing that is broken was selected: exit code 0." in text
    assert text.count("BROKEN") == 2 and "\nBROKEN  the plugin raises_on_import" in text and "\nnote" not in text
    assert "Traceback" in invoke("doctor", "--verbose", registry=registry).stdout


BROKEN = {
    "a plugin that does not load": (
        [("raises_on_import", "fake_plugins.raises_on_import")],
        {"MLA_PORTABLE_BACKEND": "raises_on_import"},
        "did not load",
    ),
    "a library that is missing": (
        [("spoiled", Spoiled(check=missing_library))],
        {"MLA_PORTABLE_BACKEND": "spoiled"},
        "pip install",
    ),
    "a probe that fails": (
        [("spoiled", Spoiled({"convert_indices": WRONG["convert_indices"]}))],
        {"MLA_PORTABLE_BACKEND_CONVERT_INDICES": "spoiled"},
        "wrong values",
    ),
    "a primitive that it lacks": (
        [("spoiled", Spoiled(only=[MERGE_STATES]))],
        {"MLA_PORTABLE_BACKEND_SPARSE_DECODE": "spoiled"},
        "not offered",
    ),
    "a variant beside a sound one": ([("spoiled", HalfSpoiled())], {"MLA_PORTABLE_BACKEND": "spoiled"}, "spoiled.worse"),
    "everything switched off": ([], {"MLA_PORTABLE_DISABLE": "reference"}, "MLA_PORTABLE_DISABLE"),
    "a name that nobody has": ([], {"MLA_PORTABLE_BACKEND": "referense"}, "Did you mean 'reference'"),
    "a variable that means nothing": ([], {"MLA_PORTABLE_BACKEND_SPARSE_DEKODE": "reference"}, "does not exist"),
    "a policy file that is not there": ([], {"MLA_PORTABLE_POLICY": "/nowhere/policy.toml"}, "policy.toml"),
}


@pytest.mark.parametrize(("plugins", "environ", "words"), BROKEN.values(), ids=BROKEN)
def test_doctor_fails_when_what_is_selected_is_broken(plugins, environ, words):
    registry = registry_with(*plugins, environ=environ)
    answer = document("doctor", registry=registry, code=1)
    fatal = [problem for problem in answer["problems"] if problem["fatal"]]
    assert fatal and all(problem["remedy"] for problem in fatal)
    assert any(words in problem["what"] + problem["remedy"] for problem in fatal)
    assert "BROKEN" in invoke("doctor", registry=registry, code=1).stdout


ALL_WRONG = Spoiled(WRONG, only=tuple(Primitive.named(name) for name in WRONG))


@pytest.mark.parametrize("plugins", [[("spoiled", Spoiled(check=missing_library))], [("spoiled", ALL_WRONG)]])
def test_doctor_mentions_what_is_passed_over(plugins):
    answer = document("doctor", registry=registry_with(*plugins))
    assert answer["ok"] and len(answer["problems"]) >= 1
    assert "spoiled.torch" in answer["problems"][0]["what"]
    assert {choice["chosen"] for choice in answer["choices"]} == {"reference.torch"}


def test_doctor_reports_a_device_that_fails_while_probing():
    def out_of_memory(*args, **options):
        raise MemoryError("no room")

    registry = registry_with(("spoiled", Spoiled({"cache_write": out_of_memory})))
    answer = document("doctor", registry=registry, code=1)
    assert any("MemoryError: no room" in problem["what"] for problem in answer["problems"] if problem["fatal"])


def test_doctor_shows_the_policy_and_where_it_comes_from(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text('[backend]\nmerge_states = "reference"\n')
    environ = {"MLA_PORTABLE_POLICY": str(policy), "MLA_PORTABLE_BACKEND": "auto"}
    registry = registry_with(environ=environ)
    answer = document("doctor", registry=registry)
    assert ["all", "auto", "MLA_PORTABLE_BACKEND"] in answer["rules"]
    assert any(rule[:2] == ["merge_states", "reference"] and str(policy) in rule[2] for rule in answer["rules"])
    assert "MLA_PORTABLE_BACKEND" in invoke("doctor", registry=registry).stdout


def test_doctor_leaves_alone_what_is_disabled():
    def never(device: object) -> object:
        raise AssertionError("it was checked")

    plugins = ("spoiled", Spoiled(check=never)), ("acme", "fake_plugins.raises_on_import")
    environ = {"MLA_PORTABLE_DISABLE": "spoiled.torch,acme", "MLA_PORTABLE_ACME_PATH": "/x"}
    registry = registry_with(*plugins, environ=environ)
    answer = document("doctor", registry=registry)
    of_it = [each for each in answer["examined"] if each["implementation"] == "spoiled.torch"]
    assert of_it and all(each["reasons"][0]["subject"] == "disabled" and each["probe"] is None for each in of_it)
    assert [each["disabled"] for each in answer["plugins"] if each["name"] == "acme"] == ["MLA_PORTABLE_DISABLE"]
    assert not answer["problems"] and "disabled by MLA_PORTABLE_DISABLE" in invoke("doctor", registry=registry).stdout


def test_doctor_does_not_list_a_variable_that_does_not_exist():
    registry = registry_with(environ={"MLA_PORTABLE_BACKND": "reference", "MLA_PORTABLE_VLLM": "off"})
    answer = document("doctor", registry=registry, code=1)
    assert answer["environment"] == [["MLA_PORTABLE_VLLM", "off"]]
    assert any("Did you mean 'MLA_PORTABLE_BACKEND'" in problem["what"] for problem in answer["problems"] if problem["fatal"])


@pytest.mark.parametrize(("name", "value"), [("MLA_PORTABLE_VLLM", "foo"), ("MLA_PORTABLE_VLLM_CACHE_WRITER", "nobody")])
def test_doctor_fails_at_a_variable_of_the_vllm_plugin_that_means_nothing(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.26.0")
    registry = registry_with(environ={name: value})
    answer = document("doctor", registry=registry, code=1)
    (problem,) = [problem for problem in answer["problems"] if problem["fatal"]]
    assert name in problem["what"] and value in problem["what"] and "unset" in problem["remedy"]
    text = invoke("doctor", registry=registry, code=1).stdout
    assert "BROKEN  " in text and "vLLM" in text
    assert name != "MLA_PORTABLE_VLLM" or "heads per GPU" not in text


def test_doctor_with_vllm_reports_a_policy_that_cannot_be_followed(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.26.0")
    registry = registry_with(environ={"MLA_PORTABLE_BACKEND": "referense"})
    answer = document("doctor", registry=registry, code=1)
    assert answer["vllm"] is None and any("referense" in problem["what"] for problem in answer["problems"])
    text = invoke("doctor", registry=registry, code=1).stdout
    assert "BROKEN  the policy cannot be followed" in text and "vLLM: not examined" in text


def test_doctor_shows_the_cost_that_decides():
    def costs(implementation, request):
        return (3.0, "measured yesterday on this CPU;") if implementation.name == "reference.torch" else None

    registry = Registry(plugins=[("reference", "mla_portable.reference")], environ={}, probe=False, costs=costs)
    row = document("doctor", registry=registry)["examined"][0]
    assert (row["cost"], row["cost_source"]) == (3.0, "measured yesterday on this CPU;") and "preference" not in row
    assert "3 measured" in invoke("doctor", registry=registry).stdout
    assert "1000 declared" in invoke("doctor").stdout


def test_doctor_in_a_process_of_its_own():
    done = in_a_process("doctor", "--device", "cpu", "--json", code=1, MLA_PORTABLE_DISABLE="reference,triton")
    answer = json.loads(done.stdout)
    assert ["MLA_PORTABLE_DISABLE", "reference,triton"] in answer["environment"]


# ---------------------------------------------------------------------- conform and bench


def test_conform_passes_and_records(tmp_path):
    record = tmp_path / "new" / "reference.jsonl"
    words = ["conform", "reference", "--level", "smoke", "--primitive", "merge_states", "--record", str(record)]
    answer = document(*words)
    assert answer["ok"] and answer["totals"]["passed"] == answer["totals"]["cases"] > 0
    assert {case["primitive"] for case in answer["cases"]} == {"merge_states"}
    invoke(*words)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(lines) == 2 and lines[0]["totals"]["cases"] == lines[1]["totals"]["cases"]


def test_levels_are_those_of_the_suite_and_are_checked_before_anything_is_loaded():
    from mla_portable.problems import LEVELS
    from mla_portable.tools.cli.conform import _LEVELS

    assert _LEVELS == LEVELS
    code = (
        "import sys\nfrom mla_portable.tools.cli.app import app\n"
        "try: app(['conform', 'triton', '--level', 'turbo'])\nexcept SystemExit as end: assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "smoke, quick, full" in done.stderr.replace("\n", " "), done.stderr


def test_conform_in_processes_gives_what_one_process_gives():
    words = ["conform", "reference", "--level", "smoke", "--primitive", "quantize_per_tensor", "--device", "cpu", "--json"]
    alone, spread = (json.loads(in_a_process(*words, "--jobs", jobs).stdout) for jobs in ("1", "2"))
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


def test_a_suite_that_ran_nothing_fails():
    registry = registry_with(("spoiled", Spoiled(check=missing_library)))
    answer = document("conform", "spoiled", "--level", "smoke", registry=registry, code=1)
    assert answer["totals"]["cases"] == 0 and len(answer["unavailable"]) == len(Primitive.all())
    text = invoke("conform", "spoiled", "--level", "smoke", registry=registry, code=1).stdout
    assert "No test case applied to this device." in text and "spoiled_kernels" in text
    assert document("conform", "reference", "--match", "no such case", code=1)["totals"]["cases"] == 0


def test_bench_plan():
    answer = document("bench", "plan", "--repeat", "1")
    assert answer["rows"] and all(row["median_us"] > 0 and row["n"] == 1 for row in answer["rows"])
    assert "Planner.plan" in invoke("bench", "plan", "--repeat", "1").stdout


def test_bench_plan_for_another_machine():
    words = "bench plan --repeat 1 --schedule flashmla_tiles --arch sm90 --num-sms 132 --route fused"
    everything = Registry(environ={}, probe=False)
    assert document(*words.split(), registry=everything)["config"]["schedule_kind"] == "flashmla_tiles"


def test_bench_dispatch():
    answer = document("bench", "dispatch", "--batches", "2", "--calls", "3")
    assert {"launcher", "bound"} <= {row["call"] for row in answer["rows"]}
    assert "launcher" in invoke("bench", "dispatch", "--batches", "2", "--calls", "3").stdout


def test_bench_step():
    answer = document("bench", "step", *SMALL, "--repeat", "3")
    assert answer["ok"] and {row["timing"]["n"] for row in answer["primitives"]} == {3}
    assert "p90 ms" in invoke("bench", "step", *SMALL).stdout
    registry = registry_with(("spoiled", Spoiled({"merge_states": WRONG["merge_states"]})), probe=False)
    assert "WRONG" in invoke("bench", "step", *SMALL, registry=registry, code=1).stdout


# ---------------------------------------------------------------------- the page


PAGE = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()


def options(command) -> Iterator[tuple[str, list[str], list[str]]]:
    """(option, its other spellings) of every command, subcommands included; --help is click's own."""
    for name, each in getattr(command, "commands", {}).items():
        yield from ((f"{name} {path}".strip(), opts, off) for path, opts, off in options(each))
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield "", [opt for opt in parameter.opts if opt.startswith("--")], parameter.secondary_opts


def test_the_page_names_every_option_and_invents_none():
    known = list(options(typer.main.get_command(app)))
    named = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    missing = [(path, opts) for path, opts, _ in known if not named & set(opts)]
    assert len(known) > 60 and missing == []
    assert named <= {"--help", "--no-"}.union(*(set(opts) | set(off) for _, opts, off in known))


def test_help_and_page_give_the_defaults_that_hold():
    cpu, gpu = default_shape("cpu"), default_shape("cuda")
    text = " ".join(invoke("run", "--help").stdout.replace("│", " ").split())
    for here, there in (
        (cpu.num_heads, gpu.num_heads),
        (cpu.decodes, gpu.decodes),
        (cpu.prefill_tokens, gpu.prefill_tokens),
        (cpu.context, gpu.context),
    ):
        assert f"Default: {here} on a CPU, {there} on a GPU." in text
    for row in (
        f"| `--heads` | {cpu.num_heads} | {gpu.num_heads} |",
        f"| `--topk` | {cpu.topk} | {gpu.topk} |",
        f"| `--decodes`, `--query-len` | {cpu.decodes}, {cpu.decode_query_len} | {gpu.decodes}, {gpu.decode_query_len} |",
        f"| `--prefills`, `--prefill-tokens` | {cpu.prefills}, {cpu.prefill_tokens} | {gpu.prefills}, {gpu.prefill_tokens} |",
        f"| `--context` | {cpu.context} | {gpu.context} |",
        f"| {cpu.block_size}, `{cpu.kv_layout}`, `{cpu.scale_format}` |",
    ):
        assert row in PAGE


def test_the_page_lists_every_environment_variable():
    sources = [path.read_text() for path in (Path(__file__).parents[1] / "mla_portable").rglob("*.py")]
    used = {name.rstrip("_") for text in sources for name in re.findall(r"MLA_PORTABLE_[A-Z_]+", text)}
    table = PAGE[PAGE.index("**Environment.**") : PAGE.index("What is stronger")]
    assert used >= {"MLA_PORTABLE_BACKEND", "MLA_PORTABLE_DISABLE", "MLA_PORTABLE_POLICY"}
    listed = {name.rstrip("_") for name in re.findall(r"`(MLA_PORTABLE_[A-Z_]+)", table)}
    assert used - {"MLA_PORTABLE"} <= listed
