# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""What a layer computes between its projections, by two primitives: norms, rotary embedding, both caches, the queries.

    norm_rope_write        normed query input; normed latent and rotated key, written into the cache; the indexer's key, written
    rope_quantize_queries  rotated part of the query, where attention reads it; codes and weights of the indexer's queries

The parts belong to one layer and read its weights at each call, because vLLM may load them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.choose import get_registry
from mla_portable.contracts import InvalidArgument, Request
from mla_portable.contracts.values import CACHE_ALIGNMENT
from mla_portable.engines.common.index_keys import kind_of_pages
from mla_portable.engines.common.routing import bind_for
from mla_portable.kit.rules import check_cache
from mla_portable.layouts import INDEX, INDEX_FP8, INDEX_HEAD_SIZE, LAYOUTS
from mla_portable.primitives import NORM_ROPE_WRITE, ROPE_QUANTIZE_QUERIES, NormRopeWrite, RopeQuantizeQueries

PARTS: Final = "mla_portable_parts"
"""Attribute of vLLM's MLAAttention: the LayerParts of a layer that ours serves."""
Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class IndexerParts:
    """The indexer of a layer.

    Attributes:
        name: of its cache. cache: the module that has it as `kv_cache`, [blocks, 64, 132] bytes.
        norm: of its key, with `weight`, `bias` [128] and `eps`. rope_style: of its keys and queries. scale: of its scores.
    """

    name: str
    cache: Any
    norm: Any
    rope_style: str
    scale: float


