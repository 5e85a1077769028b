# SPDX-License-Identifier: Apache-2.0
"""KernelCase: one size at which the implementations of a primitive are timed side by side; the sizes taken by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from mla_portable.contracts import FP8_DS_MLA, LAYOUTS, SCALE_FORMATS, InvalidArgument, Primitive
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT, SPARSE_DECODE, SPARSE_PREFILL

__all__ = ["ATTENTION", "BLOCK_SIZE", "TIMED", "KernelCase", "kernel_cases"]

ATTENTION: Final = (SPARSE_DECODE, SPARSE_PREFILL)
TIMED: Final = (*ATTENTION, CONVERT_INDICES, GATHER_UPCONVERT, CACHE_WRITE)
BLOCK_SIZE: Final = 64
_TOPK: Final = 2048  # DeepSeek-V3.2's
_DECODE_TOKENS: Final = 65_536
"""Least size of the cache that decode reads; it grows until every row has K tokens of its own."""
_NARROW_TOKENS: Final = 1_024
_NARROW: Final = 8_192
_WIDE: Final = 65_536
"""Rows of the prefill workspace for up to _NARROW_TOKENS tokens, and beyond."""
_HEADS: Final = (16, 32, 64, 128)
_ROWS: Final = {
    SPARSE_DECODE: (1, 4, 16, 64, 128, 256),
    SPARSE_PREFILL: (1_024, 4_096),
    CONVERT_INDICES: (16, 128, 1_024, 4_096),
    GATHER_UPCONVERT: (8_192, 65_536),
    CACHE_WRITE: (16, 128, 1_024, 4_096),
}
_LAYOUTS: Final = {
    **dict.fromkeys(ATTENTION, ("fp8_ds_mla", "bf16")),
    **dict.fromkeys((GATHER_UPCONVERT, CACHE_WRITE), ("fp8_ds_mla",)),
}


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One problem size.

    Attributes:
        rows: batch rows of one query token (sparse_decode), tokens (sparse_prefill, convert_indices, cache_write) or
            workspace rows (gather_upconvert).
        kv_layout, num_heads, topk: None where the primitive has none.
        width: tokens of the cache or rows of the workspace that attention chooses from; 0 where nothing is chosen.
        overlap: percent of a token's indices that the token before it has too; sparse_prefill only.
        scale_format: of FP8 rows, read or written.
    Raises: InvalidArgument for a size that cannot be made.
    """

    primitive: Primitive
    rows: int
    kv_layout: str | None = None
    num_heads: int | None = None
    topk: int | None = None
    width: int = 0
    overlap: int = 0
    scale_format: str = "pow2"

    def __post_init__(self) -> None:
        where = "KernelCase"
        if self.primitive not in TIMED:
            expected = f"one of {', '.join(TIMED)}"
            raise InvalidArgument(where, "primitive", got=self.primitive, expected=expected)
        for name in ("rows", "num_heads", "topk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(where, name, got=value, expected="at least 1")
        if self.kv_layout is not None and self.kv_layout not in LAYOUTS:
            raise InvalidArgument(where, "kv_layout", got=repr(self.kv_layout), expected=f"one of {', '.join(LAYOUTS)}")
        if self.scale_format not in SCALE_FORMATS:
            expected = f"one of {', '.join(SCALE_FORMATS)}"
            raise InvalidArgument(where, "scale_format", got=repr(self.scale_format), expected=expected)
        if not 0 <= self.overlap <= 100:
            raise InvalidArgument(where, "overlap", got=self.overlap, expected="0 to 100 percent")
        if self.primitive in ATTENTION and self.width < (self.topk or 0):
            expected = f"at least topk ({self.topk}): a row's indices are distinct"
            raise InvalidArgument(where, "width", got=self.width, expected=expected)

    @property
    def storage(self) -> str:
        """The tolerance table's word for what the rows hold."""
        return self.scale_format if self.kv_layout == FP8_DS_MLA.name else "bf16"

    @property
    def shape(self) -> str:
        """The sizes in words, scales that are not the usual ones behind them; with primitive and layout it names the case."""
        return self._sizes + (f", {self.scale_format} scales" if self.storage == "amax" else "")

    @property
    def _sizes(self) -> str:
        heads, topk = f"H {self.num_heads}", f"K {self.topk}"
        if self.primitive is SPARSE_DECODE:
            return f"B {self.rows}, S 1, {heads}, {topk}, N {self.width}"
        if self.primitive is SPARSE_PREFILL:
            overlap = f", overlap {self.overlap} %" if self.overlap else ""
            return f"T {self.rows}, {heads}, {topk}, W {self.width}{overlap}"
        if self.primitive is CONVERT_INDICES:
            return f"T {self.rows}, {topk}"
        return f"W {self.rows}" if self.primitive is GATHER_UPCONVERT else f"T {self.rows}"

    def __str__(self) -> str:
        return " ".join(word for word in (str(self.primitive), self.kv_layout, self.shape) if word)


def kernel_cases(
    primitives: Sequence[Primitive] = TIMED,
    *,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    layouts: Sequence[str] | None = None,
    topk: int = _TOPK,
    width: int | None = None,
    overlaps: Sequence[int] = (0,),
    scale_format: str = "pow2",
) -> tuple[KernelCase, ...]:
    """Every combination, by primitive, layout, head count and rows; None takes what the primitive has by default.

    A layout that a primitive does not have by default is added where it is asked for. Head counts, `topk`, `width`,
    `overlaps` and `scale_format` go to the primitives that know them.
    Raises: InvalidArgument, as KernelCase.
    """
    found: list[KernelCase] = []
    for primitive in primitives:
        sizes = rows or _ROWS.get(primitive, (1,))
        if primitive in ATTENTION:
            prefill = primitive is SPARSE_PREFILL
            grid = product(layouts or _LAYOUTS[primitive], heads or _HEADS, sizes, overlaps if prefill else (0,))
            for layout, count, size, overlap in grid:
                chosen_from = width or (_prefill_width(size, topk) if prefill else _decode_width(size, topk))
                found.append(KernelCase(primitive, size, layout, count, topk, chosen_from, overlap, scale_format))
        elif primitive is CONVERT_INDICES:
            found += [KernelCase(primitive, size, topk=topk) for size in sizes]
        else:
            each = layouts or _LAYOUTS.get(primitive, (FP8_DS_MLA.name,))
            found += [KernelCase(primitive, size, layout, scale_format=scale_format) for layout in each for size in sizes]
    return tuple(found)


def _decode_width(rows: int, topk: int) -> int:
    """Tokens of a cache where every row reads a context of its own, as requests do; whole blocks."""
    return -(-max(_DECODE_TOKENS, rows * topk) // BLOCK_SIZE) * BLOCK_SIZE


def _prefill_width(rows: int, topk: int) -> int:
    return max(_NARROW if rows <= _NARROW_TOKENS else _WIDE, topk)
