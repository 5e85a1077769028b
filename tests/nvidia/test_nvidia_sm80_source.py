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

from mla_portable.judge.problems.attention_problem import EDGES, edge_lengths
from mla_portable.kit.split_kv import SplitSchedule
from mla_portable.layouts import FP8_DS_MLA, FP8_V4, LAYOUTS
from mla_portable_nvidia.native import attention_sm80

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    with stand_ins(monkeypatch, Emulated):
        yield


def extent(kv):
    """Where a cache begins and ends, as addresses."""
    begin = kv.data_ptr()
    return begin, begin + ((kv.shape[0] - 1) * kv.stride(0) + kv[0].numel()) * kv.element_size()


def check(monkeypatch, kv, q, indices, request, schedule=None, **options):
    extra = options.get("extra_kv_cache")
    request = request.but(nope=LAYOUTS[request.kv_layout].key_width != q.shape[-1])
    if extra is not None:
        request = request.but(extra_topk=options["extra_indices"].shape[-1], extra_block_size=extra.shape[1])
    monkeypatch.setattr(Emulated, "caches", tuple(extent(each) for each in (kv, extra) if each is not None))
    out, lse = attention_sm80.bind_sparse_decode(request)(q, kv, indices, softmax_scale=SCALE, schedule=schedule, **options)
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


BUILT = ((A100, 16, 150), (RTX_4090, 16, 70), (A100, 21, 70), (RTX_4090, 20, 40), (A100, 50, 70), (RTX_4090, 64, 40))
"""(device, heads, indices) that take each build of the kernel."""


