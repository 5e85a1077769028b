# SPDX-License-Identifier: Apache-2.0
"""Which body of `nvidia.native_v4` a call gets, and what it hands to it; no GPU takes part."""

from __future__ import annotations

import pytest
import torch
from machines import H200
from native_model import Model, stand_ins
from test_nvidia_native import SCALE, cache, check_calls, problem
from test_nvidia_native_sm80 import stand_in as older_stand_in
from torch_reference import sparse_decode as reference

from mla_portable.contracts import Request, ScheduleLimits
from mla_portable.layouts import FP8_V4
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_nvidia.native import bind_v4
from mla_portable_nvidia.native.bind_v4 import BODIES, Serves, V4Attention, body_of, v4_implementations
from mla_portable_nvidia.native.choice import BUILDS, MANY
from mla_portable_nvidia.native.sparse_decode import Build

REQUEST = Request(SPARSE_DECODE, H200, kv_layout=FP8_V4.name, num_heads=20, topk=100, block_size=16, lse=True)
TABLE = (Serves("sm90", heads=32, rows=4), Serves("sm90", heads=16, keys=100), Serves("sm90", heads=64, rows=2), Serves("sm80"))


def stand_in(build, *launch):
    return (Model if isinstance(build, Build) else older_stand_in)(build, *launch)


@pytest.fixture
def models(monkeypatch):
    with stand_ins(monkeypatch, stand_in) as found:
        yield found


def kernels(models):
    """Of the launches since the last call."""
    found = {build.kernel for build, model in models.items() if model.launches} - {"merge_splits"}
    for model in models.values():
        model.launches.clear()
    return found


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "body"),
    [
        *((32, 4, 10**6, "sm90"), (32, 5, 1, "sm80"), (16, 5, 100, "sm90"), (16, 5, 101, "sm80"), (17, 5, 100, "sm80")),
        *((64, 2, 9999, "sm90"), (65, 1, 1, "sm80"), (128, 1, 1, "sm80"), (10**4, 10**6, 10**6, "sm80")),
    ],
)
def test_the_first_line_that_holds_a_call_decides(heads, rows, keys, body):
    assert body_of(heads, rows, keys, TABLE) == body


def test_the_table_holds_every_call():
    assert BODIES[-1] == Serves(BODIES[-1].body)


def test_a_call_goes_to_its_body_with_and_without_a_second_cache(models):
    torch.manual_seed(0)
    kv = cache(7, 16, 48, layout=FP8_V4.name)
    bound = V4Attention(REQUEST, TABLE)
    for rows, kernel in ((2, "sparse_decode_fp8"), (4, "sparse_decode_fp8"), (5, "sparse_decode_sm80")):
        q, indices = problem(rows, 1, 20, 100, 112, width=512)
        lengths = torch.randint(0, 101, (rows, 1), dtype=torch.int32)
        check_calls(bound.decode, q, kv, indices, lengths, rtol=1e-2, atol=4e-3)
        assert kernels(models) == {kernel}
    extra = cache(30, 2, 576, layout=FP8_V4.name)
    bound = V4Attention(REQUEST.but(extra_topk=60, extra_block_size=2, num_heads=16), TABLE)
    for width, kernel in ((100, "sparse_decode_sm80"), (40, "sparse_decode_fp8")):  # keys of both lists count
        q, indices = problem(6, 1, 16, width, 112, width=512)
        second = {"extra_kv_cache": extra, "extra_indices": problem(6, 1, 16, 60, 60)[1]}
        out, lse = bound.decode(q, kv, indices, softmax_scale=SCALE, **second)
        wanted, wanted_lse = reference(q, kv, indices, softmax_scale=SCALE, **second)
        torch.testing.assert_close(out, wanted, rtol=1e-2, atol=4e-3)
        torch.testing.assert_close(lse, wanted_lse)
        assert kernels(models) == {kernel}


def test_many_heads_take_the_kernel_for_them(models):
    q, indices = problem(2, 1, 64, 600, 112, width=512)
    V4Attention(REQUEST.but(num_heads=64), TABLE).decode(q, cache(7, 16, 48, layout=FP8_V4.name), indices, softmax_scale=SCALE)
    assert kernels(models) <= {MANY.kernel, "sparse_decode_fp8"}
    assert set(BUILDS[FP8_V4.name]) <= set(models)


def test_a_schedule_is_the_older_body_s_and_the_others_take_none(models):
    torch.manual_seed(0)
    limits = ScheduleLimits(torch.device("cpu"), 20, 1000, 8, num_sms=132, arch="sm90", request=REQUEST.but(topk=1000))
    offered = next(each for each in v4_implementations() if each.primitive is SPARSE_DECODE)
    planner = offered.schedule_kind.planner(limits)
    bound, kv = V4Attention(REQUEST.but(topk=1000), TABLE), cache(7, 16, 48, layout=FP8_V4.name)
    for rows, kernel in ((3, "sparse_decode_fp8"), (7, "sparse_decode_sm80")):
        q, indices = problem(rows, 1, 20, 1000, 112, width=512)
        out, _ = bound.decode(q, kv, indices, softmax_scale=SCALE, schedule=planner.get(rows, 1))
        torch.testing.assert_close(out, reference(q, kv, indices, softmax_scale=SCALE)[0], rtol=1e-2, atol=4e-3)
        assert kernels(models) == {kernel}


def test_batch_invariant_rows_have_one_body(models):
    bound, kv = V4Attention(REQUEST.but(batch_invariant=True), TABLE), cache(7, 16, 48, layout=FP8_V4.name)
    for rows in (1, 4, 9):
        q, indices = problem(rows, 1, 20, 100, 112, width=512)
        bound.decode(q, kv, indices, softmax_scale=SCALE)
        assert kernels(models) == {"sparse_decode_sm80"}


def test_bodies_that_no_line_has_for_these_heads_are_not_compiled(models):
    V4Attention(REQUEST.but(num_heads=100), TABLE)
    assert {build.kernel for build in models} == {"sparse_decode_sm80", "merge_splits"}


def test_what_ships_serves_both_primitives(models):
    q, indices = problem(3, 1, 20, 100, 112, width=512)
    kv = cache(7, 16, 48, layout=FP8_V4.name)
    wanted, _ = reference(q, kv, indices, softmax_scale=SCALE)
    names = {each.primitive: each for each in v4_implementations()}
    assert {each.name for each in names.values()} == {"nvidia.native_v4"}
    got, _ = names[SPARSE_DECODE].bind(REQUEST)(q, kv, indices, softmax_scale=SCALE)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=4e-3)
    prefill = bind_v4.bind_sparse_prefill(REQUEST.but(primitive=SPARSE_PREFILL))
    got, _ = prefill(q[:, 0], kv, indices[:, 0], softmax_scale=SCALE)
    torch.testing.assert_close(got, wanted[:, 0], rtol=1e-2, atol=4e-3)
