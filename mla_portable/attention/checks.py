# SPDX-License-Identifier: Apache-2.0
"""What a step's tensors must be before a layer runs anything on them: they fit the spec, and the plan was made for them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.attention.buffers import StepBuffers
from mla_portable.attention.spec import AttentionSpec
from mla_portable.contracts import (
    HEAD_SIZE,
    KV_LORA_RANK,
    LAYOUTS,
    QK_ROPE_HEAD_DIM,
    InvalidArgument,
    PlanMismatch,
    StepPlan,
)
from mla_portable.contracts.rules import check_cache, check_disjoint, check_tensor, placement
from mla_portable.contracts.validate import check_schedule

__all__ = ["StepCheck", "checked_sink"]

_WHERE: Final = "SparseMLAAttention.forward"


class StepCheck:
    """The checks of one layer; made when it is built, so that a step compares and does not look up."""

    def __init__(self, spec: AttentionSpec, route: str, buffers: StepBuffers, *, device: int, flat_cache: bool) -> None:
        """`device` is what `Tensor.get_device()` says; `flat_cache`: sparse_prefill reads the bf16 cache as flat rows."""
        self._spec, self._route, self._buffers, self._device, self._flat = spec, route, buffers, device, flat_cache
        self._layout = LAYOUTS[spec.kv_layout]

    def __call__(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        topk_indices: Tensor,
        plan: StepPlan,
        out: Tensor | None,
        lse_out: Tensor | None,
    ) -> None:
        """Raises: PlanMismatch when the plan was made for something else, InvalidArgument for the tensors."""
        spec, device = self._spec, self._device
        tokens, heads = plan.num_padded_tokens, spec.num_heads
        parts = {"q[0]": q[0], "q[1]": q[1]} if isinstance(q, tuple) else {"q": q}
        self._check_plan(next(iter(parts.values())).shape[0], plan)
        self._check_cache(kv_cache)
        width = KV_LORA_RANK if isinstance(q, tuple) else HEAD_SIZE
        for (name, part), size in zip(parts.items(), (width, QK_ROPE_HEAD_DIM), strict=False):
            check_tensor(_WHERE, name, part, torch.bfloat16, (tokens, heads, size), device, f"[T, H, {size}]")
        rows = max(tokens, topk_indices.shape[0])
        check_tensor(_WHERE, "topk_indices", topk_indices, torch.int32, (rows, spec.topk), device, "[T or more, K]")
        if plan.decode_schedule is not None:
            check_schedule(_WHERE, plan.decode_schedule, plan.num_decodes, plan.decode_query_len, heads, spec.topk, device)
        if out is not None or lse_out is not None:
            if out is not None:
                check_tensor(_WHERE, "out", out, torch.bfloat16, (tokens, heads, KV_LORA_RANK), device, "[T, H, 512]")
            if lse_out is not None:
                check_tensor(_WHERE, "lse_out", lse_out, torch.float32, (tokens, heads), device, "[T, H]")
            read = {**parts, "kv_cache": kv_cache, "topk_indices": topk_indices, "the layer's buffers": self._buffers.indices}
            check_disjoint(_WHERE, {"out": out, "lse_out": lse_out}, read)

    def _check_plan(self, given: int, plan: StepPlan) -> None:
        tokens, most = plan.num_padded_tokens, self._spec.max_num_tokens
        if plan.route != self._route:
            raise PlanMismatch(
                f"{_WHERE}: the layer takes route {self._route!r}, the plan was made for {plan.route!r}. "
                "Configure the planner with planner_config()."
            )
        if given != tokens:
            raise PlanMismatch(
                f"{_WHERE}: q has {given} tokens, the plan was made for {tokens}. A plan serves one batch: plan again."
            )
        if tokens > most:
            raise PlanMismatch(
                f"{_WHERE}: the plan has {tokens} tokens, the layer was built for at most {most}. "
                "Build it with a larger max_num_tokens."
            )
        workspace = self._buffers.workspace
        have = 0 if workspace is None else workspace.shape[0]
        for chunk in plan.prefill_chunks:
            if chunk.workspace_rows > have:
                raise PlanMismatch(
                    f"{_WHERE}: a prefill chunk needs {chunk.workspace_rows} workspace rows, the layer has {have}. "
                    "Configure the planner with planner_config()."
                )

    def _check_cache(self, kv_cache: Tensor) -> None:
        layout, blocks, block_size = check_cache(_WHERE, "kv_cache", kv_cache, self._device)
        if layout.name != self._layout.name or block_size != self._spec.block_size:
            got, expected = (
                f"{layout.name}, block_size {block_size}",
                f"{self._layout.name}, block_size {self._spec.block_size}",
            )
            raise InvalidArgument(_WHERE, "kv_cache", got=got, expected=f"{expected}, as in the spec")
        alignment, uneven = placement(kv_cache)
        if alignment < self._spec.cache_alignment:
            apart = kv_cache.stride()[0] * kv_cache.element_size()
            got = f"address {kv_cache.data_ptr():#x}, block stride {apart} bytes"
            expected = f"multiples of {self._spec.cache_alignment} bytes, which the spec promises"
            remedy = f"Build the layer with cache_alignment={alignment}."
            raise InvalidArgument(_WHERE, "kv_cache", got=got, expected=expected, remedy=remedy)
        stride = kv_cache.stride()[0]
        if (uneven and self._spec.contiguous_blocks) or (self._flat and blocks > 1 and stride != block_size * HEAD_SIZE):
            raise InvalidArgument(
                _WHERE,
                "kv_cache",
                got=f"block stride {stride}",
                expected=f"{block_size * kv_cache.shape[2]}: the spec promises contiguous blocks, which route "
                f"{self._route!r} may rely on",
                remedy="Build the layer with contiguous_blocks=False for blocks that lie apart.",
            )


def checked_sink(spec: AttentionSpec, attn_sink: Tensor | None, device: int) -> Tensor | None:
    """The layer's sink. Raises: InvalidArgument unless there is one exactly where the spec says so, [H] float32."""
    where = "SparseMLAAttention"
    if spec.attn_sink and attn_sink is None:
        raise InvalidArgument(where, "attn_sink", got="None", expected="[H] float32, because spec.attn_sink")
    if attn_sink is not None:
        if not spec.attn_sink:
            raise InvalidArgument(where, "attn_sink", got="a tensor", expected="None, because spec.attn_sink is False")
        check_tensor(where, "attn_sink", attn_sink, torch.float32, (spec.num_heads,), device, "[H]")
    return attn_sink
