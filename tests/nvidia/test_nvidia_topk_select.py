# SPDX-License-Identifier: Apache-2.0
"""The native topk_select: its source on a CPU through what the binding packs, the choice of its launches, its declaration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import A100, B200, H200, RTX_4090, RTX_5090
from native_model import stand_ins
from source_on_cpu import COMPILER
from topk_model import Model, parameters, shared_size

from mla_portable.contracts import InvalidArgument, MLAPortableError, Request
from mla_portable.judge.problems.topk_select import LONG, TopkSelectParams
from mla_portable.judge.problems.topk_select import topk_select as oracle
from mla_portable.primitives import TOPK_SELECT
from mla_portable_nvidia.native import checks
from mla_portable_nvidia.native import topk_select as native
from mla_portable_nvidia.native.runtime.driver import Launches
from mla_portable_nvidia.native.topk_select import FEW_ROWS, MANY_ROWS, MAX_TOPK, TopkBuild, choose, topk_implementations

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")
NAN, INF = float("nan"), float("inf")
SMALL = TopkBuild(block_threads=256, blocks_per_sm=1, batch=8)
"""Quicker to emulate than the builds that are shipped."""


@pytest.fixture
def models(monkeypatch):
    """Build -> its stand-in, for all that are bound in a test."""
    with stand_ins(monkeypatch, Model) as found:
        yield found


def bound(device=H200, topk=64):
    return native.bind_topk_select(Request(primitive=TOPK_SELECT, device=device, topk=topk))


def row(kind, n, g):
    z = torch.randn(n, generator=g)
    if kind == "ties":
        z = (2 * z).round() / 2
    elif kind == "equal":
        z.fill_(-3.5)
    elif kind == "ascending":
        z = z.sort().values
    elif kind == "holes":
        for i, value in enumerate((-INF, NAN, INF, 0.0, -0.0)):
            z[i::9] = value
    elif kind == "absent":
        z.fill_(-INF)
    elif kind == "few":
        z[torch.rand(n, generator=g) > 0.002] = -INF
    elif kind == "wide":
        z = (30 * z).exp()
    elif kind == "narrow":
        z = 1e-3 * z + 100
    elif kind == "period":
        z[::16] += 5
    elif kind == "adjacent":  # neighbours among the floats, the largest last
        z = 1 + torch.randint(2, (n,), generator=g) * 2.0**-23
        z[n // 2 :] = 1 + 2 * 2.0**-23
    elif kind == "least":  # of any float, above -inf
        z.fill_(-INF)
        z[n // 2 :] = torch.finfo(torch.float32).min
    return z


KINDS = ("plain", "ties", "equal", "ascending", "holes", "absent", "few", "wide", "narrow", "period", "adjacent", "least")


def check(model, logits, starts, ends, topk, blocks):
    """One launch of a model against the oracle; what lies beside its results must stay."""
    rows, n = logits.shape
    wide = torch.full((rows, topk + 3), -77, dtype=torch.int32)
    launch = model.prepare((rows, blocks), blocks, topk, n, logits.stride(0), wide.stride(0))
    launch(wide.data_ptr(), logits.data_ptr(), starts.data_ptr(), ends.data_ptr())
    assert torch.equal(wide[:, :topk], oracle(logits, starts, ends, topk=topk))
    assert (wide[:, topk:] == -77).all()


def model_of(build):
    return Model(build, build.changing, build.fixed, build.threads, build.shared_bytes, False)


@emulated
@pytest.mark.parametrize(
    ("n", "topk", "blocks", "kind"),
    [
        *((*sizes, kind) for sizes in ((700, 64, 1), (8193, 2048, 2), (20_000, 64, 4)) for kind in KINDS),
        *((*sizes, kind) for sizes in ((1, 3, 1), (8192, 2048, 1), (20_000, 1, 1)) for kind in KINDS[:5:2]),
    ],
)
def test_the_source_chooses_what_the_oracle_does(kind, n, topk, blocks):
    g = torch.Generator().manual_seed(n + topk)
    logits = torch.stack([row(kind, n + 9, g) for _ in range(2)])[:, 3 : 3 + n]
    starts, ends = torch.tensor([0, min(5, n)], dtype=torch.int32), torch.tensor([n, n - 1], dtype=torch.int32)
    check(model_of(SMALL), logits, starts, ends, topk, blocks)


@emulated
@pytest.mark.parametrize("blocks", [2, 4])
def test_a_block_that_is_ahead_hands_over_what_the_first_keeps(monkeypatch, blocks):
    """The first block of a cluster is as late as its barriers allow: it has sampled its row before others write there."""
    monkeypatch.setattr(Model, "strides", (-1,))
    logits = row("plain", 20_000, torch.Generator().manual_seed(3)).unsqueeze(0)
    whole = torch.tensor([0], dtype=torch.int32), torch.tensor([20_000], dtype=torch.int32)
    check(model_of(SMALL), logits, *whole, 2048, blocks)


@emulated
@pytest.mark.parametrize("build", [FEW_ROWS, MANY_ROWS], ids=lambda build: build.label)
@pytest.mark.parametrize("kind", ["plain", "ties", "holes"])
def test_the_builds_that_are_shipped_do(build, kind):
    g = torch.Generator().manual_seed(7)
    logits = row(kind, 140_000, g).unsqueeze(0)  # more positions than have a bit at once
    whole = torch.tensor([0], dtype=torch.int32), torch.tensor([140_000], dtype=torch.int32)
    check(model_of(build), logits, *whole, 1, 1)
    check(model_of(build), logits, *whole, MAX_TOPK, 1)
    assert shared_size(build) == build.shared_bytes


@emulated
@pytest.mark.parametrize("kind", ["plain", "ties", "holes"])
def test_rows_of_a_prompt_grow(kind):
    """Of many rows each takes the code of its own length, on both sides of the border between the two."""
    g = torch.Generator().manual_seed(11)
    ends = torch.tensor([0, 60, 700, 4095, 4096, 4097, 7000], dtype=torch.int32)
    logits = torch.stack([row(kind, 7000, g) for _ in ends])
    logits[torch.arange(7000) >= ends.unsqueeze(1)] = INF  # is not seen
    check(model_of(MANY_ROWS), logits, torch.zeros_like(ends), ends, 64, 1)


@emulated
def test_ranges_are_clamped(models):
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 3, -7, 5, 309, 1, 299], dtype=torch.int32)
    ends = torch.tensor([64, 400, 300, 2, 300, 2, 300], dtype=torch.int32)
    call = bound()
    assert torch.equal(call(logits, starts, ends, topk=64), oracle(logits, starts, ends, topk=64))


@emulated
@pytest.mark.parametrize("build", [SMALL, FEW_ROWS, MANY_ROWS], ids=lambda build: build.label)
@pytest.mark.parametrize("n", [300, 5000, 9000])
def test_bounds_may_be_any_int32(build, n):
    """A row in registers, of either size, and one that is longer: no difference of two bounds may wrap."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    starts, ends = torch.tensor([least, least + 1, -1, 0, 5, n, most]), torch.tensor([least, least + 1, -1, 0, 7, n, most])
    starts, ends = torch.cartesian_prod(starts, ends).to(torch.int32).T.contiguous()
    logits = torch.randn(n, generator=torch.Generator().manual_seed(n)).expand(len(starts), n).contiguous()
    check(model_of(build), logits, starts, ends, 16, 1)


