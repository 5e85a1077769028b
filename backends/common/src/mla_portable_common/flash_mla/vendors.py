# SPDX-License-Identifier: Apache-2.0
"""What a vendor's plugin declares whose library has FlashMLA's functions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from mla_portable.contracts import DeviceFacts, Implementation, MLAPortableError, Primitive, Reason, Request, Support
from mla_portable.layouts import LAYOUTS
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparseDecode, SparsePrefill
from mla_portable_common.flash_mla.binding import DECODE_LIMITS, PREFILL_LIMITS, Found, Limits, decode_on, prefill_on
from mla_portable_common.flash_mla.discovery import find_copy
from mla_portable_common.flash_mla.tile_schedules import num_sm_parts
from mla_portable_common.flash_mla.torch_passes import TorchBoundary
from mla_portable_common.libraries import Library

_NO_SINK: Final = "declare attn_sink=False in the Support, or lse=True where the library returns one"


def decode(
    name: str,
    library: Library,
    support: Support,
    *,
    topk_multiple: int = DECODE_LIMITS.topk_multiple,
    any_order: bool = True,
    preference: float = 10.0,
) -> Implementation[SparseDecode]:
    """sparse_decode on `flash_mla_with_kvcache` and `get_mla_metadata`, in any of their generations.

    The adapter brings every feature of sparse_decode that `support` declares: it pads heads, cleans and pads lists, converts
    the lse, which is natural or to base 2, and zeroes rows without a valid index. What the kernel leaves there and in which
    base it computes is found by a few tiny calls on the device. Plans are the library's own, one for each shape.

    Args:
        name: of the implementation, "<vendor>.flash_mla".
        library: where it is found.
        support: `kv_layouts`, of rows of bytes or of bf16; the heads that the kernel has as `padded_heads`, or as `num_heads`
            where none are to be padded; `lse=False` where the functions return none; `attn_sink=False` where they take none, or
            return no lse; the remaining fields are of the adapter.
        topk_multiple: what the kernel's list width must be one of; shorter lists are padded with -1.
        any_order: False where the kernel takes -1 behind all other indices alone.
        preference: as of `Implementation`.
    Raises: MLAPortableError for a `support` without heads.
    """
    return _implementation(SPARSE_DECODE, name, library, support, topk_multiple, any_order, preference)


def prefill(
    name: str,
    library: Library,
    support: Support,
    *,
    topk_multiple: int = PREFILL_LIMITS.topk_multiple,
    any_order: bool = True,
    preference: float = 10.0,
) -> Implementation[SparsePrefill]:
    """sparse_prefill on `flash_mla_sparse_fwd`, in any of its generations. Arguments: as of `decode`."""
    return _implementation(SPARSE_PREFILL, name, library, support, topk_multiple, any_order, preference)


def _implementation(
    primitive: Primitive[Any],
    name: str,
    library: Library,
    support: Support,
    topk_multiple: int,
    any_order: bool,
    preference: float,
) -> Implementation[Any]:
    counts = support.padded_heads or support.num_heads
    if not counts or not support.kv_layouts:
        raise MLAPortableError(
            f"{name}: {primitive} on FlashMLA's functions: the Support names no head counts of the kernel or no layouts; give "
            "`padded_heads` or `num_heads`, and `kv_layouts`"
        )
    limits = Limits(tuple(sorted(counts)), topk_multiple, any_order)
    return Implementation(
        name,
        primitive,
        support,
        partial(_bind, primitive=primitive, library=library, support=support, limits=limits),
        check=partial(_check, primitive=primitive, library=library, support=support, limits=limits),
        preference=preference,
    )


def _find(
    layout: str, device: DeviceFacts, primitive: Primitive[Any], library: Library, support: Support, limits: Limits
) -> Found:
    return find_copy(library, primitive, device, LAYOUTS[layout], limits, support.lse)


def _check(
    device: DeviceFacts, primitive: Primitive[Any], library: Library, support: Support, limits: Limits
) -> Iterable[Reason]:
    """Every module's reason why it cannot serve a layout that is declared; nothing where one serves all of them."""
    for layout in support.kv_layouts or ():
        found = _find(layout, device, primitive, library, support, limits)
        if found.provider is None:
            return found.reasons
        if support.attn_sink and not (found.kernel.has_lse or found.kernel.takes_sink):
            return (Reason("attn_sink", "True", f"{found.provider} takes none and returns no lse to apply one", _NO_SINK),)
    return ()


def _bind(request: Request[Any], primitive: Primitive[Any], library: Library, support: Support, limits: Limits) -> Any:
    layout = request.kv_layout or ""
    found = _find(layout, request.device, primitive, library, support, limits)
    if found.provider is None:
        why = "; ".join(map(str, found.reasons)) or "no module is named"
        raise MLAPortableError(f"{primitive}: nothing has FlashMLA's functions here: {why}")
    if primitive is SPARSE_PREFILL:
        return prefill_on(found, request, TorchBoundary(), limits=limits)
    # how a vendor's kernel deals out rows is not known: as on Hopper, which has the most parts
    parts = partial(num_sm_parts, "sm90", num_sms=request.device.num_sms)
    whole_rows = support.needs_whole_rows
    return decode_on(found, request, TorchBoundary(), parts, LAYOUTS[layout], whole_rows=whole_rows, limits=limits)
