# SPDX-License-Identifier: Apache-2.0
"""Every primitive on a step's own tensors: how it is called, and how its result is held against the float64 oracle.

A job is given correct inputs whatever the other primitives did (indices and workspaces come from the oracle), so an error
shows where it arises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.attention import SparseMLAAttention
from mla_portable.attention.routes import route_requests
from mla_portable.contracts import Request, StepPlan
from mla_portable.layouts import HEAD_SIZE, KV_LORA_RANK, LAYOUTS
from mla_portable.primitives import CACHE_WRITE, MERGE_STATES, QUANTIZE_PER_TENSOR
from mla_portable.problems import (
    Finding,
    attention,
    cache_write,
    convert_indices,
    gather_upconvert,
    merge_states,
    quantize_per_tensor,
)
from mla_portable.tools.bench.inputs import StepInputs

Pair = tuple[Tensor, Tensor]
_FEW: Final = 8
"""Decode rows to try where the step has none."""


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


@dataclass(frozen=True, eq=False)
class Step:
    """A step whose tokens are in the cache, with the oracle's results.

    Attributes:
        kv_cache: after the step's cache write. rows: [n] int64 on the host, the tokens that the oracle judged.
        slots: [T, K] int32 on the host, the oracle's. want_out: [n, H, 512] float64. want_lse: [n, H] float64.
    """

    inputs: StepInputs
    layer: SparseMLAAttention
    plan: StepPlan
    kv_cache: Tensor
    rows: Tensor
    slots: Tensor
    want_out: Tensor
    want_lse: Tensor

    @property
    def storage(self) -> str:
        """The tolerance table's word for what the cache holds."""
        shape = self.inputs.shape
        return shape.scale_format if LAYOUTS[shape.kv_layout].is_quantized else "bf16"

    @property
    def scale(self) -> float:
        return self.layer.spec.softmax_scale

    @property
    def prefill_tokens(self) -> slice:
        """The tokens of the requests that prefill, of all requests where none does."""
        shape = self.inputs.shape
        return slice(shape.decodes * shape.decode_query_len if shape.prefills else 0, shape.num_tokens)

    @cached_property
    def decode_tensors(self) -> tuple[slice, Tensor, Tensor]:
        """The tokens of sparse_decode, their q [B, S, H, 576] and indices [B, S, K].

        They are those that are planned as decodes, else the requests that decode, else a few tokens.
        """
        plan, shape = self.plan, self.inputs.shape
        sizes = (shape.decodes, shape.decode_query_len) if shape.decodes else (min(_FEW, shape.num_tokens), 1)
        if plan.num_decode_tokens:
            sizes = plan.num_decodes, plan.decode_query_len
        tokens = slice(0, sizes[0] * sizes[1])
        q = self.inputs.q[tokens].unflatten(0, sizes)
        return tokens, q, self.slots[tokens].to(q.device).unflatten(0, sizes)

    def judged(self, tokens: slice) -> Pair:
        """Of the judged tokens those in `tokens`: their places among the judged ones, and within `tokens`."""
        inside = ((self.rows >= tokens.start) & (self.rows < tokens.stop)).nonzero()[:, 0]
        return inside, self.rows[inside] - tokens.start

    def checked(self, tokens: slice) -> str:
        """How many of `tokens` the oracle judged."""
        return f"{len(self.judged(tokens)[0])} of {tokens.stop - tokens.start} rows"

    def judge(self, result: Pair, tokens: slice, *, remark: str = "") -> Iterator[Finding]:
        """Attention of `tokens` over the cache, out [.., H, 512] and lse [.., H], against the oracle's rows."""
        judged, places = self.judged(tokens)
        want = {"out": self.want_out[judged], "lse": self.want_lse[judged]}
        yield from attention.findings(self.storage, _rows_of(result, places), want, rows=places, remark=remark)


def _rows_of(result: Pair, places: Tensor) -> dict[str, Tensor]:
    out, lse = result
    flat = {"out": out.reshape(-1, *out.shape[-2:]), "lse": lse.reshape(-1, lse.shape[-1])}
    return {name: each[places.to(each.device)].cpu() for name, each in flat.items()}


def cache_write_request(layer: SparseMLAAttention) -> Request:
    """What a layer asks for to write its cache."""
    spec = layer.spec
    scale_format = spec.scale_format if spec.kv_layout != "bf16" else None
    size = spec.block_size
    return Request(CACHE_WRITE, layer.facts, kv_layout=spec.kv_layout, block_size=size, scale_format=scale_format)


