# SPDX-License-Identifier: Apache-2.0
"""The conventions under which FlashMLA's sparse decode is found.

operator         torch.ops.<library>.sparse_decode_fwd, schedule tensors in and out
schedule object  flash_mla_with_kvcache with a FlashMLASchedMeta that its first call fills
tensors          flash_mla_with_kvcache with the two tensors that get_mla_metadata returned
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.layouts import KV_LORA_RANK
from mla_portable_common.flash_mla.conventions import DecodeKernel, Plan, PreparedDecode, SecondCache, output_of
from mla_portable_common.libraries import NotThisConvention, Positions, parameters_of
from mla_portable_common.streams import stream_of

_EXTRA_NAMES: Final = ("extra_kv", "extra_indices")
_DECODE_NAMES: Final = ("q", "kv", "indices", "attn_sink", "tile_scheduler_metadata", "num_splits", "d_v", "sm_scale")


class OperatorDecode(DecodeKernel):
    """`sparse_decode_fwd` of a library of torch operators; with or without `out_`."""

    takes_sink = True
    takes_plan = True

    def __init__(self, operator: Any) -> None:
        """operator: the overload itself, `torch.ops.<library>.sparse_decode_fwd.default`. Raises: NotThisConvention."""
        positions = Positions(operator, _DECODE_NAMES, ("out_", *_EXTRA_NAMES))
        self._operator, self._template, index = operator, positions.template, positions.index
        self._template[index["d_v"]] = KV_LORA_RANK
        self._q, self._kv, self._indices, self._scale = (index[n] for n in ("q", "kv", "indices", "sm_scale"))
        self._sink, self._metadata = index["attn_sink"], index["tile_scheduler_metadata"]
        self._num_splits, self._out = index["num_splits"], index.get("out_")
        self.takes_out = self._out is not None
        self._extra = tuple(index[name] for name in _EXTRA_NAMES if name in index)
        self.takes_extra = len(self._extra) == len(_EXTRA_NAMES)

    def _run(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        scale: float,
        attn_sink: Tensor | None = None,
        plan: Plan | None = None,
        out: Tensor | None = None,
        extra: SecondCache | None = None,
    ) -> tuple[Tensor, ...]:
        arguments = self._template.copy()
        arguments[self._q], arguments[self._kv], arguments[self._indices], arguments[self._scale] = q, kv, indices, scale
        arguments[self._sink] = attn_sink
        arguments[self._metadata], arguments[self._num_splits] = plan or (None, None)
        if self._out is not None:
            arguments[self._out] = out
        if extra is not None:
            arguments[self._extra[0]], arguments[self._extra[1]] = extra
        return self._operator(*arguments)

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        softmax_scale: float,
        attn_sink: Tensor | None = None,
        plan: Plan | None = None,
        out: Tensor | None = None,
        extra: SecondCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See DecodeKernel."""
        result, lse, *_ = self._run(q, kv, indices, softmax_scale, attn_sink, plan, out, extra)
        return result, lse

    def plan(self, q: Tensor, kv: Tensor, indices: Tensor, extra: SecondCache | None = None) -> Plan:
        """See DecodeKernel: the operator returns the plan that it made."""
        results = self._run(q, kv, indices, 1.0, extra=extra)
        return results[2], results[3]

    def prepared(self, plan: Plan | None) -> PreparedDecode:
        """See DecodeKernel: of a list of arguments where all that stays the same is in place."""
        arguments = self._template.copy()
        arguments[self._metadata], arguments[self._num_splits] = plan or (None, None)
        operator, copy, q_at, kv_at, indices_at = self._operator, arguments.copy, self._q, self._kv, self._indices
        scale_at, sink_at, out_at, extra_at = self._scale, self._sink, self._out, self._extra
        assert out_at is not None

        def call(
            q: Tensor,
            kv: Tensor,
            indices: Tensor,
            scale: float,
            attn_sink: Tensor | None,
            out: Tensor,
            extra: SecondCache | None,
        ) -> object:
            given = copy()
            given[q_at], given[kv_at], given[indices_at] = q, kv, indices
            given[scale_at], given[sink_at], given[out_at] = scale, attn_sink, out
            if extra is not None:
                given[extra_at[0]], given[extra_at[1]] = extra
            return operator(*given)

        return call


