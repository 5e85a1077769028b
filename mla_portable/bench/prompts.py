# SPDX-License-Identifier: Apache-2.0
"""A layer's prompts both ways, over latent rows and over keys of each head, projections included: times, and a fit to them.

Both compute the same attention from the same inputs, so each is checked against the other. With the fit the layer chooses
(`mla_portable.times.prompts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mla_portable.attention import AttentionSpec, HeadDims, PromptAttention, SparseMLAAttention
from mla_portable.attention.layer_registry import ForcedBackend
from mla_portable.attention.step import JoinQuery
from mla_portable.bench.timing import captured, measure_in_turns
from mla_portable.contracts import Batch
from mla_portable.dispatch import current_registry
from mla_portable.judge.problems.selection_lists import LayerLists, neighbours
from mla_portable.judge.problems.selections import Selections
from mla_portable.layouts import LAYOUTS
from mla_portable.models import DEEPSEEK_V32, Model
from mla_portable.planner import Planner
from mla_portable.planner.prompts import plan_prompts
from mla_portable.times.prompts import Counts, PromptTimes

Requests = tuple[tuple[int, int], ...]
"""New tokens, and new tokens with their context, of each request."""

STEPS: Final[tuple[Requests, ...]] = (
    *(((tokens, tokens),) * count for count, tokens in ((1, 128), (16, 128), (1, 512), (4, 512), (8, 1000), (8, 1024))),
    *(((tokens, tokens),) * count for count, tokens in ((1, 2000), (4, 2000), (4, 2048), (2, 4096), (1, 8192))),
    ((1024, 2048),) * 4,
    ((2048, 4096),) * 4,
    ((2048, 16_384),),
    ((4096, 8192),),
    ((8192, 16_384),),
    ((512, 8192),) * 4,
)
"""Prompts alone, then prompts behind a context."""
BLOCK: Final = 64


@dataclass(frozen=True, slots=True)
class PromptLayer:
    """Both ways of a layer with random weights.

    Attributes:
        latent, per_head: as an engine builds them. weight: of the up-projection, [H * (P + V), 512] bf16. w_uk: [H, P, 512],
            w_uv: [H, 512, V] bf16, the same weights as the products with the query and the output have them.
    """

    latent: SparseMLAAttention
    per_head: PromptAttention
    planner: Planner
    weight: Tensor
    w_uk: Tensor
    w_uv: Tensor


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one step. latent_us, per_head_us: median GPU time of the layer. error: between the two, of the larger norm.

    selection: whose lists of keys were used; "" for random ones.
    """

    requests: Requests
    counts: Counts
    latent_us: float
    per_head_us: float
    error: float
    masked: bool
    selection: str = ""

    @property
    def name(self) -> str:
        return step_name(self.requests)


def step_name(requests: Requests) -> str:
    """As pages have it: `4 x 2,000`, or `4 x 2,000 of 4,000` behind a context."""
    new, total = requests[0]
    return f"{len(requests)} x {new:,}" + (f" of {total:,}" if total > new else "")


def lengths(requests: Requests) -> tuple[np.ndarray, np.ndarray]:
    """query_lens and seq_lens, [R] int32."""
    return np.array([new for new, _ in requests], np.int32), np.array([total for _, total in requests], np.int32)


def can_time(model: Model) -> bool:
    """Its layers have both ways, over rows with a rotary part."""
    return model.per_head_prompts and model.head_dims[1] > 0


