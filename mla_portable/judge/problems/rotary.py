# SPDX-License-Identifier: Apache-2.0
"""What norm_rope_write and rope_quantize_queries are judged by: norms and rotations in float64, and whose rounding is certain.

Their results are rounded to bfloat16, and codes are made of the rounded numbers. The arithmetic before that is float32's, so a
number that lies next to the middle between two bfloat16 may be rounded to either. `Exact` knows which numbers do not: what is
made of those alone is compared bit for bit, the rest by value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.judge.problems.compare import Finding, Tolerance, close

_NORM_SLACK: Final = 2.0**-20
_ROPE_SLACK: Final = 2.0**-22
"""How far float32 arithmetic may lie from float64, as parts of the terms: sums of up to 8,192 numbers, an approximate root;
two products and a sum."""

ROUNDED: Final = Tolerance(0, 1.01, "float32 arithmetic, rounded to bfloat16 once, behind the weight of a norm", "step")
NEAR: Final = Tolerance(0, 0.13, "a bfloat16 next to the oracle's may have the neighbouring e4m3 code")
NEAR_BF16: Final = Tolerance(0, 2.0**-6, "a bfloat16 next to the oracle's")
YARN: Final = 1.2
"""A factor as of YaRN, which multiplies cosines and sines."""


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """Numbers before they are rounded to bfloat16. values: [..., n] float64. slack: how far float32's may lie from them."""

    values: Tensor
    slack: Tensor

    @property
    def rounded(self) -> Tensor:
        """[..., n] bfloat16."""
        return self.values.to(torch.bfloat16)

    @property
    def certain(self) -> Tensor:
        """[...] bool: whatever float32 makes of them, all n numbers are rounded as the oracle's. False where one is NaN."""
        low, high = (self.values - self.slack).to(torch.bfloat16), (self.values + self.slack).to(torch.bfloat16)
        return (low == high).all(dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Exact:
    """x [T, n] bf16, weight [n]."""
    x, weight = x.cpu().double(), weight.cpu().double()
    values = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight
    return Exact(values, values.abs() * _NORM_SLACK)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Exact:
    """x [T, n] bf16, weight and bias [n]."""
    x, weight, bias = x.cpu().double(), weight.cpu().double(), bias.cpu().double()
    apart = x - x.mean(dim=-1, keepdim=True)
    scale = weight / torch.sqrt((apart * apart).mean(dim=-1, keepdim=True) + eps)
    terms = (x.abs() + x.abs().mean(dim=-1, keepdim=True)) * scale.abs() + bias.abs()
    return Exact(apart * scale + bias, terms * _NORM_SLACK)


def angles(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """[T, R / 2] float64: cosines and sines of each token."""
    rows = [cos_sin[min(max(position, 0), len(cos_sin) - 1)].double() for position in positions.tolist()]
    half = cos_sin.shape[1] // 2
    table = torch.stack(rows) if rows else torch.empty((0, 2 * half), dtype=torch.float64)
    return table[:, :half], table[:, half:]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, style: str, first: int, width: int) -> Exact:
    """x [T, ..., n] bf16, of which `width` numbers from `first` on are rotated by the token's angles [T, width / 2], pair by
    pair; the others stay."""
    values = x.cpu().double().clone()
    slack = torch.zeros_like(values)
    middle = [1] * (x.dim() - 2)
    for pair in range(width // 2):
        one, other = (2 * pair, 2 * pair + 1) if style == "interleaved" else (pair, pair + width // 2)
        a, b = x.cpu()[..., first + one].double(), x.cpu()[..., first + other].double()
        c, s = cos[:, pair].reshape(-1, *middle), sin[:, pair].reshape(-1, *middle)
        values[..., first + one], values[..., first + other] = a * c - b * s, b * c + a * s
        slack[..., first + one] = ((a * c).abs() + (b * s).abs()) * _ROPE_SLACK
        slack[..., first + other] = ((b * c).abs() + (a * s).abs()) * _ROPE_SLACK
    return Exact(values, slack)


def close_rounded(quantity: str, got: Tensor, want: Exact, limit: Tolerance = ROUNDED) -> Iterator[Finding]:
    """bfloat16 results lie within one rounding of the oracle's, and are NaN where these are."""
    missing = want.values.isnan()
    yield same_nan(quantity, got, missing)
    size = want.values.abs().clamp(min=2.0**-126)
    half_steps = torch.exp2(size.nan_to_num(nan=1.0).log2().floor() - 8) + want.slack
    values, found = torch.where(missing, 0.0, want.values), torch.where(missing, 0.0, got.double())
    yield close(quantity, found, values, limit, steps=torch.where(missing, 1.0, half_steps))


def close_rows(quantity: str, got: Tensor, want: Tensor, limit: Tolerance) -> Iterator[Finding]:
    """Rows [n, width] float64 whose codes were made of one bfloat16 or of its neighbour; NaN where the oracle's are."""
    missing = want.isnan()
    yield same_nan(quantity, got, missing)
    values, found = torch.where(missing, 0.0, want), torch.where(missing, 0.0, got)
    least = values.abs().amax(dim=-1, keepdim=True).expand_as(values) / 8 if values.numel() else values
    yield close(quantity, found, values, limit, steps=least)


def same_nan(quantity: str, got: Tensor, missing: Tensor) -> Finding:
    """Every number of `got` is NaN where `missing` says so, and no other."""
    wrong = got.isnan() != missing
    if not wrong.any():
        return Finding(quantity, 0, 0)
    where = tuple(int(each) for each in wrong.nonzero()[0])
    expected = "NaN" if missing[where] else "a number"
    at = ", ".join(map(str, where))
    message = f"{quantity}[{at}]: got {got[where].item()}, expected {expected}; {int(wrong.sum())} of {wrong.numel()} differ"
    return Finding(quantity, math.inf, 0, message, "NaN of a token is lost, or got into another", "")


def table_of(kind: str, positions: int, width: int) -> Tensor:
    """[positions, width]: cosines and sines of the usual frequencies. kind: "float32"; "bfloat16"; "yarn", times a factor."""
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    table = torch.cat([turns.cos(), turns.sin()], dim=1) * (YARN if kind == "yarn" else 1.0)
    return table.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)


def drawn_positions(kind: str, count: int, positions: int, g: torch.Generator) -> Tensor:
    """[count] int64. kind: "plain", in the table of `positions`; "outside", every other one is not."""
    drawn = torch.randint(0, positions, (count,), generator=g)
    if kind == "outside":
        drawn[::2] = torch.tensor([-1, positions, -(2**40), 2**40, positions + 1])[torch.arange(len(drawn[::2])) % 5]
    return drawn


def drawn_tokens(kind: str, count: int, width: int, g: torch.Generator) -> Tensor:
    """[count, width] bf16, tokens in turn of size 1, 2**-10, which is small beside eps, and 8.

    kind: "plain"; "zero", every third token is 0; "nan", the second one holds NaN in one place; "equal", all numbers of a token
    are the same.
    """
    size = torch.tensor([1.0, 2.0**-10, 8.0])[torch.arange(count) % 3, None]
    values = torch.randn(count, width, generator=g) * size
    if kind == "zero":
        values[::3] = 0
    elif kind == "nan" and count > 1:
        values[1, width // 2] = math.nan
    elif kind == "equal":
        values = values[:, :1].expand(count, width).clone()
    return values.to(torch.bfloat16)
