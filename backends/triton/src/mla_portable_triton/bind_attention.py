# SPDX-License-Identifier: Apache-2.0
"""Binding the attention primitives to the Triton kernels: everything that a request decides is decided here, once.

A bound callable validates nothing and looks nothing up. It allocates only what its caller did not give (`out`, `lse_out`,
`schedule`), never synchronises, and launches nothing for zero rows.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, Request
from mla_portable.kit.results import attention_results
from mla_portable.kit.split_kv import SplitSchedule, split_kv
from mla_portable.layouts import BF16, LAYOUTS
from mla_portable.primitives import MergeStates, SparseDecode, SparsePrefill
from mla_portable_triton.attention_configs import program_shape
from mla_portable_triton.attention_tuning import bound_config
from mla_portable_triton.support import interpreter_is_on


def _bf16_native() -> bool:
    """Triton's interpreter has no bfloat16 arithmetic."""
    return not interpreter_is_on()


def _fp8(request: Request) -> dict[str, bool]:
    from mla_portable_triton.kernels.coded_products import fp8_constants

    device = request.device
    return fp8_constants(device.arch, e4m3_native=device.has_fp8_conversion, hardware=not interpreter_is_on())


def bind_sparse_decode(request: Request) -> SparseDecode:
    """sparse_decode for `request`; `schedule` is a SplitSchedule, made from the shapes of the call where none is given."""
    from mla_portable_triton.kernels import merge_states as merge
    from mla_portable_triton.kernels import sparse_attention as attention

    device = request.device
    config = bound_config(request)
    program = program_shape(config, request.kv_layout, device)
    num_sms = 0 if request.batch_invariant else device.num_sms  # 0: rows stay whole, however few they are
    value_width = LAYOUTS[request.kv_layout or BF16.name].value_width
    fp8, bf16_native = _fp8(request), _bf16_native()

    def sparse_decode(
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv_cache: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        schedule: DecodeSchedule | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch, query_len, num_heads, _ = q.shape
        out, lse_out = attention_results(q, kv_cache, out, lse_out, kv_layout=request.kv_layout)
        if schedule is None:
            num_rows, topk = batch * query_len, indices.shape[2]
            num_splits = split_kv(
                num_rows=num_rows,
                num_heads=num_heads,
                topk=topk,
                extra_topk=0 if extra_indices is None else extra_indices.shape[2],
                num_sms=num_sms,
                program=program,
            )
            schedule = _new_schedule(num_rows, num_heads, topk, num_splits, value_width, q.device)
        cut = cast("SplitSchedule", schedule)  # the type of `schedule_kind`, which the callers check
        results, result_lses = out, lse_out
        if cut.num_splits > 1:
            assert cut.partial_out is not None and cut.partial_lse is not None
            results, result_lses = cut.partial_out, cut.partial_lse
        is_split = results is not out
        attention.launch(
            results,
            result_lses,
            q,
            kv_cache,
            indices,
            softmax_scale=softmax_scale,
            lengths=lengths,
            attn_sink=None if is_split else attn_sink,
            extra_kv_cache=extra_kv_cache,
            extra_indices=extra_indices,
            extra_lengths=extra_lengths,
            num_splits=cut.num_splits,
            config=config,
            fp8=fp8,
            bf16_native=bf16_native,
        )
        if is_split:
            merge.launch(out, lse_out, results, result_lses, attn_sink=attn_sink, base_2=True, bf16_native=bf16_native)
        return out, lse_out

    return sparse_decode


def _new_schedule(
    num_rows: int, num_heads: int, topk: int, num_splits: int, value_width: int, device: torch.device
) -> SplitSchedule:
    """A schedule for one call, with scratch where it splits."""
    partial_out = partial_lse = None
    if num_splits > 1:
        partial_out = torch.empty((num_splits, num_rows, num_heads, value_width), dtype=torch.float32, device=device)
        partial_lse = torch.empty((num_splits, num_rows, num_heads), dtype=torch.float32, device=device)
    return SplitSchedule(num_rows, num_heads, topk, num_splits, partial_out, partial_lse)


def bind_sparse_prefill(request: Request) -> SparsePrefill:
    """sparse_prefill for `request`: the attention kernel with one split, tokens as batch rows of one query each."""
    from mla_portable_triton.kernels import sparse_attention as attention

    config = bound_config(request)
    fp8, bf16_native = _fp8(request), _bf16_native()

    def sparse_prefill(
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv_cache: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse_out = attention_results(q, kv, out, lse_out, kv_layout=request.kv_layout)
        attention.launch(
            out.unsqueeze(1),
            lse_out.unsqueeze(1),
            q.unsqueeze(1),
            kv,
            indices.unsqueeze(1),
            softmax_scale=softmax_scale,
            lengths=None if lengths is None else lengths.unsqueeze(1),
            attn_sink=attn_sink,
            extra_kv_cache=extra_kv_cache,
            extra_indices=None if extra_indices is None else extra_indices.unsqueeze(1),
            extra_lengths=None if extra_lengths is None else extra_lengths.unsqueeze(1),
            num_splits=1,
            config=config,
            fp8=fp8,
            bf16_native=bf16_native,
        )
        return out, lse_out

    return sparse_prefill


def bind_merge_states(request: Request) -> MergeStates:
    """merge_states for any shapes; `request` is used for its device only."""
    from mla_portable_triton.kernels import merge_states as merge

    bf16_native = _bf16_native()

    def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = outs.contiguous(), lses.contiguous()
        out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
        lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
        rows = (lse.numel(), 1, 1)
        merge.launch(
            out.view(*rows, out.shape[-1]), lse.view(rows), outs, lses, attn_sink=None, base_2=False, bf16_native=bf16_native
        )
        return out, lse

    return merge_states
