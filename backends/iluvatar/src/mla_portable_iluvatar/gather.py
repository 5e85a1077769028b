# SPDX-License-Identifier: Apache-2.0
"""gather_upconvert through `cp_gather_and_upconvert_fp8_kv_cache`, which changed its arguments once.

with_seq_lens   (src, dst, block_table, seq_lens, workspace_starts, batch_size): older vLLM
without         (src, dst, block_table, workspace_starts, batch_size, seq_starts=None): current vLLM, which takes a request
                to end where the next begins, and the last one where dst ends

No public op of the vendor does this, so the place is vLLM's own name, and the portable kernels, which decode e4m3 by
integer arithmetic, are preferred to it. Requests are gathered next to one another into memory of the adapter's own and
copied to their rows, so that every convention means the same, and rows of nobody stay as they were. Lengths are read back
from the device for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.layouts import FP8_DS_MLA, HEAD_SIZE, KV_LORA_RANK, SCALE_GROUP
from mla_portable_iluvatar.native import Trial

__all__ = ["GatherConvention", "bind_gather_upconvert", "gather_trial", "with_seq_lens", "without_seq_lens"]

TRIAL_TOKENS: Final = 1024
TRIAL_BLOCK: Final = 64

GatherConvention = Callable[[Callable[..., Any], Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(op, cache, dst [N, 576], block_table [P, B], seq_lens [P], starts [P]): fills dst, whose rows requests own without gaps."""


def with_seq_lens(op: Callable[..., Any], src: Tensor, dst: Tensor, table: Tensor, lens: Tensor, starts: Tensor) -> None:
    """By keyword, so that a changed order cannot misbind."""
    op(src=src, dst=dst, block_table=table, seq_lens=lens, workspace_starts=starts, batch_size=table.shape[0])


def without_seq_lens(op: Callable[..., Any], src: Tensor, dst: Tensor, table: Tensor, lens: Tensor, starts: Tensor) -> None:
    """Lengths follow from the starts and from dst."""
    op(src=src, dst=dst, block_table=table, workspace_starts=starts, batch_size=table.shape[0])


def bind_gather_upconvert(op: Callable[..., Any], convention: GatherConvention) -> Callable[..., Tensor]:
    """gather_upconvert through `op`; reads back and allocates, so no graph safety is claimed."""

    def gather_upconvert(
        kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor, *, out: Tensor
    ) -> Tensor:
        room = (out.shape[0] - workspace_starts.long()).clamp(min=0)  # rows past `out` are not written: nor gathered
        lengths = seq_lens.clamp(min=0).minimum(room).to(torch.int32)
        total = int(lengths.sum())
        num_blocks, block_size, _ = kv_cache.shape
        columns = block_table.shape[1]
        if total == 0 or out.shape[0] == 0:
            return out
        request = torch.repeat_interleave(lengths, output_size=total)  # [N]
        packed_starts = lengths.cumsum(0, dtype=torch.int32) - lengths
        position = torch.arange(total, device=out.device) - packed_starts[request]  # [N]
        rows = workspace_starts[request] + position
        column = position // block_size
        exists = column < columns
        if num_blocks and columns:
            # one that is not there is read as block 0 and zeroed below; a table too narrow for a length is widened
            widest = -(-int(lengths.max()) // block_size)
            wide = torch.nn.functional.pad(block_table, (0, max(0, widest - columns)), value=-1)
            present = (wide >= 0) & (wide < num_blocks)
            exists = present[request, column]
            gathered = torch.empty((total, HEAD_SIZE), dtype=torch.bfloat16, device=out.device)
            convention(
                op,
                kv_cache.contiguous(),
                gathered,
                torch.where(present, wide, 0).contiguous(),
                lengths.contiguous(),
                packed_starts.contiguous(),
            )
            gathered = torch.where(exists.unsqueeze(1), gathered, 0)
        else:
            gathered = torch.zeros((total, HEAD_SIZE), dtype=torch.bfloat16, device=out.device)
        written = rows >= 0  # lengths end where `out` does
        out[rows[written].long()] = gathered[written]
        return out

    return gather_upconvert


def gather_trial(op: Callable[..., Any], convention: GatherConvention, device: torch.device) -> Trial:
    """A problem on which a loop over tokens shows."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn((TRIAL_TOKENS, HEAD_SIZE), generator=generator)
    rows = FP8_DS_MLA.pack(tokens[:, :KV_LORA_RANK], tokens[:, KV_LORA_RANK:], scale_format="pow2")
    cache = rows.view(-1, TRIAL_BLOCK, FP8_DS_MLA.row_width).to(device)
    columns = cache.shape[0] // 2
    table = torch.arange(2 * columns, dtype=torch.int32).view(2, columns).to(device)
    lens = torch.full((2,), TRIAL_TOKENS // 2, dtype=torch.int32, device=device)
    starts = torch.tensor([0, TRIAL_TOKENS // 2], dtype=torch.int32, device=device)
    out = torch.empty((TRIAL_TOKENS, HEAD_SIZE), dtype=torch.bfloat16, device=device)
    bound = bind_gather_upconvert(op, convention)
    flat = cache.view(-1, FP8_DS_MLA.row_width)
    # by table: torch may have no e4m3 conversion on this device
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)

    def plain() -> Tensor:
        latent = values[flat[:, :KV_LORA_RANK].long()]
        scales = flat[:, KV_LORA_RANK : FP8_DS_MLA.rope_offset].contiguous().view(torch.float32)
        latent = latent.view(-1, scales.shape[1], SCALE_GROUP) * scales.unsqueeze(-1)
        rope = flat[:, FP8_DS_MLA.rope_offset :].contiguous().view(torch.bfloat16)
        return torch.cat([latent.view(-1, KV_LORA_RANK).bfloat16(), rope], dim=-1)

    return Trial(lambda: bound(cache, table, lens, starts, out=out), plain, device)
