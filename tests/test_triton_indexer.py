# SPDX-License-Identifier: Apache-2.0
"""The indexer's kernels in Triton's interpreter: both forms, any batch, bounded scratch, and what they must not touch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Primitive, Request
from mla_portable.judge.conformance.poison import poisoned
from mla_portable.layouts import LAYOUTS, index_query_dtype
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, INDEXER_SELECT, TOPK_SELECT
from mla_portable.primitives import _select_in_parts as parts
from mla_portable_triton import bind_indexer, index_forms
from mla_portable_triton.kernels import indexer_cache_write, indexer_logits, indexer_logits_ragged
from mla_portable_triton.kernels import topk_select as topk
from mla_portable_triton.kernels.indexer_logits import REQUEST_TILE
from mla_portable_triton.support import SUPPORT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FACTS = DeviceFacts(vendor="any", name="any", arch="any", device_type=DEVICE.type)
STORED = ("index_bf16", "index_fp8")
Arguments = list[Tensor]


def bound(primitive: Primitive, kv: str | None = "index_bf16") -> Any:
    return getattr(bind_indexer, f"bind_{primitive}")(Request(primitive, FACTS, kv_layout=kv))


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages_of(kv: str, keys: Tensor) -> Tensor:
    """keys [blocks, block_size, 128] as a paged cache."""
    layout, (blocks, size, _) = LAYOUTS[kv], keys.shape
    rows = layout.pack(keys.flatten(0, 1), keys.flatten(0, 1)[:, :0]).view(blocks, size, -1)
    pages = torch.empty(blocks, size, layout.row_width, dtype=layout.dtype)
    parts = layout.parts(pages)
    for part, values in zip(parts, rows.split([part.shape[2] for part in parts], dim=2), strict=True):
        part.copy_(values)
    return pages


def problem(heads: int, size: int, queries: list[int], lengths: list[int], tail: int = 0, kv: str = "index_bf16") -> Arguments:
    """Arguments with every block in use, in a shuffled order."""
    g = torch.Generator().manual_seed(heads + size)
    columns = max(1, -(-max([*lengths, 1]) // size))
    tokens, blocks = sum(queries) + tail, len(queries) * columns + 1
    return [
        torch.randn(tokens, heads, 128, generator=g).to(index_query_dtype(LAYOUTS[kv])),
        torch.randn(tokens, heads, generator=g),
        pages_of(kv, torch.randn(blocks, size, 128, generator=g)),
        torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
        int32(lengths),
        torch.randperm(blocks, generator=g)[1:].view(len(queries), columns).to(torch.int32),
    ]


def solve(arguments: Arguments, width: int, kv: str = "index_bf16") -> tuple[Tensor, Tensor]:
    """What the kernel wrote, and the oracle's answer."""
    out = torch.full((arguments[0].shape[0], width), math.nan, device=DEVICE)
    assert bound(INDEXER_LOGITS, kv)(*(x.to(DEVICE) for x in arguments), out=out) is out
    return out.cpu().double(), oracle.indexer_logits(*arguments, out=out)


def agree(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got == -math.inf, want == -math.inf) and torch.allclose(got, want, rtol=1e-4, atol=1e-3)


# a batch of few tokens a request is served token by token, one of many by tiles of keys
@pytest.mark.parametrize("each", [1, 9], ids=["decode", "prefill"])
@pytest.mark.parametrize("kv", STORED)
def test_more_requests_than_a_tile_with_empty_ones_between(kv: str, each: int):
    queries = [each * (r % 2) for r in range(REQUEST_TILE + 6)]
    lengths = [each + 2 + r % 5 for r in range(len(queries))]
    got, want = solve(problem(2, 16, queries, lengths, tail=1, kv=kv), each + 8, kv)
    assert agree(got, want)


@pytest.mark.parametrize("each", [1, 4], ids=["decode", "prefill"])
@pytest.mark.parametrize("starts", [[0, 9, 1, 3], [9, 1, 3, 2], [7, 3, 1, 0]], ids=str)
def test_starts_that_do_not_ascend_read_nothing_outside(starts: list[int], each: int):
    """Positions stay within the table, so a score is that of a block which the table names, or -inf."""
    arguments = problem(1, 16, [3 * each, each, 3 * each], [16, 16, 16])
    arguments[3] = int32(starts)
    wide = torch.zeros(3, 4, dtype=torch.int32)  # block 0 is in no column of the table, but stands behind it
    wide[:, :1] = arguments[5][:, :1]
    out = torch.full((7 * each, 40), math.nan, device=DEVICE)
    here = [x.to(DEVICE) for x in arguments[:5]]
    bound(INDEXER_LOGITS)(*here, wide.to(DEVICE)[:, :1], out=out)
    assert not out.isnan().any() and (out[:, 16:] == -math.inf).all()
    chosen = bound(INDEXER_SELECT)(*here, wide.to(DEVICE)[:, :1], topk=40)
    assert ((chosen >= -1) & (chosen < 16)).all()


