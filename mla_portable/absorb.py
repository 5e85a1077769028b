# SPDX-License-Identifier: Apache-2.0
"""Weight absorption: `kv_b_proj` split per head into W_UK and W_UV, so that attention runs on the latent itself.

With latent c, and key k = W_UK c and value v = W_UV c of a head:
    q . k      = (W_UK^T q) . c        the query moves into the latent space:     ql_nope = q_nope @ W_UK
    sum p_i v_i = W_UV (sum p_i c_i)   the output moves out of it after attention: v = out @ W_UV^T
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2 and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.layouts import KV_LORA_RANK

__all__ = ["AbsorbedProjections"]

_WIDE: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Weight types that are numbers as they stand; anything narrower belongs to a quantised layer."""


@dataclass(frozen=True, slots=True, eq=False)
class AbsorbedProjections:
    """The two products around latent attention.

    Attributes:
        w_uk: [H, nope, rank], query into the latent space. w_uv: [H, rank, v_dim], latent output to values. Contiguous.
    """

    w_uk: Tensor
    w_uv: Tensor

    @classmethod
    def from_kv_b_proj(
        cls,
        layer_or_weight: Tensor | Callable[..., Any],
        *,
        num_heads: int,
        kv_lora_rank: int = KV_LORA_RANK,
        qk_nope_head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype | None = None,
    ) -> AbsorbedProjections:
        """Split `kv_b_proj`, once, when a model is loaded.

        Args:
            layer_or_weight: the weight [H * (nope + v_dim), rank], rows head by head, each head's keys before its values;
                or the linear layer. A layer whose `weight` is no plain floating-point matrix (a quantised one) is applied
                to an identity matrix, through its `quant_method` where it has one, which undoes any quantisation.
            num_heads: H of this rank. kv_lora_rank, qk_nope_head_dim, v_head_dim: rank, nope, v_dim.
            dtype: of the results, and of the identity that a quantised layer sees; None keeps the weight's type, or
                takes bfloat16 for a quantised layer.
        Raises: InvalidArgument when the sizes do not fit, or when the layer has a bias, which cannot be absorbed.
        """
        where = "AbsorbedProjections.from_kv_b_proj"
        sizes = {
            "num_heads": num_heads,
            "kv_lora_rank": kv_lora_rank,
            "qk_nope_head_dim": qk_nope_head_dim,
            "v_head_dim": v_head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise InvalidArgument(where, name, got=size, expected="at least 1")
        weight = _weight_of(where, layer_or_weight, kv_lora_rank, dtype)
        rows = num_heads * (qk_nope_head_dim + v_head_dim)
        if weight.shape != (rows, kv_lora_rank):
            transposed = weight.shape == (kv_lora_rank, rows)
            raise InvalidArgument(
                where,
                "layer_or_weight",
                got=f"a weight of shape {list(weight.shape)}",
                expected=f"[num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank] = {[rows, kv_lora_rank]}",
                remedy="Pass weight.T." if transposed else "Give the head count and sizes of this rank's shard.",
            )
        per_head = weight.detach().to(dtype or weight.dtype).view(num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)
        w_uk, w_uv = per_head.split([qk_nope_head_dim, v_head_dim], dim=1)
        return cls(w_uk=w_uk.contiguous(), w_uv=w_uv.transpose(1, 2).contiguous())

    def absorb_query(self, q_nope: Tensor, *, out: Tensor | None = None) -> Tensor:
        """ql_nope = q_nope @ W_UK, head by head.

        Args:
            q_nope: [T, H, nope] in the dtype of the weights. out: [T, H, rank], written.
        Returns: [T, H, rank], `out` where given. Graph-safe with `out`.
        """
        return _per_head("absorb_query", "q_nope", q_nope, self.w_uk, out)

    def up_project(self, latent: Tensor, *, out: Tensor | None = None) -> Tensor:
        """v = latent @ W_UV^T, head by head; `latent` is what attention returned.

        Args:
            latent: [T, H, rank] in the dtype of the weights. out: [T, H, v_dim], written.
        Returns: [T, H, v_dim], `out` where given. Graph-safe with `out`.
        """
        return _per_head("up_project", "latent", latent, self.w_uv, out)


def _per_head(where: str, argument: str, x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """[T, H, a] @ [H, a, b] -> [T, H, b]."""
    heads, inner, outer = weight.shape
    if x.dim() != 3 or x.shape[1:] != (heads, inner):
        raise InvalidArgument(where, argument, got=f"shape {list(x.shape)}", expected=f"[T, {heads}, {inner}]")
    if x.dtype != weight.dtype or x.device != weight.device:
        expected = f"{weight.dtype} on {weight.device}, like the weights"
        raise InvalidArgument(where, argument, got=f"{x.dtype} on {x.device}", expected=expected)
    if out is None:
        out = torch.empty((x.shape[0], heads, outer), dtype=x.dtype, device=x.device)
    elif out.shape != (x.shape[0], heads, outer) or out.dtype != x.dtype or out.device != x.device:
        got, expected = (
            f"{out.dtype} {list(out.shape)} on {out.device}",
            f"{x.dtype} {[x.shape[0], heads, outer]} on {x.device}",
        )
        raise InvalidArgument(where, "out", got=got, expected=expected)
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def _weight_of(where: str, source: Any, rank: int, dtype: torch.dtype | None) -> Tensor:
    """The matrix [outputs, rank] of a weight or a linear layer."""
    weight = source if isinstance(source, Tensor) else getattr(source, "weight", None)
    if isinstance(source, Tensor) and source.dtype not in _WIDE:
        raise InvalidArgument(
            where,
            "layer_or_weight",
            got=f"a {source.dtype} weight",
            expected="a floating-point weight of 16 bits or more, or the layer",
            remedy="Pass the layer itself: its scales are needed.",
        )
    if not isinstance(source, Tensor) and not callable(source):
        raise InvalidArgument(where, "layer_or_weight", got=type(source).__name__, expected="a tensor or a linear layer")
    if not isinstance(source, Tensor):
        bias = getattr(source, "bias", None)
        if isinstance(bias, Tensor):
            expected = "a layer without bias: one cannot be absorbed"
            raise InvalidArgument(where, "layer_or_weight", got=f"a bias of shape {list(bias.shape)}", expected=expected)
    if isinstance(weight, Tensor) and weight.dtype in _WIDE and weight.dim() == 2:
        return weight
    return _by_identity(where, source, rank, dtype or torch.bfloat16)


def _by_identity(where: str, layer: Any, rank: int, dtype: torch.dtype) -> Tensor:
    """The weight that a linear layer applies, as the rows it makes of an identity matrix."""
    parameters = [*layer.parameters(), *layer.buffers()] if isinstance(layer, torch.nn.Module) else []
    device = parameters[0].device if parameters else torch.device("cpu")
    identity = torch.eye(rank, dtype=dtype, device=device)
    apply = getattr(getattr(layer, "quant_method", None), "apply", None)
    with torch.no_grad():
        made = apply(layer, identity, bias=None) if apply is not None else layer(identity)
    product = made[0] if isinstance(made, tuple) else made  # engines' linear layers return (output, bias)
    if not isinstance(product, Tensor) or product.dim() != 2 or product.shape[0] != rank:
        got = f"shape {list(product.shape)}" if isinstance(product, Tensor) else type(product).__name__
        raise InvalidArgument(
            where, "layer_or_weight", got=f"a layer that makes {got} of [{rank}, {rank}]", expected=f"[{rank}, outputs]"
        )
    return product.T
