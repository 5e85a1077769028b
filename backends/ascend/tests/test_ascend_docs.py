# SPDX-License-Identifier: Apache-2.0
"""docs/ascend.md names every implementation and calls none of them proven."""

from __future__ import annotations

from pathlib import Path

from mla_portable_ascend import PROVIDERS

PAGE = (Path(__file__).parents[3] / "docs" / "ascend.md").read_text()


def test_every_implementation_is_on_the_page_and_no_other_one():
    named = {word.removeprefix("ascend.") for word in PAGE.split("`") if word.startswith("ascend.")}
    layouts = {layout.removeprefix("ascend.") for provider in PROVIDERS for layout in provider.limits["kv_layouts"]}
    assert named - layouts == {provider.variant for provider in PROVIDERS}


def test_nothing_is_called_verified():
    assert "**Not run on hardware: held against a stand-in of the public operations.**" in PAGE
    assert "verified" not in PAGE
    for provider in PROVIDERS:
        support = provider.implementation().support
        assert "182b75ea" in support.source or "517f2e7d" in support.source
        assert support.vendors == ("ascend",) and support.probes_graph
