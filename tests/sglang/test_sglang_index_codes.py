# SPDX-License-Identifier: Apache-2.0
"""The indexer's Triton kernels where Triton has no e4m3: SGLang's own functions, with wider numbers in place of e4m3.

SGLang's kernels run in Triton's interpreter, where e4m3 exists, so that both forms can be compared bit for bit.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import compiling
from interpreter_rounding import round_ties_to_even
from machines import A100, H200, RTX_4090
from sglang_indexer import exact
from sglang_kit import cases, fixture, small
from sglang_version import SELECTORS
from torch import Tensor

from mla_portable.contracts import DeviceFacts, InvalidArgument
from mla_portable.engine import index_keys
from mla_portable.engine.e4m3_stores import StandIn
from mla_portable.layouts import INDEX_FP8
from mla_portable.registry import Registry
from mla_portable.sglang import index_codes, places, plugin, serving, settings, stock

E4M3, WIDTH, ROWS, POOL = torch.float8_e4m3fn, 128, 64, 4
OPS = "sglang.kernels.ops"
QUANT = import_module(f"{OPS}.quantization.act_quant_triton" if SELECTORS else f"{OPS}.attention.dsa.triton_kernel")
PAGES = import_module(f"{OPS}.kvcache.dsa_index_k_cache" if SELECTORS else f"{OPS}.attention.dsa.index_buf_accessor")
POOLS: Any = import_module("sglang.srt.layers.attention.dsa.kpool_fp8_index") if SELECTORS else None
KERNELS = tuple(
    (module, place.name)
    for place in places.INDEX_KERNELS
    for module in (QUANT, PAGES, POOLS)
    if module is not None and module.__name__ == place.target.rpartition(".")[0]
)
needs_pools = pytest.mark.parametrize("pools", [POOLS] if POOLS else [], ids=["0.5.23"] if POOLS else [])
"""0.5.16 has no model with pools of keys."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    round_ties_to_even(monkeypatch)


