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
from mla_portable_common.flash_mla.binding import Found, decode_on, prefill_on
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES, num_sm_parts
from mla_portable_common.libraries import triton_missing
from mla_portable_nvidia.flashmla.discovery import find_kernel
from mla_portable_nvidia.flashmla.support import NATIVE_HEADS, attention_support, nope_support, truncation_allowed, v4_support

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

    device = request.device
    parts = partial(num_sm_parts, device.arch, num_sms=device.num_sms)
    whole_rows = device.arch != "sm90"
    return decode_on(_kernel(request), request, Boundary(), parts, read_layout(request), whole_rows=whole_rows)


def bind_sparse_prefill(request: Request) -> SparsePrefill:
    """sparse_prefill on the provider of this device. Raises: MLAPortableError where there is none."""
    from mla_portable_nvidia.passes.boundary import Boundary

    native_heads = NATIVE_HEADS.get(request.device.arch, ())
    return prefill_on(_kernel(request), request, Boundary(), native_heads=native_heads)


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
