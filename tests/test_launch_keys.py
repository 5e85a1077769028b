# SPDX-License-Identifier: Apache-2.0
"""One compilation serves all steps of a layer: nothing that a step changes is what Triton compiles a kernel apart for.

Kernels are called as layers and engines call them, with other numbers of tokens and requests, and with tensors that begin
anywhere, as slices of a batch's do. The keys that Triton would make are compared; no kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from launch_keys import LaunchKeys, record_launches
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Primitive, Request
from mla_portable_common.deep_gemm.index_pass_kernels import TritonIndexPasses
from mla_portable_common.deep_gemm.pages import Pages, Rows
from mla_portable_nvidia.fa3.page_lists import PageLists
from mla_portable_nvidia.fa3.prompt_lse import PromptLse
from mla_portable_nvidia.flashmla.row_parts import RowParts
from mla_portable_nvidia.passes.boundary import Boundary
from mla_portable_triton import bind_attention, bind_data, bind_indexer, bind_projections, bind_prompts

FACTS = DeviceFacts(vendor="nvidia", name="any", arch="sm90", device_type="cpu", num_sms=132, has_fp8_conversion=True)
BF16, F32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
HEADS, TOPK, BLOCK = 16, 64, 64


@dataclass(frozen=True)
class Step:
    """tokens, requests: of the step. at: where its tensors begin in those that they are slices of, in elements or rows."""

    tokens: int
    requests: int
    at: int

    def ints(self, *shape: int, dtype: torch.dtype = INT32) -> Tensor:
        """A slice that begins `at` elements into its memory: contiguous."""
        size = torch.Size(shape).numel()
        return torch.zeros(self.at + size, dtype=dtype)[self.at :].view(shape)

    def rows(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """The rows from `at` on."""
        return torch.zeros(self.at + shape[0], *shape[1:], dtype=dtype)[self.at :]

    def table(self, columns: int = 5) -> Tensor:
        """A block table, as wide as the engine's, of which some requests and columns are the step's."""
        return self.rows(self.requests, columns + self.at, dtype=INT32)[:, :columns]


STEPS = tuple(
    Step(tokens, requests, at)
    for tokens, requests in ((1, 1), (2, 2), (3, 1), (16, 16), (17, 3), (48, 5), (160, 2))
    for at in (0, 1, 3, 4)
)


def bound(module: Any, primitive: str, **facts: Any) -> Callable[..., Any]:
    return getattr(module, f"bind_{primitive}")(Request(Primitive.named(primitive), FACTS, **facts))


CACHE = torch.zeros((4, BLOCK, 656), dtype=torch.uint8)
ROWS = torch.zeros((4 * BLOCK, 576), dtype=BF16)
INDEX = torch.zeros((4, BLOCK, 132), dtype=torch.uint8)


def cache_write(s: Step) -> None:
    fused = s.rows(s.tokens, 2112)  # what one product makes: kv_c, k_pe and more side by side
    call = bound(bind_data, "cache_write", kv_layout="fp8_ds_mla")
    call(s.rows(s.tokens, 512), fused[:, 2048:], CACHE, s.ints(s.tokens, dtype=INT64))


def convert_indices(s: Step) -> None:
    given = s.rows(s.tokens, TOPK, dtype=INT32), s.ints(s.tokens), s.table()
    out = s.rows(s.tokens, TOPK, dtype=INT32), s.ints(s.tokens)
    bound(bind_data, "convert_indices")(*given, block_size=BLOCK, num_slots=256 + s.at, out=out, seq_lens=s.ints(s.requests))


def convert_indices_with_prefills(s: Step) -> None:
    given = s.rows(s.tokens, TOPK, dtype=INT32), s.ints(s.tokens), s.table()
    out, ids, starts = (s.rows(s.tokens, TOPK, dtype=INT32), s.ints(s.tokens)), s.ints(s.tokens), s.ints(s.requests)
    call = bound(bind_data, "convert_indices", compact=True)
    call(*given, block_size=BLOCK, out=out, prefill_request_ids=ids, prefill_workspace_starts=starts, compact=True)


def gather_upconvert(s: Step) -> None:
    call = bound(bind_data, "gather_upconvert", kv_layout="fp8_ds_mla")
    call(CACHE, s.table(), s.ints(s.requests), s.ints(s.requests), out=torch.zeros(s.tokens, 576, dtype=BF16))


def sparse_prefill(s: Step) -> None:
    """Rows of a step's tensors, of a workspace that is as long as the step needs."""
    given = s.rows(s.tokens, HEADS, 576), ROWS[: BLOCK + s.tokens], s.rows(s.tokens, TOPK, dtype=INT32)
    out = s.rows(s.tokens, HEADS, 512), s.ints(s.tokens, HEADS, dtype=F32)
    call = bound(bind_attention, "sparse_prefill", kv_layout="bf16", num_heads=HEADS, topk=TOPK)
    call(*given, softmax_scale=0.1, lengths=s.ints(s.tokens), out=out[0], lse_out=out[1])


