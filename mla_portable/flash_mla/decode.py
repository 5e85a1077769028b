# SPDX-License-Identifier: Apache-2.0
"""flash_mla_with_kvcache: sparse decode over a paged cache, of FP8 or BF16 rows."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from mla_portable.contracts.values import check_flag, check_type, describe, refuse, rounded_rows
from mla_portable.dispatch import opaque, unchecked
from mla_portable.flash_mla.arguments import check_value_width, layout_name, scale_of, without_head
from mla_portable.flash_mla.schedule import FlashMLASchedMeta
from mla_portable.flash_mla.statistics import as_flashmla
from mla_portable.kit.rules import CacheFacts, check_cache, shape_of
from mla_portable.kit.second_cache import is_nope, second_cache
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import FP8_NOPE
from mla_portable.primitives import SPARSE_DECODE

_WHERE: Final = "flash_mla_with_kvcache"
_CACHE: Final = "[blocks, page_block_size, 1, row width]"
_BYTES: Final = (torch.float8_e4m3fn, torch.int8)
"""Names that FlashMLA has for the bytes of a quantised row, besides uint8."""
_NAMED: Final = "V32_NO_ROPE"
"""The format that a caller must name: rows of V41 have as many bytes, and other scales."""
_FORMATS: Final = {"V32": 656, _NAMED: FP8_NOPE.row_bytes, "V4": 584}
"""`kv_format` -> bytes of a row."""
_OTHER_FORMATS: Final = ("V41", "V41_FP4")
TENSORS: Final = TensorTable(
    _WHERE,
    {
        "q": Axes("b s_q h_q key", torch.bfloat16, not_empty="s_q h_q"),
        "k_cache": Checked(),
        "indices": Axes("b s_q topk", torch.int32, not_empty="topk"),
        "attn_sink": Axes("h_q", torch.float32, optional=True),
        "topk_length": Axes("b", torch.int32, optional=True),
        "extra_k_cache": Checked(optional=True),
        "extra_indices_in_kvcache": Axes("b s_q extra_topk", torch.int32, optional=True, not_empty="extra_topk"),
        "extra_topk_length": Axes("b", torch.int32, optional=True),
        "out": Axes("b s_q h_q value", torch.bfloat16, optional=True, written=True),
    },
    given="key value",
)


@opaque
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
        k_cache: [blocks, page_block_size, 1, row width]: bf16 rows of 576 or 512, or the bytes of quantised rows, 656 (V3.2),
            528 (V3.2 without RoPE) or 584 (V4), as uint8, int8 or float8_e4m3fn. Blocks may lie further apart than a block is
            long.
        block_table, cache_seqlens, num_splits, use_legacy: ignored.
        head_dim_v: 512. tile_scheduler_metadata: from `get_mla_metadata` or `get_mla_decoding_metadata`; None is taken too.
        softmax_scale: factor on q.k, by default one over the square root of the width of a key.
        causal: False. is_fp8_kvcache: None, or what the cache is.
        indices: [b, s_q, topk] int32, slots: block * page_block_size + offset. Any outside of the cache is absent, as -1 is.
            Required: dense decode is not served.
        attn_sink: [h_q] float32; out is multiplied by exp(lse) / (exp(lse) + exp(sink)).
        extra_k_cache, extra_indices_in_kvcache: a second cache of the same layout, with pages of any size, and [b, s_q,
            extra_topk] int32 slots of it; a token attends to what both lists name.
        topk_length, extra_topk_length: [b] int32; only that many leading indices of a request's tokens are read.
        kv_format: None, or the name of the layout that the cache has: "V32", "V32_NO_ROPE" or "V4". Rows of 528 bytes are taken
            for "V32_NO_ROPE" only where it is given.
        enable_batch_invariant: False. descale_q, descale_k: None, they are for dense decode.
        out: [b, s_q, h_q, 512] bf16, written; by default allocated.
    Returns: (out, lse); lse is [b, h_q, s_q] float32, a transposed view, the natural logarithm without the sink; a token
        without a valid index has 0 and +inf.
    Raises: InvalidArgument, PlanMismatch, UnsupportedRequest. Graph-safe: no host synchronisation.
    """
    if indices is None:
        _refuse_dense()
    _check_unserved(causal, enable_batch_invariant, {"descale_q": descale_q, "descale_k": descale_k})
    check_value_width(_WHERE, "head_dim_v", head_dim_v)
    shape_of(_WHERE, "q", q, 4, "[b, s_q, h_q, width]")
    cache = _rows("k_cache", k_cache, kv_format)
    first = check_cache(_WHERE, "k_cache", cache, q.device, kv_layout=layout_name(_WHERE, "k_cache", cache))
    layout = first.layout
    if layout is FP8_NOPE and kv_format is None:
        refuse(_WHERE, "kv_format", "None for rows of 528 bytes", f"{_NAMED!r}: rows of V41, not served here, have as many")
    if is_fp8_kvcache is not None:
        check_flag(_WHERE, "is_fp8_kvcache", is_fp8_kvcache)
    if is_fp8_kvcache not in (None, layout.is_quantized):
        refuse(_WHERE, "is_fp8_kvcache", is_fp8_kvcache, f"{layout.is_quantized} for a cache of {layout.dtype}, or None")
    extra_cache, extra_block_size, caches = _second(extra_k_cache, extra_indices_in_kvcache, extra_topk_length, first, q.device)
    nope = is_nope(q, layout)
    width = layout.value_width if nope else layout.key_width
    sizes = {"key": width, "value": layout.value_width}
    extra = extra_cache, extra_indices_in_kvcache, extra_topk_length
    TENSORS.check((q, cache, indices, attn_sink, topk_length, *extra, out), sizes)
    batch, query_len, topk, extra_topk = sizes["b"], sizes["s_q"], sizes["topk"], sizes.get("extra_topk")
    scale = scale_of(_WHERE, "softmax_scale", softmax_scale, width)
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        shapes = batch, query_len, sizes["h_q"], cache.shape[1], 1, False, layout.is_quantized, topk, extra_block_size
        tile_scheduler_metadata.remember(_WHERE, FlashMLASchedMeta.Config(*shapes, extra_topk))
    elif tile_scheduler_metadata is not None and not isinstance(tile_scheduler_metadata, Tensor):
        refuse(_WHERE, "tile_scheduler_metadata", describe(tile_scheduler_metadata), "a FlashMLASchedMeta, a tensor, or None")
    decode = unchecked(
        SPARSE_DECODE,
        q,
        **caches._asdict(),
        num_heads=sizes["h_q"],
        topk=topk,
        query_len=query_len,
        lengths=topk_length is not None,
        attn_sink=attn_sink is not None,
        lse=True,
        rows=rounded_rows(batch * query_len),
        extra_topk=extra_topk,
        extra_block_size=extra_block_size,
        extra_lengths=extra_topk_length is not None,
        nope=nope,
        q_scale=False,
    )
    out, lse = decode(
        q,
        cache,
        indices,
        softmax_scale=scale,
        lengths=_per_token(topk_length, query_len),
        attn_sink=attn_sink,
        schedule=None,
        out=out,
        lse_out=None,
        **second_cache(extra_cache, extra_indices_in_kvcache, _per_token(extra_topk_length, query_len)),
    )
    return out, as_flashmla(lse).transpose(1, 2)


