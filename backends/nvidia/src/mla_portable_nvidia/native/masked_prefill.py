# SPDX-License-Identifier: Apache-2.0
"""masked_prefill in CUDA for compute capability 9.0: its builds, the maps of its tensors and its launch.

Blocks are persistent, one for each multiprocessor, and take pieces of work (128 queries of one head of one request) from a
counter in device memory. The last block to ask sets it back to 0, so a counter serves all calls of one stream; a call under
graph capture gets one of the graph's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import ClassVar, Final

import torch
from torch import Tensor

from mla_portable.contracts import (
    DeviceFacts,
    Implementation,
    InvalidArgument,
    Reason,
    Request,
    Support,
)
from mla_portable.kit.results import head_results
from mla_portable.primitives import MASKED_PREFILL, MaskedPrefill
from mla_portable_nvidia.alignment import mappable
from mla_portable_nvidia.native.checks import check, index_of
from mla_portable_nvidia.native.kernel_build import KernelBuild, load
from mla_portable_nvidia.native.runtime.driver import MAPS_SINCE, Kernel, Launch, Launches, driver_version, tensor_map

__all__ = ["BUILDS", "MaskedPrefillBuild", "NativeMaskedPrefill", "group_streams", "masked_prefill_implementations"]

QUERIES: Final = 128
"""Of a piece of work, as the source has it."""
_STAGES: Final = 2
_GROUP_BYTES: Final = 32 << 20
"""Keys and values of the streams, a head of a request each, that are worked on at a time, so that they stay in an H200's
50 MB of L2."""
_MOST_CHUNKS: Final = 1024
"""Of 32 requests, as the source has it."""
_LOG2_E: Final = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class MaskedPrefillBuild(KernelBuild):
    """One build. qk_head_dim, v_head_dim: multiples of 64. keys: of a tile, 64 or 128."""

    kernel: ClassVar[str] = "masked_prefill"
    headers: ClassVar[tuple[str, ...]] = ("instructions.cuh",)
    # maps of q, k, v; out, lse, q, k, v, query_start_loc, key_start_loc, selection, counter; scale; causal, heads, requests,
    # query tiles, streams of a group, words of a row
    changing: ClassVar[str] = "128s 128s 128s 9P f 6i"
    fixed: ClassVar[str] = "11q"  # strides of q, k, v (token, head), of the selection's rows, of out and lse (token, head)
    archs: ClassVar[Mapping[str, str]] = MappingProxyType({"sm90": "sm_90a"})
    tensor_maps: ClassVar[bool] = True

    qk_head_dim: int
    v_head_dim: int
    keys: int

    @property
    def label(self) -> str:
        return f"{self.kernel}-{self.qk_head_dim}-{self.v_head_dim}"

    @property
    def threads(self) -> int:
        return 384

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (("DQK", self.qk_head_dim), ("DV", self.v_head_dim), ("KEYS", self.keys), ("GROUP_BYTES", _GROUP_BYTES))

    @property
    def shared_bytes(self) -> int:
        queries, tile = QUERIES * self.qk_head_dim * 2, self.keys * (self.qk_head_dim + self.v_head_dim) * 2
        mask, work, first_keys, barriers = QUERIES * self.keys // 8, 32, _STAGES * 4, (4 * _STAGES + 2) * 8
        aligned = -(-(queries + _STAGES * (tile + mask) + work + first_keys + barriers) // 16) * 16
        return aligned + 32 * 16 + (_MOST_CHUNKS + 1) * 4

    @property
    def wide_clusters(self) -> bool:
        return False


BUILDS: Final = {
    (192, 128): MaskedPrefillBuild(qk_head_dim=192, v_head_dim=128, keys=128),
    (256, 256): MaskedPrefillBuild(qk_head_dim=256, v_head_dim=256, keys=64),
}
"""(qk_head_dim, v_head_dim) -> the build."""


def group_streams(num_streams: int, max_key_len: int, head_bytes: int) -> int:
    """Streams of a group, whose keys and values L2 holds. head_bytes: of a key and its value, of one head.

    Groups are about equal: a small last one would have too few pieces for the device, and the longest of them would end late.
    """
    most = max(1, min(num_streams, _GROUP_BYTES // max(max_key_len * head_bytes, 1)))
    groups = -(-num_streams // most)
    return -(-num_streams // groups)


class Counters:
    """The counter of pieces of work, by device and stream: one int32 that is 0 before and after each launch."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}

    def take(self, index: int) -> Tensor:
        """That of the device's current stream; one of the graph's own under capture."""
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", index))
        key = index, torch._C._cuda_getCurrentRawStream(index)
        counter = self._kept.get(key)
        if counter is None:
            counter = self._kept[key] = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", index))
        return counter


_counters: Final = Counters()


class _Maps(Launches[bytes]):
    """Maps of tensors by address, shape and strides."""


