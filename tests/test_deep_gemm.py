# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's indexer functions by its names, against plain torch with the meaning of DeepGEMM's tests/test_attention.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from arguments import on_a_gpu, zeros
from torch import Tensor

from mla_portable import deep_gemm
from mla_portable.contracts import InvalidArgument
from mla_portable.deep_gemm import dense as module

HEADS, WIDTH, BLOCK = 8, 128, 64


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """Arguments and shapes are what is tested here; kernels have tests of their own."""
    import mla_portable

    with mla_portable.use("reference"):
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 128] as e4m3 and float32 scales [...]: the largest of a row becomes 448."""
    scales = values.abs().amax(dim=-1).clamp(min=1e-4) / 448
    return (values / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """[M, N] float64 of q [M, H, 128], keys [N, 128], weights [M, H]."""
    products = torch.einsum("mhd,nd->mhn", q.double(), keys.double()).clamp(min=0)
    return (products * weights.double().unsqueeze(-1)).sum(dim=1)


def assert_scores(found: Tensor, wanted: Tensor, seen: Tensor) -> None:
    """-inf exactly where nothing is seen; elsewhere float32 sums."""
    assert found.shape == wanted.shape
    assert torch.equal(found == -torch.inf, ~seen)
    torch.testing.assert_close(found[seen].double(), wanted[seen], rtol=1e-4, atol=1e-3)


RANGES = {
    "causal": ([0, 0, 0, 0, 0, 0], [5, 6, 7, 8, 9, 10]),
    "context parallel": ([0] * 6, [3, 4, 5, 30, 31, 32]),
    "several sequences": ([0, 0, 10, 10, 25, 25], [9, 10, 24, 25, 39, 40]),
    "suffixes": ([0, 30, 39, 0, 0, 0], [40, 40, 40, 1, 2, 3]),
    "nothing": ([0, 40, 3, 50, -2, 7], [0, 40, 2, 60, 0, 7]),
}


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("clean", [True, False])
def test_scores_of_gathered_keys(ranges: str, clean: bool):
    starts, ends = (torch.tensor(each, dtype=torch.int32) for each in RANGES[ranges])
    q, weights = draw(6, HEADS, WIDTH).to(torch.float8_e4m3fn), draw(6, HEADS, seed=1)
    codes, scales = quantised(draw(40, WIDTH, seed=2))
    found = deep_gemm.fp8_fp4_mqa_logits((q, None), (codes, scales), weights, starts, ends, clean_logits=clean)
    column = torch.arange(40)
    seen = (column >= starts.unsqueeze(1)) & (column < ends.unsqueeze(1))
    wanted = scores(q, codes.double() * scales.double().unsqueeze(1), weights)
    assert_scores(found, wanted, seen)
    assert found.stride(0) % 256 == 0  # top-k kernels load whole rows
    older = deep_gemm.fp8_mqa_logits(q, (codes, scales), weights, starts, ends, clean)
    assert torch.equal(older, found)


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("form", ["keyword", "sixth"])
@pytest.mark.parametrize("at_a_time", [1 << 24, 1000])
def test_a_compressed_result_starts_at_the_first_key(ranges: str, form: str, at_a_time: int, monkeypatch: pytest.MonkeyPatch):
    """`max_seqlen_k` by its name, or, as DeepGEMM 2.8 has it, in the place of clean_logits; in parts where scratch is short."""
    monkeypatch.setattr(module, "_SCRATCH_ELEMENTS", at_a_time)
    starts, ends = (torch.tensor(each, dtype=torch.int32) for each in RANGES[ranges])
    width = max(1, int((ends - starts.clamp(min=0)).max()))
    q, weights = draw(6, HEADS, WIDTH).to(torch.float8_e4m3fn), draw(6, HEADS, seed=1)
    codes, scales = quantised(draw(40, WIDTH, seed=2))
    arguments = (q, None), (codes, scales), weights, starts, ends
    if form == "keyword":
        found = deep_gemm.fp8_fp4_mqa_logits(*arguments, clean_logits=False, max_seqlen_k=width)
    else:
        found = deep_gemm.fp8_fp4_mqa_logits(*arguments, width)
    dense = deep_gemm.fp8_fp4_mqa_logits(*arguments)
    assert found.shape == (6, width)
    for row in range(6):
        first, last = max(int(starts[row]), 0), min(int(ends[row]), 40)
        own = dense[row, first:last] if first < last else dense[row, :0]
        assert found[row, : len(own)].tolist() == own.tolist()
        assert (found[row, len(own) :] == -torch.inf).all()


@pytest.mark.parametrize("max_seqlen_k", [0, 7])
def test_no_keys_and_no_tokens(max_seqlen_k: int):
    q, nothing = draw(2, HEADS, WIDTH).to(torch.float8_e4m3fn), torch.zeros(2, dtype=torch.int32)
    codes, scales = quantised(draw(3, WIDTH))
    options = {"clean_logits": False, "max_seqlen_k": max_seqlen_k}
    empty = deep_gemm.fp8_fp4_mqa_logits((q, None), (codes[:0], scales[:0]), draw(2, HEADS), nothing, nothing, **options)
    assert empty.shape == (2, max_seqlen_k) and (empty == -torch.inf).all()
    none = deep_gemm.fp8_fp4_mqa_logits((q[:0], None), (codes, scales), draw(0, HEADS), nothing[:0], nothing[:0], **options)
    assert none.shape == (0, max_seqlen_k or 3)


def test_a_bound_that_no_memory_holds_is_refused_in_words():
    nothing = torch.zeros(1 << 14, dtype=torch.int32)
    q, (codes, scales) = torch.zeros(1 << 14, HEADS, WIDTH, dtype=torch.float8_e4m3fn), quantised(draw(3, WIDTH))
    with pytest.raises(InvalidArgument, match="max_seqlen_k: got 2147483647 for 16384 query tokens, 131072 GiB of scores"):
        deep_gemm.fp8_fp4_mqa_logits(
            (q, None), (codes, scales), torch.zeros(1 << 14, HEADS), nothing, nothing, max_seqlen_k=2**31 - 1
        )


def test_a_bound_beyond_the_keys_costs_only_its_columns(monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *sizes, **options: (made.append(sizes[-1]), arange(*sizes, **options))[1])
    codes, scales = quantised(draw(3, WIDTH))
    q, starts, ends = draw(2, HEADS, WIDTH).to(torch.float8_e4m3fn), torch.tensor([0, 1]).int(), torch.tensor([3, 2]).int()
    arguments = (q, None), (codes, scales), draw(2, HEADS), starts, ends
    found = deep_gemm.fp8_fp4_mqa_logits(*arguments, max_seqlen_k=100_000)
    few = deep_gemm.fp8_fp4_mqa_logits(*arguments, max_seqlen_k=3)
    assert torch.equal(found[:, :3], few) and (found[:, 3:] == -torch.inf).all() and max(made) == 3


def paged(lengths: list[int], columns: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A cache [blocks, 64, 1, 132] with these sequences in blocks here and there, its block table, and the keys as numbers."""
    blocks = torch.randperm(2 + sum(-(-n // BLOCK) for n in lengths), generator=torch.Generator().manual_seed(3)).tolist()
    cache = torch.full((len(blocks), BLOCK * (WIDTH + 4)), 0xFF, dtype=torch.uint8)
    table, keys = torch.zeros((len(lengths), columns), dtype=torch.int32), []
    for row, length in enumerate(lengths):
        codes, scales = quantised(draw(length, WIDTH, seed=10 + row))
        keys.append(codes.double() * scales.double().unsqueeze(1))
        for column, begin in enumerate(range(0, length, BLOCK)):
            block = table[row, column] = blocks.pop()
            page, some = cache[block], slice(begin, begin + BLOCK)
            part = codes[some].view(torch.uint8).flatten()
            page[: len(part)] = part
            page[BLOCK * WIDTH :][: 4 * len(scales[some])] = scales[some].view(torch.uint8)
    return cache.view(-1, BLOCK, 1, WIDTH + 4), table, keys


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["one length", "a length for each token"])
@pytest.mark.parametrize("older", [False, True])
def test_scores_of_pages(next_n: int, form: str, older: bool):
    lengths = [70, 5, 128]
    cache, table, keys = paged(lengths, columns=3)
    q, weights = draw(3, next_n, HEADS, WIDTH).to(torch.float8_e4m3fn), draw(3 * next_n, HEADS, seed=1)
    if form == "one length":
        context = torch.tensor(lengths, dtype=torch.int32)
        seen_by = [[length - next_n + 1 + token for token in range(next_n)] for length in lengths]
    else:
        seen_by = [[(length * (7 + token)) % (length + 1) for token in range(next_n)] for length in lengths]
        context = torch.tensor(seen_by, dtype=torch.int32)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context, BLOCK, 132)
    if older:
        found = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, context, table, schedule, 150, clean_logits=True)
    else:
        found = deep_gemm.fp8_fp4_paged_mqa_logits((q, None), cache, weights, context, table, schedule, 150)
    assert found.shape == (3 * next_n, 150) and found.stride(0) % 256 == 0
    for request in range(3):
        for token in range(next_n):
            row, count = request * next_n + token, seen_by[request][token]
            wanted = torch.zeros(150, dtype=torch.float64)
            wanted[: lengths[request]] = scores(q[request, token][None], keys[request], weights[row][None])[0]
            assert_scores(found[row], wanted, torch.arange(150) < count)


