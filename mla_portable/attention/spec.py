# SPDX-License-Identifier: Apache-2.0
"""AttentionSpec: what a model's sparse-MLA layers have in common, known when they are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from mla_portable.contracts import DEFAULT_SCRATCH_BYTES, ROUTES, WORKSPACE_SEQUENCES, InvalidArgument
from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.contracts.values import CACHE_ALIGNMENT, INT32_MAX, check_alignment, check_fields, check_scale, describe
from mla_portable.layouts import LAYOUTS, CacheLayout, layout_names, scale_formats

AUTO_ROUTE: Final = "auto"
_LIMITS: Final[dict[str, tuple[int, int]]] = dict.fromkeys(
    (
        *("num_heads", "block_size", "topk", "max_num_tokens", "max_num_reqs", "max_model_len", "decode_query_len"),
        "prefill_workspace_tokens",
    ),
    (1, INT32_MAX),
)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One value for all layers of a model on one rank.

    Attributes:
        num_heads: H, query heads of this rank. softmax_scale: factor on q.k before the softmax.
        kv_layout: one of `mla_portable.layouts.LAYOUTS`. block_size: of the paged cache, in tokens. topk: K.
        scale_format: how the FP8 scales in the cache are made: "pow2", "amax", or None where unknown (they are then read
            as arbitrary, and `cache_write` makes "pow2").
        cache_alignment: bytes, a power of two up to 16 that divides the address of every layer's cache and the stride
            between its blocks. Implementations that need more are passed over; `forward` refuses a cache that has less.
        contiguous_blocks: blocks follow one another without a gap; blocks of an FP8 cache may still have gaps of whole
            rows. With False, blocks may lie any distance apart: routes that read a bf16 cache as flat rows, and
            implementations that need whole rows between blocks, are passed over.
        max_num_tokens, max_num_reqs: of a step, padding included. max_model_len: greatest sequence length, in tokens.
        decode_query_len: requests with this many query tokens or fewer are decodes; more than 1 for speculative decoding.
        prefill_workspace_tokens: rows of the bf16 workspace; None means 5 * max_model_len. Routes without one ignore it. With
            fewer than max_model_len, routes that gather every prefill are passed over.
        route: "auto" or one of `mla_portable.contracts.ROUTES`. A forced "split" gathers every prefill; a chosen one only those
            that are faster so, where that was measured.
        need_lse: `forward` returns the lse; an implementation that does not return it is passed over.
        attn_sink: the layer has a sink per head. graph: uniform decode batches are captured in CUDA graphs.
        batch_invariant: a row's result does not depend, in a single bit, on what else is in the batch, as long as it is served
            as a decode, or as a prefill, in both; an implementation that cannot promise that is passed over.
        concat_query: `forward` may be given (ql_nope, q_pe) pairs, for which a [max_num_tokens, H, query width] buffer is kept;
            none where there is nothing to join.
        nope: queries and new keys have no rotary part, over a quantised layout whose rows have one: it is written as zeros and
            not read. Routes that gather rows for attention are passed over. Rows without scales come in a layout of their own.
        max_scratch_bytes: bound on the split-KV scratch.
        extra_topk, extra_block_size: of a second cache of the same layout (`extra_kv_cache`), both or neither: the greatest
            width of the list that names its slots, and tokens in its blocks. `SlotAttention` alone has one.
        share: what the cache holds of each sequence: all of it, or the share of one rank of decode context parallelism. Then
            `num_heads` are the heads of the ranks that share it together, as each computes all of them over its own keys, and
            `forward` gives a partial result: `merge_states` of the ranks' outputs and lses is the whole. Sequence lengths,
            positions and `max_model_len` are those of the whole sequence; slots and the block table are this rank's.
    Raises: InvalidArgument for a value of another type or out of range.
    """

    num_heads: int
    softmax_scale: float
    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    kv_layout: str = "fp8_ds_mla"
    block_size: int = 64
    topk: int = 2048
    scale_format: str | None = None
    cache_alignment: int = CACHE_ALIGNMENT
    contiguous_blocks: bool = True
    decode_query_len: int = 1
    prefill_workspace_tokens: int | None = None
    route: str = AUTO_ROUTE
    need_lse: bool = True
    attn_sink: bool = False
    graph: bool = False
    batch_invariant: bool = False
    concat_query: bool = True
    nope: bool = False
    max_scratch_bytes: int = DEFAULT_SCRATCH_BYTES
    share: ContextShare = WHOLE
    extra_topk: int = 0
    extra_block_size: int | None = None

    def __post_init__(self) -> None:
        where = "AttentionSpec"
        check_fields(self, _LIMITS)
        check_scale(where, "softmax_scale", self.softmax_scale)
        check_alignment(where, self.cache_alignment)
        for name, value, allowed in (
            ("kv_layout", self.kv_layout, layout_names()),
            ("scale_format", self.scale_format, (None, *scale_formats())),
            ("route", self.route, (AUTO_ROUTE, *ROUTES)),
        ):
            if value not in allowed:
                raise InvalidArgument(where, name, got=repr(value), expected=f"one of {', '.join(map(str, allowed))}")
        if self.layout.tensor_scale:
            expected = "a layout whose rows need no kv_scale: layers pass none"
            raise InvalidArgument(where, "kv_layout", got=repr(self.kv_layout), expected=expected)
        if self.nope and not (self.layout.is_quantized and self.layout.rope_width):
            expected = "False: only quantised rows with a rotary part are read without it"
            raise InvalidArgument(where, "nope", got=f"True for {self.kv_layout}", expected=expected)
        if self.extra_topk < 0 or (self.extra_block_size is None) != (self.extra_topk == 0):
            got, expected = f"{self.extra_topk}, blocks of {self.extra_block_size}", "0 and None, or both at least 1"
            raise InvalidArgument(where, "extra_topk", got=got, expected=expected)
        if not isinstance(self.share, ContextShare):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(where, "share", got=describe(self.share), expected="a ContextShare")
        if self.share.size > 1 and not self.need_lse:
            raise InvalidArgument(where, "need_lse", got=False, expected="True: partial results are merged by their lse")
        if self.share.size > 1 and self.extra_topk:
            expected = "0: how the ranks of a ContextShare would share a second cache is not defined"
            raise InvalidArgument(where, "extra_topk", got=self.extra_topk, expected=expected)
        if self.share.size > 1 and self.attn_sink:
            expected = "False: every rank of a ContextShare would count the sink"
            raise InvalidArgument(where, "attn_sink", got=True, expected=expected)

    @property
    def layout(self) -> CacheLayout:
        """The layout of the cache."""
        return LAYOUTS[self.kv_layout]

    @property
    def rope_width(self) -> int:
        """Numbers of the rotary part of a query and of a new key."""
        return 0 if self.nope else self.layout.rope_width

    @property
    def query_width(self) -> int:
        """Numbers of a query: those of the latent, then those of the rotary part."""
        return self.layout.value_width + self.rope_width

    @property
    def joins_query(self) -> bool:
        """The halves of a (ql_nope, q_pe) pair are written side by side; where `q_pe` has no columns, ql_nope is the query."""
        return self.concat_query and self.rope_width > 0

    @property
    def workspace_rows(self) -> int:
        """Rows of the bf16 prefill workspace, for the routes that have one."""
        if self.prefill_workspace_tokens is None:
            return WORKSPACE_SEQUENCES * self.max_model_len
        return self.prefill_workspace_tokens

    def cache_facts(self, *, as_rows: bool = False) -> dict[str, Any]:
        """The fields of a Request that say what the cache is like; as_rows: where it is read as flat rows, without blocks."""
        facts: dict[str, Any] = {"kv_layout": self.kv_layout, "cache_alignment": self.cache_alignment}
        if not as_rows:
            facts |= {"block_size": self.block_size, "uneven_blocks": not self.contiguous_blocks}
        return facts | {"scale_format": self.scale_format if self.layout.is_quantized else None}

    def attention_facts(self, *, in_place: bool) -> dict[str, Any]:
        """The fields of a Request that say what attention to the cache, or with in_place=False to gathered rows, needs."""
        facts: dict[str, Any] = {
            "num_heads": self.num_heads,
            "topk": self.topk,
            "lse": self.need_lse,
            "attn_sink": self.attn_sink,
            "batch_invariant": self.batch_invariant,
        }
        if not in_place:
            return facts
        second = {"extra_topk": self.extra_topk, "extra_block_size": self.extra_block_size} if self.extra_topk else {}
        return facts | {"nope": self.nope} | second
