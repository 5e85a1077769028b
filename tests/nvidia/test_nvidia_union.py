# SPDX-License-Identifier: Apache-2.0
"""sparse_prefill over unions: both sources on a CPU, against the reference; and that nobody gets it who did not name it."""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
import torch
import torch_reference as reference
from machines import H200
from native_model import stand_ins
from simulated_gpu import conforms, registry
from sm90_model import EmulatedSm90
from source_on_cpu import COMPILER, compiled
from test_nvidia_native import SCALE, cache, spread

from mla_portable.contracts import InvalidArgument, Request
from mla_portable.layouts import FP8_DS_MLA, FP8_NOPE
from mla_portable.primitives import SPARSE_PREFILL
from mla_portable.registry import Registry
from mla_portable_nvidia import native
from mla_portable_nvidia.native import sparse_prefill_union as union

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")
OWNERS_AT = 28


@functools.cache
def library(build: union.UnionRowsBuild) -> ctypes.CDLL:
    source = files(native).joinpath("union_rows.cu").read_text(encoding="utf-8")
    shared = "extern __shared__ __align__(16) u8 smem[];"
    assert source.count(shared) == 1
    source = source.replace(shared, "u8* smem = (u8*)&memory[0];").replace("__restrict__", "")
    types = [*[ctypes.c_void_p] * 4, *[ctypes.c_int] * 3, *[ctypes.c_longlong] * 3, *[ctypes.c_int] * 2]
    loaded = compiled(source, "union_on_cpu.cpp", build.defines, *types)
    assert loaded.shared_size() == build.shared_bytes
    return loaded


class EmulatedUnion:
    """A build of union_rows, loaded. stride: how far the next thread is that gets its turn."""

    def __init__(self, stride: int, build: union.UnionRowsBuild) -> None:
        self._stride, self._build = stride, build

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any) -> Any:
        assert grid[1] == cluster == 1
        fields = f"{self._build.changing} {self._build.fixed}"

        def launch(*changing: Any) -> None:
            values = struct.unpack(fields, struct.pack(fields, *changing, *fixed))
            library(self._build).launch(*values, grid[0], self._stride)

        return launch


class Attending(EmulatedSm90):
    def max_clusters(self, size: int) -> int:
        return 2 if size == 2 else 0


@pytest.fixture
def bound(monkeypatch):
    """Binds a request for some heads, with every launch run by its source."""

    def loaded(build, changing, fixed, threads, shared, wide_clusters):
        assert (threads, shared) == (build.threads, build.shared_bytes)
        return EmulatedUnion(77, build) if build.kernel == "union_rows" else Attending(0, build)

    with stand_ins(monkeypatch, loaded, arch="sm_90a"):
        monkeypatch.setattr(union, "index_of", lambda request: -1)
        request = Request(SPARSE_PREFILL, H200, topk=64, block_size=16)
        yield lambda heads, layout=FP8_DS_MLA.name: union.bind_union(request.but(kv_layout=layout, num_heads=heads))


