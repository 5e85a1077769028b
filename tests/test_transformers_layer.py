# SPDX-License-Identifier: Apache-2.0
"""A whole layer (indexer, cache, attention, prompts) against transformers' own in float32, on the GPU kit's small checkpoints.

transformers' layer runs once over a text, and what it computes on the way is kept: queries, latents, the indexer's queries and
keys, what it chose, and attention's result. The primitives are given the same numbers in an engine's formats and steps:
prompts, chunks, single tokens beside another request's prompt. So what differs is what these formats round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mla_portable import AttentionSpec, Batch, Planner, SparseMLAAttention, indexer_cache_write, indexer_select
from mla_portable.attention.prompts import HeadDims, PromptAttention
from mla_portable.engines.transformers.attention import SERVED
from mla_portable.layouts import LAYOUTS
from mla_portable.planner.prompts import plan_prompts

TOKENS, TOPK, HEADS, BLOCK, BLOCKS = 150, 48, 8, 64, 7
CACHE_LIMIT: Final = {"bf16": 5.5e-3, "fp8_ds_mla": 4.6e-2}
"""Of attention over the cache, relative to the norm of transformers' result. BF16: 4.0e-3 to 4.8e-3, as absorbed queries, rows
and results have 8 bits. FP8: 3.5e-2 to 4.1e-2, as latents have 4."""
PROMPT_LIMIT: Final = 5.5e-3
"""Likewise of prompts over keys of each head in BF16: 4.1e-3 to 4.8e-3."""
LEAST_SHARED: Final = {"index_bf16": 0.995, "index_fp8": 0.97}
"""Of the positions that transformers chose in float32, the share that is chosen of rounded scores: 0.9988 and 0.982."""


@dataclass(frozen=True)
class Text:
    """What transformers computed, float32: of T tokens, H heads, I heads of the indexer.

    Attributes:
        q: [T, H, P + R], rope applied. latent: [T, 512]. rope: [T, 64]. up: [H, P + V, 512], of `kv_b_proj`.
        result: [T, H, V]. chosen: [T, K] int32, -1 where a token sees fewer. scale: factor on q.k. sink: [H] or None.
        index_q: [T, I, 128]. index_k: [T, 128]. weights: [T, I].
    """

    q: Tensor
    latent: Tensor
    rope: Tensor
    up: Tensor
    result: Tensor
    chosen: Tensor
    scale: float
    sink: Tensor | None
    index_q: Tensor
    index_k: Tensor
    weights: Tensor

    @property
    def nope(self) -> int:
        return self.q.shape[2] - self.rope.shape[1]


@dataclass
class Products(TorchFunctionMode):
    """The operands of the indexer's two products: q [1, T, I, 128] of scores, weights [1, T, 1, I] of their sum."""

    left: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.matmul and args[0].dim() == 4:
            self.left.append(args[0])
        return func(*args, **(kwargs or {}))


