# SPDX-License-Identifier: Apache-2.0
"""A layout that a plugin adds: int8 codes with the rotary part beside them and a scale per token behind the rows of a block."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import mla_portable
from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.contracts import Batch, InvalidArgument, Request, Support
from mla_portable.layouts import BF16, LAYOUTS, CacheLayout, add_layout, base, layout_of
from mla_portable.planner import Planner
from mla_portable.primitives import SPARSE_DECODE

LATENT, ROPE, BLOCK, BLOCKS, HEADS, TOPK = 32, 8, 4, 12, 3, 6
ROWS = CacheLayout(
    name="tiny_bf16",
    dtype=torch.bfloat16,
    row_width=LATENT + ROPE,
    value_width=LATENT,
    rope_width=ROPE,
    rope_offset=2 * LATENT,
    alignment=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Apart(CacheLayout):
    def pack(self, latent: Tensor, rope: Tensor, scale_format: str | None = None) -> Tensor:
        scale = latent.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / 127
        codes = (latent.float() / scale).round().to(torch.int8)
        parts = (codes, rope.to(torch.bfloat16).contiguous(), scale)
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        codes, rope, scale = rows.split([LATENT, 2 * ROPE, 4], dim=-1)
        latent = codes.view(torch.int8).to(dtype) * scale.clone().view(torch.float32).to(dtype)
        return latent, rope.clone().view(torch.bfloat16).to(dtype)


CODES = Int8Apart(
    name="tiny_int8",
    dtype=torch.uint8,
    row_width=LATENT + 2 * ROPE + 4,
    value_width=LATENT,
    rope_width=ROPE,
    rope_offset=LATENT,
    scale_offset=LATENT + 2 * ROPE,
    scale_formats=("token",),
    apart_bytes=4,
    alignment=4,
    upconverted=ROWS,
    contents="32 int8 codes, 8 bfloat16 and a float32 scale",
)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two layouts, for this test alone."""
    before = dict(base._layouts), dict(base._by_rows)
    add_layout(ROWS)
    add_layout(CODES)
    yield
    for table, kept in zip((base._layouts, base._by_rows), before, strict=True):
        table.clear()
        table.update(kept)


def filled_cache(layout: CacheLayout, tokens: Tensor) -> Tensor:
    """[BLOCKS, BLOCK, row_width], written by the public function into blocks that lie apart."""
    storage = torch.full((BLOCKS, BLOCK + 2, layout.row_width), 0x7F, dtype=torch.uint8 if layout is CODES else layout.dtype)
    cache = storage[:, :BLOCK]
    latent, rope = tokens[:, :LATENT].contiguous(), tokens[:, LATENT:].contiguous()
    mla_portable.cache_write(
        latent, rope, cache, torch.arange(len(tokens)), scale_format="token" if layout is CODES else "pow2"
    )
    assert (storage[:, BLOCK:] == 0x7F).all()
    return cache


def attended(q: Tensor, keys: Tensor, indices: Tensor, scale: float) -> Tensor:
    """[T, H, LATENT] float64, one row at a time."""
    rows = []
    for query, chosen in zip(q.double(), indices, strict=True):
        keys_of_row = keys[chosen[chosen >= 0].long()]
        weights = (scale * query @ keys_of_row.T).softmax(dim=-1)
        rows.append(weights @ keys_of_row[:, :LATENT])
    return torch.stack(rows)


def draw() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(BLOCKS * BLOCK, LATENT + ROPE, generator=generator).bfloat16()
    q = torch.randn(5, HEADS, LATENT + ROPE, generator=generator).bfloat16()
    indices = torch.randint(-1, BLOCKS * BLOCK, (5, TOPK), generator=generator, dtype=torch.int32)
    indices[:, 0] = torch.arange(5)
    return tokens, q, indices


def test_scales_lie_behind_the_rows_of_their_block():
    tokens, _, _ = draw()
    cache = filled_cache(CODES, tokens)
    rows = CODES.pack(tokens[:, :LATENT], tokens[:, LATENT:])
    block = torch.cat([rows[:BLOCK, :-4].flatten(), rows[:BLOCK, -4:].flatten()])
    assert torch.equal(cache[0].flatten(), block)


