# SPDX-License-Identifier: Apache-2.0
"""The parts of a step's plan, each with its rows of the buffers that the layers share.

Creating tensor views costs host time comparable to a kernel launch, so they are created once per step and shared by all layers.
V and R are the widths of the cache layout's latent and rotary part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_portable.contracts import PrefillChunk, StepPlan

if TYPE_CHECKING:
    from mla_portable.attention.buffers import StepBuffers

JoinQuery = Callable[[Tensor, Tensor, Tensor], None]
"""Writes the halves of a query, ql_nope [T, H, V] and q_pe [T, H, R], side by side into the third argument, [T, H, V + R]."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The tokens of one call.

    Attributes:
        begin, end: the step's tokens. shape: how the call wants them, (B, S) for sparse_decode, (T,) for sparse_prefill.
        indices: [*shape, K] int32. lengths: [*shape] int32. kept: tensors of all tokens, each with its rows of this part.
        gathered: what is gathered beforehand, and into which rows [W, V + R]; None where the cache itself is read.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    indices: Tensor
    lengths: Tensor
    kept: tuple[tuple[Tensor, Tensor], ...]
    gathered: tuple[PrefillChunk, Tensor] | None = None

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor [T, ...] of the step's tokens, as far as they are this part's: [*shape, ...]."""
        for whole, rows in self.kept:
            if whole is tensor:
                return rows
        return _rows(tensor, self.begin, self.end, self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A plan's parts.

    Attributes:
        plan: as given. indices: [T, K], counts: [T], lse: [T, H], query: [T, H, V + R]: the buffers' rows of all tokens.
        decodes: sparse_decode serves what the plan says it does; else sparse_prefill serves that too.
        decode: the leading tokens, None where nothing decodes. prefills: what follows, in order.
        end: tokens that the parts serve.
    """

    plan: StepPlan
    decodes: bool
    indices: Tensor
    counts: Tensor
    lse: Tensor | None
    query: Tensor | None
    decode: Part | None
    prefills: tuple[Part, ...]
    end: int

    def join_query(self, pair: tuple[Tensor, Tensor], join: JoinQuery) -> Tensor:
        """(ql_nope [T, H, V], q_pe [T, H, R]) -> [T, H, V + R] at a stable address; the last pair is overwritten."""
        assert self.query is not None  # StepCheck refuses a pair where the buffers have no room for it
        join(*pair, self.query)
        return self.query


def join_halves(ql_nope: Tensor, q_pe: Tensor, out: Tensor) -> None:
    """Write ql_nope [T, H, V] and q_pe [T, H, R] side by side into out [T, H, V + R]."""
    torch.cat((ql_nope, q_pe), dim=-1, out=out)


def divide(plan: StepPlan, decodes: bool, buffers: StepBuffers) -> Step:
    """The step of a plan on buffers that are large enough for it."""
    tokens, workspace = plan.num_padded_tokens, buffers.workspace
    indices, counts = buffers.indices[:tokens], buffers.counts[:tokens]
    lse, query = (None if tensor is None else tensor[:tokens] for tensor in (buffers.lse, buffers.query))

    def part(begin: int, end: int, shape: tuple[int, ...], chunk: PrefillChunk | None = None) -> Part:
        own = [indices, counts, *(tensor for tensor in (lse, query) if tensor is not None)]
        of_indices, of_counts, *others = (_rows(tensor, begin, end, shape) for tensor in own)
        gathered = None if chunk is None or workspace is None else (chunk, workspace[: chunk.workspace_rows])
        return Part(begin, end, shape, of_indices, of_counts, tuple(zip(own[2:], others, strict=True)), gathered)

    begin = plan.num_decode_tokens if decodes else 0
    decode = part(0, begin, (plan.num_decodes, plan.decode_query_len)) if begin else None
    prefills: list[Part] = []
    for chunk in plan.prefill_chunks:
        if begin < chunk.tokens.start:
            prefills.append(part(begin, chunk.tokens.start, (chunk.tokens.start - begin,)))
        begin = chunk.tokens.stop
        prefills.append(part(chunk.tokens.start, begin, (chunk.num_tokens,), chunk))
    end = max(begin, plan.num_decode_tokens + plan.num_prefill_tokens)
    if begin < end:
        prefills.append(part(begin, end, (end - begin,)))
    return Step(plan, decodes, indices, counts, lse, query, decode, tuple(prefills), end)


def _rows(tensor: Tensor, begin: int, end: int, shape: tuple[int, ...]) -> Tensor:
    part = tensor if begin == 0 and end == tensor.shape[0] else tensor[begin:end]
    return part if len(shape) == 1 else part.view(*shape, *part.shape[1:])
