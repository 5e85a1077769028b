#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The gates on the records: all of them, or those that are named; every one runs, whatever the first one says.

    python ci/gates.py [--base REF] [--arch ARCH ...] [GATE ...]

Of what is contributed, a failing run among it (`contributions` names these five):
schema       a record or report that is malformed
reports      a record that its report does not say; a report that contradicts itself, its device or its suite
commits      a report of no commit, of one that is not in this history, or that holds other sources than those that ran
history      a report that has gone since the base, at any commit, and nothing supersedes it; keys and reports in one change
generated    files that are not what reports, records and registry say
Of what is claimed:
staleness    evidence of other sources than today's, of what any machine can run again
claims       a declaration beyond its evidence, and any failure
untested     a declared layout, head count or block size that the conformance suite has no case for
regressions  a benchmark slower than its record on the same device
compile      compiled records that compiling one architecture a day again, or those of --arch, contradicts
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path

import torch

from mla_portable.contracts import Primitive
from mla_portable.registry import get_registry
from mla_portable.tools import provenance
from mla_portable.tools.conformance import tolerances
from mla_portable.tools.matrix import gates
from mla_portable.tools.matrix.checks import check_report, copies
from mla_portable.tools.matrix.claims import COMPILER, Claim, case_ids, suite_cases
from mla_portable.tools.matrix.derive import records_of
from mla_portable.tools.matrix.evidence import Evidence
from mla_portable.tools.matrix.fold import wrongly_removed
from mla_portable.tools.matrix.generated import differences, generate
from mla_portable.tools.matrix.model import RecordError, moment
from mla_portable.tools.matrix.record import compiled_report
from mla_portable.tools.matrix.records import Records, index_of, read_records
from mla_portable.tools.matrix.reports import REPORTS, SIGNERS, Report, parse_report, read_reports
from mla_portable.tools.provenance import provenance_of

ROOT = Path(__file__).parents[1]
CAPABILITY = ROOT / "capability"
BASE = "GATES_BASE"
"""Environment variable: what a push or a pull request starts from, for all gates of a run."""
NOWHERE = "0" * 40
"""What a host says a new branch was before."""


@cache
def records() -> Records:
    return read_records(CAPABILITY, get_registry())


@cache
def reports() -> dict[str, Report]:
    return read_reports(CAPABILITY)


def git(*arguments: str) -> str:
    return provenance.git(ROOT, *arguments)


def base_commit(named: str | None) -> str | None:
    """The commit that a change starts from: where it left `named`, else origin/main, else main; on that HEAD's parent."""
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


def schema(_: argparse.Namespace) -> list[str]:
    records(), reports()  # they raise what is wrong
    return []


def check_reports(_: argparse.Namespace) -> list[str]:
    found = differences(index_of(CAPABILITY, records().profiles))
    ids = case_ids(get_registry(), records().profiles)
    for sha, report in reports().items():
        now = datetime.now(timezone.utc)
        problems = check_report(report, records().profiles, records().hashes, now=now, case_ids=ids, limits=limits_of)
        found += [f"report {sha[:16]}: {problem}" for problem in problems]
    return found + copies(reports())


@cache
def limits_of(primitive: str) -> Collection[float]:
    """Every tolerance that a primitive's problems have."""
    mine = [row for (name, _, _), row in tolerances().items() if name == Primitive.named(primitive)]
    return {limit for row in mine for limit in (row.abs, row.rel, row.cosine) if limit is not None}


