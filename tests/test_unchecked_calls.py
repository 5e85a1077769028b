# SPDX-License-Identifier: Apache-2.0
"""flash_mla and deep_gemm check their arguments once, and hand over what the primitive's own check would accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from arguments import zeros
from recorder import Recorder, registry_of
from torch import Tensor

from mla_portable import deep_gemm, flash_mla, primitives
from mla_portable.choose import Registry
from mla_portable.contracts import InvalidArgument
from mla_portable.dispatch import serving
from mla_portable.flash_mla import statistics
from mla_portable.kit.tensor_table import TensorTable
from mla_portable.primitives import MASKED_PREFILL

INT32, UINT8, FLOAT32, E4M3 = torch.int32, torch.uint8, torch.float32, torch.float8_e4m3fn


class Tape(Recorder):
    """A recorder for every kind of call, whose results are tensors where attention returns them."""

    def __init__(self) -> None:
        super().__init__(support={"extra_cache": True, "nope": True})

    def _bind(self, request: Any) -> Callable[..., Any]:
        record = super()._bind(request)

        def call(*args: Any, **kwargs: Any) -> Any:
            record(*args, **kwargs)
            q, out = args[0], kwargs.get("out")
            is_attention = str(request.primitive).startswith("sparse_") or request.primitive is MASKED_PREFILL
            return (q[..., :512] if out is None else out, torch.zeros(q.shape[:-1])) if is_attention else out

        return call


def decode(batch: int = 2, query_len: int = 3, **changes: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    given = {
        "q": zeros(batch, query_len, 4, 576),
        "k_cache": zeros(6, 16, 1, 656, dtype=UINT8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "indices": zeros(batch, query_len, 8, dtype=INT32),
    }
    return flash_mla.flash_mla_with_kvcache, given | changes


def second(batch: int = 2, query_len: int = 3, **changes: Any) -> dict[str, Any]:
    given = {
        "extra_k_cache": zeros(5, 64, 1, 656, dtype=UINT8),
        "extra_indices_in_kvcache": zeros(batch, query_len, 7, dtype=INT32),
    }
    return given | changes


def prompts(width: int = 576, **changes: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    given = {
        "q": zeros(5, 3, width),
        "kv": zeros(10, 1, width),
        "indices": zeros(5, 1, 6, dtype=INT32),
        "sm_scale": 0.1,
    }
    return flash_mla.flash_mla_sparse_fwd, given | changes


def keys(tokens: int = 5, **changes: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    given = {
        "q": (zeros(tokens, 8, 128, dtype=E4M3), None),
        "kv": (zeros(40, 128, dtype=E4M3), zeros(40, dtype=FLOAT32)),
        "weights": zeros(tokens, 8, dtype=FLOAT32),
        "cu_seq_len_k_start": zeros(tokens, dtype=INT32),
        "cu_seq_len_k_end": zeros(tokens, dtype=INT32),
    }
    return deep_gemm.fp8_fp4_mqa_logits, given | changes


def pages(batch: int = 2, next_n: int = 3, **changes: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    given = {
        "q": (zeros(batch, next_n, 8, 128, dtype=E4M3), None),
        "kv_cache": zeros(5, 64, 1, 132, dtype=UINT8),
        "weights": zeros(batch * next_n, 8, dtype=FLOAT32),
        "context_lens": zeros(batch, next_n, dtype=INT32),
        "block_table": zeros(batch, 2, dtype=INT32),
        "schedule_meta": None,
        "max_context_len": 100,
    }
    return deep_gemm.fp8_fp4_paged_mqa_logits, given | changes


def bytes_at(offset: int, *shape: int) -> Tensor:
    """A cache that starts `offset` bytes behind an address of 16."""
    size = torch.Size(shape).numel()
    return zeros(size + 64, dtype=UINT8)[offset : offset + size].view(shape)


def ragged(tokens: int = 6, heads_kv: int = 4, **changes: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    given = {
        "q": zeros(tokens, 4, 192),
        "k": zeros(7, heads_kv, 192),
        "v": zeros(7, heads_kv, 128),
        "cu_seqlens_qo": torch.tensor([0, 2, tokens], dtype=INT32),
        "cu_seqlens_kv": torch.tensor([0, 3, 7], dtype=INT32),
        "max_seqlen_qo": tokens,
        "max_seqlen_kv": 4,
    }
    return flash_mla.flash_attn_varlen_func, given | changes


LENGTHS, SINK = zeros(2, dtype=INT32), zeros(4, dtype=FLOAT32)
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "decode": decode(),
    "decode of one token": decode(1, 1),
    "decode of many tokens": decode(300, 1),
    "decode of no requests": decode(0, 1),
    "decode with lengths": decode(topk_length=LENGTHS),
    "decode with lengths of one token each": decode(2, 1, topk_length=LENGTHS),
    "decode with a sink": decode(attn_sink=SINK),
    "decode into memory": decode(out=zeros(2, 3, 4, 512)),
    "decode of bf16 rows": decode(k_cache=zeros(6, 16, 1, 576)),
    "decode without a rotary part": decode(q=zeros(2, 3, 4, 512)),
    "decode of rows without a rotary part": decode(
        q=zeros(2, 3, 4, 512), k_cache=zeros(6, 16, 1, 528, dtype=UINT8), kv_format="V32_NO_ROPE"
    ),
    "decode of v4 rows": decode(q=zeros(2, 3, 4, 512), k_cache=zeros(6, 16, 1, 584, dtype=UINT8)),
    "decode of e4m3 bytes": decode(k_cache=zeros(6, 16, 1, 656, dtype=E4M3)),
    "decode at an odd address": decode(k_cache=bytes_at(4, 6, 16, 1, 656)),
    "decode of pages apart": decode(k_cache=zeros(6, 20, 1, 656, dtype=UINT8)[:, :16]),
    "decode of pages apart by parts of a row": decode(k_cache=bytes_at(0, 6, 16 * 656 + 64)[:, : 16 * 656].view(6, 16, 1, 656)),
    "decode of two caches": decode(**second()),
    "decode of two caches with lengths": decode(**second(extra_topk_length=LENGTHS, topk_length=LENGTHS)),
    "decode of two caches, the second with lengths": decode(**second(extra_topk_length=LENGTHS)),
    "decode of two caches, the second at an odd address": decode(**second(extra_k_cache=bytes_at(8, 5, 64, 1, 656))),
    "decode of two caches, the second of pages apart by parts of a row": decode(
        **second(extra_k_cache=bytes_at(0, 5, 64 * 656 + 64)[:, : 64 * 656].view(5, 64, 1, 656))
    ),
    "prefill": prompts(),
    "prefill without a rotary part": prompts(512),
    "prefill with lengths and a sink": prompts(topk_length=zeros(5, dtype=INT32), attn_sink=zeros(3, dtype=FLOAT32)),
    "prefill into memory": prompts(out=zeros(5, 3, 512)),
    "prefill of no rows": prompts(kv=zeros(0, 1, 576)),
    "prefill of one row": prompts(kv=zeros(4, 1, 1408)[:1, :, :576]),
    "prefill at an odd address": prompts(kv=zeros(5761)[1:].view(10, 1, 576)),
    "prefill of rows apart": prompts(kv=zeros(10, 1, 1408)[..., :576], topk_length=zeros(5, dtype=INT32)),
    "prefill of overlapping rows": prompts(kv=zeros(6000).as_strided((10, 1, 576), (64, 576, 1)), out=zeros(5, 3, 512)),
    "prefill of rows apart by an odd number": prompts(kv=zeros(10, 1, 1401)[..., :576]),
    "keys": keys(),
    "keys, compressed": keys(max_seqlen_k=7),
    "keys of many tokens": keys(200),
    "keys of tokens apart": keys(q=(zeros(5, 16, 128, dtype=E4M3)[:, :8], None)),
    "pages": pages(),
    "pages of one token": pages(4, 1),
    "pages with one length": pages(context_lens=zeros(2, dtype=INT32)),
    "pages with lengths from a wider tensor": pages(4, 1, context_lens=zeros(4, 2, dtype=INT32)[:, :1]),
    "pages of queries apart": pages(q=(zeros(2, 6, 8, 128, dtype=E4M3)[:, :3], None)),
    "pages at an odd address": pages(kv_cache=bytes_at(4, 5, 64, 1, 132)),
    "pages apart": pages(kv_cache=bytes_at(0, 5, 64 * 132 + 16)[:, : 64 * 132].view(5, 64, 1, 132)),
    "ragged": ragged(),
    "ragged, causal": ragged(causal=True, softmax_scale=0.1),
    "ragged, of one head of keys": ragged(heads_kv=1),
    "ragged, of many tokens": ragged(300),
    "ragged, of no requests": ragged(
        cu_seqlens_qo=zeros(1, dtype=INT32), cu_seqlens_kv=zeros(1, dtype=INT32), max_seqlen_qo=0, max_seqlen_kv=0
    ),
    "ragged, of keys and values side by side": ragged(k=zeros(7, 4, 320)[..., :192], v=zeros(7, 4, 320)[..., 192:]),
}


@pytest.fixture(params=["off", "on"])
def max_logits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setenv(statistics.MAX_LOGITS.name, request.param)
    statistics.wants_max_logits.cache_clear()
    yield request.param == "on"
    statistics.wants_max_logits.cache_clear()


def kinds_of(registry: Registry) -> set[tuple[Any, ...]]:
    """What was asked for, by its facts; a promise of the caller is none."""
    return {(*key[:5], key[6]) for key in registry.dispatched}


@pytest.mark.parametrize("what", CALLS)
def test_what_is_handed_over_would_pass_the_primitives_own_check_and_is_of_the_same_kind(what: str, max_logits: bool):
    """The public function, called with the same arguments, refuses nothing and finds the choice that was made."""
    function, given = CALLS[what]
    tape = Tape()
    registry = registry_of(tape)
    with serving(registry):
        function(**given)
        calls, kinds = list(tape.calls), kinds_of(registry)
        assert calls and kinds
        for name, args, kwargs in calls:
            getattr(primitives, name)(*args, **kwargs)
    assert len(tape.calls) == 2 * len(calls)
    assert kinds_of(registry) == kinds, f"other facts: {kinds_of(registry) ^ kinds}"


@pytest.mark.parametrize("what", CALLS)
def test_each_tensor_is_checked_once(what: str, monkeypatch: pytest.MonkeyPatch):
    function, given = CALLS[what]
    checked: list[str] = []
    check = TensorTable.check

    def counted(table: TensorTable, *args: Any) -> dict[str, int]:
        checked.append(table.where)
        return check(table, *args)

    monkeypatch.setattr(TensorTable, "check", counted)
    with serving(registry_of(Tape())):
        function(**given)
    assert checked == ([function.__name__] if function.__module__.startswith("mla_portable.flash_mla") else [])


def test_a_scale_that_is_too_large_for_the_greatest_score_is_refused_before_any_kernel_runs(
    max_logits: bool, monkeypatch: pytest.MonkeyPatch
):
    """The second attention for the greatest score of a row multiplies the scale by 2**20."""
    tape = Tape()
    function, given = prompts(sm_scale=1e33)
    with serving(registry_of(tape)):
        if max_logits:
            with pytest.raises(InvalidArgument, match=r"flash_mla_sparse_fwd: sm_scale times 1048576.* float32 holds"):
                function(**given)
            assert not tape.calls
        function(**given, return_log2_lse=False)  # no statistic, no second attention
    assert len(tape.calls) == 1


def test_rows_that_torch_negates_when_it_reads_them_are_refused():
    function, given = prompts(kv=torch._neg_view(zeros(10, 1, 576)))
    tape = Tape()
    with serving(registry_of(tape)), pytest.raises(InvalidArgument, match=r"flash_mla_sparse_fwd: kv: .*negative bit"):
        function(**given)
    assert not tape.calls


def test_lengths_of_one_column_reach_the_kernel_one_after_the_other():
    lengths = torch.arange(8, dtype=INT32).view(4, 2)[:, :1]  # of tokens that lie apart
    function, given = pages(4, 1, context_lens=lengths)
    tape = Tape()
    with serving(registry_of(tape)):
        function(**given)
    ((_, args, _),) = tape.calls
    assert args[4].tolist() == [0, 2, 4, 6] and args[4].is_contiguous()
