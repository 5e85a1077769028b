# SPDX-License-Identifier: Apache-2.0
"""The class of low accuracy: judged by tolerances of its own, shown as such, and chosen only where it is forced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from commands import invoke
from torch import Tensor

from mla_portable import use
from mla_portable.choose import Registry
from mla_portable.choose.policy import Policy
from mla_portable.contracts import Implementation, InvalidArgument, Registrar, Request, Support, hookimpl
from mla_portable.judge.conformance import run_suite
from mla_portable.judge.problems.base import tolerances
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.primitives import MASKED_PREFILL, SPARSE_DECODE, SPARSE_PREFILL

HEADS = 16


def e4m3(values: Tensor) -> Tensor:
    """Values [.., D] rounded to e4m3, with a scale for each row."""
    scale = values.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 448
    return (values.float() / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale.to(values.dtype)


def mantissa_of(values: Tensor, bits: int) -> Tensor:
    """Values rounded to so many bits behind the leading one."""
    fraction, exponent = torch.frexp(values.float())
    return torch.ldexp((fraction * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)


class Low:
    """`low.codes`: attention with queries of 8 bits (`rounded`), and `low.exact`: the reference."""

    def __init__(self, *, rounded=e4m3, both: bool = True, **support: Any) -> None:
        self.rounded, self.both = rounded, both
        self.support = {"accuracy": "low", "num_heads": (HEADS,), "kv_layouts": (FP8_DS_MLA.name,), **support}

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        def bind(request: Request) -> Any:
            exact = request.primitive.reference
            return lambda q, *args, **keywords: exact(self.rounded(q).to(q.dtype), *args, **keywords)

        for primitive in (SPARSE_DECODE, SPARSE_PREFILL):
            declared = Support("a stand-in", device_types=("cpu",), scale_formats=("pow2",), **self.support)
            registrar.add(Implementation("low.codes", primitive, declared, bind, preference=1))
            if self.both:
                declared = Support("a stand-in", device_types=("cpu",), kv_layouts=(FP8_DS_MLA.name,))
                registrar.add(
                    Implementation("low.exact", primitive, declared, lambda asked: asked.primitive.reference, preference=9)
                )


def registry_of(plugin: Low, **options: Any) -> Registry:
    return Registry(plugins=[("reference", "mla_portable.reference"), ("low", plugin)], **{"environ": {}, **options})


def asked(registry: Registry) -> Request:
    sizes = {"num_heads": HEADS, "topk": 64, "block_size": 16, "query_len": 1, "scale_format": "pow2"}
    return Request(SPARSE_DECODE, registry.facts("cpu"), kv_layout=FP8_DS_MLA.name, **sizes)


def test_it_is_never_chosen_automatically():
    registry = registry_of(Low(both=False))
    decision = registry.decide(asked(registry), thorough=True)
    assert decision.chosen == "reference.torch" and not decision.was_fallback
    assert "low accuracy (only when forced)" in decision.text()
    (verdict,) = (each for each in decision.verdicts if each.implementation == "low.codes")
    assert [each.remedy for each in verdict.reasons] == ['backend="low.codes" takes it']


def test_it_serves_where_it_is_forced():
    registry = registry_of(Low())
    request = asked(registry)
    assert registry.decide(request, backend="low.codes").chosen == "low.codes"
    with use("low.codes"):
        assert registry.decide(request).chosen == "low.codes"
    environ = {"MLA_PORTABLE_BACKEND_SPARSE_DECODE": "low.codes"}
    assert registry_of(Low(), environ=environ).decide(request).chosen == "low.codes"
    assert (
        registry_of(Low(), policy=Policy.from_environment({"MLA_PORTABLE_BACKEND": "auto"})).decide(request).chosen
        == "low.exact"
    )


def test_the_name_of_a_backend_takes_what_is_exact_there_first():
    registry = registry_of(Low())
    assert registry.decide(asked(registry), backend="low").chosen == "low.exact"
    registry = registry_of(Low(both=False))
    assert registry.decide(asked(registry), backend="low").chosen == "low.codes"


@pytest.mark.parametrize("level", ["smoke", "quick"])
def test_queries_of_8_bits_conform_by_the_class_and_not_by_the_usual_one(level: str):
    report = run_suite(registry_of(Low()), "low.codes", device="cpu", level=level, primitives=[SPARSE_DECODE])
    assert report.ok, [(each.case.id, each.message) for each in report.results if each.status != "passed"][:5]
    assert report.passed and all("-low" in each.case.id for each in report.results)
    usual = run_suite(
        registry_of(Low(accuracy="standard")), "low.codes", device="cpu", level="smoke", primitives=[SPARSE_DECODE]
    )
    assert usual.failed and not any("-low" in each.case.id for each in usual.results)


def test_prompts_of_8_bits_conform_by_the_class():
    def bind(request: Request) -> Any:
        def call(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Any:
            return MASKED_PREFILL.reference(*(e4m3(each).to(each.dtype) for each in (q, k, v)), *args, **keywords)

        return call

    class Prompts:
        def __init__(self, accuracy: str) -> None:
            self.support = Support("a stand-in", device_types=("cpu",), accuracy=accuracy, head_dims=((192, 128),))

        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            registrar.add(Implementation("low.prompts", MASKED_PREFILL, self.support, bind))

    for accuracy, ok in (("low", True), ("standard", False)):
        registry = Registry(plugins=[("low", Prompts(accuracy))], environ={})
        report = run_suite(registry, "low", device="cpu", level="smoke")
        assert report.passed + report.failed and report.ok == ok


def test_commands_say_that_it_is_low():
    registry = registry_of(Low())
    shown = " ".join(invoke("doctor", "--all", "--device", "cpu", registry=registry).stdout.split())
    assert "works (low accuracy: only when forced)" in shown
    sizes = ["--layout", "fp8_ds_mla", "--heads", str(HEADS), "--topk", "64", "--block-size", "16", "--device", "cpu"]
    assert "low accuracy (only when forced)" in invoke("explain", "sparse_decode", *sizes, registry=registry).stdout
    suite = ["conform", "low.codes", "--level", "smoke", "--primitive", "sparse_decode", "--device", "cpu"]
    assert "low.codes (low accuracy)" in invoke(*suite, registry=registry).stdout


@pytest.mark.parametrize("rounded", [lambda q: mantissa_of(q, 1), lambda q: q * 1.5, torch.zeros_like])
def test_what_is_worse_than_8_bits_does_not(rounded):
    registry = registry_of(Low(rounded=rounded))
    report = run_suite(registry, "low.codes", device="cpu", level="quick", primitives=[SPARSE_DECODE], match="dense")
    assert report.failed


def test_the_probe_judges_by_the_class():
    for accuracy, ok in (("low", True), ("standard", False)):
        registry = registry_of(Low(accuracy=accuracy))
        (codes,) = (each for each in registry.implementations(SPARSE_DECODE) if each.name == "low.codes")
        assert registry.probe(codes, torch.device("cpu")).ok == ok


def test_every_attention_has_tolerances_of_the_class_with_a_cosine_of_0_998():
    limits = {(primitive, quantity): row for (primitive, storage, quantity), row in tolerances().items() if storage == "low"}
    assert {primitive for primitive, _ in limits} == {SPARSE_DECODE, SPARSE_PREFILL, MASKED_PREFILL}
    assert all(row.cosine == 2e-3 for (_, quantity), row in limits.items() if quantity == "out")


@pytest.mark.parametrize("accuracy", ["exact", "", 8, None, "LOW"])
def test_there_are_two_classes(accuracy: Any):
    with pytest.raises(InvalidArgument, match="Support: accuracy: got"):
        Support("a test", accuracy=accuracy)
