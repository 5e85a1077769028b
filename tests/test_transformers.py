# SPDX-License-Identifier: Apache-2.0
"""`attn_implementation="mla_portable"` against transformers' own "eager": small models with the latents' real widths."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no kernel is looked for elsewhere

import pytest
import torch
import transformers
from torch import Tensor

from mla_portable import InvalidArgument, use
from mla_portable.engines.transformers import attention
from mla_portable.engines.transformers.latents import BLOCK_SIZE, latent_rows
from mla_portable.transformers import register

LIMIT: Final = 1e-3
"""Of logits with a spread of 1.6, all of it in float32: both sides round sums alone, by up to 5e-5."""
KERNEL_LIMIT: Final = 5e-3
"""Of attention in BF16, relative to the norm of the result in float32: 2.8e-3 to 3.5e-3, as absorbed queries and results have 8
bits. transformers' own in BF16, which rounds keys, values, scores and weights: 5.3e-3 to 8.1e-3."""
TOPK: Final = 24
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 48,
    "index_n_heads": 16,  # with few, all scores of a key are negative at times, and which zeros are chosen is chance
    "index_head_dim": 128,
    "index_topk": TOPK,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "v32": ("DeepseekV32Config", {"mlp_layer_types": ["dense", "dense"]}),
    "glm": (
        "GlmMoeDsaConfig",
        {"num_hidden_layers": 3, "mlp_layer_types": ["dense"] * 3, "indexer_types": ["full", "shared", "full"]},
    ),
    "hy": ("HYV4Config", {"mlp_layer_types": ["dense", "dense"], "indexer_types": ["full", "shared"]}),
}
"""Name -> configuration class and its own fields; layers share a selection in two of them, hy_v4 has sinks."""
PADDING: Final = {"left": slice(0, 17), "right": slice(43, 60)}
IDS: Final = torch.randint(3, 256, (2, 60), generator=torch.Generator().manual_seed(3))


def model_of(name: str, dtype: torch.dtype = torch.float32, implementation: str = "mla_portable", **fields: Any) -> Any:
    """A model with random weights, sinks included: the same for all implementations."""
    config, own = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = getattr(transformers, config)(**SIZES | own | fields)
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=implementation)
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "sinks"):
                torch.nn.init.normal_(layer.self_attn.sinks, 1.0, 2.0)
    return model.to(dtype).eval().requires_grad_(False)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


@dataclass
class Chunks:
    """What a model says of `IDS`, given in chunks of these sizes."""

    sizes: Sequence[int]
    mask: Tensor | None = None
    cache: Any = None

    def logits(self, model: Any, implementation: str) -> Tensor:
        model.set_attn_implementation(implementation)
        found, begin, cache = list[Tensor](), 0, self.cache() if self.cache else None
        for size in self.sizes:
            end = begin + size
            given: dict[str, Any] = {"attention_mask": None if self.mask is None else self.mask[:, :end], "use_cache": True}
            with torch.no_grad():
                result = model(IDS[:, begin:end], cache=cache, **given)
            cache, begin = result.cache, end
            found.append(result.logits)
        return torch.cat(found, dim=1)


def padded(side: str) -> Tensor:
    mask = torch.ones(IDS.shape, dtype=torch.long)
    mask[1, PADDING[side]] = 0
    return mask


