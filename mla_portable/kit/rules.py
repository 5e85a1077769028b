# SPDX-License-Identifier: Apache-2.0
"""The checks that argument validation is built from; each raises InvalidArgument with what was got and what was expected.

They run before every convenience call, so the good case reads each property of a tensor once and builds no text; what
went wrong is worked out after the fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from mla_portable.contracts.values import CACHE_ALIGNMENT, describe, refuse
from mla_portable.layouts import KV, LAYOUTS, Cache, CacheLayout, layout_names, layout_of

_NO_SCRATCH: Final[Mapping[str, tuple[int, int]]] = MappingProxyType({})

_STRIDED: Final = torch.strided


def check_dense(where: str, argument: str, value: Any, axes: str) -> None:
    """A tensor with strides and data: neither nested nor sparse, and on no meta device; the call records no gradient for it."""
    if not isinstance(value, Tensor):
        refuse(where, argument, describe(value), f"a tensor {axes}")
    if value.is_nested or value.layout is not _STRIDED:
        refuse(where, argument, describe(value), f"a dense tensor {axes}")
    if value.is_meta:
        refuse(where, argument, describe(value), f"a tensor {axes} on a device that holds data")
    check_no_gradient(where, argument, value)


def check_no_gradient(where: str, argument: str, value: Tensor) -> None:
    """torch would record no gradient for a call with this tensor, for nothing here has a backward.

    A result without a graph would end the caller's graph silently. A tensor that requires a gradient, such as a parameter, is
    accepted where gradients are switched off.
    """
    if value.requires_grad and torch.is_grad_enabled():
        remedy = f"Call it under torch.no_grad() or torch.inference_mode(), or pass {argument}.detach()."
        expected = "one without, while torch records gradients: there is no backward here"
        refuse(where, argument, "a tensor that requires a gradient", expected, remedy)


def shape_of(where: str, argument: str, value: Any, rank: int, axes: str, remedy: str = "") -> torch.Size:
    """The shape of a tensor that must have `rank` dimensions.

    Args:
        where, argument: names for the message. value: what the caller passed. axes: the expected shape in words.
        remedy: what to do about another rank.
    Raises: InvalidArgument when `value` is no dense tensor or has another rank.
    """
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not _STRIDED or value.is_meta:
        check_dense(where, argument, value, axes)
    shape = value.shape
    if len(shape) != rank:
        refuse(where, argument, f"shape {list(shape)}", f"{rank} dimensions, {axes}", remedy)
    return shape


def check_tensor(
    where: str, argument: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, axes: str
) -> None:
    """One dense tensor has exactly this dtype, shape and device, and its last dimension is contiguous.

    Args:
        device: with its index, that of the call's first tensor. axes: `shape` with its axes named, for the message.
    """
    try:
        if (
            isinstance(value, Tensor)
            and value.dtype is dtype
            and value.shape == shape
            and value.layout is _STRIDED
            and value.device == device
            and (value.is_contiguous() or value.stride()[-1] == 1 or shape[-1] <= 1)
            and not value.is_neg()
            and not (value.requires_grad and torch.is_grad_enabled())
        ):
            return
    except RuntimeError:  # nested and sparse tensors have no shape or no strides: explained below
        pass
    _explain_tensor(where, argument, value, dtype, shape, device, axes)


def _explain_tensor(
    where: str, argument: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, axes: str
) -> NoReturn:
    wanted = f"{axes} {str(dtype).removeprefix('torch.')}"
    check_dense(where, argument, value, wanted)  # raises for a gradient, too
    if value.dtype is not dtype:
        refuse(where, argument, value.dtype, str(dtype))
    if value.shape != shape:
        refuse(where, argument, f"shape {list(value.shape)}", f"{axes} = {list(shape)}")
    if value.device != device:
        _refuse_device(where, argument, value, device)
    check_resolved(where, argument, value)
    refuse(
        where,
        argument,
        f"strides {list(value.stride())}",
        f"{axes} whose last dimension is contiguous (stride 1)",
        f"Pass {argument}.contiguous().",
    )


def check_resolved(where: str, argument: str, value: Tensor) -> None:
    """The numbers in memory are those of the tensor: it is no view that torch negates when it is read."""
    if value.is_neg():
        refuse(where, argument, "a tensor with the negative bit set", "one without", f"Pass {argument}.resolve_neg().")


def _refuse_device(where: str, argument: str, value: Tensor, device: torch.device) -> NoReturn:
    refuse(where, argument, f"a tensor on {value.device}", f"one on {device}, like the call's first tensor")


class CacheFacts(NamedTuple):
    """The fields of a Request that a cache decides. block_size: None for flat rows."""

    kv_layout: str
    block_size: int | None
    cache_alignment: int
    uneven_blocks: bool

    @property
    def layout(self) -> CacheLayout:
        return LAYOUTS[self.kv_layout]

    def beside(self, other: CacheFacts) -> CacheFacts:
        """These, of a call that reads another cache of the same layout as well."""
        alignment = min(self.cache_alignment, other.cache_alignment)
        return CacheFacts(self.kv_layout, self.block_size, alignment, self.uneven_blocks or other.uneven_blocks)


def check_cache(
    where: str,
    argument: str,
    value: Any,
    device: torch.device,
    cache: str = KV,
    *,
    kv_layout: str | None = None,
    may_overlap: bool = False,
) -> CacheFacts:
    """A paged cache [blocks, block_size, row width] of one of `mla_portable.layouts`: of `cache`, KV or INDEX. It is a tuple of
    such tensors where the layout has several.

    Rows are contiguous and adjacent within a block; blocks may lie further apart than a block is long. Blocks of a quantised
    layout start at multiples of its alignment, because scales stand inside them.

    Args:
        kv_layout: the name of its layout, None to infer it. may_overlap: for a cache that is only read: blocks of a single row
            without scales may overlap, so that rows which begin every few elements of other memory can be named.
    Raises: InvalidArgument.
    """
    if isinstance(value, tuple):
        return _check_tensors(where, argument, cast("tuple[Any, ...]", value), device, cache, kv_layout)
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not _STRIDED or value.requires_grad:
        check_dense(where, argument, value, _cache_axes(cache))
    shape = value.shape
    if len(shape) != 3:
        one_head = len(shape) == 4 and shape[2] == 1
        refuse(where, argument, f"shape {list(shape)}", _cache_axes(cache), f"Pass {argument}.squeeze(2)." if one_head else "")
    layout = layout_of(value, name=kv_layout, where=where, argument=argument, cache=cache)
    _, block_size, width = shape
    if block_size < 1:
        refuse(where, argument, f"block_size {block_size}", "a block of at least 1 token")
    if value.device != device:
        _refuse_device(where, argument, value, device)
    least = 1 if may_overlap and block_size == 1 and not layout.in_place else block_size * width
    distance = _block_distance(where, argument, value, shape, least)
    alignment = _alignment(value.data_ptr(), distance * layout.dtype.itemsize)
    if alignment < layout.alignment:
        _refuse_alignment(where, argument, value, layout.alignment)
    return CacheFacts(layout.name, block_size, alignment, bool(distance % layout.row_pitch))


def _check_tensors(
    where: str, argument: str, value: tuple[Any, ...], device: torch.device, cache: str, kv_layout: str | None
) -> CacheFacts:
    """`check_cache` of a cache in several tensors. Each may have blocks any distance apart."""
    for at, each in enumerate(value):
        check_dense(where, f"{argument}[{at}]", each, "[blocks, block_size, width]")
        shape_of(where, f"{argument}[{at}]", each, 3, "[blocks, block_size, width]")
    layout = layout_of(value, name=kv_layout, where=where, argument=argument, cache=cache)
    blocks, block_size = value[0].shape[:2]
    alignment, uneven = CACHE_ALIGNMENT, False
    for at, each in enumerate(value):
        name, width = f"{argument}[{at}]", each.shape[2]
        if each.shape[:2] != (blocks, block_size):
            refuse(where, name, f"shape {list(each.shape)}", f"[{blocks}, {block_size}, {width}], as {argument}[0] has blocks")
        if block_size < 1:
            refuse(where, name, f"block_size {block_size}", "a block of at least 1 token")
        if each.device != device:
            _refuse_device(where, name, each, device)
        distance = _block_distance(where, name, each, each.shape, block_size * width)
        own = _alignment(each.data_ptr(), distance * each.element_size())
        if own < layout.alignment:
            _refuse_alignment(where, name, each, layout.alignment)
        alignment, uneven = min(alignment, own), uneven or bool(distance % width)
    return CacheFacts(layout.name, block_size, alignment, uneven)


def _block_distance(where: str, argument: str, value: Tensor, shape: torch.Size, least: int) -> int:
    """Elements from block to block, 0 for a single one; refuses rows that do not follow one another. least: that it must be."""
    (blocks, block_size, width), (block_stride, row_stride, stride) = shape, value.stride()
    if stride != 1 or (row_stride != width and block_size > 1) or (block_stride < least and blocks > 1):
        refuse(
            where,
            argument,
            f"strides {[block_stride, row_stride, stride]}",
            f"[{least} or more, {width}, 1]: whole rows, one after the other within a block",
            "Slice the cache by blocks only.",
        )
    return block_stride if blocks > 1 else 0


def _refuse_alignment(where: str, argument: str, value: Tensor, alignment: int) -> NoReturn:
    refuse(
        where,
        argument,
        f"address {value.data_ptr():#x}, block stride {value.stride(0) * value.element_size()} bytes",
        f"both multiples of {alignment} bytes, for the scales of a row",
        "Allocate the cache by itself, or pad its blocks.",
    )


def _cache_axes(cache: str) -> str:
    known = (LAYOUTS[name] for name in layout_names(cache) if not LAYOUTS[name].tensors)
    caches = (f"[blocks, block_size, {row.row_width}] {str(row.dtype).removeprefix('torch.')}" for row in known)
    return " or ".join(caches)


def _alignment(address: int, stride: int) -> int:
    """The greatest power of two, up to CACHE_ALIGNMENT, that divides both."""
    bits = address | stride | CACHE_ALIGNMENT
    return bits & -bits


def facts_of_rows(rows: Tensor, layout: CacheLayout) -> CacheFacts:
    """Of contiguous flat rows [W, row width]."""
    return CacheFacts(layout.name, None, _alignment(rows.data_ptr(), rows.shape[1] * rows.element_size()), False)


def check_flat_rows(where: str, argument: str, rows: Tensor, layout: CacheLayout, device: torch.device) -> None:
    """[W, row width] of a layout without scales, whose rows follow one another."""
    width = layout.row_width
    axes = f"[W, {width}]"
    num_rows, _ = shape_of(where, argument, rows, 2, axes)
    check_tensor(where, argument, rows, layout.dtype, (num_rows, width), device, axes)
    if num_rows > 1 and rows.stride()[0] != width:
        refuse(where, argument, f"strides {list(rows.stride())}", f"{axes} contiguous", f"Pass {argument}.contiguous().")


def named_tensors(name: str, cache: Cache | None) -> dict[str, Tensor | None]:
    """A cache as what `check_disjoint` takes: by name, one entry for each of its tensors."""
    if isinstance(cache, tuple):
        return {f"{name}[{at}]": each for at, each in enumerate(cache)}
    return {name: cache}


def extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one that a tensor may touch."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    if tensor.numel() == 0:
        return begin, begin
    span = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):  # no sum(): a generator takes twice as long
        span += (size - 1) * stride
    return begin, begin + span * tensor.element_size()


def check_rows_apart(where: str, argument: str, tensor: Tensor) -> None:
    """No two elements share memory: going up by stride, every dimension steps past all that the smaller ones reach."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                strides = f"strides {list(tensor.stride())} for shape {list(tensor.shape)}"
                expected = "memory of its own for each element, because it is written"
                refuse(where, argument, strides, expected, f"Allocate {argument} with torch.empty, without expand.")
            reach += (size - 1) * stride


