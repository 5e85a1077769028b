# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs: cached tokens, paged caches whose unused memory is NaN, index rows with holes in chosen places."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts.values import CACHE_ALIGNMENT
from mla_portable.errors import MLAPortableError
from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN, plugin_layout
from mla_portable.layouts import SCALE_GROUP, Cache, CacheLayout, CacheTensor

PATTERNS: Final = ("dense", "holes", "front", "middle", "end", "absent", "corpus", "duplicates", "first", "last")
"""Where a row of indices has invalid entries.

dense       nowhere; slot 0 and the last slot are used
holes       40 % of the places        front, middle, end   a third of the row, there
absent      every other row wholly; the rest has holes
corpus      half of the places, taking the values of `corpus` in turn; the other patterns use -1
duplicates  nowhere, and few slots are named many times
first       everywhere but at the first place; last: everywhere but at the last
"""
SIZES: Final = ("plain", "large", "loud_head", "loud_keys", "loud_group")
"""Magnitudes of an attention problem. Each head's result is held against that head's own magnitude.

large       queries and tokens eight times larger: scores reach hundreds, and exp overflows unless the maximum is taken off
loud_head   head 1 of the query is 2^20 times larger than the others
loud_keys   the latents of every fourth token are 2^16 times larger, and its scores so low that it contributes nothing
loud_group  the first 128 values of every token are 2^12 times larger, and the queries are 0 there
"""
PAIR_BLOCK: Final = 8
"""Tokens that a block must hold for a cache of two of them to make a case."""
MIXED: Final = "mixed"
"""The pattern of a probe: rows in turn that are full, have four holes, are absent and have a single entry, or the last three
where there are not as many rows as that. What is invalid is so by little (`near`): memory that a faulty kernel may read."""
MIXED_TOKENS: Final = 48
"""Tokens that such a problem's cache holds."""
SLAB_LAYERS: Final = 3
"""Layers of a slab, a buffer in which the pages of a block, one of each layer, follow one another; a case has a later one."""
GUARD_ROWS: Final = 64
"""Rows at least before and behind the blocks of a cache, which keep their alignment."""


