# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3's operator: where it is found, and how this project calls it, with pages of one token or on prompts.

With pages of one token, queries are given in two halves, the rotary one as `q` and the latent one as `q_v`; keys are the
rotary columns of the cached rows, values the latent ones. Each query row is a sequence of its own, whose pages are the rows
that it chose. vLLM's backend FLASH_ATTN_MLA_SPARSE and SGLang's `fa3` call it so. The operator has the same name and
arguments in each package; those that are not used here get the value that leaves them out.

Rows without a rotary part are given with 64 of their own columns as the keys that the operator demands beside `q_v`, and zeros
as the queries of these: what that adds to a score is 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from torch import Tensor

from mla_portable.contracts import Reason
from mla_portable.layouts import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from mla_portable_common.libraries import NotThisConvention, Positions, load_from, operator_of
from mla_portable_nvidia.machine import PROVIDER_VARIABLE

_PROMPTS: Final = (
    "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal",
    "num_splits",
)  # fmt: skip
_NEEDED: Final = (
    "q", "k", "v", "q_v", "out", "seqused_k", "max_seqlen_k", "page_table", "softmax_scale", "num_splits",
)  # fmt: skip
_HALVES: Final = (KV_LORA_RANK, QK_ROPE_HEAD_DIM)
IDLE_QUERY_BYTES: Final = 2 * QK_ROPE_HEAD_DIM
"""Of the zeros for each head of a token of rows without a rotary part."""
_UNUSED: Final[dict[str, Any]] = {
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "only_qv": False,
}
"""Arguments that must be given, by some build or by all, and say nothing here."""


Halves = tuple[Tensor, Tensor]
"""Values [W, 1, 1, 512] and keys [W, 1, 1, 64] of rows; of those without a rotary part, keys that no query looks at."""


class FA3Operator:
    """`fwd` of one package. Graph-safe; lse and the accumulators of splits come from torch's allocator."""

    def __init__(self, operator: Any) -> None:
        """operator: the overload itself, `torch.ops.<library>.fwd.default`. Raises: NotThisConvention."""
        positions = Positions(operator, _NEEDED, tuple(_UNUSED))
        self._operator, self._template = operator, positions.template
        for name, at in positions.index.items():
            self._template[at] = _UNUSED.get(name)
        index = positions.index
        self._q, self._k, self._v, self._q_v, self._out, self._used = (index[name] for name in _NEEDED[:6])
        self._most, self._table, self._scale, self._splits = (index[name] for name in _NEEDED[6:])

    def __call__(
        self,
        q: Tensor,
        halves: Halves,
        pages: Tensor,
        counts: Tensor,
        softmax_scale: float,
        num_splits: int,
        out: Tensor,
    ) -> Tensor:
        """Attend.

        Args:
            q: [T, 1, H, 576] bf16, or [T, 1, H, 512] where rows have no rotary part; address and strides in multiples of 16
                bytes, as those of kv and out.
            halves: `halves_of` kv [W, 576] or [W, 512] bf16.
            pages: [T, K] int32, the first counts[t] of which are rows of kv; the others are not read. K contiguous.
            counts: [T] int32, contiguous, each 0 to K.
            num_splits: of a row's pages, at most; 0 for as many as the operator likes.
            out: [T, 1, H, 512] bf16, written; zeros where there are no pages.
        Returns: lse [T, H, 1] float32, natural, infinite where there are no pages.
        """
        given = self._template.copy()
        if q.shape[3] == KV_LORA_RANK:
            given[self._q_v], given[self._q] = q, q.new_zeros((*q.shape[:3], QK_ROPE_HEAD_DIM))
        else:
            given[self._q_v], given[self._q] = q.split_with_sizes(_HALVES, 3)
        given[self._v], given[self._k] = halves
        given[self._table], given[self._used], given[self._most] = pages, counts, pages.shape[1]
        given[self._scale], given[self._splits], given[self._out] = softmax_scale, num_splits, out
        return self._operator(*given)[1]


