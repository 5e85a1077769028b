# SPDX-License-Identifier: Apache-2.0
"""The matrix as data, matrix.json, and as a page, MATRIX.md; and what is known of an implementation, in words.

`table` makes it. A wheel has matrix.json instead of the runs. Nothing here imports torch or a plugin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from mla_portable.capability.model import Count, Model, RecordError, Text, validation_problems

PAGE: Final = "MATRIX.md"
DATA: Final = "matrix.json"
CI: Final = "CI"
NOT_RUN: Final = "not run"
UNPUBLISHED: Final = "a deciding fact is not published"
_MAX_BYTES: Final = 32 << 20


class Proof(Model):
    """One implementation of one primitive with one cache layout, in all runs of a release on a device.

    Attributes:
        device: slug of its profile. target: the architecture whose code ran, where that is not the device's own.
        layout: "" where none plays a part. level: that is nearest to complete. passed, failed: cases of any level. missing:
            cases of `level` that did not run. first_failed: id of a case. date, commit: of the newest run. who: everybody.
    """

    release: Text
    device: Text
    target: str = ""
    implementation: Text
    primitive: Text
    layout: str = ""
    level: Text
    passed: Count
    failed: Count = 0
    missing: Count = 0
    first_failed: str = ""
    date: Text
    commit: str | None
    who: list[str]

    @property
    def complete(self) -> bool:
        """Every case of the level ran, and all that ran passed."""
        return self.passed > 0 and not self.failed and not self.missing


class Cell(Model):
    """What would run. implementation: "" where nothing can. us: of the size in the column's heading, where it was timed."""

    implementation: str
    state: Text
    us: float | None = None

    @property
    def time(self) -> str:
        """In words, "" without one."""
        return "" if self.us is None else f"{self.us:,.0f} us" if self.us >= 100 else f"{self.us:.1f} us"

    @property
    def text(self) -> str:
        """In one line."""
        return ", ".join(filter(None, (self.implementation, self.state, self.time)))


class Device(Model):
    """A row. slug: of its profile. name: for readers; short: without the vendor and the size of the memory."""

    slug: Text
    name: Text
    short: Text
    vendor: Text
    arch: Text
    cells: tuple[Cell, ...]


class RunLine(Model):
    """A run, in short.

    Attributes:
        failed_comparisons: of engines, by the first word of their names, which names the model or the job: how many failed, and
            what the first of them found.
    """

    file: Text
    release: Text
    device: Text
    target: str = ""
    level: str | None
    passed: Count
    failed: Count
    times: Count
    comparisons: str = ""
    failed_comparisons: tuple[str, ...] = ()
    commit: str | None
    dirty: bool | None
    date: Text
    who: Text


class Matrix(Model):
    """Everything that a display shows.

    Attributes:
        plugins: (name, distribution, version) of those that are described. implementations: (name, primitive) of all that they
            offer. layouts: all names. columns: headings. ci: of `claims.proven_by_ci`, what is offered.
    """

    plugins: tuple[tuple[str, str, str], ...]
    implementations: tuple[tuple[str, str], ...]
    layouts: tuple[str, ...]
    columns: tuple[str, ...]
    ci: dict[str, list[str]]
    devices: tuple[Device, ...]
    runs: tuple[RunLine, ...]
    proofs: tuple[Proof, ...]


class States:
    """What is known of implementations on one device, in words."""

    def __init__(
        self, slug: str, arch: str, proofs: Iterable[Proof], ci: Mapping[str, Sequence[str]], names: Mapping[str, str]
    ) -> None:
        """ci: as of `Matrix`. names: slug -> name, of all devices."""
        self._arch, self._ci, self._names = arch, ci, names
        self._own: dict[tuple[str, str, str], Proof] = {}
        self._older: dict[tuple[str, str, str], list[Proof]] = {}
        for each in sorted(proofs, key=lambda each: (_version(each.release), each.date)):
            key = each.implementation, each.primitive, each.layout
            if each.device == slug and not each.target:
                self._own[key] = each
            elif each.target == arch and each.device != slug:
                self._older.setdefault(key, []).append(each)

    def proof(self, implementation: str, primitive: str, layout: str | None) -> Proof | None:
        """Of the newest release with a run on the device itself."""
        return self._own.get((implementation, primitive, layout or "")) or self._own.get((implementation, primitive, ""))

    def of(self, implementation: str, primitive: str, layout: str | None) -> str:
        """The best that is known, or what failed."""
        proof = self.proof(implementation, primitive, layout)
        if proof is not None:
            if proof.failed:
                return f"{proof.failed} cases failed in {proof.release}"
            return f"verified in {proof.release}" if proof.complete else f"run in part in {proof.release}"
        older = [each for each in self._older.get((implementation, primitive, layout or ""), ()) if each.complete]
        if older:
            where = " and ".join(sorted({f"an {self._names.get(each.device, each.device)}" for each in older}))
            return f"its {self._arch.upper()} code ran on {where}"
        return CI if self._arch in self._ci.get(f"{implementation} / {primitive}", ()) else NOT_RUN


