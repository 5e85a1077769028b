# SPDX-License-Identifier: Apache-2.0
"""Iluvatar CoreX devices for mla_portable: the plugin.

Registers a detector and an implementation for each row of `PROVIDERS`: one per op and calling convention. Importing this
module and registering import nothing of the vendor; `check` and `bind` do, on a device that the detector recognised. The
registry checks and probes rows in order of declared cost, so what is open about an op (docs/dev/iluvatar.md) is settled on the
device, whether a graph can hold a call among it. Portable Triton kernels stand at 50, plain torch at 1000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

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
from mla_portable.layouts import INDEX_BF16
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, INDEXER_LOGITS, SPARSE_DECODE, SPARSE_PREFILL, TOPK_SELECT
from mla_portable_iluvatar import attention, cache, convert, indexer, topk
from mla_portable_iluvatar.detection import OVERRIDE, is_override
from mla_portable_iluvatar.detector import detect
from mla_portable_iluvatar.resolve import Op, Place, twins_called

__all__ = ["PROVIDERS", "Provider", "mla_portable_register"]

_INFINICORE: Final = "InfiniCore 2cec6ce6, iluvatar_vendor_adaptor: types of the compiled ops"
_FORK: Final = "Iluvatar's changes to vLLM 0.17, flashmla_sparse: call site"
_PYTHON_LAYER: Final = "signatures of ixformer's Python layer, CoreX 4.2 and 4.3"
_INDEXER_CALL: Final = "vllm-iluvatar 0.1.0, ilu_sparse_attn_indexer: call site"
_VENDOR_TEST: Final = "InfiniCore's test of the vendor's ops: names and call"
_TWIN: Final = "the op falls back in silence: try other shapes or block sizes with CoreX's support, or another version"


@dataclass(frozen=True, slots=True)
class Provider:
    """One op that serves one primitive.

    Attributes:
        variant: the second half of the implementation's name. primitive: what it serves. place: where its op is.
        cost: declared, smaller is preferred. source: the public code that shows the op. limits: fields of Support.
        bind: the op, adapted to the primitive. trial: calls the adapted op once, on a device.
    """

    variant: str
    primitive: Primitive
    place: Place
    cost: float
    source: str
    bind: Callable[[Op], Callable[..., Any]]
    trial: Callable[[Op, torch.device], None]
    limits: dict[str, Any]

    def check(self, device: DeviceFacts) -> Iterator[Reason]:
        """The op is there, takes the arguments that its convention passes, and is a kernel."""
        missing = tuple(self.place.missing())
        yield from missing
        if missing:
            return
        where = torch.device(device.device_type)
        if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield Reason("op", "not tried", "needs an ordinary stream", "bind, or call once, before capturing a graph")
            return
        op = self.place.find()
        if twins := twins_called(lambda: self.trial(op, where)):
            yield Reason("speed", f"{self.place.attribute} runs {', '.join(twins)}", "a Python twin instead of a kernel", _TWIN)

    def implementation(self) -> Implementation:
        """What the registry is given. "cpu" is named for stand-ins of the vendor's modules: no CPU has this vendor."""
        devices: dict[str, Any] = {"device_types": ("cuda", "cpu"), "vendors": ("iluvatar",), "probes_graph": True}
        support = Support(source=self.source, **devices, **self.limits)
        return Implementation(
            name=f"iluvatar.{self.variant}",
            primitive=self.primitive,
            support=support,
            bind=self._bind_request,
            check=self.check,
            preference=self.cost,
        )

    def _bind_request(self, request: Request) -> Callable[..., Any]:
        return self.bind(self.place.find())


def _attention(
    variant: str,
    place: Place,
    call: attention.SparseCall,
    cost: float,
    source: str,
    *,
    heads: int | None = None,
    lse: bool = False,
) -> Iterator[Provider]:
    """Decode and prefill through one sparse op. heads: q is padded to so many. lse: computed in torch."""
    limits: dict[str, Any] = {"kv_layouts": ("bf16",), "attn_sink": False, "lse": lse}
    if heads is not None:
        limits["padded_heads"] = (heads,)

    def adapt(op: Op) -> attention.SparseOp:
        return attention.SparseOp(op, call, heads, lse)

    def trial(op: Op, device: torch.device) -> None:
        attention.attention_trial(adapt(op), device)

    binds = {SPARSE_DECODE: attention.bind_sparse_decode, SPARSE_PREFILL: attention.bind_sparse_prefill}
    for primitive, bind in binds.items():
        yield Provider(variant, primitive, place, cost, source, lambda op, bind=bind: bind(adapt(op)), trial, limits)