def make_layer(
    device: torch.device,
    *,
    num_heads: int,
    layout: str = "fp8_ds_mla",
    head_dims: HeadDims | None = None,
    topk: int = DEEPSEEK_V32.topk,
    max_num_tokens: int = 8192,
    max_model_len: int = 16_384,
    backend: ForcedBackend = None,
    join_query: JoinQuery | None = None,
    seed: int = 0,
) -> PromptLayer:
    """backend: forced for both ways, as of SparseMLAAttention. join_query: the engine's way to join a query's halves."""
    dims = HeadDims() if head_dims is None else head_dims
    spec = AttentionSpec(
        num_heads=num_heads,
        softmax_scale=dims.query**-0.5,
        max_num_tokens=max_num_tokens,
        max_num_reqs=64,
        max_model_len=max_model_len,
        kv_layout=layout,
        block_size=BLOCK,
        topk=topk,
        scale_format="pow2" if LAYOUTS[layout].is_quantized else None,
        need_lse=False,
    )
    generator = torch.Generator(device).manual_seed(seed)
    shape = num_heads * (dims.nope + dims.value), spec.layout.value_width
    weight = (torch.randn(shape, generator=generator, device=device) / shape[1] ** 0.5).bfloat16()
    keys, values = weight.view(num_heads, -1, shape[1]).split([dims.nope, dims.value], dim=1)
    chosen: dict[str, Any] = {"device": device, "registry": current_registry(), "backend": backend}
    latent = SparseMLAAttention(spec, join_query=join_query, **chosen)
    per_head = PromptAttention(spec, dims, **chosen)
    planner = Planner(latent.planner_config())
    return PromptLayer(latent, per_head, planner, weight, keys.contiguous(), values.transpose(1, 2).contiguous())


