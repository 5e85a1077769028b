# SPDX-License-Identifier: Apache-2.0
"""The indexer's primitives bound to their kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_portable.contracts import Request
from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.primitives import (
    TOPK_SELECT,
    IndexerCacheWrite,
    IndexerLogits,
    IndexerLogitsBlocks,
    IndexerLogitsRagged,
    IndexerSelect,
    SelectInParts,
    TopkSelect,
    bind_part,
)
from mla_portable_triton.index_forms import BF16, FP8_DECODED, form_of_request
from mla_portable_triton.support import interpreter_is_on
from mla_portable_triton.tile_rows import tile_arch

if TYPE_CHECKING:
    from mla_portable_triton.kernels.index_keys import Numbers


def _numbers(request: Request[Any]) -> Numbers:
    from mla_portable_triton.kernels.index_keys import Numbers

    device, hardware, form = request.device, not interpreter_is_on(), form_of_request(request)
    if form != BF16 and not hardware:
        form = FP8_DECODED
    return Numbers(form, hardware, tile_arch(device), device.num_sms)


def bind_indexer_cache_write(request: Request[IndexerCacheWrite]) -> IndexerCacheWrite:
    """indexer_cache_write; graph-safe."""
    from mla_portable_triton.kernels import indexer_cache_write as kernel
    from mla_portable_triton.kernels.e4m3_encode import encodes_natively

    config, hardware = kernel.config_for(kernel.CONFIGS, request.device.arch), not interpreter_is_on()
    e4m3_native = hardware and encodes_natively(request.device.arch, request.device.has_fp8_conversion)

    def indexer_cache_write(k: Tensor, index_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2") -> None:
        pow2 = scale_format == "pow2"
        kernel.launch(k, index_cache, slot_mapping, pow2=pow2, e4m3_native=e4m3_native, bf16_native=hardware, config=config)

    return indexer_cache_write


def bind_indexer_logits(request: Request[IndexerLogits]) -> IndexerLogits:
    """indexer_logits for up to 128 heads; graph-safe."""
    from mla_portable_triton.kernels import indexer_logits as kernel

    numbers = _numbers(request)

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
        kernel.launch(out, q, weights, index_cache, query_start_loc, seq_lens, block_table, numbers=numbers)
        return out

    return indexer_logits


def bind_indexer_logits_ragged(request: Request[IndexerLogitsRagged]) -> IndexerLogitsRagged:
    """indexer_logits_ragged for up to 128 heads; graph-safe."""
    from mla_portable_triton.kernels import indexer_logits_ragged as kernel

    numbers = _numbers(request)

    def indexer_logits_ragged(
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        key_scales: Tensor | None,
        row_starts: Tensor,
        row_ends: Tensor,
        *,
        out: Tensor,
    ) -> Tensor:
        kernel.launch(out, q, weights, keys, key_scales, row_starts, row_ends, numbers=numbers)
        return out

    return indexer_logits_ragged


def bind_indexer_logits_blocks(request: Request[IndexerLogitsBlocks]) -> IndexerLogitsBlocks:
    """indexer_logits_blocks for up to 128 heads; graph-safe."""
    from mla_portable_triton.kernels import indexer_logits_blocks as kernel

    config, hardware = kernel.config_for(kernel.CONFIGS, request.device.arch), not interpreter_is_on()
    e4m3_native = hardware and request.device.has_fp8_conversion

    def indexer_logits_blocks(
        q: Tensor,
        q_scales: Tensor,
        weights: Tensor,
        keys: Tensor,
        key_scales: Tensor,
        starts: Tensor,
        lengths: Tensor,
        *,
        block_tokens: int,
        out: Tensor,
    ) -> Tensor:
        kernel.launch(
            out,
            q,
            q_scales,
            weights,
            keys,
            key_scales,
            starts,
            lengths,
            block_tokens=block_tokens,
            e4m3_native=e4m3_native,
            bf16_native=hardware,
            config=config,
        )
        return out

    return indexer_logits_blocks


def bind_topk_select(request: Request[TopkSelect]) -> TopkSelect:
    """topk_select for any K; graph-safe with `out`."""
    from mla_portable_triton.kernels import topk_select as kernel

    def topk_select(logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty((logits.shape[0], topk), dtype=torch.int32, device=logits.device)
        kernel.launch(out, logits, row_starts, row_ends)
        return out

    return topk_select


def _no_scratch(width: int, topk: int) -> int:
    return 0


def bind_indexer_select(request: Request[IndexerSelect]) -> IndexerSelect:
    """indexer_select for any K and up to 128 heads; graph-safe with `out`. Its top-k is the topk_select that is chosen here.

    The scratch of this plugin's top-k leaves room for fewer scores; with another's all of it is theirs.
    """
    from mla_portable_triton.kernels import chosen_scores, indexer_logits, topk_select

    numbers = _numbers(request)
    part = Request(TOPK_SELECT, request.device, topk=request.topk, ordered=request.ordered, graph=request.graph)
    choose = bind_part(part, bind_topk_select)
    beside = partial(topk_select.scratch_bytes, 1) if choose.__module__ == __name__ else _no_scratch

    def score(
        out: Tensor,
        bounds: Tensor,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        first: int,
        share: ContextShare = WHOLE,
        *,
        all_chosen: int = 0,  # all are scored, these too
    ) -> None:
        pages = query_start_loc, seq_lens, block_table
        indexer_logits.launch(
            out, q, weights, index_cache, *pages, numbers=numbers, bounds=bounds, first_token=first, share=share
        )

    return SelectInParts(score, choose, beside, chosen_scores.launch)
