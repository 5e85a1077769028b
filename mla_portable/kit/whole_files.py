# SPDX-License-Identifier: Apache-2.0
"""Files that are written as a whole: whoever reads one sees what was there before or all of what is there now."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

UNFINISHED: Final = ".part"
"""How the name of a file ends that is being written, or that a killed process has left."""


def replace_file(path: Path, data: bytes) -> None:
    """Write a file beside `path` and rename it: a full disk, an interrupt or a kill leaves `path` as it was.

    The folder has to be there. Whoever may read the folder may read the file. Raises: OSError.
    """
    path = Path(os.path.realpath(path))  # what a link leads to is replaced, not the link
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED, delete=False) as file:
        made = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            made.chmod(0o644)
            made.replace(path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
