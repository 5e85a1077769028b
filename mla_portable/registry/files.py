# SPDX-License-Identifier: Apache-2.0
"""Small text files of a user's: the policy, the tuning table."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

MOST_BYTES: Final = 1 << 20
"""Of a table of tuned configurations, some hundreds of bytes each."""


def named_path(text: str) -> Path:
    """The path that a variable names; "~" is the user's home directory, where there is one."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def read_text_file(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a regular file, UTF-8 with or without a byte-order mark.

    Raises: OSError when it cannot be read, or is a directory, FIFO or device; ValueError when it has more than `most_bytes`, is
        not UTF-8, or the path holds a NUL.
    """
    status = path.stat()  # before it is opened: opening a FIFO waits for a writer
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"'{path}' is not a regular file")
    if status.st_size > most_bytes:
        raise ValueError(f"'{path}' has {status.st_size} bytes, more than {most_bytes}")
    return path.read_text(encoding="utf-8-sig")
