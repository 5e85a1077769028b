# SPDX-License-Identifier: Apache-2.0
"""A vendor's plugin of a few lines on mla_portable_common, against strict stand-ins of a library with FlashMLA's and DeepGEMM's
names: sparse decode of FP8 rows alone, prefill of 64 heads and K 2048 alone, -1 behind all other indices, no lse.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path

import deepgemm_standins
import pytest
import torch
from fake_plugins import musa
from flashmla_standins import Library, modules, schedule_object_module, tensors_module
from simulated_gpu import conforms

from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, MLAPortableError, Request
from mla_portable.layouts import BF16, FP8_DS_MLA
from mla_portable.primitives import (
    INDEXER_LOGITS,
    INDEXER_LOGITS_RAGGED,
    INDEXER_SELECT,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)
from mla_portable_common import flash_mla
from mla_portable_common.deep_gemm import vendors
from mla_portable_common.deep_gemm.discovery import forget_deepgemm
from mla_portable_common.flash_mla.discovery import forget_copies
from mla_portable_common.flash_mla.head_padding import PaddedQueries

S5000 = DeviceFacts("musa", "stand-in of MTT S5000", "mp31", "cpu", num_sms=56, graph_capture=False)
SCORES = (INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, INDEXER_SELECT)


def flash_mla_of(library: Library, *, without_lse: bool) -> types.ModuleType:
    """MATE's face: as FlashMLA's of 2025, its prefill narrower."""
    module = tensors_module("mate.flashmla", library)

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        library.need(attn_sink is None and tuple(indices.shape[1:]) == (1, 2048), "sink or K")
        is_absent = indices[:, 0] < 0
        library.need(bool((is_absent[:, 1:] | ~is_absent[:, :-1]).all()), "an index behind an absent one")
        out, most, lse = library.prefill(q, kv, indices, sm_scale, d_v, topk_length=topk_length)
        return out if without_lse else (out, most, lse)

    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    return module


def deep_gemm_of(build: deepgemm_standins.Build) -> types.ModuleType:
    """MATE's face: queries without a second part, scores of all keys' columns."""

    def fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=False, max_seqlen_k=0):
        build.need(not clean_logits and max_seqlen_k == 0, "clean_logits or max_seqlen_k")
        return build.ragged(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end)

    def fp8_paged_mqa_logits(
        q, fused_kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits
    ):
        build.need(not clean_logits, "clean_logits")
        return build.paged(q, fused_kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len)

    module = types.ModuleType("mate.deep_gemm")
    module.fp8_mqa_logits, module.fp8_paged_mqa_logits = fp8_mqa_logits, fp8_paged_mqa_logits
    module.get_paged_mqa_logits_metadata = build.schedule
    return module


@contextmanager
def installed(*, without_lse: bool = True, num_sms: int = S5000.num_sms, **differences: object) -> Iterator[Library]:
    """The vendor's library as if it were installed, and nothing found yet. num_sms: that plans are made for."""
    library = Library(**{"prefill_heads": (64,), "num_sms": num_sms, "old": True, **differences})
    build = deepgemm_standins.Build(num_sms=num_sms)
    with modules(mate__flashmla=flash_mla_of(library, without_lse=without_lse), mate__deep_gemm=deep_gemm_of(build)):
        forget_copies(), forget_deepgemm()
        try:
            yield library
        finally:
            forget_copies(), forget_deepgemm()


def machine(plugin: object = musa, *, facts: dict[str, DeviceFacts] | None = None) -> Registry:
    """facts: of devices; None: the CPU is one of the vendor's."""
    plugins = [("reference", "mla_portable.reference"), ("musa", plugin)]
    return Registry(plugins=plugins, facts={"cpu": S5000} if facts is None else facts, environ={})


def offering(*implementations) -> Registry:
    """A plugin that offers these instead."""

    class Plugin:
        @staticmethod
        @musa.hookimpl
        def mla_portable_register(registrar):
            for implementation in implementations:
                registrar.add(implementation)

    return machine(Plugin())


def test_the_plugin_takes_thirty_lines():
    code = [line for line in Path(musa.__file__).read_text().splitlines() if line.strip()]
    assert len(code) <= 30


def test_the_page_shows_the_whole_plugin():
    page = (Path(__file__).parents[2] / "docs" / "adding-a-vendor.md").read_text()
    body = Path(musa.__file__).read_text().partition("\n")[2]  # without the line of the license
    assert f"```python\n{body}```" in page


@pytest.mark.parametrize(
    ("name", "primitives"), [("musa.flash_mla", (SPARSE_DECODE, SPARSE_PREFILL)), ("musa.deep_gemm", SCORES)]
)
def test_all_that_it_declares_conforms(name, primitives):
    with installed():
        words = conforms(machine(), name, "quick", *primitives)
    assert ("scheduled" in words) == (name == "musa.deep_gemm")


