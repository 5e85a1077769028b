# SPDX-License-Identifier: Apache-2.0
"""rope_quantize_queries: rotary embedding of a layer's queries; that of the indexer's, and their codes."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import check_scale, refuse, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.rules import check_dense, shape_of
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import INDEX_FP8, INDEX_HEAD_SIZE
from mla_portable.primitives._reference import isolated
from mla_portable.primitives._rotary import (
    PLACES,
    STYLES,
    check_choice,
    check_cos_sin,
    check_given,
    cosines_and_sines,
    rotate,
    rotate_at,
)

__all__ = ["ROPE_QUANTIZE_QUERIES", "RopeQuantizeQueries", "rope_quantize_queries"]

_WEIGHTS: Final = (torch.bfloat16, torch.float32)

TENSORS: Final = TensorTable(
    "rope_quantize_queries",
    {
        "positions": Axes("T", torch.int64),
        "cos_sin": Checked(),
        "q": Axes("T H D", torch.bfloat16, optional=True, not_empty="H"),
        "index_q": Axes("T I width", torch.bfloat16, optional=True, not_empty="I"),
        "index_weights": Axes("T I", optional=True),
        "q_out": Axes("T H W", torch.bfloat16, optional=True, written=True),
        "index_q_out": Axes("T I width", torch.float8_e4m3fn, optional=True, written=True),
        "index_weights_out": Axes("T I", torch.float32, optional=True, written=True),
    },
    given="width",
)


class RopeQuantizeQueries(Protocol):
    """Rotary embedding of queries; codes of the indexer's. Each of the two parts may be absent.

    q [T, H, P + R] bf16: its last R numbers, rotated, into the last R of q_out [T, H, V + R] bf16, whose others stay.
    index_q [T, I, 128] bf16 -> rotated, index_q_out [T, I, 128] e4m3; index_weights [T, I] bf16 or float32, times index_scale
    and the scale of the codes -> index_weights_out [T, I] float32. Tokens and heads lie any distance apart.
    """

    def __call__(
        self,
        q: Tensor | None,
        index_q: Tensor | None,
        index_weights: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        *,
        q_out: Tensor | None,
        index_q_out: Tensor | None = None,
        index_weights_out: Tensor | None = None,
        index_scale: float = 1.0,
        rope_style: str = "interleaved",
        index_rope_style: str = "neox",
        index_rope_at: str = "first",
    ) -> None: ...


@opaque
def rope_quantize_queries(
    q: Tensor | None,
    index_q: Tensor | None,
    index_weights: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    q_out: Tensor | None,
    index_q_out: Tensor | None = None,
    index_weights_out: Tensor | None = None,
    index_scale: float = 1.0,
    rope_style: str = "interleaved",
    index_rope_style: str = "neox",
    index_rope_at: str = "first",
    backend: str | None = None,
) -> None:
    """Rotate the queries of a layer; rotate and quantise those of its indexer.

    Two parts, each of which may be None together with all that belongs to it. Tokens and heads may lie any distance apart; the
    last dimension is contiguous.

    Args:
        q: [T, H, P + R] bf16, whose last R numbers are rotated -> the last R numbers of q_out. P may be 0.
        index_q: [T, I, 128] bf16: its first or last R numbers are rotated -> index_q_out, codes with a scale for each token and
            head, 2 ** ceil(log2(max(amax, 1e-4) / 448)), as `indexer_cache_write` makes them of keys.
        index_weights: [T, I] bf16 or float32 -> index_weights_out: times the scale of the codes and index_scale, in float32.
        positions: [T] int64. A position outside of the table is taken for the nearest one in it.
        cos_sin: [P, R] bf16 or float32: R / 2 cosines, then R / 2 sines.
        q_out: [T, H, V + R] bf16. Its first V numbers, the absorbed product's, are neither read nor written.
        index_q_out: [T, I, 128] e4m3. index_weights_out: [T, I] float32. Written.
        index_scale: positive; of the scores: 128 ** -0.5 times I ** -0.5 in DeepSeek-V3.2.
        rope_style, index_rope_style, index_rope_at: as of `norm_rope_write`. backend: see `mla_portable.primitives`.
    Rotations are computed in float32 and rounded to bf16 once; codes are made of the rounded numbers. NaN stays in its head.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe.
    """
    facts = check(
        q,
        index_q,
        index_weights,
        positions,
        cos_sin,
        q_out,
        index_q_out,
        index_weights_out,
        index_scale,
        rope_style,
        index_rope_style,
        index_rope_at,
    )
    find(ROPE_QUANTIZE_QUERIES, backend, positions, facts).call(
        q,
        index_q,
        index_weights,
        positions,
        cos_sin,
        q_out=q_out,
        index_q_out=index_q_out,
        index_weights_out=index_weights_out,
        index_scale=index_scale,
        rope_style=rope_style,
        index_rope_style=index_rope_style,
        index_rope_at=index_rope_at,
    )


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide. num_heads: of q, None where there is none."""

    num_heads: int | None
    rows: int


