# SPDX-License-Identifier: Apache-2.0
"""Builder, metadata and forward_mqa inside vLLM's real classes, on the reference backend, against a per-token oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from machines import costs_of
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm_engine import (
    BLOCK,
    HEADS,
    KNOWN_LENGTHS,
    LATENT,
    MAX_LEN,
    NOPE,
    ROPE,
    SCALE,
    TOPK,
    V_DIM,
    Engine,
    assert_close,
    attend,
    check_step,
    expected,
    make_engine,
    make_step,
    run_layer,
)

from mla_portable.attention import SparseMLAAttention
from mla_portable.choose import Registry, use
from mla_portable.contracts import InvalidArgument, PlanMismatch
from mla_portable.engines.vllm import compat
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.planner import PlannerConfig
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES

BATCHES = {
    "decodes": ([1] * 5, [1, 64, 65, 130, 256], {}),
    "prefills": ([7, 70, 3], [7, 70, 3], {}),
    "mixed": ([1, 1, 1, 9, 33], [100, 7, 256, 9, 33], {}),
    "chunked prefill": ([1, 20, 40], [80, 150, 256], {}),
    "one token": ([1], [1], {}),
    "padded decodes": ([1] * 3, [70, 1, 200], {"padded_tokens": 8, "padded_reqs": 8}),
    "padded tokens alone": ([1] * 3, [70, 1, 200], {"padded_tokens": 8}),
    "padded mixed": ([1, 1, 30], [70, 3, 200], {"padded_tokens": 40, "padded_reqs": 4}),
}
SPECULATIVE = {
    "drafts": ([3] * 4, [3, 64, 66, 256], {}),
    "drafts and prefills": ([3, 3, 8, 30], [20, 100, 8, 90], {}),
    "uneven drafts": ([3, 3, 2, 1], [20, 100, 8, 90], {}),
    "padded drafts": ([3] * 3, [20, 100, 8], {"padded_tokens": 12, "padded_reqs": 4}),
}


ROUTES = ("direct", "split", "fused", "upconvert")
FORWARD = [
    pytest.param(
        dtype, route, batch, bool((d + r + b) % 2), id=f"{dtype}-{route}-{batch}-{('tensor', 'pair')[(d + r + b) % 2]}"
    )
    for d, dtype in enumerate(("auto", "fp8"))
    for r, route in enumerate(ROUTES)
    for b, batch in enumerate(BATCHES)
]
"""Every dtype, route and batch together; the query as a tensor or as a pair with any two of them."""


@pytest.mark.parametrize(("dtype", "route", "batch", "pair"), FORWARD)
def test_forward_mqa_is_what_the_oracle_says(dtype: str, route: str, batch: str, pair: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLA_PORTABLE_VLLM_ROUTE", route)
    query_lens, seq_lens, padding = BATCHES[batch]
    engine = make_engine(dtype)
    step = make_step(engine, query_lens, seq_lens, **padding)
    metadata = engine.builder.build(0, step.common)
    assert metadata.plan.route == route
    q = step.q
    if pair:  # as MLAAttention gives them: the one is transposed, the other a slice
        q = (q[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1), step.q[..., LATENT:])
    out, lse = attend(engine, metadata, q)
    assert out.dtype == torch.bfloat16 and lse is None
    assert_close(out, expected(engine, step)[0], len(step.requests))
    assert torch.count_nonzero(out[len(step.requests) :]) == 0


def test_vllms_operator_joins_the_halves_of_a_query(monkeypatch: pytest.MonkeyPatch):
    """Where vLLM has one, as on CUDA: into the layer's own buffer, and what it wrote is attended with."""
    seen: list[int] = []

    def join(ql_nope: torch.Tensor, q_pe: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(out.data_ptr())
        out.copy_(torch.cat([ql_nope, q_pe], dim=-1))

    monkeypatch.setattr("mla_portable.engines.vllm.compat.query_joiner", lambda: join)
    engine = make_engine("fp8")
    step = make_step(engine, [1, 1, 5], [100, 64, 200], padded_tokens=8)
    metadata = engine.builder.build(0, step.common)
    halves = step.q[..., :LATENT], step.q[..., LATENT:]
    out, _ = attend(engine, metadata, halves)
    assert_close(out, expected(engine, step)[0], 7)
    assert seen == [engine.builder.attention.buffers.query.data_ptr()]


@pytest.mark.parametrize("fault", ["tokens", "cache"])
def test_nothing_is_written_for_a_step_that_does_not_fit(fault: str, monkeypatch: pytest.MonkeyPatch):
    """Not even the layer's own buffer, into which vLLM's operator joins the halves of the query."""
    joined: list[int] = []
    monkeypatch.setattr("mla_portable.engines.vllm.compat.query_joiner", lambda: lambda *halves: joined.append(1))
    engine = make_engine("fp8")
    step = make_step(engine, [1, 1, 5], [100, 64, 200])
    metadata = engine.builder.build(0, step.common)
    halves, kv_cache = (step.q[..., :LATENT], step.q[..., LATENT:]), engine.kv_cache
    if fault == "tokens":  # as where dense attention takes the prefills, which this backend does not offer
        halves, error, text = (halves[0][:2], halves[1][:2]), PlanMismatch, "q has 2 tokens, the plan was made for 7"
    else:
        kv_cache, error, text = kv_cache[:, : BLOCK // 2], InvalidArgument, "block_size 32, expected fp8_ds_mla, block_size 64"
    with pytest.raises(error, match=text):
        attend(engine, metadata, halves, kv_cache)
    assert not joined


@pytest.fixture
def planned_for_flashmla(monkeypatch: pytest.MonkeyPatch):
    """Plans are made as for FlashMLA's decode on an H200."""
    own = SparseMLAAttention.planner_config

    def config(attention: SparseMLAAttention) -> PlannerConfig:
        return replace(own(attention), schedule_kind=FLASHMLA_TILES, num_sms=132, arch="sm90")

    monkeypatch.setattr(SparseMLAAttention, "planner_config", config)
    monkeypatch.setenv("MLA_PORTABLE_VLLM_ROUTE", "split")


@pytest.mark.parametrize(
    "query_lens", [[17, 70], [1, 1, 17], [9, 9, 9, 40], [32], [5, 7], [1, 1, 1], [2, 30], [40, 3]], ids=str
)
def test_few_tokens_decode_where_vllms_own_backend_decodes_them(query_lens: list[int], planned_for_flashmla: None):
    engine = make_engine("fp8")
    step = make_step(engine, query_lens, [length + 60 for length in query_lens])
    plan = engine.builder.build(0, step.common).plan
    threshold = 256 if compat.few_decode_tokens() else 1
    stock = split_decodes_and_prefills(step.common, decode_threshold=threshold, require_uniform=True)
    if query_lens != [40, 3] or threshold == 1:  # more than 32 tokens: vLLM would decode them
        assert (plan.num_decodes, plan.num_prefills, plan.num_decode_tokens) == stock[:3]
    else:
        assert (plan.num_decodes, stock[0]) == (0, 1)


@pytest.mark.parametrize("builder, tokens", [({"require_uniform_decodes": True}, 32), ({}, 0), (None, 0)])
def test_few_tokens_follow_what_stocks_builder_does(builder: dict | None, tokens: int, monkeypatch: pytest.MonkeyPatch):
    """From 0.26 on it groups leading requests of one length; a vendor's build may have no such backend at all."""

    def stock(name: str):
        if builder is None:
            raise ImportError(name)
        return SimpleNamespace(FlashMLASparseMetadataBuilder=type("Builder", (), builder))

    monkeypatch.setattr(compat, "import_module", stock)
    assert compat.few_decode_tokens() == tokens


def test_portable_kernels_alone_serve_a_mixed_batch():
    """Triton's kernels, in its interpreter: no other code of a backend runs."""
    with use("triton"):
        engine = make_engine("fp8")
        assert {part.decision.chosen for part in engine.builder.attention.route_decision.verdict.parts} == {"triton.portable"}
    check_step(engine, [1, 1, 2], [70, 3, 40], padded_tokens=5)


def test_a_prompt_is_gathered_where_that_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch):
    """A token saves 1 us on bf16 rows, and a row costs 0.2 to gather: prompts are, a few tokens of a long context are not."""
    us = {
        ("sparse_decode", "fp8_ds_mla"): {1: 1.0},
        ("sparse_prefill", "fp8_ds_mla"): {1: 3.0, 100: 300.0},
        ("sparse_prefill", "bf16"): {1: 2.0, 100: 200.0},
        ("gather_upconvert", "fp8_ds_mla"): {1: 0.2, 100: 20.0},
    }
    cpu = Registry(environ={}).facts("cpu").name
    timed = Registry(environ={}, costs=costs_of({"reference.torch": us}, cpu, HEADS, TOPK))
    monkeypatch.setattr("mla_portable.choose.registry._registry", timed)
    with use("reference"):
        engine = make_engine("fp8")
    assert engine.builder.attention.route == "split" and engine.builder.attention.buffers.workspace is not None
    prompt = check_step(engine, [1, 1, 70, 33], [100, 7, 70, 120])
    assert [chunk.tokens for chunk in prompt.plan.prefill_chunks] == [slice(2, 105)]
    turn = check_step(engine, [1, 1, 20, 9], [100, 7, 150, 120], seed=1)
    assert turn.plan.prefill_chunks == () and turn.plan.num_prefill_tokens == 29


@pytest.mark.parametrize("batch", SPECULATIVE)
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_drafts_are_verified_as_decodes(dtype: str, batch: str):
    query_lens, seq_lens, padding = SPECULATIVE[batch]
    engine = make_engine(dtype, drafts=2)
    assert engine.builder.reorder_batch_threshold == 3
    metadata = check_step(engine, query_lens, seq_lens, **padding)
    if batch != "uneven drafts":
        assert metadata.plan.decode_query_len == 3
        assert metadata.plan.num_decode_tokens == (padding.get("padded_tokens") or 3 * query_lens.count(3))


def test_lse_is_returned_where_vllm_merges_partial_results(monkeypatch: pytest.MonkeyPatch):
    from mla_portable.engines.vllm.impl import MLAPortableImpl

    reserve = MLAPortableImpl._reserve

    def merging(self: Any, config: Any) -> Any:
        self.need_to_return_lse_for_decode = True
        return reserve(self, config)

    monkeypatch.setattr(MLAPortableImpl, "_reserve", merging)
    engine = make_engine("fp8")
    step = make_step(engine, [1, 1, 9], [100, 7, 30])
    metadata = engine.builder.build(0, step.common)
    out, lse = attend(engine, metadata, step.q)
    wanted, wanted_lse = expected(engine, step)
    assert_close(out, wanted, 11)
    if compat.impl_projects():  # such a layer takes out alone
        assert lse is None
    else:
        assert torch.allclose(lse.double(), wanted_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_new_tokens_are_written_and_padding_is_not(dtype: str):
    """Activations are padded for a CUDA graph, slots may not be; a negative slot is a padding row as well."""
    engine = make_engine(dtype)
    before, random = engine.kv_cache.clone(), torch.Generator().manual_seed(3)
    kv_c, k_pe = torch.randn((6, LATENT), generator=random), torch.randn((6, 1, ROPE), generator=random)
    slots = torch.tensor([70, -1, 3, 200])
    engine.impl.do_kv_cache_update(kv_c, k_pe, engine.kv_cache, slots, engine.layer.kv_cache_dtype, torch.ones(()))
    wanted = oracle.cache_write(kv_c[:4], k_pe[:4, 0], before, slots, scale_format="pow2")
    assert torch.equal(engine.kv_cache.view(torch.uint8), wanted.view(torch.uint8))
    rows: list[tuple[int, ...]] = []
    engine.builder.attention.cache_write = lambda *given: rows.append(tuple(len(given[i]) for i in (0, 1, 3)))
    engine.impl.do_kv_cache_update(kv_c, k_pe, engine.kv_cache, slots, engine.layer.kv_cache_dtype, torch.ones(()))
    assert rows == [(4, 4, 4)]
    engine.impl.do_kv_cache_update(kv_c, k_pe, torch.empty(0), slots, engine.layer.kv_cache_dtype, torch.ones(()))  # profiling


def test_one_builder_serves_step_after_step():
    """Buffers are persistent: a step must not see what a longer one left, and graph addresses stay."""
    engine = make_engine("fp8")
    addresses = set()
    for seed, (query_lens, seq_lens) in enumerate([([1, 40, 60], [9, 40, 60]), ([1, 1], [30, 64]), ([1] * 9, [50] * 9)]):
        metadata = check_step(engine, query_lens, seq_lens, seed=seed)
        addresses.add(metadata.plan.req_id_per_token.data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("with_indexer", [True, False])
def test_choices_come_from_the_indexer_or_the_buffer(with_indexer: bool):
    engine = make_engine("auto", with_indexer=with_indexer)
    assert engine.impl.topk_indices_buffer is engine.topk
    other = engine.topk.clone()
    if with_indexer:  # a draft model's indexer is given the target's buffer late
        engine.impl._indexer.topk_indices_buffer = other
        assert engine.impl.topk_indices_buffer is other


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_the_whole_layer_is_dense_attention_over_the_chosen_tokens(dtype: str):
    check_whole_layer(make_engine(dtype))


def check_whole_layer(
    engine: Engine, query_lens: Sequence[int] = (1, 1, 9, 33), seq_lens: Sequence[int] = (100, 64, 9, 90)
) -> Any:
    """The layer, cache write and absorbed weights included, against attention with keys and values written out.

    Returns: the step's metadata.
    """
    step = make_step(engine, query_lens, seq_lens)
    tokens = len(step.requests)
    random = torch.Generator().manual_seed(5)
    q = torch.randn((tokens, HEADS, NOPE + ROPE), generator=random)
    kv_c, k_pe = torch.randn((tokens, LATENT), generator=random), torch.randn((tokens, 1, ROPE), generator=random)
    starts, lengths = step.common.query_start_loc_cpu.tolist(), step.common.seq_lens.tolist()
    slots = []
    for token, r in enumerate(step.requests):
        position = lengths[r] - starts[r + 1] + token
        slots.append(int(step.table[r, position // BLOCK]) * BLOCK + position % BLOCK)
    metadata = engine.builder.build(0, step.common)
    out = run_layer(engine, metadata, torch.tensor(slots), q, kv_c, k_pe).view(tokens, HEADS, V_DIM)

    cached = engine.kv_cache.flatten(0, 1)
    cached = (FP8_DS_MLA.unpack(cached, dtype=torch.float64) if cached.dtype == torch.uint8 else cached).double()
    assert torch.equal(cached[slots][:, LATENT:], k_pe[:, 0].double())  # the layer wrote its tokens
    as_given = cached.clone()  # what prompts over keys of each head attend to: new tokens before the cache rounded them
    as_given[slots] = torch.cat((kv_c, k_pe[:, 0]), dim=1).double()
    w_k, w_v = engine.layer.kv_b_proj.plain().double().view(HEADS, NOPE + V_DIM, LATENT).split([NOPE, V_DIM], dim=1)
    for token, r in enumerate(step.requests):
        is_prompt = metadata.prefill is not None and token >= metadata.num_decode_tokens
        chosen = [int(step.table[r, p // BLOCK]) * BLOCK + p % BLOCK for p in step.topk[token].tolist() if p >= 0]
        rows = (as_given if is_prompt else cached)[chosen]
        keys = torch.cat([torch.einsum("nl,hdl->hnd", rows[:, :LATENT], w_k), rows[:, LATENT:].expand(HEADS, -1, -1)], dim=-1)
        weights = torch.softmax(SCALE * torch.einsum("hd,hnd->hn", q[token].double(), keys), dim=-1)
        wanted = torch.einsum("hn,nl,hvl->hv", weights, rows[:, :LATENT], w_v)
        assert (out[token] - wanted).norm() <= 2e-2 * wanted.norm(), token
    return metadata


class OnDevice(torch.Tensor):
    """A tensor that stands for one on a GPU: whatever would wait for the device is refused."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("cpu", "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__index__", "__float__"):
            raise AssertionError(f"read back from the device: {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("route", ["direct", "split", "fused", "upconvert"])
@pytest.mark.parametrize("known", [*KNOWN_LENGTHS, ""])
def test_build_reads_nothing_back(route: str, known: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLA_PORTABLE_VLLM_ROUTE", route)
    engine = make_engine("fp8")
    step = make_step(engine, [1, 1, 9, 33], [100, 64, 9, 90], host_lengths=known)
    tensors = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    watched = replace(step.common, **{name: getattr(step.common, name).as_subclass(OnDevice) for name in tensors})
    with pytest.raises(AssertionError, match="read back"):
        watched.seq_lens.cpu()
    metadata = engine.builder.build(0, watched)
    # The reference backend does read back: it is given plain tensors for the same plan.
    with torch._C.DisableTorchFunctionSubclass():
        plan = plain(metadata.plan, "block_table")
        plan = replace(plan, prefill_chunks=tuple(plain(each, "block_table", "seq_lens") for each in plan.prefill_chunks))
    out, _ = attend(engine, replace(metadata, plan=plan), step.q)
    assert_close(out, expected(engine, step)[0], len(step.requests))


def plain(value, *names: str):
    return replace(value, **{name: getattr(value, name).as_subclass(torch.Tensor) for name in names})


def test_dummy_lengths_are_brought_into_range(monkeypatch: pytest.MonkeyPatch):
    """vLLM's dummy batches have lengths below their queries, and bounds above the limit by drafts not yet accepted.

    The block table reaches as far as the model's longest sequence, not as far as such a bound.
    """
    engine = make_engine("fp8", drafts=2)
    step = make_step(engine, [3, 3, 1], [30, 64, 9])
    getattr(step.common, KNOWN_LENGTHS[0])[:] = torch.tensor([0, MAX_LEN + 9, 9], dtype=torch.int32)
    batches, plan = [], engine.builder.planner.plan
    monkeypatch.setattr(engine.builder.planner, "plan", lambda batch: (batches.append(batch), plan(batch))[1])
    engine.builder.build(0, step.common)
    assert np.array_equal(batches[0].seq_lens, [3, MAX_LEN + 3, 9])


def test_a_batch_beyond_the_limits_and_a_layer_of_another_scale_are_refused():
    engine = make_engine("fp8")
    step = make_step(engine, [1, 1], [30, 64])
    metadata = engine.builder.build(0, step.common)
    engine.impl.scale *= 2
    with pytest.raises(InvalidArgument, match="scale"):
        attend(engine, metadata, step.q)
    step.common.num_actual_tokens = 10_000
    with pytest.raises(InvalidArgument, match="num_padded_tokens: got 10000"):
        engine.builder.build(0, step.common)
