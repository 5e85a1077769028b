# SPDX-License-Identifier: Apache-2.0
"""Candidate: one way to do a case's work, ours or a baseline's, with all that is prepared once outside of the timing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mla_portable.choose import Registry
from mla_portable.contracts import Baseline, Batch, DecodeSchedule, Implementation, Reason, Request
from mla_portable.judge.problems.bench import BenchProblem, KernelCase
from mla_portable.planner import Planner, PlannerConfig
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A way to do the work.

    Attributes:
        name: of the implementation or the baseline. implementation: None for a baseline. remark: see `Baseline`.
        prepare: makes (run, result) for the problem: see `BaselineCall`. May compile and allocate.
    """

    name: str
    implementation: Implementation | None
    remark: str
    prepare: Callable[[], tuple[Callable[[], object], Callable[[], Any]]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A way that cannot do a case, and why."""

    name: str
    reasons: tuple[Reason, ...]


def our_candidates(
    problem: BenchProblem, registry: Registry, device: torch.device, backends: Collection[str]
) -> tuple[list[Candidate], list[Refusal]]:
    """Every implementation of the primitive that claims this device; what the registry's checks refuse is refused here.

    Numeric probes are left out: the benchmark judges each result itself, on a larger problem.

    Args:
        backends: names of backends or implementations to consider; empty means all.
    """
    named = next(iter(backends), "auto")  # every candidate gets a verdict all the same; a named reference is timed on a GPU too
    decision = registry.decide(problem.request.but(lse=False), backend=named, probe=False, thorough=True)
    by_name = {each.name: each for each in registry.implementations(problem.request.primitive)}
    found: list[Candidate] = []
    refused: list[Refusal] = []
    for verdict in sorted(decision.verdicts, key=lambda each: each.implementation):
        implementation = by_name.get(verdict.implementation)
        if implementation is None:  # a backend that is disabled, and so was not imported
            continue
        if backends and implementation.name not in backends and implementation.backend not in backends:
            continue
        if verdict.can_run:
            bind = partial(registry.bind_implementation, implementation)
            remark = "" if implementation.support.lse or not problem.request.lse else "returns no lse"
            request = registry.configured(implementation, problem.request.but(lse=False))
            prepare = partial(prepared, problem, implementation, request, bind, device)
            found.append(Candidate(implementation.name, implementation, remark, prepare))
        elif not any(implementation.support.device_reasons(problem.request.device)):
            refused.append(Refusal(implementation.name, verdict.reasons))
    return found, refused


def prepared(
    problem: BenchProblem,
    implementation: Implementation,
    request: Request,
    bind: Callable[[Request], Callable[..., Any]],
    device: torch.device,
) -> tuple[Callable[[], object], Callable[[], Any]]:
    """(run, result) of what `bind` makes for the problem, with the schedule that the implementation takes.

    Attention is bound and called as `SparseMLAAttention` does: indices are promised to be clean, and their counts are lengths.

    Args:
        request: of the problem, with or without lse, and with the configuration that it is bound with. The schedule is cut for
            that.
    """
    others: dict[str, Any] = {}
    schedule = decode_schedule(implementation, problem.case, request, device)
    if schedule is not None:
        others["schedule"] = schedule
    if request.primitive in (SPARSE_DECODE, SPARSE_PREFILL):
        kind = implementation.schedule_kind
        request = request.but(clean_indices=True)
        if implementation.support.lengths and not (kind is not None and kind.assumes_topk):
            request = request.but(lengths=True, clean_lengths=True)
            indices: torch.Tensor = problem.arguments["indices"]
            others["lengths"] = (indices >= 0).sum(dim=-1, dtype=torch.int32)
    bound = bind(request)
    last: list[Any] = [None]

    def run() -> None:
        last[0] = problem.call(bound, **others)

    return run, lambda: last[0] if request.lse == problem.request.lse else (last[0][0], None)


def decode_schedule(
    implementation: Implementation, case: KernelCase, request: Request, device: torch.device
) -> DecodeSchedule | None:
    """What the planner makes for a batch of this many decodes; None where the implementation takes no schedule.

    Every token sees at least K keys, as the lists of the case name K: a schedule of a kind with `needs_lengths` reads all.
    """
    facts, context = request.device, (case.topk or 1) + case.query_len
    if case.primitive is not SPARSE_DECODE or implementation.schedule_kind is None:
        return None
    config = PlannerConfig(
        device=device,
        route="fused",
        num_heads=case.num_heads or 1,
        topk=case.topk or 1,
        max_num_reqs=case.rows,
        max_num_tokens=case.rows * case.query_len,
        decode_threshold=case.query_len,
        max_model_len=context,
        schedule_kind=implementation.schedule_kind,
        decode_request=request,
        num_sms=facts.num_sms,
        arch=facts.arch,
    )
    seq_lens = np.full(case.rows, context, dtype=np.int32)
    batch = Batch(
        query_start_loc=np.arange(case.rows + 1, dtype=np.int32) * case.query_len,
        seq_lens=seq_lens,
        block_table=torch.zeros((case.rows, 1), dtype=torch.int32, device=device),
        seq_lens_device=torch.from_numpy(seq_lens).to(device),  # as engines have them
    )
    return Planner(config).plan(batch).decode_schedule


def baseline_candidates(problem: BenchProblem, baselines: Iterable[Baseline]) -> tuple[list[Candidate], list[Refusal]]:
    """Every baseline of the primitive; what has reasons against it is refused."""
    found: list[Candidate] = []
    refused: list[Refusal] = []
    for baseline in baselines:
        if baseline.primitive is not problem.request.primitive:
            continue
        reasons = tuple(baseline.reasons(problem.request))
        if reasons:
            refused.append(Refusal(baseline.name, reasons))
        else:
            found.append(Candidate(baseline.name, None, baseline.remark, partial(_prepared_baseline, baseline, problem)))
    return found, refused


def _prepared_baseline(baseline: Baseline, problem: BenchProblem) -> tuple[Callable[[], object], Callable[[], Any]]:
    call = baseline.prepare(problem.request, problem.arguments)
    return call.run, call.result
