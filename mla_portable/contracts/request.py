# SPDX-License-Identifier: Apache-2.0
"""Request: one question to the registry, "who can run this primitive on these shapes here?"."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from mla_portable.contracts.device import DeviceFacts
from mla_portable.contracts.errors import InvalidArgument
from mla_portable.contracts.layouts import LAYOUTS, SCALE_FORMATS
from mla_portable.contracts.primitives import Primitive

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """The static facts of a call; a field that does not matter for a primitive stays None (or False).

    Attributes:
        primitive, device: what to run, where.
        kv_layout: "bf16" or "fp8_ds_mla", of the cache or workspace that is read or written.
        num_heads: H. topk: K. block_size: of the paged cache. query_len: S of sparse_decode.
        rows: query rows (B * S or T) where a choice may depend on the amount of work; never decides what can run.
        scale_format: how the FP8 scales in the cache were made; None where unknown, which is read as arbitrary.
        lse, attn_sink, lengths, compact, prefill_workspace: the call needs this feature. Where the lse is not asked for, it
            need not be told: `lse_out` is scratch at most, and the second result may be NaN or a tensor without elements. What
            is neither is the lse.
        clean_indices: a promise about the values of `indices`: each is -1 or a slot of the cache (a row of kv), and what
            stands past a row's length is -1, so that `lengths` only repeats it. It saves work and never decides what can run.
            Who breaks it may be shown foreign memory.
        clean_lengths: likewise of `lengths`: each is 0 to K.
        batch_invariant: a row's result may not depend, in a single bit, on what other rows there are: whoever is bound
            computes it alike for every `rows`. A schedule cuts every batch alike then (`PlannerConfig.batch_invariant`).
        graph: the call is going to be captured in a CUDA graph.
        configuration: kernel configuration from the user's tuning table; None = the plugin's own. The registry sets it for the
            chosen implementation just before `bind`; it never decides what can run.
    """

    primitive: Primitive
    device: DeviceFacts
    kv_layout: str | None = None
    num_heads: int | None = None
    topk: int | None = None
    block_size: int | None = None
    query_len: int | None = None
    rows: int | None = None
    scale_format: str | None = None
    lse: bool = False
    attn_sink: bool = False
    lengths: bool = False
    compact: bool = False
    prefill_workspace: bool = False
    clean_indices: bool = False
    clean_lengths: bool = False
    batch_invariant: bool = False
    graph: bool = False
    configuration: tuple[tuple[str, int], ...] | None = None

    def __post_init__(self) -> None:
        where = "Request"
        if self.kv_layout is not None and self.kv_layout not in LAYOUTS:
            raise InvalidArgument(where, "kv_layout", got=repr(self.kv_layout), expected=f"one of {', '.join(LAYOUTS)}")
        if self.scale_format is not None and self.scale_format not in SCALE_FORMATS:
            raise InvalidArgument(
                where, "scale_format", got=repr(self.scale_format), expected=f"one of {', '.join(SCALE_FORMATS)}"
            )
        for name in ("num_heads", "topk", "block_size", "query_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(where, name, got=value, expected="at least 1")
        if self.rows is not None and self.rows < 0:
            raise InvalidArgument(where, "rows", got=self.rows, expected="0 or more")

    def but(self, **changes: Any) -> Request:
        """The same request with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        words = [
            f"{field.name}={'yes' if value is True else value}"
            for field in fields(self)
            if field.name not in ("primitive", "device") and (value := getattr(self, field.name)) not in (None, False)
        ]
        return " ".join([*words, f"on {self.device}"])
