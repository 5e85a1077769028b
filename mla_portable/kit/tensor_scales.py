# SPDX-License-Identifier: Apache-2.0
"""Scales of a whole tensor: `kv_scale` of a cache whose layout has `tensor_scale`, `q_scale` of e4m3 queries."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts.values import describe, refuse
from mla_portable.kit.rules import check_dense
from mla_portable.layouts import CacheLayout

Q_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""Of queries with a q_scale."""


def check_kv_scale(where: str, layout: CacheLayout, kv_scale: Tensor | None, device: torch.device) -> None:
    """There is a scale exactly where the layout has one. Raises: InvalidArgument."""
    if kv_scale is None:
        if layout.tensor_scale:
            refuse(where, "kv_scale", "None", f"a float32 tensor of one element, by which {layout.name} numbers count")
    elif not layout.tensor_scale:
        refuse(where, "kv_scale", describe(kv_scale), f"None: {layout.name} has no scale of the whole cache")
    else:
        _check_scale(where, "kv_scale", kv_scale, device)


def query_dtype(where: str, q: Tensor, q_scale: Tensor | None) -> torch.dtype:
    """What queries must be: e4m3 with a scale, else bfloat16. Raises: InvalidArgument."""
    if q_scale is None:
        return torch.bfloat16
    _check_scale(where, "q_scale", q_scale, q.device)
    if q.dtype not in Q_DTYPES:
        refuse(where, "q", q.dtype, f"{' or '.join(map(str, Q_DTYPES))}, because there is a q_scale")
    return q.dtype


def _check_scale(where: str, argument: str, scale: Tensor, device: torch.device) -> None:
    check_dense(where, argument, scale, "of one element")
    if scale.dtype is not torch.float32 or scale.numel() != 1 or scale.device != device:
        refuse(where, argument, describe(scale), f"a float32 tensor of one element on {device}")


_NONE: Final[dict[str, Tensor]] = {}


def tensor_scales(kv_scale: Tensor | None = None, q_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The keywords of the scales that there are: not every implementation knows them. Not to be written to."""
    if kv_scale is None and q_scale is None:
        return _NONE
    given = {"kv_scale": kv_scale, "q_scale": q_scale}
    return {name: scale for name, scale in given.items() if scale is not None}
