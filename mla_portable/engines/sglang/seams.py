# SPDX-License-Identifier: Apache-2.0
"""The seams of SGLang, functions that are hooked: data that the plugin registers, and that `doctor` compares with the sources.

They are private to SGLang, so their parameters are checked before any hook is registered. A parameter that is not known here
may change what a method computes; then nothing is hooked, and the log and `doctor` say which seam it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BACKEND_MODULE: Final = "sglang.srt.layers.attention.dsa_backend"
BACKEND: Final = f"{BACKEND_MODULE}.DeepseekSparseAttnBackend"
CONTEXT_MODULE: Final = "sglang.srt.model_executor.forward_context"
SELECTORS: Final = "sglang.srt.layers.attention.dsa.utils"
DEEP_GEMM_USERS: Final = (BACKEND_MODULE, "sglang.srt.layers.attention.dsa.dsa_indexer")
"""Modules that call DeepGEMM by its module's name, where there are no selectors (0.5.16)."""
POOLED_INDEXER: Final = "sglang.srt.layers.attention.dsa.dsa_indexer_kpool"
"""The indexer of pools of keys does so too, beside the selectors."""

AROUND: Final = "AROUND"
AFTER: Final = "AFTER"
REPLACED: Final = "REPLACED"
"""Not hooked: `index_codes` puts something in its place where the device needs it."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of SGLang.

    Attributes:
        target: its dotted path. kind: of the hook. needs: parameters that must be there. may_have: others that are known; None
            where the hook passes on whatever there is.
        optional: versions without it are served as well.
    """

    target: str
    kind: str
    needs: Collection[str] = ()
    may_have: Collection[str] | None = ()
    optional: bool = False

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.target.rpartition(".")[2]

    def objection(self, parameters: Collection[str] | None) -> str | None:
        """Why a function with these parameters (None: there is none) cannot be hooked, None where it can."""
        if parameters is None:
            return None if self.optional else f"{self.target} is not there"
        missing = [name for name in self.needs if name not in parameters]
        unknown = [] if self.may_have is None else [n for n in parameters if n not in (*self.needs, *self.may_have)]
        words = [f"has no {', '.join(missing)}" if missing else "", f"has an unknown {', '.join(unknown)}" if unknown else ""]
        return f"{self.target} {' and '.join(filter(None, words))}" if missing or unknown else None


def _method(name: str, kind: str, parameters: str, may_have: str | None = "") -> Seam:
    others = None if may_have is None else tuple(may_have.split())
    return Seam(f"{BACKEND}.{name}", kind, ("self", *parameters.split()), others)


SPARSE: Final = "_forward_flashmla_sparse"
KV: Final = "_forward_flashmla_kv"
FA3: Final = "_forward_fa3"
ATTENTION: Final = (
    _method(SPARSE, AROUND, "q_all kv_cache v_head_dim page_table_1 sm_scale", "topk_length attn_sink"),
    _method(KV, AROUND, "q_all kv_cache v_head_dim sm_scale layer metadata page_table_1"),
    _method(
        FA3,
        AROUND,
        "q_rope kv_cache v_head_dim q_nope page_table cache_seqlens cu_seqlens_q cu_seqlens_k max_seqlen_q sm_scale logit_cap "
        "page_size",
    ),
    _method("_compute_flashmla_metadata", AROUND, "cache_seqlens seq_len_q"),
    _method("__init__", AFTER, "model_runner", None),
    _method("init_forward_metadata", AFTER, "forward_batch", None),
    _method("init_forward_metadata_out_graph", AFTER, "forward_batch", None),
)
"""Methods of the backend object; decode, extend, target verify and draft all call them."""

_POOLED: Final = "sglang.srt.layers.attention.dsa.dsa_backend_kpool.DeepseekSparseAttnBackendKPoolMixin"
POOLS: Final = (
    Seam(f"{_POOLED}._resolve_kpool_tail_backend", AROUND, ("self", "topk_indices", "dsa_impl"), optional=True),
    Seam(f"{_POOLED}._check_kpool_tail_backend", AROUND, ("self", "topk_indices", "dsa_impl", "phase"), optional=True),
)
"""Where SGLang reroutes, or refuses, implementations for an indexer that scores pools of keys."""

LAYER_MODULE: Final = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla"
LAYER: Final = f"{LAYER_MODULE}.DeepseekMLAForwardMixin"
PROMPTS: Final = (
    _method("get_indexer_metadata", AROUND, "layer_id forward_batch"),
    Seam(
        f"{LAYER}.forward_absorb_prepare",
        AROUND,
        ("self", "positions", "hidden_states", "forward_batch", "zero_allocator"),
        ("llama_4_scaling", "prev_topk_indices"),
    ),
    Seam(f"{LAYER}.forward_absorb_core", AROUND, ("self",), None),
)
"""What attends to prompts over keys of each head goes through: the indexer's choice of slots or positions, and the layer."""

