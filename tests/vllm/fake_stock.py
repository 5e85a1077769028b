# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a stock backend on a CPU: exact but for an error that a test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, MLAAttentionImpl

ERROR = {"relative": 0.0}
"""By how much the stand-in's output is off, relative to its size."""


class StockBuilder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        starts = common_attn_metadata.query_start_loc_cpu
        rows = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
        return SimpleNamespace(rows=rows, table=common_attn_metadata.block_table_tensor)


class StockImpl(MLAAttentionImpl):
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        topk, out = self.arguments["indexer"].topk_indices_buffer, torch.full((len(q), q.shape[1], 512), float("nan"))
        rows = kv_c_and_k_pe_cache.flatten(0, 1).float()
        block = kv_c_and_k_pe_cache.shape[1]
        for token, request in enumerate(attn_metadata.rows.tolist()):
            chosen = topk[token][topk[token] >= 0].long()
            keys = rows[attn_metadata.table[request][chosen // block].long() * block + chosen % block]
            weights = torch.softmax(self.arguments["scale"] * q[token].float() @ keys.T, dim=-1)
            out[token] = (weights @ keys[:, :512]) * (1 + ERROR["relative"])
        return out, None

    def forward_mha(self, *arguments: Any, **named: Any) -> None:
        """Abstract in vLLM up to 0.25."""
        raise NotImplementedError


class StockBackend:
    get_impl_cls = staticmethod(lambda: StockImpl)
    get_builder_cls = staticmethod(lambda: StockBuilder)