def check_disjoint(
    where: str,
    written: Mapping[str, Tensor | None],
    read: Mapping[str, Tensor | None],
    scratch: Mapping[str, tuple[int, int]] = _NO_SCRATCH,
) -> None:
    """What is written overlaps nothing that is read, nothing else that is written, and not itself.

    All are known to lie on one device. Address ranges are compared, so views that interleave count as overlapping.

    Args:
        scratch: name -> address range of memory that the call writes as well; ranges do not overlap each other.
    """
    extents = list(scratch.values())
    for tensors in (written, read):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.is_contiguous():
                begin = tensor.data_ptr()
                extents.append((begin, begin + tensor.nbytes))
            else:
                extents.append(extent(tensor))
                if tensors is written:
                    check_rows_apart(where, name, tensor)
    extents.sort()
    reached = 0
    for begin, end in extents:
        if begin == end:
            continue
        if begin < reached:
            _explain_overlap(where, written, read, scratch)  # returns where only inputs overlap, which is allowed
            return
        reached = end


def _explain_overlap(
    where: str,
    written: Mapping[str, Tensor | None],
    read: Mapping[str, Tensor | None],
    scratch: Mapping[str, tuple[int, int]],
) -> None:
    results = {name: extent(tensor) for name, tensor in written.items() if tensor is not None}
    inputs = {name: extent(tensor) for name, tensor in read.items() if tensor is not None}
    taken = {**inputs, **scratch}
    for name, mine in results.items():
        for other, its in taken.items():
            if _overlap(mine, its):
                expected = "memory of its own: inputs are still read while results are written"
                refuse(where, name, f"memory that overlaps {other}", expected, f"Allocate {name} separately.")
        taken[name] = mine
    for name, mine in inputs.items():
        for other, its in scratch.items():
            if _overlap(mine, its):
                expected = "memory of its own: the call writes intermediate results there"
                refuse(where, name, f"memory that overlaps {other}", expected, f"Allocate {name} separately.")


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])
