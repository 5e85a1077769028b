# SPDX-License-Identifier: Apache-2.0
"""The row formats: offsets, e4m3 bytes, scales, and how much packing may lose."""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import replace

import pytest
import torch

import mla_portable
from mla_portable.contracts import InvalidArgument
from mla_portable.judge.problems import exact
from mla_portable.layouts import (
    BF16,
    BF16_128_32,
    BF16_NOPE,
    CORE_LAYOUTS,
    FP8_DS_MLA,
    FP8_NOPE,
    FP8_V4,
    INDEX,
    INDEX_BF16,
    INDEX_FP8,
    LAYOUTS,
    SCALE_FORMATS,
    CacheLayout,
    index_query_dtype,
    layout_names,
    layout_of,
    tile_scales,
)
from mla_portable.primitives._reference import CacheRows

TINY = 2.0**-126  # the smallest normal float32


def own() -> dict[str, CacheLayout]:
    """The core's layouts."""
    return {name: layout for name, layout in LAYOUTS.items() if name in CORE_LAYOUTS}


def e4m3_value(byte: int) -> float:
    """By the definition of the format: sign, 4 exponent bits (bias 7), 3 mantissa bits, NaN in 0x7f and 0xff."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def row_of(latent_bytes: bytes, scales: tuple[float, ...], rope_bytes: bytes) -> torch.Tensor:
    data = latent_bytes + struct.pack("<4f", *scales) + rope_bytes
    return torch.tensor(list(data), dtype=torch.uint8)[None]


def latent_with(amax: float) -> torch.Tensor:
    """A latent whose four groups all have this greatest magnitude, once positive and once negative."""
    latent = torch.zeros(1, 512)
    latent[0, 5], latent[0, 133], latent[0, 300], latent[0, 511] = amax, -amax, amax, -amax
    return latent


def test_offsets_are_those_of_the_published_row():
    assert (FP8_DS_MLA.scale_offset, FP8_DS_MLA.rope_offset, FP8_DS_MLA.alignment) == (512, 528, 4)
    assert (FP8_DS_MLA.row_bytes, FP8_DS_MLA.row_width, FP8_DS_MLA.is_quantized) == (656, 656, True)
    assert (BF16.row_width, BF16.row_bytes, BF16.rope_offset, BF16.is_quantized) == (576, 1152, 1024, False)
    assert (BF16_NOPE.row_width, BF16_NOPE.row_bytes, BF16_NOPE.rope_width, BF16_NOPE.is_quantized) == (512, 1024, 0, False)
    assert (BF16_128_32.row_width, BF16_128_32.row_bytes, BF16_128_32.rope_offset) == (160, 320, 256)
    assert (BF16_128_32.value_width, BF16_128_32.rope_width, BF16_128_32.is_quantized) == (128, 32, False)
    assert (INDEX_FP8.row_bytes, INDEX_FP8.scale_offset, INDEX_FP8.apart_bytes, INDEX_FP8.alignment) == (132, 128, 4, 4)
    assert (INDEX_BF16.row_bytes, INDEX_BF16.key_width, INDEX_BF16.rope_width, INDEX_BF16.is_quantized) == (256, 128, 0, False)
    assert (FP8_V4.row_bytes, FP8_V4.row_pitch, FP8_V4.apart_bytes, FP8_V4.key_width, FP8_V4.alignment) == (584, 576, 8, 512, 8)
    assert FP8_V4.workspace is BF16_NOPE and FP8_V4.rope_width == 0
    assert (FP8_NOPE.row_bytes, FP8_NOPE.row_pitch, FP8_NOPE.scale_offset, FP8_NOPE.alignment) == (528, 528, 512, 4)
    assert FP8_NOPE.workspace is BF16_NOPE and (FP8_NOPE.rope_width, FP8_NOPE.key_width) == (0, 512)
    assert own().keys() & set(layout_names(INDEX)) == {"index_bf16", "index_fp8"}
    known = {
        "bf16": BF16,
        "fp8_ds_mla": FP8_DS_MLA,
        "bf16_nope": BF16_NOPE,
        "fp8_nope": FP8_NOPE,
        "fp8_v4": FP8_V4,
        "bf16_128_32": BF16_128_32,
        "index_bf16": INDEX_BF16,
        "index_fp8": INDEX_FP8,
    }
    assert known == own()


@pytest.mark.parametrize("scale_format", ["pow2", "amax"])
def test_a_row_without_a_rotary_part_is_the_head_of_one_with_it(scale_format: str):
    g = torch.Generator().manual_seed(4)
    latent, rope = torch.randn(7, 512, generator=g) * 3, torch.randn(7, 64, generator=g)
    rows, whole = FP8_NOPE.pack(latent, rope[:, :0], scale_format), FP8_DS_MLA.pack(latent, rope, scale_format)
    assert rows.shape == (7, 528) and torch.equal(rows, whole[:, :528])
    want = FP8_DS_MLA.unpack(whole, torch.float64)[:, :512]
    for cut in (rows, whole[:, :528], rows.view(7, 1, 528)):
        assert torch.equal(FP8_NOPE.unpack(cut, torch.float64).view(7, 512), want)
    assert torch.equal(exact.latent(rows), want) and exact.rope(rows).shape == (7, 0)
    cache = torch.zeros(3, 4, 528, dtype=torch.uint8)
    slots = torch.tensor([11, 0, -1, 5, 12, 4, 7])
    mla_portable.cache_write(latent.bfloat16(), rope[:, :0].bfloat16(), cache, slots, scale_format=scale_format)
    written = (slots >= 0) & (slots < 12)
    kept = FP8_NOPE.pack(latent.bfloat16(), rope[:, :0], scale_format)[written]
    assert torch.equal(cache.view(12, 528)[slots[written]], kept)
    assert int((cache.view(12, 528) != 0).any(dim=1).sum()) == 5


def test_a_page_of_v4_is_rows_and_then_scales():
    g = torch.Generator().manual_seed(3)
    latent = torch.randn(5, 512, generator=g).bfloat16()
    latent[2, 64:128] = 0
    latent[3, :64] *= 2.0**20
    cache = torch.full((3, 2, 584), 0x55, dtype=torch.uint8)
    mla_portable.cache_write(latent, latent[:, :0], cache, torch.tensor([5, 0, 1, 2, 4]))
    page = cache[0].flatten()  # tokens 1 and 2
    for at, token in ((0, 1), (1, 2)):
        row, scales = page[576 * at : 576 * (at + 1)], page[1152 + 8 * at : 1160 + 8 * at]
        assert torch.equal(row[448:].view(torch.bfloat16), latent[token, 448:])
        for group, exponent in enumerate(scales[:7].tolist()):
            amax = float(latent[token, 64 * group : 64 * group + 64].abs().max())
            assert exponent == 127 + math.ceil(math.log2(max(amax / 448, 1e-4)))
            values = [e4m3_value(byte) * 2.0 ** (exponent - 127) for byte in row[64 * group : 64 * group + 64].tolist()]
            error = (torch.tensor(values) - latent[token, 64 * group : 64 * group + 64].float()).abs().max()
            assert error <= 2.0 ** (exponent - 127) * 16  # half a step of the last binade, 256 to 448
        assert scales[7] == 0
    got = CacheRows(cache).values(torch.tensor([5, 0, 1, 2, 4]), torch.float64)[0]
    assert torch.equal(got, FP8_V4.unpack(FP8_V4.pack(latent), torch.float64))
    assert torch.equal(got, exact.latent(exact.named_rows(cache, torch.tensor([5, 0, 1, 2, 4]))))
    assert torch.equal(got[3, 448:], latent[3, 448:].double())


def test_v4_reads_every_scale():
    rows = torch.zeros(256, 584, dtype=torch.uint8)
    rows[:, :448] = 0x38  # 1.0
    rows[:, 576:583] = torch.arange(256, dtype=torch.uint8)[:, None]
    rows[:, 583] = 255  # padding
    got = FP8_V4.unpack(rows, torch.float64)
    want = torch.exp2(torch.arange(256, dtype=torch.float64) - 127)
    want[255] = math.nan
    torch.testing.assert_close(got[:, :448], want[:, None].expand(256, 448), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(exact.latent(rows), got, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(InvalidArgument, match="got 'amax', expected 'pow2'"):
        FP8_V4.pack(torch.zeros(1, 512), None, "amax")


def test_unpack_reads_every_e4m3_byte_by_the_formula():
    scales = (1.0, 0.5, 3.0, 0.7)
    row = row_of(bytes(range(256)) * 2, scales, b"\x80\x3f" * 64)
    expected = []
    for position, byte in enumerate(list(range(256)) * 2):
        scale = struct.unpack("<f", struct.pack("<f", scales[position // 128]))[0]
        expected.append(e4m3_value(byte) * scale)
    expected = torch.tensor([expected], dtype=torch.float64)
    got = FP8_DS_MLA.unpack(row, dtype=torch.float64)
    torch.testing.assert_close(got[:, :512], expected, rtol=0, atol=0, equal_nan=True)
    assert got[:, :512].isnan().sum() == 4
    assert torch.equal(got[:, 512:], torch.ones(1, 64, dtype=torch.float64))
    as_bf16 = FP8_DS_MLA.unpack(row)
    assert as_bf16.dtype == torch.bfloat16
    torch.testing.assert_close(as_bf16[:, :512], expected.float().bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_rope_survives_bit_for_bit():
    patterns = torch.arange(0, 65536, 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(-1, 64)  # NaNs too
    rows = FP8_DS_MLA.pack(torch.zeros(len(patterns), 512, dtype=torch.bfloat16), patterns)
    back = FP8_DS_MLA.unpack(rows)[:, 512:]
    assert torch.equal(back.contiguous().view(torch.int16), patterns.view(torch.int16))


@pytest.mark.parametrize("amax, scale", [(336.0, 1.0), (0.0, 2.0**-13), (1e-30, 2.0**-13), (448.0, 1.0), (449.0, 2.0)])
def test_pow2_scale_of_known_groups(amax: float, scale: float):
    assert tile_scales(latent_with(amax), "pow2").tolist() == [[scale] * 4]


@pytest.mark.parametrize("exponent", [-13, -12, -1, 0, 1, 7, 60, 118])
def test_pow2_scale_steps_exactly_at_448_times_a_power(exponent: int):
    at = torch.tensor(448.0 * 2.0**exponent)
    above = torch.nextafter(at, torch.tensor(math.inf))
    assert tile_scales(latent_with(float(at)), "pow2")[0, 0] == 2.0**exponent
    assert tile_scales(latent_with(float(above)), "pow2")[0, 0] == 2.0 ** (exponent + 1)


def test_an_unknown_scale_format_is_refused():
    with pytest.raises(InvalidArgument, match=r"scale_format: got 'ue8m0', expected 'pow2' or 'amax'"):
        FP8_DS_MLA.pack(torch.zeros(1, 512), torch.zeros(1, 64), "ue8m0")


def test_packing_saturates_and_keeps_signed_zero():
    latent = latent_with(449.0)
    latent[0, 0], latent[0, 1] = 0.0, -0.0
    row = FP8_DS_MLA.pack(latent, torch.zeros(1, 64))[0]
    assert row[[0, 1]].tolist() == [0, 0x80]
    # an infinity has a finite scale of 2**120 and becomes the greatest value, 0x7e, not NaN
    assert FP8_DS_MLA.pack(latent_with(math.inf), torch.zeros(1, 64))[0, [5, 133]].tolist() == [0x7E, 0xFE]
    # amax scales: the largest value lands on 448 exactly, 0x7e
    assert FP8_DS_MLA.pack(latent, torch.zeros(1, 64), scale_format="amax")[0, [5, 133]].tolist() == [0x7E, 0xFE]


# the indexer's keys


def published_index_scale(amax: float, pow2: bool) -> float:
    """vLLM's indexer_k_quant_and_cache, in float32: max(amax, 1e-4) / 448, and for "ue8m0" exp2(ceil(log2(.)))."""
    scale = torch.tensor(amax).clamp(min=torch.tensor(1e-4)) / torch.tensor(448.0)
    return float(torch.exp2(torch.ceil(torch.log2(scale.double()))) if pow2 else scale)


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("amax", [0.0, 9e-5, 1e-4, 1.1e-4, 1.0, 336.0, 448.0, 448.00003, 449.0, 3e38])
def test_an_index_key_has_vllms_scale(amax: float, scale_format: str):
    key = torch.zeros(1, 128)
    key[0, 7], key[0, 90] = amax / 2, -amax
    row = INDEX_FP8.pack(key, scale_format=scale_format)
    scale = row[:, 128:].contiguous().view(torch.float32).item()
    assert scale == published_index_scale(amax, scale_format == "pow2")
    assert row[0, 90] & 0x7F == torch.tensor(amax / scale).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert amax / scale <= 448 * (1 + 2**-23) and (row[0, 90] & 0x7F) <= 0x7E


