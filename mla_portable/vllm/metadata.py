# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""What travels from the builder to the layers: the plan of the step, and the fields that vLLM itself reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata

from mla_portable.attention import SparseMLAAttention
from mla_portable.contracts import Batch, PlanMismatch, StepPlan
from mla_portable.planner import Planner

__all__ = ["MLAPortableMetadata"]


@dataclass
class MLAPortableMetadata(AttentionMetadata):
    """One step, shared by the layers of a builder.

    vLLM sends tokens that are not decodes to dense attention where a backend offers that. This one does not, so to vLLM
    every token is a decode, and all go through `forward_mqa`; what decodes and what prefills is said by `plan`.

    Attributes:
        num_actual_tokens: query tokens, padding for a CUDA graph included. The fields up to `prefill` are read by vLLM.
        attention, planner, batch, plan: who serves the step, and how.
        shadow: what a stock implementation needs for the same step, None unless it runs beside ours.
    """

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_decodes: int
    num_decode_tokens: int
    block_size: int
    topk_tokens: int
    attention: SparseMLAAttention
    planner: Planner
    batch: Batch
    plan: StepPlan
    shadow: Any | None = None
    num_prefills: int = 0
    prefill_max_seq_len: int = 0
    prefill: None = None
    decode: None = None

    def plan_for(self, num_tokens: int) -> StepPlan:
        """The plan for the step's first `num_tokens` tokens: the step's own, or one for its leading requests alone.

        Planning again overwrites what the step's own plan points at, so the last plan that was asked for is the one that
        holds. Not under graph capture, where a step always has all of its tokens.
        Raises: PlanMismatch when no whole number of requests has that many tokens.
        """
        if num_tokens == self.plan.num_padded_tokens:
            return self.plan
        if num_tokens == self.num_actual_tokens:
            self.plan = self.planner.plan(self.batch)
            return self.plan
        batch = self.batch
        num_reqs = int(np.searchsorted(batch.query_start_loc, num_tokens))
        if num_reqs >= len(batch.query_start_loc) or batch.query_start_loc[num_reqs] != num_tokens:
            raise PlanMismatch(
                f"forward_mqa: {num_tokens} tokens, the step has {self.num_actual_tokens} in requests that start at "
                f"{batch.query_start_loc.tolist()}. Give all tokens of a step, or those of its leading requests."
            )
        self.plan = self.planner.plan(
            Batch(
                query_start_loc=batch.query_start_loc[: num_reqs + 1],
                seq_lens=batch.seq_lens[:num_reqs],
                block_table=batch.block_table[:num_reqs],
                seq_lens_device=None if batch.seq_lens_device is None else batch.seq_lens_device[:num_reqs],
            )
        )
        return self.plan
