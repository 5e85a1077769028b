# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Who serves the layers of one backend object of SGLang, decided when it is built; and the calls that are served here.

SGLang makes one object for the target model and one for each step of a draft. Objects of equal layers share their scratch:
their layers run one after the other, on one stream.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mla_portable.attention import AttentionSpec, SlotAttention, UnsupportedRoute
from mla_portable.choose import get_registry
from mla_portable.contracts import InvalidArgument, StepLengths
from mla_portable.contracts.values import device_of
from mla_portable.engines.common.metrics import publish
from mla_portable.engines.common.routing import decide_route, route_pairs, served_by
from mla_portable.engines.common.warm_up import warm_slots
from mla_portable.engines.sglang import index_codes, model, pool_rows, prompts, settings, stock, topk
from mla_portable.layouts import LAYOUTS

LAYERS: Final = "_mla_portable"
"""The attribute of SGLang's backend object that holds its BackendLayers."""


def _shared() -> WeakValueDictionary[tuple[AttentionSpec, torch.device, bool], SlotAttention]:
    """Those that were bound under the policy in force, for as long as a backend object holds them."""
    return get_registry().keep("SGLang's attention", WeakValueDictionary)


class BackendLayers:
    """The layers of one backend object.

    Attributes:
        methods: names of the methods whose calls are served here. reasons: why, for each of them.
        prompts: beside it where extends are served here and may be computed over keys of each head; None where not.
    """

    def __init__(self, backend: Any, model_runner: Any, device: torch.device, reasons: Mapping[str, str]) -> None:
        """Bind what serves the methods named by `reasons`. device: the runner's. Raises: UnsupportedRoute with every reason."""
        self.reasons, self.methods = dict(reasons), frozenset(reasons)
        self._pool = model.pool_layout(backend)
        self._plain = LAYOUTS[self._pool].workspace.name  # rows that SGLang gathers from an FP8 cache
        self._device = device
        self._spec = functools.partial(model.make_spec, backend, model_runner)
        self._clean = model.keys_of_pool(backend) == 1 and not model.in_host_memory(backend)
        self._attentions: dict[tuple[str, bool], SlotAttention] = {}
        sinks = model.has_sinks(model_runner)
        for method in reasons:
            self.attention(model.layouts_of(method, backend), attn_sink=sinks)
        self.prompts: prompts.Prompts | None = None
        if self.methods.intersection(model.methods_of_prefill(backend)):
            spec, facts = self._spec(self._pool, attn_sink=sinks), get_registry().facts(device)
            self.prompts = prompts.prompts(backend, model_runner, spec, facts)

    @property
    def attentions(self) -> tuple[SlotAttention, ...]:
        """What was bound so far."""
        return tuple(self._attentions.values())

    def attention(self, layout: str, *, attn_sink: bool) -> SlotAttention:
        """For rows of a layout. Bound when the backend is built, unless a layer has a sink that the config does not name."""
        found = self._attentions.get((layout, attn_sink))
        if found is None:
            found = _attention(self._spec(layout, attn_sink=attn_sink), self._device, clean=self._clean)
            self._attentions[layout, attn_sink] = found
        return found

    def prepare(self, metadata: Any) -> None:
        """Make the schedules of a decode batch, before its layers run or are captured."""
        if metadata.max_seq_len_q <= 1:
            rows = metadata.dsa_cache_seqlens_int32.shape[0]
            for attention in self._attentions.values():
                lengths = StepLengths(None, metadata.dsa_seqlens_expanded[:rows]) if attention.needs_lengths else None
                attention.prepare(rows, lengths=lengths)

    def flashmla_sparse(
        self,
        backend: Any,
        q_all: Tensor,
        kv_cache: Tensor,
        v_head_dim: int,
        page_table_1: Tensor,
        sm_scale: float,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
    ) -> Tensor:
        """SGLang's `_forward_flashmla_sparse`: rows of a BF16 cache, or rows that were gathered from an FP8 cache.

        q_all [T, H, 576 or 512], kv_cache [rows, 1, 576 or 512] bf16, page_table_1 [T, K] int32, topk_length [T or more] int32,
        attn_sink [H] float32. Returns: [T, H, 512].
        """
        rows = kv_cache.squeeze(1)
        return self.attention(self._plain, attn_sink=attn_sink is not None).forward(
            q_all,
            rows,
            page_table_1,
            softmax_scale=sm_scale,
            decodes=self._pool == self._plain and backend.forward_metadata.max_seq_len_q <= 1,
            lengths=_rows(topk_length, q_all.shape[0]),
            attn_sink=attn_sink,
        )

    def flashmla_kv(
        self,
        backend: Any,
        q_all: Tensor,
        kv_cache: Tensor,
        v_head_dim: int,
        sm_scale: float,
        layer: Any,
        metadata: Any,
        page_table_1: Tensor,
    ) -> Tensor:
        """SGLang's `_forward_flashmla_kv`: the cache as it is, FP8 or BF16.

        q_all [T, H, 576 or 512] or of that many elements; kv_cache [slots, 1, 656 or 528] of 8 bits or [slots, 1, 576 or 512]
        bf16. Returns: [T, 1, H, 512].
        """
        q = q_all.view(-1, layer.tp_q_head_num, layer.head_dim)
        row = LAYOUTS[self._pool]
        rows = kv_cache.view(torch.uint8).view(-1, model.PAGE, row.row_width) if row.is_quantized else kv_cache.squeeze(1)
        out = self.attention(self._pool, attn_sink=False).forward(
            q,
            rows,
            page_table_1,
            softmax_scale=sm_scale,
            decodes=metadata.max_seq_len_q <= 1,
            lengths=_rows(metadata.dsa_cache_seqlens_int32, q.shape[0]),
        )
        return out.unsqueeze(1)

    def fa3(
        self,
        backend: Any,
        q_rope: Tensor,
        kv_cache: Tensor,
        v_head_dim: int,
        q_nope: Tensor,
        page_table: Tensor,
        cache_seqlens: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        sm_scale: float,
        logit_cap: float,
        page_size: int,
    ) -> Tensor:
        """SGLang's `_forward_fa3`: a BF16 cache, every query token a sequence of one token.

        q_nope [T, H, 512], q_rope [T, H, 64 or 0], kv_cache [slots, 1, 576 or 512] bf16, page_table [T, K], cache_seqlens [T or
        more]. Returns: [T, H, 512].
        """
        if logit_cap:
            raise InvalidArgument("SGLang", "logit_cap", got=logit_cap, expected="0: sparse MLA does not cap its logits")
        return self.attention(self._plain, attn_sink=False).forward(
            torch.cat((q_nope, q_rope), dim=-1) if LAYOUTS[self._plain].rope_width else q_nope,
            kv_cache.squeeze(1),
            page_table,
            softmax_scale=sm_scale,
            decodes=backend.forward_metadata.max_seq_len_q <= 1,
            lengths=_rows(cache_seqlens, q_nope.shape[0]),
        )


