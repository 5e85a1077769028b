# SPDX-License-Identifier: Apache-2.0
"""Baselines of the indexer: DeepGEMM's scores and vLLM's top-k operators, called as vLLM 0.26 calls them, and torch.topk.

Source: vLLM 0.26.0, vllm/model_executor/layers/sparse_attn_indexer.py. What a step does once for all layers is not timed: the
schedule of decode rows, ranges of prefill rows. Positions come in any order, and of equal scores by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import Baseline, BaselineCall, Reason, Request
from mla_portable.layouts import INDEX_FP8, INDEX_HEAD_SIZE
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, INDEXER_SELECT, TOPK_SELECT
from mla_portable_common.deep_gemm.pages import PAGE
from mla_portable_common.libraries import operator_of
from mla_portable_nvidia.baselines.attention import Arguments
from mla_portable_nvidia.deepgemm.discovery import deepgemm_reasons, find_deepgemm
from mla_portable_nvidia.deepgemm.implementations import HEADS

_LIBRARY: Final = "_C"
_CACHE_OPS: Final = "_C_cache_ops"
_EXTENSIONS: Final = ("vllm._C_stable_libtorch", "vllm._C")
"""What registers the operators, by age."""
_GATHER: Final = "cp_gather_indexer_k_quant_cache"
_WORKSPACE_BYTES: Final = 1 << 20
_RADIX_TOPKS: Final = (512, 1024, 2048)
"""K of the operators with a workspace."""
_COOPERATIVE_ROWS: Final = 32
_COOPERATIVE_ARCHS: Final = ("sm90", "sm100", "sm103")
_PREFILL_ROWS: Final = 256
"""From here on the benchmark's rows are tokens of one request, else requests of one token."""
_INT32_MAX: Final = 2**31 - 1

TopK = Callable[[Tensor], object]
"""Chooses from logits [T, N] into memory of its own."""


def vllm_operator(name: str, library: str = _LIBRARY) -> Any | None:
    """An operator of vLLM's, None where no vLLM brings it. library: the namespace that it is registered in."""
    for extension in (None, *_EXTENSIONS):
        try:
            if extension is not None:
                import_module(extension)
        except (ImportError, OSError, RuntimeError):
            continue
        operator = operator_of(library, name)
        if operator is not None:
            return operator
    return None


def missing_operator(name: str, library: str = _LIBRARY) -> Iterator[Reason]:
    """A reason where `vllm_operator` finds none."""
    if vllm_operator(name, library) is None:
        yield Reason("operator", f"{library}.{name}", "not registered by any package here", "install vLLM")


def _ascending(found: Tensor) -> Tensor:
    """[T, K] int32 positions as topk_select lists them."""
    ordered = found.masked_fill(found < 0, _INT32_MAX).sort(dim=1).values
    return ordered.masked_fill(ordered == _INT32_MAX, -1).to(torch.int32)


# -------------------------------------------------------------------------------------------------------------- top-k


def _radix(name: str, lens: Tensor, out: Tensor, longest: int) -> TopK:
    """cooperative_topk or persistent_topk: rows begin at column 0. lens: [T] int32."""
    operator: Any = vllm_operator(name)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=out.device)
    return lambda logits: operator(logits, lens, out, workspace, out.shape[1], longest)


def _per_row_decode(lens: Tensor, out: Tensor) -> TopK:
    operator: Any = vllm_operator("top_k_per_row_decode")
    return lambda logits: operator(logits, 1, lens, out, logits.shape[0], logits.stride(0), logits.stride(1), out.shape[1])


def _per_row_prefill(starts: Tensor, ends: Tensor, out: Tensor) -> TopK:
    operator: Any = vllm_operator("top_k_per_row_prefill")
    return lambda logits: operator(logits, starts, ends, out, logits.shape[0], logits.stride(0), logits.stride(1), out.shape[1])


_DECODE_TOPK: Final[dict[str, Callable[[Tensor, Tensor, int], TopK]]] = {
    "cooperative_topk": partial(_radix, "cooperative_topk"),
    "persistent_topk": partial(_radix, "persistent_topk"),
    "top_k_per_row_decode": lambda lens, out, longest: _per_row_decode(lens, out),
}
"""Operator -> (lengths [T] int32, out [T, K] int32, the longest) -> what chooses, from rows that begin at column 0."""


def _topk_reasons(name: str, request: Request[Any]) -> Iterator[Reason]:
    """vLLM has the operator, and would call it for these rows."""
    if name in ("cooperative_topk", "persistent_topk") and request.topk not in _RADIX_TOPKS:
        yield Reason("topk", str(request.topk), f"supports {', '.join(map(str, _RADIX_TOPKS))}")
    if name == "cooperative_topk":
        if (request.rows or 0) > _COOPERATIVE_ROWS:
            yield Reason("rows", str(request.rows), f"at most {_COOPERATIVE_ROWS}")
        if request.device.arch not in _COOPERATIVE_ARCHS:
            yield Reason("arch", request.device.arch, f"supports {', '.join(_COOPERATIVE_ARCHS)}")
    yield from missing_operator(name)


def _prepare_topk(name: str, request: Request[Any], arguments: Arguments) -> BaselineCall:
    """An operator alone, on rows that are searched from column 0 on."""
    logits, starts, ends = (arguments[each] for each in ("logits", "row_starts", "row_ends"))
    found = torch.full_like(arguments["out"], -1)
    if name == "top_k_per_row_prefill":
        choose = _per_row_prefill(starts, ends, found)
    else:
        choose = _DECODE_TOPK[name](ends, found, logits.shape[1])
    return BaselineCall(lambda: choose(logits), lambda: _ascending(found))