@pytest.mark.parametrize("kv", STORED)
@pytest.mark.parametrize("heads", [3, 70])
def test_keys_in_registers_give_the_scores_of_keys_in_shared_memory(heads: int, kv: str, monkeypatch: pytest.MonkeyPatch):
    arguments = [x.to(DEVICE) for x in problem(heads, 16, [7, 0, 1, 12], [40, 3, 70, 21], tail=2, kv=kv)]
    arguments[5][0, 1] = -1
    tokens, width = arguments[0].shape[0], arguments[5].shape[1] * 16
    starts = torch.arange(tokens, dtype=torch.int32, device=DEVICE) % 5
    ends = starts * 17 % 60
    keys = torch.randn(50, 128).to(arguments[0].dtype).to(DEVICE)
    scales = torch.rand(50).to(DEVICE) if kv == "index_fp8" else None

    def scores() -> list[Tensor]:
        out = [torch.full((tokens, columns), math.nan, device=DEVICE) for columns in (width, len(keys))]
        bound(INDEXER_LOGITS, kv)(*arguments, out=out[0])
        bound(INDEXER_LOGITS_RAGGED, kv)(*arguments[:2], keys, scales, starts, ends, out=out[1])
        return [*out, bound(INDEXER_SELECT, kv)(*arguments, topk=9)]

    shared = scores()
    tiles = indexer_logits.PREFILL["default"]
    monkeypatch.setitem(indexer_logits.PREFILL, "default", replace(tiles, positions=32, tokens=4, num_stages=0))
    assert all(map(agree, scores(), shared))


@pytest.mark.parametrize("kv", STORED)
@pytest.mark.parametrize("queries", [[1, 2, 0, 1], [13, 9]], ids=["decode", "prefill"])
def test_a_selection_is_the_topk_of_the_scores_however_many_rows_fit(queries: list[int], kv: str, monkeypatch):
    lengths = [40 * (r + 1) + query for r, query in enumerate(queries)]
    arguments = [x.to(DEVICE) for x in problem(3, 16, queries, lengths, tail=2, kv=kv)]
    arguments[5][0, 1] = -1
    tokens, width = arguments[0].shape[0], arguments[5].shape[1] * 16
    logits = torch.empty(tokens, width, device=DEVICE)
    bound(INDEXER_LOGITS, kv)(*arguments, out=logits)
    zeros = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    for count, limits in ((24, (tokens, 3, 1)), (1, (3,)), (width + 3, (1,))):
        want = bound(TOPK_SELECT, None)(logits, zeros, zeros + width, topk=count)
        assert ((want >= 0).sum(dim=1) == (logits > -math.inf).sum(dim=1).clamp(max=count)).all()
        for rows in limits:
            monkeypatch.setattr(parts, "SELECT_SCRATCH_BYTES", (1 << 10) + rows * 4 * (width + 2))
            assert parts.rows_at_a_time(tokens, width, topk.scratch_bytes(1, width, count)) <= rows
            out = torch.full((tokens, count), 7, dtype=torch.int32, device=DEVICE)
            assert torch.equal(bound(INDEXER_SELECT, kv)(*arguments, topk=count, out=out), want)


