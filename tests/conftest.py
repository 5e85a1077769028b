# SPDX-License-Identifier: Apache-2.0
"""What every test needs: on a machine without a GPU, Triton's kernels run in its interpreter.

Triton decides that when a kernel is decorated, so the variable must be set before anything imports triton. Tests run side by
side, a process for each core: torch gets one thread in each, for threads that wait for a core stall it past time limits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and commands fold their tables at it

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def fresh_accelerators() -> None:
    """A test that pretends a device patches torch's module of it, whose functions an accelerator looks up once."""
    from mla_portable.accelerator import accelerator

    accelerator.cache_clear()


@pytest.fixture
def a_bare_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU and no policy of whoever runs the tests, so that defaults are the same everywhere."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name in [name for name in os.environ if name.startswith("MLA_PORTABLE_")]:
        monkeypatch.delenv(name)
    yield
