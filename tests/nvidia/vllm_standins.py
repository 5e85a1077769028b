# SPDX-License-Identifier: Apache-2.0
"""Strict stand-ins of vLLM's data-movement operators, of each convention."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch
from flashmla_standins import modules

from mla_portable.layouts import FP8_DS_MLA

CONVERT_MODULE = "vllm__v1__attention__backends__mla__sparse_utils"


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
def vllm(version: str):
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
