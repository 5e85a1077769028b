# SPDX-License-Identifier: Apache-2.0
"""Running a command of the command line in this process, or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from spoiled import registry_with
from typer.testing import CliRunner

from mla_portable.choose import Registry
from mla_portable.cli.app import app
from mla_portable.contracts import Reason
from mla_portable.dispatch import serving

RUNNER = CliRunner()


def invoke(*arguments: str, registry: Registry | None = None, code: int = 0):
    with serving(registry or registry_with()):
        done = RUNNER.invoke(app, list(arguments))
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def document(*arguments: str, registry: Registry | None = None, code: int = 0) -> dict:
    return json.loads(invoke(*arguments, "--json", registry=registry, code=code).stdout)


def in_a_process(*arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mla_portable", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def missing_library(device):
    return [Reason("library", "missing", "spoiled_kernels", "pip install spoiled-kernels")]
