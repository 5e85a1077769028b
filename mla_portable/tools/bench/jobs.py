# SPDX-License-Identifier: Apache-2.0
"""Every primitive on a step's own tensors: how it is called, and how its result is held against the float64 oracle.

A job is given correct inputs whatever the other primitives did (indices and workspaces come from the oracle), so an error
shows where it arises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_portable.attention import SparseMLAAttention
from mla_portable.attention.routes import route_requests
from mla_portable.contracts import Request
from mla_portable.layouts import HEAD_SIZE, KV_LORA_RANK
from mla_portable.primitives import (
    CACHE_WRITE,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
)
from mla_portable.problems import Finding, cache_write, convert_indices, gather_upconvert, merge_states, quantize_per_tensor
from mla_portable.tools.bench.inputs import StepInputs
from mla_portable.tools.bench.judged import Step

__all__ = ["Job", "cache_write_job", "jobs_after"]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One primitive at work on the step.

    Attributes:
        name: of the primitive, with a remark where it appears twice. request: what is asked of the registry.
        shape: of the call, for a reader. checked: how much of the result the oracle judged.
        call: runs an implementation bound for `request`; every call does the same work. check: judges a result of `call`.
    """

    name: str
    request: Request
    shape: str
    checked: str
    call: Callable[[Callable[..., Any]], Any]
    check: Callable[[Any], Iterator[Finding]]


def cache_write_job(inputs: StepInputs, layer: SparseMLAAttention, before: Tensor) -> Job:
    """The step's tokens into the cache as it was `before` the step; every byte is judged."""
    shape, layout = inputs.shape, inputs.shape.kv_layout
    target = before.clone()

    def call(bound: Callable[..., Any]) -> Tensor:
        bound(inputs.kv_c, inputs.k_pe, target, inputs.slot_mapping, scale_format=shape.scale_format)
        return target

    def check(result: Tensor) -> Iterator[Finding]:
        tokens = (inputs.kv_c, inputs.k_pe, before, inputs.slot_mapping)
        want = cache_write.cache_write(*tokens, scale_format=shape.scale_format)
        yield from cache_write.findings(shape.scale_format, {"kv_cache": result}, {"kv_cache": want})

    request = Request(
        CACHE_WRITE,
        layer.facts,
        kv_layout=layout,
        block_size=shape.block_size,
        scale_format=shape.scale_format if layout != "bf16" else None,
    )
    return Job("cache_write", request, f"T {shape.num_tokens}, {layout}", "the whole cache", call, check)


def jobs_after(step: Step, bind_decode: Callable[[Request], Callable[..., Any] | None]) -> list[Job]:
    """Every primitive but cache_write. bind_decode: who serves a sparse_decode request, None where nobody does."""
    requests = route_requests(step.layer.spec, step.layer.facts)
    workspace = _Workspace.of(step)
    jobs = [
        _convert_job(step, requests["workspace_convert" if step.layer.buffers.workspace is not None else "convert"]),
        _gather_job(step, requests["gather"], workspace),
        _decode_job(step, requests["decode"]),
        _cache_prefill_job(step, requests["cache_prefill"]),
    ]
    if step.storage != "bf16":
        jobs.append(_workspace_prefill_job(step, requests["bf16_prefill"], workspace))
    decode = bind_decode(requests["decode"])
    if decode is not None:
        jobs.append(_merge_job(step, decode))
    jobs.append(_quantize_job(step))
    return jobs


