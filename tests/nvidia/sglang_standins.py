# SPDX-License-Identifier: Apache-2.0
"""Strict CPU stand-ins of SGLang's sparse MLA functions: what they demand and how they answer, computed with torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch
from flashmla_standins import modules
from torch import Tensor

FOLDERS = (
    "sglang.kernels.ops.attention.dsa",
    "sglang.srt.layers.attention.dsa",
    "sglang.srt.layers.attention.nsa",
)
"""The packages that its kernels lay in, newest first: the first is that of 0.5.23."""
_LOG2E = math.log2(math.e)


def attend(q: Tensor, kv: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, H, 576], kv [S, 1, 576], indices [T, 1, K], -1 absent -> out [T, H, 512] and lse [T, H], float32, of base 2."""
    need(q.dtype == kv.dtype == torch.bfloat16 and indices.dtype == torch.int32, "dtypes")
    need(all(each.is_contiguous() for each in (q, kv, indices)) and kv.shape[1] == indices.shape[1] == 1, "shapes")
    chosen = indices[:, 0].long()
    need(bool((chosen < kv.shape[0]).all()), "an index past the rows")
    rows = kv[chosen.clamp(min=0), 0].float()  # [T, K, 576]
    scores = torch.einsum("thd,tkd->thk", q.float(), rows) * scale * _LOG2E
    scores.masked_fill_((chosen < 0).unsqueeze(1), -math.inf)
    lse = (scores * math.log(2)).logsumexp(dim=2) * _LOG2E
    return torch.einsum("thk,tkd->thd", torch.exp2(scores - lse.unsqueeze(2)), rows[..., :512]), lse


def need(fact: bool, what: str) -> None:
    if not fact:
        raise RuntimeError(f"stand-in of SGLang: {what}")


@dataclass
class Library:
    """calls: (function, rows, heads, what else matters) of each; built: kernels that were compiled, by name and arguments."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    built: list[tuple[object, ...]] = field(default_factory=list)

    def whole(self, q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512) -> Tensor:
        """tilelang_sparse_fwd on an NVIDIA GPU, BF16 rows."""
        heads, topk = q.shape[1], indices.shape[-1]
        need(d_v == 512 and topk % 128 == 0 and (heads <= 64 or heads % 64 == 0), "sizes")
        self.calls.append(("whole", q.shape[0], heads))
        return attend(q, kv, indices, sm_scale)[0].bfloat16().unsqueeze(0)

    def part(
        self, heads: int, dim: int, tail_dim: int, topk: int, *,
        sm_scale: float, block_I: int = 64, inner_iter: int = 1, threads: int = 256,
    ) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
        """sparse_mla_fwd_decode_partial: makes the kernel of one part of each row for each `block_I * inner_iter` keys."""
        need((dim, tail_dim) == (512, 64) and topk % (block_I * inner_iter) == 0, "sizes")
        self.built.append(("part", heads, topk, inner_iter))
        groups = topk // (block_I * inner_iter)

        def kernel(q: Tensor, kv: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
            need(q.shape[0] == kv.shape[0] == indices.shape[0] == 1 and q.shape[2] == heads, "a batch of one")
            self.calls.append(("part", q.shape[1], heads, inner_iter))
            pieces = indices[0].split(topk // groups, dim=-1)
            parts = [attend(q[0], kv[0], piece.contiguous(), sm_scale) for piece in pieces]
            outs, sums = (torch.stack(each, dim=1) for each in zip(*parts, strict=True))
            return outs.bfloat16().unsqueeze(0), sums.unsqueeze(0)

        return kernel

    def combine(
        self, heads: int, dim: int, topk: int, head_per_block: int, *, block_I: int = 64, threads: int = 256
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """sparse_mla_fwd_decode_combine: makes the kernel that adds `topk // block_I` parts of each row."""
        need(dim == 512 and heads % head_per_block == 0, "sizes")

        def kernel(outs: Tensor, sums: Tensor) -> Tensor:
            need(outs.shape[2] == sums.shape[2] == topk // block_I, "parts")
            weights = torch.softmax(sums * math.log(2), dim=2)
            return (outs.float() * weights.unsqueeze(-1)).sum(dim=2).bfloat16()

        return kernel

    def prefill(
        self, q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, *,
        topk_length: Tensor | None = None, out: Tensor | None = None, union: int = 0,
    ) -> Tensor:  # fmt: skip
        """sparse_mla_prefill: a set for each token, or one for `union` neighbours."""
        tokens, heads, _ = q.shape
        topk = indices.shape[-1]
        need(d_v == 512 and (not union or (union * heads in (16, 32) and not topk & (topk - 1))), "sizes")
        need(topk_length is not None and topk_length.dtype == torch.int32 and bool((topk_length == topk).all()), "counts")
        need(out is not None and out.shape == (tokens, heads, 512), "out")
        self.calls.append(("prefill", tokens, heads, union))
        return out.copy_(attend(q, kv, indices, sm_scale)[0])


@contextmanager
def installed(folder: str = FOLDERS[0], *functions: str) -> Iterator[Library]:
    """SGLang with its kernels in a folder. functions: only these, as in an older version; none means all."""
    library = Library()
    kernels = {
        "tilelang_kernel": {
            "tilelang_sparse_fwd": library.whole,
            "sparse_mla_fwd_decode_partial": library.part,
            "sparse_mla_fwd_decode_combine": library.combine,
        },
        "triton_sparse_mla_prefill": {"sparse_mla_prefill": library.prefill},
    }
    named = {}
    for name, offered in kernels.items():
        module = ModuleType(f"{folder}.{name}")
        for key, function in offered.items():
            if not functions or key in functions:
                setattr(module, key, function)
        named[module.__name__.replace(".", "__")] = module
    with modules(**named):
        yield library
