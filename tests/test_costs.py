# SPDX-License-Identifier: Apache-2.0
"""Measured times: how they rank implementations, the files that ship them, and what is ignored of a bad file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import document, invoke
from kernel_bench import SMALL, workshop
from machines import A100, H200, PROFILES

from mla_portable.bench.kernel_records import measured_times
from mla_portable.capability.run import Run, Time
from mla_portable.choose import Registry, get_registry, reset_registry
from mla_portable.choose.plugin_sources import installed_plugins
from mla_portable.choose.plugins import load_plugins
from mla_portable.choose.policy import Policy
from mla_portable.choose.select import decide
from mla_portable.contracts import Implementation, Primitive, Registrar, Request, Support, hookimpl
from mla_portable.judge.problems.bench import kernel_cases
from mla_portable.primitives import CONVERT_INDICES, MASKED_PREFILL, MERGE_STATES, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.times.files import parse_times, times_text
from mla_portable.times.measured import MeasuredCosts
from mla_portable.times.records import MeasuredTime, Measurement

ROOT = Path(__file__).parents[1]
FILES = sorted(ROOT.glob("backends/*/src/*/costs/*.json"))
ON_H200 = Measurement("NVIDIA H200", recorded="2026-11-02")


def times(
    *rows: tuple[str, str | None, int | None, int, float], primitive: str = "sparse_decode", measurement: Measurement = ON_H200
) -> list[MeasuredTime]:
    """(implementation, layout, heads, rows, us) on an H200."""
    return [
        MeasuredTime(name, primitive, layout, heads, 2048, count, us, measurement) for name, layout, heads, count, us in rows
    ]


def named(name: str, preference: float = 50.0, primitive: Primitive = SPARSE_DECODE) -> Implementation:
    support = Support(source="this test", kv_layouts=("bf16", "fp8_ds_mla"))
    return Implementation(name, primitive, support, lambda request: lambda: None, preference=preference)


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


def test_times_are_linear_between_two_sizes_and_as_at_the_nearest_beyond():
    known = MeasuredCosts(
        times(
            ("a.v1", FP8, 16, 4, 10.0),
            ("a.v1", FP8, 16, 16, 40.0),
            ("a.v1", FP8, 16, 64, 200.0),
            ("b.v1", FP8, 16, 4, 20.0),
            ("b.v1", FP8, 16, 16, 32.0),
            ("b.v1", FP8, 16, 64, 100.0),
        )
    )

    def costs(rows: int) -> tuple[float, ...]:
        return tuple(found[0] for name in ("a.v1", "b.v1") if (found := known(named(name), request(rows=rows))))

    assert costs(0) == costs(1) == costs(4) == (10, 20)
    assert costs(8) == pytest.approx((20 / 17.33 * 10, 24 / 17.33 * 10), abs=0.02), "17.3 lies between 10 and 32"
    assert costs(10)[0] < costs(10)[1] and costs(11)[0] > costs(11)[1], "they cross at 10.7 rows"
    assert costs(64) == costs(1000) == (20, 10)
    texts = [known(named("a.v1"), request(rows=rows))[1] for rows in (1, 8, 16, 1000)]
    assert [text.partition("us by rows ")[2] for text in texts] == ["4: 10;", "4: 10, 16: 40;", "16: 40;", "64: 200;"]


def test_a_size_that_others_lack_is_no_reason_to_compare_different_work():
    """Times of prompts depend on the context, so those of one size may not be between those of its neighbours."""
    known = MeasuredCosts(
        times(
            ("a.v1", FP8, 16, 1024, 100.0),
            ("a.v1", FP8, 16, 2048, 5000.0),
            ("a.v1", FP8, 16, 4096, 2000.0),
            ("b.v1", FP8, 16, 1024, 150.0),
            ("b.v1", FP8, 16, 4096, 3000.0),
        )
    )
    a, b = (known(named(name), request(rows=2048)) for name in ("a.v1", "b.v1"))
    assert a and b and (a[0], b[0]) == (10, 15)


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
    declared = decide(request(rows=1), [named("a.v1"), named("d.v1", 7.0)], Policy(), costs=costs)
    assert declared.chosen == "a.v1" and not declared.was_fallback, "it was not timed, whatever it declares"


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


def test_layouts_are_compared_with_one_another():
    prefill = MeasuredCosts(times(("a.v1", FP8, 16, 1024, 30.0), ("b.v1", "bf16", 16, 1024, 10.0), primitive="sparse_prefill"))
    asked = request(primitive=SPARSE_PREFILL)
    assert prefill(named("a.v1", primitive=SPARSE_PREFILL), asked)[0] == 30
    assert prefill(named("b.v1", primitive=SPARSE_PREFILL), asked.but(kv_layout="bf16"))[0] == 10


def test_a_primitive_without_heads_and_layout_is_found():
    convert = MeasuredCosts(times(("a.v1", None, None, 64, 3.0), ("b.v1", None, None, 64, 2.0), primitive="convert_indices"))
    asked = Request(CONVERT_INDICES, H200, topk=2048, block_size=64)
    assert convert(named("a.v1", primitive=CONVERT_INDICES), asked)[0] == 15


def test_prompts_are_ranked_by_what_a_run_recorded_for_their_dims_with_a_selection_and_without():
    """Through the records of a run, the file that ships and the request of a call."""
    us = {"fast.dense": (90.0, 900.0), "fast.masked": (100.0, 120.0)}
    found = [
        Time(
            implementation=name, primitive="masked_prefill", layout=None, heads=case.num_heads, topk=case.topk, form=case.form,
            rows=case.rows, width=case.width, us=each, p10=each, p90=each, bound=1.0,
        )
        for case in kernel_cases([MASKED_PREFILL], heads=[16], rows=[8192], widths=[2048])
        for name, each in zip(us, [both[case.topk is not None] for both in us.values()], strict=True)
    ]  # fmt: skip
    assert {time.form for time in found} == {"192/128", "192/128 selection", "256/256", "256/256 selection"}
    fields = {"release": "0.1.0", "commit": None, "dirty": None, "who": "a_test", "date": "2026-11-26"}
    run = Run(schema=1, device={"name": "NVIDIA H200"}, versions={"torch": "2.11.0"}, times=found, **fields)
    read = parse_times(times_text(measured_times(run, PROFILES)))
    assert read.problems == () and len(read.times) == 8
    costs = MeasuredCosts(read.times)
    offered = [named(name, primitive=MASKED_PREFILL) for name in us]
    call = Request(MASKED_PREFILL, H200, num_heads=16, qk_head_dim=192, v_head_dim=128, lse=True, rows=8192)
    for selection, best in ((False, "fast.dense"), (True, "fast.masked")):
        ranked = {each.name: costs(each, call.but(selection=selection)) for each in offered}
        assert all(ranked.values()) and min(ranked, key=lambda name: ranked[name][0]) == best
    assert costs(offered[0], call.but(v_head_dim=64)) is None and costs(offered[0], call.but(qk_head_dim=None)) is None


def test_a_size_with_a_disturbed_time_ranks_nothing_and_the_same_size_of_another_width_does():
    def time(name: str, width: int, p90: float) -> Time:
        sizes = {"layout": "bf16", "heads": 16, "topk": 2048, "rows": 4, "width": width}
        return Time(implementation=name, primitive="sparse_decode", us=20.0 + width, p10=18.0, p90=p90, bound=1.0, **sizes)

    fields = {"release": "0.1.0", "commit": None, "dirty": None, "who": "a_test", "date": "2026-11-26"}
    found = [time("a.v1", 1, 27.0), time("b.v1", 1, 23.0), time("a.v1", 2, 23.0), time("b.v1", 2, 27.1)]
    run = Run(schema=1, device={"name": "NVIDIA H200"}, versions={}, times=found, **fields)
    assert [each.problem in run.disturbed for each in found] == [False, False, True, True]
    assert [each.us for each in measured_times(run, PROFILES)] == [21.0, 21.0]
    assert measured_times(run.model_copy(update={"times": found[2:]}), PROFILES) == []


def test_what_is_timed_of_prompts_is_what_their_calls_ask_for():
    made = workshop()
    for case in (replace(SMALL[MASKED_PREFILL], head_dims=(192, 128), topk=topk) for topk in (None, 16)):
        problem = made.make(case)
        assert problem.request.form == case.form and problem.request.topk is None
        assert problem.request.finite_values and (problem.arguments["selection"] is None) == (case.topk is None)


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


# ---------------------------------------------------------------------- the files that ship


def test_the_file_says_the_same_whatever_the_order():
    origin = Measurement("NVIDIA H200", ("NVIDIA H200*",), "2026-11-02", "0.1.0", (("torch", "2.11.0"), ("triton", "3.6.0")))
    older = replace(origin, recorded="2026-10-01", release="", versions=())
    some = times(("b.v1", FP8, 128, 1, 2.0), ("b.v1", FP8, 128, 64, 9.0), ("a.v1", None, None, 4, 1.0), measurement=origin)
    some += times(("a.v1", "bf16", 16, 1, 1.0), measurement=older)
    text = times_text(some)
    assert text == times_text(some[::-1])
    assert text.count("\n") == 2 + 3 + 1, "a line for each implementation and head count"
    read = parse_times(text)
    assert read.problems == () and set(read.times) == set(some) and len(read.times) == len(some)
    for several in ([], [*some, *times(("a.v1", None, None, 4, 1.0), measurement=Measurement("another"))]):
        with pytest.raises(ValueError, match="a file of times is of one device"):
            times_text(several)


def test_one_file_stands_for_one_list_of_vendors():
    read = parse_times(json.dumps({"device": "NVIDIA H200", "stands_for": ["nvidia"], "prompts": [PROMPTS_ROW]}))
    with pytest.raises(ValueError, match=r"stand for the same vendors; got \[\(\), \('nvidia',\)\]"):
        times_text(prompts=[*read.prompts, replace(read.prompts[0], heads=8, stands_for=())])


def test_a_time_of_a_tuned_configuration_is_kept_with_it_and_ranks_nothing():
    """It was taken beside other configurations of one kernel: others, which were not tuned, are not to lose by it."""
    tuned = [
        replace(each, configuration=(("block_n", 32),)) for each in times(("a.v1", FP8, 16, 1, 1.0), ("a.v1", FP8, 16, 8, 2.0))
    ]
    plain = times(("a.v1", FP8, 16, 1, 30.0), ("b.v1", FP8, 16, 1, 10.0))
    text = times_text([*tuned, *plain])
    read = parse_times(text)
    assert read.problems == () and set(read.times) == {*tuned, *plain} and times_text(read.times) == text
    assert text.count('"configuration": {"block_n": 32}, "us": {"1": 1.0, "8": 2.0}') == 1
    costs = MeasuredCosts(read.times)
    assert [found and found[0] for found in (costs(named(name), request(rows=1)) for name in ("a.v1", "b.v1"))] == [30, 10]
    assert MeasuredCosts(tuned)(named("a.v1"), request()) is None


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_every_row_that_ships_counts(file: Path):
    plugin = file.parents[1].name.removeprefix("mla_portable_")
    registry = Registry(environ={}, probe=False)
    (report,) = [each for each in registry.plugin_reports if each.name == plugin]
    assert report.ok and report.notes == ()
    text = file.read_text(encoding="utf-8")
    read = parse_times(text)
    found = (*read.times, *read.prompts)
    assert found and read.problems == () and times_text(read.times, read.prompts) == text, "as `times_text` writes it"
    (profile,) = [each for each in PROFILES.values() if each.name == found[0].measurement.device]
    assert {each.measurement.matches(profile.device_facts().name) for each in found} == {True}
    assert all(profile.matches(name) for name in found[0].measurement.names)


@pytest.mark.parametrize(("device", "share"), [("h200", 0.5), ("h100", 1.0)])
def test_times_between_sizes_lose_less_than_those_of_the_nearest_size(device: str, share: float):
    """Every size but the first and the last is left out once: what is chosen then, by the time that was left out."""
    groups: dict[tuple[Any, ...], list[MeasuredTime]] = {}
    for file in (path for path in FILES if path.stem == device):
        for each in parse_times(file.read_text(encoding="utf-8")).times:
            groups.setdefault((each.primitive, each.layout, each.heads, each.topk), []).append(each)
    registry = Registry(environ={}, probe=False)
    offered = {(str(each.primitive), each.name): each for each in registry.implementations()}
    lost: dict[str, list[float]] = {"between": [], "nearest": []}
    for (primitive, layout, heads, topk), found in groups.items():
        sizes = sorted({each.rows for each in found})
        names = {each.implementation for each in found}
        able = Support(source="this test", kv_layouts=(layout,) if layout else ())
        candidates = [replace(offered[primitive, name], support=able) for name in names]
        facts = PROFILES[device].device_facts()
        asked = Request(candidates[0].primitive, facts, kv_layout=layout, num_heads=heads, topk=topk)
        for rows in sizes[1:-1] if len(names) > 1 else ():
            us = {each.implementation: each.us for each in found if each.rows == rows}
            costs = MeasuredCosts(each for each in found if each.rows != rows)
            nearest = min((size for size in sizes if size != rows), key=lambda size: max(size / rows, rows / size))
            for rule, given in (("between", rows), ("nearest", nearest)):
                chosen = decide(asked.but(rows=given), candidates, Policy(), costs=costs).chosen
                assert chosen is not None
                lost[rule].append(us[chosen] / min(us.values()) - 1)
    assert len(lost["between"]) >= 40 and max(lost["nearest"]) > 0.1
    assert sum(lost["between"]) <= share * sum(lost["nearest"]) and max(lost["between"]) <= max(lost["nearest"])


def test_a_device_is_found_by_its_name_and_by_its_drivers_name():
    measurement = Measurement("NVIDIA H200 141GB", ("NVIDIA H200", "NVIDIA H200 NVL"))
    costs = MeasuredCosts(times(("a.v1", FP8, 16, 1, 10.0), measurement=measurement))
    for name, found in {"NVIDIA H200": 1, "NVIDIA H200 NVL": 1, "NVIDIA H200 141GB": 1, "NVIDIA H200 MIG": 0}.items():
        asked = request(device=replace(H200, name=name))
        assert (costs(named("a.v1"), asked) is not None) == bool(found), name


def test_times_of_one_device_under_two_names_are_compared():
    one = times(("a.v1", FP8, 16, 1, 10.0), measurement=Measurement("H200 SXM", ("NVIDIA H200",)))
    costs = MeasuredCosts(one + times(("b.v1", FP8, 16, 1, 30.0)))
    assert [costs(named(name), request())[0] for name in ("a.v1", "b.v1")] == [10, 30]


def test_of_two_times_the_newest_counts():
    old, new = (Measurement("NVIDIA H200", recorded=day) for day in ("2026-10-01", "2026-11-01"))
    both = times(("a.v1", FP8, 16, 1, 5.0), measurement=new) + times(("a.v1", FP8, 16, 1, 50.0), measurement=old)
    costs = MeasuredCosts(both)
    assert costs.times(named("a.v1"), request()) == {1: 5.0}
    assert "2026-11-01" in costs(named("a.v1"), request())[1]


class Timed:
    """A plugin with one implementation and times of it."""

    def __init__(self, name: str, us: float = 9.0, *, costs: Any = None, preference: float = 50.0) -> None:
        self.name, self.preference = name, preference
        self.costs = times_text(times((name, FP8, 16, 1, us))) if costs is None else costs

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add(named(self.name, self.preference))
        registrar.add_costs(self.costs)


def measured(*plugins: object) -> Registry:
    given = [(plugin.name.partition(".")[0], plugin) for plugin in plugins]
    return Registry(plugins=given, facts={"cuda": H200}, environ={}, probe=False, costs="measured")


def test_the_times_of_all_plugins_are_ranked_together():
    fast, slow = Timed("a.v1", 10.0), Timed("b.v1", 25.0)
    decision = measured(slow, fast).decide(request(rows=1), probe=False)
    assert [(v.implementation, v.cost) for v in decision.verdicts] == [("a.v1", 10.0), ("b.v1", 25.0)]
    assert measured(slow).decide(request(rows=1), probe=False).verdicts[0].cost == 10.0


def test_a_plugin_reads_a_folder_of_files(tmp_path: Path):
    (tmp_path / "h200.json").write_text(times_text(times(("a.v1", FP8, 16, 1, 10.0))), encoding="utf-8")
    (tmp_path / "broken.json").write_bytes(b"\xff\xfe")
    (tmp_path / "README.md").write_text("no times", encoding="utf-8")
    registry = measured(Timed("a.v1", costs=tmp_path))
    (report,) = registry.plugin_reports
    assert report.ok and len(report.notes) == 1 and report.notes[0].startswith("broken.json: 'utf-8' codec")
    assert registry.decide(request(rows=1)).verdicts[0].measured
    (report,) = measured(Timed("a.v1", costs=tmp_path / "absent")).plugin_reports
    assert report.ok and "No such file" in report.notes[0]


def test_the_registry_of_the_process_has_the_costs_that_ship():
    reset_registry()
    try:
        shipped = MeasuredCosts(each for file in load_plugins(installed_plugins()).times for each in file.times)
        asked = Request(MERGE_STATES, PROFILES["h200"].device_facts())
        registry = get_registry()
        for each in registry.implementations(MERGE_STATES):
            verdicts = registry.decide(asked, probe=False, thorough=True).verdicts
            found = next(v for v in verdicts if v.implementation == each.name)
            cost = shipped(each, asked)
            assert (found.measured, found.cost if cost else None) == (cost is not None, cost[0] if cost else None)
    finally:
        reset_registry()


# ---------------------------------------------------------------------- a user's own


def with_own(folder: Path, *plugins: Timed) -> Registry:
    given = [(each.name.partition(".")[0], each) for each in plugins]
    return Registry(plugins=given, facts={"cuda": H200}, environ={"MLA_PORTABLE_TIMES": str(folder)}, costs="measured")


def test_a_user_s_own_times_rank_as_those_that_ship_and_come_first(tmp_path: Path):
    plugins = Timed("a.v1", 10.0), Timed("b.v1", 20.0)
    assert with_own(tmp_path, *plugins).decide(request(rows=1)).chosen == "a.v1"
    older = replace(ON_H200, recorded="2026-01-01")
    (tmp_path / "mine.json").write_text(times_text(times(("a.v1", FP8, 16, 1, 30.0), measurement=older)))
    registry = with_own(tmp_path, *plugins)
    decision = registry.decide(request(rows=1))
    assert decision.chosen == "b.v1" and "us by rows 1: 30" in decision.text(), "it counts, though what ships is newer"
    (tmp_path / "mine.json").unlink()
    assert registry.decide(request(rows=1)).chosen == "b.v1"
    registry.reload_policy()
    assert registry.decide(request(rows=1)).chosen == "a.v1"


def test_a_device_that_nobody_ships_times_for_is_ranked_by_a_user_s_own(tmp_path: Path):
    on_a100 = Measurement("mine", (A100.name,), "2026-11-29")
    rows = times(("a.v1", FP8, 16, 1, 30.0), ("b.v1", FP8, 16, 1, 20.0), measurement=on_a100)
    (tmp_path / "a100.json").write_text(times_text(rows))
    plugins = [(name[0], plugin(named(name, preference))) for name, preference in (("a.v1", 10.0), ("b.v1", 20.0))]
    for environ, chosen in (({}, "a.v1"), ({"MLA_PORTABLE_TIMES": str(tmp_path)}, "b.v1")):
        registry = Registry(plugins=plugins, facts={"cuda": A100}, environ=environ, costs="measured")
        assert registry.decide(request(rows=1, device=A100)).chosen == chosen
        declared = Registry(plugins=plugins, facts={"cuda": A100}, environ=environ)
        assert declared.decide(request(rows=1, device=A100)).chosen == "a.v1", "only declared costs count there"


def test_own_times_of_what_is_not_here_are_left_alone(tmp_path: Path):
    rows = times(("a.v1", FP8, 16, 1, 30.0), ("gone.v1", FP8, 16, 1, 1.0))
    (tmp_path / "mine.json").write_text(times_text(rows))
    registry = with_own(tmp_path, Timed("b.v1", 10.0), Timed("a.v1", 10.0))
    assert registry.times_ignored == ()
    assert [each.implementation for file in registry.times_files if not file.owner for each in file.times] == ["a.v1"]
    found = {v.implementation: v.cost for v in registry.decide(request(rows=1)).verdicts}
    assert found == {"b.v1": 10, "a.v1": 30}, "the fastest on record is one that is here"


# ---------------------------------------------------------------------- bad files

ROW = {"implementation": "b.v1", "primitive": "sparse_decode", "layout": FP8, "heads": 16, "topk": 2048, "us": {"1": 5.0}}
BAD_ROWS = {
    "zero": ({"us": {"1": 0}}, "us of 1 rows: got 0, expected a number above 0 and below 1e+12"),
    "negative": ({"us": {"1": -5}}, "us of 1 rows: got -5"),
    "NaN": ({"us": {"1": float("nan")}}, "us of 1 rows: got nan"),
    "infinite": ({"us": {"1": float("inf")}}, "us of 1 rows: got inf"),
    "beyond a float": ({"us": {"1": 10**400}}, "us of 1 rows: got 1000"),
    "text": ({"us": {"1": "fast"}}, "us of 1 rows: got 'fast'"),
    "null": ({"us": {"1": None}}, "us of 1 rows: got nothing"),
    "true": ({"us": {"1": True}}, "us of 1 rows: got True"),
    "no rows": ({"us": {"0": 5}}, "us: rows '0', expected a whole number of 1 or more"),
    "negative rows": ({"us": {"-3": 5}}, "us: rows '-3'"),
    "half a row": ({"us": {"1.5": 5}}, "us: rows '1.5'"),
    "rows of other digits": ({"us": {"\u00b2": 5}}, "us: rows '\u00b2'"),
    "us is a list": ({"us": [5]}, "us: got a list, expected an object: rows to microseconds"),
    "us is absent": ({"us": None}, "us: got nothing"),
    "heads of 0": ({"heads": 0}, "heads: got 0, expected a whole number of 1 or more"),
    "heads as text": ({"heads": "2"}, "heads: got '2'"),
    "heads as a fraction": ({"heads": 2.0}, "heads: got 2.0"),
    "topk as a list": ({"topk": [2048]}, "topk: got a list"),
    "topk is true": ({"topk": True}, "topk: got True"),
    "layout as a number": ({"layout": 8}, "layout: got 8, expected a printable text"),
    "no name": ({"implementation": None}, "implementation: got nothing"),
    "an empty name": ({"primitive": ""}, "primitive: got '', expected a text that is not empty"),
    "not printable": ({"implementation": "\x1b[31mb.v1"}, "implementation: got '\\x1b[31mb.v1'"),
    "half a surrogate": ({"implementation": "\ud800"}, "implementation: got '\\ud800'"),
    "another's": ({"implementation": "a.v1"}, "'a.v1' / 'sparse_decode' is not offered by this plugin"),
    "another primitive": ({"primitive": "sparse_prefill"}, "'b.v1' / 'sparse_prefill' is not offered by this plugin"),
    "a configuration as a list": (
        {"configuration": [32]},
        "configuration: got a list, expected an object: name to whole number",
    ),
    "a configuration of texts": (
        {"configuration": {"block": "32"}},
        "configuration: got an object, expected an object: name to",
    ),
    "a configuration of flags": (
        {"configuration": {"block": True}},
        "configuration: got an object, expected an object: name to",
    ),
    "an unknown field": ({"query_len": 2}, "unknown field 'query_len'; there are implementation, primitive"),
    "versions as a list": ({"versions": ["3.6"]}, "versions: got a list, expected an object: name to version"),
    "the day as a number": ({"recorded": 20261102}, "recorded: got 20261102"),
    "no object": (5, "got 5, expected an object with implementation"),
}
BAD_DOCUMENTS = {
    "no JSON": ("no JSON", "no JSON document"),
    "nested too deeply": ("[" * 100_000, "no JSON document"),
    "a list": ("[]", "got a list, expected an object with device"),
    "empty": ("{}", "device: got nothing"),
    "no times": ('{"device": "NVIDIA H200"}', "times: got nothing, expected a list of rows"),
    "the older format": ('{"devices": {"h": "("}, "times": []}', "unknown field 'devices'"),
    "names as text": ('{"device": "x", "names": "NVIDIA*", "times": []}', "names: got 'NVIDIA*', expected a list of fnmatch"),
    "no text": (5, "5: expected a text, a file or a folder"),
    "bytes": (b"{}", "b'{}': expected a text"),
}


CONSTANTS = dict.fromkeys(("latent_fixed", "latent_token", "latent_pair", "dense_fixed", "dense_key", "dense_pair"), 1.0)
CONSTANTS |= dict.fromkeys(("masked_fixed", "masked_key", "masked_pair", "part", "merged"), 0)
PROMPTS_ROW = {"implementation": "b.v1", "qk_head_dim": 192, "v_head_dim": 128, "heads": 16, "us": CONSTANTS}
BAD_PROMPTS = {
    "a constant too few": (
        {"us": {"latent_fixed": 1.0}},
        "us: got an object, expected an object with latent_fixed, latent_token",
    ),
    "a constant too many": ({"us": CONSTANTS | {"more": 1.0}}, "us: got an object, expected an object with"),
    "a negative constant": ({"us": CONSTANTS | {"part": -1.0}}, "numbers of 0 or more"),
    "an infinite constant": ({"us": CONSTANTS | {"part": float("inf")}}, "numbers of 0 or more"),
    "a constant is true": ({"us": CONSTANTS | {"part": True}}, "numbers of 0 or more"),
    "constants as a list": ({"us": [1.0]}, "us: got a list"),
    "no heads": ({"heads": None}, "heads: got nothing, expected a whole number of 1 or more"),
    "a width of 0": ({"v_head_dim": 0}, "v_head_dim: got 0"),
    "rows": ({"rows": 4}, "unknown field 'rows'; there are implementation, qk_head_dim"),
    "another's": ({"implementation": "a.v1"}, "'a.v1' / 'masked_prefill' is not offered by this plugin"),
}


@pytest.mark.parametrize(("row", "words"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_row_of_prompts_is_ignored_and_described(row: Any, words: str):
    document = {"device": "NVIDIA H200", "stands_for": ["acme"], "prompts": [PROMPTS_ROW | row, PROMPTS_ROW]}
    read = parse_times(json.dumps(document), {("b.v1", "masked_prefill")})
    assert len(read.problems) == 1 and read.problems[0].startswith("row 1 of prompts: ") and words in read.problems[0]
    (record,) = read.prompts
    assert record.stands_for == ("acme",) and record.times.latent_pair == 1.0 and record.times.part == 0.0


@pytest.mark.parametrize("vendors", ["nvidia", [""], [5], {"nvidia": 1}])
def test_vendors_that_are_no_names_leave_the_document_out(vendors: Any):
    read = parse_times(json.dumps({"device": "NVIDIA H200", "stands_for": vendors, "prompts": [PROMPTS_ROW]}))
    assert read.prompts == () and "stands_for: got" in read.problems[0] and "expected a list of names" in read.problems[0]


def with_row(row: Any) -> str:
    """A file with that row and a good one, of a rows count of its own."""
    head = {"device": "NVIDIA H200", "recorded": "2026-11-02"}
    return json.dumps({**head, "times": [row if isinstance(row, int) else ROW | row, ROW | {"us": {"256": 400.0}}]})


@pytest.mark.parametrize(("row", "words"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_ignored_and_described(row: Any, words: str):
    registry = measured(Timed("a.v1", 100.0), Timed("b.v1", costs=with_row(row)))
    good, bad = registry.plugin_reports
    assert good.ok and good.notes == () and bad.ok and bad.loaded and not bad.error
    assert len(bad.notes) == 1 and bad.notes[0].startswith("times: row 1: ") and words in bad.notes[0]
    verdicts = {v.implementation: v.cost_source for v in registry.decide(request(), probe=False).verdicts}
    good_row = "measured 2026-11-02 on NVIDIA H200, 16 heads, us by rows 256: 400;"
    assert verdicts["b.v1"].startswith(good_row), "the good row counts"
    assert registry.decide(request(rows=1), probe=False).chosen


@pytest.mark.parametrize(("text", "words"), BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS)
def test_a_bad_document_is_ignored_and_described(text: Any, words: str):
    registry = measured(Timed("a.v1"), Timed("b.v1", costs=text))
    good, bad = registry.plugin_reports
    assert good.ok and bad.ok and any(words in note for note in bad.notes)
    assert registry.decide(request(rows=1), probe=False).chosen == "a.v1"


def test_null_is_as_good_as_absent():
    row = {"implementation": "b.v1", "primitive": "sparse_decode", "recorded": None, "us": {"1": 2.0}}
    text = {"device": "NVIDIA H200", "names": None, "recorded": None, "release": None, "versions": None, "times": [row]}
    read = parse_times(json.dumps(text))
    found = read.times
    assert read.problems == () and found[0].measurement == Measurement("NVIDIA H200") and found[0].layout is None


def test_a_pattern_of_names_cannot_hang_or_take_another_plugins_times():
    slow = "*a" * 90 + "b"
    text = json.dumps({"device": "any", "names": [slow, "*"], "times": [ROW | {"us": {"1": 50.0}}]})
    registry = measured(Timed("b.v1", costs=text), Timed("a.v1", 10.0))
    named_a = replace(H200, name="a" * 200)
    assert registry.decide(request(device=named_a)).verdicts[0].implementation == "b.v1"
    assert registry.decide(request(rows=1)).chosen == "a.v1", "both were timed on what matches"


def test_doctor_says_what_is_ignored():
    rows = [ROW | {"us": {"1": 0}}] * 14
    text = json.dumps({"device": "NVIDIA H200", "times": rows})
    registry = measured(Timed("b.v1", costs=text))
    plugins = document("doctor", registry=registry, code=1)["plugins"]
    assert plugins[0]["ok"] and len(plugins[0]["notes"]) == 11 and plugins[0]["notes"][-1] == "times: 4 more like these"
    printed = " ".join(invoke("doctor", registry=registry, code=1).stdout.split())
    assert "ignored times: row 1: us of 1 rows: got 0, expected a number above 0 and below 1e+12" in printed


# ---------------------------------------------------------------------- what ranks


@pytest.mark.parametrize("primitive", [SPARSE_DECODE])
def test_a_plugin_cannot_declare_itself_ahead_of_what_was_measured(primitive: Primitive):
    class Boaster:
        name = "acme.v1"

        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            registrar.add(named("acme.v1", preference=1.0))

    decision = measured(Boaster(), Timed("b.v1", preference=50.0)).decide(request(rows=1, primitive=primitive))
    assert decision.chosen == "b.v1"


def installed(device: str) -> Registry:
    return Registry(facts={"cuda": PROFILES[device].device_facts()}, environ={}, probe=False, costs="measured")


def test_times_of_an_h100_choose_there():
    facts = PROFILES["h100"].device_facts()
    asked = Request(SPARSE_DECODE, facts, kv_layout="bf16", num_heads=64, topk=2048, rows=4)
    decision = installed("h100").decide(asked)
    assert decision.chosen == "nvidia.native_wide" and decision.verdicts[0].measured
    assert "on NVIDIA H100 SXM 80GB with 0.2.0, 64 heads, us by rows 4: 20.5;" in decision.text()
    driver = replace(facts, name="NVIDIA H100 80GB HBM3")
    assert installed("h100").decide(asked.but(device=driver)).verdicts[0].measured


def test_explain_says_where_a_time_comes_from():
    origin = Measurement(
        "NVIDIA H200", (), "2026-11-02", "0.2.0", (("flash_mla", "1.0"), ("torch", "2.11.0"), ("triton", "3.6.0"))
    )
    costs = MeasuredCosts(times(("a.v1", FP8, 16, 1, 10.0), measurement=origin))
    here = replace(H200, libraries=(("cuda", "13.0"), ("torch", "2.11.0+cu130"), ("triton", "3.7.0")))
    source = costs(named("a.v1"), request(device=here))[1]
    assert source == "measured 2026-11-02 on NVIDIA H200 with 0.2.0; triton 3.6.0, here 3.7.0, 16 heads, us by rows 1: 10;"
    same = replace(here, libraries=(("triton", "3.6.0"),))
    assert costs(named("a.v1"), request(device=same))[1].startswith("measured 2026-11-02 on NVIDIA H200 with 0.2.0, 16 heads")
