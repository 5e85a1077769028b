# SPDX-License-Identifier: Apache-2.0
"""merge_states: merge P partial attention results over disjoint key sets (split-KV, context parallelism)."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from mla_portable.contracts.primitive import Primitive

__all__ = ["MERGE_STATES", "MergeStates"]


class MergeStates(Protocol):
    """Merge P partial attention results over disjoint key sets (split-KV, context parallelism).

    outs [P, ..., D] bf16/fp16/float32, lses [P, ...] float32 natural. out = sum_p exp(lse_p - lse) * out_p with
    lse = logsumexp_p(lse_p); a part with lse = -inf contributes nothing, whatever its `out` holds; where all are -inf,
    out = 0 and lse = -inf. out has the dtype of outs.
    """

    def __call__(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]: ...


MERGE_STATES: Final = Primitive[MergeStates]("merge_states", module=__name__, results=("out", "lse"))