def both(call: Callable[[], Any], pools: bool = False) -> tuple[Any, Any]:
    """What a call gives with SGLang's kernels, and as on an A100."""
    theirs = call()
    index_codes.serve(A100, pools=pools)
    assert all(isinstance(getattr(*each), StandIn) for each in KERNELS)
    return theirs, call()


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Of many magnitudes, with zeros; the first rows are all zeros."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randn(*shape, generator=random) * torch.exp2(torch.randint(-30, 12, (*shape[:-1], 1), generator=random))
    found[0] = 0
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale_fmt", ["ue8m0", None])
def test_queries_have_the_same_codes_and_scales(scale_fmt: str | None, dtype: torch.dtype):
    q = values(11, 8, WIDTH, dtype=dtype)
    (theirs, their_scales), (ours, our_scales) = both(lambda: QUANT.act_quant(q, WIDTH, scale_fmt))
    assert ours.dtype == E4M3 and ours.shape == q.shape and our_scales.shape == (11, 8, 1)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) and torch.equal(our_scales, their_scales)
    codes, scales = exact(q, scale_fmt)
    assert torch.equal(ours.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(our_scales, scales)


def test_every_code_of_e4m3_and_every_tie_is_rounded_as_by_the_kernel():
    grid = torch.arange(128, dtype=torch.uint8).view(E4M3).float()[:127]
    middles = (grid[1:] + grid[:-1]) / 2
    q = torch.zeros(4, WIDTH)
    found = torch.cat([grid, middles, -grid, -middles])
    q[:, :-1] = torch.nn.functional.pad(found, (0, 4 * (WIDTH - 1) - len(found))).view(4, WIDTH - 1)
    q[:, -1] = 448  # so that a power of two is 1
    (theirs, scales), (ours, _) = both(lambda: QUANT.act_quant(q.bfloat16(), WIDTH, "ue8m0"))
    assert (scales == 1).all() and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(ours.view(torch.uint8), q.to(E4M3).view(torch.uint8))


def cache(pages: int = 8) -> Tensor:
    return torch.full((pages, ROWS * INDEX_FP8.row_width), 0xFF, dtype=torch.uint8)


def test_keys_are_moved_as_bytes():
    """Where SGLang's CUDA kernel for keys cannot be compiled, it quantises them like queries, and moves them by this."""
    key, slots = values(5, WIDTH), torch.tensor([70, 3, 511, 64, 0])

    def write() -> Tensor:
        pages = cache()
        k, scale = QUANT.act_quant(key, WIDTH, "ue8m0")
        PAGES.SetKAndS.execute(
            SimpleNamespace(page_size=ROWS, index_page_size=ROWS), buf=pages, loc=slots, index_k=k, index_k_scale=scale
        )
        return pages

    theirs, ours = both(write)
    assert torch.equal(ours, theirs)
    rows = INDEX_FP8.pack(key, key[:, :0], "pow2")
    codes = ours[slots // ROWS, : ROWS * WIDTH].view(5, ROWS, WIDTH)[torch.arange(5), slots % ROWS]
    assert torch.equal(codes, rows[:, :WIDTH])


def pool_of(extra: int = 0) -> SimpleNamespace:
    return SimpleNamespace(page_size=ROWS, index_page_size=ROWS, index_head_dim=WIDTH, index_kpool=POOL, tail_extra_slots=extra)


@needs_pools
@pytest.mark.parametrize("masked", [True, False])
def test_pools_of_a_prompt_are_the_same_bytes(pools: Any, masked: bool):
    count = 13
    k, score, ape = values(count, POOL, WIDTH, seed=1), values(count, POOL, WIDTH, seed=2), values(POOL, WIDTH, seed=3).float()
    slots = torch.randperm(8 * ROWS, generator=torch.Generator().manual_seed(4))[:count]
    mask = torch.arange(count) % 3 != 0

    def write() -> Tensor:
        pages = cache()
        named = {"write_mask": mask if masked else None, "round_scale": True}
        pools.kpool_softmax_rotate_write_cache(pool_of(), pages, k, score, ape, slots, **named)
        return pages

    theirs, ours = both(write, pools=True)
    assert torch.equal(ours, theirs) and (ours != 0xFF).any()


@needs_pools
@pytest.mark.parametrize("write", [True, False])
def test_pools_are_returned_too(pools: Any, write: bool):
    k, score, ape = values(6, POOL, WIDTH, seed=1), values(6, POOL, WIDTH, seed=2), values(POOL, WIDTH, seed=3).float()
    slots = torch.arange(6) * 5

    def compress() -> tuple[Tensor, Tensor, Tensor]:
        pages = cache()
        named = {"round_scale": True, "return_compressed": True, "write_cache": write}
        return *pools.kpool_softmax_rotate_write_cache(pool_of(), pages, k, score, ape, slots, **named), pages

    theirs, ours = both(compress, pools=True)
    for their, our in zip(theirs, ours, strict=True):
        assert their.dtype == our.dtype and torch.equal(our.view(torch.uint8), their.view(torch.uint8))
    assert (ours[2] != 0xFF).any() == write


@needs_pools
@pytest.mark.parametrize("masked", [True, False])
def test_pools_of_a_ring_and_a_chunk_are_the_same_bytes(pools: Any, masked: bool):
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
        pools.kpool_assemble_softmax_rotate_write_cache(
            pool_of(), pages, chunk, score, tail_k, tail_score, request, from_tail, source, base, ape, slots,
            write_mask=mask if masked else None, round_scale=True,
        )  # fmt: skip
        return pages

    theirs, ours = both(write, pools=True)
    assert torch.equal(ours, theirs) and (ours != 0xFF).any()


@needs_pools
def test_decodes_fill_rings_and_pools_with_the_same_bytes(pools: Any):
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
        pools.kpool_decode_update_and_maybe_write_cache(
            pool_of(), pages, tail_k, tail_score, key, score, ape, table, requests, positions, positions + 1, locations,
            round_scale=True,
        )  # fmt: skip
        return pages, tail_k, tail_score

    theirs, ours = both(decode, pools=True)
    assert all(torch.equal(our.view(torch.uint8), their.view(torch.uint8)) for our, their in zip(ours, theirs, strict=True))
    assert (ours[0] != 0xFF).any(dim=1).sum() >= 5


@needs_pools
@pytest.mark.parametrize("accepted", [True, False])
def test_drafts_fill_rings_and_pools_with_the_same_bytes(pools: Any, accepted: bool):
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
        pools.kpool_write_tail_and_maybe_compress(
            pool_of(extra), pages, key, score, tail_k, tail_score, ape, torch.arange(requests), start, start // POOL * POOL,
            slots, locations, drafts, True,
            effective_n_per_batch=torch.tensor([1, 3, 6, 6, 2], dtype=torch.int32) if accepted else None,
        )  # fmt: skip
        return pages, tail_k, tail_score

    theirs, ours = both(verify, pools=True)
    assert all(torch.equal(our.view(torch.uint8), their.view(torch.uint8)) for our, their in zip(ours, theirs, strict=True))
    assert (ours[0] != 0xFF).any()


@needs_pools
def test_scales_that_are_not_powers_of_two_are_refused(pools: Any):
    index_codes.serve(A100, pools=True)
    k, before = values(2, POOL, WIDTH), cache()
    pages = before.clone()
    with pytest.raises(InvalidArgument, match=r"SGLang: ROUND_SCALE.*powers of two"):
        pools.kpool_softmax_rotate_write_cache(pool_of(), pages, k, k, k[0].float(), torch.tensor([1, 2]))
    assert torch.equal(pages, before)


@pytest.mark.parametrize("facts", [H200, RTX_4090], ids=lambda facts: facts.arch)
def test_where_triton_converts_nothing_is_replaced(facts: DeviceFacts):
    index_codes.serve(facts, pools=True)
    assert not any(isinstance(getattr(*each), StandIn) for each in KERNELS)


def test_off_leaves_sglang_s_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_INDEXER, "off")
    index_codes.serve(A100, pools=False)
    assert not any(isinstance(getattr(*each), StandIn) for each in KERNELS)


def test_they_are_replaced_when_a_model_is_built(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Also where the plugin serves no attention; once, and `doctor` still knows them."""
    caplog.set_level(logging.INFO, logger=settings.logger.name)
    monkeypatch.setattr(serving, "get_registry", lambda: SimpleNamespace(facts=lambda device: A100))
    monkeypatch.setattr(stock, "_import_error", lambda module: None)
    for _ in range(2):
        fixture(
            small(cases()["dsa_sparse_decode_ragged_prefix"]), dsa_prefill_backend="tilelang", dsa_decode_backend="tilelang"
        )
    kernels = ", ".join(name for _, name in KERNELS)
    line = f"makes the e4m3 codes of SGLang's kernels {kernels} because Triton does not convert e4m3 on sm80"
    assert caplog.text.count(line) == 1
    for module, name in KERNELS:
        found = getattr(module, name)
        assert isinstance(found, StandIn) and not isinstance(found.kernel, StandIn)
    assert not list(places.objections(plugin._parameters))


def test_pools_are_refused_where_nothing_writes_their_keys(monkeypatch: pytest.MonkeyPatch):
    registry = Registry(plugins=(), environ={}, probe=False, facts={"cpu": A100})
    monkeypatch.setattr(index_keys, "get_registry", lambda: registry)
    with pytest.raises(
        InvalidArgument, match=r"(?s)Triton does not convert e4m3 on sm80, and nothing here writes the indexer's"
    ):
        index_codes.serve(A100, pools=True)
    assert not any(isinstance(getattr(*each), StandIn) for each in KERNELS)


def test_a_kernel_with_other_parameters_stops_all_hooks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(QUANT, "_act_quant_kernel", SimpleNamespace(arg_names=["X_ptr", "Y", "round_scale"]))
    assert [each.rpartition(".")[2] for each in places.objections(plugin._parameters)] == ["_act_quant_kernel has no Y_ptr"]


def test_they_compile_for_sm80_with_wider_numbers_and_not_with_e4m3(tmp_path: Path):
    """SGLang's own sources, ahead of time; the same kernels with pointers to e4m3 are what an A100 stops at."""
    script = Path(__file__).with_name("compile_index_kernels.py")
    modules: dict[str, ModuleType] = {module.__name__: module for module, _ in KERNELS}
    given = [f"{module.__file__}:{name}" for module, name in KERNELS]
    assert len(given) == (6 if SELECTORS else 2) and len(modules) == (3 if SELECTORS else 2)
    command = [sys.executable, str(script), *given]
    run = subprocess.run(command, env=compiling(tmp_path), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line.split(" ", 2) for line in run.stdout.splitlines()]
    assert {name for name, _, _ in lines} == {name for _, name in KERNELS}
    for name, stored, said in lines:
        if stored == "fp8e4nv":
            assert "fp8e4nv not supported" in said, (name, stored, said)
        else:
            assert said == "cubin", (name, stored, said)
