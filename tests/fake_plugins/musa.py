# SPDX-License-Identifier: Apache-2.0
"""A vendor whose library has FlashMLA's and DeepGEMM's names, as Moore Threads' has: the example of docs/adding-a-vendor.md."""

from mla_portable.contracts import Registrar, Support, hookimpl
from mla_portable_common import Library, deep_gemm, flash_mla

ATTENTION = Library(("mate.flashmla", "flash_mla"), "install MATE 0.2.2 or later")
SCORES = Library(("mate.deep_gemm", "deep_gemm"), "install MATE 0.2.2 or later")
DEVICES = {"device_types": ("musa", "cpu"), "vendors": ("musa", "cpu"), "graph": False}  # "cpu": to try it without the device
DECODE = Support(
    source="MATE 0.2.2, mate/flashmla.py: sparse decode of FP8 rows",
    kv_layouts=("fp8_ds_mla",), padded_heads=(64, 128), cache_alignment=16, attn_sink=False, **DEVICES,
)  # fmt: skip
PREFILL = Support(
    source="vllm-musa, flashmla_sparse.py: 64 heads and K 2048, no lse",
    kv_layouts=("bf16",), padded_heads=(64,), max_topk=2048, cache_alignment=16, lse=False, attn_sink=False, **DEVICES,
)  # fmt: skip
INDEXER = Support(
    source="MATE 0.2.2, mate/deep_gemm.py", kv_layouts=("index_fp8",), num_heads=(32, 64), nan_keys=False, **DEVICES
)


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer attention and the indexer's scores."""
    registrar.add(flash_mla.decode("musa.flash_mla", ATTENTION, DECODE))
    registrar.add(flash_mla.prefill("musa.flash_mla", ATTENTION, PREFILL, topk_multiple=2048, any_order=False))
    for implementation in deep_gemm.scores("musa.deep_gemm", SCORES, INDEXER):
        registrar.add(implementation)