def test_scratch_is_bounded_at_any_batch_and_context(monkeypatch: pytest.MonkeyPatch):
    limit = parts.SELECT_SCRATCH_BYTES
    assert limit == 64 << 20
    for tokens in (1, 64, 4096, 70_000):
        for width in (64, 4096, 4160, 32_768, 163_840, 1 << 20):
            for count in (1, 2048, 4096):
                rows = parts.rows_at_a_time(tokens, width, topk.scratch_bytes(1, width, count))
                assert 1 <= rows <= tokens
                assert 4 * rows * (width + 2) + topk.scratch_bytes(rows, width, count) <= limit
                assert rows == tokens or 8 * rows * (width + 2) > limit / 4, "and it is used"
    # what is counted is what is allocated
    arguments = [x.to(DEVICE) for x in problem(1, 64, [1, 1, 1], [5000, 70, 5100])]
    sizes: list[int] = []
    empty = torch.empty

    def counting(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        sizes.append(made.nbytes)
        return made

    out = torch.empty(3, 64, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(torch, "empty", counting)
    bound(INDEXER_SELECT)(*arguments, topk=64, out=out)
    width = arguments[5].shape[1] * 64
    assert sum(sizes) == 4 * 3 * (width + 2) + topk.scratch_bytes(3, width, 64)


def test_scores_have_all_scratch_where_another_topk_is_chosen(monkeypatch: pytest.MonkeyPatch):
    arguments = [x.to(DEVICE) for x in problem(1, 16, [8], [60])]
    width, seen = arguments[5].shape[1] * 16, []

    def choose(logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int, out: Tensor) -> Tensor:
        seen.append(logits.shape[0])
        return out.fill_(0)

    monkeypatch.setattr(bind_indexer, "bind_part", lambda request, own: choose)
    monkeypatch.setattr(topk, "scratch_bytes", lambda rows, width, count: rows << 20)
    monkeypatch.setattr(parts, "SELECT_SCRATCH_BYTES", (1 << 10) + 4 * 4 * (width + 2))
    bound(INDEXER_SELECT)(*arguments, topk=3)
    assert seen == [4, 4]


@pytest.mark.parametrize(("length", "k", "held"), [(9_000, 64, topk.SHORT), (12_000, 4_096, 2 * topk.SHORT)])
@pytest.mark.parametrize("more", [0, 1])
def test_as_many_candidates_as_scratch_holds_and_one_more(length: int, k: int, held: int, more: int):
    """Scores that are all above the guess or all below. With one more than fits nothing is kept, and scratch holds poison."""
    assert topk.candidates(length, k) == held
    logits = torch.full((1, length), -1.0)
    logits[0, torch.randperm(length, generator=torch.Generator().manual_seed(k))[: held + more]] = 1.0
    starts, ends = int32([0]), int32([length])
    with poisoned():
        got = bound(TOPK_SELECT, None)(logits, starts, ends, topk=k)
    assert torch.equal(got, oracle.topk_select(logits, starts, ends, topk=k))


@pytest.mark.parametrize("kv", STORED)
def test_a_key_that_is_nan_is_never_chosen(kv: str):
    arguments = problem(2, 16, [1, 2], [20, 33], kv=kv)
    key = LAYOUTS[kv].parts(arguments[2])[0][arguments[5][0, 0].long(), 3]
    key[100] = 0x7F if kv == "index_fp8" else math.nan
    for chosen in (
        bound(INDEXER_SELECT, kv)(*(x.to(DEVICE) for x in arguments), topk=40).cpu(),
        INDEXER_SELECT.reference(*arguments, topk=40),
    ):
        assert chosen[0, :20].tolist() == [0, 1, 2, *range(4, 20), -1] and (chosen[0, 20:] == -1).all()
        assert chosen[1, :33].tolist() == [*range(32), -1] and chosen[2, :33].tolist() == [*range(33)]
    for most in (8, 15, 19):  # the token sees more keys than it may choose
        assert 3 not in bound(INDEXER_SELECT, kv)(*(x.to(DEVICE) for x in arguments), topk=most)[0].tolist()


@pytest.mark.parametrize(("kv", "name"), [*product(STORED, ["q", "weights", "keys"]), ("index_fp8", "key_scales")])
def test_a_score_of_nan_is_minus_infinity(kv: str, name: str):
    """Of a key, or of all that a token sees, from pages and of gathered keys."""
    arguments = problem(3, 16, [2, 7], [20, 33], kv=kv)
    keys, scales = torch.randn(33, 128).to(arguments[0].dtype), torch.rand(33) + 0.5
    page, *page_scales = (part[int(arguments[5][1, 0])] for part in LAYOUTS[kv].parts(arguments[2]))
    spoiled = {
        "q": [arguments[0][4, 2]],
        "weights": [arguments[1][4, 2:]],
        "keys": [page[3], keys[3]],
        "key_scales": [*(each[3] for each in page_scales), scales[3:4]],
    }[name]
    for numbers in spoiled:  # NaN of bfloat16 and of float32 has all bits set
        numbers.view(torch.uint8)[-4:] = 0x7F if kv == "index_fp8" and name in ("q", "keys") else 0xFF
    starts, ends = torch.zeros(9, dtype=torch.int32), torch.full((9,), 33, dtype=torch.int32)
    gathered = [*arguments[:2], keys, scales if kv == "index_fp8" else None, starts, ends]
    for primitive, given in ((INDEXER_LOGITS, arguments), (INDEXER_LOGITS_RAGGED, gathered)):
        here = [None if x is None else x.to(DEVICE) for x in given]
        got, want = (torch.full((9, 33), 7.0, device=DEVICE) for _ in range(2))
        bound(primitive, kv)(*here, out=got)
        primitive.reference(*here, out=want)
        assert not want.isnan().any() and agree(got, want)
        lost = want[4] if name in ("q", "weights") else want[2:, 3]
        assert (lost == -math.inf).all() and (want[8, 4:] > -math.inf).any()


@pytest.mark.parametrize("queries", [[1, 2], [9, 9]], ids=["decode", "prefill"])
def test_heads_of_padding_add_nothing_to_the_score_of_an_infinite_key(queries: list[int]):
    """Their queries are 0, and 0 times infinity is NaN."""
    arguments = problem(3, 16, queries, [20, 33])
    arguments[0].abs_()
    arguments[1].abs_()
    keys = torch.randn(33, 128).bfloat16()
    arguments[2][int(arguments[5][0, 0]), 3], keys[3] = math.inf, math.inf
    tokens = sum(queries)
    ranges = torch.zeros(tokens, dtype=torch.int32), torch.full((tokens,), 33, dtype=torch.int32)
    out = [torch.full((tokens, 33), math.nan, device=DEVICE) for _ in range(2)]
    bound(INDEXER_LOGITS)(*(x.to(DEVICE) for x in arguments), out=out[0])
    bound(INDEXER_LOGITS_RAGGED)(*(x.to(DEVICE) for x in arguments[:2]), keys.to(DEVICE), None, *ranges, out=out[1])
    assert out[0][0, 3] == math.inf and (out[1][:, 3] == math.inf).all()
    assert out[0][0, :3].isfinite().all() and out[1][:, 4:].isfinite().all()


@pytest.mark.parametrize("module", [indexer_cache_write, indexer_logits, indexer_logits_ragged, topk], ids=lambda m: m.__name__)
def test_variants_name_every_parameter(module: Any):
    for variant in module.aot_variants():
        assert set(variant.signature) | set(variant.constexprs) == set(variant.kernel.arg_names)


@pytest.mark.parametrize(
    ("arch", "converts", "heads", "form"),
    [
        ("sm80", False, 64, index_forms.FP8_WORDS),
        ("sm89", True, 64, index_forms.FP8),
        ("sm90", True, 8, index_forms.FP8),
        ("sm120", True, 32, index_forms.FP8),
        ("sm90", True, 7, index_forms.FP8_WORDS),
        ("sm90", False, 64, index_forms.FP8_WORDS),
        ("gfx942", False, 64, index_forms.FP8_DECODED),
        ("gfx950", True, 64, index_forms.FP8_DECODED),
        ("ivcore11", False, 64, index_forms.FP8_DECODED),
    ],
)
def test_e4m3_bytes_are_multiplied_as_they_are_where_matrix_units_take_them(
    arch: str, converts: bool, heads: int, form: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bind_indexer, "interpreter_is_on", lambda: False)
    facts = DeviceFacts(vendor="any", name="any", arch=arch, has_fp8_conversion=converts)
    for kv, expected in (("index_fp8", form), ("index_bf16", index_forms.BF16)):
        assert bind_indexer._numbers(Request(INDEXER_LOGITS, facts, kv_layout=kv, num_heads=heads)).form == expected


@pytest.mark.parametrize(
    ("arch", "converts", "heads", "kept"),
    [
        ("sm80", False, 64, False),
        ("sm89", True, 64, True),
        ("sm90", True, 8, True),
        ("sm90", True, 7, False),
        ("gfx942", False, 1, True),
    ],
)
def test_keys_of_nan_are_declared_as_they_are_decoded(arch: str, converts: bool, heads: int, kept: bool):
    """In words of two NVIDIA's instructions read NaN as 480; every other form keeps it."""
    facts = DeviceFacts(vendor="any", name="any", arch=arch, has_fp8_conversion=converts)
    for primitive in (INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, INDEXER_SELECT):
        for kv, expected in (("index_fp8", kept), ("index_bf16", True)):
            asked = Request(primitive, facts, kv_layout=kv, num_heads=heads)
            assert SUPPORT[primitive].keeps_nan(asked) is expected


def test_a_cache_past_two_to_the_31_elements():
    """Its memory is committed only where it is touched; what a 32-bit offset reads instead is NaN."""
    blocks = 2**31 // (16 * 128) + 3
    cache = torch.empty(blocks, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    cache[:2], far = math.nan, torch.randn(16, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache[-1] = far.to(DEVICE)
    arguments = problem(2, 16, [2], [16])
    small = [*arguments[:2], far[None], *arguments[3:5], int32([[0]])]
    here = [x.to(DEVICE) for x in (*arguments[:2], *arguments[3:5], int32([[blocks - 1]]))]
    out = torch.full((2, 16), math.nan, device=DEVICE)
    bound(INDEXER_LOGITS)(*here[:2], cache, *here[2:], out=out)
    assert agree(out.cpu().double(), oracle.indexer_logits(*small, out=out))
