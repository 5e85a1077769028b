# SPDX-License-Identifier: Apache-2.0
"""sparse_decode of a BF16 cache on FlashMLA's prefill kernel: the whole suite on strict stand-ins, and who is chosen when."""

from __future__ import annotations

import pytest
import torch
from flashmla_standins import installed
from machines import H200
from simulated_gpu import FACTS, conforms, registry

from mla_portable.contracts import InvalidArgument, Request
from mla_portable.primitives import SPARSE_DECODE
from mla_portable_common.flat_rows import FlatDecode
from mla_portable_nvidia.flashmla.flat_decode import flat_implementations


def suite(level: str):
    machine = registry(offered=flat_implementations(device_types=("cpu",)))
    return conforms(machine, "nvidia.flashmla_bf16", level, SPARSE_DECODE)


@pytest.mark.parametrize("generation", ["vllm 0.24", "vllm 0.26", "flash_mla 2025", "sgl_kernel 0.4.5"])
def test_every_generation_conforms(generation: str):
    with installed(generation) as library:
        suite("smoke")
        assert library.prefill_calls and not library.calls


def test_the_quick_level_passes():
    with installed("vllm 0.33"):
        assert {"lengths", "strided", "k100", "h63", "h127", "b53"} <= suite("quick")


def test_blocks_that_are_not_whole_rows_apart_are_refused():
    kv_cache = torch.zeros(10_000, dtype=torch.bfloat16).as_strided((2, 4, 576), (4 * 576 + 8, 576, 1))
    decode = FlatDecode(lambda *args, **options: pytest.fail("the kernel was called"))
    with pytest.raises(InvalidArgument, match=r"got strides \(2312, 576, 1\).*whole number of rows"):
        decode(torch.zeros(1, 1, 64, 576).bfloat16(), kv_cache, torch.zeros(1, 1, 128, dtype=torch.int32), softmax_scale=1.0)


def test_it_comes_before_portable_kernels_and_leaves_fp8_to_the_decode_kernel():
    implementation, _ = flat_implementations()  # the other one reads rows without a rotary part
    request = Request(SPARSE_DECODE, H200, kv_layout="bf16", num_heads=64, topk=2048, block_size=64, query_len=1)
    assert implementation.support.reasons(request.but(graph=True, lse=True, attn_sink=True, lengths=True)) == ()
    assert 10 < implementation.preference < 50
    assert implementation.support.reasons(request.but(kv_layout="fp8_ds_mla", scale_format="pow2"))
    assert implementation.support.reasons(request.but(device=FACTS["sm100"]))
