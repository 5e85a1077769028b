# SPDX-License-Identifier: Apache-2.0
"""concat_mla_k: keys of each head from the part that every head has of its own and the part that all heads share."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.primitives._reference import isolated

__all__ = ["CONCAT_MLA_K", "ConcatMlaK", "concat_mla_k"]

TENSORS: Final = TensorTable(
    "concat_mla_k",
    {
        "k_nope": Axes("N H P", torch.bfloat16, not_empty="H P"),
        "k_rope": Axes("N R", torch.bfloat16, not_empty="R"),
        "out": Axes("N H D", torch.bfloat16, optional=True, written=True),
    },
    given="D",
)


class ConcatMlaK(Protocol):
    """Keys of each head: its own columns, then those that all heads share.

    k_nope [N, H, P] and k_rope [N, R] bf16, with any strides but those of the last dimension. Returns k [N, H, P + R] bf16,
    which is `out` where given. Graph-safe with `out`.
    """

    def __call__(self, k_nope: Tensor, k_rope: Tensor, *, out: Tensor | None = None) -> Tensor: ...


@opaque
def concat_mla_k(k_nope: Tensor, k_rope: Tensor, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Keys of each head: its own columns, then those that all heads share.

    Args:
        k_nope: [N, H, P] bf16, of each head. Tokens and heads may lie any distance apart, as in a slice of the up-projection's
            result [N, H, P + V]; the last dimension is contiguous. k_rope: [N, R] bf16, of all heads, likewise: a slice of a
            latent row. Without rotary columns there is nothing to join: pass k_nope itself as the keys.
        out: [N, H, P + R] bf16, written; it overlaps no input. backend: see `mla_portable.primitives`.
    Returns: k [N, H, P + R] bf16; k[n, h] is k_nope[n, h] followed by k_rope[n], bit for bit.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe with `out`.
    """
    return find(CONCAT_MLA_K, backend, k_nope, check(k_nope, k_rope, out)).call(k_nope, k_rope, out=out)


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide."""

    num_heads: int
    rows: int


def check(k_nope: Tensor, k_rope: Tensor, out: Tensor | None) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    widths = [x.shape[-1] if isinstance(x, Tensor) and not x.is_nested and x.dim() else 0 for x in (k_nope, k_rope)]
    sizes = TENSORS.check((k_nope, k_rope, out), {"D": sum(widths)})
    return Facts(sizes["H"], rounded_rows(sizes["N"]))


@isolated
def reference(k_nope: Tensor, k_rope: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Two copies. Allocates nothing beyond the output."""
    num_tokens, num_heads, own = k_nope.shape
    if out is None:
        shape = num_tokens, num_heads, own + k_rope.shape[1]
        out = torch.empty(shape, dtype=torch.bfloat16, device=k_nope.device)
    out[..., :own] = k_nope
    out[..., own:] = k_rope.unsqueeze(1)
    return out


CONCAT_MLA_K: Final = Primitive[ConcatMlaK](
    "concat_mla_k",
    module=__name__,
    facts=Facts._fields,
    results=("out",),
    reference=reference,
)
