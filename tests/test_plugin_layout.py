# SPDX-License-Identifier: Apache-2.0
"""A plugin with a layout of its own, whose rows are as wide as the core's: judged, chosen and listed as the core's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from invented_layouts import INT8, INT8_KEYS, known
from torch import Tensor

import mla_portable
from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.capability.detail import offers_on
from mla_portable.capability.profiles import all_profiles
from mla_portable.capability.table import make_matrix
from mla_portable.choose import Registry
from mla_portable.contracts import DecodeSchedule, Implementation, InvalidArgument, Registrar, Request, Support, hookimpl
from mla_portable.dispatch import serving
from mla_portable.judge.conformance import run_suite
from mla_portable.judge.problems import draw
from mla_portable.judge.problems.attention import TOLERANCES
from mla_portable.judge.problems.bench import KernelCase
from mla_portable.layouts import CORE_LAYOUTS, FP8_DS_MLA, LAYOUTS, CacheLayout
from mla_portable.primitives import CACHE_WRITE, GATHER_UPCONVERT, INDEXER_LOGITS, SPARSE_DECODE


@pytest.fixture(autouse=True)
def invented() -> Iterator[None]:
    with known(INT8):
        yield


def keys_of(rows: Tensor, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """[..., 512] and [..., 64] float32 of rows [..., 656]: the plugin's own reading of its layout."""
    codes = rows[..., :512].contiguous().view(torch.int8).float()
    rope = rows[..., 512:640].contiguous().view(torch.bfloat16).float()
    scales = rows[..., 640:].contiguous().view(torch.float32).repeat_interleave(128, dim=-1)
    latent = codes * scales
    return (latent.bfloat16().float(), rope) if rounded else (latent, rope)


