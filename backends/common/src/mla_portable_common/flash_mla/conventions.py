# SPDX-License-Identifier: Apache-2.0
"""One signature for FlashMLA's decode and one for its prefill, which providers are called by.

Nothing is converted here: conventions of value (bases, infinities) are found by `calibration`, undone by `boundary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts.values import INT32_MAX

Plan = tuple[Tensor, Tensor]
"""(tile_scheduler_metadata [parts, 8] int32, num_splits [B + 1] int32), on the device."""


class SecondCache(NamedTuple):
    """What a row attends to beside its first list: kv [blocks, page, 1, row bytes] uint8 and indices [B, S, E] int32."""

    kv: Tensor
    indices: Tensor


PreparedDecode = Callable[[Tensor, Tensor, Tensor, float, "Tensor | None", Tensor, "SecondCache | None"], object]
"""(q, kv, indices, softmax_scale, attn_sink, out, extra) as DecodeKernel takes them; the result is in `out`."""


class Parts(Protocol):
    """Into how many parts a decode kernel deals the rows of a call, each with accumulators of its own."""

    def __call__(self, *, query_len: int, num_heads: int) -> int:
        """num_heads: of the kernel."""
        ...


class DecodeKernel(Protocol):
    """FlashMLA's sparse decode.

    Attributes:
        takes_out: `out` may be given. takes_sink: so may `attn_sink`. takes_plan: so may `plan`. takes_extra: so may `extra`.
        has_lse: an lse is returned.
    """

    has_lse: bool = True

    takes_out: bool
    takes_sink: bool
    takes_plan: bool
    takes_extra: bool

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        softmax_scale: float,
        attn_sink: Tensor | None = None,
        plan: Plan | None = None,
        out: Tensor | None = None,
        extra: SecondCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; graph-safe, allocates the provider's own accumulators.

        Args:
            q: [B, S, H, 576] bf16. kv: [blocks, page, 1, 656] uint8. indices: [B, S, K] int32, slots or -1, contiguous.
                Or q [B, S, H, 512] and kv [blocks, page, 1, 584] of `fp8_v4`, with which alone there may be an `extra`.
            attn_sink: [H] float32. plan: for just these shapes; None lets the provider make one, by a kernel of its own.
            out: [B, S, H, 512] bf16, contiguous.
        Returns: out [B, S, H, 512] and lse [B, H, S] float32, the order of axes that FlashMLA has, in the provider's own base
            and infinities; None where it has none.
        """
        ...

    def plan(self, q: Tensor, kv: Tensor, indices: Tensor, extra: SecondCache | None = None) -> Plan:
        """The provider's own plan for a call with these tensors."""
        ...

    def prepared(self, plan: Plan | None) -> PreparedDecode:
        """The same call with this plan, for callers that repeat it and do not read the lse; where takes_out."""
        return lambda q, kv, indices, scale, attn_sink, out, extra: self(q, kv, indices, scale, attn_sink, plan, out, extra)


class BoundaryPasses(Protocol):
    """The passes around a call of FlashMLA that give it this project's one meaning. They write what they are given; neither
    synchronises, and neither launches anything for zero rows.
    """

    def sanitise(self, out: Tensor, indices: Tensor, lengths: Tensor | None, num_slots: int) -> None:
        """Copy indices; what is negative, past the cache or past the row's length becomes -1, and so does the padding.

        Args:
            out: [B, S, K'] int32 contiguous, written, K' >= K. indices: [B, S, K] int32. lengths: [B, S] int32.
            num_slots: slots of the cache, at least 1.
        """
        ...

    def finish(
        self,
        out: Tensor,
        lse_out: Tensor,
        result: Tensor | None,
        lse: Tensor,
        attn_sink: Tensor | None,
        base_2: bool,
        *,
        early: bool,
    ) -> None:
        """Bring a kernel's results into `out` and `lse_out`.

        Args:
            out: [B, S, H, 512] bf16, written. lse_out: [B, S, H] float32, written.
            result: [B, S, H' >= H, 512] bf16, or None where the kernel wrote `out` itself.
            lse: [B, H' >= H, S] float32, infinite (of either sign) where a row has no valid entry. base_2: lse is to base 2.
            attn_sink: [H] float32 that the kernel has not applied.
            early: the kernel in front was launched normally and is the last of its call, so that the pass may start before its
                end where it can wait for it.
        """
        ...


class PrefillKernel(Protocol):
    """FlashMLA's sparse BF16 prefill.

    Attributes:
        takes_out, takes_sink, takes_lengths: whether these may be given. has_lse: an lse is returned.
    """

    has_lse: bool = True

    takes_out: bool
    takes_sink: bool
    takes_lengths: bool

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        softmax_scale: float,
        attn_sink: Tensor | None = None,
        lengths: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            q: [T, H, 576] bf16. kv: [W, 1, 576] bf16. indices: [T, 1, K] int32, contiguous. attn_sink: [H] float32.
            lengths: [T] int32, each in [0, K]. out: [T, H, 512] bf16, contiguous.
        Returns: out [T, H, 512] and lse [T, H] float32, in the provider's own base and infinities; None where it has none.
        """
        ...


def output_of(returned: Any) -> Tensor:
    """The output among what a function without an lse returned: the first of several, or the lone tensor."""
    return returned if isinstance(returned, Tensor) else returned[0]


def marks_of_empty(lists: Sequence[Tensor], num_heads: int, num_rows: int = INT32_MAX) -> Tensor:
    """In place of an lse that a kernel does not return: [.., H] float32, inf where a row has no valid index, else 0.

    lists: indices [.., K] int32 of what a row attends to. num_rows: those from there on are absent.
    """
    empty = torch.stack([((indices < 0) | (indices >= num_rows)).all(dim=-1) for indices in lists]).all(dim=0)
    marks = torch.zeros(empty.shape, dtype=torch.float32, device=empty.device).masked_fill_(empty, math.inf)
    return marks.unsqueeze(-1).expand(*empty.shape, num_heads)


def absent_behind(indices: Tensor) -> Tensor:
    """indices [.., K] with the negative ones behind the others, which keep their order."""
    return indices.gather(-1, (indices < 0).to(torch.uint8).argsort(dim=-1, stable=True))


def padded_sink(attn_sink: Tensor, num_heads: int) -> Tensor:
    """attn_sink [H] with zeros up to `num_heads`."""
    return torch.nn.functional.pad(attn_sink, (0, num_heads - attn_sink.shape[0]))
