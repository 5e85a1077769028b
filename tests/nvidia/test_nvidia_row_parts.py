# SPDX-License-Identifier: Apache-2.0
"""The kernels around rows in parts against what they are to write, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch

from mla_portable_nvidia.row_parts import RowParts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("heads", "kernel_heads", "parts"), [(3, 64, 2), (40, 64, 1), (64, 64, 4), (100, 128, 16)])
def test_every_part_gets_the_query_and_its_share_of_the_length(heads: int, kernel_heads: int, parts: int):
    q = torch.randn(4, heads + 2, 580, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)[:, 1:-1, 2:578]
    queries = torch.full((4, parts, kernel_heads, 576), math.nan, dtype=torch.bfloat16, device=DEVICE)
    limits = torch.full((4, parts), 77, dtype=torch.int32, device=DEVICE)
    total = 128 * parts
    some = min(130, total)
    lengths = torch.tensor([0, some, total, total + 9], dtype=torch.int32, device=DEVICE)
    RowParts().spread(queries.flatten(0, 1), limits.flatten(), q.unsqueeze(1), lengths.unsqueeze(1), 128)
    assert torch.equal(queries[:, :, :heads], q.unsqueeze(1).expand(-1, parts, -1, -1))
    assert not queries[:, :, heads:].any()
    assert limits.sum(dim=1).tolist() == [0, some, total, total] and limits[1].tolist()[:2] == [128, 2][:parts]
    RowParts().spread(queries.fill_(math.nan).flatten(0, 1), None, q.unsqueeze(1), None, 128)
    assert torch.equal(queries[:, -1, :heads], q)


@pytest.mark.parametrize(("heads", "kernel_heads", "parts"), [(3, 64, 2), (40, 64, 1), (64, 64, 4), (100, 128, 16)])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("base_2", [False, True])
def test_parts_become_one_result(heads: int, kernel_heads: int, parts: int, with_sink: bool, with_lse: bool, base_2: bool):
    g = torch.Generator().manual_seed(heads)
    values = torch.randn(4, parts, kernel_heads, 512, generator=g).bfloat16()
    lses = 3 * torch.randn(4, parts, kernel_heads, generator=g) + 200  # exp overflows
    lses[1, 0], lses[2, :], lses[3, 1:] = math.inf, -math.inf, -math.inf
    sink = None
    if with_sink:
        sink = 200 + torch.randn(heads, generator=g)
        sink[0], sink[1] = math.inf, -math.inf
    given = lses / math.log(2.0) if base_2 else lses
    poisoned = values.masked_fill(lses.isinf().unsqueeze(-1), math.nan)  # what a kernel leaves there is nobody's business
    out = torch.full((4, heads + 1, 528), math.nan, dtype=torch.bfloat16, device=DEVICE)
    given_sink = None if sink is None else sink.to(DEVICE)
    parts_of, lses_of = poisoned.to(DEVICE).flatten(0, 1), given.to(DEVICE).flatten(0, 1)
    memory = torch.full((4, heads + 1, 2), math.nan, device=DEVICE)
    lse_out = memory[:, :heads, 0].unsqueeze(1) if with_lse else None
    RowParts().merge(out[:, :heads, :512].unsqueeze(1), lse_out, parts_of, lses_of, given_sink, base_2)
    assert out[:, heads:].isnan().all() and out[..., 512:].isnan().all()
    assert memory[:, heads].isnan().all() and memory[..., 1].isnan().all()
    exact = lses[:, :, :heads].double().masked_fill(lses[:, :, :heads].isinf(), -math.inf)
    lse = exact.logsumexp(dim=1)
    weights = torch.exp(exact - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(1))
    want = (weights.unsqueeze(-1) * values[:, :, :heads].double()).sum(dim=1)
    if sink is not None:
        want *= torch.sigmoid(lse.masked_fill(lse.isinf(), 0.0) - sink.double()).unsqueeze(-1)
    torch.testing.assert_close(out[:, :heads, :512].double().cpu(), want, atol=1e-2, rtol=1e-2)
    assert not out[2, :heads, :512].any()
    if lse_out is not None:
        torch.testing.assert_close(lse_out[:, 0].double().cpu(), lse, atol=1e-4, rtol=1e-6)
