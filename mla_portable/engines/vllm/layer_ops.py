# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The three operators of our layer around MLAAttention, opaque to torch.compile, each with a fake.

    vllm_norm_rope_write   stands in a captured piece, as vLLM's own write of the cache does: slots keep their addresses
    vllm_rope_queries      likewise
    vllm_attention         splits graphs, and is run between the pieces, as vLLM's own operator of attention is

They reach the layer by its name, and what belongs to the step through vLLM's forward context. Ordering follows from data: what
reads a cache has an input that was made from what the writer returned.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from mla_portable.engines.vllm.layer_parts import PARTS, LayerParts, as_bytes, index_part, slots_of
from mla_portable.layouts import INDEX_HEAD_SIZE

ATTENTION: Final = "mla_portable::vllm_attention"
"""As vLLM's `splitting_ops` name it."""
_LIBRARY: Final = torch.library.Library("mla_portable", "FRAGMENT")


def norm_rope_write(
    positions: Tensor, qkv: Tensor, kw: Tensor | None, q_width: int, rope_width: int, layer_name: LayerNameType
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, rotate and write a step's tokens.

    Args:
        positions: [T] int64. qkv: [T, Q + V + R] bf16, result of the layer's first projection. kw: [T, 128 + I] bf16, that of
            its indexer's, None where nothing is selected. q_width, rope_width: Q and R.
    Returns: [T, Q], the normed input of the next projections; [T, V], the normed latent; [T, R], the rotated key.
    """
    context = get_forward_context()
    layer, parts = _layer(context, layer_name)
    normed = _norm_rope_write_fake(positions, qkv, kw, q_width, rope_width, layer_name)
    tokens = len(positions)
    caches, index_caches = _cache(context, layer, layer.layer_name, tokens), None
    if kw is not None and parts.indexer is not None:
        index_caches = _cache(context, parts.indexer.cache, parts.indexer.name, tokens)
    key = None if kw is None or index_caches is None else index_part(kw)[0]
    parts.norm_rope_write(positions, qkv, key, caches, index_caches, *normed)
    return normed


def _norm_rope_write_fake(
    positions: Tensor, qkv: Tensor, kw: Tensor | None, q_width: int, rope_width: int, layer_name: LayerNameType
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width = qkv.shape
    return tuple(qkv.new_empty((tokens, n)) for n in (q_width, width - q_width - rope_width, rope_width))  # type: ignore[return-value]


def rope_queries(
    positions: Tensor, q: Tensor, index_q: Tensor | None, kw: Tensor | None, key_width: int, layer_name: LayerNameType
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate a step's queries, and quantise those of its indexer.

    Args:
        q: [T, H, P + R] bf16. index_q: [T, I * 128] bf16 and kw: [T, 128 + I] bf16, or None. key_width: V + R.
    Returns: [T, H, V + R] bf16, of which the last R numbers are written; [T, I, 128] e4m3 and [T, I] float32, empty where there
        is no index_q.
    """
    _, parts = _layer(get_forward_context(), layer_name)
    query, codes, weights = made = _rope_queries_fake(positions, q, index_q, kw, key_width, layer_name)
    if index_q is None or kw is None:
        parts.rope_quantize_queries(positions, q, None, None, query, None, None)
    else:
        parts.rope_quantize_queries(positions, q, index_q.view(codes.shape), index_part(kw)[1], query, codes, weights)
    return made


def _rope_queries_fake(
    positions: Tensor, q: Tensor, index_q: Tensor | None, kw: Tensor | None, key_width: int, layer_name: LayerNameType
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads = q.shape[:2]
    selecting = 0 if index_q is None else index_q.shape[1] // INDEX_HEAD_SIZE
    codes = q.new_empty((tokens, selecting, INDEX_HEAD_SIZE), dtype=torch.float8_e4m3fn)
    weights = q.new_empty((tokens, selecting), dtype=torch.float32)
    return q.new_empty((tokens, heads, key_width)), codes, weights


@eager_break_during_capture
@maybe_transfer_kv_layer
def attention(q: Tensor, query: Tensor, kv_c: Tensor, k_pe: Tensor, output: Tensor, layer_name: LayerNameType) -> None:
    """Attention of a step's tokens; the absorbed product is written into the query, beside its rotated part.

    Args:
        q: [T, H, P + R] bf16, not rotated; where a step has prompts over keys of each head, its rotated part is written here.
        query: [T, H, V + R] bf16, of which the last R numbers are given; the others are written. kv_c: [T, V], k_pe: [T, R].
        output: [T, H * V_DIM] bf16, written.
    """
    metadata, layer, kv_cache, _ = get_attention_context(_resolve_layer_name(layer_name))
    nope = layer.qk_nope_head_dim
    if metadata is None or metadata.prefill is not None:
        if metadata is None:
            layer.impl.reserve_workspace()
        else:
            q[..., nope:] = query[..., layer.kv_lora_rank :]
        layer.forward_impl(q, kv_c, k_pe.unsqueeze(1), kv_cache, metadata, output=output)
        return
    rows = metadata.num_actual_tokens
    if not rows:
        return
    query = query[:rows]
    torch.bmm(q[:rows, :, :nope].transpose(0, 1), layer.W_UK_T, out=query[..., : layer.kv_lora_rank].transpose(0, 1))
    out, _ = layer.impl.forward_mqa(query, kv_cache, metadata, layer)
    layer._v_up_proj(out, out=output[:rows])


def _attention_fake(
    q: Tensor, query: Tensor, kv_c: Tensor, k_pe: Tensor, output: Tensor, layer_name: LayerNameType
) -> None: ...


def _layer(context: Any, layer_name: Any) -> tuple[Any, LayerParts]:
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    return layer, getattr(layer, PARTS)


def _cache(context: Any, owner: Any, name: str, num_tokens: int) -> tuple[Tensor, Tensor] | None:
    """The cache that `owner` has and slots [num_tokens] in it; None before there is a cache, and where vLLM profiles."""
    slots = slots_of(context.slot_mapping, name, num_tokens)
    cache = owner.kv_cache
    if slots is None or not cache.numel():
        return None
    return as_bytes(cache), slots


def _register(name: str, operator: Callable[..., Any], fake: Callable[..., Any], mutated: tuple[str, ...]) -> None:
    hints = typing.get_type_hints(fake)  # LayerNameType is settled when vLLM is imported
    fake.__annotations__ = {at: None if hint is type(None) else hint for at, hint in hints.items()}
    _LIBRARY.define(name + torch.library.infer_schema(fake, mutates_args=mutated))
    _LIBRARY.impl(name, operator, "CompositeExplicitAutograd")
    _LIBRARY._register_fake(name, fake)


_register("vllm_norm_rope_write", norm_rope_write, _norm_rope_write_fake, ())
_register("vllm_rope_queries", rope_queries, _rope_queries_fake, ())
_register("vllm_attention", attention, _attention_fake, ("q", "query", "output"))
