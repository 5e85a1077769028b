# SPDX-License-Identifier: Apache-2.0
"""How masked_prefill is tried and judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request, Support
from mla_portable.judge.problems import attention
from mla_portable.judge.problems.attention import SOFTMAX_SCALE, judge_state
from mla_portable.judge.problems.base import STRENGTH, Params, Problems
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import Finding
from mla_portable.judge.problems.cover import Choice
from mla_portable.judge.problems.draw import generator
from mla_portable.judge.problems.exact import INT32_MAX
from mla_portable.judge.problems.shapes import accepted, can_capture, heads
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.models import DEEPSEEK_V32, GLM_5
from mla_portable.primitives import MASKED_PREFILL

TOLERANCES: Final = {key: row for key, row in attention.TOLERANCES.items() if key[0] in ("bf16", attention.LOW)}
findings = partial(judge_state, TOLERANCES)
"""out [n, H, Dv] and lse [n, H]."""

_LARGE: Final = 1e38
"""Of keys and values that no query attends to, where they are promised to be finite."""
DIMS: Final = (*((model.qk_head_dim, model.head_dims[2]) for model in (DEEPSEEK_V32, GLM_5)), (40, 24))
"""(Dqk, Dv) of DeepSeek-V3.2, of GLM-5, and one that nobody has, where an implementation names none."""
BATCHES: Final[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "ragged": ((20, 1, 70), (20, 40, 100)),
    "one": ((1,), (1,)),
    "idle": ((0, 45, 0, 3), (20, 45, 0, 90)),
    "fewer": ((40, 20), (25, 1)),
    "keyless": ((5, 3), (0, 9)),
    "empty": ((), ()),
    "long": ((300, 129, 1), (300, 700, 513)),
    "nothing": ((5, 3), (0, 0)),
    "corners": ((5, 5, 5), (67, 131, 68)),
    "pairs": ((130, 130, 130), (130, 150, 140)),
}
"""Queries and keys of each request. ragged: alone, with a context, a single token. idle: requests without queries, one of them
without keys. fewer: fewer keys than queries. keyless: no keys. long: several tiles of queries and of keys. nothing: no request
has keys. corners: the first query sees one key less than whole tiles of keys have, or as many. pairs: two tiles of queries
each."""
_SCENES: Final = ("long", "nothing", "corners", "pairs")
"""Batches of cases of their own."""
_SPARE: Final = 20_000
"""With so many keys, groups of streams that fit in 32 MB are two of the three that `pairs` has with one head."""


def masked_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    softmax_scale: float,
    max_query_len: int,
    max_key_len: int,
    causal: bool = True,
    selection: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, H, Dv] and lse [T, H], float64, one query at a time; rows of no request are 0 and -inf."""
    return _attended(q, k, v, query_start_loc, key_start_loc, softmax_scale, causal, selection)[:2]


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    softmax_scale: float,
    causal: bool,
    selection: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and [T, H] the magnitudes of the products of a score added up, on average over keys by their weights."""
    queries = q.detach().cpu().double()
    keys, values = k.detach().cpu(), v.detach().cpu()
    out = torch.zeros((*queries.shape[:2], v.shape[2]), dtype=torch.float64, device="cpu")
    lse = torch.full(queries.shape[:2], -math.inf, dtype=torch.float64, device="cpu")
    terms = torch.zeros_like(lse)
    first_query, first_key = query_start_loc.tolist(), key_start_loc.tolist()
    for request in range(len(first_query) - 1):
        begin, end = first_key[request : request + 2]
        num_queries, num_keys = first_query[request + 1] - first_query[request], end - begin
        its_keys, its_values = (each[begin:end].double() for each in (keys, values))
        for i in range(num_queries):
            token = first_query[request] + i
            seen = max(0, min(num_keys, i + num_keys - num_queries + 1)) if causal else num_keys
            places = torch.arange(seen)
            if selection is not None:
                places = places[selected_keys(selection[token])[:seen].nonzero()[:, 0]]
            if len(places):
                mine = its_keys[places]  # [n, H, Dqk]
                scores = softmax_scale * torch.einsum("hd,nhd->hn", queries[token], mine)
                weights = scores.softmax(dim=1)
                out[token] = torch.einsum("hn,nhd->hd", weights, its_values[places])
                lse[token] = scores.logsumexp(dim=1)
                sizes = torch.einsum("hd,nhd->hn", queries[token].abs(), mine.abs())
                terms[token] = softmax_scale * (weights * sizes).sum(dim=1)
    return out, lse, terms


def selected_keys(words: Tensor) -> Tensor:
    """[32 W] bool from the words [W] int32 of one row, byte by byte."""
    octets = words.detach().cpu().contiguous().view(torch.uint8).long()  # [4 W], little-endian
    bits = octets.unsqueeze(1) // 2 ** torch.arange(8) % 2 == 1
    return bits.flatten()


def words_of(bits: Tensor) -> Tensor:
    """[T, W] int32 from bits [T, 32 W]."""
    values = bits.reshape(bits.shape[0], bits.shape[1] // 32, 32).double() @ 2.0 ** torch.arange(
        32, dtype=torch.float64, device=bits.device
    )
    unsigned = values.long()
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPrefillParams(Params):
    """One masked_prefill call.

    Attributes:
        heads: H. qk_head_dim, v_head_dim: of a head.
        batch: a key of BATCHES. full: every query sees every key, where it would see those up to itself.
        selected: None for no selection; "half" of the keys; "few", 1 of 20, every fifth row none at all, and some keys none;
            "all".
        unseen: keys that no query attends to: "marked", NaN and their values infinite; "plain", as all others: a kernel that
            computes rows of NaN again would hide a key too many. finite: those marked are large instead, as promised.
        lse: "asked" or "none".
        held: words of a row: "exact"; "more", with bits past the request's keys; "fewer" than the keys need.
        bounds: of lengths, "exact" or "most", 2^31 - 1.
        apart: tokens of no request lie in front of the first one and behind the last one, and keys too.
        inputs, outputs: "packed" or "views"; outputs also "fresh", allocated by the callee.
        size: "plain"; "large", scores of hundreds, past what exp can take.
        spare: so many keys more of no request lie in front of the first one; max_key_len counts them.
    """

    primitive = MASKED_PREFILL
    says = (
        "h{heads}! d{qk_head_dim}! {v_head_dim}! {batch}! full{full} selected_{selected} held_{held} bounds_{bounds} "
        "apart{apart} finite{finite} unseen_{unseen} lse_{lse} in{inputs} out_{outputs} {size} spare{spare}"
    )
    asks = "num_heads=heads qk_head_dim v_head_dim selection=selected finite_values=finite lse"
    heads: int
    qk_head_dim: int
    v_head_dim: int
    batch: str = "ragged"
    full: bool = False
    selected: str = "none"
    finite: bool = False
    unseen: str = "marked"
    lse: str = "asked"
    held: str = "exact"
    bounds: str = "exact"
    apart: bool = False
    inputs: str = "packed"
    outputs: str = "fresh"
    size: str = "plain"
    spare: int = 0

    @classmethod
    def asked(cls, device: DeviceFacts, values: Mapping[str, Any]) -> Request:
        """As of every primitive; what says nothing of finite values may be given them."""
        return super(MaskedPrefillParams, cls).asked(device, {"finite": True, **values})

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage = generator(seed), Stage(device)
        queries, keys = BATCHES[self.batch]
        before, behind = (2, 3) if self.apart else (0, 0)
        first_key = before + self.spare
        tokens, rows = before + sum(queries) + behind, first_key + sum(keys) + behind
        q = torch.randn(tokens, self.heads, self.qk_head_dim, generator=g)
        k = torch.randn(rows, self.heads, self.qk_head_dim, generator=g)
        v = torch.randn(rows, self.heads, self.v_head_dim, generator=g)
        if self.size == "large":
            q *= 64
        if self.accuracy == "low":
            q *= attention.LOW_QUERIES
        starts = [
            torch.tensor([*accumulate(lengths, initial=first)], dtype=torch.int32)
            for lengths, first in ((queries, before), (keys, first_key))
        ]
        selection = self._selection(starts[0], keys, tokens, g)
        attended = self._attended_keys(starts[0], starts[1], selection, rows) | (self.unseen == "plain")
        arguments: dict[str, Any] = {
            "q": q.bfloat16(),
            "k": k.masked_fill_(~attended[:, None, None], _LARGE if self.finite else math.nan).bfloat16(),
            "v": v.masked_fill_(~attended[:, None, None], _LARGE if self.finite else math.inf).bfloat16(),
            "query_start_loc": starts[0],
            "key_start_loc": starts[1],
        }
        given: dict[str, Any] = {"softmax_scale": self.qk_head_dim**-0.5, "causal": not self.full, "selection": selection}
        out, lse, terms = _attended(**arguments, **given)
        strided = self.inputs == "views"
        args = {name: stage.read(name, each, strided=strided and each.dim() == 3) for name, each in arguments.items()}
        longest = {"max_query_len": max(queries, default=0), "max_key_len": max(keys, default=0) + self.spare}
        if self.bounds == "most":
            longest = dict.fromkeys(longest, INT32_MAX)
        keywords = {**given, **longest}
        if selection is not None:
            keywords["selection"] = stage.read("selection", selection, strided=strided)
        returns = {"out": (tuple(out.shape), torch.bfloat16), "lse": (tuple(lse.shape), torch.float32)}
        if self.outputs != "fresh":
            for name, keyword in (("out", "out"), ("lse", "lse_out")):
                keywords[keyword] = stage.write(name, *returns[name], strided=self.outputs == "views")
        own = torch.arange(before, tokens - behind)

        def judge(results: Results) -> Iterator[Finding]:
            got, want = {name: each[own] for name, each in results.items()}, {"out": out[own], "lse": lse[own]}
            if self.lse == "none" and "lse" in got:  # NaN says that it is none
                got["lse"] = torch.where(got["lse"].isnan(), want["lse"], got["lse"])
            storage = attention.LOW if self.accuracy == "low" else "bf16"
            yield from findings(storage, got, want, rows=own, terms=lambda: terms[own])

        untold = frozenset(("lse",) if self.lse == "none" else ())
        return Problem(stage, args, keywords, returns, judge, frozenset({"out", "lse_out"}), untold)

    def _selection(self, query_starts: Tensor, keys: tuple[int, ...], tokens: int, g: torch.Generator) -> Tensor | None:
        if self.selected == "none":
            return None
        words = max(-(-max(keys, default=0) // 32) + {"exact": 0, "more": 3, "fewer": -1}[self.held], 1)
        share = {"half": 0.5, "few": 0.05, "all": 1.0}[self.selected]
        bits = torch.rand(tokens, 32 * words, generator=g) < share
        if self.selected == "few":
            bits[::5], bits[:, 3::16], bits[:, 64:96] = False, False, False
        return words_of(bits)

    def _attended_keys(self, query_starts: Tensor, key_starts: Tensor, selection: Tensor | None, rows: int) -> Tensor:
        """[N] bool: a query attends to the key."""
        found = torch.zeros(rows, dtype=torch.bool)
        for request in range(len(query_starts) - 1):
            (first, last), (begin, end) = (each[request : request + 2].tolist() for each in (query_starts, key_starts))
            for token in range(first, last):
                seen = max(0, end - begin - (last - 1 - token) * (not self.full))
                mine = torch.ones(seen, dtype=torch.bool)
                if selection is not None:
                    bits = selected_keys(selection[token])[:seen]
                    mine = torch.cat([bits, bits.new_zeros(seen - len(bits))])
                found[begin : begin + seen] |= mine
        return found


def _pairs(support: Support) -> tuple[tuple[int, int], ...]:
    return DIMS if support.head_dims is None else support.head_dims


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[MaskedPrefillParams]:
    """What a level asks of an implementation of masked_prefill."""
    support, pairs = implementation.support, _pairs(implementation.support)
    counts = heads(implementation, facts, level)
    small = accepted(implementation, facts, "num_heads", (1, 3)) or counts[:1]
    selections = ["half", "few", "all"] if support.selection else []
    on_cpu = facts.device_type == "cpu"
    axes: dict[str, list[Any]] = {
        "heads": small if on_cpu else counts,
        "qk_head_dim": list(dict.fromkeys(qk for qk, _ in pairs)),
        "v_head_dim": list(dict.fromkeys(v for _, v in pairs)),
        "batch": ["ragged", "idle", "fewer"] if level == "smoke" else [name for name in BATCHES if name not in _SCENES],
        "full": [False, True],
        "selected": [*selections, "none"],
        "finite": [False, True],
        "lse": ["asked", "none"],
        "held": ["exact", "more", "fewer"],
        "apart": [False, True],
        "inputs": ["packed", "views"],
        "outputs": ["fresh", "packed", "views"],
        "size": ["plain"] if support.accuracy == "low" else ["plain", "large"],
        "run": ["once", "repeat"],
    }

    def allowed(choice: Choice) -> bool:
        qk, value = choice.get("qk_head_dim"), choice.get("v_head_dim")
        if not any(qk in (None, pair[0]) and value in (None, pair[1]) for pair in pairs):
            return False
        return choice.get("held", "exact") == "exact" or choice.get("selected") != "none"

    yield from MaskedPrefillParams.covering(implementation, facts, axes, strength=min(STRENGTH[level], 2), allowed=allowed)
    if level == "smoke" or not counts:
        return
    base = MaskedPrefillParams(
        heads=small[0],
        qk_head_dim=pairs[0][0],
        v_head_dim=pairs[0][1],
        batch="long",
        finite=support.needs_finite_values,
    )
    for qk, value in pairs:
        for each in axes["selected"]:
            if on_cpu and (each == "all" or qk != pairs[0][0]):
                continue
            yield replace(base, qk_head_dim=qk, v_head_dim=value, selected=each, outputs="packed")
            if not on_cpu:
                for count in counts:
                    yield replace(base, heads=count, qk_head_dim=qk, v_head_dim=value, selected=each, apart=True)
        yield replace(base, qk_head_dim=qk, v_head_dim=value, batch="corners")
        yield replace(base, qk_head_dim=qk, v_head_dim=value, batch="nothing")
    if base.heads == 1:
        yield replace(base, batch="pairs", spare=_SPARE)
    yield from (replace(base, batch="ragged", selected=each, bounds="most") for each in axes["selected"])
    for selected in selections[:1]:
        yield replace(base, batch="ragged", selected=selected, held="fewer")
        yield replace(base, batch="ragged", selected=selected, held="fewer", unseen="plain")
    if can_capture(implementation, facts):
        for each in axes["selected"]:
            yield replace(base, batch="ragged", selected=each, outputs="packed", run="graph")


def _variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    for qk, value in _pairs(support)[: None if support.head_dims else 1]:
        asked = request.but(qk_head_dim=qk, v_head_dim=value, finite_values=support.needs_finite_values, lse=True)
        yield f"dims {qk}/{value}", asked
        if support.selection:
            yield f"selection, dims {qk}/{value}", asked.but(selection=True)


def _of_request(request: Request, name: str) -> MaskedPrefillParams:
    return MaskedPrefillParams(
        heads=request.num_heads or 1,
        qk_head_dim=request.qk_head_dim or DIMS[0][0],
        v_head_dim=request.v_head_dim or DIMS[0][1],
        batch="ragged",
        selected="few" if request.selection else "none",
        finite=request.finite_values,
        lse="asked" if request.lse else "none",
        outputs="packed",
    )


def _drawn(workshop: Workshop, seen: Tensor, width: int, topk: int) -> Tensor:
    """[T, W] words that select about `topk` of the keys before each token. seen: [T] how many these are, of `width`."""
    words = workshop.empty(len(seen), -(-width // 32), dtype=torch.int32)
    for begin in range(0, len(seen), 1024):
        mine = seen[begin : begin + 1024].to(workshop.device).unsqueeze(1)
        words[begin : begin + 1024] = words_of(workshop.scores(mine.shape[0], 32 * words.shape[1]) * mine < topk)
    return words


def _words(workshop: Workshop, case: KernelCase, lengths: Sequence[int], seen: Tensor) -> Tensor:
    """[T, W] words of the prompts' selections: random, or a model's."""
    if case.selection is None:
        return _drawn(workshop, seen, case.width, case.topk or 1)
    words, columns = list[Tensor](), 32 * -(-case.width // 32)
    for length in lengths:
        lists = workshop.neighbours(case, torch.arange(case.width - length + 1, case.width + 1))
        assert lists is not None
        for some in lists[0].split(1024):
            bits = torch.zeros((len(some), columns + 1), dtype=torch.bool, device=workshop.device)  # absent ones go last
            words.append(words_of(bits.scatter_(1, some.long().masked_fill(some < 0, columns), True)[:, :columns]))
    return torch.cat(words)


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case that is timed: prompts of `width` tokens; a token selects about K of those before it, or all of them."""
    (qk_dim, v_dim), device, heads, width = case.head_dims or DIMS[0], workshop.device, case.num_heads or 1, case.width
    lengths = [width] * (case.rows // width) + ([case.rows % width] if case.rows % width else [])
    requests = len(lengths)
    q = workshop.normal(case.rows, heads, qk_dim)
    k, v = workshop.normal(requests * width, heads, qk_dim), workshop.normal(requests * width, heads, v_dim)
    query_starts = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)
    key_starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * width
    seen = torch.cat(
        [torch.arange(width - length + 1, width + 1) for length in lengths]
    )  # [T] keys before a token, and its own
    words = None if case.topk is None else _words(workshop, case, lengths, seen)
    out = workshop.empty(case.rows, heads, v_dim, dtype=torch.bfloat16)
    lse = workshop.empty(case.rows, heads, dtype=torch.float32)
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "query_start_loc": query_starts,
        "key_start_loc": key_starts,
        "softmax_scale": SOFTMAX_SCALE,
        "max_query_len": max(lengths),
        "max_key_len": width,
        "selection": words,
        "out": out,
        "lse_out": lse,
    }
    request = workshop.request(case).but(
        topk=None, qk_head_dim=qk_dim, v_head_dim=v_dim, selection=words is not None, finite_values=True, lse=True
    )
    judged = spread(case.rows, workshop.check_rows, device)

    @cache
    def wanted() -> tuple[Tensor, Tensor]:
        rows: list[tuple[Tensor, Tensor]] = []
        for token in judged.tolist():
            request, one = token // width, torch.tensor([0, 1], dtype=torch.int32)
            keys = slice(request * width, request * width + int(seen[token]))
            ends = torch.tensor([0, keys.stop - keys.start], dtype=torch.int32)
            here = slice(token, token + 1)
            parts = [
                masked_prefill(
                    q[here, head : head + 1], k[keys, head : head + 1], v[keys, head : head + 1], one, ends,
                    softmax_scale=SOFTMAX_SCALE, max_query_len=1, max_key_len=width,
                    selection=None if words is None else words[here],
                )
                for head in range(heads)
            ]  # fmt: skip
            rows.append((torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=1)))
        return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])

    def judge(results: Results) -> Iterator[Finding]:
        got = {name: each[judged] for name, each in results.items()}
        yield from findings("bf16", got, dict[str, Tensor](zip(("out", "lse"), wanted(), strict=True)), rows=judged.cpu())

    moved = sum(each.nbytes for each in (q, k, v, words, out, lse) if each is not None)
    flops = 2 * heads * (qk_dim + v_dim) * int(seen.sum())
    return BenchProblem(case, request, arguments, 5, {"out": out, "lse": lse}, moved, flops, judge)


def _shape(case: KernelCase) -> str:
    chosen = "all" if case.topk is None else f"K {case.topk}"
    dims = "" if case.head_dims is None else f", dims {case.head_dims[0]}/{case.head_dims[1]}"
    return f"T {case.rows}, H {case.num_heads}{dims}, {chosen}, prompts of {case.width}"


PROBLEMS: Final = Problems(
    primitive=MASKED_PREFILL,
    oracle=masked_prefill,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("num_heads", "qk_head_dim", "v_head_dim"),
    variants=_variants,
    rows=sum(BATCHES["ragged"][0]),
    bench=Bench(
        rows=(2_048, 8_192),
        heads=(16, 128),
        make=_make,
        shape=_shape,
        width=lambda rows, topk: rows,
        widths=(2_048, 8_192),
        head_dims=DIMS[:2],
        takes="neighbours",
    ),
)
