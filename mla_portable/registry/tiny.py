# SPDX-License-Identifier: Apache-2.0
"""Problems that an implementation must solve before it serves, one family per primitive.

Two sizes of each: `tiny_cases` are the smallest convenient ones that a Support allows, with every feature it declares;
`request_case` has the heads, top-k width, block size, query length and features of one request, with 3 query rows. Values are
seeded, and the traps are those that libraries are known to fall into: absent indices in any column, rows with nothing valid,
indices just past the cache, NaN in what nobody owns. What a faulty kernel reads past a tensor's edge is memory of the same
allocation, so that it is found by value and causes no device fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from mla_portable.contracts import DeviceFacts, Implementation, Primitive, Request, Support
from mla_portable.layouts import FP8_DS_MLA, INDEX_HEAD_SIZE, KV_LORA_RANK, LAYOUTS
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_LOGITS,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
)
from mla_portable.registry.tiny_attention import SOFTMAX_SCALE, attention_call, attention_requests
from mla_portable.registry.tiny_parts import (
    Call,
    TinyCase,
    cache_tokens,
    call_layout,
    generator_of,
    int32,
    normal,
    num_blocks_of,
    poison_of,
    with_slack,
)

__all__ = ["SOFTMAX_SCALE", "Call", "TinyCase", "request_case", "request_cases", "tiny_cases", "tiny_layouts"]

TINY_ROWS: Final = 4
"""Query rows of a tiny attention problem: one full, one with holes, one empty, one with a single entry."""
LEAST_ROWS: Final = 3
"""Query rows of a request's problem, or more for whole tokens of S queries: one with holes, one empty, one with one entry."""
MOST: Final = {"num_heads": 128, "topk": 4096, "block_size": 1024, "query_len": 8}
MOST_ON_A_CPU: Final = {"num_heads": 8, "topk": 128, "block_size": 1024, "query_len": 2}
"""Larger requests are probed at these sizes, where the Support allows them. On a CPU kernels run in Triton's interpreter, which
takes 0.1 s for 2 rows of 8 heads and 128 entries and 3.4 s for 128 heads and 2048 entries."""


class _Family(NamedTuple):
    """How to make problems of one primitive.

    sizes: the Request fields that give its shapes. requests: (name, request) of each tiny problem. call: (request, name,
    device, rows=) -> its arguments.
    """

    sizes: tuple[str, ...]
    requests: Callable[[Request, Support], Iterator[tuple[str, Request]]]
    call: Callable[..., Call]
    rows: int = TINY_ROWS


def tiny_layouts(implementation: Implementation, layout: str | None) -> tuple[str | None, ...]:
    """The cache layouts to try an implementation on: `layout`, else all it declares; (None,) where no cache is touched."""
    if not implementation.primitive.has_layout:
        return (None,)
    return (layout,) if layout is not None else implementation.support.layouts or (None,)


def tiny_cases(implementation: Implementation, device: DeviceFacts, layout: str | None) -> Iterator[TinyCase]:
    """The smallest problems for one implementation on one cache layout (None for primitives that touch no cache).

    The first one is repeated, with outputs given and left out.
    """
    family, support = _FAMILIES.get(implementation.primitive), implementation.support
    if family is None:
        return
    request = Request(implementation.primitive, device, kv_layout=layout, rows=family.rows)
    request = _complete(request, implementation)
    for number, (name, asked) in enumerate(family.requests(request, support)):
        make = partial(family.call, asked, name, rows=family.rows)
        yield TinyCase(name, asked, make, repeat=number == 0)


def request_cases(implementation: Implementation, request: Request) -> Iterator[TinyCase]:
    """The problem of a request; none for a primitive of a plugin, for which there are no problems."""
    if implementation.primitive in _FAMILIES:
        yield request_case(implementation, request)


