# SPDX-License-Identifier: Apache-2.0
"""Run cases: build the problem, run it in poisoned memory, judge what came out; and the suite of a whole backend."""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.choose import Registry, get_registry
from mla_portable.choose.facts import resolve_device
from mla_portable.contracts import (
    DeviceFacts,
    Implementation,
    InvalidArgument,
    Primitive,
    Reason,
    UnknownBackend,
)
from mla_portable.judge.conformance.parallel import RunOne, run_in_processes
from mla_portable.judge.conformance.poison import poisoned
from mla_portable.judge.conformance.report import CaseResult, Progress, Report, Unavailable
from mla_portable.judge.problems.base import Case, cases_for, check_level
from mla_portable.judge.problems.compare import Finding, same_bits
from mla_portable.judge.problems.stage import Problem
from mla_portable.kit.defaults import neutral_defaults

WARM_UP_CALLS = 2
"""Calls on a side stream before a graph is captured, so that nothing compiles or initialises during the capture."""

_LIBRARIES: Final = tuple(
    f"{folder}{os.sep}"
    for name in ("torch", "triton")
    if (spec := find_spec(name)) is not None
    for folder in spec.submodule_search_locations or ()
)


def run_case(case: Case, bound: Callable[..., Any], device: torch.device) -> CaseResult:
    """Run one case on a bound implementation.

    Args:
        case: from `cases_for`. bound: the implementation, bound for `case.request`. device: where its tensors lie.
    Returns: a result in every case; an exception of the implementation becomes status "error".
    """
    start = time.perf_counter()
    try:
        with torch.no_grad(), neutral_defaults():
            problem = case.params.build(case.seed, device, case.request.device)
            findings = list(_run(case, problem, bound, device))
    except Exception as error:
        return _raised(case, error, start)
    errors: dict[str, float] = {}
    limits: dict[str, float] = {}
    for finding in findings:
        if finding.error >= errors.get(finding.quantity, 0.0):
            errors[finding.quantity], limits[finding.quantity] = finding.error, finding.limit
    messages = [finding.message for finding in findings if finding.message]
    status = "failed" if messages else "passed"
    return CaseResult(case, status, errors, limits, "\n".join(messages), time.perf_counter() - start)


def _run(case: Case, problem: Problem, bound: Callable[..., Any], device: torch.device) -> Iterator[Finding]:
    """Run the problem the way the case wants, and judge it."""
    if case.params.run == "graph":
        yield from _replay(case, problem, bound, device)
        return
    with poisoned():
        results = problem.call(bound)
        _wait(device)
    if case.params.run == "repeat":
        first = _everything(results, problem)
        with poisoned():
            again = problem.call(bound)
            _wait(device)
        for name, tensor in _everything(again, problem).items():
            yield same_bits(f"second run, {name}", tensor, first[name])
    if case.params.run == "batches":
        yield from _in_other_batches(results, problem, bound, device)
    yield from problem.findings(results)


