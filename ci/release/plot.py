# SPDX-License-Identifier: Apache-2.0
"""Kernel times over rows as a picture: for each head count, top-k and width a panel with the fastest of this project, Triton's,
the fastest baseline and the roofline bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from svg import Curve, panels_svg

from mla_portable.capability.run import Baseline, Time
from mla_portable.contracts import InvalidArgument

_PORTABLE: Final = "triton.portable"
_NEVER_BELOW: Final = 0.99
"""Times are rounded."""


class Picture(NamedTuple):
    """title: in the picture too. svg: the file's text."""

    title: str
    svg: str


def picture_of(times: Iterable[Time], device: str) -> Picture:
    """Draw times. Those with an overlap or of a model's selections are left out.

    device: its name, and what else the title begins with.

    What all times share is in the title, the rest in the labels. Panels of one primitive, layout and form share their axes.

    Raises: InvalidArgument where no time is left, or one is below the roofline bound of its size.
    """
    problems = list(by_problem(each for each in times if each.random).values())
    if not problems:
        raise InvalidArgument("plot", "times", got="none without an overlap or a selection", expected="at least one")
    for each in (time for group in problems for time in group):
        if each.us < _NEVER_BELOW * each.bound:
            got = f"{each.us:g} us for {each.rows} rows, {each.heads} heads, K {each.topk} by {each.implementation}"
            expected = f"no less than the roofline bound of that size, {each.bound:g} us"
            raise InvalidArgument("plot", "times", got=got, expected=expected, remedy="Time it again: one of both is wrong.")
    widths = widths_matter(problems)
    facts = [_facts(group[0], widths) for group in problems]
    shared = {name for name in facts[0] if len({fact[name] for fact in facts}) == 1}
    others = _name_of_others(problems)
    panels: dict[str, dict[str, list[Sequence[Time]]]] = {}
    for group, fact in sorted(zip(problems, facts, strict=True), key=lambda found: _order(found[0][0])):
        own = {name: text for name, text in fact.items() if name not in shared}
        place = _words(own, "primitive", "layout", "form")
        panels.setdefault(place, {}).setdefault(_words(own, "topk", "heads", "width"), []).append(group)
    call = "one call of " if "primitive" in shared else "one call, "
    words = _words({name: text for name, text in facts[0].items() if name in shared}, *facts[0])
    title = f"{device}: {call}{words}".rstrip(", ") + " (lower is better)"
    drawn = {place: {label: _curves(found, others) for label, found in labels.items()} for place, labels in panels.items()}
    return Picture(title, panels_svg(title, drawn, x="rows", y="us"))


def by_problem(times: Iterable[Time]) -> dict[tuple[Any, ...], list[Time]]:
    """Times that may be compared."""
    found: dict[tuple[Any, ...], list[Time]] = {}
    for each in times:
        found.setdefault(each.problem, []).append(each)
    return found


def widths_matter(problems: Iterable[Sequence[Time]]) -> bool:
    """Whether one number of rows occurs with several widths; else a width only follows from the rows."""
    sizes = [(t.primitive, t.layout, t.form, t.heads, t.topk, t.rows) for t, *_ in problems]
    return len(sizes) != len(set(sizes))


def baseline_of(times: Sequence[Time]) -> Baseline | None:
    """The fastest that was timed beside one of these."""
    return min((time.baseline for time in times if time.baseline is not None), key=lambda each: each.us, default=None)


def _facts(time: Time, widths: bool) -> dict[str, str]:
    """What the words of a picture say of a time, in their order."""
    return {
        "primitive": time.primitive,
        "layout": time.layout or "",
        "form": time.form,
        "topk": f"K {time.topk:,}" if time.topk else "",
        "heads": f"{time.heads} heads" if time.heads else "",
        "width": f"width {time.width:,}" if widths and time.width else "",
    }


def _order(time: Time) -> tuple[Any, ...]:
    return time.primitive, time.layout or "", time.form, time.heads or 0, time.topk or 0, time.width, time.rows


def _words(facts: Mapping[str, str], *names: str) -> str:
    return ", ".join(facts[name] for name in names if facts.get(name))


def _name_of_others(problems: Iterable[Sequence[Time]]) -> str:
    """Of the curve of baselines, in all panels."""
    names = sorted({found.name for times in problems if (found := baseline_of(times)) is not None})
    return f"{'the fastest of ' if len(names) > 1 else ''}{', '.join(names)}, called directly"


def _curves(problems: Sequence[Sequence[Time]], others: str) -> list[Curve]:
    points = {
        "mla_portable, its fastest kernel": [(times[0].rows, min(time.us for time in times)) for times in problems],
        others: [(times[0].rows, found.us) for times in problems if (found := baseline_of(times)) is not None],
        _PORTABLE: [(each.rows, each.us) for times in problems for each in times if each.implementation == _PORTABLE],
    }
    solid = [Curve(name, tuple((float(x), y) for x, y in found)) for name, found in points.items() if found]
    return [*solid, Curve("roofline bound", tuple((float(t.rows), t.bound) for t, *_ in problems), dashed=True)]
