# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: any implementation, held against the float64 oracle on cases made from its own declaration.

    from mla_portable.tools.conformance import run_suite
    from mla_portable.registry import get_registry

    report = run_suite(get_registry(), "reference", device="cpu", level="quick")
    assert report.ok, [result.message for result in report.results if result.status != "passed"]

`mla-portable conform NAME` does the same. Tolerances and the meaning of every quantity: docs/numerics.md.
"""

from mla_portable.tools.conformance.cases import Case, cases_for
from mla_portable.tools.conformance.params import LEVELS
from mla_portable.tools.conformance.report import CaseResult, Progress, Report, Unavailable, Worst
from mla_portable.tools.conformance.runner import run_case, run_suite
from mla_portable.tools.conformance.tolerances import TOLERANCES, Tolerance, tolerance, tolerance_table_markdown

__all__ = [
    "LEVELS",
    "TOLERANCES",
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
    "tolerance",
    "tolerance_table_markdown",
]
