# SPDX-License-Identifier: Apache-2.0
"""What sparse_decode and sparse_prefill share about a second cache, and about queries without a rotary part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mla_portable.contracts.values import describe, refuse
from mla_portable.kit.rules import check_cache
from mla_portable.layouts import CacheLayout

Read = Callable[[str, Tensor, torch.device], tuple[CacheLayout, "int | None", int, int]]
"""(argument, tensor, device) -> layout, block size, stride between blocks, alignment; raises for what is no such tensor."""


def check_second_cache(
    where: str,
    layout: CacheLayout,
    alignment: int,
    device: torch.device,
    cache: Tensor | None,
    indices: Tensor | None,
    lengths: Tensor | None,
    *,
    read: Read | None = None,
) -> tuple[int | None, int, int]:
    """The three arguments are there together, and the second cache has the layout of the first.

    Args:
        layout, alignment: of the first cache. read: checks a cache by itself; paged ones where None.
    Returns: its block size (None where there is no second cache, or it is flat), elements from block to block, and the
        alignment that both caches have.
    Raises: InvalidArgument.
    """
    if cache is None:
        for name, value in (("extra_indices", indices), ("extra_lengths", lengths)):
            if value is not None:
                refuse(where, name, describe(value), "None without extra_kv_cache", "Pass the cache that it names slots of.")
        return None, 0, alignment
    if indices is None:
        refuse(where, "extra_indices", "None", "slots of extra_kv_cache", "Leave both out, or pass lengths of 0.")
    its_layout, block_size, block_stride, its_alignment = (read or partial(check_cache, where))("extra_kv_cache", cache, device)
    if its_layout is not layout:
        refuse(where, "extra_kv_cache", f"rows of {its_layout.name}", f"the layout of the first cache, {layout.name}")
    return block_size, block_stride, min(alignment, its_alignment)


def is_nope(q: Tensor, layout: CacheLayout) -> bool:
    """Queries are as wide as the latent of quantised rows that have a rotary part too: it is not read.

    Rows without scales come in a layout of their own for such queries.
    """
    if not (layout.is_quantized and layout.rope_width):
        return False
    shape = q.shape
    return len(shape) > 0 and shape[-1] == layout.value_width


def second_cache(cache: Tensor | None, indices: Tensor | None, lengths: Tensor | None) -> dict[str, Tensor | None]:
    """The keywords of a second cache, none where there is none: not every implementation knows them."""
    if cache is None:
        return {}
    return {"extra_kv_cache": cache, "extra_indices": indices, "extra_lengths": lengths}
