# SPDX-License-Identifier: Apache-2.0
"""A run: what the conformance suite and the benchmark found on one device, of one commit, in one compressed file.

`mla-portable conform BACKEND --out FILE` and `mla-portable bench kernels --out FILE` write it; the same file takes both.
Anybody may send one, so reading is bounded in memory, and every way in which a file can be broken is a RecordError.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationError

from mla_portable.capability.model import Model, Positive, RecordError, Text, validation_problems
from mla_portable.kit.whole_files import replace_file

SUFFIX: Final = ".json.gz"
MAX_BYTES: Final = 16 << 20
"""Of a file of records when it is unpacked; one of a device's whole suite has about 1 MiB."""
_MAX_FIELDS: Final = 200
"""Of an object."""
_MAX_ID: Final = 400
DISTURBED: Final = 1.5
"""90th over 10th percentile of a time that something disturbed; of thousands of undisturbed times the largest is 1.3."""
_ID: Final = re.compile(r"(?P<primitive>[a-z0-9_]+)\[(?P<implementation>[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*)(?:-.*)?\]")
_BOUND_TO: Final = ("release", "commit", "device", "target", "who", "driver", "versions")
"""What everything in a file shares."""

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Measured = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$")]


def _a_day(text: str) -> str:
    date.fromisoformat(text)
    return text


class CaseName(NamedTuple):
    """What the id of a case says of it."""

    primitive: str
    implementation: str


def name_of(case_id: str) -> CaseName:
    """Raises: RecordError for a text that is no id."""
    match = _ID.fullmatch(case_id)
    if match is None:
        raise RecordError(case_id[:80], "no id of a case; expected primitive[backend.variant-...]")
    return CaseName(match["primitive"], match["implementation"])


def _an_id(text: str) -> str:
    name_of(text)
    return text


class Case(Model):
    """What became of one case of the suite.

    Attributes:
        errors: quantity -> error as the tolerance table measures it; "inf", "-inf" or "nan" where it is no finite number.
        message: of a case that did not pass.
    """

    id: Annotated[str, Field(max_length=_MAX_ID), AfterValidator(_an_id)]
    status: Literal["passed", "failed", "error"]
    errors: dict[str, _Finite | Literal["inf", "-inf", "nan"]] = Field(default_factory=dict)
    message: str = ""


class Baseline(Model):
    """The fastest baseline that was timed on the same problem."""

    name: Text
    us: _Measured


class Time(Model):
    """A median over several calls, in microseconds, with the tenth and the ninetieth percentile.

    Attributes:
        layout, heads, topk: None where the primitive has none. form: as in Request. rows, width, overlap: as in
            `problems.bench.KernelCase`. selection: whose lists or indexer's inputs were used; "" for random ones.
        bound: the roofline bound of the machine that ran. baseline: None where none was timed.
    """

    implementation: _Name
    primitive: Text
    layout: str | None
    heads: Positive | None
    topk: Positive | None
    form: str = ""
    rows: Positive
    width: Annotated[int, Field(ge=0)] = 0
    overlap: Annotated[int, Field(ge=0, le=100)] = 0
    selection: str = ""
    us: _Measured
    p10: _Measured
    p90: _Measured
    bound: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    baseline: Baseline | None = None

    @property
    def size(self) -> tuple[Any, ...]:
        """What was timed; a file has one time of it."""
        return (*self.problem, self.implementation)

    @property
    def problem(self) -> tuple[Any, ...]:
        """What times share that may be compared."""
        sizes = self.rows, self.width, self.overlap
        return self.primitive, self.layout or "", self.heads or 0, self.topk or 0, *sizes, self.form, self.selection

    @property
    def random(self) -> bool:
        """What is chosen from is random and shared by no two rows on purpose: times that rank, and that tables show."""
        return not self.overlap and not self.selection


class Comparison(Model):
    """What an engine generated through this project's adapter, judged.

    Attributes:
        engine: name and version. suite: which comparisons. passed: None for a line that only informs. text: the figures.
    """

    engine: Text
    suite: Text
    name: Text
    passed: bool | None
    text: str


class EngineTime(Model):
    """A time of an engine that serves one rank's share of a whole model.

    Attributes:
        engine: name and version. backend: whose attention, "stock" or "plugin". heads: query heads of the rank.
        quantity: first_token: until all prompts that start together have a token. decode: one step. layer: the GPU time of the
            kernels of one kind in the steps up to the first token, divided by the model's layers.
        requests, tokens: that start together, and of each: of the prompt, or of the context before a decode.
        kernels: of a layer's time, the kind of kernel; "" otherwise.
        mode: how the engine was started, as in EngineLoad; "" in older runs, whose engines ran without torch.compile.
        layers: of the model that ran; None in older runs.
    """

    engine: Text
    backend: Text
    heads: Positive
    quantity: Literal["first_token", "decode", "layer"]
    requests: Positive
    tokens: Positive
    kernels: str = ""
    mode: str = ""
    layers: Positive | None = None
    us: _Measured

    @property
    def size(self) -> tuple[Any, ...]:
        """What was timed; a file has one time of it."""
        ran = self.engine, self.backend, self.heads, self.mode
        return *ran, self.quantity, self.requests, self.tokens, self.kernels


