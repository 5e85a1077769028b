# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Whose indexer serves the model: decided in the process that runs it, when its first layer is built.

Mode auto takes this one where the platform has no DeepGEMM for its compute capability, where DeepGEMM cannot be imported, and
under decode context parallelism where CuteDSL cannot, which merges the ranks' selections in vLLM's, and under
VLLM_BATCH_INVARIANT, because vLLM's top-k repeats neither ties nor order. Elsewhere vLLM's serves, but for steps of decodes in
which this one takes less time by what was measured on the device: builders decide that for each step, on the host.
Mode on takes it wherever it can replace vLLM's. There are two paths:

    fused       the operator `vllm::sparse_attn_indexer` itself: cache write, then indexer_select over the pages
    functions   vLLM's operator, with DeepGEMM's functions replaced, for what the fused path does not do
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm.platforms import current_platform

from mla_portable.choose import get_registry
from mla_portable.contracts import Request
from mla_portable.engines.vllm import compat, model, settings
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.layouts import INDEX_FP8
from mla_portable.primitives import INDEXER_SELECT
from mla_portable.times.selection import SelectionTimes, has_selection_times, selection_times


@dataclass(frozen=True, slots=True)
class IndexerChoice:
    """`ours`: DeepGEMM is not called. `fused`: by the fused path. `reason`: in words.

    times: where vLLM's serves, by which decodes go to the fused path all the same; None where none do.
    """

    ours: bool
    fused: bool
    reason: str
    times: SelectionTimes | None = None

    @property
    def fuses_some(self) -> bool:
        """Some steps at least are served by the fused path."""
        return self.fused or self.times is not None

    def fuses(self, metadata: Any, common: Any, *, captured: bool) -> bool:
        """The fused path serves a step, of which vLLM has metadata of its indexer and CommonAttentionMetadata.

        captured: in a CUDA graph, which later steps replay with sequences of any length up to the longest.
        """
        if self.fused or self.times is None:
            return self.fused
        rows, keys = int(common.num_actual_tokens), int(common.max_seq_len)
        if metadata.num_prefills or common.max_query_len != 1:  # of which there are no times
            return False
        return (self.times.ours_is_faster_up_to if captured else self.times.ours_is_faster)(rows, keys)


_latest: IndexerChoice | None = None


def current() -> IndexerChoice:
    """The choice for the model that this process built last; before any was built, that for the configuration in force."""
    if _latest is None:
        from vllm.config import get_current_vllm_config_or_none

        return choose(get_current_vllm_config_or_none())
    return _latest


def choose(vllm_config: Any | None) -> IndexerChoice:
    """Decide for a configuration, None where there is none yet, and remember it; a new decision is logged."""
    global _latest
    found = _decide(vllm_config)
    if vllm_config is None:
        return found
    if found != _latest:
        who = "mla_portable" if found.ours else "vLLM"
        path = "" if not found.ours else " (fused)" if found.fused else " (by DeepGEMM's functions)"
        if found.times is not None:
            path = ", and mla_portable's (fused) in decodes where that takes less time"
        overruled = not found.ours and settings.indexer() == "on"
        (settings.logger.warning if overruled else settings.logger.info)(
            "the DSA indexer is %s's%s: %s", who, path, found.reason
        )
        _latest = found
    return found


def forget() -> None:
    """Drop the choice; for tests."""
    global _latest
    _latest = None


def capability() -> tuple[int, int] | None:
    """The CUDA compute capability as the platform states it, None on platforms without. Does not initialise CUDA."""
    found = current_platform.get_device_capability() if current_platform.is_cuda_alike() else None
    return None if found is None else (found.major, found.minor)


