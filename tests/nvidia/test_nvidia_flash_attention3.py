# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 behind sparse_decode and sparse_prefill: the suite on a strict stand-in, its promises, its splits."""

from __future__ import annotations

import pytest
from fa3_standins import SCHEMAS, installed
from simulated_gpu import StandInPlugin

from mla_portable.contracts import Registrar, hookimpl
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.registry import Registry
from mla_portable.tools.conformance import run_suite
from mla_portable_nvidia.flash_attention3 import fa3_implementations

NAME = "nvidia.flash_attention3"


class Plugin(StandInPlugin):
    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add_detector(self.detect)
        for implementation in fa3_implementations(device_types=("cpu",)):
            registrar.add(implementation)


def suite(level: str) -> None:
    machine = Registry(plugins=[("reference", "mla_portable.reference"), ("nvidia", Plugin())], environ={})
    report = run_suite(machine, NAME, device="cpu", level=level)
    wrong = [f"{r.case.id}: {r.status}: {r.message}" for r in report.results if r.status != "passed"]
    assert report.ok and not wrong, "\n".join(wrong)
    assert {r.case.primitive for r in report.results} == {SPARSE_DECODE, SPARSE_PREFILL}


@pytest.mark.parametrize("package", SCHEMAS)
def test_every_package_conforms(package: str):
    with installed(package) as library:
        suite("smoke")
        assert library.calls


def test_the_quick_level_passes_whatever_the_lse_of_an_empty_row_is():
    with installed(empty=float("inf")):
        suite("quick")
