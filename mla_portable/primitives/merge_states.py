# SPDX-License-Identifier: Apache-2.0
"""merge_states: merge P partial attention results over disjoint key sets (split-KV, context parallelism)."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import refuse
from mla_portable.dispatch import find, opaque
from mla_portable.kit.rules import check_dense, check_tensor
from mla_portable.primitives._reference import isolated

__all__ = ["MERGE_STATES", "MergeStates", "merge_states"]

_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
_CHUNK_BYTES: Final = 256 << 20


class MergeStates(Protocol):
    """Merge P partial attention results over disjoint key sets (split-KV, context parallelism).

    outs [P, ..., D] bf16/fp16/float32, lses [P, ...] float32 natural. out = sum_p exp(lse_p - lse) * out_p with
    lse = logsumexp_p(lse_p); a part with an infinite lse is empty: it contributes nothing, whatever its `out` holds. That is
    -inf, and +inf as FlashMLA and FlashAttention return it. Where all parts are empty, out = 0 and lse = -inf. out has the
    dtype of outs.
    """

    def __call__(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]: ...


@opaque
def merge_states(outs: Tensor, lses: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Merge P partial attention results over disjoint sets of keys (split-KV, context parallelism).

    Args:
        outs: [P, ..., D] bf16, fp16 or float32. lses: [P, ...] float32, natural logarithm; -inf, or +inf as
            `mla_portable.flash_mla` returns it, = nothing in that part, whatever its `outs` hold.
        backend: see `mla_portable.primitives`.
    Returns: (out [..., D] in the dtype of outs, lse [...] float32); where all parts are empty, 0 and -inf.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Allocates its results.
    """
    where = "merge_states"
    check_dense(where, "outs", outs, "[P, ..., D]")
    if outs.dim() < 2:
        refuse(where, "outs", f"shape {list(outs.shape)}", "[P, ..., D]")
    shape = tuple(outs.shape)
    if outs.dtype not in _FLOATS:
        refuse(where, "outs", outs.dtype, "torch.bfloat16, torch.float16 or torch.float32")
    if shape[0] < 1 or shape[-1] < 1:
        refuse(where, "outs", f"shape {list(shape)}", "[P, ..., D] with P and D of at least 1")
    device = outs.device
    check_tensor(where, "outs", outs, outs.dtype, shape, device, "[P, ..., D]")
    check_tensor(where, "lses", lses, torch.float32, shape[:-1], device, "[P, ...]")
    return find(MERGE_STATES, backend, outs, ()).call(outs, lses)  # shapes do not affect the choice


@isolated
def reference(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of P partial results, in float32, part by part.

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
    A part with an infinite lse is left out, NaN or not.
    """
    lses = lses.masked_fill(lses == torch.inf, -torch.inf)
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


MERGE_STATES: Final = Primitive[MergeStates](
    "merge_states",
    module=__name__,
    results=("out", "lse"),
    reference=reference,
)
