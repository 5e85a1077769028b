# SPDX-License-Identifier: Apache-2.0
"""The kernels of the index passes against what they are to write, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_portable_nvidia.index_pass_kernels import IndexPasses
from mla_portable_nvidia.index_passes import Pages, Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = 40
INT32_MIN = -(2**31)


def pages(starts: list[int], lens: list[int], columns: int, width: int) -> Pages:
    g = torch.Generator().manual_seed(columns)
    wide = torch.randint(0, BLOCKS, (len(lens), columns + 3), generator=g, dtype=torch.int32)
    wide.view(-1)[::5] = torch.tensor([-1, BLOCKS, INT32_MIN, 2**31 - 1], dtype=torch.int32).repeat(wide.numel())[
        : wide.view(-1)[::5].numel()
    ]
    start, length = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (starts, lens))
    return Pages(start, length, wide.to(DEVICE)[:, :columns], BLOCKS, width)


CASES = {
    # starts, lengths, columns, width, first token, tokens, tokens a row
    "decode": ([0, 1, 2, 3], [1, 64, 700], 11, 704, 0, 3, 1),
    "parts": ([0, 3, 3, 9], [3, 50, 200], 4, 256, 2, 5, 1),
    "late, and a tail": ([2, 3, 6], [70, 130], 3, 192, 0, 9, 1),
    "outside": ([-1, 2, 8], [70, 130], 3, 192, 0, 6, 1),
    "overlong": ([0, 4, 6, 7, 8], [2, 500, -5, INT32_MIN], 2, 128, 0, 8, 1),
    "narrow": ([0, 2, 4], [150, 30], 3, 3, 0, 4, 1),
    "two a row": ([0, 10], [150], 3, 192, 4, 6, 2),
    "two a row, some of no request": ([3, 6], [150], 3, 150, 0, 10, 2),
    "many requests": (list(range(131)), [3 + i for i in range(130)], 3, 192, 60, 70, 1),
}


def described(name: str) -> tuple[Rows, Pages]:
    starts, lens, columns, width, first, tokens, tokens_a_row = CASES[name]
    batch = pages(starts, lens, columns, width)
    rows = Rows.empty(tokens, tokens_a_row, -(-width // 64), torch.device(DEVICE))
    rows.table.fill_(77)
    IndexPasses().describe(rows, batch, first)
    return rows, batch


def expected(name: str) -> tuple[list[int], list[int]]:
    """What each token sees, and whose it is."""
    starts, lens, columns, width, first, tokens, _ = CASES[name]
    ends, owners = [], []
    for token in range(first, first + tokens):
        seen, owner = 0, -1
        for r, length in enumerate(lens):
            if starts[r] <= token < starts[r + 1]:
                seen, owner = min(max(length, 0), 64 * columns) - (starts[r + 1] - 1 - token), r
        ends.append(min(max(seen, 0), width))
        owners.append(owner)
    return ends, owners


@pytest.mark.parametrize("name", CASES)
def test_describe(name):
    got, batch = described(name)
    assert not got.starts.any()
    ends, owners = expected(name)
    assert got.ends.tolist() == ends
    assert all(found == owner for found, owner, end in zip(got.owners.tolist(), owners, ends, strict=True) if end)
    lens = torch.tensor(ends).view(got.lens.shape).amax(dim=1, keepdim=True).clamp(min=1).expand_as(got.lens)
    assert got.lens.tolist() == lens.tolist()
    for row, length in enumerate(lens[:, 0].tolist()):
        needed = -(-length // 64)
        owner = int(got.owners[row * lens.shape[1]])
        raw = batch.block_table[owner, :needed].tolist()
        blocks = [block if 0 <= block < BLOCKS else 0 for block in raw]
        assert got.table[row, :needed].tolist() == blocks
        assert (got.table[row, needed:] == 77).all(), "what no row needs is not written"


def logits_of(batch: Pages, tokens: int) -> Tensor:
    """[tokens, width] in rows that lie further apart than they are long."""
    memory = torch.randn(tokens, batch.width + 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return memory[:, : batch.width]


@pytest.mark.parametrize("more", [0, 2100])
@pytest.mark.parametrize("name", CASES)
def test_finish_and_erase(name, more):
    rows, batch = described(name)
    tokens = rows.ends.shape[0]
    want = torch.full((tokens, batch.width + more), -math.inf)
    absent = torch.zeros(tokens, batch.width, dtype=torch.bool)
    logits = logits_of(batch, tokens)
    for token, end in enumerate(rows.ends.tolist()):
        for position in range(end):
            if 0 <= int(batch.block_table[int(rows.owners[token]), position // 64]) < BLOCKS:
                want[token, position] = logits[token, position]
            else:
                absent[token, position] = True
    memory = torch.full((tokens, batch.width + more + 5), 7.0, device=DEVICE)
    IndexPasses().finish(memory[:, :-5], logits, rows, batch)
    assert torch.equal(memory[:, :-5].cpu(), want) and (memory[:, -5:] == 7).all()
    erased = logits_of(batch, tokens)
    IndexPasses().erase(erased, rows, batch)
    seen = torch.arange(batch.width) < rows.ends.cpu().unsqueeze(1)
    assert torch.equal(erased.cpu()[seen], logits.cpu().masked_fill(absent, -math.inf)[seen])


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("columns", [1, 300, 2100])
def test_window(columns, relative):
    starts = torch.tensor([0, -7, 5, columns - 1, columns + 9, 2], dtype=torch.int32)
    ends = torch.tensor([columns, columns + 100, 5, columns, columns + 20, 1], dtype=torch.int32)
    logits = torch.randn(6, columns + 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)[:, :columns]
    want = torch.full((6, columns), -math.inf)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        for column in range(max(start, 0), min(end, columns)):
            want[row, column] = logits[row, column - max(start, 0) if relative else column]
    memory = torch.full((6, columns + 5), 7.0, device=DEVICE)
    IndexPasses().window(memory[:, :-5], logits, starts.to(DEVICE), ends.to(DEVICE), relative)
    assert torch.equal(memory[:, :-5].cpu(), want) and (memory[:, -5:] == 7).all()