@pytest.mark.parametrize(
    ("rows", "device", "num_heads", "topk"),
    [
        *(("fp8_v4", *build) for build in BUILT),
        *((rows, *build) for rows in ("bf16_nope", "fp8_nope", "fp8_ds_mla without rope") for build in BUILT[::2]),
    ],
    ids=lambda value: getattr(value, "arch", value),
)
def test_rows_whose_keys_have_no_rope(monkeypatch, rows, device, num_heads, topk):
    """Likewise: of BF16 rows, of FP8 rows whose rope is NaN, and of those with their scales behind the rows of a block."""
    torch.manual_seed(0)
    layout = rows.split()[0]
    kv = cache(5, 16, gap=16, layout=layout)
    if layout == "fp8_ds_mla":
        kv[..., 528:] = 0xFF
    q, indices = problem(2, 1, num_heads, topk, 80, width=512)
    lengths = torch.tensor([[topk], [topk // 2]], dtype=torch.int32)
    request = REQUEST.but(kv_layout=layout, num_heads=num_heads, device=device)
    check(monkeypatch, kv, q, indices, request, lengths=lengths, attn_sink=torch.randn(num_heads))


@pytest.mark.parametrize(
    ("layout", "device", "num_heads", "scheduled"),
    [
        *(("fp8_v4", *build, False) for build in ((A100, 16), (RTX_4090, 20), (A100, 50))),
        *(("fp8_v4", A100, 16, True), ("bf16", RTX_4090, 20, True)),
        *(("bf16_nope", A100, 16, False), ("fp8_ds_mla", A100, 50, False), ("fp8_nope", RTX_4090, 50, True)),
    ],
    ids=lambda value: getattr(value, "arch", value),
)
def test_a_row_attends_to_two_caches(monkeypatch, layout, device, num_heads, scheduled):
    """Blocks of other sizes, lists of other lengths: both, one alone, none; in one block, and in three that cut their union."""
    torch.manual_seed(0)
    kv, extra = cache(5, 16, gap=32, layout=layout), cache(24, 2, gap=576 - 16, layout=layout)
    q, indices = problem(4, 1, num_heads, 70, 80, width=LAYOUTS[layout].key_width)
    _, extra_indices = problem(4, 1, num_heads, 90, 48)
    options = {
        "lengths": torch.tensor([[70], [33], [0], [-1]], dtype=torch.int32),
        "attn_sink": torch.randn(num_heads),
        "extra_kv_cache": extra,
        "extra_indices": extra_indices,
        "extra_lengths": torch.tensor([[90], [0], [41], [0]], dtype=torch.int32),
    }
    request = REQUEST.but(kv_layout=layout, num_heads=num_heads, device=device, batch_invariant=not scheduled)
    schedule = None
    if scheduled:
        scratch = torch.full((3, 4, num_heads, 512), torch.nan), torch.zeros(3, 4, num_heads)
        schedule = SplitSchedule(4, num_heads, 70, 3, *scratch, extra_topk=90)
    check(monkeypatch, kv, q, indices, request, schedule=schedule, **options)


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(("layout", "num_heads"), [("fp8_v4", 16), ("bf16", 50)])
def test_lengths_may_be_any_int32(monkeypatch, layout, num_heads, second):
    """Of one list; and of either of two, whose keys are those of the other then. Each is found by strides of its own."""
    torch.manual_seed(0)
    rows = len(EDGES)
    q, indices = problem(rows, 1, num_heads, 70, 80, width=LAYOUTS[layout].key_width)
    options = {"lengths": edge_lengths(rows, 70, 0).unsqueeze(1)}
    if second:
        apart = torch.full((rows, 3), 7, dtype=torch.int32)
        apart[:, 1] = edge_lengths(rows, 90, 1)
        options |= {
            "extra_kv_cache": cache(24, 2, gap=576 - 16, layout=layout),
            "extra_indices": problem(rows, 1, num_heads, 90, 48)[1],
            "extra_lengths": apart[:, 1:2],
        }
    request = REQUEST.but(kv_layout=layout, num_heads=num_heads, device=A100)
    check(monkeypatch, cache(5, 16, gap=32, layout=layout), q, indices, request, **options)


@pytest.mark.parametrize("num_heads", [16, 64])
def test_every_exponent_of_a_scale_of_v4(monkeypatch, num_heads):
    """A row with the exponents 0, 1 and 7 others; each group of columns is compared by itself."""
    torch.manual_seed(0)
    kv = cache(4, 16, layout=FP8_V4.name)
    rows, scales = FP8_V4.parts(kv)
    rows[..., 448:] = 0
    scales[..., :7] = torch.tensor([0, 1, 100, 118, 126, 134, 135], dtype=torch.uint8)
    scales[..., 7] = 255  # nobody's
    q, indices = problem(1, 1, num_heads, 40, 64, width=512)
    q[..., 320:448] *= 2.0**-16
    monkeypatch.setattr(Emulated, "caches", (extent(kv),))
    request = REQUEST.but(kv_layout=FP8_V4.name, num_heads=num_heads, batch_invariant=True)
    decode = attention_sm80.bind_sparse_decode(request)
    out, lse = decode(q, kv, indices, softmax_scale=SCALE)
    wanted, wanted_lse = reference.sparse_decode(q, kv, indices, softmax_scale=SCALE)
    for got, want in zip(out.double().split(64, dim=-1), wanted.double().split(64, dim=-1), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2e-2)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)
    scales[0, 3, 6] = 255
    indices[...] = 3
    out, _ = decode(q, kv, indices, softmax_scale=SCALE)
    assert out[..., 384:448].isnan().all(), "the exponent 255 is NaN"


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


@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla", "fp8_nope", "fp8_v4"])
@pytest.mark.parametrize("num_heads", [16, 50])
def test_rows_that_no_index_names_may_be_nan(monkeypatch, layout, num_heads):
    """Every other row is 0xFF, a row past the lengths too."""
    torch.manual_seed(0)
    kv = cache(5, 16, gap=16, layout=layout)
    for part in LAYOUTS[layout].parts(kv):
        part.view(torch.uint8)[:, 1::2] = 0xFF
    q, indices = problem(2, 1, num_heads, 70, 80, width=LAYOUTS[layout].key_width)
    indices = indices & ~1
    indices[0, 0, 40:] = 1
    lengths = torch.tensor([[40], [70]], dtype=torch.int32)
    check(monkeypatch, kv, q, indices, REQUEST.but(kv_layout=layout, num_heads=num_heads, device=A100), lengths=lengths)


@pytest.mark.parametrize("sign", [0x00, 0x80])
def test_a_nan_code_in_a_row_that_is_named_counts_as_480(monkeypatch, sign):
    """docs/numerics.md: 480 is 240, a code of its own, at twice the scale."""
    torch.manual_seed(0)
    kv, (q, indices) = cache(2, 16), problem(1, 1, 16, 32, 32)
    monkeypatch.setattr(Emulated, "caches", (extent(kv),))
    row = kv.view(-1, 656)[5]
    indices[0, 0, 3] = 5
    row[128:256] = 0
    decode = attention_sm80.bind_sparse_decode(REQUEST.but(device=A100))
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
    monkeypatch.setattr(Emulated, "caches", (extent(kv),))
    q, indices = problem(2, 1, 16, 40, 48)
    indices[1] = -1
    decode = attention_sm80.bind_sparse_decode(REQUEST.but(kv_layout=layout, batch_invariant=True))
    whole = decode(q, kv, indices, softmax_scale=SCALE)
    q[:, :, 3, 70] = broken
    out, lse = decode(q, kv, indices, softmax_scale=SCALE)
    others = torch.arange(16) != 3
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan()
    assert torch.equal(out[:, :, others], whole[0][:, :, others]) and torch.equal(lse[:, :, others], whole[1][:, :, others])
    assert not out[1].any() and (lse[1] == -torch.inf).all()
