# SPDX-License-Identifier: Apache-2.0
"""masked_prefill: attention of prompts over per-head keys, causal and under a selection of keys.

A program serves BLOCK_M queries of one head of one request. It goes over the keys that its last query sees, BLOCK_N at a time,
with a running maximum and sum in base 2 (`softmax_scale * log2(e)` is folded into the scores). The selection has a bit for each
query and key: a tile reads BLOCK_N / 32 words of each of its rows, as vectors that are broadcast along the row. A gathered
load of [BLOCK_M, BLOCK_N] words made the same kernel four times slower on an H200. What causality and the ends of a request
leave of a word is cut off there, once a row and tile, so that a score costs the test of one bit. Without a selection only the
tiles at the end are masked.

Head dimensions that are no power of two are two products: 192 = 128 + 64.

Values of a key that a query may not see are multiplied by a probability of 0; where one is not finite, that makes the row NaN.
A program whose result is not finite computes it again, with the values of keys that none of its queries selects replaced by
zeros.

Streams, a head of a request each, come in groups whose keys and values stay in the last-level cache. In a group the tiles with
the most keys start first, so that the last programs to end are short.

Cost: 2 * H * (Dqk + Dv) flops for each query and key of the tiles; keys and values are read once for each BLOCK_M queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import dot_operand, to_bfloat16
from mla_portable_triton.kernels.strides import stride_unit

_LOG2_E: Final = math.log2(math.e)
_GROUP_BYTES: Final = 32 << 20
"""Keys and values of the streams of a group. An H200 has 50 MB of L2 cache."""


@dataclass(frozen=True, slots=True)
class MaskedConfig:
    """One cut of the kernel.

    Attributes:
        block_m: queries of a program. block_n: keys of an inner step, 32 or 64. num_warps, num_stages: of a program.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


CONFIGS: Final[Mapping[str, tuple[MaskedConfig, MaskedConfig]]] = {
    # fits 48 KiB, the least that any target is known to have
    "default": (MaskedConfig(64, 32, 4, 1), MaskedConfig(32, 32, 4, 1)),
    "sm80": (MaskedConfig(128, 32, 8, 3), MaskedConfig(64, 32, 8, 2)),
    "sm86": (MaskedConfig(128, 32, 8, 3), MaskedConfig(64, 32, 8, 2)),
    "sm89": (MaskedConfig(128, 32, 8, 3), MaskedConfig(64, 32, 8, 2)),
    "sm90": (MaskedConfig(128, 64, 8, 3), MaskedConfig(64, 64, 8, 2)),
    "sm100": (MaskedConfig(128, 64, 8, 2), MaskedConfig(128, 64, 8, 2)),
    "sm120": (MaskedConfig(64, 64, 8, 2), MaskedConfig(64, 32, 8, 2)),
    "gfx942": (MaskedConfig(64, 32, 4, 1), MaskedConfig(64, 32, 8, 1)),
    "gfx950": (MaskedConfig(64, 32, 4, 1), MaskedConfig(64, 32, 8, 1)),
    "gfx1100": (MaskedConfig(32, 32, 8, 1), MaskedConfig(32, 32, 8, 1)),
    # Triton's interpreter: large tiles, because its cost is per operation
    "cpu": (MaskedConfig(128, 64, 1, 1), MaskedConfig(128, 64, 1, 1)),
}
"""DeviceFacts.arch -> the cut for values of up to 128 columns, and for wider ones. sm90's first row is that of a prototype on
an H200; the others are what Triton 3.7 fits into shared memory with the fewest spills (`mla_portable_triton.aot`), untimed.
On sm86 and sm89 64 queries by 64 keys took 892 instructions of a warp under a selection, because two warps share each row; 128
by 32, as many scores, take 458 (docs/dev/sm80-sm89.md)."""


def config_for(arch: str, v_head_dim: int) -> MaskedConfig:
    """The cut for a device and the width of a head's values."""
    narrow, wide = CONFIGS.get(arch, CONFIGS["default"])
    return narrow if v_head_dim <= 128 else wide


@triton.jit
def _columns(rows, column: tl.constexpr, WIDTH: tl.constexpr, valid, BF16_NATIVE: tl.constexpr):
    """Columns [column, column + WIDTH) of rows at `rows` [N, 1], 0 where not valid, as an operand of a product."""
    tile = tl.load(rows + (tl.arange(0, WIDTH) + column)[None, :], mask=valid[:, None], other=0.0)  # [N, WIDTH]
    return dot_operand(tile, BF16_NATIVE)


