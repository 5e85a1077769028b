# SPDX-License-Identifier: Apache-2.0
"""The kit's small checkpoints of GLM-5, GLM-5.3-Flash and hy_v4: fields and names are those of vLLM and of transformers."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import engine
import other_models
import pytest
import torch
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.model_executor.models import registry

HEADS = 4
RENAMED = {
    "glm": {
        r"\.forget_gate\.": ".",
        r"\.attn_hc\.": ".hc_attn_",
        r"\.ffn_hc\.": ".hc_ffn_",
    },
    "hy": {
        r"\.sinks$": ".learnable_sink_param",
        r"self_attn\.gate_proj": "self_attn.linear_gate",
        r"\.attn_hc\.": ".hc_attn_layer.hc_pre.hc_",
        r"\.ffn_hc\.": ".hc_mlp_layer.hc_pre.hc_",
        r"hc_head\.hc_": "hc_head.hc_head_",
    },
}
"""From transformers' names to those of checkpoints, the other way round than its conversion table has it. The mixing weights of
hyper-connections have no `.weight`: vLLM's loader of hy_v4 adds it, and leaves names out that have it already."""


def parameters(kind: str, package: str, config: str, model: str) -> dict[str, tuple[int, ...]]:
    try:
        module: Any = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        classes: Any = importlib.import_module(f"transformers.models.{package}")
    except ImportError:
        pytest.skip(f"this transformers has no {package}")
    fields = {name: value for name, value in getattr(other_models, f"{kind}_config")(HEADS).items() if name != "torch_dtype"}
    with torch.device("meta"):
        built = getattr(module, model)(getattr(classes, config)(**fields))
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in built.state_dict().items():
        for pattern, by in RENAMED[kind].items():
            name = re.sub(pattern, by, name)
        found[f"model.{name}"] = tuple(tensor.shape)
    return found


@pytest.mark.parametrize(
    "kind, names",
    [
        ("glm", ("glm5_next", "Glm5NextTextConfig", "Glm5NextTextModel")),
        ("hy", ("hy_v4", "HYV4Config", "HYV4Model")),
    ],
)
def test_the_checkpoint_has_every_parameter_of_the_model(kind: str, names: tuple[str, str, str]):
    wanted = parameters(kind, *names)
    made = {name: tuple(tensor.shape) for name, tensor in getattr(other_models, f"{kind}_tensors")(HEADS).items()}
    assert made.pop("lm_head.weight") == (4096, 512)
    for layer in range(3 if kind == "glm" else 0):  # one tensor in transformers
        prefix = f"model.layers.{layer}.self_attn"
        rows = sum(made.pop(f"{prefix}.{each}_conv1d.weight")[0] for each in "qkv")
        assert wanted.pop(f"{prefix}.conv1d.weight") == (rows, 1, 4)
    assert made == wanted


def test_vllm_reads_the_configuration_of_glm5_and_of_its_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sparse MLA with 576 numbers a token; the draft keeps the fields by which vLLM builds an indexer and shares its choice."""
    config = other_models.glm5_config(HEADS, drafts=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())  # it would import vLLM again
    target: Any = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192)
    assert target.architectures == ["GlmMoeDsaForCausalLM"] and target.use_mla and target.get_head_size() == 576
    drafts = {"method": "deepseek_mtp", "num_speculative_tokens": 2, "target_model_config": target}
    made: Any = SpeculativeConfig(**drafts, target_parallel_config=ParallelConfig())
    fields = made.draft_model_config.hf_config
    assert (fields.n_predict, fields.num_hidden_layers, fields.index_share_for_mtp_iteration) == (1, 3, True)
    assert (fields.index_topk, fields.index_topk_pattern, fields.indexer_rope_interleave) == (2048, "FSF", True)


def test_vllms_own_class_reads_the_fields_of_hy_v4():
    try:
        configs: Any = importlib.import_module("vllm.transformers_utils.configs.hy_v4")
    except ImportError:
        return  # came with 0.29
    config = configs.HYV4Config(**other_models.hy_config(HEADS))
    assert config.learnable_sink and config.indexer_types == ["full"] * 2
    assert (config.index_topk, config.kv_lora_rank, config.qk_rope_head_dim) == (2048, 512, 64)


def test_hyper_connections_run_without_tilelang(monkeypatch: pytest.MonkeyPatch):
    """vLLM's own operators, as the kit changes them; on CUDA they would import TileLang at the first step."""
    try:
        mhc: Any = importlib.import_module("vllm.model_executor.layers.mhc")
    except ImportError:
        mhc = None
    if not hasattr(mhc, "_apply_mhc_norm"):
        return  # GLM-5.3-Flash came with 0.30; before it this way left the norm out
    for kind in (mhc.MHCPreOp, mhc.MHCPostOp, mhc.MHCFusedPostPreOp):
        monkeypatch.setattr(kind, "forward_cuda", kind.forward_cuda)  # for what runs after this test
    assert engine.connect_without_tilelang()
    tokens, streams, width = 3, 4, 128
    random = torch.Generator().manual_seed(1)
    float32: dict[str, Any] = {"dtype": torch.float32, "generator": random}
    residual = torch.randn(tokens, streams, width, **float32).to(torch.bfloat16)
    mixing = torch.randn(streams * (2 + streams), streams * width, **float32) / 16
    scale, base = torch.ones(3, dtype=torch.float32), torch.randn(streams * (2 + streams), **float32)
    norm = (1 + torch.randn(width, **float32)).to(torch.bfloat16)
    given = {"fn": mixing, "hc_scale": scale, "hc_base": base, "rms_eps": 1e-5, "hc_pre_eps": 1e-6, "hc_sinkhorn_eps": 1e-6}
    given |= {"hc_post_mult_value": 2.0, "sinkhorn_repeat": 20}
    before, after = mhc.MHCPreOp.forward_cuda, mhc.MHCPostOp.forward_cuda
    post, comb, plain = before(operator(mhc.MHCPreOp), residual, **given)
    _, _, normed = before(operator(mhc.MHCPreOp), residual, **given, norm_weight=norm, norm_eps=1e-5)
    wanted = plain.double() * (plain.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    torch.testing.assert_close(normed.double(), wanted, rtol=2e-2, atol=2e-2)
    mixed = after(operator(mhc.MHCPostOp), plain, residual, post, comb)
    fused = mhc.MHCFusedPostPreOp.forward_cuda(operator(mhc.MHCFusedPostPreOp), plain, residual, post, comb, **given)
    assert torch.equal(fused[0], mixed) and torch.equal(fused[3], before(operator(mhc.MHCPreOp), mixed, **given)[2])


def operator(kind: Any) -> Any:
    """As a layer has it, without what its constructor reads of a configuration."""
    return kind.__new__(kind)
