# SPDX-License-Identifier: Apache-2.0
"""TensorTable: the tensors of a function as a table of axes and dtypes, which checks a call in one pass.

    TensorTable(
        "topk_select",
        {
            "logits": Axes("T N", torch.float32),
            "row_starts": Axes("T", torch.int32),
            "row_ends": Axes("T", torch.int32),
            "out": Axes("T K", torch.int32, optional=True, written=True),
        },
        given="K",
    )

An axis is a name with one size in the whole call. The caller gives the sizes that follow from something else, such as K from
`topk` and a width from the layout of the cache. Every other axis is as long as in the first tensor that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts.values import refuse
from mla_portable.kit.rules import check_dense, check_disjoint, check_rows_apart, check_tensor, extent, named_tensors, shape_of

_STRIDED: Final = torch.strided


@dataclass(frozen=True, slots=True)
class Axes:
    """A row of the table: a dense tensor whose last dimension is contiguous.

    Attributes:
        axes: names, separated by blanks; a single one may be `R+1`, one more than R. A given size whose name is in small
            letters, such as a width, stands in messages as a number.
        dtype: None for the one that `TensorTable.check` is given.
        optional: it may be None. written: it overlaps no other tensor of the table, and none of its elements another.
        not_empty: those of its axes, first in this row, that are at least 1 long.
    """

    axes: str
    dtype: torch.dtype | None = None
    optional: bool = False
    written: bool = False
    not_empty: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """A row of the table: what the caller has checked, a paged cache in one tensor or several. Only its memory is compared."""

    optional: bool = False
    written: bool = False


class TensorTable:
    """The tensors of one function. where: its name. rows: by argument, in order."""

    def __init__(self, where: str, rows: Mapping[str, Axes | Checked], *, given: str = "") -> None:
        """
        Args:
            where: the function, for messages. rows: by argument, in the order in which `check` takes them. The call is on the
                device of the first, which is never None. given: axes whose size the caller gives.
        """
        self.where, self.rows, self._given = where, dict(rows), frozenset(given.split())
        self._results = [at for at, row in enumerate(rows.values()) if row.written]
        known = set(self._given)
        # plain tuples, which are unpacked faster than anything with names
        self._steps: list[tuple[Any, ...]] = []
        for name, row in rows.items():
            axes, dtype = (tuple(row.axes.split()), row.dtype) if isinstance(row, Axes) else ((), None)
            measured = tuple((at, axis) for at, axis in enumerate(axes) if axis not in known and "+" not in axis)
            known.update(axes)
            shape_from = None if len(measured) == len(axes) else _shape_from(axes)
            not_empty = isinstance(row, Axes) and bool(row.not_empty)
            self._steps.append((name, dtype, len(axes), measured, not_empty, shape_from, row.optional, row.written))

    def check(self, values: Sequence[Any], sizes: dict[str, int], dtype: torch.dtype | None = None) -> dict[str, int]:
        """The tensors of a call fit the table.

        Args:
            values: one for each row. sizes: of the given axes; those of the others are added. dtype: of rows that name none.
        Returns: `sizes`.
        Raises: InvalidArgument for the first tensor that does not fit, or for two that overlap where one of them is written.
        """
        device: torch.device | None = None
        extents: list[tuple[int, int]] = []
        writes, records = False, torch.is_grad_enabled()
        for at in self._results:
            writes = writes or values[at] is not None
        for step, value in zip(self._steps, values, strict=True):
            name, own, rank, measured, not_empty, shape_from, optional, written = step
            if value is None:
                if not optional:
                    self._check_row(name, value, sizes, own, device)  # raises
                continue
            fits = False
            if rank:
                kind = dtype if own is None else own
                try:
                    shape, its_device = value.shape, value.device
                    if device is None and not value.is_meta:  # one without data is refused below
                        device = its_device
                    if len(shape) == rank:
                        for at, axis in measured:
                            sizes[axis] = shape[at]
                        fits = (
                            value.dtype is kind
                            and (shape_from is None or shape == shape_from(sizes))
                            and (its_device is device or its_device == device)
                            and value.layout is _STRIDED
                            and value.is_contiguous()
                            and not value.is_neg()
                            and not (records and value.requires_grad)
                            and not (not_empty and 0 in shape)
                        )
                except (AttributeError, RuntimeError):  # no tensor; a nested or sparse one has no shape or no strides
                    pass
                if not fits:
                    self._check_row(name, value, sizes, kind, device)
            elif isinstance(value, tuple):  # a cache in several tensors
                device = value[0].device if device is None else device
                if writes:
                    extents.extend([extent(each) for each in value])
                    for at, each in enumerate(value if written else ()):
                        check_rows_apart(self.where, f"{name}[{at}]", each)
                continue
            elif device is None:
                device = value.device
            if writes:
                if fits or value.is_contiguous():
                    begin = value.data_ptr()
                    extents.append((begin, begin + value.nbytes))
                else:
                    extents.append(extent(value))
                    if written:
                        check_rows_apart(self.where, name, value)
        extents.sort()
        reached = 0
        for begin, end in extents:
            if begin == end:
                continue
            if begin < reached:
                self._check_disjoint(values)
                break  # only inputs overlap, which is allowed
            reached = end
        return sizes

    def _check_row(self, name: str, value: Any, sizes: dict[str, int], dtype: Any, device: torch.device | None) -> None:
        """One tensor once more: raise what is wrong with it, or return where it is only not contiguous as a whole."""
        row = self.rows[name]
        assert isinstance(row, Axes)
        axes = row.axes.split()
        words = (str(sizes[axis]) if axis in self._given and axis.islower() else axis.replace("+", " + ") for axis in axes)
        text = f"[{', '.join(words)}]"
        check_dense(self.where, name, value, text)
        if not sizes.keys() >= {axis for axis in axes if "+" not in axis}:
            shape_of(self.where, name, value, len(axes), text)  # raises: it is no tensor of that rank to measure
        check_tensor(self.where, name, value, dtype, _shape_from(tuple(axes))(sizes), device or value.device, text)
        not_empty = row.not_empty.split()
        if any(sizes[axis] < 1 for axis in not_empty):
            refuse(self.where, name, f"shape {list(value.shape)}", f"{text} with {' and '.join(not_empty)} of at least 1")

    def _check_disjoint(self, values: Sequence[Any]) -> None:
        written: dict[str, Tensor | None] = {}
        read: dict[str, Tensor | None] = {}
        for (name, row), value in zip(self.rows.items(), values, strict=True):
            (written if row.written else read).update(named_tensors(name, value))
        check_disjoint(self.where, written, read)


def _shape_from(axes: tuple[str, ...]) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    """Sizes -> the shape of a tensor with these axes."""
    if len(axes) > 1:
        return itemgetter(*axes)
    axis, _, more = "".join(axes).partition("+")
    extra = int(more or 0)
    return lambda sizes: (sizes[axis] + extra,)
