# SPDX-License-Identifier: Apache-2.0
"""The process of a command: streams that are closed, full or gone, signals that end it, errors that nothing else has handled.

Imports neither torch nor the command line's own dependencies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, TextIO

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
_AGAIN: Final = 1.0
"""Seconds after a signal within which others count as the same one: `timeout` sends each twice."""
_WRITE_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE})
"""Of a stream that was opened for writing; unlike errors of `open` they carry no file name."""


def open_streams() -> None:
    """Give the process the standard streams that it was started without, so that no file of its own takes their place.

    Raises: SystemExit where there is no stdout, because results would be lost.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    stderr: TextIO | None = sys.stderr
    stdout: TextIO | None = sys.stdout
    if stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  it stays open
    if stdout is None:
        raise SystemExit("mla-portable: stdout is closed, and results are written there")


def guarded(work: Callable[[], None]) -> None:
    """Run a command to its end.

    Raises: SystemExit with 1 after an error. Stderr has a line about a stream that cannot be written to, and the traceback of
        any other, with control characters as escapes: text of a plugin's may be in it. The command's own SystemExit,
        KeyboardInterrupt.
    """
    try:
        work()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of an extension module is no Exception
        if isinstance(error, OSError) and error.errno in _WRITE_ERRORS and error.filename is None:
            message = f"mla-portable: write error: {error.strerror}"
        else:
            from mla_portable.errors import printable

            message = printable(traceback.format_exc())
        with contextlib.suppress(OSError):  # stderr may be what cannot be written to
            sys.stderr.write(f"{message.rstrip()}\n")
            sys.stderr.flush()
        raise SystemExit(1) from None
    finally:
        close_stdout()


class _Signals:
    """Signals that ask the process to end.

    Attributes:
        first: the number of the first one that came, 0 before. since: when, by the monotonic clock. held: `undisturbed` blocks
            that the main thread is in.
    """

    def __init__(self) -> None:
        self.first, self.since, self.held = 0, 0.0, 0

    def handle(self, number: int, frame: object) -> None:
        if not self.first:
            self.first, self.since = number, time.monotonic()
            if not self.held:
                raise KeyboardInterrupt
        elif time.monotonic() - self.since > _AGAIN:
            os._exit(128 + number)


_signals = _Signals()


@contextlib.contextmanager
def ended_by_signals() -> Generator[None]:
    """Let SIGINT and SIGTERM end this block in order: what ran is kept, workers are ended.

    Such a signal raises a KeyboardInterrupt in the main thread, or behind its `undisturbed` block. Another one, more than a
    second later, ends the process at once. Signals that the process was started to ignore, or handles, are left alone.

    Raises: SystemExit with 128 + the number of the signal that came (130 for SIGINT, 143 for SIGTERM), whatever was made of
        the KeyboardInterrupt; stderr has a line about it.
    """
    global _signals
    _signals = _Signals()
    kept: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        found = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        kept = {each: it for each, it in found.items() if it in (signal.SIG_DFL, signal.default_int_handler)}
    try:
        for number in kept:
            signal.signal(number, _signals.handle)
        yield
    except BaseException:
        if not _signals.first:
            raise
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if _signals.first:
        with contextlib.suppress(OSError):  # stderr may be gone
            sys.stderr.write(f"mla-portable: interrupted by {signal.Signals(_signals.first).name}\n")
            sys.stderr.flush()
        raise SystemExit(128 + _signals.first)


@contextlib.contextmanager
def undisturbed() -> Generator[None]:
    """Let a signal that comes in this block interrupt the command behind it: what is written here is written as a whole."""
    came = _signals.first
    _signals.held += 1
    try:
        yield
    finally:
        _signals.held -= 1
    if _signals.first and not (came or _signals.held):
        raise KeyboardInterrupt


def close_stdout() -> None:
    """Send to stderr what writes to stdout from here to the end of the process, such as a plugin's exit handler."""
    target = 2
    try:
        sys.stdout.flush()
    except OSError:  # its reader has gone, or its device is full; Python would try again
        target = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):  # the process has no stderr
        os.dup2(target, 1)
