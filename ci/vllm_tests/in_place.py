# SPDX-License-Identifier: Apache-2.0
"""What of ours stands in place of what of vLLM's while its tests run.

Each function changes modules of vLLM before a file of tests is imported. Some names are those that the plugin replaces itself
(DeepGEMM's functions, the backend, the kernels of pools of keys). The others are vLLM's operators of which this project has a
primitive: they are called with vLLM's arguments and conventions, so that its tests say whether the primitive means the same.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any, Final

import torch
from torch import Tensor

FLASH_MLA: Final = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_metadata", "FlashMLASchedMeta")
_SPARSE: Final = "vllm.v1.attention.backends.mla.flashmla_sparse"


def flash_mla() -> None:
    """FlashMLA's functions, where vLLM's layers import them from."""
    import mla_portable.flash_mla as ours

    module: Any = import_module("vllm.v1.attention.ops.flashmla")
    for name in FLASH_MLA:
        setattr(module, name, getattr(ours, name))
    module.is_flashmla_sparse_supported = lambda: (True, None)
    _write_where_vllm_cannot()


def deep_gemm() -> None:
    """DeepGEMM's functions behind vLLM's wrappers of them, as the plugin puts them there."""
    from mla_portable.engines.vllm import indexer_seams

    import_module("vllm.utils.import_utils").has_deep_gemm = lambda: True
    module: Any = import_module("vllm.utils.deep_gemm")
    module._lazy_init = lambda: None  # what the plugin puts there is to stay
    indexer_seams.set_functions(ours=True)
    module.get_num_sms = import_module("mla_portable.deep_gemm").get_num_sms


def backend() -> None:
    """The plugin's backend as FlashMLA's sparse one.

    The tests make the builder before the layer's implementation, and neither is a part of a model: the implementation is
    attached to the builder that was made last, as a builder does with the layers that it finds.
    """
    from mla_portable.engines.vllm.backend import MLAPortableBackend
    from mla_portable.engines.vllm.builder import MLAPortableMetadataBuilder
    from mla_portable.engines.vllm.impl import MLAPortableImpl
    from mla_portable.engines.vllm.writer import choose_writer

    made: list[MLAPortableMetadataBuilder] = []

    class Builder(MLAPortableMetadataBuilder):
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            layers = vllm_config.compilation_config.static_forward_context
            layers["placeholder"].impl = Demand(vllm_config)
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            made[:] = [self]

    class Demand:
        """What the layer will ask for, which builders read of implementations: here the test's configuration says it."""

        sinks, need_to_return_lse_for_decode, head_dims = None, False, None

        def __init__(self, vllm_config: Any) -> None:
            model = vllm_config.model_config
            self.head_size = model.get_head_size()
            self.num_heads = model.get_num_attention_heads(vllm_config.parallel_config)
            self.scale = 1 / math.sqrt(self.head_size)
            self.kv_cache_dtype = vllm_config.cache_config.cache_dtype

        def attach(self, *_: Any) -> None:
            """The implementation is attached below."""

    class Impl(MLAPortableImpl):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            attention = made[0].attention
            self.attach(attention, choose_writer(attention.spec.kv_layout, attention.device, None))

    class Backend(MLAPortableBackend):
        @staticmethod
        def get_builder_cls() -> type[Builder]:
            return Builder

        @staticmethod
        def get_impl_cls() -> type[Impl]:
            return Impl

    module: Any = import_module(_SPARSE)
    module.FlashMLASparseBackend = Backend
    _write_where_vllm_cannot()
    import_module("vllm.v1.attention.ops.flashmla").is_flashmla_sparse_supported = lambda: (True, None)


def converter() -> None:
    """`convert_indices` as vLLM's `triton_convert_req_index_to_global_index`."""
    import mla_portable

    def convert(
        req_id: Tensor,
        block_table: Tensor,
        token_indices: Tensor,
        BLOCK_SIZE: int = 64,
        NUM_TOPK_TOKENS: int = 2048,
        HAS_PREFILL_WORKSPACE: bool = False,
        prefill_workspace_request_ids: Tensor | None = None,
        prefill_workspace_starts: Tensor | None = None,
        return_valid_counts: bool = False,
        out: Tensor | None = None,
        valid_counts_out: Tensor | None = None,
    ) -> Any:
        assert token_indices.shape[1] == NUM_TOPK_TOKENS
        if out is not None and valid_counts_out is None:
            valid_counts_out = out.new_empty(len(out))
        workspace = (prefill_workspace_request_ids, prefill_workspace_starts) if HAS_PREFILL_WORKSPACE else (None, None)
        indices, counts = mla_portable.convert_indices(
            token_indices,
            req_id,
            block_table,
            block_size=BLOCK_SIZE,
            prefill_request_ids=workspace[0],
            prefill_workspace_starts=workspace[1],
            out=None if out is None or valid_counts_out is None else (out, valid_counts_out),
        )
        return (indices, counts) if return_valid_counts else indices

    for name in (_SPARSE, "vllm.v1.attention.backends.mla.sparse_utils"):
        import_module(name).triton_convert_req_index_to_global_index = convert


def gather() -> None:
    """`gather_upconvert` as vLLM's operator of prompts on 656-byte rows."""
    import mla_portable

    def gather_rows(src_cache: Tensor, dst: Tensor, block_table: Tensor, workspace_starts: Tensor, batch_size: int) -> None:
        starts = workspace_starts[:batch_size]
        ends = torch.cat([starts[1:], torch.full_like(starts[:1], len(dst))])
        mla_portable.gather_upconvert(src_cache, block_table[:batch_size], ends - starts, starts, out=dst)

    import_module("vllm._custom_ops").cp_gather_and_upconvert_fp8_kv_cache = gather_rows


