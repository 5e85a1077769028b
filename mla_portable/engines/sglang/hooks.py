# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""What SGLang calls in place of the functions in `seams`. Each calls SGLang's own where that serves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from mla_portable.engines.sglang import indexer, model, pool_rows, prompts, seams, serving


def hook_of(seam: seams.Seam) -> Callable[..., Any]:
    """The hook of a seam, as SGLang's registry takes it: AROUND (original, *args), AFTER (result, *args)."""
    if seam in seams.INDEXER:
        return functools.partial(_select, seam.name)
    if seam == seams.POOLED_SCHEDULE:
        return indexer.module
    return _HOOKS[seam.name]


def _select(name: str, original: Callable[[], Any]) -> Any:
    return indexer.select(name, original)


def _calls(method: str, serve: Callable[..., Any]) -> Callable[..., Any]:
    """A hook around an attention method: `serve(layers, backend, ...)` where the backend object's layers have the method."""

    def around(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
        layers = getattr(backend, serving.LAYERS, None)
        if layers is None or method not in layers.methods:
            return original(backend, *args, **kwargs)
        return serve(layers, backend, *args, **kwargs)

    return around


def _serves(backend: Any, dsa_impl: str) -> bool:
    """The method of one of SGLang's implementations is served here."""
    layers = getattr(backend, serving.LAYERS, None)
    return layers is not None and model.METHOD_OF.get(dsa_impl) in layers.methods


def _resolve_kpool_tail_backend(original: Callable[..., Any], backend: Any, topk_indices: Any, dsa_impl: str) -> str:
    return dsa_impl if _serves(backend, dsa_impl) else original(backend, topk_indices, dsa_impl)


def _check_kpool_tail_backend(original: Callable[..., Any], backend: Any, topk_indices: Any, dsa_impl: str, phase: str) -> None:
    """A list is as wide as it is: keys behind the last whole pool are slots like others."""
    if not _serves(backend, dsa_impl):
        original(backend, topk_indices, dsa_impl, phase)


def _compute_flashmla_metadata(original: Callable[..., Any], backend: Any, cache_seqlens: Any, seq_len_q: int) -> Any:
    """Tensors of the shapes that SGLang slices and copies; nothing here reads them, and FlashMLA need not be there."""
    layers = getattr(backend, serving.LAYERS, None)
    if layers is None or seams.KV not in layers.methods:
        return original(backend, cache_seqlens=cache_seqlens, seq_len_q=seq_len_q)
    made = import_module(seams.BACKEND_MODULE).DSAFlashMLAMetadata
    rows = cache_seqlens.shape[0]
    return made(flashmla_metadata=cache_seqlens.new_zeros((1, 8)), num_splits=cache_seqlens.new_zeros(rows + 1))


def _built(result: None, backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    serving.attach(backend, model_runner)


def _planned(result: None, backend: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    layers = getattr(backend, serving.LAYERS, None)
    if layers is not None:
        layers.prepare(backend.forward_metadata)
        if layers.prompts is not None:
            layers.prompts.plan(backend, forward_batch)


def _planned_for_graph(result: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    layers = getattr(backend, serving.LAYERS, None)
    if layers is not None:
        layers.prepare(backend.forward_metadata)
        if layers.prompts is not None:
            layers.prompts.step = None


def _prompts_of(backend: Any) -> Any | None:
    """The Prompts of the backend object that serves the step, where the step is theirs."""
    found = getattr(getattr(backend, serving.LAYERS, None), "prompts", None)
    return found if found is not None and found.step is not None else None


def _get_indexer_metadata(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    found, step = original(backend, *args, **kwargs), _prompts_of(backend)
    return replace(found, force_unfused_topk=True) if step is not None and step.asks_for_positions else found


def _absorb_prepare(
    original: Callable[..., Any],
    layer: Any,
    positions: Any,
    hidden_states: Any,
    forward_batch: Any,
    zero_allocator: Any,
    llama_4_scaling: Any = None,
    prev_topk_indices: Any = None,
) -> Any:
    """Where the step's prompts are computed over keys of each head: the layer's attention, else SGLang's own."""
    backend = import_module(seams.CONTEXT_MODULE).get_attn_backend()
    step = _prompts_of(backend)
    if step is None or llama_4_scaling is not None or not prompts.is_plain(layer):
        return original(layer, positions, hidden_states, forward_batch, zero_allocator, llama_4_scaling, prev_topk_indices)
    return (step.prepare(layer, backend, positions, hidden_states, forward_batch, prev_topk_indices),)


def _absorb_core(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], prompts.Computed):
        return prompts.finish(layer, args[0])
    return original(layer, *args, **kwargs)


_HOOKS: dict[str, Callable[..., Any]] = {
    seams.SPARSE: _calls(seams.SPARSE, serving.BackendLayers.flashmla_sparse),
    seams.KV: _calls(seams.KV, serving.BackendLayers.flashmla_kv),
    seams.FA3: _calls(seams.FA3, serving.BackendLayers.fa3),
    "_resolve_kpool_tail_backend": _resolve_kpool_tail_backend,
    "_check_kpool_tail_backend": _check_kpool_tail_backend,
    "_compute_flashmla_metadata": _compute_flashmla_metadata,
    "__init__": _built,
    "init_forward_metadata": _planned,
    "init_forward_metadata_out_graph": _planned_for_graph,
    "get_indexer_metadata": _get_indexer_metadata,
    "forward_absorb_prepare": _absorb_prepare,
    "forward_absorb_core": _absorb_core,
    "_quantize_k_cache_fast": pool_rows.quantise,
    "_quantize_k_cache_fast_separate": pool_rows.quantise_apart,
    "dequantize_k_cache_paged_dsa": pool_rows.gather,
    "dequantize_k_cache_paged": pool_rows.gather,
}
