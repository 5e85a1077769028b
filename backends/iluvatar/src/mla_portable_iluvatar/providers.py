# SPDX-License-Identifier: Apache-2.0
"""Who may serve each primitive, in the order in which they are tried: one row per place, convention and variant.

A row becomes an implementation of its own. The registry checks and probes rows in order of cost until one computes a tiny
problem correctly, so what is open about an op (docs/iluvatar.md) is settled on the device, not here. Costs are declared
preferences, none measured: portable Triton kernels stand at 50, plain torch at 1000.

Newer generations come first. Variants of an attention op:
    plain   no lse, no sink, any number of heads
    h64     the same with heads padded to 64, should fewer be refused
    sink    with the op's own attn_sink, whose meaning the probe tries
    lse     the op's out with an lse computed in torch: below the portable kernel, which gives both in one pass
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from mla_portable.contracts import Primitive, Support
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_LOGITS,
    SPARSE_DECODE,
    SPARSE_PREFILL,
)
from mla_portable_iluvatar import attention, cache, conventions, convert, gather, indexer
from mla_portable_iluvatar.attention import SparseOp
from mla_portable_iluvatar.native import Trial
from mla_portable_iluvatar.resolve import Place

__all__ = ["PROVIDERS", "Provider"]

_SPARSE: Final = (SPARSE_DECODE, SPARSE_PREFILL)
_PACKAGE: Final = "mla_portable_iluvatar"

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to run one or two primitives with one op.

    Attributes:
        variant: the second half of the implementation's name. place: where its op is. primitives: what it serves.
        support: by primitive. bind: the op, wrapped for a primitive. trial: a problem to tell a kernel from a slow twin.
        preference: declared cost. sources: modules that decide the result.
    """

    variant: str
    place: Place
    preference: float
    support: dict[Primitive, Support]
    bind: Callable[[Op, Primitive], Callable[..., Any]]
    trial: Callable[[Op, torch.device], Trial]
    sources: tuple[str, ...] = field(default=())

    @property
    def primitives(self) -> tuple[Primitive, ...]:
        return tuple(self.support)


def _support(source: str, **limits: Any) -> Support:
    """On the vendor's devices. "cpu" is named for stand-ins of the vendor's modules: no CPU has this vendor."""
    return Support(source=source, device_types=("cuda", "cpu"), vendors=("iluvatar",), graph=False, **limits)


def _modules(*names: str) -> tuple[str, ...]:
    return tuple(f"{_PACKAGE}.{name}" for name in ("providers", *names))


def _attention(
    variant: str,
    place: Place,
    convention: conventions.Convention,
    preference: float,
    source: str,
    *,
    primitives: Iterable[Primitive] = _SPARSE,
    sink: bool = False,
    lse: bool = False,
    own_lse: bool = False,
    kernel_heads: int | None = None,
) -> Provider:
    limits: dict[str, Any] = {"kv_layouts": ("bf16",), "attn_sink": sink, "lse": lse or own_lse}
    if kernel_heads is not None:
        limits["padded_heads"] = (kernel_heads,)

    def wrap(op: Op) -> SparseOp:
        return SparseOp(op, convention, kernel_heads=kernel_heads, own_lse=own_lse)

    def bind(op: Op, primitive: Primitive) -> Callable[..., Any]:
        decode = primitive is SPARSE_DECODE
        return (attention.bind_sparse_decode if decode else attention.bind_sparse_prefill)(wrap(op))

    return Provider(
        variant=variant,
        place=place,
        preference=preference,
        support={primitive: _support(source, **limits) for primitive in primitives},
        bind=bind,
        # the op is on trial, not the lse that is computed here
        trial=lambda op, device: attention.attention_trial(
            SparseOp(op, convention, kernel_heads=kernel_heads), device, sink=sink
        ),
        sources=_modules("attention", "conventions", "rows"),
    )


