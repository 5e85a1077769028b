# SPDX-License-Identifier: Apache-2.0
"""Batch and StepPlan: an engine's description of a step, and what every layer of that step shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_portable.contracts.schedule import DecodeSchedule
from mla_portable.contracts.values import INT32_MAX, check_fields, check_type, describe, refuse

ROUTES = ("fused", "split", "direct", "upconvert")
"""Compositions of primitives that serve a batch.

fused      every token through sparse_decode on the cache itself
split      decode tokens through sparse_decode; prefill through gather_upconvert and sparse_prefill on the workspace, chunk by
           chunk; where the route was chosen by measured times, a chunk for which that is slower is served as in direct
direct     decode tokens through sparse_decode; prefill through sparse_prefill on the paged cache, no workspace
upconvert  every token through gather_upconvert and sparse_prefill (vendors whose kernels read bf16 only)
"""
WORKSPACE_ROUTES = ("split", "upconvert")
"""Those that gather prefill sequences into a bf16 workspace."""
WORKSPACE_SEQUENCES = 5
"""Sequences of the greatest length that the workspace holds by default, as in vLLM. 5 x 163 840 tokens of 1152 bytes are 0.9
GiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One engine step. Requests that decode come first, requests that prefill after; the planner finds the boundary.

    A request may be empty (no query tokens), as padding requests are; a decode behind a prefill is served as a prefill.

    Attributes:
        query_start_loc: [R + 1] int32 on the host, cumulative query tokens; its last entry is the token count.
        seq_lens: [R] int32 on the host, context plus query of each request, in tokens.
        block_table: [R or more, columns] int32 on the device; the entries of a row are contiguous.
        num_padded_tokens: rows to fill for a CUDA graph that was captured for more tokens than the batch has;
            None means no padding.
        seq_lens_device: [R or more] int32, contiguous, what the cache holds of each sequence: the same lengths, or those of the
            planner's share, on the device where the engine has them; None lets the planner copy them with everything else, and
            leaves positions behind a sequence to its block table. A captured graph reads them at each replay.
    """

    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: Tensor
    num_padded_tokens: int | None = None
    seq_lens_device: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """Prefill requests whose sequences fit the workspace together.

    Attributes:
        tokens: slice of the batch's query tokens. requests: slice of the batch's requests.
        block_table: [p, columns], seq_lens [p] int32, workspace_starts [p] int32: device views for gather_upconvert.
        workspace_rows: rows of the workspace in use, the chunk's total sequence length.
    """

    tokens: slice
    requests: slice
    block_table: Tensor
    seq_lens: Tensor
    workspace_starts: Tensor
    workspace_rows: int

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return self.tokens.stop - self.tokens.start


@dataclass(slots=True, eq=False)
class PlanCounter:
    """How often a planner has written the buffers that its plans are views of."""

    count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Everything a layer needs for a step; made once by the planner, shared by all layers.

    Attributes:
        route: one of ROUTES, as the planner was configured.
        num_reqs, num_tokens: of the batch. num_padded_tokens: rows of the tensors below, >= num_tokens; padding rows
            have request id 0 and prefill request id -1, and expect top-k rows of -1.
        num_decodes, num_decode_tokens, decode_query_len: B, B * S and S of the sparse_decode call, which serves the leading
            tokens: those of leading requests with one query length, up to the decode threshold (empty requests have no
            row). A batch without prefills counts its padding rows too, so that a captured graph covers them, unless they
            do not divide by S. In the fused route every row counts as decode, padding included, with S = 1 unless the
            batch is uniform. S is 1 where nothing decodes.
        num_prefills, num_prefill_tokens: requests from the first that is neither decode nor empty to the last that is not
            empty, and their tokens.
        block_table: [R, columns] int32, the batch's own.
        req_id_per_token: [num_padded_tokens] int32.
        prefill_request_ids: [num_padded_tokens] int32, -1 for tokens that read the cache itself, else the index among the
            prefill requests; None unless something is gathered.
        prefill_workspace_starts: [num_prefills] int32, chunk-local; None likewise.
        seq_lens: [num_reqs] int32, what the cache holds of each sequence: positions from there on are absent. None where the
            engine does not have them on the device.
        prefill_chunks: what is gathered, in order, each with at least one token. Prefill tokens in none of them read the cache
            itself, as all do on a route without a workspace.
        decode_schedule: for sparse_decode, None when the kernel wants none or nothing decodes.
        counter: the planner's, None for a plan that no planner made. generation: its count when this plan was made; a layer
            refuses the plan once the planner has counted on, except while a CUDA graph is captured.

    The request ids and the numbers of prefills are views of buffers that the planner owns: they hold this step until a later
    `plan()` with other request ids, on the same stream. `block_table`, and the lengths where the engine has them on the device,
    are views of the engine's tensors; schedules are tensors of their own.
    Raises: InvalidArgument for numbers that are not those of one step.
    """

    route: str
    num_reqs: int
    num_tokens: int
    num_padded_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode_query_len: int
    num_prefills: int
    num_prefill_tokens: int
    block_table: Tensor
    req_id_per_token: Tensor
    prefill_request_ids: Tensor | None = None
    prefill_workspace_starts: Tensor | None = None
    seq_lens: Tensor | None = None
    prefill_chunks: tuple[PrefillChunk, ...] = ()
    decode_schedule: DecodeSchedule | None = None
    counter: PlanCounter | None = None
    generation: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_reqs, self.num_tokens, self.num_padded_tokens, self.num_decodes, self.num_decode_tokens)
        counts += (self.decode_query_len, self.num_prefills, self.num_prefill_tokens)
        if type(self.route) is not str or set(map(type, counts)) != {int} or min(counts) < 0 or self.decode_query_len < 1:
            check_fields(self, {"decode_query_len": (1, INT32_MAX)})
        tokens, decodes, prefills = self.num_padded_tokens, self.num_decode_tokens, self.num_prefill_tokens
        if self.num_tokens > tokens:
            _refuse("num_tokens", self.num_tokens, f"at most num_padded_tokens, {tokens}")
        if decodes != self.num_decodes * self.decode_query_len:
            product = f"{self.num_decodes} x {self.decode_query_len}"
            _refuse("num_decode_tokens", decodes, f"num_decodes x decode_query_len, {product}")
        if decodes + prefills > tokens:
            _refuse("num_prefill_tokens", prefills, f"with {decodes} decode tokens at most num_padded_tokens, {tokens}")
        _check_ids("block_table", self.block_table, self.num_reqs, "[num_reqs, columns]", 2)
        _check_ids("req_id_per_token", self.req_id_per_token, tokens, "[num_padded_tokens]")
        if self.prefill_request_ids is not None:
            _check_ids("prefill_request_ids", self.prefill_request_ids, tokens, "[num_padded_tokens]")
        if self.prefill_workspace_starts is not None:
            _check_ids("prefill_workspace_starts", self.prefill_workspace_starts, self.num_prefills, "[num_prefills]")
        if self.seq_lens is not None:
            _check_ids("seq_lens", self.seq_lens, self.num_reqs, "[num_reqs]")
        check_type("StepPlan", "prefill_chunks", self.prefill_chunks, tuple, "a tuple of PrefillChunks")
        end = decodes
        for index, chunk in enumerate(self.prefill_chunks):
            check_type("StepPlan", f"prefill_chunks[{index}]", chunk, PrefillChunk, "a PrefillChunk")
            if not end <= chunk.tokens.start < chunk.tokens.stop <= decodes + prefills:
                expected = f"a slice that is not empty, within {end} and {decodes + prefills}"
                _refuse(f"prefill_chunks[{index}].tokens", chunk.tokens, expected)
            end = chunk.tokens.stop


def _check_ids(argument: str, value: object, rows: int, axes: str, rank: int = 1) -> None:
    """An int32 tensor of these axes, of which the first has `rows` entries."""
    if not isinstance(value, Tensor) or value.dtype != torch.int32 or value.dim() != rank or value.shape[0] != rows:
        _refuse(argument, describe(value), f"int32 {axes}, with {rows} rows")


def _refuse(argument: str, got: object, expected: str) -> NoReturn:
    refuse("StepPlan", argument, got, expected, "Plans are made by a Planner: plan again.")
