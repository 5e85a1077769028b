# SPDX-License-Identifier: Apache-2.0
"""What the problems of indexer_logits and indexer_select share: the batch, the pages of keys, the scores in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from mla_portable.contracts import (
    ContextShare,
    DecodeSchedule,
    DeviceFacts,
    Implementation,
    Request,
    ScheduleKind,
    ScheduleLimits,
    StepLengths,
    Support,
)
from mla_portable.contracts.share import WHOLE
from mla_portable.judge.problems.base import STRENGTH, Params
from mla_portable.judge.problems.compare import Tolerance
from mla_portable.judge.problems.draw import PAIR_BLOCK, SLAB_LAYERS, generator, paged, shuffled, vast
from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN, e4m3_values, plugin_layout, token_values
from mla_portable.judge.problems.shapes import (
    MANY_ROWS,
    block_sizes,
    can_capture,
    can_hold_many,
    can_hold_vast,
    heads,
    one_storage_each,
    storage_asked,
    storages,
)
from mla_portable.judge.problems.stage import Stage
from mla_portable.layouts import INDEX_BF16, INDEX_HEAD_SIZE, LAYOUTS, CacheLayout, index_query_dtype

P = TypeVar("P", bound="PageParams")
Q = TypeVar("Q", bound=Params)
_E4M3_NAN: Final = 0x7F
FEW: Final = 70
"""Tokens of context that are more than one block of 64."""
_LONG: Final = 9000
"""Tokens of context that no block of threads holds."""
SHARES: Final = {
    "none": (1, 0),
    "whole": (1, 0),
    "first_of_2": (2, 0),
    "last_of_8": (8, 7),
    "middle_of_3": (3, 1),
    "last_of_2_by_block": (2, 1),
    "first_of_3": (3, 0),
    "first_of_2_by_block": (2, 0),
}
"""Size and rank of a ContextShare, in runs of one token or of a block; all but "none" ask for `context_parallel`."""
_UNIFORM: Final = ("decode", "drafts", "none", "crowd", "published")
"""Batches whose requests have the same number of tokens."""
_SINGLE: Final = ("pair", "address", "slab")
"""Kinds of blocks that make a single request."""
SCORES: Final = {
    ("bf16", "out"): Tolerance(
        1e-4, 1e-3, "float32 sums of exact products, over 128 channels and then over heads, whose terms may cancel", "row"
    ),
    ("fp8", "out"): Tolerance(
        1e-4, 2.0**-14, "units that multiply e4m3 align products to the largest of a sum, and keep 13 bits below it", "terms"
    ),
}
"""Of scores, by the number format of q and keys."""


def query_values(q: Tensor) -> Tensor:
    """[.., 128] bf16 or e4m3 as float64 on the CPU."""
    q = q.detach().cpu()
    return e4m3_values(q.view(torch.uint8)) if q.dtype == torch.float8_e4m3fn else q.double()


def key_values(cache: Tensor, block: int, own: CacheLayout | None = None) -> Tensor:
    """The keys [block_size, 128] float64 of a block, on the CPU, products with scales not rounded. own: of `plugin_layout`."""
    size = cache.shape[1]
    if own is not None:
        return token_values(cache[block : block + 1].cpu(), torch.arange(size, device="cpu"), own)[0]
    page = cache[block].flatten().cpu()  # a block is whole, though blocks may lie apart
    if cache.dtype == torch.bfloat16:
        return page.view(size, INDEX_HEAD_SIZE).double()
    codes, scales = page[: size * INDEX_HEAD_SIZE].view(size, INDEX_HEAD_SIZE), page[size * INDEX_HEAD_SIZE :]
    return e4m3_values(codes) * scales.clone().view(torch.float32).double().unsqueeze(1)


def format_of(q: Tensor) -> str:
    """The tolerance table's word for the number format of q and keys."""
    return "fp8" if q.dtype == torch.float8_e4m3fn else "bf16"