def decode_by(keys: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def decode(
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        schedule: DecodeSchedule | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        blocks, size, _ = kv_cache.shape
        index = indices.long()
        valid = (index >= 0) & (index < blocks * size)
        if lengths is not None:
            valid &= torch.arange(index.shape[2]) < lengths.unsqueeze(-1)
        index = index.masked_fill(~valid, 0)
        latent, rope = keys(kv_cache[index // size, index % size])  # [B, S, K, ...]
        latent, rope = latent.masked_fill(~valid[..., None], 0), rope.masked_fill(~valid[..., None], 0)
        query = q.float() * softmax_scale
        scores = query @ torch.cat([latent, rope], dim=-1).mT
        scores = scores.masked_fill(~valid.unsqueeze(2), -torch.inf)
        lse = scores.logsumexp(dim=-1)
        weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
        result = (weights @ latent).bfloat16()
        out = result if out is None else out.copy_(result)
        return out, lse if lse_out is None else lse_out.copy_(lse)

    return decode


def write(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "int8") -> None:
    size = kv_cache.shape[1]
    kept = ((slot_mapping >= 0) & (slot_mapping < kv_cache.shape[0] * size)).nonzero()[:, 0]
    slots = slot_mapping[kept]
    groups = kv_c[kept].float().view(-1, 4, 128)
    scales = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-9) / 127
    codes = torch.clamp(torch.round(groups / scales), -127, 127).to(torch.int8).view(-1, 512)
    rows = [codes.view(torch.uint8), k_pe[kept].bfloat16().contiguous().view(torch.uint8), scales.view(-1, 4).view(torch.uint8)]
    kv_cache[slots // size, slots % size] = torch.cat(rows, dim=1)


def plugin(decode: Callable[..., Any] | None = None, kv_layouts: tuple[str, ...] = (INT8.name,)) -> object:
    """(name, plugin) with a decode kernel and a writer of INT8 rows."""
    called = decode or decode_by(keys_of)
    support = Support(
        source="a test",
        device_types=("cpu",),
        kv_layouts=kv_layouts,
        scale_formats=("int8",),
        attn_sink=False,
        graph=False,
        needs_bf16=False,
    )

    @hookimpl
    def mla_portable_register(registrar: Registrar) -> None:
        registrar.add(Implementation("codes.int8", SPARSE_DECODE, support, lambda request: called, preference=10))
        registrar.add(Implementation("codes.int8", CACHE_WRITE, support, lambda request: write, preference=10))

    return SimpleNamespace(mla_portable_register=mla_portable_register)


def registry(made: object | None = None, **options: Any) -> Registry:
    plugins = [("reference", "mla_portable.reference"), ("codes", made or plugin())]
    return Registry(plugins=plugins, environ={}, **options)


def cached(layout: CacheLayout, tokens: int = 32) -> Tensor:
    g = torch.Generator().manual_seed(1)
    rows = layout.pack(torch.randn(tokens, 512, generator=g), torch.randn(tokens, 64, generator=g), layout.scale_formats[0])
    return rows.view(-1, 4, layout.row_width)


def call(cache: Tensor, **keywords: Any) -> Tensor:
    g = torch.Generator().manual_seed(2)
    q = torch.randn(3, 1, 2, 576, generator=g).bfloat16()
    indices = torch.randint(-1, 32, (3, 1, 8), generator=g, dtype=torch.int32)
    return mla_portable.sparse_decode(q, cache, indices, softmax_scale=0.1, **keywords)[0]


def test_its_kernels_conform_at_level_quick():
    report = run_suite(registry(), "codes", device="cpu", level="quick")
    assert [result.case.id for result in report.results if result.status != "passed"] == []
    counts = {str(p): sum(r.case.primitive is p for r in report.results) for p in (SPARSE_DECODE, CACHE_WRITE)}
    assert counts["sparse_decode"] > 90 and counts["cache_write"] > 15
    assert all("int8_656-int8" in result.case.id for result in report.results)


def swapped(rows: Tensor) -> tuple[Tensor, Tensor]:
    """As fp8_ds_mla has them: scales before the rotary part."""
    return keys_of(torch.cat([rows[..., :512], rows[..., 528:], rows[..., 512:528]], dim=-1))


@pytest.mark.parametrize("wrong", [swapped, FP8_DS_MLA.split], ids=["scales before rope", "e4m3"])
def test_a_kernel_that_reads_the_cores_rows_fails(wrong: Any):
    keys = wrong if wrong is swapped else lambda rows: FP8_DS_MLA.split(rows, torch.float32)
    reg = registry(plugin(decode_by(keys)))
    report = run_suite(reg, "codes", device="cpu", level="smoke", primitives=[SPARSE_DECODE])
    assert report.failed and report.passed < report.failed
    request = Request(SPARSE_DECODE, reg.facts("cpu"), kv_layout=INT8.name, num_heads=2, topk=8, block_size=4, query_len=1)
    assert reg.decide(request).chosen == "reference.torch"  # the probe found it


def test_it_serves_without_being_forced_and_the_core_serves_its_own_rows():
    calls: list[tuple[int, ...]] = []
    own = decode_by(keys_of)

    def counted(q: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        calls.append(tuple(q.shape))
        return own(q, *args, **keywords)

    reg = registry(plugin(counted))
    with serving(reg):
        out = call(cached(INT8), kv_layout=INT8.name)
        want = call(cached(INT8), kv_layout=INT8.name, backend="reference")
        assert calls[-1] == (3, 1, 2, 576)
        torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)
        count = len(calls)
        core = call(cached(FP8_DS_MLA))
        assert len(calls) == count
    assert torch.equal(core, call(cached(FP8_DS_MLA), backend="reference"))
    decision = mla_portable.explain("sparse_decode", device="cpu", kv_layout=FP8_DS_MLA.name)
    assert decision.chosen != "codes.int8"


def test_a_layer_on_it_is_served_by_it():
    spec = AttentionSpec(
        num_heads=2,
        softmax_scale=0.1,
        max_num_tokens=8,
        max_num_reqs=4,
        max_model_len=32,
        kv_layout=INT8.name,
        block_size=4,
        topk=8,
    )
    layer = SparseMLAAttention(spec, device="cpu", registry=registry())
    served = {part.role: part.decision.chosen for part in layer.route_decision.verdict.parts}
    assert served["decode"] == "codes.int8" and layer.write_decision.chosen == "codes.int8"


def test_it_is_explained_and_in_the_matrix():
    reg = registry()
    with serving(reg):
        decision = mla_portable.explain("sparse_decode", device="cpu", kv_layout=INT8.name, num_heads=2, topk=8)
    assert decision.chosen == "codes.int8" and "codes.int8" in decision.text()
    unprobed = registry(probe=False)
    matrix = make_matrix_of(unprobed)
    assert INT8.name in matrix.layouts and ("codes.int8", "sparse_decode") in matrix.implementations
    offers = offers_on(all_profiles(None)["cpu"], matrix, unprobed, lambda name, commit: None)
    mine = {(each.primitive, each.layout): each.chosen for each in offers if each.implementation == "codes.int8"}
    assert mine == {("sparse_decode", INT8.name): True, ("cache_write", INT8.name): True}


def make_matrix_of(reg: Registry) -> Any:
    return make_matrix(Path("nowhere"), reg, ((), ()))


def test_the_reference_is_judged_on_every_plugins_layout():
    with known(INT8_KEYS):
        report = run_suite(registry(), "reference", device="cpu", level="smoke", match="int8_")
        assert [result.case.id for result in report.results if result.status != "passed"] == []
        assert {str(result.case.primitive) for result in report.results} >= {
            *("sparse_decode", "sparse_prefill", "gather_upconvert", "cache_write"),
            *("indexer_cache_write", "indexer_logits", "indexer_select"),
        }


def test_a_layout_says_what_its_kernels_may_round():
    loose = replace(INT8, name="int8_loose", tolerance="amax")
    with known(loose):
        rounding = plugin(decode_by(lambda rows: keys_of(rows, rounded=True)), kv_layouts=("int8_656", "int8_loose"))
        options: dict[str, Any] = {"device": "cpu", "level": "quick", "primitives": [SPARSE_DECODE]}
        report = run_suite(registry(rounding), "codes", match="int8_loose", **options)
        assert report.passed > 30 and report.failed == 0
        assert run_suite(registry(rounding), "codes", match="int8_656", **options).failed  # scores of large queries
    assert [loose.tolerance_of(each) for each in ("int8", "pow2", None)] == ["amax"] * 3
    assert [INT8.tolerance_of(each) for each in ("int8", None)] == ["bf16", "bf16"]
    assert [FP8_DS_MLA.tolerance_of(each) for each in FP8_DS_MLA.scale_formats] == ["pow2", "amax"]
    assert {storage for storage, _ in TOLERANCES} == {"bf16", "pow2", "amax", "low"}
    with pytest.raises(InvalidArgument, match="tolerance: got 'wide', expected None or one of bf16, pow2, amax"):
        replace(INT8, tolerance="wide")


CORE = [LAYOUTS[name] for name in sorted(CORE_LAYOUTS)]


@pytest.mark.parametrize("layout", [*CORE, INT8, INT8_KEYS], ids=lambda layout: layout.name)
def test_a_row_that_must_not_be_read_is_no_token(layout: CacheLayout):
    row = draw.poison(layout)
    assert row.shape == (layout.row_bytes,)
    assert layout.split(row.view(layout.dtype)[None], torch.float64)[0].isnan().all()


def test_where_nothing_is_nan_poison_is_loud():
    class Whole(type(INT8)):
        """Scales of a power of two as an int8 exponent: no bits of a row are NaN."""

        __slots__ = ()

        def pack(self, latent: Tensor, rope: Tensor, scale_format: str | None = None) -> Tensor:
            exponents = torch.full((len(latent), 16), 8, dtype=torch.int8)
            codes = (latent.nan_to_num(0.0) / 256).round().clamp(-127, 127).to(torch.int8)
            return torch.cat([each.contiguous().view(torch.uint8) for each in (codes, rope.bfloat16(), exponents)], dim=1)

        def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            codes = rows[..., :512].contiguous().view(torch.int8).to(dtype)
            exponents = rows[..., 640:641].contiguous().view(torch.int8).to(dtype)
            return codes * exponents.exp2(), rows[..., 512:640].contiguous().view(torch.bfloat16).to(dtype)

    layout = Whole(**{name: getattr(INT8, name) for name in INT8.__dataclass_fields__} | {"name": "whole"})
    latent, _ = layout.split(draw.poison(layout)[None], torch.float64)
    assert (latent.abs() > 30_000).all()


def test_a_timed_case_takes_the_layouts_own_scales():
    for primitive in (SPARSE_DECODE, GATHER_UPCONVERT):
        sizes = {"num_heads": 2, "topk": 8, "width": 64} if primitive is SPARSE_DECODE else {}
        case = KernelCase(primitive, 8, INT8.name, **sizes)
        assert (case.scale_format, case.storage) == ("int8", "bf16")
    assert INDEXER_LOGITS.layouts[:2] == ("index_bf16", "index_fp8")
