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

from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, InvalidArgument
from mla_portable.engines.common import index_keys, routing
from mla_portable.engines.common.e4m3_stores import StandIn
from mla_portable.engines.sglang import index_codes, plugin, seams, serving, settings, stock
from mla_portable.layouts import INDEX_FP8

E4M3, WIDTH, ROWS = torch.float8_e4m3fn, 128, 64
OPS = "sglang.kernels.ops"
QUANT = import_module(f"{OPS}.quantization.act_quant_triton" if SELECTORS else f"{OPS}.attention.dsa.triton_kernel")
PAGES = import_module(f"{OPS}.kvcache.dsa_index_k_cache" if SELECTORS else f"{OPS}.attention.dsa.index_buf_accessor")
POOLS: Any = import_module("sglang.srt.layers.attention.dsa.kpool_fp8_index") if SELECTORS else None
KERNELS = tuple(
    (module, seam.name)
    for seam in seams.INDEX_KERNELS
    for module in (QUANT, PAGES, POOLS)
    if module is not None and module.__name__ == seam.target.rpartition(".")[0]
)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    round_ties_to_even(monkeypatch)


def both(call: Callable[[], Any], pools: bool = False) -> tuple[Any, Any]:
    """What a call gives with SGLang's kernels, and as on an A100."""
    assert not any(isinstance(getattr(*each), StandIn) for each in KERNELS)
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
    monkeypatch.setattr(
        serving, "get_registry", lambda: SimpleNamespace(facts=lambda device: A100, keep=lambda key, make: make())
    )
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
    assert not list(seams.objections(plugin._parameters))


def test_pools_are_refused_where_nothing_writes_their_keys(monkeypatch: pytest.MonkeyPatch):
    registry = Registry(plugins=(), environ={}, probe=False, facts={"cpu": A100})
    for module in (index_keys, routing):
        monkeypatch.setattr(module, "get_registry", lambda: registry)
    with pytest.raises(
        InvalidArgument, match=r"(?s)Triton does not convert e4m3 on sm80, and nothing here writes the indexer's"
    ):
        index_codes.serve(A100, pools=True)
    assert not any(isinstance(getattr(*each), StandIn) for each in KERNELS)


def test_a_kernel_with_other_parameters_stops_all_hooks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(QUANT, "_act_quant_kernel", SimpleNamespace(arg_names=["X_ptr", "Y", "round_scale"]))
    assert [each.rpartition(".")[2] for each in seams.objections(plugin._parameters)] == ["_act_quant_kernel has no Y_ptr"]


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
