# SPDX-License-Identifier: Apache-2.0
"""Where DeepGEMM is found on NVIDIA's devices, and why it cannot serve."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from mla_portable.contracts import DeviceFacts, Primitive, Reason
from mla_portable_common.deep_gemm.discovery import deepgemm_itself, find_scores, scores_reasons
from mla_portable_common.libraries import Library, triton_missing
from mla_portable_nvidia.machine import device_with

LIBRARY: Final = Library(
    ("deep_gemm", "vllm.third_party.deep_gemm"),  # in the order in which vLLM asks
    "install DeepGEMM of April 2026 or later, or vLLM 0.24 to 0.33, which bring it, and CUDA's nvcc",
    device_with,
)
find_deepgemm = partial(find_scores, LIBRARY, deepgemm_itself)
"""(primitive, facts) -> DeepGEMM as it serves a primitive on a device; see `find_scores`."""


def deepgemm_reasons(primitive: Primitive[Any], facts: DeviceFacts) -> Iterator[Reason]:
    """Why DeepGEMM cannot serve, if it cannot, or what the passes around it lack."""
    yield from scores_reasons(LIBRARY, deepgemm_itself, primitive, facts)
    yield from triton_missing()
