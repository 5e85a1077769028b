# SPDX-License-Identifier: Apache-2.0
"""What one head's queries do to the other heads of a block of 64, in a model of the kernel's arithmetic.

`ci/gpu_broken_heads` holds the kernels themselves to the same.
"""

from __future__ import annotations

import math

import pytest
import torch
from native_model import FAR, wide_scores

SHARED = 10_000
"""A distance that no heads have: all share one scale."""


def problem(heads=64, keys=96):
    g = torch.Generator().manual_seed(0)
    return torch.randn(heads, 576, generator=g), torch.randn(keys, 576, generator=g, dtype=torch.float64)


def errors(q, keys, **options):
    """Of each head's scores, relative to its largest."""
    wanted = q.double() @ keys.T
    return (wide_scores(q, keys, **options) - wanted).abs().amax(1) / wanted.abs().amax(1)


@pytest.mark.parametrize("power", [0, FAR - 1, FAR, FAR + 1, 30, 38, 120])
def test_a_loud_head_leaves_the_others_as_exact_as_they_were(power):
    q, keys = problem()
    q[1] *= 2.0**power
    q[5] = 0
    assert errors(q.bfloat16(), keys).nan_to_num(0).max() < 1e-5
    q[6] *= 2.0**-70  # a scale of its own is 2^-60 at least
    assert errors(q.bfloat16(), keys).nan_to_num(0).max() < 1e-2
    if power > 36:
        assert errors(q.bfloat16(), keys, far=SHARED).nan_to_num(0)[2:5].min() > 0.1, "what a shared scale does"


@pytest.mark.parametrize("column", [3, 520])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e38])
def test_a_broken_head_shows_and_stays_alone(value, column):
    q, keys = problem()
    keys[:, column] = -keys[:, column].abs()  # an infinity alone would score -inf everywhere, as if no key were there
    q[1, column] = value
    q = q.bfloat16()
    others = [head for head in range(64) if head != 1]
    assert errors(q, keys)[others].max() < 1e-5
    assert value == 1e38 or wide_scores(q, keys)[1].isnan().all()
    if column == 3:
        assert errors(q, keys, far=SHARED)[others].min() > 0.3, "what a shared scale does"
