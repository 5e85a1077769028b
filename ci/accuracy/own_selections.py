# SPDX-License-Identifier: Apache-2.0
"""What a trained network's indexers choose in a prompt, as a file that benchmarks read (docs/dev/bench.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from network import Chosen, Index, Network

from mla_portable.judge.problems.selections import IndexSample, Selections, write_selections
from mla_portable.layouts import INDEX_HEAD_SIZE

SELECTIONS: Final = "selections.npz"
_RUN: Final = 256
"""Neighbouring tokens of a run; there are two, from the middle of the prompt and from its end."""
_SCORED: Final = 32
"""Tokens of the end whose queries are kept, of the first and of the last indexer."""


@torch.inference_mode()
def write_own_selections(path: Path, network: Network, tokens: Sequence[int], *, made: str) -> Selections:
    """Read a prompt of more tokens than the top-k, and keep what its tokens choose.

    The indexer's inputs are kept where its heads are those of the models that are served, of 128.
    """
    found: dict[int, Chosen] = {}

    def keep(number: int) -> Any:
        return lambda module, inputs, output: found.update({number: output[2]})

    layers = [(n, layer.self_attn) for n, layer in enumerate(network.model["layers"]) if network.form.indexed[n]]
    hooks = [attention.register_forward_hook(keep(number)) for number, attention in layers]
    device = next(network.parameters()).device
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            network(torch.tensor([list(tokens)], device=device), "chosen")
    finally:
        for hook in hooks:
            hook.remove()
    length, topk = len(tokens), network.form.topk
    run = min(_RUN, (length - topk) // 4)
    rows = torch.tensor([*range((length - run) // 2, (length + run) // 2), *range(length - run, length)])
    numbers = [number for number, _ in layers]
    positions = torch.stack([found[number][1][0][0].cpu()[rows] for number in numbers])
    sample = None
    if network.form.index_dim == INDEX_HEAD_SIZE:
        sample = _inputs({number: found[number][0] for number in (numbers[0], numbers[-1])}, min(_SCORED, run))
    name = f"trained {network.form.name}"
    return write_selections(path, positions, rows + 1, model=name, made=made, layers=torch.tensor(numbers), index=sample)


def _inputs(indexes: dict[int, Index], tokens: int) -> IndexSample:
    """Of the last `tokens` tokens, by the layers' numbers."""
    queries, keys, weights = (
        torch.stack([index[part][0].cpu() for index in indexes.values()]).to(dtype)
        for part, dtype in ((0, torch.bfloat16), (1, torch.bfloat16), (2, torch.float32))
    )
    length = keys.shape[1]
    seen = np.arange(length - tokens, length, dtype=np.int32) + 1
    return IndexSample(np.array(list(indexes), np.int32), keys, queries[:, -tokens:], weights[:, -tokens:], seen)