def cache_write_job(inputs: StepInputs, layer: SparseMLAAttention, before: Tensor) -> Job:
    """The step's tokens into the cache as it was `before` the step; every byte is judged."""
    shape = inputs.shape
    target = before.clone()

    def call(bound: Callable[..., Any]) -> Tensor:
        bound(inputs.kv_c, inputs.k_pe, target, inputs.slot_mapping, scale_format=shape.scale_format)
        return target

    def check(result: Tensor) -> Iterator[Finding]:
        tokens = (inputs.kv_c, inputs.k_pe, before, inputs.slot_mapping)
        want = cache_write.cache_write(*tokens, scale_format=shape.scale_format)
        yield from cache_write.findings(shape.scale_format, {"cache": result}, {"cache": want})

    sizes = f"T {shape.num_tokens}, {shape.kv_layout}"
    return Job("cache_write", cache_write_request(layer), sizes, "the whole cache", call, check)


def jobs_after(step: Step, bind_decode: Callable[[Request], Callable[..., Any] | None]) -> Iterator[Job]:
    """Every primitive but cache_write. bind_decode: the callable for a sparse_decode request, None where nothing serves it."""
    requests = route_requests(step.layer.spec, step.layer.facts)
    rows, indices, gather = _gather_job(step, requests["gather"])
    yield _convert_job(step, requests["workspace_convert" if step.layer.buffers.workspace is not None else "convert"])
    yield gather
    yield _decode_job(step, requests["decode"])
    yield _cache_prefill_job(step, requests["cache_prefill"])
    if step.storage != "bf16":
        yield _workspace_prefill_job(step, requests["bf16_prefill"], rows, indices)
    decode = bind_decode(requests["decode"])
    if decode is not None:
        yield _merge_job(step, decode)
    yield _quantize_job(step)


def _convert_job(step: Step, request: Request) -> Job:
    inputs, plan = step.inputs, step.plan
    tokens, topk = inputs.topk_indices.shape
    out = (torch.empty_like(inputs.topk_indices), torch.empty_like(inputs.topk_indices[:, 0]))
    places: dict[str, Any] = {
        "block_size": inputs.shape.block_size,
        "num_slots": step.kv_cache.shape[0] * inputs.shape.block_size,
        "prefill_request_ids": plan.prefill_request_ids,
        "prefill_workspace_starts": plan.prefill_workspace_starts,
    }
    given = inputs.topk_indices, plan.req_id_per_token, plan.block_table

    def check(result: Pair) -> Iterator[Finding]:
        want = convert_indices.convert_indices(*given, **places)
        got = {"indices": result[0].cpu(), "counts": result[1].cpu()}
        positions = inputs.topk_indices.cpu()
        yield from convert_indices.findings("any", got, {"indices": want[0], "counts": want[1]}, positions=positions)

    checked = f"{tokens} of {tokens} rows"
    sizes = f"T {tokens}, K {topk}"
    return Job("convert_indices", request, sizes, checked, lambda bound: bound(*given, **places, out=out), check)


def _gather_job(step: Step, request: Request) -> tuple[Tensor, Tensor, Job]:
    """The contexts of the requests that prefill, one after the other.

    Returns: rows [W, 576] bf16 on the host, as gather_upconvert must write them; indices [T', K] int32 on the host, of each
        prefill token, into them; the job.
    """
    inputs, tokens, device = step.inputs, step.prefill_tokens, step.kv_cache.device
    first = int(inputs.req_id_per_token[tokens.start])
    seq_lens = torch.from_numpy(inputs.batch.seq_lens[first:].copy())
    starts = torch.cumsum(seq_lens, 0, dtype=torch.int32) - seq_lens
    table = inputs.batch.block_table[first:]
    unowned = torch.full((int(seq_lens.sum()), HEAD_SIZE), torch.nan, dtype=torch.bfloat16)
    rows = gather_upconvert.gather_upconvert(step.kv_cache, table, seq_lens, starts, out=unowned)
    positions = inputs.topk_indices[tokens].cpu()
    offset = starts[inputs.req_id_per_token[tokens] - first].unsqueeze(1)
    given = step.kv_cache, table, seq_lens.to(device), starts.to(device)
    out = torch.empty(rows.shape, dtype=torch.bfloat16, device=device)

    def check(result: Tensor) -> Iterator[Finding]:
        yield from gather_upconvert.findings(step.storage, {"out": result}, {"out": rows})

    shape, checked = f"P {len(seq_lens)}, W {len(rows)}", f"{len(rows)} of {len(rows)} rows"
    job = Job("gather_upconvert", request, shape, checked, lambda bound: bound(*given, out=out), check)
    return rows, torch.where(positions >= 0, positions + offset, -1), job


