# SPDX-License-Identifier: Apache-2.0
"""What the adapter declares to the registry: its variables, and the status that `doctor` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_portable.contracts import Engine, EngineStatus, Registrar, hookimpl
from mla_portable.engines.sglang.settings import VARIABLES

if TYPE_CHECKING:
    import torch

    from mla_portable.choose import Registry


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Declare what this adapter reads and says."""
    for variable in VARIABLES.values():
        registrar.add_variable(variable)
    registrar.add_engine(Engine("SGLang", _status))


def _status(registry: Registry, device: torch.device) -> EngineStatus:
    from mla_portable.engines.sglang.status import sglang_status

    return sglang_status(registry, device)
