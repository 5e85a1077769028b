# SPDX-License-Identifier: Apache-2.0
"""The reference backend against the oracle, at every edge of the primitives' contract."""

from __future__ import annotations

import math
import subprocess
import sys

import oracle
import pytest
import torch
import torch_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_portable.reference
from mla_portable.contracts import DeviceFacts, Implementation, Primitive, Request
from mla_portable.layouts import decode_e4m3
from mla_portable.primitives._reference import CacheRows

INT_MAX = 2**31 - 1
LAYOUTS = ["bf16", "fp8_ds_mla"]
SCALE = 576**-0.5


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def empty_cache(layout: str, blocks: int, block_size: int, gap_rows: int = 0, gap: int = 0) -> torch.Tensor:
    """[blocks, block_size, width] of 0xFF bytes, NaN however they are read; blocks lie gap_rows rows and gap elements apart."""
    width, dtype = (576, torch.bfloat16) if layout == "bf16" else (656, torch.uint8)
    stride = (block_size + gap_rows) * width + gap
    flat = torch.full((blocks * stride * (2 if layout == "bf16" else 1),), 255, dtype=torch.uint8).view(dtype)
    return flat.as_strided((blocks, block_size, width), (stride, width, 1))


def filled_cache(layout: str, blocks: int, block_size: int, used: torch.Tensor, **gaps: int) -> torch.Tensor:
    """A cache that holds tokens in the slots `used` and NaN everywhere else, written by the oracle."""
    cache = empty_cache(layout, blocks, block_size, **gaps)
    latent = torch.randn(len(used), 512, generator=seeded(3)) * 2
    rope = torch.randn(len(used), 64, generator=seeded(4))
    cache.copy_(oracle.cache_write(latent.bfloat16(), rope.bfloat16(), cache, used, scale_format="amax"))
    return cache


def check_attention(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, **options: torch.Tensor | None) -> None:
    """Holds out and lse against the oracle, in float32 so that rounding to bf16 hides nothing; q [T, H, 576]."""
    expected, expected_lse = oracle.sparse_prefill(q, kv, indices, softmax_scale=SCALE, **options)
    assert not expected.isnan().any(), "the case itself names NaN"
    out = torch.full((*q.shape[:2], 512), math.nan)
    _, lse = reference.sparse_prefill(q, kv, indices, softmax_scale=SCALE, out=out, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=2e-6)


def query(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, 576, generator=seeded(seed)).bfloat16()


# --- registration


def test_the_hook_offers_every_primitive_once():
    class Collector:
        def __init__(self) -> None:
            self.found: list[Implementation] = []

        def add(self, implementation: Implementation) -> None:
            self.found.append(implementation)

        def add_detector(self, detector: object) -> None:
            raise AssertionError("the reference recognises no device")

    collector = Collector()
    mla_portable.reference.mla_portable_register(collector)
    assert sorted(i.primitive for i in collector.found) == sorted(Primitive.all())
    cpu = DeviceFacts(vendor="cpu", name="cpu", arch="cpu", device_type="cpu", has_bf16=False)
    gpu = DeviceFacts(vendor="amd", name="gfx", arch="gfx942")
    tpu = DeviceFacts(vendor="google", name="tpu", arch="v5", device_type="xla")
    for i in collector.found:
        assert (i.name, i.preference, i.schedule_kind) == ("reference.torch", 1000, None)
        for device in (cpu, gpu):
            request = Request(
                i.primitive, device, num_heads=7, topk=100, block_size=17, query_len=5, lse=True, attn_sink=True,
                lengths=True, compact=True, prefill_workspace=True, kv_layout="fp8_ds_mla" if i.primitive.has_layout else None,
            )  # fmt: skip
            assert i.support.reasons(request) == ()
            assert i.bind(request) is i.primitive.reference
        assert [r.subject for r in i.support.reasons(Request(i.primitive, gpu, graph=True))] == ["graph"]
        assert i.support.reasons(Request(i.primitive, tpu)) == ()
        for source in i.sources:
            assert source.partition(":")[0] in sys.modules


# --- rows


