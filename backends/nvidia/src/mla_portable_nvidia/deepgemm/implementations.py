# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's scores as implementations, for SM90 and SM100."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from mla_portable.contracts import Implementation, Request, Support
from mla_portable.layouts import INDEX_FP8
from mla_portable.primitives import (
    INDEXER_LOGITS,
    INDEXER_LOGITS_RAGGED,
    INDEXER_SELECT,
    TOPK_SELECT,
    IndexerLogits,
    IndexerLogitsRagged,
    IndexerSelect,
    TopkSelect,
    bind_part,
)
from mla_portable.primitives.topk_select import reference as topk_reference
from mla_portable_common.deep_gemm.indexer_logits import PagedLogits, RaggedLogits
from mla_portable_common.deep_gemm.indexer_select import TOPK_BYTES, DeepGemmSelect
from mla_portable_common.deep_gemm.pages import PAGE
from mla_portable_common.deep_gemm.schedules import deepgemm_rows
from mla_portable_nvidia.deepgemm.discovery import deepgemm_reasons, find_deepgemm
from mla_portable_nvidia.native.topk_select import NativeTopkSelect

NAME: Final = "nvidia.deepgemm"
HEADS: Final = (32, 64)
"""What every build takes on both architectures."""
PREFERENCE: Final = 60.0
"""Behind the portable kernels (50) where nothing was timed: on few rows the passes around it cost more than it gains."""
DEEPGEMM_ROWS: Final = deepgemm_rows(find_deepgemm)


def bind_indexer_logits(request: Request[IndexerLogits]) -> IndexerLogits:
    """indexer_logits on the DeepGEMM of this machine. Raises: MLAPortableError where there is none."""
    from mla_portable_common.deep_gemm.index_pass_kernels import TritonIndexPasses

    return PagedLogits(find_deepgemm(INDEXER_LOGITS, request.device), TritonIndexPasses())


def bind_indexer_logits_ragged(request: Request[IndexerLogitsRagged]) -> IndexerLogitsRagged:
    """indexer_logits_ragged on the DeepGEMM of this machine. Raises: MLAPortableError where there is none."""
    from mla_portable_common.deep_gemm.index_pass_kernels import TritonIndexPasses

    device = request.device
    return RaggedLogits(find_deepgemm(INDEXER_LOGITS_RAGGED, device), TritonIndexPasses(), device.num_sms)


def deepgemm_implementations(*, device_types: tuple[str, ...] = ("cuda",)) -> Iterator[Implementation[Any]]:
    """indexer_logits and indexer_logits_ragged. device_types: ("cuda",) but for tests that run stand-ins on a CPU."""
    common: dict[str, Any] = {
        "source": "DeepGEMM 54e2261, csrc/apis/attention.hpp; vLLM 0.26.0 and 0.33.0. SM100 was not run here",
        "device_types": device_types,
        "vendors": ("nvidia",),
        "archs": ("sm90", "sm100"),
        "kv_layouts": (INDEX_FP8.name,),
        "num_heads": HEADS,
        "nan_keys": False,  # its ReLU makes 0 of NaN
    }
    yield Implementation(
        NAME,
        INDEXER_LOGITS,
        Support(**common, block_sizes=(PAGE,), cache_alignment=16),
        bind_indexer_logits,
        check=partial(deepgemm_reasons, INDEXER_LOGITS),
        preference=PREFERENCE,
        schedule_kind=DEEPGEMM_ROWS,
    )
    yield Implementation(
        NAME,
        INDEXER_LOGITS_RAGGED,
        Support(**common),
        bind_indexer_logits_ragged,
        check=partial(deepgemm_reasons, INDEXER_LOGITS_RAGGED),
        preference=PREFERENCE,
    )


def bind_indexer_select(request: Request[IndexerSelect]) -> IndexerSelect:
    """indexer_select on the DeepGEMM of this machine. Raises: MLAPortableError where there is none."""
    from mla_portable_common.deep_gemm.index_pass_kernels import TritonIndexPasses

    device = request.device
    part = Request(TOPK_SELECT, device, topk=request.topk, ordered=request.ordered, graph=request.graph)
    topk = bind_part(part, lambda _: topk_reference)
    kernel = find_deepgemm(INDEXER_LOGITS, device)
    return DeepGemmSelect(kernel, TritonIndexPasses(), topk, topk_bytes=scratch_of(topk))


def scratch_of(topk: TopkSelect) -> int:
    """Bytes that a topk_select may take for each row; the native one takes none."""
    return 0 if isinstance(topk, NativeTopkSelect) else TOPK_BYTES


def select_implementations(*, device_types: tuple[str, ...] = ("cuda",)) -> Iterator[Implementation[IndexerSelect]]:
    """indexer_select. device_types: ("cuda",) but for tests that run stand-ins on a CPU."""
    yield Implementation(
        NAME,
        INDEXER_SELECT,
        Support(
            source="DeepGEMM 54e2261, csrc/apis/attention.hpp; vLLM 0.26.0 and 0.33.0. SM100 was not run here",
            device_types=device_types,
            vendors=("nvidia",),
            archs=("sm90", "sm100"),
            kv_layouts=(INDEX_FP8.name,),
            num_heads=HEADS,
            block_sizes=(PAGE,),
            cache_alignment=16,
            nan_keys=False,  # DeepGEMM's ReLU makes 0 of NaN
        ),
        bind_indexer_select,
        check=partial(deepgemm_reasons, INDEXER_LOGITS),
        preference=PREFERENCE,
        schedule_kind=DEEPGEMM_ROWS,
    )
