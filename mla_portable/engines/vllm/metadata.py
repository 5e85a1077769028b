# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""What travels from the builder to the layers: the plan of the step, and the fields that vLLM itself reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

from mla_portable.attention import SparseMLAAttention
from mla_portable.contracts import StepPlan
from mla_portable.engines.vllm.prompts import StepPrompts


@dataclass(kw_only=True)
class MLAPortableMetadata(MLACommonMetadata):
    """One step, shared by the layers of a builder. KV connectors that move files tell the cache of MLA by the base class.

    vLLM sends tokens that are not decodes to `forward_mha`. Unless `prefill` has them (`prompts`), every token is a decode to
    vLLM, and goes through `forward_mqa`; what decodes and what prefills there is said by `plan`.

    Attributes:
        num_actual_tokens: query tokens, padding for a CUDA graph included. The fields up to `prefill` are read by vLLM.
        prefill: the requests behind the first `num_decodes`, None where `plan` has all of them.
        attention, plan: the layer that computes the step, and its plan.
        fp8_extra_metadata: what vLLM's own FlashMLA kernels are given up to 0.25; these have the plan.
    """

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_decodes: int
    num_decode_tokens: int
    block_size: int
    topk_tokens: int
    attention: SparseMLAAttention
    plan: StepPlan
    num_prefills: int = 0
    prefill_max_seq_len: int = 0
    prefill: StepPrompts | None = None
    decode: None = None
    fp8_extra_metadata: None = None

    @property
    def req_id_per_token(self) -> Tensor:
        """[num_actual_tokens] int32: the request of each token, 0 for padding."""
        return self.plan.req_id_per_token

    @property
    def fp8_use_mixed_batch(self) -> bool:
        """Prefill tokens of an FP8 cache go through the decode kernel."""
        return self.attention.spec.layout.is_quantized and self.plan.route == "fused"
