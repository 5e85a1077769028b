# SPDX-License-Identifier: Apache-2.0
"""Every test that is written has run and passed, or is named here with the reason; judged by the outcome of a run.

    pytest --junitxml=report.xml
    python3 ci/check_tests.py report.xml [FOLDER ...] [--deselect TEST ...] [--ignore-glob PATTERN ...]

Written are the functions named `test*` of the test files below the folders (default: tests, without those of engines, which
`ci/vllm` and `ci/sglang` run, and the tests folders of plugins), wherever they stand in a file. Each needs a case that passed,
and none that did anything else: a mark, a call, an option, a condition or a conftest that keeps one from running leaves it
without. A name that is defined twice hides the first.
Tests that the command deselects or ignores are exceptions of that run. A test that passes without testing, or that was
deleted, cannot be seen here.
"""

from __future__ import annotations

import argparse
import ast
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "backends").glob("*/tests")))
ELSEWHERE = ("tests/sglang", "tests/vllm")
EXCEPTIONS: Mapping[str, str] = {
    "tests/test_torch_defaults.py::test_a_gpu_is_served_by_a_kernel_under_each_setting": "needs a GPU",
    "tests/test_triton_e4m3_packed.py::test_every_word_on_a_gpu": "needs an NVIDIA GPU; a reading of the PTX runs everywhere",
}
"""Test -> why it need not run on a machine without a GPU."""


def written(folders: Iterable[str], root: Path = ROOT) -> Counter[str]:
    """Tests of the files below some folders, as "path::name" or "path::Class::name", and how often each is defined."""
    found: Counter[str] = Counter()
    for folder in folders:
        for path in sorted((root / folder).rglob("test_*.py")):
            name = path.relative_to(root).as_posix()
            if folder in ELSEWHERE or not name.startswith(ELSEWHERE):
                found.update(f"{name}::{each}" for each in _tests(ast.parse(path.read_text(encoding="utf-8")).body))
    return found


def _tests(statements: Iterable[ast.AST], prefix: str = "") -> Iterator[str]:
    for each in statements:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if each.name.startswith("test"):
                yield prefix + each.name
        elif isinstance(each, ast.ClassDef):
            if each.name.startswith("Test"):
                yield from _tests(each.body, f"{each.name}::")
        else:
            yield from _tests([inner for inner in ast.iter_child_nodes(each) if isinstance(inner, ast.stmt)], prefix)


def outcomes(report: str) -> dict[str, Counter[str]]:
    """Test, as `written` names it -> how many of its cases passed, failed or were skipped. report: JUnit's XML."""
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
        parts = module.split(".")
        split = next((i for i, part in enumerate(parts) if part.startswith("Test")), len(parts))
        test = "::".join([f"{'/'.join(parts[:split])}.py", *parts[split:], name])
        other = next((child.tag for child in case if child.tag in ("skipped", "failure", "error")), "passed")
        found.setdefault(test, Counter())[other] += 1
    return found


def problems(tests: Mapping[str, int], ran: Mapping[str, Counter[str]], exceptions: Mapping[str, str]) -> Iterator[str]:
    """What did not pass, though it is written and no exception names it; exceptions that are none."""
    for test, times in tests.items():
        found = ran.get(test, Counter())
        if times > 1:
            yield f"{test}: defined {times} times; the last one hides the others"
        if test in exceptions:
            continue
        if not found["passed"]:
            yield f"{test}: {'skipped' if found else 'did not run'}; let it run, or name it in ci/check_tests.py"
        elif found.total() > found["passed"]:
            rest = ", ".join(f"{count} {what}" for what, count in found.items() if what != "passed")
            yield f"{test}: {found['passed']} cases passed, {rest}"
    for test in exceptions.keys() - tests.keys():
        yield f"{test}: an exception for a test that is not written"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--deselect", action="append", default=[], metavar="TEST")
    parser.add_argument("--ignore-glob", action="append", default=[], metavar="PATTERN")
    options = parser.parse_args()
    folders = options.folders
    tests = written(folders or TESTS)
    ignored = [test for test in tests for pattern in options.ignore_glob if fnmatch(test.partition("::")[0], pattern)]
    named = dict.fromkeys([*options.deselect, *ignored], "not for this run") | ({} if folders else dict(EXCEPTIONS))
    ran = outcomes(options.report.read_text(encoding="utf-8"))
    found = list(problems(tests, ran, named))
    for problem in found:
        print(problem)
    cases = sum((counts for counts in ran.values()), Counter())
    print(f"{len(tests)} tests, {cases['passed']} cases passed, {len(named)} exceptions, {len(found)} problems")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
