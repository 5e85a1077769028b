# SPDX-License-Identifier: Apache-2.0
"""The last step of indexer_select on one of several ranks: own positions become positions of the sequence, scores are listed.

A gather of 4 B and 12 B of traffic an entry, in one launch.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.contracts import ContextShare
from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.index_keys import whole_position

_TILE: Final = 512
_STRIDES: Final = ("chosen_stride", "listed_stride", "logits_stride")


@triton.jit(do_not_specialize=list(_STRIDES), **at_any_address("chosen_ptr", "listed_ptr", "logits_ptr"))
def chosen_scores_kernel(
    chosen_ptr, listed_ptr, logits_ptr, chosen_stride, listed_stride, logits_stride,
    TOPK: tl.constexpr, TILE: tl.constexpr, DCP_SIZE: tl.constexpr, DCP_RANK: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """Some entries of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    own = tl.load(chosen_ptr + row * chosen_stride + k, mask=k < TOPK, other=-1)  # [TILE]
    if listed_ptr is not None:
        score = tl.load(logits_ptr + row * logits_stride + own, mask=own >= 0, other=float("-inf"))  # [TILE]
        tl.store(listed_ptr + row * listed_stride + k, score, mask=k < TOPK)
    if DCP_SIZE > 1:
        tl.store(chosen_ptr + row * chosen_stride + k, whole_position(own, DCP_SIZE, DCP_RANK, INTERLEAVE), mask=own >= 0)


_launch = TritonLauncher(chosen_scores_kernel)


def launch(chosen: Tensor, listed: Tensor | None, logits: Tensor, share: ContextShare) -> None:
    """Rewrite `chosen` [T, K] int32 in place, and write `listed` [T, K] float32 where it is given. Graph-safe.

    logits: [T, N] float32, by own positions. Rows of each may lie apart.
    """
    num_tokens, topk = chosen.shape
    _launch(
        (num_tokens, triton.cdiv(topk, _TILE)),
        chosen, listed, logits, chosen.stride(0), 0 if listed is None else listed.stride(0), logits.stride(0),
        TOPK=topk, TILE=_TILE, DCP_SIZE=share.size, DCP_RANK=share.rank, INTERLEAVE=share.interleave, num_warps=4,
    )  # fmt: skip


def aot_variants(arch: str = "default") -> list[AotVariant]:
    """K of DeepSeek-V3.2, on the second of two ranks."""
    pointers = {"chosen_ptr": "*i32", "listed_ptr": "*fp32", "logits_ptr": "*fp32"}
    return [
        variant(
            chosen_scores_kernel, "chosen_scores", 4, **pointers, **dict.fromkeys(_STRIDES, "i32"),
            TOPK=2048, TILE=_TILE, DCP_SIZE=2, DCP_RANK=1, INTERLEAVE=1,
        )
    ]  # fmt: skip
