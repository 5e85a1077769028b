# SPDX-License-Identifier: Apache-2.0
"""pack_selection in CUDA: its build and its launch, a block for each row and SPAN positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, Final

import torch
from torch import Tensor

from mla_portable.contracts import Implementation, Request, Support
from mla_portable.primitives import PACK_SELECTION, PackSelection
from mla_portable_nvidia.native.checks import check, index_of
from mla_portable_nvidia.native.kernel_build import KernelBuild, load
from mla_portable_nvidia.native.runtime.driver import Launch, Launches
from mla_portable_nvidia.native.topk_select import TopkBuild

__all__ = ["BUILD", "SPAN", "NativePackSelection", "PackBuild", "pack_implementations"]

SPAN: Final = 16384
"""Positions of a block's turn, each a byte of shared memory."""
_MOST_BLOCKS: Final = 65535
"""Along y, by the devices' limit."""


@dataclass(frozen=True, slots=True)
class PackBuild(KernelBuild):
    """The only build."""

    kernel: ClassVar[str] = "pack_selection"
    changing: ClassVar[str] = "3P i"  # words, positions, starts; positions are read four at a time
    fixed: ClassVar[str] = "3i 2q"  # topk, width, span; strides of the rows of positions and words
    archs: ClassVar[Mapping[str, str]] = TopkBuild.archs

    @property
    def label(self) -> str:
        return self.kernel

    @property
    def threads(self) -> int:
        return 256

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (("THREADS", self.threads),)

    @property
    def shared_bytes(self) -> int:
        return SPAN

    @property
    def wide_clusters(self) -> bool:
        return False


BUILD: Final = PackBuild()


class NativePackSelection:
    """pack_selection for a bound request; devices are loaded at bind or at their first call."""

    def __init__(self, request: Request[PackSelection]) -> None:
        self._on = cache(partial(load, BUILD, PackBuild.archs[request.device.arch]))
        self._launches = Launches[Launch]()
        self._on(index_of(request))

    def __call__(self, topk_indices: Tensor, *, width: int, starts: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """See PackSelection. A launch is prepared for the first call of its shapes and strides."""
        num_tokens, topk = topk_indices.shape
        if out is None:
            out = torch.empty((num_tokens, -(-width // 32)), dtype=torch.int32, device=topk_indices.device)
        if num_tokens == 0:
            return out
        stride, index, address = topk_indices.stride(0), topk_indices.get_device(), topk_indices.data_ptr()
        key = (num_tokens, topk, width, stride, out.stride(0), index)
        launch = self._launches.get(key)
        if launch is None:
            blocks = min(-(-width // SPAN), _MOST_BLOCKS)
            fixed = topk, width, SPAN, stride, out.stride(0)
            launch = self._launches[key] = self._on(index).prepare((num_tokens, blocks), 1, *fixed)
        vectors = address % 16 == 0 and stride % 4 == 0 and topk % 4 == 0
        launch(out.data_ptr(), address, 0 if starts is None else starts.data_ptr(), vectors)
        return out


def bind_pack_selection(request: Request[PackSelection]) -> PackSelection:
    """pack_selection. Raises: NvrtcNotFound, CompilationFailed, DriverError where the kernel cannot be built here."""
    return NativePackSelection(request)


def pack_implementations() -> Iterator[Implementation[PackSelection]]:
    """pack_selection, preferred to the portable kernel."""
    yield Implementation(
        name="nvidia.native",
        primitive=PACK_SELECTION,
        support=Support(
            source="mla_portable_nvidia/native: pack_selection.cu",
            device_types=("cuda",),
            vendors=("nvidia",),
            archs=tuple(PackBuild.archs),
            min_shared_memory=BUILD.shared_bytes,
            needs_bf16=False,
        ),
        bind=bind_pack_selection,
        check=check,
        preference=8.0,
    )