def test_index_keys_are_read_back_from_rows_and_from_pages():
    key = torch.randn(6, 128) * 2.0 ** torch.arange(-10, 2, 2)[:, None]
    rows = INDEX_FP8.pack(key)
    back, rope = INDEX_FP8.split(rows, torch.float64)
    assert rope.shape == (6, 0) and ((back - key).abs() <= key.abs() / 16 + back.abs().amax(1, keepdim=True) * 2.0**-17).all()
    odd = torch.zeros(6 * 132 + 1, dtype=torch.uint8)[1:].view(6, 132).copy_(rows)
    assert torch.equal(INDEX_FP8.unpack(odd, torch.float64), back), "rows at any address"
    # blocks of two tokens, 9 rows apart: 2 x 128 codes, then 2 scales
    pages = torch.full((3 * 9 * 132,), 255, dtype=torch.uint8).as_strided((3, 2, 132), (9 * 132, 132, 1))
    codes, scales = INDEX_FP8.parts(pages)
    codes.copy_(rows[:, :128].view(3, 2, 128)), scales.copy_(rows[:, 128:].view(3, 2, 4))
    flat = pages.reshape(3, 264)
    assert torch.equal(flat[:, :256].reshape(6, 128), rows[:, :128])
    assert torch.equal(flat[:, 256:].reshape(6, 4), rows[:, 128:])
    assert CacheRows(pages, INDEX).values(torch.arange(6), torch.float64)[0].equal(back)
    assert [index_query_dtype(each) for each in (INDEX_BF16, INDEX_FP8)] == [torch.bfloat16, torch.float8_e4m3fn]


