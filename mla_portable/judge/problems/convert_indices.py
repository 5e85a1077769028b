# SPDX-License-Identifier: Apache-2.0
"""How convert_indices is tried and judged: slots, counts and their order are exact.

One case is published: request, table and positions of InfiniCore's test of sparse-attention operators
(test/infinicore/ops/dsa.py, at 2cec6ce6). That test compares two implementations; the slots expected here follow from
table[req, position // 64] * 64 + position % 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import ContextShare, DeviceFacts, Implementation, Request, Support
from mla_portable.judge.problems.base import Params, Problems
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import BITS, Finding, same_bits
from mla_portable.judge.problems.cover import Choice, covering, crossed
from mla_portable.judge.problems.draw import MIXED, PATTERNS, generator, index_rows, shuffled
from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN
from mla_portable.judge.problems.shapes import (
    MANY_ROWS,
    accepted,
    block_sizes,
    can_capture,
    can_hold_many,
    narrow_topks,
    says_something,
    topks,
)
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.primitives import CONVERT_INDICES

_PROBED_TOKENS: Final = 6
_JUDGED_TOKENS: Final = 64
"""Tokens of a timed conversion that the oracle judges."""
_REQUESTS: Final = 128
"""Requests at most that a timed conversion serves."""
_CONTEXT: Final = 8_192
"""Tokens of each of those requests."""
_TABLE: Final = [[2, 3], [5, 6]]
_PUBLISHED_ROWS: Final = (
    (0, [0, 63, 64, -1], [128, 191, 192, -1]),
    (0, [1, 65, -1, -1], [129, 193, -1, -1]),
    (1, [0, 64, -1, -1], [320, 384, -1, -1]),
    (1, [3, 66, -1, -1], [323, 386, -1, -1]),
)
"""(request, positions, expected slots)."""
_SHARES: Final = {
    "none": ContextShare(),
    "first_of_2": ContextShare(2, 0),
    "last_of_8": ContextShare(8, 7),
    "middle_of_3_by_4": ContextShare(3, 1, 4),
    "last_of_2_by_64": ContextShare(2, 1, 64),
}
_PROBED_SHARE: Final = "middle_of_3_by_4"
_PARTS: Final = {"prefill": (0, 1, 2, 3), "decode": (0, 3)}
NUM_REQUESTS: Final = 4
NUM_TOKENS: Final = 7


def convert_indices(
    topk_indices: Tensor,
    req_id_per_token: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_slots: int | None = None,
    prefill_request_ids: Tensor | None = None,
    prefill_workspace_starts: Tensor | None = None,
    seq_lens: Tensor | None = None,
    compact: bool = False,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
) -> tuple[Tensor, Tensor]:
    """indices [T, K] and counts [T], int32."""
    positions, table = topk_indices.cpu().long(), block_table.cpu().long()
    place = positions % (dcp_size * interleave) - dcp_rank * interleave  # in the rank's run of each round
    owned = (positions >= 0) & (place >= 0) & (place < interleave)
    positions = torch.where(owned, positions // (dcp_size * interleave) * interleave + place, -1)
    requests = req_id_per_token.tolist()
    prefills = [-1] * len(requests) if prefill_request_ids is None else prefill_request_ids.tolist()
    starts: list[int] = [] if prefill_workspace_starts is None else prefill_workspace_starts.tolist()
    indices = torch.full(positions.shape, -1, dtype=torch.int32, device="cpu")
    counts = torch.zeros(positions.shape[0], dtype=torch.int32, device="cpu")
    for token, (request, prefill) in enumerate(zip(requests, prefills, strict=True)):
        pos = positions[token]
        known = 0 <= request < table.shape[0]
        length = INT32_MAX + 1 if seq_lens is None else int(seq_lens[request]) if known else 0
        place = torch.nonzero((pos >= 0) & (pos < length))[:, 0]  # columns of the row that may hold a valid entry
        if prefill >= 0:
            place = place if prefill < len(starts) else place[:0]
            found = pos[place] + (starts[prefill] if prefill < len(starts) else 0)
        else:
            place = place if known else place[:0]
            place = place[pos[place] // block_size < table.shape[1]]
            block = table[request, pos[place] // block_size] if place.numel() else pos[place]
            place, block = place[block >= 0], block[block >= 0]
            found = block * block_size + pos[place] % block_size
            inside = found < num_slots if num_slots is not None else found >= 0
            place, found = place[inside], found[inside]
        fits = (found >= 0) & (found <= INT32_MAX)
        place, found = place[fits], found[fits].to(torch.int32)
        counts[token] = found.numel()
        if compact:
            indices[token, : found.numel()] = found
        else:
            indices[token, place] = found
    return indices, counts


def findings(
    storage: str,
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    *,
    positions: Tensor | None = None,
    rows: Tensor | None = None,
    compact: bool = False,
) -> Iterator[Finding]:
    """indices [n, K] and counts [n]. positions: [n, K], what they were made from. rows: [n], their numbers among many."""

    def place(where: tuple[int, ...]) -> str:
        return f"row {where[0] if rows is None else int(rows[where[0]])}"

    def of_index(where: tuple[int, ...]) -> tuple[str, str]:
        values = f"{int(got['indices'][where])}, expected {int(want['indices'][where])}"
        if compact or positions is None:
            return f"entry {where[1]} of a {'compacted ' if compact else ''}row is {values}", place(where)
        return f"position {int(positions[where])} became slot {values}", place(where)

    def of_count(where: tuple[int, ...]) -> tuple[str, str]:
        return f"the count is {int(got['counts'][where])}, expected {int(want['counts'][where])}", place(where)

    yield same_bits("indices", got["indices"].cpu(), want["indices"], symptom=of_index)
    yield same_bits("counts", got["counts"].cpu(), want["counts"], symptom=of_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertIndicesParams(Params):
    """One convert_indices call.

    Attributes:
        topk, block_size: K, tokens a block. tokens: T.
        pattern: where positions are invalid (`inputs.PATTERNS`); positions past the table's width are among them.
        table: "plain"; "holes", negative entries and blocks past the cache; "huge", blocks whose slots pass int32.
        limit: pass num_slots.
        seq_lens: pass lengths: a block, none, all but the last token of the table, and a negative one.
        compact: valid entries first.
        share: "none", or the rank whose share the cache holds: one of _SHARES.
        requests: "plain"; "edges", requests of the table and of the workspace that do not exist, up to the edges of int32,
            where the workspace's starts are as well.
        workspace: "none"; "mixed", some tokens map to the prefill workspace; "half", the second half; "all" do.
        inputs, outputs: "packed" or "views" into larger memory; outputs also "fresh", allocated by the callee.
    """

    primitive = CONVERT_INDICES
    says = (
        "k{topk}! b{block_size}! {pattern}! t{tokens} table_{table} limit{limit} "
        "seq_lens{seq_lens} compact{compact} workspace_{workspace} requests_{requests} share_{share} in{inputs} out_{outputs}"
    )
    asks = "topk block_size rows=tokens compact prefill_workspace=workspace seq_lens context_parallel=share"
    topk: int
    block_size: int
    tokens: int = NUM_TOKENS
    pattern: str = "dense"
    table: str = "plain"
    limit: bool = False
    seq_lens: bool = False
    compact: bool = False
    workspace: str = "none"
    requests: str = "plain"
    share: str = "none"
    inputs: str = "packed"
    outputs: str = "fresh"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage = generator(seed), Stage(device)
        columns = -(-(self.topk + self.topk // 8 + 2) // self.block_size) + 1
        num_blocks = NUM_REQUESTS * columns + 5
        table = shuffled(num_blocks, g)[: NUM_REQUESTS * columns].view(NUM_REQUESTS, columns).to(torch.int32)
        if self.table == "holes":
            table.view(-1)[::5] = -1
            table.view(-1)[1::5] = num_blocks + 114514
            table.view(-1)[2::15] = INT32_MIN
        elif self.table == "huge":
            last = INT32_MAX // self.block_size  # the last block that has a slot within int32
            for i, block in enumerate((last, min(last + 1, INT32_MAX), INT32_MAX)):
                table.view(-1)[i::4] = block
        share = _SHARES[self.share]
        positions = self._positions(columns * self.block_size * share.size, g)
        requests = torch.randint(0, NUM_REQUESTS, (self.tokens,), generator=g, dtype=torch.int32)
        turn = torch.arange(self.tokens)
        if self.requests == "edges":
            odd = torch.tensor([0, -1, INT32_MIN, INT32_MIN + 1, NUM_REQUESTS, INT32_MAX, NUM_REQUESTS - 1], dtype=torch.int32)
            requests = odd[turn % len(odd)]
        originals: dict[str, Tensor] = {"topk_indices": positions, "req_id_per_token": requests, "block_table": table}
        if self.workspace != "none":
            ids = torch.randint(0, 3, (self.tokens,), generator=g, dtype=torch.int32)
            if self.workspace == "mixed":
                ids[torch.rand(self.tokens, generator=g) < 0.5] = -1
            elif self.workspace == "half":
                ids[: self.tokens // 2] = -1
            originals["prefill_request_ids"] = ids
            order = shuffled(3, g)
            if self.workspace == "half":  # none whose rows end past int32
                ids[self.tokens // 2 :] = torch.arange(self.tokens - self.tokens // 2) % 2
                order = torch.arange(3)
            starts = torch.tensor([0, 1000, INT32_MAX - 40], dtype=torch.int32)[order]
            if self.requests == "edges":
                # from a start of -2^31 no position has a row, from -5 all but the first five have one
                starts = torch.tensor([-5, INT32_MIN, INT32_MIN + 1, INT32_MAX], dtype=torch.int32)
                odd = torch.tensor([0, 1, 2, 3, 4, INT32_MAX, INT32_MIN, INT32_MIN + 1], dtype=torch.int32)
                originals["prefill_request_ids"] = odd[turn % len(odd)]
            originals["prefill_workspace_starts"] = starts
        if self.seq_lens:
            lengths = [self.block_size, 0, columns * self.block_size - 1, -5]  # at borders, which positions are among
            originals["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
        placed = {name: stage.read(name, t, strided=self.inputs == "views") for name, t in originals.items()}
        # fewer slots than the table names: whole blocks, and the last ones of a block, fall outside
        num_slots = num_blocks * self.block_size * 3 // 4 - 1 if self.limit else None
        static: dict[str, Any] = {"block_size": self.block_size, "num_slots": num_slots, "compact": self.compact}
        static |= share.arguments
        judged = torch.linspace(0, self.tokens - 1, 96).long() if self.tokens > 96 else torch.arange(self.tokens)
        per_token = ("topk_indices", "req_id_per_token", "prefill_request_ids")
        judged_originals = {name: t[judged] if name in per_token else t for name, t in originals.items()}
        want = dict[str, Tensor](zip(("indices", "counts"), convert_indices(**judged_originals, **static), strict=True))
        args = {name: placed.pop(name) for name in ("topk_indices", "req_id_per_token", "block_table")}
        keywords = {**placed, **static}
        if self.outputs != "fresh":
            strided = self.outputs == "views"
            indices = stage.write("indices", (self.tokens, self.topk), torch.int32, strided=strided)
            keywords["out"] = (indices, stage.write("counts", (self.tokens,), torch.int32))

        def judge(results: Results) -> Iterator[Finding]:
            got = {name: value[judged] for name, value in results.items()}
            yield from findings("any", got, want, positions=positions[judged], rows=judged, compact=self.compact)

        returns = {"indices": ((self.tokens, self.topk), torch.int32), "counts": ((self.tokens,), torch.int32)}
        return Problem(stage, args, keywords, returns, judge, outputs=frozenset({"out"}))

    def _positions(self, width: int, g: torch.Generator) -> Tensor:
        """[T, K] int32 positions below `width`, the borders of blocks among them."""
        borders = torch.tensor([0, self.block_size - 1, self.block_size, width - 1]).clamp(max=width - 1).unique()
        others = shuffled(width, g)
        used = torch.cat([borders, others[~torch.isin(others, borders)]])[: max(self.topk, len(borders))]
        return index_rows(self.pattern, self.tokens, self.topk, used, used[:0], width, None, g)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConvert(Params):
    """The published positions. part: "prefill", all four rows; "decode", one of each request."""

    primitive = CONVERT_INDICES
    says = "{pattern}! k{topk}! b{block_size}! {part}!"
    asks = "topk block_size rows"
    part: str
    pattern: str = "published"
    topk: int = len(_PUBLISHED_ROWS[0][1])
    block_size: int = 64

    @property
    def rows(self) -> int:
        return len(_PARTS[self.part])

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params. Nothing is random."""
        stage = Stage(device)
        requests, positions, slots = zip(*(_PUBLISHED_ROWS[i] for i in _PARTS[self.part]), strict=True)
        tensors = {"topk_indices": positions, "req_id_per_token": requests, "block_table": _TABLE}
        args = {name: stage.read(name, torch.tensor(values, dtype=torch.int32)) for name, values in tensors.items()}
        indices = torch.tensor(slots, dtype=torch.int32)
        want = {"indices": indices, "counts": (indices >= 0).sum(1, dtype=torch.int32)}

        def judge(results: Results) -> Iterator[Finding]:
            yield from findings("any", results, want)

        returns = {name: (tuple(each.shape), torch.int32) for name, each in want.items()}
        return Problem(stage, args, {"block_size": self.block_size}, returns, judge)


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[Params]:
    """What a level asks of an implementation of convert_indices."""
    compact = accepted(implementation, facts, "compact", [False, True])
    workspace = accepted(implementation, facts, "prefill_workspace", [False, True])
    shares = accepted(implementation, facts, "context_parallel", [False, True])
    axes: dict[str, list[Any]] = {
        "pattern": ["corpus", "absent", "last", "holes"] if level == "smoke" else list(PATTERNS),
        "topk": topks(implementation, facts, level),
        "block_size": block_sizes(implementation, facts, level),
        "compact": compact,
        "workspace": ["none", "mixed", "all"] if True in workspace else ["none"],
        "share": list(_SHARES) if True in shares else ["none"],
        "table": ["plain", "holes", "huge"],
        "limit": [True, False],
        "outputs": ["fresh", "packed", "views"],
        "inputs": ["packed", "views"],
        "run": ["once", "repeat"],
    }
    if not all(axes.values()):
        return

    def allowed(choice: Choice) -> bool:
        return says_something(choice) and ConvertIndicesParams.claimed(implementation, facts, choice)

    seeds = crossed(axes, ["topk", "block_size", "compact", "workspace"]) if level == "full" else []
    for choice in covering(axes, strength=1 if level == "smoke" else 2, allowed=allowed, seeds=seeds):
        yield ConvertIndicesParams(**choice)
    plain = {name: values[-1:] for name, values in axes.items()} | {
        "topk": [k for k in axes["topk"] if k >= 8][:1],
        "run": ["once"],
    }
    for choice in covering(plain, strength=1, allowed=allowed):
        params = ConvertIndicesParams(**choice)
        yield replace(params, tokens=0)
        if can_hold_many(facts, level):
            yield replace(params, tokens=MANY_ROWS)
    if True in accepted(implementation, facts, "seq_lens", [True]):
        bounded = plain | {name: axes[name] for name in ("compact", "workspace", "share", "inputs")}
        bounded |= {"seq_lens": [True], "pattern": ["corpus"], "table": ["plain"]}
        yield from (ConvertIndicesParams(**choice) for choice in covering(bounded, strength=2, allowed=allowed))
    edges = plain | {"workspace": axes["workspace"][:2]}
    for choice in () if level == "smoke" else covering(edges, strength=1, allowed=allowed):
        yield replace(ConvertIndicesParams(**choice), requests="edges", tokens=16, pattern="corpus")
    narrow = plain | {"topk": narrow_topks(implementation, facts), "pattern": ["dense", "absent"], "compact": compact}
    if level != "smoke" and narrow["topk"]:
        yield from (ConvertIndicesParams(**choice) for choice in covering(narrow, strength=1, allowed=allowed))
    if level != "smoke" and can_capture(implementation, facts):
        graphed = axes | {"run": ["graph"], "outputs": ["packed"], "topk": axes["topk"][-1:], "inputs": ["packed"]}
        for choice in covering(graphed, strength=1, allowed=allowed):
            yield ConvertIndicesParams(**choice)
    if level != "smoke":
        yield from (PublishedConvert(part=part) for part in _PARTS)


