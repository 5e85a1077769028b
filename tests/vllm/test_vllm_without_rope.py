# SPDX-License-Identifier: Apache-2.0
"""Attention without a rotary part (GLM-5.3-Flash) in vLLM's layer: both caches, larger blocks, wider rows of the indexer."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import MultipleOf
from vllm_engine import (
    HEADS,
    LATENT,
    NOPE,
    TOPK,
    V_DIM,
    assert_close,
    attend,
    check_step,
    expected,
    make_config,
    make_engine,
    make_step,
    run_layer,
)

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import compat, model, writer
from mla_portable.engines.vllm.backend import MLAPortableBackend

STEPS = {
    "decodes": ([1] * 5, [1, 64, 65, 130, 256], {}),
    "prompts": ([7, 70, 3], [7, 70, 3], {}),
    "mixed": ([1, 1, 1, 9, 33], [100, 7, 256, 9, 90], {}),
    "padded": ([1, 1, 30], [70, 3, 200], {"padded_tokens": 40, "padded_reqs": 4}),
}
FLASH = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_kpool": 4,
}
"""GLM-5.3-Flash's, as its checkpoint states them."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("block, apart", [(64, 0), (128, 0), (128, 37), (256, 37)])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_every_step_attends_without_rope(dtype: str, block: int, apart: int, step: str):
    """The selection has -1 anywhere in rows of 128, twice as wide as the top-k."""
    query_lens, seq_lens, padding = STEPS[step]
    engine = make_engine(dtype, rope=0, block=block, apart=apart)
    spec = engine.builder.attention.spec
    assert (spec.topk, engine.topk.shape[1]) == (128, 128) and engine.impl.head_size == LATENT
    assert (spec.kv_layout, spec.nope) == (("bf16_nope", False) if dtype == "auto" else ("fp8_ds_mla", True))
    metadata = check_step(engine, query_lens, seq_lens, **padding)
    assert metadata.topk_tokens == TOPK  # what vLLM compares lengths with


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_drafts_and_sinks_go_without_rope_too(dtype: str):
    sinks = torch.tensor([0.5, -1.0, -torch.inf, 4.0], dtype=torch.float32)
    check_step(make_engine(dtype, rope=0, drafts=2, sinks=sinks), [3, 3, 30], [20, 100, 90])


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_the_first_half_of_a_pair_is_the_query(dtype: str):
    """Up to 0.31 it comes as a batched product leaves it: heads outermost."""
    engine = make_engine(dtype, rope=0)
    step = make_step(engine, [1, 1, 9], [100, 64, 30])
    metadata = engine.builder.build(0, step.common)
    latent = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    out, _ = attend(engine, metadata, (latent, step.q[..., :0]))
    assert_close(out, expected(engine, step)[0], 11)
    assert engine.builder.attention.buffers.query is None


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_the_whole_layer_writes_and_attends(dtype: str):
    """vLLM's own layer, from queries of 128 by its W_UK to values by its W_UV, over keys that it has written."""
    engine = make_engine(dtype, rope=0)
    step = make_step(engine, [1, 1, 9], [100, 64, 30])
    tokens, random = len(step.q), torch.Generator().manual_seed(5)
    metadata = engine.builder.build(0, step.common)
    q, new = torch.randn(tokens, HEADS, NOPE, generator=random), torch.randn(tokens, LATENT, generator=random)
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    out = run_layer(engine, metadata, slots, q, new, new[:, None, :0])
    w_uk, w_uv = engine.layer.kv_b_proj.weight.view(HEADS, NOPE + V_DIM, LATENT).split([NOPE, V_DIM], dim=1)
    step = replace(step, q=torch.einsum("thp,hpl->thl", q, w_uk))
    wanted = torch.einsum("thl,hvl->thv", expected(engine, step)[0], w_uv.double())
    torch.testing.assert_close(out.double().view_as(wanted), wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


def test_a_wrong_buffer_is_refused_in_words():
    """A version whose buffer is of another width than this one computes."""
    engine = make_engine("auto", rope=0)
    step = make_step(engine, [1], [30])
    engine.impl.topk_indices_buffer = engine.topk[:, :TOPK]
    with pytest.raises(InvalidArgument, match=r"topk_indices: got shape \[160, 64\], expected .*= \[160, 128\]"):
        attend(engine, engine.builder.build(0, step.common), step.q)


def test_fields_of_the_released_checkpoint():
    """By transformers' own class, where this version has it."""
    try:
        text: Any = importlib.import_module("transformers.models.glm5_next").Glm5NextTextConfig(**FLASH)
    except ImportError:
        text = SimpleNamespace(**FLASH)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text, hf_config=text))
    assert (compat.topk(config), compat.selection_width(config), compat.pooled_keys(config)) == (2048, 2176, 4)
    assert (compat.head_size(config), compat.nominal_scale(config)) == (512, 1 / 16)
    deepseek = SimpleNamespace(index_topk=2048)
    config.model_config = SimpleNamespace(hf_text_config=deepseek, hf_config=deepseek)
    assert (compat.selection_width(config), compat.head_size(config)) == (2048, 576)


