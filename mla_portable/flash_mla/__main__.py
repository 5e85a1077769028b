# SPDX-License-Identifier: Apache-2.0
"""`python -m mla_portable.flash_mla SCRIPT [ARGS]`: run an unchanged program in which `flash_mla` is this package.

The processes that it starts find it too. `flash_mla_sparse_fwd` computes `max_logits` there, which a program may read, unless
MLA_PORTABLE_FLASH_MLA_MAX_LOGITS says otherwise. `-m MODULE [ARGS]` runs a module, `--force` hides a FlashMLA that is there.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Final

from mla_portable.errors import InvalidArgument
from mla_portable.flash_mla.installing import ON_PATH, install
from mla_portable.flash_mla.statistics import MAX_LOGITS

_USAGE: Final = """\
usage: python -m mla_portable.flash_mla [--force] SCRIPT [ARGS ...]
       python -m mla_portable.flash_mla [--force] -m MODULE [ARGS ...]

Run a program that imports flash_mla with mla_portable in its place, also in the processes that it starts.

  --force   also where another flash_mla is installed, which is then hidden
"""


def main(arguments: list[str]) -> int:
    """Run the program that `arguments` name. Returns: the exit code of a wrong command line; a program exits by itself."""
    rest, force = list(arguments), False
    if rest[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    if rest[:1] == ["--force"]:
        rest, force = rest[1:], True
    as_module = rest[:1] == ["-m"]
    if as_module or rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest or (rest[0].startswith("-") and not as_module):
        what = "a module after -m" if as_module else f"a script (got {rest[0]})" if rest else "a script or -m MODULE"
        return _refused(f"expected {what}\n\n{_USAGE}")
    if not as_module and not Path(rest[0]).exists():
        return _refused(f"there is no {rest[0]}")
    os.environ.setdefault(MAX_LOGITS.name, "on")
    try:
        install(force)
    except InvalidArgument as error:
        return _refused(f"{error} Here: --force.")
    sys.argv = rest
    if not as_module:
        sys.path[0] = str(Path(rest[0]).resolve().parent)
    _reach_child_processes()
    if as_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(rest[0], run_name="__main__")
    return 0


def _reach_child_processes() -> None:
    """Let `flash_mla` be found in them: those of multiprocessing take over `sys.path`, others the environment."""
    sys.path.insert(1, str(ON_PATH))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ON_PATH), *([others] if others else [])])


def _refused(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