class NativeMaskedPrefill:
    """masked_prefill for a bound request; devices are loaded at bind or at their first call."""

    def __init__(self, request: Request[MaskedPrefill]) -> None:
        asked = request.qk_head_dim, request.v_head_dim
        pairs = [pair for pair in BUILDS if all(size in (None, own) for size, own in zip(asked, pair, strict=True))]
        self._num_sms, target = request.device.num_sms, MaskedPrefillBuild.archs[request.device.arch]

        @cache
        def kernel(pair: tuple[int, int], index: int) -> Kernel:
            return load(BUILDS[pair], target, index)

        self._kernel = kernel
        self._launches, self._maps = Launches[Launch](), _Maps()
        index = index_of(request)
        for pair in pairs:
            kernel(pair, index)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        *,
        softmax_scale: float,
        max_query_len: int,
        max_key_len: int,
        causal: bool = True,
        selection: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See MaskedPrefill. q, k, v and out are copied where they are not aligned to 16 bytes."""
        out, lse_out = head_results(q, v.shape[2], out, lse_out)
        num_tokens, num_heads, qk_head_dim = q.shape
        pair, num_requests = (qk_head_dim, v.shape[2]), query_start_loc.shape[0] - 1
        query_tiles = -(-min(max_query_len, num_tokens) // QUERIES)
        if num_requests == 0 or query_tiles == 0:
            return out, lse_out
        build = BUILDS.get(pair)
        if build is None:  # another than was bound
            expected = " or ".join(f"{qk}/{value}" for qk, value in BUILDS)
            raise InvalidArgument("nvidia.native", "head dims", got=f"{qk_head_dim}/{v.shape[2]}", expected=expected)
        given, index = out, q.get_device()
        q, k, v, out = mappable(q), mappable(k), mappable(v), mappable(out)
        streams = num_heads * num_requests
        head_bytes = (qk_head_dim + v.shape[2]) * 2
        group = group_streams(streams, min(max_key_len, k.shape[0]), head_bytes)
        launch = self._launch(pair, index, streams * query_tiles, q, k, v, selection, out, lse_out)
        launch(
            self._map(q, QUERIES),
            self._map(k if k.shape[0] else q, build.keys),  # without a key nothing is copied
            self._map(v if v.shape[0] else q, build.keys),
            out.data_ptr(),
            lse_out.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            query_start_loc.data_ptr(),
            key_start_loc.data_ptr(),
            0 if selection is None else selection.data_ptr(),
            _counters.take(index).data_ptr(),
            softmax_scale * _LOG2_E,
            int(causal),
            num_heads,
            num_requests,
            query_tiles,
            group,
            0 if selection is None else selection.shape[1],
        )
        if out is not given:
            given.copy_(out)
        return given, lse_out

    def _launch(
        self,
        pair: tuple[int, int],
        index: int,
        pieces: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Tensor | None,
        out: Tensor,
        lse_out: Tensor,
    ) -> Launch:
        """The prepared launch for these strides and this many pieces of work."""
        if pieces > _MOST_PIECES:
            remedy = "Pass the lengths of this step, not of the longest one, or fewer requests."
            got = f"{pieces} pieces of {QUERIES} queries, a head and a request"
            raise InvalidArgument("nvidia.native", "max_query_len", got=got, expected=f"at most {_MOST_PIECES}", remedy=remedy)
        row = 0 if selection is None else selection.stride(0)
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], row, *out.stride()[:2], *lse_out.stride())
        blocks = min(self._num_sms, pieces)
        key = pair, index, blocks, strides
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._kernel(pair, index).prepare((blocks, 1), 1, *strides)
        return launch

    def _map(self, x: Tensor, rows: int) -> bytes:
        key = x.data_ptr(), x.shape, x.stride(), rows
        found = self._maps.get(key)
        if found is None:
            found = self._maps[key] = tensor_map(x, rows)
        return found


_MOST_PIECES: Final = 2**31 - 1 - 1024
"""What the counter holds, less one for each block."""


def bind_masked_prefill(request: Request[MaskedPrefill]) -> MaskedPrefill:
    """masked_prefill. Raises: NvrtcNotFound, CompilationFailed, DriverError where the kernel cannot be built here."""
    return NativeMaskedPrefill(request)


def _check(device: DeviceFacts) -> Iterator[Reason]:
    """As for every native kernel, and a driver that knows where a kernel's parameters start."""
    found = False
    for reason in check(device):
        found = True
        yield reason
    if not found and (version := driver_version()) < MAPS_SINCE:
        given, least = (f"CUDA {number // 1000}.{number % 1000 // 10}" for number in (version, MAPS_SINCE))
        yield Reason("CUDA driver", given, f"needs {least} or newer", "update the NVIDIA driver")


def masked_prefill_implementations() -> Iterator[Implementation[MaskedPrefill]]:
    """masked_prefill, preferred to the portable kernel."""
    yield Implementation(
        name="nvidia.native",
        primitive=MASKED_PREFILL,
        support=Support(
            source="mla_portable_nvidia/native: masked_prefill.cu; run on an H200",
            device_types=("cuda",),
            vendors=("nvidia",),
            archs=tuple(MaskedPrefillBuild.archs),
            head_dims=tuple(BUILDS),
            min_shared_memory=max(build.shared_bytes for build in BUILDS.values()),
        ),
        bind=bind_masked_prefill,
        check=_check,
        preference=8.0,
    )
