# SPDX-License-Identifier: Apache-2.0
"""How sparse_decode is tried and judged."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from mla_portable.judge.problems.attention import TOLERANCES, attend, findings
from mla_portable.judge.problems.attention_bench import make_attention
from mla_portable.judge.problems.attention_cases import attention_of_request, attention_params, attention_variants
from mla_portable.judge.problems.base import Problems
from mla_portable.judge.problems.bench import BLOCK_SIZE, Bench, KernelCase
from mla_portable.primitives import SPARSE_DECODE

_CACHED: Final = 65_536
"""Least size of the cache that a timed decode reads; it grows until every row has K tokens of its own."""


def sparse_decode(
    q: Tensor, kv_cache: Tensor, indices: Tensor, *, lengths: Tensor | None = None, **rest: Any
) -> tuple[Tensor, Tensor]:
    """out [B, S, H, 512] and lse [B, S, H], float64: each of the B x S query tokens stands alone; rest: as `attend`."""
    limits = None if lengths is None else lengths.flatten()
    for name in ("extra_indices", "extra_lengths"):
        if rest.get(name) is not None:
            rest[name] = rest[name].flatten(0, 1)
    out, lse = attend(q.flatten(0, 1), kv_cache, indices.flatten(0, 1), lengths=limits, **rest)
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


def _width(rows: int, topk: int) -> int:
    """Tokens of a cache where every row reads a context of its own, as requests do; whole blocks."""
    return -(-max(_CACHED, rows * topk) // BLOCK_SIZE) * BLOCK_SIZE


def _shape(case: KernelCase) -> str:
    return f"B {case.rows}, S {case.query_len}, H {case.num_heads}, K {case.topk}, N {case.width}"


PROBLEMS: Final = Problems(
    primitive=SPARSE_DECODE,
    oracle=sparse_decode,
    tolerances=TOLERANCES,
    findings=findings,
    params=attention_params,
    of_request=attention_of_request,
    sizes=("num_heads", "topk", "block_size", "query_len"),
    variants=attention_variants,
    bench=Bench(
        rows=(1, 4, 16, 64, 128, 256),
        layouts=("fp8_ds_mla", "bf16"),
        make=make_attention,
        shape=_shape,
        width=_width,
        takes="requests",
    ),
)
