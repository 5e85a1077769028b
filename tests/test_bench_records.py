# SPDX-License-Identifier: Apache-2.0
"""From a line of the kernel benchmark to evidence, to a measured cell, to the cost that the registry ranks by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from acme_records import acme_claim
from machines import A100, H200
from reporting import PROFILES, derived

from mla_portable.contracts import Implementation, Primitive, Registrar, Request, Support, hookimpl
from mla_portable.primitives import CONVERT_INDICES, MERGE_STATES, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.registry import Registry, get_registry, reset_registry
from mla_portable.registry.costs import MeasuredCosts, MeasuredTime, costs_text, installed_hash, parse_costs
from mla_portable.registry.plugins import load_plugins
from mla_portable.registry.policy import Policy
from mla_portable.registry.select import decide
from mla_portable.registry.sources import installed_plugins
from mla_portable.sources import source_hash, sources_of
from mla_portable.tools.matrix.benchmarks import measured_times
from mla_portable.tools.matrix.claims import Declarations
from mla_portable.tools.matrix.derive import baselines_of, unfit
from mla_portable.tools.matrix.evidence import Evidence, problems_of
from mla_portable.tools.matrix.generated import generate
from mla_portable.tools.matrix.levels import Hashes
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.record import benchmark_report
from mla_portable.tools.matrix.trust import Trust
from mla_portable.tools.matrix.words import REPRODUCED, SELF_REPORTED, SIGNED

ROOT = Path(__file__).parents[1]
OLD = "b" * 64
SUPPORT = {"source": "this test", "device_types": ["cuda"], "kv_layouts": ["fp8_ds_mla"], "lse": True}
SOURCES = ("mla_portable.layouts.base",)
HASH = source_hash(SOURCES)
HASHES = Hashes({("acme.v1", "sparse_decode", profile.arch): HASH for profile in PROFILES.values()}, {})

claim = partial(acme_claim, sources=SOURCES, targets=(), support=SUPPORT, devices=dict.fromkeys(PROFILES, ()))


DECLARED = Declarations((claim(),))
HEADER: dict[str, Any] = {
    "kind": "kernel_run",
    "schema": 3,
    "recorded": "2026-11-02T10:00:00Z",
    "command": "mla-portable bench kernels",
    "machine": "0123456789abcdef",
    "commit": "0123456789" * 4,
    "changed": {},
    "files": None,
    "device": {"name": "NVIDIA H200", "arch": "sm90", "vendor": "nvidia"},
    "driver": "580.1",
    "versions": {"python": "3.12", "torch": "2.11"},
    "clocks": {"clocks.sm": 1980.0},
    "ceilings": {"bytes_per_second": 4.3e12, "flops_per_second": 7.9e14, "copy_bytes": 1, "side": 1},
    "tuned": False,
}


def line(name: str = "acme.v1", us: float | None = 50.0, **changes: Any) -> dict[str, Any]:
    ours = name.startswith("acme")
    return {
        "device": {"name": "NVIDIA H200", "arch": "sm90", "vendor": "nvidia"},
        "primitive": "sparse_decode",
        "layout": "fp8_ds_mla",
        "heads": 16,
        "topk": 2048,
        "rows": 64,
        "overlap": 0,
        "shape": "B 64, S 1, H 16, K 2048",
        "bytes": 86_000_000,
        "flops": 1000,
        "bound_us": 20.0,
        "name": name,
        "role": "implementation" if ours else "baseline",
        "source_hash": HASH if ours else None,
        "wrong": [],
        "failure": "",
        "median_us": us,
        "p10_us": us,
        "p90_us": us,
        "runs": 30,
    } | changes


BASELINES = [line("other.slow", 90.0), line("other.fast", 80.0), line("other.wrong", None, wrong=["out[0]"])]


def report(*lines: dict[str, Any], **header: Any) -> dict[str, Any]:
    return benchmark_report(HEADER | header, lines, DECLARED)


def records(*lines: dict[str, Any], **header: Any) -> list[dict[str, Any]]:
    return derived(report(*lines, **header))


def evidence(*made: dict[str, Any]) -> list[Evidence]:
    for record in made:
        assert problems_of(record, PROFILES) == []
    return [Evidence(f"test:{number}", record) for number, record in enumerate(made, 1)]


# ---------------------------------------------------------------------- evidence


def test_a_time_beside_its_best_baseline_is_evidence():
    (record,) = records(line(), *BASELINES)
    assert problems_of(record, PROFILES) == []
    assert record["baseline"] == {"name": "other.fast", "median_us": 80.0}
    assert record["bound"] == {"name": "copy at 4.3 TB/s, bf16 product at 790 TFLOP/s", "median_us": 20.0}
    assert record["device"] == {"profile": "h200", "name": "NVIDIA H200", "arch": "sm90"}
    assert (record["heads"], record["topk"], record["rows"], record["median_us"]) == ([16], [2048], 64, 50.0)
    assert (record["source_hash"], record["recorded"], record["commit"]) == (HASH, HEADER["recorded"], HEADER["commit"])


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([line()], "no baseline was timed in the same run"),
        ([line(), line("other.fast", 80.0, shape="B 4")], "no baseline was timed in the same run"),
        ([line(us=None, wrong=["out[0]: got 1"]), *BASELINES], "out[0]: got 1"),
        ([line(us=None, failure="RuntimeError: no"), *BASELINES], "RuntimeError: no"),
        ([line(source_hash=None), *BASELINES], "in no module"),
    ],
)
def test_what_is_no_evidence_is_left_out_with_the_reason(lines, why):
    assert records(*lines) == []
    assert why in unfit(lines[0], baselines_of(lines))


def test_what_cannot_be_evidence_is_refused():
    with pytest.raises(RecordError, match="no plugin here declares it"):
        records(line("acme.v2"), *BASELINES)
    with pytest.raises(RecordError, match="other sources"):
        records(line(source_hash=OLD), *BASELINES)
    with pytest.raises(RecordError, match="a table of the user's"):
        records(line(), *BASELINES, tuned=True)
    with pytest.raises(RecordError, match="no profile matches"):
        records(line(), *BASELINES, device={"name": "NVIDIA H201", "arch": "sm90", "vendor": "nvidia"})


# ---------------------------------------------------------------------- times that costs are made of


def on(day: int, us: float = 50.0, **header: Any) -> dict[str, Any]:
    """The record of a run of that day."""
    return records(line(us=us), *BASELINES, recorded=f"2026-11-{day:02}T10:00:00Z", **header)[0]


def test_the_newest_time_that_was_repeated_counts():
    (time,) = measured_times(evidence(on(2), on(5, 47.0)), HASHES)
    assert time == MeasuredTime(
        "NVIDIA H200", "sparse_decode", "fp8_ds_mla", 16, 2048, 64, "acme.v1", us=47.0, recorded="2026-11-05", source_hash=HASH
    )
    assert measured_times(evidence(on(2, changed={"a.py": "0" * 40}), on(5)), HASHES) == []
    overlapping = [record | {"overlap": 50} for record in (on(2), on(5))]
    assert measured_times(evidence(*overlapping), HASHES) == []
    stale = [record | {"source_hash": OLD} for record in (on(6, 40.0), on(7, 40.0))]
    assert [each.us for each in measured_times(evidence(on(2), on(5), *stale), HASHES)] == [50.0]


@pytest.mark.parametrize(
    ("other", "trust", "ships"),
    [
        (on(3), REPRODUCED, True),
        (on(2, machine="f" * 16), REPRODUCED, True),
        (on(3, 54.9), REPRODUCED, True),
        (on(3, 55.1), SELF_REPORTED, False),
        (on(2), SELF_REPORTED, False),
        (on(3) | {"source_hash": OLD}, SELF_REPORTED, False),
        (on(2) | {"signer": "runner@example.invalid"}, SELF_REPORTED, False),
        (on(3, 5.0) | {"signer": "runner@example.invalid"}, SELF_REPORTED, False),
    ],
    ids=["day", "machine", "within the limit", "beyond it", "the same run", "other sources", "signed", "signed, 10 x"],
)
def test_a_time_ships_when_another_run_agrees(other, trust, ships):
    first, second = evidence(on(2), other)
    found = Trust([first, second])
    assert (found.of(first), found.ships(first)) == (trust, ships)
    signed = Evidence("", first.data | {"signer": "runner@example.invalid"})
    assert Trust([signed]).of(signed) == SIGNED and Trust([signed]).ships(signed)


def times(*rows: tuple[str, str | None, int | None, int, float], primitive: str = "sparse_decode") -> list[MeasuredTime]:
    """(implementation, layout, heads, rows, us) on an H200."""
    return [
        MeasuredTime("NVIDIA H200", primitive, layout, heads, 2048, count, name, us, "2026-11-02", INSTALLED)
        for name, layout, heads, count, us in rows
    ]


def named(name: str, preference: float = 50.0, primitive: Primitive = SPARSE_DECODE) -> Implementation:
    support = Support(source="this test", kv_layouts=("bf16", "fp8_ds_mla"))
    return Implementation(name, primitive, support, lambda request: lambda: None, preference=preference, sources=SOURCES)


INSTALLED = source_hash(sources_of(named("a.v1")))


def request(**changes: Any) -> Request:
    return Request(SPARSE_DECODE, H200, kv_layout="fp8_ds_mla", num_heads=16, topk=2048, lse=True).but(**changes)


FP8 = "fp8_ds_mla"
COSTS = MeasuredCosts(
    times(
        ("ours.v1", FP8, 16, 1, 10.0),
        ("ours.v1", FP8, 16, 256, 400.0),
        ("theirs.v1", FP8, 16, 1, 40.0),
        ("theirs.v1", FP8, 16, 256, 100.0),
        ("ours.v1", FP8, 64, 1, 20.0),
        ("theirs.v1", FP8, 64, 1, 10.0),
    )
)


def cost(name: str, **changes: Any) -> float | None:
    found = COSTS(named(name), request(**changes))
    return None if found is None else found[0]


def test_the_fastest_costs_ten_and_the_others_in_proportion():
    assert (cost("ours.v1", rows=1), cost("theirs.v1", rows=1)) == (10, 40)
    assert (cost("ours.v1", rows=256), cost("theirs.v1", rows=256)) == (40, 10)
    assert (cost("ours.v1", rows=200), cost("ours.v1", rows=2)) == (40, 10), "the nearest size, in ratio"


def test_times_that_cannot_be_told_apart_leave_the_choice_to_declared_preferences():
    def chosen(of_a: float, of_b: float) -> str:
        costs = MeasuredCosts(times(("a.v1", FP8, 16, 1, of_a), ("b.v1", FP8, 16, 1, of_b)))
        offered = [replace(named("a.v1"), preference=20.0), replace(named("b.v1"), preference=8.0)]
        return decide(request(rows=1), offered, Policy(), costs=costs).chosen or "nobody"

    assert chosen(100.0, 102.0) == chosen(102.0, 100.0) == "b.v1"
    assert chosen(100.0, 104.0) == "a.v1"


def test_each_implementation_has_its_own_nearest_head_count():
    """Up to 16 heads `few` was timed, `many` for 16 and 64: 32 heads are two calls of the one, a padded call of the other."""
    known = MeasuredCosts(
        times(
            ("few.v1", FP8, 16, 8, 30.0),
            ("many.v1", FP8, 16, 8, 90.0),
            ("many.v1", FP8, 64, 8, 50.0),
            ("many.v1", FP8, 64, 9, 1),
        )
    )
    found = {name: known(named(name), request(num_heads=32, rows=8)) for name in ("few.v1", "many.v1")}
    assert {name: each and each[0] for name, each in found.items()} == {"few.v1": 12, "many.v1": 10}
    assert [each and each[1] for each in found.values()] == [
        "measured 2026-11-02 on NVIDIA H200, 2 x 16 heads for 32, us by rows 8: 60;",
        "measured 2026-11-02 on NVIDIA H200, 64 heads for 32, us by rows 8: 50;",
    ]
    seventeen = known(named("few.v1"), request(num_heads=17, rows=8))
    assert seventeen and seventeen[0] == 12, "17 heads are two calls, too"
    more = known(named("many.v1"), request(num_heads=128, rows=8))
    assert more and more[1].startswith("measured 2026-11-02 on NVIDIA H200, 2 x 64 heads for 128, us by rows 8: 100;")


@pytest.mark.parametrize("heads", [17, 24, 32])
def test_prefill_of_few_heads_is_chosen_by_times_that_are_on_record(heads: int):
    """An H200's, 2026-11-22: the native kernel was timed for 16 heads alone, and declares the least cost of all."""
    kernels = {
        "nvidia.native": {16: 1786.66},
        "nvidia.native_wide": {16: 1788.38, 64: 4770.5},
        "nvidia.flashmla": {16: 2490.62, 64: 2274.37},
    }
    rows = [(name, "bf16", count, 4096, us) for name, by_heads in kernels.items() for count, us in by_heads.items()]
    prefill = SPARSE_PREFILL
    preferences = {"nvidia.native": 8.0, "nvidia.native_wide": 20.0, "nvidia.flashmla": 10.0}
    offered = [named(name, preference, prefill) for name, preference in preferences.items()]
    costs = MeasuredCosts(times(*rows, primitive="sparse_prefill"))
    asked = request(primitive=prefill, kv_layout="bf16")
    decision = decide(asked.but(num_heads=heads), offered, Policy(), costs=costs)
    assert decision.chosen == "nvidia.flashmla" and decision.verdicts[0].measured
    assert decide(asked, offered, Policy(), costs=costs).chosen == "nvidia.native"


