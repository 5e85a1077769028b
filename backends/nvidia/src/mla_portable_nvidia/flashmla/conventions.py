# SPDX-License-Identifier: Apache-2.0
"""One signature for FlashMLA's decode and one for its prefill, and how a provider's own convention is recognised.

A convention is recognised by the names in an operator's schema or in a function's signature. Nothing of it is
converted here; conventions of value (bases, infinities) are found by `calibration`, undone by `boundary`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

Plan = tuple[Tensor, Tensor]
"""(tile_scheduler_metadata [parts, 8] int32, num_splits [B + 1] int32), on the device."""


class SecondCache(NamedTuple):
    """What a row attends to beside its first list: kv [blocks, page, 1, row bytes] uint8 and indices [B, S, E] int32."""

    kv: Tensor
    indices: Tensor


PreparedDecode = Callable[[Tensor, Tensor, Tensor, float, "Tensor | None", Tensor, "SecondCache | None"], object]
"""(q, kv, indices, softmax_scale, attn_sink, out, extra) as DecodeKernel takes them; the result is in `out`."""


class NotThisConvention(Exception):
    """A symbol is missing, or takes arguments that this project does not know; the message says which."""


class DecodeKernel(Protocol):
    """FlashMLA's sparse FP8 decode.

    Attributes:
        takes_out: `out` may be given. takes_sink: so may `attn_sink`. takes_plan: so may `plan`. takes_extra: so may `extra`.
    """

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
    ) -> tuple[Tensor, Tensor]:
        """Attend; graph-safe, allocates the provider's own accumulators.

        Args:
            q: [B, S, H, 576] bf16. kv: [blocks, page, 1, 656] uint8. indices: [B, S, K] int32, slots or -1, contiguous.
                Or q [B, S, H, 512] and kv [blocks, page, 1, 584] of `fp8_v4`, with which alone there may be an `extra`.
            attn_sink: [H] float32. plan: for just these shapes; None lets the provider make one, by a kernel of its own.
            out: [B, S, H, 512] bf16, contiguous.
        Returns: out [B, S, H, 512] and lse [B, H, S] float32, the order of axes that FlashMLA has, in the provider's own base
            and infinities.
        """
        ...

    def plan(self, q: Tensor, kv: Tensor, indices: Tensor, extra: SecondCache | None = None) -> Plan:
        """The provider's own plan for a call with these tensors."""
        ...

    def prepared(self, plan: Plan | None) -> PreparedDecode:
        """The same call with this plan, for callers that repeat it and do not read the lse; where takes_out."""
        return lambda q, kv, indices, scale, attn_sink, out, extra: self(q, kv, indices, scale, attn_sink, plan, out, extra)


class PrefillKernel(Protocol):
    """FlashMLA's sparse BF16 prefill.

    Attributes:
        takes_out, takes_sink, takes_lengths: whether these may be given.
    """

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
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: [T, H, 576] bf16. kv: [W, 1, 576] bf16. indices: [T, 1, K] int32, contiguous. attn_sink: [H] float32.
            lengths: [T] int32, each in [0, K]. out: [T, H, 512] bf16, contiguous.
        Returns: out [T, H, 512] and lse [T, H] float32, in the provider's own base and infinities.
        """
        ...


class Positions:
    """An operator's arguments in the order of its schema: what is known by name, defaults or None for the rest."""

    def __init__(self, operator: Any, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
        arguments = operator._schema.arguments
        names = [argument.name for argument in arguments]
        missing = [name for name in needed if name not in names]
        if missing:
            raise NotThisConvention(f"{operator} has no argument {', '.join(missing)}")
        self.template: list[Any] = []
        for argument in arguments:
            known = argument.name in needed or argument.name in optional
            if not known and not argument.has_default_value() and argument.type.kind() != "OptionalType":
                raise NotThisConvention(f"{operator} wants an argument {argument.name}, whose meaning is not known here")
            self.template.append(argument.default_value if argument.has_default_value() else None)
        self.index = {name: names.index(name) for name in (*needed, *optional) if name in names}


def parameters_of(function: Callable[..., Any], names: tuple[str, ...]) -> list[str]:
    """The parameters of a function, which must include `names`."""
    parameters = list(inspect.signature(function).parameters)
    missing = [name for name in names if name not in parameters]
    if missing:
        where = f"{function.__module__}.{function.__qualname__}"
        raise NotThisConvention(f"{where} has no parameter {', '.join(missing)}")
    return parameters
