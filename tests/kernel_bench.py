# SPDX-License-Identifier: Apache-2.0
"""What the tests of the kernel benchmark share: small cases of each primitive, a run over them, a baseline."""

from __future__ import annotations

from typing import Any

import torch
import torch_reference as reference
from spoiled import registry_with

from mla_portable.bench.kernels import KernelReport, time_kernels
from mla_portable.choose import Registry
from mla_portable.contracts import Baseline, BaselineCall, Primitive, Reason, Request
from mla_portable.judge.problems.bench import KernelCase, Workshop, timed_primitives
from mla_portable.primitives import (
    CACHE_WRITE,
    CONCAT_MLA_K,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_SELECT,
    MASKED_PREFILL,
    MERGE_STATES,
    NORM_ROPE_WRITE,
    PACK_SELECTION,
    QUANTIZE_PER_TENSOR,
    ROPE_QUANTIZE_QUERIES,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)

CPU = torch.device("cpu")
ATTENTION = (SPARSE_DECODE, SPARSE_PREFILL)
TIMED = timed_primitives()
SMALL: dict[Primitive, KernelCase] = {
    SPARSE_DECODE: KernelCase(SPARSE_DECODE, 3, "fp8_ds_mla", 2, 16, 64),
    SPARSE_PREFILL: KernelCase(SPARSE_PREFILL, 5, "bf16", 2, 16, 64, 50),
    TOPK_SELECT: KernelCase(TOPK_SELECT, 5, topk=16, width=64),
    CONVERT_INDICES: KernelCase(CONVERT_INDICES, 5, topk=16),
    GATHER_UPCONVERT: KernelCase(GATHER_UPCONVERT, 130, "fp8_ds_mla"),
    CACHE_WRITE: KernelCase(CACHE_WRITE, 5, "fp8_ds_mla"),
    PACK_SELECTION: KernelCase(PACK_SELECTION, 5, topk=16, width=100),
    CONCAT_MLA_K: KernelCase(CONCAT_MLA_K, 5, num_heads=3),
    MASKED_PREFILL: KernelCase(MASKED_PREFILL, 50, None, 2, 16, 40),
    INDEXER_SELECT: KernelCase(INDEXER_SELECT, 3, "index_fp8", 2, 16, 100),
    MERGE_STATES: KernelCase(MERGE_STATES, 6),
    QUANTIZE_PER_TENSOR: KernelCase(QUANTIZE_PER_TENSOR, 5),
    NORM_ROPE_WRITE: KernelCase(NORM_ROPE_WRITE, 5, "fp8_ds_mla"),
    ROPE_QUANTIZE_QUERIES: KernelCase(ROPE_QUANTIZE_QUERIES, 3, num_heads=2),
}


def workshop(**options: Any) -> Workshop:
    return Workshop(CPU, registry_with().facts(CPU), **options)


def run(*cases: KernelCase, registry: Registry | None = None, **options: Any) -> KernelReport:
    return time_kernels(cases, device=CPU, registry=registry or registry_with(), repeat=2, **options)


def decode_baseline(name: str = "other.v1", *, factor: float = 1.0, reasons: tuple[Reason, ...] = ()) -> Baseline:
    def prepare(request: Request, arguments: Any) -> BaselineCall:
        q, kv, indices = (arguments[name] for name in ("q", "kv_cache", "indices"))
        last: list[Any] = []

        def work() -> None:
            last[:] = reference.sparse_decode(q, kv, indices, softmax_scale=arguments["softmax_scale"])

        return BaselineCall(work, lambda: (last[0] * factor, last[1]))

    return Baseline(name, SPARSE_DECODE, lambda request: reasons, prepare, "nothing is padded")
