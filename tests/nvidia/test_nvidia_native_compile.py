# SPDX-License-Identifier: Apache-2.0
"""Every build of the native kernels compiles, fits its device and is launched with what its source lays out; no GPU takes part.

It is compiled for SM80 or SM90; for every device that it declares by `ci/compile --all`.
NVRTC comes with requirements-dev.txt, cuobjdump in Triton's wheel: a machine without them fails here.
"""

from __future__ import annotations

import json
import operator
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from compiling import EVERY_DEVICE
from engine_kernels import load_file
from kept_images import kept_image, kept_listing
from native_model import SOURCES, check_laid_out

import mla_portable_nvidia
from mla_portable.capability.matrix import proven_by_ci
from mla_portable.choose import Registry
from mla_portable.layouts import BF16, FP8_DS_MLA
from mla_portable_nvidia import compile_all, native
from mla_portable_nvidia.native import kernel_build as build_module
from mla_portable_nvidia.native import sparse_decode_sm80
from mla_portable_nvidia.native.attention_sm90 import ARCHS
from mla_portable_nvidia.native.build_choice import BUILDS, MANY
from mla_portable_nvidia.native.indexer_logits import DECODE, PREFILL
from mla_portable_nvidia.native.kernel_build import compile_build
from mla_portable_nvidia.native.masked_prefill import BUILDS as MASKED_PREFILL
from mla_portable_nvidia.native.pack_selection import BUILD as PACK_SELECTION
from mla_portable_nvidia.native.runtime.nvrtc import CompilationFailed, NvrtcNotFound, compile_cubin, nvrtc_version
from mla_portable_nvidia.native.sparse_decode import HEADERS
from mla_portable_nvidia.native.sparse_decode_bf16 import Bf16Build
from mla_portable_nvidia.native.sparse_decode_fp8 import Fp8Build
from mla_portable_nvidia.native.sparse_decode_sm80 import MERGES
from mla_portable_nvidia.native.topk_select import CANDIDATES, FEW_ROWS, MANY_ROWS, MAX_TOPK

REGISTERS = 65_536
"""Of a multiprocessor of compute capability 9.0, which has 228 KiB of shared memory and keeps 1 KiB of it for each block."""
MODULE = mla_portable_nvidia.__name__
ALL = [build for builds in BUILDS.values() for build in builds]
SM80 = [build for builds in sparse_decode_sm80.BUILDS.values() for build in builds]
TWO = [replace(build, lists=2) for build in ALL]
TWO_SM80 = [replace(build, lists=2) for build in SM80]
INDEXER = (*DECODE.values(), *PREFILL.values())
MASKED = tuple(MASKED_PREFILL.values())
SPILLED_BY_TOPK_SELECT = 8 if nvrtc_version() > (13, 0) else 0
"""Bytes of a thread: NVRTC 13.2, which torch 2.15 brings, keeps two words of `t1024-b2` in memory."""


@pytest.fixture(scope="module", params=[*ALL, *TWO], ids=lambda build: build.label)
def compiled(request):
    """(a build, its machine code)."""
    return request.param, kept_image(request.param, ARCHS["sm90"])


def test_nothing_spills(compiled):
    build, cubin = compiled
    usage = compile_all.cuobjdump(cubin, "-res-usage")
    assert re.findall(r"Function (\w+)", usage) == [build.kernel]
    assert re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", usage) == [("0", "0")]
    code = kept_listing(cubin)
    assert re.search(r"\b(HMMA|HGMMA)\b", code) and not re.search(r"\b(STL|LDL)\b", code)


def test_products_of_warpgroups_overlap(compiled):
    """Where registers do not suffice, the compiler waits for every `wgmma` before the next, and says so in its log alone."""
    build, cubin = compiled
    code = kept_listing(cubin)
    if build.kernel != MANY.kernel:
        assert "HGMMA" not in code
        return
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", code)
    assert waits.count("0x0") == 2 < waits.count("0x1"), "for all products at the end of either part, before for all but one"


def test_registers_are_enough_and_come_to_no_more_than_a_multiprocessor_has(compiled):
    """A block that asks for more than it was launched with waits for ever."""
    build, cubin = compiled
    launched = int(re.search(r"REG:(\d+)", compile_all.cuobjdump(cubin, "-res-usage"))[1])
    assert launched * build.threads * build.blocks_per_sm <= REGISTERS
    taken = (build.consumer_registers * build.groups + build.copying_registers) * 128
    assert taken <= launched * build.threads
    code = kept_listing(cubin)
    settings = {int(value, 16) for value in re.findall(r"USETMAXREG\S*(?: UP\d,)? (0x[0-9a-f]+)", code)}
    assert settings == {build.copying_registers, build.consumer_registers}
    assert build.consumer_registers % 8 == 0
    assert max(int(number) for number in re.findall(r"\bR(\d+)\b", code)) < build.consumer_registers


