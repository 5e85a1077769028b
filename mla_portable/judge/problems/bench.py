# SPDX-License-Identifier: Apache-2.0
"""The largest level: one size at which implementations of a primitive are timed side by side, and its tensors.

They are made on the device. The oracle gets the very bytes that the kernels read, but only those that its rows name, so a
cache of any size costs it the same. What is large and random is drawn once and repeated: at other addresses, so it costs a
kernel as much as fresh values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, InvalidArgument, Primitive, Request
from mla_portable.judge.problems.compare import Finding
from mla_portable.judge.problems.selection_lists import LayerLists, apart, longest_neighbours, neighbours
from mla_portable.judge.problems.selections import Selections
from mla_portable.judge.problems.stage import Results
from mla_portable.layouts import BF16, INDEX_FP8, LAYOUTS, TOLERANCES, CacheLayout, scale_formats

BLOCK_SIZE: Final = 64
HEADS: Final = (16, 32, 64, 128)
CHUNK_ROWS: Final = 256
"""From so many rows on, the indexer's are tokens of one request."""
_TOPK: Final = 2048  # DeepSeek-V3.2's
_DRAWN: Final = 65_536
"""Tokens that are drawn; longer caches repeat them."""
_POISON: Final = 0xFF
"""A byte that is NaN in e4m3, and twice NaN in bfloat16: what was not written must not look right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is timed of a primitive.

    Attributes:
        rows, layouts, heads: by default; () for layouts and heads that a primitive does not have.
        make: builds a case's problem. shape: its sizes in words.
        width: (rows, topk) -> tokens or scores that are chosen from by default; None where nothing is chosen.
        widths: several of them by default, instead.
        overlaps: rows may share indices. head_dims: pairs (of queries and keys, of values) by default; each is timed with what
            K selects and without a selection.
        takes: what of a file of selections a case may have in place of random values: "neighbours", lists of the tokens of one
            request; "requests", lists of one token of each; "index", the indexer's inputs; "" for nothing.
    """

    rows: tuple[int, ...]
    make: Callable[[Workshop, KernelCase], BenchProblem]
    shape: Callable[[KernelCase], str]
    layouts: tuple[str, ...] = ()
    heads: tuple[int, ...] = HEADS
    width: Callable[[int, int], int] | None = None
    widths: tuple[int, ...] = ()
    overlaps: bool = False
    head_dims: tuple[tuple[int, int], ...] = ()
    takes: Literal["", "neighbours", "requests", "index"] = ""


def timed_primitives() -> tuple[Primitive[Any], ...]:
    """The primitives that have something to time."""
    return tuple(each for each in Primitive.all() if each.problems is not None and each.problems.bench is not None)


def _bench(primitive: Primitive[Any]) -> Bench:
    bench = None if primitive.problems is None else primitive.problems.bench
    if bench is None:
        raise InvalidArgument("KernelCase", "primitive", got=primitive, expected=f"one of {', '.join(timed_primitives())}")
    return bench


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One problem size.

    Attributes:
        rows: batch rows (sparse_decode), tokens (sparse_prefill, masked_prefill, concat_mla_k, pack_selection, convert_indices,
            cache_write, norm_rope_write, rope_quantize_queries), workspace rows (gather_upconvert) or rows of scores
            (topk_select).
        kv_layout, num_heads, topk: None where the primitive has none; topk of masked_prefill also where nothing is masked.
        width: tokens of the cache, of a prompt, rows of the workspace or scores of a row that are chosen from; 0 where nothing
            is chosen.
        query_len: query tokens of a row of sparse_decode. head_dims: of masked_prefill, of queries and keys, and of values.
        overlap: percent of a token's indices that the token before it has too; where `Bench.overlaps`.
        scale_format: of FP8 rows, read or written.
        selection: whose lists, or whose indexer's inputs, are used; None for random ones.
    Raises: InvalidArgument for a size that cannot be made.
    """

    primitive: Primitive[Any]
    rows: int
    kv_layout: str | None = None
    num_heads: int | None = None
    topk: int | None = None
    width: int = 0
    overlap: int = 0
    scale_format: str = "pow2"
    query_len: int = 1
    head_dims: tuple[int, int] | None = None
    selection: LayerLists | None = None

    def __post_init__(self) -> None:
        where, bench = "KernelCase", _bench(self.primitive)
        for name in ("rows", "num_heads", "topk", "query_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(where, name, got=value, expected="at least 1")
        known = self.primitive.layouts
        if self.kv_layout is not None and self.kv_layout not in known:
            raise InvalidArgument(where, "kv_layout", got=repr(self.kv_layout), expected=f"one of {', '.join(known)}")
        if self.scale_format not in scale_formats():
            expected = f"one of {', '.join(scale_formats())}"
            raise InvalidArgument(where, "scale_format", got=repr(self.scale_format), expected=expected)
        if self.kv_layout is not None:  # a plugin's layout has scale formats of its own
            object.__setattr__(self, "scale_format", LAYOUTS[self.kv_layout].scale_format_near(self.scale_format))
        if not 0 <= self.overlap <= 100:
            raise InvalidArgument(where, "overlap", got=self.overlap, expected="0 to 100 percent")
        if self.selection is not None and (not bench.takes or self.query_len > 1):
            expected = "None: its lists are of one token of a request, of primitives that take some"
            raise InvalidArgument(where, "selection", got=str(self.selection), expected=expected)
        if bench.width is not None and self.width < (self.topk or 0):
            expected = f"at least topk ({self.topk}): a row's indices are distinct"
            raise InvalidArgument(where, "width", got=self.width, expected=expected)

    @property
    def form(self) -> str:
        """`Request.form` of what is asked of the registry."""
        if self.head_dims is None:
            return ""
        return f"{self.head_dims[0]}/{self.head_dims[1]}{' selection' if self.topk else ''}"

    @property
    def storage(self) -> str:
        """The tolerance table's word for what the rows hold."""
        if self.kv_layout is None:
            return TOLERANCES[0]
        layout = LAYOUTS[self.kv_layout]
        return layout.tolerance_of(self.scale_format if layout.is_quantized else None)

    @property
    def shape(self) -> str:
        """The sizes in words, scales that are not the usual ones behind them; with primitive and layout it names the case."""
        scales = _is_quantized(self.kv_layout) and self.scale_format == "amax"
        words = [_bench(self.primitive).shape(self)] + [f"{self.scale_format} scales"] * scales
        return ", ".join(words + [f"{self.selection}"] * (self.selection is not None))

    def __str__(self) -> str:
        return " ".join(word for word in (str(self.primitive), self.kv_layout, self.shape) if word)


