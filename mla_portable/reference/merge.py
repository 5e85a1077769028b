# SPDX-License-Identifier: Apache-2.0
"""merge_states in plain torch: partial attention results over disjoint keys -> the result over all of them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.reference.arithmetic import isolated

__all__ = ["merge_states"]

_CHUNK_BYTES: Final = 256 << 20


@isolated
def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of P partial results, in float32, part by part; `primitives.MergeStates`.

    Allocates about 256 MiB beyond the outputs, except where a single entry of the first axis after P takes more.
    """
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=lses.device)
    if out.dim() == 1:  # P vectors: give them an axis to walk along
        _merge(outs.unsqueeze(1), lses.unsqueeze(1), out.unsqueeze(0), lse.unsqueeze(0))
        return out, lse
    row_bytes = 3 * 4 * max(1, out[:1].numel())
    step = max(1, _CHUNK_BYTES // row_bytes)
    for begin in range(0, out.shape[0], step):
        chunk = slice(begin, begin + step)
        _merge(outs[:, chunk], lses[:, chunk], out[chunk], lse[chunk])
    return out, lse


def _merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write out = sum of w * outs / sum of w and lse = top + log(sum of w), where w = exp(lses - top), top = max of lses.

    The divisor is the sum itself: exp(lses - lse) would carry the rounding of lse, a factor of e^0.002 at lse = 3e4.
    A part with lse = -inf is left out, NaN or not.
    """
    top = lses.amax(dim=0) if lses.shape[0] else torch.full_like(lse, -torch.inf)
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.zeros(lse.shape, dtype=torch.float32, device=lse.device)
    values = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for part_out, part_lse in zip(outs, lses, strict=True):
        absent = part_lse == -torch.inf
        weight = (part_lse - top).exp_()  # 0 where absent
        total += weight
        values += part_out.float().masked_fill(absent.unsqueeze(-1), 0.0).mul_(weight.unsqueeze(-1))
    lse.copy_(top + total.log())  # log(0) is -inf
    out.copy_(values.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1)))
