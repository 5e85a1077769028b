# SPDX-License-Identifier: Apache-2.0
"""topk_select in CUDA: its builds, which of them a shape gets, and its launch.

One launch, no scratch. A row is one block, or from compute capability 9.0 on the blocks of a cluster where rows are few and
long. Positions are the same bits however a row is cut, so the choice is one of speed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import ClassVar, Final

import torch
from torch import Tensor

from mla_portable.contracts import Implementation, InvalidArgument, Request, Support
from mla_portable.primitives import TOPK_SELECT, TopkSelect
from mla_portable_nvidia.native.checks import check, index_of
from mla_portable_nvidia.native.kernel_build import BLOCK_RESERVE, KernelBuild, load
from mla_portable_nvidia.native.runtime.driver import Kernel, Launch, Launches

__all__ = ["FEW_ROWS", "MANY_ROWS", "MAX_TOPK", "NativeTopkSelect", "TopkBuild", "choose", "topk_implementations"]

CANDIDATES: Final = 8192
"""Scores of a row that the source holds in shared memory; a row of so many is never cut."""
MAX_TOPK: Final = CANDIDATES // 2
"""What leaves room for a tile of other candidates."""
_PART: Final = 4096
"""Scores that are worth a block of a cluster. H200, 2026-11-22: docs/dev/nvidia/topk-select.md."""
_CLUSTERS: Final = (16, 8, 7, 6, 5, 4, 3, 2)
_LARGEST_CLUSTER: Final = {"sm90": 16, "sm100": 16, "sm103": 16, "sm120": 8, "sm121": 8}
"""Blocks of a cluster; none elsewhere."""


@dataclass(frozen=True, slots=True)
class TopkBuild(KernelBuild):
    """One build.

    Attributes:
        block_threads: threads of a block. blocks_per_sm: that the registers are to allow. batch: scores that a lane loads at
            once. largest_cluster: blocks of a cluster, on the device that it is loaded on.
    """

    kernel: ClassVar[str] = "topk_select"
    changing: ClassVar[str] = "4P"  # out, logits, row_starts, row_ends
    fixed: ClassVar[str] = "2i 2q"  # topk, num_logits, strides of the rows of logits and out
    archs: ClassVar[Mapping[str, str]] = MappingProxyType(
        {f"sm{version}": f"sm_{version}" for version in (80, 86, 89, 90, 100, 120, 121)} | {"sm103": "sm_100"}
    )  # code for 10.0 runs on 10.3

    block_threads: int
    blocks_per_sm: int
    batch: int
    largest_cluster: int = 1

    @property
    def label(self) -> str:
        return f"{self.kernel}-t{self.block_threads}-b{self.blocks_per_sm}"

    @property
    def threads(self) -> int:
        return self.block_threads

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (("THREADS", self.block_threads), ("BLOCKS_PER_SM", self.blocks_per_sm), ("BATCH", self.batch))

    @property
    def shared_bytes(self) -> int:
        candidates, bins = CANDIDATES * 8, 4096 * 4
        return candidates + bins + self.block_threads // 32 * 4 + 5 * 4

    @property
    def wide_clusters(self) -> bool:
        return self.largest_cluster > 8


FEW_ROWS: Final = TopkBuild(block_threads=1024, blocks_per_sm=1, batch=16)
MANY_ROWS: Final = TopkBuild(block_threads=1024, blocks_per_sm=2, batch=10)


def choose(rows: int, num_logits: int, *, num_sms: int, clusters: Callable[[int], int]) -> int:
    """Blocks of a row.

    Args:
        num_sms: multiprocessors. clusters: of a size -> how many the device holds at once, so that none waits for another.
    """
    most = min(num_sms // max(rows, 1), num_logits // _PART) if num_logits > CANDIDATES else 1
    return next((blocks for blocks in _CLUSTERS if blocks <= most and clusters(blocks) >= rows), 1)


class _Device:
    """The builds, loaded on one device."""

    def __init__(self, request: Request, index: int) -> None:
        facts = request.device
        self._num_sms, largest = facts.num_sms, _LARGEST_CLUSTER.get(facts.arch, 1)
        target = TopkBuild.archs[facts.arch]
        few = TopkBuild(FEW_ROWS.block_threads, FEW_ROWS.blocks_per_sm, FEW_ROWS.batch, largest)
        self._few, self._largest = load(few, target, index), largest
        two_fit = facts.shared_memory + BLOCK_RESERVE >= 2 * (MANY_ROWS.shared_bytes + BLOCK_RESERVE)
        self._many = load(MANY_ROWS, target, index) if two_fit else self._few
        self._held: dict[int, int] = {}

    def _clusters(self, size: int) -> int:
        if size not in self._held:
            self._held[size] = self._few.max_clusters(size) if size <= self._largest else 0
        return self._held[size]

    def cut(self, rows: int, num_logits: int) -> tuple[Kernel, int]:
        """The kernel, and the blocks of a row."""
        if rows > self._num_sms:
            return self._many, 1
        return self._few, choose(rows, num_logits, num_sms=self._num_sms, clusters=self._clusters)


class NativeTopkSelect:
    """topk_select for a bound request; devices are loaded at bind or at their first call.

    starts_early: what is in front of it in the stream is a kernel that lets it start before its end.
    """

    def __init__(self, request: Request, *, starts_early: bool = False) -> None:
        self._on, self._starts_early = cache(partial(_Device, request)), starts_early
        self._launches = Launches[Launch]()
        self._on(index_of(request))

    def __call__(self, logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int, out: Tensor | None = None) -> Tensor:
        """See TopkSelect. A launch is prepared for the first call of its shapes and strides."""
        if out is None:
            out = torch.empty((logits.shape[0], topk), dtype=torch.int32, device=logits.device)
        key = (logits.shape, topk, logits.stride(0), out.stride(0), logits.get_device())
        launch = self._launches.get(key)
        if launch is None:
            if logits.shape[0] == 0:
                return out
            launch = self._launches[key] = self._prepared(logits, out, topk)
        launch(out.data_ptr(), logits.data_ptr(), row_starts.data_ptr(), row_ends.data_ptr())
        return out

    def _prepared(self, logits: Tensor, out: Tensor, topk: int) -> Launch:
        if topk > MAX_TOPK:  # another than was bound: it would write past the candidates
            raise InvalidArgument("nvidia.native", "topk", got=topk, expected=f"at most {MAX_TOPK}")
        rows, num_logits = logits.shape
        kernel, blocks = self._on(logits.get_device()).cut(rows, num_logits)
        fixed = topk, num_logits, logits.stride(0), out.stride(0)
        return kernel.prepare((rows, blocks), blocks, *fixed, starts_early=self._starts_early)


def bind_topk_select(request: Request) -> TopkSelect:
    """topk_select. Raises: NvrtcNotFound, CompilationFailed, DriverError where the kernel cannot be built here."""
    return NativeTopkSelect(request)


def topk_implementations() -> Iterator[Implementation]:
    """topk_select, preferred to the portable kernel."""
    yield Implementation(
        name="nvidia.native",
        primitive=TOPK_SELECT,
        support=Support(
            source="mla_portable_nvidia/native: topk_select.cu; run on an H200",
            device_types=("cuda",),
            vendors=("nvidia",),
            archs=tuple(TopkBuild.archs),
            max_topk=MAX_TOPK,
            min_shared_memory=max(FEW_ROWS.shared_bytes, MANY_ROWS.shared_bytes),
            needs_bf16=False,
            batch_invariant=True,
        ),
        bind=bind_topk_select,
        check=check,
        preference=8.0,
    )