def kernel_cases(
    primitives: Sequence[Primitive[Any]] = (),
    *,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    layouts: Sequence[str] | None = None,
    topk: int = _TOPK,
    widths: Sequence[int] | None = None,
    overlaps: Sequence[int] = (0,),
    scale_format: str = "pow2",
    selections: Selections | None = None,
    selected_by: Sequence[int] = (),
) -> tuple[KernelCase, ...]:
    """Every combination, by primitive (all that are timed where none is named), layout, head count, width and rows; None takes
    what the primitive has by default.

    With `selections` the cases are those of primitives that take lists or an indexer's inputs, once for each layer of
    `selected_by`: with the file's own rows where these fit `topk`, rows and widths that are asked for, else with lists that are
    drawn like the layer's. An indexer's inputs are never drawn: what they do not fit is left out, or refused where nothing of a
    named primitive is left.

    A layout that a primitive does not have by default is added where it is asked for. Layouts of another cache
    are passed over, unless that leaves a named primitive without one. Head counts, `topk`, `widths`,
    `overlaps` and `scale_format` go to the primitives that know them.
    Raises: InvalidArgument, as KernelCase.
    """
    found: list[KernelCase] = []
    taking = [each for each in primitives or timed_primitives() if selections is None or _bench(each).takes or primitives]
    for primitive in taking:
        bench = _bench(primitive)
        sizes = rows or bench.rows
        asked = [each for each in layouts if not _is_of_another(each, primitive)] if layouts else bench.layouts
        if primitives and layouts and not asked:
            asked = layouts  # refused, with the layouts that there are
        if bench.width is not None:
            grid = product(
                asked if bench.layouts else (None,),
                (heads or bench.heads) if bench.heads else (None,),
                widths or bench.widths or (None,),
                sizes,
                overlaps if bench.overlaps else (0,),
                product(bench.head_dims, (topk, None)) if bench.head_dims else ((None, topk),),
            )
            for layout, count, width, size, overlap, (dims, selected) in grid:
                sizes_of = layout, count, selected, width or bench.width(size, topk), overlap, scale_format
                found.append(KernelCase(primitive, size, *sizes_of, head_dims=dims))
        elif not bench.layouts:
            counts = (heads or bench.heads) if bench.heads else (None,)
            selected = topk if "topk" in primitive.facts else None
            found += [KernelCase(primitive, size, num_heads=count, topk=selected) for count in counts for size in sizes]
        else:
            found += [KernelCase(primitive, size, layout, scale_format=scale_format) for layout in asked for size in sizes]
    if selections is None:
        return tuple(found)
    free = ["width"] * (widths is None) + ["num_heads"] * (heads is None)
    return _with_selections(found, selections, selected_by, primitives, free)


