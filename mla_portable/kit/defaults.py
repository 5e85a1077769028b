# SPDX-License-Identifier: Apache-2.0
"""torch's own defaults, for code that must not depend on the caller's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch

from mla_portable.accelerator import known_types, without_autocast


@contextmanager
def neutral_defaults() -> Generator[None, None, None]:
    """Restore torch's own default device (CPU) and dtype (float32), and leave inference mode and autocast, in a `with` block.

    Engines and test suites set `torch.set_default_device`, `torch.set_default_dtype`, inference mode or autocast around what
    they call. Probes, checks, `bind` and every allocation that outlives a step run inside this block. The default dtype is one
    value for the whole process, so other threads see float32 for as long as the block lasts; the rest belongs to the thread.
    `torch.use_deterministic_algorithms` stays as it is: an implementation that it forbids could not serve either.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False), ExitStack() as stack:
            for device_type in known_types():
                stack.enter_context(without_autocast(device_type))
            yield
    finally:
        torch.set_default_dtype(before)
