# SPDX-License-Identifier: Apache-2.0
"""The kernels of the passes around vendors' kernels against the same in torch, in Triton's interpreter where there is no GPU.

What the passes in torch compute, the suites on stand-ins hold against the oracle.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch_passes import TorchPageLists, TorchRowParts

from mla_portable_common.deep_gemm.index_pass_kernels import TritonIndexPasses
from mla_portable_common.deep_gemm.pages import Pages, Rows
from mla_portable_common.deep_gemm.torch_passes import TorchIndexPasses
from mla_portable_common.flash_mla.torch_passes import TorchBoundary
from mla_portable_nvidia.fa3.page_lists import PageLists
from mla_portable_nvidia.flashmla.row_parts import RowParts
from mla_portable_nvidia.passes.boundary import Boundary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
HEADS = pytest.mark.parametrize(("heads", "kernel_heads", "parts"), [(3, 64, 2), (40, 64, 1), (64, 64, 4), (100, 128, 16)])


def int32(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def twice(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for the kernel and for torch, in one tensor."""
    return torch.full((2, *shape), value, dtype=dtype, device=DEVICE)


def close(pair: Tensor, tolerance: float) -> None:
    """What was written, and what lies around it."""
    torch.testing.assert_close(pair[0].float(), pair[1].float(), atol=tolerance, rtol=tolerance, equal_nan=True)


def sinks(heads: int, level: float = 0.0) -> Tensor:
    sink = level + torch.randn(heads, generator=torch.Generator().manual_seed(heads))
    sink[0], sink[1] = math.inf, -math.inf
    return sink.to(DEVICE)


# FlashMLA's


