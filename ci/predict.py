#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predict, without a GPU, what bounds the kernels that run on SM80 to SM89: the tables of docs/dev/sm80-sm89.md.

    python ci/predict.py [sm80 sm86 sm89]

Each kernel is compiled as `ci/compile` does, its machine code is disassembled, and the instructions of its innermost loop with
the most products are counted. From the counts follow the clocks of a multiprocessor's units, from those and the bytes the time.
Nothing is measured here. Needs NVRTC and Triton with its interpreter off.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mla_portable.capability.profiles import Facts, Profile, all_profiles
from mla_portable.layouts import LAYOUTS
from mla_portable.models import DEEPSEEK_V32
from mla_portable_nvidia.compile_all import cuobjdump
from mla_portable_nvidia.native import sparse_decode_sm80
from mla_portable_nvidia.native.kernel_build import BLOCK_RESERVE, SM_SHARED_MEMORY, compile_build
from mla_portable_nvidia.native.runtime.images import compile_kept
from mla_portable_triton import aot, compile_all

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
FMA = ("FMUL", "FADD", "FFMA")
HALF = ("HMUL2", "HFMA2", "HADD2")
MULTIPLY = ("IMAD", "UIMAD")
ALU = ("LOP3", "SHF", "PRMT", "ISETP", "IADD3", "SEL", "LEA", "FMNMX", "IMNMX", "FSETP", "FSEL", "PLOP3", "F2FP", "MOV", "VOTE")
A40 = Facts(num_sms=84, memory_tb_per_s=0.696, bf16_tflops=149.7, clock_ghz=1.74)
"""NVIDIA A40 datasheet: 10,752 CUDA cores, 696 GB/s, 149.7 dense; boost clock 1,740 MHz."""
MMA_SYNC_H200 = 585.0
"""TFLOP/s of `mma.sync`, of which an H200's 989 need `wgmma`: docs/dev/indexer.md."""
EXPECTED = 0.85
"""Of the sum of parts: products, memory, shared memory and the busiest unit of the others hardly overlap in these loops. The
code for sm80 takes 0.74 to 0.95 of it on an H200, from 64 rows on (docs/dev/sm80-sm89.md)."""
K = DEEPSEEK_V32.topk
COLUMNS = (
    *("kernel", "step", "warps", "registers", "shared", "programs", "all", "products", "ldmatrix", "copies"),
    *("integer", "multiply", "float", "half", "exp"),
)


