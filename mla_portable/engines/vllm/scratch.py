# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The step's scratch: out of the workspace that all of vLLM's layers share, or one set of tensors for all microbatches.

Everything here is filled and consumed within one layer's attention on the compute stream, so the memory may belong to others
in between. It is asked for when a layer is built, so that vLLM's memory profile sees it, and when a builder binds it; and again
at each step while the workspace may grow, so that the memory it has outgrown is released.

With microbatches (DBO), vLLM has a workspace for each of the two, and attention of the one runs while data of the other's MoE
lie in its workspace. So attention keeps scratch of its own there. Both microbatches issue attention on the one compute stream
and switch only inside of MoE's communication, so they share it; so do all layers with equal limits, and every builder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mla_portable.attention import AttentionSpec, StepBuffers
from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import compat
from mla_portable.engines.vllm.model import Resolved
from mla_portable.kit.defaults import neutral_defaults

_NAMES = tuple(field.name for field in fields(StepBuffers) if field.init and field.name != "kept")
"""What others may use between two layers."""

_shared: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()
"""Tensors of microbatches by device, name, shape and dtype, for as long as a layer or a builder holds them."""


def step_buffers(resolved: Resolved, vllm_config: Any, device: torch.device) -> StepBuffers | None:
    """Buffers for layers that are served as `resolved`; None where there is no workspace of vLLM's: they allocate their own.

    Raises: InvalidArgument when vLLM's workspace is locked already and too small.
    """
    with neutral_defaults():
        wanted = StepBuffers.allocate(resolved.spec, torch.device("meta"), has_workspace=resolved.gathers)
        named = {name: tensor for name in _NAMES if (tensor := getattr(wanted, name)) is not None}
        if compat.runs_microbatches(vllm_config):
            device = torch.empty(0, device=device).device  # with its index
            ours: dict[str, Any] = {name: _shared_tensor(device, name, tensor) for name, tensor in named.items()}
            return StepBuffers(**ours)
        try:
            manager = compat.workspace_manager()
            found = None if manager is None else _borrow(manager, named.values())
        except AssertionError as error:
            tokens, heads = resolved.spec.max_num_tokens, resolved.spec.num_heads
            need = sum(tensor.nbytes for tensor in named.values())
            expected = f"{need} bytes for {tokens} tokens of {heads} heads before the workspace is locked"
            remedy = "Lower --max-num-batched-tokens or --max-model-len."
            raise InvalidArgument("vLLM", "workspace", got=str(error), expected=expected, remedy=remedy) from error
    lent: dict[str, Any] = {} if found is None else dict(zip(named, found, strict=True))
    return StepBuffers(**lent) if lent else None


def keep(buffers: StepBuffers, spec: AttentionSpec) -> StepBuffers:
    """These, with memory of their own for the slots of decode batches, which a group of layers converts once.

    Larger steps are converted in each layer: that takes less of such a step, and the memory would be large.
    """
    rows, device = min(spec.max_num_tokens, spec.max_num_reqs * spec.decode_query_len), buffers.indices.device
    with neutral_defaults():
        indices = torch.empty((rows, spec.topk), dtype=torch.int32, device=device)
        return replace(buffers, kept=(indices, torch.empty(rows, dtype=torch.int32, device=device)))


def follow(manager: Any, buffers: StepBuffers) -> None:
    """Point `buffers`, which step_buffers made of this workspace, at what it is now."""
    held = [tensor for name in _NAMES if (tensor := getattr(buffers, name)) is not None]
    with neutral_defaults():
        found = _borrow(manager, held)
        if found[0].data_ptr() != held[0].data_ptr():
            for old, new in zip(held, found, strict=True):
                old.set_(new)


def _borrow(manager: Any, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors like these out of the workspace; no views, which would hold what they are views of."""
    lent = manager.get_simultaneous(*[(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    return [tensor.new_empty(0).set_(tensor) for tensor in lent]


def _shared_tensor(device: torch.device, name: str, wanted: Tensor) -> Tensor:
    key = (device, name, wanted.shape, wanted.dtype)
    tensor = _shared.get(key)
    if tensor is None:
        tensor = _shared[key] = torch.empty_like(wanted, device=device)
    return tensor
