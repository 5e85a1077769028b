# SPDX-License-Identifier: Apache-2.0
"""The process of a command: standard streams that are closed, full or gone, and errors that nothing else has handled.

Imports neither torch nor the command line's own dependencies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

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


def close_stdout() -> None:
    """Send to stderr what writes to stdout from here to the end of the process, such as a plugin's exit handler."""
    target = 2
    try:
        sys.stdout.flush()
    except OSError:  # its reader has gone, or its device is full; Python would try again
        target = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):  # the process has no stderr
        os.dup2(target, 1)
