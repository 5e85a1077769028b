# SPDX-License-Identifier: Apache-2.0
"""What a vendor's plugin declares whose library has DeepGEMM's scores of the indexer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from mla_portable.contracts import Implementation, Primitive, Request, Support
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, INDEXER_SELECT, TOPK_SELECT, bind_part
from mla_portable.primitives.topk_select import reference as topk_reference
from mla_portable_common.deep_gemm.conventions import Scores, scores_of_module
from mla_portable_common.deep_gemm.discovery import find_scores, scores_reasons
from mla_portable_common.deep_gemm.indexer_logits import PagedLogits, RaggedLogits
from mla_portable_common.deep_gemm.indexer_select import DeepGemmSelect
from mla_portable_common.deep_gemm.pages import PAGE
from mla_portable_common.deep_gemm.schedules import deepgemm_rows
from mla_portable_common.deep_gemm.torch_passes import TorchIndexPasses
from mla_portable_common.libraries import Library


def scores(name: str, library: Library, support: Support, *, preference: float = 60.0) -> Iterator[Implementation[Any]]:
    """indexer_logits, indexer_logits_ragged and indexer_select on `fp8_paged_mqa_logits`, `get_paged_mqa_logits_metadata` and
    `fp8_mqa_logits`, or on DeepGEMM's newer names of them.

    The adapters clamp ranges, lengths and tables first, bound what a call allocates, and write -inf where a token sees nothing
    and for NaN. indexer_select takes the device's topk_select after it. A step's decodes may be planned once for all layers.

    Args:
        name: of the implementations, "<vendor>.deep_gemm".
        library: where it is found.
        support: `kv_layouts=("index_fp8",)`; the heads that the kernels have as `num_heads`; `nan_keys=False` where their ReLU
            makes 0 of NaN. That pages have 64 tokens and begin at multiples of 16 bytes is added.
        preference: as of `Implementation`.
    """
    paged = replace(support, block_sizes=(PAGE,), cache_alignment=16)
    rows = deepgemm_rows(partial(find_scores, library, scores_of_module))
    for primitive, declared, bind, tried, kind in (
        (INDEXER_LOGITS, paged, _bind_logits, INDEXER_LOGITS, rows),
        (INDEXER_LOGITS_RAGGED, support, _bind_ragged, INDEXER_LOGITS_RAGGED, None),
        (INDEXER_SELECT, paged, _bind_select, INDEXER_LOGITS, rows),
    ):
        check = partial(scores_reasons, library, scores_of_module, tried)
        own: dict[str, Any] = {"check": check, "preference": preference, "schedule_kind": kind}
        yield Implementation(name, primitive, declared, partial(bind, library), **own)


def _kernel(library: Library, primitive: Primitive[Any], request: Request[Any]) -> Scores:
    return find_scores(library, scores_of_module, primitive, request.device)


def _bind_logits(library: Library, request: Request[Any]) -> Any:
    return PagedLogits(_kernel(library, INDEXER_LOGITS, request), TorchIndexPasses())


def _bind_ragged(library: Library, request: Request[Any]) -> Any:
    return RaggedLogits(_kernel(library, INDEXER_LOGITS_RAGGED, request), TorchIndexPasses(), request.device.num_sms)


def _bind_select(library: Library, request: Request[Any]) -> Any:
    part = Request(TOPK_SELECT, request.device, topk=request.topk, ordered=request.ordered, graph=request.graph)
    topk = bind_part(part, lambda _: topk_reference)
    return DeepGemmSelect(_kernel(library, INDEXER_LOGITS, request), TorchIndexPasses(), topk)
