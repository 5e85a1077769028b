# SPDX-License-Identifier: Apache-2.0
"""The native kernel as implementations: declared, checked and bound.

`nvidia.native` serves up to 32 heads, where FlashMLA would compute 64; `nvidia.native_wide` more, for machines where
nothing brings FlashMLA. Both read the paged FP8 cache itself, for decode and for prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import (
    FP8_DS_MLA,
    KV_LORA_RANK,
    DeviceFacts,
    Implementation,
    InvalidArgument,
    MLAPortableError,
    Primitive,
    Reason,
    Request,
    SparseDecode,
    SparsePrefill,
    Support,
)
from mla_portable_nvidia.discovery import device_with
from mla_portable_nvidia.head_padding import aligned
from mla_portable_nvidia.native.choice import BUILDS, Cut, choose
from mla_portable_nvidia.native.driver import DriverError, Kernel, driver_version
from mla_portable_nvidia.native.nvrtc import NvrtcNotFound, nvrtc_version
from mla_portable_nvidia.native.sparse_decode import Build, launch, load, shared_bytes

__all__ = ["ARCHS", "native_implementations"]

ARCHS: Final = {"sm90": "sm_90a"}
"""DeviceFacts.arch -> what NVRTC compiles for."""
_FEW: Final = 32
_MODULES: Final = ("bind", "choice", "driver", "nvrtc", "sparse_decode")
_SOURCES: Final = (
    *(f"mla_portable_nvidia.native.{name}" for name in _MODULES),
    "mla_portable_nvidia.head_padding",
    "mla_portable_nvidia.native:sparse_decode_fp8.cu",
)


class _Device:
    """The kernel on one device: its builds, loaded, and the cut of each shape that was asked for."""

    def __init__(self, arch: str, index: int, num_sms: int) -> None:
        self._num_sms = num_sms
        self._kernels: dict[Build, Kernel] = {build: load(build, ARCHS[arch], index) for build in BUILDS}
        self._clusters: dict[tuple[Build, int], int] = {}
        self._cuts: dict[tuple[int, int, int], Cut] = {}

    def _held(self, build: Build, splits: int) -> int:
        if (build, splits) not in self._clusters:
            self._clusters[build, splits] = self._kernels[build].max_clusters(splits)
        return self._clusters[build, splits]

    def cut(self, rows: int, num_heads: int, topk: int) -> tuple[Kernel, Cut]:
        """The kernel and the cut for a shape; chosen once for each."""
        cut = self._cuts.get((rows, num_heads, topk))
        if cut is None:
            cut = choose(rows=rows, num_heads=num_heads, topk=topk, num_sms=self._num_sms, clusters=self._held)
            self._cuts[rows, num_heads, topk] = cut
        return self._kernels[cut.build], cut


def _check_cache(kv: Tensor) -> None:
    """Rows are copied 16 bytes at a time. Raises: InvalidArgument."""
    if kv.data_ptr() % 16 or kv.stride(0) % 16:
        raise InvalidArgument(
            "nvidia.native",
            "kv_cache",
            got=f"a start at {kv.data_ptr() % 16} and blocks {kv.stride(0)} bytes apart",
            expected="multiples of 16 bytes; allocate blocks of whole rows, or use backend='triton'",
        )


class NativeAttention:
    """Both primitives on the native kernel; one for a bound request, its devices loaded at bind or at their first call."""

    def __init__(self, request: Request) -> None:
        self._arch, self._num_sms = request.device.arch, request.device.num_sms
        self._devices: dict[int, _Device] = {}
        device = device_with(request.device)
        if device is None or device.type != "cuda":
            raise MLAPortableError(f"{request.primitive}: no CUDA device of this machine is {request.device}")
        self._on(device.index)

    def _on(self, index: int) -> _Device:
        found = self._devices.get(index)
        if found is None:
            found = self._devices[index] = _Device(self._arch, index, self._num_sms)
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
        batch, query_len, num_heads, _ = q.shape
        if out is None:
            out = torch.empty((batch, query_len, num_heads, KV_LORA_RANK), dtype=torch.bfloat16, device=q.device)
        if lse_out is None:
            lse_out = torch.empty((batch, query_len, num_heads), dtype=torch.float32, device=q.device)
        if batch == 0 or query_len == 0:
            return out, lse_out
        _check_cache(kv_cache)
        # loads of q are 16 bytes wide and stores of out 8: a copy only where their strides do not allow that
        whole = out.data_ptr() % 8 == 0 and not any(stride % 4 for stride in out.stride()[:3])
        to = out if whole else torch.empty_like(out, memory_format=torch.contiguous_format)
        kernel, cut = self._on(q.device.index).cut(batch * query_len, num_heads, indices.shape[2])
        launch(
            kernel,
            cut.build,
            to,
            lse_out,
            aligned(q),
            kv_cache,
            indices,
            softmax_scale=softmax_scale,
            lengths=lengths,
            attn_sink=attn_sink,
            num_splits=cut.num_splits,
            split_len=cut.split_len,
        )
        if not whole:
            out.copy_(to)
        return out, lse_out

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
        """sparse_prefill on the paged cache: tokens are rows of one query."""
        num_tokens, num_heads, _ = q.shape
        if out is None:
            out = torch.empty((num_tokens, num_heads, KV_LORA_RANK), dtype=torch.bfloat16, device=q.device)
        if lse_out is None:
            lse_out = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
        self.decode(
            q.unsqueeze(1),
            kv,
            indices.unsqueeze(1),
            softmax_scale=softmax_scale,
            lengths=None if lengths is None else lengths.unsqueeze(1),
            attn_sink=attn_sink,
            out=out.unsqueeze(1),
            lse_out=lse_out.unsqueeze(1),
        )
        return out, lse_out


def bind_sparse_decode(request: Request) -> SparseDecode:
    """sparse_decode. Raises: NvrtcNotFound, CompilationFailed, DriverError where the kernel cannot be built here."""
    return NativeAttention(request).decode


def bind_sparse_prefill(request: Request) -> SparsePrefill:
    """sparse_prefill, likewise."""
    return NativeAttention(request).prefill


def check(device: DeviceFacts) -> Iterator[Reason]:
    """What compiling and launching need of this machine."""
    if device_with(device) is None:
        yield Reason("device", str(device), "not on this machine")
        return
    try:
        nvrtc_version()
    except NvrtcNotFound as error:
        yield Reason("NVRTC", "not found", str(error), "install the package nvidia-cuda-nvrtc of torch's CUDA version")
    try:
        driver_version()
    except (OSError, DriverError) as error:
        yield Reason("CUDA driver", "not usable", str(error), "install the NVIDIA driver")


def native_implementations(*, few: int = _FEW) -> Iterator[Implementation]:
    """sparse_decode and sparse_prefill for few heads, preferred to FlashMLA's, and for up to 128, after it."""
    bind: dict[Primitive, Any] = {
        Primitive.SPARSE_DECODE: bind_sparse_decode,
        Primitive.SPARSE_PREFILL: bind_sparse_prefill,
    }
    for name, max_heads, preference in (("nvidia.native", few, 8.0), ("nvidia.native_wide", 128, 20.0)):
        for primitive, function in bind.items():
            yield Implementation(
                name=name,
                primitive=primitive,
                support=Support(
                    source="mla_portable_nvidia/native/sparse_decode_fp8.cu; run on an H200",
                    device_types=("cuda",),
                    vendors=("nvidia",),
                    archs=tuple(ARCHS),
                    kv_layouts=(FP8_DS_MLA.name,),
                    max_heads=max_heads,
                    min_shared_memory=max(map(shared_bytes, BUILDS)),
                    needs_fp8_conversion=True,
                ),
                bind=function,
                check=check,
                preference=preference,
                sources=_SOURCES,
            )
