# SPDX-License-Identifier: Apache-2.0
"""The GPU kit's checkpoints of 4 bits, as vLLM's own classes and compressed-tensors read them."""

from __future__ import annotations

import importlib
from typing import Any

import checkpoint
import four_bits
import torch
from compressed_tensors.compressors import unpack_from_int32
from vllm.model_executor.layers.quantization import get_quantization_config

NAME = "model.layers.0.self_attn.kv_b_proj"


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """Along a new last axis, the lowest four bits first."""
    return torch.stack([(words >> 4 * place) & 15 for place in range(8)], dim=-1)


def test_compressed_tensors_unpacks_what_was_packed() -> None:
    plain = checkpoint.tensors(16)
    stored = four_bits.packed(plain)
    codes = unpack_from_int32(stored[f"{NAME}.weight_packed"], 4, torch.Size(stored[f"{NAME}.weight_shape"].tolist()))
    scale = stored[f"{NAME}.weight_scale"].float().repeat_interleave(four_bits.GROUP, dim=1)
    error = codes.float() * scale - plain[f"{NAME}.weight"].float()
    assert (error.abs() <= 0.51 * scale).all() and error.norm() > 0


def test_vllm_knows_both_configurations() -> None:
    for config in (four_bits.PACKED, four_bits.AWQ):
        made = get_quantization_config(config["quant_method"]).from_config(dict(config))
        assert "4" in str(getattr(made, "weight_bits", "")) or made.quant_format == "pack-quantized"


def test_vllm_reads_awqs_order() -> None:
    try:
        module: Any = importlib.import_module("vllm.model_executor.layers.quantization.auto_awq")
    except ImportError:
        return  # one class for all of AWQ's kernels came later
    plain = checkpoint.tensors(16)
    stored = four_bits.awq(plain)
    layer: Any = torch.nn.Module()
    for part in ("qweight", "qzeros"):
        layer.register_parameter(part, torch.nn.Parameter(stored[f"{NAME}.{part}"], requires_grad=False))
    module.PackedvLLMParameter = lambda data, **_: torch.nn.Parameter(data, requires_grad=False)
    module._convert_awq_to_standard_format(layer, "qweight", "qzeros", 4)
    codes = codes_of(layer.qweight.data).transpose(1, 2).flatten(0, 1)  # [K, N]
    zeros = codes_of(layer.qzeros.data).transpose(1, 2).flatten(0, 1).T  # [K / 128, N]
    scale = stored[f"{NAME}.scales"].float().repeat_interleave(four_bits.GROUP, dim=0)
    error = ((codes - zeros.repeat_interleave(four_bits.GROUP, dim=0)) * scale).T - plain[f"{NAME}.weight"].float()
    assert (error.abs() <= 1.01 * scale.T).all() and error.norm() < 0.2 * plain[f"{NAME}.weight"].float().norm()
