# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's attention layer from vLLM's real classes: caches as vLLM lays them out, metadata as its builders make it.

A layer is built without its projections, which attention does not need. The lists that vLLM's builders write by Triton kernels
are written here by their definition: a window, every fourth or 128th token, slots of a block table. Caches hold random rows,
and every request's blocks are drawn from all of them: they are only read.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.engines.vllm.v4.kinds import Limits
from mla_portable.engines.vllm.v4.layer import ServedLayer
from mla_portable.layouts import LAYOUTS
from mla_portable.models import DEEPSEEK_V4

V4: Final = LAYOUTS["fp8_v4"]
WINDOW, WIDTH, TOKENS_OF_A_BLOCK = DEEPSEEK_V4.topk, DEEPSEEK_V4.qk_head_dim, 256
SCALE: Final = WIDTH**-0.5
RATIOS: Final = {"window": 1, "selected": 4, "all": 128}
"""Kinds of layers -> tokens to a compressed one."""
PREFIX: Final = "model.layers.2.attn"
_PAGE: Final = 576
"""vLLM pads pages to a multiple of it."""


@dataclass(frozen=True)
class Cache:
    """pages: [blocks, rows, 584] uint8, as layers read them. packed: [blocks * rows, 584], each row with its scales."""

    pages: Tensor
    packed: Tensor

    def values(self, slots: Tensor) -> Tensor:
        """[N, 512] float64."""
        return V4.split(self.packed[slots.long()], torch.float64)[0]


