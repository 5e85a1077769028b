# SPDX-License-Identifier: Apache-2.0
"""flash_attn_varlen_func and its packed forms: dense attention of ragged batches over keys of each head, without backward."""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts.values import INT32_MAX, check_count, check_flag, describe, refuse, rounded_rows
from mla_portable.dispatch import opaque, unchecked
from mla_portable.flash_mla.arguments import scale_of
from mla_portable.kit.rules import shape_of
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.primitives import MASKED_PREFILL
from mla_portable.primitives.masked_prefill import check_starts

_WHERE: Final = "flash_attn_varlen_func"
TENSORS: Final = TensorTable(
    _WHERE,
    {
        "q": Axes("tokens_qo heads Dqk", torch.bfloat16, not_empty="heads Dqk"),
        "k": Axes("tokens_kv heads_kv Dqk", torch.bfloat16, not_empty="heads_kv"),
        "v": Axes("tokens_kv heads_kv Dv", torch.bfloat16, not_empty="Dv"),
        "cu_seqlens_qo": Axes("batch+1", torch.int32),
        "cu_seqlens_kv": Axes("batch+1", torch.int32),
    },
    given="batch",
)


@opaque
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """Dense attention of a ragged batch.

    Args:
        q: [tokens, heads, Dqk] bf16. k: [tokens, heads or 1, Dqk] bf16. v: [tokens, as many, Dv] bf16. Widths are those that
            `masked_prefill` has kernels for: 192 and 128, or 256 and 256.
        cu_seqlens_qo, cu_seqlens_kv: [batch + 1] int32, where sequences start. max_seqlen_qo, max_seqlen_kv: upper bounds.
        dropout_p: 0. softmax_scale: by default one over the square root of Dqk.
        causal: query i of Lq sees the keys up to i + Lk - Lq. deterministic: False. is_varlen: ignored.
    Returns: (out [tokens, heads, Dv] bf16, lse [tokens, heads] float32, whose tokens are contiguous); a query without a key has
        0 and -inf.
    Raises: InvalidArgument, UnsupportedRequest. Graph-safe.
    """
    (starts,) = shape_of(_WHERE, "cu_seqlens_qo", cu_seqlens_qo, 1, "[batch + 1]")
    if starts < 1:
        refuse(_WHERE, "cu_seqlens_qo", "shape [0]", "[batch + 1], at least one value")
    sizes = TENSORS.check((q, k, v, cu_seqlens_qo, cu_seqlens_kv), {"batch": starts - 1})
    heads, heads_kv, width = sizes["heads"], sizes["heads_kv"], sizes["Dqk"]
    if heads_kv not in (1, heads):
        remedy = f"Pass k.repeat_interleave({heads // heads_kv}, dim=1), and v likewise." if heads % heads_kv == 0 else ""
        refuse(_WHERE, "k", f"{heads_kv} heads", f"1 head, or {heads} as q has", remedy)
    if not isinstance(dropout_p, Real) or dropout_p != 0:
        refuse(_WHERE, "dropout_p", describe(dropout_p), "0")
    check_flag(_WHERE, "deterministic", deterministic)
    if deterministic:
        refuse(_WHERE, "deterministic", True, "False")
    check_flag(_WHERE, "causal", causal)
    scale = scale_of(_WHERE, "softmax_scale", softmax_scale, width)
    longest_qo, longest_kv = _length("max_seqlen_qo", max_seqlen_qo), _length("max_seqlen_kv", max_seqlen_kv)
    check_starts(_WHERE, "cu_seqlens_qo", cu_seqlens_qo, "tokens_qo", sizes["tokens_qo"], "max_seqlen_qo", longest_qo)
    check_starts(_WHERE, "cu_seqlens_kv", cu_seqlens_kv, "tokens_kv", sizes["tokens_kv"], "max_seqlen_kv", longest_kv)
    attend = unchecked(
        MASKED_PREFILL,
        q,
        num_heads=heads,
        qk_head_dim=width,
        v_head_dim=sizes["Dv"],
        selection=False,
        lse=True,
        rows=rounded_rows(sizes["tokens_qo"]),
    )
    out, lse = attend(
        q,
        k.expand(-1, heads, -1),
        v.expand(-1, heads, -1),
        cu_seqlens_qo,
        cu_seqlens_kv,
        softmax_scale=scale,
        max_query_len=longest_qo,
        max_key_len=longest_kv,
        causal=causal,
        selection=None,
        out=None,
        lse_out=None,
    )
    return out, lse.mT.contiguous().mT


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func` with qkv [tokens, heads, 2 * head_dim_qk + Dv]: queries, keys and values side by side."""
    width = _packed("qkv", qkv, head_dim_qk, 2)
    q, k, v = qkv[..., :width], qkv[..., width : 2 * width], qkv[..., 2 * width :]
    ragged = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *ragged, dropout_p, softmax_scale, causal, deterministic, is_varlen)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func` with kv [tokens, heads, head_dim_qk + Dv]: keys and values side by side."""
    width = _packed("kv", kv, head_dim_qk, 1)
    k, v = kv[..., :width], kv[..., width:]
    ragged = cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv
    return flash_attn_varlen_func(q, k, v, *ragged, dropout_p, softmax_scale, causal, deterministic, is_varlen)


def _packed(argument: str, packed: Any, head_dim_qk: Any, parts: int) -> int:
    """The width of a key, where `parts` of it and a value lie side by side."""
    axes = f"[tokens, heads, {'2 * ' if parts == 2 else ''}head_dim_qk + Dv]"
    wide = shape_of(_WHERE, argument, packed, 3, axes)[2]
    width = _length("head_dim_qk", head_dim_qk, 1)
    if parts * width >= wide:
        refuse(_WHERE, argument, f"shape {list(packed.shape)}, head_dim_qk {width}", f"{axes}, a value of at least 1")
    return width


def _length(argument: str, value: Any, least: int = 0) -> int:
    """An integer of Python's or numpy's; no tensor, which would have to be read back."""
    count: Any = index(value) if hasattr(value, "__index__") and not isinstance(value, (bool, Tensor)) else value
    check_count(_WHERE, argument, count, least, INT32_MAX)
    return count
