# SPDX-License-Identifier: Apache-2.0
"""Huawei Ascend devices for mla_portable: the plugin.

Registers a detector and an implementation for each row of `PROVIDERS`: one per operation, place and primitive. Importing this
module and registering import nothing of the vendor; `check` and `bind` do, on a device that the detector recognised. What is
open about an operation (docs/ascend.md) is settled on the device by the probe: whether it returns the lse where its documents
contradict its use, whether a graph can hold it. Portable Triton kernels stand at 50, plain torch at 1000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from mla_portable.accelerator import add_error_words
from mla_portable.contracts import (
    DeviceFacts,
    Implementation,
    Primitive,
    Reason,
    Registrar,
    Request,
    Support,
    Variable,
    hookimpl,
)
from mla_portable.layouts import BF16, INDEX_BF16
from mla_portable.primitives import INDEXER_SELECT, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_ascend import attention, indexer
from mla_portable_ascend.detector import A2, A3, A5, ARCHS, OVERRIDE, detect, is_override
from mla_portable_ascend.layouts import C8, C8_E4M3, SPLIT
from mla_portable_ascend.resolve import TORCH_NPU, VLLM_ASCEND, Op, Place

__all__ = ["PROVIDERS", "Provider", "mla_portable_register"]

_VLLM_ASCEND: Final = "vllm-ascend 182b75ea, csrc/attention: README, schema and kernel"
_TORCH_NPU: Final = "op-plugin 517f2e7d, docs of torch_npu"
_COPIED: Final = (
    "; the operation reads latent and rotary part from two tensors, so each row that is read is copied apart first "
    "(1,152 bytes read, written, split, and read again): a split layout is read in place"
)
_PAGES: Final[dict[str, Any]] = {"block_size_multiple": 16, "max_block_size": 1024}
_A2_HEADS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_FAULTS: Final = (507011, 507014, 507015, 507016, 507017, 507018, 507034, 507035, 507046, 507053)
"""Codes of the runtime after which a device is lost: time limits and exceptions of its cores. Those of wrong arguments, which
torch_npu raises with the same words, are not among them."""

add_error_words("npu", *(f"error code is {code}" for code in _FAULTS))


@dataclass(frozen=True, slots=True)
class Provider:
    """One operation that serves one primitive.

    Attributes:
        variant: the second half of the implementation's name. primitive: what it serves. place: where its operation is.
        archs: of devices that have it. cost: declared, smaller is preferred. source: the public text that shows it.
        limits: fields of Support. bind: the operation, adapted to the primitive for a request.
    """

    variant: str
    primitive: Primitive[Any]
    place: Place
    archs: tuple[str, ...]
    cost: float
    source: str
    bind: Callable[[Op, Request[Any]], Callable[..., Any]]
    limits: dict[str, Any]

    def check(self, device: DeviceFacts) -> Iterator[Reason]:
        """The operation is there, and takes what the adapter passes."""
        return self.place.missing()

    def implementation(self) -> Implementation:
        """What the registry is given. "cpu" is named for stand-ins of the operations: no CPU has this vendor."""
        devices: dict[str, Any] = {"device_types": ("npu", "cpu"), "vendors": ("ascend",), "archs": self.archs}
        return Implementation(
            name=f"ascend.{self.variant}",
            primitive=self.primitive,
            support=Support(source=self.source, probes_graph=True, **devices, **self.limits),
            bind=lambda request: self.bind(self.place.find(), request),
            check=self.check,
            preference=self.cost,
        )


def _binds(call: attention.Call, *, apart: bool = False) -> dict[Primitive[Any], Callable[..., Callable[..., Any]]]:
    """Both primitives of attention through one operation; `apart` as in `attention.Attention`."""
    return {
        SPARSE_DECODE: partial(attention.bind_sparse_decode, call=call, apart=apart),
        SPARSE_PREFILL: partial(attention.bind_sparse_prefill, call=call, apart=apart),
    }


def _unpacked(variant: str, cost: float, note: str, *, apart: bool, **limits: Any) -> Iterator[Provider]:
    """Attention over bf16 caches. apart: their rows hold both parts. limits: fields of Support, the layout among them."""
    limits |= {"attn_sink": False}
    few, many = {**limits, "num_heads": _A2_HEADS}, {**limits, "max_heads": 128}
    own, general = (
        Place(package, "npu_sparse_flash_attention", attention.SPLIT_KEYWORDS) for package in (VLLM_ASCEND, TORCH_NPU)
    )
    for primitive, bind in _binds(attention.sparse_flash_attention, apart=apart).items():
        yield Provider(variant, primitive, own, (A2, A3), cost, f"{_VLLM_ASCEND}{note}", bind, few)
        yield Provider(f"{variant}_torch_npu", primitive, general, (A2, A3), cost + 1, f"{_TORCH_NPU}{note}", bind, few)
        yield Provider(f"{variant}_950", primitive, general, (A5,), cost, f"{_TORCH_NPU}{note}", bind, many)


def _packed() -> Iterator[Provider]:
    """Attention over packed caches, in place."""
    name = "npu_kv_quant_sparse_flash_attention"
    own = Place(VLLM_ASCEND, name, (*attention.PACKED_KEYWORDS, "return_softmax_lse"))
    general = Place(TORCH_NPU, name, attention.PACKED_KEYWORDS)
    limits: dict[str, Any] = {"attn_sink": False, "scale_formats": ("amax",), **_PAGES}
    few = {**limits, "kv_layouts": (C8.name,), "num_heads": _A2_HEADS}
    many = {**limits, "kv_layouts": (C8.name, C8_E4M3.name), "num_heads": tuple(sorted((*_A2_HEADS, 48))), "lse": False}
    for primitive, bind in _binds(attention.kv_quant_sparse_flash_attention).items():
        yield Provider("quant_sfa", primitive, own, (A2, A3), 10, _VLLM_ASCEND, bind, few)
        yield Provider("quant_sfa_torch_npu", primitive, general, (A2, A3), 11, _TORCH_NPU, bind, {**few, "lse": False})
        yield Provider("quant_sfa_950", primitive, general, (A5,), 10, _TORCH_NPU, bind, many)


def _indexer() -> Iterator[Provider]:
    """Scores and selection over `index_bf16` keys."""
    own, general = (Place(package, "npu_lightning_indexer", indexer.KEYWORDS) for package in (VLLM_ASCEND, TORCH_NPU))
    limits: dict[str, Any] = {
        "kv_layouts": (INDEX_BF16.name,),
        "max_topk": 2048,
        "topks": tuple(range(3072, 8193, 1024)),
        **_PAGES,
        "needs_whole_tables": True,
        "nan_keys": False,  # not known
    }
    few, some = {**limits, "max_heads": 64}, {**limits, "num_heads": (8, 16, 24, 32, 64)}
    full, rounded = (partial(indexer.bind_indexer_select, weights_dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    yield Provider("lightning_indexer", INDEXER_SELECT, own, (A2, A3), 10, _VLLM_ASCEND, full, few)
    yield Provider("lightning_indexer_torch_npu", INDEXER_SELECT, general, (A2, A3), 11, _TORCH_NPU, full, few)
    yield Provider("lightning_indexer_950", INDEXER_SELECT, general, (A5,), 10, _TORCH_NPU, rounded, some)


PROVIDERS: Final[tuple[Provider, ...]] = (
    *_unpacked("sfa", 10, "", apart=False, kv_layouts=(SPLIT.name,), **_PAGES),
    *_unpacked("sfa_copied", 20, _COPIED, apart=True, kv_layouts=(BF16.name,)),
    *_packed(),
    *_indexer(),
)


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Recognise the vendor's devices; offer every provider."""
    registrar.add_detector(detect)
    registrar.add_variable(Variable(OVERRIDE, f"off, or an architecture: {', '.join(ARCHS)}", is_override))
    for provider in PROVIDERS:
        registrar.add(provider.implementation())
