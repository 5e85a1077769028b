# SPDX-License-Identifier: Apache-2.0
"""PromptAttention: a layer's prompts over keys and values of each head, the other way to compute what sparse MLA defines.

SparseMLAAttention multiplies the query by W_UK, attends to latent rows and leaves the product with W_UV to its caller. Here the
latent rows are projected to keys [N, H, P + R] and values [N, H, V] once, and the query attends to those of its request, under
its selection as a bit mask where it does not select everything. Both give the same up to rounding. This way reads every key
before a token, but at a fraction of the products for each: `PromptTimes` says when it takes less time.

For each part of the keys (PromptPlan; mostly one has all of them): gather_upconvert of the context from the cache, the
projection, concat_mla_k (for keys with a rotary part), pack_selection, masked_prefill; merge_states where there are several.

New tokens are attended to as they are given, not as a quantised cache has them; the context is what the cache has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention.checks import CacheCheck
from mla_portable.attention.layer_registry import ForcedBackend, LayerRegistry
from mla_portable.attention.spec import AttentionSpec
from mla_portable.choose import Registry
from mla_portable.contracts import Decision, DeviceFacts, PlanMismatch, Request
from mla_portable.contracts.values import INT32_MAX, check_count, check_fields, check_type, describe, device_of, refuse
from mla_portable.kit.rules import check_dense, check_disjoint, check_tensor, named_tensors, shape_of
from mla_portable.layouts import Cache
from mla_portable.models import DEEPSEEK_V32
from mla_portable.planner.prompts import KeyPart, PromptPlan
from mla_portable.primitives import (
    CONCAT_MLA_K,
    GATHER_UPCONVERT,
    MASKED_PREFILL,
    MERGE_STATES,
    PACK_SELECTION,
)

Project = Callable[[Tensor], Tensor]
"""The up-projection, `kv_b_proj` of a model: latent [N, 512] bf16 -> [N, H * (P + V)] bf16, for each head its P columns of the
key without rope, then its V columns of the value. The latent's rows may lie any distance apart."""

_CLASS: Final = "PromptAttention"
_WHERE: Final = "PromptAttention.forward"
LEAST_KEY_ROWS: Final = 2048
"""Keys that are projected at a time, where a step has fewer tokens."""


@dataclass(frozen=True, slots=True)
class HeadDims:
    """Widths of a head. nope: of the query and key without rope (P). rope: of the rest (R), may be 0. value: of the value (V).

    Those of models are in `mla_portable.models`; DeepSeek-V3.2's by default.
    """

    nope: int = DEEPSEEK_V32.head_dims[0]
    rope: int = DEEPSEEK_V32.head_dims[1]
    value: int = DEEPSEEK_V32.head_dims[2]

    def __post_init__(self) -> None:
        check_fields(self, {"nope": (1, INT32_MAX), "rope": (0, INT32_MAX), "value": (1, INT32_MAX)})

    @property
    def query(self) -> int:
        """P + R."""
        return self.nope + self.rope


def prompt_requests(spec: AttentionSpec, head_dims: HeadDims, facts: DeviceFacts) -> dict[str, Request[Any]]:
    """What PromptAttention asks for, by the names of its `decisions`."""
    widths: dict[str, Any] = {"qk_head_dim": head_dims.query, "v_head_dim": head_dims.value}
    # keys and values are what `project` makes of rows that were all written
    attend = Request(MASKED_PREFILL, facts, **widths, num_heads=spec.num_heads, rows=spec.max_num_tokens, finite_values=True)
    gather = Request(GATHER_UPCONVERT, facts, **spec.cache_facts())
    pack = Request(PACK_SELECTION, facts, topk=spec.topk, rows=spec.max_num_tokens)
    merge = Request(MERGE_STATES, facts)
    named: dict[str, Request[Any]] = {"masked": attend.but(selection=True), "dense": attend}
    named |= {f"{name} part": request.but(lse=True) for name, request in named.items()}
    named |= {"gather": gather, "pack": pack, "merge": merge}
    if head_dims.rope:  # else the up-projection makes the keys
        named["concat"] = Request(CONCAT_MLA_K, facts, num_heads=spec.num_heads, rows=spec.max_num_tokens)
    return named


