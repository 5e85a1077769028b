# SPDX-License-Identifier: Apache-2.0
"""The oracle against statements more naive still: one number at a time, in plain Python, from the bytes up."""

from __future__ import annotations

import math
import struct

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_portable.judge.problems.attention import findings, score_terms
from mla_portable.layouts import FP8_DS_MLA

N_BLOCKS, BLOCK = 3, 4
N = N_BLOCKS * BLOCK
CORPUS = [-(2**31), -123456, -1, N, N + 114514, 2**31 - 1]


def naive_bf16(low: int, high: int) -> float:
    return struct.unpack("<f", bytes([0, 0, low, high]))[0]


def naive_row(row: torch.Tensor) -> list[float]:
    """576 numbers from the bytes of one stored row."""
    data = bytes(row.contiguous().view(torch.uint8).tolist())
    if len(data) == 1152:
        return [naive_bf16(data[i], data[i + 1]) for i in range(0, 1152, 2)]
    scales = struct.unpack("<4f", data[512:528])
    values = []
    for i in range(512):
        sign, exponent, mantissa = data[i] >> 7, data[i] >> 3 & 15, data[i] & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        values.append(math.nan if exponent == 15 and mantissa == 7 else (-1) ** sign * size * scales[i // 128])
    return values + [naive_bf16(data[i], data[i + 1]) for i in range(528, 656, 2)]


def naive_attention(q: list[float], keys: list[list[float]], scale: float, sink: float | None) -> tuple[list[float], float]:
    scores = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    total = sum(math.exp(s) for s in scores)
    if total == 0:
        return [0.0] * 512, -math.inf
    factor = 1.0 if sink is None else total / (total + math.exp(sink))
    out = [factor * sum(math.exp(s) * key[d] for s, key in zip(scores, keys, strict=True)) / total for d in range(512)]
    return out, math.log(total)


def make_cache(layout: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    latent, rope = torch.randn(N, 512, generator=generator), torch.randn(N, 64, generator=generator)
    if layout == "bf16":
        return torch.cat([latent, rope], dim=1).bfloat16().view(N_BLOCKS, BLOCK, 576)
    return FP8_DS_MLA.pack(latent, rope, scale_format="amax").view(N_BLOCKS, BLOCK, 656)


@pytest.mark.parametrize("sink", [None, (0.25, -2.0), (-math.inf, 700.0)])
@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
def test_attention_is_the_sum_over_named_rows(layout: str, sink: tuple[float, ...] | None):
    cache = make_cache(layout)
    q = torch.randn(2, 2, 2, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    indices = torch.tensor(
        [[[3, -1, 3, N, 7], [11, 0, 2**31 - 1, 5, 1]], [[-1, -5, N, -(2**31), N + 1], [2, 4, 6, 8, 10]]], dtype=torch.int32
    )
    lengths = torch.tensor([[5, 2], [5, 9]], dtype=torch.int32)
    attn_sink = None if sink is None else torch.tensor(sink)
    out, lse = oracle.sparse_decode(q, cache, indices, softmax_scale=0.05, lengths=lengths, attn_sink=attn_sink)
    assert out.dtype == lse.dtype == torch.float64
    for b in range(2):
        for s in range(2):
            named = [i for i in indices[b, s].tolist()[: int(lengths[b, s])] if 0 <= i < N]
            keys = [naive_row(cache[i // BLOCK, i % BLOCK]) for i in named]
            for h in range(2):
                head_sink = None if sink is None else sink[h]
                expected, expected_lse = naive_attention(q[b, s, h].double().tolist(), keys, 0.05, head_sink)
                torch.testing.assert_close(out[b, s, h], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
                assert lse[b, s, h] == pytest.approx(expected_lse, rel=1e-13)


def test_terms_of_a_score_are_the_magnitudes_of_its_products_by_the_weights_of_keys():
    cache, generator = make_cache("bf16"), torch.Generator().manual_seed(3)
    q = torch.randn(1, 2, 576, generator=generator).bfloat16()
    indices, scale = torch.tensor([[1, 7, 7, -1, 4]], dtype=torch.int32), 0.1
    rows = [naive_row(cache.view(N, -1)[slot]) for slot in (1, 7, 7)]
    got = score_terms(q, cache, indices, softmax_scale=scale, lengths=torch.tensor([4]))
    for head in range(2):
        products = [[a * b for a, b in zip(q[0, head].tolist(), row, strict=True)] for row in rows]
        weights = [math.exp(scale * sum(each)) for each in products]
        terms = [scale * sum(map(abs, each)) for each in products]
        want = sum(w * t for w, t in zip(weights, terms, strict=True)) / sum(weights)
        assert got[0, head].item() == pytest.approx(want, rel=1e-12)
    assert not score_terms(q, cache, indices, softmax_scale=scale, lengths=torch.tensor([0])).any()


@pytest.mark.parametrize(("error", "terms", "right"), [(1.5e-4, None, False), (1.5e-4, 1300.0, True), (4e-4, 1300.0, False)])
def test_an_lse_that_is_small_as_large_products_cancel_is_held_to_what_float32_holds(error, terms, right):
    out, lse = torch.ones(1, 1, 512).double(), torch.tensor([[-0.82]]).double()
    got = {"out": out.bfloat16(), "lse": (lse + error).float()}
    make = None if terms is None else lambda: torch.tensor([[terms]]).double()
    found = list(findings("bf16", got, {"out": out, "lse": lse}, terms=make))
    assert all(not each.message for each in found) == right
    assert (found[0].error <= found[0].limit) == right


def test_gather_decodes_every_byte_and_keeps_the_rest():
    cache = torch.full((2, 2, 656), 255, dtype=torch.uint8)
    cache[1, 0, :512] = torch.arange(512, dtype=torch.int32).to(torch.uint8)
    cache[1, 0, 512:528] = torch.tensor([1.0, 0.1, 3.0, 1e30]).view(torch.uint8)
    cache[1, 0, 528:] = torch.arange(128, dtype=torch.int32).to(torch.uint8)
    out = torch.full((5, 576), 7.0, dtype=torch.bfloat16)
    table = torch.tensor([[1], [-1]], dtype=torch.int32)
    got = oracle.gather_upconvert(cache, table, torch.tensor([1, 3]), torch.tensor([0, 3]), out=out)
    expected = torch.tensor(naive_row(cache[1, 0]), dtype=torch.float64).float().bfloat16()
    torch.testing.assert_close(got[0], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got[0, 512:].view(torch.uint8), cache[1, 0, 528:])
    assert (got[1:3] == 7).all() and (got[3:] == 0).all() and (out == 7).all()


def naive_convert(pos: int, req: int, table: list[list[int]], block: int, limit: int | None, prefill: int, starts: list[int]):
    if pos < 0:
        return -1
    if prefill >= 0:
        row = starts[prefill] + pos if prefill < len(starts) else -1
        return row if 0 <= row < 2**31 else -1
    if not 0 <= req < len(table) or pos // block >= len(table[req]):
        return -1
    entry = table[req][pos // block]
    slot = entry * block + pos % block
    return slot if entry >= 0 and slot < 2**31 and (limit is None or slot < limit) else -1


int32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), compact=st.booleans(), block=st.sampled_from([1, 3, 16, 64]), tokens=st.integers(0, 4))
def test_conversion_is_the_formula_entry_by_entry(data: st.DataObject, compact: bool, block: int, tokens: int):
    def rows(count: int, width: int, values: st.SearchStrategy[int]) -> list[list[int]]:
        return [data.draw(st.lists(values, min_size=width, max_size=width)) for _ in range(count)]

    columns = data.draw(st.integers(1, 3))
    table = rows(data.draw(st.integers(1, 3)), columns, st.integers(-2, 9) | int32)
    topk = rows(tokens, data.draw(st.integers(1, 6)), st.integers(-2, block * (columns + 1)) | st.sampled_from(CORPUS))
    reqs = data.draw(st.lists(st.integers(-1, 3) | int32, min_size=tokens, max_size=tokens))
    starts = data.draw(st.lists(st.integers(0, 50) | st.just(2**31 - 3), min_size=1, max_size=3))
    prefills = data.draw(st.lists(st.integers(-1, 3), min_size=tokens, max_size=tokens)) if data.draw(st.booleans()) else None
    limit = data.draw(st.none() | st.integers(0, 9 * block))
    indices, counts = oracle.convert_indices(
        torch.tensor(topk, dtype=torch.int32).view(tokens, -1) if tokens else torch.empty(0, 4, dtype=torch.int32),
        torch.tensor(reqs, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
        block_size=block,
        num_slots=limit,
        prefill_request_ids=None if prefills is None else torch.tensor(prefills, dtype=torch.int32),
        prefill_workspace_starts=None if prefills is None else torch.tensor(starts, dtype=torch.int32),
        compact=compact,
    )
    for token, row in enumerate(topk):
        prefill = -1 if prefills is None else prefills[token]
        expected = [naive_convert(pos, reqs[token], table, block, limit, prefill, starts) for pos in row]
        valid = [value for value in expected if value >= 0]
        assert counts[token] == len(valid)
        assert indices[token].tolist() == (valid + [-1] * (len(row) - len(valid)) if compact else expected)
