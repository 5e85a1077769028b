# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's sparse functions, the second level of V4.1's indexer: scores of candidate blocks, beside dense ones in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from arguments import bf16, e4m3, f32, i32, i64, on_a_gpu, u8
from torch import Tensor

import mla_portable
from mla_portable import deep_gemm
from mla_portable.contracts import InvalidArgument

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, WIDTH = 4, 128
FORMS = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.int8}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PADDING = {"last": None, "largest": 2**31 - 1, "absent": -1}
"""What follows the blocks of a row: vLLM repeats the last one, SGLang writes the largest int32."""


def quantised(values: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [.., 128] or [.., 64], scales [..] int32, and the numbers that these are [.., 128] float64."""
    groups = values.double().unflatten(-1, (4, 32))
    most = 448.0 if form == "mxfp8" else 6.0
    exponents = (groups.abs().amax(-1).clamp(min=1e-4) / most).log2().ceil()  # [.., 4]
    scaled = groups / exponents.exp2().unsqueeze(-1)
    packed = (exponents + 127).to(torch.uint8).view(torch.int32).squeeze(-1)
    if form == "mxfp8":
        codes = scaled.to(torch.float32).to(torch.float8_e4m3fn)
        numbers = codes.float().double()
        stored = codes.flatten(-2)
    else:
        sizes = torch.tensor(E2M1, dtype=torch.float64)
        code = (scaled.abs().unsqueeze(-1) - sizes).abs().argmin(-1)
        numbers = torch.where(scaled < 0, -sizes[code], sizes[code])
        nibbles = (code + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
        stored = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(torch.int8)
    return stored, packed, (numbers * exponents.exp2().unsqueeze(-1)).flatten(-2)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """[M, N] float64 of q [M, H, 128], keys [N, 128], weights [M, H]."""
    return (torch.einsum("mhd,nd->mhn", q, keys).relu() * weights.double().unsqueeze(-1)).sum(dim=1)


def lists(counts: list[int], width: int, padding: str, seed: int) -> tuple[list[list[int]], Tensor]:
    """Of each row some of its blocks, ascending; and the rows, padded.

    DeepGEMM reads min(width, count) of a row. Every second row has one block fewer, so that padding is among what is read.
    """
    generator = torch.Generator().manual_seed(seed)
    most = [min(width, count) - row % 2 * (count > 1) for row, count in enumerate(counts)]
    chosen = [
        sorted(torch.randperm(count, generator=generator)[:take].tolist()) for count, take in zip(counts, most, strict=True)
    ]
    filler = PADDING[padding]
    rows = [row + [(row or [0])[-1] if filler is None else filler] * (width - len(row)) for row in chosen]
    return chosen, torch.tensor(rows, dtype=torch.int32).view(len(counts), width)


def assert_scores(found: Tensor, wanted: Tensor) -> None:
    """A bfloat16, rounded once; -inf exactly where it is wanted."""
    assert found.dtype == torch.bfloat16 and found.shape == wanted.shape and found.stride(0) % 512 == 0
    found = found.cpu().double()
    assert torch.equal(found == -math.inf, wanted == -math.inf)
    seen = wanted > -math.inf
    torch.testing.assert_close(found[seen], wanted[seen], rtol=2**-8 + 1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("size", "padding", "unaligned"), [(8, "last", True), (16, "largest", False), (8, "absent", False)])
def test_scores_of_gathered_keys(form: str, size: int, padding: str, unaligned: bool, backend: str):
    lengths = [5, 70, 0, 33, 120]
    starts = torch.tensor([sum(lengths[:row]) for row in range(5)], dtype=torch.int32)
    if not unaligned:
        starts = (starts + size - 1) // size * size
    ends = starts + torch.tensor(lengths, dtype=torch.int32)
    num_keys, width = int(ends.max()), 5
    chosen, relative = lists([-(-length // size) for length in lengths], width, padding, seed=size)
    indices = torch.where((relative >= 0) & (relative < 2**30), relative + (starts // size)[:, None], relative)
    q, q_scales, queries = quantised(drawn(5, HEADS, WIDTH, seed=1), form)
    keys, key_scales, values = quantised(drawn(num_keys, WIDTH, seed=2), form)
    weights = drawn(5, HEADS, seed=3).bfloat16()
    dense = scores(queries, values, weights)
    wanted = torch.full((5, width * size), -math.inf, dtype=torch.float64)
    for row, blocks in enumerate(chosen):
        for place, block in enumerate(blocks):
            first = int(starts[row]) + block * size
            own = dense[row, first : min(first + size, int(ends[row]))]
            wanted[row, place * size : place * size + len(own)] = own
    on = [each.to(DEVICE) for each in (starts, ends, indices, q, q_scales, keys, key_scales, weights)]
    starts, ends, indices, q, q_scales, keys, key_scales, weights = on
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(starts, ends, num_keys, indices, q.dtype, size, unaligned)
    assert metadata.dtype == torch.uint8 and metadata.dim() == 1
    with mla_portable.use(backend):
        call = (q, q_scales), (keys, key_scales), weights, metadata, width, size
        found = deep_gemm.fp8_fp4_sparse_mqa_logits(*call, use_unaligned_ks=unaligned)
    assert_scores(found, wanted)


def paged(lengths: list[int], page: int, form: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A cache [pages, page, 1, bytes] whose pages lie apart, a block table, and the keys of each sequence as numbers."""
    bytes_of_key = WIDTH if form == "mxfp8" else WIDTH // 2
    own = [-(-length // page) for length in lengths]
    ids = torch.randperm(sum(own) + 2, generator=torch.Generator().manual_seed(7)).tolist()
    storage = torch.full((len(ids), page * (bytes_of_key + 4) + 512), 0xFF, dtype=torch.uint8)
    table, keys = torch.full((len(lengths), max(own) + 1), -1, dtype=torch.int32), []
    for row, length in enumerate(lengths):
        codes, scales, numbers = quantised(drawn(length, WIDTH, seed=20 + row), form)
        keys.append(numbers)
        for column in range(own[row]):
            block = table[row, column] = ids.pop()
            some = slice(column * page, min((column + 1) * page, length))
            count = some.stop - some.start
            storage[block, : count * bytes_of_key] = codes[some].view(torch.uint8).flatten()
            storage[block, page * bytes_of_key :][: 4 * count] = scales[some].contiguous().view(torch.uint8)
    cache = storage[:, : page * (bytes_of_key + 4)].unflatten(1, (page, 1, bytes_of_key + 4))
    return cache, table, keys


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("page", "size", "padding"), [(16, 8, "last"), (64, 16, "largest")])
def test_scores_of_pages(form: str, page: int, size: int, padding: str, backend: str):
    """Two rows of the first request, as of drafts; one row that sees nothing; metadata that two layers share."""
    lengths, request_of, width = [70, 9, 130], [0, 0, 1, 1, 2], 4
    seen = [69, 70, 9, 0, 130]
    chosen, indices = lists([-(-count // size) for count in seen], width, padding, seed=page)
    of_row = torch.tensor(request_of)
    context = torch.tensor(seen, dtype=torch.int32).view(-1, 1)
    metadata = None
    for layer in range(2):
        cache, table, keys = paged(lengths, page, form)
        q, q_scales, queries = quantised(drawn(5, 1, HEADS, WIDTH, seed=40 + layer), form)
        weights = drawn(5, HEADS, seed=50 + layer).bfloat16()
        wanted = torch.full((5, width * size), -math.inf, dtype=torch.float64)
        for row, blocks in enumerate(chosen):
            dense = scores(queries[row], keys[request_of[row]], weights[row : row + 1])[0]
            for place, block in enumerate(blocks):
                own = dense[block * size : min((block + 1) * size, seen[row])]
                wanted[row, place * size : place * size + len(own)] = own
        if metadata is None:
            lists_of_rows = context.to(DEVICE), table[of_row].to(DEVICE), of_row.int().to(DEVICE)
            metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(*lists_of_rows, page, indices.to(DEVICE), q.dtype, size)
        on_device = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=DEVICE).copy_(cache)
        call = (q.to(DEVICE), q_scales.to(DEVICE)), on_device, weights.to(DEVICE), metadata
        with mla_portable.use(backend):
            assert_scores(deep_gemm.fp8_fp4_paged_sparse_mqa_logits(*call, width, size), wanted)


def test_a_block_that_a_table_or_the_keys_do_not_reach_is_not_scored():
    q, q_scales, _ = quantised(drawn(4, 1, HEADS, WIDTH, seed=1), "mxfp8")
    cache, table, _ = paged([70], 16, "mxfp8")
    rows = table[:, :3].repeat(4, 1)  # 48 positions
    rows[1, 1], rows[2, 0] = -1, 2**31 - 1  # a hole, and a page past the cache
    indices = torch.tensor([[0, 5, 6]] * 4, dtype=torch.int32)
    context = torch.tensor([70, 70, 70, -5], dtype=torch.int32)
    arguments = context, rows, torch.zeros(4, dtype=torch.int32), 16, indices, q.dtype, 8
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(*arguments)
    with mla_portable.use("reference"):
        found = deep_gemm.fp8_fp4_paged_sparse_mqa_logits((q, q_scales), cache, bf16(4, HEADS), metadata, 3, 8)
    there = (found > -math.inf).unflatten(1, (3, 8))
    assert there.all(dim=2).tolist() == [[True, True, False], [True, True, False], [False, True, False], [False] * 3]
    assert torch.equal(there.all(dim=2), there.any(dim=2))


@pytest.mark.parametrize("starts", [3, 2**31 - 4, -9])
def test_a_start_that_no_block_has_and_ends_of_int32(starts: int):
    """Without use_unaligned_ks a block that begins before the first key of its token is not scored."""
    begin, end = torch.tensor([starts], dtype=torch.int32), torch.tensor([2**31 - 1], dtype=torch.int32)
    indices = torch.tensor([[0, 1, 2, 2**28 - 1]], dtype=torch.int32)
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(begin, end, 24, indices, torch.int8, 8)
    first, lengths = metadata.view(torch.int32).view(2, 4).tolist()
    if starts == 3:
        assert (first, lengths) == ([-1, 8, 16, -1], [0, 8, 8, 0])
    elif starts < 0:
        assert (first, lengths) == ([0, 8, 16, -1], [8, 8, 8, 0])
    else:
        assert (first, lengths) == ([-1] * 4, [0] * 4)


def test_no_tokens_and_no_keys():
    nothing = i32(0)
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(nothing, nothing, 5, i32(0, 4), torch.int8, 8)
    q = torch.zeros(0, HEADS, 64, dtype=torch.int8), i32(0, HEADS)
    keys = torch.zeros(5, 64, dtype=torch.int8), i32(5)
    assert deep_gemm.fp8_fp4_sparse_mqa_logits(q, keys, bf16(0, HEADS), metadata, 4, 8).shape == (0, 32)
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(i32(2), i32(2), 0, i32(2, 4), torch.float8_e4m3fn, 8)
    empty = deep_gemm.fp8_fp4_sparse_mqa_logits(
        (e4m3(2, HEADS, WIDTH), i32(2, HEADS)), (e4m3(0, WIDTH), i32(0)), bf16(2, HEADS), metadata, 4, 8
    )
    assert (empty == -math.inf).all()


# ------------------------------------------------------------------------------------------------- what is refused

M, B, N, PAGE, PAGES = 3, 4, 40, 16, 5
GATHERED = {
    "cu_seq_len_k_start": i32(M),
    "cu_seq_len_k_end": i32(M),
    "num_kv_tokens": N,
    "sparse_kv_block_indices": i32(M, B),
    "qk_dtype": torch.int8,
    "sparse_block_kv": 8,
}
PAGED = {
    "context_lens": i32(M),
    "block_table": i32(M, 2),
    "indices": i32(M),
    "page_kv": PAGE,
    "sparse_kv_block_indices": i32(M, B),
    "qk_dtype": torch.float8_e4m3fn,
    "sparse_block_kv": 16,
}
SCORES = {
    "q": (e4m3(M, HEADS, WIDTH), i32(M, HEADS)),
    "kv": (e4m3(N, WIDTH), i32(N)),
    "weights": bf16(M, HEADS),
    "metadata": u8(8 * M * B),
    "num_max_sparse_blocks": B,
    "sparse_block_kv": 8,
}
PAGE_SCORES = {
    **{name: value for name, value in SCORES.items() if name != "kv"},
    "q": (e4m3(M, 1, HEADS, WIDTH), i32(M, 1, HEADS)),
    "kv_cache": u8(PAGES, PAGE, 1, 132),
}
LISTS: dict[str, list[Any]] = {
    "sparse_kv_block_indices": [None, i32(M), f32(M, B), i64(M, B), i32(M, 2 * B)[:, ::2]],
    "qk_dtype": [torch.uint8, torch.bfloat16, "int8", None],
    "sparse_block_kv": [4, 32, 0, None, 8.5, True],
}
RESULTS: dict[str, list[Any]] = {
    "weights": [None, f32(M, HEADS), bf16(M, HEADS + 1), bf16(M)],
    "metadata": [None, u8(8 * M * B + 8), u8(8, M * B), i32(2 * M * B), on_a_gpu(8 * M * B, dtype=torch.uint8)],
    "num_max_sparse_blocks": [0, -1, 1.5, None, B + 1],
    "sparse_block_kv": LISTS["sparse_block_kv"],
}
CASES: list[tuple[Any, dict[str, Any], dict[str, list[Any]]]] = [
    (
        deep_gemm.get_sparse_mqa_logits_metadata,
        GATHERED,
        {
            **LISTS,
            "cu_seq_len_k_start": [None, i32(M + 1), i64(M), i32(M, 1)],
            "cu_seq_len_k_end": [i32(0), f32(M)],
            "num_kv_tokens": [-1, 1.5, None, torch.tensor(3)],
        },
    ),
    (
        deep_gemm.get_paged_sparse_mqa_logits_metadata,
        PAGED,
        {
            **LISTS,
            "context_lens": [None, i32(M + 1), i64(M), i32(2, M)],
            "block_table": [None, i32(M), i32(M + 1, 2), i64(M, 2)],
            "indices": [None, i32(M + 1), i64(M)],
            "page_kv": [0, 24, None, 1.5],
        },
    ),
    (
        deep_gemm.fp8_fp4_sparse_mqa_logits,
        SCORES,
        {
            **RESULTS,
            "q": [None, e4m3(M, HEADS, WIDTH), (e4m3(M, HEADS, WIDTH), None)],
            "q[0]": [(each, i32(M, HEADS)) for each in (None, bf16(M, HEADS, WIDTH), e4m3(M, HEADS, 64), e4m3(M, 0, WIDTH))],
            "q[1]": [(e4m3(M, HEADS, WIDTH), each) for each in (f32(M, HEADS), i32(M, HEADS + 1), i32(M, HEADS, 4))],
            "kv": [None, (e4m3(N, WIDTH),)],
            "kv[0]": [(each, i32(N)) for each in (e4m3(N, 64), u8(N, WIDTH), torch.zeros(N, 64, dtype=torch.int8))],
            "kv[1]": [(e4m3(N, WIDTH), each) for each in (f32(N), i32(N + 1), i32(N, 1))],
        },
    ),
    (
        deep_gemm.fp8_fp4_paged_sparse_mqa_logits,
        PAGE_SCORES,
        {
            **RESULTS,
            "q[0]": [(each, i32(*each.shape[:-1])) for each in (e4m3(M, HEADS, WIDTH), e4m3(M, 2, HEADS, WIDTH))],
            "kv_cache": [
                None,
                u8(PAGES, PAGE, 1, 68),
                u8(PAGES, PAGE, 132),
                u8(PAGES, PAGE, 2, 132),
                u8(PAGES, 2 * PAGE, 1, 132)[:, ::2],
                u8(PAGES, PAGE * 132 + 2)[:, : PAGE * 132].unflatten(1, (PAGE, 1, 132)),
                u8(PAGES * PAGE * 132 + 2)[2:].view(PAGES, PAGE, 1, 132),
            ],
        },
    ),
]


@pytest.mark.parametrize(("call", "arguments", "refusals"), CASES, ids=[call.__name__ for call, _, _ in CASES])
def test_arguments_are_checked(call: Any, arguments: dict[str, Any], refusals: dict[str, list[Any]]):
    for argument, values in refusals.items():
        for value in values:
            with pytest.raises(InvalidArgument) as caught:
                call(**arguments | {argument.partition("[")[0]: value})
            wrong = "metadata" if isinstance(value, int) and value == B + 1 else argument  # of another number of blocks
            assert (caught.value.argument, caught.value.where) == (wrong, call.__name__), (argument, value)
            assert ": got " in str(caught.value) and ", expected " in str(caught.value)
    assert isinstance(call(**arguments), Tensor)