def time_step(
    layer: PromptLayer,
    requests: Requests,
    *,
    repeat: int = 10,
    seed: int = 0,
    selected: tuple[Selections, int] | None = None,
) -> StepTimes:
    """Time one step's prompts both ways, in turns, on a GPU from a graph with a cold L2; the errors are looked at first.

    selected: a file's selections and the number of a layer: tokens attend to its lists, or to lists drawn like them. None for
    random ones.
    """
    latent, per_head, spec, dims = layer.latent, layer.per_head, layer.latent.spec, layer.per_head.head_dims
    device, layout = latent.device, spec.layout
    generator = torch.Generator(device).manual_seed(seed)
    query_lens, seq_lens = lengths(requests)
    tokens, columns = int(query_lens.sum()), -(-spec.max_model_len // BLOCK)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    blocks = -(-seq_lens // BLOCK)
    table = torch.zeros((len(requests), columns), dtype=torch.int32)
    order = torch.randperm(int(blocks.sum()), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    for request, (end, count) in enumerate(zip(np.cumsum(blocks).tolist(), blocks.tolist(), strict=True)):
        table[request, :count] = order[end - count : end]
    table = table.to(device)
    kv_cache = torch.zeros((len(order), BLOCK, layout.row_width), dtype=layout.dtype, device=device)
    topk = torch.full((spec.max_num_tokens, spec.topk), -1, dtype=torch.int32, device=device)
    kv_c, k_pe = normal(tokens, layout.value_width), normal(tokens, dims.rope)
    begin = 0
    for request, (new, total) in enumerate(requests):
        position = torch.arange(total, device=device)
        slots = table[request, position // BLOCK].long() * BLOCK + position % BLOCK
        rows = normal(total, layout.value_width), normal(total, dims.rope)
        for row, given in zip(rows, (kv_c, k_pe), strict=True):
            row[total - new :] = given[begin : begin + new]
        latent.cache_write(*rows, kv_cache, slots)
        if selected is None:
            topk[begin : begin + new, : min(total, spec.topk)] = _selection(new, total, spec.topk, generator, device)
        begin += new
    lists = None if selected is None else _lists(*selected, requests, spec.topk)
    if lists is not None:
        topk[:tokens] = _listed(lists, requests, spec.topk, generator, device)

    q = normal(tokens, spec.num_heads, dims.query)
    out = torch.empty((2, tokens, spec.num_heads, dims.value), dtype=torch.bfloat16, device=device)  # of either way
    q_nope, q_pe = q.split([dims.nope, dims.rope], dim=-1)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    plan = layer.planner.plan(Batch(starts, seq_lens, table))
    prompts = plan_prompts(query_lens, seq_lens, table, topk=spec.topk, key_rows=per_head.key_rows)
    attended = torch.empty((tokens, spec.num_heads, layout.value_width), dtype=torch.bfloat16, device=device)

    def over_latent_rows() -> Tensor:
        absorbed = torch.bmm(q_nope.transpose(0, 1), layer.w_uk).transpose(0, 1)
        latent.forward((absorbed, q_pe), kv_cache, topk, plan, out=attended)
        torch.bmm(attended.transpose(0, 1), layer.w_uv, out=out[0].transpose(0, 1))
        return out[0]

    def over_keys_of_each_head() -> Tensor:
        return per_head.forward(
            q, kv_c, k_pe, lambda rows: torch.nn.functional.linear(rows, layer.weight), kv_cache, topk, prompts, out=out[1]
        )

    calls: list[Callable[[], object]] = [over_latent_rows, over_keys_of_each_head]
    found = [call().float() for call in (over_latent_rows, over_keys_of_each_head)]
    error = float((found[0] - found[1]).norm() / max(each.norm() for each in found))
    if device.type != "cpu":
        calls = [captured(call, device) for call in calls]
    times = measure_in_turns(calls, device=device, repeat=repeat)
    counts = Counts.of(query_lens, seq_lens, spec.topk, per_head.key_rows)
    us = [each.median_ms * 1e3 for each in times]
    return StepTimes(requests, counts, us[0], us[1], error, prompts.masked, "" if lists is None else str(lists))


def _selection(new: int, total: int, topk: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """[new, min(total, K)] int32: random positions up to each token's own, in no order, absent ones last."""
    width, chosen = min(total, topk), list[Tensor]()
    for begin in range(total - new, total, 1024):
        last = torch.arange(begin, min(begin + 1024, total), device=device).unsqueeze(1)
        scores = torch.rand((len(last), total), generator=generator, device=device)
        scores.masked_fill_(torch.arange(total, device=device) > last, -1.0)
        found, position = scores.topk(width, dim=1, sorted=True)
        chosen.append(position.masked_fill_(found < 0, -1).to(torch.int32))
    return torch.cat(chosen)


def _lists(selections: Selections, layer: int, requests: Requests, topk: int) -> LayerLists:
    """The file's own lists where each request's tokens are in it, else lists like them."""
    found = [neighbours(selections, total - new + 1, total) for new, total in requests]
    lists = LayerLists(selections, layer, drawn=topk != selections.topk or None in found)
    lists.check(neighbours=True)
    return lists


def _listed(lists: LayerLists, requests: Requests, topk: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """[T, K] int32: what the tokens of all requests select; requests of one size at once."""
    drawn = {
        (new, total): iter(lists.of_neighbours(total - new + 1, total, topk, batch=count, device=device, generator=generator))
        for (new, total), count in Counter(requests).items()
    }
    return torch.cat([next(drawn[request]) for request in requests])


def fit(times: Iterable[StepTimes]) -> PromptTimes:
    """The constants whose times differ least from those measured, each difference relative to its time; none is negative."""
    measured = list(times)
    latent = _fit([(e.latent_us, (1.0, e.counts.tokens * 1e-3, e.counts.selected * 1e-6)) for e in measured])
    per_head: list[tuple[float, tuple[float, ...]]] = []
    for each in measured:
        counts = each.counts
        own = 1.0, counts.keys * 1e-3, counts.pairs * 1e-6
        both = (0.0, 0.0, 0.0, *own) if each.masked else (*own, 0.0, 0.0, 0.0)
        per_head.append((each.per_head_us, (*both, float(counts.parts), counts.merged * 1e-3)))
    return PromptTimes(*latent, *_fit(per_head))


def _fit(samples: Sequence[tuple[float, tuple[float, ...]]]) -> list[float]:
    """Least squares of (a sum of constants times a row) / us - 1; a constant that would be negative is left out."""
    us, rows = np.array([each[0] for each in samples]), np.array([each[1] for each in samples])
    kept = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    while True:
        found, *_ = np.linalg.lstsq(rows[:, kept] / us[:, None], np.ones(len(us)), rcond=None)
        if found.min(initial=0.0) >= 0:
            break
        kept.pop(int(found.argmin()))
    constants = [0.0] * rows.shape[1]
    for column, value in zip(kept, found.tolist(), strict=True):
        constants[column] = float(f"{value:.4g}")
    return constants
