# SPDX-License-Identifier: Apache-2.0
"""An expected failure that comes true is an error, and no test is skipped for good."""

from __future__ import annotations

from gate import ROOT, finish

from mla_portable.tools.matrix.gates import strict_expectations

paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "backends").glob("*/tests/**/*.py")]
files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}
problems = strict_expectations(files)
if "xfail_strict = true" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8"):
    problems.append("pyproject.toml: xfail_strict = true is gone from [tool.pytest.ini_options]")
finish("strict", problems)