def _rows(argument: str, cache: Any, kv_format: Any) -> Tensor:
    """A cache as [blocks, page_block_size, row width], its bytes as uint8."""
    rows = without_head(_WHERE, argument, cache, 4, _CACHE)
    if kv_format is not None:
        check_type(_WHERE, "kv_format", kv_format, str, "the name of a format, or None")
        if kv_format in _OTHER_FORMATS:
            refuse(_WHERE, "kv_format", kv_format, f"{', '.join(_FORMATS)}, which have kernels here")
        if kv_format not in _FORMATS:
            refuse(_WHERE, "kv_format", describe(kv_format), f"None, or one of {', '.join((*_FORMATS, *_OTHER_FORMATS))}")
        if rows.dtype.itemsize != 1 or rows.shape[-1] != _FORMATS[kv_format]:
            got = f"{kv_format} for {rows.dtype} rows of {rows.shape[-1]}"
            refuse(_WHERE, "kv_format", got, f"{kv_format} for rows of {_FORMATS[kv_format]} bytes")
    return rows.view(torch.uint8) if rows.dtype in _BYTES else rows


def _second(
    cache: Any, indices: Tensor | None, lengths: Tensor | None, first: CacheFacts, device: torch.device
) -> tuple[Tensor | None, int | None, CacheFacts]:
    """The second cache as [blocks, page_block_size, row width].

    Args:
        first: of the first cache.
    Returns: it and its page size (None and None where there is none), and the facts of the first beside it.
    """
    if cache is None:
        for name, value in (("extra_indices_in_kvcache", indices), ("extra_topk_length", lengths)):
            if value is not None:
                refuse(_WHERE, name, describe(value), "None without extra_k_cache", "Pass the cache that it names slots of.")
        return None, None, first
    if indices is None:
        refuse(_WHERE, "extra_indices_in_kvcache", "None", "slots of extra_k_cache, [b, s_q, extra_topk] int32")
    rows = _rows("extra_k_cache", cache, None)
    second = check_cache(_WHERE, "extra_k_cache", rows, device, kv_layout=layout_name(_WHERE, "extra_k_cache", rows))
    if second.kv_layout != first.kv_layout:
        refuse(_WHERE, "extra_k_cache", f"rows of {second.kv_layout}", f"the layout of k_cache, {first.kv_layout}")
    return rows, second.block_size, first.beside(second)


def _per_token(lengths: Tensor | None, query_len: int) -> Tensor | None:
    """[b, s_q]: each request's length for all of its tokens."""
    return None if lengths is None else lengths.unsqueeze(1).expand(-1, query_len).contiguous()


def _check_unserved(causal: Any, enable_batch_invariant: Any, descaling: dict[str, Tensor | None]) -> None:
    check_flag(_WHERE, "causal", causal)
    check_flag(_WHERE, "enable_batch_invariant", enable_batch_invariant)
    if causal:
        refuse(_WHERE, "causal", causal, "False: with indices, a token sees the keys that it selects")
    if enable_batch_invariant:
        remedy = "Force an implementation that declares batch_invariant, with mla_portable.use or MLA_PORTABLE_BACKEND."
        refuse(_WHERE, "enable_batch_invariant", True, "False", remedy)
    for name, value in descaling.items():
        if value is not None:
            refuse(_WHERE, name, describe(value), "None: it is a scale of FP8 dense decode, which is not served")


def _refuse_dense() -> NoReturn:
    remedy = (
        "Dense decode needs FlashMLA itself (SM90, up to August 2026), or an engine's own kernels for dense MLA: "
        "leave this package uninstalled there."
    )
    refuse(_WHERE, "indices", "None (dense decode)", "[b, s_q, topk] int32: sparse decode alone is served", remedy)
