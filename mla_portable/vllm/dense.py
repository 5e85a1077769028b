# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Short prompts as dense attention, where that is faster than the sparse route.

A prompt no longer than the top-k selects everything before each token, so both give the same up to rounding. vLLM computes the
dense one itself, from 0.26 on: its layer hands prefills to `forward_mha` of the implementation if the metadata describes them
as such, and the decodes before them to `forward_mqa` as ever. Both the description and `forward_mha` are vLLM's.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from mla_portable.vllm import compat, settings
from mla_portable.vllm.model import Resolved

FASTER: Final = {"sm90": (128, 512)}
"""Architecture -> query heads and tokens of the longest prompt from which on vLLM's kernels are faster. H200: docs/vllm.md."""


def shortest(resolved: Resolved, vllm_config: Any) -> int | None:
    """The least length, in tokens, of a step's longest prompt for dense attention; None where it is never taken.

    With VLLM_BATCH_INVARIANT a prompt's result must not depend on the lengths of others. Shadow mode and decode context
    parallelism have every token take the sparse route; so do attention sinks, which vLLM's dense attention does not have.
    """
    spec = resolved.spec
    heads, tokens = FASTER.get(resolved.decision.device.arch, (None, None))
    if heads is None or spec.num_heads < heads or spec.batch_invariant or spec.share.size > 1 or spec.attn_sink:
        return None
    if settings.shadow_backend() is not None or compat.forces_sparse_prefill(vllm_config):
        return None
    return tokens


def implementation(resolved: Resolved, vllm_config: Any, arguments: dict[str, Any]) -> Any | None:
    """vLLM's implementation of `forward_mha` for a layer with these arguments of its constructor, None where it is not used."""
    parts = compat.dense_prefill_parts()
    if parts is None or shortest(resolved, vllm_config) is None:
        return None
    known = inspect.signature(parts.implementation.__init__).parameters
    given = {name: value for name, value in arguments.items() if name in known}
    given |= {"indexer": None, "topk_indices_buffer": None}  # for its sparse half
    return type("DensePrefill", (parts.implementation,), {"forward_mqa": None})(**given)


def prefills(
    resolved: Resolved, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, threshold: int
) -> DensePrefills | None:
    """Beside a builder of these layers: None where their prefills are never dense. threshold: query tokens of a decode."""
    parts, tokens = compat.dense_prefill_parts(), shortest(resolved, vllm_config)
    layers = [vllm_config.compilation_config.static_forward_context.get(name) for name in layer_names]
    if parts is None or tokens is None or any(getattr(layer, "prefill_backend", None) is None for layer in layers):
        return None
    changes = {"metadata_cls": SimpleNamespace, "_build_req_id_per_token": lambda self, common: None}  # the plan has them
    builder = type("DenseBuilder", (parts.builder,), changes)
    beside = builder(kv_cache_spec, layer_names, vllm_config, device)
    beside.reorder_batch_threshold = threshold
    return DensePrefills(beside, tokens, resolved.spec.topk, threshold)


class DensePrefills:
    """The steps whose prefills are computed as dense attention."""

    def __init__(self, builder: Any, shortest: int, longest: int, threshold: int) -> None:
        self._builder, self._shortest, self._longest, self._threshold = builder, shortest, longest, threshold

    def build(self, common: Any, query_lens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> Any | None:
        """What vLLM's builder says of a step with such prefills (num_decodes, num_decode_tokens, num_prefills, prefill).

        None where no request is a prefill, the longest one is not in the range, or vLLM keeps no lengths on the host.
        """
        (later,) = np.nonzero(query_lens > self._threshold)
        if not len(later) or common.seq_lens_cpu_upper_bound is None:
            return None
        if not self._shortest <= lengths[later[0] :].max() <= self._longest:
            return None
        return self._builder.build(0, common)
