# SPDX-License-Identifier: Apache-2.0
"""Claims: what implementations declare, held against runs and against the suite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from proofs import Results
from suite import LEVELS, Suite

from mla_portable.capability.profiles import Profile
from mla_portable.capability.run import name_of
from mla_portable.contracts import Features, Implementation, Request
from mla_portable.judge.problems import cases_for
from mla_portable.layouts import LAYOUTS


def uncovered(
    implementations: Iterable[Implementation], results: Results, today: Suite, profiles: Mapping[str, Profile]
) -> list[str]:
    """What the implementations that ran declare now and the results do not prove, a line for each.

    A claim is covered where every case that today's suite has for it, at level quick or at level full, passed.
    """
    facts = profiles[results.device].device_facts()
    if results.target:
        facts = next(each.device_facts() for each in profiles.values() if each.arch == results.target)
    where = f"{results.device}{f' as {results.target}' if results.target else ''} in {results.release}"
    ran = {name_of(case).implementation for case in results.status}
    found: list[str] = []
    for each in implementations:
        if each.name not in ran or any(True for _ in each.support.device_reasons(facts)):
            continue
        wanted = [today.cases(str(each.primitive), each.name, results.arch, level) for level in LEVELS]
        if any(results.passed(cases) for cases in wanted) or not any(wanted):
            continue
        fewest = min((cases for cases in wanted if cases), key=lambda cases: len(_open(cases, results)))
        still_open = _open(fewest, results)
        what = f"{len(still_open)} of {len(fewest)} cases did not pass or did not run, {still_open[0]} first"
        found.append(f"{each.name} / {each.primitive} on {where}: {what}")
    return found


def _open(cases: Iterable[str], results: Results) -> list[str]:
    return [case for case in cases if results.status.get(case) != "passed"]


def untested(implementations: Iterable[Implementation], profiles: Mapping[str, Profile], level: str = "quick") -> list[str]:
    """The limits of every `Support` that the suite has no case for, a line each.

    A limit of a declaration is tested where a case on some device reaches it: a case with exactly the largest count that is
    declared, one for each layout, head count, block size and format that is listed, one for each feature.
    """
    facts = {profile.arch: profile.device_facts() for profile in profiles.values()}
    found: list[str] = []
    for each in implementations:
        claimed = [device for device in facts.values() if not any(True for _ in each.support.device_reasons(device))]
        if not claimed:
            continue
        name = f"{each.name} / {each.primitive}"
        requests = [case.request for case in cases_for(each, claimed[0], level)]
        if not requests:
            found.append(f"{name}: declared, yet the suite has no case")
            continue
        missing = list(_limits_without_a_case(each, requests))
        for device in claimed[1:] if missing else ():  # a limit may depend on what a device has
            requests = [case.request for case in cases_for(each, device, level)]
            still = set(_limits_without_a_case(each, requests))
            missing = [limit for limit in missing if limit in still]
        found += [f"{name}: {limit} is declared, yet no case has it" for limit in missing]
    return found


def _limits_without_a_case(implementation: Implementation, requests: Sequence[Request]) -> Iterator[str]:
    support, primitive = implementation.support, implementation.primitive

    def values(field: str) -> set[Any]:
        return {getattr(request, field) for request in requests} - {None}

    layouts, heads, topk = values("kv_layout"), values("num_heads"), values("topk")
    blocks, query_lens, formats = values("block_size"), values("query_len"), values("scale_format")
    if primitive.cache:
        yield from (f"layout {layout}" for layout in implementation.layouts if layout not in layouts)
    if heads:
        listed = [*(support.num_heads or ()), *support.padded_heads, *([support.max_heads] if support.max_heads else ())]
        yield from (f"num_heads {count}" for count in listed if count not in heads)
    if topk:
        if support.max_topk is not None and support.max_topk not in topk:
            yield f"max_topk {support.max_topk}"
        if support.topk_multiple > 1 and not any((count // support.topk_multiple) % 2 for count in topk):
            yield f"topk_multiple {support.topk_multiple}"
    if blocks:
        yield from (f"block_size {size}" for size in support.block_sizes or () if size not in blocks)
        if support.block_size_multiple > 1 and not any((size // support.block_size_multiple) % 2 for size in blocks):
            yield f"block_size_multiple {support.block_size_multiple}"
    if query_lens and support.max_query_len is not None and support.max_query_len not in query_lens:
        yield f"max_query_len {support.max_query_len}"
    if formats:
        kept = {each for name in implementation.layouts for each in LAYOUTS[name].scale_formats_of(support.scale_formats)}
        yield from (f"scale_format {each}" for each in sorted(kept - formats))
    for feature in (each.name for each in fields(Features)):
        asked = feature in (*primitive.facts, *primitive.stated, "graph")
        if asked and getattr(support, feature) and not any(getattr(request, feature) for request in requests):
            yield f"feature {feature}"
