# SPDX-License-Identifier: Apache-2.0
"""Model runner V2's own functions: it makes the builders, describes batches to them, and captures graphs by what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu import attn_utils
from vllm_engine import BLOCK, CPU, Engine, Step, assert_close, attend, expected, make_engine, make_step

from mla_portable.engines.vllm.metadata import MLAPortableMetadata


def start(engine: Engine, block_size: int = BLOCK) -> tuple[KVCacheConfig, list[Any], Any, list[int]]:
    """As the runner starts: groups with builders, what graphs it may capture, and the blocks that kernels see."""
    with set_current_vllm_config(engine.config):
        engine.config.cache_config.block_size = block_size
        spec = engine.layer.get_kv_cache_spec(engine.config)
        group = KVCacheGroupSpec([engine.layer.layer_name], spec)
        cache = KVCacheConfig(num_blocks=len(engine.kv_cache), kv_cache_tensors=[], kv_cache_groups=[group])
        groups, support, kernel_blocks = attn_utils.init_attn_backend(cache, engine.config, CPU)
    return cache, groups, support, kernel_blocks


def describe(step: Step, cache: KVCacheConfig, groups: list[Any], **more: Any) -> MLAPortableMetadata:
    """The step's metadata; the runner hands over buffers that are longer than the batch."""
    common = step.common
    longer = torch.cat([common.seq_lens, torch.full((3,), 77, dtype=torch.int32)])
    (found,) = attn_utils.build_attn_metadata(
        attn_groups=groups,
        num_reqs=common.num_reqs,
        num_tokens=common.num_actual_tokens,
        query_start_loc_gpu=common.query_start_loc,
        query_start_loc_cpu=common.query_start_loc_cpu,
        max_query_len=common.max_query_len,
        seq_lens=longer,
        seq_lens_cpu_upper_bound=longer.clone(),
        max_seq_len=common.max_seq_len,
        block_tables=[common.block_table_tensor],
        slot_mappings=common.slot_mapping[None],
        kv_cache_config=cache,
        **more,
    ).values()
    return found


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "padding"),
    [([1, 1, 9, 33], [100, 64, 9, 90], {}), ([1] * 3, [70, 1, 200], {"padded_tokens": 8, "padded_reqs": 8})],
    ids=["mixed", "padded decodes"],
)
def test_a_step_is_what_the_oracle_says(query_lens: list[int], seq_lens: list[int], padding: dict[str, int], capture: bool):
    engine = make_engine("fp8")
    cache, groups, _, _ = start(engine)
    step = make_step(engine, query_lens, seq_lens, **padding)
    metadata = describe(step, cache, groups, for_cudagraph_capture=capture)
    assert type(metadata) is MLAPortableMetadata
    out, _ = attend(engine, metadata, step.q)
    assert_close(out, expected(engine, step)[0], len(step.requests))


def test_kernels_see_blocks_of_64_and_graphs_follow_the_route():
    _, _, support, kernel_blocks = start(make_engine(), block_size=4 * BLOCK)
    assert kernel_blocks == [BLOCK]
    assert support.min_cg_support is AttentionCGSupport.NEVER, "the reference reads back"
    assert support.min_cg_attn_backend == "MLAPortableBackend"


def test_drafts_are_decodes_to_the_runner_too():
    engine = make_engine("fp8", drafts=2)
    cache, groups, _, _ = start(engine)
    metadata = describe(make_step(engine, [3] * 4, [3, 64, 66, 256]), cache, groups)
    assert metadata.plan.decode_query_len == 3 and metadata.plan.num_prefill_tokens == 0