def test_passing_over_an_unmeasured_implementation_is_no_fallback():
    costs = MeasuredCosts(times(("a.v1", FP8, 16, 1, 10.0), ("c.v1", FP8, 16, 1, 9.0)))
    support = Support(source="this test", kv_layouts=("fp8_ds_mla",), lse=False)
    lacking = [replace(named(name), support=support, preference=8.0) for name in ("b.v1", "c.v1")]
    assert not decide(request(rows=1), [named("a.v1"), lacking[0]], Policy(), costs=costs).was_fallback
    assert decide(request(rows=1), [named("a.v1"), lacking[1]], Policy(), costs=costs).was_fallback, "that one is faster"
    preferred = decide(request(rows=1), [named("a.v1"), lacking[1], named("d.v1", 7.0)], Policy(), costs=costs)
    assert preferred.chosen == "d.v1" and not preferred.was_fallback, "it is before all that were timed"


def test_a_tie_is_said_where_it_decides():
    costs = MeasuredCosts(times(("a.v1", FP8, 16, 1, 100.0), ("b.v1", FP8, 16, 1, 101.0), ("c.v1", FP8, 16, 1, 200.0)))
    offered = [named("a.v1", 9.0), named("b.v1", 8.0), named("c.v1", 7.0)]
    found = {v.implementation: v.cost_source for v in decide(request(rows=1), offered, Policy(), costs=costs).verdicts}
    assert list(found) == ["b.v1", "a.v1", "c.v1"]
    assert found["b.v1"].endswith("1: 101; tie within 3%, declared cost 8 decides;")
    assert "tie" in found["a.v1"] and "tie" not in found["c.v1"]
    alone = decide(request(rows=1), [offered[0], offered[2]], Policy(), costs=costs)
    assert not any("tie" in v.cost_source for v in alone.verdicts)