class Waits(Model):
    """Milliseconds that requests waited, over all of them."""

    mean: _Measured
    p50: _Measured
    p99: _Measured


class EngineLoad(Model):
    """A mixed load that an engine served, on one rank's share of a model (`ci/gpu_vllm --serve`).

    Attributes:
        engine, backend, heads: as in EngineTime. layers: of the model that ran. mode: how the engine was started. rate:
            requests a second, None where all come at once. turn: the same load is served several times.
        requests: of the load. tokens_s: output tokens a second, all requests together.
        first_ms: from arrival to the first token. between_ms: between the tokens of a request.
        compiled: kernels that were compiled, or read from the disk, while requests waited, by name.
    """

    engine: Text
    backend: Text
    heads: Positive
    layers: Positive
    mode: Text
    rate: _Measured | None = None
    turn: Annotated[int, Field(ge=0)]
    requests: Positive
    tokens_s: _Measured
    first_ms: Waits
    between_ms: Waits
    compiled: dict[Text, Positive] = Field(default_factory=dict)

    @property
    def size(self) -> tuple[Any, ...]:
        """What was served; a file has one of it."""
        return self.engine, self.backend, self.heads, self.layers, self.mode, self.rate or 0.0, self.turn, self.requests


class EngineAccuracy(Model):
    """What an engine makes of a trained model's text, over prompts of one length (`ci/gpu_accuracy`).

    Attributes:
        engine: name and version. model: that was trained, by its form. backend: whose attention, as in `ci/gpu_accuracy`.
            cache: its format. per_head: prompts may go over keys of each head. variant: what else was different, a planted
            fault for one; "" where nothing was.
        length: tokens of a prompt. tokens: of all prompts of that length, whose log-probabilities are in `perplexity`.
        right, asked: answers and questions, by the depth of the needle in percent.
        mean, p99, drift: of the difference to stock with the same cache in a token's log-probability: of its size, and its
            mean. scale: of attention's scores, the relative error that explains the differences. None for that stock.
    """

    engine: Text
    model: Text
    backend: Text
    cache: Literal["bf16", "fp8"]
    per_head: bool
    variant: str = ""
    length: Positive
    tokens: Positive
    perplexity: _Measured
    right: dict[Text, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    asked: dict[Text, Positive] = Field(default_factory=dict)
    mean: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    p99: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    drift: _Finite | None = None
    scale: _Finite | None = None

    @property
    def size(self) -> tuple[Any, ...]:
        """What was read; a file has one of it."""
        return self.engine, self.model, self.backend, self.cache, self.per_head, self.variant, self.length


class Run(Model):
    """What a file holds.

    Attributes:
        release: of mla_portable. commit: of the code that ran, None where git could not say. dirty: paths of code with
            uncommitted changes, None where git could not say. who: ran it. date: of the first result.
        device: as in DeviceFacts. target: the architecture whose code ran, where that is not the device's own.
        driver: its version. clocks: MHz and watts by nvidia-smi's names. versions: of the software that ran.
        level: of the suite, None where it did not run. suite: SHA-256 of the ids of the cases, sorted, a line each.
        comparisons, engine_times, engine_loads, engine_accuracy: of engines.
    """

    version: Literal[1] = Field(alias="schema")
    release: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+]*$")]
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None
    dirty: Annotated[list[Text], Field(fail_fast=True)] | None
    who: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.]*$", max_length=40)]
    date: Annotated[str, AfterValidator(_a_day)]
    device: dict[str, str | bool | int | _Finite | None]
    target: Text | None = None
    driver: str | None = None
    clocks: dict[str, _Finite] = Field(default_factory=dict)
    versions: dict[str, str]
    level: Literal["smoke", "quick", "full"] | None = None
    suite: str | None = None
    cases: list[Case] = Field(default_factory=list[Case], fail_fast=True)
    times: list[Time] = Field(default_factory=list[Time], fail_fast=True)
    comparisons: list[Comparison] = Field(default_factory=list[Comparison], fail_fast=True)
    engine_times: list[EngineTime] = Field(default_factory=list[EngineTime], fail_fast=True)
    engine_loads: list[EngineLoad] = Field(default_factory=list[EngineLoad], fail_fast=True)
    engine_accuracy: list[EngineAccuracy] = Field(default_factory=list[EngineAccuracy], fail_fast=True)

    @property
    def device_name(self) -> str:
        """As the driver reports it."""
        return str(self.device.get("name"))

    @property
    def arch(self) -> str:
        """The architecture whose code ran."""
        return self.target or str(self.device.get("arch"))

    @property
    def disturbed(self) -> set[tuple[Any, ...]]:
        """Problems of times that something disturbed. They are timed in turns, so none of such a problem's times counts."""
        return {time.problem for time in self.times if time.p90 > DISTURBED * time.p10}


def suite_of(cases: Iterable[Case]) -> str | None:
    """What `Run.suite` has to be; None without a case."""
    ids = sorted(case.id for case in cases)
    return hashlib.sha256("".join(f"{each}\n" for each in ids).encode()).hexdigest() if ids else None


