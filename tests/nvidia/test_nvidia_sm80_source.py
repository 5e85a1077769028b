# SPDX-License-Identifier: Apache-2.0
"""The SM80 attention kernels' own sources on a CPU: fragment layouts, barriers, copies, the splits and their merge."""

from __future__ import annotations

import pytest
import torch
import torch_reference as reference
from attention_model import Emulated
from machines import A100, RTX_4090
from native_model import stand_ins
from source_on_cpu import COMPILER
from test_nvidia_native import SCALE, cache, problem
from test_nvidia_native_sm80 import REQUEST

from mla_portable.contracts import SplitSchedule
from mla_portable.layouts import FP8_DS_MLA
from mla_portable_nvidia.native import bind_sm80

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    with stand_ins(monkeypatch, Emulated):
        yield


def check(monkeypatch, kv, q, indices, request, schedule=None, **options):
    begin = kv.data_ptr()
    monkeypatch.setattr(
        Emulated, "cache", (begin, begin + ((kv.shape[0] - 1) * kv.stride(0) + kv[0].numel()) * kv.element_size())
    )
    out, lse = bind_sm80.bind_sparse_decode(request)(q, kv, indices, softmax_scale=SCALE, schedule=schedule, **options)
    wanted, wanted_lse = reference.sparse_decode(q, kv, indices, softmax_scale=SCALE, **options)
    error = (out.float() - wanted.float()).abs().amax(-1) / wanted.float().abs().amax(-1).clamp_min(1e-6)
    assert error.max() < 1.5e-2
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("device", "num_heads", "topk"),
    [(A100, 16, 150), (RTX_4090, 16, 70), (A100, 21, 70), (RTX_4090, 20, 40), (A100, 50, 70), (RTX_4090, 64, 40)],
    ids=lambda value: getattr(value, "arch", value),
)
def test_what_the_source_computes(monkeypatch, layout, device, num_heads, topk):
    """Every build, with absent entries, a length and a sink; in splits where the device would split so few rows."""
    torch.manual_seed(0)
    kv = cache(5, 16, gap=16, layout=layout)
    q, indices = problem(2, 1, num_heads, topk, 80)
    lengths = torch.tensor([[topk], [topk // 2]], dtype=torch.int32)
    request = REQUEST.but(kv_layout=layout, num_heads=num_heads, device=device)
    check(monkeypatch, kv, q, indices, request, lengths=lengths, attn_sink=torch.randn(num_heads))


@pytest.mark.parametrize("num_heads", [16, 64])
def test_scales_that_no_single_factor_holds(monkeypatch, num_heads):
    """2^120 times a large scale is infinite; small ones beside it keep their bits."""
    torch.manual_seed(0)
    kv = cache(2, 16)
    values = torch.randn(32, 576) * torch.tensor([2.0**14, 2.0**-10]).repeat(16).unsqueeze(1)
    kv.copy_(FP8_DS_MLA.pack(values[:, :512], torch.zeros(32, 64)).view_as(kv))
    q, indices = problem(1, 1, num_heads, 32, 32)
    q[..., :512] *= 2.0**-14
    for chosen in (indices, indices | 1):  # all rows, and the small ones alone
        check(monkeypatch, kv, q, chosen, REQUEST.but(num_heads=num_heads, batch_invariant=True))


@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
def test_blocks_share_the_keys_that_a_row_has(monkeypatch, layout):
    """256 keys of 512 in four blocks: none is idle. 100 keys: two are, and what is left of them is not read."""
    torch.manual_seed(0)
    kv, indices = (
        cache(8, 16, layout=layout),
        torch.arange(512, dtype=torch.int32).remainder(128).expand(2, 1, 512).contiguous(),
    )
    q, lengths = torch.randn(2, 1, 16, 576).bfloat16(), torch.tensor([[256], [100]], dtype=torch.int32)
    schedule = SplitSchedule(2, 16, 512, 4, torch.full((4, 2, 16, 512), torch.nan), torch.zeros(4, 2, 16))
    check(monkeypatch, kv, q, indices, REQUEST.but(kv_layout=layout, device=A100), schedule=schedule, lengths=lengths)
    assert schedule.partial_lse.isfinite().all(-1).tolist() == [[True, True], [True, True], [True, False], [True, False]]


def test_more_splits_than_a_warp_has_lanes(monkeypatch):
    """The merge knows 32 splits at a time: 34 of 64 keys, and a row whose keys fill three of them."""
    torch.manual_seed(0)
    kv, keys = cache(8, 16), 34 * 64
    indices = torch.arange(keys, dtype=torch.int32).remainder(128).expand(2, 1, keys).contiguous()
    q, lengths = torch.randn(2, 1, 16, 576).bfloat16(), torch.tensor([[keys], [150]], dtype=torch.int32)
    schedule = SplitSchedule(2, 16, keys, 34, torch.full((34, 2, 16, 512), torch.nan), torch.zeros(34, 2, 16))
    check(monkeypatch, kv, q, indices, REQUEST.but(device=A100), schedule=schedule, lengths=lengths)
    assert schedule.partial_lse.isfinite().all(-1).sum(0).tolist() == [34, 3]


def test_rows_without_an_entry_are_zero(monkeypatch):
    kv = cache(2, 16)
    q, indices = problem(2, 1, 16, 64, 32)
    indices[0] = -1
    check(monkeypatch, kv, q, indices, REQUEST.but(device=A100), attn_sink=torch.randn(16))


@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("num_heads", [16, 50])
def test_rows_that_no_index_names_may_be_nan(monkeypatch, layout, num_heads):
    """Every other row is 0xFF, a row past the lengths too."""
    torch.manual_seed(0)
    kv = cache(5, 16, gap=16, layout=layout)
    kv.view(torch.uint8)[:, 1::2] = 0xFF
    q, indices = problem(2, 1, num_heads, 70, 80)
    indices = indices & ~1
    indices[0, 0, 40:] = 1
    lengths = torch.tensor([[40], [70]], dtype=torch.int32)
    check(monkeypatch, kv, q, indices, REQUEST.but(kv_layout=layout, num_heads=num_heads, device=A100), lengths=lengths)


@pytest.mark.parametrize("sign", [0x00, 0x80])
def test_a_nan_code_in_a_row_that_is_named_counts_as_480(monkeypatch, sign):
    """docs/numerics.md: 480 is 240, a code of its own, at twice the scale."""
    torch.manual_seed(0)
    kv, (q, indices) = cache(2, 16), problem(1, 1, 16, 32, 32)
    monkeypatch.setattr(Emulated, "cache", (kv.data_ptr(), kv.data_ptr() + kv.numel()))
    row = kv.view(-1, 656)[5]
    indices[0, 0, 3] = 5
    row[128:256] = 0
    decode = bind_sm80.bind_sparse_decode(REQUEST.but(device=A100))
    results = []
    for code, factor in ((0x7F, 1.0), (0x77, 2.0)):
        row[130] = code | sign
        row[512:528].view(torch.float32)[1] = 0.25 * factor
        results.append([each.clone() for each in decode(q, kv, indices, softmax_scale=SCALE)])
    (out, lse), (wanted, wanted_lse) = results
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse) and out.isfinite().all()
    row[130] = 0x7E | sign  # 448
    assert not torch.equal(decode(q, kv, indices, softmax_scale=SCALE)[1], lse), "the code counts"


@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_a_broken_query_shows_in_its_own_head(monkeypatch, layout, broken):
    torch.manual_seed(0)
    kv = cache(3, 16, layout=layout)
    monkeypatch.setattr(Emulated, "cache", (kv.data_ptr(), kv.data_ptr() + kv.numel() * kv.element_size()))
    q, indices = problem(2, 1, 16, 40, 48)
    indices[1] = -1
    decode = bind_sm80.bind_sparse_decode(REQUEST.but(kv_layout=layout, batch_invariant=True))
    whole = decode(q, kv, indices, softmax_scale=SCALE)
    q[:, :, 3, 70] = broken
    out, lse = decode(q, kv, indices, softmax_scale=SCALE)
    others = torch.arange(16) != 3
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan()
    assert torch.equal(out[:, :, others], whole[0][:, :, others]) and torch.equal(lse[:, :, others], whole[1][:, :, others])
    assert not out[1].any() and (lse[1] == -torch.inf).all()
