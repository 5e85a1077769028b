# SPDX-License-Identifier: Apache-2.0
"""What one rank of decode context parallelism has of a step for the tests of a layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from attention_steps import BLOCK, BLOCKS, MODEL_LEN, Step
from torch import Tensor

from mla_portable.contracts import Batch, ContextShare


def shared(step: Step, share: ContextShare) -> tuple[Batch, Tensor]:
    """The batch and the cache of a rank: own tokens in blocks of their own; every other byte is 0xFF, NaN in every format."""
    whole, table = step.batch, step.batch.block_table
    cache = torch.full_like(step.kv_cache.view(torch.uint8), 0xFF).view(step.kv_cache.dtype)
    own_table = torch.full((table.shape[0], -(-MODEL_LEN // share.size // BLOCK) + 1), -1, dtype=torch.int32)
    free = iter(torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(share.rank)).tolist())
    for request, length in enumerate(whole.seq_lens.tolist()):
        position = torch.arange(length)
        own = share.own(position)
        position, own = position[own >= 0], own[own >= 0]
        for column in range(-(-len(own) // BLOCK)):
            own_table[request, column] = next(free)
        rows = step.kv_cache[table[request, position // BLOCK].long(), position % BLOCK]
        cache[own_table[request, own // BLOCK].long(), own % BLOCK] = rows
    return replace(whole, block_table=own_table), cache