def _prepare_torch(request: Request[Any], arguments: Arguments) -> BaselineCall:
    """torch.topk, on rows that are searched from end to end."""
    logits, topk = arguments["logits"], arguments["topk"]
    values = torch.empty((logits.shape[0], topk), dtype=torch.float32, device=logits.device)
    found = torch.empty((logits.shape[0], topk), dtype=torch.int64, device=logits.device)
    run = partial(torch.topk, logits, topk, dim=1, sorted=False, out=(values, found))
    return BaselineCall(run, lambda: _ascending(found.to(torch.int32)))


# ------------------------------------------------------------------------------------------------------ scores and top-k


def _shape_reasons(request: Request[Any], *, prefill: bool) -> Iterator[Reason]:
    if request.kv_layout != INDEX_FP8.name:
        yield Reason("kv_layout", str(request.kv_layout), f"supports {INDEX_FP8.name}")
    if request.num_heads not in HEADS:
        yield Reason("num_heads", str(request.num_heads), f"supports {', '.join(map(str, HEADS))}")
    if ((request.rows or 0) >= _PREFILL_ROWS) != prefill:
        limit = f"{_PREFILL_ROWS} rows and more are tokens of one request"
        yield Reason("rows", str(request.rows), limit, "another baseline serves them")


def _decode_reasons(name: str, request: Request[Any]) -> Iterator[Reason]:
    yield from _shape_reasons(request, prefill=False)
    yield from _topk_reasons(name, request)
    yield from deepgemm_reasons(INDEXER_LOGITS, request.device)


def _prepare_decode(name: str, request: Request[Any], arguments: Arguments) -> BaselineCall:
    """Paged scores of one token a request, then an operator."""
    kernel = find_deepgemm(INDEXER_LOGITS, request.device)
    q, weights, table, out = (arguments[each] for each in ("q", "weights", "block_table", "out"))
    lens = arguments["seq_lens"]
    rows, pages, width = lens.view(-1, 1), arguments["index_cache"].unsqueeze(2), table.shape[1] * PAGE
    queries, schedule, found = q.unsqueeze(1), kernel.schedule(rows), torch.full_like(out, -1)
    choose = _DECODE_TOPK[name](lens, found, width)
    return BaselineCall(
        lambda: choose(kernel.paged(queries, pages, weights, rows, table, schedule, width)), lambda: _ascending(found)
    )


def _prefill_reasons(request: Request[Any]) -> Iterator[Reason]:
    yield from _shape_reasons(request, prefill=True)
    yield from missing_operator("top_k_per_row_prefill")
    yield from missing_operator(_GATHER, _CACHE_OPS)
    yield from deepgemm_reasons(INDEXER_LOGITS_RAGGED, request.device)


def _prepare_prefill(request: Request[Any], arguments: Arguments) -> BaselineCall:
    """The keys of one request gathered, their scores in one matrix, then the operator for ranges."""
    kernel = find_deepgemm(INDEXER_LOGITS_RAGGED, request.device)
    gather: Any = vllm_operator(_GATHER, _CACHE_OPS)
    q, weights, cache, table, out = (arguments[each] for each in ("q", "weights", "index_cache", "block_table", "out"))
    tokens, device, context = q.shape[0], q.device, int(arguments["seq_lens"][0])
    keys = torch.empty((context, INDEX_HEAD_SIZE), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((context, 4), dtype=torch.uint8, device=device)
    bounds = torch.tensor([0, context], dtype=torch.int32, device=device)
    starts = torch.zeros(tokens, dtype=torch.int32, device=device)
    ends = context - tokens + 1 + torch.arange(tokens, dtype=torch.int32, device=device)
    found = torch.full_like(out, -1)
    choose, factors = _per_row_prefill(starts, ends, found), scales.view(torch.float32).squeeze(-1)

    def run() -> None:
        gather(cache, keys, scales, table, bounds)
        choose(kernel.ragged(q, keys, factors, weights, starts, ends))

    return BaselineCall(run, lambda: _ascending(found))


def indexer_baselines() -> Iterator[Baseline]:
    """Everything that can be called directly; each says for itself whether it is here."""
    loose = "positions in any order, of equal scores by chance"
    for name in _DECODE_TOPK:
        reasons, prepare = partial(_decode_reasons, name), partial(_prepare_decode, name)
        remark = f"DeepGEMM, then vLLM's {name}; scheduled beforehand; table entries are taken as valid; {loose}"
        yield Baseline(f"deepgemm.{name}", INDEXER_SELECT, reasons, prepare, remark)
    remark = f"gathered keys, DeepGEMM, then vLLM's top_k_per_row_prefill; a matrix of all scores; {loose}"
    yield Baseline("deepgemm.top_k_per_row_prefill", INDEXER_SELECT, _prefill_reasons, _prepare_prefill, remark)
    for name in (*_DECODE_TOPK, "top_k_per_row_prefill"):
        yield Baseline(f"vllm.{name}", TOPK_SELECT, partial(_topk_reasons, name), partial(_prepare_topk, name), loose)
    yield Baseline("torch.topk", TOPK_SELECT, lambda request: (), _prepare_torch, loose)