def test_lengths_of_padding_see_nothing():
    cache, table, _ = paged([70], columns=2)
    q, weights = draw(1, 2, HEADS, WIDTH).to(torch.float8_e4m3fn), draw(2, HEADS)
    for context in ([[-1, 0]], [0]):
        lengths = torch.tensor(context, dtype=torch.int32)
        found = deep_gemm.fp8_fp4_paged_mqa_logits((q, None), cache, weights, lengths, table, None, 40)
        assert (found == -torch.inf).all()


def test_the_schedule_fits_vllms_buffer():
    """vLLM copies it into [num_sms + 1, 2] int32, in 0.26 whole, later the rows that there are."""
    schedule = deep_gemm.get_paged_mqa_logits_metadata(torch.ones((4, 2), dtype=torch.int32), 64, 132, indices=None)
    buffer = torch.full((133, 2), 7, dtype=torch.int32)
    buffer[:] = schedule
    assert schedule.shape == buffer.shape and schedule.dtype == torch.int32


def test_other_dtypes_of_the_result_and_other_formats():
    cache, table, _ = paged([70], columns=2)
    q, weights, context = (
        draw(1, 1, HEADS, WIDTH).to(torch.float8_e4m3fn),
        draw(1, HEADS),
        torch.tensor([[70]], dtype=torch.int32),
    )
    found = deep_gemm.fp8_fp4_paged_mqa_logits((q, None), cache, weights, context, table, None, 80, logits_dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    with pytest.raises(InvalidArgument, match=r"fp8_fp4_paged_mqa_logits: q: got queries with scales .* weights"):
        deep_gemm.fp8_fp4_paged_mqa_logits((q, torch.ones(1)), cache, weights, context, table, None, 80)
    with pytest.raises(InvalidArgument, match="fp8_fp4_mqa_logits: q"):
        deep_gemm.fp8_fp4_mqa_logits((q[0], torch.ones(1)), (q[0, 0], torch.ones(8)), weights, table[:, 0], table[:, 1])


# ------------------------------------------------------------------------------------------------- what is refused

E4M3, INT32 = torch.float8_e4m3fn, torch.int32
M, N, B, NEXT_N = 4, 12, 2, 3


def int32(*shape: int) -> Tensor:
    return zeros(*shape, dtype=INT32)


def float32(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.float32)


def e4m3(*shape: int) -> Tensor:
    return zeros(*shape, dtype=E4M3)


def key_arguments(tokens: int = M, keys: int = N, **changes: Any) -> dict[str, Any]:
    return {
        "q": (e4m3(tokens, HEADS, WIDTH), None),
        "kv": (e4m3(keys, WIDTH), float32(keys)),
        "weights": float32(tokens, HEADS),
        "cu_seq_len_k_start": int32(tokens),
        "cu_seq_len_k_end": int32(tokens),
    } | changes


def page_arguments(**changes: Any) -> dict[str, Any]:
    return {
        "q": (e4m3(B, NEXT_N, HEADS, WIDTH), None),
        "kv_cache": zeros(5, BLOCK, 1, WIDTH + 4, dtype=torch.uint8),
        "weights": float32(B * NEXT_N, HEADS),
        "context_lens": int32(B, NEXT_N),
        "block_table": int32(B, 2),
        "schedule_meta": None,
        "max_context_len": 100,
    } | changes


NO_COUNTS = (-1, 1.5, "x", None, [3], True, torch.tensor(3), 2**31)
NO_TENSORS = (None, 5, "x", [1.0])
WRONG_DTYPES = (torch.int32, torch.float8_e4m3fn, torch.int64, "x", None, float)

KEY_REFUSALS: dict[str, list[Any]] = {
    "q": [None, e4m3(M, HEADS, WIDTH), (e4m3(M, HEADS, WIDTH),), (e4m3(M, HEADS, WIDTH), float32(M, HEADS))],
    "q[0]": [(each, None) for each in (
        *NO_TENSORS, e4m3(M, WIDTH), e4m3(M, 0, WIDTH), e4m3(M, HEADS, 64), zeros(M, HEADS, WIDTH),
        e4m3(M, HEADS, 256)[..., ::2],
    )],
    "kv": [None, e4m3(N, WIDTH), (e4m3(N, WIDTH), float32(N), None)],
    "kv[0]": [(each, float32(N)) for each in (
        *NO_TENSORS, e4m3(N, 64), zeros(N, WIDTH), e4m3(N, 1, WIDTH), on_a_gpu(N, WIDTH, dtype=E4M3),
    )],
    "kv[1]": [(e4m3(N, WIDTH), each) for each in (*NO_TENSORS, float32(N + 1), float32(N, 1), int32(N), float32(2 * N)[::2])],
    "weights": [
        *NO_TENSORS, float32(M + 1, HEADS), float32(M, HEADS + 1), float32(M), zeros(M, HEADS),
        on_a_gpu(M, HEADS, dtype=torch.float32),
    ],
    "cu_seq_len_k_start": [*NO_TENSORS, int32(M + 1), int32(M - 1), int32(M, 1), float32(M), zeros(M, dtype=torch.int64)],
    "cu_seq_len_k_end": [*NO_TENSORS, int32(M + 1), int32(M - 1), int32(0), float32(M), on_a_gpu(M, dtype=INT32)],
    "max_seqlen_k": list(NO_COUNTS),
    "clean_logits": [each for each in NO_COUNTS if each is not True],
    "logits_dtype": list(WRONG_DTYPES),
}  # fmt: skip
PAGE_REFUSALS: dict[str, list[Any]] = {
    "q": [None, e4m3(B, NEXT_N, HEADS, WIDTH), (e4m3(B, NEXT_N, HEADS, WIDTH), float32(1))],
    "q[0]": [(each, None) for each in (
        *NO_TENSORS, e4m3(B * NEXT_N, HEADS, WIDTH), e4m3(B, 0, HEADS, WIDTH), e4m3(B, NEXT_N, 0, WIDTH),
        e4m3(B, NEXT_N, HEADS, 64), zeros(B, NEXT_N, HEADS, WIDTH),
    )],
    "kv_cache": [
        *NO_TENSORS, zeros(5, BLOCK, 2, 132, dtype=torch.uint8), zeros(5, BLOCK, 1, 128, dtype=torch.uint8),
        zeros(5, BLOCK, 1, 132, dtype=torch.int8), zeros(5, BLOCK, 132), zeros(5, 132, dtype=torch.uint8),
        zeros(5, 2 * BLOCK, 1, 132, dtype=torch.uint8)[:, ::2], on_a_gpu(5, BLOCK, 1, 132, dtype=torch.uint8),
    ],
    "weights": [*NO_TENSORS, float32(B, NEXT_N, HEADS), float32(B, HEADS), float32(B * NEXT_N, 1), zeros(B * NEXT_N, HEADS)],
    "context_lens": [
        *NO_TENSORS, int32(B + 2, 1), int32(1, B + 2), int32(B, NEXT_N, 1), int32(NEXT_N, B), int32(B + 1), int32(1), int32(),
        float32(B), zeros(B, NEXT_N, dtype=torch.int64), on_a_gpu(B, NEXT_N, dtype=INT32),
    ],
    "block_table": [*NO_TENSORS, int32(B), int32(B + 1, 2), int32(B * NEXT_N, 2), float32(B, 2), on_a_gpu(B, 2, dtype=INT32)],
    "max_context_len": list(NO_COUNTS),
    "logits_dtype": list(WRONG_DTYPES),
}  # fmt: skip


def refused(call: Callable[..., Any], arguments: dict[str, Any], argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(**arguments | {argument.partition("[")[0]: value})
    assert caught.value.argument == argument and caught.value.where == call.__name__
    assert f"{argument}: got " in str(caught.value) and ", expected " in str(caught.value)


@pytest.mark.parametrize("argument", KEY_REFUSALS)
@pytest.mark.parametrize("max_seqlen_k", [0, 7])
@pytest.mark.parametrize(("tokens", "keys"), [(M, N), (0, N), (M, 0)])
def test_gathered_keys_are_checked_whatever_the_form_of_the_result(argument: str, max_seqlen_k: int, tokens: int, keys: int):
    """Also where there is nothing to compute: lengths other than M or N are refused there too."""
    for value in KEY_REFUSALS[argument] if (tokens, keys) == (M, N) else ():
        refused(deep_gemm.fp8_fp4_mqa_logits, key_arguments() | {"max_seqlen_k": max_seqlen_k}, argument, value)
    wrong = {
        "weights": float32(tokens + 1, HEADS),
        "cu_seq_len_k_start": int32(tokens + 1),
        "cu_seq_len_k_end": int32(tokens + 1),
    }
    if argument in wrong:
        given = key_arguments(tokens, keys, max_seqlen_k=max_seqlen_k)
        refused(deep_gemm.fp8_fp4_mqa_logits, given, argument, wrong[argument])
    assert deep_gemm.fp8_fp4_mqa_logits(**key_arguments(tokens, keys, max_seqlen_k=max_seqlen_k)).shape[0] == tokens


@pytest.mark.parametrize("argument", PAGE_REFUSALS)
def test_pages_are_checked(argument: str):
    for value in PAGE_REFUSALS[argument]:
        refused(deep_gemm.fp8_fp4_paged_mqa_logits, page_arguments(), argument, value)
    for context_lens in (int32(B, NEXT_N), int32(B)):
        found = deep_gemm.fp8_fp4_paged_mqa_logits(**page_arguments(context_lens=context_lens))
        assert found.shape == (B * NEXT_N, 100) and (found == -math.inf).all()


def test_a_schedule_is_made_for_lengths_and_counts_alone():
    make = deep_gemm.get_paged_mqa_logits_metadata
    given = {"context_lens": int32(B, NEXT_N), "block_kv": BLOCK, "num_sms": 132}
    for value in (*NO_TENSORS, int32(), int32(B, NEXT_N, 1), float32(B)):
        refused(make, given, "context_lens", value)
    for argument in ("block_kv", "num_sms"):
        for value in (0, *NO_COUNTS):
            refused(make, given, argument, value)


def test_counts_of_numpy_are_integers():
    found = deep_gemm.fp8_fp4_paged_mqa_logits(**page_arguments(max_context_len=np.int64(70)))
    assert found.shape == (B * NEXT_N, 70)
    assert deep_gemm.fp8_fp4_mqa_logits(**key_arguments(clean_logits=np.int32(5))).shape == (M, 5)


def test_multiprocessors_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch):
    properties = {"of": SimpleNamespace(multi_processor_count=78)}
    monkeypatch.setattr(module, "accelerator", lambda device: SimpleNamespace(properties=lambda: properties["of"]))
    assert deep_gemm.get_num_sms() == 78
    properties["of"] = None
    assert deep_gemm.get_num_sms() == 1