def commits(_: argparse.Namespace) -> list[str]:
    if not has_whole_history():
        print("commits: not looked at, this copy has no history or not all of it")
        return []
    found: list[str] = []
    for sha, report in reports().items():
        name, commit = f"report {sha[:16]}", report.commit
        if commit is None:
            found.append(f"{name}: bound to no commit; enter it with ci/record_evidence.py add")
            continue
        try:
            git("merge-base", "--is-ancestor", commit, "HEAD")
        except subprocess.CalledProcessError:
            found.append(f"{name}: commit {commit[:12]} is none of this history")
            continue
        made = datetime.fromtimestamp(int(git("show", "-s", "--format=%ct", commit)), timezone.utc)
        if moment(report.recorded) < made - timedelta(minutes=10):
            found.append(f"{name}: recorded {report.recorded}, before its commit was made")
        if report.changed:
            continue  # not the commit's sources; its records are partial
        try:
            there = hashes_at(commit)
        except subprocess.CalledProcessError as error:
            found.append(f"{name}: the sources of commit {commit[:12]} cannot be hashed: {error.stderr.strip()[-200:]}")
            continue
        for claim in report.claims:
            what = f"{claim.implementation}/{claim.primitive}/{claim.arch}"
            if there["sources"].get(what) != claim.source_hash:
                found.append(f"{name}: {what}: commit {commit[:12]} holds other sources than those that ran")
            elif claim.suite_hash not in (None, there["suite"].get(claim.primitive)):
                found.append(f"{name}: {what}: commit {commit[:12]} holds another conformance suite than the one that ran")
    return found


def has_whole_history() -> bool:
    try:
        return git("rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


@cache
def hashes_at(commit: str) -> dict[str, dict[str, str]]:
    """What `ci/record_evidence.py hashes` says in a commit's own tree."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        top = Path(folder)
        path = [top, *top.glob("backends/*/src"), *top.glob("examples/*/src")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        command = [sys.executable, "ci/record_evidence.py", "hashes"]
        done = subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def history(options: argparse.Namespace) -> list[str]:
    base = base_commit(options.base)
    if base is None:
        return []
    passed = [base, *git("rev-list", f"{base}..HEAD", "--", "capability").split()]
    before = {line: None for commit in passed for line in evidence_at(commit)}
    found = wrongly_removed([Evidence("", json.loads(line)) for line in before], records().evidence)
    touched = git("diff", "--name-only", base, "HEAD", "--", "capability").splitlines()
    reported = git("ls-tree", "-r", "--name-only", base, "--", f"capability/{REPORTS}")  # the first key may come with the first
    if reported and f"capability/{SIGNERS}" in touched and any(path.startswith(f"capability/{REPORTS}/") for path in touched):
        found.append(f"capability/{SIGNERS} and reports change together; a key counts for reports that come after it")
    return found


def evidence_at(commit: str) -> Iterator[str]:
    """The lines of evidence that a commit holds."""
    for path in git("ls-tree", "-r", "--name-only", commit, "--", "capability/evidence").splitlines():
        yield from git("show", f"{commit}:{path}").splitlines()


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
        run = provenance_of(ROOT, " ".join(command), torch.device("cpu"))
        document = compiled_report(lines, module, declared, records().profiles, run)
        fresh = records_of(parse_report(document, "compiled again"), "", records().profiles)
        recorded = [each.data for each in records().evidence if each.kind == "compiled"]
        problems += gates.compiled_as_recorded(recorded, fresh)
        print(f"compiled again: {len(lines)} variants of {module} for {', '.join(chosen)}")
    return problems


def claimed() -> tuple[Claim, ...]:
    return records().declarations.claims


CONTRIBUTIONS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "schema": schema,
    "reports": check_reports,
    "commits": commits,
    "history": history,
    "generated": lambda _: differences(generate(CAPABILITY)),
}
GATES = CONTRIBUTIONS | {
    "staleness": lambda _: gates.staleness(records().cells(), records().profiles),
    "claims": lambda _: gates.claims_within_evidence(records().cells(), claimed(), records().profiles),
    "untested": lambda _: gates.untested_claims(claimed(), records().profiles, suite_cases(get_registry())),
    "regressions": lambda _: gates.regressions(records().evidence),
    "compile": compile_again,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gate", nargs="*", help="default: all; `contributions` stands for the first five")
    before = os.environ.get(BASE, "")
    default = None if before in ("", NOWHERE) else before
    parser.add_argument(
        "--base", metavar="REF", default=default, help=f"what a change starts from; default: ${BASE}, origin/main"
    )
    parser.add_argument("--arch", action="append", default=[])
    options = parser.parse_args()
    named = [each for name in options.gate for each in (CONTRIBUTIONS if name == "contributions" else (name,))]
    unknown = [name for name in named if name not in GATES]
    if unknown:
        parser.error(f"no gate {', '.join(unknown)}; there are {', '.join(GATES)}")
    status = 0
    for name in named or GATES:
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
