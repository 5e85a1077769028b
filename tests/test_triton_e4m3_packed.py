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
from mla_portable_triton.kernels.e4m3_packed import e4m3_lower, e4m3_lower_half, e4m3_upper, e4m3_upper_half

EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
"""Every word of two bytes."""


def values(words: Tensor) -> tuple[Tensor, Tensor]:
    """What torch makes of the lower and the upper bytes of words, as bfloat16."""
    even, odd = words.view(torch.float8_e4m3fn).view(-1, 2).bfloat16().unbind(1)
    return even, odd


def run(assembly: str, registers: Tensor) -> Tensor:
    """The result of PTX's instructions, of as many as these kernels need; a register is the low half of an int64."""
    held = {"$1": registers.clone()}

    def read(name: str) -> Tensor | int:
        return held[name] if name in held else int(name, 0)

    for name, types, operands in re.findall(r"(\w+)\.([\w.]+) ([^;]+);", assembly.partition(";")[2]):
        target, *sources = operands.split(", ")
        a, *rest = map(read, sources)
        held[target] = execute(name, types, a, *rest) & 0xFFFFFFFF
    return held["$0"]


def execute(name: str, types: str, a: Tensor | int, b: Tensor | int = 0, c: Tensor | int = 0, *rest: Tensor | int) -> Tensor:
    if name == "mov":
        return torch.as_tensor(a)
    if name == "prmt":  # selectors with bit 3 spread the sign of a byte
        assert isinstance(c, int) and b == 0
        picked = [(a >> (c >> 4 * i & 7) * 8 & 0xFF, c >> 4 * i & 8) for i in range(4)]
        chosen = [(byte >> 7) * 0xFF if spread else byte for byte, spread in picked]
        return torch.stack([byte << 8 * i for i, byte in enumerate(chosen)]).sum(0)
    if name == "fma":
        assert types == "rn.bf16x2"
        halves = [[torch.as_tensor(x) >> at & 0xFFFF for x in (a, b, c)] for at in (0, 16)]
        floats = [[half.to(torch.int16).view(torch.bfloat16).double() for half in each] for each in halves]
        low, high = ((x * y + z).bfloat16().view(torch.int16).long() & 0xFFFF for x, y, z in floats)
        return low | high << 16
    if name == "lop3":
        assert rest == (0xEA,)
        return torch.as_tensor(a & b | c)
    return {"and": a & b, "add": a + b, "shl": a << b, "shr": a >> b}[name]  # type: ignore[return-value]


def same(got: Tensor, want: Tensor, keep_nan: bool) -> bool:
    """Equal numbers; a NaN is a NaN, or 480 of either sign."""
    nan = want.isnan()
    return torch.equal(got[~nan], want[~nan]) and bool((got[nan].isnan() if keep_nan else got[nan].abs() == 480).all())


@pytest.mark.parametrize("neighbour", [0, 0x7FFF, -1])
@pytest.mark.parametrize("keep_nan", [True, False])
def test_every_word_by_a_reading_of_the_instructions(neighbour: int, keep_nan: bool):
    registers = (EVERY.long() & 0xFFFF) << 16 | (neighbour & 0xFFFF)
    assemblies = (e4m3_packed.LOWER_NAN, e4m3_packed.UPPER_NAN) if keep_nan else (e4m3_packed.LOWER, e4m3_packed.UPPER)
    besides = values(torch.tensor([neighbour], dtype=torch.int16))
    for assembly, want, beside in zip(assemblies, values(EVERY), besides, strict=True):
        result = run(assembly.value, registers)
        assert same((result >> 16).to(torch.int16).view(torch.bfloat16), want, keep_nan)
        assert same((result & 0xFFFF).to(torch.int16).view(torch.bfloat16), beside.expand(len(EVERY)), keep_nan)


def same_halves(got: Tensor, want: Tensor) -> bool:
    """float16 numbers are 2**-8 of `want`; a NaN is 480 of either sign."""
    got, nan = got.float() * 256, want.isnan()
    return torch.equal(got[~nan], want[~nan].float()) and bool((got[nan].abs() == 480).all())


@pytest.mark.parametrize("neighbour", [0, 0x7FFF, -1])
def test_every_word_as_halves_by_a_reading_of_the_instructions(neighbour: int):
    registers = (EVERY.long() & 0xFFFF) << 16 | (neighbour & 0xFFFF)
    besides = values(torch.tensor([neighbour], dtype=torch.int16))
    for assembly, want, beside in zip((e4m3_packed.HALF_LOWER, e4m3_packed.HALF_UPPER), values(EVERY), besides, strict=True):
        result = run(assembly.value, registers)
        assert same_halves((result >> 16).to(torch.int16).view(torch.float16), want)
        assert same_halves((result & 0xFFFF).to(torch.int16).view(torch.float16), beside.expand(len(EVERY)))


@triton.jit
def _halve(even_ptr, odd_ptr, word_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(word_ptr + i)
    tl.store(even_ptr + i, e4m3_lower_half(words))
    tl.store(odd_ptr + i, e4m3_upper_half(words))


@triton.jit
def _decode(even_ptr, odd_ptr, word_ptr, KEEP_NAN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(word_ptr + i)
    tl.store(even_ptr + i, e4m3_lower(words, KEEP_NAN))
    tl.store(odd_ptr + i, e4m3_upper(words, KEEP_NAN))


@pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("keep_nan", [True, False])
def test_every_word_on_a_gpu(keep_nan: bool):
    words = EVERY.cuda()
    even, odd = torch.empty_like(words, dtype=torch.bfloat16), torch.empty_like(words, dtype=torch.bfloat16)
    _decode[(64,)](even, odd, words, KEEP_NAN=keep_nan, BLOCK=1024)
    for got, want in zip((even, odd), values(EVERY), strict=True):
        assert same(got.cpu(), want, keep_nan)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU")
def test_every_word_as_halves_on_a_gpu():
    words = EVERY.cuda()
    even, odd = torch.empty_like(words, dtype=torch.float16), torch.empty_like(words, dtype=torch.float16)
    _halve[(64,)](even, odd, words, BLOCK=1024)
    assert all(same_halves(got.cpu(), want) for got, want in zip((even, odd), values(EVERY), strict=True))
