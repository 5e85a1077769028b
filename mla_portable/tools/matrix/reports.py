# SPDX-License-Identifier: Apache-2.0
"""Reports: everything that a run said, one compressed file each, which the records are derived from (`derive`).

A report's name is the start of the SHA-256 of its JSON text, so a report that is edited is another one. A signature of the
whole hash may lie beside it (`signed_by`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from mla_portable.tools.matrix.model import Count, Hash, Model, Moment, Positive, RecordError, Text, validation_problems

REPORTS: Final = "reports"
ENGINE: Final = ("mla_portable.vllm", "engine")
"""What stands for implementation and primitive in the evidence of engines."""
SIGNERS: Final = "signers"
"""Public keys of the project's own runners, in the format of `man ssh-keygen`, ALLOWED SIGNERS."""
_NAME: Final = 16
_NAMESPACE: Final = "mla-portable"
_Number = float | str
"""A finite number, or "inf", "-inf", "nan"."""


class Claimed(Model):
    """One implementation of one primitive, as it was installed where the report was made.

    Attributes:
        arch: whose code ran or was compiled. source_hash, suite_hash: of what ran, None for a suite that did not. mode: of the
            suite. kernels, shared_memory_limit: of what was compiled.
    """

    implementation: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$")]
    primitive: Text
    arch: Text
    distribution: str
    version: str
    support: dict[str, Any]
    source_hash: Hash
    suite_hash: Hash | None = None
    mode: Literal["native", "interpreter", "stand_in", "ptx"] | None = None
    kernels: list[str] | None = None
    shared_memory_limit: Count | None = None


class _Report(Model):
    version: Literal[1] = Field(alias="schema")
    recorded: Moment
    command: Text
    machine: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None
    changed: dict[str, str]
    versions: dict[str, str]
    claims: list[Claimed]


class _OnDevice(_Report):
    """device: as in DeviceFacts. clocks: MHz and watts, by nvidia-smi's names."""

    device: dict[str, Any]
    driver: str | None
    clocks: dict[str, float]


class Case(Model):
    """As in CaseResult; params: those that are not usual."""

    id: Text
    implementation: Text
    primitive: Text
    layout: str | None
    heads: Positive | None
    topk: Positive | None
    params: dict[str, Any]
    status: Literal["passed", "failed", "error"]
    errors: dict[str, _Number]
    tolerances: dict[str, _Number]
    message: str
    seconds: float


class Conformance(_OnDevice):
    """A run of the conformance suite. target: of mode "ptx", the architecture whose code ran, which the cases were made for."""

    kind: Literal["conformance"]
    level: Literal["smoke", "quick", "full"]
    match: str
    target: str | None
    cases: list[Case]


class Compiled(_Report):
    """What the compiler of a plugin printed."""

    kind: Literal["compiled"]
    lines: list[dict[str, Any]]


class Benchmark(_OnDevice):
    """Lines of `mla-portable bench kernels`, without what they share."""

    kind: Literal["benchmark"]
    ceilings: dict[str, float]
    lines: list[dict[str, Any]]


class Comparison(Model):
    """passed: None for a line that only informs. text: the figures."""

    name: Text
    passed: bool | None
    text: str


class Engine(_OnDevice):
    """What an engine generated through this project's adapter, judged. engine: name and version. suite: which comparisons."""

    kind: Literal["engine"]
    engine: Text
    suite: Text
    lines: list[Comparison]


Report = Conformance | Compiled | Benchmark | Engine
_SCHEMA: Final[TypeAdapter[Report]] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


def parse_report(document: Any, where: str) -> Report:
    """Raises: RecordError with everything that is wrong."""
    try:
        return _SCHEMA.validate_python(document)
    except ValidationError as error:
        raise RecordError(where, "; ".join(validation_problems(error)[:8])) from error


def report_text(document: Mapping[str, Any]) -> str:
    """The one text of a report."""
    return json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":"))


def digest(text: str) -> str:
    """SHA-256 of a report's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def report_path(folder: Path, sha: str) -> Path:
    """Where a report is kept, below a folder of records."""
    return folder / REPORTS / f"{sha[:_NAME]}.json.gz"


def write_report(folder: Path, document: Mapping[str, Any]) -> Path:
    """Keep a report below a folder of records. Returns: its file; the same report has the same one."""
    parse_report(document, "new report")
    text = report_text(document)
    path = report_path(folder, digest(text))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return path


def unpacked(path: Path) -> str:
    """The text of a file that may be compressed. Raises: RecordError."""
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise RecordError(path.name, f"cannot be read: {error}") from error


def read_reports(folder: Path) -> dict[str, Report]:
    """SHA-256 -> report, of all below a folder of records. Raises: RecordError for one that is not what its name says."""
    found: dict[str, Report] = {}
    for path in sorted((folder / REPORTS).glob("*.json.gz")):
        text = unpacked(path)
        if path != report_path(folder, digest(text)):
            raise RecordError(path.name, "its contents have another hash; a report is never edited")
        found[digest(text)] = parse_report(json.loads(text), path.name)
    return found


def sign(path: Path, key: Path) -> None:
    """Sign a report with a private key of ssh, for `signed_by`. Raises: RecordError without ssh-keygen; CalledProcessError."""
    done = _ssh_keygen("sign", digest(unpacked(path)), "-q", "-f", str(key))
    done.check_returncode()
    path.with_suffix(".sig").write_text(done.stdout)


def signed_by(folder: Path, reports: Iterable[str]) -> dict[str, str]:
    """SHA-256 -> who signed, of the reports with a signature by a key in `folder/signers`.

    Raises: RecordError where there are signatures and no ssh-keygen to check them.
    """
    signers = folder / SIGNERS
    names = [line.split()[0] for line in signers.read_text().splitlines() if line.strip()] if signers.is_file() else []
    found: dict[str, str] = {}
    for sha in reports:
        signature = report_path(folder, sha).with_suffix(".sig")
        for name in dict.fromkeys(names) if signature.is_file() else ():
            if _ssh_keygen("verify", sha, "-f", str(signers), "-I", name, "-s", str(signature)).returncode == 0:
                found[sha] = name
    return found


def _ssh_keygen(task: str, sha: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What became of a task about the signature of a report."""
    command = ["ssh-keygen", "-Y", task, "-n", _NAMESPACE, *words]
    try:
        return subprocess.run(command, input=sha, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RecordError(f"{sha[:_NAME]}.json.gz", "its signature needs ssh-keygen; install OpenSSH's client") from None
