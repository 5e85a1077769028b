# SPDX-License-Identifier: Apache-2.0
"""indexer_logits in Triton, in its interpreter: against the oracle, and what it must not touch."""

from __future__ import annotations

import inspect
import math

import oracle
import pytest
import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Request
from mla_portable.primitives import INDEXER_LOGITS, IndexerLogits
from mla_portable_triton.bind_indexer import bind_indexer_logits
from mla_portable_triton.kernels import indexer_logits as kernel
from mla_portable_triton.kernels.indexer_logits import REQUEST_TILE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FACTS = DeviceFacts(vendor="any", name="any", arch="any", device_type=DEVICE.type)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def problem(heads: int, size: int, queries: list[int], lengths: list[int], tail: int = 0) -> list[Tensor]:
    """Arguments with every block in use, in a shuffled order."""
    g = torch.Generator().manual_seed(heads + size)
    columns = max(1, -(-max([*lengths, 1]) // size))
    tokens = sum(queries) + tail
    return [
        torch.randn(tokens, heads, 128, generator=g).bfloat16(),
        torch.randn(tokens, heads, generator=g),
        torch.randn(len(queries) * columns + 1, size, 128, generator=g).bfloat16(),
        torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
        int32(lengths),
        torch.randperm(len(queries) * columns + 1, generator=g)[1:].view(len(queries), columns).to(torch.int32),
    ]


def solve(arguments: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """What the kernel wrote, and the oracle's answer."""
    bound = bind_indexer_logits(Request(INDEXER_LOGITS, FACTS))
    out = torch.full((arguments[0].shape[0], width), math.nan, device=DEVICE)
    assert bound(*(x.to(DEVICE) for x in arguments), out=out) is out
    return out.cpu().double(), oracle.indexer_logits(*arguments, out=out)


def agree(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got == -math.inf, want == -math.inf) and torch.allclose(got, want, rtol=1e-4, atol=1e-3)


def test_more_requests_than_a_tile_with_empty_ones_between():
    lengths = [3 + r % 5 for r in range(REQUEST_TILE + 6)]
    got, want = solve(problem(2, 16, [r % 2 for r in range(len(lengths))], lengths, tail=1), width=9)
    assert agree(got, want)


@pytest.mark.parametrize("starts", [[0, 9, 1, 3], [9, 1, 3, 2], [7, 3, 1, 0]], ids=str)
def test_starts_that_do_not_ascend_read_nothing_outside(starts: list[int]):
    """Positions stay within the table, so a score is that of a block which the table names, or -inf."""
    arguments = problem(1, 16, [3, 1, 3], [16, 16, 16])
    arguments[3] = int32(starts)
    wide = torch.zeros(3, 4, dtype=torch.int32)  # block 0 is in no column of the table, but stands behind it
    wide[:, :1] = arguments[5][:, :1]
    bound = bind_indexer_logits(Request(INDEXER_LOGITS, FACTS))
    out = torch.full((7, 40), math.nan, device=DEVICE)
    bound(*(x.to(DEVICE) for x in arguments[:5]), wide.to(DEVICE)[:, :1], out=out)
    assert not out.isnan().any() and (out[:, 16:] == -math.inf).all()


def test_the_signature_is_the_protocols():
    bound = bind_indexer_logits(Request(INDEXER_LOGITS, FACTS))
    expected = list(inspect.signature(IndexerLogits.__call__).parameters.values())[1:]
    found = list(inspect.signature(bound).parameters.values())
    assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in expected]


def test_variants_name_every_parameter():
    for variant in kernel.aot_variants():
        names = set(variant.signature) | set(variant.constexprs)
        assert names == set(kernel.indexer_logits_kernel.arg_names)


def test_a_cache_past_two_to_the_31_elements():
    """Its memory is committed only where it is touched; what a 32-bit offset reads instead is NaN."""
    blocks = 2**31 // (16 * 128) + 3
    cache = torch.empty(blocks, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    cache[:2], far = math.nan, torch.randn(16, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache[-1] = far.to(DEVICE)
    arguments = problem(2, 16, [2], [16])
    small = [*arguments[:2], far[None], *arguments[3:5], int32([[0]])]
    bound = bind_indexer_logits(Request(INDEXER_LOGITS, FACTS))
    here = [x.to(DEVICE) for x in (*arguments[:2], *arguments[3:5], int32([[blocks - 1]]))]
    out = torch.full((2, 16), math.nan, device=DEVICE)
    bound(*here[:2], cache, *here[2:], out=out)
    assert agree(out.cpu().double(), oracle.indexer_logits(*small, out=out))