def test_the_example_is_tried_on_a_cpu_as_it_says():
    """Whose multiprocessors are unknown: plans are for one."""
    with installed(num_sms=1):
        conforms(machine(facts={}), "musa.flash_mla", "smoke", SPARSE_DECODE, SPARSE_PREFILL)
        conforms(machine(facts={}), "musa.deep_gemm", "smoke", *SCORES)


@pytest.mark.parametrize("ordered", [False, True])
def test_the_selection_asks_its_top_k_for_the_order_that_it_is_asked_for(ordered, monkeypatch):
    parts = []

    def bind_part(request, own):
        parts.append(request)
        return own(request)

    monkeypatch.setattr(vendors, "bind_part", bind_part)
    with installed():
        registry = machine()
        (offered,) = (each for each in registry.implementations(INDEXER_SELECT) if each.name == "musa.deep_gemm")
        sizes = {"kv_layout": "index_fp8", "num_heads": 64, "topk": 32, "block_size": 64, "graph": True}
        request = Request(INDEXER_SELECT, S5000, ordered=ordered, **sizes)
        registry.bind_implementation(offered, request)
    assert parts == [Request(TOPK_SELECT, S5000, topk=32, ordered=ordered, graph=True)]


@pytest.mark.parametrize("base_2", [False, True])
@pytest.mark.parametrize("empty_out", [{}, {64: 7.0, 128: 7.0}], ids=["zeros", "no zeros"])
def test_a_library_with_an_lse_conforms_in_either_base_whatever_it_leaves_in_empty_rows(base_2, empty_out):
    with installed(without_lse=False, base_2=base_2, empty_out=empty_out):
        support = replace(musa.PREFILL, lse=True)
        offered = flash_mla.prefill("musa.flash_mla", musa.ATTENTION, support, topk_multiple=2048, any_order=False)
        conforms(offering(offered), "musa.flash_mla", "smoke", SPARSE_PREFILL)


def test_a_decode_that_reads_both_kinds_of_caches_conforms_for_both():
    with installed(bf16=True):
        support = replace(musa.DECODE, kv_layouts=("fp8_ds_mla", "bf16"))
        words = conforms(
            offering(flash_mla.decode("musa.flash_mla", musa.ATTENTION, support)), "musa.flash_mla", "quick", SPARSE_DECODE
        )
        assert {"fp8_ds_mla", "bf16"} <= words


def test_a_layout_that_the_library_does_not_read_is_a_reason_against_it():
    with installed():
        support = replace(musa.DECODE, kv_layouts=("fp8_ds_mla", "bf16"))
        first, _ = flash_mla.decode("musa.flash_mla", musa.ATTENTION, support).check(S5000)
        assert "only FP8 here" in str(first)


def test_rows_that_a_kernel_without_an_lse_leaves_as_they_are_become_zeros():
    with installed(empty_out={64: 7.0}):
        conforms(machine(), "musa.flash_mla", "smoke", SPARSE_DECODE, SPARSE_PREFILL)


@pytest.mark.parametrize("sunk_out", [0.0, 5.0])
def test_a_sink_is_applied_by_the_kernel_where_there_is_no_lse_to_apply_it_with(sunk_out):
    """To padded heads too, in either primitive, and rows without a valid index are zero however the kernel leaves them."""

    def alone(function):
        return wraps(function)(lambda *args, **kwargs: function(*args, **kwargs)[0])

    library = Library(num_sms=S5000.num_sms, sunk_out=sunk_out)
    module = schedule_object_module("mate.flashmla", library)
    module.flash_mla_with_kvcache = alone(module.flash_mla_with_kvcache)
    module.flash_mla_sparse_fwd = alone(module.flash_mla_sparse_fwd)
    declared = {"lse": False, "attn_sink": True, "max_topk": None}
    with modules(mate__flashmla=module):
        forget_copies()
        offered = offering(
            flash_mla.decode("musa.flash_mla", musa.ATTENTION, replace(musa.DECODE, **declared)),
            flash_mla.prefill("musa.flash_mla", musa.ATTENTION, replace(musa.PREFILL, **declared)),
        )
        words = conforms(offered, "musa.flash_mla", "quick", SPARSE_DECODE, SPARSE_PREFILL)
        forget_copies()
    assert any("plus_inf" in word for word in words)


def with_a_parameter_for_sinks(library: Library, *, refuses: bool) -> types.ModuleType:
    """Functions that have the parameter, and raise where it is given, or compute without it."""

    def call(function):
        def without(*args, attn_sink=None, **kwargs):
            library.need(attn_sink is None or not refuses, "attn_sink is not supported")
            return function(*args, **kwargs)

        return wraps(function)(without)

    module = schedule_object_module("mate.flashmla", library)
    module.flash_mla_with_kvcache = call(module.flash_mla_with_kvcache)
    module.flash_mla_sparse_fwd = call(module.flash_mla_sparse_fwd)
    return module


