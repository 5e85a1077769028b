# SPDX-License-Identifier: Apache-2.0
"""The kernel of the page lists against Python's lists, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from mla_portable_nvidia.page_lists import PageLists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("topk", [1, 64, 100, 2048, 2500])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("num_rows", [1, 50, 2**31 + 7])
def test_what_counts_comes_first_in_its_order(topk: int, with_lengths: bool, num_rows: int):
    g = torch.Generator().manual_seed(topk)
    wide = torch.randint(-5, 60, (10, topk + 8), generator=g, dtype=torch.int32)
    wide[0, 0], wide[4, 0] = 2**31 - 1, -(2**31)
    wide[6] = -1
    indices = wide[::2, :topk].to(DEVICE)
    lengths = torch.tensor([0, topk, topk + 9, topk // 2, -3], dtype=torch.int32).to(DEVICE) if with_lengths else None
    expected = [
        [index for index in row[: max(0, limit)] if 0 <= index < num_rows]
        for row, limit in zip(indices.tolist(), [topk] * 5 if lengths is None else lengths.tolist(), strict=True)
    ]
    pages = torch.full((5, topk), 77, dtype=torch.int32, device=DEVICE)
    counts = torch.full((5,), 77, dtype=torch.int32, device=DEVICE)
    PageLists()(pages, counts, indices, lengths, num_rows)
    assert counts.tolist() == [len(row) for row in expected]
    assert [row[:count] for row, count in zip(pages.tolist(), counts.tolist(), strict=True)] == expected
