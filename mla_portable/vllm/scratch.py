# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The step's scratch, out of the workspace that all of vLLM's layers share, where this vLLM has one.

Everything here is filled and forgotten within one layer's attention, so the memory may belong to others in between. It is
asked for twice: when a layer is built, so that vLLM's memory profile sees it, and when a builder binds it.
"""

from __future__ import annotations

import torch

from mla_portable.attention import AttentionSpec, StepBuffers
from mla_portable.contracts import HEAD_SIZE
from mla_portable.vllm import compat

__all__ = ["step_buffers"]


def step_buffers(spec: AttentionSpec, *, has_workspace: bool) -> StepBuffers | None:
    """Buffers for layers of `spec` in vLLM's shared workspace; None where there is none, and they are to be allocated.

    Raises: AssertionError, by vLLM, when its workspace is locked already and too small.
    """
    tokens, heads = spec.max_num_tokens, spec.num_heads
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "indices": ((tokens, spec.topk), torch.int32),
        "counts": ((tokens,), torch.int32),
    }
    if not spec.need_lse:
        shapes["lse"] = (tokens, heads), torch.float32
    if spec.concat_query:
        shapes["query"] = (tokens, heads, HEAD_SIZE), torch.bfloat16
    if has_workspace:
        shapes["workspace"] = (spec.workspace_rows, HEAD_SIZE), torch.bfloat16
    with torch.inference_mode(False):  # made under inference mode they could never be written outside of it
        found = compat.shared_scratch(list(shapes.values()))
    return None if found is None else StepBuffers(**dict(zip(shapes, found, strict=True)))
