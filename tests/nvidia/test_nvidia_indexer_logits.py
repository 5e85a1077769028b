# SPDX-License-Identifier: Apache-2.0
"""The native indexer_logits and indexer_select: what a launch packs, the choice of builds and parts, and the machine code.

The kernels need a GPU. A launch is unpacked as the source lists its parameters, and answered by the reference.
"""

from __future__ import annotations

import math
import re
import struct
from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch
from kept_images import kept_image
from machines import A100, H200
from native_model import Memory, stand_ins
from test_triton_indexer import pages_of

from mla_portable.contracts import Request
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_SELECT, TOPK_SELECT
from mla_portable.primitives import _select_in_parts as parts
from mla_portable.primitives.indexer_logits import reference
from mla_portable.primitives.indexer_select import reference as select_reference
from mla_portable.primitives.topk_select import reference as topk_reference
from mla_portable_nvidia import compile_all, native
from mla_portable_nvidia.native import indexer_logits as indexer
from mla_portable_nvidia.native.indexer_logits import DECODE, PREFILL, indexer_implementations

BUILDS = (*DECODE.values(), *PREFILL.values())
_LETTERS = {"int": "i", "i64": "q"}


def parameters(kernel: str) -> list[tuple[str, str]]:
    """(name, letter of `struct`) of a kernel's parameters, in the order of its source."""
    header, source = (
        files(native).joinpath(name).read_text(encoding="utf-8") for name in ("indexer_logits.cuh", f"{kernel}.cu")
    )
    body = re.search(r"struct Arguments \{[^\n]*\n(.*?)\};", header, re.DOTALL)
    more = re.search(rf"{kernel}\(const Arguments a(.*?)\) \{{", source)
    assert body and more
    declared = [
        line for line in re.sub(r"//[^\n]*", "", body[1] + more[1].replace(",", "").strip() + ";").split(";") if line.strip()
    ]
    found: list[tuple[str, str]] = []
    for line in declared:
        kind, names = re.fullmatch(r"(?:const )?(\w+)\*? ?(.*)", line.strip()).groups()
        for name in names.split(","):
            pointer = "*" in line
            found.append((name.strip(" *"), "P" if pointer else _LETTERS[kind]))
    return found


class Model:
    """One build, loaded; the reference answers its launches."""

    def __init__(self, build, changing, fixed, threads, shared, wide_clusters):
        self.build, self.fields, self.launches = build, f"{changing} {fixed}", []
        assert (threads, shared) == (build.threads, build.shared_bytes)
        letters = "".join(int(count or 1) * letter for count, letter in re.findall(r"(\d*)(\w)", self.fields))
        assert letters == "".join(letter for _, letter in parameters(build.kernel))

    def prepare(self, grid, cluster, *fixed):
        assert cluster == 1
        return lambda *changing: self.run(grid, *changing, *fixed)

    def run(self, grid, *arguments):
        names = [name for name, _ in parameters(self.build.kernel)]
        values = struct.unpack(self.fields, struct.pack(self.fields, *arguments))
        at = SimpleNamespace(**dict(zip(names, values, strict=True)), grid=grid)
        self.launches.append(at)
        memory, heads = Memory(), self.build.heads
        last = at.first_token + at.num_rows
        q = memory(at.q, torch.float8_e4m3fn, (last, heads, 128), (at.q_stride_t, at.q_stride_h, 1))
        assert at.q % 16 == at.q_stride_t % 16 == at.q_stride_h % 16 == at.cache % 16 == at.block_stride % 16 == 0
        weights = memory(at.weights, torch.float32, (last, heads), (at.weight_stride, 1))
        cache = memory(at.cache, torch.uint8, (at.num_blocks, 64, 132), (at.block_stride, 132, 1))
        starts = memory(at.starts, torch.int32, (at.num_requests + 1,), (1,))
        lens = memory(at.lens, torch.int32, (at.num_requests,), (1,))
        table = memory(at.table, torch.int32, (at.num_requests, at.table_width), (at.table_stride, 1))
        out = memory(at.out, torch.float32, (at.num_rows, at.num_logits), (at.out_stride, 1))
        whole = torch.empty(last, at.num_logits)
        reference(q, weights, cache, starts.clamp(max=last), lens - (starts[1:] - starts[1:].clamp(max=last)), table, out=whole)
        found = whole[at.first_token :]
        if not at.begins:
            out.copy_(found)
            return
        seen = (found != -math.inf).sum(dim=1, dtype=torch.int32)
        memory(at.begins, torch.int32, (at.num_rows,), (1,)).zero_()
        memory(at.ends, torch.int32, (at.num_rows,), (1,)).copy_(seen)
        sees = torch.arange(at.num_logits) < seen.unsqueeze(1)
        most = seen
        if self.build in DECODE.values():  # by request: what its last token sees
            of = torch.searchsorted(starts[1:], torch.arange(at.first_token, last, dtype=torch.int32), right=True)
            most = seen[(starts[1:].clamp(max=last)[of] - 1 - at.first_token).long()]
        found[(most <= at.all_chosen).unsqueeze(1) & (found > -math.inf)] = 0.0
        out.copy_(torch.where(sees, found, torch.nan))  # what is not seen is not written


