# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""SGLang's Triton kernels of the indexer that store or move e4m3, where Triton has none: below compute capability 8.9.

    _act_quant_kernel           quantises queries, and keys where SGLang's CUDA kernel for them cannot be compiled
    _set_k_and_s_triton_kernel  moves those keys into the pages
    the kernels of pools        make a key of several tokens (GLM-5.3-Flash), and write it into the pages

They run as they are, with wider numbers in the place of e4m3 (`mla_portable.engines.common.e4m3_stores`), or with bytes
where codes are only moved. 0.5.16 and 0.5.23 were read. SGLang's CUDA kernels of the indexer convert e4m3 on every
architecture.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, InvalidArgument, UnsupportedRequest
from mla_portable.engines.common import e4m3_stores, index_keys
from mla_portable.engines.common.e4m3_stores import Kernel, Serve
from mla_portable.engines.sglang import model, seams, settings, stock
from mla_portable.layouts import INDEX_FP8


def quantise(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_act_quant_kernel`: Y_ptr [M, N] float8_e4m3fn and S_ptr [M, N / group_size] float32 are written."""
    exact = call["round_scale"] and call["X_ptr"].dtype == torch.bfloat16
    e4m3_stores.convert(kernel, call, "Y_ptr", torch.bfloat16 if exact else torch.float32)


def move_keys(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_set_k_and_s_triton_kernel`: codes as bytes."""
    kernel(**call | {name: call[name].view(torch.uint8) for name in ("buf_fp8_ptr", "index_k_ptr")})


def write_pools(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_kpool_softmax_rotate_write_cache_kernel`."""
    e4m3_stores.write_pools(kernel, call, _pages(call), "SGLang")


def assemble_pools(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_kpool_assemble_softmax_rotate_write_cache_kernel`: a pool a program, of tokens of a ring and of a chunk.

    loc_ptr [pools] int64: slots. write_mask_ptr [pools] bool: the pools to write, where HAS_WRITE_MASK.
    """
    _write_slots(kernel, call, "loc_ptr", {})


def update_drafts(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_kpool_write_tail_and_maybe_compress_kernel`: N tokens of each request go into its ring, pools that they complete into
    the cache.

    write_loc_ptr [requests, MAX_CLOSED_POOLS]: slots of the pools, in order.
    """
    _write_slots(kernel, call, "write_loc_ptr", {"write_loc_stride_0": call["MAX_CLOSED_POOLS"]})


def update_pools(kernel: Kernel, call: dict[str, Any]) -> None:
    """`_kpool_decode_update_and_maybe_write_cache_kernel`: a token of each request goes into its ring, a pool that it completes
    into the cache.

    positions_ptr [requests or more]. block_tables_ptr [requests or more, BLOCK_TABLE_COLS]: pages of tokens. POOL_SIZE of them
    have one page of pools, whose number is that of the first, divided by POOL_SIZE.
    """
    e4m3_stores.check_scales(call, "SGLang")
    size, rows, width = call["POOL_SIZE"], call["INDEX_PAGE_SIZE"], call["HEAD_DIM"]
    count = call["key_ptr"].shape[0]
    pool = call["positions_ptr"][:count].clamp(min=0).long() // size
    column = (pool // rows * size).clamp(max=call["BLOCK_TABLE_COLS"] - 1)
    page = call["block_tables_ptr"][:count].gather(1, column.unsqueeze(1)).squeeze(1).long() // size
    keys, _ = e4m3_stores.key_rows(pool, width)
    # for pages of one row: 128 elements, 32 words
    scales = torch.zeros((count, width // 4), dtype=torch.float32, device=keys.device)
    table = torch.arange(count, dtype=torch.int64, device=keys.device) * size
    own = {"buf_fp8_ptr": keys, "buf_fp32_ptr": scales, "block_tables_ptr": table}
    own |= {"block_tables_stride_0": 1, "block_tables_stride_1": 0}
    own |= {"INDEX_PAGE_SIZE": 1, "BUF_NUMEL_PER_PAGE": width, "S_OFFSET_NBYTES_IN_PAGE": 0}
    kernel(**call | own)
    e4m3_stores.write_keys(keys, scales[:, 0], _pages(call), page * rows + pool % rows)


def _write_slots(kernel: Kernel, call: dict[str, Any], name: str, own: dict[str, Any]) -> None:
    """Run a kernel whose argument `name` are slots; it writes keys in their order instead. own: other arguments, changed."""
    e4m3_stores.check_scales(call, "SGLang")
    slots: Tensor = call[name]
    keys, scales = e4m3_stores.key_rows(slots, call["HEAD_DIM"])
    rows = torch.arange(slots.numel(), dtype=slots.dtype, device=slots.device).view(slots.shape)
    own = own | {"buf_fp8_ptr": keys, "buf_fp32_ptr": scales, name: rows, "INDEX_PAGE_SIZE": e4m3_stores.ONE_PAGE_ROWS}
    kernel(**call | own | e4m3_stores.ONE_PAGE)
    e4m3_stores.write_keys(keys, scales, _pages(call), slots)


def _pages(call: dict[str, Any]) -> Tensor:
    """The pages of SGLang's pool, [pages, rows * 132], as [pages, rows, 132] uint8."""
    pages = call["buf_fp8_ptr"].view(torch.uint8)
    return pages.view(pages.shape[0], -1, INDEX_FP8.row_width)


SERVED_BY: Final[dict[str, Serve]] = {
    "_act_quant_kernel": quantise,
    "_set_k_and_s_triton_kernel": move_keys,
    "_kpool_softmax_rotate_write_cache_kernel": write_pools,
    "_kpool_assemble_softmax_rotate_write_cache_kernel": assemble_pools,
    "_kpool_write_tail_and_maybe_compress_kernel": update_drafts,
    "_kpool_decode_update_and_maybe_write_cache_kernel": update_pools,
}
"""By the name of a seam in `seams.INDEX_KERNELS`."""


def serve(facts: DeviceFacts, *, pools: bool) -> None:
    """Replace SGLang's kernels in this process where Triton has no e4m3, unless MLA_PORTABLE_SGLANG_INDEXER is off.

    pools: the indexer scores pools of keys.
    Raises: InvalidArgument where nothing writes the keys of pools.
    """
    reason = stock.against_e4m3_in_triton(facts)
    if reason is None or settings.indexer() == "off":
        return
    if pools:
        try:
            index_keys.bind_writer(facts, kv_layout=INDEX_FP8.name, block_size=model.PAGE)
        except UnsupportedRequest as error:
            expected = f"keys of single tokens, as {reason}, and nothing here writes the indexer's keys: {error}"
            raise InvalidArgument("SGLang", "index_kpool", got="pools of keys", expected=expected) from error
    replaced: list[str] = []
    for seam in seams.INDEX_KERNELS:
        path = seam.target.rpartition(".")[0]
        try:
            module = import_module(path)
        except ModuleNotFoundError as error:  # another version has this kernel elsewhere, or not at all
            if not str(error.name).startswith("sglang"):
                raise
            continue
        if hasattr(module, seam.name):
            e4m3_stores.replace_kernels(module, {seam.name: SERVED_BY[seam.name]})
            replaced.append(seam.name)
    _log_once(", ".join(replaced), reason)


@functools.cache
def _log_once(kernels: str, reason: str) -> None:
    settings.logger.info("mla_portable makes the e4m3 codes of SGLang's kernels %s because %s", kernels, reason)
