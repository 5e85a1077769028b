# SPDX-License-Identifier: Apache-2.0
"""Prompts over keys of each head in an engine: for which layers, and in which steps that takes less GPU time.

What an engine adds is how its step's lengths and block table are found, and how its layer hands over the query and the latent
rows before any product with W_UK.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from mla_portable.attention import AttentionSpec, HeadDims, PromptAttention
from mla_portable.attention.layer_registry import ForcedBackend, LayerRegistry
from mla_portable.attention.prompts import prompt_requests
from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, UnsupportedRequest
from mla_portable.planner.prompts import PromptPlan, plan_prompts
from mla_portable.times.prompts import Counts, Lengths, PromptTimes

LEAST_SAVED: Final = 5.0
"""Microseconds a layer; below that the host's time for planning the prompts counts for more."""


def refusals(
    spec: AttentionSpec,
    head_dims: HeadDims,
    facts: DeviceFacts,
    *,
    registry: Registry | None = None,
    backend: ForcedBackend = None,
) -> list[str]:
    """Why all tokens of such layers take the sparse route, in words. No kernel is run to find out.

    Args:
        registry, backend: as of PromptAttention.
    """
    checks = (
        (spec.batch_invariant, "a prompt's bits must not depend on the batch, and its way does"),
        (spec.share.size > 1, f"each of {spec.share.size} ranks has a share of the context"),
        (spec.attn_sink, "attention over keys of each head has no sinks"),
        (head_dims.rope != spec.rope_width, f"keys with {head_dims.rope} rotary columns over rows with {spec.rope_width}"),
    )
    reasons = [words for refused, words in checks if refused]
    if reasons:
        return reasons
    layers = LayerRegistry(registry, backend, probe=False, where="PromptAttention")
    masked = layers.decide(prompt_requests(spec, head_dims, facts)["masked"])
    able = [verdict.implementation for verdict in masked.verdicts if verdict.can_run]
    if able and not any(layers.prompt_times(replace(masked, chosen=name)) for name in able):
        return [missing_times(able, facts)]
    return []


def missing_times(implementations: Sequence[str], facts: DeviceFacts) -> str:
    """Why prompts that these implementations of masked_prefill could serve take the sparse route, and what to do."""
    return (
        f"no times of the two ways are on record for {', '.join(implementations)} on {facts.name}, nor of a device that stands "
        f"for those of {facts.vendor}; `mla-portable bench prompts --fit --out FILE` makes them there"
    )


def prompt_attention(
    spec: AttentionSpec, head_dims: HeadDims, facts: DeviceFacts, device: torch.device, logger: logging.Logger
) -> PromptAttention | None:
    """For layers of `spec`, with `times`; None, with the reasons in the log, where all their tokens take the sparse route."""
    reasons = refusals(spec, head_dims, facts)
    if not reasons:
        try:
            found = PromptAttention(spec, head_dims, device=device)
        except UnsupportedRequest as error:
            reasons = [str(error)]
        else:
            if found.times is not None:
                return found
            reasons = [missing_times([str(found.decisions["masked"].chosen)], facts)]
    logger.info("prompts take the sparse route: %s", "; ".join(reasons))
    return None


def plan_where_faster(
    attention: PromptAttention,
    times: PromptTimes,
    query_lens: Lengths,
    seq_lens: Lengths,
    block_table: Tensor,
    *,
    topk: int,
    masks: bool = True,
    least: float | None = None,
) -> PromptPlan | None:
    """The plan of a step's prompts; None where the sparse route takes them.

    Args:
        query_lens, seq_lens: [R] on the host, exact. block_table: [R or more, columns] int32. topk: a token that sees no more
            keys selects all of them. masks: prompts that are longer may be attended to under their selection.
        least: microseconds that a layer must save; None for LEAST_SAVED.
    """
    masked = bool(seq_lens.max() > topk)
    if masked and not masks:
        return None
    counts = Counts.of(query_lens, seq_lens, topk, attention.key_rows)
    if times.saves(counts, masked=masked) <= (LEAST_SAVED if least is None else least):
        return None
    sizes = {"key_rows": attention.key_rows, "block_size": attention.spec.block_size}
    return plan_prompts(query_lens, seq_lens, block_table, topk=topk, **sizes)
