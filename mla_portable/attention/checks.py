# SPDX-License-Identifier: Apache-2.0
"""What a step's tensors must be before a layer runs anything on them: they fit the spec, and the plan was made for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention.buffers import StepBuffers
from mla_portable.attention.spec import AttentionSpec
from mla_portable.contracts import DecodeSchedule, InvalidArgument, PlanMismatch, StepPlan
from mla_portable.contracts.values import describe, refuse
from mla_portable.kit.rules import (
    CacheFacts,
    check_cache,
    check_disjoint,
    check_flat_rows,
    check_tensor,
    facts_of_rows,
    named_tensors,
    shape_of,
)
from mla_portable.layouts import Cache
from mla_portable.primitives.cache_write import check as check_write

_WHERE: Final = "SparseMLAAttention.forward"
_CONFIGURE: Final = "Configure the planner with planner_config()."
_KEPT_CACHES: Final = 1024
"""More than a model has layers."""
_PLAN_AGAIN: Final = "A plan serves one batch: plan again."


class StepCheck:
    """The checks of one layer; made when it is built, so that a step compares and does not look up."""

    def __init__(
        self,
        spec: AttentionSpec,
        route: str,
        buffers: StepBuffers,
        *,
        device: torch.device,
        flat_cache: bool,
        reads_in_place: bool,
        schedule_type: type[DecodeSchedule] | None,
    ) -> None:
        """`flat_cache`: sparse_prefill reads the cache as flat rows. `reads_in_place`: prefill tokens need not be gathered.

        `schedule_type`: what the layer's sparse_decode takes, None for any.
        """
        self._spec, self._route, self._device = spec, route, device
        self._check_cache = CacheCheck(_WHERE, "kv_cache", spec, device, flat=flat_cache)
        self._check_written = CacheCheck("SparseMLAAttention.cache_write", "kv_cache", spec, device, flat=flat_cache)
        self._layout, self._reads_in_place = spec.layout, reads_in_place
        self._known: object = self  # the last plan that passed _check_plan; no plan yet
        self._schedule: DecodeSchedule | None = None
        self._schedule_scratch: Mapping[str, tuple[int, int]] = {}
        """Of the last schedule: a planner gives the same one to every step of one shape."""
        self._schedule_type = DecodeSchedule if schedule_type is None else schedule_type
        self._buffers = buffers
        self._workspace_rows = 0 if buffers.workspace is None else buffers.workspace.shape[0]
        self._look_at_buffers()

    def _look_at_buffers(self) -> None:
        """Address ranges of what a step writes, by whether it joins a query and fills an lse of its own."""
        extents, choices = self._buffers.extents, (False, True)
        self._address = self._buffers.indices.data_ptr()
        self._scratch = {(joins, own_lse): extents(query=joins, lse=own_lse) for joins in choices for own_lse in choices}

    def __call__(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Cache,
        topk_indices: Tensor,
        plan: StepPlan,
        out: Tensor | None,
        lse_out: Tensor | None,
        attn_sink: Tensor | None,
    ) -> None:
        """Raises: PlanMismatch when the plan was made for something else, InvalidArgument for the tensors."""
        spec, device = self._spec, self._device
        self.plan(plan)
        tokens, heads = plan.num_padded_tokens, spec.num_heads
        parts, widths = self._query_parts(q)
        name, first = next(iter(parts.items()))
        given = shape_of(_WHERE, name, first, 3, f"[T, H, {widths[0]}]")[0]
        if given != tokens:
            _mismatch(f"q has {given} tokens, the plan was made for {tokens}. {_PLAN_AGAIN}")
        if plan.counter is not None and plan.generation != plan.counter.count and not _is_capturing(device):
            _mismatch(f"a later plan() of the same planner has overwritten the numbers of this plan. {_PLAN_AGAIN}")
        self._check_cache(kv_cache)
        for (name, part), size in zip(parts.items(), widths, strict=True):
            check_tensor(_WHERE, name, part, torch.bfloat16, (tokens, heads, size), device, f"[T, H, {size}]")
        given = shape_of(_WHERE, "topk_indices", topk_indices, 2, "[T or more, K]")[0]
        rows = max(tokens, given)
        check_tensor(_WHERE, "topk_indices", topk_indices, torch.int32, (rows, spec.topk), device, "[T or more, K]")
        if out is not None:
            width = self._layout.value_width
            check_tensor(_WHERE, "out", out, torch.bfloat16, (tokens, heads, width), device, f"[T, H, {width}]")
        if lse_out is not None:
            check_tensor(_WHERE, "lse_out", lse_out, torch.float32, (tokens, heads), device, "[T, H]")
        check_sink(_WHERE, spec, attn_sink, device)
        read = {**parts, **named_tensors("kv_cache", kv_cache), "topk_indices": topk_indices, "attn_sink": attn_sink}
        if self._buffers.indices.data_ptr() != self._address:  # copy.deepcopy made this layer
            self._look_at_buffers()
        scratch = self._scratch[len(parts) == 2, lse_out is None]
        if self._schedule_scratch:
            scratch = {**scratch, **self._schedule_scratch}
        check_disjoint(_WHERE, {"out": out, "lse_out": lse_out}, read, scratch)

    def plan(self, plan: StepPlan) -> None:
        """A plan that the layer can follow. Raises: PlanMismatch, InvalidArgument."""
        if plan is not self._known:
            if not isinstance(plan, StepPlan):  # pyright: ignore[reportUnnecessaryIsInstance]
                refuse(_WHERE, "plan", describe(plan), "a StepPlan, from a planner of planner_config()")
            self._check_plan(plan)
            self._known = plan

    def write(self, kv_c: Tensor, k_pe: Tensor, kv_cache: Cache, slot_mapping: Tensor, scale_format: str = "pow2") -> None:
        """The tensors of a cache_write that is bound for the spec's cache. Raises: InvalidArgument."""
        check_write(kv_c, k_pe, kv_cache, slot_mapping, scale_format, None, self._spec.kv_layout)
        self._check_written(kv_cache)

    @staticmethod
    def no_rope(k_pe: Tensor) -> None:
        """The rotary part of new keys where the spec says that there is none. Raises: InvalidArgument."""
        where = "SparseMLAAttention.cache_write"
        tokens = shape_of(where, "k_pe", k_pe, 2, "[T, 0]")[0]
        check_tensor(where, "k_pe", k_pe, k_pe.dtype, (tokens, 0), k_pe.device, "[T, 0], because spec.nope")

    def _query_parts(self, q: Tensor | tuple[Tensor, Tensor]) -> tuple[Mapping[str, Tensor], tuple[int, ...]]:
        """The tensors of the query by name, and their widths."""
        spec = self._spec
        if isinstance(q, Tensor):
            return {"q": q}, (spec.query_width,)
        tensor, halves = f"[T, H, {spec.query_width}]", (self._layout.value_width, spec.rope_width)
        expected = f"a tensor {tensor}, or the pair (ql_nope [T, H, {halves[0]}], q_pe [T, H, {halves[1]}])"
        if not isinstance(q, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(_WHERE, "q", describe(q), expected)
        if len(q) != 2:  # pyright: ignore[reportUnnecessaryComparison]
            refuse(_WHERE, "q", f"a tuple of {len(q)}", expected)
        if not spec.concat_query:
            refuse(_WHERE, "q", "a pair", f"one tensor {tensor}", "Build the layer with concat_query=True.")
        return {"q[0]": q[0], "q[1]": q[1]}, halves

    def _check_plan(self, plan: StepPlan) -> None:
        """What depends on the plan alone: once a plan, for it never changes."""
        spec, tokens, schedule = self._spec, plan.num_padded_tokens, plan.decode_schedule
        made_on, wanted = plan.req_id_per_token.device, self._schedule_type
        if plan.route != self._route:
            _mismatch(f"the layer takes route {self._route!r}, the plan was made for {plan.route!r}. {_CONFIGURE}")
        if made_on != self._device:
            _mismatch(f"the layer is on {self._device}, the plan was made on {made_on}. {_CONFIGURE}")
        if tokens > spec.max_num_tokens:
            limit = f"the layer was built for at most {spec.max_num_tokens}. Build it with a larger max_num_tokens."
            _mismatch(f"the plan has {tokens} tokens, {limit}")
        if schedule is not None:
            if not isinstance(schedule, wanted):
                takes = f"the layer's sparse_decode takes a {wanted.__name__}. {_CONFIGURE}"
                _mismatch(f"the plan has a {type(schedule).__name__}, {takes}")
            schedule.check(_WHERE, plan.num_decodes, plan.decode_query_len, spec.num_heads, spec.topk, self._device)
        if schedule is not self._schedule:
            scratch = {} if schedule is None else schedule.scratch(_WHERE, self._layout.value_width)
            self._schedule, self._schedule_scratch = schedule, scratch
        needed = max((chunk.workspace_rows for chunk in plan.prefill_chunks), default=0)
        if needed > self._workspace_rows:
            _mismatch(f"a prefill chunk needs {needed} workspace rows, the layer has {self._workspace_rows}. {_CONFIGURE}")
        if not self._reads_in_place:
            gathered, prefills = sum(chunk.num_tokens for chunk in plan.prefill_chunks), plan.num_prefill_tokens
            if gathered < prefills:
                _mismatch(f"the plan gathers {gathered} of {prefills} prefill tokens, the layer needs all. {_CONFIGURE}")


class CacheCheck:
    """`check_layer_cache` of the caches of a model's layers, which are the same ones in every step: a cache is looked at once.

    What is remembered is all that the check reads of a tensor, never the tensor.
    """

    __slots__ = ("_arguments", "_flat", "_passed")

    def __init__(self, where: str, argument: str, spec: AttentionSpec, device: torch.device, *, flat: bool = False) -> None:
        self._arguments, self._flat = (where, argument, spec, device), flat
        self._passed: set[tuple[object, ...]] = set()

    def __call__(self, cache: Cache) -> None:
        """Raises: InvalidArgument."""
        where, argument, spec, device = self._arguments
        key = None
        if isinstance(cache, Tensor) and cache.layout is torch.strided and not cache.is_nested and not cache.requires_grad:
            key = cache.data_ptr(), cache.shape, cache.stride(), cache.dtype, cache.device
            if key in self._passed:
                return
        check_layer_cache(where, argument, cache, spec, device, flat=self._flat)
        if key is not None:
            if len(self._passed) >= _KEPT_CACHES:
                self._passed.clear()
            self._passed.add(key)


def _mismatch(text: str) -> NoReturn:
    raise PlanMismatch(f"{_WHERE}: {text}")


def _is_capturing(device: torch.device) -> bool:
    """A graph is being captured: it keeps plans on purpose, and later plans write the numbers that its replays read."""
    return accelerator(device).is_capturing()


def check_sink(where: str, spec: AttentionSpec, attn_sink: Tensor | None, device: torch.device) -> None:
    """Raises: InvalidArgument unless there is a sink exactly where the spec says so, [H] float32."""
    if spec.attn_sink and attn_sink is None:
        expected = "[H] float32, because spec.attn_sink: when the layer is built, or in each call"
        raise InvalidArgument(where, "attn_sink", got="None", expected=expected)
    if attn_sink is not None:
        if not spec.attn_sink:
            raise InvalidArgument(where, "attn_sink", got="a tensor", expected="None, because spec.attn_sink is False")
        check_tensor(where, "attn_sink", attn_sink, torch.float32, (spec.num_heads,), device, "[H]")


def check_layer_cache(
    where: str,
    argument: str,
    cache: Cache,
    spec: AttentionSpec,
    device: torch.device,
    *,
    block_size: int | None = None,
    flat: bool = False,
) -> None:
    """Raises: InvalidArgument unless this is a paged cache as the spec says.

    Args:
        block_size: in place of the spec's. flat: it is read as flat rows, which lie behind one another without a gap.
    """
    found = check_cache(where, argument, cache, device, kv_layout=spec.kv_layout)
    wanted = spec.block_size if block_size is None else block_size
    for at, part in enumerate(cache if isinstance(cache, tuple) else (cache,)):
        name = f"{argument}[{at}]" if isinstance(cache, tuple) else argument
        _check_layer_tensor(where, name, part, spec, found, wanted, flat=flat)


def _check_layer_tensor(
    where: str, argument: str, cache: Tensor, spec: AttentionSpec, found: CacheFacts, wanted: int, *, flat: bool
) -> None:
    """One tensor of a cache with the facts `found`, in blocks of `wanted` tokens."""
    layout, alignment, (blocks, size, width) = spec.layout, found.cache_alignment, cache.shape
    block_stride = cache.stride(0) if blocks > 1 else 0
    if size != wanted:
        refuse(where, argument, f"block_size {size}", f"{layout.name}, block_size {wanted}, as in the spec")
    if alignment < spec.cache_alignment:
        bytes_apart = block_stride * cache.element_size()
        _refuse_alignment(where, argument, cache, f", block stride {bytes_apart} bytes", spec, alignment)
    if block_stride not in (0, size * width) and (flat or (spec.contiguous_blocks and found.uneven_blocks)):
        expected = f"{size * width}: the spec promises contiguous blocks, which kernels may rely on"
        remedy = "Build the layer with contiguous_blocks=False for blocks that lie block_stride."
        refuse(where, argument, f"block stride {block_stride}", expected, remedy)


def check_layer_rows(where: str, argument: str, rows: Tensor, spec: AttentionSpec, device: torch.device) -> None:
    """Raises: InvalidArgument unless these are flat rows [W, row width] of the spec's layout, which has no scales."""
    check_flat_rows(where, argument, rows, spec.layout, device)
    alignment = facts_of_rows(rows, spec.layout).cache_alignment
    if alignment < spec.cache_alignment:
        _refuse_alignment(where, argument, rows, "", spec, alignment)


def _refuse_alignment(where: str, argument: str, cache: Tensor, stride: str, spec: AttentionSpec, alignment: int) -> NoReturn:
    expected = f"multiples of {spec.cache_alignment} bytes, which the spec promises"
    remedy = f"Build the layer with cache_alignment={alignment}."
    refuse(where, argument, f"address {cache.data_ptr():#x}{stride}", expected, remedy)
