# SPDX-License-Identifier: Apache-2.0
"""A step with what the float64 oracle says of it, and the judgement of attention results by that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mla_portable.attention import SparseMLAAttention
from mla_portable.contracts import Primitive, StepPlan
from mla_portable.tools.bench.inputs import StepInputs
from mla_portable.tools.conformance import tolerance
from mla_portable.tools.conformance.compare import Finding, close, cosine

__all__ = ["Step", "attention_findings"]

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
        return shape.scale_format if shape.kv_layout != "bf16" else "bf16"

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

    def judge(self, primitive: Primitive, out: Tensor, lse: Tensor, tokens: slice, *, remark: str = "") -> Iterator[Finding]:
        """Attention of `tokens` over the cache, out [.., H, 512] and lse [.., H], against the oracle's rows."""
        judged, places = self.judged(tokens)
        got_out, got_lse = out.cpu().reshape(-1, *out.shape[-2:])[places], lse.cpu().reshape(-1, lse.shape[-1])[places]
        want_out, want_lse = self.want_out[judged], self.want_lse[judged]
        yield from attention_findings(primitive, self.storage, got_out, got_lse, want_out, want_lse, remark=remark)


def attention_findings(
    primitive: Primitive, storage: str, out: Tensor, lse: Tensor | None, want_out: Tensor, want_lse: Tensor, *, remark: str = ""
) -> Iterator[Finding]:
    """Judge attention rows [n, H, 512] and [n, H] by the tolerances of a primitive; lse is None where none is told."""
    limit = tolerance(primitive, storage, "out")
    yield close(f"out{remark}", out, want_out, limit)
    if limit.cosine is not None:
        yield cosine(f"1 - cosine{remark}", out, want_out, limit.cosine)
    if lse is not None:
        yield close(f"lse{remark}", lse, want_lse, tolerance(primitive, storage, "lse"))