def request_case(implementation: Implementation, request: Request) -> TinyCase:
    """One problem of the request's own sizes and features, repeated with outputs given and left out.

    Sizes that the request leaves open are tiny ones. Sizes above `MOST` (`MOST_ON_A_CPU` on a CPU) are cut to that, where the
    implementation's Support allows the smaller problem. Making the problem, the reference and the comparisons take 55 ms of CPU
    time at 128 heads and K 2048, 25 ms at 16 heads (one thread of an x86-64 server CPU, torch 2.13, 2026-11-22), besides three
    calls of the kernel and its compilation.
    """
    family = _FAMILIES[implementation.primitive]
    most = MOST_ON_A_CPU if request.device.device_type == "cpu" else MOST
    asked = _complete(request, implementation)
    units = {"topk": implementation.support.topk_multiple, "block_size": implementation.support.block_size_multiple}
    for name in family.sizes:
        size, unit = getattr(asked, name), units.get(name, 1)
        least = -(-most[name] // unit) * unit
        if size is not None and size > least:
            smaller = asked.but(**{name: least})
            if not any(implementation.support.shape_reasons(smaller)):
                asked = smaller
    query_len = asked.query_len or 1 if "query_len" in family.sizes else 1
    rows = query_len * -(-LEAST_ROWS // query_len)
    asked = asked.but(rows=asked.rows or rows)
    sizes = " ".join(f"{name}={getattr(asked, name)}" for name in family.sizes if getattr(asked, name) is not None)
    case = " ".join(filter(None, ("request", sizes)))
    return TinyCase(case, asked, partial(family.call, asked, case, rows=rows), repeat=True)


def _complete(request: Request, implementation: Implementation) -> Request:
    """The request with the smallest convenient sizes that the Support allows where it leaves them open."""
    support, primitive = implementation.support, implementation.primitive
    multiple, unit = support.topk_multiple, support.block_size_multiple
    topk = -(-64 // multiple) * multiple
    if support.max_topk is not None and topk > support.max_topk:
        topk = max(support.max_topk // multiple, 1) * multiple
    block_size = -(-16 // unit) * unit
    if support.block_sizes is not None:
        block_size = min((size for size in support.block_sizes if size % unit == 0), default=support.block_sizes[0])
    smallest = {
        "num_heads": min(support.num_heads) if support.num_heads else min(2, support.max_heads or 2),
        "topk": topk,
        "block_size": block_size,
        "query_len": 1 if support.max_query_len == 1 else 2,
    }
    names = _FAMILIES[primitive].sizes
    layout = None if request.kv_layout is None else LAYOUTS[request.kv_layout]
    quantized = layout is not None and layout.is_quantized
    if primitive is SPARSE_PREFILL and not quantized:
        names = tuple(name for name in names if name != "block_size")  # rows without scales are flat
    filled: dict[str, Any] = {name: smallest[name] for name in names if getattr(request, name) is None}
    if quantized and primitive is not CONVERT_INDICES:
        usual = "pow2" if primitive is CACHE_WRITE else "amax"  # a reader meets arbitrary scales
        wanted = request.scale_format or usual
        # a user may allow more than is declared, at a loss: what is declared is what is compared
        filled["scale_format"] = wanted if wanted in support.scale_formats else support.scale_formats[0]
    return request.but(**filled)


def _one(name: str) -> Callable[[Request, Support], Iterator[tuple[str, Request]]]:
    """A single problem."""

    def requests(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
        yield name, request

    return requests


def _convert_requests(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    yield "holes", request
    if support.compact:
        yield "compact", request.but(compact=True)
    if support.prefill_workspace:
        yield "workspace", request.but(prefill_workspace=True)


def _convert_call(request: Request, name: str, device: torch.device, *, rows: int) -> Call:
    """Three tokens of two requests; a negative and an out-of-range block in the table, holes and overlong positions."""
    size, k, columns = request.block_size or 1, request.topk or 1, 3
    num_blocks = num_blocks_of(size)
    generator = generator_of(request, name)
    table = int32([[2, 0, 1], [1, -1, num_blocks]])
    positions = torch.randint(columns * size, (3, k), generator=generator, dtype=torch.int32, device=_CPU)
    positions[0, 0], positions[0, k // 2], positions[0, -1] = -1, columns * size, -7
    positions[1, : k // 4], positions[1, -1] = -1, columns * size + 1  # past the table, yet a row of a workspace
    positions[2] = positions[2].where(torch.arange(k, device=_CPU) % 3 > 0, int32(-1))
    kwargs: dict[str, Any] = {"block_size": size, "num_slots": num_blocks * size}
    if request.prefill_workspace:
        kwargs["prefill_request_ids"] = int32([-1, 0, 1]).to(device)
        kwargs["prefill_workspace_starts"] = int32([5, 5 + columns * size]).to(device)
    if request.compact:
        kwargs["compact"] = True
    kwargs["out"] = tuple(torch.full(shape, 99, dtype=torch.int32, device=device) for shape in ((3, k), (3,)))
    args = {
        "topk_indices": positions.to(device),
        "req_id_per_token": int32([0, 1, 1]).to(device),
        "block_table": with_slack(table, device, fill=0)[0],
    }
    return Call(args, kwargs, written=frozenset({"out"}), optional=frozenset({"out"}))


def _gather_call(request: Request, name: str, device: torch.device, *, rows: int) -> Call:
    """Two requests with a gap between them, a third whose only block is absent; the rest of `out` must stay as it was."""
    layout, size = call_layout(request, FP8_DS_MLA), request.block_size or 1
    generator = generator_of(request, name)
    kv = torch.full((num_blocks_of(size), size, layout.row_width), poison_of(layout), dtype=layout.dtype, device=_CPU)
    used = cache_tokens(layout, normal(generator, 2 * size, layout.key_width), request.scale_format or "amax").view(2, size, -1)
    tail = min(3, size)  # tokens of the first request's second block
    kv[2], kv[0, :tail], kv[1, 0] = used[0], used[1, :tail], used[1, 0]
    args = {
        "kv_cache": with_slack(kv, device, poison_of(layout))[0],
        "block_table": int32([[2, 0], [1, -1], [-1, -1]]).to(device),
        "seq_lens": int32([size + tail, 1, 1]).to(device),
        "workspace_starts": int32([0, size + 5, size + 7]).to(device),
    }
    out = torch.full((size + 10, layout.key_width), 7.0, dtype=torch.bfloat16, device=device)
    return Call(args, {"out": out}, written=frozenset({"out"}))


def _write_requests(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    if call_layout(request, FP8_DS_MLA).is_quantized:
        for scale_format in support.scale_formats:
            yield f"skip, {scale_format} scales", request.but(scale_format=scale_format)
    else:
        yield "skip", request


def _write_call(request: Request, name: str, device: torch.device, *, rows: int) -> Call:
    """Two tokens to write, one to skip, one past the cache; every other byte must stay as it was."""
    layout, size = call_layout(request, FP8_DS_MLA), request.block_size or 1
    num_blocks = num_blocks_of(size)
    generator = generator_of(request, name)
    kv = torch.full((num_blocks, size, layout.row_width), 90, dtype=layout.dtype, device=_CPU)
    kv_c = normal(generator, 4, layout.value_width)
    kv_c[0, :128] = 0.0  # a group whose amax is zero
    cache, memory = with_slack(kv, device, fill=90)
    slots = torch.tensor([num_blocks * size - 1, -1, 1, num_blocks * size], dtype=torch.int64, device=_CPU)
    args = {
        "kv_c": kv_c.to(device),
        "k_pe": normal(generator, 4, layout.rope_width).to(device),
        "kv_cache": cache,
        "slot_mapping": slots.to(device),
    }
    kwargs = {"scale_format": request.scale_format} if request.scale_format else {}
    return Call(args, kwargs, written=frozenset({"kv_cache"}), watched={"kv_cache": cache, "around kv_cache": memory})


def _merge_call(request: Request, name: str, device: torch.device, *, rows: int) -> Call:
    """Three parts; one is empty in row 1, all are empty in row 2, and what an empty part holds is NaN."""
    generator, heads = generator_of(request, name), request.num_heads or 1
    outs = normal(generator, 3, 3, heads, KV_LORA_RANK, dtype=torch.float32)
    lses = 3 * normal(generator, 3, 3, heads, dtype=torch.float32)
    empty = torch.zeros(3, 3, 1, dtype=torch.bool, device=_CPU)
    empty[1, 1], empty[:, 2] = True, True
    lses = lses.masked_fill(empty, -torch.inf)
    outs = outs.masked_fill(empty[..., None], torch.nan)
    return Call({"outs": outs.to(device), "lses": lses.to(device)}, {})


def _quantize_call(request: Request, name: str, device: torch.device, *, rows: int) -> Call:
    """A matrix of an odd size."""
    return Call({"x": normal(generator_of(request, name), 5, 77).to(device)}, {})


def _indexer_call(request: Request, name: str, device: torch.device, *, rows: int) -> Call:
    """A request of three tokens with an absent block, one of one token, one token of nobody; unused keys are NaN.

    The weights of the first two tokens are positive, so that their logits can only be negative without the ReLU; those of
    the third are negative.
    """
    size, heads = request.block_size or 1, request.num_heads or 1
    generator = generator_of(request, name)
    shape = (num_blocks_of(size), size, INDEX_HEAD_SIZE)
    cache = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=_CPU)
    tail = min(3, size)  # keys of the first request's last block
    cache[2], cache[0, :tail], cache[1, 0] = (normal(generator, n, INDEX_HEAD_SIZE) for n in (size, tail, 1))
    weights = normal(generator, 5, heads, dtype=torch.float32).bfloat16().float()  # some ops take bf16 ones
    weights[:2], weights[2] = weights[:2].abs(), -weights[2].abs()
    args = {
        "q": normal(generator, 5, heads, INDEX_HEAD_SIZE).to(device),
        "weights": weights.to(device),
        "index_cache": with_slack(cache, device, float("nan"))[0],
        "query_start_loc": int32([0, 3, 4]).to(device),
        "seq_lens": int32([2 * size + tail, 1]).to(device),
        "block_table": int32([[2, -1, 0], [1, 0, 0]]).to(device),
    }
    out = torch.full((5, 3 * size), 7.0, dtype=torch.float32, device=device)
    return Call(args, {"out": out}, written=frozenset({"out"}))


_CPU: Final = torch.device("cpu")
_ATTENTION: Final = _Family(("num_heads", "topk", "block_size", "query_len"), attention_requests, attention_call)
_FAMILIES: Final[dict[Primitive, _Family]] = {
    CACHE_WRITE: _Family(("block_size",), _write_requests, _write_call),
    CONVERT_INDICES: _Family(("topk", "block_size"), _convert_requests, _convert_call, rows=3),
    GATHER_UPCONVERT: _Family(("block_size",), _one("ragged"), _gather_call),
    SPARSE_DECODE: _ATTENTION,
    SPARSE_PREFILL: _ATTENTION._replace(sizes=("num_heads", "topk", "block_size")),
    MERGE_STATES: _Family(("num_heads",), _one("empty parts"), _merge_call, rows=3),
    QUANTIZE_PER_TENSOR: _Family((), _one("odd size"), _quantize_call),
    INDEXER_LOGITS: _Family(("num_heads", "block_size"), _one("ragged"), _indexer_call, rows=5),
}
