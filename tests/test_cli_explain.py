# SPDX-License-Identifier: Apache-2.0
"""`mla-portable explain`: what it prints, as text and as JSON, and the code it exits with."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
from commands import document, in_a_process, invoke
from machines import H200

from mla_portable.choose import Registry
from mla_portable.contracts import Features, Primitive, Promises
from mla_portable.primitives import MERGE_STATES
from mla_portable.times.measured import MeasuredCosts
from mla_portable.times.records import MeasuredTime, Measurement

pytestmark = pytest.mark.usefixtures("a_bare_machine")


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
        "attn_sink requested (not supported)",
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
    assert answer["ok"] and answer["checked"] is True and answer["primitive"] == str(primitive)
    assert ("lse=yes" in answer["request"]) == ("lse" in primitive.facts)


@pytest.mark.parametrize("flag", [each.name for each in (*fields(Features), *fields(Promises)) if each.metadata["words"]])
def test_explain_asks_for_a_feature_of_the_primitives_that_have_it(flag):
    (primitive, *_) = [each for each in Primitive.all() if flag in (*each.facts, *each.stated, "graph")]
    option = "--sink" if flag == "attn_sink" else f"--{flag.replace('_', '-')}"
    registry = Registry(environ={}, costs="measured")
    for words in ([option], []):
        code = 1 if words and flag == "q_scale" else 0  # of what is here, the reference alone has it, in no graph
        answer = document("explain", str(primitive), *words, "--device", "h200", registry=registry, code=code)
        assert answer["arguments"][flag] is bool(words or flag in ("lse", "selection", "ordered"))


def test_explain_route_of_queries_without_a_rotary_part():
    answer = document("explain", "route", "--nope", "--device", "h200", registry=Registry(environ={}, costs="measured"))
    assert answer["arguments"]["nope"] is True and answer["chosen"] in ("direct", "fused")


def test_explain_route():
    answer = document("explain", "route", "--device", "cuda", "--heads", "64", registry=simulated())
    assert answer["ok"] and {route["route"] for route in answer["routes"]} == {"fused", "split", "direct", "upconvert"}
    assert "route: " in invoke("explain", "route", "--device", "cuda", registry=simulated()).stdout


@pytest.mark.parametrize(
    ("device", "own", "why"),
    [
        ("h200", "DeepGEMM", ""),
        ("a100", "", ""),
        ("mi300x", "no DeepGEMM on ROCm", ""),
        ("bi-v150", "", "; vLLM's own before 0.24"),
    ],
)
def test_explain_route_is_ten_lines_with_prompts_and_the_indexer(device, own, why, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    registry = Registry(environ={}, costs="measured")
    words = ["explain", "route", "--device", device, "--layout", "bf16" if device == "bi-v150" else "fp8_ds_mla"]
    lines = invoke(*words, registry=registry).stdout.splitlines()
    answer = document(*words, registry=registry)
    indexer = answer["indexer"]
    assert len(lines) <= 10 and max(map(len, lines)) <= 80
    (row,) = [line.split() for line in lines if line.startswith("  indexer ")]
    served = f"the engine's own {own}; on request".split() if own else []
    assert row[1 : 2 + len(served)] == [*served, indexer["chosen"]] and indexer["checked"] is False
    assert " ".join(row).endswith(why) and ("0.24" in row) == bool(why)
    prompts = [line.split()[1] for line in lines if line.startswith("  prompts ")]
    nvidia = device in ("h200", "a100")
    assert prompts == ([answer["prompts"]["chosen"]] if nvidia else []), "no times of other vendors are known"
    assert not nvidia or answer["prompts"]["primitive"] == "masked_prefill"


def test_explain_route_names_an_indexer_where_no_graph_can_be_captured():
    """As on a CPU: a layer in vLLM then runs outside of graphs."""
    answer = document("explain", "route", "--device", "cpu")
    assert answer["indexer"]["chosen"] == "reference.torch"


def test_explain_route_names_every_part_once_with_its_reason():
    registry = Registry(environ={}, costs="measured")
    words = "explain route --device h200 --heads 32 --layout bf16"
    answer = document(*words.split(), registry=registry)
    parts = answer["routes"][0]["parts"]
    roles = [part["role"] for part in parts]
    assert {"convert", "decode", "prefill"} < {*roles}
    assert any(role.startswith("decode <= ") for role in roles), "a small batch has another winner on this device"
    lines = invoke(*words.split(), registry=registry).stdout.splitlines()
    table = lines[[line.split()[:1] == ["part"] for line in lines].index(True) + 1 :]
    for part in parts:
        (row,) = [line for line in table if re.split(r" {2,}", line.strip())[:2] == [part["role"], part["chosen"]]]
        assert row.partition(part["chosen"])[2].strip()
    small = next(line for line in table if line.startswith("  decode <= "))
    assert re.search(r"[\d.]+ us \(\d+ rows\); verified in ", small)
    assert not any("sparse_decode:" in line for line in lines) and any("--all shows" in line for line in lines)
    whole = invoke(*words.split(), "--all", registry=registry).stdout
    titles = ["convert (convert_indices): ", "decode (sparse_decode): ", "prefill (sparse_prefill): "]
    for title in (*titles, "prompts (masked_prefill): ", "indexer (indexer_select): "):
        assert whole.count(title) == 1
    assert re.search(r"decode <= \d+ rows \(sparse_decode\): ", whole) and whole.count("nvidia.flashmla_sm100") >= 3
    for route in ("direct", "split", "fused", "upconvert"):
        assert re.search(rf"^  {route} ", whole, re.MULTILINE)
    assert "cost measured: 10 is the fastest" in whole


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
    assert candidates[answer["chosen"]]["can_run"] is None and candidates[answer["chosen"]]["matrix"] == "not run"
    assert all(each["can_run"] is (False if each["reasons"] else None) for each in candidates.values())
    text = invoke(*words.split(), registry=installed()).stdout
    assert "BI-V150 (profile bi-v150) is not here: nothing was checked or probed" in text
    assert f"{answer['chosen']} (would be tried first)" in text and "matrix: not run" in text
    assert "chosen" not in text and "can run" not in text
    nvidia = [name for name in candidates if name.startswith("nvidia.")]
    (others,) = [line for line in text.splitlines() if "for other vendors' devices" in line]
    assert "nvidia.native" not in text and nvidia and f"{len(nvidia)} of nvidia" in others
    assert {"amd", "ascend"} <= {each.split()[-1] for each in others.partition(":")[0].split(",")}


def test_explain_route_for_a_profile_claims_no_more_than_the_declarations():
    words = "explain route --device bi-v150 --layout bf16"
    answer = document(*words.split(), registry=installed())
    assert answer["ok"] and answer["checked"] is False
    assert {route["can_run"] for route in answer["routes"]} == {None, False}
    parts = [part for route in answer["routes"] for part in route["parts"]]
    assert parts and not any(each["can_run"] for part in parts for each in part["candidates"])
    text = invoke(*words.split(), registry=installed()).stdout
    assert "is not here" in text and "would be tried first" in text and "chosen" not in text and "can run" not in text


def test_explain_for_the_profile_of_a_device_that_is_here_says_how_to_examine_it(monkeypatch):
    monkeypatch.setattr("mla_portable.cli.elsewhere.gpu_names", lambda: ["NVIDIA H200"])
    text = invoke("explain", "merge_states", "--device", "h200", registry=installed()).stdout
    assert "is not here" not in text and "--device with torch's name of it examines the one that is here" in text
    assert "is not here" in invoke("explain", "merge_states", "--device", "h100", registry=installed()).stdout


def test_explain_gives_what_was_asked_as_an_object():
    words = "explain sparse_decode --device cuda --heads 64 --rows 7 --graph"
    asked = document(*words.split(), registry=simulated())["arguments"]
    assert (asked["num_heads"], asked["rows"], asked["graph"], asked["kv_layout"]) == (64, 7, True, "fp8_ds_mla")
    asked = document("explain", "route", "--device", "cuda", "--rows", "7", registry=simulated())["arguments"]
    assert (asked["max_num_reqs"], asked["need_lse"]) == (7, False)


@pytest.mark.parametrize(("columns", "widest"), [("", 200), ("80", 80)])
def test_text_in_a_pipe_is_as_wide_as_columns_says(monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", columns)
    lines = invoke("explain", "sparse_decode", "--device", "h200", registry=installed()).stdout.splitlines()
    assert 80 - 10 < max(map(len, lines)) <= widest
    assert widest == 80 or any(len(line) > 80 for line in lines)


def test_what_a_person_reads_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words, most in (("doctor", 40), ("explain sparse_decode", 15), ("matrix", 60)):
        lines = invoke(*words.split(), registry=installed()).stdout.splitlines()
        assert len(lines) < most and max(map(len, lines)) <= 80, words


def test_tp_is_heads_of_a_rank():
    for words, heads in (("--tp 8", 16), ("--tp 1", 128), ("", 16)):
        answer = document("explain", "sparse_decode", *words.split(), registry=installed())
        assert answer["arguments"]["num_heads"] == heads
    assert document("explain", "route", "--tp", "4", registry=installed())["arguments"]["num_heads"] == 32


def test_costs_of_a_profile_are_those_measured_under_any_name_of_its_drivers():
    """As where records of an H100 ship, whose driver says another name than the profile."""
    registry = Registry(environ={}, probe=False)
    (plain,) = (each for each in registry.implementations(MERGE_STATES) if each.name == "triton.portable")
    measurement = Measurement("NVIDIA H100 SXM 80GB", ("NVIDIA H100 80GB HBM3",), "2026-11-01", "0.1.0")
    costs = MeasuredCosts([MeasuredTime(plain.name, "merge_states", None, None, None, 64, 7.0, measurement)])
    registry = Registry(environ={}, probe=False, costs=costs)
    answer = document("explain", "merge_states", "--device", "h100", registry=registry)
    assert answer["chosen"] == plain.name
    assert "measured 2026-11-01 on NVIDIA H100 SXM 80GB with 0.1.0" in answer["candidates"][0]["cost_source"]
    text = invoke("explain", "merge_states", "--device", "h100", registry=registry).stdout
    assert "10 measured" in text and "64: 7" in text and "cost measured: 10 is the fastest" in text


def test_explain_route_asks_what_a_layer_in_vllm_asks():
    answer = document("explain", "route", "--device", "cuda", registry=simulated())
    decode = next(part for part in answer["routes"][0]["parts"] if part["role"] == "decode")["request"]
    assert "rows=256" in decode and "lse" not in decode
    assert "no lse;" in invoke("explain", "route", "--device", "cuda", registry=simulated()).stdout
    answer = document(
        *["explain", "route", "--device", "cuda", "--rows", "3", "--query-len", "2", "--lse"], registry=simulated()
    )
    decode = next(part for part in answer["routes"][0]["parts"] if part["role"] == "decode")["request"]
    assert "rows=6" in decode and "lse=yes" in decode
