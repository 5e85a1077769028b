# SPDX-License-Identifier: Apache-2.0
"""flash_mla_with_kvcache: sparse decode over a paged cache, of FP8 or BF16 rows."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from mla_portable.contracts.rules import check_cache, check_dense
from mla_portable.contracts.tensor_table import Axes, Checked, TensorTable
from mla_portable.contracts.values import describe, refuse
from mla_portable.flash_mla.arguments import check_value_width, scale_of, without_head
from mla_portable.flash_mla.schedule import FlashMLASchedMeta
from mla_portable.flash_mla.statistics import as_flashmla
from mla_portable.primitives import sparse_decode

_WHERE: Final = "flash_mla_with_kvcache"
_CACHE: Final = "[blocks, page_block_size, 1, row width]"
_BYTES: Final = (torch.float8_e4m3fn, torch.int8)
"""Names that FlashMLA has for the bytes of a quantised row, besides uint8."""
_FORMATS: Final = {"V32": 656, "V4": 584}
"""`kv_format` -> bytes of a row."""
_OTHER_FORMATS: Final = ("V32_NO_ROPE", "V41", "V41_FP4")
TENSORS: Final = TensorTable(
    _WHERE,
    {
        "q": Axes("b s_q h_q key", torch.bfloat16, not_empty="s_q h_q"),
        "k_cache": Checked(),
        "indices": Axes("b s_q topk", torch.int32, not_empty="topk"),
        "attn_sink": Axes("h_q", torch.float32, optional=True),
        "topk_length": Axes("b", torch.int32, optional=True),
        "out": Axes("b s_q h_q value", torch.bfloat16, optional=True, written=True),
    },
    given="key value",
)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor | None,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse decode: attention of b x s_q query tokens over chosen slots of a paged cache.

    Args:
        q: [b, s_q, h_q, width of a key] bf16, any number of heads, any strides but that of the last dimension.
        k_cache: [blocks, page_block_size, 1, row width]: bf16 rows of 576 or 512, or the bytes of quantised rows as uint8, int8
            or float8_e4m3fn. Blocks may lie further apart than a block is long.
        block_table, cache_seqlens, num_splits, use_legacy: ignored.
        head_dim_v: 512. tile_scheduler_metadata: from `get_mla_metadata` or `get_mla_decoding_metadata`; None is taken too.
        softmax_scale: factor on q.k, by default one over the square root of the width of a key.
        causal: False. is_fp8_kvcache: None, or what the cache is.
        indices: [b, s_q, topk] int32, slots: block * page_block_size + offset. Any outside of the cache is absent, as -1 is.
            Required: dense decode is not served.
        attn_sink: [h_q] float32; out is multiplied by exp(lse) / (exp(lse) + exp(sink)).
        topk_length: [b] int32; only that many leading indices of a request's tokens are read.
        kv_format: None, or the name of the layout that the cache has: "V32".
        enable_batch_invariant: False. descale_q, descale_k: None, they are for dense decode.
        out: [b, s_q, h_q, 512] bf16, written; by default allocated.
    Returns: (out, lse); lse is [b, h_q, s_q] float32, a transposed view, the natural logarithm without the sink; a token
        without a valid index has 0 and +inf.
    Raises: InvalidArgument, PlanMismatch, UnsupportedRequest. Graph-safe: no host synchronisation.
    """
    if indices is None:
        _refuse_dense()
    _check_unserved(
        enable_batch_invariant=enable_batch_invariant,
        causal=causal,
        descale_q=descale_q,
        descale_k=descale_k,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
    )
    check_value_width(_WHERE, "head_dim_v", head_dim_v)
    check_dense(_WHERE, "q", q, "[b, s_q, h_q, width]")
    cache = _rows(k_cache, kv_format)
    layout, page_block_size, _, _ = check_cache(_WHERE, "k_cache", cache, q.device)
    if is_fp8_kvcache is not None and bool(is_fp8_kvcache) != layout.is_quantized:
        refuse(_WHERE, "is_fp8_kvcache", is_fp8_kvcache, f"{layout.is_quantized} for a cache of {layout.dtype}, or None")
    sizes = {"key": layout.key_width, "value": layout.value_width}
    TENSORS.check((q, cache, indices, attn_sink, topk_length, out), sizes)
    batch, query_len, num_heads, topk = sizes["b"], sizes["s_q"], sizes["h_q"], sizes["topk"]
    scale = scale_of(_WHERE, "softmax_scale", softmax_scale, layout.key_width)
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        shapes = batch, query_len, num_heads, page_block_size, 1, False, layout.is_quantized, topk, None, None
        tile_scheduler_metadata.remember(_WHERE, FlashMLASchedMeta.Config(*shapes))
    elif tile_scheduler_metadata is not None and not isinstance(tile_scheduler_metadata, Tensor):
        refuse(_WHERE, "tile_scheduler_metadata", describe(tile_scheduler_metadata), "a FlashMLASchedMeta, a tensor, or None")
    lengths = None if topk_length is None else topk_length.unsqueeze(1).expand(batch, query_len).contiguous()
    out, lse = sparse_decode(q, cache, indices, softmax_scale=scale, lengths=lengths, attn_sink=attn_sink, out=out)
    return out, as_flashmla(lse).transpose(1, 2)


def _rows(k_cache: Any, kv_format: Any) -> Tensor:
    """The cache as [blocks, page_block_size, row width], its bytes as uint8."""
    rows = without_head(_WHERE, "k_cache", k_cache, 4, _CACHE)
    if kv_format is not None:
        if kv_format in _OTHER_FORMATS:
            remedy = "Rows of 656 bytes (V32) hold a latent of 512 with its scales." if kv_format == "V32_NO_ROPE" else ""
            refuse(_WHERE, "kv_format", kv_format, f"{' or '.join(_FORMATS)}, which have kernels here", remedy)
        if kv_format not in _FORMATS:
            refuse(_WHERE, "kv_format", describe(kv_format), f"None, or one of {', '.join((*_FORMATS, *_OTHER_FORMATS))}")
        if rows.dtype.itemsize != 1 or rows.shape[-1] != _FORMATS[kv_format]:
            got = f"{kv_format} for {rows.dtype} rows of {rows.shape[-1]}"
            refuse(_WHERE, "kv_format", got, f"{kv_format} for rows of {_FORMATS[kv_format]} bytes")
    return rows.view(torch.uint8) if rows.dtype in _BYTES else rows


def _check_unserved(*, enable_batch_invariant: bool, causal: bool, **others: Tensor | None) -> None:
    if causal:
        refuse(_WHERE, "causal", causal, "False: with indices, a token sees the keys that it selects")
    if enable_batch_invariant:
        remedy = "Force an implementation that declares batch_invariant, with mla_portable.use or MLA_PORTABLE_BACKEND."
        refuse(_WHERE, "enable_batch_invariant", True, "False", remedy)
    for name, value in others.items():
        if value is None:
            continue
        if name.startswith("descale"):
            refuse(_WHERE, name, describe(value), "None: they are the scales of FP8 dense decode, which is not served")
        refuse(_WHERE, name, describe(value), "None: a second cache is not served yet")


def _refuse_dense() -> NoReturn:
    remedy = (
        "Dense decode needs FlashMLA itself (SM90, up to August 2026), or an engine's own kernels for dense MLA: "
        "leave this package uninstalled there."
    )
    refuse(_WHERE, "indices", "None (dense decode)", "[b, s_q, topk] int32: sparse decode alone is served", remedy)