def _version(release: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdecimal() else (0, part) for part in release.split("."))


def records_folder(given: Path | None = None) -> Path:
    """The folder that is given; else `capability/` of this checkout, or what a wheel has of it.

    Raises: RecordError when there is none.
    """
    if given is None:
        packaged = Path(__file__).parent / "data"
        given = packaged if packaged.is_dir() else Path(__file__).parents[2] / "capability"
    if not given.is_dir():
        raise RecordError(str(given), "no such folder; give one with --records")
    return given


def read_matrix(folder: Path) -> Matrix:
    """matrix.json. Raises: RecordError."""
    path = folder / DATA
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise RecordError(str(path), f"has more than {_MAX_BYTES >> 20} MiB")
        return Matrix.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(str(path), f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise RecordError(str(path), "; ".join(validation_problems(error)[:8])) from error


def installed_matrix() -> Matrix | None:
    """As it was generated; None where other plugins, or other versions of them, are installed. Raises: RecordError."""
    folder = records_folder()
    if not (folder / DATA).is_file():
        return None
    matrix = read_matrix(folder)
    points = entry_points(group="mla_portable.backends")
    return matrix if {(p.name, p.dist.name, p.dist.version) for p in points if p.dist} == set(matrix.plugins) else None


def matrix_text(matrix: Matrix) -> str:
    """matrix.json: an element a line."""
    parts: list[str] = []
    for name, value in matrix.model_dump(mode="json", exclude_defaults=True).items():
        lines = ",\n".join(map(json.dumps, value))
        parts.append(f'"{name}": [\n{lines}\n]' if isinstance(value, list) else f'"{name}": {json.dumps(value)}')
    return "{" + ",\n".join(parts) + "}\n"


_INTRODUCTION: Final = (
    "# What runs where",
    "",
    "Generated by `mla-portable matrix --write` from [runs](README.md), device profiles, declarations and measured costs. "
    "How to read it: [docs/matrix.md](../docs/matrix.md); how to add a run: [docs/dev/evidence.md](../docs/dev/evidence.md).",
    "",
    "A cell names what would run by default: the implementation, what is known of it on that device, and the time of one call "
    "where it was measured, with 64 heads and 2,048 indices per row. Libraries that an implementation calls (FlashMLA, "
    "FlashAttention 3, DeepGEMM, ixformer) are taken to be installed; `mla-portable doctor` says what is missing on a machine. "
    "`mla-portable matrix DEVICE` has every implementation of a device.",
    "",
)
_WORDS: Final = {
    "verified in R": "every case of the conformance suite of release R passed on that device, at level quick or full",
    "run in part in R": "all cases that ran passed; some of that release's suite did not run",
    "its SM80 code ran on an H200": "the suite passed with the code for that architecture, which a newer GPU's driver compiled",
    CI: "on the list (`ci.json`) of what this project's continuous integration proves without the device: each of its kernels "
    "compiles for the architecture and fits it; Triton's kernels, in its interpreter, and plain torch pass the suite on a CPU",
    NOT_RUN: "declared by its plugin",
    UNPUBLISHED: "such as how much shared memory there is, so that nobody can say what would run",
}


def page(matrix: Matrix) -> str:
    """MATRIX.md."""
    lines = [*_INTRODUCTION]
    lines += _rows(("device", *matrix.columns), ((f"{d.name} ({d.arch})", *(c.text for c in d.cells)) for d in matrix.devices))
    lines += ["", "## Words", "", *(f"- **{word}**: {meaning}" for word, meaning in _WORDS.items())]
    lines += ["", "## Runs", "", *_rows(_RUN_HEADINGS, map(_run_words, matrix.runs)), "", f"{_counted(matrix.runs)}."]
    failed = [f"- {run.release}, {run.device}, {words}" for run in matrix.runs for words in run.failed_comparisons]
    lines += ["", "Comparisons of engines that failed:", "", *failed] if failed else []
    return "\n".join(lines) + "\n"


_RUN_HEADINGS: Final = ("release", "device", "what", "commit", "date", "who")


def _run_words(run: RunLine) -> tuple[str, ...]:
    cases = f"{run.passed + run.failed:,} cases at level {run.level}" + (f", {run.failed} failed" if run.failed else "")
    what = [cases if run.level else "", f"{run.times} times" if run.times else "", run.comparisons]
    device = f"{run.device}, {run.target} code" if run.target else run.device
    commit = (run.commit or "unknown")[:12] + (" with uncommitted changes" if run.dirty else "")
    return run.release, device, "; ".join(filter(None, what)), commit, run.date, run.who


def _counted(runs: Sequence[RunLine]) -> str:
    people = len({run.who for run in runs})
    return f"{len(runs)} runs by {people} {'party' if people == 1 else 'parties'}"


def _rows(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}", *(f"| {' | '.join(row)} |" for row in rows)]