@emulated
@pytest.mark.parametrize(("length", "rows"), [(300, 6), (5000, 6), (LONG, 6), (300, 140), (LONG, 140)])
def test_the_suites_case_of_such_bounds_passes(models, length, rows):
    """Few rows, and more than the device has multiprocessors."""
    problem = TopkSelectParams(topk=64, length=length, ranges="edges", rows=rows).build(0, torch.device("cpu"), H200)
    assert not [found.message for found in problem.findings(problem.call(bound())) if found.message]


@emulated
def test_a_launch_says_what_the_call_meant(models):
    call = bound()
    wide = torch.randn(5, 500, generator=torch.Generator().manual_seed(1))
    starts, ends = torch.zeros(5, dtype=torch.int32), torch.full((5,), 300, dtype=torch.int32)

    def same(logits, topk, out=None):
        got = call(logits, starts[: len(logits)], ends[: len(logits)], topk=topk, out=out)
        assert (got.shape, got.dtype) == ((len(logits), topk), torch.int32) and (out is None or got is out)
        assert torch.equal(got, oracle(logits, starts[: len(logits)], ends[: len(logits)], topk=topk))
        return sum(model.prepared for model in models.values())

    assert same(wide[:, :300], 16) == 1
    assert same(wide[:, 100:400], 16) == 1  # lies alike
    assert same(wide[:, :300].contiguous(), 16) == 2
    assert same(wide[:3, :300], 16) == 3
    assert same(wide[:, :300], 17) == 4
    assert same(wide[:, :300], 16, torch.zeros(5, 40, dtype=torch.int32)[:, 3:19]) == 5
    assert same(wide[:, :300], 16) == 5


def test_no_row_no_launch(models):
    nothing = torch.empty(0, dtype=torch.int32)
    assert bound()(torch.empty(0, 300), nothing, nothing, topk=8).shape == (0, 8)
    assert all(model.prepared == 0 for model in models.values())


