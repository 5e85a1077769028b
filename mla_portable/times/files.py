# SPDX-License-Identifier: Apache-2.0
"""Files of measured times, which plugins ship: one JSON document for a device.

    {"device": "NVIDIA H200",                        name of the device: that of its profile
     "names": ["NVIDIA H200"],                       patterns of fnmatch for the names that its drivers report
     "recorded": "2026-11-23", "release": "0.1.0",   the day, and the plugin's release
     "versions": {"triton": "3.6.0"},                of the software that ran
     "times": [{"implementation": "nvidia.native", "primitive": "sparse_decode", "layout": "fp8_ds_mla", "heads": 16,
                "topk": 2048, "us": {"1": 13.8, "128": 65.6}}]}        medians in microseconds by rows

`layout`, `heads` and `topk` are null where the primitive has none; everything but `device`, `times`, `implementation`,
`primitive` and `us` may be left out. A row may have `recorded`, `release` and `versions` of its own. A file of times is a hint:
what cannot be used of it is left out and described, and the rest counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, cast

from mla_portable.times.records import MeasuredTime, Measurement

if TYPE_CHECKING:
    from importlib.abc import Traversable

_COUNT: Final = "a whole number of 1 or more"
_MOST_US: Final = 1e12
"""Eleven days: sums of what is smaller stay finite."""
_LONGEST: Final = 200
"""Characters of a text."""
_ORIGIN: Final = ("recorded", "release", "versions")
_SHARED: Final = ("device", "names", *_ORIGIN, "times")
_ROW: Final = ("implementation", "primitive", "layout", "heads", "topk", "form", "us", *_ORIGIN)


def read_costs(source: str | Traversable) -> tuple[list[tuple[str, str]], list[str]]:
    """((name, text) of each document, what cannot be read, in words). Never raises for what a file holds.

    Args:
        source: the text of a document, a file, or a folder, of which every "*.json" is read, sorted by name.
    """
    if isinstance(source, str):
        return [("times", source)], []
    documents: list[tuple[str, str]] = []
    problems: list[str] = []
    try:
        files = [each for each in source.iterdir() if each.name.endswith(".json")] if source.is_dir() else [source]
    except (OSError, AttributeError) as error:
        return [], [f"{_short(source)}: expected a text, a file or a folder: {error}"]
    for file in sorted(files, key=lambda each: each.name):
        try:
            documents.append((file.name, file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:  # ValueError: not UTF-8
            problems.append(f"{file.name}: {error}")
    return documents, problems


def parse_costs(text: str, offered: Collection[tuple[str, str]] | None = None) -> tuple[list[MeasuredTime], list[str]]:
    """(times, what is wrong with the others, in words). Never raises for what the text says.

    Args:
        offered: (implementation, primitive) that times may be of; None for any.
    """
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, an integer too long, nested too deeply
        return [], [f"no JSON document: {error}"]
    if not isinstance(document, dict):
        return [], [f"got {_short(document)}, expected an object with {', '.join(_SHARED)}"]
    fields = _given(cast("dict[str, Any]", document))
    problems = _unknown(fields, _SHARED)
    problems += _wrong(fields, {"device": _is_name, "names": _optional(_are_patterns), **_ORIGIN_CHECKS})
    if not isinstance(fields.get("times"), list):
        problems.append(f"times: got {_short(fields.get('times'))}, expected a list of rows")
    if problems:
        return [], problems
    shared = _measurement(Measurement(fields["device"], tuple(fields.get("names", ()))), fields)
    times: list[MeasuredTime] = []
    for number, row in enumerate(fields["times"], start=1):
        found, wrong = _row(row, shared, offered)
        times += found
        problems += [f"row {number}: {each}" for each in wrong]
    return times, problems


def _row(row: Any, shared: Measurement, offered: Collection[tuple[str, str]] | None) -> tuple[list[MeasuredTime], list[str]]:
    """The times of one row that can be used, and what is wrong with it."""
    if not isinstance(row, dict):
        return [], [f"got {_short(row)}, expected an object with {', '.join(_ROW)}"]
    fields = _given(cast("dict[str, Any]", row))
    checks = {"implementation": _is_name, "primitive": _is_name, "layout": _optional(_is_name)}
    checks |= {"heads": _optional(_is_count), "topk": _optional(_is_count), "form": _optional(_is_name)}
    problems = _unknown(fields, _ROW) + _wrong(fields, checks | _ORIGIN_CHECKS)
    if not isinstance(fields.get("us"), dict):
        problems.append(f"us: got {_short(fields.get('us'))}, expected an object: rows to microseconds")
    if problems:
        return [], problems
    name, primitive = fields["implementation"], fields["primitive"]
    if offered is not None and (name, primitive) not in offered:
        return [], [f"{_short(name)} / {_short(primitive)} is not offered by this plugin"]
    measurement, times = _measurement(shared, fields), list[MeasuredTime]()
    for rows, us in cast("dict[str, Any]", fields["us"]).items():
        count = int(rows) if rows.isascii() and rows.isdecimal() and len(rows) < 12 else 0
        if count < 1:
            problems.append(f"us: rows {_short(rows)}, expected {_COUNT}")
        elif isinstance(us, bool) or not isinstance(us, (int, float)) or not 0 < us < _MOST_US:
            problems.append(f"us of {rows} rows: got {_short(us)}, expected a number above 0 and below {_MOST_US:g}")
        else:
            layout, heads, topk = fields.get("layout"), fields.get("heads"), fields.get("topk")
            times.append(
                MeasuredTime(name, primitive, layout, heads, topk, count, float(us), measurement, fields.get("form", ""))
            )
    return times, problems


def costs_text(times: Iterable[MeasuredTime]) -> str:
    """The document of one device's times, a line for those that differ in rows alone; in an order that depends on them alone.

    Raises: ValueError for times of several devices, or none.
    """
    times = list(times)
    devices = {(each.measurement.device, each.measurement.names) for each in times}
    if len(devices) != 1:
        raise ValueError(f"a file of times is of one device; got {', '.join(sorted(name for name, _ in devices)) or 'none'}")
    newest = max((each.measurement for each in times), key=lambda each: (each.recorded, each.release, each.versions))
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}

    def order(each: MeasuredTime) -> tuple[Any, ...]:
        return each.primitive, each.layout or "", each.form, each.heads or 0, each.topk or 0, each.implementation, each.rows

    for each in sorted(times, key=order):
        named = {name: getattr(each, name) for name in ("implementation", "primitive", "layout", "heads", "topk")}
        if each.form:
            named["form"] = each.form
        if each.measurement != newest:
            origin, shared = _origin(each.measurement), _origin(newest)
            named |= {name: value for name, value in origin.items() if value != shared[name]}
        group = groups.setdefault((*map(str, named.values()), each.measurement), {**named, "us": {}})
        group["us"][str(each.rows)] = each.us
    head = {"device": newest.device, "names": list(newest.names), **_origin(newest)}
    lines = ",\n".join(json.dumps(group) for group in groups.values())
    return f'{json.dumps(head)[:-1]},\n"times": [\n{lines}\n]}}\n'


def _origin(measurement: Measurement) -> dict[str, Any]:
    return {"recorded": measurement.recorded, "release": measurement.release, "versions": dict(measurement.versions)}


def _measurement(shared: Measurement, fields: Mapping[str, Any]) -> Measurement:
    own = {name: fields[name] for name in _ORIGIN if name in fields}
    if "versions" in own:
        own["versions"] = tuple(sorted(own["versions"].items()))
    return replace(shared, **own) if own else shared


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Without those that are null: they are as good as absent."""
    return {name: value for name, value in fields.items() if value is not None}