def _convert_job(step: Step, request: Request) -> Job:
    inputs, plan, shape = step.inputs, step.plan, step.inputs.shape
    tokens = inputs.topk_indices.shape[0]
    num_slots = step.kv_cache.shape[0] * shape.block_size
    out = (torch.empty_like(inputs.topk_indices), torch.empty_like(inputs.topk_indices[:, 0]))
    places: dict[str, Any] = {
        "block_size": shape.block_size,
        "num_slots": num_slots,
        "prefill_request_ids": plan.prefill_request_ids,
        "prefill_workspace_starts": plan.prefill_workspace_starts,
    }

    def call(bound: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        return bound(inputs.topk_indices, plan.req_id_per_token, plan.block_table, **places, out=out)

    def check(result: tuple[Tensor, Tensor]) -> Iterator[Finding]:
        want = convert_indices.convert_indices(inputs.topk_indices, plan.req_id_per_token, plan.block_table, **places)
        got = {"indices": result[0].cpu(), "counts": result[1].cpu()}
        positions = inputs.topk_indices.cpu()
        yield from convert_indices.findings("any", got, {"indices": want[0], "counts": want[1]}, positions=positions)

    return Job("convert_indices", request, f"T {tokens}, K {shape.topk}", f"{tokens} of {tokens} rows", call, check)


@dataclass(frozen=True, slots=True, eq=False)
class _Workspace:
    """The contexts of the requests that prefill, one after the other, as gather_upconvert must write them.

    block_table [P, columns], seq_lens [P], starts [P] int32 on the device; rows [W, 576] bf16 on the host; indices [T', K]
    int32 on the host: of each prefill token, rows of the workspace.
    """

    block_table: Tensor
    seq_lens: Tensor
    starts: Tensor
    rows: Tensor
    indices: Tensor

    @classmethod
    def of(cls, step: Step) -> _Workspace:
        inputs, tokens = step.inputs, step.prefill_tokens
        first = int(inputs.req_id_per_token[tokens.start])
        seq_lens = torch.from_numpy(inputs.batch.seq_lens[first:].copy())
        starts = torch.cumsum(seq_lens, 0, dtype=torch.int32) - seq_lens
        table = inputs.batch.block_table[first:]
        unowned = torch.full((int(seq_lens.sum()), HEAD_SIZE), torch.nan, dtype=torch.bfloat16)
        positions = inputs.topk_indices[tokens].cpu()
        offset = starts[inputs.req_id_per_token[tokens] - first].unsqueeze(1)
        return cls(
            block_table=table,
            seq_lens=seq_lens.to(table.device),
            starts=starts.to(table.device),
            rows=gather_upconvert.gather_upconvert(step.kv_cache, table, seq_lens, starts, out=unowned),
            indices=torch.where(positions >= 0, positions + offset, -1),
        )


def _gather_job(step: Step, request: Request, workspace: _Workspace) -> Job:
    out = torch.empty(workspace.rows.shape, dtype=torch.bfloat16, device=step.kv_cache.device)
    rows = out.shape[0]

    def call(bound: Callable[..., Any]) -> Tensor:
        return bound(step.kv_cache, workspace.block_table, workspace.seq_lens, workspace.starts, out=out)

    def check(result: Tensor) -> Iterator[Finding]:
        yield from gather_upconvert.findings(step.storage, {"out": result}, {"out": workspace.rows})

    shape = f"P {len(workspace.seq_lens)}, W {rows}"
    return Job("gather_upconvert", request, shape, f"{rows} of {rows} rows", call, check)


def _decode_tensors(step: Step) -> tuple[slice, Tensor, Tensor]:
    """The tokens of sparse_decode, their q [B, S, H, 576] and indices [B, S, K]."""
    rows = step.decode_rows
    tokens = slice(0, rows[0] * rows[1])
    q = step.inputs.q[tokens].unflatten(0, rows)
    return tokens, q, step.slots[tokens].to(q.device).unflatten(0, rows)


def _results_for(q: Tensor) -> dict[str, Tensor]:
    """`out` and `lse_out` of an attention call."""
    out = torch.empty(*q.shape[:-1], KV_LORA_RANK, dtype=torch.bfloat16, device=q.device)
    return {"out": out, "lse_out": torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)}


