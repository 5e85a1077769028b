# SPDX-License-Identifier: Apache-2.0
"""Problems of every primitive and the judge of their results, for probe, conformance, benchmark and `run` alike.

One module per primitive: its oracle in float64, the cases of each level, how the tensors are built, tolerances and judge, what
is timed. `primitive.problems` imports it on first use. Levels: probe (`probe`), smoke < quick < full (`base.LEVELS`), bench
(`bench`). Tolerances and the meaning of every quantity: docs/dev/accuracy.md. Needs torch alone.
"""

from mla_portable.judge.problems.base import LEVELS, Case, Params, Problems, cases_for, tolerance_table_markdown, tolerances
from mla_portable.judge.problems.compare import Finding, Tolerance
from mla_portable.judge.problems.stage import Problem, Stage

__all__ = [
    "LEVELS",
    "Case",
    "Finding",
    "Params",
    "Problem",
    "Problems",
    "Stage",
    "Tolerance",
    "cases_for",
    "tolerance_table_markdown",
    "tolerances",
]
