# SPDX-License-Identifier: Apache-2.0
"""The models of ci/gpu_vllm tell a wrong kernel from one that rounds otherwise: a twin of them in plain torch, on the CPU.

The twin computes a prompt at once and keeps every rounding to bfloat16 and to the cache's format; only YaRN is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from mla_portable.layouts import FP8_DS_MLA

HEADS, TOKENS, FIRST = 16, 160, 16
SCALE: Final = 192**-0.5 * (0.1 * math.log(4) + 1) ** 2

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention: scores [H, T, T] of all pairs, which of them count [T, T], values [T, 512] -> [T, H, 512]."""


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return rounded(rounded(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * weight)


def rotated(x: Tensor) -> Tensor:
    """x: [T, ..., 64], by its row's number."""
    angles = torch.arange(len(x))[:, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
    angles = angles.view(len(x), *[1] * (x.dim() - 2), 32)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return rounded(torch.stack(turned, -1).flatten(-2))


def attend(scores: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    return rounded((scores.masked_fill(~counts, -math.inf).softmax(-1) @ values).transpose(0, 1))


def logprobs(weights: dict[str, Tensor], ids: Tensor, fp8: bool, attend: Attend, *, rope: float = 1.0) -> Tensor:
    """[T, vocabulary], of what follows each token. rope: factor on its part of the scores, 1 where all is right."""

    def linear(x: Tensor, name: str) -> Tensor:
        return rounded(x @ weights[f"{name}.weight"].T)

    x, residual = weights["model.embed_tokens.weight"][ids], torch.zeros(())
    counts = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for layer in ("model.layers.0", "model.layers.1"):
        own = f"{layer}.self_attn"
        residual = rounded(x + residual)
        y = normed(residual, weights[f"{layer}.input_layernorm.weight"])
        q = linear(normed(linear(y, f"{own}.q_a_proj"), weights[f"{own}.q_a_layernorm.weight"]), f"{own}.q_b_proj")
        q = q.view(len(ids), HEADS, 192)
        kv = linear(y, f"{own}.kv_a_proj_with_mqa")
        latent, k_rope = normed(kv[:, :512], weights[f"{own}.kv_a_layernorm.weight"]), rotated(kv[:, 512:])
        if fp8:
            rows = FP8_DS_MLA.pack(latent.to(torch.bfloat16), k_rope.to(torch.bfloat16), scale_format="amax")
            latent = FP8_DS_MLA.unpack(rows, dtype=torch.float32)[:, :512]
        up = weights[f"{own}.kv_b_proj.weight"].view(HEADS, 256, 512)
        absorbed = rounded(torch.einsum("thn,hnl->htl", q[..., :128], up[:, :128]))
        scores = (absorbed @ latent.T + rope * (rotated(q[..., 128:]).transpose(0, 1) @ k_rope.T)) * SCALE
        out = rounded(torch.einsum("thl,hvl->thv", attend(scores, counts, latent), up[:, 128:])).flatten(1)
        residual = rounded(linear(out, f"{own}.o_proj") + residual)
        y = normed(residual, weights[f"{layer}.post_attention_layernorm.weight"])
        gate = rounded(torch.nn.functional.silu(linear(y, f"{layer}.mlp.gate_proj")))
        x = linear(rounded(gate * linear(y, f"{layer}.mlp.up_proj")), f"{layer}.mlp.down_proj")
    return linear(normed(rounded(x + residual), weights["model.norm.weight"]), "lm_head").log_softmax(-1)


def rounded_anew(scores: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    """Every element times 1 + u * 2**-8, u uniform in [-1, 1]: at most one unit of bfloat16."""
    out = attend(scores, counts, values)
    return rounded(out * (1 + 2**-8 * (2 * torch.rand(out.shape, generator=torch.Generator().manual_seed(1)) - 1)))


def without_the_newest(scores: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    """One key of each token is forgotten, as by a length that is short by one."""
    fewer = counts.tril(-1)
    fewer[0, 0] = True
    return attend(scores, fewer, values)


def without_a_tile(scores: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    """Keys 64 to 127 are forgotten, as by a split that is not merged."""
    fewer = counts.clone()
    fewer[128:, 64:128] = False
    return attend(scores, fewer, values)


def too_sharp(scores: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    return attend(scores * 1.05, counts, values)


def without_a_head(scores: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    out = attend(scores, counts, values)
    out[:, 3] = 0
    return out


def listed(found: Tensor) -> list[dict[str, Any]]:
    """As an engine's results: a prompt for each of the last tokens, and what it continues with."""
    run: list[dict[str, Any]] = []
    for length, (values, tokens) in enumerate(zip(*found[FIRST:].topk(5), strict=True)):
        at = {str(token): value for token, value in zip(tokens.tolist(), values.tolist(), strict=True)}
        run.append({"length": length, "tokens": tokens[:1].tolist(), "logprobs": [at]})
    return run


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_the_tolerance_lies_between_rounding_and_mistakes(kit: Any, fp8: bool):
    weights, judge = {name: tensor.float() for name, tensor in kit.checkpoint.tensors(HEADS).items()}, kit.judge
    ids = torch.randint(2, 4096, (TOKENS,), generator=torch.Generator().manual_seed(5))
    right = listed(logprobs(weights, ids, fp8, attend))

    def judged(kernel: Attend, **mistakes: float) -> Any:
        return judge.agree(listed(logprobs(weights, ids, fp8, kernel, **mistakes)), right)

    other = judged(rounded_anew)
    assert 0 < other.difference < 0.8 * judge.TOLERANCE and other.within(judge.TOLERANCE), other
    for kernel in (without_the_newest, without_a_tile, too_sharp, without_a_head):
        assert not judged(kernel).within(judge.TOLERANCE), kernel.__name__
    assert not judged(attend, rope=0.0).within(judge.TOLERANCE)
