# SPDX-License-Identifier: Apache-2.0
"""What stands between the projections of vLLM's layers, by vLLM's own modules and by the primitives that can replace them."""

from __future__ import annotations

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm_engine import make_config

from mla_portable import primitives
from mla_portable.layouts import INDEX_BF16

T, Q, HEADS, ROPE = 7, 96, 3, 64


@pytest.fixture
def drawn():
    g = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(shape, generator=g).bfloat16()


@pytest.mark.parametrize("neox", [False, True], ids=["interleaved", "neox"])
def test_norms_and_rotations_are_vllms(drawn, neox):
    """With YaRN's table. Eager norms of vLLM round once more, before the weight; compiled ones do not. Rotations are given
    float32, because some versions rotate bfloat16 in bfloat16."""
    q_a, latent, key, q = drawn(T, Q), drawn(T, 512 + ROPE), drawn(T, 128), drawn(T, HEADS, 128 + ROPE)
    positions = torch.tensor([0, 5, 200, 31, 7, 128, 255])
    with set_current_vllm_config(make_config()):
        rope = DeepseekScalingRotaryEmbedding(ROPE, ROPE, 64, 10_000, neox, 4.0, torch.bfloat16, mscale=1.0, mscale_all_dim=0.5)
        q_norm, kv_norm, key_norm = RMSNorm(Q, eps=1e-6), RMSNorm(512, eps=1e-6), LayerNorm(128, eps=1e-6)
    table = rope.cos_sin_cache = rope.cos_sin_cache.float()
    for norm in (q_norm, kv_norm, key_norm):
        for weight in norm.parameters():
            weight.data = (torch.rand(weight.shape, generator=torch.Generator().manual_seed(4)) + 0.5).bfloat16()
    with torch.no_grad():
        want_q, want_kv = q_norm.forward_native(q_a), kv_norm.forward_native(latent[:, :512])
        key_norm.float()
        normed = key_norm(key)
        want_query, want_rope = rope.forward_native(positions, q[..., 128:].float(), latent[:, None, 512:].float())
        _, want_key = rope.forward_native(positions, q[..., 128:].float(), normed[:, None, :ROPE].float())

    style, cache = "neox" if neox else "interleaved", torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    outputs = {
        name: torch.zeros(T, width).bfloat16() for name, width in (("q_out", Q), ("latent_out", 512), ("k_rope_out", ROPE))
    }
    primitives.norm_rope_write(
        *(q_a, latent, key, positions, table), q_norm=q_norm.weight.data.bfloat16(), kv_norm=kv_norm.weight.data.bfloat16(),
        index_norm=(key_norm.weight.data, key_norm.bias.data), eps=1e-6, kv_cache=None, slot_mapping=torch.arange(T),
        index_cache=cache, rope_style=style, index_rope_style=style, **outputs, backend="reference",
    )  # fmt: skip
    torch.testing.assert_close(outputs["q_out"], want_q.bfloat16(), rtol=2**-7, atol=0)
    torch.testing.assert_close(outputs["latent_out"], want_kv.bfloat16(), rtol=2**-7, atol=0)
    assert torch.equal(outputs["k_rope_out"], want_rope.reshape(T, ROPE).bfloat16())
    written = INDEX_BF16.unpack(cache).flatten(0, 1)[:T]
    assert torch.equal(written, torch.cat([want_key.reshape(T, ROPE).bfloat16(), normed[:, ROPE:]], dim=1))

    q_out = torch.zeros(T, HEADS, 512 + ROPE).bfloat16()
    primitives.rope_quantize_queries(q, None, None, positions, table, q_out=q_out, rope_style=style, backend="reference")
    assert torch.equal(q_out[..., 512:], want_query.reshape(T, HEADS, ROPE).bfloat16()) and not q_out[..., :512].any()
