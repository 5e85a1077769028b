# SPDX-License-Identifier: Apache-2.0
"""Calls of every kind that a layer's steps make, on small tensors, so that no request waits for a kernel to be made.

A kernel is made, or read from the disk, in the first call that needs it: Triton's for types, constants and what it specialises
(`mla_portable.kit.triton_launcher.at_any_address` says what it does not), a library's when its module is loaded. The number of
rows, the tokens of a request, the part of a step and the width of a list decide on that. Keys, lengths and tables do not, so
each row here has one key, in a scratch cache whose blocks lie as those of the engine's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention import AttentionSpec, PromptAttention, SparseMLAAttention
from mla_portable.attention.prompts import Project
from mla_portable.attention.slots import SlotAttention
from mla_portable.contracts import Batch, InvalidArgument, StepLengths, StepPlan
from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.contracts.values import INT32_MAX
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.layouts import INDEX_HEAD_SIZE, Cache
from mla_portable.planner import Planner, PlannerConfig
from mla_portable.planner.prompts import plan_prompts
from mla_portable.primitives import IndexerSelect

MOST_ROWS: Final = 512
"""Of a step here: 64 MiB of queries with 128 heads. Larger batches take what serves these."""
_BLOCKS: Final = 2
_PROMPT: Final = 16
"""New tokens of a prompt."""
_CONTEXT: Final = 48
_SELECT_ROWS: Final = (1, 128)
"""Rows of lists of scores: a top-k treats few rows and many differently."""


def row_counts(limit: int, ranges: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Numbers of rows up to `limit` to call with: powers of two, and both sides of where a range of rows ends.

    ranges: the most rows of each range but the last.
    """
    most = min(limit, MOST_ROWS)
    powers = (1 << power for power in range(most.bit_length()))
    sides = (side for end in ranges for side in (end, end + 1) if side <= limit)
    return tuple(sorted({most, *powers, *sides} - {0}))


def scratch_cache(spec: AttentionSpec, device: torch.device, block_stride: int | None = None) -> Cache:
    """A cache of two blocks [2, block_size, row width] of the spec's layout, zeros; a tuple where it has several tensors.

    block_stride: elements between blocks of a cache in one tensor; None where they follow one another.
    Raises: InvalidArgument for a distance between blocks of several tensors.
    """
    layout = spec.layout
    if layout.tensors:
        if block_stride is not None:
            expected = f"None for {layout.name}, whose cache is {len(layout.tensors)} tensors"
            raise InvalidArgument("scratch_cache", "block_stride", got=block_stride, expected=expected)
        shape = _BLOCKS, spec.block_size
        return tuple(torch.zeros((*shape, each.width), dtype=each.dtype, device=device) for each in layout.tensors)
    stride = spec.block_size * layout.row_width if block_stride is None else block_stride
    memory = torch.zeros(_BLOCKS * stride, dtype=layout.dtype, device=device)
    return memory.as_strided((_BLOCKS, spec.block_size, layout.row_width), (stride, layout.row_width, 1))


def warm_layer(
    layer: SparseMLAAttention,
    config: PlannerConfig | None = None,
    *,
    kv_cache: Cache | None = None,
    writes: bool = True,
) -> None:
    """Make what the steps of a layer need: decodes of any number of rows and query length, prefills, both in a step, writes.

    Args:
        config: of the engine's planner; None for the layer's. kv_cache: of `scratch_cache`; None for blocks without gaps.
        writes: `cache_write` of the layer writes the engine's cache.
    Raises: whatever a call of the layer raises. Waits for the device.
    """
    spec, device = layer.spec, layer.device
    with accelerator(device).guard(), neutral_defaults(), torch.no_grad():
        cache = scratch_cache(spec, device) if kv_cache is None else kv_cache
        if writes and layer.write_decision.chosen:
            _write(layer, cache)
        sink = torch.zeros(spec.num_heads, device=device) if spec.attn_sink else None
        planner = Planner(_gathers_all(layer.planner_config() if config is None else config))
        for query_lens in _steps(layer):
            plan = planner.plan(_batch(layer, query_lens))
            for each in _ways(layer, plan):
                _attend(layer, cache, each, sink)
        accelerator(device).synchronize()


def _write(layer: SparseMLAAttention, cache: Cache) -> None:
    """Rows that are skipped."""
    spec, device = layer.spec, layer.device
    for rows in (1, min(_PROMPT, spec.max_num_tokens)):
        latent = torch.zeros((rows, spec.layout.value_width), dtype=torch.bfloat16, device=device)
        rope = torch.zeros((rows, spec.rope_width), dtype=torch.bfloat16, device=device)
        layer.cache_write(latent, rope, cache, torch.full((rows,), -1, dtype=torch.int64, device=device))


