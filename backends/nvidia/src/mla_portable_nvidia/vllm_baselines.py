# SPDX-License-Identifier: Apache-2.0
"""Baselines of cache_write, gather_upconvert and convert_indices: vLLM's own operators, called directly.

They take slots, indices and table entries as valid. This project's kernels check them, and are about as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any, Final

import torch

from mla_portable.contracts import Baseline, BaselineCall, Reason, Request
from mla_portable.layouts import FP8_DS_MLA, KV_LORA_RANK, QK_ROPE_HEAD_DIM, SCALE_FORMATS, tile_scales
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT
from mla_portable_nvidia.discovery import device_with, operator_of

_CACHE_OPS: Final = "_C_cache_ops"
_EXTENSIONS: Final = ("vllm._C_stable_libtorch", "vllm._C")
"""What registers the operators, by age."""
_INSTALL: Final = "install vLLM"
_WRITE: Final = "concat_and_cache_mla"
_GATHER: Final = "cp_gather_and_upconvert_fp8_kv_cache"
_CONVERT: Final = "triton_convert_req_index_to_global_index"
_CONVERT_MODULE: Final = "vllm.v1.attention.backends.mla.sparse_utils"
_CONVERT_BLOCK: Final = 128
"""What vLLM calls it with."""

Arguments = Mapping[str, Any]


def vllm_operator(name: str, library: str = _CACHE_OPS) -> Any | None:
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


def missing_operator(name: str, library: str = _CACHE_OPS) -> Iterator[Reason]:
    """A reason where `vllm_operator` finds none."""
    if vllm_operator(name, library) is None:
        yield Reason("operator", f"{library}.{name}", "not registered by any package here", _INSTALL)


@cache
def imported_function(name: str, *modules: str) -> Callable[..., Any] | str:
    """A function of the first of these modules that has it, or why none has; asked once, for a failing import can take long."""
    failures: list[str] = []
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except Exception as error:  # vLLM's import fails in many ways on a machine that it does not fit
            failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return "; ".join(dict.fromkeys(failures))


def missing_function(name: str, *modules: str, install: str = _INSTALL) -> Iterator[Reason]:
    """A reason where `imported_function` finds none. install: the remedy."""
    function = imported_function(name, *modules)
    if isinstance(function, str):
        yield Reason("function", name, function, install)


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


def _fp8_reasons(name: str, request: Request) -> Iterator[Reason]:
    if request.kv_layout != FP8_DS_MLA.name:
        yield Reason("kv_layout", str(request.kv_layout), f"supports {FP8_DS_MLA.name}")
        return
    yield from missing_operator(name)


def _write(arguments: Arguments) -> Callable[[], None]:
    kv_c, k_pe, target, slots = (arguments[name] for name in ("kv_c", "k_pe", "kv_cache", "slot_mapping"))
    scale = torch.ones(1, dtype=torch.float32, device=target.device)  # not read for this layout
    operator: Any = vllm_operator(_WRITE)
    return partial(operator, kv_c, k_pe, target, slots, FP8_DS_MLA.name, scale)


def _written_format(device: torch.device) -> str | None:
    """The scale format that the operator makes, None where it is neither; waits for the device."""
    kv_c = (torch.arange(KV_LORA_RANK, device=device) % 7 - 3).bfloat16().unsqueeze(0)
    k_pe = torch.zeros((1, QK_ROPE_HEAD_DIM), dtype=torch.bfloat16, device=device)
    target = torch.zeros((1, 1, FP8_DS_MLA.row_width), dtype=torch.uint8, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    _write({"kv_c": kv_c, "k_pe": k_pe, "kv_cache": target, "slot_mapping": slots})()
    scales = target[0, 0, FP8_DS_MLA.scale_offset : FP8_DS_MLA.rope_offset].cpu().view(torch.float32)
    return next((name for name in SCALE_FORMATS if torch.equal(scales, tile_scales(kv_c.cpu(), name)[0])), None)


def _write_reasons(request: Request) -> Iterator[Reason]:
    """vLLM's writer is here, and makes scales of the format that is asked for."""
    reasons, device = list(_fp8_reasons(_WRITE, request)), device_with(request.device)
    yield from reasons
    if not reasons and device is not None and (written := _written_format(device)) != request.scale_format:
        yield Reason("scale_format", str(request.scale_format), f"this build of vLLM writes {written or 'neither of them'}")


def _prepare_write(request: Request, arguments: Arguments) -> BaselineCall:
    return BaselineCall(_write(arguments), lambda: arguments["kv_cache"])


def _prepare_gather(request: Request, arguments: Arguments) -> BaselineCall:
    """Its schema says whether it takes lengths, or each request ends where the next begins; this workspace is packed.

    vLLM from 0.26 on has optional arguments behind them that its schema gives no default: None is passed.
    """
    operator: Any = vllm_operator(_GATHER)
    source, table, lens, starts, out = (
        arguments[name] for name in ("kv_cache", "block_table", "seq_lens", "workspace_starts", "out")
    )
    names = [argument.name for argument in operator._schema.arguments]
    places = (lens, starts) if "seq_lens" in names else (starts,)
    given = (source, out, table, *places, table.shape[0])
    return BaselineCall(partial(operator, *given, **dict.fromkeys(names[len(given) :])), lambda: out)


def _convert_reasons(request: Request) -> Iterator[Reason]:
    yield from multiple_of(request, _CONVERT_BLOCK)
    yield from missing_function(_CONVERT, _CONVERT_MODULE)


def _prepare_convert(request: Request, arguments: Arguments) -> BaselineCall:
    function: Any = imported_function(_CONVERT, _CONVERT_MODULE)
    positions, owner, table = (arguments[name] for name in ("topk_indices", "req_id_per_token", "block_table"))
    size, topk = arguments["block_size"], positions.shape[1]
    return recorded(
        lambda: function(owner, table, positions, BLOCK_SIZE=size, NUM_TOPK_TOKENS=topk, BLOCK_N=_CONVERT_BLOCK),
        lambda got: (got, (got >= 0).sum(dim=1, dtype=torch.int32)),
    )


def data_baselines() -> Iterator[Baseline]:
    """One for each primitive; each says for itself whether it is here."""
    unguarded = "indices, slots and table entries are taken as valid"
    yield Baseline("vllm.concat_and_cache_mla", CACHE_WRITE, _write_reasons, _prepare_write, unguarded)
    yield Baseline("vllm.cp_gather", GATHER_UPCONVERT, partial(_fp8_reasons, _GATHER), _prepare_gather, unguarded)
    uncounted = f"{unguarded}; nothing is counted"
    yield Baseline("vllm.convert", CONVERT_INDICES, _convert_reasons, _prepare_convert, uncounted)
