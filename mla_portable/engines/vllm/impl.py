# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""One layer's attention as vLLM calls it: the latent query against the cache, over the tokens that the indexer chose."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar, Final
from weakref import WeakSet, ref

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none

from mla_portable.attention import PromptAttention, SparseMLAAttention, StepBuffers
from mla_portable.contracts import InvalidArgument
from mla_portable.engines.common import warm_up as warming
from mla_portable.engines.common.routing import route_pairs
from mla_portable.engines.vllm import compat, model, prompts, scratch, warm_up
from mla_portable.engines.vllm.layer_parts import as_bytes
from mla_portable.engines.vllm.metadata import MLAPortableMetadata
from mla_portable.engines.vllm.settings import logger
from mla_portable.engines.vllm.writer import Writer
from mla_portable.kit.rules import check_tensor
from mla_portable.layouts import KV_LORA_RANK

READS: Final = ("num_heads", "num_kv_heads", "head_size", "scale", "kv_cache_dtype", "attn_type")
"""Arguments of vLLM's that must be there; `kv_lora_rank`, `indexer`, `topk_indices_buffer` and `sinks` may be."""
REFUSED: Final = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "q_pad_num_heads")


class MLAPortableImpl(compat.IMPL_BASE):
    """vLLM's interface to a SparseMLAAttention that the builder makes and all layers share.

    vLLM multiplies the query by W_UK before, and the output by W_UV after; nothing of the weights is kept here. The builder
    owns the attention and its buffers: what a dropped builder held is released, whatever layers it was made for.
    """

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: bool = False
    masked_mha_available: bool = False
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_pcp: bool = False
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(self, **arguments: Any) -> None:
        """Checks that the layer can be served and reserves its scratch, so that vLLM fails early and profiles it.

        Args:
            arguments: what vLLM passes to every implementation of MLA, by name; those of READS are used here.
        Raises: InvalidArgument for what sparse MLA does not have, and for sinks of another shape or dtype; UnsupportedRoute
            when nothing here serves the model.
        """
        for name in REFUSED:
            if arguments.get(name):
                raise InvalidArgument("vLLM", name, got=repr(arguments[name]), expected="None: sparse MLA does not support it")
        if arguments["attn_type"] != "decoder":
            raise InvalidArgument("vLLM", "attn_type", got=repr(arguments["attn_type"]), expected="'decoder'")
        self.num_heads: int = arguments["num_heads"]
        self.num_kv_heads: int = arguments["num_kv_heads"]
        self.head_size: int = arguments["head_size"]
        self.scale = float(arguments["scale"])
        self.kv_cache_dtype: str = arguments["kv_cache_dtype"]
        self.kv_lora_rank: int = arguments.get("kv_lora_rank", KV_LORA_RANK)
        self.sinks: Tensor | None = arguments.get("sinks")
        """[H] float32, an attention sink for each head of this rank. The model loads its values later; each call reads them."""
        if self.sinks is not None:
            with torch.no_grad():  # a parameter
                check_tensor("vLLM", "sinks", self.sinks, torch.float32, (self.num_heads,), self.sinks.device, "[H]")
        self._indexer: Any | None = arguments.get("indexer")
        self.has_indexer = self._indexer is not None
        self.same_selection = False
        """The layer attends to what an earlier layer's indexer selected, whose slots that layer converted (`selections`)."""
        self.builders: WeakSet[Any] = WeakSet()
        """Of this layer, for as long as vLLM keeps them."""
        misspelt = arguments.get("topk_indice_buffer")  # 0.17
        self._topk_indices_buffer: Tensor | None = arguments.get("topk_indices_buffer", misspelt)
        self._attention: ref[SparseMLAAttention] | None = None
        self._writer: Writer | None = None
        self._scratch: StepBuffers | None = None
        self.head_dims = prompts.head_dims(arguments)
        self._project = arguments.get("kv_b_proj")
        self._prompts: PromptAttention | None = None
        self.resolved: model.Resolved | None = None
        """How the layer is served, by what was known when it was built; None without a configuration."""
        config = get_current_vllm_config_or_none()
        if config is not None:
            self.resolved = self._reserve(config)
            self._prompts = prompts.attention(self.resolved, config, self.head_dims)
            self.supports_dense_mha_prefill = self.masked_mha_available = self._prompts is not None

    def _reserve(self, config: Any) -> model.Resolved:
        resolved = model.resolve(
            config,
            compat.device(),
            kv_cache_dtype=self.kv_cache_dtype,
            head_size=self.head_size,
            num_heads=self.num_heads,
            softmax_scale=self.scale,
            need_lse=self.need_to_return_lse_for_decode,
            attn_sink=self.sinks is not None,
        )
        buffers = scratch.step_buffers(resolved, config, compat.device())
        # vLLM's workspace may grow, and must not be held
        self._scratch = buffers if compat.runs_microbatches(config) else None
        return resolved

    @property
    def topk_indices_buffer(self) -> Tensor | None:
        """[tokens, K] int32, filled by the indexer; a layer without one reads what the layer before it chose.

        Read from the indexer each time: a draft model's indexer is given the target's buffer after its layers were built.
        """
        return self._topk_indices_buffer if self._indexer is None else self._indexer.topk_indices_buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: Tensor | None) -> None:
        self._topk_indices_buffer, self._indexer = buffer, None

    def attach(self, attention: SparseMLAAttention, writer: Writer, *, same_selection: bool = False) -> None:
        """Called by each builder of this layer; the latest one's attention writes the cache where vLLM's operator cannot.

        vLLM makes a first set of builders to profile CUDA graphs and drops it: the layer keeps none of it alive.
        """
        self._attention, self._writer, self.same_selection = ref(attention), writer, same_selection

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Nothing to prepare: W_UK and W_UV are the layer's own.

        Raises: InvalidArgument for activations other than bfloat16.
        """
        if act_dtype != torch.bfloat16:
            remedy = "Start vLLM with --dtype bfloat16."
            raise InvalidArgument("vLLM", "dtype", got=act_dtype, expected="torch.bfloat16", remedy=remedy)

    def warm_up(self, vllm_config: Any, kv_cache: Tensor | None) -> None:
        """Make what this layer's steps need, unless a layer of its kind did.

        kv_cache: the layer's own, which is neither read nor written: blocks lie as in it. None before there is one.
        Raises: whatever a call of the layer raises.
        """
        if self.resolved is None:
            return
        resolved, attention = self.resolved, self._attention() if self._attention is not None else None
        if attention is not None:
            resolved = replace(resolved, spec=attention.spec, decision=attention.route_decision)
        stride = whole = resolved.spec.block_size * resolved.spec.layout.row_width
        if kv_cache is not None and len(kv_cache) > 1 and kv_cache.shape[1] == resolved.spec.block_size:
            stride = as_bytes(kv_cache).stride(0)
        stride = None if stride == whole else stride
        kind = resolved.spec, route_pairs(resolved.decision), resolved.writer, self.head_dims, self._prompts is None, stride
        if kind in warm_up.warmed():
            return
        device = compat.device()
        if attention is None:
            buffers = scratch.step_buffers(resolved, vllm_config, device)
            attention = model.bind(resolved, device, buffers)
        begin, cache = time.perf_counter(), warming.scratch_cache(resolved.spec, attention.device, stride)
        config = model.planner_config(attention)
        warming.warm_layer(attention, config, kv_cache=cache, writes=resolved.writer.who != "vllm")
        if self._prompts is not None:
            project = self._project
            warming.warm_prompts(self._prompts, None if project is None else lambda rows: project(rows)[0], kv_cache=cache)
        warm_up.warmed().add(kind)
        logger.info("mla_portable made what its layers need in %.1f s", time.perf_counter() - begin)

    def reserve_workspace(self) -> None:
        """Called by vLLM 0.33 while it profiles memory: what a step of prompts allocates, and frees."""
        if self._prompts is not None:
            torch.empty(self._prompts.scratch_bytes, dtype=torch.uint8, device=self._prompts.device)

    def record_logical_topk_ready(self) -> None:
        """Called by vLLM 0.33 when the indexer's kernels are enqueued; nothing to do, everything here is on the same stream."""

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *more: Any, **options: Any
    ) -> None:
        """Write new tokens: kv_c_normed [T, 512], k_pe [T, 1, R] or [T, R]; slot_mapping [T or fewer], negative = skip.

        `more` and `options` are vLLM's operator's: the cache's format, its scale, and what versions add.

        Raises: InvalidArgument when no builder was made for the layer yet.
        """
        if kv_cache.numel() == 0:  # vLLM profiles before there is a cache
            self.reserve_workspace()
            return
        attention = self._attention() if self._attention is not None else None
        if attention is None or self._writer is None:
            got, expected = "a layer without a metadata builder", "one builder for each group of layers, made before a step"
            raise InvalidArgument("vLLM", "do_kv_cache_update", got=got, expected=expected)
        if self._writer.who == "vllm":
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, *more, **options)
            return
        slots = slot_mapping.flatten()
        rows = slots.shape[0]
        attention.cache_write(kv_c_normed[:rows], k_pe.flatten(1)[:rows], as_bytes(kv_cache), slots)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: MLAPortableMetadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of a step's tokens.

        Args:
            q: [T, H, 512 + R] bf16, or ql_nope [T, H, 512] and q_pe [T, H, R]; R is 64, or 0 in models without rope. T is the
                metadata's `num_decode_tokens`. Under decode context parallelism the first, with the heads of all ranks that
                share a sequence.
            kv_c_and_k_pe_cache: [blocks, block_size, 512 + R] bf16, or [blocks, block_size, 656] of bytes.
        Returns: out [T, H, 512] bf16, and the natural-log lse [T, H] float32 where vLLM merges partial results, else None.
        Raises: InvalidArgument or PlanMismatch before anything is written.
        """
        attention, topk_indices = attn_metadata.attention, self.topk_indices_buffer
        if attention.spec.softmax_scale != self.scale:
            expected = f"{attention.spec.softmax_scale}, as the builder's layers do"
            raise InvalidArgument("vLLM", "scale", got=f"a layer that scales by {self.scale}", expected=expected)
        if topk_indices is None:
            raise InvalidArgument("vLLM", "topk_indices_buffer", got="None", expected="an indexer's buffer, [tokens, K] int32")
        own: dict[str, Any] = {"attn_sink": self.sinks, "same_selection": self.same_selection}
        return attention.forward(q, as_bytes(kv_c_and_k_pe_cache), topk_indices, attn_metadata.plan, **own)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLAPortableMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attention of the tokens behind the metadata's `num_decode_tokens`, over keys of each head.

        Args:
            q: [T, H, P + R] bf16. kv_c_normed: [T, 512], k_pe: [T, 1, R] bf16, of the same tokens. kv_c_and_k_pe_cache: has
                what stands before them. output: [T, H * V] bf16, written. k_scale: of formats that are not served here.
        Raises: InvalidArgument or PlanMismatch before anything is written; InvalidArgument for an `output_scale`.
        """
        step, topk_indices = attn_metadata.prefill, self.topk_indices_buffer
        if output_scale is not None or step is None or topk_indices is None or self._project is None:
            got = f"output_scale {output_scale is not None}, prompts {step is not None}, indexer {topk_indices is not None}"
            raise InvalidArgument("vLLM", "forward_mha", got=got, expected="a step whose prompts the builder described")
        attention, project = step.attention, self._project
        first, tokens = attn_metadata.num_decode_tokens, q.shape[0]
        attention.forward(
            q,
            kv_c_normed,
            k_pe.flatten(1),
            lambda latent: project(latent)[0],
            as_bytes(kv_c_and_k_pe_cache),
            topk_indices[first : first + tokens] if step.plan.masked else None,
            step.plan,
            out=output.view(tokens, self.num_heads, attention.head_dims.value),
        )

    @staticmethod
    def masked_mha_workspace_fits(prefill: Any) -> bool:
        """Asked by vLLM's layer from 0.28 on: the prompts of the step go to `forward_mha`."""
        return isinstance(prefill, prompts.StepPrompts)
