# SPDX-License-Identifier: Apache-2.0
"""Scales outside of the rows: `kv_scale` of a whole cache, `q_scale` of e4m3 queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from invented_layouts import INT8, SCALED, known
from torch import Tensor

import mla_portable
from mla_portable.attention import AttentionSpec
from mla_portable.choose import Registry
from mla_portable.contracts import Implementation, InvalidArgument, Registrar, Support, UnsupportedRequest, hookimpl
from mla_portable.judge.conformance import run_suite
from mla_portable.layouts import INDEX
from mla_portable.primitives import CACHE_WRITE, GATHER_UPCONVERT, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.primitives.sparse_decode import reference as decode_reference

BLOCKS, BLOCK, HEADS, TOKENS = 6, 4, 3, 24
NAME = SCALED.name
SCALE = torch.tensor([0.25])


@pytest.fixture(autouse=True)
def invented() -> Iterator[None]:
    with known(SCALED):
        yield


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def cached(scale: Tensor = SCALE) -> Tensor:
    cache = torch.full((BLOCKS, BLOCK, 576), 0xFF, dtype=torch.uint8)
    tokens = normal(TOKENS, 512), normal(TOKENS, 64, seed=2)
    mla_portable.cache_write(*tokens, cache, torch.arange(TOKENS), kv_scale=scale, kv_layout=NAME)
    return cache


def values(scale: Tensor = SCALE) -> Tensor:
    """[TOKENS, 576] float64: what the cache holds."""
    tokens = torch.cat([normal(TOKENS, 512), normal(TOKENS, 64, seed=2)], dim=1).float()
    return (tokens / scale).to(torch.float8_e4m3fn).float().double() * scale.double()


def attended(q: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
    rows = []
    for query, chosen in zip(q.double(), slots, strict=True):
        own = keys[chosen[chosen >= 0].long()]
        rows.append((0.1 * query @ own.T).softmax(dim=-1) @ own[:, :512])
    return torch.stack(rows)


SLOTS = torch.tensor([[0, 3, -1, 23, 7], [9, 9, 1, -1, -1]], dtype=torch.int32)


def attention(cache: Tensor, decode: bool, q: Tensor, **keywords: Any) -> Tensor:
    keywords = {"softmax_scale": 0.1, "kv_layout": NAME, "backend": "reference"} | keywords
    if decode:
        return mla_portable.sparse_decode(q[:, None], cache, SLOTS[:, None], **keywords)[0][:, 0]
    return mla_portable.sparse_prefill(q, cache, SLOTS, **keywords)[0]


@pytest.mark.parametrize("decode", [True, False])
def test_numbers_count_by_the_scales(decode: bool):
    q = normal(2, HEADS, 576, seed=3)
    out = attention(cached(), decode, q, kv_scale=SCALE)
    torch.testing.assert_close(out.double(), attended(q, values(), SLOTS), rtol=1e-2, atol=1e-2)
    codes, q_scale = (q.float() / 0.5).to(torch.float8_e4m3fn), torch.tensor(0.5)
    out = attention(cached(), decode, codes, kv_scale=SCALE, q_scale=q_scale)
    torch.testing.assert_close(out.double(), attended(codes.float() * 0.5, values(), SLOTS), rtol=1e-2, atol=1e-2)


def test_a_second_cache_counts_by_the_same_scale():
    extra = {"extra_kv_cache": cached(), "extra_indices": SLOTS}
    q = normal(2, HEADS, 576, seed=3)
    out = attention(cached(), False, q, kv_scale=SCALE, **extra)
    torch.testing.assert_close(out, attention(cached(), False, q, kv_scale=SCALE))  # every key twice


def test_gathered_rows_are_multiplied():
    out = torch.zeros(TOKENS, 576, dtype=torch.bfloat16)
    table, number = torch.arange(BLOCKS, dtype=torch.int32)[None], torch.tensor([TOKENS], dtype=torch.int32)
    scale = torch.tensor([0.3])
    mla_portable.gather_upconvert(cached(scale), table, number, number * 0, out=out, kv_scale=scale, kv_layout=NAME)
    assert torch.equal(out, values(scale).float().bfloat16())


CALLS: dict[str, Callable[..., Any]] = {
    "sparse_decode": lambda cache, **keywords: attention(cache, True, normal(2, HEADS, 576), **keywords),
    "sparse_prefill": lambda cache, **keywords: attention(cache, False, normal(2, HEADS, 576), **keywords),
    "cache_write": lambda cache, **keywords: mla_portable.cache_write(
        normal(2, 512), normal(2, 64), cache, torch.tensor([0, 1]), **({"kv_layout": NAME} | keywords)
    ),
    "gather_upconvert": lambda cache, **keywords: mla_portable.gather_upconvert(
        cache,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        out=torch.zeros(4, 576).bfloat16(),
        **({"kv_layout": NAME} | keywords),
    ),
}
WRONG = [
    (None, "kv_scale: got None, expected a float32 tensor of one element, by which e4m3_576 numbers count"),
    (torch.ones(2), "kv_scale: got torch.float32 .2., expected|kv_scale: got .*expected a float32 tensor of one element"),
    (torch.ones(1, dtype=torch.float64), "kv_scale: got .*float64.*expected a float32 tensor of one element on cpu"),
    (0.5, "kv_scale: got float"),
    (torch.ones(1, device="meta"), "kv_scale: .*on a device that holds data"),
]


@pytest.mark.parametrize("name", CALLS)
def test_a_scale_is_there_exactly_where_the_layout_has_one(name: str):
    for scale, message in WRONG:
        with pytest.raises(InvalidArgument, match=message):
            CALLS[name](cached(), kv_scale=scale)
    fp8 = torch.zeros(BLOCKS, BLOCK, 656, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match=r"kv_scale: got .*expected None: fp8_ds_mla has no scale of the whole cache"):
        CALLS[name](fp8, kv_scale=SCALE, kv_layout="fp8_ds_mla")


def test_queries_are_e4m3_exactly_where_they_have_a_scale():
    codes = normal(2, HEADS, 576).to(torch.float8_e4m3fn)
    with pytest.raises(InvalidArgument, match=r"q: got torch.bfloat16, expected torch.float8_e4m3fn or"):
        attention(cached(), True, normal(2, HEADS, 576), kv_scale=SCALE, q_scale=SCALE)
    with pytest.raises(InvalidArgument, match=r"q: got torch.float8_e4m3fn, expected torch.bfloat16"):
        attention(cached(), True, codes, kv_scale=SCALE)
    with pytest.raises(InvalidArgument, match=r"q_scale: got .*expected a float32 tensor of one element"):
        attention(cached(), True, codes, kv_scale=SCALE, q_scale=torch.ones(2))


def test_what_declares_no_q_scale_is_not_called_with_one():
    codes = normal(2, HEADS, 576).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedRequest, match="q_scale"):
        attention(
            torch.zeros(2, 4, 656, dtype=torch.uint8), True, codes, q_scale=SCALE, kv_layout="fp8_ds_mla", backend="triton"
        )


def test_layers_say_that_they_bring_no_scale():
    with pytest.raises(InvalidArgument, match=r"kv_layout: got 'e4m3_576', expected a layout whose rows need no kv_scale"):
        AttentionSpec(HEADS, 0.1, 8, 4, TOKENS, kv_layout=NAME)


def test_rows_have_one_kind_of_scale():
    with pytest.raises(InvalidArgument, match="tensor_scale: got True, expected False for rows with scales of their own"):
        replace(INT8, tensor_scale=True)
    with pytest.raises(InvalidArgument, match="tensor_scale: got True, expected False for the indexer's keys"):
        replace(SCALED, cache=INDEX)


def registry(decode: Callable[..., Any]) -> Registry:
    support = Support(
        source="a test", device_types=("cpu",), kv_layouts=(NAME,), graph=False, needs_bf16=False, q_scale=True, attn_sink=True
    )

    @hookimpl
    def mla_portable_register(registrar: Registrar) -> None:
        registrar.add(Implementation("scaled.v1", SPARSE_DECODE, support, lambda request: decode, preference=10))

    plugins = [
        ("reference", "mla_portable.reference"),
        ("scaled", SimpleNamespace(mla_portable_register=mla_portable_register)),
    ]
    return Registry(plugins=plugins, environ={})


def kernel(*, without: str = "") -> Callable[..., Any]:
    """The reference on the rows that are named, in bfloat16; `without` a scale it is wrong."""

    def decode(
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        kv_scale: Tensor,
        q_scale: Tensor | None = None,
        softmax_scale: float,
        **keywords: Any,
    ) -> Any:
        slots = kv_cache.shape[0] * kv_cache.shape[1]
        there = (indices >= 0) & (indices < slots)
        named = indices.where(there, 0).unique().long()
        rows = kv_cache[named // kv_cache.shape[1], named % kv_cache.shape[1]].unsqueeze(1)  # blocks of one
        values = torch.cat(SCALED.split(rows, torch.float32), dim=-1).bfloat16()  # e4m3 is exact in bfloat16
        indices = torch.searchsorted(named, indices.long()).where(there, -1).to(torch.int32)
        factor = 1.0 if without == "kv_scale" else float(kv_scale)
        queries = 1.0 if q_scale is None or without == "q_scale" else float(q_scale)
        out, lse = decode_reference(q.bfloat16(), values, indices, softmax_scale=softmax_scale * factor * queries, **keywords)
        out *= factor
        return out, lse

    return decode


def test_a_kernel_is_judged_with_scales():
    report = run_suite(registry(kernel()), "scaled", device="cpu", level="quick")
    assert [result.case.id for result in report.results if result.status != "passed"] == []
    scaled = [result for result in report.results if result.case.request.q_scale]
    assert report.passed > 50 and len(scaled) > 5


@pytest.mark.parametrize("without", ["kv_scale", "q_scale"])
def test_a_kernel_that_leaves_a_scale_out_fails(without: str):
    report = run_suite(registry(kernel(without=without)), "scaled", device="cpu", level="smoke")
    failed = [result for result in report.results if result.status == "failed"]
    assert failed and (without == "kv_scale" or all(result.case.request.q_scale for result in failed))


def test_the_reference_conforms_on_it():
    primitives = [SPARSE_DECODE, SPARSE_PREFILL, GATHER_UPCONVERT, CACHE_WRITE]
    report = run_suite(Registry(environ={}), "reference", device="cpu", level="smoke", primitives=primitives, match=NAME)
    assert [result.case.id for result in report.results if result.status != "passed"] == []
    assert {str(result.case.primitive) for result in report.results} == set(map(str, primitives))
