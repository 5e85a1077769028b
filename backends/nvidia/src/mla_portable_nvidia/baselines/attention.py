# SPDX-License-Identifier: Apache-2.0
"""Baselines of attention on NVIDIA GPUs, for `mla-portable bench kernels`: FlashMLA and FlashAttention 3, called directly.

Each gets its arguments as it likes them best: queries padded to its head counts, plans made, results allocated, all outside
of the timing. What it then leaves to its caller (undoing the padding, sanitising indices) is not charged to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import Baseline, BaselineCall, Primitive, Reason, Request
from mla_portable.layouts import FP8_DS_MLA, HEAD_SIZE, KV_LORA_RANK
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.conventions import DecodeKernel, PrefillKernel
from mla_portable_common.flash_mla.head_padding import kernel_heads
from mla_portable_common.libraries import operator_of
from mla_portable_nvidia.flashmla.discovery import find_kernel

_LN2: Final = math.log(2.0)
_FA3_MODULE: Final = "vllm.vllm_flash_attn.flash_attn_interface"
_DECODE_TOPK: Final = 64
_PREFILL_TOPK: Final = 128
_OTHER: Final = "another baseline serves it"

Arguments = Mapping[str, Any]


def multiple_of(request: Request, multiple: int) -> Iterator[Reason]:
    """A reason where the request's K is no multiple."""
    if (request.topk or 0) % multiple:
        yield Reason("topk", str(request.topk), f"a multiple of {multiple}")


def recorded(call: Callable[[], Any], result: Callable[[Any], Any]) -> BaselineCall:
    """`call`, and what it returned last as the primitive means it."""
    last: list[Any] = []

    def run() -> None:
        last[:] = [call()]

    return BaselineCall(run, lambda: result(last[0]))


# ----------------------------------------------------------------------------------------------------------- FlashMLA


