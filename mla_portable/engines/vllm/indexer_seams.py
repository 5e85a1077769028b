# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Where this indexer takes the place of vLLM's: each function changes one of vLLM's modules, right after it is imported.

Nothing is imported, and no device is touched, when the plugin is loaded. Every replacement asks `indexer_choice` when it is
called, and calls vLLM's own where that serves. Versions are recognised by what their modules have; 0.24 to 0.33 were read.

    vllm.model_executor.layers.sparse_attn_indexer   the operator, its function, and the layer around it
    vllm.v1.attention.backends.mla.indexer           requests attached to the metadata; no DeepGEMM schedules
    vllm.model_executor.models.deepseek_v2           no Triton kernel that stores e4m3 below compute capability 8.9
    vllm.models.deepseek_v32                         0.29 and later: the generic model class there, for the same reason
    vllm.models.glm5next.nvidia.sparse_indexer       the layer that scores pools of keys, which calls DeepGEMM's functions; in
                                                     0.30 vllm.model_executor.layers.sparse_attn_indexer_kpool
    vllm.models.glm5next.nvidia.ops.kpool_compress   its kernels that store e4m3, and what moves e4m3 in Triton, below compute
    vllm.models.glm5next.common.attention            capability 8.9; in 0.30 vllm.models.glm5next.nvidia.attention

The operator keeps its name and schema: its kernel alone is registered again, in torch's dispatcher. So everything that refers
to it by name goes on to work (`splitting_ops`, piecewise and full CUDA graphs), which a new operator or another `CustomOp`
class would not give, and vLLM 0.30's models, which call the function, get the same one. That, and DeepGEMM's functions behind
`vllm.utils.deep_gemm`, are changed when the first layer is built and this indexer serves it: elsewhere they stay vLLM's.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch

from mla_portable.accelerator import accelerator
from mla_portable.contracts import ContextShare
from mla_portable.engines.vllm import settings
from mla_portable.engines.vllm.imports import when_imported

_STEP: Final = "mla_portable_step"
"""The attribute of vLLM's indexer metadata that holds an IndexerStep."""
_SCHEDULES: Final = "mla_portable_schedules"
"""The attribute of vLLM's builder of it that holds IndexerSchedules."""
_CAPTURED: Final = "mla_portable_captured"
"""The attribute of vLLM's builder that says that a step is described for a CUDA graph."""
_FP8_IN_TRITON: Final = (8, 9)
"""The least compute capability for which Triton compiles e4m3."""
_MODELS: Final = {
    "DeepseekV32ForCausalLM": ("vllm.model_executor.models.deepseek_v2", "DeepseekV3ForCausalLM"),
    "GlmMoeDsaForCausalLM": ("vllm.model_executor.models.deepseek_v2", "GlmMoeDsaForCausalLM"),
    "DeepseekV32MTP": ("vllm.model_executor.models.deepseek_mtp", "DeepSeekMTP"),
}
_FUNCTIONS: Final = ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata")
_theirs: dict[str, Any] = {}
"""What `vllm.utils.deep_gemm` had in place of ours."""


def install() -> None:
    """Prepare the replacements; calling it again changes nothing."""
    for name, seam in SEAMS.items():
        when_imported(name, seam)


def replace_operator(module: Any) -> None:
    """Serve the function behind `vllm::sparse_attn_indexer`, and let the layer be built without DeepGEMM."""
    has_deep_gemm = module.has_deep_gemm
    module.sparse_attn_indexer = serve = operator(module, module.sparse_attn_indexer)
    module.has_deep_gemm = lambda: _ours() or has_deep_gemm()  # asked by the layer's constructor alone, which refuses without
    _extend_layer(module.SparseAttnIndexer, serve)


@functools.cache
def register_kernel(serve: Callable[..., torch.Tensor]) -> torch.library.Library:
    """Make `serve` the kernel of `vllm::sparse_attn_indexer` for as long as the result lives: for good."""
    from vllm.platforms import current_platform

    library = torch.library.Library("vllm", "IMPL")
    allowed = {"allow_override": True} if "allow_override" in inspect.signature(library.impl).parameters else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is registered again
        library.impl("sparse_attn_indexer", serve, dispatch_key=current_platform.dispatch_key, **allowed)
    return library


