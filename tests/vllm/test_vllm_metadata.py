# SPDX-License-Identifier: Apache-2.0
"""What vLLM reads from the metadata of a step: the value of every field, for every kind of batch."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib import import_module
from itertools import accumulate

import numpy as np
import pytest
import torch
from test_vllm_forward import BATCHES
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm_engine import BLOCK, CPU, MAX_LEN, TOPK, make_engine, make_step

from mla_portable.engines.vllm.metadata import MLAPortableMetadata


@pytest.mark.parametrize("capture", [False, True], ids=["step", "capture"])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_field_has_its_value(batch: str, drafts: int, capture: bool):
    query_lens, seq_lens, padding = BATCHES[batch]
    engine = make_engine("fp8", drafts=drafts)
    step = make_step(engine, query_lens, seq_lens, **padding)
    step.common.slot_mapping.copy_(torch.arange(len(step.q)))
    step.common.num_actual_tokens = np.int64(step.common.num_actual_tokens)
    build = engine.builder.build_for_cudagraph_capture if capture else lambda common: engine.builder.build(0, common)
    metadata = build(step.common)

    tokens, reqs = padding.get("padded_tokens", sum(query_lens)), padding.get("padded_reqs", len(query_lens))
    empty = [0] * (reqs - len(query_lens))
    wanted = {
        "num_reqs": reqs,
        "num_actual_tokens": tokens,
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "query_start_loc": [0, *accumulate([*query_lens, *empty])],
        "seq_lens": [*seq_lens, *empty],
        "block_table": step.table.tolist(),
        "slot_mapping": list(range(tokens)),
        # To vLLM every token is a decode: it would give the others to dense attention.
        "num_decodes": reqs,
        "num_decode_tokens": tokens,
        "num_prefills": 0,
        "prefill_max_seq_len": 0,
        "prefill": None,
        "decode": None,
        "fp8_extra_metadata": None,
        "block_size": BLOCK,
        "topk_tokens": TOPK,
    }
    found = {field.name: getattr(metadata, field.name) for field in fields(MLAPortableMetadata)}
    found = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()}
    attention, plan = found.pop("attention"), found.pop("plan")
    for field in fields(MLACommonMetadata):  # what else MLA has, as it is without dense attention
        if field.name not in wanted:
            assert found.pop(field.name) == field.default, field.name
    assert found == wanted
    assert attention is engine.builder.attention
    assert (plan.num_reqs, plan.num_tokens, plan.num_padded_tokens) == (reqs, sum(query_lens), tokens)
    assert step.table.shape == (reqs, MAX_LEN // BLOCK)
    assert metadata.req_id_per_token.tolist() == step.requests + [0] * (tokens - len(step.requests))


def test_tensors_are_vllms_own():
    """Their addresses are those that vLLM writes in the next step, which a graph reads."""
    engine = make_engine("auto")
    step = make_step(engine, [1, 1], [100, 64])
    metadata = engine.builder.build(0, step.common)
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        assert getattr(metadata, name) is getattr(step.common, name), name
    assert metadata.block_table is step.common.block_table_tensor


OF_STOCKS_KERNELS = {
    "fp8_extra_metadata": "FlashMLA's arguments",
    "fp8_use_mixed_batch": "by head count there, by route here",
    "cp_kv_cache_interleave_size": "context parallelism",
    "dcp_rank": "context parallelism",
    "pcp_world_size": "context parallelism",
    "decode_max_query_len": "of its decode kernel",
    "num_prefill_tokens": "of MLACommonMetadata",
}
SPLIT = {"num_decodes", "num_decode_tokens", "num_prefills", "prefill_max_seq_len"}
"""What stock does not compute as dense attention, it may still call prefills; its own forward sends all to forward_mqa."""


@pytest.mark.parametrize("batch", BATCHES)
def test_values_are_those_of_stocks_builder(batch: str, monkeypatch: pytest.MonkeyPatch):
    """On the same batch, field by field; in the configuration in which stock computes nothing as dense attention."""
    stock = import_module("vllm.v1.attention.backends.mla.flashmla_sparse")
    monkeypatch.setattr(stock, "num_compute_units", lambda index: 4)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there is no device to copy it to
    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.") and hasattr(m, "PIN_MEMORY")]:
        monkeypatch.setattr(module, "PIN_MEMORY", False)
    query_lens, seq_lens, padding = BATCHES[batch]
    engine = make_engine("auto")
    if hasattr(engine.config.attention_config, "sparse_mla_force_mqa"):
        engine.config.attention_config.sparse_mla_force_mqa = True
    with set_current_vllm_config(engine.config):
        spec = engine.layer.get_kv_cache_spec(engine.config).copy_with_new_block_size(BLOCK)
        builder = stock.FlashMLASparseMetadataBuilder(spec, [engine.layer.layer_name], engine.config, CPU)
    step, unmade = make_step(engine, query_lens, seq_lens, **padding), set[str]()
    if hasattr(step.common, "token_to_req_indices"):  # 0.33: made by a Triton kernel
        monkeypatch.setattr(builder, "_build_req_id_per_token", lambda common: None)
        unmade = {"req_id_per_token"}
    theirs, ours = builder.build(0, step.common), engine.builder.build(0, step.common)
    compared = {field.name for field in fields(theirs)} - set(OF_STOCKS_KERNELS) - SPLIT - unmade
    assert compared >= {"num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "block_size", "topk_tokens"}
    for name in sorted(compared):
        one, other = getattr(theirs, name), getattr(ours, name)
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same, f"{name}: {other}, stock has {one}"
