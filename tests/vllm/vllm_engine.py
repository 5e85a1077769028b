# SPDX-License-Identifier: Apache-2.0
"""A small engine around vLLM's real classes: configuration, MLAAttention layer, cache spec, CommonAttentionMetadata.

Only what a checkpoint holds is invented: the model's config.json, the weights of kv_b_proj and the indexer's choices.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import oracle
import torch
from torch import Tensor
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.config.device import DeviceConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.models import registry
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from mla_portable.engines.vllm.backend import MLAPortableBackend

CPU = torch.device("cpu")
HEADS, TOPK, NOPE, ROPE, V_DIM, LATENT = 4, 64, 128, 64, 128, 512
SCALE = (NOPE + ROPE) ** -0.5 * 1.3
MAX_TOKENS, MAX_REQS, MAX_LEN, BLOCK = 160, 16, 256, 64

TAKES_BACKEND = "attn_backend" in inspect.signature(mla_attention.MLAAttention.__init__).parameters
"""From 0.20 on a layer may be given its backend, and calls `fp8` what is stored as fp8_ds_mla."""
KNOWN_LENGTHS = [
    name
    for name in ("seq_lens_cpu_upper_bound", "_seq_lens_cpu")
    if name in {field.name for field in fields(CommonAttentionMetadata)}
]
"""Where this version keeps lengths on the host, the first as its runner does."""


MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V_DIM,
    "index_topk": TOPK,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "vocab_size": 128,
    "max_position_embeddings": MAX_LEN,
}
"""A checkpoint's config.json: DeepSeek-V3.2 but for its sizes."""
POOL = 4
WITHOUT_ROPE = {**MODEL, "qk_rope_head_dim": 0, "index_kpool": POOL}
"""With the attention of GLM-5.3-Flash: no rotary part, and an indexer that selects pools of keys."""


@cache
def _model_config(rope: int) -> ModelConfig:
    """As vLLM reads it from a checkpoint, once; it looks at the model's class here, not in a process that imports vLLM too."""
    here = mock.patch.object(registry, "_run_in_subprocess", lambda look: look())
    with TemporaryDirectory() as folder, here:
        Path(folder, "config.json").write_text(json.dumps(MODEL if rope else WITHOUT_ROPE))
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_LEN)


def make_config(kv_cache_dtype: str = "auto", *, drafts: int = 0, rope: int = ROPE, **model: Any) -> VllmConfig:
    """As vLLM makes it for a small model, of WITHOUT_ROPE where `rope` is 0; `model` changes the model's part."""
    if not TAKES_BACKEND and kv_cache_dtype == "fp8":  # as the model's config does there
        kv_cache_dtype = "fp8_ds_mla"
    config = VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(cache_dtype=kv_cache_dtype),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_REQS, max_model_len=MAX_LEN, is_encoder_decoder=False
        ),
    )
    if config.cache_config.block_size is None:  # up to 0.19 the platform sets it, a CPU's does not
        config.cache_config.block_size = BLOCK
    config.model_config = copy.copy(_model_config(rope))
    for name, value in model.items():
        setattr(config.model_config, name, value)
    attention = config.attention_config
    if getattr(attention, "sparse_mla_prefill_workspace_factor", 0) is None:  # set once the model's length is known
        attention.sparse_mla_prefill_workspace_factor = 5
    if drafts:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=drafts, parallel_drafting=False, enable_adaptive_verification=False
        )
    return config