def test_vllms_own_function_says_the_same_width():
    try:
        models = importlib.import_module("vllm.models.glm5next.common.model")
    except ImportError:
        return  # came with 0.30, and needs torchvision
    width = models.get_sparse_topk_buffer_width
    for topk, pool in ((2048, 4), (2048, 16), (512, 2), (64, 4)):
        text = SimpleNamespace(index_topk=topk, index_kpool=pool)
        config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text, hf_config=text))
        assert compat.selection_width(config) == width(text)


def test_blocks_of_128_and_256_are_shared_with_an_indexer_of_pools():
    """By vLLM's own choice of a common block size; before 0.31 backends are asked without a specification."""
    pooled, plain = make_config(rope=0), make_config()
    sizes = MLAPortableBackend.get_supported_kernel_block_sizes
    for config, found in ((pooled, [MultipleOf(64)]), (plain, [64])):
        with set_current_vllm_config(config):
            assert [(type(size), getattr(size, "base", size)) for size in sizes()] == [
                (type(size), getattr(size, "base", size)) for size in found
            ]
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    if not hasattr(indexer, "Glm5NextIndexerBackend"):
        return  # 0.33's, which needs 128 or 256
    select = importlib.import_module("vllm.v1.worker.utils").select_common_block_size
    main, keys = SimpleNamespace(head_size=512), SimpleNamespace(tokens_per_state=4)
    for manager, kernel in ((4352, 256), (384, 128), (128, 128)):
        assert select(manager, [MLAPortableBackend, indexer.Glm5NextIndexerBackend], [main, keys]) == kernel


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
def test_vllms_selection_takes_it(dtype: str):
    config = make_config(rope=0)
    with set_current_vllm_config(config):
        arguments = {**compat.selection_arguments(config), "kv_cache_dtype": dtype}
        assert arguments["head_size"] == 512
        arguments["device_capability"] = DeviceCapability(8, 9)
        assert MLAPortableBackend.validate_configuration(**arguments) == []
        reasons = MLAPortableBackend.validate_configuration(**{**arguments, "head_size": 544})
    assert any("head_size 544 (supports 512, 576" in reason for reason in reasons)


def test_a_head_of_another_size_is_refused_in_words():
    reason = model.refusal(make_config(), torch.device("cpu"), head_size=320, kv_cache_dtype="auto", block_size=None)
    assert reason == "head_size 320 (supports 512, 576: a latent of 512, with 64 of rope or without)"


def test_vllms_operator_is_tried_without_rope(monkeypatch: pytest.MonkeyPatch):
    """It must write the rotary part of FP8 rows as zeros; older ones refuse such keys, or leave what was there."""
    ops: Any = importlib.import_module("vllm._custom_ops")
    zeros = [True]

    def write(kv_c: Any, k_pe: Any, kv_cache: Any, slots: Any, *, kv_cache_dtype: str, scale: Any) -> None:
        assert k_pe.shape == (1, 0)
        row = model.LAYOUTS[kv_cache_dtype].pack(kv_c, torch.zeros(1, 64), "pow2")[0]
        kept = 656 if zeros[0] else 528
        kv_cache.view(-1, 656)[slots[0], :kept] = row[:kept]

    monkeypatch.setattr(ops, "concat_and_cache_mla", write)
    for zeros[0] in (True, False):
        writer.try_vllm.cache_clear()
        trial = writer.try_vllm("fp8_ds_mla", torch.device("cpu"), nope=True)
        assert (trial.works, trial.scale_format) == ((True, "pow2") if zeros[0] else (False, None))
    writer.try_vllm.cache_clear()