@dataclass(slots=True, eq=False)
class LayerParts:
    """What stands between the projections of one layer.

    Attributes:
        q_norm, kv_norm: with `weight`; `eps` is that of both. rotary: has `cos_sin_cache` [P, R].
        num_heads: of the queries. kv_layout, scale_format: of the cache.
        indexer: None where the layer attends to what another one selected.
    """

    q_norm: Any
    kv_norm: Any
    eps: float
    rotary: Any
    rope_style: str
    num_heads: int
    kv_layout: str
    scale_format: str
    indexer: IndexerParts | None
    _writers: dict[Kind, NormRopeWrite] = field(default_factory=dict, init=False, repr=False)
    _queries: RopeQuantizeQueries | None = field(default=None, init=False, repr=False)

    def bind(self, device: torch.device, block_size: int) -> tuple[tuple[str, str], ...]:
        """Bind what serves caches of whole rows, before there is one. Returns: (primitive, implementation) of each.

        Raises: UnsupportedRequest with every reason where nothing serves.
        """
        facts: dict[str, Any] = {"kv_layout": self.kv_layout, "block_size": block_size}
        if LAYOUTS[self.kv_layout].scale_formats:
            facts["scale_format"] = self.scale_format
        if self.indexer is not None:
            facts["index_layout"] = INDEX_FP8.name
        here = get_registry().facts(device)
        heads = Request(ROPE_QUANTIZE_QUERIES, here, num_heads=self.num_heads)
        bound = bind_for(Request(NORM_ROPE_WRITE, here, **facts), heads)
        self._queries = bound[1].call
        return tuple((str(each.request.primitive), str(each.decision.chosen)) for each in bound)

    def norm_rope_write(
        self,
        positions: Tensor,
        qkv: Tensor,
        index_key: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        index_caches: tuple[Tensor, Tensor] | None,
        q_out: Tensor,
        latent_out: Tensor,
        k_rope_out: Tensor,
    ) -> None:
        """Norm and rotate a step's tokens; write them where there are caches.

        Args:
            positions: [T] int64. qkv: [T, Q + V + R] bf16. index_key: [T, 128] bf16, None where the step selects nothing here.
            caches, index_caches: a cache and slots [T] int64 in it, negative = skip; None where vLLM profiles.
            q_out: [T, Q]. latent_out: [T, V]. k_rope_out: [T, R]. bf16, written.
        Raises: InvalidArgument for a cache of another kind, UnsupportedRequest where nothing serves it; both at its first call.
        """
        width = q_out.shape[1]
        one_call = caches is not None and index_caches is not None and _are_same(caches[1], index_caches[1])
        kv_cache, slots = (None, None) if caches is None else caches
        with_index = index_key is not None and one_call
        own = self._index_arguments(index_key, index_caches) if with_index else {}
        self._writer(kv_cache, own.get("index_cache"))(
            qkv[:, :width],
            qkv[:, width:],
            index_key if with_index else None,
            positions,
            self.rotary.cos_sin_cache,
            q_norm=self.q_norm.weight,
            kv_norm=self.kv_norm.weight,
            eps=self.eps,
            kv_cache=kv_cache,
            slot_mapping=slots,
            rope_style=self.rope_style,
            scale_format=self.scale_format,
            q_out=q_out,
            latent_out=latent_out,
            k_rope_out=k_rope_out,
            **own,
        )
        if index_key is not None and index_caches is not None and not with_index:  # the two caches have slots of their own
            own = self._index_arguments(index_key, index_caches)
            given: dict[str, Any] = {"q_norm": None, "kv_norm": None, "eps": self.eps, "kv_cache": None, "q_out": None}
            writer = self._writer(None, own["index_cache"])
            writer(None, None, index_key, positions, self.rotary.cos_sin_cache, slot_mapping=index_caches[1], **given, **own)

    def warm_up(self, kv_cache: Tensor) -> None:
        """Make what writes these caches, by a call without a slot; vLLM's profiling run makes the other calls.

        kv_cache: the layer's own; that of the indexer is there with it.
        """
        device, dtype = kv_cache.device, torch.bfloat16
        widths = self.q_norm.weight.shape[0], self.kv_norm.weight.shape[0], self.rotary.cos_sin_cache.shape[1]
        slots = torch.full((1,), -1, dtype=torch.int64, device=device)
        qkv, *outs = (torch.zeros((1, width), dtype=dtype, device=device) for width in (sum(widths), *widths))
        key, index_caches = None, None
        if self.indexer is not None:
            key = torch.zeros((1, INDEX_HEAD_SIZE), dtype=dtype, device=device)
            index_caches = as_bytes(self.indexer.cache.kv_cache), slots
        self.norm_rope_write(torch.zeros_like(slots), qkv, key, (as_bytes(kv_cache), slots), index_caches, *outs)

    def rope_quantize_queries(
        self,
        positions: Tensor,
        q: Tensor,
        index_q: Tensor | None,
        index_weights: Tensor | None,
        query: Tensor,
        index_q_out: Tensor | None,
        index_weights_out: Tensor | None,
    ) -> None:
        """Rotate and quantise a step's queries.

        Args:
            q: [T, H, P + R] bf16. query: [T, H, V + R] bf16, whose last R numbers are written.
            index_q: [T, I, 128] bf16, index_weights: [T, I] bf16 -> index_q_out e4m3, index_weights_out float32; or all None.
        """
        assert self._queries is not None  # a layer without has no parts
        indexer = self.indexer
        own: dict[str, Any] = {}
        if index_q is not None and indexer is not None:
            own = {"index_scale": indexer.scale, "index_rope_style": indexer.rope_style}
        self._queries(
            q,
            index_q,
            index_weights,
            positions,
            self.rotary.cos_sin_cache,
            q_out=query,
            index_q_out=index_q_out,
            index_weights_out=index_weights_out,
            rope_style=self.rope_style,
            **own,
        )

    def _index_arguments(self, index_key: Tensor | None, caches: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
        indexer = self.indexer
        assert indexer is not None and index_key is not None and caches is not None
        norm = indexer.norm
        return {
            "index_norm": (norm.weight, norm.bias),
            "index_eps": norm.eps,
            "index_cache": caches[0],
            "index_rope_style": indexer.rope_style,
        }

    def _writer(self, kv_cache: Tensor | None, index_cache: Tensor | None) -> NormRopeWrite:
        """What serves caches like these; bound at the first call for a kind, which belongs outside of CUDA graphs."""
        kind: Kind = tuple(None if each is None else kind_of_pages(each) for each in (kv_cache, index_cache))
        found = self._writers.get(kind)
        if found is None:
            found = self._writers[kind] = self._bind_writer(kv_cache, index_cache)
        return found

    def _bind_writer(self, kv_cache: Tensor | None, index_cache: Tensor | None) -> NormRopeWrite:
        facts: dict[str, Any] = {"cache_alignment": CACHE_ALIGNMENT, "uneven_blocks": False}
        device = self.kv_norm.weight.device
        if kv_cache is not None:
            found = check_cache("vLLM", "kv_cache", kv_cache, device, kv_layout=self.kv_layout)
            facts |= found._asdict() | {"scale_format": self.scale_format if found.layout.scale_formats else None}
        if index_cache is not None:
            found = check_cache("vLLM", "index_cache", index_cache, device, INDEX, kv_layout=INDEX_FP8.name)
            facts["index_layout"] = found.kv_layout
            facts.setdefault("block_size", found.block_size)
            facts["cache_alignment"] = min(facts["cache_alignment"], found.cache_alignment)
            facts["uneven_blocks"] = facts["uneven_blocks"] or found.uneven_blocks
        return bind_for(Request(NORM_ROPE_WRITE, get_registry().facts(device), **facts))[0].call


def slots_of(slot_mapping: Any, name: str, num_tokens: int) -> Tensor | None:
    """[num_tokens] int64: where a step's tokens go in the cache of a layer; None where vLLM profiles.

    Args:
        slot_mapping: of vLLM's forward context.
    Raises: InvalidArgument where it is not by layer.
    """
    if not isinstance(slot_mapping, dict):
        raise InvalidArgument("vLLM", "slot_mapping", got=type(slot_mapping).__name__, expected="a dict, by layer")
    slots = slot_mapping.get(name)
    if slots is None or len(slots) == num_tokens:
        return slots
    short = num_tokens - len(slots)
    return slots[:num_tokens] if short < 0 else torch.nn.functional.pad(slots, (0, short), value=-1)


def as_bytes(cache: Tensor) -> Tensor:
    """The cache as bytes where it is quantised, whatever 8-bit type vLLM gave it."""
    return cache.view(torch.uint8) if cache.element_size() == 1 and cache.dtype != torch.uint8 else cache


def index_part(kw: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 128 + I], one projection's result -> the indexer's key [T, 128] and the weights of its heads [T, I]; views."""
    return kw[:, :INDEX_HEAD_SIZE], kw[:, INDEX_HEAD_SIZE:]


def _are_same(slots: Tensor, others: Tensor) -> bool:
    return slots is others or (slots.data_ptr() == others.data_ptr() and slots.shape == others.shape)
