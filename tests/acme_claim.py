# SPDX-License-Identifier: Apache-2.0
"""A claim of an invented vendor: one implementation of sparse_decode."""

from __future__ import annotations

from typing import Any

from mla_portable.tools.matrix.claims import Claim


def acme_claim(**values: Any) -> Claim:
    """values: the fields that a test is about; sources, targets, support and devices are always among them."""
    fields: dict[str, Any] = {
        "implementation": "acme.v1",
        "primitive": "sparse_decode",
        "plugin": "acme",
        "module": "acme",
        "distribution": "acme",
        "version": "1",
        "preference": 10.0,
        "core": False,
    }
    return Claim(**(fields | values))