@pytest.fixture
def models(monkeypatch):
    """Build -> its stand-in, for all that are loaded in a test."""

    class TopK:
        def __init__(self, request, *, starts_early):
            assert request.primitive is TOPK_SELECT and starts_early

        def __call__(self, logits, row_starts, row_ends, *, topk, out):
            return topk_reference(logits, row_starts, row_ends, topk=topk, out=out)

    monkeypatch.setattr(indexer, "NativeTopkSelect", TopK)
    with stand_ins(monkeypatch, Model) as found:
        yield found


def request(primitive, heads=64, **more):
    return Request(primitive, H200, kv_layout="index_fp8", num_heads=heads, block_size=64, **more)


def problem(queries, lengths, heads=64, columns=3):
    g = torch.Generator().manual_seed(len(queries))
    tokens, blocks = sum(queries), len(queries) * columns + 1
    return [
        torch.randn(tokens, heads, 128, generator=g).to(torch.float8_e4m3fn),
        torch.randn(tokens, heads, generator=g),
        pages_of("index_fp8", torch.randn(blocks, 64, 128, generator=g)),
        torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.randperm(blocks, generator=g)[1:].view(len(queries), columns).to(torch.int32),
    ]


@pytest.mark.parametrize(
    ("queries", "build"),
    [([1, 1, 1], DECODE[64, 1]), ([2, 1, 2], DECODE[64, 2]), ([3, 4, 4], DECODE[64, 2]), ([9, 1, 4], PREFILL[64])],
    ids=["a token a request", "drafts", "more drafts", "prefill"],
)
def test_scores_go_to_the_kernel_of_their_batch(models, queries, build):
    """With gaps between the rows of every tensor that may have them."""
    arguments = problem(queries, [130, 64, 7])
    apart = [torch.cat((x, x), dim=-1)[..., : x.shape[-1]] if i in (1, 5) else x for i, x in enumerate(arguments)]
    wide = torch.full((sum(queries), 300), 7.0)
    out = wide[:, :200]
    bound = indexer.bind_indexer_logits(request(INDEXER_LOGITS))
    assert bound(*apart, out=out) is out
    want = reference(*arguments, out=torch.empty(sum(queries), 200))
    assert torch.equal(out, want) and (wide[:, 200:] == 7.0).all()
    assert [len(model.launches) for made, model in models.items() if made == build] == [1]
    assert sum(len(model.launches) for model in models.values()) == 1


