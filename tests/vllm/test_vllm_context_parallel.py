# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism through vLLM's real classes: ranks of one process, each with its own cache, layer and builder."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_indexer
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility
from vllm_engine import BLOCK, HEADS, LATENT, ROPE, TOPK, expected, make_config, make_engine, make_step

import mla_portable
from mla_portable import primitives
from mla_portable.attention import SelectionMerge
from mla_portable.contracts import ContextShare
from mla_portable.engines.vllm import auto, compat, context_parallel, indexer, indexer_choice, model, plugin, settings
from mla_portable.engines.vllm.backend import MLAPortableBackend

GROUPS = [(2, 1), (3, 4), (4, 64)]


class Group:
    """A rank's process group. all_gather: what the ranks sent, once all have; until then nothing is known of the others."""

    def __init__(self, share: ContextShare) -> None:
        self.world_size, self.rank_in_group = share.size, share.rank
        self.sent: list[list[torch.Tensor]] = [[] for _ in range(share.size)]

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        mine = self.sent[self.rank_in_group]
        mine.append(tensor)
        others = [sent[len(mine) - 1] if len(sent) >= len(mine) else torch.full_like(tensor, -math.inf) for sent in self.sent]
        return torch.cat(others, dim=dim)


def join(monkeypatch: pytest.MonkeyPatch, share: ContextShare) -> Group:
    group = Group(share)
    monkeypatch.setattr(parallel_state, "_DCP", group)
    return group


def dealt(config: Any, share: ContextShare) -> Any:
    config.parallel_config.decode_context_parallel_size = share.size
    config.parallel_config.cp_kv_cache_interleave_size = share.interleave
    return config


