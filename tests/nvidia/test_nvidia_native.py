# SPDX-License-Identifier: Apache-2.0
"""What a call hands to the native kernels, and what it says of a machine that cannot run it; no GPU takes part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_reference as reference
from machines import H200
from native_model import Model, stand_ins

from mla_portable.contracts import InvalidArgument, MLAPortableError, Request, ScheduleLimits
from mla_portable.layouts import BF16, FP8_DS_MLA, FP8_V4, LAYOUTS
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_nvidia.flashmla import attention
from mla_portable_nvidia.flashmla.flat_decode import flat_implementations
from mla_portable_nvidia.native import attention_sm90, checks
from mla_portable_nvidia.native.build_choice import BUILDS, FEW, MANY, builds
from mla_portable_nvidia.native.runtime.driver import Launches
from mla_portable_nvidia.native.runtime.nvrtc import NvrtcNotFound
from mla_portable_nvidia.native.sparse_decode import FP8_IDLE_ROPE, layout_name

SCALE = 576**-0.5
REQUEST = Request(SPARSE_DECODE, H200, kv_layout="fp8_ds_mla", num_heads=16, topk=2048, block_size=64, lse=True)
FLAT = ("nvidia.flashmla_bf16", "nvidia.flashmla_nope", "nvidia.flashmla_sm100")
"""Decodes of whole rows apart."""
EACH = pytest.mark.parametrize("layout", [BF16.name, FP8_DS_MLA.name, FP8_V4.name])

# ---------------------------------------------------------------------------------------------------- a launch


@pytest.fixture
def models(monkeypatch):
    """Build -> its stand-in, for all that are bound in a test."""
    with stand_ins(monkeypatch, Model, arch="sm_90a") as found:
        yield found


def launches(models):
    return [launch for model in models.values() for launch in model.launches]


def cache(blocks, block_size, gap=0, offset=0, layout="fp8_ds_mla"):
    """A paged cache of random rows; blocks `gap` bytes apart, the first at `offset`. Between them 0xFF, NaN in any type."""
    width, dtype = LAYOUTS[layout].row_width, LAYOUTS[layout].dtype
    stride = block_size * LAYOUTS[layout].row_bytes + gap
    raw = torch.full((blocks * stride + offset + 16,), 0xFF, dtype=torch.uint8)
    raw = raw[-raw.data_ptr() % 16 + offset :]
    raw = raw[: len(raw) // 8 * 8].view(dtype)
    kv = raw.as_strided((blocks, block_size, width), (stride // dtype.itemsize, width, 1))
    tokens = blocks * block_size
    packed = LAYOUTS[layout].pack(torch.randn(tokens, 512), torch.randn(tokens, LAYOUTS[layout].rope_width), "pow2")
    parts = LAYOUTS[layout].parts(kv)
    for part, values in zip(parts, packed.split([part.shape[2] for part in parts], dim=1), strict=True):
        part.copy_(values.view(part.shape))
    return kv


def problem(batch, query_len, num_heads, topk, num_slots, width=576):
    q = torch.randn(batch, query_len, num_heads, width).bfloat16()
    indices = torch.randint(-3, num_slots + 5, (batch, query_len, topk), dtype=torch.int32)
    return q, indices


def spread(tensor, step=16):
    """The same values with free space after every innermost row and between the others."""
    wide = torch.zeros(*(size + 1 for size in tensor.shape[:-1]), tensor.shape[-1] + step, dtype=tensor.dtype)
    view = wide[tuple(slice(size) for size in tensor.shape)]
    return view.copy_(tensor)


def check_calls(decode, q, kv, indices, lengths, *, rtol, atol, **given):
    """Four calls: without and with lengths and a sink, of dense tensors and into spread ones."""
    for options in ({}, {"lengths": spread(lengths, 1), "attn_sink": torch.randn(q.shape[2])}):
        wanted = reference.sparse_decode(q, kv, indices, softmax_scale=SCALE, **options)
        got = decode(q, kv, indices, softmax_scale=SCALE, **given, **options)
        out, lse = spread(torch.zeros(wanted[0].shape).bfloat16()), spread(torch.zeros(wanted[1].shape), 1)
        decode(spread(q), kv, spread(indices, 3), softmax_scale=SCALE, out=out, lse_out=lse, **given, **options)
        for result in (got, (out, lse)):
            torch.testing.assert_close(result[0], wanted[0], rtol=rtol, atol=atol)
            torch.testing.assert_close(result[1], wanted[1])


@EACH
@pytest.mark.parametrize(
    ("batch", "query_len", "num_heads", "topk", "block_size", "gap"),
    [
        *((1, 1, 16, 64, 64, 0), (3, 2, 5, 100, 16, 48), (2, 1, 40, 33, 1, 0), (2, 3, 17, 1, 53, 16), (150, 1, 2, 40, 4, 0)),
        *((1, 2, 128, 70, 8, 656), (2, 1, 16, 0, 4, 0), (40, 1, 20, 32, 16, 16), (9, 1, 100, 300, 16, 48)),
        *((3, 1, 4, 50, 1, 656), (3, 1, 4, 50, 1, 16)),
    ],
)
def test_a_launch_says_what_the_call_meant(models, layout, batch, query_len, num_heads, topk, block_size, gap):
    gap += -(block_size * LAYOUTS[layout].row_bytes + gap) % 16  # as engines pad pages of fp8_v4
    kv = cache(7, block_size, gap, layout=layout)
    q, indices = problem(batch, query_len, num_heads, topk, 7 * block_size, LAYOUTS[layout].key_width)
    lengths = torch.randint(0, topk + 1, (batch, query_len), dtype=torch.int32)
    decode = attention_sm90.bind_sparse_decode(REQUEST.but(kv_layout=layout, num_heads=num_heads))
    assert set(models) == set(builds(layout, num_heads))
    assert {build for build in BUILDS[layout] if build not in models} == {
        build for build in BUILDS[layout] if build.kernel == MANY.kernel and num_heads <= FEW
    }
    check_calls(decode, q, kv, indices, lengths, rtol=8e-3, atol=1e-3)
    assert len(launches(models)) == 4


@EACH
@pytest.mark.parametrize("follows_in_order", [False, True])
def test_a_launch_starts_early_where_what_is_in_front_ends_in_order(models, layout, follows_in_order):
    kv, (q, indices) = cache(7, 16, layout=layout), problem(2, 1, 16, 64, 7 * 16, LAYOUTS[layout].key_width)
    decode = attention_sm90.bind_sparse_decode(REQUEST.but(kv_layout=layout, follows_in_order=follows_in_order))
    decode(q, kv, indices, softmax_scale=SCALE)
    assert [early for model in models.values() for early in model.started_early] == [follows_in_order]


def check_second_cache(models, request, binding, rows, *, planned=False):
    """A decode and a prefill, with one list and with two, of rows of a layout or of FP8 rows without their rope."""
    layout = layout_name(rows)
    request = request.but(kv_layout=layout, num_heads=20, nope=rows == FP8_IDLE_ROPE)
    kv, extra = cache(7, 16, 48, layout=layout), cache(30, 3, 1216 - 3 * LAYOUTS[layout].row_bytes % 64, layout=layout)
    q, indices = problem(3, 2, 20, 200, 7 * 16, width=512 if request.nope else LAYOUTS[layout].key_width)
    _, extra_indices = problem(3, 2, 20, 150, 90)
    lengths, extra_lengths = (torch.randint(-1, n, (3, 2), dtype=torch.int32) for n in (201, 151))
    own = {"softmax_scale": SCALE, "lengths": lengths, "attn_sink": torch.randn(20)}
    second = {"extra_kv_cache": extra, "extra_indices": spread(extra_indices, 3), "extra_lengths": spread(extra_lengths, 1)}
    for options in (own, own | second, own | second | {"extra_lengths": None}):
        bound = request.but(extra_topk=150, extra_block_size=3) if options is not own else request
        schedule = None
        if planned:
            given = {"extra_topk": bound.extra_topk or 0, "request": bound}
            limits = ScheduleLimits(torch.device("cpu"), 20, 200, 6, 2, 12, "sm80", **given)
            schedule = next(binding.sm80_implementations()).schedule_kind.planner(limits).get(3, 2)
        wanted = reference.sparse_decode(q, kv, indices, **options)
        got = binding.bind_sparse_decode(bound)(q, kv, indices, schedule=schedule, **options)
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-2, atol=4e-3)
        torch.testing.assert_close(got[1], wanted[1])
        if LAYOUTS[layout].is_quantized:
            prefill = binding.bind_sparse_prefill(replace(bound, primitive=SPARSE_PREFILL))
            tokens = {
                name: value[:, 1]
                for name, value in options.items()
                if name.endswith(("lengths", "indices")) and value is not None
            }
            got = prefill(q[:, 1], kv, indices[:, 1], **options | tokens)
            torch.testing.assert_close(got[0], wanted[0][:, 1], rtol=1e-2, atol=4e-3)
    with pytest.raises(InvalidArgument, match="bound for: bind a request with extra_topk"):
        binding.bind_sparse_decode(request)(q, kv, indices, **own | second)
    with pytest.raises(InvalidArgument, match=r"nvidia.native.*q.*for which it was bound"):
        binding.bind_sparse_decode(request)(q[..., :64].contiguous(), kv, indices, **own)


@pytest.mark.parametrize("rows", [*BUILDS])
def test_a_second_cache_and_queries_without_rope_reach_the_kernel(models, rows):
    torch.manual_seed(0)
    check_second_cache(models, REQUEST, attention_sm90, rows)


@EACH
def test_one_token_of_one_query_is_a_prefill_token(models, layout):
    kv = cache(4, 16, layout=layout)
    request = REQUEST.but(kv_layout=layout)
    q, indices = problem(6, 1, 16, 64, 64, LAYOUTS[layout].key_width)
    lengths = torch.randint(0, 65, (6,), dtype=torch.int32)
    decoded = attention_sm90.bind_sparse_decode(request)(q, kv, indices, softmax_scale=SCALE, lengths=lengths[:, None])
    prefill = attention_sm90.bind_sparse_prefill(replace(request, primitive=SPARSE_PREFILL))
    rows = kv.flatten(0, 1) if layout == "bf16" else kv
    out, lse = torch.zeros(6, 16, 512).bfloat16(), torch.zeros(6, 16)
    for options in ({}, {"out": out, "lse_out": lse}):
        got = prefill(q[:, 0], rows, indices[:, 0], softmax_scale=SCALE, lengths=lengths, **options)
        assert torch.equal(got[0], decoded[0][:, 0]) and torch.equal(got[1], decoded[1][:, 0])
    assert torch.equal(out, decoded[0][:, 0]) and torch.equal(lse, decoded[1][:, 0])


@EACH
@pytest.mark.parametrize(("gap", "offset"), [(8, 0), (0, 4), (4, 12)])
def test_a_cache_that_16_byte_copies_cannot_read_is_refused_before_a_launch(models, layout, gap, offset):
    kv = cache(3, 4, gap, offset, layout)
    request = REQUEST.but(kv_layout=layout)
    q, indices = problem(2, 1, 16, 32, 12)
    with pytest.raises(InvalidArgument, match=r"multiples of 16 bytes.*cache_alignment") as caught:
        attention_sm90.bind_sparse_decode(request)(q, kv, indices, softmax_scale=SCALE)
    assert f"a start at {offset % 16}" in str(caught.value)
    assert f"blocks {4 * LAYOUTS[layout].row_bytes + gap} bytes apart" in str(caught.value)
    prefill = attention_sm90.bind_sparse_prefill(replace(request, primitive=SPARSE_PREFILL))
    with pytest.raises(InvalidArgument, match="multiples of 16 bytes"):
        prefill(q[:, 0], kv, indices[:, 0], softmax_scale=SCALE)
    assert launches(models) == []


@pytest.mark.parametrize(("bound", "given"), [("bf16", "fp8_ds_mla"), ("fp8_ds_mla", "bf16")])
def test_rows_of_another_layout_than_was_bound_are_refused_before_a_launch(models, bound, given):
    q, indices = problem(2, 1, 16, 32, 12)
    decode = attention_sm90.bind_sparse_decode(REQUEST.but(kv_layout=bound))
    with pytest.raises(InvalidArgument, match=rf"rows of {LAYOUTS[given].row_width}.*bound for {bound}"):
        decode(q, cache(3, 4, layout=given), indices, softmax_scale=SCALE)
    assert launches(models) == []


def test_queries_and_results_that_lie_unevenly_go_through_copies(models):
    kv = cache(4, 16)
    q, indices = problem(3, 1, 16, 64, 64)
    wanted = reference.sparse_decode(q, kv, indices, softmax_scale=SCALE)[0]
    uneven_q, out = torch.zeros(q.numel() + 8).bfloat16()[3:-5].view(q.shape), torch.zeros(wanted.numel() + 1).bfloat16()
    out = out[1:].view(wanted.shape)
    got, _ = attention_sm90.bind_sparse_decode(REQUEST)(uneven_q.copy_(q), kv, indices, softmax_scale=SCALE, out=out)
    assert got is out
    torch.testing.assert_close(out, wanted, rtol=8e-3, atol=1e-3)
    (launch,) = launches(models)
    assert launch.q != uneven_q.data_ptr() and launch.out != out.data_ptr()
    apart = torch.zeros(3, 1, 16, 514).bfloat16()[..., :512]
    attention_sm90.bind_sparse_decode(REQUEST)(spread(q, 1), kv, indices, softmax_scale=SCALE, out=apart)
    torch.testing.assert_close(apart, wanted, rtol=8e-3, atol=1e-3)


def test_a_launch_is_prepared_once_for_tensors_that_lie_alike(models):
    kv, other = cache(4, 16), cache(4, 16)
    q, indices = problem(3, 1, 16, 64, 64)
    bound = attention_sm90.bind_sparse_decode(REQUEST)

    def check(q, kv, indices, prepared, **options):
        out, lse = bound(q, kv, indices, softmax_scale=SCALE, **options)
        wanted = reference.sparse_decode(q, kv, indices, softmax_scale=SCALE, **options)
        torch.testing.assert_close(out, wanted[0], rtol=8e-3, atol=1e-3)
        torch.testing.assert_close(lse, wanted[1])
        assert sum(model.prepared for model in models.values()) == prepared

    check(q, kv, indices, 1)
    check(q.flip(0), other, indices.roll(1, 0).contiguous(), 1, attn_sink=torch.randn(16))
    odd = torch.zeros(q.numel() + 8).bfloat16()[3:-5].view(q.shape).copy_(q)
    check(odd, kv, indices, 1)  # its copy lies as q does
    check(q[:2], kv, indices[:2], 2)
    check(q, kv, indices, 3, lengths=torch.tensor([[5], [0], [64]], dtype=torch.int32))
    check(spread(q), kv, indices, 4)
    check(q, cache(4, 16, gap=16), indices, 5)
    check(q, kv[:3], indices, 6)
    check(q, kv, indices, 6)
    with pytest.raises(InvalidArgument, match="multiples of 16 bytes"):
        check(q, cache(4, 16, offset=8), indices, 6)


def test_prepared_launches_are_bounded(models, monkeypatch):
    monkeypatch.setattr(Launches, "most", 2)
    decode = attention_sm90.bind_sparse_decode(REQUEST)
    kv = cache(4, 16)
    for batch, prepared in ((1, 1), (2, 2), (1, 2), (3, 3), (3, 3), (1, 4)):
        q, indices = problem(batch, 1, 16, 64, 64)
        decode(q, kv, indices, softmax_scale=SCALE)
        assert sum(model.prepared for model in models.values()) == prepared


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)])
def test_no_row_no_launch(models, shape):
    q, indices = torch.empty(*shape, 16, 576).bfloat16(), torch.empty(*shape, 64, dtype=torch.int32)
    out, lse = attention_sm90.bind_sparse_decode(REQUEST)(q, cache(1, 4), indices, softmax_scale=SCALE)
    assert (out.shape, lse.shape) == ((*shape, 16, 512), (*shape, 16))
    assert launches(models) == []


@EACH
def test_batch_invariant_every_batch_is_cut_alike(models, layout):
    kv = cache(4, 16, layout=layout)
    decode = attention_sm90.bind_sparse_decode(REQUEST.but(kv_layout=layout, batch_invariant=True))
    for batch in (1, 20, 140):
        q, indices = problem(batch, 1, 16, 64, 64, LAYOUTS[layout].key_width)
        decode(q, kv, indices, softmax_scale=SCALE)
    cuts = {(build, each.grid[1], each.whole_clusters) for build, model in models.items() for each in model.launches}
    assert len(launches(models)) == 3 and len(cuts) == 1 and {whole for _, _, whole in cuts} == {0}


def test_a_shape_is_cut_once(models):
    kv = cache(4, 16)
    q, indices = problem(3, 1, 16, 64, 64)
    decode = attention_sm90.bind_sparse_decode(REQUEST)
    for _ in range(3):
        decode(q, kv, indices, softmax_scale=SCALE)
    asked = [(build, size) for build, model in models.items() for size in model.asked]
    assert asked and len(asked) == len(set(asked))


# ---------------------------------------------------------------------------------------------------- the machine


def test_few_heads_come_before_many_and_both_before_flashmla():
    offered = {each.name: each for each in attention_sm90.native_implementations() if each.primitive is SPARSE_DECODE}
    assert offered["nvidia.native"].preference < offered["nvidia.native_wide"].preference < 10
    needed = {name: each.support.min_shared_memory for name, each in offered.items()}
    wide = [build for builds in BUILDS.values() for build in builds if build.kernel == MANY.kernel]
    assert needed["nvidia.native"] < needed["nvidia.native_wide"] == max(build.shared_bytes for build in wide)
    for name, most in (("nvidia.native", 32), ("nvidia.native_wide", 128)):
        support = offered[name].support
        assert support.reasons(REQUEST.but(batch_invariant=True)) == ()
        assert support.reasons(REQUEST.but(num_heads=most)) == ()
        assert [reason.subject for reason in support.reasons(REQUEST.but(num_heads=most + 1))] == ["num_heads"]
        assert support.reasons(REQUEST.but(kv_layout="bf16", num_heads=most)) == ()
        v4 = REQUEST.but(kv_layout="fp8_v4", num_heads=most, block_size=53, extra_topk=1024, extra_block_size=2)
        assert support.reasons(v4.but(extra_lengths=True, uneven_blocks=True, attn_sink=True, lengths=True)) == ()
        assert [reason.subject for reason in support.reasons(v4.but(cache_alignment=8))] == ["cache_alignment"]
        assert "arch" in {r.subject for r in support.device_reasons(replace(H200, arch="sm100"))}


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
def test_a_cache_that_16_byte_copies_cannot_read_is_a_reason_and_no_error_of_a_call(alignment):
    for offered in (*attention.attention_implementations(), *flat_implementations(), *attention_sm90.native_implementations()):
        request = REQUEST.but(
            primitive=offered.primitive,
            device=replace(H200, arch=offered.support.archs[0]),
            kv_layout=offered.support.kv_layouts[0],
            num_heads=64 if offered.support.padded_heads else 16,
            scale_format="pow2",
            lse=False,
        )
        assert offered.support.reasons(request) == ()
        (reason,) = offered.support.reasons(request.but(cache_alignment=alignment))
        assert reason.subject == "cache_alignment" and "needs 16" in str(reason)
        flat = offered.primitive is SPARSE_DECODE and offered.name in FLAT
        assert [reason.subject for reason in offered.support.reasons(request.but(uneven_blocks=True))] == [
            "uneven_blocks"
        ] * flat


def test_what_the_machine_lacks_is_said_with_a_remedy(monkeypatch):
    monkeypatch.setattr(checks, "device_with", lambda facts: None)
    assert [(reason.subject, reason.limit) for reason in checks.check(H200)] == [("device", "not on this machine")]
    with pytest.raises(MLAPortableError, match="no CUDA device of this machine"):
        attention_sm90.bind_sparse_decode(REQUEST)
    monkeypatch.setattr(checks, "device_with", lambda facts: torch.device("cuda", 0))

    def no_nvrtc():
        raise NvrtcNotFound("nowhere")

    def no_driver():
        raise OSError("libcuda.so.1: cannot open")

    monkeypatch.setattr(checks, "nvrtc_version", no_nvrtc)
    monkeypatch.setattr(checks, "driver_version", no_driver)
    reasons = list(checks.check(H200))
    assert [(reason.subject, reason.limit) for reason in reasons] == [
        ("NVRTC", "nowhere"),
        ("CUDA driver", "libcuda.so.1: cannot open"),
    ]
    assert all(reason.remedy.startswith("install") for reason in reasons)
