# SPDX-License-Identifier: Apache-2.0
"""Baselines of attention on BF16 rows out of SGLang: its TileLang kernels and its Triton kernel, called as SGLang calls them.

TileLang compiles a kernel for each head count, K and scale when it is first called, which takes a while and is not timed. No
kernel returns an lse. For FP8 caches SGLang's TileLang kernel reads rows of 576 e4m3 values without scales: nothing to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import Baseline, BaselineCall, Reason, Request
from mla_portable.layouts import HEAD_SIZE, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_nvidia.baselines import cache_of, query_rows
from mla_portable_nvidia.vllm_baselines import Arguments, imported_function, missing_function, multiple_of, recorded

_FOLDERS: Final = (
    "sglang.kernels.ops.attention.dsa",
    "sglang.srt.layers.attention.dsa",
    "sglang.srt.layers.attention.nsa",
)
"""Where SGLang keeps them, newest first: 0.5.23 has the first."""
_TILELANG: Final = tuple(f"{folder}.tilelang_kernel" for folder in _FOLDERS)
_TRITON: Final = tuple(f"{folder}.triton_sparse_mla_prefill" for folder in _FOLDERS)
_WHOLE: Final = ("tilelang_sparse_fwd", *_TILELANG)
_PART: Final = ("sparse_mla_fwd_decode_partial", *_TILELANG)
_COMBINE: Final = ("sparse_mla_fwd_decode_combine", *_TILELANG)
_PREFILL: Final = ("sparse_mla_prefill", *_TRITON)
_INSTALL: Final = "install SGLang and the TileLang that it names"
_ARCH: Final = "sm90"
"""What SGLang's TileLang kernels for NVIDIA are written for: warpgroups that change their registers."""
_TILE_HEADS: Final = 64
_PAIR: Final = 128
"""Keys of two tiles, which the whole kernel takes in turns."""
_TILE: Final = 64
_THREADS: Final = 128
_COMBINED_HEADS: Final = 4
_TRITON_HEADS: Final = 32
_UNION_ROWS: Final = (16, 32)
"""Rows of heads and tokens that SGLang lets share a gathered set."""
_UNIONS: Final = (0, 2, 4)
"""Neighbouring tokens that share one; 0: none."""


def _bf16(request: Request) -> Iterator[Reason]:
    if request.kv_layout != "bf16":
        yield Reason("kv_layout", str(request.kv_layout), "supports bf16")


def _tilelang_reasons(
    request: Request, *, functions: tuple[tuple[str, ...], ...], keys: int, heads: int = 1
) -> Iterator[Reason]:
    """keys, heads: what K and the head count must be a multiple of; above 64 heads are whole tiles. The import comes last."""
    reasons = [*_bf16(request), *multiple_of(request, keys)]
    if request.device.arch != _ARCH:
        reasons.append(Reason("arch", request.device.arch, f"supports {_ARCH}"))
    count = request.num_heads or 0
    if count % (_TILE_HEADS if count > _TILE_HEADS else heads):
        reasons.append(Reason("num_heads", str(count), f"a multiple of {heads} up to {_TILE_HEADS}, above of {_TILE_HEADS}"))
    yield from reasons
    if not reasons:
        for function in functions:
            yield from missing_function(*function, install=_INSTALL)