def _convert(variant: str, place: Place, call: convert.ConvertCall, cost: float, source: str, *, workspace: bool) -> Provider:
    bind, trial = partial(convert.bind_convert_indices, call=call), partial(convert.convert_trial, call=call)
    limits = {"needs_bf16": False, "prefill_workspace": workspace}
    return Provider(variant, CONVERT_INDICES, place, cost, source, bind, trial, limits)


def _indexer(variant: str, place: Place, call: indexer.LogitsCall, cost: float, source: str) -> Provider:
    bind, trial = partial(indexer.bind_indexer_logits, call=call), partial(indexer.indexer_trial, call=call)
    limits = {
        "kv_layouts": (INDEX_BF16.name,),
        "num_heads": (indexer.HEADS,),
        "block_sizes": indexer.BLOCK_SIZES,
        "nan_keys": False,  # not known
    }
    return Provider(variant, INDEXER_LOGITS, place, cost, source, bind, trial, limits)


def _vllm_iluvatar(op: str) -> Place:
    """The layout of vllm_iluvatar: a package per op, and vllm imported before any of them."""
    return Place(f"vllm_iluvatar.custom_kernels.{op}.perf_impl", f"{op}_perf", before=("vllm",))


_FUNCTIONS: Final = "ixformer.inference.functions"
_V2: Final = Place("ixtriturbo._C.ops", "flash_mla_sparse_v2")
_FORK_PREFILL: Final = Place(
    "vllm.v1.attention.ops.flashmla", "flash_mla_sparse_prefill", parameters=("q", "kv", "topk", "sm_scale")
)
_DSA_CONVERT: Final = Place(
    "vllm._custom_ops",
    "dsa_convert_req_index_to_global_index",
    parameters=("req_id_per_token", "block_table", "topk_indices", "block_size"),
)
_CONCAT: Final = Place(_FUNCTIONS, "vllm_concat_and_cache_mla", parameters=("kv_c", "k_pe", "kv_cache", "slot_mapping"))
_CONCAT_PACKAGE: Final = Place("vllm_iluvatar.custom_kernels.concat_and_cache_mla", "concat_and_cache_mla", before=("vllm",))
_DSA_TOPK: Final = Place(_FUNCTIONS, "dsa_update_topk_indices")
_DSA_LOGITS: Final = Place(
    _FUNCTIONS,
    "dsa_indexer_mqa_logits_with_blocks",
    parameters=("q", "cu_seqlens_q", "cu_seqlens_kv", "kv_cache", "block_table", "weights"),
)
_MAP_PREFILL: Final = _vllm_iluvatar("map_prefill_request_block_indices_to_global_blocks")
_BLOCK_LOGITS: Final = _vllm_iluvatar("compute_block_sparse_mqa_logits")

PROVIDERS: Final[tuple[Provider, ...]] = (
    *_attention("flash_mla_sparse_v2", _V2, attention.flash_mla_sparse_v2, 10, _INFINICORE),
    *_attention("flash_mla_sparse_v2_h64", _V2, attention.flash_mla_sparse_v2, 11, _INFINICORE, heads=64),
    *_attention("fork_sparse_prefill", _FORK_PREFILL, attention.sparse_prefill_returning, 12, _FORK),
    *_attention("flash_mla_sparse_v2_lse", _V2, attention.flash_mla_sparse_v2, 55, _INFINICORE, lse=True),
    _convert("map_prefill", _MAP_PREFILL, convert.map_prefill, 10, _INFINICORE, workspace=True),
    _convert("dsa_convert", _DSA_CONVERT, convert.dsa_convert, 11, _FORK, workspace=False),
    Provider(
        "concat_mla", CACHE_WRITE, _CONCAT, 10, _PYTHON_LAYER,
        cache.bind_cache_write, cache.cache_write_trial, {"kv_layouts": ("bf16",)},
    ),
    Provider(
        "concat_and_cache_mla", CACHE_WRITE, _CONCAT_PACKAGE, 11, _VENDOR_TEST,
        cache.bind_cache_write, cache.cache_write_trial, {"kv_layouts": ("bf16",)},
    ),
    _indexer("block_sparse_logits", _BLOCK_LOGITS, indexer.block_sparse, 10, _INFINICORE),
    _indexer("dsa_indexer_logits", _DSA_LOGITS, indexer.dsa_indexer, 11, _INDEXER_CALL),
    Provider(
        "dsa_update_topk", TOPK_SELECT, _DSA_TOPK, 10, _INDEXER_CALL,
        topk.bind_topk_select, topk.topk_trial, {"needs_bf16": False, "max_topk": topk.MAX_TOPK},
    ),
)  # fmt: skip


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Recognise the vendor's devices; offer every provider."""
    registrar.add_detector(detect)
    registrar.add_variable(Variable(OVERRIDE, "on, off, or an architecture such as ivcore11", is_override))
    for provider in PROVIDERS:
        registrar.add(provider.implementation())
