# SPDX-License-Identifier: Apache-2.0
"""indexer_logits of FP8 keys, and indexer_select with it, in CUDA: builds, launches, and what they serve.

In decode a block keeps a token's queries and pages pass; in prefill it keeps pages and queries pass. The two multiply the
numbers of a key in different orders, so a score's last bits depend on which of them the batch gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final

from torch import Tensor

from mla_portable.contracts import Implementation, Request, Support
from mla_portable.layouts import INDEX_FP8
from mla_portable.primitives import (
    INDEXER_LOGITS,
    INDEXER_SELECT,
    TOPK_SELECT,
    IndexerLogits,
    IndexerSelect,
    SelectInParts,
)
from mla_portable_common.alignment import aligned
from mla_portable_nvidia.native.checks import check, index_of
from mla_portable_nvidia.native.kernel_build import KernelBuild, load
from mla_portable_nvidia.native.runtime.driver import Kernel, Launch, Launches
from mla_portable_nvidia.native.topk_select import MAX_TOPK, NativeTopkSelect

__all__ = ["HEADS", "DecodeBuild", "IndexerBuild", "NativeScores", "PrefillBuild", "indexer_implementations"]

HEADS: Final = (32, 64)
"""GLM-5's and DeepSeek-V3.2's."""
_PAGE: Final = 64
_TILE: Final = 4 * _PAGE
"""Positions of a block in prefill."""
_KEY_BYTES: Final = 128 + 4
_UNIT: Final = 16
"""Tokens that count as one where prefill shares its work."""
_TOKENS_A_REQUEST: Final = 4
"""From here on, on average, keys stay instead of queries."""


def _query_bytes(heads: int) -> int:
    """Of a token in shared memory: queries, weights and the gaps between these."""
    return heads * _KEY_BYTES + 64


@dataclass(frozen=True, slots=True)
class IndexerBuild(KernelBuild):
    """One build. heads: of q. stages: of the ring through which pages or queries pass."""

    headers: ClassVar[tuple[str, ...]] = ("instructions.cuh", "indexer_logits.cuh")
    changing: ClassVar[str] = "9P 2i"  # out, begins, ends, q, weights, cache, starts, lens, table; first token, rows
    # requests, blocks, widths of the table and of the scores; strides; tokens that see no more positions are not scored
    fixed: ClassVar[str] = "4i 6q i"
    archs: ClassVar[Mapping[str, str]] = MappingProxyType({"sm90": "sm_90a"})

    heads: int
    stages: int


@dataclass(frozen=True, slots=True)
class DecodeBuild(IndexerBuild):
    """A block for one or two tokens (`tokens`) of a request at a time, and some pages."""

    kernel: ClassVar[str] = "indexer_logits_decode"

    tokens: int
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        return 160

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (
            ("HEADS", self.heads),
            ("STAGES", self.stages),
            ("TOKENS", self.tokens),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
        )

    @property
    def label(self) -> str:
        return f"{self.kernel}-h{self.heads}-t{self.tokens}-s{self.stages}"

    @property
    def shared_bytes(self) -> int:
        return self.tokens * _query_bytes(self.heads) + self.stages * (_PAGE * _KEY_BYTES + 17)


@dataclass(frozen=True, slots=True)
class PrefillBuild(IndexerBuild):
    """A block for four pages at a time and tokens that see them, two at a time."""

    kernel: ClassVar[str] = "indexer_logits_prefill"

    @property
    def label(self) -> str:
        return f"{self.kernel}-h{self.heads}-s{self.stages}"

    @property
    def threads(self) -> int:
        return 640

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (("HEADS", self.heads), ("STAGES", self.stages))

    @property
    def shared_bytes(self) -> int:
        return self.stages * (2 * _query_bytes(self.heads) + 16) + 8


DECODE: Final = {
    (heads, tokens): DecodeBuild(heads, stages, tokens, blocks)
    for heads in HEADS
    for tokens, stages, blocks in ((1, 3, 4), (2, 6, 2))
}
"""(heads, tokens) -> build. H200, 2026-11-22: docs/dev/indexer.md."""
PREFILL: Final = {heads: PrefillBuild(heads, 8) for heads in HEADS}


class NativeScores:
    """Scores of some tokens; devices are loaded at bind or at their first call."""

    def __init__(self, request: Request[Any]) -> None:
        self._request = request
        self._launches = Launches[Launch]()
        index = index_of(request)
        for build in (*DECODE.values(), *PREFILL.values()):
            if build.heads == request.num_heads:
                load(build, IndexerBuild.archs[request.device.arch], index)

    def __call__(
        self,
        out: Tensor,
        bounds: Tensor | None,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        first: int = 0,
        *,
        all_chosen: int = 0,
    ) -> None:
        """Write `out` [T', N] float32, of the T' tokens from `first` on. Graph-safe.

        Args:
            bounds: None to write all of `out`; or [2, T'] int32, where it is written which positions each token sees, the
                only ones that are written.
            all_chosen: as of SeenScores; such scores are left out.
            The rest: see IndexerLogits.
        """
        q, rows = aligned(q), out.shape[0]
        shapes = q.shape, index_cache.shape, block_table.shape, out.shape, q.get_device()
        strides = q.stride(), weights.stride(0), index_cache.stride(0), block_table.stride(0), out.stride(0)
        launch = self._launches.get((shapes, strides, all_chosen))
        if launch is None:
            if 0 in out.shape:
                return
            launch = self._prepared(out, q, weights, index_cache, block_table, all_chosen)
            self._launches[shapes, strides, all_chosen] = launch
        begins, ends = (0, 0) if bounds is None else (bounds[0].data_ptr(), bounds[1].data_ptr())
        launch(
            out.data_ptr(),
            begins,
            ends,
            q.data_ptr(),
            weights.data_ptr(),
            index_cache.data_ptr(),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            first,
            rows,
        )

    def _prepared(
        self, out: Tensor, q: Tensor, weights: Tensor, index_cache: Tensor, block_table: Tensor, all_chosen: int
    ) -> Launch:
        rows, num_logits = out.shape
        num_tokens, num_heads, _ = q.shape
        num_requests, columns = block_table.shape
        facts = self._request.device
        fixed = (
            *(num_requests, index_cache.shape[0], columns, num_logits),
            *(index_cache.stride(0), block_table.stride(0), out.stride(0), q.stride(0), q.stride(1), weights.stride(0)),
            all_chosen,
        )
        if num_tokens >= _TOKENS_A_REQUEST * num_requests:
            blocks = min(-(-num_logits // _TILE) * (-(-rows // _UNIT) + num_requests), facts.num_sms)
            return self._kernel(PREFILL[num_heads], q).prepare((blocks, 1), 1, *fixed)
        build = DECODE[num_heads, 1 if num_tokens <= num_requests else 2]
        blocks = min(-(-num_logits // _PAGE) * rows, facts.num_sms * build.blocks_per_sm)
        return self._kernel(build, q).prepare((blocks, 1), 1, *fixed)

    def _kernel(self, build: IndexerBuild, q: Tensor) -> Kernel:
        return load(build, build.archs[self._request.device.arch], q.get_device())


def bind_indexer_logits(request: Request[IndexerLogits]) -> IndexerLogits:
    """indexer_logits. Raises: NvrtcNotFound, CompilationFailed, DriverError where the kernels cannot be built here."""
    scores = NativeScores(request)

    def indexer_logits(
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        out: Tensor,
    ) -> Tensor:
        scores(out, None, q, weights, index_cache, query_start_loc, seq_lens, block_table)
        return out

    return indexer_logits


def bind_indexer_select(request: Request[IndexerSelect]) -> IndexerSelect:
    """indexer_select: scores of some tokens at a time, then their top-k. Raises: as bind_indexer_logits."""
    part = Request(TOPK_SELECT, request.device, topk=request.topk, ordered=request.ordered, graph=request.graph)
    return SelectInParts(NativeScores(request), NativeTopkSelect(part, starts_early=True))


def indexer_implementations() -> Iterator[Implementation[Any]]:
    """indexer_logits and indexer_select, preferred to the portable kernels."""
    kernels = ("indexer_logits_decode.cu", "indexer_logits_prefill.cu")
    common: dict[str, Any] = {
        "device_types": ("cuda",),
        "vendors": ("nvidia",),
        "archs": tuple(IndexerBuild.archs),
        "kv_layouts": (INDEX_FP8.name,),
        "num_heads": HEADS,
        "block_sizes": (_PAGE,),
        "cache_alignment": 16,
        "min_shared_memory": max(build.shared_bytes for builds in (DECODE, PREFILL) for build in builds.values()),
        "needs_fp8_conversion": True,
    }
    text = f"mla_portable_nvidia/native: {', '.join(kernels)}; run on an H200"
    yield Implementation(
        name="nvidia.native",
        primitive=INDEXER_LOGITS,
        support=Support(source=text, **common),
        bind=bind_indexer_logits,
        check=check,
        preference=8.0,
    )
    yield Implementation(
        name="nvidia.native",
        primitive=INDEXER_SELECT,
        support=Support(source=text, max_topk=MAX_TOPK, **common),
        bind=bind_indexer_select,
        check=check,
        preference=8.0,
    )
