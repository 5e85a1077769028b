# SPDX-License-Identifier: Apache-2.0
"""vLLM's own data-movement operators behind cache_write, gather_upconvert and convert_indices, where vLLM is installed.

Each is recognised by its schema. What they do not guarantee is added in torch operations that neither read back nor
synchronise: a slot past the cache would be written, a negative table entry followed, rows between requests overwritten.
Those passes cost more than the portable kernels, which need none, so these implementations rank behind them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, MLAPortableError, Reason, Request, Support
from mla_portable.layouts import FP8_DS_MLA, HEAD_SIZE, KV_LORA_RANK, QK_ROPE_HEAD_DIM, SCALE_FORMATS, tile_scales
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT, CacheWrite, ConvertIndices, GatherUpconvert
from mla_portable_nvidia.discovery import device_with

FLOAT16: Final = "dtype of kv_c"
"""What a reason against a writer that serves bfloat16 alone is about."""
_CACHE_OPS: Final = "_C_cache_ops"
_MODULES: Final = ("vllm._C_stable_libtorch", "vllm._C")
"""Extensions that register the operators, by age."""
_CONVERT_MODULE: Final = "vllm.v1.attention.backends.mla.sparse_utils"
_CONVERT: Final = "triton_convert_req_index_to_global_index"
_PREFERENCE: Final = 60.0
"""Behind the portable kernels (50) until a measurement says otherwise."""
_INT32_MAX: Final = 2**31 - 1
INSTALL_VLLM: Final = "install vLLM, or take another backend"


def vllm_operator(name: str, library: str = _CACHE_OPS) -> Any | None:
    """An operator of vLLM's, None where no vLLM brings it. library: the namespace that it is registered in."""
    for module in (None, *_MODULES):
        try:
            if module is not None:
                import_module(module)
        except (ImportError, OSError, RuntimeError):
            continue
        packet = getattr(getattr(torch.ops, library), name, None)
        if packet is not None:
            return packet.default
    return None


