# SPDX-License-Identifier: Apache-2.0
"""ContextShare, and convert_indices over it, against a walk through the positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_portable
from mla_portable.contracts import ContextShare, InvalidArgument

SIZES, INTERLEAVES = st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 16, 64])


def dealt(num_positions: int, size: int, interleave: int) -> list[list[int]]:
    """The positions of each rank, in order: runs of `interleave` dealt out in turn."""
    hands: list[list[int]] = [[] for _ in range(size)]
    for position in range(num_positions):
        hands[position // interleave % size].append(position)
    return hands


@settings(max_examples=60, deadline=None)
@given(size=SIZES, interleave=INTERLEAVES, length=st.integers(0, 400))
def test_a_share_is_what_was_dealt(size: int, interleave: int, length: int) -> None:
    for rank, hand in enumerate(dealt(length, size, interleave)):
        share, everything = ContextShare(size, rank, interleave), torch.arange(-2, length)
        own = share.own(everything)
        assert everything[own >= 0].tolist() == hand
        assert own[own >= 0].tolist() == list(range(len(hand)))
        assert share.positions(own[own >= 0]).tolist() == hand
        assert share.positions(torch.tensor([-1])).tolist() == [-1]
        assert share.lengths(np.array([length], dtype=np.int32)).tolist() == [len(hand)]


@settings(max_examples=60, deadline=None)
@given(
    size=SIZES,
    interleave=INTERLEAVES,
    block_size=st.sampled_from([1, 3, 16, 64]),
    compact=st.booleans(),
    workspace=st.booleans(),
    data=st.data(),
)
def test_every_position_is_found_on_one_rank(
    size: int, interleave: int, block_size: int, compact: bool, workspace: bool, data: st.DataObject
) -> None:
    """Each rank's slots are those of a cache that was filled with its own tokens alone."""
    length = data.draw(st.integers(1, 300))
    rows = data.draw(st.lists(st.lists(st.integers(-3, length - 1), min_size=7, max_size=7), min_size=1, max_size=4))
    topk = torch.tensor(rows, dtype=torch.int32)
    requests = torch.zeros(len(rows), dtype=torch.int32)
    found = torch.zeros(topk.shape, dtype=torch.int64)
    for rank, hand in enumerate(dealt(length, size, interleave)):
        columns = max(1, -(-len(hand) // block_size))
        table = torch.randperm(columns).to(torch.int32).view(1, columns)
        holds = torch.full((columns * block_size,), -1)  # slot -> position
        for own, position in enumerate(hand):
            holds[own if workspace else int(table[0, own // block_size]) * block_size + own % block_size] = position
        prefill = {"prefill_request_ids": requests, "prefill_workspace_starts": torch.tensor([5]).int()} if workspace else {}
        slots, counts = mla_portable.convert_indices(
            topk, requests, table, block_size=block_size, compact=compact,
            dcp_size=size, dcp_rank=rank, interleave=interleave, **prefill,
        )  # fmt: skip
        first = 5 if workspace else 0
        for row, (got, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            expected = [position if position in set(hand) else -1 for position in rows[row]]
            named = [int(holds[slot - first]) if slot >= 0 else -1 for slot in got]
            valid = [position for position in expected if position >= 0]
            assert count == len(valid)
            assert named == (valid + [-1] * (7 - count) if compact else expected)
            found[row] += torch.tensor([position >= 0 for position in expected])
    assert torch.equal(found, (topk >= 0).long())


@pytest.mark.parametrize(
    ("share", "argument"),
    [((0, 0, 1), "size"), ((2, 2, 1), "rank"), ((2, -1, 1), "rank"), ((2, 0, 0), "interleave"), ((4, 1, 2**30), "interleave")],
)
def test_a_share_that_cannot_be(share: tuple[int, int, int], argument: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        ContextShare(*share)
    assert refusal.value.argument == argument
    topk, table = torch.zeros((1, 1), dtype=torch.int32), torch.zeros((1, 1), dtype=torch.int32)
    size, rank, interleave = share
    with pytest.raises(InvalidArgument, match=argument):
        mla_portable.convert_indices(
            topk, topk[0], table, block_size=64, dcp_size=size, dcp_rank=rank, interleave=interleave
        )  # fmt: skip
