# SPDX-License-Identifier: Apache-2.0
"""Who decides: argument, `use`, environment, default; and what a typo in any of them leads to."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator

import pytest
from fake_plugins import implementation, make_plugin
from machines import H200

from mla_portable.choose import Policy, Registry, use
from mla_portable.choose.policy import Rule, active_rules
from mla_portable.contracts import InvalidArgument, Request, UnknownBackend, UnsupportedRequest
from mla_portable.primitives import MERGE_STATES, SPARSE_DECODE

BACKENDS = ("alpha", "beta", "gamma", "delta", "zeta", "eta", "theta")
DECODE = Request(SPARSE_DECODE, H200)
MERGE = Request(MERGE_STATES, H200)


def plugins() -> list[tuple[str, object]]:
    """Each backend offers two variants of decode and one of merge; alpha is what an automatic choice takes."""
    return [
        (
            name,
            make_plugin(
                implementation(f"{name}.v1", SPARSE_DECODE, preference=10 + rank),
                implementation(f"{name}.v2", SPARSE_DECODE, preference=20 + rank),
                implementation(f"{name}.v1", MERGE_STATES, preference=10 + rank),
            ),
        )
        for rank, name in enumerate(BACKENDS)
    ]


def registry(**environ: str) -> Registry:
    return Registry(plugins=plugins(), facts={"cuda": H200}, environ=environ)


def choice(reg: Registry, request: Request = DECODE, backend: str | None = None) -> tuple[str | None, str]:
    decision = reg.decide(request, backend=backend)
    return decision.chosen, decision.control


def test_each_layer_outweighs_all_below_it():
    """All layers speak at once; taking away the strongest, one by one, brings the next to the fore."""
    environ = {
        "MLA_PORTABLE_BACKEND_SPARSE_DECODE": "delta",
        "MLA_PORTABLE_BACKEND": "zeta",
    }
    reg = registry(**environ)
    with use("gamma"):
        with use("gamma", sparse_decode="beta.v2"):
            assert choice(reg, backend="alpha.v2") == ("alpha.v2", "argument")
            assert choice(reg) == ("beta.v2", "use(...)")
            assert choice(reg, MERGE) == ("gamma.v1", "use(...)")
        assert choice(reg) == ("gamma.v1", "use(...)")
    assert choice(reg) == ("delta.v1", "MLA_PORTABLE_BACKEND_SPARSE_DECODE")
    assert choice(reg, MERGE) == ("zeta.v1", "MLA_PORTABLE_BACKEND")
    del environ["MLA_PORTABLE_BACKEND_SPARSE_DECODE"]
    assert choice(registry(**environ)) == ("zeta.v1", "MLA_PORTABLE_BACKEND")
    assert choice(registry()) == ("alpha.v1", "default")


def test_an_inner_block_for_all_outweighs_an_outer_one_for_a_primitive():
    reg = registry()
    with use(sparse_decode="beta"), use("gamma"):
        assert choice(reg) == ("gamma.v1", "use(...)")
    with use("gamma"), use(sparse_decode="beta"):
        assert choice(reg)[0] == "beta.v1" and choice(reg, MERGE)[0] == "gamma.v1"


def test_auto_lifts_what_weaker_layers_demand():
    reg = registry(MLA_PORTABLE_BACKEND="zeta")
    assert choice(reg, backend="auto") == ("alpha.v1", "argument")
    assert reg.decide(DECODE, backend="auto").forced is None
    with use(sparse_decode="auto"):
        assert choice(reg) == ("alpha.v1", "use(...)")
        assert choice(reg, MERGE) == ("zeta.v1", "MLA_PORTABLE_BACKEND")


def test_use_ends_with_its_block_also_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), use("beta"):
        raise RuntimeError("inside")
    assert active_rules() == ()


def test_a_generator_inside_a_block_may_be_closed_in_another_thread():
    def serving() -> Iterator[str]:
        with use("beta"):
            yield "ready"

    def other() -> None:
        with use("gamma"):
            generator.close()
            seen.append([rule.target for rule in active_rules()])

    seen: list[object] = []
    generator = serving()

    def here() -> None:
        next(generator)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    contextvars.copy_context().run(here)
    assert seen == [["gamma"]] and active_rules() == ()


def test_use_holds_for_its_own_thread():
    reg = registry()
    seen: dict[str, str | None] = {}
    inside = threading.Event()
    done = threading.Event()

    def other() -> None:
        inside.wait(10)
        seen["outside"] = choice(reg)[0]
        with use("gamma"):
            seen["own"] = choice(reg)[0]
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use("beta"):
        inside.set()
        assert done.wait(10)
        seen["here"] = choice(reg)[0]
    thread.join()
    assert seen == {"outside": "alpha.v1", "own": "gamma.v1", "here": "beta.v1"}


def test_the_environment_is_read_once_and_again_on_request(monkeypatch: pytest.MonkeyPatch):
    for name in ("MLA_PORTABLE_BACKEND", "MLA_PORTABLE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    reg = Registry(plugins=plugins(), facts={"cuda": H200})
    assert choice(reg)[0] == "alpha.v1"
    bound = reg.select(DECODE)[0]
    token = reg.choice_token()
    monkeypatch.setenv("MLA_PORTABLE_BACKEND", "beta")
    assert choice(reg)[0] == "alpha.v1" and reg.select(DECODE)[0] is bound and reg.choice_token() == token
    reg.reload_policy()
    assert choice(reg)[0] == "beta.v1" and reg.select(DECODE)[0].name == "beta.v1"
    assert reg.choice_token() != token
    monkeypatch.setenv("MLA_PORTABLE_BACKEND", "bta")
    with pytest.raises(UnknownBackend):
        reg.reload_policy()
    assert choice(reg)[0] == "beta.v1", "the old policy stays in force"


def test_a_policy_in_code_replaces_the_environment():
    policy = Policy(rules=(Rule("beta", "a test", SPARSE_DECODE),), disabled=(("alpha", "a test"),))
    reg = Registry(plugins=plugins(), facts={"cuda": H200}, policy=policy, environ={"MLA_PORTABLE_BACKEND": "zeta"})
    assert choice(reg) == ("beta.v1", "a test")
    assert choice(reg, MERGE) == ("beta.v1", "default")


# Disabling


def test_disabled_candidates_stay_visible_with_who_disabled_them():
    reg = registry(MLA_PORTABLE_DISABLE=" alpha, beta.v1 ,gamma,")
    decision = reg.decide(DECODE)
    assert (decision.chosen, decision.was_fallback) == ("delta.v1", True)
    assert [r.disabled for r in reg.plugin_reports[:3]] == ["MLA_PORTABLE_DISABLE", "", "MLA_PORTABLE_DISABLE"]
    disabled = {v.implementation: [(r.given, r.limit) for r in v.reasons] for v in decision.verdicts if v.reasons}
    assert disabled == {
        "alpha": [("by MLA_PORTABLE_DISABLE", "it names alpha")],
        "beta.v1": [("by MLA_PORTABLE_DISABLE", "it names beta.v1")],
        "gamma": [("by MLA_PORTABLE_DISABLE", "it names gamma")],
    }
    assert reg.decide(DECODE, backend="beta").chosen == "beta.v2"


def test_even_a_forced_choice_does_not_take_what_is_disabled():
    reg = registry(MLA_PORTABLE_DISABLE="alpha")
    for name in ("alpha", "alpha.v1"):
        with pytest.raises(UnsupportedRequest, match=f"take alpha out of MLA_PORTABLE_DISABLE to let {name} run"):
            reg.select(DECODE, backend=name)
    with pytest.raises(UnsupportedRequest, match=r"take beta\.v1 out of MLA_PORTABLE_DISABLE to let beta\.v1 run"):
        registry(MLA_PORTABLE_DISABLE="beta.v1").select(DECODE, backend="beta.v1")


# Typos


def test_an_unknown_backend_is_an_error_in_every_layer():
    for environ in (
        {"MLA_PORTABLE_BACKEND": "gama"},
        {"MLA_PORTABLE_BACKEND_MERGE_STATES": "gama"},
        {"MLA_PORTABLE_DISABLE": "alpha,gama"},
    ):
        reg = registry(**environ)
        assert reg.implementations(), "doctor can still look around"
        for ask in (lambda r: r.decide(DECODE), lambda r: r.bind(DECODE), lambda r: r.policy):
            with pytest.raises(UnknownBackend, match=r"got 'gama'\. Did you mean 'gamma'\? Expected one of auto, alpha, beta"):
                ask(reg)
    reg = registry()
    with pytest.raises(UnknownBackend, match=r"argument: backend: got 'alpha\.v3'.*Did you mean 'alpha\.v"):
        reg.decide(DECODE, backend="alpha.v3")
    with use(merge_states="gama"), pytest.raises(UnknownBackend, match=r"use\(\.\.\.\)"):
        reg.decide(DECODE)
    with pytest.raises(UnknownBackend, match="doctor"):
        reg.decide(DECODE, backend="")


def test_an_unknown_primitive_is_an_error_in_every_layer():
    with (
        pytest.raises(InvalidArgument, match=r"sparse_decod: got an unknown keyword.*Did you mean 'sparse_decode'\?"),
        use(sparse_decod="alpha"),
    ):
        pass
    reg = registry(MLA_PORTABLE_BACKEND_SPARSE_DECOD="alpha")
    with pytest.raises(InvalidArgument, match=r"Did you mean 'MLA_PORTABLE_BACKEND_SPARSE_DECODE'\?"):
        reg.decide(DECODE)
    with pytest.raises(InvalidArgument, match=r"Did you mean 'MLA_PORTABLE_BACKEND'\?"):
        registry(MLA_PORTABLE_BACKENDS="alpha").decide(DECODE)


# Variables


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MLA_PORTABLE_DISABLED", "alpha", "Did you mean 'MLA_PORTABLE_DISABLE'"),
        ("MLA_PORTABLE_BACKND", "alpha", "Did you mean 'MLA_PORTABLE_BACKEND'"),
        ("MLA_PORTABLE_VLLMM", "off", "Did you mean 'MLA_PORTABLE_VLLM'"),
        ("MLA_PORTABLE_POLICY", "/etc/p.toml", r"Set MLA_PORTABLE_BACKEND to .*_<PRIMITIVE> to .* MLA_PORTABLE_DISABLE to"),
        ("MLA_PORTABLE_NVIDIA_PROVIDR", "vllm", "Did you mean 'MLA_PORTABLE_NVIDIA_PROVIDER'"),
        ("MLA_PORTABLE_XYZ", "1", "Unset MLA_PORTABLE_XYZ"),
        ("MLA_PORTABLE_VLLM", "foo", "got 'foo', expected one of auto, custom, override, off"),
        ("MLA_PORTABLE_VLLM_ROUTE", "foo", "expected one of auto, fused"),
        ("MLA_PORTABLE_VLLM_SHADOW", "1", "Unset MLA_PORTABLE_VLLM_SHADOW"),
        ("MLA_PORTABLE_ILUVATAR", "maybe", "expected on, off, or an architecture"),
        ("MLA_PORTABLE_NVIDIA_PROVIDER", "foo", "expected one of library, flash_mla"),
        ("MLA_PORTABLE_NVIDIA_TRUNCATED_SCALES", "1", "expected one of allow"),
        ("MLA_PORTABLE_PLUGIN_TIMEOUT", "soon", "seconds, 0 or more"),
        ("MLA_PORTABLE_DISABLE", "auto", "asks for an automatic choice"),
    ],
)
def test_a_variable_that_means_nothing_is_an_error_at_every_choice(name: str, value: str, message: str):
    vendors = [("nvidia", "mla_portable_nvidia"), ("iluvatar", "mla_portable_iluvatar")]
    reg = Registry(plugins=[*plugins(), *vendors], facts={"cuda": H200}, environ={name: value})
    for ask in (lambda: reg.decide(MERGE), lambda: reg.bind(MERGE), lambda: reg.policy):
        with pytest.raises(InvalidArgument, match=message):
            ask()
    assert Registry(plugins=plugins(), facts={"cuda": H200}, environ={name: " "}).decide(MERGE).chosen


def test_variables_that_mean_something_are_accepted_and_listed():
    given = {
        "MLA_PORTABLE_VLLM": "OFF",
        "MLA_PORTABLE_NVIDIA_PROVIDER": "vllm",
        "MLA_PORTABLE_ILUVATAR": "ivcore11",
        "MLA_PORTABLE_PLUGIN_TIMEOUT": "60",
    }
    kubernetes = {
        "MLA_PORTABLE_SERVICE_HOST": "10.0.0.1",
        "MLA_PORTABLE_PORT_80_TCP_ADDR": "10.0.0.1",
        "MLA_PORTABLE_PORT": "x",
    }
    vendors = [("nvidia", "mla_portable_nvidia"), ("iluvatar", "mla_portable_iluvatar")]
    reg = Registry(plugins=[*plugins(), *vendors], facts={"cuda": H200}, environ={**given, **kubernetes, "HOME": "/me"})
    assert reg.decide(MERGE).chosen and dict(reg.environment) == given


def test_variables_of_a_plugin_that_is_broken_or_disabled_are_not_typos():
    broken = ("acme", "fake_plugins.raises_on_import")
    environ = {"MLA_PORTABLE_ACME_PATH": "/x", "MLA_PORTABLE_ACME": "on", "MLA_PORTABLE_NVIDIA_PROVIDER": "foo"}
    sources = [*plugins(), broken, ("nvidia", "mla_portable_nvidia")]
    reg = Registry(plugins=sources, facts={"cuda": H200}, environ={**environ, "MLA_PORTABLE_DISABLE": "nvidia"})
    assert reg.decide(MERGE).chosen == "alpha.v1"
    with pytest.raises(InvalidArgument, match="MLA_PORTABLE_ACMEPATH"):
        Registry(plugins=sources, facts={"cuda": H200}, environ={"MLA_PORTABLE_ACMEPATH": "x"}).decide(MERGE)


def test_use_refuses_what_is_no_name():
    for bad in ({"backend": 3}, {"backend": ""}, {"merge_states": None}, {"merge_states": ""}):
        with pytest.raises(InvalidArgument, match="expected the name of a backend"), use(**bad):
            pass


def test_empty_variables_are_no_wish():
    assert choice(registry(MLA_PORTABLE_BACKEND="", MLA_PORTABLE_DISABLE=" ")) == (
        "alpha.v1",
        "default",
    )


def test_naming_a_plugin_that_did_not_load_is_no_typo():
    reg = Registry(
        plugins=[*plugins(), ("broken", "fake_plugins.raises_on_import")],
        facts={"cuda": H200},
        environ={"MLA_PORTABLE_BACKEND": "broken"},
    )
    with pytest.raises(UnsupportedRequest, match="libacme"):
        reg.select(DECODE)
    assert reg.decide(DECODE, backend="broken.v1").chosen is None
    assert reg.decide(DECODE, backend="alpha").chosen == "alpha.v1"
