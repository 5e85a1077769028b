# SPDX-License-Identifier: Apache-2.0
"""PlannerConfig: what holds for all steps, refused where it is made if no batch could be planned with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from mla_portable.contracts import (
    DEFAULT_SCRATCH_BYTES,
    ROUTES,
    WORKSPACE_ROUTES,
    WORKSPACE_SEQUENCES,
    InvalidArgument,
    Request,
    ScheduleKind,
)
from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.contracts.values import INT32_MAX, check_fields, describe
from mla_portable.times.prefill import PrefillTimes

_LIMITS: Final[dict[str, tuple[int, int]]] = dict.fromkeys(
    ("num_heads", "topk", "max_num_reqs", "max_num_tokens", "max_model_len", "decode_threshold", "block_size"), (1, INT32_MAX)
)


def least_workspace(max_model_len: int, prefill_times: PrefillTimes | None) -> int:
    """Rows that a bf16 workspace has at least: any one sequence fits, unless one that does not may be read in place."""
    return max_model_len if prefill_times is None else 1


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Limits and choices that hold for every step of one engine.

    Attributes:
        device: where plans live. route: one of ROUTES.
        num_heads: H, query heads of this rank. topk: K. extra_topk: K of a second cache that decode calls attend to, 0 where
            there is none.
        max_num_reqs, max_num_tokens: of a batch, graph padding included. They size the persistent buffers.
        max_model_len: tokens of the longest sequence, context and query.
        prefill_workspace_tokens: rows of the bf16 workspace, None for 5 * max_model_len. Routes without a workspace
            ("fused", "direct") have none, whatever this says.
        prefill_times: of route "split": a chunk that is served faster on the cache itself, or does not fit the workspace, is
            left to the layer's second sparse_prefill. None where every chunk is gathered; every sequence must then fit.
        decode_threshold: query length up to which a request counts as decode; above 1 for speculative decoding, where all
            decodes of a batch share one length.
        few_tokens: leading requests of one greater length are decodes too where they have at most this many tokens together;
            0 for none. Routes "direct" and "split".
        schedule_kind: what the sparse_decode implementation wants, `Implementation.schedule_kind`; None for no schedules.
        decode_request: what that implementation is bound for; its schedules may depend on it. None where unknown.
        num_sms: multiprocessors, 0 for a CPU. arch: `DeviceFacts.arch`. A schedule kind may need both.
        batch_invariant: the splits of a decode row have one length in every batch, so that the order of a row's sums does not
            depend on the batch; `few_tokens` counts as 0. The length depends on topk, num_heads, max_num_reqs,
            decode_threshold and max_scratch_bytes (route "fused": max_num_tokens). A planner of a schedule kind that cannot
            promise it refuses it.
        max_scratch_bytes: bound on the scratch of a decode call.
        block_size: tokens in a block of the cache; a sequence that its row of the block table cannot hold is then refused.
            None where unknown: keys past the end of a row would be left out silently.
        share: what the cache holds of each sequence; the workspace then holds the same of each. Lengths are of whole sequences.
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
    prefill_times: PrefillTimes | None = None
    decode_threshold: int = 1
    few_tokens: int = 0
    schedule_kind: ScheduleKind | None = None
    decode_request: Request | None = None
    num_sms: int = 0
    arch: str = ""
    batch_invariant: bool = False
    max_scratch_bytes: int = DEFAULT_SCRATCH_BYTES
    block_size: int | None = None
    share: ContextShare = WHOLE
    extra_topk: int = 0

    def __post_init__(self) -> None:
        where = "PlannerConfig"
        check_fields(self, _LIMITS)
        if self.route not in ROUTES:
            raise InvalidArgument(where, "route", got=repr(self.route), expected=f"one of {', '.join(ROUTES)}")
        if self.schedule_kind is not None and not isinstance(self.schedule_kind, ScheduleKind):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(where, "schedule_kind", got=describe(self.schedule_kind), expected="a ScheduleKind or None")
        if self.prefill_times is not None and self.route != "split":
            got = f"times, with route {self.route!r}"
            raise InvalidArgument(where, "prefill_times", got=got, expected="None, or route 'split'")
        if self.extra_topk and self.share.size > 1:
            raise InvalidArgument(
                where,
                "extra_topk",
                got=self.extra_topk,
                expected="0 with a ContextShare of several ranks: how they would share a second cache is not defined",
                remedy="Keep each sequence whole on one rank, share=WHOLE.",
            )
        least = least_workspace(self.max_model_len, self.prefill_times)
        if self.has_workspace and not least <= self.workspace_tokens <= INT32_MAX:
            raise InvalidArgument(
                where,
                "prefill_workspace_tokens",
                got=self.workspace_tokens,
                expected=f"{least} to {INT32_MAX} on route {self.route}",
                remedy="The longest sequence must fit the workspace whole: enlarge it, lower max_model_len, or take a route "
                "without one (fused, direct).",
            )

    @property
    def has_workspace(self) -> bool:
        """The route gathers prefill sequences into a bf16 workspace."""
        return self.route in WORKSPACE_ROUTES

    @property
    def workspace_tokens(self) -> int:
        """Rows of the workspace, 0 for a route without one."""
        if not self.has_workspace:
            return 0
        if self.prefill_workspace_tokens is None:
            return WORKSPACE_SEQUENCES * self.max_model_len
        return self.prefill_workspace_tokens
