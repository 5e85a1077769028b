# SPDX-License-Identifier: Apache-2.0
"""What a report cannot say: each function returns what is wrong with its contents, in words, [] when it may be believed.

A report that is invented as a whole, with consistent cases and times, passes; the matrix marks it as *self-reported*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from mla_portable.registry.names import CORE_DISTRIBUTION
from mla_portable.tools.matrix.levels import Hashes
from mla_portable.tools.matrix.model import moment
from mla_portable.tools.matrix.profiles import Profile, profile_of, shared_memory_limit
from mla_portable.tools.matrix.reports import ENGINE, Benchmark, Case, Claimed, Compiled, Conformance, Engine, Report

CaseIds = Callable[[Claimed, str, str], Collection[str] | None]
"""(claim, level, profile) -> ids that the suite collects; None where the declaration is not today's."""
Limits = Callable[[str], Collection[float]]
"""Primitive -> every tolerance that its problems have."""
_SKEW: Final = timedelta(minutes=10)
"""Clocks of two machines may differ so much."""
_SAME_BOUND: Final = 1.01
_FP8: Final = 2
"""Products of e4m3 run at so many times the rate of bfloat16."""
_MEMORY: Final = 0.85
"""A driver reports at least this share of a device's nominal memory."""


def check_report(
    report: Report,
    profiles: Mapping[str, Profile],
    hashes: Hashes,
    *,
    now: datetime,
    case_ids: CaseIds,
    limits: Limits,
) -> list[str]:
    """Everything that is wrong with one report. hashes: today's, to which the suite's cases and limits belong."""
    found = [] if moment(report.recorded) <= now + _SKEW else [f"recorded {report.recorded}, which is in the future"]
    if isinstance(report, Compiled):
        return found + list(_compiled(report, profiles))
    profile = profile_of(str(report.device.get("name")), profiles)
    found += _device(report.device, profile)
    if isinstance(report, Benchmark):
        return found + list(_times(report, profile))
    if isinstance(report, Engine):
        return found + list(_compared(report))
    found += _modes(report, profile)
    current = [claim for claim in report.claims if _is_current(claim, hashes)]
    return found + list(_cases(report)) + list(_suite(report, current, profile, profiles, case_ids, limits))


def copies(reports: Mapping[str, Report]) -> list[str]:
    """Reports whose figures are another's, to the last digit, under a new date or another machine."""
    seen: dict[Any, str] = {}
    found: list[str] = []
    for sha, report in sorted(reports.items(), key=lambda each: each[1].recorded):
        if isinstance(report, Compiled):
            continue  # a compiler says the same each time
        cases = report.cases if isinstance(report, Conformance) else ()
        lines = report.lines if isinstance(report, Benchmark) else ()
        figures = (
            *((case.id, case.seconds) for case in cases),
            *((line["name"], line["shape"], line["median_us"], line["p90_us"]) for line in lines),
        )
        first = seen.setdefault(figures, sha)
        if first != sha and figures:
            found.append(f"report {sha[:16]}: every figure is that of report {first[:16]}; a run takes other times")
    return found


def _is_current(claim: Claimed, hashes: Hashes) -> bool:
    today = hashes.sources.get((claim.implementation, claim.primitive, claim.arch))
    return claim.source_hash == today and claim.suite_hash == hashes.suite.get(claim.primitive)


def _device(device: Mapping[str, Any], profile: Profile) -> Iterator[str]:
    """The device is the one that the profile describes."""
    known = {"vendor": profile.vendor, "arch": profile.arch, "device_type": profile.device_type}
    facts = profile.facts
    known |= {
        name: getattr(facts, name) for name in ("num_sms", "shared_memory", "warp_size") if getattr(facts, name) is not None
    }
    for name, published in known.items():
        if device.get(name) != published and profile.device_type != "cpu":
            yield f"device/{name} is {device.get(name)!r}, that of {profile.slug} is {published!r}: another device"
    nominal = (facts.memory_gib or 0) << 30
    if nominal and not _MEMORY * nominal <= device.get("memory_bytes", 0) <= 1.05 * nominal:
        yield f"device/memory_bytes is {device.get('memory_bytes')}, {profile.slug} has {facts.memory_gib} GiB: another device"


def _modes(report: Conformance, profile: Profile) -> Iterator[str]:
    """On a CPU nothing but the core runs as it is; code for another architecture is a run of mode ptx."""
    for claim in report.claims:
        core = claim.distribution == CORE_DISTRIBUTION
        native = profile.device_type != "cpu" or core
        modes = ("ptx",) if report.target else ("native",) if native else ("interpreter", "stand_in")
        arch = report.target or report.device.get("arch")
        if claim.mode not in modes or claim.arch != arch:
            what = f"mode {claim.mode} of code for {claim.arch}"
            yield f"{claim.implementation} / {claim.primitive}: {what}, on {profile.slug} it is {' or '.join(modes)} for {arch}"