def new_run(document: dict[str, Any], where: str = "new run") -> Run:
    """Raises: RecordError with what is wrong."""
    try:
        return Run.model_validate(document)
    except ValidationError as error:
        raise RecordError(where, "; ".join(validation_problems(error)[:8])) from error


def combined(old: Run, new: Run) -> Run:
    """One run of the results of both.

    A case that ran twice has passed if it passed both times. Of two times of one size the newer stays.
    Raises: RecordError where they are not of the same release, commit, device, person or versions, or of two levels.
    """
    for name in _BOUND_TO:
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            problem = f"holds results of {name} {_short(before)}, these are of {_short(now)}; write them to another file"
            raise RecordError("run", problem)
    if old.cases and new.cases and old.level != new.level:
        raise RecordError("run", f"holds cases of level {old.level}, these are of {new.level}; write them to another file")
    cases = {case.id: case for case in old.cases}
    for case in new.cases:
        if cases.get(case.id, case).status == "passed":
            cases[case.id] = case
    times = {time.size: time for time in (*old.times, *new.times)}
    compared = {(each.engine, each.suite, each.name): each for each in (*old.comparisons, *new.comparisons)}
    engines = {time.size: time for time in (*old.engine_times, *new.engine_times)}
    loads = {load.size: load for load in (*old.engine_loads, *new.engine_loads)}
    texts = {text.size: text for text in (*old.engine_accuracy, *new.engine_accuracy)}
    return old.model_copy(
        update={
            "dirty": None if old.dirty is None or new.dirty is None else sorted({*old.dirty, *new.dirty}),
            "clocks": new.clocks or old.clocks,
            "level": new.level if new.cases else old.level,
            "suite": suite_of(cases.values()),
            "cases": list(cases.values()),
            "times": [times[size] for size in sorted(times)],
            "comparisons": list(compared.values()),
            "engine_times": list(engines.values()),
            "engine_loads": list(loads.values()),
            "engine_accuracy": list(texts.values()),
        }
    )


def run_text(run: Run) -> str:
    """The JSON of a run, a line for each result, so that a difference can be read."""
    fields = run.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    parts: list[str] = []
    for name, value in fields.items():
        rows = name in ("cases", "times", "comparisons", "engine_times", "engine_loads", "engine_accuracy")
        text = "[\n" + ",\n".join(map(_json, value)) + "\n]" if rows else _json(value)
        parts.append(f"{_json(name)}: {text}")
    return "{" + ",\n".join(parts) + "}\n"


def write_run(path: Path, run: Run) -> None:
    """Replace a file in one step; whoever reads it sees the old one or the new one. Raises: RecordError where it cannot."""
    packed = gzip.compress(run_text(run).encode(), 9, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        replace_file(path, packed)
    except OSError as error:
        raise RecordError(str(path), f"cannot be written: {error.strerror}") from error


def read_run(path: Path) -> Run:
    """Raises: RecordError with what is wrong."""
    run = new_run(parsed(unpacked(path), path.name), path.name)
    if run.suite != suite_of(run.cases):
        raise RecordError(path.name, "suite is not the hash of the cases' ids: cases were added or removed by hand")
    return run


def runs_in(folder: Path) -> Iterator[tuple[Path, Run]]:
    """Every run below a folder of records, `<release>/*.json.gz`, by path. Raises: RecordError for the first broken one."""
    for path in sorted(folder.glob(f"*/*{SUFFIX}")):
        run = read_run(path)
        if run.release != path.parent.name:
            raise RecordError(f"{path.parent.name}/{path.name}", f"a run of release {run.release}; move it to that folder")
        yield path, run


def unpacked(path: Path, limit: int = MAX_BYTES) -> str:
    """The text of a compressed file. No more than `limit` bytes of it are unpacked. Raises: RecordError."""
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a symbolic link" if stat.S_ISLNK(mode) else "no file"
            raise RecordError(path.name, f"is {kind}; expected a file that `mla-portable conform --out` wrote")
        with gzip.open(path) as file:
            data = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(path.name, f"cannot be read: {error}") from error
    if len(data) > limit:
        raise RecordError(path.name, f"has more than {limit >> 20} MiB when it is unpacked")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RecordError(path.name, f"no UTF-8 text: {error}") from error


def parsed(text: str, where: str) -> dict[str, Any]:
    """The JSON object in a text. Raises: RecordError; also for an object with a field twice or with very many."""
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise RecordError(where, "no record: nested too deeply") from error
    except ValueError as error:  # no JSON, or an integer with too many digits
        raise RecordError(where, f"no JSON document: {error}") from error
    if not isinstance(document, dict):
        raise RecordError(where, f"no record: expected a JSON object, got {type(document).__name__}")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What is malformed is described once, not for each of a million fields."""
    found = dict(pairs[:_MAX_FIELDS])
    if len(found) < len(pairs):
        raise ValueError(f"an object has more than {_MAX_FIELDS} fields, or one of them twice")
    return found


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _short(value: object) -> str:
    text = str(value.get("name", value) if isinstance(value, dict) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
