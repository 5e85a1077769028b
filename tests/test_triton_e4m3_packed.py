# SPDX-License-Identifier: Apache-2.0
"""e4m3 decoded by NVIDIA's instructions, every word of two bytes: by a reading of the instructions, and by a GPU."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_portable_triton.kernels import e4m3_packed
from mla_portable_triton.kernels.e4m3_packed import e4m3_converted, e4m3_lower_half, e4m3_times_140, e4m3_upper_half

EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
"""Every word of two bytes."""


WAYS = {
    "halves": (e4m3_packed.HALF_LOWER, e4m3_packed.HALF_UPPER),
    "times 140": (e4m3_packed.LOUD_LOWER, e4m3_packed.LOUD_UPPER),
    "converted": (e4m3_packed.CONVERT_LOWER, e4m3_packed.CONVERT_UPPER),
}
UNIT = {"halves": 2.0**-8, "times 140": 140.0, "converted": 1.0}
"""What a number is multiplied by."""


def values(words: Tensor) -> tuple[Tensor, Tensor]:
    """What torch makes of the lower and the upper bytes of words, as float32."""
    even, odd = words.view(torch.float8_e4m3fn).view(-1, 2).float().unbind(1)
    return even, odd


def run(assembly: str, registers: Tensor) -> Tensor:
    """The result of PTX's instructions, of as many as these kernels need; a register is the low half of an int64."""
    held = {"$1": registers.clone()}

    def read(name: str) -> Tensor | int:
        return held[name] if name in held else int(name, 0)

    for name, types, operands in re.findall(r"(\w+)\.([\w.]+) ([^;]+);", assembly.partition(";")[2]):
        target, *sources = operands.split(", ")
        if target.startswith("{"):
            upper, both = sources[0].removesuffix("}"), held[sources[1]]
            held[target.removeprefix("{")], held[upper] = both & 0xFFFF, both >> 16
            continue
        a, *rest = map(read, sources)
        held[target] = execute(name, types, a, *rest) & 0xFFFFFFFF
    return held["$0"]


def execute(name: str, types: str, a: Tensor | int, b: Tensor | int = 0, c: Tensor | int = 0) -> Tensor:
    if name == "mov":
        return torch.as_tensor(a)
    if name == "prmt":  # a selector's highest bit: eight times the sign of the byte
        assert isinstance(c, int) and b == 0
        taken = [(c >> 4 * i & 8, a >> (c >> 4 * i & 7) * 8 & 0xFF) for i in range(4)]
        return torch.stack([((byte >> 7) * 0xFF if sign else byte) << 8 * i for i, (sign, byte) in enumerate(taken)]).sum(0)
    if name == "cvt":
        assert types == "rn.f16x2.e4m3x2" and isinstance(a, Tensor)
        low, high = (bits(numbers.half()) for numbers in values(a.to(torch.int16)))
        return low | high << 16
    if name == "mul":
        assert types == "rn.f16x2"
        halves = [[torch.as_tensor(x) >> at & 0xFFFF for x in (a, b)] for at in (0, 16)]
        floats = [[half.to(torch.int16).view(torch.float16).double() for half in each] for each in halves]
        low, high = (bits((x * y).half()) for x, y in floats)
        return low | high << 16
    return {"and": a & b, "shl": a << b, "shr": a >> b}[name]  # type: ignore[return-value]


def bits(halves: Tensor) -> Tensor:
    return halves.view(torch.int16).long() & 0xFFFF


def same(got: Tensor, want: Tensor, way: str) -> bool:
    """float16 numbers are UNIT times `want`, exactly. A NaN is 2**-8 of 480, infinite or a NaN."""
    got, nan = got.double(), want.isnan()
    seen = {"halves": got[nan].abs() == 480 * 2.0**-8, "times 140": got[nan].isinf(), "converted": got[nan].isnan()}
    return torch.equal(got[~nan], want[~nan].double() * UNIT[way]) and bool(seen[way].all())


@pytest.mark.parametrize("neighbour", [0, 0x7FFF, -1])
@pytest.mark.parametrize("way", WAYS)
def test_every_word_by_a_reading_of_the_instructions(neighbour: int, way: str):
    registers = (EVERY.long() & 0xFFFF) << 16 | (neighbour & 0xFFFF)
    besides = values(torch.tensor([neighbour], dtype=torch.int16))
    for assembly, want, beside in zip(WAYS[way], values(EVERY), besides, strict=True):
        result = run(assembly.value, registers)
        assert same((result >> 16).to(torch.int16).view(torch.float16), want, way)
        assert same((result & 0xFFFF).to(torch.int16).view(torch.float16), beside.expand(len(EVERY)), way)


@pytest.mark.parametrize("way", WAYS)
def test_two_bytes_take_few_instructions(way: str):
    """They are a third of the instructions of the attention kernel's loop where there is no conversion."""
    least = {"halves": 3, "times 140": 4, "converted": 2}[way]
    for assembly in WAYS[way]:
        assert len(re.findall(r"\b(?:prmt|shl|shr|and|lop3|mul|cvt)\.", assembly.value)) == least


@triton.jit
def _decode(even_ptr, odd_ptr, word_ptr, WAY: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(word_ptr + i)
    if WAY == "converted":
        even, odd = e4m3_converted(words)
    elif WAY == "times 140":
        even, odd = e4m3_times_140(words)
    else:
        even = e4m3_lower_half(words)
        odd = e4m3_upper_half(words)
    tl.store(even_ptr + i, even)
    tl.store(odd_ptr + i, odd)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("way", WAYS)
def test_every_word_on_a_gpu(way: str):
    if way == "converted" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the conversion exists from 8.9 on")
    words = EVERY.cuda()
    even, odd = torch.empty_like(words, dtype=torch.float16), torch.empty_like(words, dtype=torch.float16)
    _decode[(64,)](even, odd, words, WAY=way, BLOCK=1024)
    assert all(same(got.cpu(), want, way) for got, want in zip((even, odd), values(EVERY), strict=True))
