# SPDX-License-Identifier: Apache-2.0
"""The pass behind a kernel of prompts whose lse lies by heads: lse [H, T] -> [T, H], -inf where there is no key.

Tokens of no request keep what they have: the kernel did not write theirs. Requests lie one behind another, so these are the
tokens in front of the first start and from the last one on.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import at_any_address
from mla_portable_nvidia.passes.prepared_passes import Arguments, PreparedPass

_BLOCK_T: Final = 64
_BLOCK_H: Final = 16


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "lse_head"], **at_any_address("out_ptr", "lse_ptr", "starts_ptr"))
def _prompt_lse_kernel(
    out_ptr, lse_ptr, starts_ptr, num_tokens, num_requests, num_heads, out_token, out_head, lse_head,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    first, end = tl.load(starts_ptr), tl.load(starts_ptr + num_requests)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    owned = (token >= first) & (token < end) & (token < num_tokens)  # [BLOCK_T]
    there = owned[:, None] & (head < num_heads)[None, :]  # [BLOCK_T, BLOCK_H]
    at = token.to(tl.int64)[:, None]
    lse = tl.load(lse_ptr + head.to(tl.int64)[None, :] * lse_head + at, mask=there, other=0.0)
    lse = tl.where(lse == float("inf"), float("-inf"), lse)
    tl.store(out_ptr + at * out_token + head.to(tl.int64)[None, :] * out_head, lse, mask=there)


_prompt_lse = PreparedPass(_prompt_lse_kernel)


class PromptLse:
    """The pass, one launch; nothing for no tokens. Graph-safe."""

    def __call__(self, out: Tensor, lse: Tensor, query_start_loc: Tensor) -> None:
        """Write out [T, H] float32 from lse [H, T] float32, contiguous. query_start_loc: [R + 1] int32."""
        num_heads, num_tokens = lse.shape
        if num_tokens == 0:
            return
        strides = (*out.stride(), lse.stride(0))
        grid = -(-num_tokens // _BLOCK_T), -(-num_heads // _BLOCK_H)
        _prompt_lse(
            (grid, num_heads, strides),
            (out, lse, query_start_loc),
            lambda: Arguments(grid, (num_heads, *strides), {"BLOCK_T": _BLOCK_T, "BLOCK_H": _BLOCK_H, "num_warps": 4}),
            (num_tokens, query_start_loc.shape[0] - 1),
        )