def _decide(vllm_config: Any | None) -> IndexerChoice:
    if vllm_config is not None:
        settings.adopt(vllm_config.additional_config)
    mode = settings.indexer()
    if mode == "off":
        return IndexerChoice(False, False, f"{settings.ENV_INDEXER}=off")
    wanted, reason = (True, f"{settings.ENV_INDEXER}=on") if mode == "on" else _without_deep_gemm(vllm_config)
    same_bits = not wanted and current_platform.is_cuda() and compat.wants_batch_invariance()
    times = None if wanted or same_bits else _times(vllm_config)
    if not (wanted or same_bits) and times is None:
        return IndexerChoice(False, False, reason)
    impossible = other_formats(vllm_config)
    if impossible is not None:
        return IndexerChoice(False, False, f"mla_portable does not read {impossible}")
    apart = _beyond_fused(vllm_config)
    if not wanted:
        if apart is not None:
            return IndexerChoice(False, False, reason)
        if same_bits:
            return IndexerChoice(True, True, "VLLM_BATCH_INVARIANT is set, and vLLM's top-k does not repeat ties and order")
        assert times is not None
        return IndexerChoice(False, False, f"{reason}; {times.text}", times)
    return IndexerChoice(True, apart is None, reason if apart is None else f"{reason}; not fused: {apart}")


def _times(vllm_config: Any | None) -> SelectionTimes | None:
    """Of what would serve the model's decodes, beside vLLM's own kernels; None where they were not timed on this device, and
    where vLLM captures decodes and nothing can be captured. Tries implementations that were not tried before.
    """
    if vllm_config is None or vllm_config.model_config is None or not current_platform.is_cuda():
        return None
    heads, topk = compat.indexer_heads(vllm_config), compat.topk(vllm_config)
    if heads is None or topk is None or compat.context_ranks(vllm_config) > 1:
        return None
    registry, device = get_registry(), compat.device()
    sizes: dict[str, Any] = {"num_heads": heads, "topk": topk, "kv_layout": INDEX_FP8.name, "block_size": model.BLOCK_SIZE}
    request = Request(INDEXER_SELECT, registry.facts(device), **sizes, whole_tables=True)
    if not has_selection_times(registry.times_files, request, settings.INDEXER_IN_TIMES):
        return None
    with neutral_defaults(), registry.guard(device):
        decisions = [registry.decide(request.but(graph=graph)) for graph in (True, False)]
    found = next((each for each in decisions if each.chosen), None)
    if found is None or found.chosen is None or (compat.wants_full_graphs(vllm_config) and not found.request.graph):
        return None
    return selection_times(registry.times_files, request, found.chosen, settings.INDEXER_IN_TIMES)


def _without_deep_gemm(vllm_config: Any | None) -> tuple[bool, str]:
    """Whether vLLM's indexer lacks its DeepGEMM here, and why (not)."""
    platform = current_platform
    name = platform.device_type or type(platform).__name__
    if not (platform.is_cuda() or platform.is_out_of_tree()):
        return False, f"vLLM does not use DeepGEMM for it on {name}"
    version = capability()
    device = f"compute capability {version[0]}.{version[1]}" if version else f"platform {name}"
    if not platform.support_deep_gemm():
        return True, f"DeepGEMM does not support {device}"
    found = import_module("vllm.utils.import_utils")
    if not found.has_deep_gemm():
        return True, "DeepGEMM cannot be imported"
    size = 1 if vllm_config is None else compat.context_ranks(vllm_config)
    if size > 1 and not getattr(found, "has_cutedsl", lambda: False)():
        return True, f"vLLM's under decode context parallelism {size} needs CuteDSL, which cannot be imported"
    return False, f"DeepGEMM serves {device}"


def other_formats(vllm_config: Any | None) -> str | None:
    """A format of the indexer's cache that is not `index_fp8`, None where there is none."""
    attention = getattr(vllm_config, "attention_config", None)
    if getattr(attention, "use_fp4_indexer_cache", None) or getattr(attention, "indexer_kv_dtype", None) == "mxfp4":
        return "an indexer cache in FP4"
    with_mx = getattr(import_module("vllm.utils.deep_gemm"), "mqa_logits_use_mx_scales", None)
    if with_mx is not None and with_mx():  # 0.33 on SM100
        return "an indexer cache with MX scales"
    return None


def _beyond_fused(vllm_config: Any | None) -> str | None:
    """Why the fused path cannot serve the model, None where it can."""
    if vllm_config is None:
        return None
    size = getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) or 1
    if size > 1:
        return f"prefill context parallelism {size}"
    if vllm_config.model_config is None:
        return None
    if any(ratio > 1 for ratio in compat.compress_ratios(vllm_config)):
        return "the indexer scores compressed tokens (compress_ratios)"
    pool = compat.pooled_keys(vllm_config)
    return f"the indexer scores pools of {pool} keys (index_kpool)" if pool > 1 else None
