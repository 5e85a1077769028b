# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""LayerKind: what DeepSeek-V4's layers of one kind share. There are at most three kinds in a model:

window     the sliding window alone
selected   and compressed tokens that an indexer selects (V4: one for 4 tokens; V4.1: one for each, or for 2)
all        and every compressed token (V4: one for 128); vLLM lists their slots once a step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention import AttentionSpec, SlotAttention
from mla_portable.choose import get_registry
from mla_portable.contracts import Request
from mla_portable.engines.common.metrics import publish
from mla_portable.engines.common.routing import IF_POSSIBLE, bind_for, decide_route, in_words, pairs
from mla_portable.engines.vllm import compat
from mla_portable.engines.vllm.settings import logger
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.layouts import FP8_V4
from mla_portable.primitives import CONVERT_INDICES, SPARSE_DECODE

T = TypeVar("T")

_LIST_MULTIPLE = 128
"""vLLM rounds the list of all compressed tokens up to this."""
_IN_GRAPHS = (CONVERT_INDICES, SPARSE_DECODE)
"""What decode batches run."""
_NO_GRAPHS = (
    "mla_portable: nothing on %s can be captured in CUDA graphs for DeepSeek-V4's layers. If captures fail, set "
    '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\' or --enforce-eager.'
)
_REQUESTS, _SLOTS = "mla_portable_requests", "mla_portable_slots"
"""Attributes of vLLM's metadata that hold what the first layer of a step made for the others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a configuration: tokens and decode rows of a step, greatest sequence length, sizes of CUDA graphs; `graph`: they hold
    attention, too."""

    max_num_tokens: int
    max_decode_rows: int
    max_model_len: int
    sizes: tuple[int, ...]
    graph: bool
    batch_invariant: bool

    @classmethod
    def of(cls, vllm_config: Any) -> Limits:
        scheduler, captured = vllm_config.scheduler_config, compat.capture_sizes(vllm_config)
        tokens = max(scheduler.max_num_batched_tokens, captured)
        rows = max(scheduler.max_num_seqs * compat.decode_query_len(vllm_config), captured)
        sizes = tuple(getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or ())
        lengths = vllm_config.model_config.max_model_len
        graph = compat.wants_full_graphs(vllm_config)
        return cls(tokens, min(rows, tokens), lengths, sizes, graph, compat.wants_batch_invariance())


def keep_for_graph(metadata: Any) -> None:
    """Let the graph that is being captured read what earlier layers made of a step, as all but the first layer of a step do."""
    for name in (_REQUESTS, _SLOTS):
        if hasattr(metadata, name):
            setattr(metadata, name, (True, getattr(metadata, name)[1]))


