# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's interface: its generations found and calibrated, and the adapters that give them this project's one meaning.

A vendor's plugin calls `decode` and `prefill`.
"""

from mla_portable_common.flash_mla.vendors import decode, prefill

__all__ = ["decode", "prefill"]
