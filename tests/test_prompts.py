# SPDX-License-Identifier: Apache-2.0
"""Prompts over keys of each head, against an oracle that goes token by token and against the layer over latent rows."""

from __future__ import annotations

import logging
import math
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_steps import BLOCK, BLOCKS, HEADS, REFERENCE, SPEC, TOPK, written_cache
from commands import document, invoke
from machines import A100, H200, MI300X, RTX_4090
from torch import Tensor

from mla_portable.attention import AttentionSpec, HeadDims, PromptAttention, SparseMLAAttention
from mla_portable.bench.prompts import STEPS, StepTimes, fit
from mla_portable.choose import Registry, get_registry, use
from mla_portable.choose.plugin_sources import installed_plugins
from mla_portable.choose.plugins import load_plugins
from mla_portable.contracts import (
    Batch,
    ContextShare,
    DeviceFacts,
    Implementation,
    InvalidArgument,
    PlanMismatch,
    Registrar,
    Request,
    Support,
    UnsupportedRequest,
    hookimpl,
)
from mla_portable.engines.common.prompt_route import prompt_attention, refusals
from mla_portable.layouts import LAYOUTS
from mla_portable.planner import Planner
from mla_portable.planner.prompts import PromptPlan, plan_prompts
from mla_portable.primitives import CONCAT_MLA_K, MASKED_PREFILL
from mla_portable.times.files import parse_times, times_text
from mla_portable.times.prompts import Counts, PromptRecord, PromptTimes, recorded_prompts
from mla_portable.times.records import Measurement

DIMS = HeadDims(nope=16, rope=64, value=24)
NOPE = HeadDims(nope=32, rope=0, value=24)
CPU = torch.device("cpu")
BACKEND = "reference"
"""Not Triton's interpreter, which would be tried first."""

# (new tokens, sequence length) of each request
BATCHES: dict[str, list[tuple[int, int]]] = {
    "short": [(7, 7), (1, 1), (12, 12)],
    "long": [(17, 17), (3, 3), (30, 30)],
    "short with context": [(4, 11), (3, 3), (2, 12)],
    "long with context": [(7, 40), (9, 9), (5, 31), (13, 48)],
    "empty requests between": [(0, 7), (9, 20), (0, 0), (6, 40), (0, 48)],
    "one token": [(1, 40)],
    "one key more than are selected": [(TOPK + 1, TOPK + 1), (2, TOPK + 1), (3, 9)],
    "nothing": [],
    "only empty requests": [(0, 5), (0, 9)],
}


@dataclass
class Prompts:
    """A step's inputs. latent, rope: of the new tokens."""

    plan: PromptPlan
    batch: Batch
    q: Tensor
    latent: Tensor
    rope: Tensor
    kv_cache: Tensor
    topk: Tensor
    weight: Tensor
    dims: HeadDims = DIMS

    def project(self, latent: Tensor) -> Tensor:
        return torch.nn.functional.linear(latent, self.weight)

    def run(self, layer: PromptAttention, **more: Tensor) -> Tensor:
        return layer(self.q, self.latent, self.rope, self.project, self.kv_cache, self.topk, self.plan, **more)


