# SPDX-License-Identifier: Apache-2.0
"""Errors of a plugin's code: which must reach the user instead of counting against an implementation, and their text.

A plugin's code may raise what is no Exception: SystemExit, KeyboardInterrupt, the panics of extension modules. `contained`
makes a PluginRaised of it, so every error of a plugin's is an Exception. Any other BaseException that passes through here was
raised in the user's own thread, by Ctrl-C or a signal handler, and ends what the user does.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import torch

from mla_portable.accelerator import is_device_error
from mla_portable.contracts import DRIVER_FAULTS, PluginError
from mla_portable.errors import printable

T = TypeVar("T")

_REFUSED_LAUNCHES: Final = (
    "no kernel image is available",
    "invalid device function",
    "invalid configuration argument",
    "too many resources requested",
    "operation not supported",
    "invalid argument",
)
_DRIVER_ERROR: Final = re.compile(r"CUDA driver error (\d+)")


class PluginRaised(PluginError):
    """Code of a plugin raised what is no Exception, the cause of this error: its type and the first line of its message."""


def contained(work: Callable[[], T]) -> T:
    """Run code of a plugin: what it raises is an Exception.

    A KeyboardInterrupt in the main thread is the user's. Signals reach no other thread, so elsewhere it is the plugin's own.
    Raises: PluginRaised for what is no Exception; every Exception as it is.
    """
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise PluginRaised(first_line(error)) from error


def is_fatal(error: Exception, device_type: str) -> bool:
    """Whether an error of a plugin's code must reach the user.

    Out of memory (the next candidate would fail too, or later), and a fault that leaves the device unusable.
    A library that exits the process is at fault itself. On a CPU the text of an error is no sign of a device fault.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = text_of(error)
    if "can't allocate memory" in message:  # torch's CPU allocator, a RuntimeError
        return True
    if isinstance(error, RuntimeError) and device_type != "cpu":
        code = _DRIVER_ERROR.search(message)
        if code is not None:
            return int(code[1]) in DRIVER_FAULTS
    if is_device_error(error, device_type):
        return not any(text in message for text in _REFUSED_LAUNCHES)
    return False


def blame(error: BaseException, text: str) -> None:
    """Add a line to the message of a fatal error that says whose code raised it; its type stays as it is.

    Python 3.10 has no `add_note`, and a caller that logs `str(error)` would not see a note. Interrupts are left alone.
    """
    if not isinstance(error, (MemoryError, RuntimeError)):
        return
    message, rest = (text_of(error.args[0]), error.args[1:]) if error.args else ("", ())
    if text not in message:
        error.args = (f"{message}\n{text}" if message else text, *rest)


def text_of(value: object) -> str:
    """`str` of an error, or of its argument: code of a plugin's too. Where that raises, a text that says so."""
    try:
        return contained(partial(str, value))
    except Exception as failure:
        return f"(its text cannot be read: {type(failure.__cause__ or failure).__name__})"


def first_line(error: BaseException) -> str:
    """`error` in one line for a log or terminal: its type and the first line of its message."""
    lines = text_of(error).strip().splitlines()
    message = printable(lines[0]) if lines else ""
    if isinstance(error, PluginRaised):  # its message begins with the type that the plugin raised
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
