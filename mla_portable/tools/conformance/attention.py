# SPDX-License-Identifier: Apache-2.0
"""The parameters of a case of sparse_decode or sparse_prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from mla_portable.contracts import DeviceFacts, Request, ScheduleKind
from mla_portable.layouts import BF16
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.tools.conformance.attention_problem import build_attention
from mla_portable.tools.conformance.params import Params
from mla_portable.tools.conformance.problem import Problem

__all__ = ["WORKSPACE", "AttentionParams", "DecodeParams", "PrefillParams", "layout_of_storage", "workspace_of"]

WORKSPACE: Final = "workspace"


def workspace_of(layout: str) -> str:
    """What cases call flat rows of a layout: the name of the storage starts with WORKSPACE."""
    return WORKSPACE if layout == BF16.name else f"{WORKSPACE}_{layout}"


def layout_of_storage(kv: str) -> str:
    """The layout of a storage, which is a paged layout or what `workspace_of` made of one."""
    return BF16.name if kv == WORKSPACE else kv.removeprefix(f"{WORKSPACE}_")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams(Params):
    """One attention call.

    Attributes:
        kv: a layout (paged), or `workspace_of` one (flat rows). scale_format: of an FP8 cache.
        heads, topk, block_size, query_len: H, K, tokens a block (None for a workspace), S (None for prefill).
        rows: query rows, B * S or T.
        pattern: where indices are invalid (`inputs.PATTERNS`).
        sink: "none", "finite"; "minus_inf" and "plus_inf" give heads -inf, +inf and finite sinks in turn, starting
            with that one.
        lengths: pass them; 0, K and values outside of [0, K] among them.
        inputs, outputs: "packed" or "views" into larger memory; outputs also "fresh", allocated by the callee.
        blocks: "packed"; "strided", further apart than they are long; "pair", so, and a cache of two blocks only.
        size: magnitudes of queries and tokens (`inputs.SIZES`).
        schedule: the kind to pass, None for no schedule.
        with_lse: it is asked for.
        promised: indices are clean, as the request then says; what is absent is -1, past a length as well.
        scene: "" or "address" (a cache of more than 2**31 elements).
    """

    kv: str
    scale_format: str | None
    heads: int
    topk: int
    block_size: int | None
    query_len: int | None
    rows: int
    pattern: str = "dense"
    sink: str = "none"
    lengths: bool = False
    inputs: str = "packed"
    outputs: str = "fresh"
    blocks: str = "packed"
    size: str = "plain"
    schedule: ScheduleKind | None = None
    with_lse: bool = True
    promised: bool = False
    scene: str = ""

    @property
    def kv_layout(self) -> str:
        """The layout of the rows that are read."""
        return layout_of_storage(self.kv)

    @property
    def storage_name(self) -> str:
        """What the tolerance table calls it."""
        return self.scale_format or "bf16"

    def words(self) -> list[str]:
        """See Params."""
        shape = [f"h{self.heads}", f"k{self.topk}"]
        shape += [f"b{self.block_size}"] if self.block_size else []
        shape += [f"s{self.query_len}"] if self.query_len else []
        remarks = {
            f"t{self.rows}": self.rows == 0 or self.rows > 4,
            f"sink_{self.sink}": self.sink != "none",
            "lengths": self.lengths,
            "inviews": self.inputs == "views",
            f"out_{self.outputs}": self.outputs != "fresh",
            self.blocks: self.blocks != "packed",
            self.size: self.size != "plain",
            "scheduled": self.schedule is not None,
            "promised": self.promised,
            self.scene: bool(self.scene),
            self.run: self.run != "once",
        }
        kv = [word for word in (self.kv, self.scale_format) if word]
        return [*kv, *shape, self.pattern, *(word for word, said in remarks.items() if said)]

    def request(self, device: DeviceFacts) -> Request:
        """See Params."""
        return Request(
            primitive=self.primitive,
            device=device,
            kv_layout=self.kv_layout,
            num_heads=self.heads,
            topk=self.topk,
            block_size=self.block_size,
            query_len=self.query_len,
            rows=self.rows,
            scale_format=self.scale_format,
            lse=self.with_lse,
            attn_sink=self.sink != "none",
            lengths=self.lengths,
            clean_indices=self.promised,
            batch_invariant=self.run == "batches",
            graph=self.run == "graph",
        )

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        return build_attention(self, seed, device, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParams(AttentionParams):
    """sparse_decode."""

    primitive = SPARSE_DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillParams(AttentionParams):
    """sparse_prefill."""

    primitive = SPARSE_PREFILL