def test_queries_at_odd_addresses_are_copied(models):
    arguments = problem([2], [100])
    odd = torch.empty(2 * 64 * 128 + 8, dtype=torch.float8_e4m3fn)[8:].view(2, 64, 128).copy_(arguments[0])
    bound, out = indexer.bind_indexer_logits(request(INDEXER_LOGITS)), torch.empty(2, 192)
    want = reference(*arguments, out=torch.empty(2, 192))
    assert odd.data_ptr() % 16 and torch.equal(bound(odd, *arguments[1:], out=out), want)


@pytest.mark.parametrize("scratch", [64 << 20, 4096])
def test_select_takes_the_tokens_in_parts_that_fit_its_scratch(models, monkeypatch, scratch):
    monkeypatch.setattr(parts, "SELECT_SCRATCH_BYTES", scratch)
    arguments = problem([9, 6], [150, 192])
    got = indexer.bind_indexer_select(request(INDEXER_SELECT, topk=64))(*arguments, topk=64)
    assert torch.equal(got, select_reference(*arguments, topk=64, dtype=torch.float32))
    (model,) = (model for model in models.values() if model.launches)
    rows = parts.rows_at_a_time(15, 192)
    assert [each.first_token for each in model.launches] == list(range(0, 15, rows)) and (rows < 15) == (scratch == 4096)


def test_nothing_is_launched_where_there_is_nothing_to_choose(models):
    bound, arguments = indexer.bind_indexer_select(request(INDEXER_SELECT, topk=4)), problem([2], [100])
    assert (bound(*arguments[:5], arguments[5][:, :0], topk=4) == -1).all()
    assert bound(arguments[0][:0], arguments[1][:0], *arguments[2:], topk=4).shape == (0, 4)
    assert not any(model.launches for model in models.values())


@pytest.mark.parametrize(
    ("queries", "columns", "blocks"), [([200], 40, 132), ([64], 3, 5), ([9, 6], 3, 3)], ids=["many", "few", "two requests"]
)
def test_prefill_has_a_block_for_each_multiprocessor_or_each_unit_of_work(models, queries, columns, blocks):
    arguments = problem(queries, [64 * columns] * len(queries), columns=columns)
    indexer.bind_indexer_logits(request(INDEXER_LOGITS))(*arguments, out=torch.empty(sum(queries), 64 * columns))
    assert [each.grid for each in models[PREFILL[64]].launches] == [(blocks, 1)]


def test_what_is_declared():
    logits, select = indexer_implementations()
    assert logits.support.archs == select.support.archs == ("sm90",) and A100.arch not in logits.support.archs
    assert logits.support.min_shared_memory == max(build.shared_bytes for build in BUILDS)
    for each in (logits, select):
        assert not each.support.batch_invariant, "decode and prefill add up a score in orders of their own"


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.label)
def test_machine_code_has_the_registers_that_its_warps_ask_for(build):
    """No spills in loops; warps that take registers from others of their block find as many as these give, or wait for ever."""
    cubin = kept_image(build, "sm_90a")
    usage, code = (compile_all.cuobjdump(cubin, option) for option in ("-res-usage", "-sass"))
    ((stack, local),) = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    # prefill's copiers, which have 32 registers, keep two words there from one run of tokens to the next
    words = 2 if build in PREFILL.values() else 0
    assert local == "0" and int(stack) <= 4 * words and len(re.findall(r"\b(?:LDL|STL)\b", code)) <= 2 * words
    assert f"QGMMA.64x{build.heads * (2 if build in PREFILL.values() else build.tokens)}x32" in code
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    assert registers * build.threads <= 65_536
    if build in PREFILL.values():
        source = files(native).joinpath(f"{build.kernel}.cu").read_text(encoding="utf-8")
        consumers, copiers = (int(re.search(rf"#define {who}_REGISTERS (\d+)", source)[1]) for who in ("CONSUMER", "COPIER"))
        assert consumers * 512 + copiers * 128 <= registers * build.threads
    else:
        assert build.blocks_per_sm * registers * build.threads <= 65_536
        assert build.blocks_per_sm * (build.shared_bytes + 1024) <= 228 << 10
