# SPDX-License-Identifier: Apache-2.0
"""A decode batch is served by the implementation that is chosen for its number of rows, where several were timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_steps import HEADS, SPEC, TOPK, plan_for
from machines import H200, costs_of
from recorder import Recorder

from mla_portable.attention import SlotAttention, SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.contracts import Batch
from mla_portable.kit.split_kv import SPLIT_KV
from mla_portable.primitives import SPARSE_DECODE

US = {
    "few": {1: 5.0, 4: 6.0, 16: 20.0, 64: 90.0, 256: 400.0},
    "many": {1: 10.0, 4: 12.0, 16: 20.1, 64: 80.0, 256: 300.0},
}
"""Up to 15 rows `few` is the faster one, there by 3.2 %. 16 rows are a tie, for which `many` is preferred. Then `many`."""


def registry_of(us=US, kinds=(None, None)) -> tuple[dict[str, Recorder], Registry]:
    """Recorders by name: decoders `few` and `many`, and `rest` for everything, slowly."""
    decoders = {
        name: Recorder(
            f"{name}.kernel", kind, preference, {"batch_invariant": True, "lengths": name == "many"}, (SPARSE_DECODE,)
        )
        for name, kind, preference in zip(us if len(us) > 2 else US, kinds, (9.0, 8.0, 7.0), strict=False)
    }
    plugins = {**decoders, "rest": Recorder("rest.kernel", preference=50.0, support={"batch_invariant": True})}
    sizes = {f"{name}.kernel": {("sparse_decode", "fp8_ds_mla"): by_rows} for name, by_rows in us.items()}
    costs = costs_of(sizes, H200.name, HEADS, TOPK)
    return plugins, Registry(plugins=list(plugins.items()), facts={"cpu": H200}, environ={}, probe=False, costs=costs)


def layer_of(us=US, kinds=(None, None), **changes) -> tuple[dict[str, Recorder], SparseMLAAttention]:
    plugins, registry = registry_of(us, kinds)
    spec = replace(SPEC, **{"max_num_reqs": 256, "max_num_tokens": 768, **changes})
    return plugins, SparseMLAAttention(spec, device="cpu", registry=registry)


def served(plugins: dict[str, Recorder], layer: SparseMLAAttention, rows: int, query_len: int = 1) -> tuple[str, dict]:
    """(who, with which arguments) of a batch of decodes."""
    for plugin in plugins.values():
        plugin.calls.clear()
    requests = rows // query_len
    starts = np.arange(requests + 1, dtype=np.int32) * np.int32(query_len)
    table = torch.zeros((requests, 6), dtype=torch.int32)
    plan = plan_for(layer, Batch(starts, np.full(requests, query_len, dtype=np.int32), table))
    cache = torch.zeros((2, SPEC.block_size, 656), dtype=torch.uint8)
    layer(torch.zeros(rows, HEADS, 576).bfloat16(), cache, torch.zeros((rows, TOPK), dtype=torch.int32), plan)
    ((name, arguments),) = [
        (name, given) for name, each in plugins.items() for called, _, given in each.calls if called == "sparse_decode"
    ]
    return name, arguments


@pytest.mark.parametrize(("rows", "name"), [(1, "few"), (9, "few"), (15, "few"), (16, "many"), (33, "many"), (256, "many")])
def test_each_batch_gets_what_is_chosen_for_its_rows(rows: int, name: str):
    plugins, layer = layer_of()
    found, arguments = served(plugins, layer, rows)
    assert found == name
    assert (arguments["lengths"] is not None) is (name == "many"), "each as it was bound"
    (bound,) = plugins[name].bound
    assert bound.clean_indices and bound.lengths is (name == "many") and bound.rows == (15 if name == "few" else 256)


def test_one_that_is_fastest_only_between_two_sizes_is_found():
    """`mid` is behind at both; with 40 rows it takes 61 us, and the others take 68."""
    us = {"few": {16: 30.0, 64: 106.0}, "many": {16: 50.0, 64: 86.0}, "mid": {16: 32.0, 64: 90.0}}
    plugins, layer = layer_of(us, kinds=(None, None, None))
    names = [served(plugins, layer, rows)[0] for rows in range(1, 80)]
    assert list(dict.fromkeys(names)) == ["few", "mid", "many"] and names == sorted(names, key=["few", "mid", "many"].index)
    assert "mid" not in (names[15], names[63])


def test_rows_of_slots_get_what_is_chosen_for_their_number():
    plugins, registry = registry_of()
    spec = replace(SPEC, max_num_reqs=256, max_num_tokens=768, need_lse=False, concat_query=False)
    attention = SlotAttention(spec, device="cpu", registry=registry)
    cache, found = torch.zeros((2, SPEC.block_size, 656), dtype=torch.uint8), []
    for rows in (1, 15, 16, 256):
        for plugin in plugins.values():
            plugin.calls.clear()
        q, slots = torch.zeros(rows, HEADS, 576).bfloat16(), torch.zeros((rows, TOPK), dtype=torch.int32)
        attention.forward(q, cache, slots, softmax_scale=0.1, decodes=True)
        found += [name for name, each in plugins.items() if each.calls]
    assert found == ["few", "few", "many", "many"]


def test_drafts_count_as_rows():
    plugins, layer = layer_of(decode_query_len=3)
    assert [served(plugins, layer, rows, 3)[0] for rows in (15, 18)] == ["few", "many"]


def test_the_decision_names_both():
    _, layer = layer_of()
    parts = {part.label: part for part in layer.route_decision.verdict.parts}
    assert parts["decode"].decision.chosen == "many.kernel" and parts["decode"].most_rows is None
    small = parts["decode <= 15 rows"]
    assert (small.decision.chosen, small.decision.request.rows, small.most_rows, small.weight) == ("few.kernel", 15, 15, 0)
    others = (part for verdict in layer.route_decision.verdicts[1:] for part in verdict.parts)
    assert not any(part.most_rows for part in others), "only of the chosen route"
    assert "sparse_decode: few.kernel" in layer.explain() and "sparse_decode: many.kernel" in layer.explain()


@pytest.mark.parametrize(
    "changes",
    [
        {"us": {}},
        {"max_num_reqs": 7},
        {"us": {"many": US["many"]}},
        {"us": {name: {256: us[256]} for name, us in US.items()}},
        {"kinds": (SPLIT_KV, None)},
        {"kinds": (None, SPLIT_KV)},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_one_serves_all_where_nothing_else_is_known_or_may(changes: dict):
    _, layer = layer_of(**changes)
    assert not any(part.most_rows for part in layer.route_decision.verdict.parts)
