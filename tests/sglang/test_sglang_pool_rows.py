# SPDX-License-Identifier: Apache-2.0
"""FP8 caches where Triton does not convert e4m3: the rows are SGLang's, and none of its kernels that convert is launched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machines import A100, H200, RTX_4090
from sglang_kit import cases, fixture, judging, run, small
from sglang_version import SELECTORS
from torch import Tensor

from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, InvalidArgument
from mla_portable.engines.common import routing
from mla_portable.engines.sglang import pool_rows, serving, settings, stock
from mla_portable.layouts import FP8_DS_MLA, FP8_NOPE

OPS = "sglang.kernels.ops"
QUANT = import_module(f"{OPS}.quantization.dsa_quant_k_cache" if SELECTORS else f"{OPS}.attention.dsa.quant_k_cache")
DEQUANT = import_module(f"{OPS}.attention.dsa.dequant_k_cache")
GATHER = "dequantize_k_cache_paged_dsa" if SELECTORS else "dequantize_k_cache_paged"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")
    yield


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The rows' device is this one; its kernels run in Triton's interpreter."""

    def pretend(facts: DeviceFacts, backend: str = "triton") -> None:
        registry = Registry(environ={"MLA_PORTABLE_BACKEND": backend}, probe=False, facts={"cpu": facts})
        monkeypatch.setattr(pool_rows, "get_registry", lambda: registry)
        monkeypatch.setattr(routing, "get_registry", lambda: registry)

    return pretend


@pytest.fixture
def no_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kernels fail, as they do to compile below compute capability 8.9."""

    class Fails:
        def __getitem__(self, grid: Any) -> Any:
            raise ValueError("type fp8e4nv not supported in this architecture")

    monkeypatch.setattr(QUANT, "_quantize_k_cache_fast_kernel", Fails())
    monkeypatch.setattr(DEQUANT, "_dequantize_k_cache_paged_kernel", Fails())


def latents(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    k = torch.randn(count, 576, generator=generator) * torch.logspace(-3, 3, count)[:, None]
    k[0, 128:256] = 0
    k[1, ::3] = 0
    k = k.bfloat16()
    return k[:, :512], k[:, 512:]


def parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and rope of rows [T, 656] of bytes."""
    codes, scales, rope = rows[:, :512], rows[:, 512:528], rows[:, 528:]
    return codes, scales.contiguous().view(torch.float32), rope


def assert_sglang_s(ours: Tensor, theirs: Tensor, k_nope: Tensor) -> None:
    """Scales and rope bit for bit; a code may be the neighbour where SGLang's reciprocal moves a value across a middle.

    SGLang's codes are computed by torch: the interpreter loses the carry of a rounding that ends in the next power of two.
    """
    (codes, scales, rope), (_, their_scales, their_rope) = parts(ours), parts(theirs)
    empty = k_nope.view(-1, 4, 128).abs().amax(2) == 0
    assert empty.any() and torch.equal(rope, their_rope)
    assert torch.equal(scales[~empty], their_scales[~empty])
    assert (their_scales[empty] == 0).all() and (scales[empty] == torch.finfo(torch.float32).tiny).all()
    of_values = scales.repeat_interleave(128, dim=1)
    exact, by_reciprocal = e4m3(k_nope.float() / of_values), e4m3(k_nope.float() * (1 / of_values))
    assert torch.equal(codes, exact)
    differ = exact != by_reciprocal
    assert differ.float().mean() < 2e-3 and ((codes.int() - by_reciprocal.int()).abs()[differ] == 1).all()


def e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def test_rows_are_sglang_s(on: Callable[..., None]):
    k_nope, k_rope = latents(64)
    theirs = torch.cat(QUANT.quantize_k_cache_separate(k_nope, k_rope), dim=-1).squeeze(1)
    whole = QUANT.quantize_k_cache(torch.cat((k_nope, k_rope), 1).view(64, 1, 1, 576)).view(torch.uint8).view(64, 656)
    assert torch.equal(theirs[:, 528:], whole[:, 528:])
    on(A100)
    nope, rope = QUANT.quantize_k_cache_separate(k_nope, k_rope)
    assert nope.shape == (64, 1, 528) and rope.shape == (64, 1, 128) and nope.dtype == rope.dtype == torch.uint8
    ours = torch.cat((nope, rope), dim=-1).squeeze(1)
    assert_sglang_s(ours, theirs, k_nope)
    rows = QUANT.quantize_k_cache(torch.cat((k_nope, k_rope), 1).view(64, 1, 1, 576))
    assert rows.shape == (64, 1, 1, 656) and rows.dtype == torch.float8_e4m3fn
    assert torch.equal(rows.view(torch.uint8).view(64, 656), ours)


