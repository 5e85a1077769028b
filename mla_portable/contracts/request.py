# SPDX-License-Identifier: Apache-2.0
"""Request: one question to the registry, "who can run this primitive on these shapes here?"."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Generic, TypeVar, cast

from mla_portable.contracts.device import DeviceFacts
from mla_portable.contracts.primitive import F, Primitive
from mla_portable.contracts.values import CACHE_ALIGNMENT, INT32_MAX, check_alignment, check_fields, describe, refuse
from mla_portable.layouts import LAYOUTS, scale_formats

G = TypeVar("G")

_LIMITS: Final[dict[str, tuple[int, int]]] = dict.fromkeys(
    ("num_heads", "topk", "block_size", "extra_topk", "extra_block_size", "query_len", "qk_head_dim", "v_head_dim"),
    (1, INT32_MAX),
)


@dataclass(frozen=True, slots=True)
class Request(Generic[F]):
    """The static facts of a call; a field that does not matter for a primitive stays None (or False).

    Attributes:
        primitive, device: what to run, where.
        kv_layout: one of `mla_portable.layouts.LAYOUTS`, of the cache or workspace that is read or written.
        num_heads: H. topk: K. block_size: of the paged cache. query_len: S of sparse_decode.
        extra_topk, extra_block_size: K and block size of a second cache of the same layout, to which every row attends as well;
            None where there is none. extra_lengths: the call has `extra_lengths`.
        nope: queries are as wide as the latent, and the rotary part of the rows, quantised ones that have one, is not read.
        qk_head_dim, v_head_dim: width of a head's queries and keys, and of its values, where a call has keys of each head.
        rows: query rows (B * S or T) where a choice may depend on the amount of work; never decides what can run.
        scale_format: how the FP8 scales in the cache were made; None where unknown, which is read as arbitrary.
        cache_alignment: bytes, a power of two up to 16 that divides the address of the cache (or of the rows of kv) and the
            stride between its blocks; of a second cache too. A cache of whole rows in memory from torch has 16.
        uneven_blocks: the stride between the blocks of the cache, or of a second one, is no multiple of the distance between
            its rows (`CacheLayout.row_pitch`).
        lse, attn_sink, lengths, compact, prefill_workspace, selection: the call needs this feature. With lse=False the
            implementation may skip the lse: `lse_out` is scratch, and the second result may be NaN or a tensor without
            elements. Any other value in it is the lse.
        seq_lens: the call has `seq_lens`, which limits positions to those that are cached.
        context_parallel: the cache holds one rank's share of each sequence (`ContextShare`), of several ranks.
        clean_indices: a promise about the values of `indices`: each is -1 or a slot of the cache (a row of kv), and what
            stands past a row's length, which is 0 to K, is -1, so that `lengths` only repeats it. It saves work and never
            decides what can run. Violating this promise can read out-of-bounds memory.
        clean_lengths: likewise of `lengths`: each is 0 to K, and no index in front of it is negative: they count compacted
            indices.
        finite_values: a promise about `k` and `v`: no row of them holds NaN or infinity, those of no request and of other
            requests included. What needs it (`Support.needs_finite_values`) multiplies rows behind a request's end by 0, and
            runs under this promise alone. Where it is broken, results of neighbouring requests become NaN.
        follows_in_order: a promise about the stream: the kernel in front of each call ends after all that is before it in the
            stream, as one that is launched normally does (`Support.ends_in_order`). A kernel that waits for it may then start
            before its end (CUDA's programmatic dependent launch). Where the promise is broken, a call may read what is not
            written yet, or overwrite what is still read.
        batch_invariant: a row's result may not depend, in a single bit, on the other rows: the bound implementation computes it
            in the same way for every `rows`, and a schedule cuts every batch in the same way (`PlannerConfig.batch_invariant`).
        graph: the call is going to be captured in a CUDA graph.
        configuration: kernel configuration from a file of times; None = the plugin's own. The registry sets it for the
            chosen implementation just before `bind`; it never decides what can run.
    """

    primitive: Primitive[F]
    device: DeviceFacts
    kv_layout: str | None = None
    num_heads: int | None = None
    topk: int | None = None
    block_size: int | None = None
    extra_topk: int | None = None
    extra_block_size: int | None = None
    query_len: int | None = None
    qk_head_dim: int | None = None
    v_head_dim: int | None = None
    rows: int | None = None
    scale_format: str | None = None
    cache_alignment: int = CACHE_ALIGNMENT
    uneven_blocks: bool = False
    lse: bool = False
    attn_sink: bool = False
    lengths: bool = False
    extra_lengths: bool = False
    nope: bool = False
    compact: bool = False
    prefill_workspace: bool = False
    selection: bool = False
    seq_lens: bool = False
    context_parallel: bool = False
    clean_indices: bool = False
    clean_lengths: bool = False
    finite_values: bool = False
    follows_in_order: bool = False
    batch_invariant: bool = False
    graph: bool = False
    configuration: tuple[tuple[str, int], ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, _LIMITS)
        if not isinstance(self.primitive, Primitive):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse("Request", "primitive", describe(self.primitive), "a mla_portable.contracts.Primitive")
        if not isinstance(self.device, DeviceFacts):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse("Request", "device", describe(self.device), "DeviceFacts", "Ask `get_registry().facts(device)` for them.")
        for name, allowed in (("kv_layout", tuple(LAYOUTS)), ("scale_format", scale_formats())):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                refuse("Request", name, repr(value), f"one of {', '.join(allowed)}")
        check_alignment("Request", self.cache_alignment)
        if self.context_parallel and self.extra_cache:
            expected = "None with context_parallel: how ranks would share a second cache is not defined"
            refuse("Request", "extra_topk", self.extra_topk, expected, "Keep each sequence whole on one rank.")

    @property
    def extra_cache(self) -> bool:
        """The call has a second cache."""
        return self.extra_topk is not None

    def of(self, primitive: Primitive[G]) -> Request[G]:
        """This request with its type narrowed to `primitive`, which it must be for. Raises: InvalidArgument."""
        if self.primitive != primitive:
            refuse("Request", "primitive", repr(str(self.primitive)), repr(str(primitive)))
        return cast("Request[G]", self)

    def but(self, **changes: Any) -> Request[F]:
        """The same request with some fields changed."""
        return replace(self, **changes)

    @property
    def form(self) -> str:
        """Names measured times of attention over keys of each head, beside heads and rows: "192/128", "192/128 selection".

        "" for a primitive without head dims, or where they are left open.
        """
        if self.qk_head_dim is None or self.v_head_dim is None:
            return ""
        return f"{self.qk_head_dim}/{self.v_head_dim}{' selection' if self.selection else ''}"

    def __str__(self) -> str:
        words = [
            f"{field.name}={'yes' if value is True else value}"
            for field in fields(self)
            if field.name not in ("primitive", "device") and (value := getattr(self, field.name)) != field.default
        ]
        return " ".join([*words, f"on {self.device}"])
