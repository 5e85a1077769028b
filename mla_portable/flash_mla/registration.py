# SPDX-License-Identifier: Apache-2.0
"""What these functions declare to the registry: their variable."""

from mla_portable.contracts import Registrar, hookimpl
from mla_portable.flash_mla.statistics import MAX_LOGITS


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Declare what is read here."""
    registrar.add_variable(MAX_LOGITS)
