# SPDX-License-Identifier: Apache-2.0
"""Portable kernels for every GPU with enough shared memory, and one that decodes FP8 only where the hardware converts it."""

from __future__ import annotations

from fake_plugins import never_runs
from mla_portable.contracts import Implementation, Primitive, Registrar, Support, hookimpl
from mla_portable.primitives import SPARSE_DECODE

LAYOUTS = ("bf16", "fp8_ds_mla")
ANY_GPU = Support(source="a test", kv_layouts=LAYOUTS, max_heads=128, min_shared_memory=49_152)
NATIVE = Support(source="a test", kv_layouts=LAYOUTS, max_heads=128, needs_fp8_conversion=True, min_shared_memory=131_072)


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    registrar.add(Implementation("handy.native", SPARSE_DECODE, NATIVE, never_runs, preference=40))
    for primitive in Primitive.all():
        registrar.add(Implementation("handy.portable", primitive, ANY_GPU, never_runs, preference=50))
