# SPDX-License-Identifier: Apache-2.0
"""masked_prefill by FlashAttention 3, where nothing is masked but by causality.

The operator takes keys and values of ragged requests as they lie, by their starts. What it does differently:

- *Rows behind a request.* The last tile of a request's keys reaches into the rows behind them, whose values it multiplies by 0.
  So it runs for a request that promises finite values (`Request.finite_values`).
- *The lse* lies by heads and is infinite, of either sign, where there is no key. One small pass brings it into place, where it
  is asked for.
- *Batch invariance.* Keys are never split. A call of one query a request would be computed in other tiles, as one that is not
  causal; the bound that it is given is at least 2.
- *No keys at all.* The operator then also fills rows of no request; it is given the queries as keys, of which it reads none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import (
    DeviceFacts,
    Implementation,
    MLAPortableError,
    Reason,
    Request,
    Support,
)
from mla_portable.kit.results import head_results
from mla_portable.primitives import MASKED_PREFILL, MaskedPrefill
from mla_portable_common.libraries import triton_missing
from mla_portable_nvidia.alignment import mappable
from mla_portable_nvidia.fa3.operators import FA3Prompts, find_fa3_prompts
from mla_portable_nvidia.fa3.sparse_attention import NAME

if TYPE_CHECKING:
    from mla_portable_nvidia.fa3.prompt_lse import PromptLse

HEAD_DIMS: Final = ((192, 128), (256, 256))
_PREFERENCE: Final = 7.5
"""Before the native kernel, which takes 1.02 to 1.25 times as long where nothing is masked."""


class FlashAttention3Prompts:
    """masked_prefill without a selection. Graph-safe with `out` and `lse_out`; the operator allocates an lse and a schedule."""

    def __init__(self, operator: FA3Prompts, prompt_lse: PromptLse, *, tells_lse: bool = True) -> None:
        """tells_lse: False where no lse is asked for: there is no pass then."""
        self._operator, self._prompt_lse, self._tells_lse = operator, prompt_lse, tells_lse
        self._no_lse = torch.empty(0)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        *,
        softmax_scale: float,
        max_query_len: int,
        max_key_len: int,
        causal: bool = True,
        selection: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See MaskedPrefill. q, k, v and out are copied where they are not aligned to 16 bytes. `selection` is None."""
        if self._tells_lse:
            out, lse_out = head_results(q, v.shape[2], out, lse_out)
        else:
            lse_out = self._no_lse
            if out is None:
                out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
        if q.shape[0] == 0 or query_start_loc.shape[0] == 1 or max_query_len == 0:
            return out, lse_out
        given = out
        # no longer than the tensors: the operator rounds both up to whole tiles, in int32
        longest = max(min(max_query_len, q.shape[0]), 2), max(min(max_key_len, k.shape[0]), 1)
        q, out = mappable(q), mappable(out)
        k, v = (mappable(k), mappable(v)) if k.shape[0] else (q, q[..., : v.shape[2]])
        lse = self._operator(q, k, v, query_start_loc, key_start_loc, longest, softmax_scale, causal, out)
        if out is not given:
            given.copy_(out)
        if self._tells_lse:
            self._prompt_lse(lse_out, lse, query_start_loc)
        return given, lse_out


def bind_fa3_prompts(request: Request[MaskedPrefill]) -> MaskedPrefill:
    """masked_prefill on the operator that is here. Raises: MLAPortableError where there is none."""
    from mla_portable_nvidia.fa3.prompt_lse import PromptLse

    operator, reasons = find_fa3_prompts()
    if operator is None:
        raise MLAPortableError(f"{request.primitive}: nothing brings FlashAttention 3 here: {'; '.join(map(str, reasons))}")
    return FlashAttention3Prompts(operator, PromptLse(), tells_lse=request.lse)


def _check(device: DeviceFacts) -> tuple[Reason, ...]:
    """Every package's reason why it cannot serve; where one can, what its pass lacks."""
    operator, reasons = find_fa3_prompts()
    return triton_missing() if operator is not None else reasons


def prompt_implementations(*, device_types: tuple[str, ...] = ("cuda",)) -> Iterator[Implementation[MaskedPrefill]]:
    """masked_prefill without a selection, for SM90. device_types: ("cuda",) but for tests with stand-ins."""
    declared: dict[str, Any] = {
        "source": "vllm-project/flash-attention 01ed8aa: hopper/flash_api.cpp; vLLM 0.26: its FlashAttention 3 of prompts",
        "device_types": device_types,
        "vendors": ("nvidia",),
        "archs": ("sm90",),
        "head_dims": HEAD_DIMS,
        "selection": False,
        "needs_finite_values": True,
    }
    yield Implementation(NAME, MASKED_PREFILL, Support(**declared), bind_fa3_prompts, check=_check, preference=_PREFERENCE)