def config_and_weights(kit: Any, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Of a checkpoint of the kit; hy_v4's with transformers' names of parameters."""
    if name == "v32":
        return kit.checkpoint.v32_config(HEADS), kit.checkpoint.tensors(HEADS)
    if name == "glm":
        return kit.other_models.glm5_config(HEADS), kit.other_models.glm5_tensors(HEADS)
    named = {"learnable_sink_param": "sinks", "linear_gate": "gate_proj"}
    tensors = kit.other_models.hy_tensors(HEADS)
    for former, now in named.items():
        tensors = {key.replace(former, now): value for key, value in tensors.items()}
    return kit.other_models.hy_config(HEADS), tensors


def text_of(kit: Any, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Text:
    """The first layer of a checkpoint, over `TOKENS` random states."""
    config, tensors = config_and_weights(kit, name)
    (folder / "config.json").write_text(json.dumps(config | {"index_topk": TOPK, "torch_dtype": "float32"}))
    made = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    where, which = SERVED[["v32", "glm", "hy"].index(name)]
    modeling = import_module(where)
    layer = getattr(modeling, which)(made, 0).float().eval()
    prefix = "model.layers.0.self_attn."
    own = {key.removeprefix(prefix): value.float() for key, value in tensors.items() if key.startswith(prefix)}
    layer.load_state_dict(own)
    states = torch.randn(1, TOKENS, made.hidden_size, generator=torch.Generator().manual_seed(11))
    places = torch.arange(TOKENS).unsqueeze(0)
    angles = getattr(modeling, which.replace("Attention", "RotaryEmbedding"))(made)(states, places)
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1).view(1, 1, TOKENS, TOKENS)
    cache, products, attended, chosen = transformers.DynamicCache(config=made), Products(), list[Any](), list[Tensor]()
    eager: Callable[..., Any] = modeling.eager_attention_forward

    def kept(module: Any, query: Tensor, *given: Any, **named: Any) -> Any:
        attended.extend((query, eager(module, query, *given, **named)[0]))
        return attended[1], None

    def watched(module: Any, *given: Any, **named: Any) -> Tensor:
        with products:
            chosen.append(select(*given, **named))
        return chosen[0]

    select: Callable[..., Tensor] = layer.indexer.forward
    monkeypatch.setattr(modeling, "eager_attention_forward", kept)
    monkeypatch.setattr(layer.indexer, "forward", lambda *given, **named: watched(layer, *given, **named))
    with torch.no_grad():
        layer(states, position_embeddings=angles, attention_mask=mask, position_ids=places, cache=cache)
    index_q, weights = products.left
    seen = chosen[0][0].sort().values
    return Text(
        q=attended[0][0].transpose(0, 1),
        latent=cache.layers[0].keys[0, 0],
        rope=cache.layers[0].values[0, 0],
        up=own["kv_b_proj.weight"].unflatten(0, (HEADS, -1)),
        result=attended[1][0],
        chosen=torch.where(seen <= places[0].unsqueeze(1), seen, -1).to(torch.int32),
        scale=layer.scaling,
        sink=own.get("sinks"),
        index_q=index_q[0],
        index_k=cache.layers[0].indexer_keys[0],
        weights=weights[0, :, 0],
    )


@pytest.fixture(scope="module", params=["v32", "glm", "hy"])
def text(request: pytest.FixtureRequest, kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Text]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield text_of(kit, request.param, tmp_path_factory.mktemp(request.param), monkeypatch)


def apart(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


TABLE: Final = torch.tensor([[4, 1, 6], [2, 5, 0]], dtype=torch.int32)
"""Blocks of two requests, in no order."""


def slots(request: int, begin: int, end: int) -> Tensor:
    places = torch.arange(begin, end)
    return TABLE[request, places // BLOCK].long() * BLOCK + places % BLOCK


def step(*requests: tuple[int, int]) -> Batch:
    """Requests as (new tokens, all tokens), each from its row of the table on."""
    starts = np.concatenate([[0], np.cumsum([new for new, _ in requests])]).astype(np.int32)
    return Batch(starts, np.array([total for _, total in requests], dtype=np.int32), TABLE)


@pytest.mark.parametrize("layout", CACHE_LIMIT)
def test_cache_and_attention_are_transformers_but_for_rounding(text: Text, layout: str):
    spec = AttentionSpec(
        num_heads=HEADS,
        softmax_scale=text.scale,
        max_num_tokens=256,
        max_num_reqs=4,
        max_model_len=3 * BLOCK,
        kv_layout=layout,
        block_size=BLOCK,
        topk=TOPK,
        attn_sink=text.sink is not None,
    )
    layer = SparseMLAAttention(spec, device="cpu", backend="reference", attn_sink=text.sink)
    planner, row, nope = Planner(layer.planner_config()), LAYOUTS[layout], text.nope
    cache = torch.full((BLOCKS, BLOCK, row.row_bytes), 0xFF, dtype=torch.uint8).view(row.dtype)  # NaN until it is written
    q, latent, rope, up = (each.bfloat16() for each in (text.q, text.latent, text.rope, text.up))
    absorbed = torch.cat([torch.einsum("thp,hpc->thc", q[..., :nope], up[:, :nope]), q[..., nope:]], dim=-1)

    def run(*requests: tuple[int, int]) -> Tensor:
        """The new tokens of requests, which are all about the same text."""
        tokens = torch.cat([torch.arange(total - new, total) for new, total in requests])
        where = torch.cat([slots(number, total - new, total) for number, (new, total) in enumerate(requests)])
        layer.cache_write(latent[tokens], rope[tokens], cache, where)
        out, _ = layer.forward(absorbed[tokens], cache, text.chosen[tokens], planner.plan(step(*requests)))
        return torch.einsum("thc,hvc->thv", out, up[:, nope:])

    at_once = run((TOKENS, TOKENS))
    assert apart(at_once, text.result) < CACHE_LIMIT[layout]
    parts = [run((120, 120)), *(run((1, total)) for total in range(121, TOKENS))]
    mixed = run((1, TOKENS), (60, 60))  # a token of the first request, and the second's prompt
    got = torch.cat([*parts, mixed[:1]])
    assert apart(got, text.result) < CACHE_LIMIT[layout] and apart(mixed[1:], text.result[:60]) < CACHE_LIMIT[layout]
    assert apart(got, at_once.float()) < 1e-3, "a step differs from the whole prompt"


def test_prompts_over_keys_of_each_head_are_transformers_but_for_rounding(text: Text):
    want = text.result if text.sink is None else eager_without_sinks(text)
    spec = AttentionSpec(
        num_heads=HEADS,
        softmax_scale=text.scale,
        max_num_tokens=256,
        max_num_reqs=4,
        max_model_len=3 * BLOCK,
        kv_layout="bf16",
        block_size=BLOCK,
        topk=TOPK,
    )
    dims = HeadDims(text.nope, text.rope.shape[1], text.result.shape[2])
    prompts = PromptAttention(spec, dims, device="cpu", backend="reference")
    weight = text.up.flatten(0, 1).bfloat16()
    q, latent, rope = (each.bfloat16() for each in (text.q, text.latent, text.rope))
    cache = torch.full((BLOCKS, BLOCK, 576), torch.nan, dtype=torch.bfloat16)
    found = list[Tensor]()
    for begin, end in ((0, 90), (90, TOKENS)):  # the second with the first as its context
        new = slice(begin, end)
        lengths = (np.array([length], dtype=np.int32) for length in (end - begin, end))
        plan = plan_prompts(*lengths, TABLE, topk=TOPK, key_rows=prompts.key_rows, block_size=BLOCK)
        given = q[new], latent[new], rope[new], lambda rows: rows @ weight.T
        found.append(prompts(*given, cache if begin else None, text.chosen[new].contiguous(), plan))
        cache.view(-1, 576)[slots(0, begin, end)] = torch.cat([latent[new], rope[new]], dim=1)
    assert apart(torch.cat(found), want) < PROMPT_LIMIT


def eager_without_sinks(text: Text) -> Tensor:
    """Attention over keys of each head in float32, dense with a mask: of hy_v4, whose sinks such prompts do not have."""
    nope = text.nope
    keys = torch.cat([torch.einsum("sc,hpc->hsp", text.latent, text.up[:, :nope]), text.rope.expand(HEADS, -1, -1)], dim=-1)
    scores = torch.einsum("thd,hsd->hts", text.q, keys) * text.scale
    counts = torch.zeros(TOKENS, TOKENS + 1, dtype=torch.bool).scatter_(1, text.chosen.long() % (TOKENS + 1), True)[:, :-1]
    weights = scores.masked_fill_(~counts, -torch.inf).softmax(-1)
    return torch.einsum("hts,sc,hvc->thv", weights, text.latent, text.up[:, nope:])


@pytest.mark.parametrize("layout", LEAST_SHARED)
def test_the_indexer_chooses_what_transformers_does_but_for_rounded_scores(text: Text, kit: Any, layout: str):
    q, k, weights = text.index_q.bfloat16(), text.index_k.bfloat16(), text.weights.contiguous()
    scores = rounded_scores(text, kit.transformers_truth.through_e4m3 if layout == "index_fp8" else None)
    pages = torch.full((BLOCKS, BLOCK, LAYOUTS[layout].row_bytes), 0xFF, dtype=torch.uint8).view(LAYOUTS[layout].dtype)
    if layout == "index_fp8":
        scale = torch.exp2(torch.ceil(torch.log2(q.float().abs().amax(-1, keepdim=True) / 448)))
        q, weights = (q.float() / scale).to(torch.float8_e4m3fn), weights * scale.squeeze(-1)
    indexer_cache_write(k, pages, slots(0, 0, TOKENS))
    found = list[Tensor]()
    for begin, end in ((0, 90), (90, TOKENS - 1), (TOKENS - 1, TOKENS)):
        lengths = torch.tensor([0, end - begin], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        new = slice(begin, end)
        found.append(indexer_select(q[new], weights[new], pages, *lengths, TABLE[:1], topk=TOPK, backend="reference"))
    got = torch.cat(found).sort().values
    few, many = slice(0, TOPK), slice(TOPK, TOKENS)
    assert torch.equal(got[few], text.chosen[few].sort().values), "a token that sees few keys gets them all"
    assert torch.equal(got[many], scores[many].topk(TOPK).indices.sort().values.to(torch.int32)), "rounding explains all"
    shared = (got[many, :, None] == text.chosen[many, None, :]).any(-1).float().mean(-1)
    assert LEAST_SHARED[layout] <= shared.mean() < 1 and shared.min() > 0.85


def rounded_scores(text: Text, through_e4m3: Callable[..., Tensor] | None) -> Tensor:
    """[T, T] float64, of transformers' queries and keys as BF16 has them, or as e4m3 codes of these with scales."""
    q, k = text.index_q.bfloat16().float(), text.index_k.bfloat16().float()
    if through_e4m3 is not None:
        q, k = through_e4m3(q, -1, least=1e-10, pow2=True), through_e4m3(k, -1, least=1e-4, pow2=True)
    products = torch.einsum("tid,sd->tsi", q.double(), k.double()).relu_()
    return torch.einsum("tsi,ti->ts", products, text.weights.double()).masked_fill_(
        ~torch.ones(TOKENS, TOKENS).tril().bool(), -torch.inf
    )


def test_a_wrong_rope_or_sink_is_far_beyond_the_limits(text: Text):
    """What the limits must tell from rounding: keys with the rotary part of the token before, or no sink."""
    right = eager_without_sinks(text)
    if text.sink is not None:
        assert apart(right, text.result) > 5 * CACHE_LIMIT["fp8_ds_mla"]
        return
    assert apart(right, text.result) < 1e-5, "transformers' attention is the mask of its choice"
    shifted = replace(text, rope=text.rope.roll(1, 0))
    assert apart(eager_without_sinks(shifted), text.result) > 5 * CACHE_LIMIT["fp8_ds_mla"]
