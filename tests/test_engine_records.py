# SPDX-License-Identifier: Apache-2.0
"""Evidence from engines: from judged comparisons to a row of the matrix."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from machines import H200
from reporting import PROFILES, RUN, derived

from mla_portable.registry import get_registry
from mla_portable.tools.matrix.checks import check_report
from mla_portable.tools.matrix.claims import collect_declarations
from mla_portable.tools.matrix.engines import engine_lines, engine_report
from mla_portable.tools.matrix.evidence import Evidence, problems_of
from mla_portable.tools.matrix.levels import Hashes
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.records import engine_hash, index_of
from mla_portable.tools.matrix.render import markdown
from mla_portable.tools.matrix.reports import parse_report, write_report
from mla_portable.tools.matrix.table import Table
from mla_portable.tools.provenance import Provenance

LINES = (("plugin", True, "0.03"), ("stock", None, "0.02"), ("graphs", True, "0.04"))
FACTS = replace(H200, memory_bytes=143156 << 20)


def report(*lines: tuple[str, bool | None, str], run: Provenance = RUN) -> dict[str, Any]:
    versions = {"python": "3.12.3", "torch": "2.11.0", "vllm": "0.26.0"}
    more = {"device": FACTS, "driver": "580", "clocks": {}, "versions": versions}
    return engine_report("vllm 0.26.0", "features", lines or LINES, run, **more)


def rows(*documents: dict[str, Any], arch_hash: str | None = None) -> list[tuple[str, ...]]:
    evidence = [Evidence("test:1", record) for document in documents for record in derived(document)]
    hashes = Hashes({("mla_portable.vllm", "engine", "sm90"): arch_hash or engine_hash()}, {})
    return list(engine_lines(evidence, hashes))


def test_judged_comparisons_become_one_record_and_one_row() -> None:
    (record,) = derived(report())
    assert record["cases"] == {"passed": 2, "failed": 0, "skipped": 0}
    assert not problems_of(record, PROFILES)
    ran = "2026-11-01, 000000000000"
    expected = ("vllm 0.26.0", "NVIDIA H200", "features", "self-reported", "2 of 2 comparisons passed", ran)
    assert rows(report()) == [expected]


def test_a_row_says_failing_stale_or_reproduced() -> None:
    failing = report(("plugin", False, "3.1"), run=replace(RUN, recorded="2026-11-02T00:00:00Z"))
    assert [row[3] for row in rows(report(), failing)] == ["failing"]
    assert [row[3] for row in rows(report(), arch_hash="0" * 64)] == ["stale"]
    again = report(run=replace(RUN, recorded="2026-11-02T00:00:00Z", machine="f" * 16))
    assert [row[3] for row in rows(report(), again)] == ["reproduced"]


def test_a_run_on_a_device_without_a_commit_is_refused() -> None:
    (record,) = derived(report(run=replace(RUN, commit=None, changed={"mla_portable/vllm/impl.py": "0" * 40})))
    assert any("commit" in problem for problem in problems_of(record, PROFILES))


@pytest.mark.parametrize(
    ("lines", "word"),
    [((("stock", None, ""),), "no comparison was judged"), ((("plugin", True, ""), ("plugin", True, "")), "plugin: twice")],
)
def test_what_a_report_of_an_engine_cannot_say(lines: tuple[Any, ...], word: str) -> None:
    parsed = parse_report(report(*lines), "test")
    now = datetime(2026, 12, 1, tzinfo=timezone.utc)
    found = check_report(parsed, PROFILES, Hashes({}, {}), now=now, case_ids=lambda *_: None, limits=lambda _: ())
    assert word in found


def test_a_report_of_another_claim_is_no_evidence_of_an_engine() -> None:
    document = report()
    document["claims"][0]["primitive"] = "sparse_decode"
    now = datetime(2026, 12, 1, tzinfo=timezone.utc)
    parsed = parse_report(document, "test")
    found = check_report(parsed, PROFILES, Hashes({}, {}), now=now, case_ids=lambda *_: None, limits=lambda _: ())
    assert any("the one claim" in each for each in found)
    with pytest.raises(RecordError):
        parse_report(document | {"lines": [{"name": "plugin"}]}, "test")


def test_the_index_and_the_page_show_it(tmp_path: Path) -> None:
    write_report(tmp_path, report())
    ((path, text),) = index_of(tmp_path, PROFILES).items()
    assert path == tmp_path / "evidence" / "h200" / "mla_portable.jsonl" and '"suite": "features"' in text
    missing = collect_declarations(get_registry(), PROFILES).missing
    empty: dict[str, Any] = dict.fromkeys(("plugins", "devices", "columns", "notes", "sources", "offers"), ())
    page = markdown(Table(recorded="", missing=missing, engines=tuple(rows(report())), **empty))
    assert "| vllm 0.26.0 | NVIDIA H200 | features | self-reported | 2 of 2 comparisons passed |" in page