def make_prompts(name: str, layout: str = "fp8_ds_mla", *, key_rows: int = 64, seed: int = 0, dims: HeadDims = DIMS) -> Prompts:
    """The cache has the context alone: the rows of new tokens are NaN there."""
    requests, row = BATCHES[name], LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    query_lens, seq_lens = (np.array([each[i] for each in requests], dtype=np.int32) for i in (0, 1))
    table = torch.full((len(requests), 48 // BLOCK), -1, dtype=torch.int32)
    blocks = torch.randperm(BLOCKS, generator=generator).to(torch.int32)
    for request, (_, total) in enumerate(requests):
        count = -(-total // BLOCK)
        table[request, :count], blocks = blocks[:count], blocks[count:]
    cache = written_cache(layout, table, (seq_lens - query_lens).tolist(), generator)
    tokens = int(query_lens.sum())
    topk = torch.full((tokens + 3, TOPK), -1, dtype=torch.int32)
    row_of = 0
    for query, total in requests:
        for position in range(total - query, total):
            chosen = torch.randperm(position + 1, generator=generator)[:TOPK]
            where = torch.randperm(TOPK, generator=generator)[: len(chosen)]
            topk[row_of, where] = chosen.to(torch.int32)
            row_of += 1
    topk[tokens:] = 2**30
    plan = plan_prompts(query_lens, seq_lens, table, topk=TOPK, key_rows=max(key_rows, tokens), block_size=BLOCK)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weight = (torch.randn(HEADS * (dims.nope + dims.value), 512, generator=generator) / 512**0.5).bfloat16()
    batch = Batch(starts, seq_lens, table)
    new = normal(tokens, HEADS, dims.query), normal(tokens, row.value_width), normal(tokens, dims.rope)
    return Prompts(plan, batch, *new, cache, topk, weight, dims)


def expected(step: Prompts, layout: str, *, masked: bool) -> Tensor:
    """[T, H, V] float64, token by token over the keys that it selects, or all before it."""
    row, dims = LAYOUTS[layout], step.dims
    out = torch.zeros((*step.q.shape[:2], dims.value), dtype=torch.float64)
    starts = step.batch.query_start_loc.tolist()
    for request, total in enumerate(step.batch.seq_lens.tolist()):
        new = slice(starts[request], starts[request + 1])
        before = total - (new.stop - new.start)
        position = torch.arange(before)
        slots = step.batch.block_table[request, position // BLOCK].long(), position % BLOCK
        latent, rope = row.unpack(step.kv_cache[slots]).split([row.value_width, row.rope_width], dim=-1)
        rope = rope[:, : dims.rope]
        latent, rope = torch.cat((latent.bfloat16(), step.latent[new])), torch.cat((rope.bfloat16(), step.rope[new]))
        projected = step.project(latent).double().unflatten(1, (HEADS, dims.nope + dims.value))
        keys = torch.cat((projected[..., : dims.nope], rope.double()[:, None].expand(-1, HEADS, -1)), dim=-1)
        for token in range(new.start, new.stop):
            seen = torch.arange(before + token - new.start + 1)
            if masked:
                seen = step.topk[token][step.topk[token] >= 0].long()
            scores = SPEC.softmax_scale * torch.einsum("hd,khd->hk", step.q[token].double(), keys[seen])
            out[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), projected[seen][..., dims.nope :])
    return out


def make_layer(
    layout: str = "fp8_ds_mla", registry: Registry = REFERENCE, rows: int = 64, dims: HeadDims = DIMS, **spec: object
) -> PromptAttention:
    spec = {"kv_layout": layout, "scale_format": "pow2" if layout == "fp8_ds_mla" else None, **spec}
    return PromptAttention(replace(SPEC, **spec), dims, device=CPU, registry=registry, key_rows=rows, backend=BACKEND)  # pyright: ignore


def assert_close(out: Tensor, wanted: Tensor) -> None:
    size = wanted.abs().amax(dim=-1, keepdim=True)
    assert ((out.double() - wanted).abs() <= 2**-7 * wanted.abs() + 2**-7 * size).all()


@pytest.mark.parametrize("layout, nope", [("bf16_nope", False), ("fp8_ds_mla", True)])
@pytest.mark.parametrize("name", ["short with context", "long with context", "nothing"])
def test_heads_without_rope(name: str, layout: str, nope: bool):
    """Keys are what the up-projection makes: nothing is joined, and what a quantised row has as its rotary part is not read."""
    step = make_prompts(name, layout, dims=NOPE)
    layer = make_layer(layout, dims=NOPE, nope=nope)
    assert "concat" not in layer.decisions
    assert_close(step.run(layer), expected(step, layout, masked=step.plan.masked))


def test_rope_of_the_heads_is_that_of_the_spec():
    with pytest.raises(InvalidArgument, match=r"head_dims.rope: got 64, expected 0, as queries of the spec have"):
        make_layer("fp8_ds_mla", nope=True)
    with pytest.raises(InvalidArgument, match=r"head_dims.rope: got 0, expected 64, as queries of the spec have"):
        make_layer("fp8_ds_mla", dims=NOPE)


@pytest.mark.parametrize("key_rows", [128, 64, 34], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("name", BATCHES)
def test_prompts_are_what_the_oracle_says(name: str, layout: str, key_rows: int):
    step = make_prompts(name, layout, key_rows=key_rows)
    out = torch.full((len(step.q), HEADS, DIMS.value), math.nan, dtype=torch.bfloat16)
    assert step.run(make_layer(layout), out=out) is out
    assert step.plan.masked == any(total > TOPK for _, total in BATCHES[name])
    assert_close(out, expected(step, layout, masked=step.plan.masked))


def test_parts_are_bounded_and_most_steps_have_one():
    plan = make_prompts("long with context", key_rows=50).plan  # 34 new tokens; contexts of 33, 0, 26 and 35 rows
    assert [part.num_context for part in plan.parts] == [50, 28, 16]
    assert [part.num_keys for part in plan.parts] == [50, 28, 50]
    assert [part.max_key_len for part in plan.parts] == [33, 19, 29]  # 16 rows of the last context and 13 tokens
    assert [part.new_rows is None for part in plan.parts] == [True, True, False]
    (all_of_it,) = make_prompts("long with context", key_rows=128).plan.parts
    assert (all_of_it.num_context, all_of_it.num_keys, all_of_it.first_positions) == (94, 128, None)
    (new,) = make_prompts("long", key_rows=50).plan.parts
    assert (new.num_context, new.num_keys, new.new_rows) == (0, 50, None)


def test_a_token_that_selects_nothing_is_zero():
    step = make_prompts("long with context")
    step.topk[3] = -1
    out = step.run(make_layer())
    assert torch.count_nonzero(out[3]) == 0 and torch.count_nonzero(out[2]) > 0


def test_it_agrees_with_the_layer_over_latent_rows():
    """The same selection, the query times W_UK before, the output times W_UV after. The cache has all tokens there."""
    step, layout = make_prompts("long with context", "bf16"), LAYOUTS["bf16"]
    spec = replace(SPEC, kv_layout="bf16", scale_format=None)
    starts = step.batch.query_start_loc
    for request, total in enumerate(step.batch.seq_lens.tolist()):
        new = slice(int(starts[request]), int(starts[request + 1]))
        position = torch.arange(total - (new.stop - new.start), total)
        rows = layout.pack(step.latent[new], step.rope[new])
        step.kv_cache[step.batch.block_table[request, position // BLOCK].long(), position % BLOCK] = rows
    latent_layer = SparseMLAAttention(spec, device=CPU, registry=REFERENCE, backend=BACKEND)
    by_head = step.weight.view(HEADS, DIMS.nope + DIMS.value, 512).float()
    absorbed = torch.einsum("thp,hpl->thl", step.q[..., : DIMS.nope].float(), by_head[:, : DIMS.nope]).bfloat16()
    plan = Planner(latent_layer.planner_config()).plan(step.batch)
    query = (absorbed, step.q[..., DIMS.nope :].contiguous())
    latent_out, _ = latent_layer(query, step.kv_cache, step.topk[: SPEC.max_num_tokens], plan)
    wanted = torch.einsum("thl,hvl->thv", latent_out.double(), by_head[:, DIMS.nope :].double())
    assert_close(step.run(make_layer("bf16")), wanted)


# refusals


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"share": ContextShare(2, 0)}, "one of 2 ranks"),
        ({"attn_sink": True}, "has no sinks"),
        ({"batch_invariant": True}, "depends on the batch"),
        ({"kv_layout": "bf16_nope", "scale_format": None}, "expected 0"),
    ],
)
def test_a_spec_that_is_not_served_is_refused(spec: dict[str, object], text: str):
    with pytest.raises(InvalidArgument, match=text):
        make_layer("bf16", **spec)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": (0, HEADS, DIMS.query)}, "q has 0 tokens, the plan was made for 34"),
        ({"latent": (34, 256)}, "kv_c"),
        ({"rope": (34, 32)}, "k_pe"),
        ({"kv_cache": (BLOCKS, BLOCK, 576)}, "kv_cache"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_runs(change: dict[str, tuple[int, ...]], text: str):
    step, ran = make_prompts("long with context"), list[int]()
    for name, shape in change.items():
        setattr(step, name, torch.zeros(shape, dtype=torch.bfloat16))
    step.project = lambda latent: ran.append(1)  # type: ignore[method-assign, assignment]
    with pytest.raises((InvalidArgument, PlanMismatch), match=text):
        step.run(make_layer())
    assert not ran


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "text"),
    [
        ([3], [2], "seq_lens of at least the query_lens"),
        ([1, 5], [3, 2], "seq_lens less by up to 3"),
        ([1, 5], [-(2**31), 4], "seq_lens less by up to 2147483649"),
        ([3], [3, 4], "2 requests"),
        ([-1], [4], "at least 0"),
        ([1, 5], [3, 2], "seq_lens less by up to 3"),
        ([1, 1], [2**31 - 1, 1], "at most 2147483647 tokens"),
        ([60, 5], [60, 5], "at least 65, the step's new tokens"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(query_lens: list[int], seq_lens: list[int], text: str):
    table = torch.zeros((4, 4), dtype=torch.int32)
    lengths = (np.array(values, dtype=np.int32) for values in (query_lens, seq_lens))
    with pytest.raises(InvalidArgument, match=text):
        plan_prompts(*lengths, table, topk=TOPK, key_rows=64)


def test_a_block_table_that_does_not_hold_the_context_is_refused_before_anything_runs():
    """The planner names the request, where it knows the size of a block; the layer does in any case."""
    step, ran = make_prompts("long with context"), list[int]()
    query_lens, seq_lens = np.diff(step.batch.query_start_loc), step.batch.seq_lens  # contexts of 33, 0, 26 and 35 tokens
    narrow, sizes = step.batch.block_table[:, :4], {"topk": TOPK, "key_rows": 64}
    wanted = "seq_lens - query_lens: got 33 for request 0, expected at most 32, the tokens that a row of the block table holds"
    with pytest.raises(InvalidArgument, match=f"^plan_prompts: {wanted}"):
        plan_prompts(query_lens, seq_lens, narrow, **sizes, block_size=BLOCK)
    with pytest.raises(InvalidArgument, match="block_size"):
        plan_prompts(query_lens, seq_lens, narrow, **sizes, block_size=0)
    step.plan = plan_prompts(query_lens, seq_lens, narrow, **sizes)
    step.project = lambda latent: ran.append(1)  # type: ignore[method-assign, assignment]
    with pytest.raises(InvalidArgument, match="plan: got a context of 35 tokens, expected at most 32"):
        step.run(make_layer())
    assert not ran
    enough = step.batch.block_table[:, :5]  # new tokens are given beside the cache
    plan_prompts(query_lens, seq_lens, enough, **sizes, block_size=BLOCK)


def test_a_token_that_sees_as_many_keys_as_it_selects_selects_all():
    table, sizes = torch.zeros((1, 1), dtype=torch.int32), {"topk": 3, "key_rows": 8}
    for total, masked in ((3, False), (4, True)):
        lens = np.array([total], dtype=np.int32)
        assert plan_prompts(lens, lens, table, **sizes).masked is masked


@pytest.mark.parametrize("name", ["long with context", "long"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda given: None, "got None, expected a tensor"),
        (lambda given: (given, None), r"got a tuple, .* first element"),
        (lambda given: given[1:], "got shape"),
        (lambda given: given[:, 1:], "got shape"),
        (lambda given: given.unflatten(1, (HEADS, -1)), "got shape"),
        (lambda given: given.half(), "got torch.float16"),
        (lambda given: given.float(), "got torch.float32"),
        (lambda given: given.int(), "got torch.int32"),
        (lambda given: given.to("meta"), "meta"),
        (lambda given: given.T.contiguous().T, "stride 1"),
    ],
    ids=["None", "tuple", "rows", "columns", "heads", "float16", "float32", "int32", "meta", "transposed"],
)
def test_what_project_returns_is_checked(change: Any, text: str, name: str):
    step, linear = make_prompts(name), Prompts.project
    step.project = lambda latent: change(linear(step, latent))  # type: ignore[method-assign]
    out = torch.full((len(step.q), HEADS, DIMS.value), 3.0, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match=rf"^PromptAttention.forward: project\(rows\): .*{text}"):
        step.run(make_layer(), out=out)
    assert (out == 3).all()


@pytest.mark.parametrize("name", ["short", "short with context", "long", "long with context"])
def test_what_a_plan_does_not_read_may_be_none(name: str):
    step = make_prompts(name)
    wanted, plan = step.run(make_layer()), step.plan
    for argument, read in (("topk", plan.masked), ("kv_cache", plan.max_context_len > 0)):
        for value in (None, [1]):
            given = replace(step, **{argument: value})
            if read or (value is not None and argument == "kv_cache"):
                with pytest.raises(InvalidArgument, match="topk_indices" if argument == "topk" else "kv_cache"):
                    given.run(make_layer(), out=torch.empty_like(wanted))
            else:
                assert torch.equal(given.run(make_layer(), out=torch.empty_like(wanted)), wanted)


@pytest.mark.parametrize("argument", ["q", "kv_c", "k_pe", "kv_cache", "topk_indices"])
def test_out_overlaps_no_input(argument: str):
    step, ran = make_prompts("long with context"), list[int]()
    step.project = lambda latent: ran.append(1)  # type: ignore[method-assign, assignment]
    numbers = len(step.q) * HEADS * DIMS.value
    name = {"kv_c": "latent", "k_pe": "rope", "topk_indices": "topk"}.get(argument, argument)
    given = getattr(step, name)
    memory = torch.zeros(max(numbers, given.nbytes // 2 + 1), dtype=torch.bfloat16)
    over = memory[: given.nbytes // 2].view(given.dtype).view(given.shape).copy_(given)
    setattr(step, name, over)
    with pytest.raises(InvalidArgument, match=f"out: got memory that overlaps {argument}"):
        step.run(make_layer(), out=memory[:numbers].view(len(step.q), HEADS, DIMS.value))
    assert not ran


def test_a_cache_of_another_size_of_blocks_is_refused():
    step = make_prompts("long with context")
    step.kv_cache = step.kv_cache.view(BLOCKS // 2, 2 * BLOCK, -1)
    with pytest.raises(
        InvalidArgument, match=f"kv_cache: got block_size {2 * BLOCK}, expected fp8_ds_mla, block_size {BLOCK}, as in"
    ):
        step.run(make_layer())


@pytest.mark.parametrize("name", ["query_lens", "seq_lens"])
def test_lengths_with_a_mask_are_refused(name: str):
    lengths: dict[str, Any] = {each: np.array([1, 1], dtype=np.int32) for each in ("query_lens", "seq_lens")}
    for mask in ([True, True], [False, True]):
        masked = {**lengths, name: np.ma.masked_array(lengths[name], mask=mask)}
        with pytest.raises(InvalidArgument, match=f"{name}: got MaskedArray"):
            plan_prompts(**masked, block_table=torch.zeros((2, 4), dtype=torch.int32), topk=TOPK, key_rows=64)


def test_without_an_implementation_the_reasons_are_said():
    with pytest.raises(UnsupportedRequest, match="masked_prefill"):
        make_layer(registry=Registry(environ={"MLA_PORTABLE_DISABLE": "triton,nvidia,iluvatar,reference"}))


def test_scratch_is_bounded_by_the_spec():
    """Measured: what a step of the most tokens with a context allocates beyond its inputs and output."""
    spec = AttentionSpec(num_heads=128, softmax_scale=0.1, max_num_tokens=8192, max_num_reqs=64, max_model_len=16384)
    layer = PromptAttention(replace(spec, scale_format="pow2"), HeadDims(), device=CPU, registry=REFERENCE, backend=BACKEND)
    keys, projected, merged = 8192 * 128 * 192 * 2, 8192 * 128 * 256 * 2, 3 * 8192 * 128 * (128 * 2 + 4)
    assert layer.scratch_bytes == keys + projected + merged + 8192 * 576 * 2 + 8192 * 256 * 4


# the choice


def lengths(*requests: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array([each[i] for each in requests], dtype=np.int32) for i in (0, 1))  # type: ignore[return-value]


def counts(*requests: tuple[int, int], key_rows: int = 8192) -> Counts:
    return Counts.of(*lengths(*requests), 2048, key_rows)


def test_counts_are_those_of_a_count_one_by_one():
    requests = [(7, 7), (5, 31), (13, 13), (4, 12), (0, 9), (6, 14)]
    seen = [position + 1 for query, total in requests for position in range(total - query, total)]
    found = Counts.of(*lengths(*requests), 12, 40)
    assert found.pairs == sum(seen) and found.selected == sum(min(12, keys) for keys in seen)
    assert (found.tokens, found.keys, found.parts, found.merged) == (35, 86, 2, 70)
    table = torch.zeros((6, 4), dtype=torch.int32)
    assert len(plan_prompts(*lengths(*requests), table, topk=12, key_rows=40).parts) == 1 + found.parts


SHIPPED = [each for file in load_plugins(installed_plugins()).times for each in file.prompts]


@pytest.mark.parametrize("record", SHIPPED, ids=lambda each: f"{each.implementation} {each.width} {each.heads} heads")
def test_long_contexts_take_the_sparse_route_and_short_prompts_do_not(record: PromptRecord):
    constants = record.times
    for prompts in ([(1000, 1000)] * 8, [(2000, 2000)] * 4, [(512, 512)], [(128, 128)] * 16):
        assert constants.saves(counts(*prompts), masked=False) > 0
    for prompts in ([(16, 2048)] * 8, [(32, 8192)] * 4, [(8192, 131_072)]):
        assert constants.saves(counts(*prompts), masked=True) < 0
    gains = [constants.saves(counts((2048, 2048 + context)), masked=True) for context in (512, 8192, 32_768)]
    assert gains == sorted(gains, reverse=True)


def test_what_ships_are_two_kernels_widths_and_five_head_counts():
    found = {(each.implementation, each.qk_head_dim, each.v_head_dim, each.heads) for each in SHIPPED}
    names, widths, heads = ("nvidia.native", "triton.portable"), ((192, 128), (256, 256)), (8, 16, 32, 64, 128)
    assert found == {(name, *dims, count) for name in names for dims in widths for count in heads}


def asked(facts: DeviceFacts, heads: int, qk_head_dim: int = 192, v_head_dim: int = 128) -> Request[Any]:
    return Request(MASKED_PREFILL, facts, num_heads=heads, qk_head_dim=qk_head_dim, v_head_dim=v_head_dim, selection=True)


@pytest.mark.parametrize("heads, row", [(1, 8), (8, 8), (12, 16), (16, 16), (24, 32), (64, 64), (96, 128), (256, 128)])
def test_times_are_those_of_the_next_head_count_and_width_of_the_implementation(heads: int, row: int):
    for record in (each for each in SHIPPED if each.heads == row):
        widths = (record.qk_head_dim, record.v_head_dim)
        assert recorded_prompts(SHIPPED, record.implementation, asked(H200, heads, *widths)) is record.times
        near = {(192, 128): (128, 128), (256, 256): (256, 192)}[widths]
        assert recorded_prompts(SHIPPED, record.implementation, asked(H200, heads, *near)) is record.times


def constants(first: float) -> PromptTimes:
    return PromptTimes(first, *[1.0] * 10)


def test_a_device_is_decided_by_its_own_constants_else_by_what_stands_for_its_vendor():
    on_h200, on_a100 = (Measurement(each.name, recorded=day) for each, day in ((H200, "2026-11-26"), (A100, "2026-11-20")))
    records = [
        PromptRecord("acme.v1", 192, 128, 16, constants(1.0), on_h200, ("nvidia",)),
        PromptRecord("acme.v2", 192, 128, 16, constants(2.0), on_h200),
        PromptRecord("acme.v1", 192, 128, 64, constants(3.0), on_a100),
    ]

    def found(name: str, facts: DeviceFacts) -> float | None:
        times = recorded_prompts(records, name, asked(facts, 16))
        return times and times.latent_fixed

    assert [found("acme.v1", each) for each in (H200, A100, RTX_4090, MI300X)] == [1.0, 3.0, 1.0, None]
    assert [found("acme.v2", each) for each in (H200, A100, MI300X)] == [2.0, None, None]
    assert recorded_prompts(records, "acme.v1", asked(H200, 16).but(num_heads=None)) is None


class Attending:
    """A vendor's plugin with a masked_prefill, and constants of it."""

    def __init__(self, *records: PromptRecord) -> None:
        self.records = records

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        support = Support(source="this test", lse=True, selection=True)
        registrar.add(Implementation("acme.v1", MASKED_PREFILL, support, lambda request: lambda: None, preference=1.0))
        if self.records:
            registrar.add_costs(times_text(prompts=self.records))


SIZES = {"max_num_tokens": 8192, "max_num_reqs": 64, "max_model_len": 16384}


@pytest.mark.parametrize("known", [True, False])
def test_any_vendors_kernel_serves_prompts_where_times_for_it_are_on_record(known: bool):
    """No vendor is named anywhere: what decides is that there are times."""
    on_mi300x = PromptRecord("acme.v1", 192, 128, 16, constants(7.0), Measurement(MI300X.name, recorded="2026-11-29"))
    plugin = Attending(*[on_mi300x] if known else [])
    registry = Registry(plugins=[("acme", plugin)], facts={"cuda": MI300X}, environ={}, probe=False, costs="measured")
    decision = registry.decide(asked(MI300X, 16))
    assert decision.chosen == "acme.v1"
    assert registry.prompt_times(decision) == (constants(7.0) if known else None)
    said = refusals(AttentionSpec(16, 0.1, **SIZES), HeadDims(), MI300X, registry=registry)
    if known:
        assert said == []
    else:
        assert f"acme.v1 on {MI300X.name}" in said[0] and "bench prompts --fit" in said[0] and "amd" in said[0]
    declared = Registry(plugins=[("acme", plugin)], facts={"cuda": MI300X}, environ={}, probe=False)
    assert declared.prompt_times(declared.decide(asked(MI300X, 16))) is None


def test_a_user_s_own_constants_decide_before_those_that_ship(tmp_path: Path):
    (tmp_path / "mine.json").write_text(
        times_text(prompts=[PromptRecord("triton.portable", 192, 128, 16, constants(9.0), Measurement(H200.name))])
    )
    environ = {"MLA_PORTABLE_TIMES": str(tmp_path), "MLA_PORTABLE_DISABLE": "nvidia"}
    for facts, heads, own in ((H200, 16, True), (H200, 64, False), (A100, 16, False)):
        registry = Registry(facts={"cuda": facts}, environ=environ, probe=False, costs="measured")
        decision = registry.decide(asked(facts, heads))
        assert decision.chosen == "triton.portable"
        assert (registry.prompt_times(decision) == constants(9.0)) is own


def test_an_engine_leaves_prompts_without_times_to_the_sparse_route_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    spec, facts = replace(SPEC, kv_layout="bf16", scale_format=None), get_registry().facts(CPU)
    logger, built = logging.getLogger("mla_portable.test"), list[object]()
    monkeypatch.setattr("mla_portable.choose.machine.Machine.try_request", lambda *given: pytest.fail("a kernel was probed"))
    with caplog.at_level(logging.INFO, logger="mla_portable.test"), use(masked_prefill="reference"):
        assert prompt_attention(spec, DIMS, facts, CPU, logger) is None
    assert "prompts take the sparse route: no times of the two ways are on record for" in caplog.text
    monkeypatch.undo()

    def build(*given: object, **named: object) -> SimpleNamespace:
        built.append(given)
        return SimpleNamespace(times=found[len(built) - 1], decisions={"masked": SimpleNamespace(chosen="acme.v1")})

    found = [constants(1.0), None]  # the second: what was probed and serves is another one than was declared
    monkeypatch.setattr("mla_portable.engines.common.prompt_route.PromptAttention", build)
    monkeypatch.setattr(Registry, "prompt_times", lambda self, decision: constants(1.0))
    with caplog.at_level(logging.INFO, logger="mla_portable.test"):
        assert [prompt_attention(spec, DIMS, facts, CPU, logger) is None for _ in found] == [False, True]
    assert "on record for acme.v1 on" in caplog.text


def test_primitives_are_chosen_like_all_others():
    layer = make_layer()
    assert {name: decision.chosen for name, decision in layer.decisions.items()}["masked"] == "reference.torch"
    assert layer.decisions["masked"].request == layer.decisions["dense"].request.but(selection=True)
    assert layer.decisions["concat"].request.primitive is CONCAT_MLA_K
    assert layer.decisions["dense"].request.primitive is MASKED_PREFILL


def test_bench_prompts_compares_both_ways_and_fits_their_times():
    words = ["bench", "prompts", "--device", "cpu", "--heads", "2", "--layout", "bf16", "--backend", BACKEND, "--repeat", "1"]
    found = document(*words, "--fit")
    assert found["ok"] and [line["prompts"] for line in found["lines"]] == ["2 x 40", "1 x 70", "1 x 20 of 90"]
    assert all(0 < line["error"] < 0.02 and line["loses"] >= 0 for line in found["lines"])
    fitted = PromptTimes(**found["constants"]["2"])
    for line, masked in zip(found["lines"], (False, True, True), strict=True):
        assert line["masked"] == masked and line["latent_us"] > 0
    assert min(astuple(fitted)) >= 0 and fitted.masked_pair + fitted.masked_key + fitted.masked_fixed > 0
    shown = invoke(*words).stdout
    assert "2 heads: latent rows by" in shown and "masked reference.torch" in shown


def test_fitted_constants_become_a_file_of_times_that_an_engine_decides_by(tmp_path: Path):
    file, name = tmp_path / "cpu.json", "reference.torch"
    words = ["bench", "prompts", "--device", "cpu", "--layout", "bf16", "--backend", BACKEND, "--repeat", "1"]
    words += ["--out", str(file)]
    assert "needs --fit" in " ".join(invoke(*words, "--heads", "2", code=2).stderr.split())
    invoke(*words, "--heads", "2", "--fit")
    (first,) = parse_times(file.read_text()).prompts
    assert (first.implementation, first.qk_head_dim, first.v_head_dim, first.heads) == (name, 192, 128, 2)
    invoke(*words, "--heads", "1,2", "--fit")
    read = parse_times(file.read_text())
    assert read.problems == () and [each.heads for each in read.prompts] == [1, 2], "those of 2 heads were replaced"
    assert recorded_prompts(read.prompts, name, asked(get_registry().facts(CPU), 2)) == read.prompts[1].times
    other = replace(first, measurement=replace(first.measurement, device="another", names=()))
    file.write_text(text := times_text(prompts=[other]))
    assert "got times of another" in " ".join(invoke(*words, "--heads", "2", "--fit", code=2).stderr.split())
    assert file.read_text() == text


def test_a_fit_finds_the_constants_of_times_that_follow_them():
    wanted = PromptTimes(20, 50, 150, 22, 12, 13, 5, 18, 16, 40, 12)
    steps: list[tuple[tuple[int, int], ...]] = [*STEPS, ((3000, 3000),) * 2, ((500, 2500),), ((8000, 40_000),)]
    times: list[StepTimes] = []
    for step in steps:
        amount, masked = counts(*step), step[0][1] > 2048
        times.append(StepTimes(step, amount, wanted.latent_us(amount), wanted.per_head_us(amount, masked=masked), 0.0, masked))
    assert astuple(fit(times)) == pytest.approx(astuple(wanted), rel=2e-3, abs=2e-2)