def _gathers_all(config: PlannerConfig) -> PlannerConfig:
    """A configuration that gathers every prefill, where the route gathers any."""
    if config.prefill_times is None:
        return config
    return replace(config, prefill_times=None, max_model_len=min(config.max_model_len, config.workspace_tokens))


def _steps(layer: SparseMLAAttention) -> Iterator[list[int]]:
    """Query tokens of each request."""
    spec = layer.spec
    ends = tuple(part.most_rows for part in layer.route_decision.verdict.parts if part.most_rows is not None)
    decodes = range(1, spec.decode_query_len + 1)
    for query_len in decodes:
        most = min(spec.max_num_reqs, spec.max_num_tokens // query_len)
        requests = {-(-rows // query_len) for rows in row_counts(most * query_len, ends)}
        yield from ([query_len] * count for count in sorted(requests) if count <= most)
    longest = min(spec.max_num_tokens, spec.max_model_len, MOST_ROWS)
    for tokens in sorted({count for count in (spec.decode_query_len + 1, *row_counts(longest)) if count in range(longest + 1)}):
        if tokens > spec.decode_query_len:
            yield [tokens]
            if spec.max_num_reqs > 1 and tokens + 1 <= spec.max_num_tokens:
                yield [1, tokens]


def _batch(layer: SparseMLAAttention, query_lens: list[int]) -> Batch:
    spec, device = layer.spec, layer.device
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    lengths = np.array(query_lens, np.int32)
    columns = -(-spec.max_model_len // (spec.block_size * spec.share.size))
    table = torch.zeros((len(query_lens), columns), dtype=torch.int32, device=device)
    on_device = torch.from_numpy(lengths).to(device) if spec.share.size == 1 else None
    return Batch(starts, lengths, table, int(starts[-1]), on_device)


def _ways(layer: SparseMLAAttention, plan: StepPlan) -> Iterator[StepPlan]:
    """The plan, and where the layer also reads prefills in place the same step so."""
    yield plan
    if plan.prefill_chunks and layer.route_decision.verdict.part("in_place") is not None:
        yield replace(plan, prefill_chunks=(), prefill_request_ids=None, prefill_workspace_starts=None)


def _attend(layer: SparseMLAAttention, cache: Cache, plan: StepPlan, sink: Tensor | None) -> None:
    spec, device, tokens = layer.spec, layer.device, plan.num_padded_tokens
    widths = (spec.layout.value_width, spec.rope_width) if spec.concat_query else (spec.query_width,)
    halves = [torch.zeros((tokens, spec.num_heads, width), dtype=torch.bfloat16, device=device) for width in widths]
    query = (halves[0], halves[1]) if spec.concat_query else halves[0]
    out = torch.empty((tokens, spec.num_heads, spec.layout.value_width), dtype=torch.bfloat16, device=device)
    layer.forward(query, cache, _lists(tokens, spec.topk, device), plan, attn_sink=sink, out=out)


def _lists(rows: int, width: int, device: torch.device) -> Tensor:
    """[rows, width] int32: position or slot 0, then nothing."""
    lists = torch.full((rows, width), -1, dtype=torch.int32, device=device)
    lists[:, 0] = 0
    return lists


def warm_slots(layer: SlotAttention) -> None:
    """Make what calls of a SlotAttention with one cache need: decodes of every number of rows, prefills; with lengths, without.

    Raises: whatever a call raises. Waits for the device.
    """
    spec, device = layer.spec, layer.device
    with accelerator(device).guard(), neutral_defaults(), torch.no_grad():
        cache = scratch_cache(spec, device)
        if isinstance(cache, Tensor) and not spec.layout.in_place:
            cache = cache.view(-1, spec.layout.row_width)
        sink = torch.zeros(spec.num_heads, device=device) if spec.attn_sink else None
        ends = tuple(part.most_rows for part in layer.route_decision.verdict.parts if part.most_rows is not None)
        for decodes, limit in ((True, spec.max_num_reqs), (False, spec.max_num_tokens)):
            for rows in row_counts(limit, ends if decodes else ()):
                one = torch.ones(rows, dtype=torch.int32, device=device)
                if decodes:
                    layer.prepare(rows, lengths=StepLengths(None, one) if layer.needs_lengths else None)
                query = torch.zeros((rows, spec.num_heads, spec.query_width), dtype=torch.bfloat16, device=device)
                slots, scale = _lists(rows, spec.topk, device), spec.softmax_scale
                for lengths in (one, None):
                    layer.forward(query, cache, slots, softmax_scale=scale, decodes=decodes, lengths=lengths, attn_sink=sink)
        accelerator(device).synchronize()


def warm_prompts(attention: PromptAttention, project: Project | None = None, *, kv_cache: Cache | None = None) -> None:
    """Make what prompts over keys of each head need: under a selection and without one, behind a context, in parts of the keys.

    Args:
        project: the layer's up-projection; None for zeros. kv_cache: as of `warm_layer`.
    Raises: whatever a call raises. Waits for the device.
    """
    spec, dims, device = attention.spec, attention.head_dims, attention.device
    width = spec.num_heads * (dims.nope + dims.value)
    with accelerator(device).guard(), neutral_defaults(), torch.no_grad():
        cache = scratch_cache(spec, device) if kv_cache is None else kv_cache
        new = min(_PROMPT, spec.max_num_tokens)
        context = min(_CONTEXT, spec.max_model_len - new)
        table = torch.zeros((2, -(-spec.max_model_len // spec.block_size)), dtype=torch.int32, device=device)
        query = torch.zeros((new, spec.num_heads, dims.query), dtype=torch.bfloat16, device=device)
        latent = torch.zeros((new, spec.layout.value_width), dtype=torch.bfloat16, device=device)
        rope = torch.zeros((new, dims.rope), dtype=torch.bfloat16, device=device)
        lists, out = _lists(new, spec.topk, device), torch.empty_like(query[..., :1].expand(-1, -1, dims.value))
        for behind in (0, context) if context > 0 else (0,):
            for key_rows in {attention.key_rows, new} if behind else {attention.key_rows}:
                for topk in (1, INT32_MAX):  # tokens select some of what they see, or all
                    lengths = np.array([new], np.int32)
                    sizes = {"topk": topk, "key_rows": key_rows, "block_size": spec.block_size}
                    plan = plan_prompts(lengths, lengths + np.int32(behind), table, **sizes)
                    attention.forward(
                        query,
                        latent,
                        rope,
                        (lambda rows: rows.new_zeros((len(rows), width))) if project is None else project,
                        cache if behind else None,
                        lists,
                        plan,
                        out=out,
                    )
        accelerator(device).synchronize()


def select_widths(longest: int, block_size: int) -> tuple[int, ...]:
    """Columns of block tables for sequences up to `longest` tokens: each power of two of them, and one more.

    What a top-k is made for changes with the power of two of a list's width, or once between two of them.
    """
    most = max(1, -(-longest // block_size))
    powers = [1 << power for power in range(most.bit_length())]
    return tuple(sorted({width for power in powers for width in (power, power + 1) if width <= most} | {most}))


def warm_indexer(
    select: IndexerSelect,
    new_pages: Callable[[int], Tensor],
    *,
    num_heads: int,
    topk: int,
    longest: int,
    dtype: torch.dtype,
    share: ContextShare = WHOLE,
) -> None:
    """Make what an indexer's steps need: decodes and prompts, few and many, at every width of the lists of scores.

    Args:
        new_pages: makes so many pages like those of the engine's cache. dtype: of the queries. longest: tokens of the longest
            sequence.
    Raises: whatever a call raises. Waits for the device.
    """
    pages = new_pages(_BLOCKS)
    device, int32, block_size = pages.device, torch.int32, pages.shape[1]
    with accelerator(device).guard(), neutral_defaults(), torch.no_grad():
        most = max(_SELECT_ROWS)
        query = torch.zeros((most, num_heads, INDEX_HEAD_SIZE), device=device).to(dtype)
        weights, out = torch.zeros((most, num_heads), device=device), torch.empty((most, topk), dtype=int32, device=device)
        scores = torch.empty((most, topk), device=device) if share.size > 1 else None
        for columns in select_widths(longest, block_size * share.size):
            for rows in _SELECT_ROWS:
                for requests in {rows, 1}:  # decodes; a prompt
                    starts = torch.arange(0, rows + 1, rows // requests, dtype=int32, device=device)
                    lengths = torch.full((requests,), rows // requests, dtype=int32, device=device)
                    table = torch.zeros((requests, columns), dtype=int32, device=device)
                    own: dict[str, Any] = {} if scores is None else {**share.arguments, "scores_out": scores[:rows]}
                    select(query[:rows], weights[:rows], pages, starts, lengths, table, topk=topk, out=out[:rows], **own)
        accelerator(device).synchronize()
