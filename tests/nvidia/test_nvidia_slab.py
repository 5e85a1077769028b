# SPDX-License-Identifier: Apache-2.0
"""The attention kernels' own sources on a layer's part of a slab, computed on a CPU: rows past element 2**32.

A CPU commits the slab's memory only where it is touched. `judge.problems.draw.vast` says which slots are worth naming.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
import torch
from attention_model import Emulated
from indexer_model import EmulatedScores
from machines import A100, H200
from native_model import stand_ins
from sm90_model import EmulatedSm90
from source_on_cpu import COMPILER
from test_nvidia_indexer_logits import request as scores_request
from test_nvidia_native_sm80 import REQUEST
from test_nvidia_sm80_source import extent
from torch import Tensor

from mla_portable.judge.conformance import Case, run_case
from mla_portable.judge.problems.attention_problem import DecodeParams
from mla_portable.judge.problems.indexer_logits import IndexerLogitsParams
from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4, LAYOUTS
from mla_portable_nvidia import native
from mla_portable_nvidia.native import attention_sm80
from mla_portable_nvidia.native import indexer_logits as indexer
from mla_portable_nvidia.native.build_choice import BUILDS, MANY
from mla_portable_nvidia.native.indexer_logits import DECODE, PREFILL, NativeScores
from mla_portable_nvidia.native.sparse_decode import Tensors, prepare

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CPU = torch.device("cpu")


def slab(layout: str, heads: int, blocks: str = "slab", **more: Any) -> DecodeParams:
    """A row that names 64 of such tokens, and lists with holes."""
    scales = LAYOUTS[layout].scale_formats
    return DecodeParams(
        kv=layout, scale_format=scales[0] if scales else None, heads=heads, topk=64, block_size=64, query_len=1, rows=1,
        pattern="holes", blocks=blocks, outputs="packed", alignment=16, **more,
    )  # fmt: skip


def passes(params: Any, bound: Any, name: str = "nvidia.native", device: Any = H200) -> None:
    result = run_case(Case(name, params, params.request(device)), bound, CPU)
    assert result.status == "passed", result.message


ROWS = (BF16.name, BF16_NOPE.name, FP8_DS_MLA.name, FP8_NOPE.name, FP8_V4.name)


@pytest.mark.parametrize(
    ("layout", "second"), [*((rows, False) for rows in ROWS), (BF16.name, True), (FP8_V4.name, True)], ids=str
)
def test_the_kernel_of_sm80(monkeypatch, layout, second):
    params = slab(layout, 16, **({"extra_topk": 64, "extra_block_size": 64, "extra_pattern": "holes"} if second else {}))

    def bound(q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> Any:
        caches = (kv, options.get("extra_kv_cache"))
        monkeypatch.setattr(Emulated, "caches", tuple(extent(each) for each in caches if each is not None))
        asked = REQUEST.but(kv_layout=layout, num_heads=16, device=A100, nope=q.shape[-1] < LAYOUTS[layout].key_width)
        if second:
            asked = asked.but(extra_topk=64, extra_block_size=64)
        return attention_sm80.bind_sparse_decode(asked)(q, kv, indices, **options)

    with stand_ins(monkeypatch, Emulated):
        passes(params, bound, "nvidia.native_sm80", A100)


SM90 = {
    FP8_V4.name: BUILDS[FP8_V4.name],
    **{rows: [each for each in BUILDS[rows] if each.kernel == MANY.kernel][:1] for rows in (FP8_DS_MLA.name, FP8_NOPE.name)},
}


@pytest.mark.parametrize(
    ("layout", "build"),
    [(layout, build) for layout, builds in SM90.items() for build in builds],
    ids=lambda each: str(getattr(each, "label", each)),
)
def test_the_kernels_of_sm90(layout, build):
    """Those whose sources run on a CPU; all of them find rows by `row_at`."""

    def bound(
        q: Tensor, kv: Tensor, indices: Tensor, *, softmax_scale: float, out: Tensor, lse_out: Tensor, **rest: Any
    ) -> Any:
        assert not rest
        of = Tensors(q, kv, indices, out, lse_out, None, None, None, None)
        launch = prepare(EmulatedSm90(0, replace(build, lists=1)), replace(build, lists=1), of, cluster=1)
        addresses = [each.data_ptr() for each in (out, lse_out, q, kv, indices)]
        launch(*addresses, 0, 0, 0, 0, 0, softmax_scale * math.log2(math.e))
        return out, lse_out

    passes(slab(layout, build.heads), bound)


@pytest.mark.parametrize("build", [PREFILL[32], DECODE[32, 2]], ids=lambda build: build.kernel)
def test_the_scores_of_an_index_cache(monkeypatch, build):
    kernel = EmulatedScores(build)
    monkeypatch.setattr(indexer, "load", lambda wanted, target, index: kernel if wanted == build else None)
    monkeypatch.setattr(indexer, "index_of", lambda request: 0)
    if build == PREFILL[32]:
        monkeypatch.setattr(indexer, "_TOKENS_A_REQUEST", 1)  # a request of 3 tokens is one of decodes
    scores = NativeScores(scores_request(IndexerLogitsParams.primitive, 32))
    params = IndexerLogitsParams(kv="index_fp8", scale_format="pow2", heads=32, block_size=64, blocks="slab")

    def bound(*arguments: Tensor, out: Tensor, **rest: Any) -> Tensor:
        scores(out, None, *arguments)
        return out

    passes(params, bound)


def test_every_address_in_a_cache_is_of_64_bits():
    """Also in the kernels whose sources do not run on a CPU: two functions say where a row of attention's caches is, and a
    page of the indexer's is found by its stride."""
    sources = {
        path.name: path.read_text(encoding="utf-8") for path in files(native).iterdir() if path.name.endswith((".cu", ".cuh"))
    }
    places = [(name, each) for name, text in sources.items() for each in re.findall(r"cache\.rows \+ ([^;]*)", text)]
    assert len(places) >= 7
    assert not [
        each
        for each in places
        if not re.match(r"(?:row_at|apart_at)\(|\(valid \? (?:row_at|apart_at)\(cache, slot\) : 0\)", each[1])
    ]
    both = "".join(re.findall(r"i64 (?:row|apart)_at\(.*?\n\}", sources["sparse_decode.cuh"], re.DOTALL))
    terms = [term for line in re.findall(r"return (.*?);", both) for term in line.split(" + ")]
    assert len(terms) == 6 and "i64 block_stride;" in sources["sparse_decode.cuh"]
    small = "slot % cache.block_size * APART"  # less than a page
    assert all(term == small or "(i64)" in term or term.endswith("* cache.block_stride") for term in terms), terms
    pages = [each for text in sources.values() for each in re.findall(r"a\.cache \+ ([^,;]*)", text)]
    assert len(pages) == 2 and all(
        re.fullmatch(r"(?:from|\(there \? block : 0\)) \* a\.block_stride\)?", each) for each in pages
    ), pages
    assert re.search(r"i64 block_stride\b", sources["indexer_logits.cuh"])