@dataclass(frozen=True)
class Loop:
    """A kernel's loop. heads: of a program, or queries of masked prefill. work: tokens (attention), positions (indexer) or keys
    (masked prefill) of a step. count: instructions of one warp. shared_moved: bytes of shared memory, of all warps."""

    name: str
    arch: str
    heads: int
    work: int
    warps: int
    registers: int
    shared: int
    spilled: int
    count: Counter[str]
    shared_moved: int

    @property
    def issued(self) -> int:
        return sum(self.count.values())

    def of(self, *names: str) -> int:
        return sum(self.count[name] for name in names)

    def programs(self) -> int:
        """Of a multiprocessor."""
        room = SM_SHARED_MEMORY[self.arch]
        by_registers = 65_536 // (-(-self.registers // 8) * 8 * 32 * self.warps)
        return max(1, min(room // (self.shared + BLOCK_RESERVE), by_registers, 64 // self.warps))

    def clocks(self, device: Facts) -> dict[str, float]:
        """Of a multiprocessor's units, for a step. Rates: CUDA C++ Programming Guide, "Arithmetic Instructions"."""
        assert device.bf16_tflops and device.num_sms and device.clock_ghz
        a_clock = device.bf16_tflops * 1e3 / (device.num_sms * device.clock_ghz)
        old = self.arch == "sm80"
        floats, half = (
            self.of(*FMA) / (2 if old else 4),
            self.of(*HALF) / (2 if old and "HFMA2" in self.count else 1 if old else 2),
        )
        each = {
            "issue": self.issued / 4,
            "tensor": self.of("HMMA", "QMMA") * 4096 / a_clock,
            "integer": self.of(*ALU) / 2,
            "multiply": self.of(*MULTIPLY) / 2 + floats + half,
            "exp": self.of("MUFU") * 2,
        }
        return {name: value * self.warps for name, value in each.items()} | {"shared": self.shared_moved / 128}


def disassembled(cubin: bytes) -> list[tuple[int, bool, str, str]]:
    """(address, under a predicate, name, operands)."""
    return [(int(at, 16), bool(p), name, rest) for at, p, name, rest in _LINE.findall(cuobjdump(cubin, "-sass") or "")]


def target(rest: str) -> int:
    found = re.search(r"0x([0-9a-f]+)", rest)
    return int(found[1], 16) if found else 0


def hot_loop(code: list[tuple[int, bool, str, str]]) -> list[tuple[int, bool, str, str]]:
    """The first of the innermost loops with products, without what is rarely run: what a branch goes around, if it is the
    rescaling of sums alone, and the longer one of two sides that multiply by scales."""
    backward = [(target(rest), at) for at, _, name, rest in code if name.startswith("BRA") and target(rest) < at]
    loops = [[each for each in code if begin <= each[0] <= end] for begin, end in backward]
    loops = [loop for loop in loops if any(each[2].startswith(("HMMA", "QMMA")) for each in loop)]
    inner = [
        one
        for one in loops
        if not any(other is not one and one[0][0] <= other[0][0] and other[-1][0] <= one[-1][0] for other in loops)
    ]
    loop = inner[0]
    dropped: set[int] = set()
    for at, under, name, rest in loop:
        to = target(rest)
        if not name.startswith("BRA") or not under or not at < to <= loop[-1][0]:
            continue
        side = [each for each in loop if at < each[0] < to]
        names = Counter(each[2].split(".")[0] for each in side)
        joins = side and side[-1][2].startswith("BRA") and not side[-1][1] and target(side[-1][3]) > to
        if joins and names["HFMA2"] > 16:  # scales of 128 and more take two products
            other = [each for each in loop if to <= each[0] < target(side[-1][3])]
            dropped |= {each[0] for each in max(side, other, key=len)}
        elif names["FMUL"] >= 32 and not names["HMMA"] and not names["LDSM"] and names["FMUL"] > len(side) / 2:
            dropped |= {each[0] for each in side}
    return [each for each in loop if each[0] not in dropped]


def moved(loop: list[tuple[int, bool, str, str]], warps: int) -> int:
    """Bytes of shared memory that all warps read and write."""
    total = 0
    for _, _, name, _ in loop:
        kind, *parts = name.split(".")
        if kind == "LDSM":
            total += 128 * int(parts[-1]) if parts[-1].isdigit() else 128
        elif kind in ("LDS", "STS", "LDGSTS"):
            total += 32 * next((int(part) // 8 for part in parts if part in ("64", "128")), 4)
    return total * warps


def loop_of(name: str, arch: str, cubin: bytes, heads: int, work: int, warps: int, shared: int) -> Loop:
    usage = re.search(r"REG:(\d+) STACK:(\d+)", cuobjdump(cubin, "-res-usage") or "")
    assert usage is not None, "needs the cuobjdump of Triton's wheel"
    loop = hot_loop(disassembled(cubin))
    count = Counter(each[2].split(".")[0] for each in loop)
    return Loop(name, arch, heads, work, warps, int(usage[1]), shared, int(usage[2]), count, moved(loop, warps))


def triton_loops(arch: str) -> Iterator[Loop]:
    wanted = {
        "sparse_attention": (r"-(fp8_ds_mla|bf16)-h\d+-whole$", "BLOCK_H", "BLOCK_N"),
        "masked_prefill": (r"-selection$", "BLOCK_M", "BLOCK_N"),
        "indexer_logits": (r"-(decode|prefill)-(fp8|bf16)$", "BLOCK_H", "BLOCK_N"),
    }
    for module in compile_all.kernel_modules():
        pattern, tall, wide = wanted.get(module.__name__.rpartition(".")[2], ("$^", "", ""))
        for variant in compile_all.variants_of(module, arch):
            if re.search(pattern, variant.label):
                made, constants = aot.compiled(variant, arch), variant.constexprs
                sizes = constants[tall], constants[wide], variant.num_warps, made.metadata.shared
                yield loop_of(variant.label, arch, made.asm["cubin"], *sizes)


def native_loops(arch: str) -> Iterator[Loop]:
    for rows in ("fp8_ds_mla", "bf16"):
        for build in sparse_decode_sm80.builds(arch, rows, None):
            cubin = compile_build(build, build.archs[arch], compile_kept)
            yield loop_of(build.label, arch, cubin, build.heads, build.tile, build.threads // 32, build.shared_bytes)


def parts(loop: Loop, device: Facts, rows: int, heads: int, *, decode: bool) -> dict[str, float]:
    """Microseconds of each unit, and of memory, for attention of `rows` to K keys each."""
    steps = rows * -(-heads // loop.heads) * -(-K // loop.work)
    layout = LAYOUTS["fp8_ds_mla" if "fp8" in loop.name else "bf16"]
    size = rows * heads * (576 + 512) * 2 + rows * K * (4 + layout.row_bytes * decode)
    return times_of(loop, device, steps, size)


def times_of(loop: Loop, device: Facts, steps: float, size: float) -> dict[str, float]:
    """Microseconds of each unit for so many steps, and of memory for so many bytes."""
    assert device.num_sms and device.clock_ghz and device.memory_tb_per_s
    clocks = loop.clocks(device).items()
    return {unit: each * steps / device.num_sms / device.clock_ghz / 1e3 for unit, each in clocks} | {
        "memory": size / device.memory_tb_per_s / 1e6
    }


def others(loops: list[Loop], device: Facts) -> Iterator[tuple[str, str]]:
    """The indexer's scores of 64 heads, masked prefill, and what only moves bytes, whose bound is what memory takes."""
    for each in loops:
        if each.name.startswith("indexer_logits-decode"):
            rows, positions, key = 16, 32_768, 132 if "fp8" in each.name else 256
            steps, size = rows * positions / each.work, rows * positions * (key + 4)
        elif each.name.startswith("indexer_logits-prefill"):
            rows, positions = 1024, 8192
            steps, size = rows * positions / each.work, rows * positions * 4
        elif each.name.startswith("masked_prefill"):
            rows, positions = 4096, 4096  # causal: half of them, and half a tile at the end
            steps = 16 * rows / each.heads * (positions + each.heads) / 2 / each.work
            size = 16 * rows * 2 * sum(map(int, re.findall(r"(?<=-)\d+", each.name))) * 2
        else:
            continue
        yield f"{each.name}, {rows:,} tokens, {positions:,} positions", summary(times_of(each, device, steps, size))
    assert device.memory_tb_per_s
    for name, size in (
        ("topk_select, 1,024 tokens, 8,192 positions, read twice", 1024 * (8192 * 8 + K * 4)),
        ("convert_indices, 1,024 tokens", 1024 * K * 8),
        ("cache_write to fp8_ds_mla, 8,192 tokens", 8192 * (1152 + 656)),
        ("gather_upconvert of fp8_ds_mla, 32,768 tokens", 32_768 * (656 + 1152)),
    ):
        yield name, f"{size / device.memory_tb_per_s / 1e6:,.0f} memory"


def devices(arch: str, profiles: dict[str, Profile]) -> dict[str, Facts]:
    """Those whose rates are published."""
    found = {slug: each.facts for slug, each in profiles.items() if each.arch == arch and each.facts.bf16_tflops}
    return found | ({"a40": A40} if arch == "sm86" else {})


def summary(times: dict[str, float]) -> str:
    """The longest part, by which nothing is faster; what is expected; the longest one's name."""
    units = max(times["issue"], times["integer"], times["multiply"], times["exp"])
    together = units + times["tensor"] + times["shared"] + times["memory"]
    bound = max(times, key=times.__getitem__)
    expected = max(times[bound], EXPECTED * together)
    return f"{times[bound]:,.0f} / {expected:,.0f} {bound}"


def main() -> None:
    profiles = dict(all_profiles())
    for arch in sys.argv[1:] or ["sm80", "sm86", "sm89"]:
        loops = [*native_loops(arch), *triton_loops(arch)]
        print(f"\n### {arch}: instructions of a warp in a step\n")
        print("|", " | ".join(COLUMNS), "|")
        print("|" + "---|" * len(COLUMNS))
        for each in loops:
            counts = each.issued, each.of("HMMA", "QMMA"), each.of("LDSM"), each.of("LDGSTS"), each.of(*ALU), each.of(*MULTIPLY)
            counts += each.of(*FMA), each.of(*HALF), each.of("MUFU")
            step = f"{each.heads} x {each.work}"
            held = each.registers, f"{each.shared:,}", each.programs()
            print("|", " | ".join(map(str, (each.name, step, each.warps, *held, *counts))), "|", flush=True)
        attention = [each for each in loops if each.name.startswith("sparse")]
        measured = (
            {"h200, this code": profiles["h200"].facts.model_copy(update={"bf16_tflops": MMA_SYNC_H200})}
            if arch == "sm80"
            else {}
        )
        for slug, facts in (devices(arch, profiles) | measured).items():
            print(f"\n### {slug}: predicted us, longest part / expected, and what is longest\n")
            print("| kernel | heads | decode 1 row | 16 | 64 | 128 | prefill 1,024 |\n|" + "---|" * 7)
            for heads in (16, 64, 128):
                for each in serving(attention, heads):
                    cells = [summary(parts(each, facts, rows, heads, decode=True)) for rows in (1, 16, 64, 128)]
                    cells.append(summary(parts(each, facts, 1024, heads, decode=False)))
                    print("|", " | ".join((each.name, str(heads), *cells)), "|")
            print("\n| kernel | us |\n|---|---|")
            for cells in others(loops, facts):
                print("|", " | ".join(cells), "|", flush=True)


def serving(loops: list[Loop], heads: int) -> list[Loop]:
    """Of each kernel and layout the loop that so many heads run."""
    kinds: dict[str, list[Loop]] = {}
    for each in loops:
        kinds.setdefault(re.sub(r"-h\d+.*", "", each.name), []).append(each)
    chosen = []
    for group in kinds.values():
        group = sorted(group, key=lambda each: each.heads)
        chosen.append(next((each for each in group if heads <= each.heads), group[-1]))
    return chosen


if __name__ == "__main__":
    main()
