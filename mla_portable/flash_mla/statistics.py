# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's statistics of a row: its lse, which is +inf where no key is valid, and its greatest score.

No kernel of this project returns the greatest score, so that it takes a pass of its own over the selected keys, about as long
as the attention itself. `MLA_PORTABLE_FLASH_MLA_MAX_LOGITS=off` leaves it out.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Final

import torch
from torch import Tensor

from mla_portable.accelerator import without_autocast
from mla_portable.registry.settings import check_variables, value_of

ENV_MAX_LOGITS: Final = "MLA_PORTABLE_FLASH_MLA_MAX_LOGITS"
LOG2_E: Final = math.log2(math.e)
_CHUNK_BYTES: Final = 256 << 20
"""Of the keys and scores that are held at a time."""


@cache
def wants_max_logits() -> bool:
    """Whether `ENV_MAX_LOGITS` leaves the pass in; read once a process. Raises: InvalidArgument for another value."""
    value = value_of(os.environ, ENV_MAX_LOGITS)
    check_variables({ENV_MAX_LOGITS: value})
    return value != "off"


def as_flashmla(lse: Tensor) -> Tensor:
    """`lse`, in which a row without a valid key becomes +inf; changed in place, by a single kernel. NaN stays."""
    return lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)


def max_logits(q: Tensor, rows: Tensor, indices: Tensor, softmax_scale: float, lengths: Tensor | None) -> Tensor:
    """The greatest score of each query token and head over its valid keys.

    Args:
        q: [T, H, D] bf16. rows: [W, D] bf16, any distance apart. indices: [T, K] int32, rows; any outside of [0, W) is absent.
        lengths: [T] int32, only that many leading indices of a token are read.
    Returns: [T, H] float32, softmax_scale * q.k; -inf where no key is valid. Products are exact, sums are float32.
    Graph-safe; allocates about 256 MiB beyond the result, whatever T.
    """
    (num_tokens, num_heads, width), topk = q.shape, indices.shape[1]
    found = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float32, device=q.device)
    if rows.shape[0] == 0:
        return found
    # keys as they are stored and, where a product needs it, as float32; indices and their masks; scores and a masked copy
    token_bytes = topk * (6 * width + 32 + 8 * num_heads)
    step = max(1, _CHUNK_BYTES // token_bytes)
    column = torch.arange(topk, dtype=torch.int64, device=q.device)
    with torch.no_grad(), without_autocast(q.device.type):
        for begin in range(0, num_tokens, step):
            some = slice(begin, begin + step)
            index = indices[some].long()  # [C, K]
            absent = (index < 0) | (index >= rows.shape[0])
            if lengths is not None:
                absent |= column >= lengths[some].unsqueeze(1)
            keys = rows.index_select(0, index.masked_fill(absent, 0).flatten()).view(*index.shape, width)  # [C, K, D]
            scores = _products(q[some], keys).masked_fill_(absent.unsqueeze(1), -math.inf)  # [C, H, K]
            torch.mul(scores.amax(dim=-1), softmax_scale, out=found[some])
    return found


def _products(q: Tensor, keys: Tensor) -> Tensor:
    """[C, H, K] float32 of q [C, H, D] and keys [C, K, D], both bf16."""
    if q.is_cuda and torch.version.cuda is not None:
        return torch.bmm(q, keys.mT, out_dtype=torch.float32)
    # exact whatever `torch.set_float32_matmul_precision` allows: TF32 holds a bfloat16
    return torch.bmm(q.float(), keys.float().mT)