def test_a_row_of_one_cache_is_no_row_of_the_other():
    latents, keys = torch.empty(2, 64, 656, dtype=torch.uint8), torch.empty(2, 64, 128, dtype=torch.bfloat16)
    assert layout_of(keys, cache=INDEX) is INDEX_BF16
    with pytest.raises(InvalidArgument, match=r"rows of 656, expected .*\(index_bf16\) or .*\(index_fp8\)"):
        layout_of(latents, cache=INDEX)
    with pytest.raises(InvalidArgument, match=r"bfloat16 rows of 128, expected .*\(bf16\)"):
        layout_of(keys)
    with pytest.raises(InvalidArgument, match="cache: got 'keys', expected 'kv' or 'index'"):
        replace(INDEX_BF16, name="other", cache="keys")
    with pytest.raises(InvalidArgument, match="upconverted"):
        replace(INDEX_FP8, name="other", upconverted=BF16_NOPE)


# rows of any cache


def test_unpack_takes_any_strides_and_no_rows():
    rows = FP8_DS_MLA.pack(torch.randn(6, 512), torch.randn(6, 64))
    wide = torch.full((3, 2, 700), 255, dtype=torch.uint8)
    wide[..., :656] = rows.view(3, 2, 656)
    assert torch.equal(FP8_DS_MLA.unpack(wide[..., :656]).view(6, 576), FP8_DS_MLA.unpack(rows))
    assert FP8_DS_MLA.unpack(rows[:0]).shape == (0, 576)
    assert FP8_DS_MLA.pack(torch.zeros(0, 512), torch.zeros(0, 64)).shape == (0, 656)


