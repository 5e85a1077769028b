# SPDX-License-Identifier: Apache-2.0
"""Planner: a Batch in, a StepPlan out, once per engine step.

Everything it needs is on the host, so nothing is read back and nothing waits. A plan makes at most one host-to-device copy,
from page-locked memory; a decode batch like the last one needs none. A decode schedule of a new shape may be another.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, split_with_sizes

from mla_portable.contracts import (
    Batch,
    LengthsPlanner,
    PrefillChunk,
    ScheduleLimits,
    SchedulePlanner,
    StepLengths,
    StepPlan,
)
from mla_portable.contracts.plan import PlanCounter
from mla_portable.contracts.values import check_type, describe, device_of, refuse
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.planner.buffers import PlanBuffers
from mla_portable.planner.checks import check_lengths, check_sizes
from mla_portable.planner.config import PlannerConfig
from mla_portable.planner.parts import BatchSplit, fill_chunks, split_decodes_and_prefills
from mla_portable.planner.staging import Fence


class _WorkspaceLayout(NamedTuple):
    """The prefill sequences of a step in the workspace.

    Attributes:
        lens: [P], what the cache holds of each. starts: [P], the first row of each, counted within its chunk.
        bounds: chunk c holds sequences bounds[c] to bounds[c + 1]. rows: of each chunk. tokens: likewise, of the batch.
        gathered: of each chunk; the others are read in place, or have no token.
    """

    lens: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    bounds: list[int]
    rows: list[int]
    tokens: list[int]
    gathered: list[bool]


class Planner:
    """Plans the steps of one engine on one device and one stream.

    A plan's tensors are views of buffers that live as long as the planner, at the same addresses in every plan, so a CUDA
    graph captured over one plan reads the next one's numbers. They hold a step until a later `plan()`, whose copy is
    ordered behind the kernels already enqueued; a layer refuses a plan whose numbers were overwritten. Call `plan()` outside
    of graph capture and from one thread at a time: a planner is not thread-safe.
    """

    def __init__(self, config: PlannerConfig, *, make_fence: Callable[[], Fence] | None = None) -> None:
        """Make the planner of the decode schedules, which allocates their scratch.

        The first plan allocates all other buffers. Device memory does not grow after it, except for schedules of new shapes
        where the kind keeps them on the device.

        Args:
            config: limits and choices. make_fence: replaces the events that show whether a copy has landed.
        Raises: InvalidArgument for a device that is not there, and for a configuration that the schedule kind refuses.
        """
        check_type("Planner", "config", config, PlannerConfig, "a PlannerConfig, such as a layer's planner_config()")
        if make_fence is not None and not callable(make_fence):
            refuse("Planner", "make_fence", describe(make_fence), "a function without arguments, or None")
        self._config = config
        self._device = device_of("Planner", config.device)
        takes_few = config.route in ("direct", "split") and not config.batch_invariant
        self._few_tokens = config.few_tokens if takes_few else 0
        self._make_fence = make_fence
        self._counter = PlanCounter()
        self._buffers: PlanBuffers | None = None
        self._requests = np.arange(config.max_num_reqs, dtype=np.int32)
        self._uniform: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = {}
        self._max_decode_rows = config.max_num_tokens
        if config.batch_invariant and config.route != "fused":  # fused: every token is a row of sparse_decode
            # The scratch holds all splits of the largest batch, so padding beyond its rows is not decoded.
            self._max_decode_rows = min(config.max_num_tokens, config.max_num_reqs * config.decode_threshold)
        self._schedules: SchedulePlanner | LengthsPlanner | None = None
        self._kind = None if config.route == "upconvert" else config.schedule_kind
        if self._kind is not None:
            limits = ScheduleLimits(
                device=self._device,
                num_heads=config.num_heads,
                topk=config.topk,
                extra_topk=config.extra_topk,
                max_num_rows=self._max_decode_rows,
                max_query_len=max(config.decode_threshold, self._few_tokens),
                num_sms=config.num_sms,
                arch=config.arch,
                max_scratch_bytes=config.max_scratch_bytes,
                batch_invariant=config.batch_invariant,
                request=config.decode_request,
            )
            with neutral_defaults():
                self._schedules = self._kind.planner(limits)

    def _allocate(self) -> PlanBuffers:
        """By the first plan: an engine may build the planner inside a memory pool whose contents it discards, as vLLM does."""
        config = self._config
        with neutral_defaults():
            return PlanBuffers(
                max_num_reqs=config.max_num_reqs,
                max_num_tokens=config.max_num_tokens,
                workspace=config.has_workspace,
                device=self._device,
                make_fence=self._make_fence,
            )

    def invalidate(self) -> None:
        """Forget what the device memory holds: to be called when its contents were lost, for example by an engine's sleep mode.

        The next plan writes all of its numbers again. Plans made before, and graphs captured with them, are not repaired until
        then, and a schedule in device memory that a captured graph reads is not repaired at all: capture again.
        """
        self._counter.count += 1
        if self._buffers is not None:
            self._buffers.invalidate()
        if self._schedules is not None:
            self._schedules.invalidate()

    @property
    def config(self) -> PlannerConfig:
        """The configuration that was given."""
        return self._config

    @property
    def device(self) -> torch.device:
        """Where plans live, with its index."""
        return self._device

    @property
    def workspace_tokens(self) -> int:
        """Rows of the bf16 workspace that plans count on, 0 for a route without one."""
        return self._config.workspace_tokens

    @property
    def num_copies(self) -> int:
        """Host-to-device copies enqueued so far, by all plans together."""
        return 0 if self._buffers is None else self._buffers.num_copies

    def plan(self, batch: Batch) -> StepPlan:
        """Plan one step.

        Raises: InvalidArgument, before anything was written, for a batch that breaks the contract or the configuration.
        """
        config = self._config
        num_reqs, num_tokens, padded = check_sizes(batch, config, self._device)
        starts = batch.query_start_loc
        max_len = table_tokens = config.max_model_len
        if config.block_size is not None:
            table_tokens = batch.block_table.shape[1] * config.block_size * config.share.size
        threshold = 0 if config.route == "upconvert" else config.decode_threshold
        uniform_len = self._uniform_query_len(starts, num_reqs, num_tokens)
        query_lens: npt.NDArray[np.int32] | None = None
        if uniform_len:
            check_lengths(uniform_len, batch.seq_lens, num_tokens, max_len, table_tokens)
            split = BatchSplit(uniform_len, num_reqs, num_reqs) if threshold else BatchSplit(0, 0, num_reqs)
        elif num_reqs:
            query_lens = starts[1:] - starts[:-1]
            check_lengths(query_lens, batch.seq_lens, num_tokens, max_len, table_tokens)
            split = split_decodes_and_prefills(query_lens, threshold, self._few_tokens)
        else:
            split = BatchSplit(0, 0, 0)
        decode_tokens, query_len = self._decode_rows(split, starts, num_tokens, padded)
        num_prefills = 0 if config.route == "fused" else split.end_prefill - split.first_prefill
        layout = self._workspace_layout(batch, split) if num_prefills and config.has_workspace else None

        schedule = None
        if self._kind is not None and self._schedules is not None and decode_tokens:
            lengths = None
            if self._kind.needs_lengths:
                lengths = self._row_lengths(batch, split, query_lens, query_len, num_tokens)
                self._counter.count += 1  # the schedule of earlier plans is overwritten
            schedule = self._kind.schedule(self._schedules, decode_tokens // query_len, query_len, lengths)
        # Everything that can be refused has been refused; from here on buffers are written.
        buffers = self._buffers
        if buffers is None:
            buffers = self._buffers = self._allocate()
        chunks: tuple[PrefillChunk, ...] = ()
        workspace_starts = None
        ids_key = (uniform_len, num_reqs) if uniform_len else None  # equal keys, equal request ids
        if layout is not None or ids_key is None or not buffers.has_ids(ids_key):
            if query_lens is None:
                ids = self._uniform[uniform_len][1][:num_tokens] if uniform_len else self._requests[:0]
            else:
                ids = self._requests[:num_reqs].repeat(query_lens)
            self._counter.count += 1  # earlier plans no longer hold their step
            if layout is None:
                buffers.send_ids(ids, ids_key)
            else:
                workspace_starts = buffers.workspace_starts[:num_prefills]
                chunks = self._send_chunks(batch, split, buffers, ids, padded, layout, workspace_starts)

        return StepPlan(
            route=config.route,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_padded_tokens=padded,
            num_decodes=decode_tokens // query_len,
            num_decode_tokens=decode_tokens,
            decode_query_len=query_len,
            num_prefills=num_prefills,
            num_prefill_tokens=num_tokens - decode_tokens if num_prefills else 0,
            block_table=_rows(batch.block_table, 0, num_reqs),
            req_id_per_token=buffers.req_ids[:padded],
            prefill_request_ids=None if layout is None else buffers.prefill_ids[:padded],
            prefill_workspace_starts=workspace_starts,
            seq_lens=None if batch.seq_lens_device is None else _rows(batch.seq_lens_device, 0, num_reqs),
            prefill_chunks=chunks,
            decode_schedule=schedule,
            counter=self._counter,
            generation=self._counter.count,
        )

    def _uniform_query_len(self, starts: npt.NDArray[np.int32], num_reqs: int, num_tokens: int) -> int:
        """The query length up to the decode threshold that all requests have in common, 0 if there is none."""
        if num_reqs == 0:
            return 0
        query_len = int(starts[1])
        if not 1 <= query_len <= self._config.decode_threshold or num_reqs * query_len != num_tokens:
            return 0
        pattern = self._uniform.get(query_len)
        if pattern is None:
            max_reqs = min(self._config.max_num_reqs, self._config.max_num_tokens // query_len)
            pattern_starts = np.arange(max_reqs + 1, dtype=np.int32) * np.int32(query_len)
            pattern = self._uniform[query_len] = (pattern_starts, self._requests[:max_reqs].repeat(query_len))
        return query_len if np.array_equal(starts, pattern[0][: num_reqs + 1]) else 0

    def _decode_rows(self, split: BatchSplit, starts: npt.NDArray[np.int32], num_tokens: int, padded: int) -> tuple[int, int]:
        """(rows served by sparse_decode, S); the rows divide by S."""
        route, query_len = self._config.route, split.query_len or 1
        prefills = split.first_prefill < split.end_prefill
        if route == "upconvert":
            return 0, 1
        if route == "fused":
            return padded, query_len if not prefills and padded % query_len == 0 else 1
        if prefills:
            return int(starts[split.first_prefill]), query_len
        return padded if padded % query_len == 0 and padded <= self._max_decode_rows else num_tokens, query_len

    def _row_lengths(
        self, batch: Batch, split: BatchSplit, query_lens: npt.NDArray[np.int32] | None, query_len: int, num_tokens: int
    ) -> StepLengths:
        """Of the rows that sparse_decode serves, `query_len` tokens each. query_lens: None where all requests have one."""
        share, prefills = self._config.share, split.first_prefill < split.end_prefill
        if split.query_len == query_len and not (prefills and self._config.route == "fused"):
            decodes, device = slice(0, split.first_prefill), batch.seq_lens_device
            lens = batch.seq_lens[decodes]
            if query_lens is None or query_lens[decodes].all():
                return StepLengths(share.lengths(lens), None if device is None else device[decodes])
            return StepLengths(share.lengths(lens[query_lens[decodes] > 0]))
        # every token is a row
        ends = batch.query_start_loc[1:]
        first = np.repeat(batch.seq_lens - ends, np.diff(batch.query_start_loc))
        return StepLengths(share.lengths(first + np.arange(1, num_tokens + 1, dtype=np.int32)))

    def _workspace_layout(self, batch: Batch, split: BatchSplit) -> _WorkspaceLayout | None:
        """The prefill sequences in the workspace; None where all of them are read in place."""
        _, first, end = split
        config, times = self._config, self._config.prefill_times
        lens = config.share.lengths(batch.seq_lens[first:end])
        starts = np.empty(end - first, dtype=np.int32)
        bounds, rows = fill_chunks(lens, config.workspace_tokens, out=starts)
        tokens: list[int] = [batch.query_start_loc.item(first + bound) for bound in bounds]
        gathered = [before < after for before, after in pairwise(tokens)]  # empty requests may fill a chunk: nothing to serve
        if times is not None:
            for chunk, (before, after) in enumerate(pairwise(tokens)):
                fits = rows[chunk] <= config.workspace_tokens
                gathered[chunk] = fits and times.gathers(after - before, rows[chunk])
            if not any(gathered):
                return None
        return _WorkspaceLayout(lens, starts, bounds, rows, tokens, gathered)

    def _send_chunks(
        self,
        batch: Batch,
        split: BatchSplit,
        buffers: PlanBuffers,
        ids: npt.NDArray[np.int32],
        padded: int,
        layout: _WorkspaceLayout,
        starts: Tensor,
    ) -> tuple[PrefillChunk, ...]:
        """Send the step's numbers. Returns: the chunks that are gathered.

        Args:
            ids: the batch's request ids, [T]. starts: where the device gets the workspace starts, [num_prefills].
        """
        _, first, end = split
        lens, staged_starts, bounds, rows, tokens, gathered = layout
        prefill_ids = np.empty(padded, dtype=np.int32)
        prefill_ids[: tokens[0]] = prefill_ids[len(ids) :] = -1
        np.subtract(ids[tokens[0] :], first, out=prefill_ids[tokens[0] : len(ids)])
        for chunk, is_gathered in enumerate(gathered):
            if not is_gathered:
                prefill_ids[tokens[chunk] : tokens[chunk + 1]] = -1
        buffers.send_chunks(ids, prefill_ids, staged_starts, lens)
        lens_on_device = batch.seq_lens_device
        lens_on_device = buffers.seq_lens[: end - first] if lens_on_device is None else lens_on_device[first:end]
        requests = [first + bound for bound in bounds]
        table = _rows(batch.block_table, first, end)
        if len(rows) == 1:
            return (PrefillChunk(slice(*tokens), slice(first, end), table, lens_on_device, starts, rows[0]),)
        sizes = [after - before for before, after in pairwise(bounds)]
        tables, lengths = split_with_sizes(table, sizes), split_with_sizes(lens_on_device, sizes)
        views = zip(tables, lengths, split_with_sizes(starts, sizes), strict=True)
        return tuple(
            PrefillChunk(slice(*tokens[i : i + 2]), slice(*requests[i : i + 2]), *of_chunk, rows[i])
            for i, of_chunk in enumerate(views)
            if gathered[i]
        )


def _rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    return tensor if begin == 0 and end == tensor.shape[0] else tensor[begin:end]