def _with_selections(
    cases: Sequence[KernelCase],
    selections: Selections,
    layers: Sequence[int],
    named: Sequence[Primitive[Any]],
    free: Collection[str],
) -> tuple[KernelCase, ...]:
    """The cases, each once, with the lists or inputs of each layer. free: sizes that may become those of the file."""
    found: dict[KernelCase, None] = {}
    unfit: dict[Primitive[Any], InvalidArgument] = {}
    for case in cases:
        bench = _bench(case.primitive)
        if not bench.takes:
            expected = f"one of {', '.join(each for each in timed_primitives() if _bench(each).takes)}, which take selections"
            raise InvalidArgument("selections", "primitive", got=case.primitive, expected=expected)
        if case.topk is None:  # attention to all keys
            continue
        for layer in layers:
            if bench.takes == "index":
                lists = LayerLists(selections, layer, drawn=False)
                asked = {name: getattr(case, name) for name in ("width", "num_heads") if name not in free}
                try:
                    sizes = lists.index_sizes(case.rows, one_request=case.rows >= CHUNK_ROWS, **asked)
                except InvalidArgument as error:
                    unfit[case.primitive] = error
                else:
                    sizes = {name: sizes[name] for name in sizes if getattr(case, name) is not None}
                    found[replace(case, **sizes, selection=lists)] = None
                continue
            width = _replayed_width(selections, case, bench.takes, free="width" in free)
            if bench.takes == "neighbours" and not bench.head_dims and case.rows > (width or case.width):
                expected = f"at least {case.rows}, the rows: they are tokens of one request, and each sees itself"
                raise InvalidArgument("selections", "width", got=case.width, expected=expected)
            lists = LayerLists(selections, layer, drawn=width is None)
            lists.check(neighbours=bench.takes == "neighbours")
            found[replace(case, width=width or case.width, selection=lists)] = None
    for primitive in named:
        if primitive in unfit and not any(case.primitive is primitive for case in found):
            raise unfit[primitive]
    return tuple(found)


def _replayed_width(selections: Selections, case: KernelCase, takes: str, *, free: bool) -> int | None:
    """The width of the case with the file's own rows; None where these do not fit it."""
    if case.topk != selections.topk:
        return None
    if takes == "requests":
        context = int(selections.seen.max())
        fits = apart(selections, case.rows) is not None and (free or case.width == case.rows * context)
        return case.rows * context if fits else None
    if free:
        found = longest_neighbours(selections, case.rows)
        return None if found is None else found[1]
    return None if neighbours(selections, max(1, case.width - case.rows + 1), case.width) is None else case.width


@dataclass(frozen=True, slots=True, eq=False)
class BenchProblem:
    """A case with its tensors.

    Attributes:
        request: what is asked of the registry.
        arguments: of the primitive, by name; results included. positional: how many of them are positional, in order.
        targets: results by name, to be poisoned before a run that is judged; a call that returns nothing is judged by them.
        bytes_moved: that any implementation must read or write at least, each cached token that is named counted once.
        flops: multiplications and additions of the two matrix products, for the heads that there are; 0 for copies.
        judge: compares results by name with the oracle on a few rows.
    """

    case: KernelCase
    request: Request
    arguments: Mapping[str, Any]
    positional: int
    targets: Mapping[str, Tensor]
    bytes_moved: int
    flops: int
    judge: Callable[[Results], Iterator[Finding]]

    def call(self, bound: Callable[..., Any], **others: Any) -> Any:
        """Run a bound implementation. Returns: what `check` judges."""
        names = list(self.arguments)
        args = [self.arguments[name] for name in names[: self.positional]]
        kwargs = {name: self.arguments[name] for name in names[self.positional :]}
        result = bound(*args, **kwargs, **others)
        return result if self.case.primitive.results else tuple(self.targets.values())

    def check(self, returned: Any) -> Iterator[Finding]:
        """Judge what `call` returned; a result that is None is not looked at."""
        values = returned if isinstance(returned, tuple) else (returned,)
        yield from self.judge({name: value for name, value in zip(self.targets, values, strict=True) if value is not None})

    def poison(self) -> None:
        """Overwrite the results, so that nothing of an earlier run can pass for this one's."""
        for target in self.targets.values():
            target.view(torch.uint8).fill_(_POISON)


