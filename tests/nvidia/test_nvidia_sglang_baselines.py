# SPDX-License-Identifier: Apache-2.0
"""SGLang's kernels called directly, against their stand-ins: right results, what each refuses, and SGLang's choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import sglang_standins
import torch
from simulated_gpu import FACTS
from test_nvidia_baselines import timed, why

from mla_portable.contracts import Primitive
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.problems.bench import KernelCase, Workshop
from mla_portable.tools.bench.candidates import baseline_candidates
from mla_portable_nvidia.sglang_baselines import sglang_baselines, tiles_per_block
from mla_portable_nvidia.vllm_baselines import imported_function

ATTENTION = (SPARSE_DECODE, SPARSE_PREFILL)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Every test has modules of its own."""
    imported_function.cache_clear()
    yield
    imported_function.cache_clear()


def problem(primitive: Primitive, *, heads: int = 16, rows: int = 5, topk: int = 256, layout: str = "bf16", arch: str = "sm90"):
    case = KernelCase(primitive, rows, layout, heads, topk, 2 * topk)
    return Workshop(torch.device("cpu"), replace(FACTS["sm90"], arch=arch)).make(case)


@pytest.mark.parametrize("folder", sglang_standins.FOLDERS)
def test_every_kernel_is_right_wherever_sglang_keeps_it(folder: str):
    with sglang_standins.installed(folder) as library:
        assert timed(problem(SPARSE_DECODE)) == {"sglang.tilelang": [], "sglang.tilelang_split": []}
        assert timed(problem(SPARSE_PREFILL)) == {"sglang.tilelang": [], "sglang.triton": [], "sglang.triton_union2": []}
    assert library.calls == [
        ("whole", 5, 16), ("part", 5, 16, 1), ("whole", 5, 16), ("prefill", 5, 16, 0), ("prefill", 5, 16, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("heads", [8, 24, 64, 128])
def test_head_counts_go_to_the_kernels_that_take_them(heads: int):
    shared = {8: ["sglang.triton_union2", "sglang.triton_union4"]}.get(heads, [])
    triton = ["sglang.triton"] if heads <= 32 else []
    with sglang_standins.installed():
        assert timed(problem(SPARSE_DECODE, heads=heads)) == {"sglang.tilelang": [], "sglang.tilelang_split": []}
        assert timed(problem(SPARSE_PREFILL, heads=heads)) == {name: [] for name in ["sglang.tilelang", *triton, *shared]}


def test_an_older_sglang_has_fewer():
    with sglang_standins.installed(sglang_standins.FOLDERS[2], "tilelang_sparse_fwd"):
        assert timed(problem(SPARSE_DECODE)) == {"sglang.tilelang": []}
        assert "has no attribute 'sparse_mla_fwd_decode_partial'" in why(problem(SPARSE_DECODE))["sglang.tilelang_split"]


@pytest.mark.parametrize("primitive", ATTENTION)
def test_a_kernel_that_cannot_says_why(primitive: Primitive):
    for refusal in baseline_candidates(problem(primitive), sglang_baselines())[1]:
        if refusal.name != "sglang.triton_union4":  # which 16 heads are too many for
            assert all("No module named 'sglang'" in str(each) for each in refusal.reasons)
            assert {each.remedy for each in refusal.reasons} == {"install SGLang and the TileLang that it names"}
    imported_function.cache_clear()
    with sglang_standins.installed() as library:
        refused = why(problem(primitive, layout="fp8_ds_mla"))
        assert {refused[name] for name in refused if name.startswith("sglang.")} <= {
            "kv_layout fp8_ds_mla (supports bf16)",
            "kv_layout fp8_ds_mla (supports bf16); num_heads 16 (4 or 8, for 4 tokens to share a set)",
        }
        assert why(problem(primitive, arch="sm80"))["sglang.tilelang"] == "arch sm80 (supports sm90)"
        assert "a multiple of 1 up to 64, above of 64" in why(problem(primitive, heads=96))["sglang.tilelang"]
        assert "a multiple of 128" in why(problem(primitive, topk=192))["sglang.tilelang"]
    assert not library.calls and not library.built


def test_splits_and_shared_sets_have_limits_of_their_own():
    with sglang_standins.installed():
        assert timed(problem(SPARSE_DECODE, topk=192)) == {"sglang.tilelang_split": []}
        assert "a multiple of 4 up to 64" in why(problem(SPARSE_DECODE, heads=6))["sglang.tilelang_split"]
        refused = why(problem(SPARSE_PREFILL, heads=8, topk=192))
        assert refused["sglang.triton_union2"] == refused["sglang.triton_union4"] == "topk 192 (a power of two)"
        assert why(problem(SPARSE_PREFILL, heads=64))["sglang.triton"] == "num_heads 64 (SGLang allows up to 32)"


@pytest.mark.parametrize(
    ("rows", "tiles", "run"), [(1, 32, 1), (8, 32, 1), (16, 32, 2), (64, 32, 8), (512, 32, 32), (512, 12, 4)]
)
def test_a_row_is_cut_while_multiprocessors_are_free(rows: int, tiles: int, run: int):
    assert tiles_per_block(rows, tiles, 132) == run


def test_parts_are_as_long_as_sglang_makes_them():
    with sglang_standins.installed() as library:
        assert timed(problem(SPARSE_DECODE, rows=70, topk=512))["sglang.tilelang_split"] == []
    assert library.built == [("part", 16, 512, 4)] and library.calls[-1] == ("part", 70, 16, 4)
