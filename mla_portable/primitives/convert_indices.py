# SPDX-License-Identifier: Apache-2.0
"""convert_indices: positions in a request -> global slots (decode) or rows of the prefill workspace, and how many are valid."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from mla_portable.contracts.primitive import Primitive

__all__ = ["CONVERT_INDICES", "ConvertIndices"]


class ConvertIndices(Protocol):
    """Positions in a request -> global slots (decode) or rows of the prefill workspace, and how many are valid.

    topk_indices [T, K] int32; req_id_per_token [T] int32, rows of block_table [R, columns] int32. A token whose
    prefill_request_ids entry [T] int32 is >= 0 maps to prefill_workspace_starts[id] + position instead. With
    compact=True the valid entries come first, in their order. out = (indices [T, K], counts [T]), int32, written.
    """

    def __call__(
        self,
        topk_indices: Tensor,
        req_id_per_token: Tensor,
        block_table: Tensor,
        *,
        block_size: int,
        num_slots: int | None = None,
        prefill_request_ids: Tensor | None = None,
        prefill_workspace_starts: Tensor | None = None,
        compact: bool = False,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]: ...


CONVERT_INDICES: Final = Primitive[ConvertIndices](
    "convert_indices",
    module=__name__,
    facts=("topk", "block_size", "prefill_workspace", "compact"),
    results=("indices", "counts"),
)
