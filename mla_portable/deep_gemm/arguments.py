# SPDX-License-Identifier: Apache-2.0
"""What DeepGEMM's functions of the indexer share: pairs and integers as arguments, and the rows of scores that they return."""

from __future__ import annotations

from operator import index
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts.values import INT32_MAX, check_count, describe, refuse

_ROW_BYTES: Final = 1024
"""Rows of scores are whole multiples of this apart, as DeepGEMM's are: top-k kernels read them in wide loads."""


def pair(where: str, argument: str, value: Any, expected: str) -> tuple[Any, Any]:
    """The two values of a pair. Raises: InvalidArgument for what is none."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:  # pyright: ignore[reportUnknownArgumentType]
        refuse(where, argument, describe(value), f"a pair {expected}")
    return value[0], value[1]  # pyright: ignore[reportUnknownVariableType]


def integer(where: str, argument: str, value: Any, least: int = 0) -> int:
    """An integer of Python's or numpy's; no bool, and no tensor, which would have to be read back."""
    count: Any = index(value) if hasattr(value, "__index__") and not isinstance(value, (bool, Tensor)) else value
    check_count(where, argument, count, least, INT32_MAX)
    return count


def score_rows(num_rows: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """[num_rows, width] of `dtype`, not filled."""
    unit = _ROW_BYTES // dtype.itemsize
    return torch.empty((num_rows, -(-width // unit) * unit), dtype=dtype, device=device)[:, :width]
