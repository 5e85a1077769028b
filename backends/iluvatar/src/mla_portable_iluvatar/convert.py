# SPDX-License-Identifier: Apache-2.0
"""convert_indices through the vendor's ops.

What the ops make of absent positions, of positions past the table, of negative or enormous blocks is nowhere stated. So the
adapter hands them nothing of the kind: such positions become -1 and such blocks -1 before the call, and what comes back is
limited to slots that exist after it. A -1 that the op maps to any negative number is -1 again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_portable_iluvatar.resolve import Op
from mla_portable_iluvatar.rows import INT32_MAX

Workspace = tuple[Tensor, Tensor]
"""(request ids [T], starts [P]), int32."""
ConvertCall = Callable[[Op, Tensor, Tensor, Tensor, int, "Workspace | None"], Tensor]
"""(op, req_id [T], block_table [R, B], positions [T, K], block_size, workspace) -> [T, K]; all contiguous int32."""


def dsa_convert(op: Op, req_id: Tensor, table: Tensor, positions: Tensor, size: int, workspace: Workspace | None) -> Tensor:
    """(req_id_per_token, block_table, topk_indices, block_size), positional; knows no workspace."""
    return op(req_id, table, positions, size)


def map_prefill(op: Op, req_id: Tensor, table: Tensor, positions: Tensor, size: int, workspace: Workspace | None) -> Tensor:
    """The same with the prefill workspace as keywords; returns (indices, counts or None). Counts are made here."""
    more: dict[str, Any] = {}
    if workspace is not None:
        ids, starts = workspace
        more = {
            "has_prefill_workspace": True,
            "prefill_workspace_request_ids": ids,
            "prefill_workspace_starts": starts,
        }
    returned = op(req_id, table, positions, size, **more)
    return returned[0] if isinstance(returned, (tuple, list)) else returned


def bind_convert_indices(op: Op, *, call: ConvertCall) -> Callable[..., tuple[Tensor, Tensor]]:
    """convert_indices through `op`; allocates."""

    def convert_indices(
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
    ) -> tuple[Tensor, Tensor]:
        num_tokens, topk = topk_indices.shape
        if out is None:
            indices = torch.empty((num_tokens, topk), dtype=torch.int32, device=topk_indices.device)
            out = indices, torch.empty(num_tokens, dtype=torch.int32, device=topk_indices.device)
        if num_tokens == 0:
            return out
        num_reqs, columns = block_table.shape
        known = (req_id_per_token >= 0) & (req_id_per_token < num_reqs)  # [T]
        allowed = (topk_indices < columns * block_size) & known.unsqueeze(1)  # [T, K]
        to_workspace = None
        workspace: Workspace | None = None
        if prefill_request_ids is not None and prefill_workspace_starts is not None:
            num_prefills = prefill_workspace_starts.shape[0]
            to_workspace = (prefill_request_ids >= 0).unsqueeze(1)  # [T, 1]
            in_range = (prefill_request_ids >= 0) & (prefill_request_ids < num_prefills)
            allowed = torch.where(to_workspace, in_range.unsqueeze(1), allowed)
            if num_prefills:
                workspace = torch.where(in_range, prefill_request_ids, -1), prefill_workspace_starts.contiguous()
        allowed &= topk_indices >= 0
        if num_reqs == 0 or columns == 0:  # nothing to look up, and ops may not take an empty table
            block_table = topk_indices.new_full((1, 1), -1)
        slots = call(
            op,
            torch.where(known, req_id_per_token, 0).contiguous(),
            torch.where((block_table < 0) | (block_table > INT32_MAX // block_size), -1, block_table).contiguous(),
            torch.where(allowed, topk_indices, -1).contiguous(),
            block_size,
            workspace,
        )
        valid = allowed & (slots >= 0)
        if num_slots is not None:
            exists = slots < num_slots
            valid &= exists if to_workspace is None else exists | to_workspace
        slots = torch.where(valid, slots, -1)
        out[1].copy_(valid.sum(1))
        if compact:
            packed = slots.new_full((num_tokens, topk + 1), -1)
            packed.scatter_(1, torch.where(valid, valid.cumsum(1) - 1, topk), slots)
            slots = packed[:, :topk]
        out[0].copy_(slots)
        return out

    return convert_indices


def convert_trial(op: Op, device: torch.device, *, call: ConvertCall) -> None:
    """One call on a small problem."""
    positions = torch.arange(64, dtype=torch.int32, device=device).expand(4, -1)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    bind_convert_indices(op, call=call)(positions, torch.zeros(4, dtype=torch.int32, device=device), table, block_size=64)
