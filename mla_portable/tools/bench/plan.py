# SPDX-License-Identifier: Apache-2.0
"""How long `Planner.plan` takes: host time, and time until its copy has landed, over typical steps.

Each run lies between two synchronisations, so that a plan pays for its own copy and for no one else's. The batches of a
case alternate, since what repeats exactly may cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from mla_portable.accelerator import accelerator
from mla_portable.contracts import Batch, InvalidArgument
from mla_portable.planner import Planner, PlannerConfig
from mla_portable.tools.bench.timing import quantiles

_CONTEXT: Final = 4096


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A kind of step: `decodes` requests of `decode_query_len` tokens, then `prefills` of `prefill_tokens` tokens.

    With `varying` every other batch has one decode less, so that no plan finds its content on the device.
    """

    name: str
    decodes: int
    prefills: int = 0
    prefill_tokens: int = 64
    decode_query_len: int = 1
    varying: bool = False

    @property
    def num_reqs(self) -> int:
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        return self.decodes * self.decode_query_len + self.prefills * self.prefill_tokens

    @property
    def longest_query(self) -> int:
        return self.prefill_tokens if self.prefills else self.decode_query_len


PLAN_CASES: Final = (
    PlanCase("256 decodes", 256),
    PlanCase("256 decodes, then 255", 256, varying=True),
    PlanCase("256 decodes + 32 prefills", 256, 32),
    PlanCase("32 prefills of 128", 0, 32, prefill_tokens=128),
    PlanCase("64 decodes + 4 prefills", 64, 4),
    PlanCase("480 decodes + 32 prefills", 480, 32),
    PlanCase("1024 decodes", 1024, varying=True),
    PlanCase("2048 decodes", 2048, varying=True),
    PlanCase("4096 decodes", 4096, varying=True),
    PlanCase("992 decodes + 32 prefills", 992, 32),
    PlanCase("2016 decodes + 32 prefills", 2016, 32),
    PlanCase("4064 decodes + 32 prefills", 4064, 32),
)
"""Steps of common sizes, and the same step with ever more requests."""


@dataclass(frozen=True, slots=True)
class PlanTiming:
    """One row of the result.

    Attributes:
        case, route, device: what was timed, and where plans lived. num_reqs, num_tokens: of the case's first batch.
        median_us, p10_us, p90_us: `plan()` as its caller sees it, microseconds on the host.
        landed_us: median until the device had done everything the plan enqueued; None on a CPU.
        copies_per_plan: host-to-device copies. n: runs that were timed.
    """

    case: str
    route: str
    device: str
    num_reqs: int
    num_tokens: int
    median_us: float
    p10_us: float
    p90_us: float
    landed_us: float | None
    copies_per_plan: float
    n: int


def time_plans(
    config: PlannerConfig, *, cases: Iterable[PlanCase] = PLAN_CASES, repeat: int = 200, warmup: int = 20
) -> list[PlanTiming]:
    """Time `plan()` for each case that fits `config`, each on a planner of its own.

    Raises: InvalidArgument for repeat < 1 or warmup < 0.
    """
    if repeat < 1:
        raise InvalidArgument("time_plans", "repeat", got=repeat, expected="at least 1")
    if warmup < 0:
        raise InvalidArgument("time_plans", "warmup", got=warmup, expected="0 or more")
    return [
        _time_case(Planner(config), case, repeat, warmup)
        for case in cases
        if case.num_reqs <= config.max_num_reqs
        and case.num_tokens <= config.max_num_tokens
        and case.longest_query <= config.max_model_len
    ]


def _time_case(planner: Planner, case: PlanCase, repeat: int, warmup: int) -> PlanTiming:
    batches = _batches(case, planner.device, min(_CONTEXT, planner.config.max_model_len - case.longest_query))
    for i in range(warmup):
        planner.plan(batches[i % len(batches)])
    copies, synchronize = planner.num_copies, accelerator(planner.device).synchronize
    on_host: list[float] = []
    landed: list[float] = []
    for i in range(repeat):
        batch = batches[i % len(batches)]
        synchronize()
        start = time.perf_counter()
        planner.plan(batch)
        returned = time.perf_counter()
        synchronize()
        landed.append((time.perf_counter() - start) * 1e6)
        on_host.append((returned - start) * 1e6)
    median_us, p10_us, p90_us = quantiles(on_host)
    return PlanTiming(
        case=case.name,
        route=planner.config.route,
        device=str(planner.device),
        num_reqs=case.num_reqs,
        num_tokens=case.num_tokens,
        median_us=median_us,
        p10_us=p10_us,
        p90_us=p90_us,
        landed_us=None if planner.device.type == "cpu" else quantiles(landed)[0],
        copies_per_plan=(planner.num_copies - copies) / repeat,
        n=repeat,
    )


def _batches(case: PlanCase, device: torch.device, context: int) -> list[Batch]:
    columns = 1 + (context + case.longest_query) // 64
    table = torch.zeros(case.num_reqs, columns, dtype=torch.int32, device=device)
    batches: list[Batch] = []
    for decodes in (case.decodes, case.decodes - case.varying):
        query_lens = np.array([case.decode_query_len] * decodes + [case.prefill_tokens] * case.prefills, dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        batches.append(Batch(starts, query_lens + np.int32(context), table))
    return batches
