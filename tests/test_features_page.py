# SPDX-License-Identifier: Apache-2.0
"""FEATURES.md: a table for each primitive, and each cell is what the declaration says."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from fake_plugins import implementation
from features import features_of, features_page

from mla_portable.choose import Registry
from mla_portable.contracts import Features, Primitive, Support
from mla_portable.primitives import CACHE_WRITE, INDEXER_SELECT, MASKED_PREFILL, SPARSE_DECODE

LEAST = Support(source="a test", archs=("sm90",), kv_layouts=("bf16",))


def cells(support: Support, primitive: Primitive) -> dict[str, str]:
    """Heading -> cell of the only row."""
    lines = [line for line in features_page([implementation("acme.v1", primitive, support)]).splitlines() if line[:1] == "|"]
    headings, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], lines[2]))
    assert len(lines) == 3 and row[0] == "`acme.v1`"
    return dict(zip(headings, row, strict=True))


@pytest.mark.parametrize("primitive", Primitive.all(), ids=str)
def test_a_column_says_whether_a_feature_is_declared(primitive: Primitive) -> None:
    for name in features_of(primitive):
        for value, word in ((True, "yes"), (False, "no")):
            assert cells(replace(LEAST, **{name: value}), primitive)[f"`{name}`"] == word


def test_every_feature_has_a_column_somewhere() -> None:
    shown = {name for primitive in Primitive.all() for name in features_of(primitive)}
    assert shown >= {each.name for each in fields(Features)} - {"graph"} | {"extra_cache"}


@pytest.mark.parametrize(
    ("primitive", "heading", "given", "wanted"),
    [
        (SPARSE_DECODE, "devices", {}, "any: sm90"),
        (SPARSE_DECODE, "devices", {"vendors": ("nvidia",)}, "nvidia: sm90"),
        (SPARSE_DECODE, "devices", {"vendors": ("iluvatar",), "archs": None}, "iluvatar"),
        (SPARSE_DECODE, "devices", {"archs": None}, "any cuda"),
        (SPARSE_DECODE, "devices", {"archs": None, "device_types": None}, "any device"),
        (SPARSE_DECODE, "layouts", {"kv_layouts": ("bf16", "fp8_ds_mla")}, "`bf16`, `fp8_ds_mla`"),
        (SPARSE_DECODE, "layouts", {"kv_layouts": None}, "any"),
        (SPARSE_DECODE, "heads", {}, "any"),
        (SPARSE_DECODE, "heads", {"num_heads": (16,), "padded_heads": (64,)}, "16; padded to 64"),
        (SPARSE_DECODE, "K", {}, "any"),
        (SPARSE_DECODE, "K", {"topk_multiple": 64, "max_topk": 2048}, "multiples of 64; at most 2,048"),
        (INDEXER_SELECT, "K", {"max_topk": 2048, "topks": (4096,)}, "at most 2,048; 4096"),
        (SPARSE_DECODE, "block size", {"block_sizes": (16, 64)}, "16, 64"),
        (SPARSE_DECODE, "block size", {"block_size_multiple": 16, "max_block_size": 1024}, "multiples of 16, at most 1024"),
        (MASKED_PREFILL, "head dims", {"head_dims": ((192, 128),)}, "192/128"),
        (CACHE_WRITE, "scales", {}, ""),
        (CACHE_WRITE, "scales", {"kv_layouts": ("fp8_ds_mla",), "scale_formats": ("pow2",)}, "pow2"),
        (CACHE_WRITE, "graph", {"graph": False, "probes_graph": True}, "no"),
        (CACHE_WRITE, "graph", {"probes_graph": True}, "probed"),
        (CACHE_WRITE, "graph", {}, "yes"),
        (SPARSE_DECODE, "accuracy", {"accuracy": "low"}, "low"),
        (SPARSE_DECODE, "needs", {"cache_alignment": 16}, "cache at multiples of 16 bytes"),
        (SPARSE_DECODE, "needs", {"needs_whole_rows": True}, "whole rows between blocks"),
        (INDEXER_SELECT, "needs", {"needs_whole_tables": True}, "`whole_tables`"),
    ],
)
def test_a_limit_is_what_is_declared(primitive: Primitive, heading: str, given: dict[str, object], wanted: str) -> None:
    assert cells(replace(LEAST, **given), primitive)[heading] == wanted


def test_the_page_has_every_implementation_of_every_primitive() -> None:
    offered = Registry(environ={}, probe=False, costs="measured").implementations()
    page = (Path(__file__).parents[1] / "capability/FEATURES.md").read_text()
    assert page == features_page(offered)
    for each in offered:
        table = page.split(f"\n## {each.primitive}\n")[1].split("\n## ")[0]
        assert f"\n| `{each.name}` | " in table
    for primitive in Primitive.all():
        costs = [each.preference for each in offered if each.primitive == primitive]
        assert costs == sorted(costs), "the page says that they stand in this order"