def sparse_prefill_in_place(s: Step) -> None:
    given = s.rows(s.tokens, HEADS, 576), CACHE, s.rows(s.tokens, TOPK, dtype=INT32)
    out = s.rows(s.tokens, HEADS, 512), s.ints(s.tokens, HEADS, dtype=F32)
    call = bound(bind_attention, "sparse_prefill", kv_layout="fp8_ds_mla", num_heads=HEADS, topk=TOPK)
    call(*given, softmax_scale=0.1, lengths=s.ints(s.tokens), attn_sink=s.ints(HEADS, dtype=F32), out=out[0], lse_out=out[1])


def merge_states(s: Step) -> None:
    bound(bind_attention, "merge_states")(s.rows(2, s.tokens, HEADS, 128), s.ints(2, s.tokens, HEADS, dtype=F32))


def pack_selection(s: Step) -> None:
    width = 32 * s.tokens
    out, starts = torch.zeros((s.tokens, s.tokens), dtype=INT32), s.ints(s.tokens)
    bound(bind_prompts, "pack_selection")(s.rows(s.tokens, TOPK, dtype=INT32), width=width, starts=starts, out=out)


def concat_mla_k(s: Step) -> None:
    rows = s.rows(s.tokens, 576)
    bound(bind_prompts, "concat_mla_k")(s.rows(s.tokens, HEADS, 256)[..., :128], rows[:, 512:])


def _masked_prefill(s: Step, selection: Tensor | None) -> None:
    q, projected = s.rows(s.tokens, HEADS, 192), s.rows(s.tokens, HEADS, 256)
    call = bound(bind_prompts, "masked_prefill", num_heads=HEADS, qk_head_dim=192, v_head_dim=128)
    call(
        *(q, s.rows(s.tokens, HEADS, 192), projected[..., 128:], s.ints(s.requests + 1), s.ints(s.requests + 1)),
        softmax_scale=0.1, max_query_len=s.tokens, max_key_len=s.tokens, selection=selection,
        out=s.rows(s.tokens, HEADS, 128), lse_out=s.ints(s.tokens, HEADS, dtype=F32),
    )  # fmt: skip


def masked_prefill(s: Step) -> None:
    _masked_prefill(s, None)


