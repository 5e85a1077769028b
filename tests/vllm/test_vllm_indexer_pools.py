# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash's kernels of pooled keys below compute capability 8.9: vLLM's own functions, with bfloat16 in place of e4m3.

vLLM's kernels run in Triton's interpreter, where e4m3 exists, so that both forms can be compared bit for bit.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import vllm
from compiling import compiling
from interpreter_rounding import round_ties_to_even
from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import indexer_choice, indexer_seams, pools
from mla_portable.layouts import INDEX_FP8

POOL, WIDTH, ROWS = 4, 128, 64
PATH = Path(vllm.__file__).parent / "models" / "glm5next" / "nvidia" / "ops" / "kpool_compress.py"
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def conversions_round_to_even(monkeypatch: pytest.MonkeyPatch):
    round_ties_to_even(monkeypatch)


def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType | None:
    """A new copy of vLLM's module with Triton itself, which vLLM replaces where it finds no GPU; None before 0.30."""
    if not PATH.exists():
        return None
    for name, real in (("tl", tl), ("triton", triton)):
        monkeypatch.setattr(f"vllm.triton_utils.{name}", real)
    spec = spec_from_file_location("kpool_compress_of_vllm", PATH)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType] | None:
    """vLLM's module as it is, and with our stores."""
    stock, ours = load(monkeypatch), load(monkeypatch)
    if stock is None or ours is None:
        return None
    pools.store_codes(ours)
    return stock, ours


