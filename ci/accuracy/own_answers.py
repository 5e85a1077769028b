# SPDX-License-Identifier: Apache-2.0
"""What a trained network answers in plain torch, and how its text depends on attention's scale: what engines are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from network import Mode, Network
from torch import Tensor
from torch.nn import functional

_STEP: Final = 0.02
"""Attention's scores are made so much larger and smaller for the slope."""


@torch.inference_mode()
def answers(network: Network, prompts: Sequence[dict[str, Any]], mode: Mode) -> tuple[int, int, float]:
    """(right, asked, perplexity) over prompts that ask something, in one pass over each with its answer behind it.

    An answer is right if each of its tokens is the likeliest after those before it: greedy text begins with it.
    """
    right, losses = 0, list[Tensor]()
    device = next(network.parameters()).device
    for prompt in prompts:
        ids = torch.tensor([[*prompt["tokens"], *prompt["answer"]]], device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = network(ids[:, :-1], mode)[0].float()[0]
        count = len(prompt["answer"])
        right += int((logits[-count:].argmax(-1) == ids[0, -count:]).all())
        losses.append(functional.cross_entropy(logits[:-count], ids[0, 1:-count]))
    return right, len(prompts), float(torch.stack(losses).mean().exp())


@torch.inference_mode()
def scale_slopes(network: Network, tokens: Sequence[int]) -> list[float]:
    """Of each token behind the first: the derivative of its log-probability by the logarithm of attention's scale.

    In the dtype of the weights, over all keys: for prompts no longer than the top-k.
    """
    ids = torch.tensor([list(tokens)], device=next(network.parameters()).device)

    def logprobs(stretch: float) -> Tensor:
        logits = network(ids[:, :-1], "dense", stretch=stretch)[0][0]
        return logits.float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)

    slopes = (logprobs(1 + _STEP) - logprobs(1 - _STEP)) / (2 * _STEP)
    return [round(float(slope), 5) for slope in slopes.cpu()]
