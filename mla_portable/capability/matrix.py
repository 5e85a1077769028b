# SPDX-License-Identifier: Apache-2.0
"""The matrix as data, matrix.json; what is known of an implementation, in words; and what continuous integration proves.

`table` makes it, `ci/release/matrix.py` writes the file. A wheel has that instead of the runs. Nothing here imports torch or a
plugin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from mla_portable.capability.model import Count, Model, RecordError, Text, validation_problems

DATA: Final = "matrix.json"
CI_LIST: Final = "ci.json"
"""Of `capability/`, and of a wheel: what this project's continuous integration proves; `ci/proven.py` holds it against runs."""
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
            offer. layouts: all names. columns: headings. ci: of `proven_by_ci`, what is offered.
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


def proven_by_ci(folder: Path | None = None) -> dict[str, list[str]]:
    """ "implementation / primitive" -> architectures that continuous integration proves it for, which needs no device.

    They are those that its kernels compile for, and "cpu" where the conformance suite passes there, as it is or in an
    interpreter. Of implementations that are not in the list nothing is known: a plugin of somebody else, or a new one.

    Args:
        folder: with the list; that of this project unless said otherwise.
    Raises: RecordError.
    """
    path = (folder or records_folder()) / CI_LIST
    try:
        return TypeAdapter(dict[str, list[str]]).validate_json(path.read_bytes(), strict=True)
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
