# SPDX-License-Identifier: Apache-2.0
"""indexer_select as DeepGEMM's paged scores of some tokens at a time, then the device's topk_select on them where they lie.

Scores are not copied: the top-k gets how many each token sees, and absent blocks are overwritten with -inf before it.
Four launches and those of the top-k serve some tokens: what they see, DeepGEMM's schedule unless it was planned, scores,
absent blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mla_portable.contracts import Implementation, Request, Support
from mla_portable.layouts import INDEX_FP8
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_SELECT, TOPK_SELECT, IndexerSelect, TopkSelect, bind_part
from mla_portable.primitives.topk_select import reference as topk_reference
from mla_portable_nvidia.deepgemm.conventions import DeepGemm, deepgemm_reasons, find_deepgemm
from mla_portable_nvidia.deepgemm.indexer_logits import HEADS, NAME, PREFERENCE, PagedScores, packed
from mla_portable_nvidia.deepgemm.pages import PAGE, Pages
from mla_portable_nvidia.deepgemm.schedules import DEEPGEMM_ROWS, IndexSchedule
from mla_portable_nvidia.native.topk_select import NativeTopkSelect

if TYPE_CHECKING:
    from mla_portable_nvidia.deepgemm.index_pass_kernels import IndexPasses

SCRATCH_BYTES: Final = 60 << 20
"""Of scores, tables and the top-k; what allocators round up to stays within the 64 MiB that the primitive promises."""
_TOPK_BYTES: Final = 64 << 10
"""For each row: what a topk_select other than the native one may take, which takes none."""


class DeepGemmSelect:
    """The callable; see `mla_portable.primitives.IndexerSelect`. Graph-safe with `out` once a call of the size was made."""

    def __init__(self, kernel: DeepGemm, passes: IndexPasses, topk: TopkSelect, *, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self._scores, self._passes, self._topk, self._scratch_bytes = PagedScores(kernel, passes), passes, topk, scratch_bytes
        self._topk_bytes = 0 if isinstance(topk, NativeTopkSelect) else _TOPK_BYTES

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        topk: int,
        schedule: IndexSchedule | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        num_tokens, width = q.shape[0], block_table.shape[1] * PAGE
        if out is None:
            out = torch.empty((num_tokens, topk), dtype=torch.int32, device=q.device)
        if num_tokens == 0:
            return out
        if width == 0 or index_cache.shape[0] == 0 or seq_lens.shape[0] == 0:
            return out.fill_(-1)
        pages = Pages(query_start_loc, seq_lens, block_table, index_cache.shape[0], width)
        q, weights = packed(q), packed(weights)
        for first, count in self._scores.calls(num_tokens, pages, self._scratch_bytes, self._topk_bytes):
            self._select(out[first : first + count], topk, q, weights, index_cache, pages, first, count, schedule)
        return out

    def _select(
        self,
        out: Tensor,
        topk: int,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        pages: Pages,
        first: int,
        count: int,
        schedule: IndexSchedule | None,
    ) -> None:
        """Some tokens. A function of its own: its scores are free again when it returns."""
        logits, rows = self._scores(q, weights, index_cache, pages, first, count, schedule)
        self._passes.erase(logits, rows, pages)
        self._topk(logits, rows.starts, rows.ends, topk=topk, out=out)


def bind_indexer_select(request: Request[IndexerSelect]) -> IndexerSelect:
    """indexer_select on the DeepGEMM of this machine. Raises: MLAPortableError where there is none."""
    from mla_portable_nvidia.deepgemm.index_pass_kernels import IndexPasses

    device = request.device
    topk = bind_part(Request(TOPK_SELECT, device, topk=request.topk, graph=request.graph), lambda _: topk_reference)
    return DeepGemmSelect(find_deepgemm(INDEXER_LOGITS, device), IndexPasses(), topk)


def select_implementations(*, device_types: tuple[str, ...] = ("cuda",)) -> Iterator[Implementation[IndexerSelect]]:
    """indexer_select. device_types: ("cuda",) but for tests that run stand-ins on a CPU."""
    yield Implementation(
        NAME,
        INDEXER_SELECT,
        Support(
            source="DeepGEMM 54e2261, csrc/apis/attention.hpp; vLLM 0.26.0 and 0.33.0. SM100 was not run here",
            device_types=device_types,
            vendors=("nvidia",),
            archs=("sm90", "sm100"),
            kv_layouts=(INDEX_FP8.name,),
            num_heads=HEADS,
            block_sizes=(PAGE,),
            cache_alignment=16,
            nan_keys=False,  # DeepGEMM's ReLU makes 0 of NaN
        ),
        bind_indexer_select,
        check=partial(deepgemm_reasons, INDEXER_LOGITS),
        preference=PREFERENCE,
        schedule_kind=DEEPGEMM_ROWS,
    )
