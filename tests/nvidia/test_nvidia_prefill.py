# SPDX-License-Identifier: Apache-2.0
"""sparse_prefill on FlashMLA: head counts of each build, widths, lengths, chunks."""

from __future__ import annotations

import pytest
import torch
import torch_reference as reference
from flashmla_standins import installed
from simulated_gpu import FACTS

from mla_portable.primitives import SPARSE_PREFILL
from mla_portable_common.flash_mla.sparse_prefill import FlashMLAPrefill
from mla_portable_common.flash_mla.torch_passes import TorchBoundary
from mla_portable_nvidia.flashmla.discovery import find_kernel
from mla_portable_nvidia.flashmla.support import NATIVE_HEADS

SCALE = 192**-0.5


def problem(tokens: int, heads: int, topk: int):
    g = torch.Generator().manual_seed(tokens * 1000 + heads)
    kv = torch.randn(200, 576, generator=g).bfloat16()
    q = torch.randn(tokens, heads, 576, generator=g).bfloat16()
    return q, kv, torch.randint(-20, 220, (tokens, topk), generator=g, dtype=torch.int32)


def adapter(library, arch: str = "sm90", **options) -> FlashMLAPrefill:
    found = find_kernel(SPARSE_PREFILL, FACTS[arch])
    library.prefill_calls, library.sinks, library.lengths = [], 0, 0
    return FlashMLAPrefill(
        found.kernel, TorchBoundary(), lse_base_2=found.traits.lse_base_2, heads=found.traits.heads, **options
    )


def assert_right(results, args, **options):
    want_out, want_lse = reference.sparse_prefill(*args, softmax_scale=SCALE, **options)
    torch.testing.assert_close(results[0].float(), want_out.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(results[1], want_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("heads", "native", "runs_with"), [(16, (), 64), (16, (16, 32), 16), (24, (16, 32), 64), (65, (), 128), (128, (), 128)]
)
def test_few_heads_are_padded_unless_the_native_path_is_named(heads, native, runs_with):
    with installed("vllm 0.33") as library:
        args = problem(3, heads, 128)
        assert_right(adapter(library, native_heads=native)(*args, softmax_scale=SCALE), args)
        assert library.prefill_calls == [(3, runs_with, 128)]


def test_no_native_path_is_named_before_it_was_measured_to_be_faster():
    assert not any(NATIVE_HEADS.values())


def test_a_build_without_the_native_path_pads_whatever_is_named():
    with installed("vllm 0.26") as library:
        args = problem(3, 16, 128)
        assert_right(adapter(library, native_heads=(16,))(*args, softmax_scale=SCALE), args)
        assert library.prefill_calls == [(3, 64, 128)]


def test_a_build_for_128_heads_alone_gets_128():
    with installed("vllm 0.24", arch="sm100", num_sms=148, prefill_heads=(128,)) as library:
        args = problem(3, 16, 128)
        assert_right(adapter(library, "sm100")(*args, softmax_scale=SCALE), args)
        assert library.prefill_calls == [(3, 128, 128)]


def test_indices_of_a_fitting_width_are_read_in_place():
    with installed("vllm 0.33") as library:
        call, (q, kv, indices) = adapter(library), problem(3, 64, 128)
        seen = []
        prefill = library.prefill
        library.prefill = lambda *args: seen.append(args[2]) or prefill(*args)
        call(q, kv, indices, softmax_scale=SCALE)
        assert [tensor.data_ptr() for tensor in seen] == [indices.data_ptr()]


def test_padded_tokens_come_in_bounded_calls():
    with installed("vllm 0.33") as library:
        args = problem(11, 16, 100)
        lengths = torch.arange(11, dtype=torch.int32) * 10
        sink = torch.linspace(-1, 1, 16)
        call = adapter(library, max_scratch_bytes=4 * (64 * 2 * (576 + 512) + 4 * 128))
        assert_right(
            call(*args, softmax_scale=SCALE, lengths=lengths, attn_sink=sink), args, lengths=lengths, attn_sink=sink
        )  # fmt: skip
        assert [shape[0] for shape in library.prefill_calls] == [4, 4, 3]
