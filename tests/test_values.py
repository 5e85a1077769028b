# SPDX-License-Identifier: Apache-2.0
"""Fields of Request, Support, schedules, specs and configurations that mean nothing are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from arguments import split_schedule, tile_schedule
from attention_steps import MODEL_LEN, SPEC
from machines import CPU, H200

from mla_portable.contracts import Features, Implementation, InvalidArgument, PluginError, Promises, Request, Support
from mla_portable.planner import Planner, PlannerConfig
from mla_portable.primitives import MERGE_STATES, SPARSE_DECODE
from mla_portable.times.prefill import PrefillTimes
from mla_portable.times.rows import Times
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES


def request(**changes: Any) -> Request:
    return Request(**{"primitive": SPARSE_DECODE, "device": CPU, **changes})


def support(**changes: Any) -> Support:
    return Support(**{"source": "a test", **changes})


CONFIG = PlannerConfig(
    device="cpu", route="split", num_heads=16, topk=128, max_num_reqs=16, max_num_tokens=64, max_model_len=40,
    prefill_workspace_tokens=44,
)  # fmt: skip
TIMES = PrefillTimes(Times({1: 1.0}), Times({1: 1.0}), Times({1: 1.0}))
spec, config = partial(replace, SPEC), partial(replace, CONFIG)
NO_INTEGERS = (1.5, True, "8", math.nan, [8], torch.tensor(8), np.int64(8))


@pytest.mark.parametrize("value", NO_INTEGERS, ids=[type(value).__name__ for value in NO_INTEGERS])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (request, "num_heads"),
        (request, "rows"),
        (support, "topk_multiple"),
        (support, "max_heads"),
        (split_schedule, "num_splits"),
        (tile_schedule, "rows_per_call"),
        (spec, "topk"),
        (spec, "prefill_workspace_tokens"),
        (config, "num_heads"),
        (config, "few_tokens"),
    ],
)
def test_integer_fields_hold_integers(make: Callable[..., object], field: str, value: Any):
    with pytest.raises(InvalidArgument, match="expected an integer of at least") as caught:
        make(**{field: value})
    assert caught.value.argument == field


@pytest.mark.parametrize("value", ["no", 0, None])
@pytest.mark.parametrize(
    ("make", "field"),
    [(request, "lse"), (request, "uneven_blocks"), (support, "graph"), (spec, "need_lse"), (config, "batch_invariant")],
)
def test_flags_are_true_or_false(make: Callable[..., object], field: str, value: Any):
    with pytest.raises(InvalidArgument, match="expected True or False") as caught:
        make(**{field: value})
    assert caught.value.argument == field


@pytest.mark.parametrize(
    ("make", "changes", "argument"),
    [
        (request, {"topk": 0}, "topk"),
        (request, {"rows": -1}, "rows"),
        (request, {"num_heads": 2**31}, "num_heads"),
        (request, {"kv_layout": 3}, "kv_layout"),
        (request, {"scale_format": "e8m0"}, "scale_format"),
        (request, {"cache_alignment": 12}, "cache_alignment"),
        (request, {"device": "cpu"}, "device"),
        (request, {"primitive": "sparse_decode"}, "primitive"),
        (partial(replace, CPU), {"num_sms": "132"}, "num_sms"),
        (partial(replace, CPU), {"memory_bytes": -1}, "memory_bytes"),
        (partial(replace, CPU), {"arch": ""}, "arch"),
        (partial(replace, CPU), {"name": 5}, "name"),
        (partial(replace, CPU), {"has_bf16": None}, "has_bf16"),
        (partial(replace, CPU), {"libraries": {"torch": "2.13"}}, "libraries"),
        (support, {"source": 5}, "source"),
        (support, {"block_size_multiple": 0}, "block_size_multiple"),
        (support, {"scale_formats": None}, "scale_formats"),
        (support, {"scale_formats": "pow2"}, "scale_formats"),
        (support, {"num_heads": 16}, "num_heads"),
        (support, {"num_heads": (0, "x")}, "num_heads"),
        (support, {"num_heads": (16, True)}, "num_heads"),
        (support, {"padded_heads": None}, "padded_heads"),
        (support, {"block_sizes": (None,)}, "block_sizes"),
        (support, {"block_sizes": [64]}, "block_sizes"),
        (support, {"max_block_size": 0}, "max_block_size"),
        (support, {"topks": (0,)}, "topks"),
        (support, {"topks": None}, "topks"),
        (support, {"device_types": "cuda"}, "device_types"),
        (support, {"archs": (90,)}, "archs"),
        (support, {"kv_layouts": 5}, "kv_layouts"),
        (support, {"cache_alignment": 0}, "cache_alignment"),
        (split_schedule, {"num_splits": 0}, "num_splits"),
        (tile_schedule, {"num_sm_parts": 0}, "num_sm_parts"),
        (spec, {"num_heads": 0}, "num_heads"),
        (spec, {"decode_query_len": 0}, "decode_query_len"),
        (spec, {"max_model_len": 10**400}, "max_model_len"),
        (spec, {"max_scratch_bytes": -1}, "max_scratch_bytes"),
        (spec, {"softmax_scale": 0.0}, "softmax_scale"),
        (spec, {"softmax_scale": 1e39}, "softmax_scale"),
        (spec, {"softmax_scale": None}, "softmax_scale"),
        (spec, {"kv_layout": "fp8"}, "kv_layout"),
        (spec, {"kv_layout": ["bf16"]}, "kv_layout"),
        (spec, {"scale_format": "e8m0"}, "scale_format"),
        (spec, {"route": "mixed"}, "route"),
        (spec, {"cache_alignment": 32}, "cache_alignment"),
        (spec, {"prefill_workspace_tokens": 0}, "prefill_workspace_tokens"),
        (config, {"route": "mixed"}, "route"),
        (config, {"schedule_kind": "split_kv"}, "schedule_kind"),
        (config, {"max_num_tokens": -4}, "max_num_tokens"),
        (config, {"decode_threshold": 0}, "decode_threshold"),
        (config, {"num_sms": -1}, "num_sms"),
        (config, {"max_scratch_bytes": -1}, "max_scratch_bytes"),
        (config, {"prefill_workspace_tokens": 39}, "prefill_workspace_tokens"),
        (config, {"prefill_workspace_tokens": 0, "route": "upconvert"}, "prefill_workspace_tokens"),
        (config, {"prefill_workspace_tokens": 0, "prefill_times": TIMES}, "prefill_workspace_tokens"),
        (config, {"route": "direct", "prefill_times": TIMES}, "prefill_times"),
        (config, {"max_model_len": 2**30, "prefill_workspace_tokens": None}, "prefill_workspace_tokens"),
    ],
)
def test_fields_stay_in_their_range(make: Callable[..., object], changes: dict[str, Any], argument: str):
    with pytest.raises(InvalidArgument) as caught:
        make(**changes)
    assert caught.value.argument == argument


@pytest.mark.parametrize("field", [field.name for field in fields(Support)])
def test_what_a_support_accepts_can_be_evaluated(field: str):
    """A registry asks every declaration at every choice, so what it cannot evaluate is refused when the value is made."""
    values: list[Any] = [None, -1, 0, 1, 5, 1.5, math.nan, 10**400, True, "", "x", "low", b"x", object(), np.int64(5), range(3)]
    items = [None, 0, 16, 1.5, True, "bf16", "pow2", "x", (192, 128), (192,), (0, 1), ("a", 1), [192, 128]]
    values += [kind(items[:n]) for kind in (tuple, list) for n in (0, 2)]
    values += [kind((item,)) for kind in (tuple, list) for item in items] + [{}, {16}, {"a": 1}]
    asks: dict[str, Any] = {"bool": True, "int": 1, "int | None": 1}
    most = {each.name: asks[str(each.type)] for each in fields(Request) if each.type in asks}
    most |= {"kv_layout": "fp8_ds_mla", "scale_format": "amax", "context_parallel": False}
    shared = {"context_parallel": True, "extra_topk": None, "extra_block_size": None, "extra_lengths": False}
    requests = request(), request(**most), request(**most | shared), request(**most, device=H200)
    made = 0
    for value in values:
        try:
            declared = support(**{field: value})
        except InvalidArgument:
            continue
        made += 1
        for asked in requests:
            assert all(str(reason) for reason in declared.reasons(asked))
        hash(declared)
    assert made, f"no value was accepted for {field}"


@pytest.mark.parametrize("feature", fields(Features), ids=lambda each: each.name)
def test_a_feature_that_is_not_declared_is_a_reason_against_a_call_that_needs_it(feature: Field[Any]):
    plain, lacks = request(device=H200), support(**{feature.name: False})
    needs = plain.but(**{feature.name: True})
    assert [(each.subject, each.remedy) for each in lacks.reasons(needs)] == [(feature.name, feature.metadata["remedy"])]
    assert not lacks.reasons(plain) and not replace(lacks, **{feature.name: True}).reasons(needs)


def test_a_request_says_its_sizes_then_its_features_and_promises_then_the_graph():
    told = request(graph=True, finite_values=True, lse=True, nope=True, topk=64, uneven_blocks=True)
    assert str(told) == f"topk=64 uneven_blocks=yes lse=yes nope=yes finite_values=yes graph=yes on {CPU}"
    flags = [each.name for each in (*fields(Features), *fields(Promises))]
    assert all(getattr(request(), name) is False for name in flags)


def test_an_implementation_wants_callables():
    made = Implementation("acme.v1", MERGE_STATES, support(), lambda asked: None)
    for field in ("bind", "check"):
        with pytest.raises(PluginError, match=f"acme.v1 / merge_states: {field} must be callable, got int"):
            replace(made, **{field: 5})


TILES: dict[str, Any] = {
    "topk": 2048, "max_num_reqs": 512, "max_num_tokens": 1024, "schedule_kind": FLASHMLA_TILES, "num_sms": 132, "arch": "sm90",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (TILES | {"num_sms": 0}, "num_sms: got 0, expected 1 or more"),
        (TILES | {"num_heads": 144}, "num_heads: got 144, expected at most 128, or a multiple of 64"),
        (TILES | {"arch": "sm80"}, "arch: got 'sm80'"),
        (TILES | {"max_scratch_bytes": 1 << 20}, "max_scratch_bytes: got 1048576, expected at least 17466624"),
        (TILES | {"batch_invariant": True}, "batch_invariant: got True, expected False for schedule_kind flashmla_tiles"),
        ({"device": "cuda:99"}, "Planner: device: got .*expected a device that torch can use here"),
        ({"device": None}, "Planner: device: got .*expected a device that torch can use here"),
        ({"device": "meta"}, "Planner: device: got 'meta', expected a device that torch can use here"),
    ],
)
def test_a_configuration_that_no_planner_can_serve_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(InvalidArgument, match=message):
        Planner(config(**changes))


def test_a_planner_wants_a_configuration():
    with pytest.raises(InvalidArgument, match="Planner: config: got None, expected a PlannerConfig"):
        Planner(None)
    with pytest.raises(InvalidArgument, match="Planner: make_fence: got 5"):
        Planner(CONFIG, make_fence=5)


def test_workspace_of_each_route():
    assert spec(prefill_workspace_tokens=None).workspace_rows == 5 * MODEL_LEN
    default = config(prefill_workspace_tokens=None)
    assert Planner(default).workspace_tokens == config(route="upconvert", prefill_workspace_tokens=None).workspace_tokens == 200
    assert config(route="direct", prefill_workspace_tokens=0).workspace_tokens == config(route="fused").workspace_tokens == 0
    assert CONFIG.workspace_tokens == 44


@pytest.mark.parametrize(
    ("declared", "asked", "subjects"),
    [
        ({}, {"cache_alignment": 1, "uneven_blocks": True}, []),
        ({"cache_alignment": 16, "needs_whole_rows": True}, {}, []),
        ({"cache_alignment": 16}, {"cache_alignment": 8}, ["cache_alignment"]),
        ({"cache_alignment": 4}, {"cache_alignment": 8}, []),
        ({"needs_whole_rows": True}, {"uneven_blocks": True}, ["uneven_blocks"]),
        ({"kv_layouts": ("fp8_ds_mla",), "scale_formats": ("pow2",)}, {"kv_layout": "fp8_ds_mla"}, ["scale_format"]),
        ({"padded_heads": (64, 128)}, {"num_heads": 64}, []),
        ({"padded_heads": (64, 128)}, {"num_heads": 1}, []),
        ({"padded_heads": (64, 128)}, {"num_heads": 129}, ["num_heads"]),
        ({}, {"batch_invariant": True}, ["batch_invariant"]),
        ({"head_dims": ((192, 128), (256, 256))}, {"qk_head_dim": 256}, []),
        ({"head_dims": ((192, 128), (256, 256))}, {"qk_head_dim": 192, "v_head_dim": 128}, []),
        ({"head_dims": ((192, 128), (256, 256))}, {"qk_head_dim": 256, "v_head_dim": 128}, ["head dims"]),
        ({}, {"selection": True}, []),
        ({"selection": False}, {"selection": True}, ["selection"]),
        ({"needs_finite_values": True}, {}, ["finite_values"]),
        ({"needs_finite_values": True}, {"finite_values": True}, []),
        ({}, {"finite_values": True}, []),
        ({"needs_whole_tables": True}, {}, ["whole_tables"]),
        ({"needs_whole_tables": True}, {"whole_tables": True}, []),
        ({"needs_uniform_query_len": True}, {}, ["uniform_query_len"]),
        ({"needs_uniform_query_len": True}, {"uniform_query_len": True}, []),
        ({"max_topk": 2048, "topks": (3072, 4096)}, {"topk": 1}, []),
        ({"max_topk": 2048, "topks": (3072, 4096), "extra_cache": True}, {"topk": 4096, "extra_topk": 3072}, []),
        (
            {"max_topk": 2048, "topks": (3072, 4096), "extra_cache": True},
            {"topk": 2049, "extra_topk": 3073},
            ["topk", "extra_topk"],
        ),
        ({"topks": (2048,)}, {"topk": 2048}, []),
        ({"topks": (2048,)}, {"topk": 1024}, ["topk"]),
        ({"block_size_multiple": 16, "max_block_size": 1024}, {"block_size": 1024, "extra_block_size": 16}, []),
        (
            {"block_size_multiple": 16, "max_block_size": 64},
            {"block_size": 80, "extra_block_size": 128},
            ["block_size", "extra_block_size"],
        ),
    ],
)
def test_reasons_of_a_declaration_against_a_request(declared: dict[str, Any], asked: dict[str, Any], subjects: list[str]):
    reasons = support(device_types=("cpu",), **declared).reasons(request(**asked))
    assert [reason.subject for reason in reasons] == subjects
    assert all(reason.remedy for reason in reasons if reason.subject in ("cache_alignment", "uneven_blocks", "batch_invariant"))


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_nan_keys_is_a_flag_or_a_function(value: Any):
    with pytest.raises(InvalidArgument, match=r"nan_keys.*True or False, or a function of a Request"):
        support(nan_keys=value)
    assert support().keeps_nan(request()) and not support(nan_keys=False).keeps_nan(request())
    of_heads = support(nan_keys=lambda asked: asked.num_heads == 8)
    assert of_heads.keeps_nan(request(num_heads=8)) and not of_heads.keeps_nan(request(num_heads=4))


@pytest.mark.parametrize("pairs", [((192,),), ((0, 128),), ([192, 128],), (192, 128), [(192, 128)], 192])
def test_head_dims_are_declared_in_pairs(pairs: Any):
    with pytest.raises(InvalidArgument, match=r"head_dims.*pairs of integers"):
        support(head_dims=pairs)


LIMITS = {
    "max_topk": ("topk", 512),
    "max_heads": ("num_heads", 48),
    "max_query_len": ("query_len", 3),
    "max_block_size": ("block_size", 64),
    "topk_multiple": ("topk", 64),
    "block_size_multiple": ("block_size", 16),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_itself_is_supported_and_nothing_above_it(limit: str):
    field, most = LIMITS[limit]
    declared = support(device_types=("cpu",), **{limit: most})
    assert declared.reasons(request(**{field: most})) == ()
    (reason,) = declared.reasons(request(**{field: most + 1}))
    assert reason.subject == field and reason.given == str(most + 1) and str(most) in reason.limit


def test_values_of_k_beside_a_range_are_named_in_reason_and_remedy():
    declared = support(device_types=("cpu",), max_topk=2048, topks=(3072, 4096))
    (reason,) = declared.reasons(request(topk=2500))
    assert str(reason) == "topk 2500 (at most 2048, or one of 3072, 4096)"
    assert reason.remedy == "take K = 3072, and pad indices with -1 to it"
    (reason,) = declared.reasons(request(topk=5000))
    assert not reason.remedy
    (reason,) = support(device_types=("cpu",), topks=(2048,)).reasons(request(topk=64))
    assert (str(reason), reason.remedy) == ("topk 64 (supports 2048)", "take K = 2048, and pad indices with -1 to it")


def test_padded_heads_are_supported_up_to_the_largest():
    declared = support(device_types=("cpu",), padded_heads=(16, 64))
    assert [bool(declared.reasons(request(num_heads=heads))) for heads in (1, 16, 63, 64, 65)] == [False] * 4 + [True]