def masked_prefill_of_a_selection(s: Step) -> None:
    _masked_prefill(s, torch.zeros((s.tokens, -(-s.tokens // 32)), dtype=INT32))


def indexer_cache_write(s: Step) -> None:
    bound(bind_indexer, "indexer_cache_write", kv_layout="index_fp8")(
        s.rows(s.tokens, 128), INDEX, s.ints(s.tokens, dtype=INT64)
    )


TABLE = torch.zeros((64, 64), dtype=F32)
WEIGHTS = {"q_norm": torch.zeros(256, dtype=BF16), "kv_norm": torch.zeros(512, dtype=BF16)}
INDEX_NORM = torch.zeros(128), torch.zeros(128)


def norm_rope_write(s: Step) -> None:
    """Slices of one projection."""
    q_a, latent, key = s.rows(s.tokens, 256 + 576 + 128).split([256, 576, 128], dim=1)
    at = {"slot_mapping": s.ints(s.tokens, dtype=INT64), "kv_cache": CACHE, "index_cache": INDEX, "eps": 1e-6}
    call = bound(bind_projections, "norm_rope_write", kv_layout="fp8_ds_mla", index_layout="index_fp8")
    call(
        q_a,
        latent,
        key,
        s.ints(s.tokens, dtype=INT64),
        TABLE,
        **WEIGHTS,
        **at,
        index_norm=INDEX_NORM,
        q_out=s.rows(s.tokens, 256),
    )


def rope_quantize_queries(s: Step) -> None:
    """Weights are a slice of the indexer's projection; the queries of attention lie as the absorbed product leaves them."""
    q, out = s.rows(s.tokens, HEADS, 192), torch.zeros(HEADS, s.tokens, 576, dtype=BF16).transpose(0, 1)
    weights = s.rows(s.tokens, 192)[:, 128:]
    codes = s.rows(s.tokens, 64, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    call = bound(bind_projections, "rope_quantize_queries", num_heads=HEADS)
    call(
        *(q, s.rows(s.tokens, 64, 128), weights, s.ints(s.tokens, dtype=INT64), TABLE),
        q_out=out, index_q_out=codes, index_weights_out=s.ints(s.tokens, 64, dtype=F32), index_scale=0.1,
    )  # fmt: skip


def queries(s: Step) -> tuple[Tensor, Tensor]:
    q = s.rows(s.tokens, 64, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return q, s.rows(s.tokens, 64, dtype=F32)


def indexer_logits(s: Step) -> None:
    """Decodes and prompts are two kernels: see the test."""
    pages = INDEX, s.ints(s.requests + 1), s.ints(s.requests), s.table()
    call = bound(bind_indexer, "indexer_logits", kv_layout="index_fp8")
    call(*queries(s), *pages, out=torch.zeros(s.tokens, 5 * BLOCK + s.at))


def indexer_logits_ragged(s: Step) -> None:
    keys, scales = s.rows(s.tokens, 128, dtype=torch.uint8).view(torch.float8_e4m3fn), s.ints(s.tokens, dtype=F32)
    call = bound(bind_indexer, "indexer_logits_ragged", kv_layout="index_fp8")
    call(*queries(s), keys, scales, s.ints(s.tokens), s.ints(s.tokens), out=torch.zeros(s.tokens, s.tokens + s.at))


def indexer_logits_blocks(s: Step) -> None:
    """Gathered keys, of any number."""
    q, _ = queries(s)
    heads = q.shape[1]
    keys = s.rows(s.tokens, 128, dtype=torch.uint8).view(torch.float8_e4m3fn), s.ints(s.tokens)
    lists, weights = (s.ints(s.tokens, 5), s.ints(s.tokens, 5)), s.rows(s.tokens, heads)
    call = bound(bind_indexer, "indexer_logits_blocks", num_heads=heads)
    pages = (each.unsqueeze(0) for each in keys)
    out = torch.zeros(s.tokens, 40, dtype=torch.bfloat16)
    call(q, s.ints(s.tokens, heads), weights, *pages, *lists, block_tokens=8, out=out)


def topk_select(s: Step) -> None:
    """Rows that are short, of any width."""
    logits, bounds = torch.zeros(s.tokens, 5 * BLOCK + s.at), s.ints(2, s.tokens)
    bound(bind_indexer, "topk_select")(logits, *bounds, topk=TOPK, out=s.rows(s.tokens, TOPK, dtype=INT32))


def indexer_select_on_a_rank(s: Step) -> None:
    """Its last step: positions of the sequence, and scores."""
    call = bound(bind_indexer, "indexer_select", kv_layout="index_fp8", topk=TOPK, context_parallel=True)
    pages, share = (INDEX, s.ints(s.requests + 1), s.ints(s.requests), s.table()), {"dcp_size": 2, "dcp_rank": 1}
    listed = {"out": s.rows(s.tokens, TOPK, dtype=INT32), "scores_out": s.rows(s.tokens, TOPK, dtype=F32)}
    call(*queries(s), *pages, topk=TOPK, **share, **listed)


def page_lists(s: Step) -> None:
    lists = s.rows(s.tokens, TOPK, dtype=INT32), s.ints(s.tokens)
    PageLists()(*lists, s.rows(s.tokens, TOPK, dtype=INT32), s.ints(s.tokens), 100 + s.at)


def prompt_lse(s: Step) -> None:
    PromptLse()(s.ints(s.tokens, HEADS, dtype=F32), s.ints(HEADS, s.tokens, dtype=F32), s.ints(s.requests + 1))


def boundary_of_decodes(s: Step) -> None:
    """A request of one token a row."""
    _boundary(s, (s.tokens, 1))


def boundary_of_prompts(s: Step) -> None:
    """All tokens in one row."""
    _boundary(s, (1, s.tokens))


def _boundary(s: Step, shape: tuple[int, int]) -> None:
    indices, lengths = s.rows(s.tokens, TOPK, dtype=INT32).view(*shape, TOPK), s.ints(*shape)
    Boundary().sanitise(torch.zeros((*shape, 128), dtype=INT32), indices, lengths, 100 + s.at)
    out, lse_out = s.rows(s.tokens, HEADS, 512).view(*shape, HEADS, 512), s.ints(*shape, HEADS, dtype=F32)
    result, lse = torch.zeros((*shape, 64, 512), dtype=BF16), s.ints(shape[0], 64, shape[1], dtype=F32)
    Boundary().finish(out, lse_out, result, lse, s.ints(HEADS, dtype=F32), True, early=False)
    Boundary().finish(out, lse_out, None, lse, None, True, early=False)


def row_parts(s: Step) -> None:
    q, lengths = s.rows(s.tokens, 1, HEADS, 576), s.ints(s.tokens, 1)
    RowParts().spread(torch.zeros((2 * s.tokens, 64, 576), dtype=BF16), s.ints(2 * s.tokens), q, lengths, 32)
    out, lse_out = s.rows(s.tokens, 1, HEADS, 512), s.ints(s.tokens, 1, HEADS, dtype=F32)
    parts, lses = torch.zeros((2 * s.tokens, 64, 512), dtype=BF16), s.ints(2 * s.tokens, 64, dtype=F32)
    RowParts().merge(out, lse_out, parts, lses, s.ints(HEADS, dtype=F32), True)


def index_passes(s: Step) -> None:
    pages = Pages(s.ints(s.requests + 1), s.ints(s.requests), s.table(), INDEX.shape[0], 5 * BLOCK)
    shape = (s.tokens, 1)
    rows = Rows(s.ints(s.tokens), s.ints(s.tokens), s.ints(s.tokens), s.ints(*shape), s.ints(s.tokens, 5))
    passes, logits = TritonIndexPasses(), torch.zeros(s.tokens, 5 * BLOCK + s.at)
    passes.describe(rows, pages, s.at)
    passes.finish(torch.zeros(s.tokens, 5 * BLOCK), logits, rows, pages)
    passes.erase(logits, rows, pages)
    passes.window(s.ints(s.tokens, 5 * BLOCK, dtype=F32), logits, s.ints(s.tokens), s.ints(s.tokens), True)


CALLS = (
    *(cache_write, convert_indices, convert_indices_with_prefills, gather_upconvert, sparse_prefill),
    *(sparse_prefill_in_place, merge_states, pack_selection, concat_mla_k, masked_prefill, masked_prefill_of_a_selection),
    *(
        indexer_cache_write,
        indexer_logits,
        indexer_logits_ragged,
        indexer_logits_blocks,
        topk_select,
        indexer_select_on_a_rank,
        page_lists,
    ),
    *(norm_rope_write, rope_quantize_queries),
    *(prompt_lse, boundary_of_decodes, boundary_of_prompts, row_parts, index_passes),
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchKeys]:
    monkeypatch.setattr(bind_indexer, "bind_part", lambda request, own: own(request))
    yield record_launches(monkeypatch, runs=False)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_one_compilation_serves_all_steps(call: Callable[[Step], None], seen: LaunchKeys) -> None:
    for step in STEPS:
        call(step)
    assert seen.keys and set(seen.by_kernel().values()) == {1}, seen.by_kernel()