MACROS = {
    "sparse_decode_fp8": ("HT", "TILE"),
    "sparse_decode_wide": ("HT", "STEP"),
    "sparse_decode_bf16": ("HEADS", "TILE"),
}
"""kernel -> heads of a block, tokens of a tile, as its source has them."""
ODD = (
    Fp8Build(FP8_DS_MLA.name, head_tiles=2, groups=2, stages=1, shared=138_112),
    Bf16Build(BF16.name, head_tiles=2, groups=4, stages=2, shared=136_064),
)
"""Most of their shared memory is for the merging."""


@pytest.mark.parametrize("build", [*ALL, *ODD], ids=str)
def test_shared_memory_is_what_the_source_lays_out(build):
    check_laid_out(build, "sm_90a", *MACROS[build.kernel])


@pytest.mark.parametrize("build", [*ALL, SM80[0], SM80[-1]], ids=lambda build: build.label)
def test_another_size_of_shared_memory_than_the_source_lays_out_does_not_compile(build):
    """The compiler names both."""
    arch = next(iter(build.archs.values()))
    for wrong in (-16, 16):
        with pytest.raises(CompilationFailed, match=rf"LAID_OUT={build.shared}, OF_BUILD={build.shared + wrong}\b"):
            compile_build(replace(build, shared=build.shared + wrong), arch)


@pytest.mark.parametrize("build", ALL, ids=str)
def test_as_many_blocks_as_were_meant_have_their_shared_memory(build):
    assert build.shared_bytes <= 227 << 10
    assert build.blocks_per_sm * (build.shared_bytes + 1024) <= 228 << 10


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm120"])  # for all of them: below, as evidence
@pytest.mark.parametrize("build", [FEW_ROWS, MANY_ROWS], ids=lambda build: build.label)
def test_topk_select_compiles_for_every_architecture_that_it_declares(build, arch):
    """Without spills, with registers for the blocks that are meant, and with the shared memory that it is launched with."""
    source = files(native).joinpath("topk_select.cu").read_text(encoding="utf-8")
    known = f"sizeof(Shared) == {build.shared_bytes} && MAX_TOPK == {MAX_TOPK} && CANDIDATES == {CANDIDATES}"
    usage = compile_all.cuobjdump(
        compile_cubin(f'{source}\nstatic_assert({known}, "differs");', build.archs[arch], build.defines), "-res-usage"
    )
    assert re.findall(r"Function (\w+)", usage) == [build.kernel]
    stack, local = map(int, re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage).groups())
    assert stack <= SPILLED_BY_TOPK_SELECT and local == 0
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    per_sm = build.blocks_per_sm if arch in ("sm80", "sm90", "sm100", "sm103") else 1  # others have 1,536 threads
    assert registers * build.threads * per_sm <= REGISTERS
    assert 2 * (build.shared_bytes + 1024) <= 164 << 10, "two blocks of an A100"


@pytest.mark.parametrize("build", [ALL[0], BUILDS[BF16.name][0]], ids=lambda build: build.label)
def test_the_builds_for_racecheck_compile_and_the_shipped_ones_have_none_of_them(build):
    """`ci/gpu_sanitize`: at the same barriers every lane arrives, and copies."""

    def visible(source, arch, defines, headers):
        return compile_cubin(source, arch, [*defines, ("VISIBLE", 1)], headers)

    codes = [kept_listing(cubin) for cubin in (compile_build(build, "sm_90a", visible), kept_image(build, "sm_90a"))]
    assert ["UBLKCP" in code for code in codes] == [False, True]


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_log(monkeypatch, tmp_path):
    source = SOURCES[ALL[0].kernel].replace("int stage = 0;", "int stage = unknown_name;", 1)
    (tmp_path / f"{ALL[0].kernel}.cu").write_text(source)
    for header in HEADERS:
        (tmp_path / header).write_text("")
    monkeypatch.setattr(build_module, "files", lambda package: tmp_path)
    with pytest.raises(CompilationFailed, match=r'(?s)NVRTC for sm_90a: .*error: identifier "unknown_name" is undefined'):
        compile_build(ALL[0], "sm_90a")
    (line,) = compile_all.compile_arch("sm90", ALL[:1])
    assert "unknown_name" in line["error"]


def lines(capsys, *arguments):
    code = compile_all.main(["--json", *arguments])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


EVERYTHING = (
    *(*ALL, *TWO, *SM80, *TWO_SM80, *MERGES, FEW_ROWS, MANY_ROWS, *INDEXER),
    *(PACK_SELECTION, *MASKED),
)
WHOLE = {"sm80", "sm90"}
"""Devices for which each build is compiled in every run."""


def test_every_source_is_compiled_both_ways_of_a_condition_on_the_architecture():
    sources = [path.read_text(encoding="utf-8") for path in files(native).iterdir() if path.name.endswith((".cu", ".cuh"))]
    conditions = [each for source in sources for each in re.findall(r"__CUDA_ARCH__ (\S+) (\d+)", source)]
    assert len(conditions) == sum(source.count("__CUDA_ARCH__") for source in sources) > 0
    compare = {">=": operator.ge, "<": operator.lt}
    for sign, number in conditions:
        assert {compare[sign](arch, int(number)) for arch in (800, 900, 1000)} == {True, False}


