# SPDX-License-Identifier: Apache-2.0
"""The vendor's layouts: a row is what the vendor's own test of the operation builds, and a layout is never guessed."""

from __future__ import annotations

import pytest
import torch

import mla_portable as mp
from mla_portable.contracts import InvalidArgument
from mla_portable.layouts import FP8_DS_MLA, layout_of
from mla_portable_ascend.layouts import C8, C8_E4M3

PACKED = pytest.mark.parametrize("layout", [C8, C8_E4M3], ids=lambda layout: layout.name)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of very different sizes, a group of zeros."""
    latent, rope = torch.randn(9, 4, 128), torch.randn(9, 64).bfloat16()
    latent *= torch.logspace(-3, 3, 9).view(9, 1, 1)
    latent[3, 2] = 0
    return latent.flatten(1), rope


@PACKED
def test_a_row_is_codes_then_the_rotary_part_then_scales(layout):
    latent, rope = tokens()
    row = layout.pack(latent, rope)
    assert row.shape == (9, 656) and row.dtype == torch.uint8
    codes, scales = row[:, :512].contiguous().view(layout.codes), row[:, 640:].contiguous().view(torch.float32)
    assert torch.equal(row[:, 512:640].contiguous().view(torch.bfloat16), rope)
    wanted = latent.view(9, 4, 128).abs().amax(dim=2) / {C8: 127, C8_E4M3: 448}[layout]
    torch.testing.assert_close(scales, wanted.clamp(min=torch.finfo(torch.float32).tiny), rtol=1e-6, atol=0)
    values = codes.double().view(9, 4, 128) * scales.double().unsqueeze(2)
    assert torch.equal(layout.split(row, torch.float64)[0], values.flatten(1))
    step = scales.double() * {C8: 0.5, C8_E4M3: 16}[layout]  # half the distance of the greatest codes
    assert ((values - latent.double().view(9, 4, 128)).abs() <= step.unsqueeze(2) * (1 + 1e-6)).all()
    assert not layout.unpack(row[3:4])[0, 256:384].any()


@PACKED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_rounded_once(layout, dtype):
    row = layout.pack(*tokens())
    for got, want in zip(layout.split(row, dtype), layout.split(row, torch.float64), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2**-8 if dtype == torch.bfloat16 else 2**-23, atol=0)


def test_rows_of_656_bytes_are_the_core_s_unless_they_are_named():
    cache = torch.zeros(2, 16, 656, dtype=torch.uint8)
    assert layout_of(cache) is FP8_DS_MLA
    assert layout_of(cache, name="ascend.c8") is C8 and layout_of(cache, name="ascend.c8_e4m3") is C8_E4M3


@PACKED
def test_a_cache_is_written_and_read_by_name(layout):
    latent, rope = tokens()
    cache = torch.zeros(2, 16, 656, dtype=torch.uint8)
    mp.cache_write(latent.bfloat16(), rope, cache, torch.arange(9), scale_format="amax", kv_layout=layout.name)
    assert torch.equal(cache.view(-1, 656)[:9], layout.pack(latent.bfloat16(), rope))
    with pytest.raises(InvalidArgument, match="scale_format"):
        mp.cache_write(latent.bfloat16(), rope, cache, torch.arange(9), scale_format="pow2", kv_layout=layout.name)
