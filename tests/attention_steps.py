# SPDX-License-Identifier: Apache-2.0
"""Steps for the tests of a layer: batches, caches, top-k indices, and what the oracle makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import oracle
import torch
from machines import H200
from recorder import Recorder, registry_of
from torch import Tensor

from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.contracts import Batch, StepPlan
from mla_portable.kit.split_kv import SPLIT_KV
from mla_portable.layouts import LAYOUTS as CACHE_LAYOUTS
from mla_portable.planner import Planner
from mla_portable.primitives import CONVERT_INDICES, GATHER_UPCONVERT, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES

HEADS, TOPK, BLOCK, BLOCKS, MODEL_LEN = 3, 12, 8, 40, 48
ROUTES = ("fused", "split", "direct", "upconvert")
LAYOUTS = ("fp8_ds_mla", "bf16", "bf16_nope")
SPEC = AttentionSpec(
    num_heads=HEADS,
    softmax_scale=0.06,
    max_num_tokens=64,
    max_num_reqs=12,
    max_model_len=MODEL_LEN,
    block_size=BLOCK,
    topk=TOPK,
    scale_format="pow2",
    prefill_workspace_tokens=64,  # less than two of the longest sequences, so that prefills come in chunks
)

# name -> (query length, sequence length) of each request, decode query length, padded tokens
BATCHES: dict[str, tuple[list[tuple[int, int]], int, int | None]] = {
    "decodes": ([(1, 17), (1, 1), (1, 48)], 1, None),
    "decodes of two tokens": ([(2, 17), (2, 2), (2, 48)], 2, None),
    "decodes, padded": ([(1, 17), (1, 30)], 1, 5),
    "decodes of two tokens, padded by half a request": ([(2, 17), (2, 30)], 2, 5),
    "one token": ([(1, 1)], 1, None),
    "decodes and prefills in chunks": ([(1, 20), (1, 9), (7, 40), (3, 3), (5, 31), (4, 48)], 1, None),
    "two-token decodes and prefills": ([(2, 20), (2, 9), (7, 40), (3, 30)], 2, None),
    "prefills alone": ([(6, 6), (9, 33), (2, 48)], 1, None),
    "empty requests between": ([(1, 20), (0, 7), (1, 9), (0, 0), (6, 40), (0, 12), (4, 30), (0, 48)], 1, None),
    "mixed, padded": ([(1, 20), (5, 31), (3, 48)], 1, 16),
    "nothing": ([], 1, None),
    "nothing, padded": ([], 1, 4),
    "only empty requests": ([(0, 5), (0, 9)], 1, None),
}


@dataclass(frozen=True)
class Step:
    """A batch with its tensors, and what the oracle says of it."""

    batch: Batch
    q: Tensor
    kv_cache: Tensor
    topk_indices: Tensor
    out: Tensor
    lse: Tensor


def make_step(name: str, layout: str, sink: Tensor | None = None, *, rope: bool = True) -> Step:
    """rope: queries have a rotary part; else it is zero, which leaves out that of the keys."""
    requests, _, padded = BATCHES[name]
    generator = torch.Generator().manual_seed(len(name))
    query_lens = np.array([query for query, _ in requests], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    seq_lens = np.array([total for _, total in requests], dtype=np.int32)
    num_tokens, rows = int(starts[-1]), padded or int(starts[-1])
    blocks = torch.randperm(BLOCKS, generator=generator).to(torch.int32)
    table = torch.full((len(requests), MODEL_LEN // BLOCK), -1, dtype=torch.int32)
    used = 0
    for request, total in enumerate(seq_lens.tolist()):
        count = -(-total // BLOCK)
        table[request, :count] = blocks[used : used + count]
        used += count
    cache = written_cache(layout, table, seq_lens.tolist(), generator)
    # an engine's buffer: longer than the batch, and what the batch does not use is absent
    topk = torch.full((SPEC.max_num_tokens, TOPK), -1, dtype=torch.int32)
    slots = torch.full((rows, TOPK), -1, dtype=torch.int64)
    for request, (query, total) in enumerate(requests):
        for offset in range(query):
            token, position = int(starts[request]) + offset, total - query + offset
            chosen = torch.randperm(position + 1, generator=generator)[:TOPK]
            where = torch.randperm(TOPK, generator=generator)[: len(chosen)]  # absent entries anywhere in the row
            if (token, len(name) % 2) == (1, 1):
                chosen, where = chosen[:0], where[:0]
            topk[token, where] = chosen.to(torch.int32)
            slots[token, where] = table[request, chosen // BLOCK].long() * BLOCK + chosen % BLOCK
    row = CACHE_LAYOUTS[layout]
    q = torch.randn(rows, HEADS, row.key_width, generator=generator).bfloat16()
    if not rope:
        q[..., row.value_width :] = 0
    q[num_tokens:] = math.nan  # padding rows hold anything
    flat = cache if row.is_quantized else cache.view(-1, row.row_width)
    out, lse = oracle.sparse_prefill(q, flat, slots, softmax_scale=SPEC.softmax_scale, attn_sink=sink, kv_layout=layout)
    return Step(Batch(starts, seq_lens, table, padded), q, cache, topk, out, lse)


def written_cache(layout: str, table: Tensor, seq_lens: list[int], generator: torch.Generator) -> Tensor:
    """Rows of the requests' tokens; every other byte is 0xFF, which is NaN in every format."""
    row = CACHE_LAYOUTS[layout]
    cache = torch.full((BLOCKS, BLOCK, row.row_bytes), 0xFF, dtype=torch.uint8).view(row.dtype)
    for request, total in enumerate(seq_lens):
        position = torch.arange(total)
        latent, rope = torch.randn(total, row.key_width, generator=generator).split([row.value_width, row.rope_width], dim=1)
        cache[table[request, position // BLOCK].long(), position % BLOCK] = row.pack(latent, rope)
    return cache


REFERENCE = Registry(environ={})


def make_layer(route: str = "auto", layout: str = "fp8_ds_mla", query_len: int = 1, **changes) -> SparseMLAAttention:
    scale_format = "pow2" if layout == "fp8_ds_mla" else None
    arguments = {name: changes.pop(name) for name in ("attn_sink", "buffers", "workspace") if name in changes}
    fields = {"route": route, "kv_layout": layout, "decode_query_len": query_len, "scale_format": scale_format, **changes}
    spec = replace(SPEC, **fields, attn_sink="attn_sink" in arguments)
    return SparseMLAAttention(spec, device="cpu", registry=REFERENCE, backend="reference", **arguments)


def plan_for(layer: SparseMLAAttention, batch: Batch) -> StepPlan:
    return Planner(layer.planner_config()).plan(batch)


def assert_matches(step: Step, out: Tensor, lse: Tensor | None) -> None:
    torch.testing.assert_close(out.double(), step.out, rtol=1e-2, atol=8e-3)
    if lse is not None:
        torch.testing.assert_close(lse.double(), step.lse, rtol=1e-5, atol=1e-5)


def recorded_layer(route: str = "split", query_len: int = 2) -> tuple[Recorder, SparseMLAAttention]:
    plugin = Recorder(schedule_kind=SPLIT_KV)
    spec = replace(SPEC, route=route, decode_query_len=query_len)
    return plugin, SparseMLAAttention(spec, device="cpu", registry=registry_of(plugin))


FLASH = Recorder(
    "flash.mla",
    FLASHMLA_TILES,
    support={"kv_layouts": ("fp8_ds_mla",), "padded_heads": (64, 128)},
    primitives=(SPARSE_DECODE,),
)
FLASH_PREFILL = Recorder("flashp.mla", support={"kv_layouts": ("bf16",)}, primitives=(SPARSE_PREFILL,))
PORTABLE = Recorder("portable.kernels", SPLIT_KV, preference=50.0)
SLOW = Recorder("slow.torch", preference=1000.0, support={"graph": False})
MOVERS = Recorder("movers.kernels", preference=50.0, primitives=(GATHER_UPCONVERT, CONVERT_INDICES))
PLODDING = Recorder("plodding.decode", preference=90.0, primitives=(SPARSE_DECODE,))
VENDOR_BF16 = Recorder("vendor.bf16", support={"kv_layouts": ("bf16",)}, primitives=(SPARSE_PREFILL,))


def route_of(*plugins: Recorder, **changes) -> SparseMLAAttention:
    """A layer built for what claims to be an H200; its kernels only write down that they were called."""
    return SparseMLAAttention(replace(SPEC, **changes), device="cpu", registry=registry_of(*plugins, facts={"cpu": H200}))
