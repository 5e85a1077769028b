# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""ServedLayer: DeepSeek-V4's attention layer with this project's kernels, derived from vLLM's class on FlashMLA.

What is vLLM's stays vLLM's: projections, the writers of both caches, the compressor, the indexer, metadata and output. Ours are
the number of heads that queries are padded to, decode, and prompts in place. Both caches are read where they lie, by the lists
that vLLM's builders make.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from mla_portable.engines.vllm import settings
from mla_portable.engines.vllm.v4.kinds import LayerKind, Limits, is_listed, kind_of, ratio

HEADS: Final = (8, 16, 32, 64, 128)
"""Numbers of heads that vLLM's writer of queries has kernels for (`fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`)."""
FEW_HEADS: Final = 32
"""With up to as many, prompts are read in place: FlashMLA's kernel for gathered rows takes 64. On an H200 that is 0.44 to 0.75
of the time of vLLM's method with 8 and 16 heads, 0.88 to 1.39 of it with 32 (docs/dev/vllm-layers.md)."""


_Base: Any = object
"""For type checkers: vLLM's class, which follows in the bases of a derived class, has what is not defined here."""


class ServedLayer(_Base):
    """Precedes vLLM's class in the bases of the class that a model is given (`choice.derived`).

    Attributes:
        gathers_prompts: prompts go through vLLM's own method: BF16 rows in its workspace, FlashMLA's prefill.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.adopt_limits(Limits.of(vllm_config), vllm_config.cache_config.block_size)

    def adopt_limits(self, limits: Limits, block_size: int | None) -> None:
        """Take what the configuration says. block_size: of the cache, in tokens."""
        self._limits, self._block_size = limits, block_size or 256
        self._kinds: dict[tuple[int, int | None], LayerKind] = {}
        route = settings.route()
        self.gathers_prompts = route == "split" or (route == "auto" and self.padded_heads > FEW_HEADS)

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """As many as the rank has, if vLLM's writer can; what stock pads to on route split, whose kernel needs that."""
        if settings.route() == "split" or num_heads > HEADS[-1]:
            return super().get_padded_num_q_heads(num_heads)
        return next(heads for heads in HEADS if heads >= num_heads)

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """As vLLM's. While it profiles memory, scratch is allocated, and schedules for its CUDA graphs are made."""
        if get_forward_context().attn_metadata is None:
            compressed = None if ratio(self) == 0 else max(self._block_size // ratio(self), 1)
            self._kind(q.device, self.swa_cache_layer.block_size, compressed).prepare()
            if not self.gathers_prompts:  # and no workspace is reserved
                output.zero_()
                return
        super().forward_mqa(q, kv, positions, output)

    def _forward_decode(
        self,
        q: Tensor,
        kv_cache: Any,
        swa_metadata: Any,
        attn_metadata: Any,
        swa_only: bool,
        output: Tensor,
    ) -> None:
        """q, output [T, H, 512] of decode tokens; kv_cache [blocks, rows, 584] uint8 of compressed tokens."""
        swa_cache, rows = self.swa_cache_layer.kv_cache, swa_metadata.num_decode_tokens
        kind = self._kind(q.device, swa_cache.shape[1], None if swa_only else kv_cache.shape[1])
        extra: dict[str, Tensor] = {}
        if not swa_only:
            if is_listed(self):
                slots = attn_metadata.c128a_global_decode_topk_indices[:, 0]
                counts = attn_metadata.c128a_decode_topk_lens
            else:
                chosen, requests = self.topk_indices_buffer[:rows], kind.requests(swa_metadata)[:rows]
                slots, counts = kind.selected_slots(chosen, requests, attn_metadata.block_table, kv_cache)
            extra = {"extra_kv_cache": kv_cache, "extra_slots": slots, "extra_lengths": counts}
        window = swa_metadata.decode_swa_indices[:, 0]
        kind.attention_of(window).forward(
            q,
            swa_cache,
            window,
            softmax_scale=self.scale,
            decodes=True,
            lengths=swa_metadata.decode_swa_lens,
            attn_sink=self.attn_sink,
            out=output,
            **extra,
        )

    def _forward_prefill(
        self,
        q: Tensor,
        positions: Tensor,
        compressed_k_cache: Any,
        swa_k_cache: Tensor,
        output: Tensor,
        attn_metadata: Any,
        swa_metadata: Any,
    ) -> None:
        """q, output [T or more, H, 512] of the tokens behind the decodes; caches as of decode."""
        swa_only = ratio(self) == 0
        if self.gathers_prompts:
            super()._forward_prefill(q, positions, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata)
            return
        begin, rows = swa_metadata.num_decode_tokens, swa_metadata.num_prefill_tokens
        kind = self._kind(q.device, swa_k_cache.shape[1], None if swa_only else compressed_k_cache.shape[1])
        extra: dict[str, Tensor] = {}
        if not swa_only:
            requests = kind.requests(swa_metadata)[begin : begin + rows]
            if is_listed(self):
                slots, counts = kind.listed_slots(attn_metadata, requests, compressed_k_cache)
            else:
                chosen = self.topk_indices_buffer[begin : begin + rows]
                slots, counts = kind.selected_slots(chosen, requests, attn_metadata.block_table, compressed_k_cache)
            extra = {"extra_kv_cache": compressed_k_cache, "extra_slots": slots, "extra_lengths": counts}
        window = swa_metadata.prefill_swa_indices[:rows, 0]
        kind.attention_of(window).forward(
            q[:rows],
            swa_k_cache,
            window,
            softmax_scale=self.scale,
            decodes=False,
            lengths=swa_metadata.prefill_swa_lens[:rows],
            attn_sink=self.attn_sink,
            out=output[:rows],
            **extra,
        )

    def _kind(self, device: torch.device, swa_block: int, block: int | None) -> LayerKind:
        found = self._kinds.get((swa_block, block))
        if found is None:
            found = self._kinds[swa_block, block] = kind_of(self, self._limits, device, swa_block, block)
        return found
