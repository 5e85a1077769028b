# SPDX-License-Identifier: Apache-2.0
"""Add results to the file of a run, as `--out FILE` of `conform` and `bench kernels` does."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mla_portable._version import __version__
from mla_portable.bench.kernel_machine import machine_state
from mla_portable.capability.history import Code, code_of, user_name
from mla_portable.capability.model import RecordError
from mla_portable.capability.run import (
    Case,
    Comparison,
    EngineAccuracy,
    EngineLoad,
    EngineTime,
    Run,
    Time,
    combined,
    new_run,
    read_run,
    write_run,
)
from mla_portable.choose import Registry
from mla_portable.contracts import InvalidArgument

_NO_NAME = re.compile(r"[^a-z0-9_.]+")


class Recorder:
    """The file of a run, to which results are added."""

    def __init__(self, path: Path, run: Run) -> None:
        """Raises: RecordError where the file is there and holds results of something else, or where it cannot be written.

        Both are found out before the work.
        """
        self._path, self._empty = path, run
        self._whole(run)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise RecordError(str(path), f"cannot be written: {error.strerror}") from error

    def add(
        self,
        *,
        level: str | None = None,
        cases: Iterable[Case] = (),
        times: Iterable[Time] = (),
        compared: Iterable[Comparison] = (),
        engine_times: Iterable[EngineTime] = (),
        engine_loads: Iterable[EngineLoad] = (),
        engine_accuracy: Iterable[EngineAccuracy] = (),
    ) -> Run:
        """Add results to the file. Returns: all that it holds. Raises: RecordError."""
        more: dict[str, Any] = {"level": level, "cases": list(cases), "times": list(times), "comparisons": list(compared)}
        more |= {"engine_times": list(engine_times), "engine_loads": list(engine_loads)}
        more |= {"engine_accuracy": list(engine_accuracy)}
        whole = self._whole(self._empty.model_copy(update=more))
        write_run(self._path, whole)
        return whole

    def _whole(self, run: Run) -> Run:
        old = read_run(self._path) if os.path.lexists(self._path) else self._empty
        try:
            return combined(old, run)
        except RecordError as error:
            raise RecordError(str(self._path), error.problem) from error


def recorder(
    path: Path,
    registry: Registry,
    device: torch.device,
    *,
    backends: Collection[str] = (),
    who: str | None = None,
    commit: str | None = None,
    target: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> Recorder:
    """The file of a run of what is installed here.

    Args:
        backends: that run, or implementations; all where there is none. who: default: git's user.name, or the login.
        commit: of the code that runs, where git cannot say. target: as of `Run`. versions: of more software that runs.
    Raises: RecordError as `Recorder`, and where a user's own times may configure the kernels; InvalidArgument for a commit
        that git contradicts.
    """
    facts = registry.facts(device)
    for file in registry.times_files:
        if not file.owner and any(each.configuration and each.measurement.matches(facts.name) for each in file.times):
            problem = f"{file.name} may configure kernels; let MLA_PORTABLE_TIMES name a folder without configurations"
            raise RecordError(str(path), problem)
    code = plugins_code(registry, backends)
    found = code.commit() if code else None
    if commit is not None and found not in (None, commit):
        raise InvalidArgument("--commit", "commit", got=commit, expected=f"{found}, which git says", remedy="Leave it out.")
    state = machine_state(device, facts)
    own = {"mla_portable": __version__, "python": platform.python_version(), **dict(facts.libraries)}
    document = {
        "schema": 1,
        "release": __version__,
        "commit": found or commit,
        "dirty": code.dirty() if code else None,
        "who": who_of(who or user_name()),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": {name: value for name, value in asdict(facts).items() if name != "libraries"},
        "target": target,
        "driver": state.driver,
        "clocks": dict(state.clocks),
        "versions": own | dict(versions or {}),
    }
    return Recorder(path, new_run(document))


def plugins_code(registry: Registry, backends: Collection[str] = ()) -> Code | None:
    """The code of the plugins that offer some backends or implementations, of all where there is none.

    To a plugin's code belong the packages of the distributions `mla-portable-...` that its own requires.
    """
    named = {part for entry in backends for part in (entry, entry.partition(".")[0])}
    plugins: dict[Path, None] = {}
    for report in registry.plugin_reports:
        offers = {part for entry in report.implementations for part in (entry.partition(" ")[0], entry.partition(".")[0])}
        if (not backends and report.implementations) or offers & named:
            for module in (report.module.partition(":")[0], *_shared_packages(report.distribution)):
                spec = find_spec(module)
                if spec is not None and spec.origin:
                    file = Path(spec.origin)
                    plugins[file.parent if spec.submodule_search_locations else file] = None
    return code_of(plugins)


def _shared_packages(distribution: str) -> list[str]:
    """The packages of the distributions `mla-portable-...` that an installed one requires."""
    try:
        needed = requires(distribution) if distribution else None
    except PackageNotFoundError:
        return []
    names = [re.match(r"[\w.-]*", line.lower()) for line in needed or ()]
    return [name.group().replace("-", "_") for name in names if name and name.group().startswith("mla-portable-")]


def case_of(result: Mapping[str, Any]) -> Case:
    """From `CaseResult.as_dict()`."""
    errors: dict[str, Any] = {
        name: error if isinstance(error, str) else float(f"{error:.4g}") for name, error in result["errors"].items()
    }
    return Case(id=result["id"], status=result["status"], errors=errors, message=result["message"])


def who_of(name: str) -> str:
    """A name as `Run.who` has it: lower case, digits, "_" and "."."""
    return _NO_NAME.sub("_", name.lower()).strip("_.")[:40] or "unknown"
