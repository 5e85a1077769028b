# SPDX-License-Identifier: Apache-2.0
"""How sparse_prefill is tried and judged."""

from __future__ import annotations

from typing import Final

from mla_portable.judge.problems.attention import TOLERANCES, attend, findings
from mla_portable.judge.problems.attention_bench import make_attention
from mla_portable.judge.problems.attention_cases import attention_of_request, attention_params, attention_variants
from mla_portable.judge.problems.base import Problems
from mla_portable.judge.problems.bench import Bench, KernelCase
from mla_portable.primitives import SPARSE_PREFILL

_NARROW_TOKENS: Final = 1_024
_NARROW: Final = 8_192
_WIDE: Final = 65_536
"""Rows of a timed workspace for up to _NARROW_TOKENS tokens, and beyond."""


sparse_prefill = attend
"""Of T tokens over the rows of a workspace or a paged cache."""


def _width(rows: int, topk: int) -> int:
    return max(_NARROW if rows <= _NARROW_TOKENS else _WIDE, topk)


def _shape(case: KernelCase) -> str:
    overlap = f", overlap {case.overlap} %" if case.overlap else ""
    return f"T {case.rows}, H {case.num_heads}, K {case.topk}, W {case.width}{overlap}"


PROBLEMS: Final = Problems(
    primitive=SPARSE_PREFILL,
    oracle=sparse_prefill,
    tolerances=TOLERANCES,
    findings=findings,
    params=attention_params,
    of_request=attention_of_request,
    sizes=("num_heads", "topk", "block_size"),
    variants=attention_variants,
    bench=Bench(
        rows=(256, 1_024, 4_096),
        layouts=("fp8_ds_mla", "bf16"),
        make=make_attention,
        shape=_shape,
        width=_width,
        overlaps=True,
        takes="neighbours",
    ),
)