def score(queries: Tensor, factors: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """[n] float64, of queries [H, 128], factors [H] and keys [n, 128], all float64: the scores; what their sums add, unsigned.

    The second is sum_h |factor| * sum_d |q[h, d] * k[d]|, what rounding errors are in proportion to.
    """
    dots, added = queries @ keys.T, queries.abs() @ keys.abs().T  # [H, n]
    return (factors[:, None] * dots.clamp(min=0)).sum(dim=0), (factors.abs()[:, None] * added).sum(dim=0)


def written(scores: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of `score` as indexer_logits writes them, -inf for NaN, and what their sums add, nothing for NaN."""
    lost = scores.isnan()
    return scores.masked_fill(lost, -math.inf), terms.masked_fill(lost, 0)


def spoil(absent: str, numbers: Tensor, scale_bytes: Tensor | None) -> None:
    """Write NaN to every fifth of n keys, as `PageParams.absent` says.

    numbers: [n, 128] bf16, or e4m3 as uint8. scale_bytes: [n, 4] uint8 of float32 scales, None where keys have none.
    """
    rows = torch.arange(len(numbers))[2::5]
    if absent == "nan":
        numbers[rows, rows * 37 % INDEX_HEAD_SIZE] = math.nan if numbers.dtype == torch.bfloat16 else _E4M3_NAN
    elif absent == "nan_scale" and scale_bytes is not None:
        scale_bytes[rows] = 0xFF


def spoiled(implementation: Implementation, facts: DeviceFacts, *bases: Q) -> Iterator[Q]:
    """`bases` with keys of NaN: NaN numbers where the implementation declares that it keeps them, NaN scales everywhere.

    What `Support.nan_keys` excepts is no claim, so it has no case. docs/numerics.md, "NaN codes", names the exceptions.
    """
    for base in bases:
        request = base.request(facts)
        if implementation.support.keeps_nan(request):
            yield replace(base, absent="nan")
        if request.kv_layout is not None and LAYOUTS[request.kv_layout].is_quantized:
            yield replace(base, absent="nan_scale")


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Arguments on the CPU, by name, and where they were placed.

    Attributes:
        arguments: as the oracle reads them. args: as the callee gets them. capacity: positions that the table reaches.
        longest: of the contexts.
    """

    arguments: dict[str, Tensor]
    args: dict[str, Tensor]
    capacity: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageParams(Params):
    """Queries of several requests against a paged index cache.

    Attributes:
        kv, scale_format, heads, block_size: layout of the index cache; H.
        batch: "decode", one token a request; "drafts", three; "prefill", several, on and next to the borders of blocks;
            "chunk", dozens; "long", contexts of thousands; "overlong", more tokens than context, a length past the table and a
            negative one; "edges", lengths at the edges of int32; "full", several tokens of contexts as long as what the table
            reaches, and longer; "crowd", MANY_ROWS requests of a token, few of which have a context; "empty", requests without
            tokens or context; "none", no tokens at all; "published", one request of 4 tokens and no context, as in InfiniCore's
            test test/infinicore/ops/dsa.py; "ragged", that of a probe: weights of one sign in each row, `ragged_blocks` blocks.
        share: "none", or the rank whose share the cache holds: one of SHARES.
        tail: tokens of no request after the last one's.
        starts: "zero", the first request starts at token 0; "late", two tokens of no request come before it; "outside", it
            starts at token -1, and the last one ends after the last token; "edges", at the edges of int32.
        table: "plain"; "holes", negative entries and blocks past the cache; "near", the block behind the cache and the one
            before it, in turn, for the second and third block of a request.
        inputs: "packed" or "views" of wider tensors; so are outputs. blocks: "packed"; "strided"; of a single request: "pair",
            two that lie apart; "address", four from the start to behind element 2**31 of a cache; "slab", to behind element
            2**32 of a buffer of all layers.
        stale: what no request owns holds keys, as it does in an engine, instead of NaN.
        promised: the request says what holds: that the table is whole, where it is "plain"; that requests have the same number
            of tokens.
        absent: "none"; "nan", every fifth key of a request has a number that is NaN; "nan_scale", a scale that is NaN.
        schedule: the kind to pass, None for no schedule; of a batch whose requests have the same number of tokens.

    The cache is a part of a larger one: the blocks before and behind it hold keys, those of others.
    """

    asks = "kv_layout=kv num_heads=heads block_size scale_format"
    kv: str
    scale_format: str | None = None
    heads: int
    block_size: int
    batch: str = "prefill"
    share: str = "none"
    tail: int = 0
    starts: str = "zero"
    table: str = "plain"
    inputs: str = "packed"
    outputs: str = "packed"
    blocks: str = "packed"
    stale: bool = False
    absent: str = "none"
    promised: bool = False
    schedule: ScheduleKind | None = None

    @classmethod
    def asked(cls, device: DeviceFacts, values: Mapping[str, Any]) -> Request:
        """As of every primitive; what leaves it open may promise, and have tables that allow it."""
        promised, single = values.get("promised", True), values.get("blocks") in _SINGLE
        uniform = (single or values.get("batch", "none") in _UNIFORM) and not values.get("tail", 0)
        holds = {
            "whole_tables": values.get("table", "plain") == "plain",
            "uniform_query_len": uniform and values.get("starts", "zero") == "zero",
        }
        told = {name: bool(promised) and held for name, held in holds.items() if name in cls.primitive.stated}
        return super(PageParams, cls).asked(device, values).but(**told)

    @property
    def scheduled(self) -> bool:
        return self.schedule is not None

    @property
    def held(self) -> ContextShare:
        """What the cache holds."""
        return ContextShare(*SHARES[self.share], self.block_size if self.share.endswith("by_block") else 1)

    @property
    def ragged_blocks(self) -> int:
        """Columns of the block table of "ragged"."""
        return 4

    def _batch(self, columns: int) -> list[tuple[int, int]]:
        """(query tokens, length) of each request."""
        block, reach = self.block_size, columns * self.block_size * self.held.size
        if self.blocks in _SINGLE:
            return [(3, reach - 1)]
        kinds = {
            "decode": [(1, 1), (1, block), (1, block + 1), (1, FEW)],
            "drafts": [(3, 3), (3, block + 1), (3, block + 5), (3, FEW)],
            "prefill": [(3, 3), (2, block + 1), (5, block + 5), (1, FEW)],
            "chunk": [(40, 130), (33, 33), (1, FEW), (7, 300)],
            "long": [(1, _LONG), (2, 2500), (1, 5)],
            "overlong": [(4, 2), (2, reach + 9), (1, -5), (2, INT32_MIN)],
            "edges": [(2, INT32_MAX), (2, INT32_MIN), (1, INT32_MIN + 1), (3, INT32_MAX - 1)],
            "full": [(9, reach), (7, reach + 9)],
            "empty": [(0, FEW), (2, 0), (0, 0), (1, 1)],
            "none": [(0, 0), (0, FEW)],
            "crowd": [(1, 1 + i % 7 if i % 500 > 495 else 0) for i in range(MANY_ROWS if self.batch == "crowd" else 0)],
            "published": [(4, 4)],
            "ragged": [(3, reach - block + min(3, block)), (1, 1)],
        }
        return kinds[self.batch]

    def _store(self, cache: Tensor, block: Tensor, at: Tensor, g: torch.Generator, absent: str = "none") -> None:
        """Write random keys, some of NaN as `absent` says, to rows `at` [n] of blocks [n] of a cache."""
        layout = LAYOUTS[self.kv]
        keys = torch.randn(len(block), INDEX_HEAD_SIZE, generator=g)
        own = plugin_layout(self.kv)
        if own is not None and absent != "none":  # what becomes of NaN is the layout's to say
            keys[2::5] = math.nan
        stored, parts = layout.pieces(layout.pack(keys, keys[:, :0], self.scale_format)), layout.parts(cache)
        if own is None:
            spoil(absent, stored[0], stored[1] if len(stored) > 1 else None)
        for part, values in zip(parts, stored, strict=True):
            part[block.to(cache.device), at.to(cache.device)] = values.to(cache.device)

    def pages(self, seed: int, stage: Stage) -> Pages:
        """The arguments of a call."""
        g, layout, block_size = generator(seed), LAYOUTS[self.kv], self.block_size
        share = self.held
        longest = {"chunk": 300, "long": _LONG, "crowd": 7}.get(self.batch, max(FEW, block_size + 5))
        kind = self.blocks if self.blocks in _SINGLE else self.batch
        columns = {"pair": 2, "address": 4, "slab": 4, "ragged": self.ragged_blocks}.get(kind, -(-longest // block_size))
        if kind != self.batch or kind == "ragged":  # every block counts
            longest = columns * block_size * share.size
        batch = self._batch(columns)
        if self.batch != "ragged":
            batch = [batch[i] for i in shuffled(len(batch), g).tolist()]
        if self.starts == "outside":  # requests of several tokens at both ends, so that parts of them are cut off
            *rest, large, largest = sorted(batch)
            batch = [large, *rest, largest]
        queries, lengths = ([each[i] for each in batch] for i in (0, 1))
        first, more = {"zero": (0, 0), "late": (2, 2), "outside": (-1, -2), "edges": (0, 0)}[self.starts]
        num_tokens = sum(queries) + self.tail + more
        owned = len(batch) * columns
        if vast_cache := self.blocks in ("address", "slab"):
            cache, _, slots = vast(layout, block_size, stage.device, layers=SLAB_LAYERS if self.blocks == "slab" else 0)
            blocks = (slots // block_size).unique()
            table = blocks[torch.linspace(0, len(blocks) - 1, 4).long()].view(1, 4).to(torch.int32)
        else:
            num_blocks = owned + (0 if self.blocks == "pair" else 2)
            table = shuffled(num_blocks, g)[:owned].view(len(batch), columns).to(torch.int32)
            # four rows: a multiple of 16 bytes where a block is one, as kernels require that copy blocks by descriptors
            gap = 0 if self.blocks == "packed" else 4 * layout.row_bytes
            larger = paged(layout.dtype, layout.row_width, num_blocks + 2, block_size, gap_bytes=gap).view  # NaN
            cache = larger[1:-1]
            others = torch.arange(num_blocks + 2) if self.stale else torch.tensor([0, num_blocks + 1])
            place = torch.arange(block_size).repeat(len(others))
            self._store(larger, others.repeat_interleave(block_size), place, generator(seed ^ 1))
        for request, length in enumerate(lengths):
            if length <= 0:
                continue
            position = torch.arange(share.length(min(max(length, 0), columns * block_size * share.size)))
            self._store(cache, table[request, position // block_size].long(), position % block_size, g, self.absent)
        num_blocks = cache.shape[0]
        if self.table == "near":
            beside = torch.tensor([num_blocks, -1], dtype=torch.int32)
            for column in (1, 2)[: columns - 1]:
                table[:, column] = beside[(torch.arange(len(batch)) + column) % 2]
        elif self.table == "holes":
            for i, bad in enumerate((-1, num_blocks, INT32_MIN, num_blocks + 114514)):
                table.view(-1)[i::7] = bad
        starts = torch.tensor([first, *queries]).cumsum(0).to(torch.int32)
        if self.starts == "edges":
            starts[0], starts[-1] = INT32_MIN, INT32_MAX
        # bf16 numbers, so that an op which takes them so loses nothing
        weights = torch.randn(num_tokens, self.heads, generator=g).bfloat16().float()
        if self.batch == "ragged":  # logits of the first two tokens can only be negative without the ReLU
            weights[:2], weights[2] = weights[:2].abs(), -weights[2].abs()
        q = torch.randn(num_tokens, self.heads, INDEX_HEAD_SIZE, generator=g)
        arguments = {
            "q": q.to(index_query_dtype(layout)),
            "weights": weights,
            "index_cache": cache,
            "query_start_loc": starts,
            "seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "block_table": table,
        }
        apart = self.inputs == "views"
        args = {
            name: stage.read(name, tensor, strided=apart and name in ("q", "weights", "block_table"))
            for name, tensor in arguments.items()
            if name != "index_cache" or not vast_cache
        }
        args = {name: args.get(name, cache) for name in arguments}
        return Pages(arguments, args, columns * block_size * share.size, longest)

    def planned(self, pages: Pages, device: torch.device, facts: DeviceFacts, topk: int = 0) -> dict[str, DecodeSchedule]:
        """The keyword `schedule` of a call, planned for the lengths of its requests; nothing where none is passed."""
        if self.schedule is None:
            return {}
        lengths, num_tokens = pages.arguments["seq_lens"], pages.arguments["q"].shape[0]
        query_len = num_tokens // len(lengths)
        limits = ScheduleLimits(
            device, self.heads, topk, num_tokens, query_len, facts.num_sms or 16, facts.arch, request=self.request(facts)
        )
        step = StepLengths(lengths.numpy(), pages.args["seq_lens"])
        return {"schedule": self.schedule.schedule(self.schedule.planner(limits), len(lengths), query_len, step)}


def needs_a_promise(support: Support) -> bool:
    """The implementation runs only where something is promised, so that its cases promise it."""
    return support.needs_whole_tables or support.needs_uniform_query_len


def page_params(
    kind: type[P],
    implementation: Implementation,
    facts: DeviceFacts,
    level: str,
    axes: dict[str, list[Any]],
    *,
    plain: dict[str, Any],
    few: dict[str, Any],
    whole: dict[str, Any],
) -> Iterator[P]:
    """What a level asks of an implementation.

    Args:
        axes: beside those that both primitives have. plain, few: their values in the cases of one scene each; `few` in those
            where tokens see more than is asked for. whole: those of a call with all positions that the table reaches.
    """
    promised = needs_a_promise(implementation.support)
    uniform = implementation.support.needs_uniform_query_len
    plain = {**plain, "promised": promised, **({"batch": "drafts"} if uniform else {})}
    axes = {
        "storage": storages(implementation),
        "heads": heads(implementation, facts, level),
        "block_size": block_sizes(implementation, facts, level),
        "batch": ["drafts", "decode", "none"] if uniform else ["prefill", "decode", "overlong", "empty", "none"],
        "tail": [0, 2],
        "table": ["plain", "holes"],
        "inputs": ["packed", "views"],
        "outputs": ["packed", "views"],
        "blocks": ["packed", "strided"],
        "run": ["once", "repeat"],
        **({"promised": [True]} if promised else {}),
    } | axes
    yield from kind.covering(implementation, facts, axes, strength=STRENGTH[level])
    if level == "smoke" or not all(axes.values()):
        return
    for kv, scale_format in axes["storage"]:
        sizes = {"heads": axes["heads"][-1], "block_size": axes["block_size"][-1]}
        base = kind(kv=kv, scale_format=scale_format, **sizes, **plain)
        fewer = replace(base, **few)
        fewest = replace(fewer, heads=axes["heads"][0])
        yield from (replace(base, starts=starts) for starts in ("late", "outside"))
        for starts in ("zero", "edges"):  # 2 tokens a request, and 4: kernels may have another form for so many
            yield from (replace(fewer, batch="edges", starts=starts, tail=tail) for tail in (0, 8))
        yield replace(fewer, batch="chunk", tail=1)
        yield replace(base, batch="long", tail=1)
        if (kv, scale_format) in one_storage_each(axes["storage"]):
            yield from (replace(fewest, stale=True), replace(fewest, table="near"))
            if not promised:  # what needs no promise may take it
                yield from (replace(fewer, batch=batch, promised=True) for batch in ("chunk", "drafts"))
            few_rows = (replace(each, batch="decode") for each in (fewest, fewer))
            yield from spoiled(implementation, facts, *few_rows, replace(fewer, batch="chunk"))
            if implementation.schedule_kind is not None:
                planned = replace(fewer, schedule=implementation.schedule_kind, **whole)
                yield from (replace(planned, batch=batch, run="repeat") for batch in ("drafts", "decode"))
            if can_hold_many(facts, level):
                yield replace(fewest, batch="crowd")
            if can_hold_vast(kv, facts, level, slabs=1):
                yield replace(fewer, blocks="slab")
        if base.block_size >= PAIR_BLOCK:
            yield replace(fewer, blocks="pair")
        if can_hold_vast(kv, facts, level):
            yield replace(fewer, blocks="address")
        if can_capture(implementation, facts):
            yield replace(base, run="graph", table="holes", tail=2)
            if promised:
                yield replace(base, run="graph")


def page_of_request(kind: type[P], request: Request, **own: Any) -> P:
    """What a probe takes: every block counts; two of them are missing, unless the request promises that none is."""
    storage, sizes = storage_asked(request, INDEX_BF16, "amax"), (request.num_heads or 1, request.block_size or 1)
    own |= {"table": "plain" if request.whole_tables else "near"}
    own |= {"batch": "drafts"} if request.uniform_query_len else {"batch": "ragged", "tail": 1}
    promised = request.whole_tables or request.uniform_query_len
    return kind(**storage, heads=sizes[0], block_size=sizes[1], promised=promised, **own)


def scored(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    width: int,
    share: ContextShare = WHOLE,
    kv_layout: str | None = None,
) -> tuple[Tensor, Tensor]:
    """[T, width] float64 on the CPU: the meaning of indexer_logits, token by token and block by block, and what sums add.

    Columns are positions of whole sequences; those of other ranks than that of `share` are -inf. NaN stays NaN: see `written`.
    kv_layout: of the cache; None for any of the core's.
    """
    layout, queries, factors = plugin_layout(kv_layout), query_values(q), weights.detach().cpu().double()
    cache, table = index_cache.detach(), block_table.cpu()
    num_blocks, block_size, _ = cache.shape
    logits = torch.full((q.shape[0], width), -math.inf, dtype=torch.float64, device="cpu")
    added = torch.zeros_like(logits)
    starts = query_start_loc.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        last = min(max(length, 0), table.shape[1] * block_size * share.size) - 1  # position of the request's last token
        tokens = range(max(starts[request], 0), min(starts[request + 1], logits.shape[0]))
        for column in range(table.shape[1] if tokens else 0):
            entry = torch.arange(column * block_size, (column + 1) * block_size)
            run, place = entry // share.interleave, entry % share.interleave
            position = (run * share.size + share.rank) * share.interleave + place
            if int(position[0]) > last:
                break
            block = int(table[request, column])
            if not 0 <= block < num_blocks:
                continue
            keys = key_values(cache, block, layout)
            for token in tokens:
                own = last - (starts[request + 1] - 1 - token)
                end = int((position < min(own + 1, width)).sum())
                if end:
                    here = position[:end]
                    logits[token, here], added[token, here] = score(queries[token], factors[token], keys[:end])
    return logits, added
