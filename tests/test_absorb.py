# SPDX-License-Identifier: Apache-2.0
"""Absorbed attention equals attention with expanded keys and values, and odd weights are refused or undone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_portable.absorb import AbsorbedProjections
from mla_portable.contracts import InvalidArgument

HEADS, RANK, NOPE, V, ROPE = 3, 16, 8, 6, 4
SIZES = {"num_heads": HEADS, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "v_head_dim": V}


def weight(dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HEADS * (NOPE + V), RANK, generator=generator, dtype=torch.float64).to(dtype)


def unabsorbed_attention(q, q_pe, latent, k_pe, kv_b_proj, scale):
    """Multi-head attention as the model defines it: every cached latent expanded to a key and a value per head."""
    expanded = (latent @ kv_b_proj.T).view(latent.shape[0], HEADS, NOPE + V)
    k_nope, v = expanded.split([NOPE, V], dim=-1)
    k = torch.cat([k_nope, k_pe[:, None].expand(-1, HEADS, -1)], dim=-1)
    scores = torch.einsum("thd,nhd->thn", torch.cat([q, q_pe], dim=-1), k) * scale
    return torch.einsum("thn,nhv->thv", scores.softmax(dim=-1), v)


def absorbed_attention(q, q_pe, latent, k_pe, projections, scale):
    """Multi-query attention over the latents themselves."""
    query = torch.cat([projections.absorb_query(q), q_pe], dim=-1)  # [T, H, RANK + ROPE]
    scores = torch.einsum("thd,nd->thn", query, torch.cat([latent, k_pe], dim=-1)) * scale
    return projections.up_project(torch.einsum("thn,nd->thd", scores.softmax(dim=-1), latent))


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(0, 5), cached=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_absorbed_equals_unabsorbed(tokens: int, cached: int, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    kv_b_proj = weight(seed=seed)
    inputs = draw(tokens, HEADS, NOPE), draw(tokens, HEADS, ROPE), draw(cached, RANK), draw(cached, ROPE)
    projections = AbsorbedProjections.from_kv_b_proj(kv_b_proj, **SIZES)
    expected = unabsorbed_attention(*inputs, kv_b_proj, 0.3)
    torch.testing.assert_close(absorbed_attention(*inputs, projections, 0.3), expected, rtol=1e-11, atol=1e-11)


def test_products_are_written_to_out():
    projections = AbsorbedProjections.from_kv_b_proj(weight(torch.bfloat16), **SIZES)
    q, latent = torch.randn(5, HEADS, NOPE).bfloat16(), torch.randn(5, HEADS, RANK).bfloat16()
    for product, x, width in ((projections.absorb_query, q, RANK), (projections.up_project, latent, V)):
        wide = torch.full((5, HEADS, width + 3), torch.nan, dtype=torch.bfloat16)
        out = wide[..., :width]
        assert product(x, out=out) is out
        assert torch.equal(out, product(x))
        assert wide[..., width:].isnan().all()


class QuantisedLinear(torch.nn.Module):
    """Eight-bit integers with a scale per output, as a quantised linear keeps its weight."""

    def __init__(self, dense: torch.Tensor):
        super().__init__()
        self.scale = dense.abs().amax(dim=1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((dense / self.scale).round().to(torch.int8), requires_grad=False)

    def dense(self) -> torch.Tensor:
        return self.weight.double() * self.scale

    def forward(self, x: torch.Tensor):
        return (x.double() @ self.dense().T).to(x.dtype), None  # (output, bias), as engines' linear layers return


class QuantMethod:
    """An engine's way to apply a layer whose own forward does more, here: fails."""

    def apply(self, layer: QuantisedLinear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert bias is None
        return (x.double() @ layer.dense().T).to(x.dtype)


def expect_weights(projections: AbsorbedProjections, dense: torch.Tensor) -> None:
    per_head = dense.view(HEADS, NOPE + V, RANK)
    assert torch.equal(projections.w_uk, per_head[:, :NOPE])
    assert torch.equal(projections.w_uv, per_head[:, NOPE:].mT)


def test_quantised_layer_is_undone_by_an_identity():
    layer = QuantisedLinear(weight())
    expect_weights(AbsorbedProjections.from_kv_b_proj(layer, **SIZES, dtype=torch.float64), layer.dense())


def test_quant_method_is_preferred_to_forward():
    layer = QuantisedLinear(weight())
    layer.quant_method = QuantMethod()
    layer.forward = lambda x: pytest.fail("forward was called")
    expect_weights(AbsorbedProjections.from_kv_b_proj(layer, **SIZES, dtype=torch.float64), layer.dense())


def test_plain_layer_gives_its_weight_unchanged():
    layer = torch.nn.Linear(RANK, HEADS * (NOPE + V), bias=False, dtype=torch.bfloat16)
    projections = AbsorbedProjections.from_kv_b_proj(layer, **SIZES)
    expect_weights(projections, layer.weight)
    assert not projections.w_uk.requires_grad


def test_any_callable_will_do():
    dense = weight()
    expect_weights(AbsorbedProjections.from_kv_b_proj(lambda x: x @ dense.T, **SIZES, dtype=torch.float64), dense)


def test_dtype_converts_the_weights():
    projections = AbsorbedProjections.from_kv_b_proj(weight(), **SIZES, dtype=torch.bfloat16)
    expect_weights(projections, weight(torch.bfloat16))


BAD = [
    (weight().T, {}, "layer_or_weight", "[16, 42]", "[42, 16]"),
    (weight(), {"num_heads": 4}, "layer_or_weight", "[42, 16]", "[56, 16]"),
    (weight(), {"v_head_dim": 0}, "v_head_dim", "0", "at least 1"),
    (weight(torch.float8_e4m3fn), {}, "layer_or_weight", "float8_e4m3fn", "16 bits or more"),
    (weight(torch.float32).to(torch.int8), {}, "layer_or_weight", "int8", "16 bits or more"),
    ("kv_b_proj", {}, "layer_or_weight", "str", "a tensor or a linear layer"),
    (torch.nn.Linear(RANK, 42, dtype=torch.float64), {}, "layer_or_weight", "bias", "without bias"),
    (lambda x: x[0], {}, "layer_or_weight", "shape [16]", "[16, outputs]"),
    (lambda x: "nothing", {}, "layer_or_weight", "str", "[16, outputs]"),
]


@pytest.mark.parametrize(("source", "sizes", "argument", "got", "expected"), BAD)
def test_weights_that_do_not_fit_are_refused(source, sizes, argument, got, expected):
    with pytest.raises(InvalidArgument) as caught:
        AbsorbedProjections.from_kv_b_proj(source, **{**SIZES, **sizes})
    assert caught.value.argument == argument
    assert got in caught.value.got
    assert expected in caught.value.expected


def test_transposed_weight_has_its_own_remedy():
    with pytest.raises(InvalidArgument) as caught:
        AbsorbedProjections.from_kv_b_proj(weight().T, **SIZES)
    assert "weight.T" in caught.value.remedy


@pytest.mark.parametrize(
    ("x", "out", "argument", "got"),
    [
        (torch.zeros(5, HEADS + 1, NOPE), None, "q_nope", "[5, 4, 8]"),
        (torch.zeros(5, HEADS, NOPE, dtype=torch.bfloat16), None, "q_nope", "bfloat16"),
        (torch.zeros(5, HEADS, NOPE, device="meta"), None, "q_nope", "meta"),
        (torch.zeros(5, HEADS, NOPE), torch.zeros(4, HEADS, RANK), "out", "[4, 3, 16]"),
        (torch.zeros(5, HEADS, NOPE), torch.zeros(5, HEADS, RANK, dtype=torch.bfloat16), "out", "bfloat16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(x, out, argument, got):
    projections = AbsorbedProjections.from_kv_b_proj(weight(torch.float32), **SIZES)
    with pytest.raises(InvalidArgument) as caught:
        projections.absorb_query(x, out=out)
    assert caught.value.argument == argument
    assert got in caught.value.got
