# SPDX-License-Identifier: Apache-2.0
"""What a call hands to the native kernels for compute capability 8.0 and later; no GPU takes part.

Where the launches are calls of the reference, so is the merge: a cut, a scratch or a stride that is wrong shows in the result.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import torch_reference as reference
from compiling import EVERY_DEVICE
from kept_images import kept_image
from machines import A100, RTX_4090, RTX_5090
from native_model import Memory, Model, attended, cache_of, check_laid_out, query_width, second_of, sink_of, stand_ins, store
from test_nvidia_native import SCALE, cache, check_calls, check_second_cache, problem

from mla_portable.contracts import InvalidArgument, Request, ScheduleLimits
from mla_portable.layouts import BF16, FP8_DS_MLA, FP8_V4
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_nvidia import compile_all
from mla_portable_nvidia.native import attention_sm80
from mla_portable_nvidia.native.kernel_build import compile_build
from mla_portable_nvidia.native.runtime.nvrtc import CompilationFailed
from mla_portable_nvidia.native.sparse_decode import FP8_IDLE_ROPE
from mla_portable_nvidia.native.sparse_decode_sm80 import BUILDS, MERGES, SHARED_MEMORY, LargeSm80Build, builds

REQUEST = Request(SPARSE_DECODE, A100, kv_layout="fp8_ds_mla", num_heads=16, topk=2048, block_size=64, lse=True)
BOTH = pytest.mark.parametrize("layout", [BF16.name, FP8_DS_MLA.name])
ALL = [build for offered in BUILDS.values() for build in offered]


class Attend(Model):
    """Each split by the reference; partial results in float32, their lse to base 2, without the sink."""

    clusters = False

    def run(self, grid, cluster, *arguments):
        at = self.arguments(grid, *arguments)
        assert cluster == 1 and at.splits == grid[1]
        memory, rows, lengths, sink = attended(at, self.build.heads)
        kv = cache_of(self.build.kv_layout, at, memory)
        query = memory(at.q, torch.bfloat16, (*rows, query_width(self.build)), (at.q_b, at.q_s, at.q_h, 1))
        second = second_of(self.build, at, memory, rows)
        listed = memory(at.indices, torch.int32, (*rows[:2], at.topk), (at.indices_b, at.indices_s, 1))
        behind = -(-at.topk // self.build.tile) * self.build.tile if second else at.topk  # where the second list begins
        share = -(-(behind + at.extra_topk) // (64 * at.splits)) * 64
        for split in range(at.splits):
            chosen = torch.full_like(listed, -1)
            part = slice(split * share, (split + 1) * share)
            chosen[..., part] = listed[..., part]
            whole = at.splits == 1
            options = {"softmax_scale": at.scale_log2 * math.log(2.0), "lengths": lengths, "attn_sink": sink if whole else None}
            if second:
                extra = torch.full_like(second["extra_indices"], -1)
                part = slice(max(split * share - behind, 0), max((split + 1) * share - behind, 0))
                extra[..., part] = second["extra_indices"][..., part]
                options |= second | {"extra_indices": extra}
            out, lse = reference.sparse_decode(query, kv, chosen, **options)
            if whole:
                assert at.partial_out == at.partial_lse == 0
                store(at, memory, rows, out, lse)
            else:
                shape = (at.splits, *rows)
                memory(at.partial_out, torch.float32, (*shape, 512), _dense(*shape, 512))[split] = out.float()
                memory(at.partial_lse, torch.float32, shape, _dense(*shape))[split] = lse / math.log(2.0)


class Merge(Model):
    clusters = False

    def run(self, grid, cluster, *arguments):
        at = self.arguments(grid, *arguments)
        assert cluster == grid[1] == 1 and at.splits > 1
        memory = Memory()
        assert grid[0] == -(-at.all_heads // self.build.heads) and self.build.heads == (4 if at.splits <= 4 else 1)
        rows = (at.all_heads // at.num_heads // at.query_len, at.query_len, at.num_heads)
        shape = (at.splits, *rows)
        lses = memory(at.partial_lse, torch.float32, shape, _dense(*shape)) * math.log(2.0)
        out, lse = reference.merge_states(memory(at.partial_out, torch.float32, (*shape, 512), _dense(*shape, 512)), lses)
        sink = sink_of(at, memory)
        if sink is not None:
            out = out * torch.sigmoid(lse - sink).unsqueeze(-1)
        store(at, memory, rows, out, lse)


def _dense(*shape):
    return torch.empty(shape, device="meta").stride()


def stand_in(build, *launch):
    return (Merge if build in MERGES else Attend)(build, *launch)


@pytest.fixture
def models(monkeypatch):
    """Build -> its stand-in, for all that are bound in a test."""
    with stand_ins(monkeypatch, stand_in, arch="sm_80") as found:
        yield found


@BOTH
@pytest.mark.parametrize(
    ("batch", "query_len", "num_heads", "topk", "block_size", "gap"),
    [
        *((1, 1, 16, 64, 64, 0), (3, 2, 5, 200, 16, 48), (2, 1, 40, 333, 1, 0), (2, 3, 17, 1, 53, 16), (150, 1, 2, 140, 4, 0)),
        *((1, 2, 128, 700, 8, 656), (2, 1, 100, 90, 8, 16)),
    ],
)
@pytest.mark.parametrize("planned", [False, True])
def test_a_launch_says_what_the_call_meant(models, layout, batch, query_len, num_heads, topk, block_size, gap, planned):
    torch.manual_seed(0)
    kv = cache(7, block_size, gap, layout=layout)
    q, indices = problem(batch, query_len, num_heads, topk, 7 * block_size)
    lengths = torch.randint(0, topk + 1, (batch, query_len), dtype=torch.int32)
    request = REQUEST.but(kv_layout=layout, num_heads=num_heads)
    decode = attention_sm80.bind_sparse_decode(request)
    schedule = None
    if planned:
        limits = ScheduleLimits(torch.device("cpu"), num_heads, topk, batch * query_len, query_len, 12, "sm80", request=request)
        schedule = next(attention_sm80.sm80_implementations()).schedule_kind.planner(limits).get(batch, query_len)
    check_calls(decode, q, kv, indices, lengths, rtol=1e-2, atol=2e-3, schedule=schedule)
    (attend,) = [model for build, model in models.items() if build not in MERGES]
    assert attend.build in builds("sm80", layout, num_heads) and len(attend.launches) == 4
    if schedule is not None:
        assert {launch.grid[1] for launch in attend.launches} == {schedule.num_splits}
        scratch = 0 if schedule.partial_out is None else schedule.partial_out.data_ptr()
        assert {launch.partial_out for launch in attend.launches} == {scratch}


def test_a_refusal_names_the_implementation(models):
    q, indices = problem(2, 1, 16, 64, 112)
    with pytest.raises(InvalidArgument, match=r"^nvidia\.native_sm80: kv_cache: got torch\.bfloat16 rows of 576"):
        attention_sm80.bind_sparse_decode(REQUEST)(q, cache(7, 16, layout=BF16.name), indices, softmax_scale=SCALE)


@BOTH
def test_tokens_of_a_prefill_and_batch_invariant_rows_stay_whole(models, layout):
    kv = cache(40, 16, layout=layout)
    q, indices = problem(2, 1, 16, 640, 640)
    request = REQUEST.but(kv_layout=layout)
    decode = attention_sm80.bind_sparse_decode(request)
    whole = attention_sm80.bind_sparse_decode(request.but(batch_invariant=True))
    prefill = attention_sm80.bind_sparse_prefill(replace(request, primitive=SPARSE_PREFILL))
    rows = kv.flatten(0, 1) if layout == "bf16" else kv
    wanted, _ = decode(q, kv, indices, softmax_scale=SCALE)
    split = models[builds("sm80", layout, 16)[0]]
    assert split.launches[-1].grid == (2, 10)
    unsplit = builds("sm80", layout, 16, whole=True)[0]
    for build, call, given in ((split.build, whole, (q, kv, indices)), (unsplit, prefill, (q[:, 0], rows, indices[:, 0]))):
        got = call(*given, softmax_scale=SCALE)
        torch.testing.assert_close(got[0].view_as(wanted), wanted, rtol=1e-2, atol=2e-3)
        assert models[build].launches[-1].grid == (2, 1)


@pytest.mark.parametrize("rows", [*BUILDS])
@pytest.mark.parametrize("planned", [False, True])
def test_a_second_cache_and_queries_without_rope_reach_the_kernel(models, rows, planned):
    torch.manual_seed(0)
    check_second_cache(models, REQUEST, attention_sm80, rows, planned=planned)


@pytest.mark.parametrize("device", [A100, RTX_4090, RTX_5090], ids=lambda device: device.arch)
def test_every_part_is_declared_and_every_build_fits_it(device):
    for offered in attention_sm80.sm80_implementations():
        request = REQUEST.but(primitive=offered.primitive, device=device)
        assert offered.support.reasons(request.but(num_heads=128, batch_invariant=True)) == ()
        assert offered.support.reasons(request.but(kv_layout="bf16")) == ()
        assert [reason.subject for reason in offered.support.reasons(request.but(cache_alignment=8))] == ["cache_alignment"]
        for layout in BUILDS:
            if layout != FP8_IDLE_ROPE:
                asked = request.but(kv_layout=layout, extra_topk=512, extra_block_size=2, extra_lengths=True)
                assert offered.support.reasons(asked) == ()
        assert offered.support.reasons(request.but(nope=True)) == ()
        assert "arch" in {reason.subject for reason in offered.support.device_reasons(replace(device, arch="sm90"))}
        assert offered.support.min_shared_memory == SHARED_MEMORY <= device.shared_memory
    for layout in BUILDS:
        assert max(build.shared_bytes for build in builds(device.arch, layout, None)) <= device.shared_memory


# ---------------------------------------------------------------------------------------------------- the compiler


@pytest.mark.parametrize("build", ALL, ids=lambda build: build.label)
def test_shared_memory_is_what_the_source_lays_out(build):
    check_laid_out(build, next(iter(build.archs.values())), "HEADS", "TILE")


SHARED = {"sm80": 164 << 10, "sm89": 100 << 10, "sm100": 228 << 10}
"""Of a multiprocessor, which keeps 1 KiB of it for each block; the registers of all are 65,536."""


TWO = [replace(build, lists=2) for build in BUILDS[FP8_V4.name]]


AROUND_THE_LOOP = {("sparse_decode_sm80-fp8_ds_mla-h32-g1-t32-s1", "sm80"): 8}
"""Bytes that are spilled before the loop and read behind it, which takes 62 instructions less in turn."""


COMPILED = [
    pytest.param(build, arch, id=f"{build.label}-{arch}")
    for build in (*ALL, *TWO)
    for arch in SHARED
    if arch in build.archs and (EVERY_DEVICE or arch == next(iter(build.archs)))
]
"""Builds for their first device, SM80 or SM100, or for every device of SHARED."""


@pytest.mark.parametrize(("build", "arch"), COMPILED)
def test_nothing_spills_and_the_registers_are_enough_for_as_many_blocks_as_were_meant(build, arch):
    usage = compile_all.cuobjdump(kept_image(build, build.archs[arch]), "-res-usage")
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    assert int(stack) <= AROUND_THE_LOOP.get((build.label, arch), 0)
    assert int(registers) * build.threads * build.blocks_per_sm <= 65_536


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("build", [*ALL, *TWO], ids=lambda build: build.label)
def test_as_many_blocks_as_were_meant_have_their_shared_memory(build, arch):
    if arch not in build.archs:
        assert build.shared_bytes > 96_000 or build.blocks_per_sm > 1
        return
    held = build.program(arch).per_sm
    assert held * (build.shared_bytes + 1024) <= SHARED[arch]
    assert held == build.blocks_per_sm or not isinstance(build, LargeSm80Build)


@pytest.mark.parametrize("rows", BUILDS)
def test_a_device_that_reports_less_shared_memory_has_the_builds_that_fit(rows):
    few, all_of = builds("sm80", rows, None, shared_memory=99 << 10), builds("sm80", rows, None, shared_memory=163 << 10)
    assert [build.heads for build in few] == [build.heads for build in all_of] and len(few) == 3
    assert max(build.shared for build in few) <= 99 << 10
    assert all_of == builds("sm80", rows, None) != few or max(build.shared for build in all_of) <= 99 << 10


@pytest.mark.parametrize("wrong", [{"tile": 8}, {"tile": 24}, {"stages": 0}])
def test_builds_that_the_source_cannot_be_are_refused(wrong):
    with pytest.raises(CompilationFailed, match=r"no such build|error"):
        compile_build(replace(ALL[0], **wrong), "sm_80")


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm100", "sm103", "sm120", "sm121"])
@BOTH
def test_the_heads_decide_the_build(arch, layout):
    offered = builds(arch, layout, None)
    assert sorted(build.heads for build in offered) == [16, 32, 64]
    for heads, served in ((1, 16), (16, 16), (17, 32), (33, 64), (128, 64)):
        assert builds(arch, layout, heads) == (next(build for build in offered if build.heads == served),)
    large = isinstance(builds(arch, layout, 64)[0], LargeSm80Build)
    assert large == (arch in LargeSm80Build.archs)
