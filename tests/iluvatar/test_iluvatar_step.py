# SPDX-License-Identifier: Apache-2.0
"""A whole FP8 step on a simulated BI-V150 with the newest generation's ops, and what `explain` says of it."""

from __future__ import annotations

import json

import pytest
import torch
from corex_machine import BI_V150, NEWEST, installed, registry
from typer.testing import CliRunner

from mla_portable.bench.step import run_step
from mla_portable.cli.app import app
from mla_portable.dispatch import serving
from mla_portable.judge.problems.step import StepShape

CPU = torch.device("cpu")
SHAPE = StepShape(num_heads=16, topk=64, decodes=3, prefills=2, prefill_tokens=6, context=150)
SIZES = {
    "heads": 16,
    "topk": 64,
    "decodes": 3,
    "prefills": 2,
    "prefill-tokens": 6,
    "context": 150,
    "check-rows": 0,
    "repeat": 1,
}
STEP = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def machine():
    with installed(NEWEST):
        yield registry()


def served(report) -> dict[str, str]:
    return {result.name: result.implementation for result in report.primitives if result.on_route}


def test_an_fp8_step_on_the_upconvert_route_agrees_with_the_oracle(machine):
    report = run_step(SHAPE, device=CPU, registry=machine, route="upconvert", repeat=1, check_rows=0)
    assert report.ok, report.failures()
    assert report.facts is BI_V150 and report.route == "upconvert"
    parts = {part.role: part.decision.chosen for part in report.route_decision.verdict.parts}
    assert parts == {
        "convert": "iluvatar.map_prefill",
        "prefill": "iluvatar.flash_mla_sparse_v2_lse",
        "gather": "reference.torch",
    }


def route_with_triton(spec):
    """The machine with Triton beside the vendor's ops, and the route of a layer on it."""
    import mla_portable_triton
    from mla_portable.attention.layer_registry import LayerRegistry
    from mla_portable.attention.routes import choose_route

    machine = registry(("triton", mla_portable_triton), probe=False)
    demand = LayerRegistry(machine, None)
    return choose_route(spec, BI_V150, demand)


@pytest.mark.parametrize("need_lse", [False, True])
def test_where_triton_runs_it_decodes_on_the_fp8_cache(need_lse):
    """A gather of every context for every token is what a device does that has no other way."""
    from mla_portable.attention import AttentionSpec

    sizes = {"num_heads": 16, "softmax_scale": 0.1, "max_num_tokens": 8, "max_num_reqs": 2, "max_model_len": 99}
    with installed(NEWEST):
        decision = route_with_triton(AttentionSpec(**sizes, need_lse=need_lse))
    parts = {part.role: part.decision.chosen for part in decision.verdict.parts}
    if need_lse:  # the portable kernel gives out and lse in one pass, and prefills on the cache itself
        assert decision.chosen == "direct" and parts["decode"] == parts["prefill"] == "triton.portable"
    else:
        assert decision.chosen == "split"
        assert parts == {
            "convert": "iluvatar.map_prefill",
            "decode": "triton.portable",
            "prefill": "iluvatar.flash_mla_sparse_v2",
            "gather": "triton.portable",
        }
    upconvert = next(verdict for verdict in decision.verdicts if verdict.route == "upconvert")
    assert upconvert.can_run and upconvert.cost > 2 * decision.verdict.cost
    assert "every step gathers every context" in str(upconvert)


def test_where_triton_cannot_run_the_vendors_op_prefills_and_torch_does_the_rest(monkeypatch):
    """As on a CPU without the interpreter: every installed plugin is there, and says why it is out."""
    import mla_portable_nvidia
    import mla_portable_triton

    monkeypatch.setattr("mla_portable_triton.support.interpreter_is_on", lambda: False)
    with installed(NEWEST):
        machine = registry(("triton", mla_portable_triton), ("nvidia", mla_portable_nvidia))
        report = command(machine, "run", "--device", "cpu", *STEP)
        answer = command(machine, "explain", "sparse_decode", "--device", "cpu", "--heads", "16", "--topk", "64", "--no-lse")
    assert report["ok"] and report["route"] == "split" and report["facts"]["name"] == "Iluvatar BI-V150"
    on_route = {row["primitive"]: row["implementation"] for row in report["primitives"] if row["on_route"]}
    assert on_route["sparse_prefill"] == "iluvatar.flash_mla_sparse_v2_lse"
    assert on_route["gather_upconvert"] == on_route["sparse_decode"] == "reference.torch"
    reasons = {c["implementation"]: {r["subject"] for r in c["reasons"]} for c in answer["candidates"]}
    assert "device type" in reasons["triton.portable"] and "kv_layout" in reasons["iluvatar.flash_mla_sparse_v2"]


def test_a_bf16_step_is_the_vendors_throughout(machine):
    shape = StepShape(num_heads=16, topk=64, decodes=3, prefills=2, prefill_tokens=6, context=150, kv_layout="bf16")
    report = run_step(shape, device=CPU, registry=machine, repeat=1, check_rows=0)
    assert report.ok, report.failures()
    assert set(served(report).values()) == {
        "iluvatar.concat_mla", "iluvatar.map_prefill", "iluvatar.flash_mla_sparse_v2_lse",
    }  # fmt: skip


def command(machine, *words: str, code: int = 0) -> dict:
    with serving(machine):
        done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_explain_says_why_nothing_reads_the_fp8_cache_natively(machine):
    answer = command(machine, "explain", "sparse_decode", "--device", "cpu", "--heads", "16", "--topk", "64", "--no-lse")
    ours = [c for c in answer["candidates"] if c["implementation"].startswith("iluvatar.")]
    assert ours and answer["chosen"] == "reference.torch"
    for candidate in ours:
        reason = next(r for r in candidate["reasons"] if r["subject"] == "kv_layout")
        assert (reason["given"], reason["limit"]) == ("fp8_ds_mla", "supports bf16") and "upconvert" in reason["remedy"]
