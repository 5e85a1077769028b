# SPDX-License-Identifier: Apache-2.0
"""docs/iluvatar.md names every implementation, and keeps what is open on its list."""

from __future__ import annotations

from pathlib import Path

from mla_portable_iluvatar import PROVIDERS

PAGE = (Path(__file__).parents[2] / "docs" / "iluvatar.md").read_text()


def test_every_implementation_is_on_the_page():
    for provider in PROVIDERS:
        assert f"`{provider.variant}`" in PAGE, provider.variant


def test_no_implementation_calls_itself_verified():
    for provider in PROVIDERS:
        support = provider.implementation().support
        assert support.source and "verified" not in support.source
        assert support.vendors == ("iluvatar",) and support.probes_graph
