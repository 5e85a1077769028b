# SPDX-License-Identifier: Apache-2.0
"""The problem of a whole DeepSeek-V3.2-shaped step: decodes, then prefills, over a paged cache; the same for the same seed.

A layer walks the step on `StepInputs`. `step_cases` are the sizes at which it asks for each primitive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mla_portable.contracts import Batch, InvalidArgument
from mla_portable.judge.problems.bench import KernelCase
from mla_portable.layouts import HEAD_SIZE, INDEX_FP8, KV_LORA_RANK, LAYOUTS, layout_names, scale_formats
from mla_portable.models import DEEPSEEK_V32
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_SELECT,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)

Ints = np.ndarray[Any, np.dtype[np.int64]]

_POISON = 0xFF
"""A byte that is NaN in e4m3, and twice NaN in bfloat16: what no token was written to must not reach an output."""
_SPARE_BLOCKS = 3
"""Blocks of the cache that belong to no request."""
_SCORES_PER_CHUNK = 1 << 24
"""Bound on the random scores drawn at once: 64 MiB of float32."""

_RANGES: Final[dict[str, tuple[int, int]]] = {
    "num_heads": (1, 512),
    "topk": (1, 1 << 20),
    "decodes": (0, 1 << 16),
    "decode_query_len": (1, 1 << 10),
    "prefills": (0, 1 << 16),
    "prefill_tokens": (1, 1 << 20),
    "context": (0, 1 << 24),
    "block_size": (1, 1 << 16),
    "seed": (0, (1 << 63) - 1),
}
"""Field of StepShape -> least and greatest value, well beyond any model's; whether it fits a device, `step_bytes` says."""
_CACHES = 3
"""Copies of the cache that are alive at once: the step's own, one to write, one to compare with."""
_LATENT_BYTES = HEAD_SIZE * (4 + 2 + 2)
"""A new token's latent as drawn, as bf16 and in its two parts."""
_FEW = 8
"""Decode rows to try where the step has none."""
_Q_LIKE = 4
"""Tensors of the size of q that are alive at once, outputs included."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of a step.

    Attributes:
        num_heads: H. topk: K. decodes: requests that decode, decode_query_len tokens each (more than one for
            speculative decoding). prefills: requests that prefill, prefill_tokens tokens each; the first is fresh.
        context: tokens that the longest request has in the cache before the step; the others have between an eighth of
            it and all of it, a fresh prefill none.
        block_size, kv_layout, scale_format: of the cache. seed: of everything random.
    Raises: InvalidArgument for a size out of its range, for unknown names, and for a layout in several tensors.
    """

    num_heads: int = DEEPSEEK_V32.rank_heads[0]
    topk: int = DEEPSEEK_V32.topk
    decodes: int = 8
    decode_query_len: int = 1
    prefills: int = 2
    prefill_tokens: int = 64
    context: int = 4096
    block_size: int = 64
    kv_layout: str = "fp8_ds_mla"
    scale_format: str = "pow2"
    seed: int = 0

    def __post_init__(self) -> None:
        where = "StepShape"
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise InvalidArgument(where, name, got=getattr(self, name), expected=f"{least} to {most}")
        if self.decodes + self.prefills == 0:
            raise InvalidArgument(where, "decodes", got="0, with 0 prefills", expected="at least one request in the step")
        if self.prefills and self.prefill_tokens <= self.decode_query_len:
            raise InvalidArgument(
                where,
                "prefill_tokens",
                got=self.prefill_tokens,
                expected=f"more than decode_query_len ({self.decode_query_len})",
                remedy="A request of fewer query tokens is served as a decode.",
            )
        if self.kv_layout not in layout_names():
            expected = f"one of {', '.join(layout_names())}"
            raise InvalidArgument(where, "kv_layout", got=repr(self.kv_layout), expected=expected)
        tensors = LAYOUTS[self.kv_layout].tensors
        if tensors:
            got, expected = f"{self.kv_layout}, in {len(tensors)} tensors", "a layout in one tensor"
            raise InvalidArgument(where, "kv_layout", got=got, expected=expected)
        if self.scale_format not in scale_formats():
            expected = f"one of {', '.join(scale_formats())}"
            raise InvalidArgument(where, "scale_format", got=repr(self.scale_format), expected=expected)
        # a plugin's layout has scale formats of its own
        object.__setattr__(self, "scale_format", LAYOUTS[self.kv_layout].scale_format_near(self.scale_format))

    @property
    def num_reqs(self) -> int:
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        return self.decodes * self.decode_query_len + self.prefills * self.prefill_tokens