class LayerKind:
    """What serves the layers of a kind.

    Attributes:
        attention: their SlotAttention, for lists that are as wide as the window; `attention.spec` says what the kind is.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device, *, selects: bool) -> None:
        """Bind, and allocate what a step writes. selects: an indexer's positions are turned into slots in each layer.

        Raises: UnsupportedRoute or UnsupportedRequest, with the reasons against every implementation.
        """
        decision = decide_route(spec, device, clean_slots=False)
        spec = decision.spec  # without graphs where none can be captured
        self.attention = SlotAttention(spec, device=device, route_decision=decision)
        self._wider: dict[int, SlotAttention] = {}
        self._sizes = limits.sizes
        self._accelerator = accelerator(self.attention.device)
        facts, decisions = self.attention.facts, [part.decision for part in self.attention.route_decision.verdict.parts]
        if spec.extra_topk:
            request = Request(
                CONVERT_INDICES,
                facts,
                topk=spec.extra_topk,
                block_size=spec.extra_block_size,
                compact=True,
            )
            (convert,) = bind_for(request, graph=IF_POSSIBLE if spec.graph else False)
            self._convert = convert.call
            decisions.append(convert.decision)
        self._out: tuple[Tensor, Tensor] | None = None
        if selects:
            with neutral_defaults():
                indices = torch.empty((spec.max_num_tokens, spec.extra_topk), dtype=torch.int32, device=device)
                self._out = indices, torch.empty(spec.max_num_tokens, dtype=torch.int32, device=device)
        served = pairs(decisions)
        logger.info("mla_portable serves DeepSeek-V4's layers on %s, %s: %s", facts, _words(spec), in_words(served))
        of_decodes = [each.request for each in decisions if each.request.primitive in _IN_GRAPHS]
        if limits.graph and not all(request.graph for request in of_decodes):
            logger.warning(_NO_GRAPHS, facts)
        publish(facts.name, served, logger)
        logger.debug("%s", self.attention.explain())

    def attention_of(self, window: Tensor) -> SlotAttention:
        """What serves lists of the window [T, K].

        vLLM's are wider than the window for images in a prompt and for drafts that see one another: then it is bound by the
        first call, which no graph captures.
        """
        spec, width = self.attention.spec, window.shape[-1]
        if width <= spec.topk:
            return self.attention
        found = self._wider.get(width)
        if found is None:
            found = self._wider[width] = SlotAttention(replace(spec, topk=width), device=self.attention.device)
        return found

    def prepare(self) -> None:
        """Make the schedules of all batches that CUDA graphs are captured for."""
        for size in self._sizes:
            self.attention.prepare(size)

    def selected_slots(self, positions: Tensor, requests: Tensor, table: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Slots [T, K] of a layer's positions [T, K], valid ones first, and their counts [T], in the kind's scratch."""
        assert self._out is not None  # of the kind "selected"
        indices, counts = self._out
        rows = positions.shape[0]
        return self._slots_of(positions, requests, table, cache, (indices[:rows], counts[:rows]))

    def listed_slots(self, metadata: Any, requests: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the prompts' positions that vLLM lists in `metadata` for all layers: once a step."""
        positions, table = metadata.c128a_prefill_topk_indices, metadata.block_table
        return self._once_a_step(metadata, _SLOTS, lambda: self._slots_of(positions, requests, table, cache, None))

    def requests(self, swa_metadata: Any) -> Tensor:
        """The request of each token, -1 for padding; once a step."""
        requests, is_valid = swa_metadata.token_to_req_indices, swa_metadata.is_valid_token
        rows = min(len(requests), len(is_valid))
        return self._once_a_step(swa_metadata, _REQUESTS, lambda: torch.where(is_valid[:rows], requests[:rows], -1))

    def _once_a_step(self, metadata: Any, name: str, make: Callable[[], T]) -> T:
        """What the first layer of a step makes, kept in its metadata. A step that is captured makes it in its graph."""
        capturing = self._accelerator.is_capturing()
        found = getattr(metadata, name, None)
        if found is None or found[0] != capturing:
            found = capturing, make()
            setattr(metadata, name, found)
        return found[1]

    def _slots_of(
        self, positions: Tensor, requests: Tensor, table: Tensor, cache: Tensor, out: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        block_size = cache.shape[1]
        return self._convert(
            positions,
            requests,
            table,
            block_size=block_size,
            num_slots=cache.shape[0] * block_size,
            compact=True,
            out=out,
        )


def _shared() -> WeakValueDictionary[tuple[Any, ...], LayerKind]:
    """Those that were bound under the policy in force, for as long as a layer holds them."""
    return get_registry().keep("DeepSeek-V4's kinds of layers in vLLM", WeakValueDictionary)


def kind_of(layer: Any, limits: Limits, device: torch.device, swa_block: int, block: int | None) -> LayerKind:
    """The kind of a layer; layers alike share one.

    Args:
        swa_block, block: rows in a block of the window's cache, and in one of compressed tokens (None: there is none).
    """
    lists_all = is_listed(layer)
    width = 0
    if block is not None:
        width = -(-limits.max_model_len // layer.compress_ratio) if lists_all else layer.topk_indices_buffer.shape[-1]
        width = -(-width // _LIST_MULTIPLE) * _LIST_MULTIPLE if lists_all else width
    spec = AttentionSpec(
        num_heads=layer.padded_heads,
        softmax_scale=layer.scale,
        max_num_tokens=limits.max_num_tokens,
        max_num_reqs=limits.max_decode_rows,
        max_model_len=limits.max_model_len,
        kv_layout=FP8_V4.name,
        block_size=swa_block,
        topk=layer.window_size,
        scale_format="pow2",
        need_lse=False,
        attn_sink=True,
        graph=limits.graph,
        batch_invariant=limits.batch_invariant,
        concat_query=False,
        extra_topk=width,
        extra_block_size=block,
    )
    key = (spec, limits, device, lists_all)
    shared = _shared()
    found = shared.get(key)
    if found is None:
        found = shared[key] = LayerKind(spec, limits, device, selects=block is not None and not lists_all)
    return found


def ratio(layer: Any) -> int:
    """Tokens to a compressed one; 0 for layers with the window alone, for which V4 says 1 and V4.1 says 0."""
    own = layer.compress_ratio
    return own if own > 1 or hasattr(layer, "compressed_cache_prefix") else 0


def is_listed(layer: Any) -> bool:
    """Its compressed tokens are all attended to."""
    return ratio(layer) == 128


def _words(spec: AttentionSpec) -> str:
    second = f" and up to {spec.extra_topk} compressed tokens" if spec.extra_topk else ""
    return f"{spec.num_heads} heads, a window of {spec.topk}{second}"