_WITH_KVCACHE_NAMES: Final = (
    "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits", "softmax_scale",
    "is_fp8_kvcache", "indices",
)  # fmt: skip


class ScheduleObjectDecode(DecodeKernel):
    """`flash_mla_with_kvcache` with a FlashMLASchedMeta."""

    def __init__(self, module: Any, *, fp8: bool = True, has_lse: bool = True) -> None:
        """fp8: caches of bytes, else of bf16. has_lse: the second result is one. Raises: NotThisConvention."""
        self._call, self._fp8, self.has_lse = module.flash_mla_with_kvcache, fp8, has_lse
        names = parameters_of(self._call, _WITH_KVCACHE_NAMES)
        self.takes_out, self.takes_sink = "out" in names, "attn_sink" in names
        self.takes_extra = {"extra_k_cache", "extra_indices_in_kvcache"} <= set(names)
        self._meta = module.FlashMLASchedMeta
        config = getattr(self._meta, "Config", None)
        fields = tuple(field.name for field in dataclasses.fields(config)) if dataclasses.is_dataclass(config) else ()
        self._config, self._fields = config, fields
        self.takes_plan = bool(fields) and set(fields) <= set(self._values(1, 1, 64, 1, 64))

    def _values(
        self, batch: int, query_len: int, heads: int, page: int, topk: int, extra: SecondCache | None = None
    ) -> dict[str, Any]:
        """What a sparse FP8 call's configuration holds, by the names of its fields."""
        return {
            "b": batch,
            "s_q": query_len,
            "h_q": heads,
            "page_block_size": page,
            "h_k": 1,
            "causal": False,
            "is_fp8_kvcache": self._fp8,
            "topk": topk,
            "extra_page_block_size": None if extra is None else extra.kv.shape[1],
            "extra_topk": None if extra is None else extra.indices.shape[2],
            "enable_batch_invariant": False,
        }

    def _run(self, meta: Any, q: Tensor, kv: Tensor, indices: Tensor, softmax_scale: float, **others: Any) -> Any:
        return self._call(
            q=q,
            k_cache=kv,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=KV_LORA_RANK,
            tile_scheduler_metadata=meta,
            softmax_scale=softmax_scale,
            is_fp8_kvcache=self._fp8,
            indices=indices,
            **others,
        )

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        softmax_scale: float,
        attn_sink: Tensor | None = None,
        plan: Plan | None = None,
        out: Tensor | None = None,
        extra: SecondCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See DecodeKernel."""
        meta = self._meta()
        if plan is not None:
            batch, query_len, heads, _ = q.shape
            values = self._values(batch, query_len, heads, kv.shape[1], indices.shape[2], extra)
            meta.config = self._config(**{name: values[name] for name in self._fields})
            meta.tile_scheduler_metadata, meta.num_splits = plan
            meta.have_initialized = True
        others: dict[str, Any] = {}
        if attn_sink is not None:
            others["attn_sink"] = attn_sink
        if out is not None:
            others["out"] = out
        returned = self._run(meta, q, kv, indices, softmax_scale, **others, **_extra_of(extra))
        return (returned[0], returned[1]) if self.has_lse else (output_of(returned), None)

    def plan(self, q: Tensor, kv: Tensor, indices: Tensor, extra: SecondCache | None = None) -> Plan:
        """See DecodeKernel: the first call fills the object."""
        meta = self._meta()
        self._run(meta, q, kv, indices, 1.0, **_extra_of(extra))
        return meta.tile_scheduler_metadata, meta.num_splits


def _extra_of(extra: SecondCache | None) -> dict[str, Tensor]:
    """The keywords of a second cache."""
    return {} if extra is None else {"extra_k_cache": extra.kv, "extra_indices_in_kvcache": extra.indices}


class TensorsDecode(DecodeKernel):
    """`flash_mla_with_kvcache` with the tensors of `get_mla_metadata`: FlashMLA up to the end of 2025 and its copies.

    With `topk` given the plan depends on shapes alone, so one per shape is made and kept: no planner kernel in later steps.
    A plan made while a CUDA graph is captured lives in that graph's memory and is not kept.
    """

    takes_out = False
    takes_plan = True
    takes_extra = False

    def __init__(self, module: Any, *, fp8: bool = True, has_lse: bool = True) -> None:
        """fp8: caches of bytes, else of bf16. has_lse: the second result is one. Raises: NotThisConvention."""
        self._call, self._make = module.flash_mla_with_kvcache, module.get_mla_metadata
        self._fp8, self.has_lse = fp8, has_lse
        names = parameters_of(self._call, _WITH_KVCACHE_NAMES)
        parameters_of(self._make, ("cache_seqlens", "num_heads_k", "num_heads_q", "is_fp8_kvcache", "topk"))
        self.takes_sink = "attn_sink" in names
        self._plans: dict[tuple[object, ...], tuple[Tensor, Plan]] = {}

    def _own(self, q: Tensor, topk: int) -> tuple[Tensor, Plan]:
        """([B] int32 lengths that nothing reads, the plan) for a call of these shapes."""
        batch, query_len, heads, _ = q.shape
        # another stream would not wait for it
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else stream_of(q.device)[0]
        key = (batch, query_len, heads, topk, q.device, stream)
        known = self._plans.get(key)
        if known is None:
            lens = torch.full((batch,), topk, dtype=torch.int32, device=q.device)
            plan = self._make(lens, query_len * heads, 1, num_heads_q=heads, is_fp8_kvcache=self._fp8, topk=topk)
            known = (lens, (plan[0], plan[1]))
            if not (torch.cuda.is_current_stream_capturing() if q.is_cuda else stream_of(q.device)[1]):
                self._plans[key] = known
        return known

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        softmax_scale: float,
        attn_sink: Tensor | None = None,
        plan: Plan | None = None,
        out: Tensor | None = None,
        extra: SecondCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See DecodeKernel."""
        lens, own = self._own(q, indices.shape[2])
        metadata, num_splits = own if plan is None else plan
        others = {} if attn_sink is None else {"attn_sink": attn_sink}
        returned = self._call(
            q=q,
            k_cache=kv,
            block_table=lens.view(-1, 1),
            cache_seqlens=lens,
            head_dim_v=KV_LORA_RANK,
            tile_scheduler_metadata=metadata,
            num_splits=num_splits,
            softmax_scale=softmax_scale,
            is_fp8_kvcache=self._fp8,
            indices=indices,
            **others,
        )
        return (returned[0], returned[1]) if self.has_lse else (output_of(returned), None)

    def plan(self, q: Tensor, kv: Tensor, indices: Tensor, extra: SecondCache | None = None) -> Plan:
        """See DecodeKernel."""
        return self._own(q, indices.shape[2])[1]


def decode_of_module(module: Any, *, fp8: bool = True, has_lse: bool = True) -> DecodeKernel:
    """The decode of a Python module, whichever generation it is. Raises: NotThisConvention.

    fp8: caches of bytes, else of bf16. has_lse: the second result is one.
    """
    if not hasattr(module, "flash_mla_with_kvcache"):
        raise NotThisConvention(f"{module.__name__} has no flash_mla_with_kvcache")
    if hasattr(module, "FlashMLASchedMeta"):
        return ScheduleObjectDecode(module, fp8=fp8, has_lse=has_lse)
    if hasattr(module, "get_mla_metadata"):
        return TensorsDecode(module, fp8=fp8, has_lse=has_lse)
    raise NotThisConvention(f"{module.__name__} has neither FlashMLASchedMeta nor get_mla_metadata")
