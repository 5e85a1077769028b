# SPDX-License-Identifier: Apache-2.0
"""A whole attention module of DeepSeek-V3.2 from vLLM's real classes, on the CPU: projections, norms, indexer, MLAAttention.

Two of them with the same weights are compared: one with vLLM's own layer around attention, one with ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup
from vllm_engine import BLOCK, CPU, HEADS, KNOWN_LENGTHS, MAX_LEN, MAX_TOKENS, MODEL, TOPK, make_config

from mla_portable.engines.vllm.backend import MLAPortableBackend

HIDDEN = MODEL["hidden_size"]
PREFIX = "model.layers.0.self_attn"
MLA, INDEX = f"{PREFIX}.attn", f"{PREFIX}.indexer.k_cache"
_BLOCKS = 40


@dataclass
class Module:
    """The module, its two builders and caches."""

    config: Any
    module: Any
    builders: dict[str, Any]
    caches: dict[str, Tensor]
    topk: Tensor

    @property
    def layer(self) -> Any:
        """vLLM's or our layer around MLAAttention."""
        return self.module.mla_attn


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one rank for vLLM's parallel layers, and torch in the place of the kernel that quantises index queries."""
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
    monkeypatch.setattr("vllm.model_executor.models.deepseek_v2.per_token_group_quant_fp8", quantise_in_torch)


