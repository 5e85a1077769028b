# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The fused path of the DSA indexer: what vLLM's operator `sparse_attn_indexer` does, without gathered keys or a logits matrix.

New keys are written, by vLLM's own operator where a trial shows that it works; then indexer_select reads the pages and writes
the chosen positions straight into `topk_indices_buffer`, once for the step's decodes and once for its prefills.

The builder of vLLM's indexer metadata attaches an `IndexerStep` to what it builds: requests as the runner knows them, whatever
vLLM's own kernels need (flattened drafts, packed queries, prefill chunks). Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention import SelectionMerge
from mla_portable.choose import get_registry
from mla_portable.contracts import (
    ContextShare,
    DecodeSchedule,
    InvalidArgument,
    LengthsPlanner,
    Request,
    ScheduleKind,
    ScheduleLimits,
    SchedulePlanner,
    StepLengths,
)
from mla_portable.engines.common.index_keys import facts_of_pages, kind_of_pages
from mla_portable.engines.common.metrics import publish
from mla_portable.engines.common.routing import bind_for, in_words, pairs
from mla_portable.engines.common.warm_up import warm_indexer
from mla_portable.engines.vllm import compat, settings
from mla_portable.engines.vllm.context_parallel import gather_from_ranks
from mla_portable.engines.vllm.model import BLOCK_SIZE
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.layouts import E4M3_MAX, INDEX_FP8, INDEX_HEAD_SIZE
from mla_portable.primitives import (
    INDEXER_CACHE_WRITE,
    INDEXER_SELECT,
    SELECT_SCRATCH_BYTES,
    TOPK_SELECT,
    IndexerCacheWrite,
    IndexerSelect,
)

_VALUE: Final = 256.0
"""e4m3 holds it with both formats of scales: 256 * 1 and 448 * (256 / 448)."""
_OURS: Final = {"ue8m0": "pow2"}
"""vLLM's names of scale formats; any other is `amax`."""


