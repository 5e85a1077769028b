# SPDX-License-Identifier: Apache-2.0
"""The native kernels as implementations: declared, checked and bound.

`nvidia.native` serves up to 32 heads, where FlashMLA would compute 64; `nvidia.native_wide` up to 128. Both read FP8 and BF16
rows of every layout, for decode and for prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from mla_portable.contracts import Implementation, Request, Support
from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparseDecode, SparsePrefill
from mla_portable_nvidia.native.bound_attention import BoundAttention, lists_of, rows_of_request
from mla_portable_nvidia.native.build_choice import FEW, Cut, builds, choose
from mla_portable_nvidia.native.checks import check
from mla_portable_nvidia.native.kernel_build import load
from mla_portable_nvidia.native.runtime.driver import Kernel
from mla_portable_nvidia.native.sparse_decode import Build, Tensors, prepare

__all__ = ["ARCHS", "native_implementations"]

ARCHS: Final = Build.archs
"""DeviceFacts.arch -> what NVRTC compiles for."""
_LAYOUTS: Final = (BF16.name, FP8_DS_MLA.name, BF16_NOPE.name, FP8_NOPE.name, FP8_V4.name)
_MANY: Final = 128


class _Device:
    """What serves a bound request on one device: its builds, loaded, and the cut of each shape that was asked for."""

    def __init__(self, request: Request, index: int) -> None:
        self._rows, self._num_sms = rows_of_request(request), request.device.num_sms
        self._batch_invariant = request.batch_invariant
        self._kernels: dict[Build, Kernel] = {
            build: load(build, ARCHS[request.device.arch], index)
            for build in builds(self._rows, request.num_heads or _MANY, lists_of(request))
        }
        self._clusters: dict[tuple[Build, int], int] = {}
        self._cuts: dict[tuple[int, int, int, int], Cut] = {}

    def _held(self, build: Build, size: int) -> int:
        """Clusters of `size` blocks that the device holds at once."""
        if size == 1:
            return self._num_sms * build.blocks_per_sm
        if (build, size) not in self._clusters:
            self._clusters[build, size] = self._kernels[build].max_clusters(size)
        return self._clusters[build, size]

    def cut(self, rows: int, num_heads: int, topk: int, extra_topk: int) -> tuple[Kernel, Cut]:
        """The kernel and the cut for a shape; chosen once for each. Batch-invariant, it is that of a row a multiprocessor."""
        if self._batch_invariant:
            rows = self._num_sms
        shape = (rows, num_heads, topk, extra_topk)
        cut = self._cuts.get(shape)
        if cut is None:
            cut = self._cuts[shape] = choose(
                self._rows,
                rows=rows,
                num_heads=num_heads,
                topk=topk,
                extra_topk=extra_topk,
                clusters=self._held,
                uniform=self._batch_invariant,
            )
        return self._kernels[cut.build], cut


class NativeAttention(BoundAttention):
    """The kernels of compute capability 9.0: no schedule is needed, the splits follow from the shape and take no scratch."""

    def __init__(self, request: Request) -> None:
        self._devices: dict[int, _Device] = {}
        super().__init__(request)

    def _on(self, index: int) -> _Device:
        found = self._devices.get(index)
        if found is None:
            found = self._devices[index] = _Device(self._request, index)
        return found

    def _load(self, index: int) -> None:
        self._on(index)

    def prepared(self, of: Tensors, cut: tuple[int, ...] | None) -> Callable[..., None]:
        batch, query_len, num_heads, _ = of.q.shape
        extra_topk = 0 if of.extra_indices is None else of.extra_indices.shape[2]
        kernel, own = self._on(of.q.device.index).cut(batch * query_len, num_heads, of.indices.shape[2], extra_topk)
        early = self._request.follows_in_order
        return prepare(kernel, own.build, of, cluster=own.cluster, whole=own.whole, starts_early=early)


def bind_sparse_decode(request: Request[SparseDecode]) -> SparseDecode:
    """sparse_decode. Raises: NvrtcNotFound, CompilationFailed, DriverError where the kernel cannot be built here."""
    return NativeAttention(request).decode


def bind_sparse_prefill(request: Request[SparsePrefill]) -> SparsePrefill:
    """sparse_prefill, likewise."""
    return NativeAttention(request).prefill


def _support(max_heads: int) -> Support:
    """Of the kernels that serve up to so many heads, for either primitive."""
    offered = [build for layout in _LAYOUTS for build in builds(layout, max_heads)]
    kernels = tuple(dict.fromkeys(build.kernel for build in offered))
    return Support(
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
        extra_cache=True,
        nope=True,
    )


def native_implementations() -> Iterator[Implementation[SparseDecode] | Implementation[SparsePrefill]]:
    """sparse_decode and sparse_prefill, preferred to FlashMLA's but for prefills of more than few heads."""
    for name, max_heads, decode_cost, prefill_cost in (
        ("nvidia.native", FEW, 8.0, 8.0),
        ("nvidia.native_wide", _MANY, 9.0, 20.0),
    ):
        support = _support(max_heads)
        yield Implementation(
            name=name,
            primitive=SPARSE_DECODE,
            support=support,
            bind=bind_sparse_decode,
            check=check,
            preference=decode_cost,
            prefills_as=name,
        )
        yield Implementation(
            name=name,
            primitive=SPARSE_PREFILL,
            support=support,
            bind=bind_sparse_prefill,
            check=check,
            preference=prefill_cost,
        )
