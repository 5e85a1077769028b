# SPDX-License-Identifier: Apache-2.0
"""Which implementation serves a kind of call: a cache between the primitives' public functions and the registry.

A kind of call is everything its arguments say that may decide the choice, and how many rows it has to the nearest power of two.
It is looked up in one dictionary, which the registry owns, so that a call after the first costs a few microseconds. A change of
policy (`use(...)`, `reload_policy()`) changes the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar, cast

import torch
from torch import Tensor

from mla_portable.accelerator import Accelerator, accelerator
from mla_portable.choose import Registry, get_registry
from mla_portable.choose.limits import running
from mla_portable.choose.names import check_backend
from mla_portable.contracts import DecodeSchedule, InvalidArgument, PlanMismatch, Request
from mla_portable.contracts.primitive import F, Primitive

_CACHE_LIMIT: Final = 4096
"""Kinds of calls whose implementation is kept; beyond that all are dropped and asked for again."""

_OPAQUE: Final = "mla_portable chooses a kernel in it: compile without fullgraph=True, and it is called between two graphs"
C = TypeVar("C", bound=Callable[..., Any])


def opaque(function: C) -> C:
    """Mark a public function as one that torch.compile calls as it is, with a graph break, and compiles nothing of.

    `torch.compiler.disable` makes a wrapper that does this, at 0.3 us for every call, and imports torch._dynamo, which takes
    1.5 s. Here the function and its code get the marks that Dynamo looks for (torch 2.13 to 2.15): no call outside of
    torch.compile costs more. Where torch has other names, Dynamo compiles parts of the function, with the same results.
    Returns: `function` itself.
    """
    marked: Any = function
    core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _OPAQUE
    try:
        dynamo = core._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(marked.__code__, dynamo._FrameExecStrategy(skip, skip))  # and all that it calls
    except AttributeError:
        pass
    return function


@dataclass(frozen=True, slots=True)
class Served(Generic[F]):
    """The choice for a kind of call. schedule_type: what `schedule=` must be; None where any is ignored."""

    call: F
    name: str
    schedule_type: type[DecodeSchedule] | None

    def check_schedule(self, where: str, schedule: DecodeSchedule) -> None:
        """Raises: PlanMismatch where what serves takes another kind of schedule. `where` begins the message."""
        if self.schedule_type is not None and not isinstance(schedule, self.schedule_type):
            raise PlanMismatch(
                f"{where}: schedule is a {type(schedule).__name__}, {self.name} takes a {self.schedule_type.__name__}. "
                "Plan with the schedule_kind of the implementation that serves, or force the one that was planned for."
            )


_override: Registry | None = None


@contextmanager
def serving(registry: Registry) -> Generator[None, None, None]:
    """Let the public functions ask `registry` instead of the process's own: for tests and measurements, in one thread."""
    global _override
    before, _override = _override, registry
    try:
        yield
    finally:
        _override = before


def current_registry() -> Registry:
    """The registry in use: the process's own, or that of a `serving` block."""
    return get_registry() if _override is None else _override


def bind_part(request: Request[F], own: Callable[[Request[F]], F]) -> F:
    """The bound callable for `request`: for the `bind` of an implementation that is made of other primitives.

    The policy in force chooses it. A probe tries a plugin alone, and its code must not call the registry: there it is
    `own(request)`, the plugin's own. Raises: UnsupportedRequest.
    """
    return own(request) if running() else current_registry().bind(request)


def find(
    primitive: Primitive[F], backend: str | None, tensor: Tensor, facts: tuple[object, ...], stated: tuple[str, ...] = ()
) -> Served[F]:
    """The choice for this kind of call: from the cache, else from the registry. `tensor` is on the call's device.

    The call runs there, whether or not it is the current device.

    Args:
        facts: values of `primitive.facts`, in that order. stated: promises of the caller, names of `primitive.stated`.
    """
    if backend is not None:
        check_backend(backend, primitive)
    where, graph = None, False
    if tensor.get_device() >= 0:
        where = accelerator(tensor.device)
        if where.current_index() != where.index:  # a kernel is launched on the current device
            with where.guard():
                served = find(primitive, backend, tensor, facts, stated)
            return replace(served, call=_on_device(where, served.call))
        graph = where.is_capturing()
    registry = get_registry() if _override is None else _override
    key = (primitive, backend, where, graph, facts, stated, registry.choice_token())
    served: Served[F] | None = registry.dispatched.get(key)
    if served is None:
        given: dict[str, Any] = dict(zip(primitive.facts, facts, strict=True)) | dict.fromkeys(stated, True)
        request = Request(primitive, registry.facts(tensor.device), graph=graph, **given)
        try:
            served = _serve(registry, request, backend)
        except InvalidArgument:
            if not graph:
                raise
            served = _as_for_other_rows(registry, request, backend)
            if served is None:
                raise
            return served  # not kept: outside of a capture more can be probed
        if len(registry.dispatched) >= _CACHE_LIMIT:
            registry.dispatched.clear()
        registry.dispatched[key] = served
    return served


def unchecked(primitive: Primitive[F], tensor: Tensor, *stated: str, **facts: object) -> F:
    """What a public function calls once it has checked its arguments: for a caller that has checked as much itself.

    The policy in force chooses it. Raises: UnknownBackend, UnsupportedRequest.

    Args:
        tensor: on the call's device. stated: promises of the caller, names of `primitive.stated`. facts: every one of
            `primitive.facts`, as the primitive's own check would return it.
    """
    return find(primitive, None, tensor, tuple([facts[name] for name in primitive.facts]), stated).call


def _serve(registry: Registry, request: Request[F], backend: str | None) -> Served[F]:
    """Choose for the rows of `request`, and bind for any number of rows: one callable however many kinds of calls share it."""
    implementation, _ = registry.select(request, backend=backend)
    call = registry.bind(request.but(rows=None), backend=implementation.name)
    kind = implementation.schedule_kind
    return Served(call, implementation.name, None if kind is None else kind.schedule_type)


def _as_for_other_rows(registry: Registry, request: Request[F], backend: str | None) -> Served[F] | None:
    """The choice for the nearest number of rows for which one can be made; None where there is none.

    For a call under graph capture, where nothing can be probed. What was called before with other rows was probed then.
    """
    rows = request.rows or 1
    powers = sorted((1 << power for power in range(31)), key=lambda each: abs(math.log2(each / rows)))
    for other in (*powers, None):
        try:
            return _serve(registry, request.but(rows=other), backend)
        except InvalidArgument:
            continue
    return None


def _on_device(where: Accelerator, call: F) -> F:
    """`call` with that device as the current one."""
    inner = cast(Any, call)

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        with where.guard():
            return inner(*args, **kwargs)

    return cast(F, elsewhere)
