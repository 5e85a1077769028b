# SPDX-License-Identifier: Apache-2.0
"""Every build of the native kernel compiles, fits its device and is launched with what its source lays out; no GPU takes part.

NVRTC comes with requirements-dev.txt, cuobjdump in Triton's wheel: a machine without them fails here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from native_model import SOURCE

import mla_portable_nvidia
from mla_portable.matrix.collect import collect_declarations
from mla_portable.matrix.evidence import problems_of
from mla_portable.matrix.profiles import load_profiles
from mla_portable.matrix.record import Origin, compiled_records, kernels_of
from mla_portable.registry import Registry
from mla_portable_nvidia import compile_all
from mla_portable_nvidia.native import sparse_decode
from mla_portable_nvidia.native.bind import ARCHS
from mla_portable_nvidia.native.choice import BUILDS
from mla_portable_nvidia.native.nvrtc import CompilationFailed, NvrtcNotFound, compile_cubin
from mla_portable_nvidia.native.sparse_decode import MAX_SPLITS, TILE, Build, compile_build, shared_bytes

REGISTERS = 65_536
"""Of a multiprocessor of compute capability 9.0, which has 228 KiB of shared memory and keeps 1 KiB of it for each block."""
COPYING = 32
"""Registers that the source leaves to a thread of the copying warps."""
PROFILES = load_profiles(Path(__file__).parents[2] / "capability" / "profiles")
MODULE = mla_portable_nvidia.__name__


@pytest.fixture(scope="module", params=BUILDS, ids=lambda build: f"h{build.heads}-g{build.groups}-s{build.stages}")
def compiled(request):
    """(a build, its machine code)."""
    return request.param, compile_build(request.param, ARCHS["sm90"])


def test_nothing_spills(compiled):
    _, cubin = compiled
    usage = compile_all.cuobjdump(cubin, "-res-usage")
    assert re.findall(r"Function (\w+)", usage) == ["sparse_decode_fp8"]
    assert re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", usage) == [("0", "0")]
    code = compile_all.cuobjdump(cubin, "-sass")
    assert "HMMA" in code and not re.search(r"\b(STL|LDL)\b", code)


def test_registers_are_enough_and_come_to_no_more_than_a_multiprocessor_has(compiled):
    """A block that asks for more than it was launched with waits for ever."""
    build, cubin = compiled
    launched = int(re.search(r"REG:(\d+)", compile_all.cuobjdump(cubin, "-res-usage"))[1])
    assert launched * build.threads * build.blocks_per_sm <= REGISTERS
    taken = build.consumer_registers * 128 * build.groups + COPYING * 128
    assert taken <= launched * build.threads
    code = compile_all.cuobjdump(cubin, "-sass")
    settings = {int(value, 16) for value in re.findall(r"USETMAXREG\S*(?: UP\d,)? (0x[0-9a-f]+)", code)}
    assert settings == {COPYING, build.consumer_registers}
    assert build.consumer_registers % 8 == 0
    assert max(int(number) for number in re.findall(r"\bR(\d+)\b", code)) < build.consumer_registers


@pytest.mark.parametrize("build", [*BUILDS, Build(head_tiles=2, groups=2, stages=1)], ids=str)
def test_shared_memory_is_what_the_source_lays_out(build):
    """The source's own macros are asked, by the compiler; the last build needs most of it at its end, to merge."""
    layout = (
        SOURCE[: SOURCE.index("__device__")]
        + """
    constexpr int merged = (2 * GROUPS * HT + 2 * HT + GROUPS * HT * MERGE_STRIDE) * 4 + SPLITS * HT * 8;
    constexpr int tiles = Q_BYTES + GROUPS * GROUP_BYTES;
    static_assert((tiles > merged ? tiles : merged) == SHARED && THREADS == BLOCK && TN == TOKENS && HT == HEADS, "differs");
    """
    )
    known = {"SPLITS": MAX_SPLITS, "SHARED": shared_bytes(build), "BLOCK": build.threads, "TOKENS": TILE, "HEADS": build.heads}
    compile_cubin(layout, "sm_90a", [*build.defines, *known.items()])
    for name in known.keys() - {"SPLITS"}:
        with pytest.raises(CompilationFailed, match="differs"):
            compile_cubin(layout, "sm_90a", [*build.defines, *(known | {name: known[name] + 8}).items()])


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_as_many_blocks_as_were_meant_have_their_shared_memory(build):
    assert shared_bytes(build) <= 227 << 10
    assert build.blocks_per_sm * (shared_bytes(build) + 1024) <= 228 << 10


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_log(monkeypatch, tmp_path):
    (tmp_path / "sparse_decode_fp8.cu").write_text(SOURCE.replace("int stage = 0;", "int stage = unknown_name;", 1))
    monkeypatch.setattr(sparse_decode, "files", lambda package: tmp_path)
    with pytest.raises(CompilationFailed, match=r'(?s)NVRTC for sm_90a: .*error: identifier "unknown_name" is undefined'):
        compile_build(BUILDS[0], "sm_90a")
    (line,) = compile_all.compile_arch("sm90", BUILDS[:1])
    assert "unknown_name" in line["error"]


def lines(capsys, *arguments):
    code = compile_all.main(["--json", *arguments])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_what_compiled_becomes_evidence_of_these_implementations_alone(capsys):
    code, made = lines(capsys)
    assert code == 0 and len(made) == len(BUILDS) and len({line["label"] for line in made}) == len(made)
    assert [line["shared"] for line in made] == [shared_bytes(build) for build in BUILDS]
    declared = collect_declarations(Registry(plugins=[("nvidia", MODULE)], environ={}, probe=False), PROFILES)
    records = compiled_records(made, MODULE, declared, PROFILES, Origin("0" * 40, False, "2026-11-01T00:00:00Z", "pytest"))
    names = {claim.implementation: claim.targets for claim in declared.claims}
    assert {name for name, targets in names.items() if targets} == {"nvidia.native", "nvidia.native_wide"}
    assert sorted({record["implementation"] for record in records}) == ["nvidia.native", "nvidia.native_wide"]
    for record in records:
        assert problems_of(record, PROFILES) == []
        assert record["cases"] == {"passed": len(BUILDS), "failed": 0, "skipped": 0} and record["target"] == "sm90"
        assert record["kernels"]["sparse_decode_fp8"]["spilled"] == 0 and record["versions"]["nvrtc"] == "13.0"
    kernels = next(kernels_of(claim) for claim in declared.claims if claim.implementation == "nvidia.native")
    assert kernels == {"sparse_decode_fp8": "mla_portable_nvidia.native:sparse_decode_fp8.cu"}


def test_a_build_that_does_not_fit_fails_the_command(capsys, monkeypatch):
    monkeypatch.setattr(compile_all, "SHARED_MEMORY", {"sm90": 200_000})
    code, made = lines(capsys, "--quick", "sm90")
    assert (code, len(made)) == (1, 2)
    assert [line["error"] for line in made] == ["", "206336 bytes of shared memory, sm90 has 200000: choose fewer stages"]


def test_without_nvrtc_nothing_is_claimed(monkeypatch, capsys):
    def nowhere():
        raise NvrtcNotFound("no NVRTC among these")

    monkeypatch.setattr(compile_all, "nvrtc_version", nowhere)
    for arguments, word in ((["--json"], "no NVRTC among these"), (["sm80"], "sm80: expected sm90")):
        with pytest.raises(SystemExit) as caught:
            compile_all.main(arguments)
        said = capsys.readouterr()
        assert (caught.value.code, said.out) == (2, "") and word in said.err
