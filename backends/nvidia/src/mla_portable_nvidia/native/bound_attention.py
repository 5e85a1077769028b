# SPDX-License-Identifier: Apache-2.0
"""What every native attention kernel is behind its bound callables: one checked, prepared launch for each kind of call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, InvalidArgument, Request
from mla_portable.kit.results import attention_results
from mla_portable.layouts import FP8_DS_MLA, LAYOUTS
from mla_portable_common.alignment import aligned
from mla_portable_nvidia.native.checks import index_of
from mla_portable_nvidia.native.runtime.driver import Launches
from mla_portable_nvidia.native.sparse_decode import Tensors, rows_of

__all__ = ["BoundAttention", "lists_of", "rows_of_request"]

_LOG2_E: Final = 1.4426950408889634


def _layout_of(request: Request) -> str:
    """The cache layout that a request is bound for."""
    return request.kv_layout or FP8_DS_MLA.name


def rows_of_request(request: Request) -> str:
    """What kernels read of its cache, one of ROW_HEADERS."""
    return rows_of(_layout_of(request), nope=request.nope)


def lists_of(request: Request) -> int:
    """Of a row's keys, each with a cache of its own."""
    return 2 if request.extra_cache else 1


def _check_cache(where: str, name: str, kv: Tensor, kv_layout: str) -> None:
    """What the request that was bound says of a cache, for callers that bring another: a wrong one would lose the device.

    where, name: of the implementation and the argument, for errors. Raises: InvalidArgument.
    """
    layout = LAYOUTS[kv_layout]
    if (kv.dtype, kv.shape[-1]) != (layout.dtype, layout.row_width):
        raise InvalidArgument(
            where,
            name,
            got=f"{kv.dtype} rows of {kv.shape[-1]}",
            expected=f"{layout.dtype} rows of {layout.row_width}, for it was bound for {kv_layout}",
        )
    apart = kv.stride(0) * kv.element_size()
    if kv.data_ptr() % 16 or apart % 16:
        raise InvalidArgument(
            where,
            name,
            got=f"a start at {kv.data_ptr() % 16} and blocks {apart} bytes apart",
            expected="multiples of 16 bytes, for it was bound with cache_alignment=16; bind for what the cache has",
        )


