# SPDX-License-Identifier: Apache-2.0
"""Files of times, which plugins ship: one JSON document for a device.

    {"device": "NVIDIA H200",                        name of the device: that of its profile
     "names": ["NVIDIA H200"],                       patterns of fnmatch for the names that its drivers report
     "recorded": "2026-11-23", "release": "0.1.0",   the day, and the plugin's release
     "versions": {"triton": "3.6.0"},                of the software that ran
     "times": [{"implementation": "nvidia.native", "primitive": "sparse_decode", "layout": "fp8_ds_mla", "heads": 16,
                "topk": 2048, "us": {"1": 13.8, "128": 65.6}}],        medians in microseconds by rows
     "prompts": [{"implementation": "nvidia.native", "qk_head_dim": 192, "v_head_dim": 128, "heads": 16,
                  "us": {"latent_fixed": 21.81, ...}}],                constants: the fields of PromptTimes
     "stands_for": ["nvidia"],                                         vendors: see PromptRecord
     "baselines": [{"implementation": "engine.kernels", ...}]}         rows as of `times`: what others run, timed beside them

A time may have a `configuration`, {"block_n": 32, ...}: `mla-portable tune` found it fastest, and the kernel is bound with it.
`layout`, `heads` and `topk` of a time are null where the primitive has none.

A document needs `device`, and `times` or `prompts`; a time needs `implementation`, `primitive` and `us`; a row of prompts needs
all that is shown. The rest may be left out. A row may have `recorded`, `release` and `versions` of its own.

A file of times is a hint: what cannot be used of it is left out and described, and the rest counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, cast

from mla_portable.times.prompts import PromptRecord, PromptTimes
from mla_portable.times.records import MeasuredTime, Measurement

if TYPE_CHECKING:
    from importlib.abc import Traversable

_COUNT: Final = "a whole number of 1 or more"
_MOST_US: Final = 1e12
"""Eleven days: sums of what is smaller stay finite."""
_LONGEST: Final = 200
"""Characters of a text."""
_ORIGIN: Final = ("recorded", "release", "versions")
_SHARED: Final = ("device", "names", *_ORIGIN, "times", "prompts", "stands_for", "baselines")
_ROW: Final = ("implementation", "primitive", "layout", "heads", "topk", "form", "configuration", "us", *_ORIGIN)
_PROMPTS: Final = ("implementation", "qk_head_dim", "v_head_dim", "heads", "us", *_ORIGIN)
_CONSTANTS: Final = tuple(field.name for field in fields(PromptTimes))
OLD_TABLE: Final = "a tuning table of release 0.2 or older, which is no longer read"
_ATTENDS: Final = "masked_prefill"
"""The primitive whose implementations `prompts` are of."""


@dataclass(frozen=True, slots=True)
class TimesFile:
    """What one document holds.

    Attributes:
        name: of the file. owner: the plugin that ships it, "" for a user's own.
        baselines: times of what is no implementation of this project's, beside some of `times`; they rank nothing.
        problems: what of it is ignored, and why, in words.
    """

    name: str
    owner: str = ""
    times: tuple[MeasuredTime, ...] = ()
    prompts: tuple[PromptRecord, ...] = ()
    baselines: tuple[MeasuredTime, ...] = ()
    problems: tuple[str, ...] = ()


def read_documents(source: str | Traversable) -> tuple[list[tuple[str, str]], list[str]]:
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


def parse_times(
    text: str, offered: Collection[tuple[str, str]] | None = None, *, name: str = "times", owner: str = ""
) -> TimesFile:
    """What can be used of a document. Never raises for what the text says.

    Args:
        offered: (implementation, primitive) that times may be of; None for any. name, owner: as of TimesFile.
    """
    empty = TimesFile(name, owner)
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, an integer too long, nested too deeply
        return replace(empty, problems=(f"no JSON document: {error}",))
    if not isinstance(document, dict):
        return replace(empty, problems=(f"got {_short(document)}, expected an object with {', '.join(_SHARED)}",))
    given = _given(cast("dict[str, Any]", document))
    if "schema" in given and "entries" in given:
        return replace(empty, problems=(OLD_TABLE,))
    problems = _unknown(given, _SHARED)
    problems += _wrong(given, {"device": _is_name, "names": _optional(_are_patterns), **_ORIGIN_CHECKS})
    problems += _wrong(given, {"stands_for": _optional(_are_names)})
    sections = [section for section in ("times", "prompts", "baselines") if section in given]
    for section in sections or ("times",):
        if not isinstance(given.get(section), list):
            problems.append(f"{section}: got {_short(given.get(section))}, expected a list of rows")
    if problems:
        return replace(empty, problems=tuple(problems))
    shared = _measurement(Measurement(given["device"], tuple(given.get("names", ()))), given)
    times: list[MeasuredTime] = []
    for number, row in enumerate(given.get("times", ()), start=1):
        found, wrong = _row(row, shared, offered)
        times += found
        problems += [f"row {number}: {each}" for each in wrong]
    prompts: list[PromptRecord] = []
    for number, row in enumerate(given.get("prompts", ()), start=1):
        record, wrong = _prompts(row, shared, tuple(given.get("stands_for", ())), offered)
        prompts += [record] if record else []
        problems += [f"row {number} of prompts: {each}" for each in wrong]
    baselines: list[MeasuredTime] = []
    for number, row in enumerate(given.get("baselines", ()), start=1):
        found, wrong = _row(row, shared, None)
        baselines += found
        problems += [f"row {number} of baselines: {each}" for each in wrong]
    return TimesFile(name, owner, tuple(times), tuple(prompts), tuple(baselines), tuple(problems))


def _row(row: Any, shared: Measurement, offered: Collection[tuple[str, str]] | None) -> tuple[list[MeasuredTime], list[str]]:
    """The times of one row that can be used, and what is wrong with it."""
    if not isinstance(row, dict):
        return [], [f"got {_short(row)}, expected an object with {', '.join(_ROW)}"]
    given = _given(cast("dict[str, Any]", row))
    checks = {"implementation": _is_name, "primitive": _is_name, "layout": _optional(_is_name)}
    checks |= {
        "heads": _optional(_is_count),
        "topk": _optional(_is_count),
        "form": _optional(_is_name),
        "configuration": _optional(_is_configuration),
    }
    problems = _unknown(given, _ROW) + _wrong(given, checks | _ORIGIN_CHECKS)
    if not isinstance(given.get("us"), dict):
        problems.append(f"us: got {_short(given.get('us'))}, expected an object: rows to microseconds")
    if problems:
        return [], problems
    name, primitive = given["implementation"], given["primitive"]
    if (wrong := _not_offered(name, primitive, offered)) is not None:
        return [], [wrong]
    measurement, times = _measurement(shared, given), list[MeasuredTime]()
    configuration = tuple(given["configuration"].items()) if "configuration" in given else None
    for rows, us in cast("dict[str, Any]", given["us"]).items():
        count = int(rows) if rows.isascii() and rows.isdecimal() and len(rows) < 12 else 0
        if count < 1:
            problems.append(f"us: rows {_short(rows)}, expected {_COUNT}")
        elif isinstance(us, bool) or not isinstance(us, (int, float)) or not 0 < us < _MOST_US:
            problems.append(f"us of {rows} rows: got {_short(us)}, expected a number above 0 and below {_MOST_US:g}")
        else:
            layout, heads, topk = given.get("layout"), given.get("heads"), given.get("topk")
            form = given.get("form", "")
            sizes = layout, heads, topk, count
            times.append(MeasuredTime(name, primitive, *sizes, float(us), measurement, form, configuration))
    return times, problems


def _prompts(
    row: Any, shared: Measurement, stands_for: tuple[str, ...], offered: Collection[tuple[str, str]] | None
) -> tuple[PromptRecord | None, list[str]]:
    """The record of one row of `prompts`, None where it cannot be used, and what is wrong with it."""
    if not isinstance(row, dict):
        return None, [f"got {_short(row)}, expected an object with {', '.join(_PROMPTS)}"]
    given = _given(cast("dict[str, Any]", row))
    sizes = ("qk_head_dim", "v_head_dim", "heads")
    checks = {"implementation": _is_name, **dict.fromkeys(sizes, _is_count), "us": _are_constants, **_ORIGIN_CHECKS}
    problems = _unknown(given, _PROMPTS) + _wrong(given, checks)
    if problems:
        return None, problems
    name, constants = given["implementation"], cast("dict[str, float]", given["us"])
    if (wrong := _not_offered(name, _ATTENDS, offered)) is not None:
        return None, [wrong]
    us = PromptTimes(**{constant: float(value) for constant, value in constants.items()})
    widths = given["qk_head_dim"], given["v_head_dim"]
    return PromptRecord(name, *widths, given["heads"], us, _measurement(shared, given), stands_for), []


def _not_offered(name: str, primitive: str, offered: Collection[tuple[str, str]] | None) -> str | None:
    if offered is None or (name, primitive) in offered:
        return None
    return f"{_short(name)} / {_short(primitive)} is not offered by this plugin"


def times_text(
    times: Iterable[MeasuredTime] = (), prompts: Iterable[PromptRecord] = (), baselines: Iterable[MeasuredTime] = ()
) -> str:
    """The document of one device, a line for times that differ in rows alone; in an order that depends on the records alone.

    Raises: ValueError for records of several devices, that stand for different vendors, or none.
    """
    times, prompts, baselines = list(times), list(prompts), list(baselines)
    measurements = [each.measurement for each in (*times, *prompts, *baselines)]
    devices = {(each.device, each.names) for each in measurements}
    if len(devices) != 1:
        raise ValueError(f"a file of times is of one device; got {', '.join(sorted(name for name, _ in devices)) or 'none'}")
    if len(stand_for := {each.stands_for for each in prompts}) > 1:
        raise ValueError(f"records of one file stand for the same vendors; got {sorted(stand_for)}")
    newest = max(measurements, key=lambda each: (each.recorded, each.release, each.versions))
    head = {"device": newest.device, "names": list(newest.names), **_origin(newest)}
    sections = {"times": _time_lines(times, newest)} if times else {}
    if prompts:
        sections["prompts"] = _prompt_lines(prompts, newest)
        if vendors := prompts[0].stands_for:
            head["stands_for"] = list(vendors)
    if baselines:
        sections["baselines"] = _time_lines(baselines, newest)
    written = (f'"{section}": [\n{lines}\n]' for section, lines in sections.items())
    return ",\n".join((json.dumps(head)[:-1], *written)) + "}\n"


def _time_lines(times: Iterable[MeasuredTime], newest: Measurement) -> str:
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}

    def order(each: MeasuredTime) -> tuple[Any, ...]:
        call = each.primitive, each.layout or "", each.form, each.heads or 0, each.topk or 0, each.implementation
        return *call, each.configuration or (), each.rows

    for each in sorted(times, key=order):
        named = {name: getattr(each, name) for name in ("implementation", "primitive", "layout", "heads", "topk")}
        if each.form:
            named["form"] = each.form
        if each.configuration is not None:
            named["configuration"] = dict(each.configuration)
        named |= _own_origin(each.measurement, newest)
        group = groups.setdefault((*map(str, named.values()), each.measurement), {**named, "us": {}})
        group["us"][str(each.rows)] = each.us
    return ",\n".join(json.dumps(group) for group in groups.values())


def _prompt_lines(prompts: Iterable[PromptRecord], newest: Measurement) -> str:
    def line(each: PromptRecord) -> str:
        named = {name: getattr(each, name) for name in ("implementation", "qk_head_dim", "v_head_dim", "heads")}
        return json.dumps({**named, **_own_origin(each.measurement, newest), "us": asdict(each.times)})

    def order(each: PromptRecord) -> tuple[Any, ...]:
        return each.implementation, each.qk_head_dim, each.v_head_dim, each.heads

    return ",\n".join(map(line, sorted(prompts, key=order)))


def _own_origin(measurement: Measurement, newest: Measurement) -> dict[str, Any]:
    """What a row says of its origin beside what the document says."""
    shared = _origin(newest)
    return {name: value for name, value in _origin(measurement).items() if value != shared[name]}


def _origin(measurement: Measurement) -> dict[str, Any]:
    return {"recorded": measurement.recorded, "release": measurement.release, "versions": dict(measurement.versions)}


def _measurement(shared: Measurement, given: Mapping[str, Any]) -> Measurement:
    own = {name: given[name] for name in _ORIGIN if name in given}
    if "versions" in own:
        own["versions"] = tuple(sorted(own["versions"].items()))
    return replace(shared, **own) if own else shared


def _given(given: dict[str, Any]) -> dict[str, Any]:
    """Without those that are null: they are as good as absent."""
    return {name: value for name, value in given.items() if value is not None}


def _is_text(value: Any) -> str:
    good = isinstance(value, str) and len(value) <= _LONGEST and value.isprintable()
    return "" if good else f"a printable text of at most {_LONGEST} characters"


def _is_name(value: Any) -> str:
    return _is_text(value) or ("" if value else "a text that is not empty")


def _is_count(value: Any) -> str:
    return "" if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else _COUNT


def _are_names(value: Any) -> str:
    good = isinstance(value, list) and not any(map(_is_name, cast("list[Any]", value)))
    return "" if good else "a list of names"


def _is_configuration(value: Any) -> str:
    items = cast("dict[str, Any]", value).items() if isinstance(value, dict) else [(None, None)]
    good = not any(_is_name(name) or type(number) is not int for name, number in items)
    return "" if good else "an object: name to whole number"


def _are_constants(value: Any) -> str:
    wrong = f"an object with {', '.join(_CONSTANTS)}: numbers of 0 or more, below {_MOST_US:g}"
    if not isinstance(value, dict) or set(cast("dict[str, Any]", value)) != set(_CONSTANTS):
        return wrong
    each: Any
    for each in cast("dict[str, Any]", value).values():
        if isinstance(each, bool) or not isinstance(each, (int, float)) or not 0 <= each < _MOST_US:
            return wrong
    return ""


def _are_patterns(value: Any) -> str:
    wrong = "a list of fnmatch patterns"
    if _are_names(value):
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


def _wrong(given: Mapping[str, Any], checks: Mapping[str, Callable[[Any], str]]) -> list[str]:
    found = {name: check(given.get(name)) for name, check in checks.items()}
    return [f"{name}: got {_short(given.get(name))}, expected {wanted}" for name, wanted in found.items() if wanted]


def _unknown(given: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    unknown = [repr(name) for name in given if name not in known]
    return [f"unknown field {', '.join(unknown)}; there are {', '.join(known)}"] if unknown else []


def _short(value: Any) -> str:
    """A value in a message; containers by their kind, for they may be nested as deeply as a parser can go."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