def test_gathered_rows_are_sglang_s(on: Callable[..., None]):
    """Bit for bit what SGLang's expression is; its kernel in the interpreter cuts the product to bfloat16 without rounding."""
    k_nope, k_rope = latents(24)
    rows, slots = FP8_DS_MLA.pack(k_nope, k_rope, "amax"), torch.tensor([3, 3, 0, 23, 1, 17], dtype=torch.int32)
    cache = rows.view(torch.float8_e4m3fn).view(24, 1, 656)
    theirs = getattr(DEQUANT, GATHER)(cache, slots)
    on(A100)
    ours = getattr(DEQUANT, GATHER)(cache, slots)
    assert ours.shape == theirs.shape == (6, 1, 576)
    codes, scales, _ = parts(rows[slots])
    latent = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, dim=1)
    wanted = torch.cat((latent.bfloat16(), k_rope[slots]), dim=1)
    assert torch.equal(ours.squeeze(1), wanted)
    torch.testing.assert_close(theirs, ours, rtol=2**-7, atol=0)
    assert getattr(DEQUANT, GATHER)(cache, slots[:0]).shape == (0, 1, 576)


def test_rows_without_a_rotary_part(on: Callable[..., None], no_e4m3: None):
    on(A100)
    k_nope, _ = latents(24)
    nope, rope = QUANT._quantize_k_cache_fast_separate(k_nope, k_nope[:, :0])
    assert nope.shape == (24, 1, 528) and rope.shape == (24, 1, 0)
    rows = FP8_NOPE.pack(k_nope, k_nope[:, :0], "amax")
    assert torch.equal(nope.squeeze(1), rows)
    slots = torch.tensor([3, 3, 0, 23], dtype=torch.int32)
    gathered = getattr(DEQUANT, GATHER)(nope.view(torch.float8_e4m3fn), slots)
    assert torch.equal(gathered.squeeze(1), FP8_NOPE.unpack(rows[slots]))


@pytest.mark.parametrize("impl", ["flashmla_kv", "flashmla_sparse"])
def test_prefill(impl: str, on: Callable[..., None], no_e4m3: None):
    on(A100)
    case = small(cases()["dsa_sparse_prefill_long_extend"])
    with judging() as judged:
        run(case, dsa_prefill_backend=impl, fp8_kv_cache=True, index_topk=16)
    assert judged.kinds == ["prefill fp8_ds_mla" if impl == "flashmla_kv" else "prefill bf16"]


def test_the_device_is_the_one_that_tensors_name(on: Callable[..., None], no_e4m3: None):
    """So that rows' writers are bound with the backend, not in the first write. SGLang says "cuda" where tensors say "cuda:0";
    of a CPU it is the longer name that no tensor has."""
    on(A100)
    case = small(cases()["dsa_sparse_decode_ragged_prefix"])
    built = fixture(case, dsa_decode_backend="flashmla_kv", fp8_kv_cache=True, index_topk=16)
    built.runner.device = "cpu:0"
    serving.attach(built.backend, built.runner)
    bound = [key for key, _ in pool_rows.get_registry()._kept if key[0] is pool_rows.PoolRows]
    assert len(bound) == 1
    QUANT.quantize_k_cache_separate(*latents(2))
    assert [key for key, _ in pool_rows.get_registry()._kept if key[0] is pool_rows.PoolRows] == bound


def test_decode(on: Callable[..., None], no_e4m3: None, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger=settings.logger.name)
    on(A100)
    with judging() as judged:
        run(
            small(cases()["dsa_sparse_decode_ragged_prefix"]),
            dsa_decode_backend="flashmla_kv",
            fp8_kv_cache=True,
            index_topk=16,
        )
    assert judged.kinds == ["decode fp8_ds_mla"]
    served = "cache_write triton.portable, gather_upconvert triton.portable"
    assert f"writes and gathers the rows of FP8 caches ({served}) because Triton does not convert e4m3 on sm80" in caplog.text


@pytest.mark.parametrize("facts", [H200, RTX_4090], ids=lambda facts: facts.arch)
def test_where_triton_converts_sglang_s_kernels_run(facts: DeviceFacts, on: Callable[..., None], no_e4m3: None):
    on(facts)
    with pytest.raises(ValueError, match="fp8e4nv"):
        QUANT.quantize_k_cache_separate(*latents(2))


def test_other_rows_are_left_to_sglang(on: Callable[..., None], no_e4m3: None):
    on(A100)
    with pytest.raises(ValueError, match="fp8e4nv"):
        QUANT._quantize_k_cache_fast_separate(*(each.contiguous() for each in latents(2)), group_size=64)


def test_what_cannot_be_written_is_refused_when_the_model_is_built(monkeypatch: pytest.MonkeyPatch):
    registry = Registry(plugins=(), environ={}, probe=False, facts={"cpu": A100})
    for module in (pool_rows, routing):
        monkeypatch.setattr(module, "get_registry", lambda: registry)
    monkeypatch.setattr(
        "mla_portable.engines.sglang.serving.get_registry",
        lambda: SimpleNamespace(facts=lambda device: A100, keep=lambda key, make: make()),
    )
    monkeypatch.setattr(stock, "_import_error", lambda module: None)
    with pytest.raises(InvalidArgument, match=r"(?s)Triton does not convert e4m3 on sm80.*--kv-cache-dtype bfloat16"):
        fixture(
            small(cases()["dsa_sparse_decode_ragged_prefix"]),
            dsa_decode_backend="flashmla_kv",
            fp8_kv_cache=True,
            index_topk=16,
        )
