# SPDX-License-Identifier: Apache-2.0
"""gather_upconvert: copy each request's cached tokens into consecutive bf16 rows of a workspace, undoing the FP8 scales."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from mla_portable.contracts.primitive import Primitive

__all__ = ["GATHER_UPCONVERT", "GatherUpconvert"]


class GatherUpconvert(Protocol):
    """Copy each request's cached tokens into consecutive bf16 rows of a workspace, undoing the FP8 scales.

    kv_cache as in CacheWrite; block_table [P, columns] int32; seq_lens [P] int32; workspace_starts [P] int32, first row
    of each request in `out` [W, 576] bf16. latent = bf16(e4m3 * float32 scale), rope bit for bit. Rows that no request
    owns stay as they were; a token whose table entry is invalid becomes a row of zeros; rows below 0 or past W are not written.
    """

    def __call__(
        self, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor, *, out: Tensor
    ) -> Tensor: ...


GATHER_UPCONVERT: Final = Primitive[GatherUpconvert](
    "gather_upconvert",
    module=__name__,
    facts=("kv_layout", "block_size", "cache_alignment", "uneven_blocks"),
    results=("out",),
    has_layout=True,
)
