# SPDX-License-Identifier: Apache-2.0
"""masked_prefill and pack_selection in CUDA: what a launch says, the source of pack_selection on a CPU, the builds."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from contextlib import nullcontext
from importlib.resources import files
from typing import Any

import pytest
import torch
from kept_images import kept_image, kept_listing
from machines import A100, B200, H200
from masked_model import SOURCE, MaskedModel, stand_in_for_device
from native_model import Memory, stand_ins
from source_on_cpu import COMPILER, compiled

from mla_portable.contracts import InvalidArgument, Request
from mla_portable.judge.conformance.runner import run_case
from mla_portable.judge.problems.base import cases_for
from mla_portable.primitives import MASKED_PREFILL, PACK_SELECTION
from mla_portable_nvidia import compile_all, native
from mla_portable_nvidia.native import masked_prefill as masked
from mla_portable_nvidia.native import pack_selection as pack
from mla_portable_nvidia.native.runtime import driver
from mla_portable_nvidia.native.runtime.nvrtc import CompilationFailed, compile_cubin

PACK = files(native).joinpath("pack_selection.cu").read_text(encoding="utf-8")
HEADER = {"instructions.cuh": files(native).joinpath("instructions.cuh").read_text(encoding="utf-8")}
BUILDS = list(masked.BUILDS.values())


# ---------------------------------------------------------------------------------------------------------- pack_selection


@functools.cache
def library() -> ctypes.CDLL:
    shared = "extern __shared__ __align__(16) unsigned char smem[];"
    assert PACK.count(shared) == 1
    source = PACK.replace(shared, "unsigned char* smem = (unsigned char*)&memory[0];")
    pointer, integer, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    types = [*[pointer] * 3, *[integer] * 4, *[wide] * 2, *[integer] * 4, *[pointer] * 2]
    return compiled(source, "pack_on_cpu.cpp", pack.BUILD.defines, *types)


class PackModel:
    """The build, loaded; its launches run the source. ends: only their first two and their last block."""

    ends = False

    def __init__(self, build: Any, changing: str, fixed: str, threads: int, shared: int, wide: bool) -> None:
        assert (threads, shared, wide) == (256, pack.SPAN, False)
        self.fields, self.grids = f"{changing} {fixed}", []

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any) -> Any:
        assert cluster == 1 and grid[0] < 1 << 31 and grid[1] < 1 << 16, "what a device launches"
        return lambda *changing: self.run(grid, struct.unpack(self.fields, struct.pack(self.fields, *changing, *fixed)))

    def run(self, grid: tuple[int, int], values: tuple[Any, ...]) -> None:
        words, positions, starts, vectors, topk, width, _, position_stride, word_stride = values
        memory, (rows, blocks) = Memory(), grid
        memory(words, torch.int32, (rows, -(-width // 32)), (word_stride, 1))
        memory(positions, torch.int32, (rows, topk), (position_stride, 1))
        if starts:
            memory(starts, torch.int32, (rows,), (1,))
        assert not vectors or (positions % 16 == position_stride % 4 == topk % 4 == 0)
        self.grids.append(grid)
        end = positions + 4 * ((rows - 1) * position_stride + topk)
        last_block = rows * blocks
        for first, last in [(0, 2), (last_block - 1, last_block)] if self.ends else [(0, last_block)]:
            library().launch(*values, blocks, first, last, (0, 1, 77)[len(self.grids) % 3], positions, end)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_the_source_of_pack_selection_passes_the_suite_on_a_cpu(monkeypatch):
    """What the suite asks of it on an H200, but for captures; every launch packs what the kernel declares."""
    (made,) = pack.pack_implementations()
    with stand_ins(monkeypatch, PackModel) as models:
        monkeypatch.setattr(pack, "index_of", lambda request: -1)
        bound = made.bind(Request(PACK_SELECTION, H200, topk=64))
        cases = [case for case in cases_for(made, H200, "quick") if case.params.run == "once"]
        cases = [case for case in cases if case.params.topk <= 128 or case.id.endswith("w40000-corpus-starts_mixed]")]
        for case in cases:
            result = run_case(case, bound, torch.device("cpu"))
            assert result.status == "passed", f"{case.id}: {result.message}"
    grids = models[pack.BUILD].grids
    assert len(cases) > 10 and (6, 1) in grids and (6, 3) in grids


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_a_row_of_all_positions_that_int32_has(monkeypatch):
    """Its first blocks, which take three turns, and its last one; a device launches no more than 65,535 blocks along y."""
    monkeypatch.setattr(PackModel, "ends", True)
    positions = torch.tensor([[0, 2**31 - 2, 31, -1, 2**31 - 1, 31, -(2**31), 16384]], dtype=torch.int32)
    with stand_ins(monkeypatch, PackModel):
        monkeypatch.setattr(pack, "index_of", lambda request: -1)
        words = pack.bind_pack_selection(Request(PACK_SELECTION, A100))(
            positions, width=2**31 - 1, out=torch.zeros(1, 2**26, dtype=torch.int32)
        )
    assert words[0, 0] == 1 - 2**31 and words[0, -1] == 2**30 and not words[0, 1:512].any() and not words[0, -512:-1].any()


def test_a_row_of_words_is_one_launch_and_a_shape_is_prepared_once(monkeypatch):
    prepared: list[tuple[int, int]] = []

    class Model:
        def __init__(self, *build: Any) -> None: ...

        def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any) -> Any:
            prepared.append(grid)
            return lambda *changing: None

    with stand_ins(monkeypatch, Model):
        monkeypatch.setattr(pack, "index_of", lambda request: -1)
        bound = pack.bind_pack_selection(Request(PACK_SELECTION, A100))
        for rows in (3, 3, 0, 5):
            assert bound(torch.zeros(rows, 8, dtype=torch.int32), width=2 * pack.SPAN + 1).shape == (rows, 1025)
    assert prepared == [(3, 3), (5, 3)]


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm120"])
def test_pack_selection_compiles_without_spills(arch):
    usage = compile_all.cuobjdump(kept_image(pack.BUILD, pack.PackBuild.archs[arch]), "-res-usage")
    assert re.findall(r"Function (\w+)", usage) == ["pack_selection"]
    assert re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", usage) == [("0", "0")]


# ---------------------------------------------------------------------------------------------------------- masked_prefill


@pytest.fixture
def bound(monkeypatch):
    """(binds for some head dims, its models)."""
    with stand_ins(monkeypatch, MaskedModel, arch="sm_90a") as models:
        stand_in_for_device(monkeypatch)
        yield lambda **dims: masked.bind_masked_prefill(Request(MASKED_PREFILL, H200, **dims)), models


def test_masked_prefill_launches_what_was_meant(bound):
    """The suite's cases of few heads, views and rows of no request among them, through what the kernel is passed."""
    bind, models = bound
    (made,) = masked.masked_prefill_implementations()
    call = bind()
    cases = [case for case in cases_for(made, H200, "quick") if not case.request.graph and case.params.batch != "long"]
    cases = [case for case in cases if case.params.heads <= 8]
    for case in cases:
        result = run_case(case, call, torch.device("cpu"))
        assert result.status == "passed", f"{case.id}: {result.message}"
    assert {(case.params.qk_head_dim, case.params.v_head_dim) for case in cases} == set(models and masked.BUILDS)
    assert len(cases) > 6 and {each["causal"] for model in models.values() for each in model.launches} == {0, 1}