_ROWS = ("k_nope", "k_rope", "group_size")
FP8_ROWS: Final = (
    *(
        Seam(f"sglang.kernels.ops.{module}.{name}", AROUND, _ROWS, optional=True)
        for module in ("quantization.dsa_quant_k_cache", "attention.dsa.quant_k_cache")  # from 0.5.23 on; 0.5.16
        for name in ("_quantize_k_cache_fast", "_quantize_k_cache_fast_separate")
    ),
    *(
        Seam(
            f"sglang.kernels.ops.attention.dsa.dequant_k_cache.{name}",
            AROUND,
            ("quant_k_cache", "page_table_1_flattened", "group_size"),
            optional=True,
        )
        for name in ("dequantize_k_cache_paged_dsa", "dequantize_k_cache_paged")
    ),
)
"""Functions that launch the kernels of FP8 rows; whatever writes or gathers them calls one of these."""

INDEXER: Final = tuple(
    Seam(f"{SELECTORS}.{name}", AROUND, optional=True)
    for name in (
        "resolve_num_sms",
        "resolve_paged_mqa_logits_metadata_fn",
        "resolve_fp8_paged_mqa_logits_fn",
        "resolve_fp8_mqa_logits_fn",
    )
)
"""Functions that return one of DeepGEMM's."""

_POOLED_KEYS: Final = "sglang.srt.layers.attention.dsa.kpool_fp8_index"
_KEYS_AND_SCALES: Final = (
    "HEAD_DIM",
    "ROUND_SCALE",
    "buf_fp8_ptr",
    "buf_fp32_ptr",
    "S_OFFSET_NBYTES_IN_PAGE",
    "BUF_NUMEL_PER_PAGE",
)


def _kernel(module: str, name: str, parameters: str, *more: str) -> Seam:
    return Seam(f"{module}.{name}", REPLACED, (*parameters.split(), *more), None, optional=True)


INDEX_KERNELS: Final = (
    *(
        _kernel(f"sglang.kernels.ops.{module}", "_act_quant_kernel", "X_ptr Y_ptr round_scale")
        for module in ("quantization.act_quant_triton", "attention.dsa.triton_kernel")  # from 0.5.23 on; 0.5.16
    ),
    *(
        _kernel(f"sglang.kernels.ops.{module}", "_set_k_and_s_triton_kernel", "buf_fp8_ptr index_k_ptr")
        for module in ("kvcache.dsa_index_k_cache", "attention.dsa.index_buf_accessor")  # likewise
    ),
    _kernel(
        _POOLED_KEYS,
        "_kpool_softmax_rotate_write_cache_kernel",
        "loc_ptr write_mask_ptr compressed_k_ptr compressed_scale_ptr HAS_WRITE_MASK RETURN_COMPRESSED WRITE_CACHE",
        *_KEYS_AND_SCALES,
    ),
    _kernel(_POOLED_KEYS, "_kpool_assemble_softmax_rotate_write_cache_kernel", "loc_ptr INDEX_PAGE_SIZE", *_KEYS_AND_SCALES),
    _kernel(
        _POOLED_KEYS,
        "_kpool_write_tail_and_maybe_compress_kernel",
        "write_loc_ptr write_loc_stride_0 MAX_CLOSED_POOLS INDEX_PAGE_SIZE",
        *_KEYS_AND_SCALES,
    ),
    _kernel(
        _POOLED_KEYS,
        "_kpool_decode_update_and_maybe_write_cache_kernel",
        "key_ptr positions_ptr block_tables_ptr block_tables_stride_0 block_tables_stride_1 BLOCK_TABLE_COLS POOL_SIZE "
        "INDEX_PAGE_SIZE",
        *_KEYS_AND_SCALES,
    ),
)
"""Triton kernels of the indexer that store or move e4m3."""

POOLED_SCHEDULE: Final = Seam("sglang.srt.layers.attention.dsa.kpool_plan._get_deep_gemm", AROUND, optional=True)
"""Where the schedules of that indexer take DeepGEMM's module from."""

SEAMS: Final = (*ATTENTION, *POOLS, *PROMPTS, *FP8_ROWS, *INDEXER, POOLED_SCHEDULE)


def objections(parameters_of: Callable[[str], Collection[str] | None]) -> Iterator[str]:
    """What stands against hooking an SGLang. parameters_of: those of a dotted path, None where there is nothing."""
    for seam in (*SEAMS, *INDEX_KERNELS):
        found = seam.objection(parameters_of(seam.target))
        if found is not None:
            yield found


def parameters_in(root: Path) -> Callable[[str], tuple[str, ...] | None]:
    """`parameters_of` for the sources in the folder of the package `sglang`, which are read but not imported."""
    trees: dict[Path, ast.Module] = {}

    def parameters_of(target: str) -> tuple[str, ...] | None:
        parts = target.split(".")[1:]
        file, inner = _split(root, parts)
        if file is None:
            return None
        if file not in trees:
            trees[file] = ast.parse(file.read_text(encoding="utf-8"))
        node: ast.AST | None = trees[file]
        for name in inner:
            node = next(
                (each for each in getattr(node, "body", ()) if getattr(each, "name", None) == name),
                None,
            )
        if not isinstance(node, ast.FunctionDef):
            return None
        given = node.args
        return tuple(each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs))

    return parameters_of


def _split(root: Path, parts: list[str]) -> tuple[Path | None, list[str]]:
    """The file of the module that a path starts with, and the names inside it."""
    for count in range(len(parts), 0, -1):
        file = root.joinpath(*parts[:count]).with_suffix(".py")
        if file.is_file():
            return file, parts[count:]
    return None, parts
