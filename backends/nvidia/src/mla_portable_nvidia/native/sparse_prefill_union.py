# SPDX-License-Identifier: Apache-2.0
"""sparse_prefill of few heads over the union of neighbouring tokens' lists: two launches.

A block of the kernel for many heads has 64. With 8 to 32 heads a token, those of several neighbouring tokens fill it: the block
reads every row that one of them chose once, and a row scores -inf for the tokens that did not choose it. The first launch makes
the unions, the second attends. The time of a block follows the size of its union, so it depends on the selections whether this
is faster. A row with NaN or an infinity makes NaN of all tokens of a block, which multiply the same values, by 0 if it is not
theirs. So it is never chosen automatically; `docs/dev/nvidia-kernels.md` says from which overlap on it pays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from mla_portable.contracts import Implementation, InvalidArgument, Request, Support
from mla_portable.kit.results import attention_results
from mla_portable.layouts import FP8_DS_MLA, FP8_NOPE, LAYOUTS
from mla_portable.primitives import SPARSE_PREFILL, SparsePrefill
from mla_portable_nvidia.alignment import aligned
from mla_portable_nvidia.native.bound_attention import LOG2_E, check_cache, layout_of, rows_of_request
from mla_portable_nvidia.native.build_choice import BUILDS, MANY, cut_of_build
from mla_portable_nvidia.native.checks import check, index_of
from mla_portable_nvidia.native.kernel_build import KernelBuild, load
from mla_portable_nvidia.native.runtime.driver import Kernel, Launch, Launches
from mla_portable_nvidia.native.sparse_decode import FP8_IDLE_ROPE, Build, Tensors, prepare, row_defines
from mla_portable_nvidia.native.sparse_decode_wide import WideBuild

__all__ = [
    "ATTENDING",
    "MOST_ENTRIES",
    "UNIONS",
    "NativeUnion",
    "UnionBuild",
    "UnionRowsBuild",
    "sharers",
    "union_build",
    "union_implementations",
]

NAME: Final = "nvidia.native_union"
MOST_ENTRIES: Final = 2048
"""Of a token's list."""
MOST_SHARERS: Final = 4
"""Tokens of a block: the bits above OWNERS_AT."""
_MOST_SLOTS: Final = (1 << 28) - 1
"""Of the cache: the bits of an index below OWNERS_AT, but for the highest slot, which -1 would be."""
_SCRATCH: Final = 64 << 20
"""Bytes of unions of one launch."""
_EXPECTED: Final = 1.6
"""Size of a union in lists, by which units of work are cut; two neighbours that share 80 % of their keys."""


