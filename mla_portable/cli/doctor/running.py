# SPDX-License-Identifier: Apache-2.0
"""`mla-portable doctor --engine`: whether the plugin serves in an engine that runs, by its server's answers or by its log."""

from __future__ import annotations

import io
import json
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Any, Final, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import typer

from mla_portable.cli.doctor.instead import START_SGLANG, START_VLLM, in_sglang, in_vllm
from mla_portable.cli.doctor.reading import Serving, in_log, in_metrics, is_of_one_process, unread_in_metrics
from mla_portable.cli.doctor.tested import how_tested
from mla_portable.engines.common.metrics import METRIC

_OPTION: Final = "--engine"
_SECONDS: Final = 20.0
"""For all that is asked of a server, or for a log that is no regular file."""
_MOST_BYTES: Final = 16 * 2**20
"""Of an answer. A server's metrics take some hundred kilobytes."""
_LONGEST_LINE: Final = 2**20
_PAGES: Final = ("/version", "/v1/models", "/metrics")
_SGLANG_PAGE: Final = "/server_info"
"""SGLang's version and options, which its /version does not have."""
_SHOWN: Final = 200
"""Characters that are shown of a text of a server."""
_NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang"}
"""What `owned_by` of /v1/models says -> the engine."""
_ATTENTION: Final = "sparse_"
"""Primitives of attention begin with it; the indexer's do not."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Running:
    """An engine that runs.

    Attributes:
        where: as the user named it. engine: name and version, "" where it does not say. models: that it serves.
        tested: how this version was tested, "" where its engine or version is not known.
        serves: the plugin serves there; None where that cannot be seen. served: what it says of it. why: what speaks against
            it, why it cannot be seen, or what to look at though it serves. remedy: what to do then.
    """

    where: str
    engine: str
    tested: str
    models: tuple[str, ...]
    serves: bool | None
    served: tuple[Serving, ...]
    why: tuple[str, ...] = ()
    remedy: str = ""


def look_at(where: str, *, seconds: float = _SECONDS) -> Running:
    """Examine the engine that `--engine` names.

    Args:
        seconds: that a server has for all its answers, and a pipe or a device until its end.
    Raises: typer.BadParameter where there is neither a server nor a file, or a server that does not answer within its bounds.
    """
    return _server(where, seconds) if where.startswith(("http://", "https://")) else _log(where, seconds)


def _log(where: str, seconds: float) -> Running:
    try:
        found = in_log(_lines(where, seconds))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        expected = f"the URL of a server (http://...), or the file of its log (got {where!r}: {why})"
        raise typer.BadParameter(f"must be {expected}", param_hint=_OPTION) from error
    served, said = found.served, found.engine
    engine = " ".join(filter(None, (said.engine, said.version)))
    running = partial(Running, where, engine, how_tested(said.engine, said.version), ())
    refused = (*found.refusals, *((f"and {found.others} further lines of this kind",) if found.others else ()))
    if served:
        alone = _alone(served, said.engine, ", ".join(said.stock)) if said.stock else ()
        return running(True, served, (*refused, *alone, *_slow(served)))
    if refused:
        return running(False, (), refused, "do what these lines say, or run `mla-portable doctor` where the engine runs")
    serves, why, remedy = in_sglang(said.implementations, said.hooks) if said.engine == "SGLang" else in_vllm(said)
    return running(serves, (), (why,), remedy)


def _alone(served: Iterable[Serving], engine: str, whose: str) -> tuple[str, ...]:
    """What to say where the plugin serves the indexer alone. whose: what of the engine computes attention."""
    start = {"vLLM": START_VLLM, "SGLang": START_SGLANG}.get(engine)
    if start is None or any(each.primitive.startswith(_ATTENTION) for each in served):
        return ()
    return (f"the plugin serves the indexer alone; attention is computed by {whose} of {engine}: {start}",)


def _lines(where: str, seconds: float) -> Iterator[str]:
    """The lines of a file; one of more than a mebibyte in pieces. Raises: OSError, TimeoutError among them.

    A file is read to its end. A pipe or a device may have none, so it has `seconds` until then.
    """
    descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody writes to opens at once
    with _Timed(descriptor, time.monotonic() + seconds) as raw, io.BufferedReader(raw, _LONGEST_LINE) as file:
        os.set_blocking(descriptor, True)
        try:
            while part := file.readline(_LONGEST_LINE):
                yield from part.decode("utf-8", errors="replace").splitlines()
        except TimeoutError:
            raise TimeoutError(f"it has no end within {seconds:g} s") from None


class _Timed(io.FileIO):
    """A file for reading that ends in TimeoutError after a time of `time.monotonic`, unless it is a regular file."""

    def __init__(self, descriptor: int, end: float) -> None:
        super().__init__(descriptor, "rb")
        self._end = None if stat.S_ISREG(os.fstat(descriptor).st_mode) else end

    def readinto(self, buffer: Any) -> int | None:
        """Read when there is something to read. Raises: TimeoutError."""
        if self._end is not None:
            left = self._end - time.monotonic()
            if left <= 0 or not select.select([self], [], [], left)[0]:
                raise TimeoutError
        return super().readinto(buffer)


def _server(where: str, seconds: float) -> Running:
    url = where.rstrip("/").removesuffix("/v1")
    version, models, metrics, options = _within(seconds, url, lambda: _pages(url, seconds))
    owner, names = _models(models)
    found = _text(_object(version).get("version")) or _text(options.get("version"))
    name = _NAMES.get(owner, owner)
    running = partial(Running, where, " ".join(filter(None, (name, found))), how_tested(name, found), names)
    served, unread = (), ()
    if metrics is not None:
        served, unread = in_metrics(metrics), unread_in_metrics(metrics)
    odd = (f"samples of {METRIC} that cannot be read: {len(unread)}, such as {unread[0][-_SHOWN:]!r}",) if unread else ()
    if served:
        return running(True, served, (*odd, *_alone(served, name, "kernels"), *_slow(served)))
    look = f"`mla-portable doctor {_OPTION} FILE` looks at its log"
    if metrics is None:
        remedy = f"start SGLang with --enable-metrics; or {look}" if owner == "sglang" else look
        return running(None, (), ("the server has no /metrics",), remedy)
    if odd:
        return running(None, (), odd, f"ask the server itself, not a proxy; or {look}")
    if is_of_one_process(metrics):
        why = "its /metrics are those of the process that answers, and layers run in others"
        remedy = f"start it with PROMETHEUS_MULTIPROC_DIR set to an empty folder; or {look}"
        return running(None, (), (why,), remedy)
    why = f"its /metrics are those of all its processes, and none has {METRIC}"
    if owner == "sglang":
        pair = tuple(_text(options.get(f"dsa_{step}_backend")) for step in ("prefill", "decode"))
        _, serving, remedy = in_sglang((pair[0], pair[1]) if all(pair) else None, hooks=None)
        return running(False, (), (f"{serving}; {why}",), f"{remedy}; {look}")
    if owner == "vllm":
        return running(False, (), (f"another backend serves: {why}",), f"{START_VLLM}; {look}, which names the backend")
    return running(False, (), (why,), f"run `mla-portable doctor` where the engine runs; {look}")


def _pages(url: str, seconds: float) -> tuple[str | None, str | None, str | None, dict[str, Any]]:
    """What a server answers at `_PAGES`, and SGLang's options, {} where it does not say them. Raises: typer.BadParameter."""
    version, models, metrics = (_get(url, path, seconds) for path in _PAGES)
    options: dict[str, Any] = {}
    if _models(models)[0] == "sglang":
        with suppress(typer.BadParameter):  # it asks its schedulers, which may not answer
            options = _object(_get(url, _SGLANG_PAGE, seconds / 4))
    return version, models, metrics, options


