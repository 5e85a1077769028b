# SPDX-License-Identifier: Apache-2.0
"""AMD Instinct for mla_portable: the plugin, which adapts operations of AITER.

Registers an implementation for each row of `PROVIDERS`. AITER is imported by `check`, on a device that is AMD's and of an
architecture for which it has kernels. The core recognises the devices. Portable Triton kernels stand at 50, plain torch at
1000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from mla_portable.contracts import DeviceFacts, Implementation, Primitive, Reason, Registrar, Request, Support, hookimpl
from mla_portable.layouts import INDEX_FP8, CacheLayout
from mla_portable.primitives import (
    CACHE_WRITE,
    INDEXER_CACHE_WRITE,
    INDEXER_LOGITS,
    INDEXER_LOGITS_RAGGED,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)
from mla_portable_amd import attention, cache, indexer, selection
from mla_portable_amd.layouts import FP8, FP8_FNUZ, INDEX_FNUZ, INDEX_FNUZ_TILES, INDEX_TILES, TILE
from mla_portable_amd.library import Op, Place

__all__ = ["PROVIDERS", "Provider", "mla_portable_register"]

_SOURCE: Final = "ROCm/aiter e4048607"
_MLA_SOURCE: Final = "aiter/mla.py, csrc/py_itfs_cu/asm_mla.cu"
_OCP: Final = "gfx950"
"""The architecture whose e4m3 is OCP's, as that of `index_fp8` is."""
_FNUZ: Final = "gfx942"


@dataclass(frozen=True, slots=True)
class Provider:
    """One operation that serves one primitive.

    Attributes:
        variant: the second half of the implementation's name. primitive: what it serves. place: where the operation is.
        bind: the operation, adapted to the primitive for a request. source: the file of AITER that the limits come from.
        archs: that have the kernel. limits: further fields of Support.
    """

    variant: str
    primitive: Primitive[Any]
    place: Place
    bind: Callable[[Op, Request[Any]], Callable[..., Any]]
    source: str
    archs: tuple[str, ...]
    limits: dict[str, Any]

    def check(self, device: DeviceFacts) -> Iterator[Reason]:
        """The operation is here, and takes the arguments that its adapter passes."""
        return self.place.reasons()

    def implementation(self) -> Implementation:
        """What the registry is given. "cpu" is named for stand-ins of AITER: no CPU is AMD's in this sense."""
        support = Support(
            source=f"{_SOURCE}, {self.source}",
            device_types=("cuda", "cpu"),
            vendors=("amd",),
            archs=self.archs,
            probes_graph=True,
            **self.limits,
        )
        return Implementation(
            name=f"amd.{self.variant}",
            primitive=self.primitive,
            support=support,
            bind=self._bind_request,
            check=self.check,
            preference=10,
        )

    def _bind_request(self, request: Request[Any]) -> Callable[..., Any]:
        return self.bind(self.place.find(), request)


_MLA_DECODE: Final = Place(
    ("aiter.mla",),
    "mla_decode_fwd",
    ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q"),
    ("sm_scale", "return_lse", "num_kv_splits", "num_kv_splits_indptr", "q_scale", "kv_scale"),
)
_PAGED_LOGITS: Final = Place(
    ("aiter.ops.triton.attention.pa_mqa_logits", "aiter.ops.triton.pa_mqa_logits"),
    "deepgemm_fp8_paged_mqa_logits",
    ("q_fp8", "kv_cache", "weights", "out_logits", "context_lens", "kv_indices", "max_model_len"),
    ("Preshuffle", "KVBlockSize"),
)
_LOGITS: Final = Place(
    ("aiter.ops.triton.attention.fp8_mqa_logits", "aiter.ops.triton.fp8_mqa_logits"),
    "fp8_mqa_logits",
    ("Q", "KV", "kv_scales", "weights", "cu_starts", "cu_ends"),
)
_TOPK: Final = Place(
    ("aiter.ops.topk",),
    "top_k_per_row_prefill",
    ("logits", "rowStarts", "rowEnds", "indices", "values", "numRows", "stride0", "stride1"),
    ("k", "stable"),
)
_CONCAT: Final = Place(
    ("aiter.ops.cache",),
    "concat_and_cache_mla",
    ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale"),
)
_INDEX_WRITE: Final = Place(
    ("aiter.ops.cache",),
    "indexer_k_quant_and_cache",
    ("k", "kv_cache", "slot_mapping", "quant_block_size", "scale_fmt"),
    ("preshuffle",),
)