def test_all_256_bytes_decode_as_torch_has_them():
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(3, 1)
    wide = torch.zeros(3, 700, dtype=torch.uint8)
    wide[:, 100:356] = data
    expected = data.view(torch.float8_e4m3fn).float()
    got = decode_e4m3(wide[:, 100:356])
    assert torch.equal(got.isnan(), expected.isnan()) and got.isnan().sum() == 6
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert torch.equal(torch.signbit(got), torch.signbit(expected))


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    blocks=st.integers(1, 5),
    block_size=st.sampled_from([1, 2, 7, 16, 64]),
    gap_rows=st.integers(0, 2),
    gap=st.integers(0, 40),
)
def test_a_slot_is_found_wherever_its_block_lies(layout: str, blocks: int, block_size: int, gap_rows: int, gap: int):
    cache = empty_cache(layout, blocks, block_size, gap_rows=gap_rows, gap=gap)
    cache[:] = torch.randint(0, 200, cache.shape, generator=seeded(blocks)).to(cache.dtype)
    slots = torch.randint(0, blocks * block_size, (20,), generator=seeded(gap))
    rows = CacheRows(cache)
    assert rows.num_slots == blocks * block_size
    assert torch.equal(rows.raw(slots), cache[slots // block_size, slots % block_size])


def test_one_row_may_stand_for_every_slot():
    row = torch.randn(576).bfloat16()
    assert torch.equal(CacheRows(row.expand(3, 4, 576)).raw(torch.tensor([0, 11])), row.expand(2, 576))


def test_rows_beyond_2_31_elements():
    """Pages that nobody touches cost nothing: 2.2 GB of addresses, a few kilobytes of memory."""
    stride = 2**30 + 656
    flat = torch.empty(2 * stride + 2 * 656, dtype=torch.uint8)
    cache = flat.as_strided((3, 2, 656), (stride, 656, 1))
    used = torch.tensor([0, 3, 4, 5])
    latent, rope = torch.randn(4, 512).bfloat16(), torch.randn(4, 64).bfloat16()
    reference.cache_write(latent, rope, cache, used)
    assert 5 // 2 * stride + 656 > 2**31
    assert flat[2 * stride + 656 : 2 * stride + 1312].any()
    check_attention(query(2, 3), cache, torch.tensor([[5, 4, 3], [0, -1, 5]], dtype=torch.int32))
    out = torch.zeros(2, 576, dtype=torch.bfloat16)
    reference.gather_upconvert(cache, torch.tensor([[2]]), torch.tensor([2]), torch.tensor([0]), out=out)
    expected = oracle.gather_upconvert(cache, torch.tensor([[2]]), torch.tensor([2]), torch.tensor([0]), out=out * 0)
    assert torch.equal(out, expected) and out.any()


# --- attention


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch):
    cache = filled_cache("fp8_ds_mla", 4, 16, torch.arange(64))
    q = query(11, 2)
    indices = torch.randint(-5, 70, (11, 8), generator=seeded(0), dtype=torch.int32)
    lengths = torch.arange(11, dtype=torch.int32)
    monkeypatch.setattr("mla_portable.primitives._attention._CHUNK_BYTES", {"cpu": 3 * 40_000})
    check_attention(q, cache, indices, lengths=lengths)


def test_nan_in_a_named_row_is_not_hidden():
    cache = filled_cache("fp8_ds_mla", 1, 32, torch.arange(31))
    indices = torch.tensor([[0, 31], [0, 1]], dtype=torch.int32)
    out, lse = reference.sparse_prefill(query(2, 2), cache, indices, softmax_scale=SCALE)
    assert out[0].isnan().all() and lse[0].isnan().all() and out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_fills_strided_outputs_in_place(layout: str):
    cache = filled_cache(layout, 3, 16, torch.arange(0, 48, 3), gap=64)
    batch, query_len, heads, topk = 3, 2, 4, 12
    q = query(query_len, batch, heads).transpose(0, 1)
    indices = (torch.randint(-1, 16, (batch, query_len, 2 * topk), generator=seeded(7)) * 3).int()[..., ::2]
    lengths = torch.tensor([[12, 0], [5, 12], [1, 99]], dtype=torch.int32)
    sink = torch.randn(heads, generator=seeded(8))
    options = {"softmax_scale": SCALE, "lengths": lengths, "attn_sink": sink}
    expected, expected_lse = oracle.sparse_decode(q, cache, indices, **options)
    store = torch.full((batch, heads, query_len, 600), 7.0, dtype=torch.bfloat16)
    lse_store = torch.full((batch, heads, query_len), 7.0)
    out, lse_out = store[..., :512].transpose(1, 2), lse_store.transpose(1, 2)
    got, got_lse = reference.sparse_decode(q, cache, indices, out=out, lse_out=lse_out, **options)
    assert got is out and got_lse is lse_out
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(lse_out.double(), expected_lse, rtol=2e-6, atol=2e-6)
    assert (store[..., 512:] == 7).all()
    fresh, fresh_lse = reference.sparse_decode(q, cache, indices, **options)
    assert (fresh.dtype, fresh_lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(fresh, out) and torch.equal(fresh_lse, lse_out)


def test_empty_batches_and_empty_caches():
    cache = filled_cache("fp8_ds_mla", 1, 16, torch.arange(16))
    out, lse = reference.sparse_decode(query(0, 2, 4), cache, torch.empty(0, 2, 8, dtype=torch.int32), softmax_scale=1.0)
    assert out.shape == (0, 2, 4, 512) and lse.shape == (0, 2, 4)
    out, lse = reference.sparse_prefill(query(0, 4), cache, torch.empty(0, 8, dtype=torch.int32), softmax_scale=1.0)
    assert out.shape == (0, 4, 512) and lse.shape == (0, 4)
    check_attention(query(2, 4), cache[:0], torch.zeros(2, 8, dtype=torch.int32))
    check_attention(query(2, 4), cache, torch.empty(2, 0, dtype=torch.int32))


def test_memory_does_not_grow_with_the_tokens():
    """256 tokens of 2048 fp32 keys would be 1.2 GB at once."""
    code = """
import resource, torch
from mla_portable.primitives import SPARSE_PREFILL
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
cache = torch.zeros(64, 64, 656, dtype=torch.uint8)
q, indices = torch.zeros(256, 16, 576, dtype=torch.bfloat16), torch.zeros(256, 2048, dtype=torch.int32)
out, lse = torch.zeros(256, 16, 512, dtype=torch.bfloat16), torch.zeros(256, 16)
run = lambda n: SPARSE_PREFILL.reference(q[:n], cache, indices[:n], softmax_scale=1.0, out=out[:n], lse_out=lse[:n])
run(4); before = peak(); run(256); print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 64  # MiB


# --- index conversion


def test_each_reason_for_an_absent_index():
    def convert(pos: int, entry: int, **options: int) -> int:
        table = torch.tensor([[0, entry]], dtype=torch.int32)
        indices, counts = reference.convert_indices(
            torch.tensor([[pos]], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), table, block_size=64, **options
        )
        assert counts.tolist() == [int(indices >= 0)]
        return int(indices)

    assert convert(65, 3) == 193
    assert convert(128, 3) == -1  # a column that the table lacks
    assert convert(-1, 3) == -1 and convert(-(2**31), 3) == -1
    assert convert(65, -1) == -1 and convert(65, -(2**31)) == -1  # the entry is negative
    assert convert(65, 3, num_slots=193) == -1 and convert(65, 3, num_slots=194) == 193
    assert convert(127, 2**25 - 1) == INT_MAX  # the last slot that int32 holds
    assert convert(64, 2**25) == -1 and convert(64, INT_MAX) == -1 and convert(64, 2**25, num_slots=2**40) == -1


def test_compaction_keeps_the_order_of_a_long_row():
    topk = torch.randint(-300, 900, (3, 2048), generator=seeded(0), dtype=torch.int32)
    table, req = torch.tensor([[3, -1, 0, 7]], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    holes, counts = reference.convert_indices(topk, req, table, block_size=200)
    indices, same_counts = reference.convert_indices(topk, req, table, block_size=200, compact=True)
    assert torch.equal(counts, same_counts) and counts.min() > 0 and counts.max() < 2048
    for row, compacted, count in zip(holes, indices, counts.tolist(), strict=True):
        assert torch.equal(compacted[:count], row[row >= 0]) and (compacted[count:] == -1).all()


def test_workspace_rows_know_no_table_width():
    topk = torch.tensor([[0, 500, -1, INT_MAX]] * 5, dtype=torch.int32)
    ids = torch.tensor([0, 1, -1, 2, INT_MAX], dtype=torch.int32)
    starts = torch.tensor([7, 1000], dtype=torch.int32)
    req = torch.tensor([0, -1, 0, 0, 0], dtype=torch.int32)  # a prefill token's own request does not matter
    for convert in (reference.convert_indices, oracle.convert_indices):
        indices, counts = convert(
            topk, req, torch.tensor([[4]], dtype=torch.int32), block_size=64,
            prefill_request_ids=ids, prefill_workspace_starts=starts,
        )  # fmt: skip
        assert indices.tolist() == [[7, 507, -1, -1], [1000, 1500, -1, -1], [256, -1, -1, -1], [-1] * 4, [-1] * 4]
        assert counts.tolist() == [2, 2, 1, 0, 0]


int32 = st.integers(-(2**31), INT_MAX)


# --- cache


@pytest.mark.parametrize("scale_format", ["pow2", "amax"])
@pytest.mark.parametrize("dtype", [torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_bytes_are_the_oracles(layout: str, dtype: torch.dtype, scale_format: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["mla_portable.primitives.cache_write"], "_CHUNK_TOKENS", 7)
    cache = empty_cache(layout, 4, 13, gap=48)
    latent = (torch.randn(20, 512, generator=seeded(0)) * 2.0 ** torch.arange(-14, 6).unsqueeze(1)).to(dtype)
    rope = torch.randn(20, 64, generator=seeded(1)).to(dtype)
    latent[3] = 0
    slots = torch.randperm(52, generator=seeded(2))[:20]
    slots[[0, 5, 11, 12]] = torch.tensor([-1, 52, -(2**40), 2**40])
    latent[5], rope[0] = math.nan, math.nan  # of tokens that are skipped
    expected = oracle.cache_write(latent, rope, cache, slots, scale_format=scale_format)
    assert reference.cache_write(latent, rope, cache, slots, scale_format=scale_format) is None
    assert torch.equal(cache.contiguous().view(torch.uint8), expected.view(torch.uint8))
    between = cache.as_strided((3, 48), (cache.stride(0), 1), cache.stride(0) - 48)
    assert (between.contiguous().view(torch.uint8) == 255).all()


def test_writing_no_tokens_changes_nothing():
    cache = empty_cache("fp8_ds_mla", 1, 16)
    reference.cache_write(torch.empty(0, 512).half(), torch.empty(0, 64).half(), cache, torch.empty(0, dtype=torch.int64))
    assert (cache == 255).all()


@pytest.mark.parametrize("chunk", [5])
@pytest.mark.parametrize("block_size", [13])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_agrees_with_the_oracle(layout: str, block_size: int, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["mla_portable.primitives.gather_upconvert"], "_CHUNK_TOKENS", chunk)
    blocks = 40 // block_size + 1
    cache = filled_cache(layout, blocks, block_size, torch.arange(blocks * block_size - 1), gap=32)
    columns = 12 // block_size + 1
    table = torch.randint(0, blocks - 1, (6, columns), generator=seeded(block_size), dtype=torch.int32)
    table[5, 0], table[2, -1], table[3, 0] = -1, blocks, INT_MAX
    # one empty, one negative, one past the table's width, one past the workspace
    seq_lens = torch.tensor([10, 0, 12, 3, -4, columns * block_size + 2], dtype=torch.int32)
    starts = torch.tensor([0, 10, 11, 25, 30, 30], dtype=torch.int32)
    store = torch.full((36, 600), 7.0, dtype=torch.bfloat16)
    out = store[:, :576]
    expected = oracle.gather_upconvert(cache, table, seq_lens, starts, out=out)
    assert reference.gather_upconvert(cache, table, seq_lens, starts, out=out) is out
    assert torch.equal(out, expected)
    assert (out[10] == 7).all() and (out[23:25] == 7).all() and (store[:, 576:] == 7).all()
    assert (out[25 : 25 + min(3, block_size)] == 0).all() and out[:10].all(dim=1).any()


def test_gather_of_no_requests_and_from_no_blocks():
    out = torch.full((4, 576), 7.0, dtype=torch.bfloat16)
    none = torch.empty(0, dtype=torch.int32)
    cache = filled_cache("fp8_ds_mla", 2, 4, torch.arange(8))
    reference.gather_upconvert(cache, torch.empty(0, 3, dtype=torch.int32), none, none, out=out)
    assert (out == 7).all()
    one = torch.tensor([2], dtype=torch.int32)
    reference.gather_upconvert(cache[:0], torch.zeros(1, 3, dtype=torch.int32), one, one, out=out)
    assert (out[:2] == 7).all() and (out[2:] == 0).all()
    reference.gather_upconvert(cache, torch.empty(1, 0, dtype=torch.int32), one, one - 2, out=out)
    assert (out == 0).all()


def test_a_request_that_starts_before_the_workspace_writes_the_rest():
    cache = filled_cache("bf16", 2, 4, torch.arange(8))
    table, length, start = (torch.tensor(x, dtype=torch.int32) for x in ([[1, 0]], [7], [-3]))
    out = torch.full((6, 576), 7.0, dtype=torch.bfloat16)
    expected = oracle.gather_upconvert(cache, table, length, start, out=out)
    reference.gather_upconvert(cache, table, length, start, out=out)
    assert torch.equal(out, expected)
    assert torch.equal(out[:4], cache.view(8, 576)[[7, 0, 1, 2]]) and (out[4:] == 7).all()


def test_the_work_of_a_gather_is_bounded_by_the_workspace(monkeypatch: pytest.MonkeyPatch):
    """Tokens whose rows would lie before the workspace are not walked over, however far before it a request starts."""
    cache = filled_cache("bf16", 2, 4, torch.arange(8))
    table = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.int32)
    lengths = torch.tensor([INT_MAX, INT_MAX, 7], dtype=torch.int32)
    starts = torch.tensor([-(2**31), 4 - INT_MAX, -5], dtype=torch.int32)
    out = torch.full((6, 576), 7.0, dtype=torch.bfloat16)
    expected = oracle.gather_upconvert(cache, table, lengths, starts, out=out)
    walked = []
    arange = torch.arange

    def counting(begin: int, end: int, **options: object) -> torch.Tensor:
        walked.append(end - begin)
        assert sum(walked) <= 3 * len(out), "more tokens than the workspace has rows for each request"
        return arange(begin, end, **options)

    monkeypatch.setattr(torch, "arange", counting)
    reference.gather_upconvert(cache, table, lengths, starts, out=out)
    assert sum(walked) == 4 + 2 and torch.equal(out, expected)
    assert torch.equal(out[:2], cache[1, 1:3]) and (out[2:4] == 0).all() and (out[4:] == 7).all()


def test_gathered_rope_is_bit_for_bit():
    cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    patterns = torch.arange(0, 65536, 16, dtype=torch.int32).to(torch.uint16).view(64, 64)
    cache[0, :, 528:] = patterns.view(torch.uint8)
    out = torch.empty(64, 576, dtype=torch.bfloat16)
    zero, length = torch.tensor([0], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    reference.gather_upconvert(cache, zero.view(1, 1), length, zero, out=out)
    assert torch.equal(out[:, 512:].contiguous().view(torch.int16), patterns.view(torch.int16))


# --- merging, quantising


@pytest.mark.parametrize("shape", [(3,), (5, 4), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32])
def test_merge_agrees_with_the_oracle(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["mla_portable.primitives.merge_states"], "_CHUNK_BYTES", 12 * 16 * 4 * 2)
    outs = torch.randn(4, *shape, 16, generator=seeded(0)).to(dtype)
    lses = torch.randn(4, *shape, generator=seeded(1)) * 5
    absent = torch.rand(4, *shape, generator=seeded(2)) < 0.3
    if lses.numel():
        absent[:, 0] = True
    lses[absent] = -math.inf
    outs[absent] = math.nan
    expected, expected_lse = oracle.merge_states(outs, lses)
    out, lse = reference.merge_states(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [3e4, -3e4, 1e6, 1e8])
def test_a_merge_of_large_lses_is_not_scaled(size: float):
    """float32 has steps of 0.002 at 3e4 and of 8 at 1e8: exp(lse_p - lse) would carry the rounding of lse."""
    outs, lses = torch.randn(3, 5, 16, generator=seeded(0)), size + torch.randn(3, 5, generator=seeded(1))
    expected, expected_lse = oracle.merge_states(outs, lses)
    out, lse = reference.merge_states(outs, lses)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-7, atol=0)
