# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's scheduler object and the functions that make one. No plan is made here: kernels divide a batch themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import index
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts.values import check_count
from mla_portable.errors import PlanMismatch
from mla_portable.kit.rules import check_tensor, shape_of

_PLAN_WIDTH: Final = 8
"""Integers of a row of FlashMLA's plan."""


@dataclass
class FlashMLASchedMeta:
    """What `flash_mla_with_kvcache` remembers of its calls: their shapes, which must not change. It holds no memory.

    Attributes:
        have_initialized: a call was made with it. config: the shapes of that call.
        tile_scheduler_metadata, num_splits: not read; a caller may set them.
    """

    @dataclass
    class Config:
        """The shapes and flags of a call, by FlashMLA's names."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool = False

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None

    def remember(self, where: str, config: Config) -> None:
        """Keep the shapes of the first call. Raises: PlanMismatch for a later call of other shapes, as FlashMLA refuses it."""
        if self.config is None:
            self.have_initialized, self.config = True, config
        elif self.config != config:
            names = [field.name for field in fields(config)]
            pairs = [(name, getattr(self.config, name), getattr(config, name)) for name in names]
            changed = ", ".join(f"{name} {now} (at first {before})" for name, before, now in pairs if before != now)
            raise PlanMismatch(
                f"{where}: tile_scheduler_metadata was used for calls of other shapes: this one has {changed}. "
                "An object serves calls of equal shapes: take another from get_mla_metadata()."
            )


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """A new scheduler object, and None. Arguments are ignored, as FlashMLA ignores them."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    """FlashMLA's plan as tensors: zeros of its shapes, because nothing here reads them.

    Args:
        seqlens_k: [b] int32. num_q_tokens_per_head_k: at least 1. The others are ignored.
    Returns: [1, 8] int32 and [b + 1] int32, on the device of `seqlens_k`. The first has one shape whatever the batch, so that
        it can be copied into a buffer that a CUDA graph reads.
    Raises: InvalidArgument.
    """
    where = "get_mla_decoding_metadata"
    (batch,) = shape_of(where, "seqlens_k", seqlens_k, 1, "[b]")
    check_tensor(where, "seqlens_k", seqlens_k, torch.int32, (batch,), seqlens_k.device, "[b]")
    tokens: Any = num_q_tokens_per_head_k
    check_count(where, "num_q_tokens_per_head_k", index(tokens) if hasattr(tokens, "__index__") else tokens, 1)
    plan = torch.zeros((1, _PLAN_WIDTH), dtype=torch.int32, device=seqlens_k.device)
    return plan, torch.zeros(batch + 1, dtype=torch.int32, device=seqlens_k.device)
