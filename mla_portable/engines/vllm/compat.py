# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""All that differs between versions of vLLM, detected by features and never by a version number.

Written against 0.17 to 0.33. Where two versions do a thing differently, the function below says which is which.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.attention import backend as _backend

from mla_portable.contracts.values import INT32_MAX
from mla_portable.layouts import KV_LORA_RANK, QK_ROPE_HEAD_DIM

IMPL_BASE: Any = getattr(_backend, "SparseMLAAttentionImpl", None) or _backend.MLAAttentionImpl
"""0.16 to 0.25 tell a sparse implementation by this class, later versions by its `is_sparse`."""

_FEW_TOKENS: Final = 32


def device() -> torch.device:
    """Where this process runs its model: the accelerator that torch finds, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(found.type) if found is not None else torch.device("cpu")


def topk(vllm_config: Any) -> int | None:
    """The keys that the model's indexer selects for a token; None where the model is not sparse."""
    model = vllm_config.model_config
    return getattr(_text_config(model), "index_topk", None) or getattr(model.hf_config, "index_topk", None)


def indexer_heads(vllm_config: Any) -> int | None:
    """Query heads of the model's indexer, which every rank has all of; None where the model has none."""
    model = vllm_config.model_config
    return getattr(_text_config(model), "index_n_heads", None) or getattr(model.hf_config, "index_n_heads", None)


def compress_ratios(vllm_config: Any) -> list[int]:
    """Tokens to an entry of each layer's cache, in models that compress them (DeepSeek-V4); empty for others.

    Up to 0.32 the model's config lists them. 0.33 derives them from what transformers' config keeps.
    """
    config = getattr(vllm_config.model_config, "hf_config", None)
    try:
        from vllm.transformers_utils.deepseek_v4_utils import get_compress_ratios
    except ImportError:
        return list(getattr(config, "compress_ratios", None) or [])
    return get_compress_ratios(config)


def pooled_keys(vllm_config: Any) -> int:
    """Tokens to a key of the indexer: more than 1 in GLM-5.3-Flash, whose layer scores pools of them (0.30 and later)."""
    return getattr(_text_config(vllm_config.model_config), "index_kpool", None) or 1


def selection_width(vllm_config: Any) -> int | None:
    """Columns of the buffer that the indexer fills; None where the model is not sparse.

    With pools of keys it also has room for the tokens that do not make up a pool yet, in whole multiples of 128
    (`get_sparse_topk_buffer_width` of vLLM's glm5next): -1 then stands between selected positions, too.
    """
    found, pool = topk(vllm_config), pooled_keys(vllm_config)
    return found if found is None or pool == 1 else -(-(found + pool - 1) // 128) * 128


def head_size(vllm_config: Any) -> int:
    """Numbers of a key: the latent and the rotary part, which some models do not have."""
    text = _text_config(vllm_config.model_config)
    return getattr(text, "kv_lora_rank", KV_LORA_RANK) + getattr(text, "qk_rope_head_dim", QK_ROPE_HEAD_DIM)


def nominal_scale(vllm_config: Any) -> float:
    """The softmax scale of the query's width; a layer's own may differ, by YaRN's factor."""
    text = _text_config(vllm_config.model_config)
    return 1.0 / math.sqrt(getattr(text, "qk_nope_head_dim", 128) + getattr(text, "qk_rope_head_dim", 64))


def _text_config(model: Any) -> Any:
    return getattr(model, "hf_text_config", None) or model.hf_config


def impls_of(vllm_config: Any, layer_names: list[str]) -> list[Any]:
    """Our implementations of these layers, as far as they are built."""
    layers = vllm_config.compilation_config.static_forward_context
    found = (getattr(layers.get(name), "impl", None) for name in layer_names)
    return [impl for impl in found if hasattr(impl, "attach")]


def has_sinks(vllm_config: Any) -> bool:
    """A layer of ours that is built has attention sinks."""
    impls = impls_of(vllm_config, list(vllm_config.compilation_config.static_forward_context))
    return any(impl.sinks is not None for impl in impls)


def decode_query_len(vllm_config: Any) -> int:
    """Query tokens of a decode: 1, more where drafts are verified in one step (twice as many where drafted in parallel)."""
    speculative = vllm_config.speculative_config
    drafts = getattr(speculative, "num_speculative_tokens", None) or 0
    return 1 + (2 if getattr(speculative, "parallel_drafting", False) else 1) * drafts


def few_decode_tokens() -> int:
    """Tokens of leading requests of one length that FlashMLA decodes, as under vLLM's own backend: 32, none up to 0.25.

    From 0.26 on that backend decodes leading requests of one length up to 128 to 1024 tokens each (`require_uniform_decodes`).
    The two kernels round differently, so the same split gives the same bits. But FlashMLA's decode reads K keys for each token,
    valid or not (H200, 64 heads: 39 us for 16 tokens, 236 us for 256), its prefill the valid ones. So only few tokens follow.
    """
    builder = getattr(_stock(), "FlashMLASparseMetadataBuilder", None)
    return _FEW_TOKENS if getattr(builder, "require_uniform_decodes", False) else 0


def impl_projects() -> bool:
    """The layer has its implementation multiply by W_UK and W_UV: Iluvatar's 0.17 does, upstream's layers do it themselves.

    The stock implementation beside ours shows it: the same layer calls both.
    """
    return hasattr(getattr(_stock(), "FlashMLASparseImpl", None), "_k_up_proj")


def layer_takes_lse() -> bool:
    """A layer whose implementation projects unpacks (out, lse) all the same. False where its source is not there."""
    layer = _mla_attention().MLAAttention
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(layer)))
    except (OSError, TypeError):
        return False
    taken = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and ".forward_mqa(" in ast.unparse(n.value)]
    return any(isinstance(target, ast.Tuple) for each in taken for target in each.targets)


