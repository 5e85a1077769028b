# SPDX-License-Identifier: Apache-2.0
"""flash_mla_sparse_fwd: sparse attention of query tokens over chosen BF16 rows."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts.values import check_flag, check_scale, refuse, rounded_rows
from mla_portable.dispatch import opaque, unchecked
from mla_portable.flash_mla.arguments import check_value_width, layout_name, scale_of, without_head
from mla_portable.flash_mla.statistics import LOG2_E, SHARPNESS, as_flashmla, wants_max_logits
from mla_portable.kit.rules import check_cache, check_resolved, shape_of
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL

_WHERE: Final = "flash_mla_sparse_fwd"
TENSORS: Final = TensorTable(
    _WHERE,
    {
        "q": Axes("s_q h_q key", torch.bfloat16, not_empty="h_q"),
        "kv": Checked(),
        "indices": Axes("s_q topk", torch.int32, not_empty="topk"),
        "attn_sink": Axes("h_q", torch.float32, optional=True),
        "topk_length": Axes("s_q", torch.int32, optional=True),
        "out": Axes("s_q h_q value", torch.bfloat16, optional=True, written=True),
    },
    given="key value",
)


@opaque
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sparse attention of s_q query tokens over chosen rows of `kv`.

    Args:
        q: [s_q, h_q, 576 or 512] bf16, any number of heads, any strides but that of the last dimension.
        kv: [s_kv, 1, the same width] bf16, rows any distance apart. They may overlap: a paged cache seen as rows that begin
            every 64 elements is read in place.
        indices: [s_q, 1, topk] int32, rows of kv; those outside of [0, s_kv) are absent.
        sm_scale: factor on q.k. d_v: 512. attn_sink: as in `flash_mla_with_kvcache`.
        topk_length: [s_q] int32; only that many leading indices of a token are read. use_legacy: ignored.
        return_log2_lse: None: statistics are natural logarithms. True: to base 2. False: none are returned.
        out: [s_q, h_q, 512] bf16, written; by default allocated.
    Returns: (out, max_logits, lse), the last two [s_q, h_q] float32 or None. A token without a valid index has 0, -inf and
        +inf. max_logits costs a second attention, so it is None unless MLA_PORTABLE_FLASH_MLA_MAX_LOGITS is on; it may be
        log(topk) / 2**20 too large where keys have equal scores.
    Raises: InvalidArgument, UnsupportedRequest. Graph-safe: no host synchronisation.
    """
    check_value_width(_WHERE, "d_v", d_v)
    shape_of(_WHERE, "q", q, 3, "[s_q, h_q, width]")
    if return_log2_lse is not None:
        check_flag(_WHERE, "return_log2_lse", return_log2_lse)
    rows = without_head(_WHERE, "kv", kv, 3, "[s_kv, 1, width]")
    if rows.dtype is not torch.bfloat16:
        remedy = "flash_mla_with_kvcache reads quantised rows from the paged cache in place."
        refuse(_WHERE, "kv", rows.dtype, "torch.bfloat16", remedy)
    check_resolved(_WHERE, "kv", rows)
    name = layout_name(_WHERE, "kv", rows)
    cache = check_cache(_WHERE, "kv", rows.unsqueeze(1), q.device, kv_layout=name, may_overlap=True)
    layout = cache.layout
    chosen = without_head(_WHERE, "indices", indices, 3, "[s_q, 1, topk]")
    sizes = {"key": layout.key_width, "value": layout.value_width}
    TENSORS.check((q, rows, chosen, attn_sink, topk_length, out), sizes)
    scale = scale_of(_WHERE, "sm_scale", _given(sm_scale), layout.key_width)
    with_max_logits = return_log2_lse is not False and wants_max_logits()
    if with_max_logits:
        check_scale(_WHERE, f"sm_scale times {SHARPNESS:.0f}, for the greatest score of a row", scale * SHARPNESS)
    facts: dict[str, object] = {
        "kv_layout": cache.kv_layout,
        "num_heads": sizes["h_q"],
        "topk": sizes["topk"],
        "cache_alignment": cache.cache_alignment,
        "uneven_blocks": cache.uneven_blocks,
        "rows": rounded_rows(sizes["s_q"]),
    }
    out, lse = _attend(facts, q, rows, chosen, scale, topk_length, attn_sink, out)
    if return_log2_lse is False:
        return out, None, None
    greatest = None
    if with_max_logits:
        greatest = _attend(facts, q, rows, chosen, scale * SHARPNESS, topk_length)[1]
        greatest.mul_((LOG2_E if return_log2_lse else 1.0) / SHARPNESS)
    as_flashmla(lse)
    return out, greatest, lse.mul_(LOG2_E) if return_log2_lse else lse


def _attend(
    facts: dict[str, object],
    q: Tensor,
    rows: Tensor,
    indices: Tensor,
    scale: float,
    lengths: Tensor | None,
    attn_sink: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The primitives' results for rows [s_kv, width] that follow one another, or lie any distance apart.

    facts: those of the call that do not depend on the primitive, nor on its optional arguments.
    """
    facts = facts | {
        "lengths": lengths is not None,
        "attn_sink": attn_sink is not None,
        "lse": True,
        "extra_topk": None,
        "extra_block_size": None,
        "extra_lengths": False,
        "nope": False,
        "q_scale": False,
    }
    if rows.shape[0] <= 1 or rows.stride(0) == rows.shape[1]:
        prefill = unchecked(SPARSE_PREFILL, q, block_size=None, **facts)
        return prefill(q, rows, indices, softmax_scale=scale, lengths=lengths, attn_sink=attn_sink, out=out, lse_out=None)
    # a row is a page of one token
    decode = unchecked(SPARSE_DECODE, q, block_size=1, query_len=1, **facts)
    out, lse = decode(
        q.unsqueeze(1),
        rows.unsqueeze(1),
        indices.unsqueeze(1),
        softmax_scale=scale,
        lengths=None if lengths is None else lengths.unsqueeze(1),
        attn_sink=attn_sink,
        schedule=None,
        out=None if out is None else out.unsqueeze(1),
        lse_out=None,
    )
    return out.squeeze(1), lse.squeeze(1)


def _given(sm_scale: Any) -> Any:
    """The scale, which has no default here."""
    if sm_scale is None:
        refuse(_WHERE, "sm_scale", "None", "a Python float")
    return sm_scale
