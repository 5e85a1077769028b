# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The backend class: what vLLM asks before it picks a backend. The answers follow the registry."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend

from mla_portable.engines.vllm import compat, model
from mla_portable.engines.vllm.builder import MLAPortableMetadataBuilder
from mla_portable.engines.vllm.impl import MLAPortableImpl
from mla_portable.engines.vllm.metadata import MLAPortableMetadata
from mla_portable.engines.vllm.settings import logger
from mla_portable.layouts import LAYOUTS


class MLAPortableBackend(AttentionBackend):
    """Sparse MLA through mla_portable, on every device that an installed implementation serves."""

    accept_output_buffer: bool = True
    """Read by vLLM up to 0.19: the layer allocates the output, inside of piecewise CUDA graphs."""
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [name for name in model.LAYOUT_OF_DTYPE if name]

    @staticmethod
    def get_name() -> str:
        """FLASHMLA_SPARSE, under every name it is registered as: vLLM ties the meaning of `fp8` (as fp8_ds_mla), the cache's
        alignment and the indexer's warm-up to this name, and all of that is wanted here."""
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[MLAPortableImpl]:
        if compat.impl_projects():
            from mla_portable.engines.vllm.projecting import ProjectingImpl

            return ProjectingImpl
        return MLAPortableImpl

    @staticmethod
    def get_builder_cls() -> type[MLAPortableMetadataBuilder]:
        return MLAPortableMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[MLAPortableMetadata]:
        return MLAPortableMetadata

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(model.HEAD_SIZES)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any | None = None) -> list[Any]:
        """[64], or its multiples where the indexer scores pools of keys."""
        return compat.block_sizes(model.BLOCK_SIZE, get_current_vllm_config_or_none(), kv_cache_spec)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, block_size, 656] bytes for FP8, else [blocks, block_size, head_size]. Asked by vLLM up to 0.28."""
        layout = LAYOUTS.get(model.LAYOUT_OF_DTYPE.get(cache_dtype_str, ""))
        return num_blocks, block_size, layout.row_width if layout and layout.is_quantized else head_size

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks are to lie whole rows apart, where vLLM has a way to ask for it (0.32 and later)."""
        return compat.align_blocks(spec)

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes, where an implementation has them; `supports_combination`, and each layer's constructor, say whether one does."""
        return True

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: steps are planned from the query lengths on the host."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes, where an implementation promises it; `supports_combination` says whether one does."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """An installed implementation declares the device, whatever its capability is."""
        return model.is_served(model.facts_of(compat.device(), capability))

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        *more: Any,
        **named: Any,
    ) -> str | None:
        """None where the whole model can be served as configured, else every reason against every candidate.

        Binds and computes nothing: what is declared decides here, what works when a layer is built. Without a configuration in
        force it only knows the arguments. `more` and `named` are what versions add in between, and the capability; the device
        itself is asked.
        """
        config = get_current_vllm_config_or_none()
        if not use_mla or not use_sparse or config is None or config.model_config is None:
            return None
        reasons = model.refusal(
            config,
            compat.device(),
            head_size=head_size,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            attn_sink=has_sink,
        )
        if reasons is None:
            return None
        logger.warning("mla_portable cannot serve this model:\n%s", reasons)
        return "; ".join(line.strip() for line in reasons.splitlines())  # vLLM quotes it, line breaks and all
