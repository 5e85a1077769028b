# SPDX-License-Identifier: Apache-2.0
"""`mla-portable doctor`: what it finds, and the code it exits with."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
import torch_reference as reference
from commands import document, invoke, missing_library
from fake_plugins import ANYWHERE, implementation, make_plugin
from machines import Costs
from rich.console import Console
from spoiled import WRONG, HalfSpoiled, Spoiled, registry_with
from vendors import Vendor

from mla_portable.choose import Registry
from mla_portable.cli.doctor import diagnosis
from mla_portable.cli.doctor.command import _for_a_person
from mla_portable.contracts import Implementation, Primitive, Support
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_SELECT, MASKED_PREFILL, MERGE_STATES, SPARSE_DECODE
from mla_portable.times.adding import add_to_file
from mla_portable.times.prompts import PromptRecord, PromptTimes
from mla_portable.times.records import MeasuredTime, Measurement
from mla_portable.times.selection import form_of

pytestmark = pytest.mark.usefixtures("a_bare_machine")


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
    "a variable of an earlier version": ([], {"MLA_PORTABLE_POLICY": "/etc/policy.toml"}, "Set MLA_PORTABLE_BACKEND to"),
}


@pytest.mark.parametrize(("plugins", "environ", "words"), BROKEN.values(), ids=BROKEN)
def test_doctor_fails_when_what_is_selected_is_broken(plugins, environ, words):
    registry = registry_with(*plugins, environ=environ)
    answer = document("doctor", registry=registry, code=1)
    fatal = [problem for problem in answer["problems"] if problem["fatal"]]
    assert fatal and all(problem["remedy"] for problem in fatal)
    assert any(words in problem["what"] + problem["remedy"] for problem in fatal)
    assert "BROKEN" in invoke("doctor", registry=registry, code=1).stdout


@pytest.mark.parametrize(
    ("support", "preference", "noted"),
    [
        ({"device_types": ("cuda",)}, 20.0, True),
        ({"device_types": None}, 20.0, True),
        ({"device_types": ("cuda", "cpu"), "vendors": ("zenith", "cpu")}, 20.0, False),
        ({"device_types": ("cuda",), "archs": ("sm80",)}, 20.0, False),
        ({"device_types": ("musa",)}, 20.0, False),
        ({"device_types": ("cuda",)}, 50.0, False),
    ],
)
def test_doctor_notes_a_vendors_kernel_that_claims_every_vendors_devices(support, preference, noted):
    kernel = implementation("zenith.v1", MERGE_STATES, Support(source="a test", **support), preference=preference)
    registry = registry_with(("zenith", make_plugin(kernel)))
    found = [problem for problem in document("doctor", registry=registry)["problems"] if "names no vendor" in problem["what"]]
    assert bool(found) == noted
    if noted:
        assert found[0]["what"].startswith("zenith.v1 (merge_states)") and not found[0]["fatal"] and not found[0]["broken"]
        assert 'vendors=("..."' in found[0]["remedy"]


def test_no_kernel_of_this_project_claims_every_vendors_devices():
    registry = Registry(environ={}, probe=False)
    assert {"triton", "nvidia", "iluvatar"} <= {report.name for report in registry.plugin_reports}
    assert list(diagnosis._claims_of_everything(registry)) == []


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


@pytest.mark.parametrize(("version", "device", "told"), [("3.9.0", "cuda", 0), ("3.10.0", "cuda", 1), ("3.10.0", "cpu", 0)])
def test_doctor_says_where_launches_of_triton_are_slow(version, device, told, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    problems = list(diagnosis._slow_launches(torch.device(device)))
    assert [(problem.fatal, "3.10.0" in problem.what) for problem in problems] == [(False, True)] * told


def test_doctor_shows_the_policy_and_where_it_comes_from():
    environ = {"MLA_PORTABLE_BACKEND_MERGE_STATES": "reference", "MLA_PORTABLE_BACKEND": "auto"}
    registry = registry_with(environ=environ)
    answer = document("doctor", registry=registry)
    assert ["all", "auto", "MLA_PORTABLE_BACKEND"] in answer["rules"]
    assert ["merge_states", "reference", "MLA_PORTABLE_BACKEND_MERGE_STATES"] in answer["rules"]
    assert "MLA_PORTABLE_BACKEND" in invoke("doctor", registry=registry).stdout


@pytest.mark.parametrize("variable", ["MLA_PORTABLE_TIMES", "XDG_CONFIG_HOME"])
def test_doctor_names_a_file_of_times_that_is_damaged(tmp_path, variable):
    folder = tmp_path / "mla-portable" / "times"
    folder.mkdir(parents=True)
    (folder / "mine.json").write_text('{"device": "x", "tim')
    registry = registry_with(environ={variable: str(folder if variable == "MLA_PORTABLE_TIMES" else tmp_path)})
    answer = document("doctor", registry=registry)
    (problem,) = answer["problems"]
    assert answer["ok"] and not problem["fatal"] and not problem["broken"] and answer["times"] == []
    assert f"{folder / 'mine.json'}: no JSON document" in problem["what"] and "mla-portable bench" in problem["remedy"]
    assert "none on record for this device" in " ".join(invoke("doctor", registry=registry).stdout.split())


def test_doctor_says_which_files_of_times_were_read_for_the_device(tmp_path):
    facts = registry_with().facts("cpu")
    here, elsewhere = (Measurement(name, (name,), "2026-11-29") for name in (facts.name, "another"))
    what = ("reference.torch", "merge_states", None, None, None)
    times = [MeasuredTime(*what, rows, 2.0, here) for rows in (1, 8)]
    times += [MeasuredTime(*what, rows, 1.0, here, configuration=(("block", 2),)) for rows in (1, 8)]
    select = ("reference.torch", "indexer_select", "index_fp8", 64, 2048)
    times.append(MeasuredTime(*select, 8, 1.0, here, form_of(4096)))  # which rank nothing
    constants = PromptRecord("reference.torch", 192, 128, 16, PromptTimes(*[1.0] * 11), elsewhere, (facts.vendor,))
    add_to_file(tmp_path / "here.json", times)
    add_to_file(tmp_path / "stands-for-it.json", prompts=[constants])
    add_to_file(tmp_path / "elsewhere.json", [MeasuredTime(*what, 1, 2.0, elsewhere)])
    registry = registry_with(environ={"MLA_PORTABLE_TIMES": str(tmp_path)}, costs="measured")
    first, second = document("doctor", registry=registry)["times"]
    assert first == {
        "file": str(tmp_path / "here.json"), "owner": "", "device": facts.name, "recorded": "2026-11-29",
        "times": 2, "configured": 1, "prompts": 0,
    }  # fmt: skip
    assert (second["file"], second["device"], second["prompts"]) == (str(tmp_path / "stands-for-it.json"), "another", 1)
    said = " ".join(invoke("doctor", registry=registry).stdout.split())
    assert f"{tmp_path / 'here.json'}, your own: 2 times, 1 configured kernels, measured 2026-11-29 on {facts.name}" in said
    assert "your own: 1 constants of prompts, measured 2026-11-29 on another" in said and "elsewhere.json" not in said


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLA_PORTABLE_VLLM", "foo"),
        ("MLA_PORTABLE_VLLM_CACHE_WRITER", "nobody"),
        ("MLA_PORTABLE_SGLANG", "override"),
        ("MLA_PORTABLE_SGLANG_INDEXER", "maybe"),
    ],
)
def test_doctor_fails_at_a_variable_of_an_engine_s_plugin_that_means_nothing(monkeypatch, name, value):
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
    assert (
        answer["vllm"] is None
        and answer["sglang"] is None
        and any("referense" in problem["what"] for problem in answer["problems"])
    )
    text = invoke("doctor", registry=registry, code=1).stdout
    assert "BROKEN  the policy cannot be followed" in text and "vLLM: not examined" in text and "SGLang: not examined" in text


def test_doctor_shows_the_cost_that_decides():
    costs = Costs(lambda each, _: (3.0, "measured yesterday on this CPU;") if each.name == "reference.torch" else None)
    registry = Registry(plugins=[("reference", "mla_portable.reference")], environ={}, probe=False, costs=costs)
    row = document("doctor", registry=registry)["examined"][0]
    assert (row["cost"], row["cost_source"]) == (3.0, "measured yesterday on this CPU;") and "preference" not in row
    assert "3 measured" in invoke("doctor", registry=registry).stdout
    assert "1000 declared" in invoke("doctor").stdout


def test_the_next_best_is_the_next_of_the_decision():
    """Not the next in costs: what was measured goes before what was only declared."""
    vendors = [Vendor(name, cost).plugin() for name, cost in (("a", 8), ("b", 10), ("c", 50))]
    registry = registry_with(*vendors, costs=Costs(lambda each, _: (10.0, "measured once") if each.backend == "c" else None))
    (merge,) = [c for c in document("doctor", registry=registry)["choices"] if c["primitive"] == "merge_states"]
    assert (merge["chosen"], merge["ranking"]) == ("c.v1", ["c.v1", "a.v1", "b.v1", "reference.torch"])
    lines = [line.split() for line in invoke("doctor", registry=registry).stdout.splitlines()]
    (row,) = [words for words in lines if words[:1] == ["merge_states"]]
    assert row == ["merge_states", "c.v1", "cost", "10", "measured", "a.v1", "(8", "declared)"]


def without_an_lse(*args, attn_sink=None, **options):
    """Right without a sink; with one its lse is NaN."""
    out, lse = reference.sparse_decode(*args, attn_sink=attn_sink, **options)
    return out, lse if attn_sink is None else lse.fill_(float("nan"))


def test_doctor_says_for_which_requests_a_plugin_works():
    class Sinks(Spoiled):
        """As Spoiled, and takes sinks."""

        def offer(self, registrar, name, primitive, bind):
            support = Support(source="a test", device_types=("cpu",), graph=False, attn_sink=True, lengths=True)
            registrar.add(Implementation(name, primitive, support, bind, preference=10))

    plugin = Sinks({"sparse_decode": without_an_lse}, only=[SPARSE_DECODE])
    registry = registry_with(("spoiled", plugin))
    answer = document("doctor", registry=registry)
    (row,) = [each for each in answer["examined"] if each["implementation"] == "spoiled.torch"]
    assert {"holes", "promises"} <= {name.partition(" on ")[0] for name in row["probe"]["solved"]}
    assert {name.partition(" on ")[0] for name in row["probe"]["failed"]} == {"lengths and sink", "infinite sinks"}
    (problem,) = answer["problems"]
    assert "works for some requests only: it solves holes" in problem["what"] and "case lengths and sink" in problem["what"]
    assert "does not work" not in problem["what"] and "conform spoiled.torch --primitive sparse_decode" in problem["remedy"]
    lines = [line.split() for line in invoke("doctor", registry=registry).stdout.splitlines()]
    (served,) = [words for words in lines if words[:1] == ["sparse_decode"]]
    assert " ".join(served).startswith("sparse_decode spoiled.torch cost 10 declared, for some requests")


def test_doctor_advises_to_lift_the_force_from_a_backend_for_other_devices():
    environ = {"MLA_PORTABLE_BACKEND_SPARSE_DECODE": "acme"}
    answer = document("doctor", registry=registry_with(("acme", "fake_plugins.acme"), environ=environ), code=1)
    (problem,) = [each for each in answer["problems"] if each["fatal"]]
    assert problem["remedy"] == "unset MLA_PORTABLE_BACKEND_SPARSE_DECODE to let the registry choose"


@pytest.mark.parametrize(
    ("primitive", "needs"),
    [
        (INDEXER_SELECT, "needs_whole_tables"),
        (INDEXER_LOGITS, "needs_uniform_query_len"),
        (MASKED_PREFILL, "needs_finite_values"),
    ],
)
def test_doctor_lets_serve_what_needs_the_promises_that_engines_give(primitive, needs):
    layouts = ("index_bf16", "index_fp8") if primitive.cache else ()
    support = Support(source="this test", device_types=("cpu",), kv_layouts=layouts, **{needs: True})
    own = implementation("acme.v1", primitive, support, bind=lambda request: primitive.reference)
    environ = {f"MLA_PORTABLE_BACKEND_{primitive.upper()}": "acme"}
    answer = document("doctor", registry=registry_with(("acme", make_plugin(own)), environ=environ))
    assert answer["ok"] and {each["primitive"]: each["chosen"] for each in answer["choices"]}[primitive] == "acme.v1"


def test_doctor_says_once_that_nothing_else_works():
    text = invoke("doctor").stdout
    assert text.count("no other implementation works here") == 1 and "next best" not in text
    assert f"reference.torch serves all {len(Primitive.all())} primitives (cost 1000 declared)" in text
    assert text.count("reference.torch") < 4


def test_doctor_says_that_there_is_no_accelerator_and_why(monkeypatch):
    assert "no accelerator: this torch" in invoke("doctor").stdout
    monkeypatch.setattr(diagnosis, "device_names", lambda device_type: ("cuda:0",))
    monkeypatch.setattr(Registry, "device_types", lambda self: ("cpu", "cuda"))
    real = Registry.facts
    monkeypatch.setattr(Registry, "facts", lambda self, device: real(self, "cpu"))
    assert "no accelerator" not in invoke("doctor", "--device", "cpu").stdout


def test_doctor_says_of_a_plugin_that_declares_nothing_for_the_device_why_and_what_to_declare():
    zeta = ("zeta", make_plugin(implementation("zeta.v1", support=Support("a test", ("cpu", "zeta"), ("zeta",)))))
    text = " ".join(invoke("doctor", registry=registry_with(zeta)).stdout.split())
    assert "1 implementations, none for this device: vendor cpu (supports zeta)" in text
    assert 'add "cpu" to `vendors` and `device_types` to try it on a CPU' in text


def test_doctor_says_of_it_on_an_accelerator_what_declares_the_device():
    """Its type need not be among those that plugins name, so that it is not listed."""
    zeta = ("zeta", make_plugin(implementation("zeta.v1", support=Support("a test", ("zeta",)))))
    found = replace(diagnosis.diagnose(registry_with(zeta), torch.device("cpu")), device="xpu:0")
    console = Console(width=200, record=True, file=io.StringIO())
    for part in _for_a_person(found, every=False, verbose=False):
        console.print(part)
    text = " ".join(console.export_text().split())
    assert "none for this device: device type cpu (supports zeta)" in text and "declare its vendor and type" in text


@pytest.mark.parametrize("support", [ANYWHERE, Support("a test", ("cpu",), ("cpu", "zeta"))])
def test_doctor_says_nothing_of_it_where_an_implementation_claims_the_device(support):
    elsewhere = implementation("zeta.v2", support=Support("a test", ("zeta",), ("zeta",)))
    zeta = ("zeta", make_plugin(implementation("zeta.v1", support=support, check=missing_library), elsewhere))
    assert "none for this device" not in invoke("doctor", registry=registry_with(zeta)).stdout


def test_a_device_type_that_torch_does_not_know_has_to_be_registered_by_its_vendors_package():
    done = invoke("doctor", "--device", "zeta", code=2)
    assert "torch knows no device type 'zeta' here" in " ".join(done.output.split())
    assert "import it" in " ".join(done.output.split())