def query_rows(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Queries [R, H, 576] and indices [R, K] of either attention primitive, one row for each query token."""
    q, indices = arguments["q"], arguments["indices"]
    return q.reshape(-1, *q.shape[-2:]), indices.reshape(-1, indices.shape[-1])


def _padded(q: Tensor, heads: int) -> Tensor:
    """q [R, H, 576] with zero heads up to `heads`."""
    whole = torch.zeros((q.shape[0], heads, HEAD_SIZE), dtype=q.dtype, device=q.device)
    whole[:, : q.shape[1]] = q
    return whole


def _in_our_meaning(arguments: Arguments, out: Tensor, lse: Tensor, base_2: bool) -> tuple[Tensor, Tensor]:
    """out [R, H', 512] and lse [R, H'] without the padding, lse natural, empty rows -inf; shaped as the primitive's."""
    q = arguments["q"]
    heads = q.shape[-2]
    lse = lse[:, :heads].float()
    natural = (lse * _LN2 if base_2 else lse).masked_fill(lse.isinf(), -math.inf)
    return out[:, :heads].reshape(*q.shape[:-1], KV_LORA_RANK), natural.reshape(q.shape[:-1])


def cache_of(arguments: Arguments) -> Tensor:
    """The cache or the workspace of either attention primitive."""
    return arguments["kv_cache" if "kv_cache" in arguments else "kv"]


def _missing_kernel(primitive: Primitive, request: Request) -> Iterator[Reason]:
    found = find_kernel(primitive, request.device)
    if found.provider is None:
        yield from found.reasons or (Reason("FlashMLA", "absent", "no provider was found"),)


def _decode_reasons(request: Request) -> Iterator[Reason]:
    """FlashMLA's decode kernel on FP8 rows."""
    if request.kv_layout != FP8_DS_MLA.name:
        yield Reason("kv_layout", str(request.kv_layout), f"supports {FP8_DS_MLA.name}", _OTHER)
        return
    yield from multiple_of(request, _DECODE_TOPK)
    yield from _missing_kernel(SPARSE_DECODE, request)


def _prepare_decode(request: Request, arguments: Arguments) -> BaselineCall:
    """The decode kernel on padded heads, a batch row for each query token, with its own plan made beforehand."""
    found = find_kernel(SPARSE_DECODE, request.device)
    kernel: DecodeKernel = found.kernel
    q, indices = query_rows(arguments)
    query = _padded(q, kernel_heads(q.shape[1])).unsqueeze(1)  # [R, 1, H', 576]
    slots = indices.unsqueeze(1).contiguous()
    kv = cache_of(arguments).unsqueeze(2)
    scale = arguments["softmax_scale"]
    options: dict[str, Any] = {}
    if kernel.takes_plan:
        options["plan"] = kernel.plan(query, kv, slots)
    if kernel.takes_out:
        options["out"] = torch.empty((*query.shape[:3], KV_LORA_RANK), dtype=query.dtype, device=query.device)
    return recorded(
        lambda: kernel(query, kv, slots, scale, **options),
        lambda got: _in_our_meaning(arguments, got[0][:, 0], got[1][:, :, 0], found.traits.lse_base_2),
    )


def _prefill_reasons(request: Request, *, native: bool) -> Iterator[Reason]:
    """FlashMLA's prefill kernel on BF16 rows, with padded or with native heads."""
    if request.kv_layout != "bf16":
        yield Reason("kv_layout", str(request.kv_layout), "supports bf16", _OTHER)
        return
    yield from multiple_of(request, _PREFILL_TOPK)
    missing = list(_missing_kernel(SPARSE_PREFILL, request))
    yield from missing
    heads = request.num_heads or 0
    if native and not missing:
        few = [count for count in find_kernel(SPARSE_PREFILL, request.device).traits.heads if count < 64]
        if heads not in few:
            yield Reason("num_heads", str(heads), f"this build has {', '.join(map(str, few)) or 'none'} below 64")


def _prepare_prefill(request: Request, arguments: Arguments, *, native: bool) -> BaselineCall:
    """The prefill kernel on the cache or workspace as flat rows."""
    found = find_kernel(SPARSE_PREFILL, request.device)
    kernel: PrefillKernel = found.kernel
    q, indices = query_rows(arguments)
    query = q.contiguous() if native else _padded(q, kernel_heads(q.shape[1]))
    rows = indices.unsqueeze(1).contiguous()
    kv = cache_of(arguments).reshape(-1, 1, HEAD_SIZE)
    scale = arguments["softmax_scale"]
    options: dict[str, Any] = {}
    if kernel.takes_out:
        options["out"] = torch.empty((*query.shape[:2], KV_LORA_RANK), dtype=query.dtype, device=query.device)
    return recorded(
        lambda: kernel(query, kv, rows, scale, **options),
        lambda got: _in_our_meaning(arguments, *got, found.traits.lse_base_2),
    )


# --------------------------------------------------------------------------------------------------- FlashAttention 3


@cache
def fa3_function() -> Callable[..., Any] | str:
    """vLLM's flash_attn_varlen_func, or why it is not here; asked once, for a failing import can take long."""
    try:
        return import_module(_FA3_MODULE).flash_attn_varlen_func
    except Exception as error:  # vLLM's import fails in many ways on a machine that it does not fit
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _fa3_reasons(request: Request) -> Iterator[Reason]:
    if request.kv_layout != "bf16":
        yield Reason("kv_layout", str(request.kv_layout), "supports bf16", _OTHER)
        return
    function = fa3_function()
    if isinstance(function, str):
        yield Reason("function", "flash_attn_varlen_func", function, "install vLLM")
    elif operator_of("_vllm_fa3_C", "fwd") is None:
        yield Reason("operator", "_vllm_fa3_C.fwd", "not registered", "install a build of vLLM for SM90")


def _prepare_fa3(request: Request, arguments: Arguments) -> BaselineCall:
    """As vLLM's backend FLASH_ATTN_MLA_SPARSE calls it: a sequence for each token, whose pages are the rows that it chose."""
    function: Any = fa3_function()
    q, indices = query_rows(arguments)
    rows = cache_of(arguments).reshape(-1, 1, 1, HEAD_SIZE)
    tokens, topk = indices.shape
    return recorded(
        partial(
            function,
            q=q[..., KV_LORA_RANK:],
            k=rows[..., KV_LORA_RANK:],
            v=rows[..., :KV_LORA_RANK],
            q_v=q[..., :KV_LORA_RANK],
            max_seqlen_q=1,
            cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32, device=q.device),
            max_seqlen_k=topk,
            seqused_k=torch.full((tokens,), topk, dtype=torch.int32, device=q.device),
            block_table=indices,
            softmax_scale=arguments["softmax_scale"],
            causal=True,
            fa_version=3,
            return_softmax_lse=True,
        ),
        lambda got: _in_our_meaning(arguments, got[0], got[1].T, False),
    )


# -------------------------------------------------------------------------------------------------------------- offer


def baselines() -> Iterator[Baseline]:
    """Everything that can be called directly; each says for itself whether it is here."""
    native, padded = {"native": True}, {"native": False}
    padding = "queries padded beforehand, padding of the result left in"
    few = "its own path for few heads"
    for primitive in (SPARSE_DECODE, SPARSE_PREFILL):
        yield Baseline("flashmla.decode", primitive, _decode_reasons, _prepare_decode, f"{padding}; planned beforehand")
        for name, how, remark in (("flashmla.prefill", padded, padding), ("flashmla.prefill_native", native, few)):
            yield Baseline(name, primitive, partial(_prefill_reasons, **how), partial(_prepare_prefill, **how), remark)
        remark = "which entries count, and how many, is known beforehand; vLLM's choice of splits"
        yield Baseline("vllm.flash_attention3", primitive, _fa3_reasons, _prepare_fa3, remark)