def unions(indices, lengths, num_slots, count=4):
    """What the kernel lists: for each group, the words of its union."""
    build, (tokens, topk) = union.UnionRowsBuild(count), indices.shape
    groups = -(-tokens // count)
    lists, counts = torch.full((groups, count * topk), -7, dtype=torch.int32), torch.full((groups,), -7, dtype=torch.int32)
    fixed = (tokens, topk, num_slots, lists.stride(0), indices.stride(0), 0 if lengths is None else lengths.stride(0))
    found = []
    for stride in (0, 1, 77):
        launch = EmulatedUnion(stride, build).prepare((groups, 1), 1, *fixed)
        launch(lists.data_ptr(), counts.data_ptr(), indices.data_ptr(), 0 if lengths is None else lengths.data_ptr())
        found.append([lists[i, : counts[i]].tolist() for i in range(groups)])
    assert found[0] == found[1] == found[2]  # whatever the order of the threads
    return found[0]


@emulated
@pytest.mark.parametrize("count", [2, 4])
def test_a_union_lists_every_slot_once_with_its_owners_in_the_order_of_the_first_that_has_it(count):
    torch.manual_seed(0)
    num_slots, tokens, topk = 3000, 11, 1500
    indices = torch.stack([torch.randperm(num_slots + 200)[:topk] - 100 for _ in range(tokens)]).int()
    lengths = torch.tensor([topk, 3, 0, -5, topk + 9, 700, topk, topk, 1, topk, topk], dtype=torch.int32)
    for group, words in enumerate(unions(indices, lengths, num_slots, count)):
        wanted: dict[int, int] = {}
        for owner in range(count):
            token = group * count + owner
            row = indices[token, : max(0, min(topk, int(lengths[token])))].tolist() if token < tokens else []
            for slot in row:
                if 0 <= slot < num_slots:
                    wanted[slot] = wanted.get(slot, 0) | 1 << owner
        assert [word & (1 << OWNERS_AT) - 1 for word in words] == list(wanted)
        assert [word % 2**32 >> OWNERS_AT for word in words] == list(wanted.values())


@emulated
def test_a_slot_that_a_token_lists_twice_counts_twice():
    indices = torch.tensor([[5, 6, 5, -1], [5, 7, 8, 9], [1, 2, 3, 4], [1, 2, 3, 4]], dtype=torch.int32)
    (words,) = unions(indices, None, 100)
    entries = [(word & (1 << OWNERS_AT) - 1, word % 2**32 >> OWNERS_AT) for word in words]
    assert entries == [(int(slot), 1 << token) for token in range(4) for slot in indices[token] if slot >= 0]


def neighbours(tokens, topk, num_slots, shared):
    """Lists of which each shares that part of the one before it, with absent entries."""
    rows = [torch.randperm(num_slots)[:topk]]
    for _ in range(tokens - 1):
        kept = rows[-1][torch.randperm(topk)[: int(topk * shared)]]
        others = torch.tensor(sorted(set(range(num_slots)) - set(kept.tolist())))
        rows.append(torch.cat([kept, others[torch.randperm(len(others))[: topk - len(kept)]]]))
    indices = torch.stack(rows).int()
    indices[:, ::17] = torch.tensor([-1, num_slots + 3] * topk)[: len(indices[0, ::17])].int()
    return indices


@emulated
@pytest.mark.parametrize(("heads", "tokens"), [(8, 5), (16, 9), (24, 3), (32, 4)])
def test_what_both_sources_compute_is_what_each_token_alone_attends_to(bound, heads, tokens):
    """A last group of fewer tokens; a token without a key; strides that are copied; sinks."""
    torch.manual_seed(0)
    kv = cache(10, 16)
    q, indices = torch.randn(tokens, heads, 576).bfloat16(), neighbours(tokens, 60, 160, 0.7)
    lengths, sink = torch.full((tokens,), 60, dtype=torch.int32), torch.randn(heads)
    lengths[1], lengths[2] = 0, 33
    call = bound(heads)
    for given in ({"lengths": lengths, "attn_sink": sink}, {}):
        wanted, wanted_lse = reference.sparse_prefill(q, kv, indices, softmax_scale=SCALE, **given)
        out, lse = torch.full((tokens, heads, 512), float("nan")).bfloat16(), torch.full((tokens, heads), float("nan"))
        if given:
            got, got_lse = call(q, kv, indices, softmax_scale=SCALE, out=out, lse_out=lse, **given)
            assert got is out and got_lse is lse
        else:
            got, got_lse = call(spread(q), kv, spread(indices), softmax_scale=SCALE, out=spread(out), lse_out=spread(lse))
        error = (got.float() - wanted.float()).abs().amax(-1) / wanted.float().abs().amax(-1).clamp_min(1e-6)
        assert error.max() < 1.5e-2
        torch.testing.assert_close(got_lse, wanted_lse, rtol=1e-3, atol=2e-3)


@emulated
def test_a_key_of_another_token_never_counts_however_large_it_is(bound):
    """No key is common to all of a group; those of two tokens are 2^20 times larger. More keys than a ring has stages for."""
    torch.manual_seed(0)
    kv = cache(40, 16)
    flat = kv.view(-1, 656)
    flat[::2, 512:528] = (flat[::2, 512:528].contiguous().view(torch.float32) * 2.0**20).view(torch.uint8)
    q = torch.randn(4, 16, 576).bfloat16()
    indices = torch.stack([torch.randperm(320)[:130] * 2 + token % 2 for token in range(4)]).int()
    got, got_lse = bound(16)(q, kv, indices, softmax_scale=SCALE)
    wanted, wanted_lse = reference.sparse_prefill(q, kv, indices, softmax_scale=SCALE)
    error = (got.float() - wanted.float()).abs().amax(-1) / wanted.float().abs().amax(-1)
    assert error.max() < 1.5e-2
    torch.testing.assert_close(got_lse[1::2], wanted_lse[1::2], rtol=1e-3, atol=2e-3)


@emulated
def test_a_row_of_nan_reaches_the_tokens_of_its_block_alone(bound):
    """Those that did not choose it, too: `docs/nvidia.md` says so. An absent row reaches nobody."""
    torch.manual_seed(0)
    kv = cache(10, 16)
    kv.view(-1, 656)[3:8] = 255
    q, indices = torch.randn(12, 16, 576).bfloat16(), torch.arange(20, 84, dtype=torch.int32).repeat(12, 1)
    indices[5, 9] = 7  # of the second block of four tokens
    out, lse = bound(16)(q, kv, indices, softmax_scale=SCALE)
    wanted, _ = reference.sparse_prefill(q[:4], kv, indices[:4], softmax_scale=SCALE)
    assert [bool(row.isnan().any()) for row in out] == [False] * 4 + [True] * 4 + [False] * 4
    error = (out[:4].float() - wanted.float()).abs().amax(-1) / wanted.float().abs().amax(-1)
    assert error.max() < 1.5e-2 and lse[8:].isfinite().all()


@emulated
def test_blocks_of_a_cluster_share_a_union(bound, monkeypatch):
    """Few groups for many multiprocessors."""
    monkeypatch.setattr(Attending, "max_clusters", lambda self, size: 66 if size == 2 else 0)
    torch.manual_seed(0)
    kv, q, indices = cache(40, 16, layout=FP8_NOPE.name), torch.randn(6, 16, 512).bfloat16(), neighbours(6, 200, 640, 0.5)
    call = bound(16, FP8_NOPE.name)
    wanted, wanted_lse = reference.sparse_prefill(q, kv, indices, softmax_scale=SCALE)
    got, got_lse = call(q, kv, indices, softmax_scale=SCALE)
    assert ((got.float() - wanted.float()).abs().amax(-1) / wanted.float().abs().amax(-1)).max() < 1.5e-2
    torch.testing.assert_close(got_lse, wanted_lse, rtol=1e-3, atol=2e-3)


@emulated
def test_scratch_is_bounded_and_more_tokens_take_more_launches(bound, monkeypatch):
    monkeypatch.setattr(union, "_SCRATCH", 2 * 4 * 4 * 64)  # of two groups
    torch.manual_seed(0)
    kv, q, indices = cache(10, 16), torch.randn(11, 16, 576).bfloat16(), neighbours(11, 64, 160, 0.8)
    made: list[tuple[int, ...]] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: made.append(shape[0]) or empty(*shape, **options))
    got, _ = bound(16)(q, kv, indices, softmax_scale=SCALE)
    assert [shape for shape in made if len(shape) == 2 and shape[1] == 256] == [(2, 256)]
    wanted, _ = reference.sparse_prefill(q, kv, indices, softmax_scale=SCALE)
    assert ((got.float() - wanted.float()).abs().amax(-1) / wanted.float().abs().amax(-1)).max() < 1.5e-2


