# SPDX-License-Identifier: Apache-2.0
"""The primitives between a layer's projections bound to their kernels, as `bind_data` binds those that move data."""

from __future__ import annotations

from torch import Tensor

from mla_portable.contracts import Request
from mla_portable.primitives import NormRopeWrite, RopeQuantizeQueries
from mla_portable_triton.support import interpreter_is_on

_INTERLEAVED = "interleaved"


def bind_norm_rope_write(request: Request) -> NormRopeWrite:
    """norm_rope_write on the layouts that the caches show; graph-safe."""
    from mla_portable_triton.kernels import norm_rope_write as kernel
    from mla_portable_triton.kernels.e4m3_encode import encodes_natively
    from mla_portable_triton.kernels.early_start import lets_next_start

    device, bf16_native = request.device, not interpreter_is_on()
    config, let_next = kernel.config_for(kernel.CONFIGS, device.arch), lets_next_start(device.arch)
    e4m3_native = bf16_native and encodes_natively(device.arch, device.has_fp8_conversion)

    def norm_rope_write(
        q_a: Tensor | None,
        latent: Tensor | None,
        index_key: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor | None,
        *,
        q_norm: Tensor | None,
        kv_norm: Tensor | None,
        index_norm: tuple[Tensor, Tensor] | None = None,
        eps: float,
        index_eps: float | None = None,
        kv_cache: Tensor | None,
        slot_mapping: Tensor | None,
        index_cache: Tensor | None = None,
        rope_style: str = "interleaved",
        index_rope_style: str = "neox",
        index_rope_at: str = "first",
        scale_format: str = "pow2",
        q_out: Tensor | None,
        latent_out: Tensor | None = None,
        k_rope_out: Tensor | None = None,
    ) -> None:
        kernel.launch(
            q_a,
            latent,
            index_key,
            positions,
            cos_sin,
            q_norm=q_norm,
            kv_norm=kv_norm,
            index_norm=index_norm,
            eps=eps,
            index_eps=index_eps,
            kv_cache=kv_cache,
            slot_mapping=slot_mapping,
            index_cache=index_cache,
            interleaved=rope_style == _INTERLEAVED,
            index_interleaved=index_rope_style == _INTERLEAVED,
            index_first=index_rope_at == "first",
            pow2=scale_format == "pow2",
            q_out=q_out,
            latent_out=latent_out,
            k_rope_out=k_rope_out,
            e4m3_native=e4m3_native,
            bf16_native=bf16_native,
            lets_next_start=let_next,
            config=config,
        )

    return norm_rope_write


def bind_rope_quantize_queries(request: Request) -> RopeQuantizeQueries:
    """rope_quantize_queries; graph-safe."""
    from mla_portable_triton.kernels import rope_quantize_queries as kernel
    from mla_portable_triton.kernels.e4m3_encode import encodes_natively
    from mla_portable_triton.kernels.early_start import lets_next_start

    device, bf16_native = request.device, not interpreter_is_on()
    config, let_next = kernel.config_for(kernel.CONFIGS, device.arch), lets_next_start(device.arch)
    e4m3_native = bf16_native and encodes_natively(device.arch, device.has_fp8_conversion)

    def rope_quantize_queries(
        q: Tensor | None,
        index_q: Tensor | None,
        index_weights: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        *,
        q_out: Tensor | None,
        index_q_out: Tensor | None = None,
        index_weights_out: Tensor | None = None,
        index_scale: float = 1.0,
        rope_style: str = "interleaved",
        index_rope_style: str = "neox",
        index_rope_at: str = "first",
    ) -> None:
        kernel.launch(
            q,
            index_q,
            index_weights,
            positions,
            cos_sin,
            q_out=q_out,
            index_q_out=index_q_out,
            index_weights_out=index_weights_out,
            index_scale=index_scale,
            interleaved=rope_style == _INTERLEAVED,
            index_interleaved=index_rope_style == _INTERLEAVED,
            index_first=index_rope_at == "first",
            e4m3_native=e4m3_native,
            bf16_native=bf16_native,
            lets_next_start=let_next,
            config=config,
        )

    return rope_quantize_queries
