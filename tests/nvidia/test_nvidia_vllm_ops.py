# SPDX-License-Identifier: Apache-2.0
"""vLLM's data-movement operators behind the primitives, against strict stand-ins of each convention."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import ModuleType

import pytest
import torch
from flashmla_standins import modules
from simulated_gpu import FACTS

from mla_portable.contracts import Registrar, Request, hookimpl
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT
from mla_portable.registry import Registry
from mla_portable.tools.conformance import run_suite
from mla_portable_nvidia import vllm_ops

CONVERT_MODULE = "vllm__v1__attention__backends__mla__sparse_utils"


class Plugin:
    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add_detector(lambda device: FACTS["sm90"])
        for implementation in vllm_ops.data_implementations(device_types=("cpu",)):
            registrar.add(implementation)


def need(fact: bool, what: str) -> None:
    if not fact:
        raise RuntimeError(f"stand-in of vLLM: {what}")


def write(scale_format, kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, skip_scale=False):
    need(kv_cache_dtype == "fp8_ds_mla" and kv_cache.dtype == torch.uint8 and kv_cache.shape[2] == 656, "layout")
    need(kv_c.dtype == k_pe.dtype and kv_c.element_size() == 2 and slot_mapping.dtype == torch.int64, "dtypes")
    need(scale.dtype == torch.float32 and scale.numel() == 1 and not skip_scale, "scale")
    rows = FP8_DS_MLA.pack(kv_c, k_pe.view(torch.bfloat16), scale_format=scale_format)  # the rotary part is copied bit by bit
    for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
        need(slot < kv_cache.shape[0] * kv_cache.shape[1], "wrote past the cache")
        if slot >= 0:
            kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1]] = row


def gather(src_cache, dst, block_table, seq_lens, workspace_starts, batch_size):
    need(block_table.dtype == torch.int32 and block_table.is_contiguous() and len(block_table) == batch_size, "block_table")
    need(workspace_starts.dtype == torch.int32 and len(workspace_starts) == batch_size, "workspace_starts")
    need(seq_lens.dtype == torch.int32 and dst.is_contiguous() and dst.dtype == torch.bfloat16, "seq_lens or dst")
    size = src_cache.shape[1]
    for table, start, length in zip(block_table.tolist(), workspace_starts.tolist(), seq_lens.tolist(), strict=True):
        need(start + length <= len(dst), "wrote past the workspace")
        for position in range(length):
            need(position // size < len(table), "read past the block table")
            block = table[position // size]
            need(0 <= block < len(src_cache), "an entry led to wild memory")
            dst[start + position] = FP8_DS_MLA.unpack(src_cache[block, position % size])


def gather_without_lengths(src_cache, dst, block_table, workspace_starts, batch_size, seq_starts, *others):
    need(seq_starts is None and not any(each is not None for each in others), "seq_starts, or what else may be absent")
    ends = torch.cat([workspace_starts[1:], torch.tensor([len(dst)], dtype=torch.int32)])
    lens = ends - workspace_starts
    need(bool((lens >= 0).all()) and int(workspace_starts[0]) == 0, "starts that do not rise from 0")
    gather(src_cache, dst, block_table, lens, workspace_starts, batch_size)


def triton_convert_req_index_to_global_index(
    req_id, block_table, token_indices, BLOCK_SIZE=64, NUM_TOPK_TOKENS=2048, BLOCK_N=128, return_valid_counts=False
):
    need(all(t.dtype == torch.int32 for t in (req_id, block_table, token_indices)), "dtypes")
    need(token_indices.shape[1] == NUM_TOPK_TOKENS and NUM_TOPK_TOKENS % BLOCK_N == 0, "width")
    column = token_indices // BLOCK_SIZE
    inside = (token_indices >= 0) & (column < block_table.shape[1])
    block = block_table[req_id.long()].gather(1, column.clamp(0, block_table.shape[1] - 1).long())
    return torch.where(inside, block * BLOCK_SIZE + token_indices % BLOCK_SIZE, -1)  # int32, wraps around as there


WRITE = (
    "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor scale"
)
GATHER = "cp_gather_and_upconvert_fp8_kv_cache(Tensor src_cache, Tensor(a!) dst, Tensor block_table, "
VERSIONS = {
    "0.24": (") -> ()", "amax", "Tensor seq_lens, Tensor workspace_starts, int batch_size) -> ()", gather),
    "0.26": (
        ") -> ()", "amax", "Tensor workspace_starts, int batch_size, Tensor? seq_starts) -> ()", gather_without_lengths,
    ),
    "0.33": (
        ", bool skip_scale=False) -> ()", "pow2",
        "Tensor workspace_starts, int batch_size, Tensor? seq_starts, Tensor? host_cache=None) -> ()", gather_without_lengths,
    ),
}  # fmt: skip


@contextmanager
def vllm(version: str, write=write):
    end, scale_format, arguments, gatherer = VERSIONS[version]
    module = ModuleType(CONVERT_MODULE.replace("__", "."))
    module.triton_convert_req_index_to_global_index = triton_convert_req_index_to_global_index
    library = torch.library.Library("_C_cache_ops", "DEF")
    with ExitStack() as stack:
        stack.callback(library._destroy)
        library.define(WRITE + end)
        library.impl("concat_and_cache_mla", lambda *a: write(scale_format, *a), "CPU")
        library.define(GATHER + arguments)
        library.impl("cp_gather_and_upconvert_fp8_kv_cache", gatherer, "CPU")
        stack.enter_context(modules(**{CONVERT_MODULE: module}))
        yield


def machine() -> Registry:
    return Registry(plugins=[("reference", "mla_portable.reference"), ("nvidia", Plugin())], environ={})


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_conforms(version):
    with vllm(version):
        report = run_suite(machine(), "nvidia", device="cpu", level="quick" if version != "0.26" else "smoke")
        wrong = [f"{r.case.id}: {r.status}: {r.message}" for r in report.results if r.status != "passed"]
        assert report.ok and not wrong, "\n".join(wrong[:5])
        expected = {CACHE_WRITE, GATHER_UPCONVERT, CONVERT_INDICES}
        assert {r.case.primitive for r in report.results} == expected
        other = {"amax": "nvidia.vllm_pow2", "pow2": "nvidia.vllm_amax"}[VERSIONS[version][1]]
        assert [left_out.implementation for left_out in report.unavailable] == [other]


def test_a_writer_that_takes_float16_for_bfloat16_is_left_out():
    def misread(scale_format, kv_c, k_pe, *others):
        write(scale_format, kv_c.view(torch.bfloat16), k_pe.view(torch.bfloat16), *others)

    with vllm("0.26", misread):
        report = run_suite(machine(), "nvidia.vllm_amax", device="cpu", level="smoke")
        assert not report.results
        (reason,) = report.unavailable[0].reasons
        assert (reason.subject, reason.given) == ("dtype of kv_c", "float16") and "bfloat16" in reason.limit


def test_the_block_that_int32_ends_in_is_converted_as_far_as_that():
    block, topk, most = 53, 64, 2**31 - 1
    positions, owner = torch.arange(topk, dtype=torch.int32).view(1, -1), torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([[most // block, most // block + 1]], dtype=torch.int32)  # of the other one no slot is left
    with vllm("0.26"):
        call = vllm_ops.bind_convert_indices(Request(CONVERT_INDICES, FACTS["sm90"], topk=topk, block_size=block))
        indices, counts = call(positions, owner, table, block_size=block)
    inside = most % block + 1
    assert indices[0, :inside].tolist() == list(range(most - most % block, most + 1)) and counts.tolist() == [inside]
    assert (indices[0, inside:] == -1).all()


def test_without_vllm_nothing_is_offered_and_each_says_why():
    registry = machine()
    for implementation in registry.implementations():
        if implementation.backend == "nvidia":
            (reason,) = implementation.check(FACTS["sm90"])
            assert "vLLM" in reason.remedy


@pytest.mark.parametrize("arguments", ["Tensor page_map", f"{VERSIONS['0.26'][2].partition(',')[0]}, int batch_size, int more"])
def test_a_gather_of_an_unknown_schema_is_refused(arguments):
    library = torch.library.Library("_C_cache_ops", "DEF")
    try:
        library.define(f"{GATHER}{arguments}) -> ()")
        (reason,) = vllm_ops._check_gather(FACTS["sm90"])
        assert arguments.rpartition(" ")[2] in str(reason) and "may be absent" in str(reason)
    finally:
        library._destroy()