def seed_of(text: str) -> int:
    """A seed from a case's id: the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int) -> torch.Generator:
    """A CPU generator, so that data do not depend on the device."""
    return torch.Generator().manual_seed(seed)


def corpus(limit: int) -> tuple[int, ...]:
    """The int32 values that are invalid where `limit` indices exist."""
    return (INT32_MIN, -123456, -1, limit, limit + 114514, INT32_MAX)


def near(limit: int) -> tuple[int, ...]:
    """Values that are invalid by little where `limit` indices exist."""
    return (-1, limit, -2, limit + 1)


def shuffled(count: int, g: torch.Generator) -> Tensor:
    """[count] int64, a permutation."""
    return torch.randperm(count, generator=g)


def queries(rows: int, heads: int, layout: CacheLayout, size: str, g: torch.Generator) -> Tensor:
    """[rows, heads, key width] bf16 of a size in SIZES."""
    q = torch.randn(rows, heads, layout.key_width, generator=g)
    if size == "large":
        q *= 8
    elif size == "loud_head":
        q[:, min(1, heads - 1)] *= 2.0**20
    elif size == "loud_keys":
        q *= 2.0**-4
        q[..., _loud(layout) :] = 0
        q[..., _loud(layout)] = 32
    elif size == "loud_group":
        q[..., :SCALE_GROUP] = 0
    return q.bfloat16()


def cached_rows(
    count: int, layout: CacheLayout, scale_format: str | None, g: torch.Generator, *, size: str = "plain"
) -> Tensor:
    """[count, row_bytes] uint8: tokens as the cache holds them, of a size in SIZES; groups of a token differ by up to 2^4."""
    values = torch.randn(count, layout.key_width, generator=g)
    loudness = 2.0 ** torch.randint(-3, 2, (count, -(-layout.key_width // 64)), generator=g).repeat_interleave(64, dim=-1)
    values = values * loudness[:, : layout.key_width]
    if size == "large":
        values *= 8
    elif size == "loud_keys":
        values[::4, : _loud(layout)] *= 2.0**16
        values[:, _loud(layout) :] = 0
        values[::4, _loud(layout)] = -20_000  # with the queries' 32 a score below all others by more than 10,000
    elif size == "loud_group":
        values[:, :SCALE_GROUP] *= 2.0**12
    assert scale_format is not None or not layout.scale_formats, "a cache with scales has a scale format"
    return packed(layout, values, scale_format)


def tensor_scale() -> Tensor:
    """[1] float32, a scale of a whole tensor: no power of two, so that it is not lost in an exponent."""
    return torch.tensor([0.3])


def packed(layout: CacheLayout, values: Tensor, scale_format: str | None) -> Tensor:
    """[n, row_bytes] uint8: keys [n, key width] as rows, all that a row has side by side."""
    rows = layout.pack(values[:, : layout.value_width], values[:, layout.value_width :], scale_format)
    return torch.cat([piece.contiguous().view(torch.uint8) for piece in layout.pieces(rows)], dim=1)


def as_rows(layout: CacheLayout, rows: Tensor) -> Cache:
    """The opposite of `packed`: what `split` takes."""
    if not layout.tensors:
        return rows.view(layout.dtype)
    parts = rows.split([each.width * each.dtype.itemsize for each in layout.tensors], dim=1)
    return tuple(part.contiguous().view(each.dtype) for part, each in zip(parts, layout.tensors, strict=True))


def _loud(layout: CacheLayout) -> int:
    """The first number of the rotary part, which loud keys have alone; the last of the latent where there is none."""
    return min(layout.value_width, layout.key_width - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """A paged cache on the CPU.

    Attributes:
        storage: [bytes] uint8, guards and gaps included. rows: [blocks, block_size, row_bytes] uint8 into it.
        view: [blocks, block_size, row_width] of the layout, the cache itself. layout: None for a cache of plain numbers.
    """

    storage: Tensor
    rows: Tensor
    view: Tensor
    layout: CacheLayout | None = None

    def put(self, slots: Tensor, rows: Tensor) -> None:
        """Store cached tokens. slots: [n] int64. rows: [n, row_bytes] uint8."""
        put_rows(self.layout, self.rows, slots, rows)


@dataclass(frozen=True, slots=True, eq=False)
class PagedTensors:
    """A paged cache of a layout with several tensors, each a `Paged` of its own. view: the tuple of them."""

    tensors: tuple[Paged, ...]

    @property
    def view(self) -> tuple[Tensor, ...]:
        return tuple(each.view for each in self.tensors)

    def put(self, slots: Tensor, rows: Tensor) -> None:
        """Store cached tokens. slots: [n] int64. rows: [n, row_bytes] uint8, as `packed` makes them."""
        widths = [each.rows.shape[2] for each in self.tensors]
        for each, values in zip(self.tensors, rows.split(widths, dim=1), strict=True):
            each.put(slots, values)


def put_rows(layout: CacheLayout | None, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store `rows` [n, width] at `slots` [n] int64 of a cache [blocks, block_size, width], each part of a row where it lies."""
    block, at = _places(cache, slots)
    parts = _parts(layout, cache)
    for part, values in zip(parts, rows.split([part.shape[2] for part in parts], dim=1), strict=True):
        part[block, at] = values.to(part.device)


def taken_rows(layout: CacheLayout, cache: Tensor, slots: Tensor) -> Tensor:
    """The opposite of `put_rows`: [n, width]."""
    block, at = _places(cache, slots)
    return torch.cat([part[block, at] for part in _parts(layout, cache)], dim=1)