@triton.jit
def _low_bits(count):
    """A word with bits [0, count) set, int32; none for 0 and less, all for 32 and more."""
    kept = tl.minimum(tl.maximum(count, 0), 31)
    return tl.where(count >= 32, -1, (tl.full(count.shape, 1, tl.int32) << kept) - 1)


@triton.jit
def _visible(
    selection_rows,
    in_rows,
    words_in_row,
    key0,
    limit,
    HAS_SELECTION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N]: the queries of `selection_rows` [BLOCK_M] see and select the keys from `key0` on.

    limit: [BLOCK_M], keys that each sees.
    """
    n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if HAS_SELECTION:
        word = key0 // 32
        low = tl.load(selection_rows + word, mask=in_rows & (word < words_in_row), other=0)  # [BLOCK_M]
        words = (low & _low_bits(limit - key0))[:, None]
        if BLOCK_N == 64:
            high = tl.load(selection_rows + word + 1, mask=in_rows & (word + 1 < words_in_row), other=0)
            words = tl.where(n[None, :] < 32, words, (high & _low_bits(limit - key0 - 32))[:, None])
        seen = ((words >> (n & 31)[None, :]) & 1) != 0
    else:
        seen = n[None, :] < (limit - key0)[:, None]
    return seen


@triton.jit
def _attend_tile(
    m,
    total,
    acc,
    q0,
    q1,
    k_rows,
    v_rows,
    selection_rows,
    in_rows,
    words_in_row,
    limit,
    num_keys,
    key0,
    scale_log2,
    k_stride_n,
    v_stride_n,
    STRIDE_UNIT: tl.constexpr,
    DQK: tl.constexpr,
    DV: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
    MASKED: tl.constexpr,
    CLEAN: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(maximum, sum, sums of values) with the keys of one tile added. MASKED: some are not seen."""
    FIRST: tl.constexpr = 256 if DQK == 256 else 128
    n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    there = key0 + n < num_keys  # [BLOCK_N]
    at = (key0 + n).to(tl.int64)[:, None]
    keys = k_rows + at * (k_stride_n.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_N, 1]
    scores = tl.dot(q0, tl.trans(_columns(keys, 0, FIRST, there, BF16_NATIVE)))  # [BLOCK_M, BLOCK_N]
    if DQK > FIRST:
        scores += tl.dot(q1, tl.trans(_columns(keys, FIRST, DQK - FIRST, there, BF16_NATIVE)))
    scores = scores * scale_log2
    valued = there
    if MASKED:
        seen = _visible(selection_rows, in_rows, words_in_row, key0, limit, HAS_SELECTION, BLOCK_N)
        scores = tl.where(seen, scores, float("-inf"))
        if CLEAN:
            valued = there & (tl.max((seen & in_rows[:, None]).to(tl.int32), 0) > 0)
    m_new = tl.maximum(m, tl.max(scores, 1))
    decay = tl.math.exp2(m - m_new)
    p = tl.math.exp2(scores - m_new[:, None])  # 0 where not seen
    values = _columns(v_rows + at * (v_stride_n.to(tl.int64) * STRIDE_UNIT), 0, DV, valued, BF16_NATIVE)  # [BLOCK_N, DV]
    acc = acc * decay[:, None] + tl.dot(dot_operand(p, BF16_NATIVE), values)
    total = total * decay + tl.sum(p, 1)
    return m_new, total, acc