def test_more_than_was_declared_is_refused_before_a_launch(models):
    row = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match=rf"topk.*at most {MAX_TOPK}"):
        bound()(torch.zeros(1, 9000), row, row, topk=MAX_TOPK + 1)
    assert all(model.prepared == 0 for model in models.values())


def test_prepared_launches_are_bounded(models, monkeypatch):
    monkeypatch.setattr(Launches, "most", 2)
    call = bound()
    monkeypatch.setattr(Model, "run", lambda *arguments: None)
    for rows, prepared in ((1, 1), (2, 2), (1, 2), (3, 3), (3, 3), (1, 4)):
        bounds = torch.zeros(rows, dtype=torch.int32)
        call(torch.zeros(rows, 9), bounds, bounds, topk=2)
        assert sum(model.prepared for model in models.values()) == prepared


@pytest.mark.parametrize(
    ("device", "rows", "length", "build", "blocks"),
    [
        *((H200, rows, 8192, FEW_ROWS, 1) for rows in (1, 132)),
        *((H200, 1, length, FEW_ROWS, blocks) for length, blocks in ((8193, 2), (16_384, 4), (32_768, 8), (131_072, 16))),
        *((H200, rows, 131_072, FEW_ROWS, blocks) for rows, blocks in ((2, 16), (16, 8), (33, 4), (64, 2), (67, 1), (132, 1))),
        *((H200, rows, 131_072, MANY_ROWS, 1) for rows in (133, 4096)),
        *((B200, rows, 131_072, FEW_ROWS, blocks) for rows, blocks in ((1, 16), (148, 1))),
        *((RTX_5090, rows, 131_072, FEW_ROWS, blocks) for rows, blocks in ((1, 8), (300, 1))),
        *((A100, rows, 131_072, build, 1) for rows, build in ((1, FEW_ROWS), (108, FEW_ROWS), (109, MANY_ROWS))),
        *((RTX_4090, rows, 131_072, FEW_ROWS, 1) for rows in (1, 129)),
    ],
)
def test_what_a_device_runs(models, monkeypatch, device, rows, length, build, blocks):
    """With as many clusters as its multiprocessors would hold if they lay in one part."""
    monkeypatch.setattr(Model, "run", lambda self, grid, *arguments: self.launches.append(grid))
    bounds = torch.zeros(rows, dtype=torch.int32)
    bound(device)(torch.empty(1, length).expand(rows, length), bounds, bounds, topk=64)
    ran = [(model.build.label, grid) for model in models.values() for grid in model.launches]
    assert ran == [(build.label, (rows, blocks))]
    large = {model.build.largest_cluster for model in models.values()} - {1}
    assert large == {"sm90": {16}, "sm100": {16}, "sm120": {8}}.get(device.arch, set())
    assert {model.wide for model in models.values() if model.launches} <= {device.arch in ("sm90", "sm100"), False}


@settings(max_examples=200)
@given(rows=st.integers(1, 9000), length=st.integers(0, 10**6), parts=st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_blocks_that_share_a_row_all_run_at_once_and_none_is_idle(rows, length, parts):
    def held(size):
        return sum(part // size for part in parts)

    blocks = choose(rows, length, num_sms=sum(parts), clusters=held)
    assert blocks == 1 or (held(blocks) >= rows and length // blocks >= 4096 and length > 8192)


def test_it_comes_before_the_portable_kernel_where_it_was_compiled():
    (offered,) = topk_implementations()
    assert offered.preference < 50
    request = Request(primitive=TOPK_SELECT, device=H200, topk=2048, graph=True, batch_invariant=True)
    for device in (H200, B200, A100, RTX_4090, RTX_5090):
        assert offered.support.reasons(replace(request, device=device)) == ()
    assert [reason.subject for reason in offered.support.reasons(request.but(topk=MAX_TOPK + 1))] == ["topk"]
    assert "arch" in {reason.subject for reason in offered.support.device_reasons(replace(H200, arch="sm75"))}


def test_the_packed_fields_are_the_parameters_of_the_source():
    letters = "".join(letter * int(count or 1) for count, letter in (("4", "P"), ("2", "i"), ("2", "q")))
    assert (TopkBuild.changing, TopkBuild.fixed) == ("4P", "2i 2q")
    assert letters == "".join(letter for _, letter in parameters())


def test_a_device_that_is_not_here_is_said(monkeypatch):
    monkeypatch.setattr(checks, "device_with", lambda facts: None)
    with pytest.raises(MLAPortableError, match="no CUDA device of this machine"):
        bound()
