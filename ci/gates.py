#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The gates on what is claimed: all of them, or those that are named; every one runs, whatever the first one says.

    ci/gates.py [--release] [GATE ...]

generated    MATRIX.md, matrix.json or FEATURES.md is not what runs, profiles, declarations and costs say, or one of
             docs/benchmarks.md, its pictures and docs/accuracy.md is not what runs say
untested     a limit of a declaration that the conformance suite has no case for
claims       what implementations that ran in the newest release declare now and did not prove there: reported; with --release
             refused

Contributed runs are checked by ci/check_runs.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "release"))

from accuracy_page import accuracy_pages
from claims import uncovered, untested
from matrix import generated
from page import benchmark_pages
from proofs import results_of
from suite import TodaysSuite

from mla_portable.capability.model import RecordError
from mla_portable.capability.profiles import load_profiles
from mla_portable.capability.run import runs_in
from mla_portable.choose import Registry

CAPABILITY = Path(__file__).parents[1] / "capability"
PROFILES = load_profiles(CAPABILITY / "profiles")
REGISTRY = Registry(environ={}, probe=False, costs="measured")


def differences() -> list[str]:
    """A paragraph for each file that is not what it should be, with the first lines that differ."""
    found: list[str] = []
    wanted_files = {path: (text, "ci/release/matrix.py") for path, text in generated(CAPABILITY, REGISTRY).items()}
    written = benchmark_pages(CAPABILITY) | accuracy_pages(CAPABILITY)
    pages = {CAPABILITY.parent / "docs" / name: text for name, text in written.items()}
    wanted_files |= {path: (text, "ci/release/bench.py page --write") for path, text in pages.items()}
    for path, (wanted, command) in wanted_files.items():
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if there != wanted:
            lines = difflib.unified_diff(there.splitlines(), wanted.splitlines(), lineterm="", n=0)
            shown = [line[:160] for line in islice(lines, 2, 14)]
            found.append("\n".join([f"{path.name} is not what runs and declarations say; run `{command}`", *shown]))
    return found


def claims() -> list[str]:
    """Of the newest release that has runs."""
    found = results_of((run for _, run in runs_in(CAPABILITY)), PROFILES)
    newest = max((each.release for each in found), default="")
    today = TodaysSuite(REGISTRY.implementations(), PROFILES)
    return [
        line
        for each in found
        if each.release == newest and each.status
        for line in uncovered(REGISTRY.implementations(), each, today, PROFILES)
    ]


GATES: dict[str, Callable[[], list[str]]] = {
    "generated": differences,
    "untested": lambda: untested(REGISTRY.implementations(), PROFILES),
    "claims": claims,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gate", nargs="*", help="default: all")
    parser.add_argument("--release", action="store_true", help="refuse claims that the newest release's runs do not prove")
    options = parser.parse_args()
    unknown = [name for name in options.gate if name not in GATES]
    if unknown:
        parser.error(f"no gate {', '.join(unknown)}; there are {', '.join(GATES)}")
    status = 0
    for name in options.gate or GATES:
        try:
            problems = GATES[name]()
        except RecordError as error:
            problems = [str(error)]
        for problem in problems:
            print(f"{name}: {problem}")
        refused = bool(problems) and (name != "claims" or options.release)
        word = "passed" if not problems else f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
        print(f"gate {name}: {word}{'' if refused or not problems else ', reported only'}")
        status |= refused
    return status


if __name__ == "__main__":
    sys.exit(main())