class BoundAttention(ABC):
    """Both primitives on a native kernel for a bound request's layout; devices are loaded at bind or at their first call.

    name: of the implementation, or of those that are bound alike, for errors.
    """

    name: ClassVar[str] = "nvidia.native"

    def __init__(self, request: Request) -> None:
        self._request = request
        self._kv_layout, self._lists = _layout_of(request), lists_of(request)
        self._launches = Launches[Callable[..., None]]()
        self._load(index_of(request))

    @abstractmethod
    def _load(self, index: int) -> None:
        """Compile and load what a device needs."""

    @abstractmethod
    def prepared(self, of: Tensors, cut: tuple[int, ...] | None) -> Callable[..., None]:
        """Launches for tensors like these; `sparse_decode.prepare` says what one is given. cut: what `cut_of` made."""

    def cut_of(self, schedule: DecodeSchedule) -> tuple[int, ...] | None:
        """What a prepared launch keeps of a schedule; None where the kernel cuts by itself."""
        return None

    def _check(self, q: Tensor, kv_cache: Tensor, extra_kv_cache: Tensor | None, extra_indices: Tensor | None) -> None:
        """The call is one of those that were bound. Raises: InvalidArgument."""
        _check_cache(self.name, "kv_cache", kv_cache, self._kv_layout)
        lists = 1 if extra_kv_cache is None or extra_indices is None else 2
        if lists != self._lists:
            raise InvalidArgument(
                self.name,
                "extra_kv_cache",
                got="none" if lists == 1 else "a second cache",
                expected="what it was bound for: bind a request with extra_topk for calls with a second cache alone",
            )
        if extra_kv_cache is not None:
            _check_cache(self.name, "extra_kv_cache", extra_kv_cache, self._kv_layout)
        layout = LAYOUTS[self._kv_layout]
        width = layout.value_width if self._request.nope else layout.key_width
        if q.shape[-1] != width:
            raise InvalidArgument(self.name, "q", got=f"width {q.shape[-1]}", expected=f"{width}, for which it was bound")

    def decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv_cache: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        schedule: DecodeSchedule | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """sparse_decode. A launch is prepared for the first call of its shapes, strides and what is kept of its schedule.

        The tensors may be those of sparse_prefill, [T, H, ...] instead of [B, S, H, ...].
        """
        out, lse_out = attention_results(q, kv_cache, out, lse_out, kv_layout=self._kv_layout)
        cut = None if schedule is None else self.cut_of(schedule)
        q_at, kv_at, out_at = q.data_ptr(), kv_cache.data_ptr(), out.data_ptr()
        shapes = (q.shape, kv_cache.shape, indices.shape, q.get_device(), kv_cache.dtype)
        strides = (q.stride(), kv_cache.stride(), indices.stride(), out.stride(), lse_out.stride())
        extra: tuple[object, ...] = ()
        extra_at = 0
        if extra_kv_cache is not None and extra_indices is not None:
            extra_at = extra_kv_cache.data_ptr()
            of_lengths = None if extra_lengths is None else extra_lengths.stride()
            extra = (extra_kv_cache.shape, extra_kv_cache.stride(), extra_kv_cache.dtype)
            extra = (*extra, extra_indices.shape, extra_indices.stride(), of_lengths)
        key = (shapes, strides, None if lengths is None else lengths.stride(), cut, extra)
        launch = self._launches.get(key)
        if launch is None or q_at % 16 or kv_at % 16 or extra_at % 16 or out_at % 8:
            if 0 in q.shape[:-2]:
                return out, lse_out
            self._check(q, kv_cache, extra_kv_cache, extra_indices)
            # loads of q are 16 bytes wide and stores of out 8: a copy only where their strides do not allow that
            query, whole = aligned(q), out_at % 8 == 0 and not any(stride % 4 for stride in out.stride()[:-1])
            if query is not q or not whole:
                to = out if whole else torch.empty_like(out, memory_format=torch.contiguous_format)
                self.decode(
                    query,
                    kv_cache,
                    indices,
                    softmax_scale=softmax_scale,
                    lengths=lengths,
                    attn_sink=attn_sink,
                    extra_kv_cache=extra_kv_cache,
                    extra_indices=extra_indices,
                    extra_lengths=extra_lengths,
                    schedule=schedule,
                    out=to,
                    lse_out=lse_out,
                )
                return out if whole else out.copy_(to), lse_out
            second = (extra_kv_cache, extra_indices, extra_lengths)
            of = _as_decode(Tensors(q, kv_cache, indices, out, lse_out, lengths, *second))
            launch = self._launches[key] = self.prepared(of, cut)
        launch(
            out_at,
            lse_out.data_ptr(),
            q_at,
            kv_at,
            indices.data_ptr(),
            0 if lengths is None else lengths.data_ptr(),
            0 if attn_sink is None else attn_sink.data_ptr(),
            extra_at,
            0 if extra_indices is None else extra_indices.data_ptr(),
            0 if extra_lengths is None else extra_lengths.data_ptr(),
            softmax_scale * _LOG2_E,
        )
        return out, lse_out

    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv_cache: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """sparse_prefill on the paged FP8 cache or on flat BF16 rows, which are one block: tokens are rows of one query."""
        return self.decode(
            q,
            kv,
            indices,
            softmax_scale=softmax_scale,
            lengths=lengths,
            attn_sink=attn_sink,
            extra_kv_cache=extra_kv_cache,
            extra_indices=extra_indices,
            extra_lengths=extra_lengths,
            out=out,
            lse_out=lse_out,
        )


def _as_decode(of: Tensors) -> Tensors:
    """A prefill's tensors with the axis that decode has; flat rows are one block."""
    if of.q.dim() == 4:
        return of
    q, kv, indices, out, lse_out, lengths, extra_kv, extra_indices, extra_lengths = of

    def of_rows(of_token: Tensor | None) -> Tensor | None:
        return None if of_token is None else of_token.unsqueeze(1)

    return Tensors(
        q.unsqueeze(1),
        _paged(kv),
        indices.unsqueeze(1),
        out.unsqueeze(1),
        lse_out.unsqueeze(1),
        of_rows(lengths),
        None if extra_kv is None else _paged(extra_kv),
        of_rows(extra_indices),
        of_rows(extra_lengths),
    )


def _paged(kv: Tensor) -> Tensor:
    return kv if kv.dim() == 3 else kv.unsqueeze(0)
