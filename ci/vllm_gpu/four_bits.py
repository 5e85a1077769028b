# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a checkpoint in 4 bits, as compressed-tensors (W4A16) and AWQ store them.

Both have a scale for 128 inputs of an output. The indexer and the output layer stay as they are, as in published checkpoints.
What matters here is `kv_b_proj`: it has no weight that could be read, so vLLM multiplies it with the unit matrix.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

GROUP: Final = 128
_KEPT: Final = ("indexer", "lm_head", "embed")
_SHIFTS: Final = torch.arange(0, 32, 4, dtype=torch.int32)
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs each nibble of a word has, the lowest first."""

PACKED: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*indexer.*"],
}
AWQ: Final[dict[str, Any]] = {
    "quant_method": "awq",
    "version": "gemm",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "modules_to_not_convert": ["indexer", "lm_head"],
}


def packed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Symmetric: values are (code - 8) * scale. `weight_packed` [N, K / 8] int32, `weight_scale` [N, K / 128] bf16."""
    made: dict[str, Tensor] = {}
    for name, weight in found.items():
        if not _is_stored_in_four_bits(name, weight):
            made[name] = weight
            continue
        codes, scale = _symmetric(weight)
        made[f"{name}_packed"] = _words(codes.flatten(1).unflatten(1, (-1, 8)))
        made[f"{name}_scale"] = scale.squeeze(-1)
        made[f"{name}_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
    return made


def packed_values(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of `packed` in bf16 under the names of `found`: a checkpoint without 4 bits that is the same model."""

    def values(weight: Tensor) -> Tensor:
        codes, scale = _symmetric(weight)
        return ((codes - 8) * scale).flatten(1).to(torch.bfloat16)

    return {name: values(each) if _is_stored_in_four_bits(name, each) else each for name, each in found.items()}


def _symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> codes 0 to 15 [N, K / 128, 128] int32, scales [N, K / 128, 1] bf16."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(dim=-1, keepdim=True) / 7).to(torch.bfloat16)
    return (groups / scale.float()).round().clamp(-8, 7).to(torch.int32) + 8, scale


def awq(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a zero point: values are (code - zero) * scale.

    `qweight` [K, N / 8], `qzeros` [K / 128, N / 8] int32, `scales` [K / 128, N] fp16.
    """
    made: dict[str, Tensor] = {}
    for name, weight in found.items():
        if not _is_stored_in_four_bits(name, weight):
            made[name] = weight
            continue
        codes, zero, scale = _with_zero(weight)
        own = name.removesuffix(".weight")
        made[f"{own}.qweight"] = _words(codes.flatten(0, 1).unflatten(1, (-1, 8))[..., _AWQ_ORDER])
        made[f"{own}.qzeros"] = _words(zero.squeeze(1).unflatten(1, (-1, 8))[..., _AWQ_ORDER])
        made[f"{own}.scales"] = scale.squeeze(1)
    return made


def awq_values(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of `awq`, as `packed_values`, with scales in bf16: vLLM loads them in the model's dtype."""

    def values(weight: Tensor) -> Tensor:
        codes, zero, scale = _with_zero(weight)
        return ((codes - zero) * scale.to(torch.bfloat16)).flatten(0, 1).T.contiguous().to(torch.bfloat16)

    return {name: values(each) if _is_stored_in_four_bits(name, each) else each for name, each in found.items()}


def _with_zero(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[N, K] -> codes 0 to 15 [K / 128, 128, N] and zeros [K / 128, 1, N] int32, scales [K / 128, 1, N] fp16."""
    groups = weight.float().T.unflatten(0, (-1, GROUP))
    low, high = groups.amin(dim=1, keepdim=True).clamp(max=0), groups.amax(dim=1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).to(torch.float16)
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = ((groups / scale.float()).round() + zero).clamp(0, 15)
    return codes.to(torch.int32), zero.to(torch.int32), scale


def _is_stored_in_four_bits(name: str, weight: Tensor) -> bool:
    return name.endswith(".weight") and weight.dim() == 2 and not any(kept in name for kept in _KEPT)


def _words(codes: Tensor) -> Tensor:
    """[..., 8] of 0 to 15 -> [...] int32, the first in the lowest bits."""
    return (codes << _SHIFTS).sum(dim=-1, dtype=torch.int32)
