# SPDX-License-Identifier: Apache-2.0
"""Poisoned memory: inside the context every fresh torch allocation holds NaN, or the largest integer.

What an implementation forgot to write then shows in its result instead of looking like a zero by luck.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def poisoned() -> Generator[None]:
    """Fill what `torch.empty` returns; restores torch's settings on the way out. Not thread-safe, as they are global."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # its one attribute is a property that type stubs lack
    fill = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        # the mode is wanted for its fill; that some torch operator has no deterministic form is not the point here
        warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = fill
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
