# SPDX-License-Identifier: Apache-2.0
"""The sources of indexer_logits on a CPU: which scores they write, for any share of the work, and their values."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from indexer_model import EmulatedScores
from source_on_cpu import COMPILER
from test_nvidia_indexer_logits import problem, request

from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN
from mla_portable.layouts import INDEX_FP8
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_SELECT
from mla_portable.primitives import _select_in_parts as parts
from mla_portable.primitives.indexer_logits import reference
from mla_portable.primitives.indexer_select import reference as select_reference
from mla_portable.primitives.topk_select import reference as topk_reference
from mla_portable_nvidia.native import indexer_logits as indexer
from mla_portable_nvidia.native.indexer_logits import DECODE, PREFILL, NativeScores

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture
def emulated(monkeypatch):
    """Of 32 heads; `sms`: multiprocessors that launches are made for. Every stride of the threads takes a turn."""
    kernels = {build: EmulatedScores(build) for build in (PREFILL[32], DECODE[32, 1], DECODE[32, 2])}
    monkeypatch.setattr(indexer, "load", lambda build, target, index: kernels.get(build))
    monkeypatch.setattr(indexer, "index_of", lambda request: 0)
    return SimpleNamespace(sms=132, kernel=kernels[PREFILL[32]], kernels=kernels)


def scores_of(emulated, primitive, sms, **more):
    asked = request(primitive, 32, **more)
    return NativeScores(replace(asked, device=replace(asked.device, num_sms=sms)))


def batch(queries, lengths, columns, *, holes=False, start=0, tail=0):
    """Of 32 heads. start, tail: tokens of no request in front of the first, and behind the last."""
    q, weights, cache, starts, lens, table = problem([*queries, start + tail], [*lengths, 0], 32, columns)
    starts, lens, table = starts[:-1] + start, lens[:-1], table[:-1]
    if holes:
        table.view(-1)[1::5], table.view(-1)[3::7] = -1, len(cache)
    return [q, weights, cache, starts.contiguous(), lens.contiguous(), table.contiguous()]


BATCHES = {
    "no context": ([70, 90], [70, 90], 2),
    "context": ([33, 5, 47], [600, 261, 300], 10),
    "a request of a token": ([1, 30, 1], [130, 30, 64], 3),
    "one long": ([40], [1000], 16),
    "more tokens than context": ([20, 9], [7, -5], 1),
}


@pytest.mark.parametrize("sms", [1, 3, 132])
@pytest.mark.parametrize("name", BATCHES)
def test_every_score_is_written_once_by_any_number_of_blocks(emulated, name, sms):
    arguments = batch(*BATCHES[name], holes=True, start=2, tail=3)
    tokens, width = len(arguments[0]), arguments[5].shape[1] * 64 - 3
    out = torch.full((tokens, width + 9), 7.0)
    scores_of(emulated, INDEXER_LOGITS, sms)(out[:, :width], None, *arguments)
    want = reference(*arguments, out=torch.empty(tokens, width))
    assert (out[:, width:] == 7).all() and torch.equal(out[:, :width] == -math.inf, want == -math.inf)
    finite = want > -math.inf
    torch.testing.assert_close(out[:, :width][finite], want[finite], rtol=1e-4, atol=1e-2)
    assert emulated.kernel.grids[0][0] <= sms


@pytest.mark.parametrize("where", ["code", "scale", "query", "weight"])
def test_a_score_of_nan_is_minus_infinity(emulated, where):
    """Of a key, or of all that a token sees. `fmaxf` would make 0 of a product that is NaN."""
    arguments = batch([70], [100], 2)
    codes, scales = INDEX_FP8.parts(arguments[2][int(arguments[5][0, 0])].unsqueeze(0))
    number = {"code": codes[0, 3], "scale": scales[0, 3], "query": arguments[0][40, 7], "weight": arguments[1][40, 7:8]}[where]
    number.view(torch.uint8)[-4:] = 0x7F if where in ("code", "query") else 0xFF
    out, want = torch.empty(70, 128), reference(*arguments, out=torch.empty(70, 128))
    scores_of(emulated, INDEXER_LOGITS, 3)(out, None, *arguments)
    assert torch.equal(out == -math.inf, want == -math.inf) and not out.isnan().any()
    lost = out[:, 3] if where in ("code", "scale") else out[40]
    assert (lost == -math.inf).all() and (out[69, 4:] > -math.inf).any()


@pytest.mark.parametrize("first_token", [0, INT32_MIN])
@pytest.mark.parametrize("end", [13, INT32_MAX])
def test_lengths_and_starts_may_be_any_int32(emulated, first_token, end):
    """A request may begin in front of all tokens and end behind them: neither moves what is there."""
    arguments = batch([2, 3, 1, 7], [60, 60, 60, 60], 3, tail=10)
    arguments[3][0], arguments[3][-1] = first_token, end
    arguments[4][:] = torch.tensor([INT32_MAX, INT32_MIN, INT32_MIN + 1, INT32_MAX - 1])
    tokens = len(arguments[0])
    out, want = torch.full((tokens, 192), 7.0), reference(*arguments, out=torch.empty(tokens, 192))
    scores_of(emulated, INDEXER_LOGITS, 3)(out, None, *arguments)
    assert torch.equal(out == -math.inf, want == -math.inf) and ((want > -math.inf).any(dim=1)[:2]).all()
    finite = want > -math.inf
    torch.testing.assert_close(out[finite], want[finite], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("first", "count"), [(0, 165), (0, 64), (64, 64), (128, 37)])
@pytest.mark.parametrize("all_chosen", [0, 30, 64, 2048])
def test_tokens_whose_positions_are_all_chosen_are_not_scored(emulated, first, count, all_chosen):
    """They get 0 where there is a page; the others get the same bits as without, and what is not seen is not written."""
    arguments = batch([70, 90], [70, 190], 3, holes=True, start=2, tail=3)
    scores = scores_of(emulated, INDEXER_SELECT, 5, topk=64)
    whole = torch.full((165, 192), torch.nan)
    scores(whole, torch.empty((2, 165), dtype=torch.int32), *arguments)
    out, bounds = torch.full((count, 192), torch.nan), torch.full((2, count), -7, dtype=torch.int32)
    scores(out, bounds, *arguments, first, all_chosen=all_chosen)
    want = reference(*arguments, out=torch.empty(165, 192))[first : first + count]
    seen = torch.zeros(165, dtype=torch.int32)
    seen[2:72], seen[72:162] = torch.arange(70) + 1, torch.arange(90) + 101
    seen = seen[first : first + count]
    assert (bounds[0] == 0).all() and torch.equal(bounds[1], seen)
    sees = torch.arange(192) < seen.unsqueeze(1)
    assert out[~sees].isnan().all()
    short = sees & (seen <= all_chosen).unsqueeze(1)
    assert torch.equal(out[short], torch.where(want > -math.inf, 0.0, -math.inf)[short])
    assert torch.equal(out[sees & ~short], whole[first : first + count][sees & ~short])


DECODES = {
    "one": ([1], [190], 1),
    "one token each": ([1, 1, 1, 1], [190, 64, 3, 0], 1),
    "drafts": ([2, 2, 1], [190, 31, 100], 2),
    "three each": ([3, 3], [150, 66], 2),
}


@pytest.mark.parametrize("sms", [1, 3, 132])
@pytest.mark.parametrize("name", DECODES)
def test_decode_writes_every_score_once(emulated, name, sms):
    queries, lengths, tokens = DECODES[name]
    arguments = batch(queries, lengths, 3, holes=True)
    rows = len(arguments[0])
    out = torch.full((rows, 201), 7.0)
    scores_of(emulated, INDEXER_LOGITS, sms)(out[:, :192], None, *arguments)
    want = reference(*arguments, out=torch.empty(rows, 192))
    assert (out[:, 192:] == 7).all() and torch.equal(out[:, :192] == -math.inf, want == -math.inf)
    finite = want > -math.inf
    torch.testing.assert_close(out[:, :192][finite], want[finite], rtol=1e-4, atol=1e-2)
    assert len(emulated.kernels[DECODE[32, tokens]].grids) == 1


@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize(
    ("queries", "lengths", "columns", "all_chosen"),
    [
        *((*DECODES[name][:2], 3, all_chosen) for name in DECODES for all_chosen in (0, 30, 31, 2048)),
        ([2], [1000], 16, 999),  # the first token sees as many, its request is scored
    ],
)
def test_decode_does_not_score_requests_whose_positions_are_all_chosen(emulated, sms, queries, lengths, columns, all_chosen):
    """They get 0 where there is a page, and none of their keys is read; the others get the same bits as without."""
    arguments = batch(queries, lengths, columns, holes=True)
    scores, rows, width = scores_of(emulated, INDEXER_SELECT, sms, topk=64), sum(queries), columns * 64
    whole = torch.full((rows, width), torch.nan)
    scores(whole, torch.empty((2, rows), dtype=torch.int32), *arguments)
    arguments[2] = arguments[2].clone()
    of_short = [at for at, length in enumerate(lengths) if length <= all_chosen]
    for page in arguments[5][of_short].flatten().tolist():
        if 0 <= page < len(arguments[2]):
            arguments[2][page].fill_(0xFF)  # NaN
    out, bounds = torch.full((rows, width), torch.nan), torch.full((2, rows), -7, dtype=torch.int32)
    scores(out, bounds, *arguments, all_chosen=all_chosen)
    tokens = [(n, max(n - count + 1 + i, 0)) for count, n in zip(queries, lengths, strict=True) for i in range(count)]
    most, seen = torch.tensor(tokens).unbind(dim=1)
    assert (bounds[0] == 0).all() and torch.equal(bounds[1], seen.to(torch.int32))
    sees = torch.arange(width) < seen.unsqueeze(1)
    short = sees & (most <= all_chosen).unsqueeze(1)
    assert out[~sees].isnan().all()
    assert torch.equal(out[short], torch.where(whole > -math.inf, 0.0, -math.inf)[short])
    assert torch.equal(out[sees & ~short], whole[sees & ~short])


@pytest.mark.parametrize("scratch", [64 << 20, 40_000])
def test_a_selection_in_parts_is_that_of_the_reference(emulated, monkeypatch, scratch):
    monkeypatch.setattr(parts, "SELECT_SCRATCH_BYTES", scratch)
    monkeypatch.setattr(indexer, "NativeTopkSelect", lambda request, starts_early: topk_reference)
    arguments = batch([70, 90], [70, 190], 3, holes=True, tail=1)
    asked = request(INDEXER_SELECT, 32, topk=40)
    got = indexer.bind_indexer_select(asked)(*arguments, topk=40)
    assert torch.equal(got, select_reference(*arguments, topk=40))
    assert len(emulated.kernel.grids) == (1 if scratch > 1 << 20 else 4)


def test_64_heads(monkeypatch):
    kernel = EmulatedScores(PREFILL[64], stride=0)
    monkeypatch.setattr(indexer, "load", lambda build, target, index: kernel if build == PREFILL[64] else None)
    monkeypatch.setattr(indexer, "index_of", lambda request: 0)
    arguments = problem([21, 9], [21, 130])
    out, want = torch.empty(30, 192), reference(*arguments, out=torch.empty(30, 192))
    NativeScores(request(INDEXER_LOGITS))(out, None, *arguments)
    assert torch.equal(out == -math.inf, want == -math.inf)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=2e-2)
