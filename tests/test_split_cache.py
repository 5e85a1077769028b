# SPDX-License-Identifier: Apache-2.0
"""A cache in several tensors: the latent in one, the rotary part in another, or codes, rotary part and scales apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from invented_layouts import SPLIT, SPLIT_INT8, known
from torch import Tensor

import mla_portable
from mla_portable.attention import AttentionSpec, HeadDims, PromptAttention, SlotAttention, SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.contracts import Batch, Implementation, InvalidArgument, Registrar, Support, hookimpl
from mla_portable.engines.common import warm_up
from mla_portable.judge.conformance import run_suite
from mla_portable.judge.problems.step import StepShape
from mla_portable.kit.rules import check_cache
from mla_portable.layouts import BF16, INDEX, LAYOUTS, CacheLayout, layout_of
from mla_portable.planner import Planner
from mla_portable.primitives import CACHE_WRITE, GATHER_UPCONVERT, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.primitives.sparse_decode import reference as decode_reference

CPU = torch.device("cpu")
BLOCKS, BLOCK, HEADS, TOPK = 6, 4, 3, 5
TOKENS = BLOCKS * BLOCK
Tensors = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def invented() -> Iterator[None]:
    with known(SPLIT, SPLIT_INT8):
        yield


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def empty(layout: CacheLayout, gap: int = 0) -> Tensors:
    """Tensors of NaN; blocks `gap` rows further apart than they are long."""
    made = []
    for each in layout.tensors:
        whole = torch.full((BLOCKS, BLOCK + gap, each.width * each.dtype.itemsize), 0xFF, dtype=torch.uint8)
        made.append(whole.view(each.dtype)[:, :BLOCK])
    return tuple(made)


def cached(layout: CacheLayout, **keywords: Any) -> Tensors:
    cache = empty(layout, **keywords)
    formats = {"scale_format": layout.scale_formats[0]} if layout.scale_formats else {}
    mla_portable.cache_write(normal(TOKENS, 512), normal(TOKENS, 64, seed=2), cache, torch.arange(TOKENS), **formats)
    return cache


def flat() -> Tensor:
    """The same tokens in one tensor [TOKENS, 576]."""
    return torch.cat([normal(TOKENS, 512), normal(TOKENS, 64, seed=2)], dim=1)


SLOTS = torch.tensor([[0, 3, -1, 23, 7], [9, 9, 1, -1, -1]], dtype=torch.int32)


def decoded(cache: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    q = normal(2, HEADS, 576, seed=3)[:, None]
    return mla_portable.sparse_decode(q, cache, SLOTS[:, None], softmax_scale=0.1, backend="reference", **keywords)


@pytest.mark.parametrize("gap", [0, 2])
def test_tokens_are_written_to_each_tensor(gap: int):
    latent, rope = cached(SPLIT, gap=gap)
    assert torch.equal(latent.flatten(0, 1), normal(TOKENS, 512)) and torch.equal(
        rope.flatten(0, 1), normal(TOKENS, 64, seed=2)
    )
    if gap:
        whole = latent.as_strided((BLOCKS, BLOCK + gap, 512), latent.stride())
        assert whole[:, BLOCK:].isnan().all()


def test_attention_is_bit_equal_to_that_on_one_tensor():
    one = flat().view(BLOCKS, BLOCK, 576)
    for got, want in zip(decoded(cached(SPLIT)), decoded(one), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(decoded(cached(SPLIT), kv_layout="bf16_split")[0], decoded(one)[0])
    q = normal(2, HEADS, 576, seed=3)
    of_split = mla_portable.sparse_prefill(q, cached(SPLIT, gap=1), SLOTS, softmax_scale=0.1, backend="reference")
    of_one = mla_portable.sparse_prefill(q, flat(), SLOTS, softmax_scale=0.1, backend="reference")
    assert torch.equal(of_split[0], of_one[0]) and torch.equal(of_split[1], of_one[1])


def test_a_second_cache_is_in_tensors_too():
    extra = {"extra_kv_cache": cached(SPLIT), "extra_indices": SLOTS[:, None]}
    one = flat().view(BLOCKS, BLOCK, 576)
    want = decoded(one, **(extra | {"extra_kv_cache": one}))
    assert torch.equal(decoded(cached(SPLIT), **extra)[0], want[0])
    with pytest.raises(InvalidArgument, match=r"extra_kv_cache: got torch.bfloat16 rows of 576 \(bf16\), expected a tuple of"):
        decoded(cached(SPLIT), **(extra | {"extra_kv_cache": one}))


@pytest.mark.parametrize("layout", [SPLIT, SPLIT_INT8], ids=lambda layout: layout.name)
def test_gathered_rows_are_in_one_tensor(layout: CacheLayout):
    out = torch.zeros(TOKENS, 576, dtype=torch.bfloat16)
    table, number = torch.arange(BLOCKS, dtype=torch.int32)[None], torch.tensor([TOKENS], dtype=torch.int32)
    mla_portable.gather_upconvert(cached(layout), table, number, number * 0, out=out)
    packed = layout.pack(normal(TOKENS, 512), normal(TOKENS, 64, seed=2))
    assert torch.equal(out, layout.unpack(packed))
    assert layout_of(out) is BF16


def spec(layout: str, **changes: Any) -> AttentionSpec:
    given: dict[str, Any] = {"block_size": BLOCK, "topk": TOPK, "num_heads": HEADS, "softmax_scale": 0.1}
    return AttentionSpec(**given, kv_layout=layout, max_num_tokens=8, max_num_reqs=4, max_model_len=TOKENS, **changes)


def forward(layout: str, cache: Any, route: str) -> tuple[Tensor, Tensor | None]:
    layer = SparseMLAAttention(spec(layout, route=route), device="cpu", registry=Registry(environ={}), backend="reference")
    layer.cache_write(normal(TOKENS, 512), normal(TOKENS, 64, seed=2), cache, torch.arange(TOKENS))
    table = torch.arange(BLOCKS, dtype=torch.int32).view(2, 3)
    starts, seq_lens = np.array([0, 1, 5], dtype=np.int32), np.array([9, 12], dtype=np.int32)
    plan = Planner(layer.planner_config()).plan(Batch(starts, seq_lens, table))
    g = torch.Generator().manual_seed(5)
    positions = torch.stack([torch.randperm(9, generator=g)[:TOPK] for _ in range(5)]).to(torch.int32)
    return layer.forward(normal(5, HEADS, 576, seed=3), cache, positions, plan)


@pytest.mark.parametrize("route", ["direct", "split", "fused", "upconvert"])
def test_a_layers_forward_is_bit_equal_to_that_on_one_tensor(route: str):
    of_split = forward("bf16_split", empty(SPLIT), route)
    of_one = forward("bf16", torch.zeros(BLOCKS, BLOCK, 576, dtype=torch.bfloat16), route)
    assert torch.equal(of_split[0], of_one[0]) and torch.equal(of_split[1], of_one[1])


def test_slot_attention_reads_it():
    layer = SlotAttention(spec("bf16_split", need_lse=False), device="cpu", registry=Registry(environ={}), backend="reference")
    q = normal(2, HEADS, 576, seed=3)
    for decodes in (False, True):
        out = layer.forward(q, cached(SPLIT), SLOTS, softmax_scale=0.1, decodes=decodes)
        assert torch.equal(out, decoded(cached(SPLIT))[0][:, 0])


@pytest.mark.parametrize("layout", ["bf16_split", "int8_split"])
@pytest.mark.parametrize("route", ["direct", "split", "fused", "upconvert"])
def test_a_layer_over_it_is_warmed_up(layout: str, route: str):
    of = spec(layout, route=route, scale_format=(LAYOUTS[layout].scale_formats or (None,))[0], need_lse=False)
    registry = Registry(environ={})
    warm_up.warm_layer(SparseMLAAttention(of, device="cpu", registry=registry, backend="reference"))
    made = warm_up.scratch_cache(of, CPU)
    assert check_cache("test", "kv_cache", made, CPU, kv_layout=layout).kv_layout == layout and len(made) == len(
        LAYOUTS[layout].tensors
    )
    with pytest.raises(InvalidArgument, match=f"block_stride: got 4096, expected None for {layout}, whose cache is"):
        warm_up.scratch_cache(of, CPU, 4096)


def test_calls_over_its_slots_and_prompts_are_warmed_up():
    of, registry = spec("bf16_split", need_lse=False), Registry(environ={})
    warm_up.warm_slots(SlotAttention(of, device="cpu", registry=registry, backend="reference"))
    dims = HeadDims(128, 64, 128)
    warm_up.warm_prompts(PromptAttention(of, dims, device=CPU, registry=registry, backend="reference"))


def test_a_step_over_it_is_refused_before_anything_is_drawn():
    with pytest.raises(InvalidArgument, match="StepShape: kv_layout: got bf16_split, in 2 tensors, expected a layout in one"):
        StepShape(kv_layout="bf16_split")


def test_the_facts_are_those_of_all_tensors():
    found = check_cache("test", "kv_cache", cached(SPLIT), CPU)
    assert found == ("bf16_split", BLOCK, 16, False)
    latent, _ = cached(SPLIT)
    storage = torch.zeros(BLOCKS * (BLOCK * 64 + 4) + 1, dtype=torch.bfloat16)
    odd = storage[1:].view(BLOCKS, -1)[:, : BLOCK * 64].unflatten(1, (BLOCK, 64))
    assert check_cache("test", "kv_cache", (latent, odd), CPU) == ("bf16_split", BLOCK, 2, True)


def swapped(cache: Tensors) -> Any:
    return cache[::-1]


BROKEN: list[tuple[Callable[[Tensors], Any], str]] = [
    (swapped, r"kv_cache: got a tuple of torch.bfloat16 rows of 64, torch.bfloat16 rows of 512"),
    (lambda cache: cache[:1], r"kv_cache: got a tuple of torch.bfloat16 rows of 512, expected"),
    (lambda cache: (), "kv_cache: got a tuple of no tensors, expected"),
    (lambda cache: (cache[0], None), r"kv_cache\[1\]: got None"),
    (lambda cache: (cache[0], cache[1][:-1]), r"kv_cache\[1\]: got shape \[5, 4, 64\], expected \[6, 4, 64\]"),
    (lambda cache: (cache[0], cache[1].to("meta")), r"kv_cache\[1\]: .*on a device that holds data"),
    (lambda cache: (cache[0], cache[1].transpose(0, 1).contiguous().transpose(0, 1)), r"kv_cache\[1\]: got strides"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_tensors_that_do_not_fit_are_refused(change: Callable[[Tensors], Any], message: str):
    with pytest.raises(InvalidArgument, match=message):
        decoded(change(cached(SPLIT)))


def test_results_overlap_none_of_the_tensors():
    cache = cached(SPLIT)
    out = cache[1].flatten()[: 2 * 512].view(2, 1, 1, 512)
    q = normal(2, 1, 1, 576)
    with pytest.raises(InvalidArgument, match=r"out: got memory that overlaps kv_cache\[1\]"):
        mla_portable.sparse_decode(q, cache, SLOTS[:, None], softmax_scale=0.1, out=out)
    twice = cache[0], cache[0].as_strided((BLOCKS, BLOCK, 64), (BLOCK * 64, 64, 1))
    with pytest.raises(InvalidArgument, match=r"kv_cache\[1\]: got memory that overlaps kv_cache\[0\]"):
        mla_portable.cache_write(normal(2, 512), normal(2, 64), twice, torch.tensor([0, 1]))
    layer = SparseMLAAttention(spec("bf16_split"), device="cpu", registry=Registry(environ={}), backend="reference")
    table, starts = torch.arange(BLOCKS, dtype=torch.int32).view(2, 3), np.array([0, 1, 2], dtype=np.int32)
    plan = Planner(layer.planner_config()).plan(Batch(starts, np.array([9, 12], dtype=np.int32), table))
    positions = torch.zeros(2, TOPK, dtype=torch.int32)
    over = cache[0].flatten()[: 2 * HEADS * 512].view(2, HEADS, 512)
    with pytest.raises(InvalidArgument, match=r"out: got memory that overlaps kv_cache\[0\]"):
        layer.forward(normal(2, HEADS, 576), cache, positions, plan, out=over)


def test_the_reference_conforms_on_it():
    primitives = [SPARSE_DECODE, SPARSE_PREFILL, GATHER_UPCONVERT, CACHE_WRITE]
    options: dict[str, Any] = {"device": "cpu", "level": "smoke", "primitives": primitives}
    for name in ("bf16_split", "int8_split"):
        report = run_suite(Registry(environ={}), "reference", match=name, **options)
        assert [result.case.id for result in report.results if result.status != "passed"] == []
        assert {str(result.case.primitive) for result in report.results} == set(map(str, primitives))


def with_kernel(decode: Callable[..., Any]) -> Registry:
    support = Support(source="a test", device_types=("cpu",), kv_layouts=("bf16_split",), graph=False, needs_bf16=False)

    @hookimpl
    def mla_portable_register(registrar: Registrar) -> None:
        registrar.add(Implementation("split.v1", SPARSE_DECODE, support, lambda request: decode, preference=10))

    plugins = [("reference", "mla_portable.reference"), ("split", SimpleNamespace(mla_portable_register=mla_portable_register))]
    return Registry(plugins=plugins, environ={})


def test_a_plugins_kernel_is_judged_on_it():
    def right(q: Tensor, kv_cache: Tensors, indices: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
        assert [each.shape[2] for each in kv_cache] == [512, 64]
        return decode_reference(q, torch.cat(kv_cache, dim=2), indices, **keywords)

    def wrong(q: Tensor, kv_cache: Tensors, indices: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
        return decode_reference(q, torch.cat([kv_cache[0], torch.zeros_like(kv_cache[1])], dim=2), indices, **keywords)

    options: dict[str, Any] = {"device": "cpu", "level": "quick"}
    report = run_suite(with_kernel(right), "split", **options)
    assert report.passed > 50 and report.failed == 0
    assert run_suite(with_kernel(wrong), "split", device="cpu", level="smoke").failed


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tensors": SPLIT.tensors[:1]}, "row_width"),
        ({"tensors": ("latent", "rope")}, "tensors"),
        ({"apart_bytes": 2}, "apart_bytes"),
        ({"cache": INDEX}, "tensors"),
        ({"upconverted": None}, "upconverted"),
        ({"upconverted": SPLIT}, "upconverted"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(changes: dict[str, Any], field: str):
    with pytest.raises(InvalidArgument, match=f"CacheLayout 'bf16_split': {field}: "):
        replace(SPLIT, **changes)
    assert "bf16_split" in LAYOUTS and BF16.upconverted is None and SPLIT.in_place and not SPLIT.is_quantized
