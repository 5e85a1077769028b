# SPDX-License-Identifier: Apache-2.0
"""SparseMLAAttention: one layer's attention. Its primitives are bound when it is built; each step follows its plan.

All tokens: convert_indices, once, compacted where that saves work; not again for a layer that attends to the selection of the
layer before it. Then every part writes its own rows of `out` and `lse`:
decode tokens    sparse_decode on the cache, as [requests, query length] rows, by the implementation for so many of them. In a
                 step with prefills, sparse_prefill serves them too where it is the same kernel on the cache: one call fills
                 the device better than two
prefill tokens   route direct: sparse_prefill on the cache
                 routes split and upconvert, chunk by chunk: gather_upconvert, then sparse_prefill on the workspace
                 a chunk that the plan does not gather: as on route direct
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention.bound_route import bind_route
from mla_portable.attention.buffers import StepBuffers
from mla_portable.attention.checks import StepCheck, check_sink
from mla_portable.attention.layer_registry import ForcedBackend, LayerRegistry
from mla_portable.attention.route_decision import RouteDecision, check_decided
from mla_portable.attention.routes import choose_route
from mla_portable.attention.spec import AttentionSpec
from mla_portable.attention.step import JoinQuery, StepViews, join_halves
from mla_portable.choose import Registry
from mla_portable.contracts import WORKSPACE_ROUTES, InvalidArgument, Request, StepPlan, UnsupportedRequest
from mla_portable.contracts.values import check_type, describe, device_of, refuse
from mla_portable.layouts import Cache
from mla_portable.planner import PlannerConfig
from mla_portable.primitives import CACHE_WRITE, CacheWrite


class SparseMLAAttention:
    """The attention of one layer, in the latent space (weights absorbed).

    A layer is not thread-safe, and neither are layers that share buffers: call `forward` from one thread at a time.

    Attributes:
        spec, device: as built, the device with its index; the layer runs there, whether or not it is the current device.
        facts: `DeviceFacts` of the device.
        route: the chosen one. route_decision: every route's verdict and reasons, with every primitive's decision.
        write_decision: of cache_write, which serves the layer's own `cache_write` where it chose something.
        buffers: to pass to the model's other layers.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        device: torch.device | str,
        registry: Registry | None = None,
        backend: ForcedBackend = None,
        workspace: Tensor | None = None,
        attn_sink: Tensor | None = None,
        buffers: StepBuffers | None = None,
        join_query: JoinQuery | None = None,
        route_decision: RouteDecision | None = None,
    ) -> None:
        """Choose a route, bind its primitives, allocate what is not given; the device is the current one meanwhile.

        Args:
            spec: shared by the model's layers. device: where they run. registry: None for the process's own.
            backend: forced for every primitive of the layer, or a mapping from primitive names to backends.
            workspace: [W, key width] bf16, at least `spec.workspace_rows`; allocated where None and the route gathers.
            attn_sink: [H] float32, only where `spec.attn_sink`; None there if every `forward` is given its own. buffers: of
                another layer of the same spec and route.
            join_query: writes the halves of a (ql_nope, q_pe) pair side by side into its third argument; `torch.cat` if None.
            route_decision: one that was made for this spec and device, by the same registry and backend: it is bound, and no
                route is chosen. None to choose one.
        Raises: UnsupportedRoute with the reasons against every route; UnknownBackend; InvalidArgument for tensors that do
            not fit the spec.
        """
        if not isinstance(spec, AttentionSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument("SparseMLAAttention", "spec", got=describe(spec), expected="an AttentionSpec")
        if spec.extra_topk:
            remedy = "A SlotAttention attends to two caches."
            refuse("SparseMLAAttention", "spec.extra_topk", spec.extra_topk, "0: a layer has one cache", remedy)
        self.spec, self._layout = spec, spec.layout
        self.device = device_of("SparseMLAAttention", device)
        if buffers is not None:
            check_type("SparseMLAAttention", "buffers", buffers, StepBuffers, "another layer's `buffers`, or None")
        if join_query is not None and not callable(join_query):
            refuse("SparseMLAAttention", "join_query", describe(join_query), "a function of three tensors, or None")
        self._accelerator = accelerator(self.device)
        with self._accelerator.guard():  # what is tried and bound for a device runs on it
            layer_registry = LayerRegistry(registry, backend)
            self.facts = layer_registry.facts(self.device)
            if route_decision is None:
                route_decision = choose_route(spec, self.facts, layer_registry)
            else:
                check_decided("SparseMLAAttention", route_decision, spec, self.facts, converts=True)
            self.route_decision: RouteDecision = route_decision
            verdict = self.route_decision.verdict  # raises where there is none
            self.route = verdict.route
            self._bound = bind_route(spec, verdict, layer_registry)
            formats = self._layout.scale_formats
            self._scales: dict[str, Any] = {"scale_format": spec.scale_format or formats[0]} if formats else {}
            write = Request(CACHE_WRITE, self.facts, graph=spec.graph, **spec.cache_facts() | self._scales)
            self.write_decision = layer_registry.decide(write)
            self._write: CacheWrite | None = layer_registry.resolve(write).call if self.write_decision.chosen else None
            self._no_rope = (
                torch.zeros((1, self._layout.rope_width), dtype=torch.bfloat16, device=self.device) if spec.nope else None
            )
            if attn_sink is not None:
                with torch.no_grad():  # it may be a parameter: what counts is how a step is called
                    check_sink("SparseMLAAttention", spec, attn_sink, self.device)
            self._attn_sink = attn_sink
            self._join_query = join_halves if join_query is None else join_query
            self.buffers = self._ready_buffers(buffers, workspace)
            kind, reads_in_place = self._bound.schedule_kind, self._bound.prefill_in_place is not None
            self._check = StepCheck(
                spec,
                self.route,
                self.buffers,
                device=self.device,
                flat_cache=reads_in_place and not self._layout.in_place,
                reads_in_place=reads_in_place,
                schedule_type=kind.schedule_type if kind else None,
            )

    def _ready_buffers(self, buffers: StepBuffers | None, workspace: Tensor | None) -> StepBuffers:
        has_workspace = self.route in WORKSPACE_ROUTES
        if buffers is None:
            buffers = StepBuffers.allocate(self.spec, self.device, has_workspace=has_workspace, workspace=workspace)
        elif workspace is not None:
            expected = "None, because buffers are given"
            raise InvalidArgument("SparseMLAAttention", "workspace", got="a tensor", expected=expected)
        buffers.check(self.spec, self.device, has_workspace=has_workspace)
        return buffers

    def explain(self) -> str:
        """The route and every primitive's implementation, with the reasons against the others."""
        return self.route_decision.text()

    def planner_config(self) -> PlannerConfig:
        """The configuration of a planner for this layer."""
        spec = self.spec
        return PlannerConfig(
            device=self.device,
            route=self.route,
            num_heads=spec.num_heads,
            topk=spec.topk,
            max_num_reqs=spec.max_num_reqs,
            max_num_tokens=spec.max_num_tokens,
            max_model_len=spec.max_model_len,
            prefill_workspace_tokens=spec.prefill_workspace_tokens,
            prefill_times=self.route_decision.verdict.prefill_times,
            decode_threshold=spec.decode_query_len,
            schedule_kind=self._bound.schedule_kind,
            decode_request=self._bound.decode_request,
            num_sms=self.facts.num_sms,
            arch=self.facts.arch,
            batch_invariant=spec.batch_invariant,
            max_scratch_bytes=spec.max_scratch_bytes,
            block_size=spec.block_size,
            share=spec.share,
        )

    def cache_write(self, kv_c: Tensor, k_pe: Tensor, kv_cache: Cache, slot_mapping: Tensor) -> None:
        """Write a step's new tokens into the cache with `spec.scale_format`; arguments as `mla_portable.cache_write`.

        With `spec.nope`, k_pe is [T, 0], and the rotary part of the rows is written as zeros. Graph-safe where `spec.graph`.
        Raises: UnsupportedRequest if no implementation writes this layout; attention may still read it. InvalidArgument for the
            tensors, before anything is written.
        """
        if self._write is None:
            raise UnsupportedRequest(self.write_decision)
        if self._no_rope is not None:
            self._check.no_rope(k_pe)
            k_pe = self._no_rope.expand(k_pe.shape[0], -1)
        self._check.write(kv_c, k_pe, kv_cache, slot_mapping, **self._scales)
        if not self._accelerator.is_current():
            with self._accelerator.guard():
                self._write(kv_c, k_pe, kv_cache, slot_mapping, **self._scales)
        else:
            self._write(kv_c, k_pe, kv_cache, slot_mapping, **self._scales)

    def forward(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Cache,
        topk_indices: Tensor,
        plan: StepPlan,
        *,
        attn_sink: Tensor | None = None,
        same_selection: bool = False,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of a step's tokens over the cache.

        Args:
            q: [T, H, V + R] bf16, or the pair ql_nope [T, H, V], q_pe [T, H, R] where `spec.concat_query`; V and R are the
                widths of the layout's latent and rotary part, T = plan.num_padded_tokens. R is 0 with `spec.nope`.
            kv_cache: [blocks, block_size, row width] of `spec.layout`, or a tuple of its tensors.
            topk_indices: [T or more, K] int32, positions in each token's request, negative = absent; rows of padding hold -1.
            plan: made for this batch by a planner of `planner_config()`.
            attn_sink: [H] float32, in place of the one that the layer was built with: a model's layers may share this object
                and have sinks of their own. Only where `spec.attn_sink`; a CUDA graph reads this tensor at every replay.
            same_selection: a promise that `topk_indices` holds what it held at the last forward with these buffers, as in
                models whose indexer serves several layers. What that forward converted is read again, if it was given the same
                tensor and plan, and the buffers keep a step of this size (`StepBuffers.kept`); else this one converts.
            out: [T, H, V] bf16, written. lse_out: [T, H] float32, written where `spec.need_lse`, else scratch.
        Returns: out and lse, natural logarithm; lse is None unless `spec.need_lse`. A row without a valid index, padding
            included, has out = 0 and lse = -inf; so has a token none of whose positions are in the spec's share.
        Raises: PlanMismatch when the plan was made for another batch, route or kernel, or a later plan of its planner has
            overwritten its numbers (not while a CUDA graph is captured); InvalidArgument for the tensors. Both before anything
            runs.
        Graph-safe for uniform decode batches, with `out` (and `lse_out`) given and `spec.graph`: no look-up, allocation or
        read-back.
        """
        if not self._accelerator.is_current():
            with self._accelerator.guard():
                given: dict[str, Any] = {
                    "attn_sink": attn_sink,
                    "same_selection": same_selection,
                    "out": out,
                    "lse_out": lse_out,
                }
                return self.forward(q, kv_cache, topk_indices, plan, **given)
        if attn_sink is None:
            attn_sink = self._attn_sink
        self._check(q, kv_cache, topk_indices, plan, out, lse_out, attn_sink)
        spec, bound, num_tokens = self.spec, self._bound, plan.num_padded_tokens
        if out is None:
            out = torch.empty((num_tokens, spec.num_heads, self._layout.value_width), dtype=torch.bfloat16, device=self.device)
        step = self.step(plan)
        if lse_out is None:
            lse_out = step.lse
        if lse_out is None:
            lse_out = torch.empty((num_tokens, spec.num_heads), dtype=torch.float32, device=self.device)
        if num_tokens == 0:
            return out, lse_out if spec.need_lse else None
        if isinstance(q, Tensor):
            query = q
        else:  # without a rotary part there is nothing to join
            query = step.join_query(q, self._join_query) if spec.joins_query else q[0]
        converts, first = bound.convert.request, kv_cache[0] if isinstance(kv_cache, tuple) else kv_cache
        num_slots = first.shape[0] * spec.block_size
        made_of = step, topk_indices, num_slots, converts
        reads_again = same_selection and self.buffers.holds(*made_of)
        if not reads_again:
            self.buffers.forget()
            bound.convert.call(
                topk_indices if topk_indices.shape[0] == num_tokens else topk_indices[:num_tokens],
                plan.req_id_per_token,
                plan.block_table,
                block_size=spec.block_size,
                num_slots=num_slots,
                prefill_request_ids=plan.prefill_request_ids,
                prefill_workspace_starts=plan.prefill_workspace_starts,
                compact=converts.compact,
                **({"seq_lens": plan.seq_lens} if converts.seq_lens and plan.seq_lens is not None else {}),
                **bound.share_arguments,
                out=(step.indices, step.counts),
            )
            self.buffers.remember(*made_of)
        if step.decode is not None:
            part = step.decode
            decoder = bound.decoder(part.end, apart=reads_again)
            decoder.call(
                part.rows(query),
                kv_cache,
                part.indices,
                softmax_scale=spec.softmax_scale,
                lengths=part.lengths if decoder.request.lengths else None,
                attn_sink=attn_sink,
                schedule=plan.decode_schedule,
                out=part.rows(out),
                lse_out=part.rows(lse_out),
            )
        for part in step.prefills:
            if part.gathered is None or bound.gather is None:
                prefill = bound.prefill_in_place
                kv = kv_cache
                if not isinstance(kv, tuple) and not self._layout.is_quantized:
                    kv = kv.view(-1, self._layout.row_width)
            else:
                prefill, (chunk, kv) = bound.prefill_gathered, part.gathered
                bound.gather.call(kv_cache, chunk.block_table, chunk.seq_lens, chunk.workspace_starts, out=kv)
            assert prefill is not None  # StepCheck refuses a plan with prefills that the layer does not serve
            prefill.call(
                part.rows(query),
                kv,
                part.indices,
                softmax_scale=spec.softmax_scale,
                lengths=part.lengths if prefill.request.lengths else None,
                attn_sink=attn_sink,
                out=part.rows(out),
                lse_out=part.rows(lse_out),
            )
        if step.end < num_tokens:
            out[step.end :].zero_()
            if spec.need_lse:
                lse_out[step.end :].fill_(-math.inf)
        return out, lse_out if spec.need_lse else None

    __call__ = forward

    def step(self, plan: StepPlan) -> StepViews:
        """The parts of a plan on this layer's buffers. Raises: PlanMismatch, InvalidArgument for what is no plan for them."""
        self._check.plan(plan)
        return self.buffers.step(plan, decodes=self._bound.decodes(plan))