def problem(heads: int = 2, **others: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = [
        torch.randn(tokens, heads, width, generator=generator).bfloat16() for tokens, width in ((40, 192), (70, 192), (70, 128))
    ]
    starts = [torch.tensor(each, dtype=torch.int32) for each in ([0, 30, 40], [0, 30, 70])]
    return [*x, *starts], {"softmax_scale": 0.1, "max_query_len": 30, "max_key_len": 40, **others}


def test_tensors_at_odd_addresses_are_copied_and_an_odd_output_is_written_where_it_is(bound):
    bind, models = bound
    arguments, keywords = problem()
    want = MASKED_PREFILL.reference(*arguments, **keywords)[0]
    for at in range(3):
        odd = torch.empty(arguments[at].numel() + 1, dtype=torch.bfloat16)[1:].view(arguments[at].shape)
        moved = list(arguments)
        moved[at] = odd.copy_(arguments[at])
        assert torch.equal(bind(qk_head_dim=192, v_head_dim=128)(*moved, **keywords)[0], want)
    held = torch.full((40 * 2 * 129,), 7.0, dtype=torch.bfloat16)
    out = held.as_strided((40, 2, 128), (258, 129, 1))
    call = bind(qk_head_dim=192, v_head_dim=128)
    assert call(*arguments, **keywords, out=out)[0] is out and torch.equal(out, want)
    assert (held.as_strided((40, 2), (258, 129), 128) == 7).all()
    broadcast = [arguments[0], arguments[1][:, :1].expand(-1, 2, -1), *arguments[2:]]
    torch.testing.assert_close(call(*broadcast, **keywords)[0], MASKED_PREFILL.reference(*broadcast, **keywords)[0])
    assert list(models) == [masked.BUILDS[192, 128]], "no other build is loaded"


def test_nothing_is_launched_for_nothing_and_other_dims_are_refused(bound, monkeypatch):
    bind, models = bound
    arguments, keywords = problem()
    call = bind(qk_head_dim=192)
    q, k, v, query_starts, key_starts = arguments
    none = torch.zeros(1, dtype=torch.int32)
    call(q[:0], k, v, query_starts * 0, key_starts, **keywords)
    call(q, k, v, none, none, **keywords)
    call(q, k, v, query_starts * 0, key_starts, **{**keywords, "max_query_len": 0})
    assert models[masked.BUILDS[192, 128]].launches == []
    with pytest.raises(InvalidArgument, match=r"head dims: got 192/192, expected 192/128 or 256/256"):
        call(q, k, k, query_starts, key_starts, **keywords)
    with pytest.raises(InvalidArgument, match=r"max_query_len.*pieces of 128 queries"):
        monkeypatch.setattr(masked, "_MOST_PIECES", 3)
        call(*arguments, **keywords)


def test_streams_are_grouped_by_what_l2_holds():
    assert masked.group_streams(64, 2048, 640) == 22, "three groups, about equal"
    assert masked.group_streams(32, 2048, 640) == 16 and masked.group_streams(16, 16_384, 640) == 3
    assert masked.group_streams(16, 1, 640) == masked.group_streams(16, 0, 640) == 16
    assert masked.group_streams(16, 2**20, 1024) == 1


def test_a_counter_is_kept_for_each_stream_and_a_graph_gets_its_own(monkeypatch):
    stream, capturing = [7], [False]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    make, made = torch.zeros, []

    def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append((device.type, device.index))
        return make(*shape, dtype=dtype)

    monkeypatch.setattr(masked.torch, "zeros", zeros)
    counters = masked.Counters()
    first = counters.take(0)
    assert counters.take(0) is first and counters.take(1) is not first
    stream[0] = 8
    assert counters.take(0) is not first
    stream[0], capturing[0] = 7, True
    own = counters.take(0)
    assert own is not first and counters.take(0) is not own
    capturing[0] = False
    assert counters.take(0) is first and own.dtype == torch.int32 and own.tolist() == [0]
    assert made == [("cuda", 0), ("cuda", 1), ("cuda", 0), ("cuda", 0), ("cuda", 0)]


def test_the_driver_is_asked_where_parameters_start(monkeypatch):
    """The maps' alignment moves all of them; a map's own bytes come from the driver."""
    calls: list[Any] = []

    class Driver:
        def cuModuleLoadData(self, handle, cubin):  # noqa: N802
            return 0

        def cuModuleGetFunction(self, function, module, name):  # noqa: N802
            return 0

        def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
            return 0

        def cuFuncGetParamInfo(self, function, number, offset, size):  # noqa: N802
            offset._obj.value, size._obj.value = 48, 128
            return 0

        def cuTensorMapEncodeTiled(self, at, kind, rank, address, sizes, strides, box, steps, *modes):  # noqa: N802
            assert at.value % 64 == 0
            calls.append((kind, rank, address.value, list(sizes), list(strides), list(box), list(steps), modes))
            ctypes.memset(at.value, 0xA5, 128)
            return 0

    monkeypatch.setattr(driver, "_driver", Driver)
    monkeypatch.setattr(driver, "_make_current", lambda device: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    module = driver.Module(b"", 0)
    for maps, before in ((True, 48), (False, 0)):
        kernel = module.kernel("name", "128s P f", "q", threads=1, shared=49 << 10, tensor_maps=maps)
        assert kernel.changing.size == before + 128 + 8 + 4
    x = torch.zeros(9, 3, 200, dtype=torch.bfloat16)[:, :, :192]
    assert driver.tensor_map(x, 64) == b"\xa5" * 128
    driver.tensor_map(x[:1, :1], 128)
    plain = [1, 1, 1], (0, 3, 2, 0)
    assert calls == [
        (9, 3, x.data_ptr(), [192, 3, 9], [400, 1200], [64, 1, 64], *plain),
        (9, 3, x.data_ptr(), [192, 1, 1], [384, 384], [64, 1, 128], *plain),
    ]


def test_an_old_driver_is_a_reason(monkeypatch):
    (made,) = masked.masked_prefill_implementations()
    monkeypatch.setattr(masked, "check", lambda device: ())
    for version, reasons in ((12040, []), (12020, ["CUDA driver CUDA 12.2 (needs CUDA 12.4 or newer)"])):
        monkeypatch.setattr(masked, "driver_version", lambda version=version: version)
        assert [str(reason) for reason in made.check(H200)] == reasons


@pytest.mark.parametrize(
    ("device", "asked", "subjects"),
    [
        (H200, {"num_heads": 16, "qk_head_dim": 192, "v_head_dim": 128, "selection": True, "graph": True}, []),
        (H200, {"num_heads": 300, "qk_head_dim": 256, "v_head_dim": 256}, []),
        (H200, {"qk_head_dim": 128, "v_head_dim": 128}, ["head dims"]),
        (A100, {}, ["arch"]),
        (B200, {}, ["arch"]),
    ],
)
def test_masked_prefill_declares_its_dims_and_one_architecture(device, asked, subjects):
    (made,) = masked.masked_prefill_implementations()
    found = made.support.reasons(Request(MASKED_PREFILL, device, **asked))
    assert [reason.subject for reason in found if reason.subject != "shared memory"] == subjects


@pytest.fixture(scope="module", params=BUILDS, ids=lambda build: build.label)
def machine_code(request):
    return request.param, kept_image(request.param, "sm_90a")


def test_products_overlap_and_nothing_spills_between_them(machine_code):
    """Where registers do not suffice, the compiler waits for every `wgmma` before the next, and says so in its log alone.

    The stack is that of rows that are computed again, behind the last product.
    """
    build, cubin = machine_code
    code = kept_listing(cubin).splitlines()
    products = [at for at, line in enumerate(code) if "HGMMA" in line]
    first_tile, loop, last_tile = build.qk_head_dim // 16, build.qk_head_dim // 16 + build.keys // 16, build.keys // 16
    assert len(products) == first_tile + loop + last_tile
    between = "\n".join(code[products[0] : products[-1]])
    assert not re.search(r"\b(STL|LDL)\b", between)
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", "\n".join(code))
    assert waits == ["0x0", "0x1", "0x0", "0x0"]


def test_registers_suffice_and_shared_memory_is_what_the_source_lays_out(machine_code):
    build, cubin = machine_code
    usage = compile_all.cuobjdump(cubin, "-res-usage")
    assert re.findall(r"Function (\w+)", usage) == ["masked_prefill"]
    launched = int(re.search(r"REG:(\d+)", usage)[1])
    settings = {int(value, 16) for value in re.findall(r"USETMAXREG\S*(?: UP\d,)? (0x[0-9a-f]+)", kept_listing(cubin))}
    assert settings == {40, 232} and (2 * 232 + 40) * 128 <= launched * build.threads <= 65_536
    layout = (
        SOURCE[: SOURCE.index('extern "C"')]
        + 'static_assert(SHARED_BYTES == SHARED && THREADS == BLOCK && QUERIES == ROWS, "differs");'
    )
    known = {"SHARED": build.shared_bytes, "BLOCK": build.threads, "ROWS": masked.QUERIES}
    compile_cubin(layout, "sm_90a", [*build.defines, *known.items()], HEADER)
    assert build.shared_bytes + 1024 <= 227 << 10
    with pytest.raises(CompilationFailed, match="differs"):
        compile_cubin(layout, "sm_90a", [*build.defines, *(known | {"SHARED": build.shared_bytes + 8}).items()], HEADER)