def default_shape(device_type: str) -> StepShape:
    """DeepSeek-V3.2's topk, with work that fits the device.

    A CPU gets 16 heads (a rank of eight) and few tokens, so that plain torch is done within a minute on two cores; a GPU all
    128 heads, as under data-parallel attention, and enough rows to fill it.
    """
    if device_type == "cpu":
        return StepShape()
    return StepShape(num_heads=DEEPSEEK_V32.heads, decodes=64, prefill_tokens=512, context=8192)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step, before anything ran.

    Attributes:
        shape: what it was made for. batch: as the planner takes it.
        positions: [T] int64 on the host, each token's place in its request. req_id_per_token: [T] int64 on the host.
        kv_cache: [blocks, block_size, row] where every byte is NaN.
        history_kv_c, history_k_pe, history_slots: [P, 512], [P, 64] bf16, [P] int64: tokens of earlier steps.
        kv_c, k_pe, slot_mapping: [T, 512], [T, 64] bf16, [T] int64: this step's tokens.
        q: [T, H, 576] bf16. topk_indices: [T, K] int32: distinct positions up to the token's own, at random; -1 fills the
            tail where there are fewer than K.
    """

    shape: StepShape
    batch: Batch
    positions: Tensor
    req_id_per_token: Tensor
    kv_cache: Tensor
    history_kv_c: Tensor
    history_k_pe: Tensor
    history_slots: Tensor
    kv_c: Tensor
    k_pe: Tensor
    slot_mapping: Tensor
    q: Tensor
    topk_indices: Tensor


def make_inputs(shape: StepShape, device: torch.device) -> StepInputs:
    """Draw a step on the host, so that a seed means the same on every device, then copy it to `device`."""
    rng = np.random.default_rng(shape.seed)
    generator = torch.Generator().manual_seed(shape.seed)
    contexts, query_lens = _lens(shape, rng)
    seq_lens = contexts + query_lens
    block_table, num_blocks = _block_table(seq_lens, shape.block_size, rng)

    def slots(request: Ints, position: Ints) -> Tensor:
        blocks = block_table[request, position // shape.block_size].astype(np.int64)
        return torch.from_numpy(blocks * shape.block_size + position % shape.block_size).to(device)

    def latents(count: int) -> tuple[Tensor, Tensor]:
        """[count, 512] and [count, 64] of unit variance, as a normalised latent and a rotary key have."""
        both = torch.randn(count, HEAD_SIZE, generator=generator).bfloat16().to(device)
        return both[:, :KV_LORA_RANK].contiguous(), both[:, KV_LORA_RANK:].contiguous()

    history_request, history_position = _ragged(np.zeros_like(contexts), contexts)
    request, position = _ragged(contexts, query_lens)
    layout = LAYOUTS[shape.kv_layout]
    cache = torch.full((num_blocks, shape.block_size, layout.row_bytes), _POISON, dtype=torch.uint8, device=device)
    history_kv_c, history_k_pe = latents(len(history_position))
    kv_c, k_pe = latents(len(position))
    q = torch.empty(shape.num_tokens, shape.num_heads, HEAD_SIZE, dtype=torch.bfloat16)
    for row in q:  # one row at a time: float32 of the whole would be twice the size
        row.copy_(torch.randn(row.shape, generator=generator))
    return StepInputs(
        shape=shape,
        batch=Batch(
            query_start_loc=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_table=torch.from_numpy(block_table).to(device),
            seq_lens_device=torch.from_numpy(seq_lens.astype(np.int32)).to(device),  # as engines have them
        ),
        positions=torch.from_numpy(position),
        req_id_per_token=torch.from_numpy(request),
        kv_cache=cache.view(layout.dtype),
        history_kv_c=history_kv_c,
        history_k_pe=history_k_pe,
        history_slots=slots(history_request, history_position),
        kv_c=kv_c,
        k_pe=k_pe,
        slot_mapping=slots(request, position),
        q=q.to(device),
        topk_indices=_causal_topk(position, shape.topk, generator).to(device),
    )


def step_bytes(shape: StepShape) -> int:
    """About how much memory a step takes, on a host or a device that holds all of it."""
    contexts, query_lens = _lens(shape, np.random.default_rng(shape.seed))
    blocks = int((-(-(contexts + query_lens) // shape.block_size)).sum()) + _SPARE_BLOCKS
    cache = blocks * shape.block_size * LAYOUTS[shape.kv_layout].row_bytes
    latents = int((contexts + query_lens).sum()) * _LATENT_BYTES
    return _CACHES * cache + latents + shape.num_tokens * (_Q_LIKE * shape.num_heads * HEAD_SIZE * 2 + 3 * shape.topk * 4)


def step_cases(shape: StepShape, *, index_heads: int = DEEPSEEK_V32.index_heads) -> Mapping[str, KernelCase]:
    """The size of each primitive's work in a step, by the primitive's name with a remark where it appears twice.

    Contexts are drawn as `make_inputs` draws them. The indexer's work is that of the decodes over the longest context.

    Args:
        index_heads: of the indexer.
    """
    contexts, query_lens = _lens(shape, np.random.default_rng(shape.seed))
    cached = max(int((contexts + query_lens).sum()), shape.topk)
    decodes, query_len = (shape.decodes, shape.decode_query_len) if shape.decodes else (min(_FEW, shape.num_tokens), 1)
    prefills = slice(shape.decodes if shape.prefills else 0, shape.num_reqs)
    layout, scale_format, heads, topk = LAYOUTS[shape.kv_layout], shape.scale_format, shape.num_heads, shape.topk
    prefill = KernelCase(SPARSE_PREFILL, int(query_lens[prefills].sum()), layout.name, heads, topk, cached, 0, scale_format)
    gathered = int((contexts + query_lens)[prefills].sum())
    longest = max(shape.context, topk)
    decode = KernelCase(SPARSE_DECODE, decodes, layout.name, heads, topk, cached, 0, scale_format, query_len)
    cases = {
        "cache_write": KernelCase(CACHE_WRITE, shape.num_tokens, layout.name, scale_format=scale_format),
        "convert_indices": KernelCase(CONVERT_INDICES, shape.num_tokens, topk=topk),
        "gather_upconvert": KernelCase(GATHER_UPCONVERT, gathered, layout.name, scale_format=scale_format),
        "sparse_decode": decode,
        "sparse_prefill (cache)": prefill,
        "sparse_prefill (workspace)": replace(prefill, kv_layout=layout.workspace.name, width=max(gathered, topk)),
        "merge_states": KernelCase(MERGE_STATES, decodes * query_len * heads),
        "quantize_per_tensor": KernelCase(QUANTIZE_PER_TENSOR, shape.num_tokens),
        "indexer_select": KernelCase(INDEXER_SELECT, decodes, INDEX_FP8.name, index_heads, topk, longest),
        "topk_select": KernelCase(TOPK_SELECT, decodes, topk=topk, width=longest),
    }
    if not layout.is_quantized:
        del cases["sparse_prefill (workspace)"]
    return cases


def _lens(shape: StepShape, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Tokens of each request in the cache, and in the step."""
    contexts = rng.integers(shape.context // 8, shape.context, size=shape.num_reqs, endpoint=True, dtype=np.int64)
    if shape.decodes:
        contexts[0] = shape.context
    if shape.prefills:
        contexts[shape.decodes] = 0
    return contexts, np.repeat([shape.decode_query_len, shape.prefill_tokens], [shape.decodes, shape.prefills])


def _block_table(seq_lens: Ints, block_size: int, rng: np.random.Generator) -> tuple[np.ndarray[Any, np.dtype[np.int32]], int]:
    """[R, columns], blocks scattered over the cache, -1 past a request's end; and how many blocks there are."""
    needed = -(-seq_lens // block_size)
    num_blocks = int(needed.sum()) + _SPARE_BLOCKS
    table = np.full((len(seq_lens), int(needed.max())), -1, dtype=np.int32)
    table[_ragged(np.zeros_like(needed), needed)] = rng.permutation(num_blocks)[: int(needed.sum())]
    return table, num_blocks


def _ragged(starts: Ints, lens: Ints) -> tuple[Ints, Ints]:
    """Row number and value of every element of the rows starts[i], starts[i] + 1, ... of lens[i] elements."""
    rows = np.repeat(np.arange(len(lens), dtype=np.int64), lens)
    first = np.cumsum(lens) - lens
    return rows, np.arange(len(rows), dtype=np.int64) - first[rows] + starts[rows]


def _causal_topk(position: Ints, topk: int, generator: torch.Generator) -> Tensor:
    """[T, K] int32: of each token's position and those before it, K at random in random order, then -1."""
    result = torch.full((len(position), topk), -1, dtype=torch.int32)
    longest = int(position.max()) + 1
    rows = max(1, _SCORES_PER_CHUNK // longest)
    for start in range(0, len(position), rows):
        own = torch.from_numpy(position[start : start + rows]).unsqueeze(1)  # [rows, 1]
        scores = torch.rand(len(own), longest, generator=generator)
        scores.masked_fill_(torch.arange(longest) > own, -1.0)  # [rows, longest]
        best, chosen = scores.topk(min(topk, longest), dim=1)
        result[start : start + rows, : chosen.shape[1]] = torch.where(best >= 0, chosen, -1).to(torch.int32)
    return result