def _convert(
    variant: str, place: Place, convention: convert.ConvertConvention, preference: float, source: str, *, workspace: bool
) -> Provider:
    return Provider(
        variant=variant,
        place=place,
        preference=preference,
        support={CONVERT_INDICES: _support(source, needs_bf16=False, prefill_workspace=workspace)},
        bind=lambda op, _: convert.bind_convert_indices(op, convention),
        trial=lambda op, device: convert.convert_trial(op, convention, device),
        sources=_modules("convert"),
    )


def _cache_write(variant: str, place: Place, preference: float, source: str) -> Provider:
    return Provider(
        variant=variant,
        place=place,
        preference=preference,
        support={CACHE_WRITE: _support(source, kv_layouts=("bf16",))},
        bind=lambda op, _: cache.bind_cache_write(op),
        trial=cache.cache_write_trial,
        sources=_modules("cache", "rows"),
    )


def _gather(variant: str, place: Place, convention: gather.GatherConvention, preference: float, source: str) -> Provider:
    return Provider(
        variant=variant,
        place=place,
        preference=preference,
        support={GATHER_UPCONVERT: _support(source, kv_layouts=("fp8_ds_mla",))},
        bind=lambda op, _: gather.bind_gather_upconvert(op, convention),
        trial=lambda op, device: gather.gather_trial(op, convention, device),
        sources=_modules("gather"),
    )


def _indexer(variant: str, place: Place, convention: indexer.IndexerConvention, preference: float, source: str) -> Provider:
    limits: dict[str, Any] = {"num_heads": (_INDEXER_HEADS,), "block_sizes": _INDEXER_BLOCKS}
    return Provider(
        variant=variant,
        place=place,
        preference=preference,
        support={INDEXER_LOGITS: _support(source, **limits)},
        bind=lambda op, _: indexer.bind_indexer_logits(op, convention),
        trial=lambda op, device: indexer.indexer_trial(op, convention, _INDEXER_HEADS, device),
        sources=_modules("indexer"),
    )


def _custom(op: str) -> Place:
    """The third generation's layout: a package per op, and vllm imported before any of them."""
    return Place(f"vllm_iluvatar.custom_kernels.{op}.perf_impl", f"{op}_perf", before=("vllm",))


_V2: Final = Place("ixtriturbo._C.ops", "flash_mla_sparse_v2")
_DS4: Final = Place("ixformer.inference.functions", "ds4_flash_mla_sparse_fwd")
_DS4_CACHE: Final = Place("ixformer.inference.functions", "ds4_flash_mla_with_kvcache")
_SPARSE_ATTN: Final = Place("vllm_iluvatar._C", "sparse_flash_attn", before=("vllm",))
_FORK_PREFILL: Final = Place("vllm.v1.attention.ops.flashmla", "flash_mla_sparse_prefill")
_PAGED: Final = "vllm_paged_attention_mla"
_GATHER: Final = "cp_gather_and_upconvert_fp8_kv_cache"
_INFINICORE: Final = "InfiniCore 2cec6ce6, iluvatar_vendor_adaptor: types of the compiled ops"
_VENDOR_IMAGE: Final = "call sites of vllm-iluvatar 0.1.0 (ixformer 0.7.0, CoreX 4.5.0); known at head size 512 only"
_INDEXER_CALL: Final = "vllm-iluvatar 0.1.0, ilu_sparse_attn_indexer: call site"
_FORK: Final = "Iluvatar's changes to vLLM 0.17, flashmla_sparse: call site"
_PYTHON_LAYER: Final = "signatures of ixformer's Python layer, CoreX 4.2 and 4.3"

_INDEXER_HEADS: Final = 64
"""The only number publicly tested (InfiniCore, test/infinicore/ops/dsa.py), and that of DeepSeek-V3.2."""
_INDEXER_BLOCKS: Final = (16, 32, 64)
"""Those with a kernel; for others the older op falls to its twin (a comment in vllm-iluvatar 0.1.0)."""
_INT32, _INT64 = torch.int32, torch.int64


