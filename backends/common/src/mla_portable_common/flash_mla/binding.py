# SPDX-License-Identifier: Apache-2.0
"""Callables for a request on a kernel that was found: what the request promises decides which passes it needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from mla_portable.contracts import Reason, Request
from mla_portable.layouts import CacheLayout
from mla_portable_common.flash_mla.conventions import BoundaryPasses, Parts
from mla_portable_common.flash_mla.head_padding import KERNEL_HEADS, kernel_heads
from mla_portable_common.flash_mla.sparse_decode import TOPK_MULTIPLE as DECODE_MULTIPLE
from mla_portable_common.flash_mla.sparse_decode import FlashMLADecode
from mla_portable_common.flash_mla.sparse_prefill import TOPK_MULTIPLE as PREFILL_MULTIPLE
from mla_portable_common.flash_mla.sparse_prefill import FlashMLAPrefill


@dataclass(frozen=True, slots=True)
class Found:
    """What serves a primitive on a device, or why nothing does.

    Attributes:
        provider: its name, None when there is none. kernel, traits: its adapter and what calibration found.
        reasons: one for each provider that was asked before, or all.
    """

    provider: str | None
    kernel: Any
    traits: Any
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a kernel takes behind its adapter.

    Attributes:
        heads: counts that it has, in ascending order; fewer are padded. topk_multiple: what the width of its lists must be one
            of; shorter ones are padded. any_order: absent indices may stand among the others, not only behind them.
    """

    heads: tuple[int, ...] = KERNEL_HEADS
    topk_multiple: int = DECODE_MULTIPLE
    any_order: bool = True


DECODE_LIMITS: Final = Limits()
PREFILL_LIMITS: Final = Limits(topk_multiple=PREFILL_MULTIPLE)
"""FlashMLA's own."""


def decode_on(
    found: Found,
    request: Request[Any],
    boundary: BoundaryPasses,
    parts: Parts,
    layout: CacheLayout,
    *,
    whole_rows: bool = False,
    limits: Limits = DECODE_LIMITS,
) -> FlashMLADecode:
    """sparse_decode on a kernel.

    Args:
        found: a provider of it. parts: into how many it deals the rows of a call. layout: of the caches.
        whole_rows: it wants a whole number of rows from block to block.
    """
    compacts = not (limits.any_order or (request.clean_indices and request.clean_lengths))
    fits = _fits(request.topk, limits) and (request.extra_topk is None or _fits(request.extra_topk, limits))
    return FlashMLADecode(
        found.kernel,
        boundary,
        lse_base_2=found.traits.lse_base_2,
        takes_plan=found.traits.takes_plan,
        parts=parts,
        layout=layout,
        whole_rows=whole_rows,
        heads=limits.heads,
        topk_multiple=limits.topk_multiple,
        sanitises=compacts or not (request.clean_indices and fits),
        compacts=compacts,
        finishes=request.lse or not _comes_finished(found, request, limits),
    )


def prefill_on(
    found: Found,
    request: Request[Any],
    boundary: BoundaryPasses,
    *,
    native_heads: Collection[int] = (),
    limits: Limits = PREFILL_LIMITS,
) -> FlashMLAPrefill:
    """sparse_prefill on a kernel. native_heads: counts that run unpadded where the kernel has them."""
    return FlashMLAPrefill(
        found.kernel,
        boundary,
        lse_base_2=found.traits.lse_base_2,
        heads=found.traits.heads,
        native_heads=native_heads,
        full_heads=limits.heads,
        topk_multiple=limits.topk_multiple,
        compacts=not (limits.any_order or (request.clean_indices and request.clean_lengths)),
        sanitises=not request.clean_indices,
        clamps=not (request.clean_indices or request.clean_lengths),
        finishes=request.lse or not _comes_finished(found, request, limits),
    )


def _fits(topk: int | None, limits: Limits) -> bool:
    """The kernel takes lists of this width."""
    return topk is not None and topk % limits.topk_multiple == 0


def _comes_finished(found: Found, request: Request[Any], limits: Limits) -> bool:
    """The provider's own `out` is what `request` asks for: zeros in empty rows, the sink applied."""
    if request.num_heads is None:
        return False
    if request.attn_sink:  # a kernel with an lse has none for padded heads
        heads = request.num_heads if found.kernel.has_lse else kernel_heads(request.num_heads, limits.heads)
        return heads in found.traits.zeroes_with_sink
    return kernel_heads(request.num_heads, limits.heads) in found.traits.zeroes_empty