def _places(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    block_size = cache.shape[1]
    return (slots // block_size).to(cache.device), (slots % block_size).to(cache.device)


def _parts(layout: CacheLayout | None, cache: Tensor) -> tuple[Tensor, ...]:
    return (cache,) if layout is None or not layout.apart_bytes else layout.parts(cache)


def guard_rows(block_size: int) -> int:
    """Rows before and behind the blocks of a cache: at least one block."""
    return max(block_size, GUARD_ROWS)


def paged(dtype: torch.dtype, width: int, num_blocks: int, block_size: int, *, gap_bytes: int = 0, alignment: int = 1) -> Paged:
    """A cache of rows of `width` elements in which every byte is 0xFF: NaN as e4m3, as bf16 and as float32.

    Args:
        gap_bytes: between blocks. alignment: of the first block, in bytes.
    """
    row = width * dtype.itemsize
    guard, stride = _up(guard_rows(block_size) * row, alignment), block_size * row + gap_bytes
    storage = torch.full((guard + num_blocks * stride + guard,), 0xFF, dtype=torch.uint8)
    return Paged(storage, *_views(storage, dtype, width, num_blocks, block_size, stride, guard))


def paged_cache(
    layout: CacheLayout, num_blocks: int, block_size: int, *, strided: bool = False, alignment: int = 1
) -> Paged | PagedTensors:
    """Likewise of a layout, with blocks `block_stride` apart; the first one is at a multiple of CACHE_ALIGNMENT."""
    cache: Paged | PagedTensors

    def made(kind: CacheLayout | CacheTensor, width: int, stride: int) -> Paged:
        gap = stride - block_size * width * kind.dtype.itemsize
        return paged(kind.dtype, width, num_blocks, block_size, gap_bytes=gap, alignment=CACHE_ALIGNMENT)

    strides = block_strides(layout, block_size, strided=strided, alignment=alignment)
    if layout.tensors:
        kinds = zip(layout.tensors, strides, strict=True)
        cache = PagedTensors(tuple(made(each, each.width, stride) for each, stride in kinds))
    else:
        cache = replace(made(layout, layout.row_width, strides[0]), layout=layout)
    if plugin_layout(layout.name) is not None:
        slots = torch.arange(num_blocks * block_size)
        cache.put(slots, poison(layout).expand(len(slots), -1))
    return cache


def poison(layout: CacheLayout) -> Tensor:
    """[row_bytes] uint8: a row that must not be read. NaN where the layout has any, else its largest numbers.

    Bytes of 0xFF where these are NaN, as they are in every layout of the core.
    """
    ones = torch.full((1, layout.row_bytes), 0xFF, dtype=torch.uint8)
    made = (torch.full((1, layout.key_width), value, dtype=torch.float64) for value in (math.nan, 2.0**15))
    rows = [ones, *(packed(layout, each, (layout.scale_formats or (None,))[0]) for each in made)]
    return next((row[0] for row in rows if layout.split(as_rows(layout, row), torch.float64)[0].isnan().all()), rows[-1][0])


def block_strides(layout: CacheLayout, block_size: int, *, strided: bool = False, alignment: int = 1) -> list[int]:
    """Bytes from block to block, of each tensor: as long as they are, rounded up to a multiple of `alignment`.

    strided: three rows further apart, at a whole multiple of the distance between rows.
    """
    if layout.tensors:
        return [_up((block_size + 3 * strided) * each.width * each.dtype.itemsize, alignment) for each in layout.tensors]
    length, pitch = block_size * layout.row_bytes, layout.row_pitch * layout.dtype.itemsize
    return [_up(length + 3 * pitch + -block_size * layout.apart_bytes % pitch if strided else length, alignment)]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _views(
    storage: Tensor, dtype: torch.dtype, width: int, num_blocks: int, block_size: int, stride: int, offset: int
) -> tuple[Tensor, Tensor]:
    size = dtype.itemsize
    rows = storage.as_strided((num_blocks, block_size, width * size), (stride, width * size, 1), offset)
    shape, strides = (num_blocks, block_size, width), (stride // size, width, 1)
    return rows, storage.view(dtype).as_strided(shape, strides, offset // size)


def vast(
    layout: CacheLayout, block_size: int, device: torch.device, *, layers: int = 0, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """A cache of more than 2**31 elements, whose memory a CPU commits only where it is touched.

    Args:
        layers: of the slab of more than 2**32 elements that it is a layer of; 0, of none. alignment: of blocks, in bytes.
    Returns: (cache on the device, rows as bytes on the device, slots [n] int64 worth using: at the start, on both sides of byte
        and of element 2**31, of a slab also of element 2**32, and at the end).
    Raises: MLAPortableError where the device has less memory left.
    """
    size, (page,) = layout.dtype.itemsize, block_strides(layout, block_size, alignment=alignment)
    stride, offset = max(layers, 1) * page, page if layers else 0
    borders = sorted({2**31, 2**31 * size, 2**32 * size} if layers else {2**31, 2**31 * size})

    def slot_at(byte: int) -> int:
        block, within = divmod(byte - offset, stride)
        return block * block_size + min(within // layout.row_bytes, block_size)

    num_blocks = -(-(slot_at(borders[-1]) + 4096) // block_size)
    storage = _room(offset + num_blocks * stride, device)
    rows, view = _views(storage, layout.dtype, layout.row_width, num_blocks, block_size, stride, offset)
    put_rows(layout, rows, torch.tensor([0]), poison(layout)[None])  # where a careless kernel looks for absent tokens
    around = [torch.arange(at - 8, at + 8) for at in map(slot_at, borders)]
    num_slots = num_blocks * block_size
    return view, rows, torch.cat([torch.arange(1, 9), *around, torch.arange(num_slots - 8, num_slots)])


def _room(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8, not initialised. Raises: MLAPortableError in place of torch's error."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # of a GPU or of a CPU
        words = f"the case needs a cache of {num_bytes / 2**30:.1f} GiB on {device}, which has less left"
        raise MLAPortableError(f"{words}: end what else uses it, or run on a device with more memory") from error


_MIXED_MASKS: Final[dict[str, Callable[[Tensor, int], Tensor]]] = {
    "full": lambda column, topk: column < 0,
    "holes": lambda column, topk: torch.isin(column, torch.tensor([0, topk // 3, topk // 2, topk - 1])),
    "absent": lambda column, topk: column >= 0,
    "single": lambda column, topk: column < topk - 1,
}


def mixed_kinds(rows: int, topk: int) -> list[str]:
    """What each row of a `MIXED` problem is about. A row of a few entries has no room for holes."""
    kinds = list(_MIXED_MASKS)[rows % 4 != 0 :] if topk >= 8 else ["full", "absent"]
    return [kinds[row % len(kinds)] for row in range(rows)]


def hole_mask(pattern: str, rows: int, topk: int, g: torch.Generator) -> Tensor:
    """[rows, topk] bool, True where the pattern wants an invalid entry."""
    if pattern == MIXED:
        return torch.stack([_MIXED_MASKS[kind](torch.arange(topk), topk) for kind in mixed_kinds(rows, topk)])
    column = torch.arange(topk).expand(rows, topk)
    third = max(1, topk // 3)
    if pattern in ("holes", "absent", "corpus"):
        share = 0.5 if pattern == "corpus" else 0.4
        mask = torch.rand(rows, topk, generator=g) < share
        if pattern == "absent":
            mask[::2] = True
        return mask
    masks = {
        "front": column < third,
        "middle": (column >= third) & (column < 2 * third),
        "end": column >= topk - third,
        "first": column > 0,
        "last": column < topk - 1,
    }
    return masks.get(pattern, column < 0)


def index_rows(
    pattern: str, rows: int, topk: int, used: Tensor, unused: Tensor, limit: int, lengths: Tensor | None, g: torch.Generator
) -> Tensor:
    """[rows, topk] int32: names of used slots, with invalid entries where the pattern wants them.

    Args:
        used, unused: slots that hold tokens, slots that hold NaN. limit: number of slots.
        lengths: [rows], entries at and after lengths[row] name unused slots, which must then not be read.
    """
    if pattern == "duplicates":
        pick = torch.randint(0, min(5, len(used)), (rows, topk), generator=g)
    else:
        pick = torch.stack([shuffled(len(used), g) for _ in range(rows)]) if rows else torch.empty(0, len(used)).long()
        pick = pick[:, torch.arange(topk) % len(used)]
    chosen = used[pick]
    mask = hole_mask(pattern, rows, topk, g)
    values = {"corpus": corpus(limit), "absent": corpus(limit), MIXED: near(limit)}
    fill = torch.tensor(values.get(pattern, (-1,)))
    turn = mask.cumsum(dim=1) - 1 if pattern == MIXED else torch.arange(rows * topk).view(rows, topk)
    chosen = torch.where(mask, fill[turn % len(fill)], chosen)
    if lengths is not None and len(unused):
        beyond = torch.arange(topk) >= lengths.unsqueeze(-1)
        chosen = torch.where(beyond, unused[torch.arange(topk) % len(unused)], chosen)
    return chosen.to(torch.int32)