def _stock() -> Any | None:
    """The module of vLLM's FLASHMLA_SPARSE, None where a vendor's build lacks it."""
    try:
        return import_module("vllm.v1.attention.backends.mla.flashmla_sparse")
    except ImportError:
        return None


def forces_sparse_prefill(vllm_config: Any) -> bool:
    """No prompt is to be computed as dense attention; said by 0.26 and later."""
    return bool(getattr(getattr(vllm_config, "attention_config", None), "sparse_mla_force_mqa", False))


def _mla_attention() -> Any:
    return import_module("vllm.model_executor.layers.attention.mla_attention")


def takes_prompts() -> bool:
    """The layer of a sparse model hands prompts to `forward_mha` of its implementation; from 0.26 on."""
    try:
        import_module("vllm.model_executor.layers.attention.sparse_mla_attention")
    except ImportError:
        return False
    return True


def takes_masked_prompts(vllm_config: Any, qk_head_dim: int, v_head_dim: int) -> bool:
    """It also does so where prompts are longer than the top-k.

    0.26 and 0.27 look at a length in the metadata, which is ours. From 0.28 on thresholds for each tensor parallel size decide;
    a size without thresholds never does.
    """
    thresholds = getattr(_mla_attention(), "_use_masked_mha", None)
    if thresholds is None:
        return True
    seq_len, _ = prompt_marks(topk(vllm_config) or 0)
    facts = {
        "backend_name": "FLASHMLA_SPARSE",
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "qk_head_dim": qk_head_dim,
        "v_head_dim": v_head_dim,
        "query_len": INT32_MAX,
        "seq_len": seq_len,
        "has_context": False,
    }
    known = inspect.signature(thresholds).parameters
    return thresholds(**{name: value for name, value in facts.items() if name in known})


@cache
def prompt_marks(topk: int) -> tuple[int, tuple[()] | None]:
    """`prefill_max_seq_len` of a step whose prompts go to `forward_mha`, and `chunked_context` of their description.

    0.26 and 0.27 want a length within the top-k; later versions compare one beyond it with thresholds. A quantised output is
    asked for where there is no context, and later only within the top-k.
    """
    return (0, ()) if getattr(_mla_attention(), "_use_masked_mha", None) is None else (topk + 1, None)


def capture_sizes(vllm_config: Any) -> int:
    """The most tokens that a batch is padded to for a CUDA graph, 0 where none is captured."""
    compilation = vllm_config.compilation_config
    largest = getattr(compilation, "max_cudagraph_capture_size", None)
    return int(largest or max(getattr(compilation, "cudagraph_capture_sizes", None) or [0]))


def wants_full_graphs(vllm_config: Any) -> bool:
    """Uniform decode batches may be captured whole. A mode that is not settled yet counts as yes, eager execution as no."""
    if getattr(vllm_config.model_config, "enforce_eager", False):
        return False
    settled = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    return settled is None or bool(settled.has_full_cudagraphs())


