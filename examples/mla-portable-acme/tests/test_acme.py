# SPDX-License-Identifier: Apache-2.0
"""The plugin's claims: each case of the conformance suite that follows from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_portable.choose import Registry
from mla_portable.contracts import Primitive
from mla_portable.judge.conformance import run_suite
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("primitive", [SPARSE_DECODE, SPARSE_PREFILL], ids=str)
def test_every_claim_holds(primitive: Primitive[Any]) -> None:
    """Level quick takes seconds here; on a device, `mla-portable conform acme --level full` before a release."""
    report = run_suite(Registry(environ={}), "acme", device=DEVICE, level="smoke", primitives=[primitive])
    assert report.results and not [str(result) for result in report.results if result.status != "passed"]
