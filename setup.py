# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: a wheel carries profiles, evidence and table of capability/ as package data."""

from pathlib import Path
from shutil import copy, copytree, rmtree

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecords(build_py):
    """`build_py`, then a copy of the records; an editable installation reads those of its checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "mla_portable" / "tools" / "matrix" / "capability"
            rmtree(target, ignore_errors=True)  # of an earlier build
            for part in ("profiles", "evidence"):
                copytree(Path(__file__).parent / "capability" / part, target / part)
            copy(Path(__file__).parent / "capability" / "matrix.json", target)


setup(cmdclass={"build_py": BuildWithRecords})