@emulated
def test_it_conforms(monkeypatch):
    """The suite's cases at level smoke."""

    def loaded(build, *_launch):
        return EmulatedUnion(0, build) if build.kernel == "union_rows" else Attending(0, build)

    (made,) = union.union_implementations()
    support = replace(made.support, device_types=("cpu",))
    made = replace(made, support=support, check=lambda facts: (), automatic=True)
    with stand_ins(monkeypatch, loaded, arch="sm_90a"):
        monkeypatch.setattr(union, "index_of", lambda request: -1)
        words = conforms(registry(offered=[made], probe=False), union.NAME, "smoke", SPARSE_PREFILL)
    assert {"absent", "amax", "dense"} <= words, words


def test_bad_calls_are_refused_before_any_launch(bound):
    call, kv = bound(16), cache(2, 16)
    q, indices = torch.zeros(4, 16, 576).bfloat16(), torch.zeros(4, 8, dtype=torch.int32)
    for arguments, match in (
        ((q[:, :8], kv, indices), "8 heads of 576"),
        ((q, kv[..., :528], indices), "native_union: kv: .*rows of 528"),
        ((q, kv, torch.zeros(4, 2049, dtype=torch.int32)), "2049 entries of a token"),
        ((q, kv[:1, :1].expand(1 << 14, 1 << 14, 656), indices), "268435456 slots"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            call(*arguments, softmax_scale=SCALE)


def test_it_serves_only_where_it_is_named():
    installed = Registry()
    request = Request(SPARSE_PREFILL, H200, kv_layout=FP8_DS_MLA.name, num_heads=16, topk=2048, block_size=64)
    for named in (None, "nvidia"):
        decision = installed.decide(request, backend=named, probe=False, thorough=True)
        (verdict,) = [each for each in decision.verdicts if each.implementation == union.NAME]
        assert decision.chosen != union.NAME and verdict.named_only