class FA3Prompts:
    """`fwd` of one package on prompts over keys of each head. Graph-safe; its lse and schedule come from torch's allocator."""

    def __init__(self, operator: Any) -> None:
        """operator: the overload itself, `torch.ops.<library>.fwd.default`. Raises: NotThisConvention."""
        unused = {name: value for name, value in _UNUSED.items() if name not in _PROMPTS}
        positions = Positions(operator, _PROMPTS, tuple(unused))
        self._operator, self._template = operator, positions.template
        for name, at in positions.index.items():
            self._template[at] = unused.get(name)
        self._at = [positions.index[name] for name in _PROMPTS]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        longest: tuple[int, int],
        softmax_scale: float,
        causal: bool,
        out: Tensor,
    ) -> Tensor:
        """Attend; keys are not split.

        Args:
            q: [T, H, Dqk], k: [N, H, Dqk], v: [N, H, Dv] bf16, N at least 1; addresses and strides in multiples of 16 bytes.
            query_start_loc, key_start_loc: [R + 1] int32. longest: bounds of queries and keys of a request.
            out: [T, H, Dv] bf16, likewise, written; zeros where there are no keys.
        Returns: lse [H, T] float32, natural, infinite where there are no keys.
        """
        given = self._template.copy()
        values = q, k, v, out, query_start_loc, key_start_loc, *longest, softmax_scale, causal, 1
        for at, value in zip(self._at, values, strict=True):
            given[at] = value
        return self._operator(*given)[1]


def halves_of(kv: Tensor) -> Halves:
    """Rows kv [W, 576], or [W, 512], as pages of one token."""
    rows = kv.view(-1, 1, 1, kv.shape[1])
    if kv.shape[1] == KV_LORA_RANK:
        return rows, rows[..., :QK_ROPE_HEAD_DIM]
    values, keys = rows.split_with_sizes(_HALVES, 3)
    return values, keys


_SOURCES: Final = {
    "vllm": ("_vllm_fa3_C", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so", "install vLLM 0.24 or newer"),
    "sgl_kernel": ("sgl_kernel", "sgl_kernel", "flash_ops*.so", "install sglang-kernel 0.4.3 to 0.4.5"),
}
"""provider -> the library's name in torch.ops, the package, its file there, a remedy."""


A = TypeVar("A")


def find_fa3(environ: Mapping[str, str] | None = None) -> tuple[FA3Operator | None, tuple[Reason, ...]]:
    """The operator of the first package that has it, and the reasons against those asked before; loads libraries."""
    return _find(FA3Operator, environ)


def find_fa3_prompts(environ: Mapping[str, str] | None = None) -> tuple[FA3Prompts | None, tuple[Reason, ...]]:
    """Likewise, as it is called on prompts."""
    return _find(FA3Prompts, environ)


def _find(adapter: Callable[[Any], A], environ: Mapping[str, str] | None) -> tuple[A | None, tuple[Reason, ...]]:
    forced = (os.environ if environ is None else environ).get(PROVIDER_VARIABLE, "").strip()
    reasons: list[Reason] = []
    for name, (library, package, pattern, remedy) in _SOURCES.items():
        if forced not in ("", name):
            continue
        try:
            if operator_of(library, "fwd") is None:
                load_from(package, pattern)
            operator = operator_of(library, "fwd")
            if operator is None:
                raise NotThisConvention(f"torch.ops.{library} has no fwd")
            return adapter(operator), tuple(reasons)
        except NotThisConvention as failure:
            reasons.append(Reason(f"provider {name}", "not usable:", str(failure), remedy))
    if not reasons:
        remedy = f"unset {PROVIDER_VARIABLE}"
        reasons.append(Reason("provider", forced, f"FlashAttention 3 comes with {', '.join(_SOURCES)}", remedy))
    return None, tuple(reasons)
