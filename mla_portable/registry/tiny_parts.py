# SPDX-License-Identifier: Apache-2.0
"""The parts that probe problems are made of: a call, a case, seeded values, caches whose unused rows are NaN.

Every tensor names its device and dtype, so that torch's defaults decide nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import Request
from mla_portable.layouts import LAYOUTS, CacheLayout

__all__ = [
    "Call",
    "TinyCase",
    "cache_rows",
    "cache_tokens",
    "call_layout",
    "generator_of",
    "int32",
    "normal",
    "num_blocks_of",
    "poison_of",
    "with_slack",
]

USED_SLOTS: Final = 48
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one call.

    Attributes:
        args: by name, in order. kwargs: keyword-only ones.
        written: names of those that the call may change.
        optional: names of outputs in kwargs that a caller may leave out.
        watched: tensors to compare afterwards that are no result: what lies around a tensor that is written.
    """

    args: dict[str, Any]
    kwargs: dict[str, Any]
    written: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    watched: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def without_outputs(self) -> Call:
        """The same tensors, with the optional outputs left out."""
        kwargs = {name: value for name, value in self.kwargs.items() if name not in self.optional}
        return Call(self.args, kwargs, self.written, frozenset(), self.watched)


@dataclass(frozen=True, slots=True, eq=False)
class TinyCase:
    """One problem. `make(device)` builds the same call with fresh tensors, on any device.

    repeat: run it several times, with outputs given and left out.
    """

    name: str
    request: Request
    make: Callable[[torch.device], Call]
    repeat: bool = False


def generator_of(request: Request, name: str) -> torch.Generator:
    """Seeded by the primitive, the layout and the name of the case."""
    seed = zlib.crc32(f"{request.primitive}/{request.kv_layout}/{name}".encode())
    return torch.Generator(device=_CPU).manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normally distributed values on the CPU, rounded from float32."""
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device=_CPU).to(dtype)


def int32(values: Any) -> Tensor:
    """An int32 tensor on the CPU."""
    return torch.tensor(values, dtype=torch.int32, device=_CPU)


def with_slack(tensor: Tensor, device: torch.device, fill: float) -> tuple[Tensor, Tensor]:
    """`tensor` on `device`, inside an allocation that goes on before and after it; the rest holds `fill`.

    Returns: the tensor, a view, and the allocation. The margin is a multiple of 64 rows, which keeps their alignment.
    """
    margin = -(-64 // tensor.shape[1]) if tensor.dim() == 3 else 64
    base = torch.full((tensor.shape[0] + 2 * margin, *tensor.shape[1:]), fill, dtype=tensor.dtype, device=_CPU)
    base[margin : margin + tensor.shape[0]] = tensor
    base = base.to(device)
    return base[margin : margin + tensor.shape[0]], base


def call_layout(request: Request, default: CacheLayout) -> CacheLayout:
    """The cache layout that a request names, else `default`."""
    return LAYOUTS.get(request.kv_layout or "", default)


def poison_of(layout: CacheLayout) -> float:
    """What fills unused cache rows: 0xFF bytes are NaN as e4m3, as float32 and as bfloat16."""
    return 255 if layout.dtype == torch.uint8 else float("nan")


def num_blocks_of(block_size: int) -> int:
    """Blocks of a problem's cache: at least 3, and twice as many slots as are used."""
    return max(3, -(-2 * USED_SLOTS // block_size))


def cache_rows(generator: torch.Generator, layout: CacheLayout, num_slots: int, scale_format: str) -> tuple[Tensor, Tensor]:
    """A cache whose used slots hold tokens and whose other rows are NaN.

    Returns: [num_slots, row_width] on the CPU and the used slots [USED_SLOTS] int64.
    """
    used = torch.randperm(num_slots, generator=generator, device=_CPU)[:USED_SLOTS]
    tokens = normal(generator, len(used), layout.key_width)
    rows = torch.full((num_slots, layout.row_width), poison_of(layout), dtype=layout.dtype, device=_CPU)
    rows[used] = cache_tokens(layout, tokens, scale_format)
    return rows, used


def cache_tokens(layout: CacheLayout, tokens: Tensor, scale_format: str) -> Tensor:
    """Tokens [T, key width] bf16 as rows of `layout`."""
    return layout.pack(tokens[:, : layout.value_width], tokens[:, layout.value_width :], scale_format)
