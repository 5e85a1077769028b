# SPDX-License-Identifier: Apache-2.0
"""What serves on which device of AMD: AITER where it has kernels and is here, portable Triton elsewhere, with the reasons."""

from __future__ import annotations

import functools
from dataclasses import replace

import aiter_ops
import pytest
from aiter_machine import DEVICES, MACHINES, installed, registry
from machines import H200

import mla_portable_amd
import mla_portable_triton
from mla_portable.choose import Registry
from mla_portable.contracts import Primitive, Request
from mla_portable_amd import PROVIDERS

MI300X, MI355X, RX7900XTX = (DEVICES[slug] for slug in ("mi300x", "mi355x", "rx7900xtx"))
MI250X = replace(MI300X, name="AMD Instinct MI250X", arch="gfx90a", num_sms=110)
CASES = {
    "sparse_decode": {"kv_layout": "bf16", "num_heads": 16, "topk": 2048, "block_size": 64, "query_len": 1},
    "sparse_prefill": {"kv_layout": "bf16", "num_heads": 128, "topk": 2048},
    "cache_write": {"kv_layout": "bf16", "block_size": 64},
    "topk_select": {"topk": 2048},
    "indexer_logits": {"kv_layout": "index_fp8", "num_heads": 64, "block_size": 1},
    "indexer_logits_ragged": {"kv_layout": "index_fp8", "num_heads": 64},
    "indexer_cache_write": {"kv_layout": "index_fp8", "block_size": 64, "scale_format": "pow2"},
}
OF_GFX950 = {"indexer_logits", "indexer_cache_write"}


def decided(device, primitive: str, **changes):
    """The choice on a device that is not here: AITER is looked for, no kernel runs."""
    plugins = [("triton", mla_portable_triton), ("amd", mla_portable_amd)]
    machine = Registry(plugins=plugins, environ={}, probe=False, facts={"cuda": device})
    request = Request(Primitive.named(primitive), device, **{**CASES[primitive], **changes})
    return machine.decide(request, thorough=True)


def ours(decision):
    return [each for each in decision.verdicts if each.implementation.startswith("amd.")]


@pytest.mark.parametrize("primitive", CASES)
@pytest.mark.parametrize("device", [MI300X, MI355X, RX7900XTX, MI250X], ids=lambda each: each.arch)
def test_aiter_serves_where_it_has_a_kernel_and_triton_elsewhere(device, primitive):
    with installed(device.arch):
        chosen = decided(device, primitive).chosen
    has = device.arch == "gfx950" or (device.arch == "gfx942" and primitive not in OF_GFX950)
    assert (chosen or "none").startswith("amd." if has else "triton."), chosen


@pytest.mark.parametrize(
    ("device", "layout", "block_size"),
    [
        *((MI300X, layout, size) for layout, size in (("amd.index_fnuz", 1), ("amd.index_fnuz_tiles", 16))),
        (MI355X, "amd.index_tiles", 16),
    ],
)
@pytest.mark.parametrize("primitive", sorted(OF_GFX950))
def test_pages_of_aiter_are_served_where_they_are_named(device, layout, block_size, primitive):
    """Triton reads none of them: without AITER, or on the other architecture, nothing but plain torch could."""
    other = MI355X if device is MI300X else MI300X
    with installed(device.arch):
        asked = {"kv_layout": layout, "block_size": block_size}
        assert decided(device, primitive, **asked).chosen.startswith("amd.")
        assert decided(other, primitive, **asked).chosen is None


@pytest.mark.parametrize(("device", "layout"), [(MI300X, "amd.fp8_fnuz"), (MI355X, "amd.fp8")], ids=lambda each: str(each))
@pytest.mark.parametrize("primitive", ["sparse_decode", "sparse_prefill"])
def test_attention_over_e4m3_rows_is_for_those_who_name_it(device, layout, primitive):
    """Its products are of 8 bits: the class of low accuracy, which nothing chooses by itself."""
    name = f"amd.mla_{device.arch}_fp8"
    with installed(device.arch):
        assert decided(device, primitive, kv_layout=layout).chosen is None
        plugins = [("amd", mla_portable_amd)]
        machine = Registry(plugins=plugins, environ={}, probe=False, facts={"cuda": device})
        request = Request(Primitive.named(primitive), device, **{**CASES[primitive], "kv_layout": layout})
        assert machine.decide(request, backend=name).chosen == name


