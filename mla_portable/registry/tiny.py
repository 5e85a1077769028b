# SPDX-License-Identifier: Apache-2.0
"""Tiny problems, one family per primitive, that an implementation must solve before it is trusted with real ones.

Sizes are the smallest that a Support allows, values are seeded, and the traps are those that libraries are known to fall
into: absent indices in any column, rows with nothing valid, indices just past the cache, NaN in what nobody owns. Whatever a
faulty kernel reads past a tensor's edge is memory of the same allocation, so that it is caught by value, not by a fault.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import (
    BF16,
    FP8_DS_MLA,
    HEAD_SIZE,
    INDEX_HEAD_SIZE,
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    DeviceFacts,
    Implementation,
    Primitive,
    Request,
    Support,
    pack_fp8,
)

__all__ = ["Call", "TinyCase", "tiny_cases", "tiny_layouts"]

NUM_ROWS: Final = 4
"""Query rows of an attention problem: one full, one with holes, one empty, one with a single entry."""
USED_SLOTS: Final = 48
SOFTMAX_SCALE: Final = 192**-0.5
"""DeepSeek-V3's: one over the square root of its 128 + 64 query dimensions."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one call.

    Attributes:
        args: by name, in order. kwargs: keyword-only ones.
        written: names of those that the call may change.
        watched: tensors to compare afterwards that are no result: what lies around a tensor that is written.
    """

    args: dict[str, Any]
    kwargs: dict[str, Any]
    written: frozenset[str] = frozenset()
    watched: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True, slots=True, eq=False)
class TinyCase:
    """One problem. `make(device)` builds the same call afresh, on any device, every time."""

    name: str
    request: Request
    make: Callable[[torch.device], Call]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Heads H, top-k width K, block size and S: the smallest convenient ones that a Support allows."""

    heads: int
    topk: int
    block_size: int
    query_len: int

    @classmethod
    def of(cls, support: Support) -> _Sizes:
        heads = min(support.num_heads) if support.num_heads else min(2, support.max_heads or 2)
        multiple = support.topk_multiple
        topk = -(-64 // multiple) * multiple
        if support.max_topk is not None and topk > support.max_topk:
            topk = max(support.max_topk // multiple, 1) * multiple
        unit = support.block_size_multiple
        block_size = -(-16 // unit) * unit
        if support.block_sizes is not None:
            block_size = min((size for size in support.block_sizes if size % unit == 0), default=support.block_sizes[0])
        return cls(heads, topk, block_size, query_len=1 if support.max_query_len == 1 else 2)

    @property
    def num_blocks(self) -> int:
        return max(3, -(-2 * USED_SLOTS // self.block_size))

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


def tiny_layouts(implementation: Implementation, layout: str | None) -> tuple[str | None, ...]:
    """The cache layouts to try an implementation on: `layout`, else all it declares; (None,) where no cache is touched."""
    if implementation.primitive in _WITHOUT_CACHE:
        return (None,)
    return (layout,) if layout is not None else implementation.support.kv_layouts or (None,)


def tiny_cases(implementation: Implementation, device: DeviceFacts, layout: str | None) -> Iterator[TinyCase]:
    """The problems for one implementation on one cache layout (None for primitives that touch no cache)."""
    sizes = _Sizes.of(implementation.support)
    request = Request(implementation.primitive, device, kv_layout=layout)
    return _FAMILIES[implementation.primitive](request, implementation.support, sizes)


def _generator(request: Request, name: str) -> torch.Generator:
    seed = zlib.crc32(f"{request.primitive}/{request.kv_layout}/{name}".encode())
    return torch.Generator().manual_seed(seed)


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)


def _int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _with_slack(tensor: Tensor, device: torch.device, fill: float) -> tuple[Tensor, Tensor]:
    """`tensor` on `device`, inside an allocation that goes on before and after it; the rest holds `fill`.

    Returns: the tensor, a view, and the allocation. The margin is a multiple of 64 rows, which keeps their alignment.
    """
    margin = -(-64 // tensor.shape[1]) if tensor.dim() == 3 else 64
    base = torch.full((tensor.shape[0] + 2 * margin, *tensor.shape[1:]), fill, dtype=tensor.dtype)
    base[margin : margin + tensor.shape[0]] = tensor
    base = base.to(device)
    return base[margin : margin + tensor.shape[0]], base


def _poison(layout: str) -> float:
    """What fills unused cache rows: 0xFF bytes are NaN as e4m3, as float32 and as bfloat16."""
    return 255 if layout == FP8_DS_MLA.name else float("nan")


def _cache(generator: torch.Generator, layout: str, sizes: _Sizes, scale_format: str) -> tuple[Tensor, Tensor]:
    """A cache whose used slots hold tokens and whose other rows are NaN.

    Returns: [blocks, block_size, row_width] on the CPU and the used slots [USED_SLOTS] int64.
    """
    used = torch.randperm(sizes.num_slots, generator=generator)[:USED_SLOTS]
    tokens = _normal(generator, len(used), HEAD_SIZE)
    spec = FP8_DS_MLA if layout == FP8_DS_MLA.name else BF16
    rows = torch.full((sizes.num_slots, spec.row_width), _poison(layout), dtype=spec.dtype)
    latent, rope = tokens[:, :KV_LORA_RANK], tokens[:, KV_LORA_RANK:]
    rows[used] = pack_fp8(latent, rope, scale_format=scale_format) if spec.is_quantized else tokens
    return rows.view(sizes.num_blocks, sizes.block_size, spec.row_width), used


def _readable_format(support: Support) -> str:
    """Scales to read: arbitrary ones where the kernel takes them."""
    return "amax" if "amax" in support.scale_formats else support.scale_formats[0]


def _slots_with_holes(generator: torch.Generator, used: Tensor, sizes: _Sizes) -> Tensor:
    """[NUM_ROWS, K] int32 slots: a full row, one with absent entries of every kind, an empty one, one with a single entry."""
    k = sizes.topk
    indices = used[torch.randint(len(used), (NUM_ROWS, k), generator=generator)].to(torch.int32)
    indices[1, 0], indices[1, k // 2], indices[1, -1] = -1, sizes.num_slots, -2
    indices[1, k // 3] = sizes.num_slots + 1
    indices[2] = -1
    indices[2, k // 2] = sizes.num_slots
    indices[3, :-1] = -1
    return indices


def _attention(request: Request, support: Support, sizes: _Sizes) -> Iterator[TinyCase]:
    """sparse_decode on a paged cache; sparse_prefill on a bf16 workspace or the paged FP8 cache."""
    layout = request.kv_layout or BF16.name
    decode = request.primitive is Primitive.SPARSE_DECODE
    paged = decode or layout == FP8_DS_MLA.name
    scale_format = _readable_format(support)
    rows = (NUM_ROWS // sizes.query_len, sizes.query_len) if decode else (NUM_ROWS,)
    request = request.but(
        num_heads=sizes.heads,
        topk=sizes.topk,
        block_size=sizes.block_size if paged else None,
        query_len=sizes.query_len if decode else None,
        rows=NUM_ROWS,
        scale_format=scale_format if layout == FP8_DS_MLA.name else None,
        lse=support.lse,
    )

    def make(name: str, device: torch.device, *, lengths: bool, sink: bool, given: bool) -> Call:
        generator = _generator(request, name)
        kv, used = _cache(generator, layout, sizes, scale_format)
        indices = _slots_with_holes(generator, used, sizes)
        kv, _ = _with_slack(kv if paged else kv.view(sizes.num_slots, HEAD_SIZE), device, _poison(layout))
        kwargs: dict[str, Any] = {"softmax_scale": SOFTMAX_SCALE}
        if lengths:  # past each length stand slots whose rows are NaN
            counts = _int32([sizes.topk // 2, sizes.topk - 1, sizes.topk, sizes.topk])
            unused = torch.ones(sizes.num_slots, dtype=torch.bool).index_fill_(0, used, False).nonzero()[0, 0]
            past = torch.arange(sizes.topk) >= counts[:, None]
            indices = indices.masked_fill(past, int(unused))
            kwargs["lengths"] = counts.view(rows).to(device)
        if sink:
            kwargs["attn_sink"] = torch.linspace(-1.0, 2.0, sizes.heads).to(device)
        if given:
            kwargs["out"] = torch.full((*rows, sizes.heads, KV_LORA_RANK), float("nan"), dtype=torch.bfloat16, device=device)
            if support.lse:
                kwargs["lse_out"] = torch.full((*rows, sizes.heads), float("nan"), device=device)
        q = _normal(generator, *rows, sizes.heads, HEAD_SIZE).to(device)
        args = {"q": q, "kv_cache" if decode else "kv": kv, "indices": indices.view(*rows, sizes.topk).to(device)}
        return Call(args, kwargs, written=frozenset({"out", "lse_out"}))

    yield TinyCase("holes", request, lambda device: make("holes", device, lengths=False, sink=False, given=True))
    features = {"lengths": support.lengths, "sink": support.attn_sink}
    if any(features.values()):
        name = " and ".join(word for word, on in features.items() if on)
        asked = request.but(lengths=support.lengths, attn_sink=support.attn_sink)
        yield TinyCase(name, asked, lambda device: make(name, device, **features, given=False))


def _convert_indices(request: Request, support: Support, sizes: _Sizes) -> Iterator[TinyCase]:
    """Three tokens of two requests; a negative and an out-of-range block in the table, holes and overlong positions."""
    size, k, columns = sizes.block_size, sizes.topk, 3
    request = request.but(topk=k, block_size=size, rows=3)

    def make(name: str, device: torch.device, **features: Any) -> Call:
        generator = _generator(request, name)
        table = _int32([[2, 0, 1], [1, -1, sizes.num_blocks]])
        positions = torch.randint(columns * size, (3, k), generator=generator, dtype=torch.int32)
        positions[0, 0], positions[0, k // 2], positions[0, -1] = -1, columns * size, -7
        positions[1, : k // 4], positions[1, -1] = -1, columns * size + 1  # past the table, yet a row of a workspace
        positions[2] = positions[2].where(torch.arange(k) % 3 > 0, torch.tensor(-1, dtype=torch.int32))
        kwargs: dict[str, Any] = {"block_size": size, "num_slots": sizes.num_slots}
        if features.get("workspace"):
            kwargs["prefill_request_ids"] = _int32([-1, 0, 1]).to(device)
            kwargs["prefill_workspace_starts"] = _int32([5, 5 + columns * size]).to(device)
        if features.get("compact"):
            kwargs["compact"] = True
            kwargs["out"] = tuple(torch.full(s, 99, dtype=torch.int32, device=device) for s in ((3, k), (3,)))
        args = {
            "topk_indices": positions.to(device),
            "req_id_per_token": _int32([0, 1, 1]).to(device),
            "block_table": _with_slack(table, device, fill=0)[0],
        }
        return Call(args, kwargs, written=frozenset({"out"}))

    yield TinyCase("holes", request, lambda device: make("holes", device))
    if support.compact:
        yield TinyCase("compact", request.but(compact=True), lambda device: make("compact", device, compact=True))
    if support.prefill_workspace:
        asked = request.but(prefill_workspace=True)
        yield TinyCase("workspace", asked, lambda device: make("workspace", device, workspace=True))


def _gather_upconvert(request: Request, support: Support, sizes: _Sizes) -> Iterator[TinyCase]:
    """Two requests with a gap between them, a third whose only block is absent; the rest of `out` must stay as it was."""
    layout = request.kv_layout or FP8_DS_MLA.name
    size, scale_format = sizes.block_size, _readable_format(support)
    request = request.but(block_size=size, scale_format=scale_format if layout == FP8_DS_MLA.name else None)

    def make(device: torch.device) -> Call:
        generator = _generator(request, "ragged")
        spec = FP8_DS_MLA if layout == FP8_DS_MLA.name else BF16
        kv = torch.full((sizes.num_blocks, size, spec.row_width), _poison(layout), dtype=spec.dtype)
        tokens = _normal(generator, 2 * size, HEAD_SIZE)
        latent, rope = tokens[:, :KV_LORA_RANK], tokens[:, KV_LORA_RANK:]
        used = (pack_fp8(latent, rope, scale_format=scale_format) if spec.is_quantized else tokens).view(2, size, -1)
        tail = min(3, size)  # tokens of the first request's second block
        kv[2], kv[0, :tail], kv[1, 0] = used[0], used[1, :tail], used[1, 0]
        lengths = _int32([size + tail, 1, 1])
        starts = _int32([0, size + 5, size + 7])
        args = {
            "kv_cache": _with_slack(kv, device, _poison(layout))[0],
            "block_table": _int32([[2, 0], [1, -1], [-1, -1]]).to(device),
            "seq_lens": lengths.to(device),
            "workspace_starts": starts.to(device),
        }
        out = torch.full((size + 10, HEAD_SIZE), 7.0, dtype=torch.bfloat16, device=device)
        return Call(args, {"out": out}, written=frozenset({"out"}))

    yield TinyCase("ragged", request, make)


def _cache_write(request: Request, support: Support, sizes: _Sizes) -> Iterator[TinyCase]:
    """Two tokens to write, one to skip, one past the cache; every other byte must stay as it was."""
    layout = request.kv_layout or FP8_DS_MLA.name
    spec = FP8_DS_MLA if layout == FP8_DS_MLA.name else BF16
    for scale_format in support.scale_formats if spec.is_quantized else (None,):
        asked = request.but(block_size=sizes.block_size, rows=4, scale_format=scale_format)

        def make(device: torch.device, scale_format: str | None = scale_format) -> Call:
            generator = _generator(request, f"skip {scale_format}")
            kv = torch.full((sizes.num_blocks, sizes.block_size, spec.row_width), 90, dtype=spec.dtype)
            kv_c = _normal(generator, 4, KV_LORA_RANK)
            kv_c[0, :128] = 0.0  # a group whose amax is zero
            cache, memory = _with_slack(kv, device, fill=90)
            args = {
                "kv_c": kv_c.to(device),
                "k_pe": _normal(generator, 4, QK_ROPE_HEAD_DIM).to(device),
                "kv_cache": cache,
                "slot_mapping": torch.tensor([sizes.num_slots - 1, -1, 1, sizes.num_slots]).to(device),
            }
            kwargs = {"scale_format": scale_format} if scale_format else {}
            return Call(args, kwargs, written=frozenset({"kv_cache"}), watched={"kv_cache": cache, "around kv_cache": memory})

        yield TinyCase(f"skip, {scale_format} scales" if scale_format else "skip", asked, make)


def _merge_states(request: Request, support: Support, sizes: _Sizes) -> Iterator[TinyCase]:
    """Three parts; one is empty in row 1, all are empty in row 2, and what an empty part holds is NaN."""

    def make(device: torch.device) -> Call:
        generator = _generator(request, "empty parts")
        outs = _normal(generator, 3, 3, sizes.heads, KV_LORA_RANK, dtype=torch.float32)
        lses = 3 * _normal(generator, 3, 3, sizes.heads, dtype=torch.float32)
        empty = torch.zeros(3, 3, 1, dtype=torch.bool)
        empty[1, 1], empty[:, 2] = True, True
        lses = lses.masked_fill(empty, -torch.inf)
        outs = outs.masked_fill(empty[..., None], torch.nan)
        return Call({"outs": outs.to(device), "lses": lses.to(device)}, {})

    yield TinyCase("empty parts", request.but(num_heads=sizes.heads, rows=3), make)


def _quantize_per_tensor(request: Request, support: Support, sizes: _Sizes) -> Iterator[TinyCase]:
    """A matrix of an odd size."""

    def make(device: torch.device) -> Call:
        return Call({"x": _normal(_generator(request, "odd size"), 5, 77).to(device)}, {})

    yield TinyCase("odd size", request, make)


def _indexer_logits(request: Request, support: Support, sizes: _Sizes) -> Iterator[TinyCase]:
    """A request of three tokens with an absent block, one of one token, one token of nobody; unused keys are NaN.

    The weights of the first two tokens are positive, so that their logits can only be negative without the ReLU; those of
    the third are negative.
    """
    size, heads = sizes.block_size, sizes.heads
    request = request.but(num_heads=heads, block_size=size, rows=5)

    def make(device: torch.device) -> Call:
        generator = _generator(request, "ragged")
        cache = torch.full((sizes.num_blocks, size, INDEX_HEAD_SIZE), float("nan"), dtype=torch.bfloat16)
        tail = min(3, size)  # keys of the first request's last block
        cache[2], cache[0, :tail], cache[1, 0] = (_normal(generator, n, INDEX_HEAD_SIZE) for n in (size, tail, 1))
        weights = _normal(generator, 5, heads, dtype=torch.float32).bfloat16().float()  # some ops take bf16 ones
        weights[:2], weights[2] = weights[:2].abs(), -weights[2].abs()
        args = {
            "q": _normal(generator, 5, heads, INDEX_HEAD_SIZE).to(device),
            "weights": weights.to(device),
            "index_cache": _with_slack(cache, device, float("nan"))[0],
            "query_start_loc": _int32([0, 3, 4]).to(device),
            "seq_lens": _int32([2 * size + tail, 1]).to(device),
            "block_table": _int32([[2, -1, 0], [1, 0, 0]]).to(device),
        }
        out = torch.full((5, 3 * size), 7.0, device=device)
        return Call(args, {"out": out}, written=frozenset({"out"}))

    yield TinyCase("ragged", request, make)


_WITHOUT_CACHE: Final = (
    Primitive.CONVERT_INDICES, Primitive.MERGE_STATES, Primitive.QUANTIZE_PER_TENSOR, Primitive.INDEXER_LOGITS,
)  # fmt: skip
_FAMILIES: Final[dict[Primitive, Callable[[Request, Support, _Sizes], Iterator[TinyCase]]]] = {
    Primitive.CACHE_WRITE: _cache_write,
    Primitive.CONVERT_INDICES: _convert_indices,
    Primitive.GATHER_UPCONVERT: _gather_upconvert,
    Primitive.SPARSE_DECODE: _attention,
    Primitive.SPARSE_PREFILL: _attention,
    Primitive.MERGE_STATES: _merge_states,
    Primitive.QUANTIZE_PER_TENSOR: _quantize_per_tensor,
    Primitive.INDEXER_LOGITS: _indexer_logits,
}
