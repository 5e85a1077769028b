# SPDX-License-Identifier: Apache-2.0
"""The attention function of transformers' models with an indexer, over latents. Forward only.

Of each query the positions that the indexer chose come as `indices`, with masked ones among them where a query sees fewer keys
than the indexer chooses; the mask says which. Both make one list of slots, so every boolean mask is served: causal, padded on
either side, packed. Models in BF16 attend by the kernels that `SlotAttention` binds, once for each device and kind of layer;
models in float32 attend in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.attention.slots import SlotAttention
from mla_portable.attention.spec import AttentionSpec
from mla_portable.choose import get_registry
from mla_portable.contracts.values import describe, refuse
from mla_portable.dispatch import opaque
from mla_portable.engines.transformers.latents import BLOCK_SIZE, up_projection
from mla_portable.engines.transformers.plain import attend
from mla_portable.layouts import LAYOUTS

NAME: Final = "mla_portable"
"""As `attn_implementation`."""
_WHERE: Final = f'attn_implementation="{NAME}"'
SERVED: Final = (
    ("transformers.models.deepseek_v32.modeling_deepseek_v32", "DeepseekV32Attention"),
    ("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa", "GlmMoeDsaAttention"),
    ("transformers.models.hy_v4.modeling_hy_v4", "HYV4Attention"),
)
"""The module and name of each class whose layers are served."""

_CLASSES: Final = tuple(name for _, name in SERVED)
_LAYOUT: Final = LAYOUTS["bf16"]
_ROWS: Final = 4096
"""Queries that are served at a time: their absorbed form takes 147 KB each with 128 heads."""
_DECODE_TOKENS: Final = 8
"""A step with no more tokens of each sequence is a decode: one token, or those that a draft proposed."""
_DECODE_ROWS: Final = 256
"""Decode batches with more queries are served as prompts: they fill a device without being split."""
_REFUSED: Final = ("output_attentions", "sliding_window", "softcap", "head_mask")
"""Keywords that other models' layers pass, or a caller."""


