# SPDX-License-Identifier: Apache-2.0
"""The conventions under which FlashMLA's sparse BF16 prefill is found: an operator, or a function of any generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from mla_portable.layouts import KV_LORA_RANK
from mla_portable_nvidia.conventions import NotThisConvention, Positions, PrefillKernel, parameters_of

_PREFILL_NAMES: Final = ("q", "kv", "indices", "sm_scale", "d_v")


class OperatorPrefill:
    """`sparse_prefill_fwd` of a library of torch operators."""

    def __init__(self, operator: Any) -> None:
        """operator: the overload itself. Raises: NotThisConvention."""
        positions = Positions(operator, _PREFILL_NAMES, ("attn_sink", "topk_length", "out_"))
        self._operator, self._template, self._index = operator, positions.template, positions.index
        self._template[self._index["d_v"]] = KV_LORA_RANK
        self.takes_out, self.takes_sink, self.takes_lengths = (
            name in self._index for name in ("out_", "attn_sink", "topk_length")
        )

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
        """See PrefillKernel."""
        arguments, index = self._template.copy(), self._index
        arguments[index["q"]], arguments[index["kv"]], arguments[index["indices"]] = q, kv, indices
        arguments[index["sm_scale"]] = softmax_scale
        for name, value in (("attn_sink", attn_sink), ("topk_length", lengths), ("out_", out)):
            if value is not None:
                arguments[index[name]] = value
        results = self._operator(*arguments)
        return results[0], results[2]


class PythonPrefill:
    """`flash_mla_sparse_fwd` of any generation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises: NotThisConvention."""
        names = parameters_of(function, _PREFILL_NAMES)
        self._call = function
        self.takes_out, self.takes_sink, self.takes_lengths = (name in names for name in ("out", "attn_sink", "topk_length"))

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
        """See PrefillKernel."""
        given = {"attn_sink": attn_sink, "topk_length": lengths, "out": out}
        others = {name: value for name, value in given.items() if value is not None}
        results = self._call(q, kv, indices, softmax_scale, KV_LORA_RANK, **others)
        return results[0], results[2]


def prefill_of_module(module: Any) -> PrefillKernel:
    """The prefill of a Python module. Raises: NotThisConvention."""
    if not hasattr(module, "flash_mla_sparse_fwd"):
        raise NotThisConvention(f"{module.__name__} has no flash_mla_sparse_fwd")
    return PythonPrefill(module.flash_mla_sparse_fwd)