def _cases(report: Conformance) -> Iterator[str]:
    """Each case once; one that passed has every error within its tolerance, one that did not says why."""
    seen: set[str] = set()
    if not report.cases:
        yield "no case ran"
    for case in report.cases:
        if case.id in seen:
            yield f"{case.id}: twice"
        seen.add(case.id)
        if case.errors.keys() != case.tolerances.keys():
            yield f"{case.id}: errors and tolerances are of different quantities"
        elif case.status == "passed" and (beyond := _beyond(case)):
            yield f"{case.id}: passed, yet {beyond}"
        elif case.status != "passed" and not case.message:
            yield f"{case.id}: {case.status}, without a message"


def _beyond(case: Case) -> str:
    for quantity, error in case.errors.items():
        limit = case.tolerances[quantity]
        if not 0 <= float(error) <= float(limit) < float("inf"):  # NaN is beyond any limit
            return f"{quantity} is off by {error}, allowed {limit}"
    return ""


def _suite(
    report: Conformance,
    current: Collection[Claimed],
    profile: Profile,
    profiles: Mapping[str, Profile],
    case_ids: CaseIds,
    limits: Limits,
) -> Iterator[str]:
    """Cases and tolerances are those of the suite, for claims of today's sources."""
    older = next((each.slug for each in profiles.values() if each.arch == report.target), profile.slug)
    for claim in current:
        name = f"{claim.implementation} / {claim.primitive}"
        cases = [
            each for each in report.cases if (each.implementation, each.primitive) == (claim.implementation, claim.primitive)
        ]
        wanted = case_ids(claim, report.level, older)
        if wanted is not None and not report.match:
            has = {case.id for case in cases}
            missing, more = sorted({*wanted} - has), sorted(has - {*wanted})
            for ids, what in ((missing, "are missing"), (more, "are none of the suite's")):
                if ids:
                    yield f"{name}: {len(ids)} cases of level {report.level} {what}, {ids[0]} first"
        allowed = {float(f"{limit:.4g}") for limit in limits(claim.primitive)} | {0.0}
        wrong = [case.id for case in cases if not {float(limit) for limit in case.tolerances.values()} <= allowed]
        if wrong:
            yield f"{name}: {len(wrong)} cases have tolerances that the suite has not, {wrong[0]} first"


def _times(report: Benchmark, profile: Profile) -> Iterator[str]:
    """Quantiles in order; no time below what the device can do by its published rates."""
    peaks = profile.facts.memory_tb_per_s, profile.facts.bf16_tflops
    if peaks[0] is None or peaks[1] is None:
        yield f"{profile.slug} has no memory_tb_per_s or no bf16_tflops, so no time can be checked; add them to its profile"
        return
    peak = {"bytes_per_second": 1e12 * peaks[0], "flops_per_second": 1e12 * peaks[1]}
    for name, rate in peak.items():
        if not 0 < report.ceilings.get(name, 0) <= rate:
            yield f"ceilings/{name} is {report.ceilings.get(name)}, the device has at most {rate:g}"
            return
    for line in (each for each in report.lines if each["median_us"] is not None):
        name = f"{line['name']} / {line['primitive']}, {line['shape']}"
        if not 0 < line["p10_us"] <= line["median_us"] <= line["p90_us"] or line["runs"] < 1:
            yield f"{name}: p10 {line['p10_us']}, median {line['median_us']}, p90 {line['p90_us']} us are out of order"
        least = 1e6 * max(line["bytes"] / peak["bytes_per_second"], line["flops"] / (_FP8 * peak["flops_per_second"]))
        if line["median_us"] < least and line["role"] != "baseline":
            yield f"{name}: {line['median_us']:g} us, and {profile.slug} needs {least:.3g} us for its bytes and operations"
        bound = 1e6 * max(line[unit] / report.ceilings[f"{unit}_per_second"] for unit in ("bytes", "flops"))
        if not bound / _SAME_BOUND <= line["bound_us"] <= bound * _SAME_BOUND:
            yield f"{name}: the roofline bound is {line['bound_us']:g} us, its bytes and operations take {bound:g}"


def _compared(report: Engine) -> Iterator[str]:
    """Something was judged, and nothing twice."""
    names = [line.name for line in report.lines]
    if not any(line.passed is not None for line in report.lines):
        yield "no comparison was judged"
    yield from (f"{name}: twice" for name in sorted(set(names)) if names.count(name) > 1)
    if [(claim.implementation, claim.primitive) for claim in report.claims] != [ENGINE]:
        yield f"an engine's report has the one claim {' / '.join(ENGINE)}"


def _compiled(report: Compiled, profiles: Mapping[str, Profile]) -> Iterator[str]:
    """Every kernel of a claim was compiled, and held against the shared memory of the devices."""
    compiled = {(line["arch"], line["kernel"]) for line in report.lines}
    for claim in report.claims:
        name = f"{claim.implementation} / {claim.primitive} for {claim.arch}"
        missing = [kernel for kernel in claim.kernels or () if (claim.arch, kernel) not in compiled]
        if missing or not claim.kernels:
            yield f"{name}: not compiled: {', '.join(missing) or 'anything'}"
        if claim.shared_memory_limit != (limit := shared_memory_limit(claim.arch, profiles)):
            yield f"{name}: held against {claim.shared_memory_limit} bytes of shared memory, its profiles have {limit}"