def values(*shape: int, seed: int = 0) -> Tensor:
    """Of many magnitudes, with zeros; rows of which one is all zeros."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randn(*shape, generator=random) * torch.exp2(torch.randint(-30, 12, (*shape[:-1], 1), generator=random))
    found[0] = 0
    return found.to(torch.bfloat16)


def exact(rotated: Tensor) -> tuple[Tensor, Tensor]:
    """What vLLM means, in torch: codes and scales of rotated rows [N, 128] float32 that are rounded to bfloat16 first."""
    x = rotated.to(torch.bfloat16).float()
    amax = x.abs().amax(dim=1).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    return (x / scale[:, None]).clamp(-448, 448).to(E4M3), scale


def rotate(x: Tensor) -> Tensor:
    """The Hadamard transform of rows of 128, in float32, in the order of butterflies that vLLM's kernels have."""
    for stride in (1, 2, 4, 8, 16, 32, 64):
        a, b = x.view(len(x), 64 // stride, 2, stride).unbind(dim=2)
        x = torch.stack((a + b, a - b), dim=2).view(len(x), WIDTH)
    return x * 0.08838834764831845


def pages(apart: int = 0) -> Tensor:
    """A cache of 0xFF, whose blocks lie `apart` bytes further from one another than they are long."""
    block = ROWS * INDEX_FP8.row_width
    whole = torch.full((8, block + apart), 0xFF, dtype=torch.uint8)
    return whole[:, :block].unflatten(1, (ROWS, INDEX_FP8.row_width))


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_queries_have_the_same_codes_and_scales(rows: int, monkeypatch: pytest.MonkeyPatch):
    loaded = both(monkeypatch)
    if loaded is None:
        return  # came with 0.30
    q = values(max(rows, 1), WIDTH)[:rows]
    (theirs, their_scales), (ours, our_scales) = (module.fwht128_quant_fp8(q) for module in loaded)
    assert ours.dtype == E4M3 and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(our_scales, their_scales)
    codes, scales = exact(rotate(q.float()))
    assert torch.equal(ours.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(our_scales[:, 0], scales)


@pytest.mark.parametrize("masked, apart", [(True, 4096 + 132), (False, 0)])
def test_pools_of_a_prompt_are_the_same_bytes(masked: bool, apart: int, monkeypatch: pytest.MonkeyPatch):
    loaded = both(monkeypatch)
    if loaded is None:
        return  # came with 0.30
    count = 13
    k, score, ape = values(count, POOL, WIDTH, seed=1), values(count, POOL, WIDTH, seed=2), values(POOL, WIDTH, seed=3).float()
    slots = torch.randperm(8 * ROWS, generator=torch.Generator().manual_seed(4))[:count]
    mask = torch.arange(count) % 3 != 0
    if masked:
        slots = torch.where(mask, slots, -1)
    theirs, ours = pages(apart), pages(apart)
    for module, cache in zip(loaded, (theirs, ours), strict=True):
        module.kpool_compress_and_write_cache(cache, k, score, ape, slots, POOL, write_mask=mask if masked else None)
    assert torch.equal(ours, theirs) and (ours != 0xFF).any()
    (codes, scales), (our_codes, our_scales) = (
        module.kpool_compress_and_write_cache(
            cache, k, score, ape, slots.clamp(min=0), POOL, return_compressed=True, write_cache=False
        )
        for module, cache in zip(loaded, (theirs, ours), strict=True)
    )
    assert torch.equal(our_codes.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(our_scales, scales)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tokens, apart", [(1, 0), (6, 132 * 3)])
def test_decodes_fill_rings_and_pools_with_the_same_bytes(tokens: int, apart: int, monkeypatch: pytest.MonkeyPatch):
    """Requests at any place of a pool, one that is padding, one whose tokens have no slots."""
    loaded = both(monkeypatch)
    if loaded is None:
        return  # came with 0.30
    requests = 9
    starts = torch.tensor([0, 1, 2, 3, 7, 30, 101, 5, 6])
    positions = (starts[:, None] + torch.arange(tokens)).to(torch.int32)
    positions[7] = -1
    ring = torch.arange(requests, dtype=torch.int32)[:, None] * POOL + positions.clamp(min=0) % POOL
    ring[7:] = -1
    slots = (torch.arange(requests)[:, None] * 37 + positions // POOL).to(torch.int32)
    slots = torch.where(positions % POOL == POOL - 1, slots, -1)
    slots[7:] = -1
    k, score, ape = (values(requests, tokens, WIDTH, seed=seed) for seed in (5, 6, 7))
    ape = ape[0, :1].float().repeat(POOL, 1)
    tails = [values(requests, 2, POOL, WIDTH, seed=8).clone() for _ in loaded]
    caches = [pages(apart), pages(apart)]
    for module, cache, tail in zip(loaded, caches, tails, strict=True):
        module.kpool_decode_update_and_maybe_write_cache_batched(cache, tail, ring, k, score, ape, slots, positions, POOL)
    assert torch.equal(caches[0], caches[1]) and torch.equal(tails[0], tails[1])
    changed = (caches[1] != 0xFF).flatten(1).any(dim=1).sum()
    assert changed > 0


def test_scales_that_are_not_powers_of_two_are_refused(monkeypatch: pytest.MonkeyPatch):
    loaded = both(monkeypatch)
    if loaded is None:
        return  # came with 0.30
    k = values(2, POOL, WIDTH)
    with pytest.raises(InvalidArgument, match="powers of two"):
        loaded[1].kpool_compress_and_write_cache(pages(), k, k, k[0].float(), torch.tensor([1, 2]), POOL, round_scale=False)


def test_e4m3_is_moved_as_bytes():
    """What pads queries of several lengths, and heads, for kernels of DeepGEMM's signature."""
    seen: list[tuple[torch.dtype, dict[str, Any]]] = []

    def moved(x: Tensor, pad: int, **named: Any) -> Tensor:
        seen.append((x.dtype, named))
        return torch.cat([x, x.new_zeros(pad, *x.shape[1:])])

    function, codes = pools.as_bytes(moved, pad_value=0), values(3, 8).to(E4M3)
    found = function(codes, 2)
    assert found.dtype == E4M3 and torch.equal(found.view(torch.uint8)[:3], codes.view(torch.uint8))
    assert not found.view(torch.uint8)[3:].any()
    assert function(torch.ones(1, 8, dtype=torch.float32), 1, pad_value=7.0).shape == (2, 8)
    assert seen == [(torch.uint8, {"pad_value": 0}), (torch.float32, {"pad_value": 7.0})]


MODULES = {
    "vllm.models.glm5next.nvidia.ops.kpool_compress": list(pools.SERVED_BY),
    "vllm.models.glm5next.nvidia.sparse_indexer": ["pack_seq_triton"],
    "vllm.models.glm5next.common.attention": ["_pad_indexer_heads"],
    "vllm.model_executor.layers.sparse_attn_indexer_kpool": ["pack_seq_triton"],
    "vllm.models.glm5next.nvidia.attention": ["_pad_indexer_heads"],
}
"""In 0.33 the first three, in 0.30 the first and the last two."""


@pytest.mark.parametrize("mode, capability, ours", [("auto", (8, 0), True), ("auto", (8, 9), False), ("off", (8, 0), False)])
def test_the_seams_replace_them_below_8_9_alone(mode: str, capability: tuple[int, int], ours: bool, monkeypatch):
    from test_vllm_indexer_choice import platform, use

    use(monkeypatch, mode, platform(capability=capability), importable=False)
    indexer_choice.forget()
    for name, names in MODULES.items():
        seam = indexer_seams.SEAMS[name]
        module: Any = ModuleType(name)
        for each in {*names, *seam.needs}:
            setattr(module, each, getattr(module, each, None) or type(each, (), {"__init__": lambda self: None}))
        before = {each: getattr(module, each) for each in names}
        seam(module)
        assert {each: getattr(module, each) is not before[each] for each in names} == dict.fromkeys(names, ours), name


def test_they_compile_for_sm80_with_bfloat16_and_not_with_e4m3(tmp_path: Path):
    """vLLM's own sources, ahead of time; the same kernels with pointers to e4m3 are what an A100 stops at."""
    if not PATH.exists():
        return  # came with 0.30
    script = Path(__file__).with_name("compile_pools.py")
    run = subprocess.run(
        [sys.executable, str(script), str(PATH)], env=compiling(tmp_path), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split(" ", 2) for line in run.stdout.splitlines()]
    assert {(kernel, stored): said.startswith("cubin") for kernel, stored, said in lines} == {
        (kernel, stored): stored == "bf16" for kernel in pools.SERVED_BY for stored in ("bf16", "fp8e4nv")
    }
    assert all("fp8e4nv not supported" in said for _, stored, said in lines if stored == "fp8e4nv")