def gather_v4() -> None:
    """`cache_write` and `gather_upconvert` as the writer and the gather of DeepSeek-V4's rows of 584 bytes."""
    import mla_portable
    from mla_portable.layouts import FP8_V4

    def paged(cache: Tensor, block_size: int) -> Tensor:
        blocks = cache.view(cache.shape[0], -1)
        return blocks.as_strided((len(blocks), block_size, FP8_V4.row_width), (blocks.stride(0), FP8_V4.row_width, 1))

    def write(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
        split = FP8_V4.key_width - FP8_V4.rope_width
        mla_portable.cache_write(k[:, :split], k[:, split:], paged(k_cache, block_size), slot_mapping, scale_format="pow2")

    def gather_rows(
        out: Tensor, k_cache: Tensor, seq_lens: Tensor, gather_lens: None, block_table: Tensor, block_size: int, offset: int
    ) -> None:
        assert gather_lens is None
        rows = out.shape[1]
        starts = torch.arange(len(out), dtype=torch.int32, device=out.device) * rows + offset
        mla_portable.gather_upconvert(paged(k_cache, block_size), block_table, seq_lens, starts, out=out.view(-1, out.shape[2]))

    module: Any = import_module("vllm.models.deepseek_v4.common.ops")
    module.quantize_and_insert_k_cache, module.dequantize_and_gather_k_cache = write, gather_rows


def cache_writers() -> None:
    """`cache_write` and `indexer_cache_write` as vLLM's operators of those caches."""
    import mla_portable
    from mla_portable.layouts import LAYOUTS

    rope_width = LAYOUTS["fp8_ds_mla"].rope_width
    version = tuple(map(int, re.findall(r"\d+", import_module("vllm").__version__)[:2]))
    scales_of_rows = "pow2" if version >= (0, 33) else "amax"  # as vLLM's operator of 0.33, and of 0.30

    def write(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor) -> None:
        assert kv_cache_dtype in ("auto", "fp8_ds_mla")
        if kv_cache_dtype == "fp8_ds_mla" and k_pe.shape[1] == 0:  # a model without rope, whose rows have zeros there
            k_pe = k_pe.new_zeros((len(k_pe), rope_width))
        mla_portable.cache_write(kv_c, k_pe, kv_cache, slot_mapping, scale_format=scales_of_rows)

    def write_keys(k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int, scale_format: str) -> None:
        assert quant_block_size == k.shape[1]
        scales = "pow2" if scale_format == "ue8m0" else "amax"
        mla_portable.indexer_cache_write(k, kv_cache, slot_mapping, scale_format=scales)

    operators: Any = import_module("vllm._custom_ops")
    operators.concat_and_cache_mla, operators.indexer_k_quant_and_cache = write, write_keys


def _write_where_vllm_cannot() -> None:
    """vLLM's own operator writes the cache where it is compiled."""
    if not hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        cache_writers()


def topk() -> None:
    """`topk_select` as vLLM's operators that select in rows of scores."""
    import mla_portable

    def select(logits: Tensor, starts: Tensor, ends: Tensor, indices: Tensor, topk: int) -> None:
        mla_portable.topk_select(logits, starts, ends, topk=topk, out=indices)

    def prompts(
        logits: Tensor, starts: Tensor, ends: Tensor, indices: Tensor, num_rows: int, row: int, column: int, topk: int
    ) -> None:
        assert (row, column) == logits.stride()
        select(logits[:num_rows], starts, ends, indices[:num_rows], topk)

    def decodes(
        logits: Tensor, next_n: int, seq_lens: Tensor, indices: Tensor, num_rows: int, row: int, column: int, topk: int
    ) -> None:
        assert (row, column) == logits.stride()
        if seq_lens.dim() == 1:  # of requests, whose tokens end one after another
            token = torch.arange(num_rows, dtype=torch.int32, device=logits.device)
            seq_lens = seq_lens.repeat_interleave(next_n)[:num_rows] - next_n + token % next_n + 1
        lengths(logits[:num_rows], seq_lens.reshape(-1)[:num_rows], indices[:num_rows], None, topk, 0)

    def lengths(
        logits: Tensor, lengths: Tensor, indices: Tensor, workspace: Tensor | None, topk: int, max_seq_len: int
    ) -> None:
        ends = lengths.reshape(-1)
        select(logits, torch.zeros_like(ends), ends, indices, topk)

    import_module("vllm._custom_ops")  # which loads the operators
    operators: Any = torch.ops._C
    operators.top_k_per_row_prefill, operators.top_k_per_row_decode = prompts, decodes
    operators.persistent_topk = operators.cooperative_topk = lengths


def pools() -> None:
    """GLM-5.3-Flash's pools of keys as the plugin writes them below compute capability 8.9: bfloat16 in place of e4m3."""
    from mla_portable.engines.vllm import pools as ours

    package = find_spec("vllm.models.glm5next")
    assert package is not None  # the sources have a test of it
    sys.modules.setdefault(package.name, module_from_spec(package))  # without its __init__, which imports a model of images
    ours.store_codes(import_module("vllm.models.glm5next.nvidia.ops.kpool_compress"))


PLACES: Final[dict[str, Callable[[], None]]] = {
    each.__name__: each for each in (flash_mla, deep_gemm, backend, converter, gather, gather_v4, cache_writers, topk, pools)
}