@pytest.mark.parametrize(("topk", "width"), [(1, 64), (64, 64), (100, 128), (1100, 1152)])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("num_slots", [1, 50, 2**31 + 7])
def test_sanitise(topk: int, width: int, with_lengths: bool, num_slots: int):
    wide = torch.randint(-5, 60, (3, 4, topk + 8), generator=torch.Generator().manual_seed(topk), dtype=torch.int32)
    wide[0, 0, 0], wide[0, 2, 0] = INT32_MAX, INT32_MIN
    indices = wide[:, ::2, :topk].to(DEVICE)
    lengths = int32([0, topk], [INT32_MAX, INT32_MIN], [topk + 9, topk // 2]) if with_lengths else None
    out = twice(77, 3, 2, width, dtype=torch.int32)
    for passes, mine in zip((Boundary(), TorchBoundary()), out, strict=True):
        passes.sanitise(mine, indices, lengths, num_slots)
    assert torch.equal(*out)


@pytest.mark.parametrize(
    ("heads", "kernel_heads", "in_place"), [(3, 64, False), (16, 64, False), (64, 64, False), (64, 64, True)]
)
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("base_2", [False, True])
def test_finish(heads: int, kernel_heads: int, in_place: bool, with_sink: bool, base_2: bool):
    g = torch.Generator().manual_seed(heads)
    result = torch.randn(3, 2, kernel_heads, 512, generator=g).bfloat16()
    lse = torch.randn(3, kernel_heads, 2, generator=g).transpose(1, 2)
    lse[1, 0], lse[2, 1] = math.inf, -math.inf
    result[1, 0] = math.nan  # what a kernel leaves in an empty row is nobody's business
    out, lses = twice(math.nan, 3, 2, heads + 1, 528, dtype=torch.bfloat16), twice(math.nan, 3, 2, heads + 1)
    sink, given = sinks(heads) if with_sink else None, None if in_place else result.to(DEVICE)
    for passes, memory, mine in zip((Boundary(), TorchBoundary()), out, lses, strict=True):
        if in_place:
            memory[:, :, :heads, :512] = result
        lse_of_heads = lse.transpose(1, 2).to(DEVICE)
        passes.finish(memory[:, :, :heads, :512], mine[..., :heads], given, lse_of_heads, sink, base_2, early=True)
    close(out, 2**-7 if with_sink else 0.0)
    close(lses, 1e-6)
    assert not out[0][1, 0, :heads, :512].any()


# around rows in parts


@HEADS
def test_every_part_gets_the_query_and_its_share_of_the_length(heads: int, kernel_heads: int, parts: int):
    values = 0, min(130, 128 * parts), 128 * parts, 128 * parts + 9, INT32_MIN, INT32_MIN + 1, INT32_MAX
    rows, lengths = len(values), int32(*values).unsqueeze(1)
    q = torch.randn(rows, heads + 2, 580, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)[:, 1:-1, 2:578]
    for given in (lengths, None):
        queries = twice(math.nan, rows * parts, kernel_heads, 576, dtype=torch.bfloat16)
        limits = twice(77, rows * parts, dtype=torch.int32)
        for passes, mine, limit in zip((RowParts(), TorchRowParts()), queries, limits, strict=True):
            passes.spread(mine, None if given is None else limit, q.unsqueeze(1), given, 128)
        assert torch.equal(*queries) and torch.equal(*limits)
        shares = limits[0].view(rows, parts).sum(dim=1)
        assert given is None or shares.tolist() == given.squeeze(1).clamp(0, 128 * parts).tolist()


@HEADS
@pytest.mark.parametrize(  # every two of them meet
    ("with_sink", "with_lse", "base_2"), [(False, False, False), (False, True, True), (True, False, True), (True, True, False)]
)
def test_parts_become_one_result(heads: int, kernel_heads: int, parts: int, with_sink: bool, with_lse: bool, base_2: bool):
    g = torch.Generator().manual_seed(heads)
    lses = 3 * torch.randn(4, parts, kernel_heads, generator=g) + 200  # exp overflows
    lses[1, 0], lses[2, :], lses[3, 1:] = math.inf, -math.inf, -math.inf
    values = torch.randn(4, parts, kernel_heads, 512, generator=g).bfloat16()
    values = values.masked_fill(lses.isinf().unsqueeze(-1), math.nan)  # what a kernel leaves there is nobody's business
    sink, out = sinks(heads, 200.0) if with_sink else None, twice(math.nan, 4, heads + 1, 528, dtype=torch.bfloat16)
    written = twice(math.nan, 4, heads + 1, 2)
    for passes, mine, memory in zip((RowParts(), TorchRowParts()), out, written, strict=True):
        lse_out = memory[:, :heads, 0].unsqueeze(1) if with_lse else None
        given = values.to(DEVICE).flatten(0, 1), (lses / math.log(2.0) if base_2 else lses).to(DEVICE).flatten(0, 1)
        passes.merge(mine[:, :heads, :512].unsqueeze(1), lse_out, *given, sink, base_2)
    close(out, 1e-2)
    close(written, 1e-6)
    assert not out[0][2, :heads, :512].any()


# FlashAttention 3's


@pytest.mark.parametrize("topk", [1, 64, 100, 2048, 2500])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("num_rows", [1, 50, 2**31 + 7])
def test_what_counts_comes_first_in_its_order(topk: int, with_lengths: bool, num_rows: int):
    wide = torch.randint(-5, 60, (10, topk + 8), generator=torch.Generator().manual_seed(topk), dtype=torch.int32)
    wide[0, 0], wide[4, 0], wide[6] = INT32_MAX, INT32_MIN, -1
    lengths = int32(0, topk, INT32_MAX, topk // 2, INT32_MIN) if with_lengths else None
    pages, counts = twice(77, 5, topk, dtype=torch.int32), twice(77, 5, dtype=torch.int32)
    for passes, mine, count in zip((PageLists(), TorchPageLists()), pages, counts, strict=True):
        passes(mine, count, wide[::2, :topk].to(DEVICE), lengths, num_rows)
    assert torch.equal(*counts)
    assert all(torch.equal(*pages[:, row, :count]) for row, count in enumerate(counts[0].tolist()))


# DeepGEMM's

BLOCKS = 40
CASES = {
    # starts, lengths, columns, width, first token, tokens, tokens a row
    "decode": ([0, 1, 2, 3], [1, 64, 700], 11, 704, 0, 3, 1),
    "parts": ([0, 3, 3, 9], [3, 50, 200], 4, 256, 2, 5, 1),
    "late, and a tail": ([2, 3, 6], [70, 130], 3, 192, 0, 9, 1),
    "outside": ([-1, 2, 8], [70, 130], 3, 192, 0, 6, 1),
    "overlong": ([0, 4, 6, 7, 8], [2, 500, -5, INT32_MIN], 2, 128, 0, 8, 1),
    "edges of int32": ([INT32_MIN, 2, 4, 5, INT32_MAX], [INT32_MAX, INT32_MIN, INT32_MIN + 1, INT32_MAX], 2, 128, 0, 6, 1),
    "narrow": ([0, 2, 4], [150, 30], 3, 3, 0, 4, 1),
    "two a row": ([0, 10], [150], 3, 192, 4, 6, 2),
    "two a row, some of no request": ([3, 6], [150], 3, 150, 0, 10, 2),
    "many requests": (list(range(131)), [3 + i for i in range(130)], 3, 192, 60, 70, 1),
}


def described(name: str, passes: TritonIndexPasses) -> tuple[Rows, Pages]:
    starts, lens, columns, width, first, tokens, tokens_a_row = CASES[name]
    g = torch.Generator().manual_seed(columns)
    wide = torch.randint(0, BLOCKS, (len(lens), columns + 3), generator=g, dtype=torch.int32)
    wide.view(-1)[::5] = int32(-1, BLOCKS, INT32_MIN, INT32_MAX).cpu().repeat(wide.numel())[: -(-wide.numel() // 5)]
    batch = Pages(int32(*starts), int32(*lens), wide.to(DEVICE)[:, :columns], BLOCKS, width)
    rows = Rows.empty(tokens, tokens_a_row, -(-width // 64), torch.device(DEVICE))
    rows.table.fill_(77)
    passes.describe(rows, batch, first)
    return rows, batch


@pytest.mark.parametrize("name", CASES)
def test_describe(name: str):
    got, want = (described(name, passes)[0] for passes in (TritonIndexPasses(), TorchIndexPasses()))
    assert torch.equal(got.starts, want.starts) and torch.equal(got.ends, want.ends) and torch.equal(got.lens, want.lens)
    assert torch.equal(got.owners[got.ends > 0], want.owners[got.ends > 0])
    needed = torch.arange(got.table.shape[1], device=DEVICE) < (got.lens[:, :1] + 63) // 64
    assert torch.equal(got.table, want.table.where(needed, 77)), "what no row needs is not written"


@pytest.mark.parametrize("more", [0, 2100])
@pytest.mark.parametrize("name", CASES)
def test_finish_and_erase(name: str, more: int):
    rows, batch = described(name, TritonIndexPasses())
    tokens, width = len(rows.ends), batch.width
    logits = torch.randn(tokens, width + 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:, :width]
    logits[:, ::7] = math.nan
    out, erased = twice(7.0, tokens, width + more + 5), torch.stack([logits, logits])
    apart = replace(rows, owners=rows.owners.where(rows.ends > 0, 0))
    for passes, mine, same in zip((TritonIndexPasses(), TorchIndexPasses()), out, erased, strict=True):
        passes.finish(mine[:, :-5], logits, apart, batch)
        passes.erase(same, apart, batch)
    assert torch.equal(*out) and (out[:, :, :-5:7][:, :, : -(-width // 7)] == -math.inf).all()
    seen = torch.arange(width, device=DEVICE) < rows.ends.unsqueeze(1)
    torch.testing.assert_close(erased[0][seen], erased[1][seen], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("columns", [1, 300, 2100])
def test_window(columns: int, relative: bool):
    starts = int32(0, -7, 5, columns - 1, columns + 9, 2, INT32_MIN, 5, INT32_MAX)
    ends = int32(columns, columns + 100, 5, columns, columns + 20, 1, INT32_MAX, INT32_MIN, INT32_MIN + 1)
    logits = torch.randn(9, columns + 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)[:, :columns]
    logits[:, 1::3] = math.nan
    out = twice(7.0, 9, columns + 5)
    for passes, mine in zip((TritonIndexPasses(), TorchIndexPasses()), out, strict=True):
        passes.window(mine[:, :-5], logits, starts, ends, relative)
    assert torch.equal(*out) and not out.isnan().any()
