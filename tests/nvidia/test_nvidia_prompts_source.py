# SPDX-License-Identifier: Apache-2.0
"""The source of masked_prefill on a CPU: the suite's cases, and how work is cut into pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simulated_gpu
import torch
from masked_model import EmulatedMasked, stand_in_for_device
from native_model import stand_ins
from simulated_gpu import conforms, registry
from source_on_cpu import COMPILER

from mla_portable.judge.conformance.runner import run_case
from mla_portable.judge.problems import masked_prefill as problems
from mla_portable.judge.problems.base import Case
from mla_portable.judge.problems.masked_prefill import MaskedPrefillParams
from mla_portable.primitives import MASKED_PREFILL
from mla_portable_nvidia.native import masked_prefill as masked

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SMALL = replace(simulated_gpu.FACTS["sm90"], num_sms=3)


@pytest.fixture
def emulated(monkeypatch):
    """The models of the builds that are loaded, on a device of three multiprocessors."""
    with stand_ins(monkeypatch, EmulatedMasked, arch="sm_90a") as models:
        stand_in_for_device(monkeypatch)
        yield models


def passes(params: MaskedPrefillParams) -> None:
    request = params.request(SMALL)
    result = run_case(Case("nvidia.native", params, request), masked.bind_masked_prefill(request), torch.device("cpu"))
    assert result.status == "passed", result.message


def test_the_source_conforms(emulated, monkeypatch):
    """The suite at level quick, on both builds."""
    monkeypatch.setitem(simulated_gpu.FACTS, "sm90", SMALL)
    (made,) = masked.masked_prefill_implementations()
    offered = [replace(made, support=replace(made.support, device_types=("cpu",)), check=lambda facts: ())]
    conforms(registry(offered=offered, probe=False), made.name, "quick", MASKED_PREFILL)
    assert set(emulated) == set(masked.BUILDS.values())
    assert {model["causal"] for each in emulated.values() for model in each.launches} == {0, 1}


@pytest.mark.parametrize("selected", ["none", "few"])
def test_several_tiles_of_wide_heads(emulated, selected):
    """The suite has them on a GPU alone."""
    passes(MaskedPrefillParams(heads=1, qk_head_dim=256, v_head_dim=256, batch="long", selected=selected, apart=True))


RAGGED = (130, 3, 257), (140, 64, 300)
MANY = tuple(0 if i % 3 else i % 7 for i in range(70)), tuple(i % 5 * 9 for i in range(70))
"""Queries and keys of each request."""


@pytest.mark.parametrize("heads_of_a_group", [1, 2])
def test_ragged_requests_are_cut_into_groups_of_heads(emulated, monkeypatch, heads_of_a_group):
    monkeypatch.setattr(masked, "_GROUP_BYTES", 140 * 640 * heads_of_a_group)
    monkeypatch.setitem(problems.BATCHES, "ragged", RAGGED)
    passes(MaskedPrefillParams(heads=3, qk_head_dim=192, v_head_dim=128))


@pytest.mark.parametrize("chunks", [1024, 1])
def test_more_requests_than_a_warp_has_lanes(emulated, monkeypatch, chunks):
    """Counted in chunks of 32 requests; where these are too many, their empty pieces are numbered too."""
    monkeypatch.setattr(EmulatedMasked, "chunks", chunks)
    monkeypatch.setitem(problems.BATCHES, "ragged", MANY)
    passes(MaskedPrefillParams(heads=2, qk_head_dim=192, v_head_dim=128, selected="half"))