class PromptAttention:
    """The prompts of a model's layers over keys of each head. Holds no weights and no state of a step.

    Attributes:
        spec, head_dims, device: as built. key_rows: for `plan_prompts`.
        decisions: the choice of every primitive; "masked" and "dense" are masked_prefill with and without a selection, where
            the keys are one part, "masked part" and "dense part" where they are several.
        times: of both ways for what "masked" chose; None where none are on record for the device.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        head_dims: HeadDims,
        *,
        device: torch.device | str,
        registry: Registry | None = None,
        backend: ForcedBackend = None,
        key_rows: int | None = None,
    ) -> None:
        """Bind the primitives; the device is the current one meanwhile.

        Args:
            spec: of the model's SparseMLAAttention; `num_heads` are those of this rank. device: where the layers run.
            registry, backend: as of SparseMLAAttention. key_rows: keys that are projected at a time; None for
                `max_num_tokens`, at least 2,048.
        Raises: InvalidArgument, also for a spec with sinks, with a share of the sequences, or that asks for batch invariance;
            UnsupportedRequest where no implementation serves a primitive.
        """
        check_type(_CLASS, "spec", spec, AttentionSpec, "an AttentionSpec")
        check_type(_CLASS, "head_dims", head_dims, HeadDims, "HeadDims")
        if spec.share.size > 1:
            refuse(_CLASS, "spec.share", f"one of {spec.share.size} ranks", "the whole of each sequence in the cache")
        if head_dims.rope != spec.rope_width:
            refuse(_CLASS, "head_dims.rope", head_dims.rope, f"{spec.rope_width}, as queries of the spec have")
        if spec.attn_sink:
            refuse(_CLASS, "spec.attn_sink", True, "False: attention over keys of each head has no sinks")
        if spec.batch_invariant:
            expected = "False: which way a prompt is computed depends on the batch"
            refuse(_CLASS, "spec.batch_invariant", True, expected)
        rows = max(spec.max_num_tokens, LEAST_KEY_ROWS) if key_rows is None else key_rows
        check_count(_CLASS, "key_rows", rows, spec.max_num_tokens, INT32_MAX)
        self.spec, self.head_dims, self.key_rows = spec, head_dims, rows
        self.device = device_of(_CLASS, device)
        self._accelerator = accelerator(self.device)
        self._check_cache = CacheCheck(_WHERE, "kv_cache", spec, self.device)
        layers = LayerRegistry(registry, backend, where=_CLASS)
        with self._accelerator.guard():  # what is tried and bound for a device runs on it
            requests = prompt_requests(spec, head_dims, layers.facts(self.device))
            bound = {name: layers.resolve(request) for name, request in requests.items()}
        self.decisions: dict[str, Decision] = {name: each.decision for name, each in bound.items()}
        self.times = layers.prompt_times(self.decisions["masked"])
        self._attention = {
            (masked, partial): bound[f"{'masked' if masked else 'dense'}{' part' if partial else ''}"].call
            for masked in (False, True)
            for partial in (False, True)
        }
        self._gather, self._pack, self._merge = (bound[name].call for name in ("gather", "pack", "merge"))
        self._concat = bound["concat"].call if head_dims.rope else None

    @property
    def scratch_bytes(self) -> int:
        """Device memory that a step of `max_num_tokens` allocates and frees, at most.

        For each key its latent row, the projection and, where it has a rotary part, the key; for each token the bit mask and
        three partial results.
        """
        spec, dims = self.spec, self.head_dims
        key = dims.query if dims.rope else 0
        of_key = 2 * (spec.layout.key_width + spec.num_heads * (key + dims.nope + dims.value))
        of_token = 4 * (-(-self.key_rows // 32)) + 3 * spec.num_heads * (2 * dims.value + 4)
        return self.key_rows * of_key + spec.max_num_tokens * of_token

    def forward(
        self,
        q: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        project: Project,
        kv_cache: Cache | None,
        topk_indices: Tensor | None,
        plan: PromptPlan,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step's prompts.

        Args:
            q: [T, H, P + R] bf16, before any product with W_UK, rope applied. kv_c: [T, 512] bf16, the new tokens' latent rows,
                normed. k_pe: [T, R] bf16, their rotary part. project: the layer's up-projection.
            kv_cache: [blocks, block_size, row width] of `spec.layout`, read for the context alone; None where there is none.
            topk_indices: [T or more, K] int32, positions in each token's request, negative = absent; read where the plan is
                masked, else it may be None.
            plan: of `plan_prompts` for these prompts, with this object's `key_rows` and the `topk` of the model's indexer: a
                token that sees no more keys selects all of them. That is the spec's where its lists are no wider.
            out: [T, H, V] bf16, written; it overlaps no input.
        Returns: out. A token that selects no key has out = 0.
        Raises: InvalidArgument and PlanMismatch, before anything runs; InvalidArgument for what `project` returns, before
            anything is written to `out`. Allocates (`scratch_bytes`); not to be captured.
        """
        out = self._check(q, kv_c, k_pe, project, kv_cache, topk_indices, plan, out)
        if plan.num_tokens == 0:
            return out
        topk = topk_indices if plan.masked else None
        if topk is not None and topk.shape[0] > plan.num_tokens:
            topk = topk[: plan.num_tokens]
        if self._accelerator.is_current():
            return self._forward(q, kv_c, k_pe, project, kv_cache, topk, plan, out)
        with self._accelerator.guard():
            return self._forward(q, kv_c, k_pe, project, kv_cache, topk, plan, out)

    __call__ = forward

    def _forward(
        self,
        q: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        project: Project,
        kv_cache: Cache | None,
        topk: Tensor | None,
        plan: PromptPlan,
        out: Tensor,
    ) -> Tensor:
        """On the current device; tensors as `forward` has checked them. topk: [T, K], None where the plan is not masked."""
        last = plan.parts[-1]
        if len(plan.parts) == 1:
            self._attend(q, *self._keys(kv_c, k_pe, project, kv_cache, plan, last), topk, plan, last, out, None)
            return out
        outs, lses = q.new_empty((2, *out.shape)), q.new_empty((2, *out.shape[:2]), dtype=torch.float32)
        of_part = tuple(zip(outs.unbind(), lses.unbind(), strict=True))  # what was merged, and the part
        for number, part in enumerate(plan.parts):
            keys = self._keys(kv_c, k_pe, project, kv_cache, plan, part)
            self._attend(q, *keys, topk, plan, part, *of_part[number > 0])
            if number:
                merged, lse = self._merge(outs, lses)
                if part is last:
                    return out.copy_(merged)
                of_part[0][0].copy_(merged)
                of_part[0][1].copy_(lse)
        return out

    def _keys(
        self, kv_c: Tensor, k_pe: Tensor, project: Project, kv_cache: Cache | None, plan: PromptPlan, part: KeyPart
    ) -> tuple[Tensor, Tensor]:
        """k [N, H, P + R] and v [N, H, V] of a part's N keys."""
        if part.num_context:
            assert kv_cache is not None  # _check refuses a plan with contexts otherwise
            width = kv_c.shape[1]
            key_width = self.spec.layout.key_width
            rows = kv_c.new_empty((part.num_keys, key_width))
            self._gather(kv_cache, plan.block_table, part.seq_lens, part.workspace_starts, out=rows)
            latent, rope = rows.split_with_sizes((width, key_width - width), 1)
            if part.new_rows is not None:  # after the gather, which writes an earlier part's positions to rows of new tokens
                latent.index_copy_(0, part.new_rows, kv_c)
                if self._concat is not None:
                    rope.index_copy_(0, part.new_rows, k_pe)
            kv_c, k_pe = latent, rope
        dims, num_keys = self.head_dims, kv_c.shape[0]
        projected = self._projected(project(kv_c), num_keys).view(num_keys, self.spec.num_heads, dims.nope + dims.value)
        own, value = projected.split_with_sizes((dims.nope, dims.value), 2)
        return own if self._concat is None else self._concat(own, k_pe), value

    def _projected(self, value: Any, rows: int) -> Tensor:
        """What `project` returned for so many rows. Raises: InvalidArgument."""
        name, width = "project(rows)", self.spec.num_heads * (self.head_dims.nope + self.head_dims.value)
        if isinstance(value, tuple):
            remedy = "Pass a function that returns its first element: a Linear of an engine returns (output, bias)."
            refuse(_WHERE, name, "a tuple", f"a tensor [{rows}, {width}] bfloat16", remedy)
        check_tensor(_WHERE, name, value, torch.bfloat16, (rows, width), self.device, "[N, H * (P + V)]")
        return value

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        topk: Tensor | None,
        plan: PromptPlan,
        part: KeyPart,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attention to a part of the keys."""
        selection = None
        if topk is not None:
            selection = self._pack(topk, width=max(1, part.max_key_len), starts=part.first_positions)
        self._attention[plan.masked, len(plan.parts) > 1](
            q,
            k,
            v,
            plan.query_start_loc,
            part.key_start_loc,
            softmax_scale=self.spec.softmax_scale,
            max_query_len=plan.max_query_len,
            max_key_len=part.max_key_len,
            causal=part is plan.parts[-1],
            selection=selection,
            out=out,
            lse_out=lse,
        )

    def _check(
        self,
        q: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        project: Project,
        kv_cache: Cache | None,
        topk_indices: Tensor | None,
        plan: PromptPlan,
        out: Tensor | None,
    ) -> Tensor:
        """Raise, or return `out`, which is allocated where None."""
        check_type(_WHERE, "plan", plan, PromptPlan, "a PromptPlan, of plan_prompts")
        if not callable(project):
            refuse(_WHERE, "project", describe(project), "the up-projection, a function of latent rows")
        spec, dims, device = self.spec, self.head_dims, self.device
        tokens, heads = plan.num_tokens, spec.num_heads
        given = shape_of(_WHERE, "q", q, 3, f"[T, H, {dims.query}]")[0]
        if given != tokens:
            raise PlanMismatch(f"q has {given} tokens, the plan was made for {tokens}. A plan serves one batch: plan again.")
        check_tensor(_WHERE, "q", q, torch.bfloat16, (tokens, heads, dims.query), device, f"[T, H, {dims.query}]")
        latent = spec.layout.value_width
        check_tensor(_WHERE, "kv_c", kv_c, torch.bfloat16, (tokens, latent), device, f"[T, {latent}]")
        check_tensor(_WHERE, "k_pe", k_pe, torch.bfloat16, (tokens, dims.rope), device, f"[T, {dims.rope}]")
        if plan.block_table.device != device:
            raise PlanMismatch(f"{_WHERE}: the layer is on {device}, the plan was made on {plan.block_table.device}.")
        if plan.max_context_len:
            self._check_context(kv_cache, plan)
        elif kv_cache is not None:
            for name, each in named_tensors("kv_cache", kv_cache).items():
                check_dense(_WHERE, name, each, "or None: the plan has no context")
        if plan.masked:
            rows = max(shape_of(_WHERE, "topk_indices", topk_indices, 2, "[T or more, K]")[0], tokens)
            check_tensor(_WHERE, "topk_indices", topk_indices, torch.int32, (rows, spec.topk), device, "[T or more, K]")
        shape = tokens, heads, dims.value
        if out is None:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)
        check_tensor(_WHERE, "out", out, torch.bfloat16, shape, device, f"[T, H, {dims.value}]")
        read = {"q": q, "kv_c": kv_c, "k_pe": k_pe, "topk_indices": topk_indices if plan.masked else None}
        read |= named_tensors("kv_cache", kv_cache)
        check_disjoint(_WHERE, {"out": out}, read)
        return out

    def _check_context(self, kv_cache: Cache | None, plan: PromptPlan) -> None:
        """The cache is as the spec says, and the plan's block table holds the contexts."""
        if kv_cache is None:
            refuse(_WHERE, "kv_cache", "None", f"the cache, which has contexts of up to {plan.max_context_len} tokens")
        self._check_cache(kv_cache)
        held = plan.block_table.shape[1] * self.spec.block_size
        if plan.max_context_len > held:
            got, expected = (
                f"a context of {plan.max_context_len} tokens",
                f"at most {held}, the tokens that its block table holds",
            )
            refuse(_WHERE, "plan", got, expected, "Give plan_prompts a block table with more columns.")
