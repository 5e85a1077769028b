#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The gates on the records: all of them, or those that are named; every one runs, whatever the first one says.

    python ci/gates.py [--base REF] [--arch ARCH ...] [schema staleness claims untested strict regressions generated compile]

schema       a record that cannot be believed; a record of the base that has gone or changed, and nothing supersedes it
staleness    evidence of other sources than today's, of what any machine can run again
claims       a declaration beyond its evidence, and any failure
untested     a declared layout, head count or block size that the conformance suite has no case for
strict       an expected failure that may pass, a test that never runs
regressions  a benchmark slower than its record on the same device
generated    MATRIX.md and costs that are not what records and registry say
compile      compiled records that compiling one architecture a day again, or those of --arch, contradicts
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from mla_portable.registry import get_registry
from mla_portable.tools.matrix import RecordError, Records, gates, read_records
from mla_portable.tools.matrix.claims import COMPILER, Claim, suite_cases
from mla_portable.tools.matrix.evidence import is_native
from mla_portable.tools.matrix.fold import wrongly_removed
from mla_portable.tools.matrix.generated import differences, generate
from mla_portable.tools.matrix.record import compiled_records, origin_of

ROOT = Path(__file__).parents[1]
CAPABILITY = ROOT / "capability"


@cache
def records() -> Records:
    return read_records(CAPABILITY, get_registry())


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def base_commit(named: str | None) -> str | None:
    """The commit that a change starts from: where the branch left `named` (origin/main, else main), or on it HEAD's parent."""
    for name in [named] if named else ["origin/main", "main"]:
        try:
            base = git("merge-base", name, "HEAD").strip()
        except (OSError, subprocess.CalledProcessError):
            continue
        if base != git("rev-parse", "HEAD").strip():
            return base
        parents = git("rev-list", "--parents", "-n", "1", "HEAD").split()[1:]
        return parents[0] if parents else base
    if named:
        sys.exit(f"no such reference: {named}")
    return None


def schema(options: argparse.Namespace) -> list[str]:
    try:
        unbound = [
            f"{each.where}: bound to no commit; enter it with ci/record_evidence.py add"
            for each in records().evidence
            if each.data["commit"] is None and is_native(each.data)
        ]
    except RecordError as error:
        return [str(error)]
    commit = base_commit(options.base)
    paths = [] if commit is None else git("ls-tree", "-r", "--name-only", commit, "--", "capability/evidence").splitlines()
    before = {path: git("show", f"{commit}:{path}") for path in paths if path.endswith(".jsonl")}
    now = {str(path): path.read_text(encoding="utf-8") for path in (CAPABILITY / "evidence").rglob("*.jsonl")}
    return unbound + wrongly_removed(before, now)


def strict(_: argparse.Namespace) -> list[str]:
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "backends").glob("*/tests/**/*.py")]
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}
    problems = gates.strict_expectations(files)
    if "xfail_strict = true" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8"):
        problems.append("pyproject.toml: xfail_strict = true is gone from [tool.pytest.ini_options]")
    return problems


def compile_again(options: argparse.Namespace) -> list[str]:
    declared, problems = records().declarations, []
    targets: dict[str, dict[str, None]] = {}
    for claim in declared.claims:
        if claim.targets:
            targets.setdefault(claim.module, {}).update(dict.fromkeys(claim.targets))
    for module, archs in ((module, tuple(found)) for module, found in targets.items()):
        today = [archs[datetime.now(timezone.utc).toordinal() % len(archs)]]
        chosen = [arch for arch in options.arch if arch in archs] if options.arch else today
        if not chosen:
            continue
        command = [sys.executable, "-m", f"{module}.{COMPILER}", "--json", "--quick", *chosen]
        environ = {**os.environ, "TRITON_INTERPRET": "0"}
        run = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
        if run.returncode not in (0, 1):
            problems.append(f"{' '.join(command)}: exit status {run.returncode}")
            continue
        lines = [json.loads(line) for line in run.stdout.splitlines()]
        fresh = compiled_records(lines, module, declared, records().profiles, origin_of(ROOT, "compile"))
        recorded = [each.data for each in records().evidence if each.kind == "compiled"]
        problems += gates.compiled_as_recorded(recorded, fresh)
        print(f"compiled again: {len(lines)} variants of {module} for {', '.join(chosen)}")
    return problems


def claimed() -> tuple[Claim, ...]:
    return records().declarations.claims


GATES: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "schema": schema,
    "staleness": lambda _: gates.staleness(records().cells(), records().profiles),
    "claims": lambda _: gates.claims_within_evidence(records().cells(), claimed(), records().profiles),
    "untested": lambda _: gates.untested_claims(claimed(), records().profiles, suite_cases(get_registry())),
    "strict": strict,
    "regressions": lambda _: gates.regressions(records().evidence),
    "generated": lambda _: differences(generate(CAPABILITY)),
    "compile": compile_again,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gate", nargs="*", help="default: all")
    parser.add_argument("--base", metavar="REF", help="what a change starts from; default: origin/main, else main")
    parser.add_argument("--arch", action="append", default=[])
    options = parser.parse_args()
    unknown = [name for name in options.gate if name not in GATES]
    if unknown:
        parser.error(f"no gate {', '.join(unknown)}; there are {', '.join(GATES)}")
    status = 0
    for name in options.gate or GATES:
        try:
            problems = GATES[name](options)
        except RecordError as error:
            problems = [str(error)]
        for problem in problems:
            print(f"{name}: {problem}")
        plural = "" if len(problems) == 1 else "s"
        print(f"gate {name}: {f'{len(problems)} problem{plural}' if problems else 'passed'}")
        status |= bool(problems)
    return status


if __name__ == "__main__":
    sys.exit(main())
