# SPDX-License-Identifier: Apache-2.0
"""merge_states in plain torch: partial attention results over disjoint keys -> the result over all of them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["merge_states"]

_CHUNK_BYTES: Final = 256 << 20


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of P partial results, in float32, part by part; `contracts.primitives.MergeStates`.

    Allocates about 256 MiB beyond the outputs, except where a single entry of the first axis after P takes more.
    """
    num_parts = outs.shape[0]
    out = torch.zeros(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    if num_parts == 0:
        return out, torch.full(lses.shape[1:], -torch.inf, dtype=torch.float32, device=lses.device)
    lse = lses.float().logsumexp(dim=0)
    if out.dim() == 1:  # P vectors: give them an axis to walk along
        out.copy_(_merge(outs, lses.float(), lse))
        return out, lse
    row_bytes = 3 * 4 * max(1, out[:1].numel())
    step = max(1, _CHUNK_BYTES // row_bytes)
    for begin in range(0, out.shape[0], step):
        chunk = slice(begin, begin + step)
        out[chunk] = _merge(outs[:, chunk], lses[:, chunk].float(), lse[chunk]).to(out.dtype)
    return out, lse


def _merge(outs: Tensor, lses: Tensor, lse: Tensor) -> Tensor:
    """Float32 sum over parts of exp(lses - lse) * outs; a part with lse = -inf is left out, NaN or not."""
    total = torch.zeros(outs.shape[1:], dtype=torch.float32, device=outs.device)
    for part_out, part_lse in zip(outs, lses, strict=True):
        absent = part_lse == -torch.inf
        weight = (part_lse - lse).exp_().masked_fill_(absent, 0.0).unsqueeze(-1)
        total += part_out.float().masked_fill(absent.unsqueeze(-1), 0.0).mul_(weight)
    return total