def _is_text(value: Any) -> str:
    good = isinstance(value, str) and len(value) <= _LONGEST and value.isprintable()
    return "" if good else f"a printable text of at most {_LONGEST} characters"


def _is_name(value: Any) -> str:
    return _is_text(value) or ("" if value else "a text that is not empty")


def _is_count(value: Any) -> str:
    return "" if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else _COUNT


def _are_patterns(value: Any) -> str:
    wrong = "a list of fnmatch patterns"
    if not isinstance(value, list) or any(map(_is_name, cast("list[Any]", value))):
        return wrong
    try:
        for pattern in cast("list[str]", value):
            fnmatchcase("", pattern)
    except re.error:  # an empty range, in Python 3.10
        return wrong
    return ""


def _are_versions(value: Any) -> str:
    items = cast("dict[str, Any]", value).items() if isinstance(value, dict) else [(None, None)]
    good = not any(_is_name(name) or _is_text(version) for name, version in items)
    return "" if good else "an object: name to version"


def _optional(check: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "" if value is None else check(value)


_ORIGIN_CHECKS: Final[dict[str, Callable[[Any], str]]] = {
    "recorded": _optional(_is_text),
    "release": _optional(_is_text),
    "versions": _optional(_are_versions),
}


def _wrong(fields: Mapping[str, Any], checks: Mapping[str, Callable[[Any], str]]) -> list[str]:
    found = {name: check(fields.get(name)) for name, check in checks.items()}
    return [f"{name}: got {_short(fields.get(name))}, expected {wanted}" for name, wanted in found.items() if wanted]


def _unknown(fields: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    unknown = [repr(name) for name in fields if name not in known]
    return [f"unknown field {', '.join(unknown)}; there are {', '.join(known)}"] if unknown else []


def _short(value: Any) -> str:
    """A value in a message; containers by their kind, for they may be nested as deeply as a parser can go."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
