# SPDX-License-Identifier: Apache-2.0
"""A problem: the tensors of one call, the call itself, and what its results must be.

Everything is made on the CPU, kept there pristine, and placed on the device. So the oracle reads the very bytes that the
implementation reads, and an implementation that changes its inputs is found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from mla_portable.judge.problems.compare import Finding, same_bits
from mla_portable.layouts import Cache

Results = dict[str, Tensor]
"""What a call returned, by name."""

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

    def outside(self, name: str, storage: Tensor | None = None) -> Finding:
        """Nothing around the view has changed; in `storage`, where that is given, as another call left it."""
        held = self.storage if storage is None else storage
        mask = torch.ones(self.initial.numel(), dtype=torch.bool)
        mask.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(False)
        return same_bits(f"memory around {name}", held.cpu()[mask], self.initial[mask])


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
        if strided or original.untyped_storage().nbytes() == original.nbytes:  # nothing surrounds it yet
            values, original = (
                original,
                guarded(tuple(original.shape), original.dtype, torch.device("cpu"), strided=strided).view,
            )
            original.copy_(values)
        base = original.as_strided((original.untyped_storage().nbytes() // original.element_size(),), (1,), 0)
        placed = base.to(self.device, copy=True)
        self.reads[name], self.pristine[name] = placed, base
        return placed.as_strided(original.shape, original.stride(), original.storage_offset())

    def read_cache(self, name: str, original: Cache) -> Cache:
        """`read` of a cache in one tensor or several."""
        if isinstance(original, tuple):
            return tuple(self.read(f"{name}[{at}]", each) for at, each in enumerate(original))
        return self.read(name, original)

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


Judge = Callable[[Results], Iterator[Finding]]
"""Compares results, and the storages of what was changed in place, all on the CPU, with the oracle. It reads CPU originals of
its own problem alone, so that it can judge another problem's tensors after they were loaded with this problem's values."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One call, ready to run.

    Attributes:
        stage: its tensors.
        args: positional arguments by name, in order. kwargs: keyword arguments, given outputs among them.
        returns: what the call returns, by name, in order: shape and dtype.
        judge: see Judge.
        outputs: the keywords of outputs, which a caller may leave out.
        untold: results that the call does not ask for: NaN or no elements, or else they must be right.
        part: runs an implementation on some of the batch rows, into fresh memory; returns the leading results, as far as they
            mean something. None where a problem has no such rows.
    """

    stage: Stage
    args: dict[str, Any]
    kwargs: dict[str, Any]
    returns: dict[str, tuple[tuple[int, ...], torch.dtype]]
    judge: Judge
    outputs: frozenset[str] = frozenset()
    untold: frozenset[str] = frozenset()
    part: Callable[[Callable[..., Any], slice], tuple[Tensor, ...]] | None = None

    def call(self, bound: Callable[..., Any], *, given: bool = True) -> object:
        """Run an implementation. given: pass the outputs; without, it allocates them. Returns: what it returned."""
        kwargs = {name: value for name, value in self.kwargs.items() if given or name not in self.outputs}
        return bound(*self.args.values(), **kwargs)

    def results_of(self, returned: object, stage: Stage | None = None, *, given: bool = True) -> Results | str:
        """The tensors that a call returned, by name; or what is wrong with what it returned. See `call`."""
        names, writes = tuple(self.returns), (stage or self.stage).writes if given else {}
        values = (returned,) if len(names) == 1 else ()
        if len(names) > 1:
            if not isinstance(returned, (tuple, list)) or len(cast(Any, returned)) != len(names):
                return f"returned {_kind(returned)}, expected ({', '.join(names)})"
            values = tuple(cast(Any, returned))
        first = next(each for each in self.args.values() if each is not None)
        device = (first[0] if isinstance(first, tuple) else first).device
        found: Results = {}
        for name, value in zip(names, values, strict=True):
            shape, dtype = self.returns[name]
            if not isinstance(value, Tensor):
                return f"returned {_kind(value)} as {name}, expected a tensor"
            if name in self.untold and not value.numel():
                continue
            if value.device != device:
                return f"returned {name} on {value.device}, expected {device}"
            if name in writes and name not in self.untold and not _same_place(value, writes[name].view):
                return f"returned another tensor than the `{name}` that it was given to write"
            if value.dtype != dtype:
                return f"{name} has dtype {_short(value.dtype)}, expected {_short(dtype)}"
            if tuple(value.shape) != shape:
                return f"{name} has shape {list(value.shape)}, expected {list(shape)}"
            found[name] = value
        return found

    def changed(self, stage: Stage | None = None) -> Iterator[Finding]:
        """Every input against what it was; `stage` is the one the call ran on, this problem's own unless loaded elsewhere."""
        ran_on = stage or self.stage
        for name, pristine in self.stage.pristine.items():

            def symptom(where: tuple[int, ...], name: str = name) -> tuple[str, str]:
                return f"it changed its input {name}", ""

            yield same_bits(f"input {name}", ran_on.reads[name], pristine, symptom=symptom)

    def judged(self, results: Results, stage: Stage | None = None) -> Iterator[Finding]:
        """The results of `results_of`, and what lies around them."""
        got = {name: value.detach().cpu() for name, value in results.items()}
        for name, written in (stage or self.stage).writes.items():
            if name in self.returns:
                yield written.outside(name)
            else:
                got[name] = written.storage.cpu()
        yield from self.judge(got)

    def findings(self, returned: object, stage: Stage | None = None) -> Iterator[Finding]:
        """Every comparison of a call with given outputs."""
        yield from self.changed(stage)
        results = self.results_of(returned, stage)
        if isinstance(results, str):
            yield Finding("results", math.inf, 0, results)
        else:
            yield from self.judged(results, stage)

    def load(self, other: Problem) -> None:
        """Overwrite this problem's tensors, where they are, with those of another problem of the same shapes."""
        for name, pristine in other.stage.pristine.items():
            self.stage.reads[name].copy_(pristine)
        for name, written in other.stage.writes.items():
            self.stage.writes[name].storage.copy_(written.initial)


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(cast(Any, value)).__name__} of {len(cast(Any, value))}"
    return type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same_place(got: Tensor, given: Tensor) -> bool:
    return got.data_ptr() == given.data_ptr() and (got.stride() == given.stride() or got.shape != given.shape)
