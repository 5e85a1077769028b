# SPDX-License-Identifier: Apache-2.0
"""Request: one question to the registry, "who can run this primitive on these shapes here?"."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Final, Generic, TypeVar, cast

from mla_portable.contracts.device import DeviceFacts
from mla_portable.contracts.primitive import F, Primitive
from mla_portable.contracts.values import CACHE_ALIGNMENT, INT32_MAX, check_alignment, check_fields, describe, refuse
from mla_portable.features import Features, Promises
from mla_portable.layouts import LAYOUTS, scale_formats

G = TypeVar("G")

_LIMITS: Final[dict[str, tuple[int, int]]] = dict.fromkeys(
    ("num_heads", "topk", "block_size", "extra_topk", "extra_block_size", "query_len", "qk_head_dim", "v_head_dim"),
    (1, INT32_MAX),
)


@dataclass(frozen=True, slots=True)
class Request(Promises, Features, Generic[F]):
    """The static facts of a call; a field that does not matter for a primitive stays None (or False).

    Beside its sizes it has the fields of `Features`, what the call needs, and of `Promises`, what its caller promises.

    Attributes:
        primitive, device: what to run, where.
        kv_layout: one of `mla_portable.layouts.LAYOUTS`, of the cache or workspace that is read or written.
        index_layout: likewise of the indexer's cache, of a call that may write both.
        num_heads: H. topk: K. block_size: of the paged cache. query_len: S of sparse_decode.
        extra_topk, extra_block_size: K and block size of a second cache of the same layout, to which every row attends as well;
            None where there is none. extra_lengths: the call has `extra_lengths`.
        qk_head_dim, v_head_dim: width of a head's queries and keys, and of its values, where a call has keys of each head.
        rows: query rows (B * S or T) where a choice may depend on the amount of work; never decides what can run.
        scale_format: how the FP8 scales in the cache were made; None where unknown, which is read as arbitrary.
        cache_alignment: bytes, a power of two up to 16 that divides the address of the cache (or of the rows of kv) and the
            stride between its blocks; of a second cache too. A cache of whole rows in memory from torch has 16.
        uneven_blocks: the stride between the blocks of the cache, or of a second one, is no multiple of the distance between
            its rows (`CacheLayout.row_pitch`).
        configuration: kernel configuration from a file of times; None = the plugin's own. The registry sets it for the
            chosen implementation just before `bind`; it never decides what can run.
    """

    primitive: Primitive[F]
    device: DeviceFacts
    kv_layout: str | None = None
    index_layout: str | None = None
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
    extra_lengths: bool = False
    _: KW_ONLY
    configuration: tuple[tuple[str, int], ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, _LIMITS)
        if not isinstance(self.primitive, Primitive):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse("Request", "primitive", describe(self.primitive), "a mla_portable.contracts.Primitive")
        if not isinstance(self.device, DeviceFacts):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse("Request", "device", describe(self.device), "DeviceFacts", "Ask `get_registry().facts(device)` for them.")
        layouts = tuple(LAYOUTS)
        for name, allowed in (("kv_layout", layouts), ("index_layout", layouts), ("scale_format", scale_formats())):
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
        """What is stated: sizes, features, promises, and at last whether it is for a graph."""
        ordered = sorted(fields(self), key=lambda each: (each.name == "graph", each.kw_only is True))
        words = [
            f"{field.name}={'yes' if value is True else value}"
            for field in ordered
            if field.name not in ("primitive", "device") and (value := getattr(self, field.name)) != field.default
        ]
        return " ".join([*words, f"on {self.device}"])