@pytest.mark.parametrize("changes", [{"device": A100}, {"topk": 1024}, {"kv_layout": "bf16"}, {"num_heads": None}])
def test_what_was_not_timed_keeps_its_declared_preference(changes):
    assert cost("ours.v1", **changes) is None
    assert cost("others.v1") is None


def test_times_of_other_sources_rank_nobody():
    (time,) = times(("a.v1", FP8, 16, 1, 10.0))
    assert MeasuredCosts([replace(time, source_hash=OLD)])(named("a.v1"), request()) is None
    assert MeasuredCosts([time])(replace(named("a.v1"), sources=(*SOURCES, "mla_portable.sources")), request()) is None
    nowhere = replace(named("a.v1"), sources=("no_such_package.kernel",))
    assert MeasuredCosts([time])(nowhere, request()) is None, "nothing says what was timed"
    assert installed_hash(("no_such_package.kernel",)) is None


def test_sources_are_read_once_and_only_where_there_are_times():
    asked: list[tuple[str, ...]] = []

    def hash_of(sources: tuple[str, ...], arch: str) -> str:
        asked.append(sources)
        return INSTALLED

    costs = MeasuredCosts(times(("a.v1", FP8, 16, 1, 10.0)), hash_of=hash_of)
    for changes in ({"device": A100}, {"topk": 1024}, {"primitive": SPARSE_PREFILL}):
        assert costs(named("a.v1"), request(**changes)) is None
    assert costs(named("b.v1"), request()) is None
    assert asked == []
    assert costs(named("a.v1"), request()) is not None and asked == [sources_of(named("a.v1"))]
    installed_hash.cache_clear()
    for _ in range(3):
        installed_hash(sources_of(named("a.v1")))
    assert installed_hash.cache_info().misses == 1


