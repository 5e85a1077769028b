# SPDX-License-Identifier: Apache-2.0
"""Faults that a job plants into its engine, to show that a judge sees them. Nothing of them is in the product.

scale: attention's scores are 2 % too large. dropped: the last of a token's chosen keys is forgotten, as by a loop that ends too
early. shifted: every chosen key is the one before it, as by an index that begins at another number. rope: attention rotates
halves in place of neighbours. index_rope: the indexer rotates the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

SCALE: Final = 1.02


def dropped(keys: Tensor) -> Tensor:
    """keys [tokens, K]: the last is absent."""
    found = keys.clone()
    found[:, -1] = -1
    return found


def shifted(keys: Tensor) -> Tensor:
    """keys [tokens, K]: each one less; the first position becomes absent, as -1."""
    return torch.where(keys < 0, keys, keys - 1)


_KEYS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"dropped": dropped, "shifted": shifted}
_ROTATIONS: Final = ("rope", "index_rope")
FAULTS: Final = ("scale", *_KEYS, *_ROTATIONS)


def plant(fault: str) -> None:
    """Make the plugin's layers wrong, those that are built from now on. Nothing for a fault of rotations."""
    if fault in _ROTATIONS:
        return
    if fault not in FAULTS:
        raise ValueError(f"no fault {fault!r}; there are {', '.join(FAULTS)}")
    from mla_portable.engines.vllm.impl import MLAPortableImpl

    if fault == "scale":
        make: Callable[..., None] = MLAPortableImpl.__init__

        def wrong(self: Any, **arguments: Any) -> None:
            make(self, **{**arguments, "scale": SCALE * arguments["scale"]})

        MLAPortableImpl.__init__ = wrong
    else:
        for name in ("forward_mqa", "forward_mha"):
            setattr(MLAPortableImpl, name, _over(_KEYS[fault], getattr(MLAPortableImpl, name)))


def _over(change: Callable[[Tensor], Tensor], forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` over changed keys, which are as they were when it returns: a layer calls two methods in a step."""

    def call(self: Any, *given: Any, **named: Any) -> Any:
        buffer: Tensor = self.topk_indices_buffer
        before = buffer.clone()
        buffer.copy_(change(buffer))
        try:
            return forward(self, *given, **named)
        finally:
            buffer.copy_(before)

    return call


def turn(fault: str, model: torch.nn.Module) -> None:
    """Of a fault of rotations: let a model that is built rotate the other way.

    Raises: RuntimeError where nothing rotates as it should.
    """
    if fault not in _ROTATIONS:
        return
    found = [module for module in model.modules() if hasattr(module, "is_neox_style")]
    wrong = [module for module in found if module.is_neox_style == (fault == "index_rope")]
    for module in wrong:
        module.is_neox_style = not module.is_neox_style
    if not wrong:
        raise RuntimeError(f"{fault}: of {len(found)} rotations none has the style that is to be turned")
