# SPDX-License-Identifier: Apache-2.0
"""The data-movement kernels of the Triton plugin in what conformance does not see: codes, tiles, launches, refusals."""

from __future__ import annotations

import oracle
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_machine import device, facts, memory_is_poisoned

from mla_portable.contracts import DeviceFacts, InvalidArgument, Primitive, Request
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT, QUANTIZE_PER_TENSOR
from mla_portable_triton import bind_data
from mla_portable_triton.kernels import convert_indices as convert_indices_kernel
from mla_portable_triton.kernels import gather_upconvert as gather_upconvert_kernel
from mla_portable_triton.kernels import quantize_per_tensor as quantize_kernel
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.e4m3_decode import e4m3_decode, e4m3_to_half
from mla_portable_triton.kernels.e4m3_encode import e4m3_encode, e5m2_encode, encodes_natively
from mla_portable_triton.support import interpreter_is_on

__all__ = ["device", "facts", "memory_is_poisoned"]  # fixtures

ROW_WIDTH = {torch.uint8: 656, torch.bfloat16: 576}
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Shape, type and every byte agree."""
    got, want = got.detach().cpu().contiguous(), want.detach().cpu().contiguous()
    same_kind = got.shape == want.shape and got.dtype == want.dtype
    return same_kind and torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


def strided_cache(blocks: int, block_size: int, dtype: torch.dtype, *, gap: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A cache whose blocks lie `gap` elements apart, 0xFF everywhere, and the memory that it is a view of."""
    width = ROW_WIDTH[dtype]
    block_stride = block_size * width + gap
    memory = torch.full((blocks * block_stride * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device).view(dtype)
    return memory.as_strided((blocks, block_size, width), (block_stride, width, 1)), memory


def latents(num_tokens: int, generator: torch.Generator) -> Tensor:
    """[T, 512] float32: groups of very different size, zeros, ties and the border between two powers of two among them."""
    x = torch.randn(num_tokens, 4, 128, generator=generator)
    x *= 2.0 ** torch.randint(-20, 8, (num_tokens, 4, 1), generator=generator)
    x[0, 0] = 0.0
    x[0, 1] = torch.arange(128) / 64.0  # many exact ties in e4m3
    x[0, 2] = -448.0
    x[0, 3] = torch.tensor([1e-40, -1e-30, 2.0**-133, 3e-5]).repeat(32)
    if num_tokens > 3:
        x[3] = torch.rand(4, 128, generator=generator)
        x[3, :, 5] = torch.tensor([1.75, 1.7578125, 1.7421875, 1.7509765625])  # amax at, above and below 1.75 * 2**e
        # amax / 448 is a / 64, so these are ties that only a true division finds
        tie = (torch.arange(17, 33, 2) / 16.0)[:, None] * 2.0 ** torch.arange(-6, 8)  # [8, 14]
        a = torch.tensor([3.0, 5.0, 11.0, 13.0])[:, None]
        x[2, :, :112], x[2, :, 112:] = a / 64.0 * tie.flatten(), -7.0 * a
    return x.flatten(1)


# e4m3 and bfloat16 helpers


@triton.jit
def _encode(out_ptr, x_ptr, num_elements, E5M2: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < num_elements, other=0.0)
    if E5M2:
        code = e5m2_encode(x)
    else:
        code = e4m3_encode(x, NATIVE)
    tl.store(out_ptr + offset, code, mask=offset < num_elements)


@triton.jit
def _decode(out_ptr, half_ptr, byte_ptr, NATIVE: tl.constexpr):
    offset = tl.arange(0, 256)
    tl.store(out_ptr + offset, e4m3_decode(tl.load(byte_ptr + offset), NATIVE))
    tl.store(half_ptr + offset, e4m3_to_half(tl.load(byte_ptr + offset), NATIVE))


def encode(x: Tensor, dtype: torch.dtype, *, native: bool = False) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    e5m2 = dtype == torch.float8_e5m2
    _encode[(triton.cdiv(x.numel(), 16384),)](out, x, x.numel(), E5M2=e5m2, NATIVE=native, BLOCK=16384)
    return out.cpu()


def every_bfloat16() -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def rounding_borders(dtype: torch.dtype) -> Tensor:
    """Every code of a float8 type, the middle between neighbours, and the float32 next to each on both sides."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    exact = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    bits = exact.view(torch.int32)
    return torch.cat([exact, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("values", ["every_bfloat16", "rounding_borders", "random_bits"])
def test_fp8_encoding_is_torchs_after_a_clamp(
    values: str, dtype: torch.dtype, device: torch.device, facts: DeviceFacts, generator: torch.Generator
) -> None:
    if values == "every_bfloat16":
        x = every_bfloat16()
    elif values == "rounding_borders":
        x = rounding_borders(dtype)
    else:
        x = torch.randint(INT32_MIN, INT32_MAX, (2**16,), generator=generator, dtype=torch.int32).view(torch.float32)
    limit = torch.finfo(dtype).max
    want = x.clamp(-limit, limit).to(dtype).view(torch.uint8)
    got = encode(x.to(device), dtype)
    number = ~x.isnan()
    assert number.sum() > 700
    assert torch.equal(got[number], want[number])
    assert got[~number].view(dtype).float().isnan().all()
    if dtype == torch.float8_e4m3fn and encodes_natively(facts.arch, facts.has_fp8_conversion):
        assert torch.equal(encode(x.to(device), dtype, native=True), got), "NaN and its sign included"


def test_the_conversion_of_ptx_is_taken_where_there_is_one() -> None:
    assert encodes_natively("sm90", True) and encodes_natively("sm120", True) and not encodes_natively("sm80", False)
    assert not encodes_natively("sm89", True), "Triton goes through float16 there"
    assert not encodes_natively("gfx950", True), "it does not saturate"


@pytest.mark.parametrize("native", [False, True], ids=["by_bits", "native"])
def test_every_e4m3_byte_decodes_as_torch_does(native: bool, device: torch.device, facts: DeviceFacts) -> None:
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    out, half = torch.empty(256, dtype=torch.bfloat16, device=device), torch.empty(256, dtype=torch.float16, device=device)
    if native and not interpreter_is_on() and not facts.has_fp8_conversion:
        with pytest.raises(triton.CompilationError):  # the fact is right: this target has no conversion
            _decode[(1,)](out, half, byte, NATIVE=True)
        return
    _decode[(1,)](out, half, byte, NATIVE=native)
    want = byte.cpu().view(torch.float8_e4m3fn).to(torch.bfloat16)
    finite = want.isfinite()
    assert finite.sum() == 254
    assert same_bits(out.cpu()[finite], want[finite])
    assert same_bits(half.cpu()[finite], want[finite].half() * (1 if native else 2.0**-8))
    if not (native and interpreter_is_on()):  # the interpreter's own conversion reads the NaN codes as 480
        assert out.cpu()[~finite].isnan().all() and half.cpu()[~finite].isnan().all()


# cache_write


def bound(primitive: Primitive, facts: DeviceFacts):
    return getattr(bind_data, f"bind_{primitive}")(Request(primitive, facts))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter divides with numpy
@pytest.mark.parametrize("scale_format", ["pow2", "amax"])
def test_cache_write_keeps_nan_and_infinity_to_their_group(
    scale_format: str, device: torch.device, facts: DeviceFacts, generator: torch.Generator
) -> None:
    kv_c = torch.randn(2, 512, generator=generator).bfloat16()
    kv_c[0, 130], kv_c[1, 260], kv_c[1, 400] = float("nan"), float("inf"), float("-inf")
    k_pe = torch.full((2, 64), float("nan"), dtype=torch.bfloat16)
    cache, _ = strided_cache(1, 2, torch.uint8, gap=0, device=device)
    slots = torch.tensor([1, 0], device=device)
    bound(CACHE_WRITE, facts)(kv_c.to(device), k_pe.to(device), cache, slots, scale_format=scale_format)
    got, want = cache[0].cpu().flip(0), FP8_DS_MLA.pack(kv_c, k_pe, scale_format=scale_format)

    scales, wanted_scales = (rows[:, 512:528].contiguous().view(torch.float32) for rows in (got, want))
    assert torch.equal(scales.nan_to_num(nan=-1.0), wanted_scales.nan_to_num(nan=-1.0))
    codes, wanted_codes = (rows[:, :512].contiguous().view(torch.float8_e4m3fn).float() for rows in (got, want))
    assert torch.equal(codes.nan_to_num(nan=-1e9), wanted_codes.nan_to_num(nan=-1e9))
    assert codes[0, 128:256].isnan().any()
    assert not codes[0, :128].isnan().any()
    assert got[:, 528:].contiguous().view(torch.bfloat16).isnan().all()


# convert_indices


def check_convert(
    facts: DeviceFacts, device: torch.device, arguments: tuple[Tensor, Tensor, Tensor], **options: object
) -> tuple[Tensor, Tensor]:
    """Run, compare both results with the oracle, return the expected ones."""
    here = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
    got = bound(CONVERT_INDICES, facts)(*(x.to(device) for x in arguments), **here)
    want = oracle.convert_indices(*arguments, **options)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])
    return want


def test_convert_indices_computes_slots_in_64_bits(device: torch.device, facts: DeviceFacts) -> None:
    # 67108865 * 64 and 2**30 * 64 wrap around to 64 and 0 in 32 bits; 33554431 * 64 + 63 is the last int32
    table = torch.tensor([[67108865, 2**30, 33554431, INT32_MIN, -1, 33554432]], dtype=torch.int32)
    pos = torch.tensor([[0, 64, 128, 191, 192, 256, 320]], dtype=torch.int32)
    req_id = torch.zeros(1, dtype=torch.int32)
    want = check_convert(facts, device, (pos, req_id, table), block_size=64)
    assert want[0].tolist() == [[-1, -1, 2147483584, INT32_MAX, -1, -1, -1]]
    beyond = check_convert(facts, device, (pos, req_id, table), block_size=64, num_slots=2**40)
    assert torch.equal(beyond[0], want[0])
    below = check_convert(facts, device, (pos, req_id, table), block_size=64, num_slots=INT32_MAX)
    assert below[0].tolist() == [[-1, -1, 2147483584, -1, -1, -1, -1]]
    nothing = check_convert(facts, device, (pos, req_id, table), block_size=64, num_slots=0)
    assert nothing[1].tolist() == [0]


def test_convert_indices_compacts_in_order_across_tiles(device: torch.device) -> None:
    pos = torch.full((2, 100), -1, dtype=torch.int32)
    pos[0, 3], pos[0, 17], pos[0, 40], pos[0, 99] = 9, 2, 9, 0
    pos[1] = torch.arange(100, dtype=torch.int32).flip(0)
    out = torch.empty(2, 100, dtype=torch.int32, device=device), torch.empty(2, dtype=torch.int32, device=device)
    convert_indices_kernel.launch(
        *out,
        pos.to(device),
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.tensor([[7]], dtype=torch.int32, device=device),
        None,
        None,
        None,
        block_size=128,
        last_slot=INT32_MAX,
        compact=True,
        config=Config(tile=16, num_warps=1),
    )
    assert out[0][0].tolist() == [905, 898, 905, 896] + [-1] * 96
    assert out[0][1].tolist() == list(range(995, 895, -1))
    assert out[1].tolist() == [4, 100]


# gather_upconvert


def filled_cache(
    blocks: int, block_size: int, layout: str, used: Tensor, *, device: torch.device, generator: torch.Generator
) -> Tensor:
    """A cache with gaps between blocks where only the slots `used` hold tokens; all else is NaN."""
    dtype = torch.bfloat16 if layout == "bf16" else torch.uint8
    cache, _ = strided_cache(blocks, block_size, dtype, gap=148, device=device)
    kv_c = latents(used.numel(), generator).bfloat16()
    k_pe = torch.randn(used.numel(), 64, generator=generator).bfloat16()
    rows = torch.cat([kv_c, k_pe], 1) if layout == "bf16" else FP8_DS_MLA.pack(kv_c, k_pe, scale_format=layout)
    cache[(used // block_size).to(device), (used % block_size).to(device)] = rows.to(device)
    return cache


def test_gather_upconvert_takes_requests_in_any_order_and_number(
    device: torch.device, facts: DeviceFacts, generator: torch.Generator
) -> None:
    num_requests = gather_upconvert_kernel.REQUEST_TILE + 9
    lens = torch.randint(0, 3, (num_requests,), generator=generator, dtype=torch.int32)
    starts = (lens.cumsum(0) - lens).int()
    order = torch.randperm(num_requests, generator=generator)
    lens, starts = lens[order], starts[order]
    lens[3], starts[4], lens[4] = -4, -1, 2
    cache = filled_cache(5, 2, "pow2", torch.arange(10), device=device, generator=generator)
    table = torch.randint(0, 5, (num_requests, 1), generator=generator, dtype=torch.int32)
    num_rows = int(lens.clamp(min=0).sum()) - 3  # the workspace ends before the last requests do
    out = torch.full((num_rows, 576), -3.0, dtype=torch.bfloat16, device=device)
    want = oracle.gather_upconvert(cache, table, lens, starts, out=out)
    bound(GATHER_UPCONVERT, facts)(cache, table.to(device), lens.to(device), starts.to(device), out=out)
    assert same_bits(out, want)


# quantize_per_tensor


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter divides with numpy
def test_quantize_per_tensor_of_nan_infinity_and_nothing(device: torch.device, facts: DeviceFacts) -> None:
    quantize = bound(QUANTIZE_PER_TENSOR, facts)
    codes, scale = quantize(torch.tensor([1.0, float("nan"), 2.0], device=device))
    assert scale.isnan()
    assert codes.float().isnan().all()
    codes, scale = quantize(torch.tensor([1.0, float("-inf"), 2.0], device=device))
    assert scale == float("inf")
    assert codes.float().nan_to_num(nan=-9.0).tolist() == [0.0, -9.0, 0.0]
    codes, scale = quantize(torch.empty(0, 7, device=device))
    assert codes.shape == (0, 7)
    assert float(scale) == float(torch.tensor(1e-10) / torch.tensor(448.0))


def test_quantize_per_tensor_reduces_more_parts_than_one(device: torch.device, generator: torch.Generator) -> None:
    # 40 tiles for 8 programs: each walks over several, and the largest value is in the last one
    x = torch.randn(40 * 32 - 5, generator=generator).to(device)
    x[-1] = 1000.0
    codes, scale = torch.empty(x.shape, dtype=torch.uint8, device=device), torch.empty((), device=device)
    parts = torch.empty(8, dtype=torch.int32, device=device)
    config = Config(tile=32, num_warps=1)
    quantize_kernel.launch(codes, scale, parts, x, e5m2=False, bf16_native=not interpreter_is_on(), config=config)
    want, wanted_scale = oracle.quantize_per_tensor(x, torch.float8_e4m3fn)
    assert same_bits(codes.view(torch.float8_e4m3fn), want)
    assert float(scale) == float(wanted_scale)
    assert quantize_kernel.num_parts(10**9, config) == quantize_kernel.MAX_PARTS


def test_quantize_per_tensor_refuses_other_types(device: torch.device, facts: DeviceFacts) -> None:
    with pytest.raises(InvalidArgument, match=r"float8_e4m3fnuz, expected torch\.float8_e4m3fn or torch\.float8_e5m2"):
        bound(QUANTIZE_PER_TENSOR, facts)(torch.ones(3, device=device), torch.float8_e4m3fnuz)


# all of them


def test_no_tokens_no_launch(device: torch.device, facts: DeviceFacts) -> None:
    def none(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    cache = torch.zeros(2, 4, 656, dtype=torch.uint8, device=device)
    half = {"dtype": torch.bfloat16}
    bound(CACHE_WRITE, facts)(none(0, 512, **half), none(0, 64, **half), cache, none(0, dtype=torch.int64))
    assert not cache.any()
    indices, counts = bound(CONVERT_INDICES, facts)(none(0, 64), none(0), none(2, 3), block_size=4)
    assert indices.shape == (0, 64)
    assert counts.shape == (0,)
    gather = bound(GATHER_UPCONVERT, facts)
    out = torch.ones(3, 576, dtype=torch.bfloat16, device=device)
    assert (gather(cache, none(0, 3), none(0), none(0), out=out) == 1).all()
    assert gather(cache, none(2, 3), none(2), none(2), out=out[:0]).shape == (0, 576)


def test_an_empty_table_makes_everything_absent(device: torch.device, facts: DeviceFacts) -> None:
    pos = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    for shape in ((1, 0), (0, 4)):
        table = torch.empty(shape, dtype=torch.int32, device=device)
        indices, counts = bound(CONVERT_INDICES, facts)(pos, zero, table, block_size=4)
        assert indices.tolist() == [[-1, -1]]
        assert counts.tolist() == [0]
    cache = torch.full((0, 4, 576), 1.0, dtype=torch.bfloat16, device=device)
    out = torch.ones(3, 576, dtype=torch.bfloat16, device=device)
    bound(GATHER_UPCONVERT, facts)(cache, zero[:, None], zero + 2, zero, out=out)
    assert out[:, 0].tolist() == [0.0, 0.0, 1.0]


def test_a_configuration_is_chosen_by_architecture() -> None:
    configs = {"default": Config(tile=8, num_warps=4), "sm90": Config(tile=16, num_warps=8)}
    assert config_for(configs, "sm90") is configs["sm90"]
    assert config_for(configs, "gfx942") is configs["default"]
