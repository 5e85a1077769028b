# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Rows of SGLang's FP8 cache on GPUs where its own kernels do not compile: NVIDIA's below compute capability 8.9.

SGLang quantises rows, and gathers them in BF16 for `flashmla_sparse`, by Triton kernels that convert e4m3. Triton has no such
conversion there. `cache_write` with "amax" scales and `gather_upconvert` do it by integer arithmetic:

scale     amax / 448, as in SGLang. A group of zeros has the least normal float32, where SGLang's has 0; both read as zeros.
code      of x / scale, rounded once. SGLang rounds x * (1 / scale): of some 2,000 values one gets a neighbouring code.
gathered  bf16(e4m3 * scale), the same bits
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.choose import get_registry
from mla_portable.contracts import InvalidArgument, Request, UnsupportedRequest
from mla_portable.engines.common.routing import bind_for, in_words, pairs
from mla_portable.engines.sglang import settings, stock
from mla_portable.layouts import FP8_DS_MLA, FP8_NOPE, SCALE_GROUP, CacheLayout
from mla_portable.primitives import CACHE_WRITE, GATHER_UPCONVERT

_SLOTS: Final = 16384
"""Rows of a call whose numbers are kept; more are numbered in the call."""


class PoolRows:
    """Quantises and gathers rows of a layout on one device. Graph-safe: calls allocate their results, and read nothing back."""

    def __init__(self, device: torch.device, layout: CacheLayout) -> None:
        """Bind what serves; a row is a block of the cache. Raises: UnsupportedRequest with the reasons."""
        self.layout, facts = layout, get_registry().facts(device)
        rows = {"kv_layout": layout.name, "block_size": 1}
        requests = Request(CACHE_WRITE, facts, **rows, scale_format="amax"), Request(GATHER_UPCONVERT, facts, **rows)
        bound = bind_for(*requests, graph=True)
        self.served_by = in_words(pairs(each.decision for each in bound))
        self._write, self._gather = (each.call for each in bound)
        self._slots = torch.arange(_SLOTS, dtype=torch.int64, device=device)
        self._start = torch.zeros(1, dtype=torch.int32, device=device)
        latent, rope = (
            torch.zeros((1, width), dtype=torch.bfloat16, device=device) for width in (layout.value_width, layout.rope_width)
        )
        self.gather(self.quantise(latent, rope), self._slots[:1])  # their kernels are made now, not for a request

    def quantise(self, k_nope: Tensor, k_rope: Tensor) -> Tensor:
        """k_nope [T, 512] and k_rope [T, 64 or 0] bf16 as rows [T, 656 or 528] uint8: codes, float32 scales, rope."""
        count = k_nope.shape[0]
        rows = torch.empty((count, self.layout.row_width), dtype=torch.uint8, device=k_nope.device)
        slots = self._slots[:count] if count <= _SLOTS else torch.arange(count, dtype=torch.int64, device=k_nope.device)
        if count:
            self._write(_dense(k_nope), _dense(k_rope), rows.unsqueeze(1), slots, scale_format="amax")
        return rows

    def gather(self, cache: Tensor, slots: Tensor) -> Tensor:
        """Rows `slots` [N] of `cache` [slots, 656 or 528] uint8 as [N, 576 or 512] bf16."""
        out = torch.empty((slots.shape[0], self.layout.key_width), dtype=torch.bfloat16, device=cache.device)
        if len(out):
            table = slots.to(torch.int32).unsqueeze(0)
            self._gather(cache.unsqueeze(1), table, self._start + len(out), self._start, out=out)
        return out


def _dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def of_device(device: torch.device, layout: CacheLayout) -> PoolRows | None:
    """What serves FP8 rows of a layout on a device; None where SGLang's own kernels do. Logged once.

    Raises: InvalidArgument where neither can, with what to set instead.
    """
    return get_registry().keep((PoolRows, device, layout), lambda: _bind(device, layout))


def _bind(device: torch.device, layout: CacheLayout) -> PoolRows | None:
    reason = stock.against_e4m3_in_triton(get_registry().facts(device))
    if reason is None:
        return None
    try:
        found = PoolRows(device, layout)
    except UnsupportedRequest as error:
        raise InvalidArgument(
            "SGLang",
            "--kv-cache-dtype",
            got="fp8_e4m3",
            expected=f"bfloat16, as {reason}, and nothing here writes such rows: {error}",
            remedy="Start SGLang with --kv-cache-dtype bfloat16.",
        ) from error
    settings.logger.info("mla_portable writes and gathers the rows of FP8 caches (%s) because %s", found.served_by, reason)
    return found


_BY_PARTS: Final = {(each.value_width, each.rope_width): each for each in (FP8_DS_MLA, FP8_NOPE)}
_BY_WIDTH: Final = {each.row_width: each for each in (FP8_DS_MLA, FP8_NOPE)}


def _served(tensor: Tensor, layout: CacheLayout | None, group_size: int) -> PoolRows | None:
    """Who serves rows of a layout; None for other rows, and where SGLang's kernels serve."""
    return of_device(tensor.device, layout) if layout is not None and group_size == SCALE_GROUP else None


def _writer(k_nope: Tensor, k_rope: Tensor, group_size: int) -> PoolRows | None:
    """Who quantises these parts, likewise."""
    return _served(k_nope, _BY_PARTS.get((k_nope.shape[1], k_rope.shape[1])), group_size)


def quantise(original: Any, k_nope: Tensor, k_rope: Tensor, group_size: int = SCALE_GROUP) -> Tensor:
    """In place of SGLang's `_quantize_k_cache_fast`: rows [T, 656 or 528] e4m3."""
    found = _writer(k_nope, k_rope, group_size)
    if found is None:
        return original(k_nope, k_rope, group_size)
    return found.quantise(k_nope, k_rope).view(torch.float8_e4m3fn)


def quantise_apart(original: Any, k_nope: Tensor, k_rope: Tensor, group_size: int = SCALE_GROUP) -> tuple[Tensor, Tensor]:
    """In place of `_quantize_k_cache_fast_separate`: codes and scales [T, 1, 528], rope [T, 1, 128 or 0], uint8."""
    found = _writer(k_nope, k_rope, group_size)
    if found is None:
        return original(k_nope, k_rope, group_size)
    rows = found.quantise(k_nope, k_rope).unsqueeze(1)
    return rows[..., : FP8_NOPE.row_width], rows[..., FP8_NOPE.row_width :]


def gather(original: Any, quant_k_cache: Tensor, page_table_1_flattened: Tensor, group_size: int = SCALE_GROUP) -> Tensor:
    """In place of `dequantize_k_cache_paged_dsa` (0.5.16: `dequantize_k_cache_paged`): [N, 1, 576 or 512] bf16."""
    width = quant_k_cache.shape[-1]
    found = _served(quant_k_cache, _BY_WIDTH.get(width), group_size)
    if found is None:
        return original(quant_k_cache, page_table_1_flattened, group_size)
    return found.gather(quant_k_cache.view(torch.uint8).view(-1, width), page_table_1_flattened).unsqueeze(1)
