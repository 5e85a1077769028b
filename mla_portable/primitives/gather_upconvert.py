# SPDX-License-Identifier: Apache-2.0
"""gather_upconvert: copy each request's cached tokens into consecutive rows of a BF16 workspace, dequantizing FP8."""

from __future__ import annotations

from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.dispatch import find, opaque
from mla_portable.kit.rules import CacheFacts, check_cache, check_dense, check_flat_rows
from mla_portable.kit.tensor_scales import check_kv_scale, tensor_scales
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import KV, Cache
from mla_portable.primitives._reference import CacheRows, isolated

__all__ = ["GATHER_UPCONVERT", "GatherUpconvert", "gather_upconvert"]

_CHUNK_TOKENS: Final = 16384
"""Tokens handled at a time: some 100 MB of float32 rows with their temporaries, whatever the batch."""

TENSORS: Final = TensorTable(
    "gather_upconvert",
    {
        "kv_cache": Checked(),
        "block_table": Axes("P columns", torch.int32),
        "seq_lens": Axes("P", torch.int32),
        "workspace_starts": Axes("P", torch.int32),
        "out": Checked(written=True),
    },
)


class GatherUpconvert(Protocol):
    """Copy each request's cached tokens into consecutive rows of a BF16 workspace, dequantizing FP8.

    kv_cache as in CacheWrite; block_table [P, columns] int32; seq_lens [P] int32; workspace_starts [P] int32, first row
    of each request in `out` [W, 576] bf16. latent = bf16(e4m3 * float32 scale), rope bit for bit. Rows that no request
    owns stay as they were; a token whose table entry is invalid becomes a row of zeros; rows below 0 or past W are not written.
    """

    def __call__(
        self, kv_cache: Any, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor, *, out: Tensor
    ) -> Tensor: ...


@opaque
def gather_upconvert(
    kv_cache: Cache,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    *,
    out: Tensor,
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Copy the cached tokens of each prefill request into consecutive BF16 rows, dequantizing FP8.

    Args:
        kv_cache: [blocks, block_size, 656] uint8 or [blocks, block_size, 576] bf16.
        block_table: [P, columns] int32. seq_lens: [P] int32, tokens to copy. workspace_starts: [P] int32, first row in `out`.
        out: [W, 576] bf16, written. Rows that no request owns stay as they were, nothing is written past W.
        kv_scale: as of `sparse_decode`. kv_layout, backend: see `mla_portable.primitives`.
    Returns: `out`: latent = bf16(e4m3 * float32 scale), rope bit for bit, zeros for a token without a block.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe.
    """
    facts = check(kv_cache, block_table, seq_lens, workspace_starts, out, kv_scale, kv_layout)
    return find(GATHER_UPCONVERT, backend, block_table, facts).call(
        kv_cache, block_table, seq_lens, workspace_starts, out=out, **tensor_scales(kv_scale)
    )


def check(
    kv_cache: Cache,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    out: Tensor,
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> CacheFacts:
    """Raise InvalidArgument, or return the facts.

    How many rows `out` needs is known on the device only; rows past it are not written.
    """
    where = TENSORS.where
    first = kv_cache[0] if isinstance(kv_cache, tuple) and kv_cache else kv_cache
    check_dense(where, "kv_cache", first, "[blocks, block_size, row width]")
    device = cast(Tensor, first).device
    facts = check_cache(where, "kv_cache", kv_cache, device, kv_layout=kv_layout)
    check_kv_scale(where, facts.layout, kv_scale, device)
    check_flat_rows(where, "out", out, facts.layout.workspace, device)
    TENSORS.check((kv_cache, block_table, seq_lens, workspace_starts, out), {})
    return facts


@isolated
def reference(
    kv_cache: Cache,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    *,
    out: Tensor,
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> Tensor:
    """Copy each request's cached tokens into consecutive bf16 rows of `out`.

    Negative lengths count as 0. Synchronises the host on a GPU, once. Not graph-safe.
    """
    rows = CacheRows(kv_cache, kv_layout=kv_layout)
    num_blocks, block_size = rows.layout.parts(kv_cache)[0].shape[:2]
    columns = block_table.shape[1]
    starts = workspace_starts.long()
    # of a request only tokens whose rows lie in the workspace are counted, so the work is bounded by W for each request
    first = (-starts).clamp_(min=0)  # [P]
    tokens = (torch.minimum(seq_lens.long(), out.shape[0] - starts) - first).clamp_(min=0)  # [P]
    ends = tokens.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    for begin in range(0, total, _CHUNK_TOKENS):
        # [n] tokens counted over all requests
        token = torch.arange(begin, min(begin + _CHUNK_TOKENS, total), dtype=torch.int64, device=out.device)
        request = torch.searchsorted(ends, token, right=True)
        position = first[request] + token - (ends - tokens)[request]
        row = starts[request] + position
        column = position // block_size
        valid = column < columns
        if columns:
            block = block_table[request, column.clamp(max=columns - 1)].long()
            valid &= (block >= 0) & (block < num_blocks)
        else:
            block = torch.zeros_like(column)
        if rows.num_slots:
            slot = torch.where(valid, block * block_size + position % block_size, 0)
            if kv_scale is None:
                values = rows.layout.unpack(rows.raw(slot))
            else:
                values = (rows.layout.unpack(rows.raw(slot), torch.float32) * kv_scale).to(torch.bfloat16)
        else:
            values = torch.zeros((row.numel(), out.shape[1]), dtype=torch.bfloat16, device=out.device)
        out[row] = values.masked_fill(~valid.unsqueeze(1), 0)
    return out


GATHER_UPCONVERT: Final = Primitive[GatherUpconvert](
    "gather_upconvert",
    module=__name__,
    facts=CacheFacts._fields,
    results=("out",),
    cache=KV,
    stated=("scale_format",),
    reference=reference,
)
