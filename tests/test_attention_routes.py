# SPDX-License-Identifier: Apache-2.0
"""Which route serves a layer: ranking, forced backends, and what memory costs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace

import pytest
import torch
from attention_steps import (
    FLASH,
    FLASH_PREFILL,
    MOVERS,
    PLODDING,
    PORTABLE,
    REFERENCE,
    ROUTES,
    SLOW,
    SPEC,
    VENDOR_BF16,
    make_step,
    plan_for,
    route_of,
)
from machines import H200, Costs
from recorder import Recorder

from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.choose import Registry, use
from mla_portable.contracts import (
    ContextShare,
    Implementation,
    Request,
    UnsupportedRequest,
)
from mla_portable.planner import PlannerConfig
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT, MERGE_STATES, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES


@pytest.mark.parametrize(
    ("plugins", "changes", "route"),
    [
        ((FLASH, FLASH_PREFILL, PORTABLE, SLOW), {"num_heads": 16}, "fused"),
        ((FLASH, FLASH_PREFILL, PORTABLE, SLOW), {"num_heads": 64}, "split"),
        ((FLASH, FLASH_PREFILL, PORTABLE, SLOW), {"num_heads": 64, "kv_layout": "bf16", "scale_format": None}, "direct"),
        ((PORTABLE, SLOW), {"num_heads": 16}, "direct"),
        ((SLOW,), {}, "direct"),
        ((VENDOR_BF16, MOVERS, SLOW), {}, "upconvert"),
        ((VENDOR_BF16, PORTABLE, SLOW), {}, "split"),
        ((VENDOR_BF16, MOVERS, PLODDING, SLOW), {}, "split"),
        ((FLASH, FLASH_PREFILL, PORTABLE, SLOW), {"num_heads": 16, "route": "split"}, "split"),
    ],
    ids=[
        "few heads for FlashMLA",
        "many heads for FlashMLA",
        "a bf16 cache",
        "portable kernels",
        "the reference alone",
        "bf16 kernels, FP8 by the reference only",
        "bf16 kernels, FP8 by portable ones",
        "bf16 kernels, FP8 by plodding ones: better than to gather in every step",
        "forced",
    ],
)
def test_route_is_ranked_by_what_serves_it(plugins, changes, route):
    assert route_of(*plugins, **changes).route == route


def test_without_a_decode_kernel_prefill_serves_all_tokens():
    kernels = Recorder("vendor.sparse", primitives=(SPARSE_PREFILL, CONVERT_INDICES), support={"kv_layouts": ("bf16",)})
    layer = route_of(kernels, kv_layout="bf16", scale_format=None)
    step = make_step("decodes and prefills in chunks", "bf16")
    layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    assert layer.route == "direct"
    assert [(name, args[0].shape[0]) for name, args, _ in kernels.calls] == [("convert_indices", 21), ("sparse_prefill", 21)]
    with pytest.raises(UnsupportedRequest) as caught:
        layer.cache_write(step.q[:, 0, :512], step.q[:, 0, 512:], step.kv_cache, torch.zeros(21, dtype=torch.int64))
    assert caught.value.decision.request.primitive is CACHE_WRITE


APART = [("sparse_decode", 2), ("sparse_prefill", 19)]


@pytest.mark.parametrize(
    ("prefills_as", "changes", "batch", "calls"),
    [
        ("vendor.sparse", {}, "decodes and prefills in chunks", [("sparse_prefill", 21)]),
        ("vendor.sparse", {}, "decodes", [("sparse_decode", 3)]),
        ("vendor.sparse", {"route": "split"}, "decodes and prefills in chunks", None),
        ("vendor.sparse", {"batch_invariant": True}, "decodes and prefills in chunks", APART),
        ("vendor.other", {}, "decodes and prefills in chunks", APART),
        ("", {}, "decodes and prefills in chunks", APART),
    ],
)
def test_one_kernel_serves_a_mixed_step_in_one_call(prefills_as, changes, batch, calls):
    kernels = Recorder("vendor.sparse", support={"batch_invariant": True}, prefills_as=prefills_as)
    layer = route_of(kernels, **changes)
    step = make_step(batch, "fp8_ds_mla")
    layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    attended = [(name, args[0].shape[0]) for name, args, _ in kernels.calls if name.startswith("sparse")]
    if calls is None:
        assert attended[0] == ("sparse_decode", 2) and sum(rows for _, rows in attended) == 21
    else:
        assert attended == calls


def test_a_bf16_cache_is_not_copied_to_bf16_rows():
    verdicts = {v.route: v for v in route_of(PORTABLE, kv_layout="bf16", scale_format=None).route_decision.verdicts}
    for route in ("split", "upconvert"):
        assert [reason.subject for reason in verdicts[route].reasons] == ["kv_layout"]
    assert verdicts["direct"].can_run and verdicts["fused"].can_run


def test_the_decision_tells_why():
    layer = route_of(FLASH, FLASH_PREFILL, PORTABLE, SLOW, num_heads=16)
    decision = layer.route_decision
    assert [verdict.route for verdict in decision.verdicts] == ["fused", "split", "direct", "upconvert"]
    assert decision.verdicts[0].cost == pytest.approx(1.5 * 10)
    text = layer.explain()
    assert text.startswith("route: fused (automatic)")
    assert "fewer than 32 heads" in text
    assert "gather portable.kernels 50 x 0.02" in text
    assert "sparse_decode: flash.mla" in text
    assert [route["route"] for route in decision.as_dict()["routes"]] == ["fused", "split", "direct", "upconvert"]


def test_no_route_is_an_error_with_the_reasons_against_each():
    narrow = Recorder("narrow.decode", primitives=(SPARSE_DECODE,), support={"num_heads": (64,)})
    with pytest.raises(UnsupportedRequest) as caught:
        route_of(narrow)
    text = str(caught.value)
    for route in ROUTES:
        assert f"  {route}" in text
    assert "num_heads 3 (supports 64)" in text
    assert "convert_indices not served" in text
    assert caught.value.decision.chosen is None
    assert not any(verdict.can_run for verdict in caught.value.route_decision.verdicts)


def test_a_forced_route_never_falls_back():
    with pytest.raises(UnsupportedRequest, match="route 'upconvert' cannot serve") as caught:
        route_of(PORTABLE, route="upconvert", graph=True)
    (verdict,) = caught.value.route_decision.verdicts
    assert [reason.subject for reason in verdict.reasons] == ["graph"]


# a forced backend holds on the route that serves


NARROW = Recorder("narrow.decode", primitives=(SPARSE_DECODE,), support={"num_heads": (64,)})
CONTROLS = ("argument", "use", "environment")


def forced_layer(control: str, wish: dict[str, str], *plugins: Recorder, **changes) -> SparseMLAAttention:
    """A layer for which `wish` (primitive or "all" -> name) is forced by one of CONTROLS."""
    environ = {}
    if control == "environment":
        environ = {"MLA_PORTABLE_BACKEND" + ("" if k == "all" else f"_{k.upper()}"): name for k, name in wish.items()}
    named = [(plugin.name.partition(".")[0], plugin) for plugin in plugins]
    registry = Registry(plugins=named, facts={"cpu": H200}, environ=environ, probe=False)
    argument = (wish.get("all") or wish) if control == "argument" else None
    context = use(wish.get("all"), **{k: v for k, v in wish.items() if k != "all"}) if control == "use" else nullcontext()
    with context:
        return SparseMLAAttention(replace(SPEC, **changes), device="cpu", registry=registry, backend=argument)


def chosen_by(layer: SparseMLAAttention) -> dict[str, str | None]:
    return {part.role: part.decision.chosen for part in layer.route_decision.verdict.parts}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
def test_no_route_evades_a_forced_decode_that_cannot_serve(control: str, layout: str):
    wish, changes = {"sparse_decode": "narrow"}, {"kv_layout": layout, "scale_format": None}
    with pytest.raises(UnsupportedRequest) as caught:
        forced_layer(control, wish, NARROW, PORTABLE, SLOW, **changes)
    verdicts = {verdict.route: verdict for verdict in caught.value.route_decision.verdicts}
    assert set(verdicts) == set(ROUTES)
    for route, verdict in verdicts.items():
        assert any(reason.subject == "sparse_decode" for reason in verdict.reasons), route
    assert "num_heads 3 (supports 64)" in str(caught.value)
    assert caught.value.decision.request.primitive is SPARSE_DECODE
    served = forced_layer(control, wish, NARROW, PORTABLE, num_heads=64, **changes)
    assert chosen_by(served)["decode"] == "narrow.decode"


@pytest.mark.parametrize("control", CONTROLS)
def test_prefill_is_not_left_to_the_decode_kernel_where_a_backend_is_forced_for_it(control: str):
    plugins = (FLASH, FLASH_PREFILL, PORTABLE, SLOW)
    assert route_of(*plugins, num_heads=16).route == "fused"
    layer = forced_layer(control, {"sparse_prefill": "slow"}, *plugins, num_heads=16)
    assert layer.route != "fused" and chosen_by(layer)["prefill"] == "slow.torch"
    assert chosen_by(layer)["decode"] == "flash.mla"
    fused = next(v for v in layer.route_decision.verdicts if v.route == "fused")
    assert "sparse_prefill forced to slow by" in str(fused) and "cannot serve" not in str(fused)
    bf16_only = forced_layer(control, {"sparse_prefill": "flashp"}, *plugins, num_heads=16)
    fused = next(v for v in bf16_only.route_decision.verdicts if v.route == "fused")
    assert bf16_only.route == "split" and "cannot serve" not in str(fused), "it does on another route"
    with pytest.raises(UnsupportedRequest, match="route 'fused' cannot serve"):
        forced_layer(control, {"sparse_prefill": "slow"}, *plugins, num_heads=16, route="fused")
    same = forced_layer(control, {"all": "portable"}, *plugins, num_heads=16, route="fused")
    assert set(chosen_by(same).values()) == {"portable.kernels"}, "it is forced for what takes the place, too"


def test_a_forced_gather_that_cannot_serve_is_not_evaded_either():
    lame = Recorder("lame.gather", primitives=(GATHER_UPCONVERT,), support={"block_sizes": (1,)})
    with pytest.raises(UnsupportedRequest, match=r"forced to lame by argument \(left out here, and lame cannot .*block_size 8"):
        forced_layer("argument", {"gather_upconvert": "lame"}, lame, PORTABLE)
    plain = {"kv_layout": "bf16", "scale_format": None}
    assert forced_layer("argument", {"gather_upconvert": "lame"}, lame, PORTABLE, **plain).route == "direct"
    assert forced_layer("argument", {"gather_upconvert": "slow"}, SLOW, PORTABLE).route == "direct", "not needed"


@pytest.mark.parametrize("control", CONTROLS)
def test_a_name_that_is_forced_for_everything_holds_for_what_it_offers(control: str):
    plugins = (FLASH, PORTABLE, SLOW)
    layer = forced_layer(control, {"all": "flash"}, *plugins, num_heads=64, route="split")
    rest = "portable.kernels"
    assert chosen_by(layer) == {"convert": rest, "decode": "flash.mla", "prefill": rest, "gather": rest}
    decisions = {part.role: part.decision for part in layer.route_decision.verdict.parts}
    assert (decisions["decode"].forced, decisions["convert"].forced) == ("flash", None)
    assert decisions["convert"].control == "default"
    assert layer.write_decision.chosen == rest
    with pytest.raises(UnsupportedRequest, match="convert_indices not offered"):
        forced_layer(control, {"convert_indices": "flash"}, *plugins)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_name_that_offers_nothing_of_a_layer_is_refused(control: str):
    merger = Recorder("merger.only", primitives=(MERGE_STATES,))
    with pytest.raises(UnsupportedRequest, match="merger offers merge_states"):
        forced_layer(control, {"all": "merger"}, merger, PORTABLE)


def test_under_a_name_that_does_not_offer_a_primitive_the_next_wish_holds():
    named = [(plugin.name.partition(".")[0], plugin) for plugin in (FLASH, PORTABLE, SLOW)]
    environ = {"MLA_PORTABLE_BACKEND_CONVERT_INDICES": "slow", "MLA_PORTABLE_BACKEND_SPARSE_DECODE": "slow"}
    registry = Registry(plugins=named, facts={"cpu": H200}, environ=environ, probe=False)
    layer = SparseMLAAttention(replace(SPEC, num_heads=64, route="split"), device="cpu", registry=registry, backend="flash")
    decisions = {part.role: part.decision for part in layer.route_decision.verdict.parts}
    assert (decisions["convert"].chosen, decisions["convert"].control) == ("slow.torch", "MLA_PORTABLE_BACKEND_CONVERT_INDICES")
    assert (decisions["decode"].chosen, decisions["decode"].control) == ("flash.mla", "argument")
    single = registry.decide(decisions["convert"].request, backend="flash")
    assert single.chosen is None and single.verdicts[0].reasons[0].given == "not offered", "a call names one primitive"


@pytest.mark.parametrize("control", CONTROLS)
def test_a_name_may_serve_all_tokens_by_another_primitive_of_its_own(control: str):
    attention = (SPARSE_DECODE, SPARSE_PREFILL)
    vendor = Recorder("vendor.bf16", support={"kv_layouts": ("bf16",)}, primitives=attention)
    layer = forced_layer(control, {"all": "vendor"}, vendor, MOVERS, SLOW)
    assert layer.route == "upconvert" and chosen_by(layer)["prefill"] == "vendor.bf16"


# what a route costs


def priced(costs: dict[str, float], memory_bytes: int = 0, plugins=(PORTABLE,), **changes) -> SparseMLAAttention:
    """A layer on kernels whose cost was measured by role: decode, cache (prefill on FP8), rows (prefill on bf16), gather."""

    def table(implementation: Implementation, request: Request) -> tuple[float, str] | None:
        role = {SPARSE_DECODE: "decode", GATHER_UPCONVERT: "gather"}.get(request.primitive)
        if request.primitive is SPARSE_PREFILL:
            role = "rows" if request.kv_layout == "bf16" else "cache"
        found = costs.get(role or "")
        return None if found is None else (found, f"measured with {request.rows} rows;")

    facts = {"cpu": replace(H200, memory_bytes=memory_bytes)}
    named = [(plugin.name.partition(".")[0], plugin) for plugin in plugins]
    registry = Registry(plugins=named, facts=facts, environ={}, probe=False, costs=Costs(table))
    return SparseMLAAttention(replace(SPEC, **changes), device="cpu", registry=registry)


MEASURED = {"decode": 10.0, "cache": 10.45, "rows": 10.0, "gather": 10.0}


def test_a_tie_of_routes_goes_to_the_one_without_a_workspace():
    layer = priced(MEASURED)
    direct, split = layer.route_decision.verdicts[:2]
    assert (direct.route, direct.cost) == ("direct", 20.45) and (split.route, split.cost) == ("split", 20.2)
    assert "a tie, the smaller workspace decides" in str(direct) and "a tie" in str(split)
    assert priced(MEASURED | {"cache": 30.0, "rows": 19.4}).route == "fused", "30 against 29.6 of split"
    slower = priced(MEASURED | {"cache": 10.55})
    assert slower.route == "split" and "a tie" not in slower.explain(), "more than 3 % of one of the two terms"


def test_a_workspace_has_a_price():
    costs = MEASURED | {"cache": 11.5}
    layer = priced(costs, memory_bytes=1 << 40)
    verdict = layer.route_decision.verdict
    assert layer.route == "split" and layer.buffers.workspace is not None
    assert verdict.workspace_bytes == layer.buffers.workspace.nbytes > 0
    assert layer.route_decision.as_dict()["routes"][0]["workspace_bytes"] == verdict.workspace_bytes
    small = priced(costs, memory_bytes=10 * verdict.workspace_bytes)
    verdicts = {v.route: v for v in small.route_decision.verdicts}
    assert small.route == "direct" and verdicts["split"].cost == pytest.approx(20.2 * 1.1)
    assert "x 1.1 = 22.22 (workspace of" in str(verdicts["split"]) and "10.0% of the memory" in str(verdicts["split"])
    assert verdicts["direct"].workspace_bytes == 0


def test_a_route_with_an_unmeasured_part_ranks_behind_all_that_were_measured():
    layer = priced({"decode": 90.0, "cache": 90.0, "gather": 10.0})
    assert [v.route for v in layer.route_decision.verdicts][:2] == ["direct", "fused"]
    measured = {v.route: v.measured for v in layer.route_decision.verdicts}
    assert measured == {"direct": True, "fused": True, "split": False, "upconvert": False}
    behind = priced({"decode": 10.0, "rows": 10.0, "gather": 10.0}).route_decision
    assert [v.route for v in behind.verdicts if v.measured] == ["split", "fused"], "a fixed cost was not measured"


def test_a_gather_of_little_weight_need_not_have_been_timed():
    """As on an H100, whose times are of attention alone."""
    layer = priced({"decode": 10.0, "cache": 15.0, "rows": 10.0})
    costs = {v.route: (v.measured, v.cost) for v in layer.route_decision.verdicts}
    assert layer.route == "split" and costs["split"] == (True, 21.0) and costs["direct"] == (True, 25.0)
    assert not costs["upconvert"][0], "there it weighs as much as the rest"


def test_a_declared_cost_does_not_outrank_what_was_measured():
    fast = Recorder("fast.rows", preference=1.0, support={"kv_layouts": ("bf16",)}, primitives=(SPARSE_PREFILL,))
    timed = {"decode": 10.0, "cache": 10.0, "gather": 10.0}
    assert priced(timed, plugins=(PORTABLE, fast)).route == "direct"


def test_a_route_is_chosen_for_the_rows_and_the_lse_of_its_spec():
    for max_num_reqs, need_lse in ((1, True), (8, False)):
        layer = priced(MEASURED, max_num_reqs=max_num_reqs, decode_query_len=2, need_lse=need_lse)
        decode = layer.route_decision.verdict.part("decode")
        assert decode is not None and decode.decision.request.rows == 2 * max_num_reqs
        text = layer.explain()
        assert f"rows={2 * max_num_reqs} " in text and ("lse=yes" in text) is need_lse
        assert f"measured with {2 * max_num_reqs} rows" in text


def test_planner_config_is_that_of_the_spec():
    """Every field that both have, each with a value that is not its default."""
    changes = {
        "num_heads": 3,
        "topk": 24,
        "max_num_reqs": 5,
        "max_num_tokens": 40,
        "max_model_len": 32,
        "block_size": 4,
        "prefill_workspace_tokens": 33,
        "batch_invariant": True,
        "max_scratch_bytes": 1 << 20,
        "share": ContextShare(2, 1),
    }
    spec = replace(SPEC, **changes, decode_query_len=2)
    config = SparseMLAAttention(spec, device="cpu", registry=REFERENCE).planner_config()
    assert {name: getattr(config, name) for name in changes} == changes and config.decode_threshold == 2
    both = {field.name for field in fields(AttentionSpec)} & {field.name for field in fields(PlannerConfig)}
    assert both == changes.keys() | {"route", "extra_topk"}, "a layer has one cache"


def test_planner_config_follows_the_decoder():
    config = route_of(FLASH, FLASH_PREFILL, PORTABLE, num_heads=64).planner_config()
    assert (config.route, config.schedule_kind, config.num_heads) == ("split", FLASHMLA_TILES, 64)
    assert (config.arch, config.num_sms, config.block_size) == ("sm90", 132, SPEC.block_size)
    assert config.decode_request is not None and config.decode_request.num_heads == 64
    assert config.workspace_tokens == SPEC.workspace_rows
    assert route_of(PORTABLE).planner_config().workspace_tokens == 0
