# SPDX-License-Identifier: Apache-2.0
"""CacheLayout: how a cached token lies in memory, as a value; and the table of the layouts that are known.

There are two caches: "kv", which attention reads, and "index", the keys that the indexer scores. A token is a latent of
`value_width` numbers, which is its value and the first part of its key, and a rotary part of `rope_width` numbers, the rest of
its key; a token of the indexer is a latent alone. Whatever depends on these widths, or on where they lie, asks the layout.

A plugin adds a layout where it is imported: `add_layout(CacheLayout(...))`. Names are taken once in a process. Layouts may
share dtype and row width: then a call names the one that its cache has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.errors import InvalidArgument

KV: Final = "kv"
INDEX: Final = "index"
TOLERANCES: Final = ("bf16", "pow2", "amax")
"""What a layout's tolerances may be those of: rows without scales, with scales that are powers of two, with any scales."""


Cache = Tensor | tuple[Tensor, ...]
"""A paged cache, or some of its rows: one tensor, or one for each of `CacheLayout.tensors`."""


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One of several tensors [blocks, block_size, width] that a cache consists of."""

    name: str
    dtype: torch.dtype
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """One row format of the paged cache `[blocks, block_size, row_width]`, or of flat rows `[W, row_width]`.

    A layout whose rows are latent and rotary part side by side in one dtype, or in a tensor each, is an instance of this class.
    Any other is a subclass with `pack` and `split` of its own.

    Attributes:
        name: what requests, declarations and records call it.
        cache: KV or INDEX, the cache that has such rows.
        dtype: of the tensor. row_width: elements of `dtype` in a row.
        value_width: numbers of the latent. rope_width: numbers of the rotary part, 0 where there is none.
        rope_offset: bytes from the start of a row to its rotary part, or to the last numbers of the latent where these are
            stored as that would be; the latent starts with the row.
        scale_offset: bytes from the start of a row to its scales, None where a row carries none.
        scale_formats: ways to choose the scales, the most general last: readers take scales of unknown origin for that one.
            Empty for layouts that are not quantised.
        apart_bytes: the last bytes of a row, where they lie behind the rows of their block instead of inside the row: those of
            token t of a block at block_size * (row_bytes - apart_bytes) + t * apart_bytes. Offsets count as if they were
            inside.
        tensors: where the cache consists of several tensors: what each holds of a row. `kv_cache` is then a tuple of them, in
            this order, with the same blocks and block size, and only `pack`, `split` and kernels that declare the layout know
            what is where. `dtype`, `row_width` and offsets are those of a row with all of it side by side.
        alignment: bytes, of the widest number in a row, or of what is read as one; addresses of blocks are multiples of it.
        upconverted: the layout of the rows that gather_upconvert makes of these; None for layouts that are not quantised and in
            one tensor, whose rows are copied.
        contents: a row in words, for error messages.
        block_size: tokens of every block, where blocks are arranged as a whole; None where they may have any number.
        tensor_scale: the numbers of a row count `kv_scale` times, a scale for the whole cache that each call brings. Such rows
            have no scales of their own. `pack` is given numbers that were divided by it, and `split` gives them so.
        inferred: calls that name no layout take a tensor of this dtype and row width for one of this layout. False for a layout
            that is always named: of a plugin whose rows have the width of another layout, so that callers who name none keep
            theirs.
        tolerance: how far results over such rows may lie from the oracle, which reads them by `split` in float64: as over
            "bf16" rows, whose numbers a kernel multiplies as they are, or over "amax" ones, which it may round to bfloat16
            first (docs/dev/accuracy.md). None: as the scale format says where it is "pow2" or "amax", else as over "bf16".
    Raises: InvalidArgument for widths and offsets that contradict each other.
    """

    name: str
    cache: str = KV
    dtype: torch.dtype
    row_width: int
    value_width: int
    rope_width: int = 0
    rope_offset: int
    scale_offset: int | None = None
    scale_formats: tuple[str, ...] = ()
    apart_bytes: int = 0
    tensors: tuple[CacheTensor, ...] = ()
    alignment: int
    upconverted: CacheLayout | None = None
    contents: str = ""
    block_size: int | None = None
    tensor_scale: bool = False
    inferred: bool = True
    tolerance: str | None = None

    def __post_init__(self) -> None:
        def check(field: str, holds: bool, expected: str) -> None:
            if not holds:
                raise InvalidArgument(f"CacheLayout {self.name!r}", field, got=repr(getattr(self, field)), expected=expected)

        for field in ("name", "cache", "contents"):
            check(field, type(getattr(self, field)) is str, "a string")
        check("dtype", isinstance(self.dtype, torch.dtype), "a torch.dtype")
        for field in ("row_width", "value_width", "rope_width", "rope_offset", "apart_bytes", "alignment"):
            check(field, type(getattr(self, field)) is int, "an integer")
        check("scale_offset", self.scale_offset is None or type(self.scale_offset) is int, "an integer, or None")
        size = self.block_size
        check("block_size", size is None or (type(size) is int and size >= 1), "None or an integer, at least 1")
        check("tolerance", self.tolerance in (None, *TOLERANCES), f"None or one of {', '.join(TOLERANCES)}")
        check("tensor_scale", type(self.tensor_scale) is bool, "True or False")
        check("tensor_scale", not (self.tensor_scale and self.scale_formats), "False for rows with scales of their own")
        check("inferred", type(self.inferred) is bool, "True or False")
        names: tuple[object, ...] = self.scale_formats
        check("scale_formats", type(names) is tuple and all(type(each) is str for each in names), "a tuple of strings")
        check("upconverted", isinstance(self.upconverted, (CacheLayout, type(None))), "a CacheLayout, or None")
        check("cache", self.cache in (KV, INDEX), f"{KV!r} or {INDEX!r}")
        check("value_width", self.value_width >= 1, "at least 1")
        check("rope_width", self.rope_width >= 0, "at least 0")
        check("rope_offset", 0 <= self.rope_offset <= self.row_bytes, f"at most row_bytes = {self.row_bytes}")
        check("apart_bytes", 0 <= self.apart_bytes < self.row_bytes, f"less than row_bytes = {self.row_bytes}")
        check("alignment", self.alignment in (1, 2, 4, 8, 16), "a power of two up to 16")
        parts: tuple[object, ...] = self.tensors
        check("tensors", type(parts) is tuple and all(type(each) is CacheTensor for each in parts), "a tuple of CacheTensors")
        if self.tensors:
            held = sum(each.width * each.dtype.itemsize for each in self.tensors)
            check("row_width", self.row_bytes == held, f"what the tensors hold of a row, {held} bytes")
            check("apart_bytes", not self.apart_bytes, "0: what lies apart is a tensor")
        if not self.is_quantized:
            check("row_width", self.row_width == self.key_width, f"key_width = {self.key_width} for a layout without scales")
        elif self.scale_formats:
            check("scale_offset", self.scale_offset is not None, "the offset of the scales")
        if not self.in_place:
            check("upconverted", self.upconverted is None, "None for a layout without scales")
        else:
            rows = self.upconverted
            widths = None if rows is None else (rows.cache, rows.in_place, rows.value_width, rows.key_width)
            wanted = (self.cache, False, self.value_width, self.key_width)
            check("upconverted", widths == wanted, "a layout of the same widths without scales, in one tensor")

    @property
    def key_width(self) -> int:
        """Numbers of a query and of a key."""
        return self.value_width + self.rope_width

    @property
    def row_bytes(self) -> int:
        return self.row_width * self.dtype.itemsize

    @property
    def row_pitch(self) -> int:
        """Elements from a row to the next one of its block."""
        return self.row_width - self.apart_bytes // self.dtype.itemsize

    @property
    def is_quantized(self) -> bool:
        """Numbers count times a scale, of the row or of the whole cache."""
        return bool(self.scale_formats) or self.tensor_scale

    @property
    def in_place(self) -> bool:
        """Rows are read from the paged cache alone. Those of other layouts, in one tensor without scales, as flat rows too."""
        return self.is_quantized or bool(self.tensors)

    def tolerance_of(self, scale_format: str | None) -> str:
        """One of TOLERANCES, for rows whose scales were made so; None for a layout without scales."""
        return self.tolerance or (scale_format if scale_format in TOLERANCES else TOLERANCES[0])

    def scale_format_near(self, name: str) -> str:
        """`name` where this layout has such scales, else its first scale format; `name` for a layout without scales."""
        return name if name in self.scale_formats or not self.scale_formats else self.scale_formats[0]

    def scale_formats_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of `names` that are ways to choose the scales of this layout, in their order."""
        return tuple(name for name in names if name in self.scale_formats)

    @property
    def workspace(self) -> CacheLayout:
        """The layout of a workspace that rows of this one are gathered into."""
        return self.upconverted or self

    def parts(self, cache: Cache) -> tuple[Tensor, ...]:
        """Views of a paged cache [blocks, block_size, row_width] that together, side by side, are its rows.

        Returns: the cache itself, or [blocks, block_size, ...] of what lies inside the rows and of what lies apart.
        """
        if isinstance(cache, tuple):
            return cache
        if not self.apart_bytes:
            return (cache,)
        blocks, size, width = cache.shape
        apart = self.apart_bytes // self.dtype.itemsize
        whole = cache.as_strided((blocks, size * width), (cache.stride(0), 1))
        inside, behind = whole.split([size * (width - apart), size * apart], dim=1)
        return inside.unflatten(1, (size, width - apart)), behind.unflatten(1, (size, apart))

    def pieces(self, rows: Cache) -> tuple[Tensor, ...]:
        """Rows [..., row_width], as `pack` makes them, as what of them lies in each of `parts`."""
        if isinstance(rows, tuple):
            return rows
        return rows.split([self.row_pitch, self.row_width - self.row_pitch], dim=-1) if self.apart_bytes else (rows,)

    def joined(self, pieces: Sequence[Tensor]) -> Cache:
        """The opposite of `pieces`."""
        if self.tensors:
            return tuple(pieces)
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=-1)

    def pack(self, latent: Tensor, rope: Tensor, scale_format: str | None = None) -> Cache:
        """Tokens as rows.

        Args:
            latent: [T, value_width] floating point. rope: [T, rope_width]. scale_format: one of `scale_formats`, None for the
                first; ignored by layouts without scales.
        Returns: [T, row_width] of `dtype`; with `tensors` a tuple of [T, width], one for each.
        """
        if self.tensors:
            halves = zip((latent, rope), self.tensors, strict=True)
            return tuple(half.to(each.dtype) for half, each in halves)
        return torch.cat([latent, rope], dim=-1).to(self.dtype)

    def split(self, rows: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows as numbers, the two parts apart.

        Args:
            rows: [..., row_width], any strides, on any device; with `tensors` a tuple of [..., width]. dtype: of the result.
                Products with scales are taken in float64 where that is asked for, else in float32, and rounded once.
        Returns: latent [..., value_width] and rope [..., rope_width].
        """
        if self.tensors:
            latent, rope = rows
            return latent.to(dtype), rope.to(dtype)
        return rows[..., : self.value_width].to(dtype), rows[..., self.value_width :].to(dtype)

    def unpack(self, rows: Cache, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Rows [..., row_width] as keys [..., key_width] of `dtype`; `split` in one tensor."""
        return torch.cat(self.split(rows, dtype), dim=-1)


_layouts: dict[str, CacheLayout] = {}
_by_rows: dict[tuple[object, ...], tuple[CacheLayout, ...]] = {}
"""(cache, dtype, row width), or (cache, (dtype, width), ...) -> the layouts that such tensors may have where none is named."""
LAYOUTS: Final[Mapping[str, CacheLayout]] = MappingProxyType(_layouts)
"""name -> layout: the core's, then those that plugins added."""


def add_layout(layout: CacheLayout) -> CacheLayout:
    """Make a layout known in this process, and return it. To add an equal one again changes nothing.

    Raises: InvalidArgument when another layout has the name.
    """
    if not isinstance(layout, CacheLayout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument("add_layout", "layout", got=type(layout).__name__, expected="a CacheLayout")
    known = _layouts.get(layout.name)
    if known is not None:
        if known != layout:
            got = f"another {layout.name!r}, {_rows_of(layout)}"
            expected = f"a name that is not taken: {layout.name!r} has {_rows_of(known)}"
            raise InvalidArgument("add_layout", "layout", got=got, expected=expected)
        return known
    _layouts[layout.name] = layout
    if layout.inferred:
        rows = layout.cache, *_kind_of(layout)
        _by_rows[rows] = (*_by_rows.get(rows, ()), layout)
    return layout


def layout_names(cache: str = KV) -> tuple[str, ...]:
    """Names of the layouts of one cache: the core's, then those that plugins added."""
    return tuple(layout.name for layout in LAYOUTS.values() if layout.cache == cache)


def scale_formats() -> tuple[str, ...]:
    """The scale formats of all layouts."""
    return tuple(dict.fromkeys(name for layout in LAYOUTS.values() for name in layout.scale_formats))


def layout_of(
    kv: Cache, *, name: str | None = None, where: str = "layout_of", argument: str = "kv_cache", cache: str = KV
) -> CacheLayout:
    """The layout of a cache or workspace: the one that is named, or the only one with its dtype and row width.

    Args:
        kv: [..., row_width] of a layout's dtype, or a tuple of its tensors. name: of the layout, None to infer it.
        where, argument: names for the error message. cache: KV or INDEX.
    Raises: InvalidArgument for a name that no layout of that cache has, for a tensor that has not the named layout's dtype and
        last dimension, and without a name when no layout has these, or several have.
    """
    rows: tuple[object, ...]
    if isinstance(kv, tuple):
        rows = tuple([(each.dtype, each.shape[-1] if each.dim() else 0) for each in kv])
    else:
        rows = kv.dtype, kv.shape[-1] if kv.dim() else 0
    if name is None:
        found = _by_rows.get((cache, *rows))
        if found is not None and len(found) == 1:
            return found[0]
    else:
        layout = _layouts.get(name)
        if layout is not None and layout.cache == cache and rows == _kind_of(layout):
            return layout
    raise _wrong_rows(rows, name, where, argument, cache)


def _kind_of(layout: CacheLayout) -> tuple[object, ...]:
    """(dtype, row width), or a pair for each tensor."""
    if layout.tensors:
        return tuple([(each.dtype, each.width) for each in layout.tensors])
    return layout.dtype, layout.row_width


def _wrong_rows(rows: tuple[Any, ...], name: str | None, where: str, argument: str, cache: str) -> InvalidArgument:
    """Why a tensor has no known layout, or not the one that was named."""
    known = [LAYOUTS[each] for each in layout_names(cache)]
    fitting = [row for row in known if _kind_of(row) == rows]
    several = [row.name for row in fitting if row.inferred]
    got = _in_words(rows)
    if name is not None:
        named = _layouts.get(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if named is None or named.cache != cache:
            return InvalidArgument(where, "kv_layout", got=repr(name), expected=f"one of {', '.join(layout_names(cache))}")
        words = f" ({' or '.join(several)})" if several else ""
        return InvalidArgument(where, argument, got=got + words, expected=f"{_rows_of(named)} ({name})")
    if several:
        remedy = f"Pass kv_layout=, one of {', '.join(map(repr, several))}."
        expected = f"a named layout, for {' and '.join(several)} have such rows"
        return InvalidArgument(where, argument, got=got, expected=expected, remedy=remedy)
    remedy = ""
    if fitting:
        remedy = f"Pass kv_layout={' or '.join(repr(row.name) for row in fitting)}, which is never inferred."
    elif rows and isinstance(rows[0], torch.dtype):
        dtype, width = rows
        if dtype.itemsize == 1 and any(_kind_of(row) == (torch.uint8, width) != rows for row in known):
            remedy = f"Pass the same bytes as uint8: {argument}.view(torch.uint8)."
        elif dtype == torch.uint8:
            remedy = next((f"A row holds {row.contents}: do not slice it." for row in known if row.dtype == dtype), "")
    inferred = [row for row in known if row.inferred]
    expected = " or ".join(f"{_rows_of(row)} ({row.name})" for row in inferred)
    return InvalidArgument(where, argument, got=got, expected=expected, remedy=remedy)


def _rows_of(layout: CacheLayout) -> str:
    return _in_words(_kind_of(layout))


def _in_words(rows: tuple[Any, ...]) -> str:
    """What `_kind_of` says."""
    if rows and isinstance(rows[0], torch.dtype):
        return f"{rows[0]} rows of {rows[1]}"
    return f"a tuple of {', '.join(f'{dtype} rows of {width}' for dtype, width in rows) or 'no tensors'}"
