# SPDX-License-Identifier: Apache-2.0
"""A step with what the float64 oracle says of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mla_portable.attention import SparseMLAAttention
from mla_portable.contracts import StepPlan
from mla_portable.layouts import LAYOUTS
from mla_portable.problems import Finding
from mla_portable.problems.attention import attend, findings
from mla_portable.tools.bench.inputs import StepInputs

__all__ = ["Step"]

_FEW = 8
"""Decode rows to try where the step has none."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step whose tokens are in the cache, with what the oracle says of it.

    Attributes:
        inputs, layer, plan: as made. kv_cache: after the step's cache write.
        rows: [n] int64 on the host, the tokens that the oracle judged. slots: [T, K] int32 on the host, the oracle's.
        want_out: [n, H, 512] float64. want_lse: [n, H] float64.
    """

    inputs: StepInputs
    layer: SparseMLAAttention
    plan: StepPlan
    kv_cache: Tensor
    rows: Tensor
    slots: Tensor
    want_out: Tensor
    want_lse: Tensor

    @property
    def storage(self) -> str:
        """The tolerance table's word for what the cache holds."""
        shape = self.inputs.shape
        return shape.scale_format if LAYOUTS[shape.kv_layout].is_quantized else "bf16"

    @property
    def scale(self) -> float:
        return self.layer.spec.softmax_scale

    @property
    def prefill_tokens(self) -> slice:
        """The tokens of the requests that prefill, of all requests where none does."""
        shape = self.inputs.shape
        return slice(shape.decodes * shape.decode_query_len if shape.prefills else 0, shape.num_tokens)

    @property
    def decode_rows(self) -> tuple[int, int]:
        """B and S of sparse_decode: as planned, else the requests that decode, else a few tokens."""
        plan, shape = self.plan, self.inputs.shape
        if plan.num_decode_tokens:
            return plan.num_decodes, plan.decode_query_len
        return (shape.decodes, shape.decode_query_len) if shape.decodes else (min(_FEW, shape.num_tokens), 1)

    def judged(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """Of the judged tokens those in `tokens`: their places among the judged ones, and within `tokens`."""
        inside = ((self.rows >= tokens.start) & (self.rows < tokens.stop)).nonzero()[:, 0]
        return inside, self.rows[inside] - tokens.start

    def says_checked(self, tokens: slice) -> str:
        return f"{len(self.judged(tokens)[0])} of {tokens.stop - tokens.start} rows"

    def judge(self, out: Tensor, lse: Tensor, tokens: slice, *, remark: str = "") -> Iterator[Finding]:
        """Attention of `tokens` over the cache, out [.., H, 512] and lse [.., H], against the oracle's rows."""
        judged, places = self.judged(tokens)
        got = _rows_of(out, lse, places)
        want = {"out": self.want_out[judged], "lse": self.want_lse[judged]}
        yield from findings(self.storage, got, want, rows=places, remark=remark)

    def judge_workspace(self, out: Tensor, lse: Tensor, rows: Tensor, indices: Tensor) -> Iterator[Finding]:
        """Attention of the prefill tokens over a bf16 workspace `rows` [W, 576]; indices [T', K] into it."""
        places = self.judged(self.prefill_tokens)[1]
        q = self.inputs.q[self.prefill_tokens].cpu()[places]
        want = attend(q, rows, indices[places], softmax_scale=self.scale, lengths=None, attn_sink=None)
        yield from findings("bf16", _rows_of(out, lse, places), {"out": want[0], "lse": want[1]}, rows=places)


def _rows_of(out: Tensor, lse: Tensor, places: Tensor) -> dict[str, Tensor]:
    flat = out.reshape(-1, *out.shape[-2:]), lse.reshape(-1, lse.shape[-1])
    return {name: each[places.to(each.device)].cpu() for name, each in zip(("out", "lse"), flat, strict=True)}
