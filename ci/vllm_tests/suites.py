# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's own test files are of parts that mla_portable replaces, and what of ours stands in place of what in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final


@dataclass(frozen=True)
class Suite:
    """A file of vLLM's tests.

    Attributes:
        file: below vLLM's `tests`. places: functions of in_place.py, called before the file is imported.
        tests: patterns of the tests that are run; the others of the file do not call what is replaced.
        left_out: patterns of tests among them that cannot be run against ours -> why.
        on_cpu: patterns of tests that cannot be run on a CPU -> why.
        model_names: models whose configuration the tests ask for by name.
    """

    file: str
    places: tuple[str, ...]
    tests: tuple[str, ...] = ("*",)
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    model_names: tuple[str, ...] = ()
    on_cpu: Mapping[str, str] = field(default_factory=dict[str, str])

    def chooses(self, test: str) -> bool:
        """The test, by its name with its parameters, calls what is replaced."""
        return any(fnmatchcase(test, each) for each in self.tests)

    def against(self, test: str, *, on_cpu: bool) -> str:
        """Why it cannot be run against ours, "" where it can."""
        left_out = {**self.left_out, **(self.on_cpu if on_cpu else {})}
        return next((why for each, why in left_out.items() if fnmatchcase(test, each)), "")


_OTHER_BACKEND: Final = "it is about FlashInfer's backend"
_BLOCK_32: Final = "stock refuses blocks of 32 tokens for this backend, as ours does"
_V2_LITE: Final = ("deepseek-ai/DeepSeek-V2-Lite-Chat",)

SUITES: Final = {
    "flash_mla": Suite(
        "kernels/attention/test_flashmla_sparse.py",
        ("flash_mla",),
        ("test_sparse_flashmla_*",),
    ),
    "flash_mla_views": Suite(
        "kernels/attention/test_mla_cross_layer_kernel_equivalence.py",
        ("flash_mla", "cache_writers"),
        ("test_flashmla_fp8_sparse_decode_*", "test_indexer_k_quant_and_cache_*", "test_concat_and_cache_mla_*"),
    ),
    "deep_gemm": Suite(
        "kernels/attention/test_deepgemm_attention.py",
        ("deep_gemm",),
        ("test_deepgemm_fp8_*",),
        {"*fp4_mqa_logits*fp4*": "queries in FP4 are not served"},
    ),
    "backend": Suite(
        "v1/attention/test_sparse_mla_backends.py",
        ("backend",),
        ("test_sparse_backend_decode_correctness*",),
        {"*FlashInferTRTLLM*": _OTHER_BACKEND, "*nvfp4_ds_mla*": "NVFP4 rows are not served", "*-32-*": _BLOCK_32},
        _V2_LITE,
    ),
    "convert": Suite(
        "v1/attention/test_sparse_mla_backends.py",
        ("converter",),
        ("test_triton_convert_*",),
        {"test_triton_convert_rejects_*": "it expects the words of vLLM's own assertion"},
    ),
    "drafts": Suite(
        "v1/attention/test_dspark_noncausal_sparse_mla.py",
        ("backend",),
        ("test_dspark_noncausal_*",),
        {"*FlashInferTRTLLM*": _OTHER_BACKEND},
        _V2_LITE,
    ),
    "gather": Suite(
        "kernels/test_cp_gather_fp8.py",
        ("gather",),
        left_out={
            "*with_sequence_starts*": "our gather begins at a request's first token",
            "*uneven_sequences_with_starts*": "our gather begins at a request's first token",
            "*pinned_host_rows*": "rows in host memory (HiSparse) are not served",
        },
    ),
    "gather_v4": Suite(
        "kernels/test_compressor_kv_cache.py",
        ("gather_v4",),
        ("test_dequantize_and_gather_k_cache*", "test_deepseek_v4_attention_quant_cache_roundtrip*"),
        {"*gather_lens_host1*": "our gather begins at a request's first token"},
    ),
    "topk": Suite(
        "kernels/test_top_k_per_row.py",
        ("topk",),
        ("test_top_k_per_row*", "test_workspace_topk*", "test_deepseek_workspace_topk*"),
        {"*gfx950*": "it is about AMD's kernel", "*-8-2048-*": "16,384 rows in loops of Python; 2,048 are checked"},
    ),
    "pools": Suite(
        "kernels/test_kpool_decode_update_batched.py",
        ("pools",),
        on_cpu=dict.fromkeys(
            ("test_batched_matches_reference*", "test_leading_invalid_tail_slot"),
            "interpreted, vLLM's own kernel does not give the reference's bits either",
        ),
    ),
    "selection": Suite("v1/attention/test_indexer_dcp_localize.py", ("topk", "converter"), ("*topk*",)),
}