def _decode_job(step: Step, request: Request) -> Job:
    tokens, q, indices = _decode_tensors(step)
    schedule = step.plan.decode_schedule if step.plan.num_decode_tokens else None
    results = _results_for(q)

    def call(bound: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        return bound(q, step.kv_cache, indices, softmax_scale=step.scale, schedule=schedule, **results)

    def check(result: tuple[Tensor, Tensor]) -> Iterator[Finding]:
        yield from step.judge(*result, tokens)

    shape = f"B {q.shape[0]}, S {q.shape[1]}, H {q.shape[2]}, K {indices.shape[-1]}"
    return Job("sparse_decode", request, shape, step.says_checked(tokens), call, check)


def _prefill_call(step: Step, kv: Tensor, indices: Tensor) -> Callable[[Callable[..., Any]], tuple[Tensor, Tensor]]:
    q = step.inputs.q[step.prefill_tokens]
    on_device, results = indices.to(q.device), _results_for(q)
    return lambda bound: bound(q, kv, on_device, softmax_scale=step.scale, **results)


def _cache_prefill_job(step: Step, request: Request) -> Job:
    tokens, size = step.prefill_tokens, step.inputs.shape
    kv = step.kv_cache if step.storage != "bf16" else step.kv_cache.view(-1, HEAD_SIZE)

    def check(result: tuple[Tensor, Tensor]) -> Iterator[Finding]:
        yield from step.judge(*result, tokens)

    shape = f"T {tokens.stop - tokens.start}, H {size.num_heads}, K {size.topk}"
    call = _prefill_call(step, kv, step.slots[tokens])
    return Job("sparse_prefill (cache)", request, shape, step.says_checked(tokens), call, check)


def _workspace_prefill_job(step: Step, request: Request, workspace: _Workspace) -> Job:
    tokens, size = step.prefill_tokens, step.inputs.shape
    kv = workspace.rows.to(step.kv_cache.device)

    def check(result: tuple[Tensor, Tensor]) -> Iterator[Finding]:
        yield from step.judge_workspace(*result, workspace.rows, workspace.indices)

    shape = f"T {tokens.stop - tokens.start}, H {size.num_heads}, K {size.topk}, W {kv.shape[0]}"
    call = _prefill_call(step, kv, workspace.indices)
    return Job("sparse_prefill (workspace)", request, shape, step.says_checked(tokens), call, check)


def _merge_job(step: Step, decode: Callable[..., Any]) -> Job:
    """Two decodes over one half of every row's indices each, merged, against the decode over all of them."""
    tokens, q, indices = _decode_tensors(step)
    in_first = torch.arange(indices.shape[-1], device=q.device) < indices.shape[-1] // 2
    halves = [
        decode(q, step.kv_cache, torch.where(half, indices, -1), softmax_scale=step.scale) for half in (in_first, ~in_first)
    ]
    outs = torch.stack([out for out, _ in halves])  # [2, B, S, H, 512]
    lses = torch.stack([lse for _, lse in halves])  # [2, B, S, H]

    def check(result: tuple[Tensor, Tensor]) -> Iterator[Finding]:
        out, lse = result
        want = dict[str, Tensor](zip(("out", "lse"), merge_states.merge_states(outs, lses), strict=True))
        yield from merge_states.findings("bfloat16", {"out": out, "lse": lse}, want)
        yield from step.judge(out, lse, tokens, remark=" of the whole")

    request = Request(MERGE_STATES, step.layer.facts)
    shape = f"2 halves of B {q.shape[0]}, S {q.shape[1]}, H {q.shape[2]}"
    return Job("merge_states", request, shape, f"{tokens.stop} of {tokens.stop} rows", lambda bound: bound(outs, lses), check)


def _quantize_job(step: Step) -> Job:
    x = step.inputs.kv_c

    def check(result: tuple[Tensor, Tensor]) -> Iterator[Finding]:
        want = {"x": x, "scale": quantize_per_tensor.quantize_per_tensor(x)[1]}
        yield from quantize_per_tensor.findings("any", {"x_q": result[0], "scale": result[1]}, want)

    request = Request(QUANTIZE_PER_TENSOR, step.layer.facts)
    shape = " x ".join(map(str, x.shape))
    return Job("quantize_per_tensor", request, shape, "every value", lambda bound: bound(x), check)