def _attention(arch: str, codes: CacheLayout) -> Iterator[Provider]:
    """Decode and prefill through one operation, whose kernels have other head counts on each architecture, and a writer.

    codes: the layout of e4m3 rows.
    """
    common = {"cache_alignment": 16, "needs_whole_rows": True, "attn_sink": False}
    bf16 = {"kv_layouts": ("bf16",), "padded_heads": attention.KERNEL_HEADS[arch]}
    fp8 = {"kv_layouts": (codes.name,), "padded_heads": attention.FP8_HEADS, "q_scale": True, "accuracy": "low"}
    binds = {SPARSE_DECODE: attention.bind_sparse_decode, SPARSE_PREFILL: attention.bind_sparse_prefill}
    for variant, limits in ((f"mla_{arch}", bf16), (f"mla_{arch}_fp8", fp8)):
        for primitive, bind in binds.items():
            yield Provider(variant, primitive, _MLA_DECODE, bind, _MLA_SOURCE, (arch,), {**common, **limits})
    yield Provider(
        f"concat_mla_{arch}_fp8", CACHE_WRITE, _CONCAT, cache.bind_cache_write, "csrc/kernels/cache_kernels.cu", (arch,),
        {"kv_layouts": (codes.name,), "cache_alignment": 16},
    )  # fmt: skip


def _pages(
    suffix: str, layout: CacheLayout, arch: str, read: tuple[int, ...], written: tuple[int, ...] | None
) -> Iterator[Provider]:
    """Scores of index pages, and their writer. read, written: block sizes."""
    yield Provider(
        f"paged_mqa_logits{suffix}", INDEXER_LOGITS, _PAGED_LOGITS, indexer.bind_indexer_logits,
        "aiter/ops/triton/attention/pa_mqa_logits.py", (arch,),
        {**_SCORES, "kv_layouts": (layout.name,), "block_sizes": read},
    )  # fmt: skip
    yield Provider(
        f"indexer_k_quant{suffix}", INDEXER_CACHE_WRITE, _INDEX_WRITE, cache.bind_indexer_cache_write,
        "csrc/kernels/cache_kernels.cu", (arch,),
        {"kv_layouts": (layout.name,), "block_sizes": written, "scale_formats": ("pow2",), "needs_bf16": False},
    )  # fmt: skip


_SCORES: Final = {"num_heads": indexer.HEADS, "nan_keys": False}
_BOTH: Final = (_FNUZ, _OCP)

PROVIDERS: Final[tuple[Provider, ...]] = (
    *_attention(_FNUZ, FP8_FNUZ),
    *_attention(_OCP, FP8),
    *_pages("", INDEX_FP8, _OCP, (1,), None),
    *_pages("_tiles", INDEX_TILES, _OCP, (TILE,), (TILE,)),
    *_pages("_fnuz", INDEX_FNUZ, _FNUZ, (1,), None),
    *_pages("_fnuz_tiles", INDEX_FNUZ_TILES, _FNUZ, (TILE,), (TILE,)),
    Provider(
        "mqa_logits", INDEXER_LOGITS_RAGGED, _LOGITS, indexer.bind_indexer_logits_ragged,
        "aiter/ops/triton/attention/fp8_mqa_logits.py", _BOTH, {**_SCORES, "kv_layouts": (INDEX_FP8.name,)},
    ),
    Provider(
        "topk_per_row", TOPK_SELECT, _TOPK, selection.bind_topk_select,
        "csrc/kernels/topk_per_row_kernels.cu", _BOTH, {"max_topk": selection.MAX_TOPK, "needs_bf16": False},
    ),
    Provider(
        "concat_mla", CACHE_WRITE, _CONCAT, cache.bind_cache_write,
        "csrc/kernels/cache_kernels.cu", _BOTH, {"kv_layouts": ("bf16",), "cache_alignment": 16},
    ),
)  # fmt: skip


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer every provider."""
    for provider in PROVIDERS:
        registrar.add(provider.implementation())
