# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash's pools of keys where Triton has no e4m3: SGLang's own functions write the same bytes as with e4m3."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from machines import A100
from test_sglang_index_codes import POOLS, ROWS, WIDTH, as_on_a_gpu, both, cache, values
from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.sglang import index_codes

__all__ = ["as_on_a_gpu"]

POOL = 4


def pool_of(extra: int = 0) -> SimpleNamespace:
    return SimpleNamespace(page_size=ROWS, index_page_size=ROWS, index_head_dim=WIDTH, index_kpool=POOL, tail_extra_slots=extra)


@pytest.mark.parametrize("masked", [True, False])
def test_pools_of_a_prompt_are_the_same_bytes(masked: bool):
    count = 13
    k, score, ape = values(count, POOL, WIDTH, seed=1), values(count, POOL, WIDTH, seed=2), values(POOL, WIDTH, seed=3).float()
    slots = torch.randperm(8 * ROWS, generator=torch.Generator().manual_seed(4))[:count]
    mask = torch.arange(count) % 3 != 0

    def write() -> Tensor:
        pages = cache()
        named = {"write_mask": mask if masked else None, "round_scale": True}
        POOLS.kpool_softmax_rotate_write_cache(pool_of(), pages, k, score, ape, slots, **named)
        return pages

    theirs, ours = both(write, pools=True)
    assert torch.equal(ours, theirs) and (ours != 0xFF).any()


@pytest.mark.parametrize("write", [True, False])
def test_pools_are_returned_too(write: bool):
    k, score, ape = values(6, POOL, WIDTH, seed=1), values(6, POOL, WIDTH, seed=2), values(POOL, WIDTH, seed=3).float()
    slots = torch.arange(6) * 5

    def compress() -> tuple[Tensor, Tensor, Tensor]:
        pages = cache()
        named = {"round_scale": True, "return_compressed": True, "write_cache": write}
        return *POOLS.kpool_softmax_rotate_write_cache(pool_of(), pages, k, score, ape, slots, **named), pages

    theirs, ours = both(compress, pools=True)
    for their, our in zip(theirs, ours, strict=True):
        assert their.dtype == our.dtype and torch.equal(our.view(torch.uint8), their.view(torch.uint8))
    assert (ours[2] != 0xFF).any() == write


@pytest.mark.parametrize("masked", [True, False])
def test_pools_of_a_ring_and_a_chunk_are_the_same_bytes(masked: bool):
    count, requests = 7, 3
    chunk, score, ape = values(40, WIDTH, seed=1), values(40, WIDTH, seed=2), values(POOL, WIDTH, seed=3).float()
    tail_k, tail_score = values(requests, POOL, WIDTH, seed=4), values(requests, POOL, WIDTH, seed=5)
    request = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    from_tail, base = torch.tensor([2, 0, 3, 0, 0, 0, 1]), torch.tensor([2, 0, 5, 0, 0, 0, 7])
    source = torch.arange(count) * 4
    slots = torch.randperm(8 * ROWS, generator=torch.Generator().manual_seed(4))[:count]
    mask = torch.arange(count) % 3 != 1

    def write() -> Tensor:
        pages = cache()
        POOLS.kpool_assemble_softmax_rotate_write_cache(
            pool_of(), pages, chunk, score, tail_k, tail_score, request, from_tail, source, base, ape, slots,
            write_mask=mask if masked else None, round_scale=True,
        )  # fmt: skip
        return pages

    theirs, ours = both(write, pools=True)
    assert torch.equal(ours, theirs) and (ours != 0xFF).any()


def test_decodes_fill_rings_and_pools_with_the_same_bytes():
    """Requests at any place of a pool; one that is padding, one out of range, one past its table."""
    positions = torch.tensor([0, 1, 2, 3, 7, 31, 103, 255, 259, 3, 7, -1])
    count = len(positions)
    key, score, ape = values(count, WIDTH, seed=5), values(count, WIDTH, seed=6), values(POOL, WIDTH, seed=7).float()
    tails = values(count, POOL, WIDTH, seed=8), values(count, POOL, WIDTH, seed=9)
    requests = torch.arange(count)
    requests[10] = count + 5
    locations = torch.arange(1, count + 1)
    locations[9] = 0
    table = (torch.arange(count * 4, dtype=torch.int32).view(count, 4) * POOL) % (64 * POOL)

    def decode() -> tuple[Tensor, ...]:
        pages, (tail_k, tail_score) = cache(64), (each.clone() for each in tails)
        POOLS.kpool_decode_update_and_maybe_write_cache(
            pool_of(), pages, tail_k, tail_score, key, score, ape, table, requests, positions, positions + 1, locations,
            round_scale=True,
        )  # fmt: skip
        return pages, tail_k, tail_score

    theirs, ours = both(decode, pools=True)
    assert all(torch.equal(our.view(torch.uint8), their.view(torch.uint8)) for our, their in zip(ours, theirs, strict=True))
    assert (ours[0] != 0xFF).any(dim=1).sum() >= 5


@pytest.mark.parametrize("accepted", [True, False])
def test_drafts_fill_rings_and_pools_with_the_same_bytes(accepted: bool):
    requests, drafts, extra = 5, 6, 8
    count = requests * drafts
    key, score, ape = values(count, WIDTH, seed=5), values(count, WIDTH, seed=6), values(POOL, WIDTH, seed=7).float()
    tails = [values(requests, POOL + extra, WIDTH, seed=seed) for seed in (8, 9)]
    start = torch.tensor([0, 1, 3, 30, 5])
    slots = torch.randperm(8 * ROWS, generator=torch.Generator().manual_seed(4))[: requests * 2].view(requests, 2)
    locations = torch.arange(1, count + 1)
    locations[3 * drafts] = 0

    def verify() -> tuple[Tensor, ...]:
        pages, (tail_k, tail_score) = cache(), (each.clone() for each in tails)
        POOLS.kpool_write_tail_and_maybe_compress(
            pool_of(extra), pages, key, score, tail_k, tail_score, ape, torch.arange(requests), start, start // POOL * POOL,
            slots, locations, drafts, True,
            effective_n_per_batch=torch.tensor([1, 3, 6, 6, 2], dtype=torch.int32) if accepted else None,
        )  # fmt: skip
        return pages, tail_k, tail_score

    theirs, ours = both(verify, pools=True)
    assert all(torch.equal(our.view(torch.uint8), their.view(torch.uint8)) for our, their in zip(ours, theirs, strict=True))
    assert (ours[0] != 0xFF).any()


def test_scales_that_are_not_powers_of_two_are_refused():
    index_codes.serve(A100, pools=True)
    k, before = values(2, POOL, WIDTH), cache()
    pages = before.clone()
    with pytest.raises(InvalidArgument, match=r"SGLang: ROUND_SCALE.*powers of two"):
        POOLS.kpool_softmax_rotate_write_cache(pool_of(), pages, k, k, k[0].float(), torch.tensor([1, 2]))
    assert torch.equal(pages, before)