class KvBProj(torch.nn.Module):
    """As ColumnParallelLinear without quantisation: [T, 512] -> [T, H * (NOPE + V_DIM)]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        weight = torch.randn(HEADS * (NOPE + V_DIM), LATENT, generator=torch.Generator().manual_seed(seed)) / LATENT**0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.params_dtype, self.quant_method = torch.bfloat16, None

    def plain(self) -> Tensor:
        """[H * (NOPE + V_DIM), 512], its values."""
        return self.weight

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x @ self.plain().T,)


GROUP = 128
"""Columns that share a scale, as checkpoints of 4 bits have it."""


class PackedKvBProj(KvBProj):
    """As that of a compressed-tensors checkpoint of 4 bits (W4A16): `weight_packed` and `weight_scale`, no `weight`.

    Its method alone can read them, as it can those that Marlin has shuffled: vLLM's layer applies it to the unit matrix.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        groups = self.weight.data.unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(dim=-1, keepdim=True) / 7
        codes = (groups / scale).round().flatten(1).to(torch.int32) + 8
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        packed = (codes.unflatten(1, (-1, 8)) << shifts).sum(dim=-1, dtype=torch.int32)
        del self.weight
        self.weight_packed = torch.nn.Parameter(packed, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scale.squeeze(-1), requires_grad=False)
        self.input_size_per_partition, self.quant_method = LATENT, self

    def plain(self) -> Tensor:
        codes = (self.weight_packed.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
        return ((codes.flatten(1) - 8).unflatten(1, (-1, GROUP)) * self.weight_scale.unsqueeze(-1)).flatten(1)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ layer.plain().T.to(x.dtype)


@dataclass
class Engine:
    """One layer with its builder and cache."""

    config: VllmConfig
    layer: mla_attention.MLAAttention
    builder: Any
    topk: Tensor
    kv_cache: Tensor
    sinks: Tensor | None = None
    rope: int = ROPE
    block: int = BLOCK

    @property
    def impl(self) -> Any:
        return self.layer.impl


def make_builder(engine: Engine) -> Any:
    """A builder of the engine's layer, as vLLM's runner makes it for the blocks that kernels see."""
    with set_current_vllm_config(engine.config):
        spec = engine.layer.get_kv_cache_spec(engine.config)
        group = AttentionGroup(MLAPortableBackend, [engine.layer.layer_name], spec, 0)
        group.create_metadata_builders(engine.config, CPU, kernel_block_size=engine.block)
    return group.get_metadata_builder()


def make_engine(
    kv_cache_dtype: str = "auto",
    *,
    drafts: int = 0,
    blocks: int = 40,
    with_indexer: bool = True,
    microbatches: bool = False,
    sinks: Tensor | None = None,
    rope: int = ROPE,
    block: int = BLOCK,
    apart: int = 0,
    kv_b_proj: type[KvBProj] = KvBProj,
) -> Engine:
    """Build a layer, its builder and its cache as vLLM's worker does; the cache is poisoned.

    sinks: of the layer, [H]. rope: 0 for a model of WITHOUT_ROPE. block: of the cache, as kernels see it. apart: rows of other
    layers between its blocks, as in vLLM's layouts with the blocks outermost. kv_b_proj: how its weight is stored.
    """
    config = make_config(kv_cache_dtype, drafts=drafts, rope=rope)
    if apart:
        config.cache_config.kv_cache_layout = "BLHNC"
    config.parallel_config.enable_dbo = microbatches
    width = TOPK if rope else -(-(TOPK + POOL - 1) // 128) * 128
    topk = torch.full((MAX_TOKENS, width), -1, dtype=torch.int32)
    layer = make_layer(config, topk, rope=rope, kv_b_proj=kv_b_proj, with_indexer=with_indexer, sinks=sinks)
    with set_current_vllm_config(config):
        spec = layer.get_kv_cache_spec(config)
    shape = MLAPortableBackend.get_kv_cache_shape(blocks, block + apart, 1, spec.head_size, layer.kv_cache_dtype)
    kv_cache = torch.full(shape, 0xFF, dtype=torch.uint8) if spec.dtype == torch.uint8 else torch.full(shape, float("nan"))
    kv_cache = kv_cache[:, :block]
    layer.kv_cache = [kv_cache] if isinstance(layer.kv_cache, list) else kv_cache  # up to 0.19 one a pipeline stage
    engine = Engine(config, layer, None, topk, kv_cache, sinks, rope, block)
    engine.builder = make_builder(engine)
    return engine


def make_layer(
    config: VllmConfig,
    topk: Tensor,
    number: int = 0,
    *,
    rope: int = ROPE,
    kv_b_proj: type[KvBProj] = KvBProj,
    with_indexer: bool = True,
    sinks: Tensor | None = None,
    **more: Any,
) -> Any:
    """A model's layer as vLLM builds it. topk: the buffer of its indexer, or the one that it reads. more: of some versions."""
    chosen: dict[str, Any] = (
        {"indexer": SimpleNamespace(topk_indices_buffer=topk)} if with_indexer else {"topk_indices_buffer": topk}
    )
    if TAKES_BACKEND:
        chosen["attn_backend"] = MLAPortableBackend
    if sinks is not None:
        chosen["sinks"] = sinks
    by_selection = mock.patch.object(mla_attention, "get_attn_backend", lambda *a, **named: MLAPortableBackend)
    with set_current_vllm_config(config), by_selection:
        layer = mla_attention.MLAAttention(
            num_heads=HEADS,
            scale=SCALE,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=rope,
            v_head_dim=V_DIM,
            q_lora_rank=None,
            kv_lora_rank=LATENT,
            kv_b_proj=kv_b_proj(7),
            cache_config=config.cache_config,
            prefix=f"model.layers.{number}.self_attn.attn",
            use_sparse=True,
            **chosen,
            **more,
        )
        layer.process_weights_after_loading(torch.bfloat16)
    return layer


@dataclass
class Step:
    """A batch's inputs. q [T, H, 512 + R] as forward_mqa gets it; positions of each token's choices in `topk` [T, K]."""

    common: CommonAttentionMetadata
    requests: list[int]
    table: Tensor
    topk: Tensor
    q: Tensor


def make_step(
    engine: Engine,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    padded_tokens: int | None = None,
    padded_reqs: int | None = None,
    host_lengths: str = KNOWN_LENGTHS[0],
    seed: int = 0,
) -> Step:
    """Fill the cache with every request's context, choose tokens, and describe the batch as vLLM's runner does."""
    random = torch.Generator().manual_seed(seed)
    num_tokens, num_reqs = sum(query_lens), len(query_lens)
    tokens, reqs = padded_tokens or num_tokens, padded_reqs or num_reqs
    block, width = engine.block, engine.topk.shape[1]
    columns = -(-MAX_LEN // block)
    table = torch.zeros((reqs, columns), dtype=torch.int32)
    free = (1 + torch.randperm(len(engine.kv_cache) - 1, generator=random)).tolist()  # block 0 is vLLM's null block
    topk = torch.full((tokens, width), -1, dtype=torch.int32)
    requests = [r for r, length in enumerate(query_lens) for _ in range(length)]
    slots: list[int] = []
    row = 0
    for r, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        used = -(-length // block)
        table[r, :used] = torch.tensor([free.pop() for _ in range(used)], dtype=torch.int32)
        slots += [int(table[r, p // block]) * block + p % block for p in range(length)]
        for position in range(length - query, length):
            chosen = torch.randperm(position + 1, generator=random)[: TOPK - 5].to(torch.int32)
            places = torch.randperm(width, generator=random)[: len(chosen)]  # holes anywhere
            topk[row, places] = chosen
            row += 1
    latent = torch.randn((len(slots), LATENT), generator=random)
    rope = torch.randn((len(slots), engine.rope), generator=random)
    with torch.inference_mode(False):
        engine.impl.do_kv_cache_update(
            latent, rope[:, None], engine.kv_cache, torch.tensor(slots), engine.layer.kv_cache_dtype, torch.ones(())
        )
    starts = torch.zeros(reqs + 1, dtype=torch.int32)
    starts[1 : num_reqs + 1] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
    starts[num_reqs + 1 :] = num_tokens
    lengths = torch.zeros(reqs, dtype=torch.int32)
    lengths[:num_reqs] = torch.tensor(seq_lens, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=lengths.clone(),
        num_reqs=reqs,
        num_actual_tokens=tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64),
        **({host_lengths: lengths} if host_lengths else {}),
    )
    engine.topk[:tokens] = topk
    engine.topk[tokens:] = 2**30  # what an earlier step left behind must not be read
    q = torch.randn((tokens, HEADS, LATENT + engine.rope), generator=random)
    return Step(common, requests, table, topk, q)


def expected(engine: Engine, step: Step) -> tuple[Tensor, Tensor]:
    """out [T, H, 512] and lse [T, H] in float64: one token after the other, its slots looked up one by one."""
    tokens, block = len(step.q), engine.block
    has_rope = engine.rope or engine.kv_cache.dtype == torch.uint8
    queries = torch.nn.functional.pad(step.q, (0, LATENT + ROPE * bool(has_rope) - step.q.shape[-1]))
    out = torch.zeros((tokens, HEADS, LATENT), dtype=torch.float64)
    lse = torch.full((tokens, HEADS), -torch.inf, dtype=torch.float64)
    for token in range(len(step.requests)):
        blocks = step.table[step.requests[token]].tolist()
        slots = [blocks[p // block] * block + p % block for p in step.topk[token].tolist() if p >= 0]
        indices = torch.tensor(slots, dtype=torch.int32)[None, None]
        given = {"softmax_scale": SCALE, "attn_sink": engine.sinks}
        one, its_lse = oracle.sparse_decode(queries[token][None, None], engine.kv_cache.contiguous(), indices, **given)
        out[token], lse[token] = one[0, 0], its_lse[0, 0]
    return out, lse


def attend(engine: Engine, metadata: Any, q: Any, kv_cache: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of the layer's implementation; lse is None where a layer takes out alone."""
    result = engine.impl.forward_mqa(q, engine.kv_cache if kv_cache is None else kv_cache, metadata, engine.layer)
    return (result, None) if isinstance(result, Tensor) else result


def run_layer(engine: Engine, metadata: Any, slots: Tensor, q: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """The whole layer as the model calls it: q [T, H, NOPE + ROPE], kv_c [T, 512], k_pe [T, 1, 64] -> [T, H * V_DIM]."""
    name = engine.layer.layer_name
    with set_forward_context({name: metadata}, engine.config, slot_mapping={name: slots}):
        return engine.layer(q, kv_c, k_pe, output_shape=torch.Size((len(q), HEADS * V_DIM)))


def assert_close(out: torch.Tensor, wanted: torch.Tensor, requests: int) -> None:
    """bfloat16 output of float32 sums: each value to 2 ** -8 of itself, and of its row's size where it cancels."""
    error = (out.double() - wanted).abs()
    size = wanted.abs().amax(dim=-1, keepdim=True)
    assert (error <= 2**-7 * wanted.abs() + 2**-9 * size).all(), f"off by {error.max()}"
    assert requests and wanted[:requests].abs().amax(dim=(1, 2)).min() > 0.01  # the oracle says something of every token


def check_step(engine: Engine, query_lens: Sequence[int], seq_lens: Sequence[int], **more: Any) -> Any:
    """Make a step and attend; out is what the oracle says. Returns: the step's metadata."""
    step = make_step(engine, query_lens, seq_lens, **more)
    metadata = engine.builder.build(0, step.common)
    out, _ = attend(engine, metadata, step.q)
    assert_close(out, expected(engine, step)[0], len(step.requests))
    return metadata
