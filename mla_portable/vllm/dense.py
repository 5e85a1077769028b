# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Short prompts as dense attention, in the steps where that takes less GPU time than the sparse route.

A prompt no longer than the top-k selects everything before each token, so both give the same up to rounding. vLLM computes the
dense one itself, from 0.26 on: its layer hands prefills to `forward_mha` of the implementation if the metadata describes them
as such, and the decodes before them to `forward_mqa` as ever. Both the description and `forward_mha` are vLLM's.

The two ways of a layer, projections included, for new tokens, keys (new tokens and the cached context before them) and pairs
of a new token and a key that it sees:

    dense    keys and values out of latent rows by `kv_b_proj`, for every key; then attention with 192 and 128 wide heads
    sparse   the query times W_UK and the output times W_UV, for every new token; then attention with 576 and 512 wide rows

vLLM's indexer looks at the same description and leaves its scores out where nothing reads them (0.28 and later). So the
description is only given to the layer where `forward_mha` runs.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mla_portable.vllm import compat
from mla_portable.vllm.model import Resolved


class LayerTimes(NamedTuple):
    """GPU time of one layer. dense_key, sparse_token: us per thousand. dense_pair, sparse_pair: us per million."""

    dense_key: float
    dense_pair: float
    sparse_token: float
    sparse_pair: float

    def saved(self, tokens: float, keys: float, pairs: float) -> float:
        """Microseconds that a layer's prefills take less as dense attention; negative where they take more."""
        per_token = self.sparse_token * tokens - self.dense_key * keys
        return per_token * 1e-3 + (self.sparse_pair - self.dense_pair) * pairs * 1e-6


TIMES: Final = {
    8: LayerTimes(9.2, 8.8, 36.8, 156),
    16: LayerTimes(19.5, 12.8, 49.7, 156),
    32: LayerTimes(37.8, 26.8, 98.9, 199),
    64: LayerTimes(73.7, 56.5, 145, 203),
    128: LayerTimes(146, 118, 287, 383),
}
"""Query heads of a rank -> a fit to the GPU times of 19 steps on an H200 (FP8 cache, cold L2, vLLM 0.26, 2026-11-26).

The steps have 1 to 64 prompts of 64 to 2,000 tokens, some with a cached context. Where this decides for the slower way it loses
up to 38 us a layer, in steps where both take about the same.

Other NVIDIA GPUs are decided by the same numbers: what counts is their ratio, and a pair costs 320 multiply-adds a head as
dense attention and 1,088 on latent rows."""

VENDORS: Final = ("nvidia",)
"""Whose dense attention in vLLM is known to be faster."""

LEAST_SAVED: Final = 5.0
"""Microseconds a layer; below that the host's time for vLLM's description of the step counts for more."""
MORE_KERNELS: Final = 25.0
"""What the dense kernels of a layer take at least, in microseconds. In a step with decodes they come on top of those of the
sparse route; a cached context needs them a second time."""


def times(resolved: Resolved, vllm_config: Any) -> LayerTimes | None:
    """By which steps with short prompts are decided; None where prompts are never computed as dense attention.

    With VLLM_BATCH_INVARIANT a prompt's result must not depend on the lengths of others. Decode context parallelism has every
    token take the sparse route; so have attention sinks, which vLLM's dense attention does not know.
    """
    spec = resolved.spec
    if resolved.decision.device.vendor not in VENDORS or spec.batch_invariant or spec.share.size > 1 or spec.attn_sink:
        return None
    if compat.forces_sparse_prefill(vllm_config):
        return None
    return TIMES[min((heads for heads in TIMES if heads >= spec.num_heads), default=max(TIMES))]


def implementation(resolved: Resolved, vllm_config: Any, arguments: dict[str, Any]) -> Any | None:
    """vLLM's implementation of `forward_mha` for a layer with these arguments of its constructor, None where it is not used."""
    parts = compat.dense_prefill_parts()
    if parts is None or times(resolved, vllm_config) is None:
        return None
    known = inspect.signature(parts.implementation.__init__).parameters
    given = {name: value for name, value in arguments.items() if name in known}
    given |= {"indexer": None, "topk_indices_buffer": None}  # for its sparse half
    return type("DensePrefill", (parts.implementation,), {"forward_mqa": None})(**given)


def prefills(
    resolved: Resolved, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, threshold: int
) -> DensePrefills | None:
    """Beside a builder of these layers: None where their prefills are never dense. threshold: query tokens of a decode."""
    parts, found = compat.dense_prefill_parts(), times(resolved, vllm_config)
    layers = [vllm_config.compilation_config.static_forward_context.get(name) for name in layer_names]
    if parts is None or found is None or any(getattr(layer, "prefill_backend", None) is None for layer in layers):
        return None
    changes = {"metadata_cls": SimpleNamespace, "_build_req_id_per_token": lambda self, common: None}  # the plan has them
    builder = type("DenseBuilder", (parts.builder,), changes)
    beside = builder(kv_cache_spec, layer_names, vllm_config, device)
    beside.reorder_batch_threshold = threshold
    beside.topk_mask_workspace = None  # 128 MiB for masked prompts on SM100, which this backend does not offer
    return DensePrefills(beside, found, resolved.spec.topk, threshold)


class DensePrefills:
    """The steps whose prefills are computed as dense attention."""

    def __init__(self, builder: Any, times: LayerTimes, longest: int, threshold: int) -> None:
        self._builder, self._times, self._longest, self._threshold = builder, times, longest, threshold

    def build(self, common: Any, query_lens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> Any | None:
        """What vLLM's builder says of a step with such prefills (num_decodes, num_decode_tokens, num_prefills, prefill).

        None where no request is a prefill, a sequence is longer than the top-k, the sparse route takes less time, or vLLM keeps
        no lengths on the host.
        """
        (later,) = np.nonzero(query_lens > self._threshold)
        if not len(later) or common.seq_lens_cpu_upper_bound is None:
            return None
        first = int(later[0])
        if lengths[first:].max() > self._longest or not self._is_faster(first, query_lens[first:], lengths[first:]):
            return None
        found = self._builder.build(0, common)
        # From 0.28 on the layer and the indexer ask this: never a description that one of them takes and the other does not.
        return found if getattr(found.prefill, "use_dense_mha", True) else None

    def _is_faster(self, num_decodes: int, query_lens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> bool:
        tokens, keys = int(query_lens.sum()), int(lengths.sum())
        pairs = float((query_lens * (lengths - query_lens / 2)).sum())
        more_kernels = MORE_KERNELS * ((num_decodes > 0) + (keys > tokens))
        return self._times.saved(tokens, keys, pairs) > LEAST_SAVED + more_kernels