def test_what_is_listed_is_every_kernel_of_these_implementations_alone(capsys, monkeypatch):
    """Builds and devices; what comes of compiling them is asked below."""

    def refused(*_):
        raise CompilationFailed("listed alone")

    monkeypatch.setattr(compile_all, "compile_build", refused)
    code, listed = lines(capsys)
    expected = [(arch, build) for arch in compile_all.TARGETS for build in EVERYTHING if arch in build.archs]
    assert code == 1 and [(line["arch"], line["label"]) for line in listed] == [(arch, build.label) for arch, build in expected]
    assert [line["shared"] for line in listed] == [build.shared_bytes for _, build in expected]
    assert len({(line["arch"], line["label"]) for line in listed}) == len(listed)
    # what that proves, each build compiling, is what the list of continuous integration has: the matrix says "CI" of it
    offered = Registry(plugins=[("nvidia", MODULE)], environ={}, probe=False).implementations()
    proven = load_file("proven", str(Path(__file__).parents[2] / "ci" / "proven.py"))
    ran = proven.of_compilation([line | {"error": ""} for line in listed], offered)
    assert proven.problems(proven_by_ci(), ran) == [] and ran.keys() == compile_all.KERNELS.keys()
    assert {name for name in proven_by_ci() if name.startswith("nvidia.")} == ran.keys()
    compiled = {(line["kernel"], line["arch"]) for line in listed}
    assert compiled == {
        (kernel, arch) for entry in ran for kernel in compile_all.KERNELS[entry] for arch in proven_by_ci()[entry]
    }


def ends(builds):
    """The first and the last build of each kernel."""
    kinds = {}
    for build in builds:
        kinds.setdefault(build.kernel, []).append(build)
    return [build for kind in kinds.values() for build in dict.fromkeys((kind[0], kind[-1]))]


@pytest.mark.parametrize("arch", compile_all.TARGETS)
def test_what_is_listed_compiles_and_fits(arch, monkeypatch):
    """All of it for a device of `WHOLE`; for another what is for neither of those, and the ends of each kernel."""
    monkeypatch.setattr(compile_all, "compile_build", kept_image)
    declared = [build for build in EVERYTHING if arch in build.archs]
    some = ends(declared)
    asked = [each for each in declared if arch in WHOLE or EVERY_DEVICE or each in some or not WHOLE & each.archs.keys()]
    made = list(compile_all.compile_arch(arch, asked))
    assert [(line["label"], line["error"]) for line in made] == [(build.label, "") for build in asked]
    assert {line["kernel"] for line in made} == {build.kernel for build in declared}
    # masked_prefill: the stack of rows that are computed again (test_nvidia_prompts); indexer_logits_prefill: two words between
    # runs of tokens (test_nvidia_indexer_logits); sparse_decode_sm80: two words around the loop (test_nvidia_native_sm80)
    most = {"masked_prefill": 200, "indexer_logits_prefill": 8, "sparse_decode_sm80": 8}
    most["topk_select"] = SPILLED_BY_TOPK_SELECT
    assert not [line for line in made if line["spilled"] > most.get(line["kernel"], 0)]
    assert {line["versions"]["nvrtc"] for line in made} == {"{}.{}".format(*nvrtc_version())}


def test_a_build_that_does_not_fit_fails_the_command(capsys, monkeypatch):
    monkeypatch.setattr(compile_all, "compile_build", kept_image)
    _, whole = lines(capsys, "--quick", "sm90")
    most = max(line["shared"] for line in whole)
    monkeypatch.setattr(compile_all, "SHARED_MEMORY", {"sm90": most - 1})
    code, made = lines(capsys, "--quick", "sm90")
    assert code == 1 and sorted(line["kernel"] for line in made) == sorted(
        {build.kernel for build in (*ALL, FEW_ROWS, *INDEXER, PACK_SELECTION, *MASKED)}
    )
    refused = f"{most} bytes of shared memory, sm90 has {most - 1}: choose fewer stages"
    assert {line["error"] for line in made} == {"", refused}
    assert all((line["error"] == refused) == (line["shared"] == most) for line in made)


def test_without_nvrtc_nothing_is_claimed(monkeypatch, capsys):
    def nowhere():
        raise NvrtcNotFound("no NVRTC among these")

    monkeypatch.setattr(compile_all, "nvrtc_version", nowhere)
    for arguments, word in ((["--json"], "no NVRTC among these"), (["sm75"], "sm75: expected sm80, sm86")):
        with pytest.raises(SystemExit) as caught:
            compile_all.main(arguments)
        said = capsys.readouterr()
        assert (caught.value.code, said.out) == (2, "") and word in said.err
