# SPDX-License-Identifier: Apache-2.0
"""How decisions, errors and durations read in a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_portable.contracts import Decision, Verdict
    from mla_portable.problems import Finding
    from mla_portable.tools.bench.step import StepReport
    from mla_portable.tools.bench.timing import Timing

__all__ = ["describe_findings", "describe_time", "for_other_devices", "step_headlines", "why", "why_not_another"]

_COSINE = "1 - cosine"
_OTHER_DEVICES = ("device type", "vendor")
"""Subjects of the reasons that say so."""


def why(decision: Decision) -> str:
    """Who decided, and at what cost."""
    chosen = next((v for v in decision.verdicts if v.implementation == decision.chosen), None)
    return f"{decision.control}, {chosen.cost_source} cost {chosen.cost:g}" if chosen else "nothing can run it"


def why_not_another(decision: Decision) -> str:
    """What became of the next best candidate; of every candidate where none can run."""
    others = sorted((v for v in decision.verdicts if v.implementation != decision.chosen), key=lambda v: v.rank)
    if decision.chosen is None:
        return "; ".join(map(_judgement, others)) or "no installed plugin offers it"
    others = [v for v in others if not for_other_devices(v)]
    return f"next best is {_judgement(others[0])}" if others else "there is no other candidate for this device"


def for_other_devices(verdict: Verdict) -> bool:
    """The candidate is declared for other vendors or kinds of device, so that nothing else about it matters here."""
    return any(reason.subject in _OTHER_DEVICES for reason in verdict.reasons)


def _judgement(verdict: Verdict) -> str:
    return f"{verdict.implementation} (cost {verdict.cost:g}): {'; '.join(map(str, verdict.reasons)) or 'can run'}"


def describe_findings(findings: Iterable[Finding]) -> str:
    """Each quantity's error and limit; cosines only where they are beyond theirs."""
    words = [_finding(finding) for finding in findings if finding.message or not finding.quantity.startswith(_COSINE)]
    return "\n".join(words)


def _finding(finding: Finding) -> str:
    mark = "  WRONG" if finding.message else ""
    if finding.limit == 0:
        return f"{finding.quantity} exact" if not finding.message else f"{finding.quantity}: {finding.error:g} differ{mark}"
    return f"{finding.quantity} {finding.error:.1e} / {finding.limit:.1e}{mark}"


def describe_time(timing: Timing | None) -> str:
    """Median in milliseconds and the number of runs, "" for what did not run."""
    return "" if timing is None else f"{timing.median_ms:.3f} ({timing.n})"


def step_headlines(report: StepReport) -> list[str]:
    """What was run where, in a few lines."""
    shape = report.shape
    speculative = f" of {shape.decode_query_len} tokens" if shape.decode_query_len > 1 else ""
    scales = f", {shape.scale_format} scales" if shape.kv_layout != "bf16" else ""
    return [
        f"device  {report.facts} [{report.device}]",
        f"step    {shape.decodes} decodes{speculative} + {shape.prefills} prefills of {shape.prefill_tokens} tokens = "
        f"{shape.num_tokens} tokens, {shape.num_heads} heads, topk {shape.topk}, context up to {shape.context}, "
        f"{shape.kv_layout} cache in blocks of {shape.block_size}{scales}, seed {shape.seed}",
        *(
            f"route   {verdict.route}: {verdict}" if verdict.route == report.route else f"        {verdict.route}: {verdict}"
            for verdict in report.route_decision.verdicts
        ),
    ]