def check(
    q: Tensor | None,
    index_q: Tensor | None,
    index_weights: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    q_out: Tensor | None,
    index_q_out: Tensor | None,
    index_weights_out: Tensor | None,
    index_scale: float,
    rope_style: str,
    index_rope_style: str,
    index_rope_at: str,
) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    where = TENSORS.where
    shape_of(where, "positions", positions, 1, "[T]")
    if q is None and index_q is None:
        refuse(where, "q and index_q", "None", "at least one of them")
    check_given(where, q, "q", {"q_out": q_out}, {})
    codes = {"index_weights": index_weights, "index_q_out": index_q_out, "index_weights_out": index_weights_out}
    check_given(where, index_q, "index_q", codes, {})
    for argument, style in (("rope_style", rope_style), ("index_rope_style", index_rope_style)):
        check_choice(where, argument, style, STYLES)
    check_choice(where, "index_rope_at", index_rope_at, PLACES)
    check_scale(where, "index_scale", index_scale)
    width = check_cos_sin(where, cos_sin, positions.device)
    if index_q is not None and width > INDEX_HEAD_SIZE:
        refuse(where, "cos_sin", f"shape {list(cos_sin.shape)}", f"[P, R] with R of at most {INDEX_HEAD_SIZE}, for index_q")
    weights_dtype: Any = None
    if index_weights is not None:
        check_dense(where, "index_weights", index_weights, "[T, I]")
        weights_dtype = index_weights.dtype
        if weights_dtype not in _WEIGHTS:
            refuse(where, "index_weights", weights_dtype, "torch.bfloat16 or torch.float32")
    for argument, value in (("q", q), ("q_out", q_out)):
        if value is not None:
            shape = shape_of(where, argument, value, 3, "[T, H, P + R]" if argument == "q" else "[T, H, V + R]")
            if shape[2] < width:
                refuse(where, argument, f"shape {list(shape)}", f"a last dimension of at least R = {width}, as cos_sin has")
    tensors = positions, cos_sin, q, index_q, index_weights, q_out, index_q_out, index_weights_out
    sizes = TENSORS.check(tensors, {"width": INDEX_HEAD_SIZE}, weights_dtype)
    return Facts(sizes.get("H"), rounded_rows(sizes["T"]))


@isolated
def reference(
    q: Tensor | None,
    index_q: Tensor | None,
    index_weights: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    q_out: Tensor | None,
    index_q_out: Tensor | None = None,
    index_weights_out: Tensor | None = None,
    index_scale: float = 1.0,
    rope_style: str = "interleaved",
    index_rope_style: str = "neox",
    index_rope_at: str = "first",
) -> None:
    """Float32 arithmetic; codes are what INDEX_FP8's `pack` makes of a key. Not graph-safe."""
    cos, sin = (each.unsqueeze(1) for each in cosines_and_sines(cos_sin, positions))  # [T, 1, R / 2]
    width = cos_sin.shape[1]
    if q is not None and q_out is not None:
        q_out[..., q_out.shape[2] - width :] = rotate(q[..., q.shape[2] - width :], cos, sin, rope_style)
    if index_q is not None and index_weights is not None and index_q_out is not None and index_weights_out is not None:
        turned = rotate_at(index_q, cos, sin, index_rope_style, index_rope_at)
        rows = INDEX_FP8.pack(turned.flatten(0, 1), turned[..., :0], "pow2")
        codes, scales = INDEX_FP8.pieces(rows)
        scales = scales.contiguous().view(torch.float32)
        index_q_out.view(torch.uint8).copy_(codes.view(index_q.shape))
        index_weights_out.copy_(index_weights.float() * scales.view(index_weights.shape) * index_scale)


ROPE_QUANTIZE_QUERIES: Final = Primitive[RopeQuantizeQueries](
    "rope_quantize_queries",
    module=__name__,
    facts=Facts._fields,
    reference=reference,
)
