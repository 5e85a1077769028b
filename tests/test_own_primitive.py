# SPDX-License-Identifier: Apache-2.0
"""A plugin may bring a primitive of its own: chosen, forced, explained and listed like those of the core."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from machines import CPU
from typer.testing import CliRunner

import mla_portable
from mla_portable.choose import Registry, use
from mla_portable.cli.app import app
from mla_portable.contracts import InvalidArgument, Primitive, Request, UnknownBackend, UnsupportedRequest
from mla_portable.contracts.primitive import _named
from mla_portable.dispatch import find, serving

PLUGINS = [("reference", "mla_portable.reference"), ("scaling", "fake_plugins.scaling")]
NAME, MODULE = "scale_rows", "fake_plugins.scaling"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Primitives are known to the whole process, once their plugin is imported."""
    yield
    _named.pop(NAME, None)
    sys.modules.pop(MODULE, None)


def registry(**environ: str) -> Registry:
    return Registry(plugins=PLUGINS, facts={"cpu": CPU}, environ=environ)


def chosen(reg: Registry, **fields: Any) -> str | None:
    return reg.decide(Request(Primitive.named(NAME), CPU, **fields)).chosen


def test_it_is_unknown_until_its_plugin_is_loaded_and_comes_last():
    with pytest.raises(ValueError, match="'scale_rows' is no primitive"):
        Primitive.named(NAME)
    registry()
    assert Primitive.all()[-1] == NAME and Primitive.all()[0] == "cache_write"


def test_it_is_chosen_and_called():
    reg = Registry(plugins=PLUGINS, environ={})
    x = torch.ones(2, 3)
    with serving(reg):
        served = find(Primitive.named(NAME), None, x, (4,))
    assert served.name == "scaling.fast" and torch.equal(served.call(x, 3.0), x * 3)
    with pytest.raises(UnsupportedRequest, match="num_heads 9"):
        reg.bind(Request(Primitive.named(NAME), reg.facts("cpu"), num_heads=9))


def test_it_is_forced_by_variable_and_block():
    assert chosen(registry()) == "scaling.fast"
    reg = registry(MLA_PORTABLE_BACKEND_SCALE_ROWS="scaling.plain")
    assert chosen(reg) == "scaling.plain"
    with use(scale_rows="scaling.fast"):
        assert chosen(reg) == "scaling.fast"


def test_a_plugin_is_disabled_where_a_variable_names_another_plugins_primitive():
    given = [*PLUGINS, ("acme", "fake_plugins.raises_on_import")]
    environ = {"MLA_PORTABLE_BACKEND_SCALE_ROWS": "scaling.plain", "MLA_PORTABLE_DISABLE": "acme"}
    reg = Registry(plugins=given, facts={"cpu": CPU}, environ=environ)
    assert reg.plugin_reports[-1].disabled == "MLA_PORTABLE_DISABLE"
    assert chosen(reg) == "scaling.plain"


def test_mistakes_are_the_typed_errors_of_other_primitives():
    with pytest.raises(UnknownBackend, match=r"scaling\.plain"):
        chosen(registry(MLA_PORTABLE_BACKEND_SCALE_ROWS="scaling.plian"))
    with pytest.raises(InvalidArgument, match=r"SCALE_ROW: .*Did you mean 'MLA_PORTABLE_BACKEND_SCALE_ROWS'"):
        chosen(registry(MLA_PORTABLE_BACKEND_SCALE_ROW="scaling.plain"))
    without = Registry(plugins=PLUGINS[:1], facts={"cpu": CPU}, environ={"MLA_PORTABLE_BACKEND_OTHER": "reference"})
    with pytest.raises(InvalidArgument, match="a variable that does not exist"):
        without.policy.rule_for(Primitive.named("merge_states"))


def test_it_is_explained_and_listed():
    with serving(registry()):
        assert mla_portable.explain(NAME, device="cpu", num_heads=4).chosen == "scaling.fast"
        shown = CliRunner().invoke(app, ["explain", NAME, "--device", "cpu", "--heads", "4"])
        assert shown.exit_code == 0 and "scaling.plain" in shown.output
        doctor = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert "scaling.fast" in doctor.output and NAME in doctor.output
