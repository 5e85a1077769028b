# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Prompts over keys of each head, in the steps where that takes less GPU time than the sparse route.

From 0.26 on, vLLM's layer hands the tokens behind `num_decode_tokens` to `forward_mha` of the implementation if the metadata of
the step lets it, and the decodes before them to `forward_mqa` as ever. vLLM means attention to everything before a token, for
prompts no longer than the top-k. Here it may be attention to the selection too. What lets the layer do so:

    0.26, 0.27   `prefill_max_seq_len` of the metadata is at most the top-k
    from 0.28    `use_dense_mha` of its `prefill`; or vLLM's own thresholds for each tensor parallel size, together with the
                 implementation's `masked_mha_available` and `masked_mha_workspace_fits(prefill)`

From 0.28 on the indexer leaves its scores out where `use_dense_mha` says so and the step has no decodes, as nothing reads them
then. So `use_dense_mha` is never set where tokens attend to their selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from mla_portable.attention import HeadDims, PromptAttention
from mla_portable.contracts.values import INT32_MAX
from mla_portable.engines.common import prompt_route
from mla_portable.engines.vllm import compat
from mla_portable.engines.vllm.model import Resolved
from mla_portable.engines.vllm.settings import logger
from mla_portable.planner.prompts import PromptPlan
from mla_portable.times.prompts import PromptTimes

BESIDE_DECODES: Final = 25.0
"""Microseconds that the kernels over keys of each head take at least: on top of the sparse route's in a step with decodes."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPrompts:
    """The prompts of a step, as `prefill` of its metadata.

    Attributes:
        attention, plan: what computes them, and how.
        use_dense_mha: no token needs its selection. Read by vLLM's layer and indexer from 0.28 on.
        max_query_len: read by vLLM's layer, which compares it with thresholds of its own; the choice was made here.
        chunked_context: as compat.prompt_marks says.
    """

    attention: PromptAttention
    plan: PromptPlan
    use_dense_mha: bool
    chunked_context: tuple[()] | None
    max_query_len: int = INT32_MAX


def head_dims(arguments: dict[str, Any]) -> HeadDims | None:
    """Of a layer with these arguments of its implementation; None where it has no keys of each head."""
    nope, rope, value = (arguments.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if arguments.get("kv_b_proj") is None or not nope or rope is None or not value:
        return None
    return HeadDims(nope, rope, value)


def attention(resolved: Resolved, vllm_config: Any, dims: HeadDims | None) -> PromptAttention | None:
    """For layers that are served as `resolved`; None where all tokens take the sparse route.

    With VLLM_BATCH_INVARIANT a prompt's result must not depend on the lengths of others. Under decode context parallelism the
    cache has a share of each context. Attention sinks, and what has no times on record, are left to the sparse route too.
    """
    if dims is None or not compat.takes_prompts() or compat.forces_sparse_prefill(vllm_config):
        return None
    return prompt_route.prompt_attention(resolved.spec, dims, resolved.decision.device, compat.device(), logger)


class Prompts:
    """Beside a builder: the steps whose prompts are computed over keys of each head."""

    def __init__(self, attention: PromptAttention, times: PromptTimes, threshold: int, topk: int, masks: bool) -> None:
        """Args:
        threshold: query tokens of a decode. topk: a token that sees no more keys selects all of them.
        masks: vLLM's layer lets prompts through that are longer than the top-k.
        """
        self._attention, self._times, self._threshold, self._masks = attention, times, threshold, masks
        self._topk = topk

    def build(
        self, query_lens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], block_table: torch.Tensor
    ) -> tuple[int, StepPrompts] | None:
        """The number of requests in front of the prompts, and the prompts; None where all take the sparse route.

        Args: of the step's requests: query_lens, lengths [R] on the host, the lengths exact; block_table [R, columns].
        """
        (later,) = np.nonzero(query_lens > self._threshold)
        if not len(later):
            return None
        first = int(later[0])
        plan = prompt_route.plan_where_faster(
            self._attention,
            self._times,
            query_lens[first:],
            lengths[first:],
            block_table[first:],
            topk=self._topk,
            masks=self._masks,
            least=prompt_route.LEAST_SAVED + (BESIDE_DECODES if first else 0.0),
        )
        if plan is None:
            return None
        return first, StepPrompts(self._attention, plan, not plan.masked, compat.prompt_marks(self._topk)[1])


def prompts(found: PromptAttention | None, layers: Sequence[Any], vllm_config: Any, threshold: int) -> Prompts | None:
    """Beside a builder of `layers`; None where their prompts always take the sparse route."""
    if found is None or found.times is None or not layers:
        return None
    if any(getattr(layer, "prefill_backend", None) is None for layer in layers):
        return None  # vLLM's layer looks at that before it asks the implementation
    masks = compat.takes_masked_prompts(vllm_config, found.head_dims.query, found.head_dims.value)
    topk = compat.topk(vllm_config) or found.spec.topk  # the indexer's buffer may be wider
    return Prompts(found, found.times, threshold, topk, masks)