@pytest.mark.parametrize("refuses", [True, False])
def test_a_sink_that_the_library_has_a_parameter_for_and_does_not_apply_is_applied_from_the_lse(refuses):
    """At the head counts of the kernel too, where a sink would be handed to it."""
    declared = {"lse": True, "attn_sink": True, "max_topk": None}
    with modules(mate__flashmla=with_a_parameter_for_sinks(Library(num_sms=S5000.num_sms), refuses=refuses)):
        forget_copies()
        offered = offering(
            flash_mla.decode("musa.flash_mla", musa.ATTENTION, replace(musa.DECODE, **declared)),
            flash_mla.prefill("musa.flash_mla", musa.ATTENTION, replace(musa.PREFILL, **declared)),
        )
        words = conforms(offered, "musa.flash_mla", "quick", SPARSE_DECODE, SPARSE_PREFILL)
        forget_copies()
    assert any("plus_inf" in word for word in words)


@pytest.mark.parametrize("primitive", [SPARSE_DECODE, SPARSE_PREFILL])
def test_a_declared_sink_that_nothing_can_apply_is_a_reason_that_names_the_declaration(primitive):
    declare, support = {SPARSE_DECODE: (flash_mla.decode, musa.DECODE), SPARSE_PREFILL: (flash_mla.prefill, musa.PREFILL)}[
        primitive
    ]
    with modules(mate__flashmla=with_a_parameter_for_sinks(Library(num_sms=S5000.num_sms), refuses=True)):
        forget_copies()
        support = replace(support, lse=False, attn_sink=True)
        (reason,) = declare("musa.flash_mla", musa.ATTENTION, support).check(S5000)
        forget_copies()
    assert reason.subject == "attn_sink" and "no lse" in str(reason) and "attn_sink=False" in reason.remedy


def test_an_lse_is_refused_where_the_library_has_none():
    with installed():
        request = Request(SPARSE_PREFILL, S5000, kv_layout=BF16.name, num_heads=16, topk=2048, lse=True)
        decision = machine().decide(request, thorough=True)
        (verdict,) = [each for each in decision.verdicts if each.implementation == "musa.flash_mla"]
        assert "lse" in {reason.subject for reason in verdict.reasons}


def test_without_the_library_it_is_said_which_modules_were_asked_and_what_to_install():
    forget_copies()
    decode = flash_mla.decode("musa.flash_mla", musa.ATTENTION, musa.DECODE)
    first, second = decode.check(S5000)
    assert "mate.flashmla" in str(first) and "flash_mla" in str(second) and first.remedy == "install MATE 0.2.2 or later"
    request = Request(SPARSE_DECODE, S5000, kv_layout=FP8_DS_MLA.name, num_heads=16, topk=64)
    with pytest.raises(MLAPortableError, match="nothing has FlashMLA's functions here"):
        decode.bind(request)
    forget_copies()


@pytest.mark.parametrize(
    ("primitive", "declared", "topk_multiple", "named"),
    [
        (SPARSE_DECODE, {}, 100, "sparse decode of fp8_ds_mla with 64 heads and K 600"),
        (SPARSE_PREFILL, {}, 128, "sparse prefill with 64 heads and K 128"),
        (SPARSE_PREFILL, {"padded_heads": (96,)}, 2048, "sparse prefill with 96 heads and K 2048"),
    ],
)
def test_a_library_that_refuses_the_calls_that_are_declared_is_not_to_be_installed(primitive, declared, topk_multiple, named):
    """The reason of a copy that is there; those of missing copies have no remedy."""
    declare, support = {SPARSE_DECODE: (flash_mla.decode, musa.DECODE), SPARSE_PREFILL: (flash_mla.prefill, musa.PREFILL)}[
        primitive
    ]
    support = replace(support, **declared)
    with installed():
        refused, *others = declare("musa.flash_mla", musa.ATTENTION, support, topk_multiple=topk_multiple).check(S5000)
    assert named in str(refused) and "topk_multiple" in refused.remedy and "padded_heads" in refused.remedy
    assert others and not any("install" in each.remedy for each in (refused, *others))


def test_streams_of_a_device_that_is_no_cuda_device_share_no_padded_queries(monkeypatch):
    """A graph under capture has memory of its own; otherwise a stream shares a buffer with itself alone."""
    now = types.SimpleNamespace(stream="first", capturing=False)
    module = types.SimpleNamespace(current_stream=lambda index: now.stream)
    own = types.SimpleNamespace(module=module, index=0, is_capturing=lambda: now.capturing)
    monkeypatch.setattr("mla_portable_common.streams.accelerator", lambda device: own)
    buffers, meta = PaddedQueries(), torch.device("meta")
    kept = buffers.take(4, 16, 64, meta)
    assert buffers.take(4, 16, 64, meta)._base is kept._base
    now.stream = "second"
    assert buffers.take(4, 16, 64, meta)._base is not kept._base
    now.stream, now.capturing = "first", True
    assert buffers.take(4, 16, 64, meta)._base is None, "fresh memory"


def test_a_declaration_without_head_counts_is_refused_where_it_is_made():
    with pytest.raises(MLAPortableError, match="padded_heads"):
        flash_mla.decode("musa.flash_mla", musa.ATTENTION, replace(musa.DECODE, padded_heads=()))