def make_cache(blocks: int, rows: int, device: torch.device, g: torch.Generator) -> Cache:
    """Blocks of random rows, a multiple of 576 bytes apart; what lies between them is NaN."""
    base = V4.pack(torch.randn((min(4096, blocks * rows), WIDTH), generator=g, device=device).to(torch.bfloat16))
    packed = base[torch.randint(len(base), (blocks * rows,), generator=g, device=device)]
    apart = -(-rows * V4.row_bytes // _PAGE) * _PAGE
    memory = torch.full((blocks, apart), 0xFF, dtype=torch.uint8, device=device)
    in_blocks, behind = packed.view(blocks, rows, -1), V4.scale_offset
    memory[:, : rows * behind] = in_blocks[:, :, :behind].reshape(blocks, -1)
    memory[:, rows * behind : rows * V4.row_width] = in_blocks[:, :, behind:].reshape(blocks, -1)
    return Cache(memory.as_strided((blocks, rows, V4.row_width), (apart, V4.row_width, 1)), packed)


@dataclass(frozen=True)
class Sizes:
    """topk: compressed tokens that are selected. chosen: of them, at most so many are. blocks: of both caches."""

    topk: int
    chosen: int
    max_tokens: int
    max_len: int
    blocks: int
    device: torch.device


def stock_class(version: str = "") -> Any:
    """vLLM's class on FlashMLA; version: "1" for V4.1."""
    return importlib.import_module(f"vllm.models.deepseek_v4{version}.nvidia.flashmla").DeepseekV4FlashMLAAttention


@dataclass(frozen=True)
class Caches:
    """What layers of a kind read: the window's cache and that of compressed tokens, None for the kind "window"."""

    kind: str
    version: str
    sizes: Sizes
    window: Cache
    compressed: Cache | None

    @property
    def ratio(self) -> int:
        return 2 if self.version and self.kind == "selected" else RATIOS[self.kind]


def make_caches(kind: str, sizes: Sizes, version: str = "", seed: int = 5) -> Caches:
    g = torch.Generator(sizes.device).manual_seed(seed)
    window_rows, rows = (32, 32) if version else (64, TOKENS_OF_A_BLOCK // RATIOS[kind])
    window = make_cache(sizes.blocks, window_rows, sizes.device, g)
    more = sizes.blocks * max(1, 64 // rows)
    return Caches(kind, version, sizes, window, None if kind == "window" else make_cache(more, rows, sizes.device, g))


def make_layer(cls: Any, caches: Caches, heads: int) -> Any:
    """A layer of `cls`, vLLM's own or derived from it, with `heads` on its rank."""
    sizes, device = caches.sizes, caches.sizes.device
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    padded = cls.get_padded_num_q_heads(heads)
    layer.prefix, layer.n_local_heads, layer.padded_heads = PREFIX, heads, padded
    layer.compress_ratio, layer.window_size, layer.scale = caches.ratio, WINDOW, SCALE
    layer.max_model_len, layer.max_num_batched_tokens, layer.max_image_tokens = sizes.max_len, sizes.max_tokens, 0
    sink = torch.full((padded,), -torch.inf, dtype=torch.float32, device=device)
    sink[:heads] = torch.linspace(-2, 2, heads, dtype=torch.float32)
    layer.attn_sink = torch.nn.Parameter(sink, requires_grad=False)
    layer.topk_indices_buffer = torch.full((sizes.max_tokens, sizes.topk), -1, dtype=torch.int32, device=device)
    layer.swa_cache_layer = SimpleNamespace(
        prefix=f"{PREFIX}.swa_cache", kv_cache=caches.window.pages, block_size=caches.window.pages.shape[1]
    )
    layer.kv_cache = torch.tensor([]) if caches.compressed is None else caches.compressed.pages
    layer.eager_scratch_pool = None
    if caches.version:
        layer.compress_ratio = 0 if caches.compressed is None else caches.ratio
        layer.use_pcp, layer.is_kv_source, layer._prefill_num_heads = False, True, padded
        layer.compressed_cache_prefix = None if caches.compressed is None else PREFIX
        layer._static_forward_context = {PREFIX: layer}
    if isinstance(layer, ServedLayer):
        graph = device.type != "cpu"
        layer.adopt_limits(Limits(sizes.max_tokens, min(sizes.max_tokens, 256), sizes.max_len, (), graph, False), 256)
    return layer


@dataclass(frozen=True)
class Step:
    """metadata: of vLLM's classes, by layer name. topk: what the indexer selected, [T, K]. q: [T, heads, 512].

    window, compressed: slots that each token attends to, -1 for none.
    """

    metadata: dict[str, Any]
    topk: Tensor
    q: Tensor
    window: Tensor
    compressed: Tensor | None

    def wanted(self, caches: Caches, token: int, sink: Tensor) -> Tensor:
        """[heads, 512] of one token, in float64."""
        lists = [(caches.window, self.window[token])]
        if caches.compressed is not None and self.compressed is not None:
            lists.append((caches.compressed, self.compressed[token]))
        keys = torch.cat([cache.values(slots[slots >= 0]) for cache, slots in lists])
        scores = SCALE * self.q[token].double() @ keys.T
        weights = torch.softmax(torch.cat([scores, sink.double().unsqueeze(1)], dim=1), dim=1)[:, :-1]
        return weights @ keys


def make_step(
    caches: Caches,
    heads: int,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_decodes: int,
    padding: int = 0,
    schedules: bool = False,
    seed: int = 1,
) -> Step:
    """Choose tokens and describe the batch.

    Args:
        num_decodes: the first so many requests are decodes. padding: tokens of no request, in batches of decodes alone.
        schedules: with FlashMLA's, which vLLM's own class needs.
    """
    sizes, device, ratio = caches.sizes, caches.sizes.device, caches.ratio
    g = torch.Generator(device).manual_seed(seed)
    tokens, decode_tokens, num_reqs = sum(query_lens), sum(query_lens[:num_decodes]), len(query_lens)
    assert not padding or decode_tokens == tokens
    rows, decode_rows = tokens + padding, decode_tokens + padding
    queries, lengths = (torch.tensor(each, dtype=torch.int32, device=device) for each in (query_lens, seq_lens))
    requests = torch.repeat_interleave(torch.arange(num_reqs, device=device), queries.long())
    starts = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
    starts[1:] = queries.cumsum(0)
    positions = (lengths - queries)[requests] + torch.arange(tokens, device=device) - starts[requests]

    def listed(columns: Tensor, valid: Tensor, table: Tensor, block: int, fill: int = -1) -> tuple[Tensor, Tensor]:
        """Positions [rows, K] and slots [rows, K] int32 of `columns`, [tokens, K], where valid; rows of padding hold `fill`."""
        found = table[requests.unsqueeze(1), (columns // block).clamp(max=table.shape[1] - 1)] * block + columns % block
        pair = [torch.full((rows, columns.shape[1]), fill, dtype=torch.int32, device=device) for _ in range(2)]
        for target, source in zip(pair, (columns, found), strict=True):
            target[:tokens] = torch.where(valid, source, -1)
        return pair[0], pair[1]

    def table_for(cache: Cache, longest: int) -> Tensor:
        blocks, block = cache.pages.shape[:2]
        return torch.randint(1, blocks, (num_reqs, -(-longest // block) + 1), generator=g, device=device, dtype=torch.int32)

    table = table_for(caches.window, max(seq_lens))
    columns = (positions - WINDOW + 1).clamp(min=0).unsqueeze(1) + torch.arange(WINDOW, device=device)
    seen = columns <= positions.unsqueeze(1)
    _, window = listed(columns, seen, table, caches.window.pages.shape[1])
    window_lens = torch.zeros(rows, dtype=torch.int32, device=device)
    window_lens[:tokens] = seen.sum(dim=1)

    topk = torch.full((rows, sizes.topk), 3, dtype=torch.int32, device=device)  # padding has those of an earlier step
    compressed, all_slots, all_positions = None, topk, topk
    counts = torch.zeros(rows, dtype=torch.int32, device=device)
    more_table = table
    if caches.compressed is not None:
        block, visible = caches.compressed.pages.shape[1], (positions + 1) // ratio
        longest = max(int(visible.max()), 1)
        more_table = table_for(caches.compressed, longest)
        if caches.kind == "selected":
            scores = torch.rand((tokens, max(longest, sizes.topk)), generator=g, device=device)
            scores[torch.arange(scores.shape[1], device=device) >= visible.unsqueeze(1)] = -1
            best, chosen = scores.topk(sizes.topk, dim=1)
            valid = (best >= 0) & (torch.arange(sizes.topk, device=device) < sizes.chosen)
            topk, compressed = listed(chosen, valid, more_table, block, fill=3)
        else:
            active = min(max(128, 1 << (longest - 1).bit_length()), -(-sizes.max_len // ratio // 128) * 128)
            chosen = torch.arange(active, device=device).expand(tokens, -1)
            all_positions, all_slots = listed(chosen, chosen < visible.unsqueeze(1), more_table, block)
            compressed = all_slots
            counts[:tokens] = visible
            wide = torch.full((rows, active + 128), 7, dtype=torch.int32, device=device)  # lists are views of wider rows
            wide[:, :active] = all_slots
            all_slots = wide[:, :active]

    valid, cpu = torch.arange(rows, device=device) < tokens, starts.cpu()
    requests_of = torch.zeros(rows, dtype=torch.int32, device=device)
    requests_of[:tokens] = requests
    prefill_queries = queries[num_decodes:]
    prefix = lengths[num_decodes:] - prefill_queries
    plans = {f"tile_sched_{name}": _schedule() for name in ("swaonly", "c4a", "c128a", "c2a") if schedules}
    swa_metadata = _known(
        importlib.import_module("vllm.v1.attention.backends.mla.sparse_swa").DeepseekSparseSWAMetadata,
        {
            "block_table": table,
            "slot_mapping": torch.where(valid, 0, -1),
            "block_size": caches.window.pages.shape[1],
            "seq_lens": lengths,
            "query_start_loc": starts,
            "query_start_loc_cpu": cpu,
            "is_valid_token": valid,
            "token_to_req_indices": requests_of,
            "decode_swa_indices": window[:decode_rows].unsqueeze(1),
            "decode_swa_lens": window_lens[:decode_rows],
            "decode_swa_width": WINDOW,
            "prefill_swa_indices": window[decode_rows:].unsqueeze(1),
            "prefill_swa_lens": window_lens[decode_rows:],
            "num_decodes": num_decodes,
            "num_prefills": num_reqs - num_decodes,
            "num_decode_tokens": decode_rows,
            "num_prefill_tokens": rows - decode_rows,
            "prefill_seq_lens": lengths[num_decodes:],
            "prefill_seq_lens_cpu": lengths[num_decodes:].cpu(),
            "prefill_gather_lens": prefill_queries + prefix.clamp(max=WINDOW - 1),
            "prefill_query_lens_cpu": prefill_queries.cpu(),
            "prefill_window_size": WINDOW,
            "prefill_max_model_len": sizes.max_len,
            "prefill_max_num_batched_tokens": sizes.max_tokens,
            **plans,
        },
    )
    metadata = {f"{PREFIX}.swa_cache": swa_metadata}
    if caches.compressed is not None:
        metadata[PREFIX] = _known(
            importlib.import_module("vllm.models.deepseek_v4.sparse_mla").DeepseekV4FlashMLAMetadata,
            {
                "num_reqs": num_reqs,
                "max_query_len": max(query_lens),
                "max_seq_len": max(seq_lens),
                "num_actual_tokens": tokens,
                "query_start_loc": starts,
                "slot_mapping": torch.zeros(rows, dtype=torch.int64, device=device),
                "block_table": more_table,
                "req_id_per_token": requests_of,
                "block_size": caches.compressed.pages.shape[1] * ratio,
                "topk_tokens": sizes.topk,
                "c128a_global_decode_topk_indices": all_slots[:decode_rows].unsqueeze(1),
                "c128a_decode_topk_lens": counts[:decode_rows],
                "c128a_prefill_topk_indices": all_positions[decode_rows:],
            },
        )
    q = torch.randn((rows, heads, WIDTH), generator=g, device=device).to(torch.bfloat16)
    return Step(metadata, topk, q, window, compressed)


def prepared(layer: Any, step: Step) -> tuple[Tensor, Tensor]:
    """q and output [T, padded heads, 512] of a layer for a step, whose selection goes into the layer's buffer."""
    layer.topk_indices_buffer[: len(step.topk)] = step.topk
    q = step.q.new_zeros((len(step.q), layer.padded_heads, WIDTH))
    q[:, : step.q.shape[1]] = step.q
    return q, torch.full_like(q, torch.nan)


def _known(kind: Any, given: dict[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if name in names})


def _schedule() -> Any:
    """What vLLM's builder makes once a step for each kind of layers."""
    return importlib.import_module("vllm.v1.attention.ops.flashmla").get_mla_metadata()[0]