@triton.jit
def _attend(
    q0,
    q1,
    k_rows,
    v_rows,
    selection_rows,
    in_rows,
    words_in_row,
    limit,
    num_keys,
    whole,
    end,
    scale_log2,
    k_stride_n,
    v_stride_n,
    STRIDE_UNIT: tl.constexpr,
    DQK: tl.constexpr,
    DV: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
    CLEAN: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(maximum, sum, sums of values) over keys [0, end). CLEAN: values of keys that no query here sees count as zeros.

    whole: keys of whole tiles that every query sees; 0 under a selection.
    """
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)  # a finite start, so that no -inf meets another
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    if not HAS_SELECTION:
        for key0 in range(0, whole, BLOCK_N):
            m, total, acc = _attend_tile(
                m, total, acc, q0, q1, k_rows, v_rows, selection_rows, in_rows, words_in_row, limit, num_keys, key0, scale_log2,
                k_stride_n, v_stride_n, STRIDE_UNIT, DQK, DV, HAS_SELECTION, False, CLEAN, BF16_NATIVE, BLOCK_N,
            )  # fmt: skip
    for key0 in range(whole, end, BLOCK_N):
        m, total, acc = _attend_tile(
            m, total, acc, q0, q1, k_rows, v_rows, selection_rows, in_rows, words_in_row, limit, num_keys, key0, scale_log2,
            k_stride_n, v_stride_n, STRIDE_UNIT, DQK, DV, HAS_SELECTION, True, CLEAN, BF16_NATIVE, BLOCK_N,
        )  # fmt: skip
    return m, total, acc


@triton.jit(
    do_not_specialize=[
        *(
            "num_heads",
            "num_requests",
            "query_tiles",
            "group_streams",
            "words_in_row",
            "q_stride_t",
            "q_stride_h",
            "k_stride_n",
            "k_stride_h",
            "v_stride_n",
        ),
        *("v_stride_h", "selection_stride_t", "out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h"),
    ],
    **at_any_address("lse_ptr", "query_start_loc_ptr", "key_start_loc_ptr", "selection_ptr"),
)
def masked_prefill_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    selection_ptr,  # None: all that is visible
    scale_log2,
    num_heads,
    num_requests,
    query_tiles,  # of BLOCK_M queries, of the longest request
    group_streams,
    words_in_row,
    q_stride_t,  # strides of q, k, v and out count STRIDE_UNIT elements
    q_stride_h,
    k_stride_n,
    k_stride_h,
    v_stride_n,
    v_stride_h,
    selection_stride_t,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    DQK: tl.constexpr,
    DV: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # 32 or 64
):
    """Grid (query tiles * heads * requests,)."""
    FIRST: tl.constexpr = 256 if DQK == 256 else 128
    group = tl.program_id(0) // (group_streams * query_tiles)
    rest = tl.program_id(0) - group * group_streams * query_tiles
    streams = tl.minimum(group_streams, num_heads * num_requests - group * group_streams)
    stream = group * group_streams + rest % streams
    tile = query_tiles - 1 - rest // streams
    request = stream // num_heads
    head = (stream % num_heads).to(tl.int64)
    q_start = tl.load(query_start_loc_ptr + request)
    num_queries = tl.load(query_start_loc_ptr + request + 1) - q_start
    k_start = tl.load(key_start_loc_ptr + request)
    num_keys = tl.load(key_start_loc_ptr + request + 1) - k_start
    q0 = tile * BLOCK_M
    if q0 < num_queries:
        rows = q0 + tl.arange(0, BLOCK_M)  # [BLOCK_M], of the request
        in_rows = rows < num_queries
        tokens = (q_start + rows).to(tl.int64)
        limit = tl.zeros([BLOCK_M], tl.int32) + num_keys  # [BLOCK_M], keys that each sees
        end = num_keys
        whole = num_keys
        if CAUSAL:
            limit = tl.minimum(rows + 1 + num_keys - num_queries, limit)
            end = tl.maximum(tl.minimum(end, tl.minimum(q0 + BLOCK_M, num_queries) + num_keys - num_queries), 0)
            whole = tl.maximum(tl.minimum(whole, q0 + 1 + num_keys - num_queries), 0)
        whole = whole // BLOCK_N * BLOCK_N

        q_rows = q_ptr + head * (q_stride_h.to(tl.int64) * STRIDE_UNIT)
        q_rows += tokens[:, None] * (q_stride_t.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_M, 1]
        first = _columns(q_rows, 0, FIRST, in_rows, BF16_NATIVE)
        second = first
        if DQK > FIRST:
            second = _columns(q_rows, FIRST, DQK - FIRST, in_rows, BF16_NATIVE)
        start = k_start.to(tl.int64)
        k_rows = k_ptr + head * (k_stride_h.to(tl.int64) * STRIDE_UNIT) + start * (k_stride_n.to(tl.int64) * STRIDE_UNIT)
        v_rows = v_ptr + head * (v_stride_h.to(tl.int64) * STRIDE_UNIT) + start * (v_stride_n.to(tl.int64) * STRIDE_UNIT)
        HAS_SELECTION: tl.constexpr = selection_ptr is not None
        selection_rows = tokens
        if HAS_SELECTION:
            whole = 0
            selection_rows = selection_ptr + tokens * selection_stride_t.to(tl.int64)  # [BLOCK_M]
        m, total, acc = _attend(
            first,
            second,
            k_rows,
            v_rows,
            selection_rows,
            in_rows,
            words_in_row,
            limit,
            num_keys,
            whole,
            end,
            scale_log2,
            k_stride_n,
            v_stride_n,
            STRIDE_UNIT,
            DQK,
            DV,
            HAS_SELECTION,
            False,
            BF16_NATIVE,
            BLOCK_M,
            BLOCK_N,
        )
        if (
            tl.max((acc * 0.0 != 0.0).to(tl.int32)) > 0
        ):  # over both axes at once: Triton 3.7 fails to compile two steps for sm100
            m, total, acc = _attend(
                first,
                second,
                k_rows,
                v_rows,
                selection_rows,
                in_rows,
                words_in_row,
                limit,
                num_keys,
                whole,
                end,
                scale_log2,
                k_stride_n,
                v_stride_n,
                STRIDE_UNIT,
                DQK,
                DV,
                HAS_SELECTION,
                True,
                BF16_NATIVE,
                BLOCK_M,
                BLOCK_N,
            )
        empty = total == 0.0  # a NaN sum is not empty, it has to be seen
        lse = tl.where(empty, float("-inf"), (m + tl.math.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
        tl.store(lse_ptr + tokens * lse_stride_t.to(tl.int64) + head * lse_stride_h.to(tl.int64), lse, mask=in_rows)
        acc = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]
        out_rows = out_ptr + head * (out_stride_h.to(tl.int64) * STRIDE_UNIT)
        out_rows += tokens[:, None] * (out_stride_t.to(tl.int64) * STRIDE_UNIT) + tl.arange(0, DV)[None, :]
        tl.store(out_rows, to_bfloat16(acc, BF16_NATIVE), mask=in_rows[:, None])


_launch = TritonLauncher(masked_prefill_kernel)


def group_streams(num_streams: int, max_key_len: int, head_bytes: int) -> int:
    """Streams of a group, whose keys and values the last-level cache holds. head_bytes: of a key and its value, of one head.

    Groups are about equal: in a small last one the longest tiles would end late.
    """
    most = max(1, min(num_streams, _GROUP_BYTES // max(max_key_len * head_bytes, 1)))
    groups = triton.cdiv(num_streams, most)
    return triton.cdiv(num_streams, groups)


def launch(
    out: Tensor,
    lse_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    softmax_scale: float,
    max_query_len: int,
    max_key_len: int,
    causal: bool,
    selection: Tensor | None,
    config: MaskedConfig,
    bf16_native: bool,
) -> None:
    """Write `out` [T, H, Dv] and `lse_out` [T, H] float32; graph-safe, allocates nothing. Arguments: see MaskedPrefill."""
    num_tokens, num_heads, qk_head_dim = q.shape
    num_requests = query_start_loc.shape[0] - 1
    query_tiles = triton.cdiv(min(max_query_len, num_tokens), config.block_m)
    if num_requests == 0 or query_tiles == 0:
        return
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    unit = stride_unit(*strides, *out.stride()[:2])
    head_bytes = (qk_head_dim + v.shape[2]) * 2
    _launch(
        (query_tiles * num_heads * num_requests,),
        out,
        lse_out,
        q,
        k,
        v,
        query_start_loc,
        key_start_loc,
        selection,
        softmax_scale * _LOG2_E,
        num_heads,
        num_requests,
        query_tiles,
        group_streams(num_heads * num_requests, min(max_key_len, k.shape[0]), head_bytes),
        0 if selection is None else selection.shape[1],
        *(stride // unit for stride in strides),
        0 if selection is None else selection.stride(0),
        *(stride // unit for stride in out.stride()[:2]),
        *lse_out.stride(),
        DQK=qk_head_dim,
        DV=v.shape[2],
        STRIDE_UNIT=unit,
        CAUSAL=causal,
        BF16_NATIVE=bf16_native,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def aot_variants(arch: str = "default") -> Iterator[AotVariant]:
    """DeepSeek-V3.2's and GLM-5's dims, with a selection and without."""
    pointers = {"out_ptr": "*bf16", "lse_ptr": "*fp32", "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16"}
    given = {**pointers, "query_start_loc_ptr": "*i32", "key_start_loc_ptr": "*i32", "scale_log2": "fp32"}
    for qk_head_dim, v_head_dim in ((192, 128), (256, 256)):
        config = config_for(arch, v_head_dim)
        sizes = {"DQK": qk_head_dim, "DV": v_head_dim, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
        for name, selection in (("dense", None), ("selection", "*i32")):
            yield variant(
                masked_prefill_kernel, f"masked_prefill-{qk_head_dim}-{v_head_dim}-{name}", config.num_warps, config.num_stages,
                **given, selection_ptr=selection, **sizes, STRIDE_UNIT=8, CAUSAL=True, BF16_NATIVE=True,
            )  # fmt: skip