def _paged() -> Iterable[Provider]:
    """Dense MLA with blocks of one token: newer packages tell the lse, sources disagree about the table's dtype."""
    cost = 20.0
    for generation, module in (("inference", "ixformer.inference.functions"), ("functions", "ixformer.functions")):
        place = Place(module, _PAGED)
        for with_lse in (True, False):
            for width, dtype in (("i32", _INT32), ("i64", _INT64)):
                name = f"paged_mla_{generation}_{width}" + ("_lse" if with_lse else "")
                convention = conventions.paged_attention_mla(dtype, with_lse=with_lse)
                yield _attention(name, place, convention, cost, _PYTHON_LAYER, lse=with_lse)
                cost += 0.5


PROVIDERS: Final[tuple[Provider, ...]] = (
    # sparse attention
    _attention("flash_mla_sparse_v2", _V2, conventions.flash_mla_sparse_v2, 10, _INFINICORE),
    _attention("flash_mla_sparse_v2_h64", _V2, conventions.flash_mla_sparse_v2, 11, _INFINICORE, kernel_heads=64),
    _attention("flash_mla_sparse_v2_sink", _V2, conventions.flash_mla_sparse_v2, 12, _INFINICORE, sink=True),
    _attention("ds4_sparse_fwd", _DS4, conventions.ds4_sparse_fwd, 13, _VENDOR_IMAGE),
    _attention("ds4_sparse_fwd_sink", _DS4, conventions.ds4_sparse_fwd, 13.5, _VENDOR_IMAGE, sink=True),
    _attention(
        "ds4_with_kvcache", _DS4_CACHE, conventions.ds4_with_kvcache, 14, _VENDOR_IMAGE, primitives=[SPARSE_DECODE]
    ),
    _attention("sparse_flash_attn", _SPARSE_ATTN, conventions.sparse_flash_attn, 15, _INFINICORE),
    _attention("fork_sparse_prefill", _FORK_PREFILL, conventions.sparse_prefill_returning, 16, _FORK),
    *_paged(),
    _attention("flash_mla_sparse_v2_lse", _V2, conventions.flash_mla_sparse_v2, 55, _INFINICORE, own_lse=True),
    _attention("fork_sparse_prefill_lse", _FORK_PREFILL, conventions.sparse_prefill_returning, 56, _FORK, own_lse=True),
    # positions to slots
    _convert(
        "map_prefill", _custom("map_prefill_request_block_indices_to_global_blocks"), convert.map_prefill, 10, _INFINICORE,
        workspace=True,
    ),
    _convert(
        "map_decode", _custom("map_decode_request_block_indices_to_global_blocks"), convert.map_decode, 11, _INFINICORE,
        workspace=False,
    ),
    _convert(
        "dsa_convert", Place("vllm._custom_ops", "dsa_convert_req_index_to_global_index"), convert.dsa_convert, 12, _FORK,
        workspace=False,
    ),
    # writing a bf16 cache
    _cache_write("concat_mla_inference", Place("ixformer.inference.functions", "vllm_concat_and_cache_mla"), 10, _PYTHON_LAYER),
    _cache_write("concat_mla_functions", Place("ixformer.functions", "vllm_concat_and_cache_mla"), 11, _PYTHON_LAYER),
    # the indexer's scores
    _indexer("block_sparse_logits", _custom("compute_block_sparse_mqa_logits"), indexer.block_sparse, 10, _INFINICORE),
    _indexer(
        "dsa_indexer_logits", Place("ixformer.inference.functions", "dsa_indexer_mqa_logits_with_blocks"), indexer.dsa_indexer,
        11, _INDEXER_CALL,
    ),
    # reading an FP8 cache: below the portable kernels, for where those cannot run
    _gather(
        "gather_seq_lens",
        Place("vllm._custom_ops", _GATHER, parameters=("src", "dst", "block_table", "seq_lens", "workspace_starts")),
        gather.with_seq_lens, 60, _FORK,
    ),
    _gather(
        "gather_implied",
        Place("vllm._custom_ops", _GATHER, parameters=("src", "dst", "block_table", "workspace_starts", "batch_size")),
        gather.without_seq_lens, 61, "vLLM 0.33, _custom_ops",
    ),
)  # fmt: skip
