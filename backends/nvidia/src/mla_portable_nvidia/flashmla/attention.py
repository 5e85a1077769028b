# SPDX-License-Identifier: Apache-2.0
"""The attention primitives as implementations: checked, calibrated and bound on the provider that this machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from mla_portable.contracts import DeviceFacts, Implementation, MLAPortableError, Primitive, Reason, Request
from mla_portable.layouts import BF16_NOPE, FP8_DS_MLA, FP8_V4, CacheLayout
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparseDecode, SparsePrefill
from mla_portable_common.flash_mla.head_padding import kernel_heads
from mla_portable_common.flash_mla.sparse_decode import TOPK_MULTIPLE, FlashMLADecode
from mla_portable_common.flash_mla.sparse_prefill import NATIVE_HEADS, FlashMLAPrefill
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES
from mla_portable_common.libraries import triton_missing
from mla_portable_nvidia.flashmla.discovery import Found, find_kernel
from mla_portable_nvidia.flashmla.support import attention_support, nope_support, truncation_allowed, v4_support

_NAMES: Final = {"sm90": "nvidia.flashmla", "sm100": "nvidia.flashmla_sm100"}
_NAME_V4: Final = "nvidia.flashmla_v4"
NOPE_NAME: Final = "nvidia.flashmla_nope"
"""Rows without a rotary part, for which not every provider has a build."""
_PREFERENCE: Final = 10.0
_PREFERENCE_NOPE: Final = 9.4
"""Of prefill, in front of FlashAttention 3: by the times of the same kernel as a decode (`flat_decode`)."""


def _kernel(request: Request) -> Found:
    found = find_kernel(request.primitive, request.device, layout=read_layout(request))
    if found.provider is None:
        why = "; ".join(map(str, found.reasons)) or "no provider was found"
        raise MLAPortableError(f"{request.primitive}: nothing brings FlashMLA here: {why}")
    return found


def read_layout(request: Request) -> CacheLayout:
    """By what `find_kernel` finds the provider for a request: of calls with a rotary part it is one."""
    return next((each for each in (FP8_V4, BF16_NOPE) if each.name == request.kv_layout), FP8_DS_MLA)


def bind_sparse_decode(request: Request) -> SparseDecode:
    """sparse_decode on the provider of this device. Raises: MLAPortableError where there is none."""
    from mla_portable_nvidia.passes.boundary import Boundary

    found, device = _kernel(request), request.device
    return FlashMLADecode(
        found.kernel,
        Boundary(),
        lse_base_2=found.traits.lse_base_2,
        takes_plan=found.traits.takes_plan,
        arch=device.arch,
        num_sms=device.num_sms,
        layout=read_layout(request),
        sanitises=not (request.clean_indices and _fits(request.topk) and _fits(request.extra_topk or 0)),
        finishes=request.lse or not _comes_finished(found, request),
    )


def _fits(topk: int | None) -> bool:
    """The kernel takes lists of this width."""
    return topk is not None and topk % TOPK_MULTIPLE == 0


def _comes_finished(found: Found, request: Request) -> bool:
    """The provider's own `out` is what `request` asks for: zeros in empty rows, the sink applied."""
    if request.num_heads is None:
        return False
    if request.attn_sink:  # the kernel has none for padded heads
        return request.num_heads in found.traits.zeroes_with_sink
    return kernel_heads(request.num_heads) in found.traits.zeroes_empty


def bind_sparse_prefill(request: Request) -> SparsePrefill:
    """sparse_prefill on the provider of this device. Raises: MLAPortableError where there is none."""
    from mla_portable_nvidia.passes.boundary import Boundary

    found, device = _kernel(request), request.device
    return FlashMLAPrefill(
        found.kernel,
        Boundary(),
        lse_base_2=found.traits.lse_base_2,
        heads=found.traits.heads,
        native_heads=NATIVE_HEADS.get(device.arch, ()),
        sanitises=not request.clean_indices,
        clamps=not (request.clean_indices or request.clean_lengths),
        finishes=request.lse or not _comes_finished(found, request),
    )


def check_kernel(primitive: Primitive, device: DeviceFacts, layout: CacheLayout = FP8_DS_MLA) -> tuple[Reason, ...]:
    """Every provider's reason why it cannot serve; where one can, what its passes lack. layout: that decode reads."""
    found = find_kernel(primitive, device, layout=layout)
    if found.provider is None:
        return found.reasons
    return triton_missing()


def attention_implementations(
    *, device_types: tuple[str, ...] = ("cuda",), environ: Mapping[str, str] | None = None
) -> Iterator[Implementation]:
    """sparse_decode and sparse_prefill, each for SM90 and for SM100; sparse_prefill on `bf16_nope` for both; sparse_decode on
    `fp8_v4` for SM90.

    Args:
        device_types: ("cuda",) but for tests that run stand-ins of the kernels on a CPU.
        environ: instead of os.environ; read for TRUNCATION_VARIABLE alone.
    """
    allow = truncation_allowed(os.environ if environ is None else environ)
    for arch, name in _NAMES.items():
        yield Implementation(
            name,
            SPARSE_DECODE,
            attention_support(SPARSE_DECODE, arch, device_types=device_types, allow_truncation=allow),
            bind_sparse_decode,
            check=partial(check_kernel, SPARSE_DECODE),
            preference=_PREFERENCE,
            schedule_kind=FLASHMLA_TILES,
        )
        yield Implementation(
            name,
            SPARSE_PREFILL,
            attention_support(SPARSE_PREFILL, arch, device_types=device_types),
            bind_sparse_prefill,
            check=partial(check_kernel, SPARSE_PREFILL),
            preference=_PREFERENCE,
        )
    yield Implementation(
        NOPE_NAME,
        SPARSE_PREFILL,
        nope_support(device_types=device_types),
        bind_sparse_prefill,
        check=partial(check_kernel, SPARSE_PREFILL, layout=BF16_NOPE),
        preference=_PREFERENCE_NOPE,
    )
    yield Implementation(
        _NAME_V4,
        SPARSE_DECODE,
        v4_support(device_types=device_types),
        bind_sparse_decode,
        check=partial(check_kernel, SPARSE_DECODE, layout=FP8_V4),
        preference=_PREFERENCE,
        schedule_kind=FLASHMLA_TILES,
    )
