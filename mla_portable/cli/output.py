# SPDX-License-Identifier: Apache-2.0
"""What a command prints: tables or one JSON document on stdout, everything else on stderr; how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from math import floor, log10
from typing import Any, TextIO, cast

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from mla_portable.cli.process import undisturbed
from mla_portable.errors import printable

EXIT_OK = 0
EXIT_FAILED = 1
"""Something is broken, wrong or cannot be served."""
EXIT_USAGE = 2
"""Invalid arguments."""

_PIPE_WIDTH = 200
"""Columns where stdout is no terminal and COLUMNS is not set: a table in a log should not be folded at 80."""
Advance = Callable[[str, int, int], None]
"""Progress of long work: (what is being done, steps done, steps in all)."""


class Output:
    """Where a command writes.

    Attributes:
        as_json: one JSON document on stdout instead of tables. stdout, stderr: rich consoles; use stdout for results only.
    """

    def __init__(self, *, as_json: bool, stream: TextIO) -> None:
        self.as_json = as_json
        self._stream = stream
        self.stdout = _console(stream)
        self.stderr = _console(sys.stderr)
        self._status: Status | None = None

    def document(self, value: object) -> None:
        """Print the JSON document; once per command."""
        self.text(json.dumps(plain(value), indent=2, allow_nan=False) + "\n")

    def text(self, value: str) -> None:
        """Write a result as it is. Raises: typer.Exit where it cannot be written; without a word if its reader has gone."""
        self.rest()
        try:
            with undisturbed():
                self._stream.write(value)
                self._stream.flush()
        except BrokenPipeError:
            raise typer.Exit(EXIT_FAILED) from None
        except OSError as error:
            self.note(f"mla-portable: write error: {error.strerror}")
            raise typer.Exit(EXIT_FAILED) from None

    def show(self, *renderables: RenderableType) -> None:
        """Print results for a person; a plain string without markup, with control characters as escapes."""
        self.rest()
        for renderable in renderables:
            self.stdout.print(Text(printable(renderable)) if isinstance(renderable, str) else renderable)

    def note(self, message: str) -> None:
        """A line for a person on stderr."""
        self.stderr.print(Text(printable(message)), soft_wrap=True)

    def busy(self, doing: str) -> None:
        """Say on stderr that something is going on, until something is printed; nothing where stderr is no terminal."""
        self.rest()
        if self.stderr.is_terminal:
            self._status = self.stderr.status(Text(printable(doing)))
            self._status.start()

    def rest(self) -> None:
        """End what `busy` shows."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    @contextlib.contextmanager
    def progress(self) -> Generator[Advance]:
        """A bar on stderr while long work runs; nothing where stderr is no terminal."""
        self.rest()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.stderr, transient=True, disable=not self.stderr.is_terminal) as bar:
            task = bar.add_task("", total=None)

            def advance(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)

            yield advance


@contextlib.contextmanager
def command(*, as_json: bool, doing: str = "loading torch and plugins") -> Generator[Output]:
    """The frame of every command: keeps stdout for results. Until there is one, a terminal sees what it is `doing`.

    Whatever else writes to stdout, from Python or through file descriptor 1, goes to stderr. Imports no torch. What a command
    raises goes to `failures.Commands`.
    """
    with _results_alone(redirect=as_json) as stream:
        output = Output(as_json=as_json, stream=stream)
        output.busy(doing)
        try:
            yield output
        finally:
            output.rest()


@contextlib.contextmanager
def _results_alone(*, redirect: bool) -> Generator[TextIO]:
    """A stream to the real stdout, while `sys.stdout` and, with `redirect`, file descriptor 1 lead to stderr.

    Where `sys.stdout` is not the process's own, as in a test, the stream is `sys.stdout`.
    """
    ours = sys.stdout
    if not redirect:
        with contextlib.redirect_stdout(sys.stderr):
            yield ours
        return
    ours.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 1)
        # what a C library has buffered must not reach fd 1 after it is stdout again
        stack.callback(ctypes.CDLL(None).fflush, None)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if ours is not sys.__stdout__:
            yield ours
            return
        stream = os.fdopen(os.dup(kept), "w", encoding="utf-8")
        try:
            yield stream
        finally:
            with contextlib.suppress(OSError):  # the error that writing met already
                stream.close()


def hanging(label: str, text: str) -> RenderableType:
    """A label and a text whose further lines stand below its first, with control characters as escapes."""
    result = Table.grid(padding=(0, 2, 0, 0))
    result.add_row(Text(f"{label:<6}", "dim"), Text(printable(text)))
    return Padding.indent(result, 2)


def columns(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = ()) -> RenderableType:
    """Plain strings in columns without lines, with control characters as escapes.

    What is too wide is folded in the last column, or, where that is one of the `numbers`, which are aligned to the right, in
    any other.
    """
    result = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    folded = [each for each in headings if each not in numbers] if headings[-1] in numbers else headings[-1:]
    for heading in headings:
        side = "right" if heading in numbers else "left"
        result.add_column(Text(heading), justify=side, overflow="fold", no_wrap=heading not in folded)
    for row in rows:
        result.add_row(*(Text(printable(cell)) for cell in row))
    return Padding.indent(result, 2)


def digits(value: float) -> str:
    """Three digits; more where the whole part has more, none beyond the third decimal."""
    return f"{value:.{max(0, min(3, 2 - floor(log10(value)) if value > 0 else 0))}f}"


def plain(value: object) -> Any:
    """`value` as JSON can hold it: values become objects, enums their text, infinities and NaN the strings "inf", "nan"."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in cast(Sequence[Any], value)]
    return str(value)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() or os.environ.get("COLUMNS") else _PIPE_WIDTH)
