# SPDX-License-Identifier: Apache-2.0
"""Kernels of an engine's profile by kind: by the names of those that run, and by what launched a product."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

FLASH = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, "
FLASH += "cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<128>, cute::C<{}>, cute::C<{}> >, {}, "
FLASH += "cutlass::bfloat16_t, float, cutlass::arch::Sm90, true, false> > > >(flash::Params)"

NAMES = {
    "attention over latent rows": (
        "void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<1, 64>(DecodingParams)",
        "void sm90::fwd::sparse_attn_fwd_kernel<cute::tuple<>>(SparsePrefillParams)",
        "void flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512>(CombineParams)",
        "get_mla_metadata_kernel(GetDecodingMetadataParams)",
        FLASH.format(64, 64, 512),
        "sparse_decode_fp8",
        "sparse_attention_fp8_kernel",
        "merge_splits",
        "_convert_req_index_to_global_index_kernel",
        "void vllm::ConcatMLAQKernel<c10::BFloat16, 512>(c10::BFloat16*)",
        "convert_indices_kernel",
        "_lse_kernel",
    ),
    "attention over per-head keys": (
        FLASH.format(112, 192, 128),
        "masked_prefill",
        "masked_prefill_kernel",
        "pack_selection_kernel",
        "concat_mla_k_kernel",
        "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int)",
        "void vllm::merge_attn_states_kernel<__nv_bfloat16, unsigned int>(__nv_bfloat16*)",
    ),
    "indexer scores and selection": (
        "void deep_gemm::sm90_fp8_mqa_logits<64u, 128u, false, 4u, 256u>(unsigned int)",
        "void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u, 128u>(unsigned int)",
        "void deep_gemm::smxx_paged_mqa_logits_metadata<32u, 256u, 132u>(unsigned int)",
        "void vllm::topKPerRowPrefill<512, false>(float const*, int const*)",
        "void vllm::persistent::persistent_topk_kernel<4>(PersistentTopKParams)",
        "void vllm::indexer_k_quant_and_cache_kernel<__nv_bfloat16>(__nv_bfloat16 const*)",
        "void vllm::cp_gather_indexer_k_quant_cache_kernel<8>(char const*)",
        "_fused_indexer_q_rope_quant_kernel",
        "indexer_logits_prefill",
        "prefill_kernel",
        "topk_select",
        "_fwht_quant_kernel",
        "_kpool_decode_update_batched_kernel",
        "_expand_pools_and_append_tail_kernel",
    ),
    "linear attention": (
        "chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_inter",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "kda_gate_cumsum_fwd_kernel",
        "_causal_conv1d_update_kernel",
        "merge_16x16_to_64x64_inverse_kernel",
        "_scatter_states_kernel",
        "recompute_w_u_fwd_kernel",
    ),
    "other GEMMs": (
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)",
        "void deep_gemm::sm90_bf16_gemm_impl<0u, 7168u>(int*)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    ),
    "MoE": (
        "fused_moe_kernel",
        "void vllm::moe::count_and_sort_expert_tokens_kernel<int>(int const*)",
        "void vllm::moe::moe_align_block_size_kernel<int>(int const*)",
        "void vllm::moe::grouped_topk_fused_kernel<float, float, int>(float*)",
        "void vllm::moe::topkGatingSigmoid<4, 16>(float const*)",
    ),
    "the rest": (
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, false>(long const*)",
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>(c10::BFloat16*)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >(int)",
        "void vllm::concat_and_cache_ds_mla_kernel<__nv_bfloat16, unsigned char>(__nv_bfloat16 const*)",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "_compute_slot_mapping_kernel",
        "gather_upconvert_kernel",
    ),
    "unknown": ("void somebody::new_kernel<3>(float*)",),
}


def test_kernels_have_their_kinds(kit: Any):
    kinds = kit.kernel_kinds
    found = {name: kinds.kind_of(kinds.Launch(name, "", (), 1.0)) for names in NAMES.values() for name in names}
    assert found == {name: kind for kind, names in NAMES.items() for name in names}
    assert {*NAMES, "absorb and up-projection GEMMs"} == set(kinds.KINDS)


@pytest.mark.parametrize(
    ("operator", "shapes", "kind"),
    [
        ("aten::bmm", ((16, 8192, 128), (16, 128, 512)), "absorb and up-projection GEMMs"),
        ("aten::mm", ((8192, 512), (512, 4096)), "absorb and up-projection GEMMs"),
        ("aten::addmm", ((4096,), (8192, 512), (512, 4096)), "absorb and up-projection GEMMs"),
        ("aten::mm", ((8192, 7168), (7168, 576)), "other GEMMs"),
        ("aten::mm", ((512, 1536), (1536, 3072)), "other GEMMs"),
        ("", (), "other GEMMs"),
    ],
)
def test_products_with_the_weights_of_keys_and_values_are_told_by_their_operator(
    operator: str, shapes: tuple[tuple[int, ...], ...], kind: str, kit: Any
):
    kinds = kit.kernel_kinds
    assert kinds.kind_of(kinds.Launch("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", operator, shapes, 1.0)) == kind
    assert kinds.kind_of(kinds.Launch("sparse_decode_fp8", operator, shapes, 1.0)) == "attention over latent rows"


def on_device(name: str, us: float, *, annotation: bool = False):
    span = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(device_type=DeviceType.CUDA, name=name, time_range=span, is_user_annotation=annotation)


def operator(name: str, shapes: list[list[int]], *kernels: tuple[str, float]):
    launched = [SimpleNamespace(name=each, duration=us) for each, us in kernels]
    return SimpleNamespace(device_type=DeviceType.CPU, name=name, input_shapes=shapes, kernels=launched)


def test_each_kernel_counts_once_at_the_operator_that_launched_it(kit: Any):
    kinds = kit.kernel_kinds
    events = [
        on_device("nvjet_a", 30.0),
        on_device("nvjet_a", 70.0),
        on_device("masked_prefill", 50.0),
        on_device("new_kernel", 4.0),
        on_device("Memset (Device)", 0.01),
        on_device("execute_model", 154.0, annotation=True),
        operator("aten::linear", [[8, 512], [4096, 512]]),
        operator("aten::mm", [[8, 512], [512, 4096], []], ("nvjet_a", 30.0)),
        operator("vllm::unified_mla_attention_with_output", [[8, 16, 192]], ("masked_prefill", 50.0)),
    ]
    found = kinds.launches(events)
    assert sum(launch.us for launch in found) == pytest.approx(154.0, abs=0.02)
    by_kind, unknown = kinds.by_kind(found, layers=2)
    wanted = {"attention over per-head keys": 25.0, "absorb and up-projection GEMMs": 15.0, "other GEMMs": 35.0, "unknown": 2.0}
    assert by_kind == wanted and list(by_kind) == [kind for kind in kinds.KINDS if kind in wanted]
    assert unknown == {"new_kernel": 2.0}


def test_a_real_profile_can_be_read(kit: Any):
    """It has what is read here; on a CPU no kernels."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        torch.ones(2, 512) @ torch.ones(512, 3)
    events = found.events()
    assert any(event.name == "aten::mm" and event.input_shapes[:2] == [[2, 512], [512, 3]] for event in events)
    assert all(event.is_user_annotation is not None and event.time_range.elapsed_us() >= 0 for event in events)
    assert kit.kernel_kinds.launches(events) == []