def _operands(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """q [R, H, 576], the cache as rows [slots, 1, 576] and indices [R, 1, K], contiguous."""
    q, indices = query_rows(arguments)
    return q.contiguous(), cache_of(arguments).reshape(-1, 1, HEAD_SIZE), indices.unsqueeze(1).contiguous()


def _out(arguments: Arguments, got: Tensor) -> tuple[Tensor, None]:
    """A result of any leading shape as the primitive's; without an lse."""
    return got.reshape(*arguments["q"].shape[:-1], KV_LORA_RANK), None


def _prepare_whole(request: Request, arguments: Arguments) -> BaselineCall:
    function: Any = imported_function(*_WHOLE)
    q, kv, indices = _operands(arguments)
    scale = arguments["softmax_scale"]
    return recorded(lambda: function(q=q, kv=kv, indices=indices, sm_scale=scale, d_v=KV_LORA_RANK), partial(_out, arguments))


def tiles_per_block(rows: int, tiles: int, num_sms: int) -> int:
    """SGLang's rule: the largest power of two that divides a row's tiles and still gives each multiprocessor a block."""
    most = rows * tiles // max(num_sms, 1)
    run = 1
    while run * 2 <= most and tiles % (run * 2) == 0:
        run *= 2
    return run


def _prepare_split(request: Request, arguments: Arguments) -> BaselineCall:
    """Parts of each row, then their sum: SGLang's kernels for AMD's GPUs, by its rule for how many, in tiles of this module."""
    part: Any = imported_function(*_PART)
    combine: Any = imported_function(*_COMBINE)
    q, kv, indices = (each.unsqueeze(0) for each in _operands(arguments))
    (_, rows, heads, _), topk = q.shape, indices.shape[-1]
    run = tiles_per_block(rows, topk // _TILE, request.device.num_sms)
    first = part(
        heads, KV_LORA_RANK, QK_ROPE_HEAD_DIM, topk,
        sm_scale=arguments["softmax_scale"], block_I=_TILE, inner_iter=run, threads=_THREADS,
    )  # fmt: skip
    second = combine(heads, KV_LORA_RANK, topk // run, head_per_block=_COMBINED_HEADS, block_I=_TILE, threads=_THREADS)
    return recorded(lambda: second(*first(q, kv, indices)), partial(_out, arguments))


def _triton_reasons(request: Request, *, union: int) -> Iterator[Reason]:
    reasons, heads, topk = list(_bf16(request)), request.num_heads or 0, request.topk or 0
    if heads > _TRITON_HEADS:
        reasons.append(Reason("num_heads", str(heads), f"SGLang allows up to {_TRITON_HEADS}"))
    if union and heads * union not in _UNION_ROWS:
        limit = " or ".join(str(rows // union) for rows in _UNION_ROWS)
        reasons.append(Reason("num_heads", str(heads), f"{limit}, for {union} tokens to share a set"))
    if union and topk & (topk - 1):
        reasons.append(Reason("topk", str(topk), "a power of two"))
    yield from reasons
    if not reasons:
        yield from missing_function(*_PREFILL, install=_INSTALL)


def _prepare_triton(request: Request, arguments: Arguments, *, union: int) -> BaselineCall:
    function: Any = imported_function(*_PREFILL)
    q, kv, indices = _operands(arguments)
    rows, _, topk = indices.shape
    counts = torch.full((rows,), topk, dtype=torch.int32, device=q.device)
    out = torch.empty((*q.shape[:2], KV_LORA_RANK), dtype=q.dtype, device=q.device)
    scale = arguments["softmax_scale"]
    return recorded(
        lambda: function(q, kv, indices, scale, KV_LORA_RANK, topk_length=counts, out=out, union=union),
        partial(_out, arguments),
    )


def sglang_baselines() -> Iterator[Baseline]:
    """Everything of SGLang's that can be called directly; each says for itself whether it is here."""
    valid = "indices are taken as valid; returns no lse"
    whole = partial(_tilelang_reasons, functions=(_WHOLE,), keys=_PAIR)
    split = partial(_tilelang_reasons, functions=(_PART, _COMBINE), keys=_TILE, heads=_COMBINED_HEADS)
    for primitive in (SPARSE_DECODE, SPARSE_PREFILL):
        yield Baseline("sglang.tilelang", primitive, whole, _prepare_whole, valid)
    yield Baseline("sglang.tilelang_split", SPARSE_DECODE, split, _prepare_split, f"{valid}; SGLang runs it on AMD's GPUs")
    for union in _UNIONS:
        name, remark = (f"sglang.triton_union{union}", f"{valid}; distinct in a row") if union else ("sglang.triton", valid)
        reasons, prepare = partial(_triton_reasons, union=union), partial(_prepare_triton, union=union)
        yield Baseline(name, SPARSE_PREFILL, reasons, prepare, remark)