def test_layouts_are_compared_with_one_another():
    prefill = MeasuredCosts(times(("a.v1", FP8, 16, 1024, 30.0), ("b.v1", "bf16", 16, 1024, 10.0), primitive="sparse_prefill"))
    asked = request(primitive=SPARSE_PREFILL)
    assert prefill(named("a.v1", primitive=SPARSE_PREFILL), asked)[0] == 30
    assert prefill(named("b.v1", primitive=SPARSE_PREFILL), asked.but(kv_layout="bf16"))[0] == 10


def test_a_primitive_without_heads_and_layout_is_found():
    convert = MeasuredCosts(times(("a.v1", None, None, 64, 3.0), ("b.v1", None, None, 64, 2.0), primitive="convert_indices"))
    asked = Request(CONVERT_INDICES, H200, topk=2048, block_size=64)
    assert convert(named("a.v1", primitive=CONVERT_INDICES), asked)[0] == 15


def plugin(*implementations: Implementation) -> object:
    class Plugin:
        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            for each in implementations:
                registrar.add(each)

    return Plugin()


def test_the_registry_takes_the_fastest_and_explains_by_the_numbers():
    given = [("ours", plugin(named("ours.v1"))), ("theirs", plugin(named("theirs.v1", preference=10)))]
    registry = Registry(plugins=given, facts={"cuda": H200}, environ={}, costs=COSTS)
    for rows, winner in ((1, "ours.v1"), (256, "theirs.v1")):
        decision = registry.decide(request(rows=rows))
        assert decision.chosen == winner
    text = registry.decide(request(rows=1)).text()
    assert "measured 2026-11-02 on NVIDIA H200, 16 heads, us by rows 1: 10; cost 10" in text
    assert "us by rows 1: 40; cost 40" in text
    assert "us by rows 1: 10, 256: 400; cost 37.27" in registry.decide(request()).text()
    declared = Registry(plugins=given, facts={"cuda": H200}, environ={})
    assert declared.decide(request(rows=1)).chosen == "theirs.v1"


