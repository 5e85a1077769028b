# SPDX-License-Identifier: Apache-2.0
"""docs/iluvatar.md names every implementation, and keeps what is open on its list."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_portable_iluvatar import PROVIDERS
from mla_portable_iluvatar.detection import COREX_VARIABLES, OVERRIDE

PAGE = (Path(__file__).parents[2] / "docs" / "iluvatar.md").read_text()
OPEN = PAGE.partition("\n## Open\n")[2]
QUESTIONS = {
    "semantics of the seed's op": ("dsa_convert", "return dtype"),
    "dense MLA": ("dense MLA", "block tables"),
    "shapes of the sparse op": ("multiple of 64", "64 heads", "no tokens", "absent index"),
    "lse": ("third generation", "lse"),
    "overflow": ("int32 overflow", "576"),
    "graphs": ("Graph safety",),
    "FP8 of the TG series": ("FP8", "TG series"),
    "the indexer": ("indexer", "heads than 64", "longest query"),
    "the newest plugin": ("vllm-iluvatar 0.27.1",),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_is_open_is_listed_as_open(name):
    assert all(word in OPEN for word in QUESTIONS[name])


def test_every_implementation_is_on_the_page():
    for provider in PROVIDERS:
        assert f"`{provider.variant}`" in PAGE, provider.variant


def test_names_are_those_of_the_code():
    assert all(f"`{name}`" in PAGE for name in (OVERRIDE, *COREX_VARIABLES))


def test_no_implementation_calls_itself_verified():
    for provider in PROVIDERS:
        support = provider.implementation().support
        assert support.source and "verified" not in support.source
        assert support.vendors == ("iluvatar",) and not support.graph
