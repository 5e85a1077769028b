# SPDX-License-Identifier: Apache-2.0
"""`bf16_nope` by FlashMLA's build for rows of 512 and by FlashAttention 3: the suite on strict stand-ins, what is refused."""

from __future__ import annotations

from importlib import import_module

import fa3_standins
import pytest
import torch
from flashmla_standins import installed
from machines import H200
from simulated_gpu import FACTS, conforms, registry
from torch_passes import TorchPageLists

from mla_portable.contracts import Request
from mla_portable.judge.problems.attention import attend
from mla_portable.layouts import BF16_NOPE
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.calibration import calibrate_prefill
from mla_portable_common.flash_mla.head_padding import KERNEL_HEADS
from mla_portable_common.flash_mla.prefill_conventions import prefill_of_module
from mla_portable_common.flash_mla.torch_passes import TorchBoundary
from mla_portable_common.flat_rows import FlatPrefill
from mla_portable_common.libraries import NotThisConvention
from mla_portable_nvidia.fa3.operators import IDLE_QUERY_BYTES, find_fa3
from mla_portable_nvidia.fa3.sparse_attention import FlashAttention3, fa3_implementations
from mla_portable_nvidia.flashmla.attention import NOPE_NAME, attention_implementations
from mla_portable_nvidia.flashmla.flat_decode import flat_implementations

ATTENTION = (SPARSE_DECODE, SPARSE_PREFILL)
FA3 = "nvidia.flash_attention3"


def flashmla():
    every = [*attention_implementations(device_types=("cpu",), environ={}), *flat_implementations(device_types=("cpu",))]
    return [each for each in every if each.name == NOPE_NAME]


@pytest.mark.parametrize("generation", ["flash_mla 2026", "vllm 0.26", "sgl_kernel 0.4.5", "sgl_flash_mla"])
def test_flashmla_conforms(generation: str):
    with installed(generation) as library:
        words = conforms(registry(offered=flashmla()), NOPE_NAME, "smoke", *ATTENTION)
        assert "bf16_nope" in words and library.prefill_widths == {512} and not library.calls


def test_flashmla_passes_the_quick_level():
    with installed("vllm 0.33"):
        words = conforms(registry(offered=flashmla()), NOPE_NAME, "quick", *ATTENTION)
    assert {"lengths", "strided", "k100", "h63", "h127"} <= words


def test_flashmla_of_2025_serves_rows_with_a_rotary_part_alone():
    """It refuses no width, but has a build for 576 alone, which would read on into the next row."""
    with installed("flash_mla 2025") as library:
        (prefill,) = (each for each in flashmla() if each.primitive is SPARSE_PREFILL)
        assert prefill.check is not None
        assert any("provider flash_mla not usable" in str(reason) for reason in prefill.check(FACTS["sm90"]))
        kernel = prefill_of_module(import_module("flash_mla"))
        with pytest.raises(NotThisConvention, match="lse nan to nan"):
            calibrate_prefill(kernel, torch.device("cpu"), KERNEL_HEADS, BF16_NOPE)
        every = attention_implementations(device_types=("cpu",), environ={})
        (rope,) = (each for each in every if each.name == "nvidia.flashmla" and each.primitive is SPARSE_PREFILL)
        assert rope.check is not None and not any("provider" in str(each) for each in rope.check(FACTS["sm90"]))
        assert library.prefill_widths == {512, 576}


def test_flashmla_declares_both_architectures_and_no_other_layout():
    prefill, decode = (next(x for x in flashmla() if x.primitive is primitive) for primitive in (SPARSE_PREFILL, SPARSE_DECODE))
    request = Request(SPARSE_PREFILL, FACTS["sm90"], kv_layout="bf16_nope", num_heads=64, topk=100, lse=True, attn_sink=True)
    assert prefill.support.reasons(request) == () and prefill.support.reasons(request.but(device=FACTS["sm100"])) == ()
    assert prefill.support.reasons(request.but(kv_layout="bf16"))
    decoding = request.but(primitive=SPARSE_DECODE, block_size=64, query_len=1)
    assert decode.support.reasons(decoding) == () and decode.support.reasons(decoding.but(device=FACTS["sm100"]))


@pytest.mark.parametrize("package", fa3_standins.SCHEMAS)
def test_flash_attention_3_attends_without_a_rotary_part(package: str):
    """By rows of 576 too: one implementation has both layouts."""
    with fa3_standins.installed(package):
        words = conforms(registry(offered=fa3_implementations(device_types=("cpu",))), FA3, "smoke", *ATTENTION)
    assert {"bf16", "bf16_nope"} <= words


def test_what_flash_attention_3_is_given_as_keys_does_not_count():
    """The operator demands 64 columns of keys beside the latent: the row's own, against queries of zeros, a bounded number."""
    g = torch.Generator().manual_seed(0)
    tokens, heads, topk = 7, 16, 64
    q, kv = torch.randn(tokens, heads, 512, generator=g).bfloat16(), torch.randn(200, 512, generator=g).bfloat16()
    indices = torch.stack([torch.randperm(200, generator=g)[:topk] for _ in range(tokens)]).to(torch.int32)
    lengths = torch.tensor([64, 0, 3, 64, 10, 64, 1], dtype=torch.int32)
    want, want_lse = attend(q, kv, indices, softmax_scale=0.1, lengths=lengths)
    for lists, each in ((True, 4 * topk + IDLE_QUERY_BYTES * heads), (False, IDLE_QUERY_BYTES * heads)):
        with fa3_standins.installed() as library:
            operator, _ = find_fa3()
            assert operator is not None
            rows = FlashAttention3(
                operator, TorchBoundary(), TorchPageLists(), num_sms=132, lists=lists, max_scratch_bytes=3 * each
            )
            out, lse = FlatPrefill(rows)(q, kv, indices, softmax_scale=0.1, lengths=lengths)
            assert [count for count, *_ in library.calls] == [3, 3, 1]
        torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)


def test_few_heads_stay_with_the_kernels_that_compute_no_padding():
    decode = next(each for each in fa3_implementations() if each.primitive is SPARSE_DECODE)
    request = Request(SPARSE_DECODE, H200, kv_layout="bf16_nope", num_heads=16, topk=2048, block_size=64, query_len=1)
    assert decode.support.reasons(request) == () and decode.preference > 8.0