def own_pages(step: Any, lengths: list[int], kv_cache: torch.Tensor, share: ContextShare) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's block table and cache: the rows of its own tokens, as they lie in the cache of everything."""
    whole = step.common.block_table_tensor
    table, cache = torch.zeros_like(whole), kv_cache.clone()
    cache.view(torch.uint8)[:] = 0xFF
    free = iter(range(1, len(cache)))
    for request, length in enumerate(lengths):
        for position in range(length):
            own = int(share.own(torch.tensor([position])))
            if own >= 0:
                if own % BLOCK == 0:
                    table[request, own // BLOCK] = next(free)
                row = kv_cache[int(whole[request, position // BLOCK]), position % BLOCK]
                cache[int(table[request, own // BLOCK]), own % BLOCK] = row
    return table, cache


BATCHES = {
    "decodes": (0, [1] * 5, [1, 64, 65, 130, 256], {}),
    "mixed": (0, [1, 1, 1, 9, 33], [100, 7, 256, 9, 33], {}),
    "padded decodes": (0, [1] * 3, [70, 1, 200], {"padded_tokens": 8, "padded_reqs": 8}),
    "drafts and prefills": (2, [3, 3, 8, 30], [20, 100, 8, 90], {}),
}


MET = [
    (*group, ("direct", "split")[(i + j) % 2], ("auto", "fp8_ds_mla")[(i + j // 2) % 2], batch)
    for i, group in enumerate(GROUPS)
    for j, batch in enumerate(BATCHES)
]
"""Every two values of a group, a route, a cache and a batch are together in one of them."""


@pytest.mark.parametrize(("size", "interleave", "route", "kv_cache_dtype", "batch"), MET)
def test_partial_results_of_ranks_are_the_whole(
    size: int, interleave: int, route: str, kv_cache_dtype: str, batch: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(settings.ENV_ROUTE, route)
    drafts, query_lens, seq_lens, more = BATCHES[batch]
    engine = make_engine(kv_cache_dtype, drafts=drafts)
    step = make_step(engine, query_lens, seq_lens, **more)
    # vLLM gathers the heads of all ranks; as many as the layer has for each of them
    q = torch.cat([step.q.roll(rank, dims=1) for rank in range(size)], dim=1)
    outs, lses = [], []
    for rank in range(size):
        share = ContextShare(size, rank, interleave)
        join(monkeypatch, share)
        monkeypatch.setattr("vllm_engine.make_config", lambda *a, share=share, **k: dealt(make_config(*a, **k), share))
        ranked = make_engine(kv_cache_dtype, drafts=drafts)
        assert ranked.impl.need_to_return_lse_for_decode and ranked.builder.attention.spec.share == share
        check_attention_cp_compatibility(ranked.config)
        table, cache = own_pages(step, seq_lens, engine.kv_cache, share)
        ranked.topk.copy_(engine.topk)
        metadata = ranked.builder.build(0, step.common.replace(block_table_tensor=table))
        out, lse = ranked.impl.forward_mqa(q, cache, metadata, ranked.layer)
        assert out.shape == (len(q), size * HEADS, LATENT) and out.is_contiguous() and lse.dtype == torch.float32
        nothing = (share.own(step.topk) < 0).all(dim=1)
        assert not out[nothing].any() and (lse[nothing] == -math.inf).all()
        outs.append(out)
        lses.append(lse)
    merged, merged_lse = mla_portable.merge_states(torch.stack(outs), torch.stack(lses), backend="reference")
    wanted, wanted_lse = expected(engine, step)
    for rank in range(size):
        heads = slice(rank * HEADS, (rank + 1) * HEADS)
        apart = (merged[:, heads].double() - wanted.roll(rank, dims=1)).norm(dim=-1)
        assert (apart <= 1e-2 * wanted.roll(rank, dims=1).norm(dim=-1)).all()  # partial results are rounded to bfloat16
        torch.testing.assert_close(merged_lse[:, heads].double(), wanted_lse.roll(rank, dims=1), atol=1e-3, rtol=1e-4)


INDEXED = {
    "decodes": (0, [1] * 4, [1, 64, 65, 200], {}),
    "mixed": (0, [1, 1, 20, 30], [100, 7, 256, 30], {}),
    "padded drafts": (2, [3] * 3, [20, 100, 8], {"padded_tokens": 12, "padded_reqs": 4}),
}


@pytest.mark.parametrize("batch", INDEXED)
@pytest.mark.parametrize("size", [2, 3])
def test_the_indexers_of_ranks_choose_what_one_would(size: int, batch: str, monkeypatch: pytest.MonkeyPatch):
    plugin.register()
    monkeypatch.setenv(settings.ENV_INDEXER, "on")
    vllm_indexer.without_kernels(monkeypatch)
    drafts, query_lens, seq_lens, more = INDEXED[batch]
    whole = vllm_indexer.make_indexer(drafts=drafts)
    step = vllm_indexer.make_batch(whole, query_lens, seq_lens, **more)
    sent: list[list[torch.Tensor]] = [[] for _ in range(size)]
    wanted, kept = vllm_indexer.expected(step), dict[int, torch.Tensor]()
    for number in [*range(size), *range(size)]:  # first what each rank sends, then what each makes of everything
        share = ContextShare(size, number)
        group = join(monkeypatch, share)
        group.sent = [list(each) for each in sent]
        group.sent[number] = []
        indexer_choice.forget()
        monkeypatch.setattr("vllm_indexer.make_config", lambda *a, share=share, **k: dealt(make_config(*a, **k), share))
        engine = vllm_indexer.make_indexer(drafts=drafts)
        whole_table = step.common.block_table_tensor
        table = torch.zeros((len(whole_table), -(-whole_table.shape[1] // size)), dtype=torch.int32)  # as vLLM's runner has it
        free, slots, token = iter(range(1, len(engine.kv_cache))), [], 0
        for request, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
            for position in range(length):
                own = int(share.own(torch.tensor([position])))
                if own >= 0 and own % BLOCK == 0:
                    table[request, own // BLOCK] = next(free)
                slot = int(table[request, own // BLOCK]) * BLOCK + own % BLOCK if own >= 0 else -1
                if position >= length - query:
                    slots.append(slot)
                elif slot >= 0:
                    vllm_indexer.write(engine.kv_cache, step.keys[request][position : position + 1], [slot])
            token += query
        slots += [-1] * (len(step.q) - token)
        local = torch.tensor([share.length(int(length)) for length in step.common.seq_lens], dtype=torch.int32)
        common = step.common.replace(block_table_tensor=table, slot_mapping=torch.tensor(slots), dcp_local_seq_lens=local)
        metadata = engine.builder.build(0, common)
        vllm_indexer.call(engine, step, {vllm_indexer.NAME: metadata})
        sent[number], kept[number] = group.sent[number], engine.topk[: len(step.q), : vllm_indexer.TOPK].clone()
    for number, positions in kept.items():
        assert ((positions < 0) | (ContextShare(size, number).own(positions) >= 0)).all()
    for row, best in zip(torch.cat([*kept.values()], dim=1).tolist(), [*wanted, *[[]] * 9], strict=False):
        assert sorted(position for position in row if position >= 0) == sorted(best)


def test_what_a_configuration_says(monkeypatch: pytest.MonkeyPatch):
    config = dealt(make_config(), ContextShare(2, 0, 64))
    assert context_parallel.context_share(make_config()) == ContextShare()
    assert context_parallel.context_share(config) == ContextShare(2, 0, 64)  # no ranks yet
    join(monkeypatch, ContextShare(2, 1))
    assert context_parallel.context_share(config) == ContextShare(2, 1, 64)
    resolved = model.resolve(config, compat.device(), kv_cache_dtype="auto")
    assert (resolved.spec.num_heads, resolved.spec.need_lse, resolved.spec.concat_query) == (2 * HEADS, True, False)
    assert model.refusal(config, compat.device(), head_size=LATENT + ROPE, kv_cache_dtype="auto", block_size=None) is None


def test_a_version_whose_indexer_does_not_know_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("vllm.v1.attention.backends.mla.sparse_utils.triton_filter_and_convert_dcp_index")
    (said,) = compat.unsupported_features(dealt(make_config(), ContextShare(2)))
    assert "decode context parallelism 2" in said and "0.25.1" in said and "set decode_context_parallel_size=1" in said


def test_stock_that_returns_no_lse_does_not_serve(monkeypatch: pytest.MonkeyPatch):
    stock = SimpleNamespace(validate_configuration=list, get_impl_cls=lambda: SimpleNamespace(can_return_lse_for_decode=False))
    config = make_config()
    with set_current_vllm_config(config):
        assert auto._against_configuration(stock) == []
        dealt(config, ContextShare(2))
        assert "no lse" in auto._against_configuration(stock)[0]
        stock.get_impl_cls = MLAPortableBackend.get_impl_cls
        assert auto._against_configuration(stock) == []


def test_our_indexer_serves_where_vllms_has_no_cutedsl(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_INDEXER, "auto")
    version = SimpleNamespace(major=9, minor=0)
    platform = SimpleNamespace(
        device_type="cuda", is_cuda=lambda: True, is_cuda_alike=lambda: True, is_out_of_tree=lambda: False,
        support_deep_gemm=lambda: True, get_device_capability=lambda: version,
    )  # fmt: skip
    monkeypatch.setattr(indexer_choice, "current_platform", platform)
    monkeypatch.setattr("vllm.utils.import_utils.has_deep_gemm", lambda: True)
    for cutedsl in (False, True):
        monkeypatch.setattr("vllm.utils.import_utils.has_cutedsl", lambda found=cutedsl: found)
        found = indexer_choice._decide(dealt(make_config(), ContextShare(2)))
        assert (found.ours, found.fused) == (not cutedsl, not cutedsl)
        assert cutedsl or "CuteDSL" in found.reason


def test_the_profile_sees_the_scratch_of_a_merge():
    def never(*_: object, **__: object) -> Any:
        raise AssertionError

    share, cpu = ContextShare(2), torch.device("cpu")
    merge = SelectionMerge(share, TOPK, never, never, cpu)
    server = indexer.BoundIndexer(never, None, merge, True, TOPK, BLOCK, "ue8m0", share, lambda: False)
    assert server.scratch_bytes(160) == 4 * 160 * TOPK + primitives.SELECT_SCRATCH_BYTES
    assert server.scratch_bytes(1 << 20) > 4 * TOPK * (1 << 20) + 2 * primitives.SELECT_SCRATCH_BYTES


def test_the_builder_may_be_told_of_varying_query_lengths():
    base = inspect.signature(MLAPortableBackend.get_builder_cls()._init_reorder_batch_threshold).parameters
    assert "supports_dcp_with_varlen" in base
