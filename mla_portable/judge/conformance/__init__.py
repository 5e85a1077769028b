# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: any implementation, held against the float64 oracle on cases made from its own declaration.

    from mla_portable.judge.conformance import run_suite
    from mla_portable.choose import get_registry

    report = run_suite(get_registry(), "reference", device="cpu", level="quick")
    assert report.ok, [result.message for result in report.results if result.status != "passed"]

`mla-portable conform NAME` does the same. Tolerances and the meaning of every quantity: docs/dev/accuracy.md.
"""

from mla_portable.judge.conformance.report import CaseResult, Progress, Report, Unavailable, Worst
from mla_portable.judge.conformance.runner import run_case, run_suite
from mla_portable.judge.problems import LEVELS, Case, Tolerance, cases_for, tolerance_table_markdown, tolerances

__all__ = [
    "LEVELS",
    "Case",
    "CaseResult",
    "Progress",
    "Report",
    "Tolerance",
    "Unavailable",
    "Worst",
    "cases_for",
    "run_case",
    "run_suite",
    "tolerance_table_markdown",
    "tolerances",
]