def sharers(num_heads: int) -> int:
    """Tokens of a block."""
    return min(MOST_SHARERS, 64 // num_heads)


@dataclass(frozen=True, slots=True)
class UnionBuild(WideBuild):
    """The kernel for many heads with those of several tokens in a block. token_heads: of each."""

    token_heads: int = field(default=16, kw_only=True)

    @property
    def sharers(self) -> int:
        """Tokens of a block."""
        return sharers(self.token_heads)

    @property
    def heads(self) -> int:
        return self.sharers * self.token_heads

    @property
    def label(self) -> str:
        return f"{self.kernel}-{self.rows}-union-{self.sharers}x{self.token_heads}"

    @property
    def defines(self) -> tuple[tuple[str, int | str], ...]:
        own = (("STAGES", self.stages), ("SHARERS", self.sharers), ("TOKEN_HEADS", self.token_heads))
        return (*row_defines(self.rows, self.lists, self.shared), *own)


@dataclass(frozen=True, slots=True)
class UnionRowsBuild(KernelBuild):
    """The unions of the lists of `sharers` tokens each."""

    kernel: ClassVar[str] = "union_rows"
    changing: ClassVar[str] = "4P"  # lists, counts, indices, lengths
    fixed: ClassVar[str] = "3i 3q"  # tokens, topk, slots; strides of lists, of indices, of lengths
    archs: ClassVar[Mapping[str, str]] = WideBuild.archs

    sharers: int

    @property
    def label(self) -> str:
        return f"{self.kernel}-{self.sharers}"

    @property
    def threads(self) -> int:
        return 1024

    @property
    def _table(self) -> int:
        return 2 * self.sharers * MOST_ENTRIES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (("SHARERS", self.sharers), ("MOST", MOST_ENTRIES), ("TABLE", self._table), ("THREADS", self.threads))

    @property
    def shared_bytes(self) -> int:
        runs = self.sharers * MOST_ENTRIES // 32
        return 5 * self._table + 4 * runs + 8

    @property
    def wide_clusters(self) -> bool:
        return False


_LAYOUTS: Final = (FP8_DS_MLA.name, FP8_NOPE.name)
_HEADS: Final = (8, 16, 24, 32)
UNIONS: Final = tuple(UnionRowsBuild(count) for count in sorted({sharers(heads) for heads in _HEADS}))
"""The builds that make unions."""


def union_build(rows: str, num_heads: int) -> UnionBuild:
    """The build that attends. rows: that it reads, one of ROW_HEADERS."""
    like = next(build for build in BUILDS[rows] if build.kernel == MANY.kernel)
    presence = 16 * like.stages - (like.stages + 1) // 2 * 8  # whose key a token is, in place of whether it is there
    return UnionBuild(rows, stages=like.stages, shared=like.shared + presence, token_heads=num_heads)


ATTENDING: Final = tuple(union_build(rows, heads) for rows in (*_LAYOUTS, FP8_IDLE_ROPE) for heads in _HEADS)
"""The builds that attend."""


class _Prepared(NamedTuple):
    """Launches for the tokens of one part of a call."""

    unite: Launch
    attend: Launch


class NativeUnion:
    """sparse_prefill for a bound request; devices are loaded at bind or at their first call."""

    def __init__(self, request: Request[SparsePrefill]) -> None:
        num_heads = request.num_heads
        if num_heads is None:
            raise InvalidArgument(NAME, "num_heads", got="None", expected="the heads that it is bound for")
        layout = LAYOUTS[layout_of(request)]
        self._heads, self._num_sms, self._kv_layout = num_heads, request.device.num_sms, layout.name
        self._width = layout.value_width if request.nope else layout.key_width
        self._build = union_build(rows_of_request(request), num_heads)
        self._unions = UnionRowsBuild(self._build.sharers)
        arch = self._build.archs[request.device.arch]
        self._on = cache(partial(load, self._build, arch))
        self._unite_on = cache(partial(load, self._unions, arch))
        self._launches = Launches[_Prepared]()
        index = index_of(request)
        for on in (self._on, self._unite_on):
            on(index)

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See SparsePrefill. Tokens beyond what _SCRATCH holds the unions of are served by further launches."""
        out, lse_out = attention_results(q, kv, out, lse_out)
        num_tokens, topk = indices.shape
        if num_tokens == 0:
            return out, lse_out
        self._check(q, kv, topk)
        query = aligned(q)
        query = query if _one_row(query) else query.contiguous()
        to = out if _one_row(out) and out.data_ptr() % 8 == 0 and out.stride(1) % 4 == 0 else torch.empty_like(query[..., :512])
        lse_to = lse_out if _one_row(lse_out) else torch.empty_like(lse_out, memory_format=torch.contiguous_format)
        entries = self._build.sharers * topk
        most = max(1, _SCRATCH // (4 * entries)) * self._build.sharers
        units = -(-min(num_tokens, most) // self._build.sharers)
        lists = torch.empty((units, entries), dtype=torch.int32, device=q.device)
        counts = torch.empty((units,), dtype=torch.int32, device=q.device)
        for first in range(0, num_tokens, most):
            part = slice(first, first + most)
            of_part = None if lengths is None else lengths[part]
            of = Tensors(query[part], kv, indices[part], to[part], lse_to[part], of_part)
            self._attend(of, attn_sink, lists, counts, softmax_scale)
        return (
            to if to is out else out.copy_(to),
            lse_to if lse_to is lse_out else lse_out.copy_(lse_to),
        )

    def _check(self, q: Tensor, kv: Tensor, topk: int) -> None:
        """The call is one of those that were bound, and of a cache whose slots an index can name. Raises: InvalidArgument."""
        check_cache(NAME, "kv", kv, self._kv_layout)
        for name, got, most in (("indices", topk, MOST_ENTRIES), ("kv", kv.shape[0] * kv.shape[1], _MOST_SLOTS)):
            if got > most:
                what = "entries of a token" if name == "indices" else "slots"
                raise InvalidArgument(NAME, name, got=f"{got} {what}", expected=f"at most {most}")
        if q.shape[1:] != (self._heads, self._width):
            expected = f"{self._heads} heads of {self._width}, for which it was bound"
            raise InvalidArgument(NAME, "q", got=f"{q.shape[1]} heads of {q.shape[2]}", expected=expected)

    def _attend(self, of: Tensors, attn_sink: Tensor | None, lists: Tensor, counts: Tensor, softmax_scale: float) -> None:
        """Both launches, prepared for the first call of these shapes and strides. of: tokens, [T, ...]."""
        q, kv, indices, out, lse, lengths, *_ = of
        of_lengths = None if lengths is None else lengths.stride()
        shapes = (q.shape, q.stride(), kv.shape, kv.stride(), indices.shape, indices.stride(), of_lengths)
        key = (shapes, out.stride(), lse.stride(), lists.stride(), q.get_device())
        launches = self._launches.get(key)
        if launches is None:
            launches = self._launches[key] = self._prepared(of, lists, counts)
        launches.unite(lists.data_ptr(), counts.data_ptr(), indices.data_ptr(), 0 if lengths is None else lengths.data_ptr())
        sink = 0 if attn_sink is None else attn_sink.data_ptr()
        results, inputs = (out.data_ptr(), lse.data_ptr()), (q.data_ptr(), kv.data_ptr(), lists.data_ptr(), counts.data_ptr())
        launches.attend(*results, *inputs, sink, 0, 0, 0, softmax_scale * LOG2_E)

    def _prepared(self, of: Tensors, lists: Tensor, counts: Tensor) -> _Prepared:
        q, kv, indices, out, lse, lengths, *_ = of
        num_tokens, topk = indices.shape
        units, index = -(-num_tokens // self._build.sharers), q.get_device()
        num_slots = kv.shape[0] * kv.shape[1]
        length_stride = 0 if lengths is None else lengths.stride(0)
        fixed = (num_tokens, topk, num_slots, lists.stride(0), indices.stride(0), length_stride)
        kernel = self._on(index)
        cut = cut_of_build(self._build, units=units, keys=int(_EXPECTED * topk), clusters=partial(self._held, kernel))
        of_units = (lists[:units].unsqueeze(1), counts[:units].unsqueeze(1))
        united = Tensors(_as_one_row(q), kv, of_units[0], _as_one_row(out), _as_one_row(lse), of_units[1])
        return _Prepared(
            self._unite_on(index).prepare((units, 1), 1, *fixed),
            prepare(kernel, self._build, united, cluster=cut.cluster, whole=cut.whole),
        )

    def _held(self, kernel: Kernel, build: Build, size: int) -> int:
        """Clusters of `size` blocks that the device holds at once."""
        return self._num_sms if size == 1 else kernel.max_clusters(size)


def _one_row(of_tokens: Tensor) -> bool:
    """The heads of a token [T, H, ...] follow those of the token before at the distance of any two."""
    return of_tokens.shape[0] == 1 or of_tokens.stride(0) == of_tokens.shape[1] * of_tokens.stride(1)


def _as_one_row(of_tokens: Tensor) -> Tensor:
    """[T, H, ...] as [1, 1, T * H, ...]."""
    return of_tokens.flatten(0, 1)[None, None]


def bind_union(request: Request[SparsePrefill]) -> SparsePrefill:
    """sparse_prefill. Raises: NvrtcNotFound, CompilationFailed, DriverError where the kernels cannot be built here."""
    return NativeUnion(request)


def union_implementations() -> Iterator[Implementation[SparsePrefill]]:
    """sparse_prefill over unions, which serves only where it is named."""
    yield Implementation(
        name=NAME,
        primitive=SPARSE_PREFILL,
        support=Support(
            source="mla_portable_nvidia/native: union_rows.cu, sparse_decode_wide.cu with SHARERS",
            device_types=("cuda",),
            vendors=("nvidia",),
            archs=tuple(WideBuild.archs),
            kv_layouts=_LAYOUTS,
            num_heads=_HEADS,
            max_topk=MOST_ENTRIES,
            cache_alignment=16,
            min_shared_memory=max(build.shared_bytes for build in ATTENDING),
            needs_fp8_conversion=True,
            nope=True,
        ),
        bind=bind_union,
        check=check,
        preference=8.0,
        automatic=False,
    )
