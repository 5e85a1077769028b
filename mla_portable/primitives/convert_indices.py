# SPDX-License-Identifier: Apache-2.0
"""convert_indices: positions in a request -> global slots (decode) or rows of the prefill workspace, and how many are valid."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.share import ContextShare, check_share
from mla_portable.contracts.values import INT32_MAX, check_count, check_flag, refuse, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.primitives._reference import isolated

__all__ = ["CONVERT_INDICES", "ConvertIndices", "convert_indices"]

_CHUNK_BYTES: Final = 256 << 20
_TEMPORARY_BYTES: Final = 64
"""Of int64 and bool temporaries per index."""

TENSORS: Final = TensorTable(
    "convert_indices",
    {
        "topk_indices": Axes("T K", torch.int32, not_empty="K"),
        "req_id_per_token": Axes("T", torch.int32),
        "block_table": Axes("R columns", torch.int32),
        "prefill_request_ids": Axes("T", torch.int32, optional=True),
        "prefill_workspace_starts": Axes("P", torch.int32, optional=True),
        "seq_lens": Axes("R", torch.int32, optional=True),
        "out[0]": Axes("T K", torch.int32, optional=True, written=True),
        "out[1]": Axes("T", torch.int32, optional=True, written=True),
    },
)


class ConvertIndices(Protocol):
    """Positions in a request -> global slots (decode) or rows of the prefill workspace, and how many are valid.

    topk_indices [T, K] int32; req_id_per_token [T] int32, rows of block_table [R, columns] int32. A token whose
    prefill_request_ids entry [T] int32 is >= 0 maps to prefill_workspace_starts[id] + position instead. With
    compact=True the valid entries come first, in their order. out = (indices [T, K], counts [T]), int32, written.

    seq_lens [R] int32: positions that are not below that of the token's request are absent, as all of a token without a
    request are, on the way to the workspace too. An implementation that does not declare `Support.seq_lens` is called without
    this argument.

    With dcp_size > 1 the block table and the workspace hold the own positions of dcp_rank (`ContextShare`): a position of
    another rank is absent, an own one is looked up by its place among them. An implementation that does not declare
    `Support.context_parallel` is called without these three arguments.
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
        seq_lens: Tensor | None = None,
        compact: bool = False,
        dcp_size: int = 1,
        dcp_rank: int = 0,
        interleave: int = 1,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]: ...