def make_module(kv_cache_dtype: str = "auto", *, hf: dict[str, Any] | None = None, config: Any = None, gap: int = 0) -> Module:
    """Build a module as vLLM's model does, with seeded weights, and its builders and caches as its runner does.

    hf: changes of the model's config. config: vLLM's. gap: rows of others between the indexer's blocks.
    """
    deepseek = importlib.import_module("vllm.model_executor.models.deepseek_v2")
    config = config or make_config(kv_cache_dtype)
    config.cache_config.block_size = BLOCK
    config.compilation_config.custom_ops = ["none", "+sparse_attn_indexer"]
    if hasattr(config, "kernel_config"):
        config.kernel_config.enable_jit_warmup = False  # of Triton's kernels
    topk = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)
    model = SimpleNamespace(**{**vars(config.model_config.hf_config), **(hf or {})})
    model.rope_parameters = dict(getattr(model, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    by_selection = mock.patch.object(mla_attention, "get_attn_backend", lambda *a, **named: MLAPortableBackend)
    with set_current_vllm_config(config), by_selection:
        module = deepseek.DeepseekV2MLAAttention(
            vllm_config=config,
            config=model,
            hidden_size=HIDDEN,
            num_heads=HEADS,
            qk_nope_head_dim=model.qk_nope_head_dim,
            qk_rope_head_dim=model.qk_rope_head_dim,
            v_head_dim=model.v_head_dim,
            q_lora_rank=model.q_lora_rank,
            kv_lora_rank=model.kv_lora_rank,
            max_position_embeddings=MAX_LEN,
            cache_config=config.cache_config,
            prefix=PREFIX,
            topk_indices_buffer=topk,
        )
        _fill(module)
        attention = module.mla_attn.mla_attn
        attention.process_weights_after_loading(torch.bfloat16)
        context = config.compilation_config.static_forward_context
        builders = {}
        for name in (MLA, INDEX):
            if name in context:
                spec, backend = context[name].get_kv_cache_spec(config), context[name].get_attn_backend()
                group = AttentionGroup(backend, [name], spec, 0)
                group.create_metadata_builders(config, CPU, kernel_block_size=BLOCK)
                builders[name] = group.get_metadata_builder()
    width = 656 if attention.kv_cache_dtype.startswith("fp8") else 576
    kind: dict[str, Any] = {"dtype": torch.uint8} if width == 656 else {"dtype": torch.bfloat16}
    caches = {MLA: torch.zeros((_BLOCKS, BLOCK, width), **kind)}
    if INDEX in builders:
        caches[INDEX] = torch.zeros((_BLOCKS, BLOCK + gap, 132), dtype=torch.uint8)[:, :BLOCK]
    for name, cache in caches.items():
        context[name].kv_cache = cache
    return Module(config, module, builders, caches, topk)


def quantise_in_torch(x: Tensor, group_size: int, *, column_major_scales: bool, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """As vLLM's `per_token_group_quant_fp8`, whose kernels need a GPU: x [N, 128] -> e4m3 [N, 128], float32 [N, 1]."""
    assert use_ue8m0 and not column_major_scales and group_size == x.shape[1] == 128
    amax = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _fill(module: Any) -> None:
    random = torch.Generator().manual_seed(11)
    for name, weight in sorted(module.named_parameters()):
        about = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        scale = 0.1 if "norm" in name else weight.shape[-1] ** -0.5
        weight.data.copy_(about + scale * torch.randn(weight.shape, generator=random, dtype=torch.float32))


@dataclass
class Inputs:
    """A step: what the model gives the module, and the runner the forward context."""

    common: CommonAttentionMetadata
    hidden: Tensor
    positions: Tensor
    slots: Tensor


def make_inputs(query_lens: Sequence[int], seq_lens: Sequence[int], *, padding: int = 0, seed: int = 0) -> Inputs:
    """Requests in blocks of their own. padding: tokens at the end that belong to no request."""
    random = torch.Generator().manual_seed(seed)
    tokens, columns = sum(query_lens), MAX_LEN // BLOCK
    table = torch.zeros((len(query_lens), columns), dtype=torch.int32)
    free = (1 + torch.randperm(_BLOCKS - 1, generator=random)).tolist()
    positions, slots = [], []
    for r, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        used = -(-length // BLOCK)
        table[r, :used] = torch.tensor([free.pop() for _ in range(used)], dtype=torch.int32)
        positions += range(length - query, length)
        slots += [int(table[r, p // BLOCK]) * BLOCK + p % BLOCK for p in range(length - query, length)]
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    mapping = torch.tensor([*slots, *[-1] * padding])
    common = CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=lengths.clone(),
        num_reqs=len(query_lens),
        num_actual_tokens=tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=mapping[:tokens],
        **{KNOWN_LENGTHS[0]: lengths},
    )
    hidden = torch.randn((tokens + padding, HIDDEN), generator=random, dtype=torch.float32).to(torch.bfloat16)
    return Inputs(common, hidden, torch.tensor([*positions, *[0] * padding]), mapping)


def fill_caches(module: Module, seed: int = 3) -> None:
    """Rows of earlier tokens: seeded, and of values that both layouts hold."""
    random = torch.Generator().manual_seed(seed)
    latent = torch.randn((_BLOCKS * BLOCK, 512), generator=random, dtype=torch.float32).to(torch.bfloat16)
    rope = torch.randn((_BLOCKS * BLOCK, 64), generator=random, dtype=torch.float32).to(torch.bfloat16)
    attention = module.layer.mla_attn
    slots = torch.arange(_BLOCKS * BLOCK)
    one = torch.ones((), dtype=torch.float32)
    attention.impl.do_kv_cache_update(latent, rope[:, None], module.caches[MLA], slots, attention.kv_cache_dtype, one)
    if INDEX in module.caches:
        from mla_portable.primitives import indexer_cache_write

        keys = torch.randn((_BLOCKS * BLOCK, 128), generator=random, dtype=torch.float32).to(torch.bfloat16)
        indexer_cache_write(keys, module.caches[INDEX], slots)


def run_step(module: Module, inputs: Inputs, forward: Any = None, index_slots: Tensor | None = None) -> Tensor:
    """The module's result [T, hidden] for a step.

    forward: what is called in the module's place. index_slots: of the indexer's cache, where it has others.
    """
    metadata = {name: builder.build(0, inputs.common) for name, builder in module.builders.items()}
    slots = dict.fromkeys(module.builders, inputs.slots)
    if index_slots is not None:
        slots[INDEX] = index_slots
    with set_forward_context(metadata, module.config, slot_mapping=slots), torch.inference_mode():
        return (module.module if forward is None else forward)(inputs.positions, inputs.hidden, None)
