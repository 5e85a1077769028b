# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""What requests say of the pages of an engine's indexer, and who writes keys into them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_portable.choose import get_registry
from mla_portable.contracts import DeviceFacts, Request
from mla_portable.contracts.values import CACHE_ALIGNMENT
from mla_portable.engines.common.routing import bind_for
from mla_portable.kit.rules import check_cache
from mla_portable.layouts import INDEX, INDEX_FP8
from mla_portable.primitives import INDEXER_CACHE_WRITE, IndexerCacheWrite


def facts_of_pages(pages: Tensor, where: str) -> dict[str, Any]:
    """What a Request says of pages. where: who asks, for errors. Raises: InvalidArgument for another cache."""
    return check_cache(where, "kv_cache", pages, pages.device, INDEX, kv_layout=INDEX_FP8.name)._asdict()


def key_writer(pages: Tensor) -> IndexerCacheWrite:
    """indexer_cache_write for pages like these, `index_fp8` with scales that are powers of two.

    Binds at the first call for a kind of pages, which belongs outside of CUDA graphs.
    Raises: UnsupportedRequest, InvalidArgument.
    """

    def bound() -> IndexerCacheWrite:
        facts = facts_of_pages(pages, "indexer_cache_write")
        return bind_writer(get_registry().facts(pages.device), **facts)

    return get_registry().keep((INDEXER_CACHE_WRITE, *kind_of_pages(pages)), bound)


def kind_of_pages(pages: Tensor) -> tuple[object, ...]:
    """Equal for pages that are served alike, at less cost than `facts_of_pages`."""
    apart = pages.stride(0) if pages.shape[0] > 1 else 0
    return pages.device, pages.shape[1:], apart, pages.data_ptr() % CACHE_ALIGNMENT


def bind_writer(here: DeviceFacts, **facts: Any) -> IndexerCacheWrite:
    """indexer_cache_write on a device, for CUDA graphs where anything serves in them. Raises: UnsupportedRequest."""
    return bind_for(Request(INDEXER_CACHE_WRITE, here, scale_format="pow2", **facts))[0].call