# ---------------------------------------------------------------------- the file that ships


def test_the_file_says_the_same_whatever_the_order():
    some = times(
        ("b.v1", FP8, 128, 1, 2.0), ("b.v1", FP8, 128, 64, 9.0), ("a.v1", "bf16", 16, 1, 1.0), ("a.v1", None, None, 4, 1.0)
    )
    text = costs_text(some)
    assert text == costs_text(some[::-1])
    assert text.count("\n") == 3 + 2 + 1, "a line for each implementation and head count"
    asked = request(num_heads=128)
    assert MeasuredCosts(*parse_costs(text))(named("b.v1"), asked) == MeasuredCosts(some)(named("b.v1"), asked)
    assert parse_costs(costs_text([])) == ([], {})
    for broken in ('[{"device": "x"}]', "{}", '{"devices": {}, "times": [{"device": "x", "us": {"1": 2}}]}', "["):
        with pytest.raises((TypeError, ValueError)):
            parse_costs(broken)


def test_a_device_is_found_by_its_profile_and_by_its_drivers_name():
    known = {"NVIDIA H200 141GB": "NVIDIA H200( NVL)?"}
    costs = MeasuredCosts(*parse_costs(costs_text(times(("a.v1", FP8, 16, 1, 10.0)), known)))
    for name, found in {"NVIDIA H200": 1, "NVIDIA H200 NVL": 1, "NVIDIA H200 141GB": 1, "NVIDIA H200 MIG": 0}.items():
        asked = request(device=replace(H200, name=name))
        assert (costs(named("a.v1"), asked) is not None) == bool(found), name
    assert costs.device_names == {"NVIDIA H200 141GB"}