def _rows(lengths: Tensor | None, num_tokens: int) -> Tensor | None:
    """The lengths of the tokens; SGLang pads them at the end. None where there are fewer: then all of a row is read."""
    if lengths is None or lengths.shape[0] < num_tokens:
        return None
    return lengths if lengths.shape[0] == num_tokens else lengths[:num_tokens]


def _attention(spec: AttentionSpec, device: torch.device, *, clean: bool) -> SlotAttention:
    """One for all backend objects of a spec, whose calls were made once: no request waits for a kernel.

    SGLang's lists end with -1 behind a row's clipped length, and its own methods give them to FlashMLA as they are: the slots
    are clean, but for those of an indexer of pools of keys, which it does not give it, and those of HiSparse's buffer, of which
    a row that pads a batch has a length and no slot.
    """
    shared = _shared()
    found = shared.get((spec, device, clean))
    if found is None:
        decision = decide_route(spec, device, clean_slots=clean)
        found = SlotAttention(decision.spec, device=device, clean_slots=clean, route_decision=decision)
        if spec.graph and not decision.spec.graph:
            _log_without_graphs(str(found.facts))
        warm_slots(found)
        shared[spec, device, clean] = found
        publish(found.facts.name, route_pairs(found.route_decision), settings.logger)
    return found


def attach(backend: Any, model_runner: Any) -> BackendLayers | None:
    """Choose the implementations for a new backend object, log them, and keep them there.

    Returns: None where SGLang's own methods serve all calls.
    Raises: UnsupportedRoute or InvalidArgument where neither can, be it attention or the indexer's keys.
    """
    setattr(backend, LAYERS, None)
    methods, mode = model.methods_in_use(backend), settings.mode()
    device = device_of("SGLang", model_runner.device)  # with its index, as its tensors have it
    facts = get_registry().facts(device)
    pools, fp8 = model.keys_of_pool(backend) > 1, backend.dsa_kv_cache_store_fp8
    index_codes.serve(facts, pools=pools)
    topk.avoid_clusters(facts)
    against = {m: stock.against_attention(m, facts, backend.num_q_heads, pools=pools, fp8=fp8) for m in methods}
    wanted = {m: against[m] or f"{settings.ENV_MODE}=on" for m in methods if against[m] is not None or mode == "on"}
    names = f"{backend.dsa_prefill_impl} (prefill), {backend.dsa_decode_impl} (decode)"
    if not wanted:
        why = f"; {settings.ENV_MODE}=on takes mla_portable's" if methods else ", which mla_portable does not replace"
        _log_once(f"SGLang's own kernels serve {names} on {facts}{why}")
        return None
    try:
        refused = model.refusals(backend, model_runner)
        if refused:
            got, expected = "; ".join(refused), "what this plugin supports"
            raise InvalidArgument("SGLang", "configuration", got=got, expected=expected)
        pool = LAYOUTS[model.pool_layout(backend)]
        if pool.is_quantized:
            pool_rows.of_device(device, pool)  # raises now, in place of the first write
        layers = BackendLayers(backend, model_runner, device, wanted)
    except (InvalidArgument, UnsupportedRoute) as error:
        needed = [f"{method}: {reason}" for method, reason in against.items() if reason is not None]
        if needed:
            settings.logger.error("neither SGLang nor mla_portable serves this model: %s", "; ".join(needed))
            raise
        settings.logger.warning("SGLang's own kernels serve this model, mla_portable does not: %s", error)
        return None
    setattr(backend, LAYERS, layers)
    served = "; ".join(f"{each.spec.kv_layout}: {served_by(each.route_decision)}" for each in layers.attentions)
    if layers.prompts is not None:
        served += f"; prompts over keys of each head: {layers.prompts.served_by}"
    if model.in_host_memory(backend):
        served += "; HiSparse, experimental"
    why, heads = "; ".join(dict.fromkeys(wanted.values())), backend.num_q_heads
    _log_once(f"mla_portable serves {', '.join(wanted)} for {names} on {facts}, {heads} heads: {served}; because {why}")
    for each in layers.attentions:
        settings.logger.debug("%s", each.explain())
    return layers


@functools.cache
def _log_once(line: str) -> None:
    """A draft's backend objects say the same as the target's."""
    settings.logger.info("%s", line)


@functools.cache
def _log_without_graphs(device: str) -> None:
    settings.logger.warning(
        "no implementation on %s can be captured in a CUDA graph: start SGLang with --disable-cuda-graph", device
    )
