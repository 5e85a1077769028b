# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The implementation for layers that leave the products with W_UK and W_UV to it, as Iluvatar's vLLM 0.17 does.

Upstream's MLAAttention multiplies the query by W_UK and the output by W_UV itself. Iluvatar's calls `_k_up_proj`, `forward_mqa`
and `_v_up_proj` of the implementation, which makes both weights out of `kv_b_proj`, and takes the output alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import compat
from mla_portable.engines.vllm.impl import MLAPortableImpl


class ProjectingImpl(MLAPortableImpl):
    """P: `qk_nope_head_dim`, the query's width without rope. V: `v_head_dim`, that of the values.

    Attributes:
        W_UK: [512, H, P]. W_UV: [512, H, V]. Views of `kv_b_proj.weight` where it is not quantised.
    """

    W_UK: Tensor
    W_UV: Tensor

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.kv_b_proj = arguments["kv_b_proj"]
        self.qk_nope_head_dim: int = arguments["qk_nope_head_dim"]
        self.v_head_dim: int = arguments["v_head_dim"]
        self._returns_lse = compat.layer_takes_lse()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Make W_UK and W_UV.

        Raises: InvalidArgument for activations other than bfloat16, and for a `kv_b_proj` of another shape.
        """
        super().process_weights_after_loading(act_dtype)
        weight, widths = _weight(self.kv_b_proj, act_dtype), (self.qk_nope_head_dim, self.v_head_dim)
        wanted = self.num_heads * sum(widths), self.kv_lora_rank
        if weight.shape != wanted:
            expected = f"{list(wanted)}: {self.num_heads} heads of {widths[0]} + {widths[1]}, a latent of {self.kv_lora_rank}"
            raise InvalidArgument("vLLM", "kv_b_proj", got=f"a weight of {list(weight.shape)}", expected=expected)
        by_head = weight.T.unflatten(1, (self.num_heads, sum(widths)))
        self.W_UK, self.W_UV = by_head.split(widths, dim=-1)

    def _k_up_proj(self, q_nope: Tensor) -> Tensor:
        """[T, H, P] -> [T, H, 512]."""
        return _per_head(q_nope, self.W_UK.permute(1, 2, 0))

    def _v_up_proj(self, x: Tensor) -> Tensor:
        """[T, H, 512] -> [T, H, V]."""
        return _per_head(x, self.W_UV.transpose(0, 1))

    def forward_mqa(self, *arguments: Any, **named: Any) -> Any:
        """As MLAPortableImpl's, but out alone, unless the layer unpacks (out, lse)."""
        result = super().forward_mqa(*arguments, **named)
        return result if self._returns_lse else result[0]


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, A], weight [H, A, B] -> [T, H, B], contiguous."""
    out = x.new_empty((*x.shape[:2], weight.shape[2]))
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def _weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """[output, input] of a linear layer in `dtype`; a quantised one is applied to the unit matrix."""
    method = layer.quant_method
    if method is None or isinstance(method, UnquantizedLinearMethod):
        return layer.weight.to(dtype)
    unit = torch.eye(layer.input_size_per_partition, dtype=dtype, device=next(layer.parameters()).device)
    return method.apply(layer, unit, bias=None).T
