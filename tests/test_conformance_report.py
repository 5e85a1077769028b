# SPDX-License-Identifier: Apache-2.0
"""What a run of the suite says besides single results, and what it refuses before anything runs."""

from __future__ import annotations

import io
import runpy
from pathlib import Path

import pytest
import torch
from conformance_faults import Model
from rich.console import Console

from mla_portable.cli.conform import _for_a_person
from mla_portable.contracts import Primitive
from mla_portable.judge.conformance import run_suite
from mla_portable.primitives import CACHE_WRITE, GATHER_UPCONVERT, INDEXER_LOGITS, MERGE_STATES

P = Primitive


def failing(fault: str, primitive: Primitive, match: str = ""):
    return run_suite(Model(fault), "model", device="cpu", level="quick", primitives=[primitive], match=match)


@pytest.mark.parametrize(
    ("fault", "primitive", "match", "shared"),
    [
        ("writes whole blocks", GATHER_UPCONVERT, "", "block_size=16|64, lens=borders|edges|long"),
        ("multiplies dead parts by 0", MERGE_STATES, "", "dead=all|mixed|rows|some"),
        ("writes skipped tokens", CACHE_WRITE, "", "skips=corpus|some"),
        ("leaves the unseen", INDEXER_LOGITS, "", ""),
        ("takes the scale of the token before", INDEXER_LOGITS, "", "kv=index_fp8"),
    ],
)
def test_a_report_names_what_failing_cases_share(fault: str, primitive: Primitive, match: str, shared: str):
    report = failing(fault, primitive, match)
    assert report.failed > 1 and report.passed > 0
    wanted = (f"common to all {report.failed} failures of {primitive}: {shared}",) if shared else ()
    assert report.common() == wanted


def test_nothing_is_shared_by_no_failure_or_by_one():
    assert failing("", MERGE_STATES).common() == ()
    one = failing("multiplies dead parts by 0", MERGE_STATES, "dead_all")
    assert one.failed >= 1 and one.passed == 0 and one.common() == ()


def test_the_command_prints_it_after_the_failures():
    report = failing("multiplies dead parts by 0", MERGE_STATES)
    console = Console(width=200, record=True, file=io.StringIO())
    for part in _for_a_person(report):
        console.print(part)
    lines = [line for line in console.export_text().splitlines() if line.strip()]
    assert lines[-2].startswith(f"common to all {report.failed} failures of merge_states: dead=")


def test_the_suite_runs_under_any_default_device_and_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            report = run_suite(Model(), "model", device="cpu", level="smoke")
    finally:
        torch.set_default_dtype(before)
    assert report.ok, [(r.case.id, r.message) for r in report.results if r.status != "passed"]


def test_the_script_renews_the_table_of_the_page_and_nothing_else():
    script = runpy.run_path(str(Path(__file__).parents[1] / "ci" / "tolerance_table.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["renewed"](page) == page
    begin = page.index(script["BEGIN"]) + len(script["BEGIN"])
    assert script["renewed"](page[:begin] + "| an old table |\n" + page[page.index(script["END"]) :]) == page
    with pytest.raises(SystemExit, match="tolerances: begin"):
        script["renewed"]("a page without markers")
