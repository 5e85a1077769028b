# SPDX-License-Identifier: Apache-2.0
"""The check of a contributed run: what a file says must agree with itself, with its device and with the suite of its release.

A run that is invented as a whole, with consistent cases and times, passes. Whoever adds it to the repository is named in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Final

from suite import LEVELS, Suite

from mla_portable.capability.model import RecordError
from mla_portable.capability.profiles import Profile, profile_of
from mla_portable.capability.run import Case, Run, Time, name_of

_MEMORY: Final = (0.85, 1.05)
"""A driver reports such a share of a device's nominal memory."""
_SAME_FACTS: Final = ("num_sms", "shared_memory", "warp_size")


def check_run(path: Path, run: Run, profiles: Mapping[str, Profile], suite: Suite, today: date) -> list[str]:
    """Everything that is wrong with a run, in words; [] when it may be believed. suite: of its release."""
    try:
        profile = profile_of(run.device_name, profiles)
    except RecordError as error:
        return [str(error)]
    return [
        *_origin(path, run, profile, today),
        *_device(run, profile, profiles),
        *_cases(run, suite),
        *_times(run, suite),
        *_engine_times(run),
        *_engine_loads(run),
        *_engine_accuracy(run),
    ]


def _origin(path: Path, run: Run, profile: Profile, today: date) -> Iterator[str]:
    stem = f"{profile.slug}-{run.date}-{run.who}"
    if not path.name.startswith(stem):
        yield f"name it {stem}.json.gz, or {stem}-<more>.json.gz: device, date and who ran it"
    if date.fromisoformat(run.date) > today + timedelta(days=1):  # it may be tomorrow there
        yield f"date {run.date} is in the future"
    if run.commit is None:
        yield "commit is unknown; run from a checkout, or name the commit with --commit"
    if run.dirty:
        yield f"{len(run.dirty)} files had uncommitted changes, {run.dirty[0]} first; run a commit as it is"
    if not any((run.cases, run.times, run.comparisons, run.engine_times, run.engine_loads, run.engine_accuracy)):
        yield "has no result"


def _device(run: Run, profile: Profile, profiles: Mapping[str, Profile]) -> Iterator[str]:
    published = {"vendor": profile.vendor, "arch": profile.arch, "device_type": profile.device_type}
    if profile.device_type != "cpu":
        facts = profile.facts
        published |= {name: getattr(facts, name) for name in _SAME_FACTS if getattr(facts, name) is not None}
    for name, value in published.items():
        if run.device.get(name) != value:
            yield f"device/{name} is {run.device.get(name)!r}, that of {profile.slug} is {value!r}: another device"
    nominal, memory = (profile.facts.memory_gib or 0) << 30, run.device.get("memory_bytes")
    if nominal and not (isinstance(memory, int) and _MEMORY[0] * nominal <= memory <= _MEMORY[1] * nominal):
        yield f"device/memory_bytes is {memory}, {profile.slug} has {profile.facts.memory_gib} GiB: another device"
    if run.target is not None and run.target not in {each.arch for each in profiles.values()} - {profile.arch}:
        yield f"target {run.target!r} is the architecture of no other profile"


def _cases(run: Run, suite: Suite) -> Iterator[str]:
    """Each once, all of the suite of that level for the implementations that ran, and none besides."""
    twice = [case for case, count in Counter(case.id for case in run.cases).items() if count > 1]
    if twice:
        yield f"{len(twice)} cases are there twice, {twice[0]} first"
    yield from (f"{case.id}: {problem}" for case in run.cases if (problem := _contradiction(case)))
    if run.cases and run.level not in LEVELS:
        yield f"level {run.level} proves nothing; run {' or '.join(reversed(LEVELS))}"
        return
    ran: dict[tuple[str, str], set[str]] = {}
    for case in run.cases:
        ran.setdefault(name_of(case.id), set()).add(case.id)
    for (primitive, implementation), ids in sorted(ran.items()):
        wanted = suite.cases(primitive, implementation, run.arch, run.level or "").keys()
        for some, what in ((wanted - ids, "did not run"), (ids - wanted, "are none of the suite's")):
            if some:
                yield f"{implementation} / {primitive}: {len(some)} cases of level {run.level} {what}, {min(some)} first"


def _contradiction(case: Case) -> str:
    if case.status == "passed":
        return "passed, with an error that is no number" if any(isinstance(e, str) for e in case.errors.values()) else ""
    return "" if case.message else f"{case.status}, without a message"


def _times(run: Run, suite: Suite) -> Iterator[str]:
    twice = [size for size, count in Counter(time.size for time in run.times).items() if count > 1]
    if twice:
        yield f"{len(twice)} times are there twice, {' '.join(map(str, twice[0]))} first"
    for time in run.times:
        if not 0 < time.bound <= time.p10 <= time.us <= time.p90:
            order = f"bound {time.bound:g}, p10 {time.p10:g}, median {time.us:g}, p90 {time.p90:g} us"
            yield f"{describe(time)}: {order} are out of order"
        if not any(suite.cases(time.primitive, time.implementation, run.arch, level) for level in LEVELS):
            yield f"{describe(time)}: the suite has no case for it on {run.arch}, so nothing says that it is right there"


def _engine_times(run: Run) -> Iterator[str]:
    twice = [size for size, count in Counter(time.size for time in run.engine_times).items() if count > 1]
    if twice:
        yield f"{len(twice)} times of engines are there twice, {' '.join(map(str, twice[0])).strip()} first"
    for time in run.engine_times:
        if bool(time.kernels) != (time.quantity == "layer"):
            what = f"{time.backend}, {time.heads} heads, {time.requests} x {time.tokens}"
            yield f"{time.engine} / {what}: a time of {time.quantity} with kernels {time.kernels!r}; a layer's has a kind alone"


def _engine_loads(run: Run) -> Iterator[str]:
    for size, count in Counter(load.size for load in run.engine_loads).items():
        if count > 1:
            yield f"a load of an engine is there {count} times: {' '.join(map(str, size))}"
    for load in run.engine_loads:
        for name in ("first_ms", "between_ms"):
            waits = getattr(load, name)
            if waits.p50 > waits.p99:
                yield f"{load.engine}, {load.backend}, {load.heads} heads: {name} has p50 {waits.p50:g} above p99 {waits.p99:g}"


def _engine_accuracy(run: Run) -> Iterator[str]:
    for size, count in Counter(text.size for text in run.engine_accuracy).items():
        if count > 1:
            yield f"a text of an engine is there {count} times: {' '.join(map(str, size))}"
    for text in run.engine_accuracy:
        what = f"{text.engine}, {text.model}, {text.backend}, {text.cache}, {text.length} tokens"
        beyond = [depth for depth, right in text.right.items() if right > text.asked.get(depth, 0)]
        if beyond:
            yield f"{what}: more right answers than questions at depth {', '.join(beyond)}"
        if text.mean is not None and (text.p99 is None or text.drift is None or abs(text.drift) > text.mean):
            yield f"{what}: a mean difference of {text.mean:g} with p99 {text.p99} and drift {text.drift}"


def describe(time: Time) -> str:
    """What was timed, in words."""
    sizes = {"heads": time.heads, "topk": time.topk, "rows": time.rows}
    words = [f"{name} {value}" for name, value in sizes.items() if value is not None]
    return f"{time.implementation} / {' '.join(filter(None, (time.primitive, time.layout)))}, {', '.join(words)}"