@opaque
def convert_indices(
    topk_indices: Tensor,
    req_id_per_token: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_slots: int | None = None,
    prefill_request_ids: Tensor | None = None,
    prefill_workspace_starts: Tensor | None = None,
    seq_lens: Tensor | None = None,
    compact: bool = False,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn positions within a request into global cache slots, or into rows of the prefill workspace.

    Args:
        topk_indices: [T, K] int32, positions; negative = absent. req_id_per_token: [T] int32, rows of `block_table`.
        block_table: [R, columns] int32, block of each run of `block_size` positions; negative = no block.
        block_size: tokens in a block. num_slots: blocks * block_size of the cache; slots past it become -1.
        prefill_request_ids: [T] int32; a token whose entry is 0 or more gets prefill_workspace_starts[entry] + position.
        prefill_workspace_starts: [P] int32, first workspace row of each prefill request; the two are given together.
        seq_lens: [R] int32, tokens of each request of `block_table` that the cache holds; positions from there on are absent.
            None leaves the limit to the table. Of a `ContextShare` the rank's own tokens, among which a position has its place.
        compact: valid entries come first, in their order, -1 after them.
        dcp_size, dcp_rank, interleave: the cache holds the share of one rank of a `ContextShare`. Position t is absent unless
            (t // interleave) % dcp_size is dcp_rank; t // (interleave * dcp_size) * interleave + t % interleave takes its
            place above. The union of the ranks' valid entries is that of one rank with the whole sequence.
        out: (indices [T, K], counts [T]) int32, written; they overlap no input.
        backend: see `mla_portable.primitives`.
    Returns: (indices, counts): indices [T, K] int32, -1 = absent; counts [T] int32, the valid entries of each row.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe with `out`.
    """
    facts = check(
        topk_indices,
        req_id_per_token,
        block_table,
        block_size,
        num_slots,
        prefill_request_ids,
        prefill_workspace_starts,
        seq_lens,
        compact,
        dcp_size,
        dcp_rank,
        interleave,
        out,
    )
    more: dict[str, Any] = {**ContextShare(dcp_size, dcp_rank, interleave).arguments}
    if seq_lens is not None:
        more["seq_lens"] = seq_lens
    return find(CONVERT_INDICES, backend, topk_indices, facts).call(
        topk_indices,
        req_id_per_token,
        block_table,
        block_size=block_size,
        num_slots=num_slots,
        prefill_request_ids=prefill_request_ids,
        prefill_workspace_starts=prefill_workspace_starts,
        compact=compact,
        out=out,
        **more,
    )


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide."""

    topk: int
    block_size: int
    prefill_workspace: bool
    compact: bool
    context_parallel: bool
    seq_lens: bool
    rows: int


def check(
    topk_indices: Tensor,
    req_id_per_token: Tensor,
    block_table: Tensor,
    block_size: int,
    num_slots: int | None,
    prefill_request_ids: Tensor | None,
    prefill_workspace_starts: Tensor | None,
    seq_lens: Tensor | None,
    compact: bool,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    out: tuple[Tensor, Tensor] | None,
) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    where = TENSORS.where
    check_count(where, "block_size", block_size, 1, INT32_MAX)
    check_flag(where, "compact", compact)
    check_share(where, dcp_size, dcp_rank, interleave)
    if num_slots is not None:
        check_count(where, "num_slots", num_slots, 0)
    if (prefill_request_ids is None) is not (prefill_workspace_starts is None):
        if prefill_workspace_starts is None:
            refuse(where, "prefill_workspace_starts", "None", "[P] int32, because prefill_request_ids is given")
        refuse(where, "prefill_request_ids", "None", "[T] int32, because prefill_workspace_starts is given")
    if out is None:
        results = None, None
    elif not (isinstance(out, tuple) and len(out) == 2):  # pyright: ignore[reportUnnecessaryComparison]
        refuse(where, "out", type(out).__name__, "a tuple (indices [T, K], counts [T])")
    else:
        results = out
        if out[0] is None or out[1] is None:  # pyright: ignore[reportUnnecessaryComparison]
            refuse(where, "out", "a tuple with None", "a tuple (indices [T, K], counts [T]), or None for new tensors")
    workspace = prefill_request_ids, prefill_workspace_starts
    sizes = TENSORS.check((topk_indices, req_id_per_token, block_table, *workspace, seq_lens, *results), {})
    return Facts(
        sizes["K"],
        block_size,
        prefill_request_ids is not None,
        compact,
        dcp_size > 1,
        seq_lens is not None,
        rounded_rows(sizes["T"]),
    )


@isolated
def reference(
    topk_indices: Tensor,
    req_id_per_token: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_slots: int | None = None,
    prefill_request_ids: Tensor | None = None,
    prefill_workspace_starts: Tensor | None = None,
    seq_lens: Tensor | None = None,
    compact: bool = False,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Global slots or workspace rows of each token's positions.

    Allocates temporaries of at most about 256 MiB. Not graph-safe.
    """
    num_tokens, topk = topk_indices.shape
    if out is None:
        out = (
            torch.empty((num_tokens, topk), dtype=torch.int32, device=topk_indices.device),
            torch.empty((num_tokens,), dtype=torch.int32, device=topk_indices.device),
        )
    indices, counts = out
    share = ContextShare(dcp_size, dcp_rank, interleave)
    step = max(1, _CHUNK_BYTES // (_TEMPORARY_BYTES * max(topk, 1)))
    for begin in range(0, num_tokens, step):
        chunk = slice(begin, begin + step)
        pos = share.own(topk_indices[chunk].long())
        if seq_lens is not None:
            pos = _cached(pos, req_id_per_token[chunk].long(), seq_lens)
        slot = _slots(pos, req_id_per_token[chunk].long(), block_table, block_size, num_slots)
        if prefill_request_ids is not None:
            request = prefill_request_ids[chunk].long()
            row = _workspace_rows(pos, request, prefill_workspace_starts)
            slot = torch.where((request >= 0).unsqueeze(1), row, slot)
        valid = slot >= 0
        if compact:
            order = torch.sort(valid.to(torch.uint8), dim=1, descending=True, stable=True).indices
            slot = slot.gather(1, order)
        indices[chunk] = slot.to(torch.int32)
        counts[chunk] = valid.sum(dim=1, dtype=torch.int32)
    return indices, counts


def _cached(pos: Tensor, req_id: Tensor, seq_lens: Tensor) -> Tensor:
    """pos [n, K] int64 in the requests req_id [n]; -1 from the length of the request on, and where there is none."""
    num_reqs = seq_lens.shape[0]
    if num_reqs == 0:
        return torch.full_like(pos, -1)
    length = seq_lens[req_id.clamp(0, num_reqs - 1)].masked_fill((req_id < 0) | (req_id >= num_reqs), 0)
    return pos.masked_fill(pos >= length.unsqueeze(1), -1)


def _slots(pos: Tensor, req_id: Tensor, block_table: Tensor, block_size: int, num_slots: int | None) -> Tensor:
    """Slots [n, K] int64 of pos [n, K] in the requests req_id [n]; -1 where there is none."""
    num_reqs, columns = block_table.shape
    if num_reqs == 0 or columns == 0:
        return torch.full_like(pos, -1)
    column = pos.div(block_size, rounding_mode="floor")
    valid = (pos >= 0) & (column < columns) & ((req_id >= 0) & (req_id < num_reqs)).unsqueeze(1)
    block = block_table[req_id.clamp(0, num_reqs - 1).unsqueeze(1), column.clamp(0, columns - 1)].long()
    slot = block * block_size + pos % block_size
    limit = INT32_MAX if num_slots is None else min(num_slots - 1, INT32_MAX)
    return slot.masked_fill_(~(valid & (block >= 0) & (slot <= limit)), -1)


def _workspace_rows(pos: Tensor, request: Tensor, starts: Tensor | None) -> Tensor:
    """Workspace rows [n, K] int64 of pos [n, K] in the prefill requests request [n]; no starts means no such request."""
    num_prefills = 0 if starts is None else starts.shape[0]
    if starts is None or num_prefills == 0:
        return torch.full_like(pos, -1)
    row = starts[request.clamp(0, num_prefills - 1)].long().unsqueeze(1) + pos
    known = ((request >= 0) & (request < num_prefills)).unsqueeze(1)
    return row.masked_fill_(~(known & (pos >= 0) & (row >= 0) & (row <= INT32_MAX)), -1)


CONVERT_INDICES: Final = Primitive[ConvertIndices](
    "convert_indices",
    module=__name__,
    facts=Facts._fields,
    results=("indices", "counts"),
    reference=reference,
)
