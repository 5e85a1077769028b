# SPDX-License-Identifier: Apache-2.0
"""Which errors of a plugin's code must reach the user instead of counting against an implementation."""

from __future__ import annotations

import re
from typing import Final

import torch

from mla_portable.accelerator import is_device_error
from mla_portable.contracts import DRIVER_FAULTS

_REFUSED_LAUNCHES: Final = (
    "no kernel image is available",
    "invalid device function",
    "invalid configuration argument",
    "too many resources requested",
    "operation not supported",
    "invalid argument",
)
_DRIVER_ERROR: Final = re.compile(r"CUDA driver error (\d+)")


def is_fatal(error: BaseException, device_type: str) -> bool:
    """Whether an error must reach the user.

    Out of memory (the next candidate would fail too, or later), a fault that leaves the device unusable, and an interrupt.
    A library that exits the process is at fault itself. On a CPU the text of an error is no sign of a device fault.
    """
    if not isinstance(error, (Exception, SystemExit)) or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error)
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
    message, rest = (str(error.args[0]), error.args[1:]) if error.args else ("", ())
    if text not in message:
        error.args = (f"{message}\n{text}" if message else text, *rest)


def first_line(error: BaseException) -> str:
    """`error` in one line: its type and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