@dataclass(slots=True)
class Requests:
    """Consecutive requests of a step, and their tokens [first, last) of the batch.

    Attributes:
        query_start_loc: [R + 1] int32, relative to `first`. seq_lens: [R] int32. block_table: [R, columns] int32.
        longest: no sequence is longer, by what the host knows.
        schedules: of the step's decodes, for each BoundIndexer whose indexer_select takes one.
    """

    first: int
    last: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    longest: int
    schedules: dict[BoundIndexer, DecodeSchedule] = field(default_factory=dict, init=False, repr=False)
    _narrow: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _seen: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def table(self, block_size: int, *, whole: bool) -> Tensor:
        """The block table; unless `whole`, its columns in use alone. A graph needs all: later sequences are longer.

        block_size: tokens of a sequence for a column, those of other ranks included.
        """
        if whole:
            return self.block_table
        narrow = self._narrow.get(block_size)
        if narrow is None:
            narrow = self._narrow[block_size] = self.block_table[:, : max(1, -(-self.longest // block_size))]
        return narrow

    def select_all(self, out: Tensor) -> None:
        """Write every position that each token sees to `out` [T, K] int32, ascending, then -1: no sequence is longer than K."""
        if self._seen is None or self._seen[0].shape[0] != out.shape[1]:
            self._seen = self._count_seen(out)
        column, seen, absent = self._seen
        torch.where(column < seen, column, absent, out=out)

    def _count_seen(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns [K], how many positions each token sees [T, 1], and -1: the same for all layers of the step. int32."""
        ends, device = self.query_start_loc[1:], out.device
        token, column = (torch.arange(size, dtype=torch.int32, device=device) for size in out.shape)
        request = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
        seen = torch.where(token < ends[-1], token - ends[request] + self.seq_lens[request] + 1, 0)
        return column, seen.unsqueeze(1), torch.full((), -1, dtype=torch.int32, device=device)


class IndexerStep(NamedTuple):
    """num_tokens: query tokens of the step, padding for a CUDA graph included. parts: all of its requests, in order."""

    num_tokens: int
    parts: tuple[Requests, ...]


def plan_step(common: Any, num_decodes: int, num_decode_tokens: int) -> IndexerStep:
    """The step of vLLM's CommonAttentionMetadata, whose leading requests are decodes. No synchronisation."""
    num_reqs, num_tokens = int(common.num_reqs), int(common.num_actual_tokens)
    starts, lengths, table = common.query_start_loc, common.seq_lens, common.block_table_tensor
    parts: list[Requests] = []
    if num_decodes:
        last = num_decode_tokens if num_decodes < num_reqs else num_tokens
        some = starts[: num_decodes + 1], lengths[:num_decodes], table[:num_decodes]
        parts.append(Requests(0, last, *some, int(common.max_seq_len)))
    if num_decodes < num_reqs and num_tokens:
        begins = starts[num_decodes : num_reqs + 1]
        if num_decode_tokens:
            begins = begins - num_decode_tokens
        known = compat.host_lengths(common, common.query_start_loc_cpu.numpy()[:num_reqs])
        longest = common.max_seq_len if known is None else known[num_decodes:].max()
        some = begins, lengths[num_decodes:num_reqs], table[num_decodes:num_reqs]
        parts.append(Requests(num_decode_tokens, num_tokens, *some, int(longest)))
    return IndexerStep(num_tokens, tuple(parts))


class IndexerSchedules:
    """The schedules of indexer_select for the steps of one of vLLM's metadata builders, made once a step for all layers.

    A builder has planners of its own: microbatches are planned side by side, each by its builder.
    """

    def __init__(self, max_num_rows: int, max_query_len: int) -> None:
        """max_num_rows: most tokens of a step, graph padding included. max_query_len: of a request that decodes."""
        self._max_num_rows, self._max_query_len = max_num_rows, max_query_len
        self._planners: dict[BoundIndexer, SchedulePlanner | LengthsPlanner] = {}

    def plan(self, step: IndexerStep, common: Any, num_decodes: int) -> None:
        """Plan the decodes of a step where their requests have equally many tokens. No synchronisation.

        Layers call without one where their indexer was not bound yet, as in vLLM's profiling run, and while they are captured.
        """
        planned = [each for each in _indexers().values() if each.kind is not None]
        if not planned or not num_decodes:
            return
        decodes = step.parts[0]
        starts = common.query_start_loc_cpu.numpy()[: num_decodes + 1]
        query_len = int(starts[1])
        uniform = query_len * num_decodes == decodes.last and (np.diff(starts) == query_len).all()
        if not uniform or not 1 <= query_len <= self._max_query_len:
            return
        host = compat.host_lengths(common, starts[:-1])
        lengths = StepLengths(host, decodes.seq_lens)
        for bound in planned:
            assert bound.kind is not None
            planner = self._planners.get(bound)
            if planner is None:
                planner = self._planners[bound] = bound.kind.planner(self._limits(bound, decodes.seq_lens.device))
            decodes.schedules[bound] = bound.kind.schedule(planner, num_decodes, query_len, lengths)

    def _limits(self, bound: BoundIndexer, device: torch.device) -> ScheduleLimits:
        request = bound.request
        assert request is not None  # where there is a kind
        facts = request.device
        return ScheduleLimits(
            device=device,
            num_heads=request.num_heads or 1,
            topk=bound.topk,
            max_num_rows=self._max_num_rows,
            max_query_len=self._max_query_len,
            num_sms=facts.num_sms,
            arch=facts.arch,
            request=request,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoundIndexer:
    """The callables that serve layers of one kind. `graph`: indexer_select may be captured in a CUDA graph.

    `write` is None where vLLM's own operator writes. `share`: what the cache holds. `merge` is None where that is everything.
    `request`: what indexer_select is bound for. `kind`: of its schedules, None where it takes none.
    """

    select: IndexerSelect
    write: IndexerCacheWrite | None
    merge: SelectionMerge | None
    graph: bool
    topk: int
    block_size: int
    scale_format: str
    share: ContextShare
    is_capturing: Callable[[], bool]
    request: Request[IndexerSelect] | None = None
    kind: ScheduleKind | None = None

    def write_keys(self, k: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Write keys [T, 128] of new tokens to slots [T] int64, negative = skip."""
        if self.write is None:
            _vllm_write()(k, kv_cache, slots, INDEX_HEAD_SIZE, self.scale_format)
        else:
            self.write(k, kv_cache, slots, scale_format=_OURS.get(self.scale_format, "amax"))

    def choose(self, q: Tensor, weights: Tensor, kv_cache: Tensor, step: IndexerStep, out: Tensor) -> None:
        """Choose keys for the step's tokens.

        Args:
            q: [T or more, H, 128] float8_e4m3fn. weights: [T or more, H] float32. out: [T or more, K] int32, written.
        """
        whole, share = self.is_capturing(), self.share
        scores = None if self.merge is None else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        for part in step.parts:
            rows = slice(part.first, part.last)
            if part.longest <= self.topk and not whole:  # nothing is selected away; a graph's later sequences are longer
                part.select_all(out[rows])
                continue
            pages = kv_cache, part.query_start_loc, part.seq_lens, part.table(self.block_size * share.size, whole=whole)
            if self.merge is None or scores is None:
                # A replay would read what its own step planned, and padding gives that other shapes than the captured one
                schedule = None if whole else part.schedules.get(self)
                planned: dict[str, Any] = {} if schedule is None else {"schedule": schedule}
                self.select(q[rows], weights[rows], *pages, topk=self.topk, out=out[rows], **planned)
            else:
                own = {"out": out[rows], "scores_out": scores[rows], **share.arguments}
                self.select(q[rows], weights[rows], *pages, topk=self.topk, **own)
                self.merge(scores[rows], out[rows])

    def scratch_bytes(self, num_tokens: int) -> int:
        """What `choose` may allocate for a step, which the memory profile is to see."""
        if self.merge is None:
            return SELECT_SCRATCH_BYTES
        return 4 * num_tokens * self.topk + max(SELECT_SCRATCH_BYTES, self.merge.nbytes(num_tokens))


def _indexers() -> dict[tuple[object, ...], BoundIndexer]:
    """Those that were bound under the policy in force."""
    return get_registry().keep("vLLM's indexers", dict)


def indexer_for(
    kv_cache: Tensor,
    num_heads: int,
    topk: int,
    device: torch.device,
    *,
    scale_format: str,
    share: ContextShare,
    longest: int,
    reason: str,
) -> BoundIndexer:
    """The indexer of layers with this cache, `index_fp8`; before there is a cache, of one in whole rows of blocks of 64.

    Args:
        scale_format: "ue8m0", or what else vLLM calls it. share: what the cache holds of each sequence.
        longest: tokens of the longest sequence. reason: why this indexer serves, for the log.
    Binds and tries implementations at the first call of a kind, and makes what its steps need, which belongs outside of CUDA
    graphs: vLLM's profiling run.
    Raises: UnsupportedRequest, with every reason, when nothing serves the indexer here; InvalidArgument for another cache.
    """
    pages = kind_of_pages(kv_cache) if kv_cache.numel() else _first_kind(device)
    key = device, num_heads, topk, scale_format, share, pages
    bound = _indexers()
    found = bound.get(key)
    if found is None:
        found = bound[key] = _bind(kv_cache, num_heads, topk, device, scale_format, share, longest, reason)
    return found


@cache
def _first_kind(device: torch.device) -> tuple[object, ...]:
    """That of a cache of pages one behind the other, for which vLLM's profiling run binds."""
    return kind_of_pages(_pages_like(torch.empty(0), device, 2))


def can_capture() -> bool:
    """All that was bound so far may be captured in CUDA graphs."""
    return all(each.graph for each in _indexers().values())


def _bind(
    kv_cache: Tensor,
    num_heads: int,
    topk: int,
    device: torch.device,
    scale_format: str,
    share: ContextShare,
    longest: int,
    reason: str,
) -> BoundIndexer:
    facts: dict[str, Any] = {"kv_layout": INDEX_FP8.name, "block_size": BLOCK_SIZE}
    if kv_cache.numel():
        facts = facts_of_pages(kv_cache, "sparse_attn_indexer")
    here = get_registry().facts(device)
    shared = share.size > 1
    # attention adds in the order of the list, which must be the same for the same bits; candidates of ranks ascend so that a
    # merge keeps the lower positions of equal scores
    same_bits = compat.wants_batch_invariance()
    requests: list[Request[Any]] = [
        # vLLM's tables name a block for every token below a length; rows of padding have length 0
        Request(
            INDEXER_SELECT,
            here,
            num_heads=num_heads,
            topk=topk,
            context_parallel=shared,
            ordered=shared or same_bits,
            whole_tables=True,
            **facts,
        )
    ]
    if shared:
        requests.append(Request(TOPK_SELECT, here, topk=topk, ordered=same_bits))
    if not _vllm_writes(device):
        made = _OURS.get(scale_format, "amax")
        requests.append(Request(INDEXER_CACHE_WRITE, here, scale_format=made, **facts))
    bound = bind_for(*requests)  # where nothing can be captured, vLLM runs the model's attention outside of graphs
    served = pairs(each.decision for each in bound)
    by: dict[Any, Any] = {each.request.primitive: each.call for each in bound}
    select = by[INDEXER_SELECT]
    write = by.get(INDEXER_CACHE_WRITE)
    merge = SelectionMerge(share, topk, by[TOPK_SELECT], gather_from_ranks, device) if shared else None
    warm_indexer(
        select,
        partial(_pages_like, kv_cache, device),
        num_heads=num_heads,
        topk=topk,
        longest=longest,
        dtype=torch.float8_e4m3fn,
        share=share,
    )
    publish(here.name, served, settings.logger)
    words = in_words(served) + ("" if write else ", keys written by vLLM")
    _log_server(f"{here}, {num_heads} heads, top-{topk}: {words}", reason)
    capturing = accelerator(device).is_capturing
    chosen, block_size = bound[0], facts["block_size"]
    kind = None if shared else chosen.implementation.schedule_kind
    own = chosen.request.graph, topk, block_size, scale_format, share, capturing, chosen.request, kind
    return BoundIndexer(select, write, merge, *own)


def _pages_like(kv_cache: Tensor, device: torch.device, count: int) -> Tensor:
    """Pages of zeros that lie as those of the cache; before there is one, one behind the other."""
    if not kv_cache.numel():
        return torch.zeros((count, BLOCK_SIZE, INDEX_FP8.row_width), dtype=torch.uint8, device=device)
    apart = kv_cache.stride(0) if len(kv_cache) > 1 else kv_cache[0].numel()
    memory = torch.zeros(count * apart, dtype=torch.uint8, device=device)
    return memory.as_strided((count, *kv_cache.shape[1:]), (apart, *kv_cache.stride()[1:]))


@cache
def _log_server(what: str, reason: str) -> None:
    settings.logger.info("mla_portable serves the DSA indexer on %s; because %s", what, reason)


def _vllm_writes(device: torch.device) -> bool:
    """vLLM's operator writes the keys. Raises: InvalidArgument when it is forced and does not work."""
    forced = settings.cache_writer()
    if forced == "mla_portable":
        return False
    why_not = try_vllm_write(device)
    if forced == "vllm" and why_not:
        expected = f"auto or mla_portable: vLLM's operator does not write the indexer's keys on {device} ({why_not})"
        raise InvalidArgument("environment", settings.ENV_WRITER, got="'vllm'", expected=expected)
    return not why_not


@cache
def try_vllm_write(device: torch.device) -> str:
    """Write one key with vLLM's operator and look at the page. Waits for the device. Returns: why it does not work, or ""."""
    width = INDEX_HEAD_SIZE
    with neutral_defaults():
        k = torch.full((1, width), _VALUE, dtype=torch.bfloat16, device=device)
        pages = torch.zeros((2, BLOCK_SIZE, INDEX_FP8.row_width), dtype=torch.uint8, device=device)
        slots = torch.tensor([BLOCK_SIZE + 1], dtype=torch.int64, device=device)
        try:
            _vllm_write()(k, pages, slots, width, "ue8m0")
            page = pages[1].cpu().flatten()
        except (AttributeError, ImportError, NotImplementedError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    codes = page[width : 2 * width].view(torch.float8_e4m3fn).float()
    scale = page[BLOCK_SIZE * width :].view(torch.float32)[1]
    expected = torch.full_like(codes, _VALUE)
    if torch.allclose(codes * scale, expected, rtol=1e-6) and not pages[0].any():
        return ""
    return f"a key of {_VALUE} came out as {float(codes[0])} * {float(scale)} (at most {E4M3_MAX} * a float32 scale)"


@cache
def _vllm_write() -> Callable[..., None]:
    return import_module("vllm._custom_ops").indexer_k_quant_and_cache