def test_every_device_that_was_timed_has_one_profile_whose_facts_find_its_costs():
    costs = load_plugins(installed_plugins()).costs
    files = ROOT.glob("backends/*/src/*/costs.json")
    names = {time.device for path in files for time in parse_costs(path.read_text(encoding="utf-8"))[0]}
    assert names and len(costs.device_names) == len(names)
    for name in names:
        (profile,) = [each for each in PROFILES.values() if each.matches(name)]
        assert costs.device_of(name) == costs.device_of(profile.device_facts().name) == profile.name


class Timed:
    """A plugin with one implementation and times of it."""

    def __init__(self, name: str, us: float, *, of: str = "", text: str = "") -> None:
        self.name, self.text = name, text or costs_text(times((of or name, FP8, 16, 1, us)), {"H200": ".*H200.*"})

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add(named(self.name))
        registrar.add_costs(self.text)


def measured(*plugins: Timed) -> Registry:
    given = [(plugin.name.partition(".")[0], plugin) for plugin in plugins]
    return Registry(plugins=given, facts={"cuda": H200}, environ={}, probe=False, costs="measured")


def test_the_times_of_all_plugins_are_ranked_together():
    fast, slow = Timed("a.v1", 10.0), Timed("b.v1", 25.0)
    decision = measured(slow, fast).decide(request(rows=1), probe=False)
    assert [(v.implementation, v.cost) for v in decision.verdicts] == [("a.v1", 10.0), ("b.v1", 25.0)]
    assert measured(slow).decide(request(rows=1), probe=False).verdicts[0].cost == 10.0


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Timed("b.v1", 9.0, text="{}"), "costs cannot be read"),
        (Timed("b.v1", 9.0, text="no JSON"), "costs cannot be read"),
        (Timed("b.v1", 9.0, text='{"devices": {}, "times": [{"us": {"1": 2}}]}'), "costs cannot be read"),
        (Timed("b.v1", 9.0, of="a.v1"), "brings costs of a.v1, which it does not offer"),
    ],
)
def test_a_plugin_with_costs_that_are_not_its_own_does_not_load(plugin: Timed, message: str):
    registry = measured(Timed("a.v1", 10.0), plugin)
    good, bad = registry.plugin_reports
    assert good.ok and not bad.loaded and message in bad.error
    assert [v.implementation for v in registry.decide(request(rows=1), probe=False).verdicts] == ["a.v1"]


def test_the_registry_of_the_process_has_the_costs_that_ship():
    reset_registry()
    try:
        shipped = load_plugins(installed_plugins()).costs
        asked = Request(MERGE_STATES, PROFILES["h200"].device_facts())
        registry = get_registry()
        for each in registry.implementations(MERGE_STATES):
            verdicts = registry.decide(asked, probe=False, thorough=True).verdicts
            found = next(v for v in verdicts if v.implementation == each.name)
            cost = shipped(each, asked)
            assert (found.measured, found.cost if cost else None) == (cost is not None, cost[0] if cost else None)
    finally:
        reset_registry()


def test_costs_are_generated_for_the_plugins_of_the_same_checkout_alone(tmp_path):
    (tmp_path / "capability").mkdir()
    (tmp_path / "capability" / "profiles").symlink_to(ROOT / "capability" / "profiles")
    plugins = [("reference", "mla_portable.reference"), ("triton", "mla_portable_triton")]
    registry = Registry(plugins=plugins, environ={}, probe=False)

    def names() -> Sequence[str]:
        return [path.name for path in generate(tmp_path / "capability", registry)]

    assert "costs.json" not in names()
    home = tmp_path / "backends" / "triton" / "src" / "mla_portable_triton"
    home.mkdir(parents=True)
    assert "costs.json" not in names(), "nothing was timed"
    (home / "costs.json").write_text("")
    assert names()[-1] == "costs.json"
