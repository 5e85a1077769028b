# SPDX-License-Identifier: Apache-2.0
"""The conventions under which FlashMLA's sparse BF16 prefill is found: an operator, or a function of any generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from mla_portable.layouts import KV_LORA_RANK
from mla_portable_common.flash_mla.conventions import PrefillKernel, output_of
from mla_portable_common.libraries import NotThisConvention, Positions, parameters_of

_PREFILL_NAMES: Final = ("q", "kv", "indices", "sm_scale", "d_v")
_OPTIONAL: Final = ("attn_sink", "topk_length", "out_")


class OperatorPrefill:
    """`sparse_prefill_fwd` of a library of torch operators."""

    has_lse = True

    def __init__(self, operator: Any) -> None:
        """operator: the overload itself. Raises: NotThisConvention."""
        positions = Positions(operator, _PREFILL_NAMES, _OPTIONAL)
        self._operator, self._template, index = operator, positions.template, positions.index
        self._template[index["d_v"]] = KV_LORA_RANK
        self._q, self._kv, self._indices, self._scale = (index[name] for name in _PREFILL_NAMES[:4])
        self._sink, self._lengths, self._out = (index.get(name, -1) for name in _OPTIONAL)
        self.takes_sink, self.takes_lengths, self.takes_out = (name in index for name in _OPTIONAL)

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
        arguments = self._template.copy()
        arguments[self._q], arguments[self._kv], arguments[self._indices] = q, kv, indices
        arguments[self._scale] = softmax_scale
        if attn_sink is not None:
            arguments[self._sink] = attn_sink
        if lengths is not None:
            arguments[self._lengths] = lengths
        if out is not None:
            arguments[self._out] = out
        results = self._operator(*arguments)
        return results[0], results[2]


class PythonPrefill:
    """`flash_mla_sparse_fwd` of any generation."""

    def __init__(self, function: Callable[..., Any], *, has_lse: bool = True) -> None:
        """has_lse: the third result is one. Raises: NotThisConvention."""
        names = parameters_of(function, _PREFILL_NAMES)
        self._call, self.has_lse = function, has_lse
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
    ) -> tuple[Tensor, Tensor | None]:
        """See PrefillKernel."""
        given = {"attn_sink": attn_sink, "topk_length": lengths, "out": out}
        others = {name: value for name, value in given.items() if value is not None}
        results = self._call(q, kv, indices, softmax_scale, KV_LORA_RANK, **others)
        return (results[0], results[2]) if self.has_lse else (output_of(results), None)


def prefill_of_module(module: Any, *, has_lse: bool = True) -> PrefillKernel:
    """The prefill of a Python module. has_lse: the third result is one. Raises: NotThisConvention."""
    if not hasattr(module, "flash_mla_sparse_fwd"):
        raise NotThisConvention(f"{module.__name__} has no flash_mla_sparse_fwd")
    return PythonPrefill(module.flash_mla_sparse_fwd, has_lse=has_lse)