@pytest.mark.parametrize("layout", [CODES, ROWS], ids=lambda layout: layout.name)
def test_the_reference_attends_to_it(layout: CacheLayout):
    tokens, q, indices = draw()
    cache = filled_cache(layout, tokens)
    keys = layout.unpack(layout.pack(tokens[:, :LATENT], tokens[:, LATENT:]), torch.float64)
    out, _ = mla_portable.sparse_decode(q[:, None], cache, indices[:, None], softmax_scale=0.2)
    torch.testing.assert_close(out[:, 0].double(), attended(q, keys, indices, 0.2), rtol=1e-2, atol=8e-3)


@pytest.mark.parametrize("route", ["direct", "split", "fused", "upconvert"])
def test_a_layer_serves_it_on_every_route(route: str):
    tokens, q, _ = draw()
    cache = filled_cache(CODES, tokens).contiguous()
    spec = AttentionSpec(
        num_heads=HEADS,
        softmax_scale=0.2,
        max_num_tokens=8,
        max_num_reqs=4,
        max_model_len=16,
        kv_layout=CODES.name,
        block_size=BLOCK,
        topk=TOPK,
        route=route,
    )
    layer = SparseMLAAttention(spec, device="cpu", registry=Registry(environ={}), backend="reference")
    table = torch.arange(BLOCKS, dtype=torch.int32).view(3, 4)
    starts, seq_lens = np.array([0, 1, 5], dtype=np.int32), np.array([9, 13], dtype=np.int32)
    plan = Planner(layer.planner_config()).plan(Batch(starts, seq_lens, table[:2]))
    positions = torch.stack([torch.randperm(9)[:TOPK] for _ in range(5)]).to(torch.int32)
    out, _ = layer.forward(q, cache, positions, plan)
    request = torch.tensor([0, 1, 1, 1, 1])[:, None]
    slots = table[request, positions // BLOCK] * BLOCK + positions % BLOCK
    keys = CODES.unpack(CODES.pack(tokens[:, :LATENT], tokens[:, LATENT:]), torch.float64)
    torch.testing.assert_close(out.double(), attended(q, keys, slots, 0.2), rtol=1e-2, atol=1.6e-2)


def test_a_layout_survives_a_pickle_and_is_what_declarations_name():
    assert pickle.loads(pickle.dumps(CODES)) == CODES
    assert layout_of(torch.empty(2, BLOCK, CODES.row_width, dtype=torch.uint8)) is CODES
    support = Support(source="a test", kv_layouts=(CODES.name,), scale_formats=("token",))
    device = mla_portable.get_registry().facts("cpu")
    request = Request(SPARSE_DECODE, device, kv_layout=CODES.name, scale_format="token")
    assert not list(support.shape_reasons(request))
    assert [reason.subject for reason in support.shape_reasons(request.but(kv_layout=BF16.name))] == ["kv_layout"]


def test_a_name_is_taken_once():
    assert add_layout(replace(CODES)) == CODES
    with pytest.raises(
        InvalidArgument, match=r"got another 'bf16', torch.bfloat16 rows of 40, expected a name that is not taken"
    ):
        add_layout(replace(ROWS, name="bf16"))
    assert LAYOUTS["bf16"] is BF16
    with pytest.raises(InvalidArgument, match="got str, expected a CacheLayout"):
        add_layout("bf16")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"value_width": 0}, "value_width"),
        ({"rope_width": -1}, "rope_width"),
        ({"rope_offset": 99}, "rope_offset"),
        ({"apart_bytes": 52}, "apart_bytes"),
        ({"alignment": 3}, "alignment"),
        ({"scale_offset": None}, "scale_offset"),
        ({"upconverted": BF16}, "upconverted"),
        ({"upconverted": None}, "upconverted"),
        ({"scale_formats": ()}, "row_width"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(changes: dict[str, object], field: str):
    with pytest.raises(InvalidArgument, match=f"CacheLayout 'tiny_int8': {field}: "):
        replace(CODES, **changes)
