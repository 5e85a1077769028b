# SPDX-License-Identifier: Apache-2.0
"""`nvidia.native_sm80`: the native attention kernel for devices other than those of compute capability 9.0, up to 128 heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, cast

from mla_portable.contracts import DecodeSchedule, Implementation, Primitive, Request, Support
from mla_portable.kit.split_kv import ProgramShape, SplitSchedule, split_kv, split_kv_kind
from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparseDecode, SparsePrefill
from mla_portable_nvidia.native.bound_attention import BoundAttention, lists_of, rows_of_request
from mla_portable_nvidia.native.checks import check
from mla_portable_nvidia.native.kernel_build import load
from mla_portable_nvidia.native.sparse_decode import Tensors
from mla_portable_nvidia.native.sparse_decode_sm80 import MERGES, SHARED_MEMORY, Sm80Build, builds, prepare

__all__ = ["sm80_implementations"]

_NAME: Final = "nvidia.native_sm80"
_MANY: Final = 128
_PREFERENCE: Final = 20.0
"""Behind FlashMLA where there is one for the device, in front of the portable kernels."""


def _program(request: Request) -> ProgramShape:
    """What the planner of splits has to know of the build for a request."""
    return _builds(request)[0].program(request.device.arch)


def _builds(request: Request) -> tuple[Sm80Build, ...]:
    return builds(
        request.device.arch,
        rows_of_request(request),
        request.num_heads,
        whole=request.primitive is SPARSE_PREFILL,
        lists=lists_of(request),
        shared_memory=request.device.shared_memory,
    )


def _own_splits(request: Request, rows: int, num_heads: int, topk: int, extra_topk: int, shape: ProgramShape) -> int:
    """Of a row in a call without a schedule; tokens of a prefill and batch-invariant rows stay whole."""
    whole = request.batch_invariant or request.primitive is not SPARSE_DECODE
    num_sms = 0 if whole else request.device.num_sms
    return split_kv(num_rows=rows, num_heads=num_heads, topk=topk, extra_topk=extra_topk, num_sms=num_sms, program=shape)


class _Attention(BoundAttention):
    """A decode takes the splits and the scratch of its schedule; without one it allocates scratch where it is split."""

    name = _NAME

    def cut_of(self, schedule: DecodeSchedule | None) -> tuple[int, ...] | None:
        if schedule is None:
            return None
        made = cast("SplitSchedule", schedule)  # the type of `schedule_kind`, which the callers check
        scratch = made.partial_out, made.partial_lse
        return (made.num_splits, *(0 if part is None else part.data_ptr() for part in scratch))

    def _load(self, index: int) -> None:
        for build in (*_builds(self._request), *MERGES):
            load(build, build.archs[self._request.device.arch], index)

    def prepared(self, of: Tensors, cut: tuple[int, ...] | None) -> Callable[..., None]:
        arch, index = self._request.device.arch, of.q.device.index
        batch, query_len, num_heads, _ = of.q.shape
        (build,) = _builds(self._request.but(num_heads=num_heads))
        if cut is None:
            topk, extra_topk = of.indices.shape[2], 0 if of.extra_indices is None else of.extra_indices.shape[2]
            cut = (_own_splits(self._request, batch * query_len, num_heads, topk, extra_topk, build.program(arch)),)
        return prepare(load(build, build.archs[arch], index), lambda each: load(each, each.archs[arch], index), build, of, *cut)


def bind_sparse_decode(request: Request) -> SparseDecode:
    """sparse_decode. Raises: NvrtcNotFound, CompilationFailed, DriverError where the kernel cannot be built here."""
    return _Attention(request).decode


def bind_sparse_prefill(request: Request) -> SparsePrefill:
    """sparse_prefill, likewise."""
    return _Attention(request).prefill


_BIND: Final[dict[Primitive, Any]] = {SPARSE_DECODE: bind_sparse_decode, SPARSE_PREFILL: bind_sparse_prefill}


def _support() -> Support:
    return Support(
        source="mla_portable_nvidia/native: sparse_decode_sm80.cu, merge_splits.cu; code for sm80 run on an H200",
        device_types=("cuda",),
        vendors=("nvidia",),
        archs=tuple(Sm80Build.archs),
        kv_layouts=(BF16.name, FP8_DS_MLA.name, BF16_NOPE.name, FP8_NOPE.name, FP8_V4.name),
        max_heads=_MANY,
        cache_alignment=16,
        min_shared_memory=SHARED_MEMORY,
        batch_invariant=True,
        extra_cache=True,
        nope=True,
    )


def sm80_implementations() -> Iterator[Implementation]:
    """sparse_decode and sparse_prefill."""
    for primitive, function in _BIND.items():
        decodes = primitive is SPARSE_DECODE
        yield Implementation(
            name=_NAME,
            primitive=primitive,
            support=_support(),
            bind=function,
            check=check,
            preference=_PREFERENCE,
            schedule_kind=split_kv_kind(_program) if decodes else None,
            prefills_as=_NAME if decodes else "",
        )
