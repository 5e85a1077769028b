# SPDX-License-Identifier: Apache-2.0
"""A problem: the tensors of one call, the call itself, and what its results must be.

Everything is made on the CPU, kept there pristine, and placed on the device. So the oracle reads the very bytes that the
implementation reads, and an implementation that changes its inputs is found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_portable.tools.conformance.compare import Finding, same_bits

__all__ = ["Guarded", "Problem", "Stage", "guarded"]

_GUARD_ELEMENTS = 64
_FLOAT_POISON = 0xFF
_INTEGER_POISON = 0x5A


@dataclass(frozen=True, slots=True, eq=False)
class Guarded:
    """A tensor to be written, inside memory that must stay as it was.

    Attributes:
        storage: [n] flat, with guards before and after the view, and gaps between its rows where it is strided.
        view: what the callee gets.
        initial: `storage` on the CPU, before the call.
    """

    storage: Tensor
    view: Tensor
    initial: Tensor

    def outside(self, name: str) -> Finding:
        """Nothing around the view has changed."""
        mask = torch.ones(self.initial.numel(), dtype=torch.bool)
        mask.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(False)
        return same_bits(f"memory around {name}", self.storage.cpu()[mask], self.initial[mask])


def poison_byte(dtype: torch.dtype) -> int:
    """NaN as any float; an integer that is neither -1 nor small."""
    return _FLOAT_POISON if dtype.is_floating_point else _INTEGER_POISON


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, strided: bool = False) -> Guarded:
    """A poisoned tensor of `shape` between guards.

    Args:
        strided: rows lie further apart than they are long, and so do groups of rows; the last dimension stays contiguous.
    """
    outer = list(shape)
    if strided:
        outer[-1] += 16  # rows stay aligned to 32 bytes, as a slice of an engine's buffer would be
        outer[-2:-1] = [size + 3 for size in outer[-2:-1]]
    count = math.prod(outer)
    element = torch.empty((), dtype=dtype).element_size()
    total = count + 2 * _GUARD_ELEMENTS
    initial = torch.full((total * element,), poison_byte(dtype), dtype=torch.uint8).view(dtype)
    storage = initial.to(device, copy=True)
    view = storage[_GUARD_ELEMENTS : _GUARD_ELEMENTS + count].view(outer)
    for axis, size in enumerate(shape):
        view = view.narrow(axis, 0, size)
    return Guarded(storage, view, initial)


@dataclass(slots=True, eq=False)
class Stage:
    """Collects the tensors of a problem while it is built.

    Attributes:
        device: where the call runs.
        reads: flat storages on the device that must not change. pristine: the same on the CPU.
        writes: what the call may write.
    """

    device: torch.device
    reads: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    pristine: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    writes: dict[str, Guarded] = field(default_factory=dict[str, Guarded])

    def read(self, name: str, original: Tensor, *, strided: bool = False) -> Tensor:
        """Place a CPU tensor, its strides and what surrounds it included; returns its twin on the device.

        Args:
            strided: place the same values in rows that lie further apart than they are long instead.
        """
        if strided:
            values, original = original, guarded(tuple(original.shape), original.dtype, torch.device("cpu"), strided=True).view
            original.copy_(values)
        base = original.as_strided((original.untyped_storage().nbytes() // original.element_size(),), (1,), 0)
        placed = base.to(self.device, copy=True)
        self.reads[name], self.pristine[name] = placed, base
        return placed.as_strided(original.shape, original.stride(), original.storage_offset())

    def write(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, strided: bool = False) -> Tensor:
        """A poisoned tensor to write to; returns what the callee gets."""
        self.writes[name] = guarded(shape, dtype, self.device, strided=strided)
        return self.writes[name].view

    def adopt(self, name: str, storage: Tensor, original: Tensor) -> Tensor:
        """Place CPU memory that the call may change, of which `original` is a view; returns the view on the device."""
        placed = storage.to(self.device, copy=True)
        view = placed.view(original.dtype).as_strided(original.shape, original.stride(), original.storage_offset())
        self.writes[name] = Guarded(placed, view, storage)
        return view


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One call, ready to run.

    Attributes:
        stage: its tensors.
        call: runs an implementation on them; returns its results.
        part: runs an implementation on some of the batch rows, into fresh memory; returns the leading results, as far as they
            mean something. None where a problem has no such rows.
        judge: compares (results, what was written) with the oracle. It uses CPU originals alone, so that it can judge
            another problem's tensors after they were loaded with this problem's values.
    """

    stage: Stage
    call: Callable[[Callable[..., Any]], tuple[Tensor, ...]]
    judge: Callable[[tuple[Tensor, ...], dict[str, Guarded]], Iterator[Finding]]
    part: Callable[[Callable[..., Any], slice], tuple[Tensor, ...]] | None = None

    def findings(self, results: tuple[Tensor, ...], stage: Stage | None = None) -> Iterator[Finding]:
        """Every comparison; `stage` is the one the call ran on, this problem's own unless it was loaded elsewhere."""
        ran_on = stage or self.stage
        for name, pristine in self.stage.pristine.items():
            yield same_bits(f"input {name}", ran_on.reads[name], pristine)
        yield from self.judge(results, ran_on.writes)

    def load(self, other: Problem) -> None:
        """Overwrite this problem's tensors, where they are, with those of another problem of the same shapes."""
        for name, pristine in other.stage.pristine.items():
            self.stage.reads[name].copy_(pristine)
        for name, written in other.stage.writes.items():
            self.stage.writes[name].storage.copy_(written.initial)