WAYS: Final = {
    "prompt": Chunks([60]),
    "chunks": Chunks([20, 30, 1, 1, 8]),
    "left padding": Chunks([45, 13, 1, 1], padded("left")),
    "right padding": Chunks([60], padded("right")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_eager_s(name: str, way: str):
    model, chunks = model_of(name), WAYS[way]
    want, got = (chunks.logits(model, each) for each in ("eager", "mla_portable"))
    counted = torch.ones(IDS.shape, dtype=torch.bool) if chunks.mask is None else chunks.mask.bool()
    assert want.std() > 1 and (got - want)[counted].abs().max() < LIMIT


def test_a_preallocated_cache_is_served():
    model = model_of("glm")
    cache = partial(transformers.StaticCache, config=model.config, max_cache_len=70)
    want, got = Chunks([50, 1, 9]), Chunks([50, 1, 9], cache=cache)
    assert (got.logits(model, "mla_portable") - want.logits(model, "eager")).abs().max() < LIMIT


def test_generated_tokens_are_eager_s():
    model, texts = model_of("hy"), dict[str, Tensor]()
    for implementation in ("eager", "mla_portable"):
        model.set_attn_implementation(implementation)
        given = {"attention_mask": padded("left"), "max_new_tokens": 8, "do_sample": False}
        texts[implementation] = model.generate(IDS, **given)
    assert texts["eager"].shape == (2, 68) and torch.equal(texts["eager"], texts["mla_portable"])


class Call:
    """Arguments of the attention function, as a layer passes them: random numbers in BF16 and a random choice."""

    def __init__(self, module: Any, queries: int, tokens: int = 90, batch: int = 2) -> None:
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(queries))
        config = module.config
        self.module, self.kv_nope = module, draw((batch, 1, tokens, 512)).bfloat16()
        self.k_rot = draw((batch, 1, tokens, 64)).bfloat16()
        self.query = draw((batch, config.num_attention_heads, queries, module.qk_head_dim)).bfloat16()
        self.mask = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries).repeat(batch, 1, 1, 1)
        self.mask[0, ..., :9] = False
        self.mask[1, :, 0, 5:] = False  # fewer keys than are chosen
        scores = draw((batch, queries, tokens)).masked_fill_(~self.mask[:, 0], -torch.inf)
        self.indices = scores.topk(config.index_topk).indices.to(torch.int32)
        self.more: dict[str, Any] = {"s_aux": module.sinks} if hasattr(module, "sinks") else {}
        self.more |= {"scaling": module.scaling, "dropout": 0.0}

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """transformers' own attention over keys of each head, with these weights and numbers in `dtype`."""
        module = self.module.to(dtype)
        key, value = type(module).expand_kv.expands(module, self.kv_nope.to(dtype), self.k_rot.to(dtype))
        hidden = torch.ones_like(self.mask).scatter_(-1, self.indices.long().unsqueeze(1), False) | ~self.mask
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
        eager = import_module(type(module).__module__).eager_attention_forward
        return eager(module, self.query.to(dtype), key, value, bias, **self.more)[0]

    def ours(self, **changed: Any) -> Tensor:
        given = {"indices": self.indices, **self.more, **changed}
        rows = given.pop("key", latent_rows(self.kv_nope, self.k_rot))
        query, mask = given.pop("query", self.query), given.pop("attention_mask", self.mask)
        with torch.set_grad_enabled(query.requires_grad):
            return attention.mla_portable_attention(self.module, query, rows, self.kv_nope, mask, **given)[0]


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("queries", [1, 12], ids=["decode", "prompt"])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_attend_in_bf16_as_eager_in_float32(name: str, queries: int):
    call = Call(model_of(name, torch.bfloat16).model.layers[0].self_attn, queries)
    want, rounded = call.expanded(torch.float32), call.expanded(torch.bfloat16)
    call.module.bfloat16()
    got = call.ours()
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    assert relative(got, want) < KERNEL_LIMIT
    assert relative(got, want) < relative(rounded, want), "farther from float32 than transformers in BF16"


def test_portable_kernels_attend_as_the_reference():
    call = Call(model_of("hy", torch.bfloat16).model.layers[0].self_attn, 1)
    found = dict[str, Tensor]()
    for backend in ("reference", "triton"):  # a layer that was built before does not outlive the policy
        with use(backend):
            found[backend] = call.ours()
    assert relative(found["triton"], found["reference"].float()) < 4e-3 and not torch.equal(*found.values())


@pytest.mark.parametrize("name", ["v32", "hy"])
def test_a_query_that_sees_nothing_has_zeros(name: str):
    module = model_of(name, torch.bfloat16).model.layers[0].self_attn
    for dtype in (torch.float32, torch.bfloat16):
        call = Call(module.to(dtype), 12)
        call.mask[1, :, 3] = False
        call.query, call.kv_nope, call.k_rot = (each.to(dtype) for each in (call.query, call.kv_nope, call.k_rot))
        got = call.ours()
        assert not got[1, 3].any() and got[1, 4].any() and got.isfinite().all()


def test_many_queries_are_served_in_parts(monkeypatch: pytest.MonkeyPatch):
    call = Call(model_of("v32", torch.bfloat16).model.layers[0].self_attn, 12)
    with use("reference"):
        whole = call.ours()
        for rows in (12, 5):  # one sequence at a time, and parts of it
            monkeypatch.setattr(attention, "_ROWS", rows)
            assert torch.equal(call.ours(), whole)


