# SPDX-License-Identifier: Apache-2.0
"""PlannerConfig: what holds for all steps, refused where it is made if no batch could be planned with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

import torch

from mla_portable.contracts import DEFAULT_SCRATCH_BYTES, ROUTES, InvalidArgument, ProgramShape, ScheduleKind
from mla_portable.contracts.values import INT32_MAX, check_fields
from mla_portable.layouts import KV_LORA_RANK
from mla_portable.planner.flashmla import accumulator_bytes, num_sm_parts

__all__ = ["DEFAULT_WORKSPACE_SEQUENCES", "MIN_HEADS_FOR_SEPARATE", "PlannerConfig"]

DEFAULT_WORKSPACE_SEQUENCES: Final = 5
"""Default workspace, in sequences of max_model_len tokens. 5 x 163 840 tokens of 1152 bytes are 0.9 GiB."""
MIN_HEADS_FOR_SEPARATE: Final = 32
"""From this many query heads on, prefill is worth a kernel of its own beside FlashMLA's decode."""
_WORKSPACE_ROUTES: Final = ("split", "upconvert")
_LIMITS: Final[dict[str, tuple[int, int]]] = dict.fromkeys(
    ("num_heads", "topk", "max_num_reqs", "max_num_tokens", "max_model_len", "decode_threshold", "block_size", "padded_heads"),
    (1, INT32_MAX),
)


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Limits and choices that hold for every step of one engine.

    Attributes:
        device: where plans live. route: one of ROUTES.
        num_heads: H, query heads of this rank. topk: K.
        max_num_reqs, max_num_tokens: of a batch, graph padding included. They size the persistent buffers.
        max_model_len: tokens of the longest sequence, context and query.
        prefill_workspace_tokens: rows of the bf16 workspace, None for 5 * max_model_len. Routes without a workspace
            ("fused", "direct") have none, whatever this says.
        decode_threshold: query length up to which a request counts as decode; above 1 for speculative decoding, where all
            decodes of a batch share one length.
        few_tokens: leading requests of one greater length are decodes too where they have at most this many tokens together;
            0 for none. Routes "direct" and "split".
        schedule_kind: what the sparse_decode implementation wants, `Implementation.schedule_kind`.
        program: what a thread block of that implementation does, `Implementation.program`; for "split_kv".
        num_sms: multiprocessors, 0 for a CPU. arch: `DeviceFacts.arch`; "flashmla_tiles" needs both.
        padded_heads: head count that the decode kernel runs with, None for num_heads.
        batch_invariant: the splits of a decode row have one length in every batch, so that the order of a row's sums does not
            depend on the batch; `few_tokens` counts as 0. The length depends on topk, num_heads, max_num_reqs,
            decode_threshold and max_scratch_bytes (route "fused": max_num_tokens). Not for "flashmla_tiles".
        max_scratch_bytes: bound on split-KV scratch, or on the accumulators of one FlashMLA call.
        block_size: tokens in a block of the cache; a sequence that its row of the block table cannot hold is then refused.
            None where unknown: keys past the end of a row would be left out silently.
        value_width: of the cache's layout, and so of partial results.
    Raises: InvalidArgument for each value that is out of range, with the limit and what to change.
    """

    device: torch.device | str
    route: str
    num_heads: int
    topk: int
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    prefill_workspace_tokens: int | None = None
    decode_threshold: int = 1
    few_tokens: int = 0
    schedule_kind: ScheduleKind = "none"
    program: ProgramShape = ProgramShape()  # noqa: RUF009  frozen
    num_sms: int = 0
    arch: str = ""
    padded_heads: int | None = None
    batch_invariant: bool = False
    max_scratch_bytes: int = DEFAULT_SCRATCH_BYTES
    block_size: int | None = None
    value_width: int = KV_LORA_RANK

    def __post_init__(self) -> None:
        where = "PlannerConfig"
        check_fields(self, _LIMITS)
        if self.route not in ROUTES:
            raise InvalidArgument(where, "route", got=repr(self.route), expected=f"one of {', '.join(ROUTES)}")
        kinds = get_args(ScheduleKind)
        if self.schedule_kind not in kinds:
            raise InvalidArgument(where, "schedule_kind", got=repr(self.schedule_kind), expected=f"one of {', '.join(kinds)}")
        if self.kernel_heads < self.num_heads:
            expected = f"at least num_heads ({self.num_heads}), or None where the kernel pads nothing"
            raise InvalidArgument(where, "padded_heads", got=self.padded_heads, expected=expected)
        self._check_workspace()
        if self.schedule_kind == "flashmla_tiles":
            self._check_tiles()
            if self.batch_invariant:
                expected = "False for schedule_kind flashmla_tiles, which cuts rows where a part of the batch ends"
                remedy = "Take an implementation of sparse_decode that offers it."
                raise InvalidArgument(where, "batch_invariant", got=True, expected=expected, remedy=remedy)

    @property
    def has_workspace(self) -> bool:
        """The route gathers prefill sequences into a bf16 workspace."""
        return self.route in _WORKSPACE_ROUTES

    @property
    def workspace_tokens(self) -> int:
        """Rows of the workspace, 0 for a route without one."""
        if not self.has_workspace:
            return 0
        if self.prefill_workspace_tokens is None:
            return DEFAULT_WORKSPACE_SEQUENCES * self.max_model_len
        return self.prefill_workspace_tokens

    @property
    def kernel_heads(self) -> int:
        """Heads that the decode kernel runs with."""
        return self.num_heads if self.padded_heads is None else self.padded_heads

    def _check_workspace(self) -> None:
        if self.has_workspace and not self.max_model_len <= self.workspace_tokens <= INT32_MAX:
            raise InvalidArgument(
                "PlannerConfig",
                "prefill_workspace_tokens",
                got=self.workspace_tokens,
                expected=f"max_model_len ({self.max_model_len}) to {INT32_MAX} on route {self.route}",
                remedy="The longest sequence must fit the workspace whole: enlarge it, lower max_model_len, or take a route "
                "without one (fused, direct).",
            )

    def _check_tiles(self) -> None:
        where, heads = "PlannerConfig", self.kernel_heads
        if self.num_sms < 1:
            raise InvalidArgument(where, "num_sms", got=self.num_sms, expected="1 or more for schedule_kind flashmla_tiles")
        if heads % 64:
            raise InvalidArgument(
                where,
                "padded_heads",
                got=heads,
                expected="a multiple of 64 for schedule_kind flashmla_tiles",
                remedy="Pass the head count that the kernel pads to.",
            )
        for query_len in range(1, max(self.decode_threshold, self.few_tokens) + 1):
            parts = num_sm_parts(self.arch, num_sms=self.num_sms, query_len=query_len, num_heads=heads)
            needed = (1 + parts) * accumulator_bytes(query_len, heads)
            if needed > self.max_scratch_bytes:
                raise InvalidArgument(
                    where,
                    "max_scratch_bytes",
                    got=self.max_scratch_bytes,
                    expected=f"at least {needed}, the accumulators of one row of {query_len} tokens and {parts} parts",
                    remedy="Raise it, or lower decode_threshold and few_tokens.",
                )
