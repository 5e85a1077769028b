# SPDX-License-Identifier: Apache-2.0
"""Levels follow from declarations, evidence and source hashes, and each kind of lie is caught by the gate meant for it.

Records are invented: a device "big" (sm90), one claim on it, evidence as a careful recorder would write it. Each test then
spoils one thing.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from acme_claim import acme_claim

import mla_portable.tools.matrix.evidence as evidence_module
from mla_portable.tools.matrix.claims import Claim, Declarations, Objection, load_declarations, wider
from mla_portable.tools.matrix.errors import RecordError
from mla_portable.tools.matrix.evidence import Evidence, append_evidence, parse_evidence, problems_of
from mla_portable.tools.matrix.gates import (
    append_only,
    claims_within_evidence,
    compiled_as_recorded,
    regressions,
    staleness,
    strict_expectations,
    untested_claims,
)
from mla_portable.tools.matrix.levels import Cell, Hashes, evaluate
from mla_portable.tools.matrix.profiles import load_profiles, parse_profile
from mla_portable.tools.matrix.records import Records, read_records
from mla_portable.tools.matrix.render import FORMATS, markdown
from mla_portable.tools.matrix.table import make_table

ROOT = Path(__file__).parents[1]
NOW, OLD, SUITE = "a" * 64, "b" * 64, "c" * 64
COMMIT = "0123456789" * 4
SUPPORT = {"source": "a data sheet", "device_types": ["cuda", "cpu"], "kv_layouts": ["bf16"], "max_heads": 128, "lse": True}
FACTS = {"shared_memory": 1000, "has_bf16": True, "has_fp8_conversion": True}


def profile(slug: str, arch: str, pattern: str, **changes: Any):
    table = {"name": slug, "vendor": "acme", "arch": arch, "device_type": "cuda", "pattern": pattern, "facts": dict(FACTS)}
    table |= changes
    return parse_profile(slug, table | {"sources": dict.fromkeys(["arch", *table["facts"]], "a data sheet")})


PROFILES = {
    "big": profile("big", "sm90", "Acme Big"),
    "odd": profile("odd", "xy1", "Acme Odd"),
    "cpu": profile("cpu", "cpu", "CPU .*", vendor="cpu", device_type="cpu"),
}

claim = partial(acme_claim, sources=("acme",), targets=("sm90",), support=SUPPORT, devices={"big": (), "odd": (), "cpu": ()})


def common(kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": kind,
        "recorded": "2026-11-01T00:00:00Z",
        "implementation": "acme.v1",
        "primitive": "sparse_decode",
        "provider": {"distribution": "acme", "version": "1"},
        "versions": {"python": "3.11"},
        "commit": COMMIT,
        "dirty": False,
        "source_hash": NOW,
        "support": SUPPORT,
        "command": "make it so",
    } | changes


def compiled(**changes: Any) -> dict[str, Any]:
    usage = {"variants": 3, "shared": 800, "registers": 64, "spilled": 0}
    own = {"target": "sm90", "shared_memory_limit": 1000, "kernels": {"a_kernel": usage}, "failures": []}
    return common("compiled", **own, cases={"passed": 3, "failed": 0, "skipped": 0}) | changes


def conformance(**changes: Any) -> dict[str, Any]:
    own = {
        "layout": "bf16",
        "device": {"profile": "big", "name": "Acme Big", "arch": "sm90"},
        "driver": "1.0",
        "mode": "native",
        "level": "quick",
        "match": "",
        "suite_hash": SUITE,
        "heads": [16],
        "topk": [64],
        "cases": {"passed": 9, "failed": 0, "skipped": 0},
        "errors": {"out": {"error": 1e-3, "tolerance": 1e-2, "case": "one"}},
    }
    return common("conformance", **own) | changes


def interpreted(**changes: Any) -> dict[str, Any]:
    device = {"profile": "cpu", "name": "CPU x86_64", "arch": "cpu"}
    return conformance(mode="interpreter", device=device, driver=None) | changes


def benchmark(**changes: Any) -> dict[str, Any]:
    own = {
        "layout": "bf16",
        "device": {"profile": "big", "name": "Acme Big", "arch": "sm90"},
        "driver": "1.0",
        "heads": [16],
        "topk": [64],
        "shape": "B 64",
        "median_us": 100.0,
        "p10_us": 99.0,
        "p90_us": 101.0,
        "runs": 30,
        "floor": {"name": "copy of the bytes", "median_us": 50.0},
        "rival": {"name": "other.v1", "median_us": 120.0},
    }
    return common("benchmark", **own) | changes


def evidence(*records: dict[str, Any]) -> list[Evidence]:
    for record in records:
        assert problems_of(record, PROFILES) == []
    return [Evidence(f"test:{number}", record) for number, record in enumerate(records, 1)]


def cells(*records: dict[str, Any], claimed: Claim | None = None, sources: str = NOW, suite: str = SUITE) -> dict[str, Cell]:
    claimed = claimed or claim()
    hashes = Hashes({("acme.v1", "sparse_decode"): sources}, suite)
    return {cell.device: cell for cell in evaluate([claimed], evidence(*records), hashes, PROFILES)}


ALL = (compiled(), interpreted(), conformance(), benchmark())


def test_each_kind_of_evidence_raises_the_level_by_one() -> None:
    states = [cells(*ALL[:count])["big"].state for count in range(5)]
    assert states == ["declared", "compiled", "interpreted", "verified", "measured"]


def test_a_level_without_evidence_cannot_be_had() -> None:
    assert cells()["big"].level == "declared"
    assert cells(compiled(), benchmark())["big"].level == "compiled"


def test_code_of_an_older_device_that_ran_on_a_newer_one_names_it() -> None:
    ran = conformance(mode="ptx", target="xy1")
    compiles = claim(targets=("sm90", "xy1"))
    both = cells(compiled(), compiled(target="xy1"), ran, claimed=compiles)
    assert (both["odd"].state, both["big"].state) == ("compiled+run", "compiled")
    assert "the code for xy1 ran on Acme Big" in both["odd"].reasons
    assert cells(ran, claimed=compiles)["odd"].state == "partial"
    assert cells(compiled(target="xy1"), ran | {"dirty": True}, claimed=compiles)["odd"].state == "partial"
    assert problems_of(conformance(mode="ptx"), PROFILES)


def test_interpreted_needs_the_compilation_that_its_plugin_offers() -> None:
    cell = cells(interpreted())["big"]
    assert (cell.level, cell.state) == ("declared", "partial")
    assert "interpreted, but not compiled for sm90" in cell.reasons
    odd = cells(interpreted())["odd"]
    assert odd.state == "interpreted"
    assert "no ahead-of-time target for xy1" in odd.reasons


def test_proof_on_one_device_says_nothing_of_another() -> None:
    found = cells(*ALL)
    assert found["odd"].state == "interpreted"
    assert found["cpu"].state == "interpreted"


def test_a_layout_is_proven_by_itself() -> None:
    both = claim(support=SUPPORT | {"kv_layouts": ["bf16", "fp8_ds_mla"]})
    record = conformance(support=both.support)
    hashes = Hashes({("acme.v1", "sparse_decode"): NOW}, SUITE)
    found = {c.layout: c.state for c in evaluate([both], evidence(record), hashes, PROFILES) if c.device == "big"}
    assert found == {"bf16": "verified", "fp8_ds_mla": "declared"}


@pytest.mark.parametrize(
    ("spoil", "state", "word"),
    [
        ({"cases": {"passed": 8, "failed": 1, "skipped": 0}}, "failing", "1 of 9 failed"),
        ({"cases": {"passed": 8, "failed": 0, "skipped": 1}}, "partial", "1 case skipped"),
        ({"cases": {"passed": 0, "failed": 0, "skipped": 0}}, "partial", "nothing ran"),
        ({"dirty": True}, "partial", "uncommitted changes"),
        ({"match": "holes"}, "partial", "only cases that contain 'holes'"),
        ({"level": "smoke"}, "partial", "level smoke"),
        ({"source_hash": OLD}, "stale", "the sources changed since 2026-11-01"),
        ({"suite_hash": OLD}, "stale", "the conformance suite changed"),
        ({"support": SUPPORT | {"max_heads": 64}}, "partial", "num_heads 65 to 128"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_not_whole_verifies_nothing(spoil: dict[str, Any], state: str, word: str) -> None:
    cell = cells(compiled(), conformance(**spoil))["big"]
    assert (cell.level, cell.state) == ("compiled", state)
    assert any(word in reason for reason in cell.reasons), cell.reasons


def test_a_benchmark_counts_beside_a_conformance_run_of_the_same_sources_only() -> None:
    assert cells(benchmark())["big"].level == "declared"
    assert cells(conformance(source_hash=OLD), benchmark())["big"].level == "declared"
    assert cells(conformance(), benchmark(source_hash=OLD))["big"].state == "stale"
    assert cells(conformance(), benchmark(dirty=True))["big"].level == "verified"


def test_a_later_failure_counts_and_a_later_success_heals() -> None:
    bad = conformance(cases={"passed": 8, "failed": 1, "skipped": 0})
    assert cells(conformance(), bad)["big"].state == "failing"
    assert cells(bad, conformance())["big"].state == "verified"


def test_a_later_narrow_run_undoes_nothing() -> None:
    assert cells(conformance(), conformance(match="holes"))["big"].state == "verified"
    assert cells(conformance(match="holes"))["big"].state == "partial"


def test_after_a_failure_an_earlier_success_counts_no_more() -> None:
    bad = conformance(cases={"passed": 8, "failed": 1, "skipped": 0})
    cell = cells(compiled(), conformance(), bad, conformance(match="holes"))["big"]
    assert (cell.level, cell.state) == ("compiled", "partial")
    assert cells(compiled(), conformance(), bad, conformance(match="holes"), conformance())["big"].state == "verified"


def test_an_excluded_device_is_never_and_says_why() -> None:
    against = (Objection("arch", "xy1", "supports sm90"),)
    cell = cells(claimed=claim(devices={"big": (), "odd": against, "cpu": ()}))["odd"]
    assert (cell.state, cell.reasons) == ("never", ("arch xy1 (supports sm90)",))


def test_what_is_not_published_is_unknown_not_never() -> None:
    dim = profile("dim", "xy2", "Acme Dim", facts={"has_bf16": True})
    against = {"dim": (Objection("shared memory", "0 bytes", "needs 49152"),)}
    hashes = Hashes({("acme.v1", "sparse_decode"): NOW}, SUITE)
    (cell,) = evaluate([claim(devices=against)], [], hashes, {"dim": dim})
    assert (cell.state, cell.reasons) == ("unknown", ("shared memory is not published for this device",))
    known = profile("dim", "xy2", "Acme Dim", facts={"has_bf16": True, "shared_memory": 0})
    assert evaluate([claim(devices=against)], [], hashes, {"dim": known})[0].state == "never"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_heads": 256}, "num_heads 129 to 256"),
        ({"max_heads": None}, "num_heads any"),
        ({"kv_layouts": ["bf16", "fp8_ds_mla"]}, "kv_layouts fp8_ds_mla"),
        ({"attn_sink": True}, "attn_sink"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"topk_multiple": 32}, "topk_multiple 32"),
        ({"max_topk": None}, "max_topk without limit"),
        ({"max_topk": 4096}, "max_topk 4096 (evidence covers 2048)"),
        ({"max_query_len": 4}, "max_query_len 4 (evidence covers 2)"),
        ({"archs": None}, "archs any"),
        ({"min_shared_memory": 0}, "min_shared_memory 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_every_way_to_widen_a_declaration_is_noticed(change: dict[str, Any], word: str) -> None:
    old = SUPPORT | {"topk_multiple": 64, "max_topk": 2048, "max_query_len": 2, "archs": ["sm90"], "attn_sink": False}
    old["min_shared_memory"] = 9
    (found,) = wider(old, old | change)
    assert word in found
    assert wider(old, old) == []
    assert wider(old | change, old) == []


# the mutations that continuous integration must catch, each by the gate meant for it


def gate_claims(found: dict[str, Cell], claimed: Claim | None = None) -> list[str]:
    return claims_within_evidence(found.values(), [claimed or claim()], PROFILES)


def test_sound_records_pass_every_gate() -> None:
    found = cells(*ALL)
    assert gate_claims(found) == []
    assert staleness(found.values(), PROFILES) == []
    assert regressions(evidence(*ALL)) == []
    assert compiled_as_recorded([compiled()], [compiled()]) == []


@pytest.mark.parametrize(
    ("changed", "compared"), [({}, True), ({"torch": "9"}, True), ({"triton": "9"}, False), ({"cc": "9"}, False)]
)
def test_gate_compile_compares_what_the_same_compilers_made(changed: dict[str, str], compared: bool) -> None:
    known = compiled()
    more = {"kernels": {name: use | {"registers": use["registers"] + 8} for name, use in known["kernels"].items()}}
    problems = compiled_as_recorded([known], [known | more | {"versions": known["versions"] | changed}])
    assert any("registers is" in problem for problem in problems) == compared


def test_gate_claims_catches_a_claim_widened_without_evidence() -> None:
    widened = claim(support=SUPPORT | {"max_heads": 256})
    problems = gate_claims(cells(*ALL, claimed=widened), widened)
    assert problems
    assert all("num_heads 129 to 256" in problem for problem in problems)


def test_gate_claims_catches_a_claim_without_any_evidence() -> None:
    problems = gate_claims(cells())
    assert any("compiles for sm90, yet there is no evidence" in problem for problem in problems)
    assert any("claims a CPU, yet no run" in problem for problem in problems)


def test_gate_claims_catches_a_skipped_case() -> None:
    skipped = interpreted(cases={"passed": 8, "failed": 0, "skipped": 1})
    assert any("1 case skipped" in problem for problem in gate_claims(cells(compiled(), skipped)))


@pytest.mark.parametrize("ran", [conformance(), conformance(mode="ptx", target="sm90")], ids=["native", "ptx"])
def test_gate_claims_catches_a_failure_that_only_a_device_can_show(ran: dict[str, Any]) -> None:
    failed = ran | {"cases": {"passed": 8, "failed": 1, "skipped": 0}}
    assert gate_claims(cells(compiled(), interpreted(), ran)) == []
    (problem,) = gate_claims(cells(compiled(), interpreted(), failed))
    assert "is failing: 1 of 9 failed" in problem


def test_gate_claims_catches_a_run_from_a_dirty_tree() -> None:
    core = claim(core=True, targets=())
    native = interpreted(mode="native", dirty=True)
    assert any("uncommitted changes" in problem for problem in gate_claims(cells(native, claimed=core), core))
    assert gate_claims(cells(native | {"dirty": False}, claimed=core), core) == []


def test_gate_claims_catches_a_configuration_over_the_shared_memory_limit() -> None:
    usage = {"variants": 3, "shared": 1200, "registers": 64, "spilled": 0}
    over = compiled(
        kernels={"a_kernel": usage},
        failures=["a: 1200 bytes of shared memory, sm90 has 1000"],
        cases={"passed": 2, "failed": 1, "skipped": 0},
    )
    found = cells(over, interpreted())
    assert found["big"].state == "failing"
    assert any("compiled is failing" in problem for problem in gate_claims(found))
    assert compiled_as_recorded([compiled()], [over])
    hidden = over | {"failures": [], "cases": {"passed": 3, "failed": 0, "skipped": 0}}
    assert any("above shared_memory_limit" in problem for problem in problems_of(hidden, PROFILES))


def test_gate_staleness_catches_a_kernel_edited_after_its_evidence() -> None:
    found = cells(*ALL, sources=OLD)
    assert {cell.state for cell in found.values()} == {"stale"}
    problems = staleness(found.values(), PROFILES)
    assert any("compiled is stale" in problem for problem in problems)
    assert any("interpreted is stale" in problem for problem in problems)
    # what only the device can renew is shown as stale, and does not stop the change
    assert not any("verified" in problem for problem in problems)


def test_gate_schema_catches_an_unknown_device_name() -> None:
    renamed = conformance(device={"profile": "big", "name": "Acme Bigger", "arch": "sm90"})
    unheard = conformance(device={"profile": "huge", "name": "Acme Big", "arch": "sm90"})
    assert "'Acme Bigger' is no big" in problems_of(renamed, PROFILES)[0]
    assert "unknown device 'huge'" in problems_of(unheard, PROFILES)[0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.pop("source_hash"),
        lambda r: r.pop("driver"),
        lambda r: r.pop("suite_hash"),
        lambda r: r.update(level_reached="verified"),
        lambda r: r.update(source_hash="abc"),
        lambda r: r.update(commit=None),
        lambda r: r["cases"].update(passed=-1),
        lambda r: r.update(recorded="yesterday"),
        lambda r: r.update(primitive="dense_decode"),
    ],
    ids=["no_hash", "no_driver", "no_suite", "a_level", "short_hash", "no_commit", "negative", "when", "primitive"],
)
def test_gate_schema_catches_a_malformed_record(spoil: Callable[[dict[str, Any]], Any]) -> None:
    record = copy.deepcopy(conformance())
    spoil(record)
    assert problems_of(record, PROFILES)
    with pytest.raises(RecordError, match="here:1"):
        parse_evidence(json.dumps(record), "here", PROFILES)


def test_gate_schema_wants_floor_and_rival_of_a_benchmark() -> None:
    for name in ("floor", "rival", "runs"):
        record = benchmark()
        del record[name]
        assert problems_of(record, PROFILES)


def test_gate_schema_catches_rewritten_history() -> None:
    assert append_only({"a": "1\n"}, {"a": "1\n2\n", "b": "3\n"}) == []
    assert "changed" in append_only({"a": "1\n"}, {"a": "2\n"})[0]
    assert "removed" in append_only({"a": "1\n"}, {})[0]


def test_nothing_is_written_when_one_record_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(RecordError):
        append_evidence(path, [conformance(), conformance(commit="none")], PROFILES)
    assert not path.exists()
    assert append_evidence(path, [conformance()], PROFILES) == 1
    assert append_evidence(path, [benchmark()], PROFILES) == 1
    assert [e.kind for e in parse_evidence(path.read_text(), "x", PROFILES)] == ["conformance", "benchmark"]


@pytest.mark.parametrize(("median", "caught"), [(114.9, False), (115.1, True)])
def test_gate_regressions_catches_a_benchmark_slower_than_its_record(median: float, caught: bool) -> None:
    later = benchmark(median_us=median, recorded="2026-11-02T00:00:00Z")
    problems = regressions(evidence(benchmark(), later))
    assert bool(problems) is caught
    if caught:
        assert "15 % slower than its record" in problems[0]


def test_gate_regressions_compares_like_with_like() -> None:
    slow = benchmark(median_us=500.0)
    on_cpu = slow | {"device": {"profile": "cpu", "name": "CPU x", "arch": "cpu"}}
    assert regressions(evidence(benchmark(), on_cpu)) == []
    assert regressions(evidence(benchmark(), slow | {"shape": "B 1"})) == []
    assert regressions(evidence(benchmark(), slow, benchmark())) == []


def test_gate_untested_catches_a_promise_without_a_case() -> None:
    def ask(*cases: dict[str, Any], claimed: Claim | None = None) -> list[str]:
        return untested_claims([claimed or claim()], PROFILES, lambda claim, profile: cases)

    whole = ({"kv_layout": "bf16", "num_heads": 128}, {"kv_layout": "bf16", "num_heads": 1})
    assert ask(*whole) == []
    assert "no case" in ask()[0]
    assert "128 heads are declared" in ask(whole[1])[0]
    both = claim(support=SUPPORT | {"kv_layouts": ["bf16", "fp8_ds_mla"]})
    assert "layout fp8_ds_mla" in ask(*whole, claimed=both)[0]
    sized = claim(support=SUPPORT | {"block_sizes": [16, 64]})
    assert "blocks of 16" in ask(*(case | {"block_size": 64} for case in whole), claimed=sized)[0]


def test_gate_strict_catches_a_lenient_expectation() -> None:
    lenient = "import pytest\n@pytest.mark.xfail(strict=False)\ndef test(): ...\n"
    forever = "import pytest\n@pytest.mark.skip(reason='later')\ndef test(): ...\n"
    fine = "import pytest\n@pytest.mark.xfail(reason='r')\n@pytest.mark.skipif(True, reason='r')\ndef test(): ...\n"
    assert "a.py:2" in strict_expectations({"a.py": lenient})[0]
    assert "never runs" in strict_expectations({"a.py": forever})[0]
    assert strict_expectations({"a.py": fine}) == []


def test_gate_compile_compares_figures_of_the_same_compiler() -> None:
    more = compiled(kernels={"a_kernel": {"variants": 1, "shared": 900, "registers": 64, "spilled": 0}})
    assert "shared is 900, the record says 800" in compiled_as_recorded([compiled()], [more])[0]
    assert "other sources" in compiled_as_recorded([compiled(source_hash=OLD)], [compiled()])[0]
    assert "no record" in compiled_as_recorded([], [compiled()])[0]
    other = more | {"versions": {"python": "3.11", "triton": "9"}}
    assert compiled_as_recorded([compiled()], [other]) == []


# profiles, drawing, and the records of this repository


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"facts": {"shared_memory": 1}, "sources": {"arch": "x"}}, "shared_memory has no source"),
        ({"facts": {"cores": 1}, "sources": {"arch": "x", "cores": "x"}}, "unknown fact 'cores'"),
        ({"facts": {"num_sms": -1}, "sources": {"arch": "x", "num_sms": "x"}}, "0 or more"),
        ({"facts": {"has_bf16": 1}, "sources": {"arch": "x", "has_bf16": "x"}}, "expected bool"),
        ({"pattern": "("}, "pattern"),
        ({"level": "verified"}, "unknown key 'level'"),
        ({"vendor": ""}, "non-empty"),
    ],
)
def test_a_profile_without_sources_or_with_nonsense_is_refused(change: dict[str, Any], word: str) -> None:
    table = {
        "name": "n",
        "vendor": "v",
        "arch": "a",
        "device_type": "cuda",
        "pattern": "p",
        "facts": {},
        "sources": {"arch": "x"},
    }
    with pytest.raises(RecordError, match=word.replace("(", r"\(")):
        parse_profile("x", table | change)


def test_every_device_of_interest_has_a_profile_and_no_two_share_a_name() -> None:
    profiles = load_profiles(ROOT / "capability" / "profiles")
    wanted = (
        "a100-80g a10 rtx3090 l40s rtx4090 h20 h100 h200 b200 rtx5090 gb10 mi300x mi355x bi-v100 bi-v150 mr-v100 tg-v200 cpu"
    )
    assert set(wanted.split()) <= set(profiles)
    names = {
        "NVIDIA A100-SXM4-80GB": "a100-80g",
        "NVIDIA A10": "a10",
        "NVIDIA H20": "h20",
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "Iluvatar BI-V150": "bi-v150",
        "CPU x86_64": "cpu",
    }
    for name, slug in names.items():
        assert [p.slug for p in profiles.values() if p.matches(name)] == [slug]
    assert profiles["h200"].device_facts().shared_memory == 227 << 10


def records(*found: dict[str, Any]) -> Records:
    hashes = Hashes({("acme.v1", "sparse_decode"): NOW}, SUITE)
    return Records(Path(), PROFILES, Declarations((claim(),)), tuple(evidence(*found)), hashes)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_shows_the_same_states(form: str) -> None:
    table = make_table(records(*ALL))
    drawn = FORMATS[form](table)
    assert FORMATS[form](make_table(records(*ALL))) == drawn
    states = {entry.state for row in table.rows for entry in row.entries}
    assert states == {"measured", "interpreted", "never"}
    assert all(state in drawn for state in states - {"never" if form == "json" else ""})
    if form == "svg":
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert "verified" not in {entry.state for row in make_table(records()).rows for entry in row.entries}


def test_notes_and_sources_name_date_and_device() -> None:
    drawn = FORMATS["md"](
        make_table(
            records(
                *ALL,
            )
        )
    )
    assert "measured: acme.v1 on Acme Big, 2026-11-01" in drawn
    assert "no ahead-of-time target for xy1" in drawn
    assert "acme: 24 places" in drawn


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("bench --out /tmp/w2/decode.jsonl --plot=/home/me/a.svg", "bench --out decode.jsonl --plot=a.svg"),
        (
            "python ci/record_evidence.py conform triton --device cpu",
            "python ci/record_evidence.py conform triton --device cpu",
        ),
        ("/usr/bin/python3 -m acme /x", "python3 -m acme x"),
    ],
)
def test_sources_name_commands_without_the_folders_of_the_machine(command: str, shown: str) -> None:
    drawn = FORMATS["md"](make_table(records(*(record | {"command": command} for record in ALL))))
    assert f"`{shown}` (1 benchmark; sparse_decode)" in drawn
    assert f"`{shown}` (9 cases; sparse_decode)" in drawn
    assert f"`{shown}` (3 kernel variants, one that serves two primitives counted twice; sm90)" in drawn


def test_declarations_survive_the_file(tmp_path: Path) -> None:
    declared = Declarations((claim(devices={"big": (Objection("arch", "a", "b"),)}),), (("other", "no such module"),))
    path = tmp_path / "declarations.json"
    path.write_text(declared.text())
    assert load_declarations(path).text() == declared.text()
    path.write_text("{}")
    with pytest.raises(RecordError, match="ci/refresh_evidence"):
        load_declarations(path)


def test_drawing_takes_no_torch_and_no_plugin() -> None:
    code = (
        "import sys\nfrom mla_portable.tools.cli.app import app\n"
        "try: app(['matrix', '--format', 'md'])\nexcept SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'triton', 'mla_portable.contracts', 'mla_portable.registry', 'mla_portable_triton', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "# Capability matrix" in done.stdout


def test_drawing_reads_each_file_and_validates_each_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drawing takes grows with the records alone: one pass, by a schema whose references were resolved before."""
    folder = ROOT / "capability"
    read: list[Path] = []
    validated: list[str] = []
    original = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: (read.append(path), original(path, **options))[1])
    check = evidence_module.problems_of
    monkeypatch.setattr(
        evidence_module, "problems_of", lambda data, known: (validated.append(str(data)), check(data, known))[1]
    )
    found = read_records(folder)
    markdown(make_table(found))
    lines = sum(len(original(path).splitlines()) for path in (folder / "evidence").rglob("*.jsonl"))
    assert len(validated) == lines == len(found.evidence) > 1000
    own = [path for path in read if folder in path.parents]
    assert len(own) == len(set(own))
    assert "$ref" not in json.dumps(evidence_module.validator().schema)