@pytest.mark.parametrize("device", [RX7900XTX, MI250X], ids=lambda each: each.arch)
def test_a_device_without_kernels_is_told_so_before_aiter_is_imported(device, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("mla_portable_amd.library.import_module", lambda name: asked.append(name))
    for primitive in CASES:
        verdicts = ours(decided(device, primitive))
        assert verdicts and all("arch" in [reason.subject for reason in each.reasons] for each in verdicts)
    assert not asked


def test_nothing_is_imported_on_another_vendors_device(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("mla_portable_amd.library.import_module", lambda name: asked.append(name))
    for primitive in CASES:
        assert all("vendor" in [reason.subject for reason in each.reasons] for each in ours(decided(H200, primitive)))
    assert not asked


def reasons(primitive: str, arch: str = "gfx950", **operations):
    """Against ours, on a machine that is asked, with the operations of AITER that are given."""
    with installed(arch, **operations):
        return refused(primitive, arch)


def refused(primitive: str, arch: str = "gfx950"):
    decision = registry(arch).decide(Request(Primitive.named(primitive), MACHINES[arch], **CASES[primitive]), thorough=True)
    assert decision.chosen == "reference.torch"
    other = {"arch", "kv_layout", "low accuracy"}
    mine = (each for each in ours(decision) if not other & {reason.subject for reason in each.reasons})
    (verdict,) = mine
    return verdict.reasons


@pytest.mark.parametrize("primitive", CASES)
def test_a_machine_without_aiter_is_told_what_to_install(primitive):
    (reason,) = refused(primitive)
    assert reason.subject == "library" and "No module named 'aiter'" in reason.limit and "install AITER" in reason.remedy


def test_an_import_that_fails_in_another_way_is_a_reason(monkeypatch):
    def broken(name):
        raise RuntimeError("no hipcc")

    monkeypatch.setattr("mla_portable_amd.library.import_module", broken)
    (reason,) = refused("topk_select")
    assert reason.subject == "library" and "RuntimeError: no hipcc" in reason.limit


def test_an_operation_that_is_not_there_is_a_reason():
    (reason,) = reasons("sparse_decode", "gfx942", mla_decode_fwd=None)
    assert "aiter.mla has no mla_decode_fwd" in reason.limit


def older_decode(q, kv_buffer, o, kv_indptr, kv_page_indices, kv_last_page_lens, sm_scale=None):
    """As in March 2025: no qo_indptr."""
    raise AssertionError("called")


def older_topk(logits, rowStarts, rowEnds, indices, values, numRows, stride0, stride1, k=2048):
    """As before August 2026: ties as they come."""
    raise AssertionError("called")


@pytest.mark.parametrize(
    ("primitive", "older"),
    [("sparse_decode", {"mla_decode_fwd": older_decode}), ("topk_select", {"top_k_per_row_prefill": older_topk})],
)
def test_another_calling_convention_is_a_reason_and_not_a_call(primitive, older):
    (reason,) = reasons(primitive, **older)
    assert reason.subject == "calling convention" and "expects" in reason.limit and "August 2026" in reason.remedy


@pytest.mark.parametrize("arch", MACHINES)
def test_the_probe_runs_on_the_stand_in(arch):
    """As on a device: what is chosen has computed a problem of the request's own shape."""
    with installed(arch):
        for primitive, fields in CASES.items():
            if arch == "gfx942" and primitive in OF_GFX950:
                continue
            fewer = {"topk": 64} if "topk" in fields else {}
            chosen = registry(arch).decide(Request(Primitive.named(primitive), MACHINES[arch], **{**fields, **fewer})).chosen
            assert chosen is not None and chosen.startswith("amd."), primitive


def test_the_probe_refuses_a_build_that_computes_something_else():
    def halved(*args, **kwargs):
        returned = aiter_ops.mla_decode_fwd(*args, **kwargs)
        args[2].mul_(0.5)
        return returned

    with installed(mla_decode_fwd=functools.wraps(aiter_ops.mla_decode_fwd)(halved)):
        request = Request(Primitive.named("sparse_decode"), MACHINES["gfx950"], **{**CASES["sparse_decode"], "topk": 64})
        assert registry().decide(request).chosen == "reference.torch"


def test_every_provider_says_where_its_limits_come_from():
    for provider in PROVIDERS:
        support = provider.implementation().support
        assert support.source.startswith("ROCm/aiter e4048607, ") and support.vendors == ("amd",)
        assert support.probes_graph and not set(support.archs or ()) - {"gfx942", "gfx950"}
