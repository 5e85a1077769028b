# SPDX-License-Identifier: Apache-2.0
"""Layers of models that no engine serves yet, beside transformers' classes in float32: Mistral Large 4, A.X-K2, hy_v4_vl.

transformers runs a small model with the real widths of latents and heads. Each of its attention layers tells what it is given
and what it makes. This project's layers then serve the same queries in steps, prompts in chunks beside decodes, over caches
that they wrote, as an engine's adapter would.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import mla_portable
from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.contracts import Batch
from mla_portable.layouts import LAYOUTS
from mla_portable.planner import Planner

SEQUENCES, TOKENS, TOPK, BLOCK, HEADS = 2, 32, 12, 8, 4
STEPS: Final = [(20, 20), (1, 12), (1, 0), (10, 0)]
"""New tokens of each sequence: two prompts, a decode beside a chunk, a decode alone, a chunk alone."""
IDS: Final = torch.randint(3, 96, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(3))
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "index_topk": TOPK,
    "index_n_heads": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # larger ones make attention so sharp that one rounded score decides it
}
REGISTRY: Final = Registry(environ={})


@dataclass
class Layer:
    """What an attention layer of transformers was given and made, float32.

    Attributes:
        module: it. query: [B, H, S, P + R]. unscaled: the same before a scale of each position and head, where there is one.
        latent: [B, S, C], rope: [B, S, R], as they are cached. indices: [B, S, K]. out: [B, S, H, V], before a gate.
        index: queries [B, S, H, 128] and keys [B, S, 128] before rope, and weights of its indexer, by what made them.
        rotary: cosines and sines [B or 1, S, R], each number of pairs twice.
    """

    module: Any
    unscaled: Tensor | None = None
    query: Tensor = field(default_factory=torch.Tensor)
    latent: Tensor = field(default_factory=torch.Tensor)
    rope: Tensor = field(default_factory=torch.Tensor)
    indices: Tensor = field(default_factory=torch.Tensor)
    out: Tensor = field(default_factory=torch.Tensor)
    index: dict[str, Tensor] = field(default_factory=dict)
    rotary: tuple[Tensor, Tensor] = field(default_factory=tuple)


def recorded(model: Any, **given: Any) -> list[Layer]:
    """A run of the model over `IDS`, as its attention layers saw it."""
    layers = [Layer(each.self_attn) for each in model.layers]
    by_module = {id(layer.module): layer for layer in layers}
    hooks: list[Any] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float, **more: Any):
        layer = by_module[id(module)]
        seen = torch.zeros(mask.expand(query.shape[0], -1, -1, -1).shape, dtype=torch.bool)
        seen = seen.scatter(3, more["indices"].long().unsqueeze(1), True) & mask
        scores = (query @ key.mT * scaling).masked_fill(~seen, -torch.inf)
        sinks = more.get("s_aux")
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
        weights = scores.softmax(-1)[..., : key.shape[2]]
        layer.query, layer.indices, layer.out = query, more["indices"], (weights @ value).transpose(1, 2)
        return layer.out, None

    def expand(layer: Layer, expands: Any):
        def expand_kv(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
            layer.latent, layer.rope = latent[:, 0], rope[:, 0]
            return expands(latent, rope)

        return expand_kv

    for layer in layers:
        layer.module.expand_kv = expand(layer, layer.module.expand_kv)
        if hasattr(layer.module, "softmax_scaling"):

            def before(_: Any, arguments: tuple[Any, ...], layer: Layer = layer) -> None:
                layer.unscaled = arguments[0]

            hooks.append(layer.module.softmax_scaling.register_forward_pre_hook(before))
        for name in ("softmax_scaling", "k_norm", "weights_proj"):
            part = getattr(layer.module.indexer, name, None)
            if part is not None:
                hooks.append(part.register_forward_hook(lambda _, __, made, to=layer.index, name=name: to.update({name: made})))

    def turned(_: Any, __: Any, made: tuple[Tensor, Tensor]) -> None:
        for layer in layers:
            layer.rotary = made

    hooks.append(model.rotary_emb.register_forward_hook(turned))
    transformers.AttentionInterface.register("recorded", attend)
    AttentionMaskInterface.register("recorded", sdpa_mask)
    model.set_attn_implementation("recorded")
    with torch.no_grad():
        model(IDS, use_cache=False, **given)
    for hook in hooks:
        hook.remove()
    return layers


def model_of(kind: str, **fields: Any) -> Any:
    """A model of random weights, scales of queries and sinks among them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = getattr(transformers, f"{kind}Config")(**SIZES | fields)
        model = transformers.AutoModel.from_config(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith(("softmax_scaling.scale", "alpha")):
                parameter.uniform_(0, 0.5)
            elif name.endswith(("softmax_scaling.bias", "sinks")):
                parameter.normal_(1, 0.5)
    return model


class Served:
    """This project's layers of one row layout, for all layers of a model that have it."""

    def __init__(self, layout: str, scaling: float, *, sinks: bool = False) -> None:
        spec = AttentionSpec(
            num_heads=HEADS,
            softmax_scale=scaling,
            max_num_tokens=SEQUENCES * TOKENS,
            max_num_reqs=SEQUENCES,
            max_model_len=TOKENS,
            kv_layout=layout,
            block_size=BLOCK,
            topk=TOPK,
            attn_sink=sinks,
        )
        self.attention = SparseMLAAttention(spec, device="cpu", registry=REGISTRY, backend="reference")
        self.planner = Planner(self.attention.planner_config())
        self.row = LAYOUTS[layout]


@dataclass
class Step:
    """New tokens of a step: the sequence and position of each."""

    sequence: Tensor
    position: Tensor
    batch: Batch
    slots: Tensor


def steps() -> list[Step]:
    per_sequence = TOKENS // BLOCK
    table = torch.randperm(SEQUENCES * per_sequence, generator=torch.Generator().manual_seed(8)).to(torch.int32)
    table = table.view(SEQUENCES, per_sequence)
    made, done = list[Step](), [0] * SEQUENCES
    for counts in STEPS:
        sequence = torch.cat([torch.full((count,), at) for at, count in enumerate(counts)])
        position = torch.cat([begin + torch.arange(count) for begin, count in zip(done, counts, strict=True)])
        done = [begin + count for begin, count in zip(done, counts, strict=True)]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        slots = table[sequence, position // BLOCK].long() * BLOCK + position % BLOCK
        made.append(Step(sequence, position, Batch(starts, np.array(done, dtype=np.int32), table), slots))
    assert done == [TOKENS] * SEQUENCES
    return made


def new_cache(width: int) -> Tensor:
    return torch.full((SEQUENCES * TOKENS // BLOCK, BLOCK, width), torch.nan, dtype=torch.bfloat16)


def chosen(indices: Tensor, position: Tensor) -> Tensor:
    """Positions that a token sees among those that transformers' indexer lists: it lists masked ones where there are few."""
    return indices.where(indices <= position.unsqueeze(1), -1).to(torch.int32)


def served(layers: list[Layer], kinds: list[Served], sources: list[int]) -> list[Tensor]:
    """[B, S, H, V] of each layer, in steps; `kinds` serve it, and it reads the cache of the layer in `sources`."""
    caches = {at: new_cache(kinds[at].row.row_width) for at in set(sources)}
    results = [torch.zeros_like(layer.out) for layer in layers]
    for step in steps():
        at = step.sequence, step.position
        plans = {kind: kind.planner.plan(step.batch) for kind in set(kinds)}
        lists: dict[int, Tensor] = {}
        for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            if number in caches:
                rows = layer.latent[at].bfloat16(), layer.rope[at].bfloat16()
                mla_portable.cache_write(*rows, caches[number], step.slots, backend="reference")
            owner = max(each for each in range(number + 1) if layers[each].module.indexer is not None)
            if owner not in lists:
                lists[owner] = chosen(layers[owner].indices[at], step.position)
            up = layer.module.kv_b_proj.weight.unflatten(0, (HEADS, -1))  # [H, P + V, C]
            nope = layer.query.shape[3] - kind.row.rope_width
            query = (layer.query if layer.unscaled is None else layer.unscaled).transpose(1, 2)[at]  # [T, H, P + R]
            q = torch.cat([torch.einsum("thp,hpc->thc", query[..., :nope], up[:, :nope]), query[..., nope:]], dim=-1)
            if layer.unscaled is not None:  # a factor of token and head: after the product with W_UK as well as before
                scaling = layer.module.softmax_scaling
                q = q * (torch.log(step.position + 1.0)[:, None] * scaling.scale + scaling.bias).unsqueeze(-1)
            options = {"same_selection": owner != number}
            if kind.attention.spec.attn_sink:
                options["attn_sink"] = layer.module.sinks.float()
            latents, _ = kind.attention.forward(q.bfloat16(), caches[sources[number]], lists[owner], plans[kind], **options)
            results[number][at] = torch.einsum("thc,hvc->thv", latents.float(), up[:, nope:])
    return results


def assert_near(results: list[Tensor], layers: list[Layer]) -> None:
    """As far as bfloat16 rows and queries are from float32: all of a layer, and the worst token and head."""
    for number, (result, layer) in enumerate(zip(results, layers, strict=True)):
        error = result - layer.out
        whole = error.norm() / layer.out.norm()
        worst = (error.norm(dim=-1) / layer.out.norm(dim=-1)).max()
        assert whole < 7e-3 and worst < 5e-2, (number, float(whole), float(worst))


def interleaved(numbers: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[B, S, H, 128] whose first 64 numbers are rotated as 32 neighbouring pairs; the pairs' first numbers come first then."""
    cos, sin = (each[..., :32].unsqueeze(2) for each in rotary)
    one, two, rest = numbers[..., 0:64:2], numbers[..., 1:64:2], numbers[..., 64:]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], dim=-1)


@pytest.fixture(scope="module")
def mistral() -> list[Layer]:
    """Layers 1, 4 and 5 read another's cache, 3 and 5 have no rope, 1 and 4 take the selection of the layer before them."""
    own = {
        "num_hidden_layers": 6,
        "no_rope_layers": [1, 1, 1, 0, 1, 0],
        "kv_source_layers": [0, 0, 2, 3, 2, 3],
        "indexer_types": ["full", "shared", "full", "full", "shared", "full"],
        "mlp_layer_types": ["dense"] * 6,
    }
    return recorded(model_of("MistralLarge4Text", **own))


def test_layers_of_mistral_large_4(mistral: list[Layer]):
    config = mistral[0].module.config
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim) == (512, 64, 64, 128)
    scaling = {layer.module.scaling for layer in mistral}
    assert scaling == {128**-0.5}  # P + R is 128 with rope and without
    with_rope, without = Served("bf16", *scaling), Served("bf16_nope", *scaling)
    kinds = [with_rope if layer.rope.shape[-1] else without for layer in mistral]
    assert [kind is with_rope for kind in kinds] == [bool(each) for each in config.no_rope_layers]
    for number, source in enumerate(
        config.kv_source_layers
    ):  # what a layer without a cache reads is the other's, rope included
        assert torch.equal(mistral[number].latent, mistral[source].latent)
        assert torch.equal(mistral[number].rope, mistral[source].rope)
    assert_near(served(mistral, kinds, list(config.kv_source_layers)), mistral)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_the_indexer_of_mistral_large_4(mistral: list[Layer], number: int):
    """Queries are scaled by token and head before they are rounded; layer 3 has no rope, layer 5 no cache of latents."""
    layer = mistral[number]
    q, k, weights = (layer.index[name] for name in ("softmax_scaling", "k_norm", "weights_proj"))
    if layer.module.use_rope:
        q, k = interleaved(q, layer.rotary), interleaved(k.unsqueeze(2), layer.rotary).squeeze(2)
    index_cache, equal = new_cache(128), list[float]()
    for step in steps():
        at = step.sequence, step.position
        mla_portable.indexer_cache_write(k[at].bfloat16(), index_cache, step.slots, backend="reference")
        starts, seq_lens = torch.from_numpy(step.batch.query_start_loc), torch.from_numpy(step.batch.seq_lens)
        pages = index_cache, starts, seq_lens, step.batch.block_table
        found = mla_portable.indexer_select(q[at].bfloat16(), weights[at].float(), *pages, topk=TOPK, backend="reference")
        for own, wanted in zip(found.tolist(), chosen(layer.indices[at], step.position).tolist(), strict=True):
            ours, theirs = set(own) - {-1}, set(wanted) - {-1}
            assert len(ours) == len(theirs)
            equal.append(len(ours & theirs) / len(theirs))
    assert np.mean(equal) > 0.98, np.mean(equal)


def test_layers_of_a_x_k2():
    layers = recorded(model_of("AXK2", num_hidden_layers=2, q_lora_rank=32, mlp_layer_types=["dense"] * 2))
    config = layers[0].module.config
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim) == (128, 32, 64, 64)
    kind = Served("bf16_128_32", 96**-0.5)
    assert {layer.module.scaling for layer in layers} == {96**-0.5}
    assert_near(served(layers, [kind] * 2, [0, 1]), layers)


def test_layers_of_hy_v4_vl():
    """Positions in three axes, as an image has them, change what is rotated, and nothing else that attention is given."""
    fields = {"num_hidden_layers": 2, "q_lora_rank": 32, "mlp_layer_types": ["dense"] * 2, "indexer_types": ["full", "shared"]}
    position = torch.arange(TOKENS).expand(3, SEQUENCES, TOKENS).clone()
    position[1, :, 6:22], position[2, :, 6:22] = 6 + torch.arange(16) // 4, 6 + torch.arange(16) % 4
    layers = recorded(model_of("HYV4VLText", **fields), position_ids=position)
    plain = recorded(model_of("HYV4VLText", **fields))
    assert not torch.allclose(layers[0].rope, plain[0].rope, atol=1e-2)
    config = layers[0].module.config
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim) == (512, 64, 192, 256)
    kind = Served("bf16", layers[0].module.scaling, sinks=True)
    assert_near(served(layers, [kind] * 2, [0, 1]), layers)
