# SPDX-License-Identifier: Apache-2.0
"""The checks that argument validation is built from; each raises InvalidArgument with what was got and what was expected.

They run before every convenience call, so the good case reads each property of a tensor once and builds no text; what
went wrong is worked out after the fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from mla_portable.contracts.layouts import BF16, FP8_DS_MLA, CacheLayout, layout_of
from mla_portable.contracts.values import CACHE_ALIGNMENT, describe, refuse

__all__ = ["check_cache", "check_disjoint", "check_tensor", "placement", "shape_of"]

_SCALE_ALIGNMENT: Final = 4
"""Bytes; the float32 scales inside an FP8 row are read as such, and 656 is a multiple of it."""


def shape_of(where: str, argument: str, value: Any, rank: int, axes: str, remedy: str = "") -> torch.Size:
    """The shape of a tensor that must have `rank` dimensions.

    Args:
        where, argument: names for the message. value: what the caller passed. axes: the expected shape in words.
        remedy: what to do about another rank.
    Raises: InvalidArgument when `value` is no tensor or has another rank.
    """
    if not isinstance(value, Tensor):
        refuse(where, argument, describe(value), f"a tensor {axes}")
    shape = value.shape
    if len(shape) != rank:
        refuse(where, argument, f"shape {list(shape)}", f"{rank} dimensions, {axes}", remedy)
    return shape


def check_tensor(
    where: str, argument: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], device: int, axes: str
) -> None:
    """One tensor has exactly this dtype, shape and device, and its last dimension is contiguous.

    Args:
        device: what `Tensor.get_device()` says of the call's first tensor: -1 for the CPU, else the index of the GPU.
        axes: `shape` with its axes named, for the message.
    """
    if (
        isinstance(value, Tensor)
        and value.dtype is dtype
        and value.shape == shape
        and value.get_device() == device
        and (value.is_contiguous() or value.stride()[-1] == 1 or shape[-1] <= 1)
    ):
        return
    _explain_tensor(where, argument, value, dtype, shape, device, axes)


def _explain_tensor(
    where: str, argument: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], device: int, axes: str
) -> NoReturn:
    wanted = f"{axes} {str(dtype).removeprefix('torch.')}"
    if not isinstance(value, Tensor):
        refuse(where, argument, describe(value), f"a tensor {wanted}")
    if value.dtype is not dtype:
        refuse(where, argument, value.dtype, str(dtype))
    if value.shape != shape:
        refuse(where, argument, f"shape {list(value.shape)}", f"{axes} = {list(shape)}")
    if value.get_device() != device:
        home = "cpu" if device < 0 else f"cuda:{device}"
        refuse(where, argument, f"a tensor on {value.device}", f"one on {home}, like the call's first tensor")
    refuse(
        where,
        argument,
        f"strides {list(value.stride())}",
        f"{axes} whose last dimension is contiguous (stride 1)",
        f"Pass {argument}.contiguous().",
    )


def check_cache(where: str, argument: str, value: Any, device: int) -> tuple[CacheLayout, int, int]:
    """A paged cache: [blocks, block_size, 576] bfloat16 or [blocks, block_size, 656] uint8.

    Rows are contiguous and adjacent within a block; blocks may lie further apart than a block is long. FP8 rows start at
    multiples of 4 bytes, because float32 scales stand inside them.

    Returns: its layout, blocks, block_size.
    """
    axes = "[blocks, block_size, 576] bfloat16 or [blocks, block_size, 656] uint8"
    if not isinstance(value, Tensor):
        refuse(where, argument, describe(value), f"a tensor {axes}")
    shape = value.shape
    if len(shape) != 3:
        one_head = len(shape) == 4 and shape[2] == 1
        refuse(where, argument, f"shape {list(shape)}", axes, f"Pass {argument}.squeeze(2)." if one_head else "")
    dtype, (blocks, block_size, width) = value.dtype, shape
    if dtype is torch.uint8 and width == FP8_DS_MLA.row_width:
        layout = FP8_DS_MLA
    elif dtype is torch.bfloat16 and width == BF16.row_width:
        layout = BF16
    else:
        layout = layout_of(value, where=where, argument=argument)  # says what is wrong
    if block_size < 1:
        refuse(where, argument, f"block_size {block_size}", "a block of at least 1 token")
    if value.get_device() != device:
        home = "cpu" if device < 0 else f"cuda:{device}"
        refuse(where, argument, f"a tensor on {value.device}", f"one on {home}, like the call's first tensor")
    block_stride, row_stride, stride = value.stride()
    if stride != 1 or (row_stride != width and block_size > 1) or (block_stride < block_size * width and blocks > 1):
        refuse(
            where,
            argument,
            f"strides {[block_stride, row_stride, stride]}",
            f"[{block_size * width} or more, {width}, 1]: whole rows, one after the other within a block",
            "Slice the cache by blocks only.",
        )
    if layout is FP8_DS_MLA and (block_stride | value.data_ptr()) % _SCALE_ALIGNMENT:
        refuse(
            where,
            argument,
            f"address {value.data_ptr():#x}, block stride {block_stride} bytes",
            f"both multiples of {_SCALE_ALIGNMENT} bytes, for the float32 scales inside a row",
            "Allocate the cache by itself, or pad its blocks.",
        )
    return layout, blocks, block_size


def placement(cache: Tensor) -> tuple[int, bool]:
    """How a checked cache (or flat rows) lies in memory: `cache_alignment` and `uneven_blocks` of `contracts.Request`."""
    apart = cache.stride()[0] if cache.shape[0] > 1 else 0
    bits = cache.data_ptr() | (apart * cache.element_size()) | CACHE_ALIGNMENT
    return bits & -bits, bool(apart % cache.shape[-1])


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one that a tensor may touch."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + span * tensor.element_size()


def check_disjoint(where: str, written: Mapping[str, Tensor | None], read: Mapping[str, Tensor | None]) -> None:
    """What is written overlaps nothing that is read, and nothing else that is written.

    All are known to lie on one device. Address ranges are compared, so views that interleave count as overlapping.
    """
    extents: list[tuple[int, int]] = []
    for tensor in (*written.values(), *read.values()):
        if tensor is not None:
            if tensor.is_contiguous():
                begin = tensor.data_ptr()
                extents.append((begin, begin + tensor.nbytes))
            else:
                extents.append(_extent(tensor))
    extents.sort()
    reached = 0
    for begin, end in extents:
        if begin == end:
            continue
        if begin < reached:
            _explain_overlap(where, written, read)  # returns where only inputs overlap, which is allowed
            return
        reached = end


def _explain_overlap(where: str, written: Mapping[str, Tensor | None], read: Mapping[str, Tensor | None]) -> None:
    taken = [(name, *_extent(tensor)) for name, tensor in read.items() if tensor is not None]
    for name, tensor in written.items():
        if tensor is None:
            continue
        begin, end = _extent(tensor)
        for other, other_begin, other_end in taken:
            if max(begin, other_begin) < min(end, other_end):
                refuse(
                    where,
                    name,
                    f"memory that overlaps {other}",
                    "memory of its own: inputs are still read while results are written",
                    f"Allocate {name} separately.",
                )
        taken.append((name, begin, end))
