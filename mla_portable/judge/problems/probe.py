# SPDX-License-Identifier: Apache-2.0
"""The smallest level: problems that an implementation must solve before it is chosen.

Two sizes: `probe_cases` are the smallest convenient ones that a Support allows, with every feature it declares; `request_case`
has the heads, top-k width, block size, query length and features of one request, with 3 query rows. The traps are those that
libraries are known to fall into: absent indices in any column, rows with nothing valid, indices just past the cache, NaN in
what nobody owns. What a faulty kernel reads past a tensor's edge is memory of the same allocation, so that it is found by value
and causes no device fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.judge.problems.base import Params, Problems
from mla_portable.judge.problems.draw import seed_of
from mla_portable.judge.problems.stage import Problem
from mla_portable.layouts import LAYOUTS

PROBE_ROWS: Final = 4
"""Query rows of a small attention problem: one full, one with holes, one absent, one with a single entry."""
REQUEST_ROWS: Final = 3
"""Query rows of a request's problem, or more for whole tokens of S queries: one with holes, one absent, one with one entry."""
MOST: Final = {"num_heads": 128, "topk": 4096, "block_size": 1024, "query_len": 8, "qk_head_dim": 256, "v_head_dim": 256}
MOST_ON_A_CPU: Final = MOST | {"num_heads": 8, "topk": 128, "query_len": 2}
"""Larger requests are probed at these sizes, where the Support allows them. On a CPU kernels run in Triton's interpreter, which
takes 0.1 s for 2 rows of 8 heads and 128 entries and 3.4 s for 128 heads and 2048 entries."""


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """One problem of a probe. repeat: run it several times, with outputs given and left out."""

    name: str
    request: Request
    params: Params
    repeat: bool = False

    def build(self, device: torch.device) -> Problem:
        """The same problem with fresh tensors, on any device."""
        request = self.request
        return self.params.build(seed_of(f"{request.primitive}/{request.kv_layout}/{self.name}"), device, request.device)


def probe_layouts(implementation: Implementation, layout: str | None) -> tuple[str | None, ...]:
    """The cache layouts to try an implementation on: `layout`, else all it declares; (None,) where no cache is touched."""
    if not implementation.primitive.cache:
        return (None,)
    return (layout,) if layout is not None else implementation.layouts or (None,)


def probe_cases(implementation: Implementation, device: DeviceFacts, layout: str | None) -> Iterator[ProbeCase]:
    """The smallest problems for one implementation on one cache layout (None for primitives that touch no cache).

    The first one is repeated. None where the primitive brings no problems.
    """
    problems = implementation.primitive.problems
    if problems is None:
        return
    request = Request(implementation.primitive, device, kv_layout=layout, rows=problems.rows or PROBE_ROWS)
    request = _complete(request, implementation, problems)
    for number, (name, asked) in enumerate(problems.variants(request, implementation.support)):
        params = replace(problems.of_request(asked, name), accuracy=implementation.support.accuracy)
        yield ProbeCase(name, asked, params, repeat=number == 0)


def request_case(implementation: Implementation, request: Request) -> Iterator[ProbeCase]:
    """The problem of the request's own sizes and features, repeated; none where the primitive brings no problems.

    Sizes that the request leaves open are small ones. Sizes above `MOST` (`MOST_ON_A_CPU` on a CPU) are cut to that, where the
    implementation's Support allows the smaller problem.
    """
    problems = implementation.primitive.problems
    if problems is None:
        return
    most = MOST_ON_A_CPU if request.device.device_type == "cpu" else MOST
    asked = _complete(request, implementation, problems)
    units = {"topk": implementation.support.topk_multiple, "block_size": implementation.support.block_size_multiple}
    for name in problems.sizes:
        size, unit = getattr(asked, name), units.get(name, 1)
        least = -(-most[name] // unit) * unit
        if size is not None and size > least:
            smaller = asked.but(**{name: least})
            if not any(implementation.support.shape_reasons(smaller)):
                asked = smaller
    query_len = asked.query_len or 1 if "query_len" in problems.sizes else 1
    rows = problems.rows or query_len * -(-REQUEST_ROWS // query_len)
    asked = asked.but(rows=asked.rows or rows)
    sizes = " ".join(f"{name}={getattr(asked, name)}" for name in problems.sizes if getattr(asked, name) is not None)
    name = " ".join(filter(None, ("request", sizes)))
    params = replace(problems.of_request(asked.but(rows=rows), name), accuracy=implementation.support.accuracy)
    yield ProbeCase(name, asked, params, repeat=True)


def _complete(request: Request, implementation: Implementation, problems: Problems) -> Request:
    """The request with the smallest convenient sizes that the Support allows where it leaves them open."""
    support = implementation.support
    multiple, unit = support.topk_multiple, support.block_size_multiple
    topk = -(-64 // multiple) * multiple
    if support.max_topk is not None and topk > support.max_topk:
        topk = max(support.max_topk // multiple, 1) * multiple
    elif support.max_topk is None and support.topks:
        topk = min(support.topks)
    block_size = -(-16 // unit) * unit
    if support.max_block_size is not None and block_size > support.max_block_size:
        block_size = max(support.max_block_size // unit, 1) * unit
    if support.block_sizes is not None:
        block_size = min((size for size in support.block_sizes if size % unit == 0), default=support.block_sizes[0])
    asked = request.qk_head_dim, request.v_head_dim
    dims = (pair for pair in support.head_dims or () if all(size in (None, own) for size, own in zip(asked, pair, strict=True)))
    qk_head_dim, v_head_dim = next(dims, (192, 128))
    smallest = {
        "num_heads": min(support.num_heads) if support.num_heads else min(2, support.max_heads or 2),
        "topk": topk,
        "block_size": block_size,
        "query_len": 1 if support.max_query_len == 1 else 2,
        "qk_head_dim": qk_head_dim,
        "v_head_dim": v_head_dim,
    }
    filled: dict[str, Any] = {name: smallest[name] for name in problems.sizes if getattr(request, name) is None}
    params = problems.of_request(request, "")
    if getattr(params, "block_size", 1) is None:
        filled.pop("block_size", None)  # the rows of a workspace are flat
    if request.kv_layout is not None and LAYOUTS[request.kv_layout].scale_formats:
        # what is declared is what is compared: a user may allow more than that, at a loss
        wanted, declared = request.scale_format or getattr(params, "scale_format", None), support.scale_formats
        own = LAYOUTS[request.kv_layout].scale_formats_of(declared) or declared
        filled["scale_format"] = wanted if wanted in declared else own[0]
    return request.but(**filled)
