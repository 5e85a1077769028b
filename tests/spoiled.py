# SPDX-License-Identifier: Apache-2.0
"""A backend that does what the reference does, except where it is told to be wrong, loud or broken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch_reference as reference

from mla_portable.choose import Registry
from mla_portable.contracts import Implementation, Primitive, Registrar, Request, Support, hookimpl
from mla_portable.primitives import MERGE_STATES

NAME = "spoiled.torch"
ALL_PRIMITIVES = Primitive.all()


def wrong_cache_write(kv_c, k_pe, kv_cache, slot_mapping, **options):
    reference.cache_write(kv_c, k_pe, kv_cache, slot_mapping, **options)
    slot = int(slot_mapping[-1])
    kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1], 0] += 1


def wrong_convert_indices(*args, **options):
    indices, counts = reference.convert_indices(*args, **options)
    indices[-1, 0] += 1
    return indices, counts


def wrong_gather_upconvert(*args, out, **options):
    reference.gather_upconvert(*args, out=out, **options)
    out[:, 0] += 1
    return out


def wrong_attention(primitive: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args, **options):
        out, lse = primitive(*args, **options)
        out.mul_(1.05)
        return out, lse

    return call


def wrong_lse(*args, **options):
    out, lse = reference.sparse_decode(*args, **options)
    lse.mul_(1.4427)
    return out, lse


def wrong_merge_states(outs, lses):
    return outs.float().mean(dim=0).to(outs.dtype), reference.merge_states(outs, lses)[1]


def inexact_merge_states(outs, lses):
    """Good enough for attention, not for a merge of float32 numbers."""
    out, lse = reference.merge_states(outs, lses)
    return out, lse * (1 + 2e-5)


def wrong_topk_select(*args, **options):
    return reference.topk_select(*args, **options).clamp_(max=4)


def wrong_quantize_per_tensor(*args, **options):
    x_q, scale = reference.quantize_per_tensor(*args, **options)
    return x_q, 1 / scale


def wrong_indexer_select(*args, **options):
    return reference.indexer_select(*args, **options).clamp_(max=4)


def wrong_pack_selection(*args, **options):
    return reference.pack_selection(*args, **options).bitwise_not_()


def wrong_concat_mla_k(*args, **options):
    k = reference.concat_mla_k(*args, **options)
    return k.copy_(k.roll(1, dims=1))


def wrong_norm_rope_write(*args, q_out, **options):
    reference.norm_rope_write(*args, q_out=q_out, **options)
    q_out[:, 0] += 1


def wrong_rope_quantize_queries(*args, index_weights_out, **options):
    reference.rope_quantize_queries(*args, index_weights_out=index_weights_out, **options)
    index_weights_out.mul_(2)


# of every primitive of a layer
WRONG: dict[str, Callable[..., Any]] = {
    "cache_write": wrong_cache_write,
    "convert_indices": wrong_convert_indices,
    "gather_upconvert": wrong_gather_upconvert,
    "sparse_decode": wrong_attention(reference.sparse_decode),
    "sparse_prefill": wrong_attention(reference.sparse_prefill),
    "merge_states": wrong_merge_states,
    "quantize_per_tensor": wrong_quantize_per_tensor,
}
WRONG_IN_STEP = {**WRONG, "topk_select": wrong_topk_select, "indexer_select": wrong_indexer_select}
WRONG_TIMED = {
    **WRONG_IN_STEP,
    "pack_selection": wrong_pack_selection,
    "concat_mla_k": wrong_concat_mla_k,
    "masked_prefill": wrong_attention(reference.masked_prefill),
    "norm_rope_write": wrong_norm_rope_write,
    "rope_quantize_queries": wrong_rope_quantize_queries,
}


class Spoiled:
    """The plugin. replaced: by primitive, what serves it instead of the reference. loud: it prints when it is bound.

    check: reasons or an exception of every implementation's `check`. only: the primitives that it offers. lse: it tells one.
    """

    def __init__(
        self,
        replaced: dict[str, Callable[..., Any]] | None = None,
        *,
        loud=False,
        check=None,
        only=ALL_PRIMITIVES,
        lse=True,
    ):
        self.replaced, self.loud, self.only, self.lse = replaced or {}, loud, only, lse
        self.check = check or (lambda device: ())

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        for primitive in self.only:
            self.offer(registrar, NAME, primitive, self.bind)

    def offer(
        self, registrar: Registrar, name: str, primitive: Primitive, bind: Callable[[Request], Callable[..., Any]]
    ) -> None:
        support = Support(source="a test", device_types=("cpu",), kv_layouts=primitive.layouts, graph=False, lse=self.lse)
        registrar.add(Implementation(name, primitive, support, bind, check=self.check, preference=10))

    def bind(self, request: Request) -> Callable[..., Any]:
        if self.loud:
            sys.stdout.write(f"binding {request.primitive}\n")
        return self.replaced.get(str(request.primitive), getattr(reference, str(request.primitive)))


class HalfSpoiled(Spoiled):
    """A second variant of merge_states beside the sound ones, and that one is wrong."""

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        for primitive in self.only:
            self.offer(registrar, NAME, primitive, self.bind)
        self.offer(registrar, "spoiled.worse", MERGE_STATES, lambda request: wrong_merge_states)


def registry_with(
    *plugins: tuple[str, object], probe: bool = True, environ: dict[str, str] | None = None, **options
) -> Registry:
    """The reference and `plugins`, with an environment of the test's own."""
    return Registry(plugins=[("reference", "mla_portable.reference"), *plugins], environ=environ or {}, probe=probe, **options)