def _variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    yield "holes", request
    if support.compact:
        yield "compact", request.but(compact=True)
    if support.prefill_workspace:
        yield "workspace", request.but(prefill_workspace=True)
    if support.seq_lens:
        yield "lengths", request.but(seq_lens=True)
    if support.context_parallel:
        yield "share", request.but(context_parallel=True)


def _of_request(request: Request, name: str) -> ConvertIndicesParams:
    return ConvertIndicesParams(
        topk=request.topk or 1,
        block_size=request.block_size or 1,
        tokens=_PROBED_TOKENS,
        pattern=MIXED,
        table="plain" if name == "lengths" else "holes",  # what a length leaves out is there
        limit=name != "lengths",
        compact=request.compact,
        workspace="half" if request.prefill_workspace else "none",
        seq_lens=request.seq_lens,
        share=_PROBED_SHARE if request.context_parallel else "none",
        outputs="packed",
    )


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    block_size = workshop.block_size
    tokens, topk = case.rows, case.topk or 1
    requests, columns = min(tokens, _REQUESTS), -(-_CONTEXT // block_size)
    table = workshop.permutation(requests * columns).view(requests, columns).to(torch.int32)
    owner = (torch.arange(tokens, device=workshop.device) * requests // tokens).to(torch.int32)
    positions = (workshop.scores(tokens, topk) * _CONTEXT).to(torch.int32)
    out = (workshop.empty(tokens, topk, dtype=torch.int32), workshop.empty(tokens, dtype=torch.int32))
    places: dict[str, Any] = {"block_size": block_size, "num_slots": requests * columns * block_size}
    arguments = {"topk_indices": positions, "req_id_per_token": owner, "block_table": table, **places, "out": out}
    targets = dict[str, Tensor](zip(("indices", "counts"), out, strict=True))
    judged = spread(tokens, _JUDGED_TOKENS, workshop.device)

    def judge(results: Results) -> Iterator[Finding]:
        want = convert_indices(positions[judged], owner[judged], table, **places)
        got = {name: value[judged].cpu() for name, value in results.items()}
        yield from findings("any", got, dict[str, Tensor](zip(("indices", "counts"), want, strict=True)), rows=judged.cpu())

    moved = sum(each.nbytes for each in (positions, owner, table, *out))
    return BenchProblem(case, workshop.request(case, block_size=block_size), arguments, 3, targets, moved, 0, judge)


PROBLEMS: Final = Problems(
    primitive=CONVERT_INDICES,
    oracle=convert_indices,
    tolerances={("any", "indices"): BITS, ("any", "counts"): BITS},
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("topk", "block_size"),
    variants=_variants,
    rows=_PROBED_TOKENS,
    bench=Bench(rows=(16, 128, 1_024, 4_096), heads=(), make=_make, shape=lambda case: f"T {case.rows}, K {case.topk}"),
)
