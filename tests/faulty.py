# SPDX-License-Identifier: Apache-2.0
"""Misbehaving implementations: the reference with one fault each, in a registry beside the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_reference as reference
from fake_plugins import make_plugin
from torch import Tensor

from mla_portable.choose import ProbeReport, Registry
from mla_portable.contracts import Implementation, Primitive, Support
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_CACHE_WRITE,
    INDEXER_LOGITS,
    INDEXER_LOGITS_RAGGED,
    INDEXER_SELECT,
    MASKED_PREFILL,
    MERGE_STATES,
    PACK_SELECTION,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
)

Kernel = Callable[..., Any]
BOTH, BOTH_INDEX = ("bf16", "fp8_ds_mla"), ("index_bf16", "index_fp8")
DECODE, PREFILL = SPARSE_DECODE, SPARSE_PREFILL
CONVERT, GATHER, WRITE = CONVERT_INDICES, GATHER_UPCONVERT, CACHE_WRITE
MERGE, QUANTIZE = MERGE_STATES, QUANTIZE_PER_TENSOR
MASKED, PACK = MASKED_PREFILL, PACK_SELECTION
INDEXER, RAGGED, SELECT, KEYS = INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, INDEXER_SELECT, INDEXER_CACHE_WRITE
RIGHT: dict[Primitive, Kernel] = {primitive: getattr(reference, str(primitive)) for primitive in Primitive.all()}


def candidate(primitive: Primitive, kernel: object, **limits: Any) -> Implementation:
    support = Support(source="a test", device_types=("cpu",), **{"kv_layouts": (*BOTH, *BOTH_INDEX), **limits})
    return Implementation("faulty.v1", primitive, support, bind=lambda request: kernel)


def registry(*implementations: Implementation, with_reference: bool = True) -> Registry:
    plugins: list[tuple[str, object]] = [("reference", "mla_portable.reference")] if with_reference else []
    return Registry(plugins=[*plugins, ("faulty", make_plugin(*implementations))], environ={})


def probe(implementation: Implementation, **options: Any) -> ProbeReport:
    return registry(implementation).probe(implementation, torch.device("cpu"), **options)


def symptoms(report: ProbeReport) -> str:
    return " | ".join(map(str, report.reasons))


def change(primitive: Primitive, before: Callable[[dict[str, Any]], Any] | None = None, after: Kernel | None = None) -> Kernel:
    """The reference with its keyword arguments, or its result, changed."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            args = before({"args": args, "kwargs": kwargs}) or args
        result = RIGHT[primitive](*args, **kwargs)
        return after(result, *args, **kwargs) if after is not None else result

    return kernel


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    def before(call: dict[str, Any]) -> None:
        for name in names:
            call["kwargs"].pop(name, None)

    return before


def in_place(results: tuple[Tensor, Tensor], out: Tensor | None = None, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """New values in the tensors that were returned, so that only the values are wrong."""
    for old, new in zip(results, (out, lse), strict=True):
        if new is not None:
            old.copy_(new)
    return results