def wants_batch_invariance() -> bool:
    """Results of a row must not depend on what else is in the batch: VLLM_BATCH_INVARIANT, of vLLM's variables since 0.20."""
    return bool(getattr(import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", False))


def workspace_rows(vllm_config: Any) -> int | None:
    """Rows of the bf16 prefill workspace as vLLM is configured (0.33), None where it has no word in it."""
    factor = getattr(getattr(vllm_config, "attention_config", None), "sparse_mla_prefill_workspace_factor", None)
    return int(factor) * int(vllm_config.model_config.max_model_len) if factor else None


def runs_microbatches(vllm_config: Any) -> bool:
    """Batches run as two overlapping microbatches (DBO), each with its own builder and its own slot of vLLM's workspace."""
    return bool(vllm_config.parallel_config.use_ubatching)


def block_gap(vllm_config: Any, kv_cache_spec: Any) -> int | None:
    """Bytes between the end of a block of a layer's cache and the next one; None for other layers' pages, whole rows of them.

    1 where such pages lie any distance apart: versions before 0.32 do not align them to rows.

    Up to 0.28 only padding lies there. 0.33 has layouts with the blocks outermost, such as `BLHNC`, where every layer's page of
    a block follows; the layout is settled before builders are made.
    """
    layout = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if layout is not None and layout.startswith("B"):
        return 1 if _row_alignment() is None else None
    padded = getattr(kv_cache_spec, "page_size_padded", None)
    return 0 if padded is None else padded - replace(kv_cache_spec, page_size_padded=None).page_size_bytes


def context_ranks(vllm_config: Any) -> int:
    """Ranks that share each sequence: the size of decode context parallelism, 1 where there is none."""
    return getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) or 1


def unsupported_features(vllm_config: Any) -> list[str]:
    """What the configuration asks for and this plugin cannot do, with the remedy."""
    parallel, refused = vllm_config.parallel_config, []
    size = context_ranks(vllm_config)
    if size > 1 and not _indexer_knows_dcp():
        why = "this vLLM's indexer does not know it; 0.25.1 and later do"
        refused.append(f"decode context parallelism {size} (supports 1: {why}): set decode_context_parallel_size=1")
    size = getattr(parallel, "prefill_context_parallel_size", 1) or 1
    if size > 1:
        why = "each rank would hold some of a prompt's queries, and vLLM leaves the gather of their keys to the backend"
        remedy = "set prefill_context_parallel_size=1; decode context parallelism shares the cache of prompts too"
        refused.append(f"prefill context parallelism {size} (supports 1: {why}): {remedy}")
    if getattr(vllm_config.speculative_config, "enable_adaptive_verification", False):
        remedy = "set enable_adaptive_verification=false"
        refused.append(f"adaptive verification (supports steps whose query lengths the host knows): {remedy}")
    if getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None:
        remedy = "leave hisparse_config and HiSparseConnector out"
        refused.append(f"HiSparse, a KV cache in host memory (supports a cache on the device): {remedy}")
    return refused


def _indexer_knows_dcp() -> bool:
    """vLLM deals the indexer's keys out to ranks of decode context parallelism: what came with this function."""
    return hasattr(import_module("vllm.v1.attention.backends.mla.sparse_utils"), "triton_filter_and_convert_dcp_index")


def selection_arguments(vllm_config: Any) -> dict[str, Any]:
    """What vLLM passes to `AttentionBackend.validate_configuration` for the configured sparse-MLA model, by name.

    Arguments that have defaults there are left out.
    """
    from vllm.platforms import current_platform

    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "head_size": model.get_head_size(),
        "dtype": model.dtype,
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size if getattr(cache, "user_specified_block_size", False) else None,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": True,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": current_platform.get_device_capability(),
        "attn_type": "decoder",
    }


def host_lengths(common: Any, query_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
    """Sequence lengths [R] int32 that already lie on the host, None where vLLM keeps none there; never copied from the device.

    Under asynchronous speculative decoding they are upper bounds for decodes, and exact for prefills.
    """
    lengths = getattr(common, "seq_lens_cpu_upper_bound", None)
    if lengths is None:
        lengths = getattr(common, "_seq_lens_cpu", None)  # the property without the underscore would wait for the device
    return None if lengths is None else lengths.numpy()[: len(query_lens)]


def query_joiner() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None:
    """vLLM's operator that writes ql_nope [T, H, 512] and q_pe [T, H, 64] side by side into the third, None where it has none.

    Here and not in the core: it reads strided halves in wide loads, which `torch.cat` does not.
    """
    import_module("vllm._custom_ops")  # registers the operators
    packet = getattr(torch.ops._C_cache_ops, "concat_mla_q", None)
    return None if packet is None else packet.default


def workspace_manager() -> Any | None:
    """vLLM's workspace, which grows until it is locked; None where this process has none."""
    try:
        from vllm.v1.worker import workspace
    except ImportError:
        return None
    return workspace.current_workspace_manager() if workspace.is_workspace_manager_initialized() else None


def align_blocks(spec: Any) -> Any:
    """A cache spec whose blocks are whole rows apart, where vLLM lets a backend ask for it (0.32 and later)."""
    align = _row_alignment()
    return spec if align is None else align(spec)


def _row_alignment() -> Callable[[Any], Any] | None:
    try:
        from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows
    except ImportError:
        return None
    return align_blocks_to_rows


def block_sizes(least: int, vllm_config: Any | None, kv_cache_spec: Any | None) -> list[Any]:
    """Blocks that kernels may see: of `least` tokens, as the indexer's cache beside ours has no other. vLLM cuts larger ones.

    An indexer of pools of keys has larger blocks, such as 128 and 256 (GLM-5.3-Flash): any multiple will do then.
    kv_cache_spec: given from 0.31 on, also where no configuration is in force.
    """
    if kv_cache_spec is not None:
        pools = getattr(kv_cache_spec, "head_size", None) == KV_LORA_RANK
    else:
        pools = vllm_config is not None and vllm_config.model_config is not None and pooled_keys(vllm_config) > 1
    return [_backend.MultipleOf(least) if pools else least]