def _attention_call(step: Step, q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> Callable[[Callable[..., Any]], Pair]:
    """A call that fills the same tensors each time."""
    out = torch.empty(*q.shape[:-1], KV_LORA_RANK, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    indices = indices.to(q.device)
    return lambda bound: bound(q, kv, indices, softmax_scale=step.scale, out=out, lse_out=lse, **options)


def _decode_job(step: Step, request: Request) -> Job:
    tokens, q, indices = step.decode_tensors
    schedule = step.plan.decode_schedule if step.plan.num_decode_tokens else None
    call = _attention_call(step, q, step.kv_cache, indices, schedule=schedule)
    shape = f"B {q.shape[0]}, S {q.shape[1]}, H {q.shape[2]}, K {indices.shape[-1]}"
    return Job("sparse_decode", request, shape, step.checked(tokens), call, lambda result: step.judge(result, tokens))


def _cache_prefill_job(step: Step, request: Request) -> Job:
    tokens, size = step.prefill_tokens, step.inputs.shape
    kv = step.kv_cache if step.storage != "bf16" else step.kv_cache.view(-1, HEAD_SIZE)
    shape = f"T {tokens.stop - tokens.start}, H {size.num_heads}, K {size.topk}"
    call = _attention_call(step, step.inputs.q[tokens], kv, step.slots[tokens])
    return Job("sparse_prefill (cache)", request, shape, step.checked(tokens), call, lambda result: step.judge(result, tokens))


def _workspace_prefill_job(step: Step, request: Request, rows: Tensor, indices: Tensor) -> Job:
    tokens, size = step.prefill_tokens, step.inputs.shape
    q = step.inputs.q[tokens]

    def check(result: Pair) -> Iterator[Finding]:
        places = step.judged(tokens)[1]
        want = attention.attend(q.cpu()[places], rows, indices[places], softmax_scale=step.scale, lengths=None, attn_sink=None)
        got = _rows_of(result, places)
        yield from attention.findings("bf16", got, {"out": want[0], "lse": want[1]}, rows=places)

    shape = f"T {tokens.stop - tokens.start}, H {size.num_heads}, K {size.topk}, W {len(rows)}"
    call = _attention_call(step, q, rows.to(q.device), indices)
    return Job("sparse_prefill (workspace)", request, shape, step.checked(tokens), call, check)


def _merge_job(step: Step, decode: Callable[..., Any]) -> Job:
    """Two decodes over one half of every row's indices each, merged, against the decode over all of them."""
    tokens, q, indices = step.decode_tensors
    in_first = torch.arange(indices.shape[-1], device=q.device) < indices.shape[-1] // 2
    halves = [
        decode(q, step.kv_cache, torch.where(half, indices, -1), softmax_scale=step.scale) for half in (in_first, ~in_first)
    ]
    outs = torch.stack([out for out, _ in halves])  # [2, B, S, H, 512]
    lses = torch.stack([lse for _, lse in halves])  # [2, B, S, H]

    def check(result: Pair) -> Iterator[Finding]:
        want = merge_states.merge_states(outs, lses)
        got = {"out": result[0], "lse": result[1]}
        yield from merge_states.findings("bfloat16", got, {"out": want[0], "lse": want[1]})
        yield from step.judge(result, tokens, remark=" of the whole")

    request = Request(MERGE_STATES, step.layer.facts)
    shape = f"2 halves of B {q.shape[0]}, S {q.shape[1]}, H {q.shape[2]}"
    return Job("merge_states", request, shape, f"{tokens.stop} of {tokens.stop} rows", lambda bound: bound(outs, lses), check)


def _quantize_job(step: Step) -> Job:
    x = step.inputs.kv_c

    def check(result: Pair) -> Iterator[Finding]:
        want = {"x": x, "scale": quantize_per_tensor.quantize_per_tensor(x)[1]}
        yield from quantize_per_tensor.findings("any", {"x_q": result[0], "scale": result[1]}, want)

    request = Request(QUANTIZE_PER_TENSOR, step.layer.facts)
    shape = " x ".join(map(str, x.shape))
    return Job("quantize_per_tensor", request, shape, "every value", lambda bound: bound(x), check)
