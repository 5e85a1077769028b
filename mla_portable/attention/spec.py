# SPDX-License-Identifier: Apache-2.0
"""AttentionSpec: what a model's sparse-MLA layers have in common, known when they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from mla_portable.contracts import DEFAULT_SCRATCH_BYTES, LAYOUTS, ROUTES, SCALE_FORMATS, InvalidArgument

__all__ = ["AUTO_ROUTE", "WORKSPACE_SEQUENCES", "AttentionSpec"]

AUTO_ROUTE: Final = "auto"
WORKSPACE_SEQUENCES: Final = 5
"""Sequences of the greatest length that the prefill workspace holds by default, as in vLLM."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One value for all layers of a model on one rank.

    Attributes:
        num_heads: H, query heads of this rank. softmax_scale: factor on q.k before the softmax.
        kv_layout: "fp8_ds_mla" or "bf16". block_size: of the paged cache, in tokens. topk: K.
        scale_format: how the FP8 scales in the cache are made: "pow2", "amax", or None where unknown (they are then read
            as arbitrary, and `cache_write` makes "pow2").
        max_num_tokens, max_num_reqs: of a step, padding included. max_model_len: greatest sequence length, in tokens.
        decode_query_len: requests with this many query tokens or fewer are decodes; more than 1 for speculative decoding.
        prefill_workspace_tokens: rows of the bf16 workspace; None means 5 * max_model_len. Routes without one ignore it.
        route: "auto" or one of `mla_portable.contracts.ROUTES`.
        need_lse: `forward` returns the lse; an implementation that cannot tell it is passed over.
        attn_sink: the layer has a sink per head. graph: uniform decode batches are captured in CUDA graphs.
        batch_invariant: a row's result does not depend, in a single bit, on what else is in the batch, as long as it is served
            as a decode, or as a prefill, in both; an implementation that cannot promise that is passed over.
        concat_query: `forward` may be given (ql_nope, q_pe) pairs, for which a [max_num_tokens, H, 576] buffer is kept.
        max_scratch_bytes: bound on the split-KV scratch.
    Raises: InvalidArgument for a value that means nothing.
    """

    num_heads: int
    softmax_scale: float
    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    kv_layout: str = "fp8_ds_mla"
    block_size: int = 64
    topk: int = 2048
    scale_format: str | None = None
    decode_query_len: int = 1
    prefill_workspace_tokens: int | None = None
    route: str = AUTO_ROUTE
    need_lse: bool = True
    attn_sink: bool = False
    graph: bool = False
    batch_invariant: bool = False
    concat_query: bool = True
    max_scratch_bytes: int = DEFAULT_SCRATCH_BYTES

    def __post_init__(self) -> None:
        where = "AttentionSpec"
        counts = ("num_heads", "block_size", "topk", "max_num_tokens", "max_num_reqs", "max_model_len", "decode_query_len")
        for name in counts:
            value = getattr(self, name)
            if value < 1:
                raise InvalidArgument(where, name, got=value, expected="at least 1")
        if not 0.0 < self.softmax_scale < math.inf:
            raise InvalidArgument(where, "softmax_scale", got=self.softmax_scale, expected="a finite number above 0")
        for name, value, allowed in (
            ("kv_layout", self.kv_layout, tuple(LAYOUTS)),
            ("scale_format", self.scale_format, (None, *SCALE_FORMATS)),
            ("route", self.route, (AUTO_ROUTE, *ROUTES)),
        ):
            if value not in allowed:
                raise InvalidArgument(where, name, got=repr(value), expected=f"one of {', '.join(map(str, allowed))}")
        if self.max_scratch_bytes < 0:
            raise InvalidArgument(where, "max_scratch_bytes", got=self.max_scratch_bytes, expected="0 or more")
        if self.prefill_workspace_tokens is not None and self.prefill_workspace_tokens < self.max_model_len:
            raise InvalidArgument(
                where,
                "prefill_workspace_tokens",
                got=self.prefill_workspace_tokens,
                expected=f"at least max_model_len = {self.max_model_len}, so that any one sequence fits",
                remedy="Give a larger workspace, or take a route without one: 'fused' or 'direct'.",
            )

    @property
    def workspace_rows(self) -> int:
        """Rows of the bf16 prefill workspace, for the routes that have one."""
        if self.prefill_workspace_tokens is None:
            return WORKSPACE_SEQUENCES * self.max_model_len
        return self.prefill_workspace_tokens