def _in_other_batches(returned: object, problem: Problem, bound: Callable[..., Any], device: torch.device) -> Iterator[Finding]:
    """Rows by themselves, and in batches of other sizes, against the same rows of the whole batch."""
    whole = _tensors(returned)
    assert problem.part is not None, "only problems with rows of a batch have such cases"
    count = whole[0].shape[0]
    for begin, end in dict.fromkeys(((0, 1), (count - 1, count), (count // 2, count // 2 + 2), (1, count))):
        with poisoned():
            some = problem.part(bound, slice(begin, end))
            _wait(device)
        for number, (got, expected) in enumerate(zip(some, whole, strict=False)):
            yield same_bits(f"rows {begin} to {end - 1} by themselves, result {number}", got.cpu(), expected[begin:end].cpu())


def _tensors(returned: object) -> tuple[Tensor, ...]:
    values: tuple[object, ...] = returned if isinstance(returned, tuple) else (returned,)
    return tuple(value for value in values if isinstance(value, Tensor))


def _everything(returned: object, problem: Problem) -> dict[str, Tensor]:
    """Copies of all that a call produced."""
    made = {f"result {i}": tensor.detach().cpu().clone() for i, tensor in enumerate(_tensors(returned))}
    return made | {name: written.storage.cpu().clone() for name, written in problem.stage.writes.items()}


def _replay(case: Case, problem: Problem, bound: Callable[..., Any], device: torch.device) -> Iterator[Finding]:
    """Capture the call in a graph, then replay it on other inputs and on the first ones again."""
    where = accelerator(device)
    with where.side_stream():
        for _ in range(WARM_UP_CALLS):
            problem.call(bound)
    graph = where.graph()
    with poisoned(), where.capture(graph):
        results = problem.call(bound)
    other = case.params.build(case.seed + 1, device, case.request.device)
    first = case.params.build(case.seed, device, case.request.device)
    for name, values in (("other inputs", other), ("the first inputs again", first)):
        problem.load(values)
        graph.replay()
        _wait(device)
        for finding in values.findings(results, problem.stage):
            quantity = f"{finding.quantity}, replayed on {name}"
            yield Finding(quantity, finding.error, finding.limit, finding.message and f"replayed on {name}: {finding.message}")


def _wait(device: torch.device) -> None:
    """Let a fault of the device surface in the case that caused it."""
    accelerator(device).synchronize()


def _raised(case: Case, error: Exception, start: float, stage: str = "") -> CaseResult:
    whole = "".join(traceback.format_exception(error))
    return CaseResult(case, "error", {}, {}, f"{stage}{_describe(error)}", time.perf_counter() - start, whole)


def _describe(error: Exception) -> str:
    """Its type, its message, and where it was raised: the deepest line that is not torch's or Triton's own."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(_LIBRARIES)]
    frame = (own or frames)[-1]
    return f"{type(error).__name__}: {error} (raised at {frame.filename}:{frame.lineno}, in {frame.name})"


def run_suite(
    registry: Registry,
    backend: str,
    *,
    device: torch.device | str,
    level: str = "quick",
    primitives: Collection[Primitive] | None = None,
    match: str = "",
    jobs: int = 1,
    worker: RunOne | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run the suite on everything a backend registered.

    Args:
        registry: the process's registry, or a test's own.
        backend: "triton", or one implementation, "triton.portable".
        device: where to run, the current GPU where it has no index. level: "smoke", "quick" or "full" (`cases_for`).
        primitives: only these; None means all. match: only cases whose id contains this.
        jobs: worker processes on that device; 1 runs all cases in this one. Workers load the installed plugins, so more than
            one needs the process's registry, or a `worker`.
        worker: what a worker process does with a case, `run_installed` unless said otherwise.
        progress: called after each case.
    Returns: a report; a failing case does not raise.
    Raises: UnknownBackend when nothing of that name is registered; InvalidArgument for an unknown level, impossible
            jobs or a device that is not here.
    """
    check_level("conform", level)
    where = resolve_device(device)
    if jobs < 1:
        raise InvalidArgument("conform", "jobs", got=jobs, expected="1 or more")
    if jobs > 1 and worker is None and registry is not get_registry():
        raise InvalidArgument("conform", "jobs", got=jobs, expected="1 for a registry that a worker process cannot build")
    chosen = [i for i in registry.implementations() if backend in (i.name, i.backend)]
    if not chosen:
        names = sorted({name for i in registry.implementations() for name in (i.backend, i.name)})
        expected = f"one of {', '.join(names)}" if names else "an installed backend, and there is none"
        raise UnknownBackend("conform", "backend", got=repr(backend), expected=expected)
    facts = registry.facts(where)
    work: list[tuple[Implementation, Case]] = []
    unavailable: list[Unavailable] = []
    for implementation in chosen:
        if primitives is not None and implementation.primitive not in primitives:
            continue
        reasons = _reasons_against(implementation, facts)
        if reasons:
            unavailable.append(Unavailable(implementation.name, implementation.primitive, reasons))
            continue
        cases = cases_for(implementation, facts, level)
        work += [(implementation, case) for case in cases if match in case.id]
    if jobs > 1:
        results = run_in_processes(worker or run_installed, [case for _, case in work], where, jobs=jobs, progress=progress)
    else:
        results = []
        with accelerator(where).guard():
            for implementation, case in work:
                results.append(_bind_and_run(implementation, case, where))
                if progress is not None:
                    progress(len(results), len(work), results[-1])
    return Report(backend, level, facts, _versions(facts), tuple(results), tuple(unavailable))


def _reasons_against(implementation: Implementation, facts: DeviceFacts) -> tuple[Reason, ...]:
    """Why an implementation has no business on this device, or does not work here."""
    declared = tuple(implementation.support.device_reasons(facts))
    if declared:
        return declared
    try:
        return tuple(implementation.check(facts))
    except Exception as error:
        return (Reason("check", "raised", _describe(error), "fix the plugin's check, which should return reasons"),)


def _bind_and_run(implementation: Implementation, case: Case, device: torch.device) -> CaseResult:
    reasons = implementation.support.reasons(case.request)
    assert not reasons, f"{case.id}: generated against {reasons}"
    start = time.perf_counter()
    try:
        bound = implementation.bind(case.request)
    except Exception as error:
        return _raised(case, error, start, "bind: ")
    if case.params.run == "batches":
        bound = _bound_for_each_size(implementation, case)
    return run_case(case, bound, device)


def _bound_for_each_size(implementation: Implementation, case: Case) -> Callable[..., Any]:
    """Each call by what is bound for its number of rows, as it would be if that batch were the only one."""

    def call(q: Tensor, *arguments: Tensor, **options: object) -> object:
        return implementation.bind(case.request.but(rows=q.shape[:-2].numel()))(q, *arguments, **options)

    return call


def run_installed(case: Case, device: torch.device) -> CaseResult:
    """In a worker process: run a case on the installed implementation of that name."""
    found = get_registry().implementations(case.primitive)
    return _bind_and_run(next(i for i in found if i.name == case.implementation), case, device)


def _versions(facts: DeviceFacts) -> tuple[tuple[str, str], ...]:
    from mla_portable._version import __version__

    own = {"mla_portable": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return tuple(sorted({**dict(facts.libraries), **own}.items()))