@opaque
def mla_portable_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of B x S queries over T tokens, as `ALL_ATTENTION_FUNCTIONS` has it.

    Args:
        module: the attention layer: its `kv_b_proj` and config are read.
        query: [B, H, S, P + R] bf16 or float32. key: [B, 1, U, C + R], of `latent_rows`. value: [B, 1, T, C], its latents.
        attention_mask: [B or 1, 1, S, T] bool, True where a query may attend. indices: [B, S, K] int32, positions below T.
        s_aux: [H], a sink for each head.
    Returns: [B, S, H, V] and None in place of weights. A query that may attend to nothing that was chosen has zeros.
    Raises: InvalidArgument, before anything runs; UnsupportedRoute where nothing serves the layer on the device.
    """
    mask, chosen = _check(module, query, key, value, attention_mask, dropout, indices, more)
    (batch, heads, length, query_width), latent = query.shape, value.shape[3]
    up, nope = up_projection(module.kv_b_proj, value, heads), query_width - (key.shape[3] - latent)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (query, key, up, s_aux)):
        expected = "no gradients: it is forward only"
        refuse(_WHERE, "model", "one that requires gradients", expected, "Call it under torch.no_grad().")
    out = query.new_empty((batch, length, heads, up.shape[1] - nope))
    rows = key.view(-1, key.shape[3])
    firsts = torch.arange(0, len(rows), key.shape[2], dtype=torch.int32, device=query.device)  # the slot of each position 0
    sink = None if s_aux is None else s_aux.float()
    # an indexer lists all tokens while these are fewer than its K; lists as wide as the spec's need one schedule alone
    topk = max(module.config.index_topk, chosen.shape[2])
    serve = partial(attend, width=latent)
    if query.dtype == torch.bfloat16:
        layer = _layer(query.device, heads, topk, float(scaling), sink is not None)
        serve = partial(_by_kernels, layer, decodes=length <= _DECODE_TOKENS)
    for b, s in _pieces(batch, length):
        piece = query[b, :, s]  # [b, H, s, P + R]
        shape = piece.shape[0] * piece.shape[2], heads
        q = query.new_empty((piece.shape[0], piece.shape[2], heads, key.shape[3]))
        q[..., :latent].copy_((piece[..., :nope] @ up[:, :nope]).transpose(1, 2))
        q[..., latent:].copy_(piece[..., nope:].transpose(1, 2))
        slots = _slots(chosen[b, s], mask[b, s], firsts[b], topk)
        result = serve(q.view(*shape, -1), rows, slots.view(shape[0], -1), softmax_scale=scaling, attn_sink=sink)
        values = result.transpose(0, 1) @ up[:, nope:].mT  # [H, b * s, V]
        out[b, s] = values.transpose(0, 1).unflatten(0, (piece.shape[0], piece.shape[2]))
    return out, None


def _pieces(batch: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Sequences and their queries in parts of at most `_ROWS` queries."""
    sequences, queries = max(1, _ROWS // length), min(length, _ROWS)
    for b in range(0, batch, sequences):
        for s in range(0, length, queries):
            yield slice(b, b + sequences), slice(s, s + queries)


def _slots(chosen: Tensor, mask: Tensor, firsts: Tensor, topk: int) -> Tensor:
    """[b, s, topk] int32: the slots that queries attend to, -1 where the mask hides a chosen position, or none is left.

    Args:
        chosen: [b, s, K]. mask: [b, s, T]. firsts: [b], the slot of each sequence's position 0.
    """
    slots = chosen.new_full((*chosen.shape[:2], topk), -1)
    seen = mask.gather(2, chosen.long())
    slots[..., : chosen.shape[2]] = torch.where(seen, chosen + firsts.view(-1, 1, 1), -1)
    return slots


def _by_kernels(
    layer: SlotAttention,
    q: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    softmax_scale: float,
    attn_sink: Tensor | None,
    decodes: bool,
) -> Tensor:
    places = torch.arange(1, slots.shape[1] + 1, dtype=torch.int32, device=slots.device)
    lengths = torch.where(slots < 0, 0, places).amax(dim=1)  # where the last slot of a row ends
    given: dict[str, Any] = {"softmax_scale": softmax_scale, "attn_sink": attn_sink, "lengths": lengths, "decodes": decodes}
    return layer.forward(q, rows, slots, **given)


def _layer(device: torch.device, heads: int, topk: int, scale: float, has_sink: bool) -> SlotAttention:
    """What serves layers of this kind: built once, and again where the policy in force has changed."""

    def build() -> SlotAttention:
        spec = AttentionSpec(
            num_heads=heads,
            softmax_scale=scale,
            max_num_tokens=_ROWS,
            max_num_reqs=_DECODE_ROWS,
            max_model_len=_ROWS,  # of a workspace, which a SlotAttention has not
            kv_layout=_LAYOUT.name,
            block_size=BLOCK_SIZE,
            topk=topk,
            need_lse=False,
            attn_sink=has_sink,
        )
        return SlotAttention(spec, device=device, clean_slots=True)

    return get_registry().keep((NAME, device, heads, topk, scale, has_sink), build)


def _check(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    indices: Tensor | None,
    more: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Raise InvalidArgument, or return the mask [B, S, T] and the indices."""
    if indices is None or not any(cls.__name__ in _CLASSES for cls in type(module).__mro__) or key.shape[1] != 1:
        got = f"{type(module).__name__} with keys of {key.shape[1]} heads"
        expected = f"one of {', '.join(_CLASSES)}, whose layers hand over latents"
        refuse(
            _WHERE, "model", got, expected, "Call mla_portable.transformers.register(), or choose another attn_implementation."
        )
    if dropout:
        refuse(_WHERE, "dropout", dropout, "0: it is forward only", "Call model.eval().")
    for name in _REFUSED:
        if more.get(name):
            refuse(_WHERE, name, describe(more[name]), "None or False: attention over latents has none")
    if query.dtype not in (torch.bfloat16, torch.float32) or key.dtype != query.dtype:
        expected = "bfloat16 for both, or float32 for both"
        got, remedy = f"{query.dtype} queries, {key.dtype} latents", "Load the model with dtype=torch.bfloat16."
        refuse(_WHERE, "dtype", got, expected, remedy)
    widths = value.shape[3], key.shape[3] - value.shape[3]
    if query.dtype == torch.bfloat16 and widths != (_LAYOUT.value_width, _LAYOUT.rope_width):
        expected = f"{_LAYOUT.value_width} and {_LAYOUT.rope_width}, as kernels have it; any in float32"
        refuse(_WHERE, "kv_lora_rank and qk_rope_head_dim", f"{widths[0]} and {widths[1]}", expected)
    (batch, _, length, _), tokens = query.shape, value.shape[2]
    if mask is None or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2:] != (length, tokens):
        expected = f"[{batch} or 1, 1, {length}, {tokens}] bool: a bias on scores is not served"
        refuse(_WHERE, "attention_mask", describe(mask), expected, "Give the model a mask of 0 and 1 for each token, or none.")
    return mask[:, 0].expand(batch, -1, -1), indices
