# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The metadata builder: one plan per step, from numbers that already lie on the host."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import ref

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from mla_portable.contracts import Batch, DecodeSchedule, InvalidArgument
from mla_portable.engines.common.metrics import publish
from mla_portable.engines.common.routing import pairs, route_pairs, served_by
from mla_portable.engines.vllm import compat, model, prompts, scratch, selections
from mla_portable.engines.vllm.metadata import MLAPortableMetadata
from mla_portable.engines.vllm.settings import logger
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.planner import Planner


class MLAPortableMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of one group of layers, and the attention object that those layers share.

    Nothing is read back from the device in `build`. Uniform decode batches, speculative ones included, may be captured in
    CUDA graphs where the chosen implementations can: every tensor that a plan names keeps its address.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Raises: UnsupportedRoute with every reason when nothing here serves the layers; InvalidArgument when they differ."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        impls = compat.impls_of(vllm_config, layer_names)
        demands = {
            (i.head_size, i.num_heads, i.scale, i.kv_cache_dtype, i.need_to_return_lse_for_decode, i.sinks is not None)
            for i in impls
        }
        if len(demands) > 1:
            got = f"layers that differ: {sorted(demands, key=str)}"
            expected = "one head size and count, scale and cache format; attention sinks in all layers or in none"
            raise InvalidArgument("vLLM", "layer_names", got=got, expected=expected)
        default = (None, None, None, _stored(vllm_config, kv_cache_spec), False, False)
        head_size, heads, scale, stored, need_lse, has_sinks = next(iter(demands), default)
        resolved = model.resolve(
            vllm_config,
            device,
            kv_cache_dtype=stored,
            head_size=head_size,
            num_heads=heads,
            softmax_scale=scale,
            block_size=kv_cache_spec.block_size,
            block_gap=compat.block_gap(vllm_config, kv_cache_spec),
            need_lse=need_lse,
            attn_sink=has_sinks,
        )
        followed = selections.leaders(vllm_config)
        leads = any(leader in impls for leader in followed.values())
        buffers = scratch.step_buffers(resolved, vllm_config, device)
        if leads and buffers is not None:
            buffers = scratch.keep(buffers, resolved.spec)
        self.attention = model.bind(resolved, device, buffers)
        with neutral_defaults():
            self.planner = Planner(model.planner_config(self.attention))
        microbatches = compat.runs_microbatches(vllm_config)
        self._workspace = None if buffers is None or microbatches else compat.workspace_manager()
        for impl in impls:
            impl.attach(self.attention, resolved.writer, same_selection=impl in followed)
            impl.builders.add(self)
        dims = {impl.head_dims for impl in impls}
        found = prompts.attention(resolved, vllm_config, next(iter(dims))) if len(dims) == 1 else None
        layers = [vllm_config.compilation_config.static_forward_context.get(name) for name in layer_names]
        self._prompts = prompts.prompts(found, layers, vllm_config, resolved.spec.decode_query_len)
        self._topk = compat.topk(vllm_config) or resolved.spec.topk
        self._captured: dict[int, DecodeSchedule] = {}
        self._leads = leads
        self._latest: tuple[selections.Described, MLAPortableMetadata] | None = None
        self.served = self.attention.spec, self._prompts is None, dims
        self._in_front = self._builders_in_front(impls, followed)
        logger.info(
            "mla_portable serves %d layers on %s by route %s: %s; cache %s, %s heads, written by %s",
            len(layer_names),
            self.attention.facts,
            self.attention.route,
            served_by(self.attention.route_decision),
            resolved.spec.kv_layout,
            resolved.spec.num_heads,
            resolved.writer.who,
        )
        bound = route_pairs(self.attention.route_decision)
        if found is not None and self._prompts is not None:
            bound += pairs(found.decisions.values())
        publish(self.attention.facts.name, bound, logger)
        logger.debug("%s", self.attention.explain())

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """UNIFORM_BATCH where the route can be captured, else NEVER.

        Raises: UnsupportedRoute when nothing serves the model.
        """
        # The spec's blocks are the manager's here; kernels will see smaller ones.
        stored, gap = _stored(vllm_config, kv_cache_spec), compat.block_gap(vllm_config, kv_cache_spec)
        sinks = compat.has_sinks(vllm_config)
        resolved = model.resolve(vllm_config, compat.device(), kv_cache_dtype=stored, block_gap=gap, attn_sink=sinks)
        return cls._cudagraph_support if resolved.spec.graph else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLAPortableMetadata:
        """The metadata of one step. `common_prefix_len` and `fast_build` make no difference.

        Raises: InvalidArgument for a batch beyond the configured limits.
        """
        for each in self._in_front:
            builder = each()
            found = None if builder is None else builder.built(common_attn_metadata)
            if found is not None:
                return found
        metadata = self._build(common_attn_metadata)
        if self._leads:
            self._latest = selections.Described(common_attn_metadata), metadata
        return metadata

    def built(self, common_attn_metadata: Any) -> MLAPortableMetadata | None:
        """What `build` made last, if it was for this step; else None."""
        if self._latest is None or not self._latest[0].is_step(common_attn_metadata):
            return None
        return self._latest[1]

    def _builders_in_front(self, impls: list[Any], followed: dict[Any, Any]) -> tuple[ref[MLAPortableMetadataBuilder], ...]:
        """Builders of the layers whose selections all layers of this one attend to, and that are served like these.

        From 0.30 on vLLM has a builder for the layers with an indexer and one for those without, but gives both the same
        description of a step. With the same plan the latter read what the former converted.
        """
        if not impls or any(impl not in followed for impl in impls):
            return ()
        found = dict.fromkeys(builder for impl in impls for builder in followed[impl].builders if builder is not self)
        return tuple(ref(each) for each in found if each.served == self.served)

    def _build(self, common: Any) -> MLAPortableMetadata:
        spec = self.attention.spec
        num_reqs, num_tokens = int(common.num_reqs), int(common.num_actual_tokens)  # numpy's in places
        starts = common.query_start_loc_cpu.numpy()[: num_reqs + 1]
        query_lens = starts[1:] - starts[:-1]
        lengths = self._host_lengths(common, query_lens)
        reqs, tokens, apart = num_reqs, num_tokens, None
        if self._prompts is not None and common.seq_lens_cpu_upper_bound is not None:  # exact for prompts
            apart = self._prompts.build(query_lens, lengths, common.block_table_tensor)
        if apart is not None:
            reqs, tokens = apart[0], int(starts[apart[0]])
        batch = Batch(
            query_start_loc=starts[: reqs + 1],
            seq_lens=lengths[:reqs],
            block_table=common.block_table_tensor,
            num_padded_tokens=tokens,
            seq_lens_device=common.seq_lens if spec.share.size == 1 else None,  # the planner sends own lengths
        )
        if self._workspace is not None and not self._workspace.is_locked():
            scratch.follow(self._workspace, self.attention.buffers)
        plan = self.planner.plan(batch)
        return MLAPortableMetadata(
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            num_decodes=reqs,
            num_decode_tokens=tokens,
            num_prefills=num_reqs - reqs,
            prefill_max_seq_len=0 if apart is None else compat.prompt_marks(self._topk)[0],
            prefill=None if apart is None else apart[1],
            block_size=spec.block_size,
            topk_tokens=self._topk,
            attention=self.attention,
            plan=plan,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLAPortableMetadata:
        """The metadata of a step that is captured.

        vLLM drops it, but the graph goes on reading what its plan points at: the planner's own buffers, and the schedule, which
        is kept here. A step of the same shape has the same schedule, so captures of it add nothing.
        """
        metadata = self.build(0, common_attn_metadata)
        schedule = metadata.plan.decode_schedule
        if schedule is not None:
            self._captured[id(schedule)] = schedule
        return metadata

    def _host_lengths(self, common: Any, query_lens: np.ndarray) -> np.ndarray:
        """Sequence lengths or upper bounds of them, [R] int32, each at least its query and at most the longest sequence.

        Dummy batches have arbitrary lengths, and bounds may pass the limit by the drafts that were not accepted yet.
        """
        limit = self.attention.spec.max_model_len
        lengths = compat.host_lengths(common, query_lens)
        if lengths is None:
            lengths = np.where(query_lens > 0, np.int32(min(common.max_seq_len, limit)), np.int32(0))
        lengths = np.maximum(lengths, query_lens)
        return np.minimum(lengths, limit, out=lengths)


def _stored(vllm_config: Any, kv_cache_spec: Any) -> str:
    """vLLM's name of the cache's format."""
    return getattr(kv_cache_spec, "cache_dtype_str", None) or vllm_config.cache_config.cache_dtype
