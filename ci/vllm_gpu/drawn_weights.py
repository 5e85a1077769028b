# SPDX-License-Identifier: Apache-2.0
"""Weights of a trained model's size for an engine without a checkpoint.

vLLM's own (`load_format="dummy"`) are of the size of 1e-3: scores of the indexer are then about 1e-15, all in one bin of its
top-k, whose time is another on such scores. Drawn with a standard deviation of 0.02 and norms of 1, they cost no more.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch

STANDARD_DEVIATION: Final = 0.02


@torch.no_grad()
def draw(model: torch.nn.Module) -> None:
    """Give every parameter and floating-point buffer of a model's state its numbers, on its device, by its name."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.dim() < 2:  # norms
            tensor.fill_(1.0)
        else:
            generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
            tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def install() -> None:
    """Let engines of this process with `load_format="dummy"` draw such weights. Before the engine is made."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        draw(model)

    DummyModelLoader.load_weights = load_weights
