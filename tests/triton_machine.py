# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that launch Triton's kernels: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_portable.contracts import DeviceFacts
from mla_portable.judge.conformance.poison import poisoned
from mla_portable_triton.support import interpreter_is_on

__all__ = ["device", "facts", "memory_is_poisoned"]


@pytest.fixture(autouse=True)
def memory_is_poisoned() -> Iterator[None]:
    with poisoned():
        yield


@pytest.fixture(scope="module")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if not interpreter_is_on():
        pytest.fail("no GPU, and Triton's interpreter is off: set TRITON_INTERPRET=1 before triton is imported")
    return torch.device("cpu")


@pytest.fixture(scope="module")
def facts(device: torch.device) -> DeviceFacts:
    """What the kernels are bound for; with no multiprocessor counted, rows are never split unless a test says so."""
    if device.type == "cpu":
        return DeviceFacts(vendor="cpu", name="cpu", arch="cpu", device_type="cpu")
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        vendor="nvidia",
        name=properties.name,
        arch=f"sm{major}{minor}",
        shared_memory=properties.shared_memory_per_block_optin,
        has_fp8_conversion=(major, minor) >= (8, 9),
    )
