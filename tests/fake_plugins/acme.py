# SPDX-License-Identifier: Apache-2.0
"""A vendor with one fast library: FP8 decode for 64 or 128 heads on two architectures, bf16 prefill on the same."""

from __future__ import annotations

from fake_plugins import never_runs
from mla_portable.contracts import Implementation, Registrar, Support, hookimpl
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES

FUSED = Support(
    source="Acme's manual, page 3",
    vendors=("nvidia",),
    archs=("sm90", "sm100"),
    kv_layouts=("fp8_ds_mla",),
    num_heads=(64, 128),
    topk_multiple=64,
    block_sizes=(64,),
    attn_sink=False,
)
PREFILL = Support(
    source="Acme's manual, page 4", vendors=("nvidia",), archs=("sm90", "sm100"), kv_layouts=("bf16",), padded_heads=(64, 128)
)


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    registrar.add(Implementation("acme.fused", SPARSE_DECODE, FUSED, never_runs, preference=10, schedule_kind=FLASHMLA_TILES))
    registrar.add(Implementation("acme.fused", SPARSE_PREFILL, PREFILL, never_runs, preference=10))
