# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Decode context parallelism (DCP): this rank's share of each sequence, and the collective of its indexer.

Attention needs none here: vLLM gathers the query's heads before `forward_mqa`, and merges outputs by their lse after it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from mla_portable.contracts import ContextShare
from mla_portable.contracts.share import WHOLE
from mla_portable.engines.vllm import compat


def context_share(vllm_config: Any) -> ContextShare:
    """What this rank's cache holds of each sequence; of rank 0 where a configuration is checked before there are ranks."""
    size = compat.context_ranks(vllm_config)
    if size == 1:
        return WHOLE
    try:
        rank = _group().rank_in_group
    except AssertionError:  # no groups yet
        rank = 0
    return ContextShare(size, rank, getattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", 1) or 1)


def gather_from_ranks(keys: Tensor) -> Tensor:
    """[n, K] of each rank -> [n, size * K], the same on all."""
    return _group().all_gather(keys, dim=1)


def _group() -> Any:
    return import_module("vllm.distributed.parallel_state").get_dcp_group()
