# SPDX-License-Identifier: Apache-2.0
"""The native kernels as implementations: declared, checked and bound.

`nvidia.native` serves up to 32 heads, where FlashMLA would compute 64; `nvidia.native_wide` up to 128. Both read the FP8 cache
and BF16 rows, for decode and for prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import (
    Implementation,
    InvalidArgument,
    MLAPortableError,
    Primitive,
    Request,
    Support,
    attention_results,
)
from mla_portable.layouts import BF16, FP8_DS_MLA, LAYOUTS
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparseDecode, SparsePrefill
from mla_portable_nvidia.discovery import device_with
from mla_portable_nvidia.head_padding import aligned
from mla_portable_nvidia.native.build import load
from mla_portable_nvidia.native.checks import check
from mla_portable_nvidia.native.choice import FEW, Cut, builds, choose
from mla_portable_nvidia.native.driver import Kernel
from mla_portable_nvidia.native.sparse_decode import Build, Tensors, prepare

__all__ = ["ARCHS", "native_implementations"]

ARCHS: Final = Build.archs
"""DeviceFacts.arch -> what NVRTC compiles for."""
_LAYOUTS: Final = (BF16.name, FP8_DS_MLA.name)
_MANY: Final = 128
_LAUNCHES: Final = 1024
_LOG2_E: Final = 1.4426950408889634


class _Device:
    """What serves a bound request on one device: its builds, loaded, and the cut of each shape that was asked for."""

    def __init__(self, request: Request, index: int) -> None:
        self._kv_layout, self._num_sms = _layout(request), request.device.num_sms
        self._batch_invariant = request.batch_invariant
        self._kernels: dict[Build, Kernel] = {
            build: load(build, ARCHS[request.device.arch], index)
            for build in builds(self._kv_layout, request.num_heads or _MANY)
        }
        self._clusters: dict[tuple[Build, int], int] = {}
        self._cuts: dict[tuple[int, int, int], Cut] = {}

    def _held(self, build: Build, splits: int) -> int:
        if (build, splits) not in self._clusters:
            self._clusters[build, splits] = self._kernels[build].max_clusters(splits)
        return self._clusters[build, splits]

    def cut(self, rows: int, num_heads: int, topk: int) -> tuple[Kernel, Cut]:
        """The kernel and the cut for a shape; chosen once for each. Batch-invariant, it is that of a row a multiprocessor."""
        if self._batch_invariant:
            rows = self._num_sms
        cut = self._cuts.get((rows, num_heads, topk))
        if cut is None:
            cut = choose(self._kv_layout, rows=rows, num_heads=num_heads, topk=topk, num_sms=self._num_sms, clusters=self._held)
            self._cuts[rows, num_heads, topk] = cut
        return self._kernels[cut.build], cut


def _layout(request: Request) -> str:
    return request.kv_layout or FP8_DS_MLA.name


def _check_cache(kv: Tensor, kv_layout: str) -> None:
    """What the request that was bound says of a cache, for callers that bring another: a wrong one would lose the device.

    Raises: InvalidArgument.
    """
    layout = LAYOUTS[kv_layout]
    if (kv.dtype, kv.shape[-1]) != (layout.dtype, layout.row_width):
        raise InvalidArgument(
            "nvidia.native",
            "kv_cache",
            got=f"{kv.dtype} rows of {kv.shape[-1]}",
            expected=f"{layout.dtype} rows of {layout.row_width}, for it was bound for {kv_layout}",
        )
    apart = kv.stride(0) * kv.element_size()
    if kv.data_ptr() % 16 or apart % 16:
        raise InvalidArgument(
            "nvidia.native",
            "kv_cache",
            got=f"a start at {kv.data_ptr() % 16} and blocks {apart} bytes apart",
            expected="multiples of 16 bytes, for it was bound with cache_alignment=16; bind for what the cache has",
        )


class NativeAttention:
    """Both primitives on the native kernel for a bound request's layout; devices are loaded at bind or at their first call."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._kv_layout = _layout(request)
        self._devices: dict[int, _Device] = {}
        self._launches: dict[tuple[Any, ...], Callable[..., None]] = {}
        device = device_with(request.device)
        if device is None or device.type != "cuda":
            raise MLAPortableError(f"{request.primitive}: no CUDA device of this machine is {request.device}")
        self._load(device.index)

    def _load(self, index: int) -> None:
        """Compile and load what a device needs."""
        self._on(index)

    def _on(self, index: int) -> _Device:
        found = self._devices.get(index)
        if found is None:
            found = self._devices[index] = _Device(self._request, index)
        return found

    def decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        schedule: Any = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """sparse_decode; `schedule` is not needed, the splits follow from the shape and take no scratch."""
        return self._attend(q, kv_cache, indices, softmax_scale, lengths, attn_sink, out, lse_out)

    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """sparse_prefill on the paged FP8 cache or on flat BF16 rows, which are one block: tokens are rows of one query."""
        return self._attend(q, kv, indices, softmax_scale, lengths, attn_sink, out, lse_out)

    def _attend(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        softmax_scale: float,
        lengths: Tensor | None,
        attn_sink: Tensor | None,
        out: Tensor | None,
        lse_out: Tensor | None,
        cut: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Either primitive, by the axes of q. A launch is prepared for the first call of its shapes, strides and `cut`."""
        out, lse_out = attention_results(q, kv, out, lse_out)
        q_at, kv_at, out_at = q.data_ptr(), kv.data_ptr(), out.data_ptr()
        shapes = (q.shape, kv.shape, indices.shape, q.get_device(), kv.dtype)
        strides = (q.stride(), kv.stride(), indices.stride(), out.stride(), lse_out.stride())
        key = (shapes, strides, None if lengths is None else lengths.stride(), cut)
        launch = self._launches.get(key)
        if launch is None or q_at % 16 or kv_at % 16 or out_at % 8:
            if 0 in q.shape[:-2]:
                return out, lse_out
            _check_cache(kv, self._kv_layout)
            # loads of q are 16 bytes wide and stores of out 8: a copy only where their strides do not allow that
            query, whole = aligned(q), out_at % 8 == 0 and not any(stride % 4 for stride in out.stride()[:-1])
            if query is not q or not whole:
                to = out if whole else torch.empty_like(out, memory_format=torch.contiguous_format)
                self._attend(query, kv, indices, softmax_scale, lengths, attn_sink, to, lse_out, cut)
                return out if whole else out.copy_(to), lse_out
            if len(self._launches) >= _LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = self._prepared(_as_decode(Tensors(q, kv, indices, out, lse_out, lengths)), cut)
        launch(
            out_at,
            lse_out.data_ptr(),
            q_at,
            kv_at,
            indices.data_ptr(),
            0 if lengths is None else lengths.data_ptr(),
            0 if attn_sink is None else attn_sink.data_ptr(),
            softmax_scale * _LOG2_E,
        )
        return out, lse_out

    def _prepared(self, of: Tensors, cut: Any) -> Callable[..., None]:
        """Launches for tensors like these. cut: of a schedule, where a kernel takes one."""
        batch, query_len, num_heads, _ = of.q.shape
        kernel, own = self._on(of.q.device.index).cut(batch * query_len, num_heads, of.indices.shape[2])
        return prepare(kernel, own.build, of, num_splits=own.num_splits, split_len=own.split_len)


def _as_decode(of: Tensors) -> Tensors:
    """A prefill's tensors with the axis that decode has; flat rows are one block."""
    if of.q.dim() == 4:
        return of
    q, kv, indices, out, lse_out, lengths = of
    return Tensors(
        q.unsqueeze(1),
        kv if kv.dim() == 3 else kv.unsqueeze(0),
        indices.unsqueeze(1),
        out.unsqueeze(1),
        lse_out.unsqueeze(1),
        None if lengths is None else lengths.unsqueeze(1),
    )


def bind_sparse_decode(request: Request) -> SparseDecode:
    """sparse_decode. Raises: NvrtcNotFound, CompilationFailed, DriverError where the kernel cannot be built here."""
    return NativeAttention(request).decode


def bind_sparse_prefill(request: Request) -> SparsePrefill:
    """sparse_prefill, likewise."""
    return NativeAttention(request).prefill


def native_implementations() -> Iterator[Implementation]:
    """sparse_decode and sparse_prefill, preferred to FlashMLA's but for prefills of more than few heads."""
    bind: dict[Primitive, Any] = {
        SPARSE_DECODE: bind_sparse_decode,
        SPARSE_PREFILL: bind_sparse_prefill,
    }
    for name, max_heads, preferences in (("nvidia.native", FEW, (8.0, 8.0)), ("nvidia.native_wide", _MANY, (9.0, 20.0))):
        offered = [build for layout in _LAYOUTS for build in builds(layout, max_heads)]
        kernels = tuple(dict.fromkeys(build.kernel for build in offered))
        for (primitive, function), preference in zip(bind.items(), preferences, strict=True):
            yield Implementation(
                name=name,
                primitive=primitive,
                support=Support(
                    source=f"mla_portable_nvidia/native: {', '.join(f'{kernel}.cu' for kernel in kernels)}; run on an H200",
                    device_types=("cuda",),
                    vendors=("nvidia",),
                    archs=tuple(ARCHS),
                    kv_layouts=_LAYOUTS,
                    max_heads=max_heads,
                    cache_alignment=16,
                    min_shared_memory=max(build.shared_bytes for build in offered),
                    needs_fp8_conversion=True,
                    batch_invariant=True,
                ),
                bind=function,
                check=check,
                preference=preference,
                prefills_as=name if primitive is SPARSE_DECODE else "",
            )