def _slow(served: Iterable[Serving]) -> tuple[str, ...]:
    """What to say where plain torch serves."""
    plain = sorted({each.primitive for each in served if each.implementation.startswith("reference.")})
    why = "`mla-portable doctor`, where the engine runs, says why nothing else does"
    return (f"plain torch (reference.torch) serves {', '.join(plain)}, which is slow: {why}",) if plain else ()


def _within(seconds: float, url: str, work: Callable[[], _T]) -> _T:
    """The result of work that asks a server. Raises: what `work` raises; typer.BadParameter where it takes longer.

    The limit of a socket is for each piece that it receives, so a server that drips can hold it for ever. The thread that waits
    for such a server ends with the process.
    """
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised again where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(seconds)
    except OutOfTime:
        raise _no_answer(url, f"no whole answer within {seconds:g} s") from None


def _get(url: str, path: str, seconds: float) -> str | None:
    """The text of an answer; None where the server has no such page, or keeps it from us. Raises: typer.BadParameter."""
    try:
        with urlopen(url + path, timeout=seconds) as answer:
            room = bytearray(_MOST_BYTES + 1)
            size = answer.readinto(room)  # read(n) has no bound where a chunk's size is negative
            if size > _MOST_BYTES:
                raise _no_answer(url + path, f"an answer of more than {_MOST_BYTES >> 20} MiB")
            if answer.length:
                raise _no_answer(url + path, f"an answer that ends {answer.length} bytes too early")
            return room[:size].decode("utf-8", errors="replace")
    except HTTPError:
        return None
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise _no_answer(url, str(error)) from error


def _no_answer(url: str, why: str) -> typer.BadParameter:
    expected = f"the URL of a server that answers, such as http://localhost:8000 (got {url}: {why})"
    return typer.BadParameter(f"must be {expected}", param_hint=_OPTION)


def _object(text: str | None) -> dict[str, Any]:
    """The JSON object in a text, {} where there is none."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str:
    """A text of a server's JSON as it is shown: "" where it is none, its beginning where it is long."""
    return value[:_SHOWN] if isinstance(value, str) else ""


def _models(text: str | None) -> tuple[str, tuple[str, ...]]:
    """Whose server it is, and the names of its models, as /v1/models says."""
    listed = _object(text).get("data")
    models = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    owner = next(filter(None, (_text(each.get("owned_by")) for each in models)), "")
    return owner, tuple(filter(None, (_text(each.get("id")) for each in models)))
