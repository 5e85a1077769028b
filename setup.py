# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: a wheel carries profiles, matrix and CI's list of capability/ as package data, no run."""

from pathlib import Path
from shutil import copy, copytree, rmtree

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecords(build_py):
    """`build_py`, then a copy of the records; an editable installation reads those of its checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            records = Path(__file__).parent / "capability"
            target = Path(self.build_lib) / "mla_portable" / "capability" / "data"
            rmtree(target, ignore_errors=True)  # of an earlier build
            copytree(records / "profiles", target / "profiles")
            for name in ("matrix.json", "ci.json"):
                copy(records / name, target)


setup(cmdclass={"build_py": BuildWithRecords})
