# SPDX-License-Identifier: Apache-2.0
"""Each kind of lie is caught by the gate meant for it, and sound records pass every gate."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from acme_records import (
    ALL,
    OLD,
    PROFILES,
    SUPPORT,
    acme_claim,
    benchmark,
    cases,
    cells,
    compiled,
    conformance,
    day,
    evidence,
    interpreted,
)

from mla_portable.tools.matrix.claims import Claim
from mla_portable.tools.matrix.evidence import append_evidence, parse_evidence, problems_of
from mla_portable.tools.matrix.fold import fold, superfluous, wrongly_removed
from mla_portable.tools.matrix.gates import (
    claims_within_evidence,
    compiled_as_recorded,
    regressions,
    staleness,
    untested_claims,
)
from mla_portable.tools.matrix.levels import Cell
from mla_portable.tools.matrix.model import RecordError

ROOT = Path(__file__).parents[1]
Records = Sequence[dict[str, Any]]


def over_claims(found: dict[str, Cell], claimed: Claim | None = None) -> list[str]:
    return claims_within_evidence(found.values(), [claimed or acme_claim()], PROFILES)


def test_sound_records_pass_every_gate() -> None:
    found = cells(*ALL)
    assert over_claims(found) == staleness(found.values(), PROFILES) == regressions(evidence(*ALL)) == []
    assert compiled_as_recorded([compiled()], [compiled()]) == []


# claims


CORE = acme_claim(core=True, targets=())
WIDE = acme_claim(support=SUPPORT | {"max_heads": 256})
TOO_LARGE = compiled(
    kernels={"a_kernel": {"variants": 3, "shared": 1200, "registers": 64, "spilled": 0}},
    failures=["a: 1200 bytes of shared memory, sm90 has 1000"],
    cases=cases(2, failed=1),
)


@pytest.mark.parametrize(
    ("records", "claimed", "words"),
    [
        (ALL, WIDE, ["num_heads 129 to 256"]),
        ((), None, ["compiles for sm90, yet there is no evidence", "claims a CPU, yet no run"]),
        ((compiled(), interpreted(cases=cases(8, skipped=1))), None, ["1 case skipped"]),
        ((compiled(), interpreted(), conformance()), None, []),
        ((compiled(), interpreted(), conformance(cases=cases(8, failed=1))), None, ["verified is failing: 1 of 9 failed"]),
        (
            (compiled(), interpreted(), conformance(mode="ptx", target="sm90", cases=cases(8, failed=1))),
            None,
            ["is failing: 1 of 9 failed"],
        ),
        ((interpreted(mode="native", dirty=True),), CORE, ["uncommitted changes"]),
        ((interpreted(mode="native"),), CORE, []),
        ((TOO_LARGE, interpreted()), None, ["compiled is failing"]),
    ],
    ids=["wider", "none", "skipped", "whole", "failing", "ptx failing", "dirty", "clean", "too large"],
)
def test_claims_catches_what_goes_beyond_evidence(records: Records, claimed: Claim | None, words: list[str]) -> None:
    problems = over_claims(cells(*records, claimed=claimed), claimed)
    assert bool(problems) == bool(words)
    assert all(any(word in problem for problem in problems) for word in words), problems


# staleness


def test_staleness_catches_a_kernel_edited_after_its_evidence() -> None:
    found = cells(*ALL, sources=OLD)
    assert {cell.state for cell in found.values()} == {"stale"}
    problems = staleness(found.values(), PROFILES)
    assert any("compiled is stale" in problem for problem in problems)
    assert any("interpreted is stale" in problem for problem in problems)
    # what only the device can renew is shown as stale, and does not stop the change
    assert not any("verified" in problem for problem in problems)


# schema


@pytest.mark.parametrize(
    ("record", "spoil"),
    [
        *((conformance, lambda r, name=name: r.pop(name)) for name in ("source_hash", "driver", "suite_hash", "kind")),
        (conformance, lambda r: r.update(level_reached="verified")),
        (conformance, lambda r: r.update(source_hash="abc")),
        (conformance, lambda r: r.update(commit=None, dirty=True)),
        (conformance, lambda r: r["cases"].update(passed=-1)),
        (conformance, lambda r: r.update(recorded="yesterday")),
        (conformance, lambda r: r.update(primitive="dense_decode")),
        (conformance, lambda r: r.update(versions={})),
        (conformance, lambda r: r.update(mode="ptx")),
        (conformance, lambda r: r["device"].update(name="Acme Bigger")),
        (conformance, lambda r: r["device"].update(profile="huge")),
        (conformance, lambda r: r["device"].update(arch="sm80")),
        *((benchmark, lambda r, name=name: r.pop(name)) for name in ("bound", "baseline", "runs")),
        (benchmark, lambda r: r.update(median_us=0.0)),
        (compiled, lambda r: r.update(target="sm79")),
        (compiled, lambda r: r.update(kernels={})),
        (compiled, lambda r: r["kernels"]["a_kernel"].update(shared=1200)),
        (compiled, lambda r: r.update(failures=["one"])),
    ],
)
def test_schema_catches_a_malformed_record(record: Callable[[], dict[str, Any]], spoil: Callable[[Any], Any]) -> None:
    data = copy.deepcopy(record())
    assert problems_of(data, PROFILES) == []
    spoil(data)
    assert problems_of(data, PROFILES)
    with pytest.raises(RecordError, match="here:1"):
        parse_evidence(json.dumps(data), "here", PROFILES)


def test_nothing_is_written_when_one_record_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(RecordError):
        append_evidence(path, [conformance(), conformance(commit="none")], PROFILES)
    assert not path.exists()
    assert append_evidence(path, [conformance()], PROFILES) == append_evidence(path, [benchmark()], PROFILES) == 1
    assert [e.kind for e in parse_evidence(path.read_text(), "x", PROFILES)] == ["conformance", "benchmark"]


# schema: which records may go


FAILED = conformance(cases=cases(8, failed=1), **day(2))
STALE = {"source_hash": OLD}
ELSEWHERE = {"machine": "f" * 16}


@pytest.mark.parametrize(
    ("records", "kept"),
    [
        ((conformance(**STALE), conformance(**day(2))), [1]),
        # of the same sources two runs stay, from two days or machines, and no third; on one machine and day the last
        ((conformance(), conformance(**day(2))), [0, 1]),
        ((conformance(), conformance(**day(2)), conformance(**day(3))), [1, 2]),
        ((conformance(), conformance(**day(1)) | {"recorded": "2026-11-01T00:00:01Z"}), [1]),
        ((conformance(**ELSEWHERE), conformance(**day(1)) | {"recorded": "2026-11-01T00:00:01Z"}), [0, 1]),
        # a failure is superseded by a pass alone, and a pass by whatever came later of other sources
        ((conformance(**STALE), FAILED), [1]),
        ((FAILED, FAILED | day(3)), [0, 1]),
        ((FAILED | STALE, conformance(**day(3))), [1]),
        ((FAILED | STALE, conformance(**day(3)), FAILED | day(4)), [1, 2]),
        ((FAILED, conformance(**day(3), cases=cases(0))), [0, 1]),
        # today's sources stay, whatever came later of others
        ((conformance(), conformance(**STALE, **day(2))), [0, 1]),
        ((conformance(), conformance(**STALE, **day(2)), conformance(**STALE, **day(3))), [0, 1, 2]),
        # of the same sources a less complete run supersedes nothing
        ((conformance(), conformance(**day(2), cases=cases(8, skipped=1))), [0, 1]),
        ((conformance(), conformance(**day(2), dirty=True)), [0, 1]),
        ((conformance(), conformance(**day(2), support=SUPPORT | {"max_heads": 64})), [0, 1]),
        # other series
        (
            (conformance(), conformance(**day(2), level="full"), conformance(**day(2), match="x"), compiled(**day(3))),
            [0, 1, 2, 3],
        ),
        ((conformance(), interpreted(**day(2)), conformance(**day(3), mode="ptx", target="xy1")), [0, 1, 2]),
        # of benchmarks the newest two and the fastest
        (
            (benchmark(median_us=99.5), *(benchmark(median_us=t, **day(d)) for d, t in ((2, 101), (3, 100), (4, 100)))),
            [0, 2, 3],
        ),
        ((benchmark(), benchmark(**day(2), shape="B 1"), benchmark(**day(2), heads=[1])), [0, 1, 2]),
    ],
)
def test_fold_keeps_what_can_still_matter_and_the_gate_accepts_that_alone(records: Records, kept: list[int]) -> None:
    made = evidence(*({**record, "report": f"{number:064x}"} for number, record in enumerate(records)))
    found = fold(made, lambda each: each.data["source_hash"] != OLD)
    assert [made.index(each) for each in found] == kept
    assert {int(sha, 16) for sha in superfluous(made, lambda each: each.data["source_hash"] != OLD)} == {*range(len(made))} - {
        *kept
    }
    assert wrongly_removed(made, found) == []
    assert len(wrongly_removed(made, found[:-1])) >= 1, "the newest of a series never goes"


def test_history_catches_a_report_that_is_gone() -> None:
    before = evidence(conformance(), FAILED)
    (problem,) = wrongly_removed(before, before[:1])
    assert f"report {2:016x}"[:20] in problem and "it has a failure" in problem
    (problem,) = wrongly_removed(before, before[1:])
    assert "gone, and no record that remains supersedes it; restore it" in problem
    assert wrongly_removed(before, [*before, *evidence(compiled(), benchmark())]) == []


# regressions, untested, compile


@pytest.mark.parametrize(
    ("records", "caught"),
    [
        ((benchmark(), benchmark(median_us=114.9, **day(2))), False),
        ((benchmark(), benchmark(median_us=115.1, **day(2))), True),
        ((benchmark(), benchmark(median_us=500.0, device={"profile": "cpu", "name": "CPU x", "arch": "cpu"})), False),
        ((benchmark(), benchmark(median_us=500.0, shape="B 1")), False),
        ((benchmark(), benchmark(median_us=500.0), benchmark()), False),
    ],
)
def test_regressions_catches_a_benchmark_slower_than_its_record(records: Records, caught: bool) -> None:
    assert ["15 % slower than its record" in problem for problem in regressions(evidence(*records))] == [True] * caught


def test_untested_catches_a_promise_without_a_case() -> None:
    whole = [SimpleNamespace(kv_layout="bf16", num_heads=heads, block_size=None) for heads in (128, 1)]
    sized = [SimpleNamespace(**vars(case) | {"block_size": 64}) for case in whole]
    for collected, more, word in (
        (whole, {}, ""),
        ((), {}, "no case"),
        (whole[1:], {}, "128 heads are declared"),
        (whole, {"kv_layouts": ["bf16", "fp8_ds_mla"]}, "layout fp8_ds_mla"),
        (sized, {"block_sizes": [16, 64]}, "blocks of 16"),
    ):
        problems = untested_claims([acme_claim(support=SUPPORT | more)], PROFILES, lambda claim, profile: collected)  # noqa: B023
        assert [word in problem for problem in problems[:1]] == [True] * bool(word)


def using(**usage: int) -> dict[str, Any]:
    return {"kernels": {"a_kernel": compiled()["kernels"]["a_kernel"] | usage}}


@pytest.mark.parametrize(
    ("fresh", "word"),
    [
        (compiled(**using(shared=900)), "shared is 900, the record says 800"),
        (compiled(**using(registers=72)), "registers is 72"),
        (compiled(**using(spilled=1)), "spilled is 1"),
        (compiled(kernels={"b_kernel": using()["kernels"]["a_kernel"]}), "the record says None"),
        (compiled(**using(registers=72), versions={"python": "3.11", "torch": "9"}), "registers is 72"),
        (compiled(**using(registers=72), versions={"python": "3.11", "triton": "9"}), ""),
        (compiled(**using(registers=72), versions={"python": "3.11", "cc": "9"}), ""),
        (compiled(source_hash=OLD), "other sources"),
        (compiled(target="xy1"), "no record"),
        (TOO_LARGE, "1200 bytes"),
    ],
)
def test_compile_compares_what_the_same_compilers_made(fresh: dict[str, Any], word: str) -> None:
    problems = compiled_as_recorded([compiled()], [fresh])
    assert any(word in problem for problem in problems) == bool(word) == bool(problems)
