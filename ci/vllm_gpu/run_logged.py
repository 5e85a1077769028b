# SPDX-License-Identifier: Apache-2.0
"""A process of a kit: its output goes to a file, its time is limited, and nothing that it started outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def run_logged(command: Sequence[str], log: Path, environ: Mapping[str, str], seconds: float) -> str:
    """How the process ended: "exit 0", or "ran out of time" where it was ended after so many seconds.

    log: written. environ: all of the process's variables.
    """
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
        status = "ran out of time"
        with suppress(subprocess.TimeoutExpired):
            status = f"exit {process.wait(seconds)}"
        with suppress(ProcessLookupError):  # the workers that it leaves behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status