class Adapted(torch.nn.Linear):
    """A projection that adds something of its own, as adapters and quantized ones do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5


def doubled(module: Any, given: Any, result: Tensor) -> Tensor:
    return result * 2


@pytest.mark.parametrize("change", ["subclass", "hook"])
def test_what_a_projection_computes_counts_not_its_weight(change: str):
    model = model_of("v32")
    for layer in model.model.layers:
        if change == "subclass":
            layer.self_attn.kv_b_proj.__class__ = Adapted
        else:
            layer.self_attn.kv_b_proj.register_forward_hook(doubled)
    plain = Chunks([60]).logits(model_of("v32"), "eager")
    want, got = (Chunks([60]).logits(model, each) for each in ("eager", "mla_portable"))
    assert (got - want).abs().max() < LIMIT and (want - plain).abs().max() > 0.1


def test_a_kind_of_layer_is_built_once(monkeypatch: pytest.MonkeyPatch):
    built: list[Any] = []

    def counted(spec: Any, **more: Any) -> Any:
        built.append(spec)
        return original(spec, **more)

    original: Callable[..., Any] = attention.SlotAttention
    monkeypatch.setattr(attention, "SlotAttention", counted)
    model = model_of("v32", torch.bfloat16)
    with use("reference.torch"):  # no layer of an earlier test, which had another policy
        Chunks([8, 1, 1, 40, 1]).logits(model, "mla_portable")
    assert [(spec.num_heads, spec.topk, spec.attn_sink) for spec in built] == [(4, TOPK, False)]


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("requires gradients, expected no gradients: it is forward only", lambda c: {"query": c.query.requires_grad_()}),
        ("dropout: got 0.1, expected 0", lambda c: {"dropout": 0.1}),
        ("output_attentions", lambda c: {"output_attentions": True}),
        ("sliding_window", lambda c: {"sliding_window": 128}),
        ("float32 queries, torch.bfloat16 latents", lambda c: {"query": c.query.float()}),
        ("float16", lambda c: {"query": c.query.half(), "key": latent_rows(c.kv_nope.half(), c.k_rot)}),
        ("a bias on scores is not served", lambda c: {"attention_mask": torch.zeros(c.mask.shape)}),
        ("attention_mask: got None", lambda c: {"attention_mask": None}),
        ("512 and 64, as kernels have it", lambda c: {"key": latent_rows(c.kv_nope, c.k_rot[..., :32])}),
        ("expected one of DeepseekV32Attention", lambda c: {"key": c.kv_nope.expand(-1, 4, -1, -1)}),
        ("Call mla_portable.transformers.register()", lambda c: {"indices": None}),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused(says: str, change: Callable[[Call], dict[str, Any]]):
    call = Call(model_of("v32", torch.bfloat16).model.layers[0].self_attn, 1)
    with pytest.raises(InvalidArgument, match='attn_implementation="mla_portable": ') as refused:
        call.ours(**change(call))
    assert says in str(refused.value)


def test_a_model_in_training_and_one_asked_for_weights_are_refused():
    model = model_of("glm").requires_grad_(True)
    with pytest.raises(InvalidArgument, match="forward only"):
        model(IDS)
    with torch.no_grad(), pytest.raises(InvalidArgument, match="output_attentions"):
        model(IDS, output_attentions=True)
    frozen = model_of("v32")
    frozen.model.layers[1].self_attn.kv_b_proj.requires_grad_(True)
    with pytest.raises(InvalidArgument, match="forward only"):
        frozen(IDS)
    other = model_of("glm", attention_dropout=0.1).train()
    with torch.no_grad(), pytest.raises(InvalidArgument, match="dropout"):
        other(IDS)


def test_other_implementations_get_keys_of_each_head():
    module = model_of("v32", implementation="sdpa").model.layers[0].self_attn
    call = Call(module, 1)
    latents = call.kv_nope.float(), call.k_rot.float()
    key, value = module.expand_kv(*latents)
    assert key.shape == (2, 4, 90, 96) and value.shape == (2, 4, 90, 48)
    module.config._attn_implementation = "mla_portable"
    key, value = module.expand_kv(*latents)
    assert key.shape == (2, 1, 2 * BLOCK_SIZE, 576) and value is latents[0]


def test_a_second_registration_changes_nothing():
    classes = [getattr(import_module(module), name) for module, name in attention.SERVED]
    before = [cls.expand_kv for cls in classes]
    register()
    assert [cls.expand_kv for cls in classes] == before and not hasattr(before[0].expands, "expands")


@pytest.fixture
def other_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    def install(version: str | None) -> None:
        module = None if version is None else ModuleType("transformers")
        if module is not None:
            vars(module)["__version__"] = version
        monkeypatch.setitem(sys.modules, "transformers", module)

    return install


@pytest.mark.parametrize(("version", "says"), [(None, "is not installed"), ("5.17.0", "5.17.0 is installed")])
def test_transformers_must_be_there_and_pass_indices(version: str | None, says: str, other_transformers: Callable[..., None]):
    other_transformers(version)
    with pytest.raises(ImportError, match=f"needs transformers 5.18 or later, .*{says}.*pip install"):
        register()
