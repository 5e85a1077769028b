# SPDX-License-Identifier: Apache-2.0
"""StepBuffers: intermediate results of one layer's step. All layers of a model share one set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_portable.attention.spec import AttentionSpec
from mla_portable.attention.step import StepViews, TokenRange, rows_of
from mla_portable.contracts import InvalidArgument, PrefillChunk, Request, StepPlan
from mla_portable.contracts.values import CACHE_ALIGNMENT, describe
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.kit.rules import extent


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """Scratch with stable addresses.

    Layers that share it must run one after the other, on one stream and from one thread at a time: a second forward overwrites
    what the first one is still reading, and nothing detects that.

    Attributes:
        indices: [max_num_tokens, K] int32. counts: [max_num_tokens] int32. Where convert_indices writes.
        kept: likewise (indices, counts) for steps that are no larger, which nothing writes between a step's layers: layers that
            attend to the same selection convert it once. None where others use the memory between the layers.
        lse: [max_num_tokens, H] float32, for layers that return none; None where every layer does.
        query: [max_num_tokens, H, query width] bf16, where a (ql_nope, q_pe) pair is joined; None where none is expected.
        workspace: [W, key width] bf16 for gathered prefill contexts; None for routes without one.
    """

    indices: Tensor
    counts: Tensor
    lse: Tensor | None = None
    query: Tensor | None = None
    workspace: Tensor | None = None
    kept: tuple[Tensor, Tensor] | None = None
    _last: list[StepViews] = field(default_factory=list[StepViews], init=False, repr=False)
    _held: list[_Conversion] = field(default_factory=list["_Conversion"], init=False, repr=False)

    @classmethod
    def allocate(
        cls, spec: AttentionSpec, device: torch.device, *, has_workspace: bool, workspace: Tensor | None = None
    ) -> StepBuffers:
        """Buffers for layers of `spec` on `device`.

        Args:
            has_workspace: the route gathers. workspace: one that the caller owns, [W, key width] bf16; allocated where None.
        """
        tokens, heads, width = spec.max_num_tokens, spec.num_heads, spec.layout.key_width

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        with neutral_defaults():
            if has_workspace and workspace is None:
                workspace = empty(spec.workspace_rows, width, dtype=torch.bfloat16)
            indices, counts = empty(tokens, spec.topk, dtype=torch.int32), empty(tokens, dtype=torch.int32)
            return cls(
                indices=indices,
                counts=counts,
                lse=None if spec.need_lse else empty(tokens, heads, dtype=torch.float32),
                query=empty(tokens, heads, spec.query_width, dtype=torch.bfloat16) if spec.joins_query else None,
                workspace=workspace if has_workspace else None,
                kept=(indices, counts),
            )

    def check(self, spec: AttentionSpec, device: torch.device, *, has_workspace: bool) -> None:
        """Raise InvalidArgument unless layers of `spec` can use these buffers."""
        tokens, heads, width = spec.max_num_tokens, spec.num_heads, spec.layout.key_width
        _check("indices", self.indices, (tokens, spec.topk), torch.int32, device)
        _check("counts", self.counts, (tokens,), torch.int32, device)
        if not spec.need_lse:
            _check("lse", self.lse, (tokens, heads), torch.float32, device)
        if spec.joins_query:
            _check("query", self.query, (tokens, heads, spec.query_width), torch.bfloat16, device)
        if has_workspace:
            _check("workspace", self.workspace, (spec.workspace_rows, width), torch.bfloat16, device)
        if self.kept is not None:
            rows = len(self.kept[1])
            _check("kept[0]", self.kept[0], (rows, spec.topk), torch.int32, device)
            _check("kept[1]", self.kept[1], (rows,), torch.int32, device)

    def step(self, plan: StepPlan, *, decodes: bool) -> StepViews:
        """The views of a plan that fits, on these buffers; made once for all layers of the step.

        decodes: the layer has a sparse_decode.
        """
        if not self._last or self._last[0].plan is not plan or self._last[0].decodes is not decodes:
            self._last[:] = [step_views(plan, decodes, self)]
        return self._last[0]

    def holds(self, step: StepViews, topk_indices: Tensor, num_slots: int, request: Request[Any]) -> bool:
        """The indices and counts of `step` are what `request` of convert_indices makes of these positions, in this step."""
        if not self._held:
            return False
        held = self._held[0]
        same = held.step is step and held.topk_indices is topk_indices and held.num_slots == num_slots
        return same and (held.request is request or held.request == request)

    def forget(self) -> None:
        """Indices and counts are about to be written."""
        self._held.clear()

    def remember(self, step: StepViews, topk_indices: Tensor, num_slots: int, request: Request[Any]) -> None:
        """They were made of this; `holds` says so from now on, where nothing else writes them."""
        if step.kept:
            self._held.append(_Conversion(step, topk_indices, num_slots, request))

    def extents(self, *, query: bool, lse: bool) -> dict[str, tuple[int, int]]:
        """Name -> address range of what a step writes here; `query` and `lse` say whether it uses these two."""
        named = {
            "indices": self.indices,
            "counts": self.counts,
            "workspace": self.workspace,
            "query": self.query if query else None,
            "lse": self.lse if lse else None,
        }
        if self.kept is not None and self.kept[0] is not self.indices:
            named |= {"kept[0]": self.kept[0], "kept[1]": self.kept[1]}
        return {f"the layer's buffers.{name}": extent(tensor) for name, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        tensors = (self.indices, self.counts, self.lse, self.query, self.workspace, *(self.kept or ()))
        return sum(each.nbytes for each in {id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def step_views(plan: StepPlan, decodes: bool, buffers: StepBuffers) -> StepViews:
    """The views of a plan on buffers that are large enough for it."""
    tokens, workspace = plan.num_padded_tokens, buffers.workspace
    kept = buffers.kept is not None and tokens <= len(buffers.kept[1])
    of_all = buffers.kept if buffers.kept is not None and kept else (buffers.indices, buffers.counts)
    indices, counts = (tensor[:tokens] for tensor in of_all)
    lse, query = (None if tensor is None else tensor[:tokens] for tensor in (buffers.lse, buffers.query))

    def part(begin: int, end: int, shape: tuple[int, ...], chunk: PrefillChunk | None = None) -> TokenRange:
        own = [indices, counts, *(tensor for tensor in (lse, query) if tensor is not None)]
        of_indices, of_counts, *others = (rows_of(tensor, begin, end, shape) for tensor in own)
        gathered = None if chunk is None or workspace is None else (chunk, workspace[: chunk.workspace_rows])
        return TokenRange(begin, end, shape, of_indices, of_counts, tuple(zip(own[2:], others, strict=True)), gathered)

    begin = plan.num_decode_tokens if decodes else 0
    decode = part(0, begin, (plan.num_decodes, plan.decode_query_len)) if begin else None
    prefills: list[TokenRange] = []
    for chunk in plan.prefill_chunks:
        if begin < chunk.tokens.start:
            prefills.append(part(begin, chunk.tokens.start, (chunk.tokens.start - begin,)))
        begin = chunk.tokens.stop
        prefills.append(part(chunk.tokens.start, begin, (chunk.num_tokens,), chunk))
    end = max(begin, plan.num_decode_tokens + plan.num_prefill_tokens)
    if begin < end:
        prefills.append(part(begin, end, (end - begin,)))
    return StepViews(plan, decodes, indices, counts, lse, query, decode, tuple(prefills), end, kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Conversion:
    """What the kept indices and counts were made of."""

    step: StepViews
    topk_indices: Tensor
    num_slots: int
    request: Request[Any]


def _check(name: str, tensor: Tensor | None, least: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """At least `least[0]` rows, otherwise exactly `least`; contiguous."""
    where, expected = "SparseMLAAttention", f"{dtype} {list(least)} on {device}, contiguous; more rows are welcome"
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(where, name, got=describe(tensor), expected=expected)
    same_rank = tensor.dim() == len(least)
    fits = same_rank and tensor.shape[0] >= least[0] and tensor.shape[1:] == least[1:]
    if fits and tensor.dtype == dtype and tensor.device == device and tensor.is_contiguous():
        if tensor.data_ptr() % CACHE_ALIGNMENT:
            limit = f"a multiple of {CACHE_ALIGNMENT} bytes, as memory from torch has"
            raise InvalidArgument(where, name, got=f"address {tensor.data_ptr():#x}", expected=limit)
        return
    got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" + ("" if tensor.is_contiguous() else ", not contiguous")
    short = least[0] - tensor.shape[0] if same_rank else 0
    remedy = f"It is too small by {short} rows: enlarge it, or lower what the spec asks for." if short > 0 else ""
    raise InvalidArgument(where, name, got=got, expected=expected, remedy=remedy)
