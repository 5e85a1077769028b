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

import mla_portable.reference
from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, Implementation, Primitive, Request
from mla_portable.judge.conformance import run_suite
from mla_portable.primitives._reference import CacheRows
from mla_portable.primitives._select_in_parts import SELECT_SCRATCH_BYTES

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
            layout = {"kv": "fp8_ds_mla", "index": "index_fp8"}.get(i.primitive.cache)
            request = Request(
                i.primitive, device, num_heads=7, topk=100, block_size=17, query_len=5, lse=True, attn_sink=True,
                lengths=True, compact=True, prefill_workspace=True, kv_layout=layout,
            )  # fmt: skip
            assert i.support.reasons(request) == ()
            bound = i.bind(request)
            assert getattr(bound, "func", bound) is i.primitive.reference
            assert getattr(bound, "keywords", {}) == ({"kv_layout": layout} if layout else {})
        assert [r.subject for r in i.support.reasons(Request(i.primitive, gpu, graph=True))] == ["graph"]
        assert i.support.reasons(Request(i.primitive, tpu)) == ()


# --- rows


def test_one_row_may_stand_for_every_slot():
    row = torch.randn(576).bfloat16()
    assert torch.equal(CacheRows(row.expand(3, 4, 576)).raw(torch.tensor([0, 11])), row.expand(2, 576))


# --- attention


CHUNKS = [
    ("_attention", "_CHUNK_BYTES", {"cpu": 2_000_000}),
    ("convert_indices", "_CHUNK_BYTES", 20_000),
    ("_indexer", "_CHUNK_ELEMENTS", 30_000),
    ("_indexer", "_CHUNK_KEYS", 23),
    ("indexer_logits_ragged", "_CHUNK_ELEMENTS", 30_000),
    ("indexer_logits_blocks", "_CHUNK_ELEMENTS", 9_000),
    ("topk_select", "_CHUNK_ELEMENTS", 8_000),
    ("pack_selection", "_CHUNK_BYTES", 20_000),
    ("masked_prefill", "_CHUNK_BYTES", 50_000),
    ("merge_states", "_CHUNK_BYTES", 9_000),
    ("gather_upconvert", "_CHUNK_TOKENS", 5),
    ("cache_write", "_CHUNK_TOKENS", 7),
]
"""Sizes of which the suite's smallest cases fill several chunks of two rows or more."""


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch):
    for module, name, size in CHUNKS:
        monkeypatch.setattr(sys.modules[f"mla_portable.primitives.{module}"], name, size)
    registry = Registry(plugins=[("reference", mla_portable.reference)], environ={}, probe=False)
    report = run_suite(registry, "reference", device="cpu", level="smoke")
    assert report.ok and {r.case.primitive for r in report.results} == set(Primitive.all()), report.counts()


def test_nan_in_a_named_row_is_not_hidden():
    cache = filled_cache("fp8_ds_mla", 1, 32, torch.arange(31))
    indices = torch.tensor([[0, 31], [0, 1]], dtype=torch.int32)
    out, lse = reference.sparse_prefill(query(2, 2), cache, indices, softmax_scale=SCALE)
    assert out[0].isnan().all() and lse[0].isnan().all() and out[1].isfinite().all() and lse[1].isfinite().all()


def test_an_empty_cache_and_rows_of_no_index():
    cache = filled_cache("fp8_ds_mla", 1, 16, torch.arange(16))
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


def test_memory_of_a_selection_grows_with_its_positions_and_not_with_its_width():
    """A row of all positions that int32 has takes 256 MiB of words, and nothing for each bit."""
    code = """
import resource, torch
from mla_portable.primitives import PACK_SELECTION
positions = torch.tensor([[0, 2**31 - 2, 31, -1, 2**31 - 1, 31, -2**31]], dtype=torch.int32)
PACK_SELECTION.reference(positions, width=40)
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (512 << 20),) * 2)
words = PACK_SELECTION.reference(positions, width=2**31 - 1)
assert words.shape == (1, 2**26)
print(words[0, 0].item(), words[0, -1].item(), words[0, 1:-1].count_nonzero().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(1 - 2**31), str(2**30), "0"]


# --- cache


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


def test_a_selection_of_a_long_context_keeps_its_bound_of_memory():
    """In a process of its own, whose largest resident size tells. Of 64 heads at once a score takes 512 bytes a position."""
    script = """
import resource, torch, mla_portable as mp
torch.set_num_threads(1)
int32, columns = torch.int32, 2048
cache, table = torch.zeros(columns, 64, 132, dtype=torch.uint8), torch.arange(columns, dtype=int32)[None]
q, weights = torch.zeros(1, 64, 128, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(1, 64)

def largest(columns):
    start, length = torch.tensor([0, 1], dtype=int32), torch.tensor([columns * 64], dtype=int32)
    mp.indexer_select(q, weights, cache, start, length, table[:, :columns], topk=2048, backend="reference")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = largest(2)
print(largest(columns) - before)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(run.stdout) <= SELECT_SCRATCH_BYTES >> 10
