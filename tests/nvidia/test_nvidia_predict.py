# SPDX-License-Identifier: Apache-2.0
"""ci/predict.py on kernels whose images other tests keep: the loop that it finds is the one with the products."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kernels import load_file
from kept_images import kept_image, kept_listing

from mla_portable.capability.profiles import all_profiles
from mla_portable_nvidia.native import sparse_decode_sm80

CI = Path(__file__).parents[2] / "ci"
MMA = 16 * 8 * 16
"""Multiplications of one `mma.m16n8k16`, which is one HMMA."""
BUILDS = [build for rows in ("fp8_ds_mla", "bf16") for build in sparse_decode_sm80.builds("sm80", rows, None)]


@pytest.fixture(scope="module")
def predict() -> Iterator[Any]:
    module: Any = load_file("predict", str(CI / "predict.py"))
    listed = module.cuobjdump
    module.cuobjdump = lambda cubin, flag: kept_listing(cubin) if flag == "-sass" else listed(cubin, flag)
    yield module
    del sys.modules["predict"]


@pytest.mark.parametrize("build", BUILDS[:2] + BUILDS[-1:], ids=lambda build: build.label)
def test_a_step_has_the_products_of_its_tokens(predict: Any, build: Any) -> None:
    """Scores over 576 columns and sums over 512, for every head and token of a step, over all warps."""
    image = kept_image(build, build.archs["sm80"])
    warps = build.threads // 32
    loop = predict.loop_of(build.label, "sm80", image, build.heads, build.tile, warps, build.shared_bytes)
    assert loop.of("HMMA") * warps * MMA == build.heads * build.tile * (576 + 512)
    device = dict(all_profiles())["a100-80g"].facts
    one, many = (predict.parts(loop, device, rows, build.heads, decode=True) for rows in (1, 64))
    assert one.keys() == many.keys() >= {"issue", "tensor", "memory"} and all(0 < one[unit] < many[unit] for unit in one)
    longest = predict.summary(many).split()[0].replace(",", "")
    assert int(longest) == round(max(many.values()))
    assert predict.serving([loop], 128) == [loop]