class Workshop:
    """Makes problems for one device; keeps one cache per layout and scales, as large as was needed so far."""

    def __init__(
        self, device: torch.device, facts: DeviceFacts, *, seed: int = 0, check_rows: int = 4, block_size: int = BLOCK_SIZE
    ) -> None:
        """check_rows: attention rows that the oracle judges, at most. block_size: of attention's caches, in tokens."""
        self.device, self.check_rows, self.block_size = device, check_rows, block_size
        self._facts = facts
        self._generator = torch.Generator(device).manual_seed(seed)
        self._caches: dict[tuple[str, str], Tensor] = {}

    def make(self, case: KernelCase) -> BenchProblem:
        """The tensors of a case."""
        return _bench(case.primitive).make(self, case)

    def neighbours(self, case: KernelCase, seen: Tensor, batch: int = 1) -> Tensor | None:
        """[batch, T, K] int32: what tokens select that see `seen` [T] keys, one more each; None where a case is random."""
        if case.selection is None:
            return None
        ends = int(seen[0]), int(seen[-1])
        drawn: Any = {"device": self.device, "generator": self._generator}
        return case.selection.of_neighbours(*ends, case.topk or 1, batch=batch, **drawn)

    def of_requests(self, case: KernelCase, context: int) -> Tensor | None:
        """[rows, K] int32: what a token of each request selects of `context` keys; None where a case is random."""
        if case.selection is None:
            return None
        drawn: Any = {"device": self.device, "generator": self._generator}
        return case.selection.of_requests(case.rows, context, case.topk or 1, **drawn)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.bfloat16)

    def scores(self, rows: int, columns: int) -> Tensor:
        return torch.rand((rows, columns), generator=self._generator, device=self.device)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def cache(self, case: KernelCase, tokens: int) -> Tensor:
        """[blocks, block_size, row] holding at least `tokens` tokens of unit variance."""
        block_size = self.block_size
        blocks = -(-tokens // block_size)
        layout = LAYOUTS[case.kv_layout or BF16.name]
        key = layout.name, case.storage
        kept = self._caches.get(key)
        if kept is None or kept.shape[0] < blocks:
            self._caches.pop(key, None)
            drawn = self.normal(min(blocks * block_size, _DRAWN), layout.key_width)
            if layout.in_place:
                drawn = self.packed(layout, drawn, case.scale_format)
            times = -(-blocks * block_size // drawn.shape[0])
            rows = drawn.repeat(times, 1)[: blocks * block_size]
            kept = self._caches[key] = self._paged(layout, rows.view(blocks, block_size, rows.shape[1]))
        return kept[:blocks]

    def index_pages(self, case: KernelCase, blocks: int) -> Tensor:
        """[blocks, 64, row] of the indexer's keys, of unit variance."""
        layout = LAYOUTS[case.kv_layout or INDEX_FP8.name]
        drawn = self.normal(min(blocks * BLOCK_SIZE, _DRAWN), layout.key_width)
        pages = self.pages_of(layout, drawn, case.scale_format)
        return pages.repeat(-(-blocks // pages.shape[0]), 1, 1)[:blocks]

    def pages_of(self, layout: CacheLayout, keys: Tensor, scale_format: str) -> Tensor:
        """[n / 64, 64, row] of the indexer's keys [n, key width] bf16."""
        return self._paged(layout, self.packed(layout, keys, scale_format).view(-1, BLOCK_SIZE, layout.row_width))

    def packed(self, layout: CacheLayout, values: Tensor, scale_format: str) -> Tensor:
        """Keys [n, key width] as rows [n, row width] of a layout in one tensor. Raises: InvalidArgument for another."""
        if layout.tensors:
            got, expected = f"{layout.name}, in {len(layout.tensors)} tensors", "a layout in one tensor"
            raise InvalidArgument("KernelCase", "kv_layout", got=got, expected=expected)
        rows = layout.pack(values[:, : layout.value_width], values[:, layout.value_width :], scale_format)
        return cast(Tensor, rows)

    def _paged(self, layout: CacheLayout, rows: Tensor) -> Tensor:
        """Rows [blocks, block_size, row] as a cache of the same shape."""
        if not layout.apart_bytes:
            return rows
        pages = self.empty(*rows.shape, dtype=layout.dtype)
        parts = layout.parts(pages)
        for part, values in zip(parts, rows.split([part.shape[2] for part in parts], dim=2), strict=True):
            part.copy_(values)
        return pages

    def request(self, case: KernelCase, **others: Any) -> Request:
        """What a case asks of the registry."""
        return Request(
            case.primitive,
            self._facts,
            kv_layout=case.kv_layout,
            num_heads=case.num_heads,
            topk=case.topk,
            rows=case.rows,
            scale_format=case.scale_format if _is_quantized(case.kv_layout) else None,
            graph=self.device.type != "cpu",
            **others,
        )


def _is_of_another(layout: str, primitive: Primitive[Any]) -> bool:
    return layout in LAYOUTS and layout not in primitive.layouts


def _is_quantized(layout: str | None) -> bool:
    return layout is not None and LAYOUTS[layout].is_quantized


def spread(count: int, at_most: int, device: torch.device) -> Tensor:
    """[n] int64: up to `at_most` of `count` rows, evenly spread, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, at_most)).round().long().unique().to(device)