def set_functions(*, ours: bool) -> None:
    """Put DeepGEMM's functions of `mla_portable.deep_gemm` behind vLLM's wrappers of them, or what was there back."""
    from vllm.platforms import current_platform

    from mla_portable import deep_gemm

    module: Any = import_module("vllm.utils.deep_gemm")
    if ours and not _theirs and current_platform.support_deep_gemm():
        module._lazy_init()  # finds all of DeepGEMM's functions, but not once one is there
    for name in _FUNCTIONS:
        slot = f"_{name}_impl"
        if ours and slot not in _theirs and hasattr(module, slot):
            _theirs[slot] = getattr(module, slot)
            setattr(module, slot, getattr(deep_gemm, name))
        elif not ours and slot in _theirs:
            setattr(module, slot, _theirs.pop(slot))


def _functions_are_ours() -> bool:
    """vLLM's wrappers of DeepGEMM's functions reach ours, whichever layer calls them."""
    return bool(_theirs)


def operator(module: Any, stock: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A function with the arguments of `stock`, vLLM's own, that serves by the fused path where it can."""
    from vllm.forward_context import get_forward_context

    from mla_portable.engines.vllm import indexer, indexer_choice

    names = tuple(inspect.signature(stock).parameters)
    share_of = functools.cache(ContextShare)
    name_of = getattr(module, "_resolve_layer_name", lambda name: name)

    def sparse_attn_indexer(*args: Any, **kwargs: Any) -> torch.Tensor:
        choice = indexer_choice.current()
        if not choice.fuses_some:
            return stock(*args, **kwargs)
        call = dict(zip(names, args, strict=False), **kwargs)  # torch leaves defaults at the end out
        if _is_beyond_fused(call):
            return stock(*args, **kwargs)
        context = get_forward_context()
        buffer, q, kv_cache = call["topk_indices_buffer"], call["q_quant"], call["kv_cache"]
        topk, scale_format = call["topk_tokens"], call["scale_fmt"] or ""
        all_metadata = context.attn_metadata
        share = share_of(call.get("dcp_world_size", 1), call.get("dcp_rank", 0), call.get("cp_kv_cache_interleave_size", 1))
        kind: dict[str, Any] = {"scale_format": scale_format, "share": share, "reason": choice.reason}
        kind["longest"] = call["max_model_len"]
        if not isinstance(all_metadata, dict):  # vLLM profiles memory, or a rank has nothing to do
            bound = indexer.indexer_for(kv_cache, q.shape[1], topk, q.device, **kind)
            torch.empty(bound.scratch_bytes(q.shape[0]), dtype=torch.uint8, device=q.device)
            return buffer if choice.fused else stock(*args, **kwargs)
        metadata = all_metadata[name_of(call["k_cache_prefix"])]
        step: indexer.IndexerStep | None = getattr(metadata, _STEP, None)
        if step is None:
            if choice.fused:
                _log_unplanned(type(metadata).__name__)
            elif not (metadata.num_prefills or accelerator(q.device).is_capturing()):
                indexer.indexer_for(kv_cache, q.shape[1], topk, q.device, **kind)  # for a graph that may hold it
            return stock(*args, **kwargs)
        bound = indexer.indexer_for(kv_cache, q.shape[1], topk, q.device, **kind)
        if not call["skip_k_cache_insert"]:
            slots = metadata.slot_mapping
            bound.write_keys(call["k"][: slots.shape[0]], kv_cache, slots)
        reader = name_of(call.get("dense_mha_metadata_layer_name", ""))
        if reader and not bound.is_capturing() and _is_unread(context, all_metadata.get(reader)):
            return buffer
        if not call.get("skip_topk_buffer_clear", False):
            num_rows = call["hidden_states"].shape[0]
            if num_rows > step.num_tokens:
                buffer[step.num_tokens : num_rows].fill_(-1)
            if buffer.shape[1] > topk:
                buffer[: step.num_tokens, topk:].fill_(-1)
        bound.choose(q, call["weights"], kv_cache, step, buffer[:, :topk])
        return buffer

    # Outermost, as vLLM has it: piecewise graphs that are captured without torch.compile run this between their pieces.
    return getattr(module, "eager_break_during_capture", lambda function: function)(sparse_attn_indexer)


def _is_beyond_fused(call: dict[str, Any]) -> bool:
    """A call that only vLLM's operator serves: FP4, prefill context parallelism, two-level selection."""
    return bool(call.get("use_fp4_cache", False) or call.get("use_pcp", False) or call.get("candidate_blocks") is not None)


def _is_unread(context: Any, metadata: Any) -> bool:
    """Nobody reads the step's selection: the layer computes all of it as dense attention (0.28 and later)."""
    dense = getattr(getattr(metadata, "prefill", None), "use_dense_mha", False)
    return dense and metadata.num_decode_tokens == 0 and context.cudagraph_runtime_mode.name != "FULL"


@functools.cache
def _log_unplanned(metadata: str) -> None:
    settings.logger.warning("vLLM's operator serves an indexer whose metadata (%s) mla_portable does not know", metadata)


def serve_pools(module: Any) -> None:
    """Let GLM-5.3-Flash's layer be built without DeepGEMM, and call our functions in its place.

    Its function is no operator, and does more than score: new tokens become pools, chosen pools become tokens again.
    """
    has_deep_gemm = module.has_deep_gemm
    module.has_deep_gemm = lambda: _ours() or has_deep_gemm()
    _extend_layer(module.SparseAttnIndexerKpool, None)
    if _lacks_fp8_in_triton() and _ours():
        from mla_portable.engines.vllm import pools

        module.pack_seq_triton = pools.as_bytes(module.pack_seq_triton, pad_value=0)  # rows that are padding are not read


def store_pools(module: Any) -> None:
    """Below compute capability 8.9 GLM-5.3-Flash's kernels store bfloat16, and the codes are made behind them."""
    if _lacks_fp8_in_triton() and _ours():
        from mla_portable.engines.vllm import pools

        pools.store_codes(module)


def pad_heads_as_bytes(module: Any) -> None:
    """Below compute capability 8.9 torch.compile pads GLM-5.3-Flash's e4m3 queries as bytes."""
    if _lacks_fp8_in_triton() and _ours():
        from mla_portable.engines.vllm import pools

        module._pad_indexer_heads = pools.as_bytes(module._pad_indexer_heads)


def _extend_layer(layer: Any, serve: Callable[..., torch.Tensor] | None) -> None:
    """Choose whose indexer serves when a layer is built, and let it call the operator on every platform if it is ours.

    serve: the operator's kernel, None for a layer that calls none.
    """
    build = layer.__init__

    @functools.wraps(build)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config_or_none
        from vllm.platforms import current_platform

        from mla_portable.engines.vllm import indexer_choice

        config = get_current_vllm_config_or_none()
        choice = indexer_choice.choose(config)
        ours = choice.ours
        set_functions(ours=ours)
        if (ours or choice.fuses_some) and serve is not None:
            register_kernel(serve)
        kernels: Any = getattr(config, "kernel_config", None)
        if ours and _lacks_fp8_in_triton() and getattr(kernels, "enable_jit_warmup", False):
            kernels.enable_jit_warmup = False  # 0.33 would compile kernels for e4m3 queries that the fused path does not call
            try:
                build(self, *args, **kwargs)
            finally:
                kernels.enable_jit_warmup = True
        else:
            build(self, *args, **kwargs)
        if ours and type(self) is layer and (current_platform.is_cpu() or current_platform.is_out_of_tree()):
            self._forward_method = self.forward_cuda  # vLLM's own refuses there; a vendor's subclass knows what it does

    layer.__init__ = construct


def extend_builder(module: Any) -> None:
    """Attach an IndexerStep to vLLM's metadata, and compute no schedules for DeepGEMM where nothing calls it.

    Builders are made after the layers. A layer of a class that is not known here still calls DeepGEMM, whatever the choice
    says, and reads the schedule.
    """
    has_deep_gemm = module.has_deep_gemm
    module.has_deep_gemm = lambda: not _functions_are_ours() and has_deep_gemm()
    builder = module.DeepseekV32IndexerMetadataBuilder
    build, build_captured = builder.build, builder.build_for_cudagraph_capture
    support = builder.get_cudagraph_support.__func__

    @functools.wraps(build)
    def with_step(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        from mla_portable.engines.vllm import compat, indexer, indexer_choice

        choice, captured = indexer_choice.current(), getattr(self, _CAPTURED, False)
        if getattr(self, "compress_ratio", 1) == 1 and choice.fuses(metadata, common_attn_metadata, captured=captured):
            step = indexer.plan_step(common_attn_metadata, metadata.num_decodes, metadata.num_decode_tokens)
            schedules = getattr(self, _SCHEDULES, None)
            if schedules is None:
                most = self.vllm_config.scheduler_config.max_num_batched_tokens
                schedules = indexer.IndexerSchedules(most, compat.decode_query_len(self.vllm_config))
                setattr(self, _SCHEDULES, schedules)
            schedules.plan(step, common_attn_metadata, metadata.num_decodes)
            setattr(metadata, _STEP, step)
        return metadata

    @functools.wraps(build_captured)
    def for_capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _CAPTURED, True)
        try:
            return build_captured(self, *args, **kwargs)
        finally:
            setattr(self, _CAPTURED, False)

    @functools.wraps(support)
    def get_cudagraph_support(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from mla_portable.engines.vllm import indexer, indexer_choice

        found = support(cls, *args, **kwargs)
        return type(found).NEVER if indexer_choice.current().fused and not indexer.can_capture() else found

    builder.build, builder.build_for_cudagraph_capture = with_step, for_capture
    builder.get_cudagraph_support = classmethod(get_cudagraph_support)


def avoid_fused_query(module: Any) -> None:
    """Below compute capability 8.9 let the Indexer quantise its queries with vLLM's CUDA operator (0.25 and later).

    vLLM finds compiled models on disk by a hash of its configuration, which therefore says so.
    """
    build = module.Indexer.__init__

    @functools.wraps(build)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if getattr(self, "use_fused_indexer_q", False) and _lacks_fp8_in_triton() and _ours():
            self.use_fused_indexer_q = False
            hashed = getattr(self.vllm_config, "additional_config", None)
            if isinstance(hashed, dict):
                hashed["mla_portable_indexer"] = "queries quantised by an operator"

    module.Indexer.__init__ = construct


def choose_models(module: Any) -> None:
    """Below compute capability 8.9 use vLLM's generic models: CUDA's own run Triton kernels that store e4m3 in every layer."""
    if not (_lacks_fp8_in_triton() and _ours()):
        return
    for name, (path, generic) in _MODELS.items():
        if hasattr(module, name):
            setattr(module, name, getattr(import_module(path), generic))
    settings.logger.info("vLLM's generic DeepSeek-V3.2 model serves: the one for CUDA needs compute capability 8.9")


def _ours() -> bool:
    from mla_portable.engines.vllm import indexer_choice

    return indexer_choice.current().ours


def _lacks_fp8_in_triton() -> bool:
    from mla_portable.engines.vllm import indexer_choice

    version = indexer_choice.capability()
    return version is not None and version < _FP8_IN_TRITON


@dataclass(frozen=True)
class Seam:
    """A function that changes a module which has all the names in `needs`; others are left alone, and a warning is logged."""

    change: Callable[[Any], None]
    needs: tuple[str, ...] = ()

    def __call__(self, module: Any) -> None:
        missing = [name for name in self.needs if not hasattr(module, name)]
        if missing:
            text = "mla_portable leaves vLLM's indexer alone: %s has no %s"
            settings.logger.warning(text, module.__name__, ", ".join(missing))
        else:
            self.change(module)


SEAMS: Final = {
    "vllm.model_executor.layers.sparse_attn_indexer": Seam(
        replace_operator, ("sparse_attn_indexer", "SparseAttnIndexer", "has_deep_gemm")
    ),
    "vllm.v1.attention.backends.mla.indexer": Seam(extend_builder, ("DeepseekV32IndexerMetadataBuilder", "has_deep_gemm")),
    "vllm.model_executor.models.deepseek_v2": Seam(avoid_fused_query, ("Indexer",)),
    "vllm.models.deepseek_v32": Seam(choose_models),
    **dict.fromkeys(
        ("vllm.models.glm5next.nvidia.sparse_indexer", "vllm.model_executor.layers.sparse_attn_indexer_kpool"),
        Seam(serve_pools, ("SparseAttnIndexerKpool", "has_deep_gemm", "pack_seq_triton")),
    ),
    "vllm.models.glm5next.nvidia.ops.kpool_compress": Seam(
        store_pools,
        ("_fwht_quant_kernel", "_kpool_softmax_rotate_write_cache_kernel", "_kpool_decode_update_batched_kernel"),
    ),
    **dict.fromkeys(
        ("vllm.models.glm5next.common.attention", "vllm.models.glm5next.nvidia.attention"),
        Seam(pad_heads_as_bytes, ("_pad_indexer_heads",)),
    ),
}

OPERATOR: Final = ("vllm.model_executor.layers.sparse_attn_indexer", "vllm.v1.attention.backends.mla.indexer")
"""The modules of `SEAMS` without whose names this indexer serves nothing; `doctor` looks for them in the installed vLLM."""