def _names(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


# ------------------------------------------------------------------------------------------------------- cache_write


class _Writer:
    """`concat_and_cache_mla` for FP8 rows; see `contracts.CacheWrite`. Graph-safe."""

    def __init__(self, operator: Any, device: torch.device) -> None:
        self._operator = operator
        self._scale = torch.ones(1, dtype=torch.float32, device=device)  # not read for this layout

    def __call__(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2"
    ) -> None:
        if kv_c.shape[0] == 0:
            return
        num_slots = kv_cache.shape[0] * kv_cache.shape[1]
        slots = slot_mapping.masked_fill(slot_mapping >= num_slots, -1)
        if k_pe.dtype != torch.bfloat16:  # the operator copies the rotary part bit by bit
            k_pe = k_pe.to(torch.bfloat16).view(k_pe.dtype)
        self._operator(kv_c, k_pe, kv_cache, slots, FP8_DS_MLA.name, self._scale)


def _written_row(operator: Any, kv_c: Tensor) -> Tensor:
    """The 656 bytes that the operator makes of a latent, [1, 512]; waits for the device."""
    device = kv_c.device
    k_pe = torch.zeros((1, QK_ROPE_HEAD_DIM), dtype=kv_c.dtype, device=device)
    cache = torch.zeros((1, 1, FP8_DS_MLA.row_width), dtype=torch.uint8, device=device)
    _Writer(operator, device)(kv_c, k_pe, cache, torch.zeros(1, dtype=torch.int64, device=device))
    return cache[0, 0].cpu()


def _written_format(row: Tensor, kv_c: Tensor) -> str | None:
    """The scale format of a row that was written, None where it is neither."""
    scales = row[FP8_DS_MLA.scale_offset : FP8_DS_MLA.rope_offset].view(torch.float32)
    return next((name for name in SCALE_FORMATS if torch.equal(scales, tile_scales(kv_c.cpu(), name)[0])), None)


def _check_writer(scale_format: str) -> Callable[[DeviceFacts], Iterator[Reason]]:
    """vLLM is here, and its writer makes scales of this format, of bfloat16 and of float16 alike."""

    def check(facts: DeviceFacts) -> Iterator[Reason]:
        operator, device = vllm_operator("concat_and_cache_mla"), device_with(facts)
        if operator is None or device is None:
            yield Reason("operator", f"{_CACHE_OPS}.concat_and_cache_mla", "not registered by any package here", INSTALL_VLLM)
            return
        kv_c = (torch.arange(KV_LORA_RANK, device=device) % 7 - 3).bfloat16().unsqueeze(0)  # exact in float16 too
        row = _written_row(operator, kv_c)
        written = _written_format(row, kv_c)
        if written != scale_format:
            remedy = "take nvidia.vllm_pow2 or nvidia.vllm_amax, whichever checks"
            yield Reason("scale_format", written or "neither", f"this implementation writes {scale_format}", remedy)
        if not torch.equal(_written_row(operator, kv_c.half()), row):
            limit = "this build of vLLM writes other bytes for it than for the same numbers in bfloat16"
            yield Reason(FLOAT16, "float16", limit, "take another backend")

    return check


def bind_cache_write(request: Request) -> CacheWrite:
    """cache_write through vLLM. Raises: MLAPortableError where it is not here."""
    operator, device = vllm_operator("concat_and_cache_mla"), device_with(request.device)
    if operator is None or device is None:
        raise MLAPortableError("cache_write: vLLM's concat_and_cache_mla is not here")
    return _Writer(operator, device)


# --------------------------------------------------------------------------------------------------- gather_upconvert

_GATHER: Final = "cp_gather_and_upconvert_fp8_kv_cache"
_WITH_LENGTHS: Final = ["src_cache", "dst", "block_table", "seq_lens", "workspace_starts", "batch_size"]
_WITHOUT_LENGTHS: Final = ["src_cache", "dst", "block_table", "workspace_starts", "batch_size"]


def gather_call(
    operator: Any, kv_cache: Tensor, rows: Tensor, block_table: Tensor, seq_lens: Tensor, starts: Tensor
) -> Callable[[], None]:
    """The operator on these tensors, called as its schema wants it: with lengths, or without.

    vLLM from 0.26 on has optional arguments behind them that its schema gives no default: None is passed.
    """
    names = _names(operator)
    places = (seq_lens, starts) if "seq_lens" in names else (starts,)
    arguments = (kv_cache, rows, block_table, *places, block_table.shape[0])
    absent = dict.fromkeys(names[len(arguments) :])
    return partial(operator, *arguments, **absent)


class _Gatherer:
    """`cp_gather_and_upconvert_fp8_kv_cache` of either convention; see `contracts.GatherUpconvert`. Graph-safe.

    Without `seq_lens` a request ends where the next begins, so the operator gathers into a packed workspace of its own, with
    one request more that owns what is left; from there rows go to their places, and only those that a request owns.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __call__(
        self, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor, *, out: Tensor
    ) -> Tensor:
        num_requests, columns = block_table.shape
        num_rows = out.shape[0]
        blocks, block_size, _ = kv_cache.shape
        if num_requests == 0 or num_rows == 0:
            return out
        starts = workspace_starts.long()
        lens = torch.minimum(seq_lens.long(), num_rows - starts).clamp(min=0)  # [P]
        ends = lens.cumsum(0)
        width = max(columns, -(-num_rows // block_size))
        table = torch.zeros((num_requests + 1, width), dtype=torch.int32, device=out.device)
        there = (block_table >= 0) & (block_table < blocks)
        table[:-1, :columns] = block_table.masked_fill(~there, 0)
        packed = torch.cat([torch.zeros_like(ends[:1]), ends]).int()  # [P + 1] starts of the packed requests
        rows = torch.empty((num_rows, HEAD_SIZE), dtype=torch.bfloat16, device=out.device)
        if blocks:
            rest = (num_rows - ends[-1:]).clamp(min=0)
            gather_call(self._operator, kv_cache, rows, table, torch.cat([lens, rest]).int(), packed)()
        # who owns each row of out: the last request that begins at or before it, if it reaches that far
        row = torch.arange(num_rows, device=out.device)  # [W]
        ordered, order = torch.where(lens > 0, starts, num_rows).sort()
        rank = torch.searchsorted(ordered, row, right=True) - 1
        owner = order[rank.clamp(min=0)]  # [W]
        position = row - starts[owner]
        owned = (rank >= 0) & (position >= 0) & (position < lens[owner])
        column = position.clamp(min=0) // block_size
        valid = owned & (column < columns)
        if columns:
            valid &= there[owner, column.clamp(max=columns - 1)]
        source = (packed[:-1].long()[owner] + position).clamp(0, num_rows - 1)
        placed = rows[source].masked_fill(~valid.unsqueeze(1), 0.0)
        return out.copy_(torch.where(owned.unsqueeze(1), placed, out))


def _check_gather(facts: DeviceFacts) -> Iterator[Reason]:
    operator = vllm_operator(_GATHER)
    if operator is None:
        yield Reason("operator", f"{_CACHE_OPS}.{_GATHER}", "not registered by any package here", INSTALL_VLLM)
        return
    names = _names(operator)
    known = next((each for each in (_WITH_LENGTHS, _WITHOUT_LENGTHS) if names[: len(each)] == each), None)
    more = [] if known is None else operator._schema.arguments[len(known) :]
    if known is None or not all(isinstance(argument.type, torch.OptionalType) for argument in more):
        shape = "src_cache, dst, block_table[, seq_lens], workspace_starts, batch_size"
        yield Reason("schema", ", ".join(names), f"known is ({shape}), then what may be absent", "take another backend")


def bind_gather_upconvert(request: Request) -> GatherUpconvert:
    """gather_upconvert through vLLM. Raises: MLAPortableError where it is not here."""
    operator = vllm_operator(_GATHER)
    if operator is None:
        raise MLAPortableError(f"gather_upconvert: vLLM's {_GATHER} is not here")
    return _Gatherer(operator)


# ---------------------------------------------------------------------------------------------------- convert_indices


class _Converter:
    """vLLM's Triton conversion; see `contracts.ConvertIndices`. Graph-safe."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(
        self,
        topk_indices: Tensor,
        req_id_per_token: Tensor,
        block_table: Tensor,
        *,
        block_size: int,
        num_slots: int | None = None,
        prefill_request_ids: Tensor | None = None,
        prefill_workspace_starts: Tensor | None = None,
        compact: bool = False,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if out is None:
            counts = torch.empty(topk_indices.shape[:1], dtype=torch.int32, device=topk_indices.device)
            out = (torch.empty(topk_indices.shape, dtype=torch.int32, device=topk_indices.device), counts)
        indices, counts = out
        if topk_indices.shape[0] == 0:
            return indices, counts
        # an entry is multiplied whatever it is, and may wrap around: -1, whose slots are all negative, stands for all bad ones.
        # Of the block that int32 ends in, the slots past that become negative by themselves
        limit = _INT32_MAX if num_slots is None else min(num_slots - 1, _INT32_MAX)
        bad = (block_table < 0) | (block_table > _INT32_MAX // block_size)
        table = block_table.masked_fill(bad, -1)
        found = self._function(
            req_id_per_token,
            table,
            topk_indices,
            BLOCK_SIZE=block_size,
            NUM_TOPK_TOKENS=topk_indices.shape[1],
            BLOCK_N=64,
        )
        indices.copy_(found.masked_fill((found < 0) | (found > limit), -1))
        counts.copy_((indices >= 0).sum(dim=1))
        return indices, counts


def _convert_function() -> Callable[..., Any] | str:
    """The function, or why it cannot be had."""
    try:
        function = getattr(import_module(_CONVERT_MODULE), _CONVERT)
    except Exception as error:  # vLLM's import fails in many ways on a machine that it does not fit
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    missing = {"BLOCK_SIZE", "NUM_TOPK_TOKENS", "BLOCK_N"} - set(inspect.signature(function).parameters)
    return f"it has no parameter {', '.join(sorted(missing))}" if missing else function


def _check_convert(facts: DeviceFacts) -> Iterator[Reason]:
    function = _convert_function()
    if isinstance(function, str):
        yield Reason("function", f"{_CONVERT_MODULE}.{_CONVERT}", function, INSTALL_VLLM)


def bind_convert_indices(request: Request) -> ConvertIndices:
    """convert_indices through vLLM. Raises: MLAPortableError where it is not here."""
    function = _convert_function()
    if isinstance(function, str):
        raise MLAPortableError(f"convert_indices: {_CONVERT_MODULE}.{_CONVERT}: {function}")
    # without the arguments of a ContextShare: no support is declared, so it is never called with them
    return _Converter(function)  # pyright: ignore[reportReturnType]


# ------------------------------------------------------------------------------------------------------- declarations


def data_implementations(*, device_types: tuple[str, ...] = ("cuda",)) -> Iterator[Implementation]:
    """What vLLM's operators serve.

    A writer makes scales of one format, which is found out by letting it write; so there is an implementation for each.
    The conversion bounds workspace rows by the table's width and compacts in no order, so it claims neither.
    """
    declared: dict[str, Any] = {"device_types": device_types, "vendors": ("nvidia",)}
    # rows are read and written in vectors
    fp8: dict[str, Any] = {"kv_layouts": (FP8_DS_MLA.name,), "cache_alignment": 16, **declared}
    common: dict[str, Any] = {"preference": _PREFERENCE}
    for scale_format in SCALE_FORMATS:
        support = Support("vLLM 0.24 to 0.33: concat_and_cache_mla's schema", scale_formats=(scale_format,), **fp8)
        name, check = f"nvidia.vllm_{scale_format}", _check_writer(scale_format)
        yield Implementation(name, CACHE_WRITE, support, bind_cache_write, check=check, **common)
    gather = Support("vLLM 0.24 to 0.33: cp_gather_and_upconvert_fp8_kv_cache's schema", **fp8)
    yield Implementation("nvidia.vllm", GATHER_UPCONVERT, gather, bind_gather_upconvert, check=_check_gather, **common)
    convert = Support(
        "vLLM 0.24 to 0.33: sparse_utils.py",
        kv_layouts=("bf16", FP8_DS_MLA.name),
        topk_multiple=64,
        compact=False,
        prefill_workspace=False,
        **declared,
    )
    yield Implementation("nvidia.vllm", CONVERT_INDICES, convert, bind_convert_indices, check=_check_convert, **common)
