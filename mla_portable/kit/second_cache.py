# SPDX-License-Identifier: Apache-2.0
"""What sparse_decode and sparse_prefill share about a second cache, and about queries without a rotary part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_portable.contracts.values import describe, refuse
from mla_portable.kit.rules import CacheFacts, check_cache
from mla_portable.layouts import Cache, CacheLayout

Read = Callable[..., CacheFacts]
"""(argument, tensor, device, kv_layout=name) -> its facts; raises for what is no such tensor."""


def check_second_cache(
    where: str,
    first: CacheFacts,
    device: torch.device,
    cache: Cache | None,
    indices: Tensor | None,
    lengths: Tensor | None,
    *,
    read: Read | None = None,
) -> tuple[int | None, CacheFacts]:
    """The three arguments are there together, and the second cache has the layout of the first.

    Args:
        first: of the first cache. read: checks a cache by itself; paged ones where None.
    Returns: its block size (None where there is no second cache, or it is flat), and the facts of the first beside it.
    Raises: InvalidArgument.
    """
    if cache is None:
        for name, value in (("extra_indices", indices), ("extra_lengths", lengths)):
            if value is not None:
                refuse(where, name, describe(value), "None without extra_kv_cache", "Pass the cache that it names slots of.")
        return None, first
    if indices is None:
        refuse(where, "extra_indices", "None", "slots of extra_kv_cache", "Leave both out, or pass lengths of 0.")
    second = (read or partial(check_cache, where))("extra_kv_cache", cache, device, kv_layout=first.kv_layout)
    return second.block_size, first.beside(second)


def is_nope(q: Tensor, layout: CacheLayout) -> bool:
    """Queries are as wide as the latent of quantised rows that have a rotary part too: it is not read.

    Rows without scales come in a layout of their own for such queries.
    """
    if not (layout.is_quantized and layout.rope_width):
        return False
    shape = q.shape
    return len(shape) > 0 and shape[-1] == layout.value_width


def second_cache(cache: Cache | None, indices: Tensor | None, lengths: Tensor | None) -> dict[str, Any]:
    """The keywords of a second cache, none where there is none: not every implementation knows them."""
    if cache is None:
        return {}
    return {"extra_kv_cache": cache, "extra_indices": indices, "extra_lengths": lengths}
