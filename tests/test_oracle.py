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

from mla_portable.layouts import FP8_DS_MLA
from mla_portable.problems.attention import findings, score_terms

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


def test_an_infinite_sink_takes_everything_and_is_not_in_the_lse():
    cache, q = make_cache("bf16"), torch.randn(1, 1, 576).bfloat16()
    indices = torch.tensor([[0, 1]], dtype=torch.int32)
    plain, plain_lse = oracle.sparse_prefill(q, cache, indices, softmax_scale=0.05)
    out, lse = oracle.sparse_prefill(q, cache, indices, softmax_scale=0.05, attn_sink=torch.tensor([math.inf]))
    assert plain.abs().max() > 0 and torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, plain_lse)


def test_prefill_reads_a_workspace_a_paged_and_a_strided_cache_alike():
    cache = make_cache("bf16")
    apart = torch.full((N_BLOCKS, BLOCK + 3, 576), math.nan, dtype=torch.bfloat16)[:, :BLOCK]
    apart.copy_(cache)
    q = torch.randn(3, 2, 576).bfloat16()
    indices = torch.randint(-2, N + 2, (3, 6), dtype=torch.int32)
    results = [oracle.sparse_prefill(q, kv, indices, softmax_scale=0.05)[0] for kv in (cache, cache.view(-1, 576), apart)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_no_rows_and_an_empty_cache():
    q = torch.randn(2, 3, 576).bfloat16()
    indices = torch.zeros(2, 4, dtype=torch.int32)
    for empty in (torch.zeros(0, 64, 656, dtype=torch.uint8), torch.zeros(0, 576, dtype=torch.bfloat16)):
        out, lse = oracle.sparse_prefill(q, empty, indices, softmax_scale=1.0)
        assert torch.equal(out, torch.zeros(2, 3, 512, dtype=torch.float64)) and (lse == -math.inf).all()
    out, lse = oracle.sparse_prefill(q[:0], make_cache("bf16"), indices[:0], softmax_scale=1.0)
    assert out.shape == (0, 3, 512) and lse.shape == (0, 3)


@pytest.mark.parametrize("scale_format", ["pow2", "amax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_written_bytes_are_those_of_the_layout(dtype: torch.dtype, scale_format: str):
    """Two writers that share no code: the layout's own and the oracle's."""
    generator = torch.Generator().manual_seed(2)
    magnitude = 2.0 ** torch.randint(-20, 12, (N, 1), generator=generator)
    latent = (torch.randn(N, 512, generator=generator) * magnitude).to(dtype)
    latent[0], latent[1, :128], latent[2, 7] = 0.0, -0.0, 448.0
    rope = torch.randn(N, 64, generator=generator).to(dtype)
    slots = torch.randperm(N, generator=generator)
    before = torch.full((N_BLOCKS, BLOCK, 656), 255, dtype=torch.uint8)
    after = oracle.cache_write(latent, rope, before, slots, scale_format=scale_format)
    assert torch.equal(after.view(N, 656)[slots], FP8_DS_MLA.pack(latent, rope, scale_format=scale_format))
    assert (before == 255).all()


def test_write_skips_slots_outside_the_cache_and_keeps_the_others():
    before = torch.full((N_BLOCKS, BLOCK, 576), 7.0, dtype=torch.bfloat16)
    slots = torch.tensor([-1, N, 5, -(2**40), 2**40])
    after = oracle.cache_write(torch.ones(5, 512).half(), 2 * torch.ones(5, 64).half(), before, slots).view(N, 576)
    assert torch.equal(after[5], torch.cat([torch.ones(512), 2 * torch.ones(64)]).bfloat16())
    assert (after[[i for i in range(N) if i != 5]] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rounding_is_torchs_at_every_value_and_midpoint(dtype: torch.dtype):
    """With the greatest value among them the scale is 1, so the bytes are those of a plain conversion."""
    greatest = torch.finfo(dtype).max
    finite = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    finite = finite[finite.isfinite()]
    midpoints = (finite[1:] + finite[:-1]) / 2
    values = torch.cat([finite, midpoints]).float()
    values = torch.cat([values, torch.nextafter(values, torch.tensor(0.0)), torch.nextafter(values, torch.tensor(greatest))])
    values = torch.cat([values, -values])
    x_q, scale = oracle.quantize_per_tensor(values, dtype)
    assert scale.item() == 1.0 and scale.dim() == 0 and scale.dtype == torch.float32
    assert torch.equal(x_q.view(torch.uint8), values.to(dtype).view(torch.uint8))


def test_quantize_of_nothing_and_of_zeros():
    for x in (torch.zeros(0, 3), torch.zeros(4)):
        x_q, scale = oracle.quantize_per_tensor(x)
        assert x_q.shape == x.shape and scale.item() == pytest.approx(1e-10 / 448) and (x_q.float() == 0).all()


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


def test_merging_parts_is_attending_to_all_keys():
    cache, q = make_cache("fp8_ds_mla"), torch.randn(2, 3, 576).bfloat16()
    indices = torch.arange(N, dtype=torch.int32).repeat(2, 1)
    whole, whole_lse = oracle.sparse_prefill(q, cache, indices, softmax_scale=0.05)
    parts = [oracle.sparse_prefill(q, cache, part, softmax_scale=0.05) for part in indices.split([5, 1, 6], dim=1)]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    nothing = torch.full_like(outs[:1], math.nan), torch.full_like(lses[:1], -math.inf)
    out, lse = oracle.merge_states(torch.cat([nothing[0], outs]), torch.cat([nothing[1], lses]))
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-13, atol=0)
    out, lse = oracle.merge_states(nothing[0], nothing[1])
    assert (out == 0).all() and (lse == -math.inf).all()


def test_indexer_logits_by_hand():
    """Two tokens at positions 1 and 2 of a request whose blocks of two lie in the order 1, 0; a third of nobody."""
    keys = torch.zeros(2, 2, 128, dtype=torch.bfloat16)
    keys[1, 0, 0], keys[1, 1, 0], keys[0, 0, 0], keys[0, 1, 0] = 1.0, -1.0, 2.0, torch.nan
    q = torch.zeros(3, 2, 128, dtype=torch.bfloat16)
    q[:, 0, 0], q[:, 1, 0] = 1.0, -3.0
    weights = torch.tensor([[1.0, 10.0], [-1.0, 10.0], [1.0, 1.0]])
    start, length, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [3], [[1, 0]]))
    got = oracle.indexer_logits(q, weights, keys, start, length, table, out=torch.empty(3, 4))
    inf = math.inf
    assert got.tolist() == [[1.0, 30.0, -inf, -inf], [-1.0, 30.0, -2.0, -inf], [-inf] * 4]
    table[0, 1] = 2
    got = oracle.indexer_logits(q, weights, keys, start, length, table, out=torch.empty(3, 2))
    assert got.tolist() == [[1.0, 30.0], [-1.0, 30.0], [-inf] * 2]
