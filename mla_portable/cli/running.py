# SPDX-License-Identifier: Apache-2.0
"""`mla-portable doctor --engine`: whether the plugin serves in an engine that runs, by its server's answers or by its log."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import typer

from mla_portable.engine.serving import METRIC, Serving, in_log, in_metrics, is_of_one_process, refusals_in_log

_OPTION: Final = "--engine"
_SECONDS: Final = 10.0
_NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang"}
"""What `owned_by` of /v1/models says -> the engine."""


@dataclass(frozen=True, slots=True)
class Running:
    """An engine that runs.

    Attributes:
        where: as the user named it. engine: name and version, "" where it does not say. models: that it serves.
        serves: the plugin serves there; None where that cannot be seen. served: what it says of it. why: what speaks against
            it, why it cannot be seen, or what to look at though it serves. remedy: what to do then.
    """

    where: str
    engine: str
    models: tuple[str, ...]
    serves: bool | None
    served: tuple[Serving, ...]
    why: tuple[str, ...] = ()
    remedy: str = ""


def look_at(where: str) -> Running:
    """Examine the engine that `--engine` names. Raises: typer.BadParameter where there is neither a server nor a file."""
    return _server(where) if where.startswith(("http://", "https://")) else _log(where)


def _log(where: str) -> Running:
    try:
        text = Path(where).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        expected = f"the URL of a server (http://...), or the file of its log (got {where!r}: {error.strerror})"
        raise typer.BadParameter(f"must be {expected}", param_hint=_OPTION) from error
    served, refused = in_log(text), refusals_in_log(text)
    if served:
        return Running(where, "", (), True, served, (*refused, *_slow(served)))
    why = refused or ("no line of the plugin says that it serves",)
    remedy = "run `mla-portable doctor` where the engine runs: it says whether the engine loads the plugin"
    return Running(where, "", (), False, (), why, remedy)


def _server(where: str) -> Running:
    url = where.rstrip("/").removesuffix("/v1")
    version, models, metrics = (_get(url, path) for path in ("/version", "/v1/models", "/metrics"))
    owner, names = _models(models)
    engine = " ".join(filter(None, (_NAMES.get(owner, owner), str(_object(version).get("version", "")))))
    served = () if metrics is None else in_metrics(metrics)
    if served:
        return Running(where, engine, names, True, served, _slow(served))
    look = f"`mla-portable doctor {_OPTION} FILE` looks at its log"
    if metrics is None:
        remedy = f"start SGLang with --enable-metrics; or {look}" if owner == "sglang" else look
        return Running(where, engine, names, None, (), ("the server has no /metrics",), remedy)
    if is_of_one_process(metrics):
        why = "its /metrics are those of the process that answers, and layers run in others"
        remedy = f"start it with PROMETHEUS_MULTIPROC_DIR set to an empty folder; or {look}"
        return Running(where, engine, names, None, (), (why,), remedy)
    why = f"its /metrics are those of all its processes, and none has {METRIC}"
    remedy = f"run `mla-portable doctor` where the engine runs; {look}"
    return Running(where, engine, names, False, (), (why,), remedy)


def _slow(served: Iterable[Serving]) -> tuple[str, ...]:
    """What to say where plain torch serves."""
    plain = sorted({each.primitive for each in served if each.implementation.startswith("reference.")})
    why = "`mla-portable doctor`, where the engine runs, says why nothing else does"
    return (f"plain torch (reference.torch) serves {', '.join(plain)}, which is slow: {why}",) if plain else ()


def _get(url: str, path: str) -> str | None:
    """The text of an answer; None where the server has no such page, or keeps it from us. Raises: typer.BadParameter."""
    try:
        with urlopen(url + path, timeout=_SECONDS) as answer:
            return answer.read().decode("utf-8", errors="replace")
    except HTTPError:
        return None
    except (URLError, HTTPException, OSError, ValueError) as error:
        expected = f"the URL of a server that answers, such as http://localhost:8000 (got {url}: {error})"
        raise typer.BadParameter(f"must be {expected}", param_hint=_OPTION) from error


def _object(text: str | None) -> dict[str, Any]:
    """The JSON object in a text, {} where there is none."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _models(text: str | None) -> tuple[str, tuple[str, ...]]:
    """Whose server it is, and the names of its models, as /v1/models says."""
    listed = _object(text).get("data")
    models = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    owner = next((str(each["owned_by"]) for each in models if "owned_by" in each), "")
    return owner, tuple(str(each.get("id")) for each in models)