@pytest.mark.parametrize(
    "kv, words",
    [
        (torch.empty(2, 64, 576, dtype=torch.uint8), "rows of 576.*do not slice"),
        (torch.empty(2, 64, 656, dtype=torch.bfloat16), "bfloat16 rows of 656"),
        (torch.empty(2, 64, 656, dtype=torch.float8_e4m3fn), r"kv_cache\.view\(torch\.uint8\)"),
        (torch.empty(2, 64, 576, dtype=torch.float16), "float16 rows of 576"),
        (torch.empty((), dtype=torch.uint8), "rows of 0"),
    ],
)
def test_any_other_row_is_refused(kv: torch.Tensor, words: str):
    with pytest.raises(InvalidArgument, match=words) as caught:
        layout_of(kv, where="sparse_decode")
    assert str(caught.value).startswith("sparse_decode: kv_cache: got ")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": None},
        {"dtype": "uint8"},
        {"row_width": "x"},
        {"row_width": True},
        {"upconverted": "bf16"},
        {"value_width": 1.5},
        {"rope_offset": None},
        {"alignment": "4"},
        {"scale_offset": "0"},
        {"scale_formats": ["pow2"]},
        {"scale_formats": "pow2"},
        {"name": 5},
        {"cache": ["kv"]},
        {"contents": None},
    ],
    ids=str,
)
def test_a_field_of_another_type_is_refused_by_name(changes: dict[str, object]):
    fields = {field.name: getattr(FP8_DS_MLA, field.name) for field in dataclasses.fields(FP8_DS_MLA)}
    (name,) = changes
    with pytest.raises(InvalidArgument, match=f"{name}: got "):
        CacheLayout(**fields | changes)
