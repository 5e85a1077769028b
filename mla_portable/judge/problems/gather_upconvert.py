# SPDX-License-Identifier: Apache-2.0
"""How gather_upconvert is tried and judged: values of the rows that requests own, and that no other row changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.judge.problems import draw, exact
from mla_portable.judge.problems.base import STRENGTH, Params, Problems, one_variant
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import BITS, Finding, Tolerance, close, limit_of, same_bits
from mla_portable.judge.problems.cover import Choice
from mla_portable.judge.problems.draw import (
    PAIR_BLOCK,
    SLAB_LAYERS,
    Paged,
    cached_rows,
    generator,
    paged_cache,
    shuffled,
    taken_rows,
    vast,
)
from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN
from mla_portable.judge.problems.shapes import block_sizes, can_capture, can_hold_vast, plain_axes, storage_asked, storages
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.layouts import FP8_DS_MLA, KV_LORA_RANK, LAYOUTS, Cache
from mla_portable.primitives import GATHER_UPCONVERT

_JUDGED_ROWS: Final = 64
"""Rows of a timed copy that the oracle judges."""
_GATHERED: Final = 4
"""Requests whose tokens a timed copy collects."""
EDGES: Final = (
    *((9, -7), (INT32_MIN, 4), (2, 5), (INT32_MIN + 1, 3), (INT32_MAX, 8)),
    *((INT32_MAX, INT32_MIN), (INT32_MAX, INT32_MAX), (INT32_MIN, INT32_MAX)),
)
"""Lengths and first rows whose sums and differences may wrap; they own rows 0 and 1, 5 and 6, and those from 8 on."""
_EDGE_TOKENS: Final = 9
"""Tokens of such a request that the table has columns for."""
_EDGE_ROWS: Final = 14
TOLERANCES: Final = {
    ("bf16", "latent"): BITS,
    ("pow2", "latent"): BITS,
    ("amax", "latent"): Tolerance(0, 2**-7, "one bf16 step: the product may be rounded once or, through float32, twice"),
    ("any", "rope"): BITS,
}


def gather_upconvert(
    kv_cache: Cache,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    *,
    out: Tensor,
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> Tensor:
    """The workspace [W, 576] bf16 as it must be afterwards; `out` gives the rows that no request owns, and is left alone."""
    own = exact.plugin_layout(kv_layout)
    cache, table = exact.on_cpu(kv_cache), block_table.cpu().long()
    workspace = out.detach().cpu().clone(memory_format=torch.contiguous_format)
    num_blocks, block_size = exact.blocks_of(cache)
    for request, (length, start) in enumerate(zip(seq_lens.tolist(), workspace_starts.tolist(), strict=True)):
        position = torch.arange(max(0, -start), max(0, -start, min(length, workspace.shape[0] - start)), device="cpu")
        column = position // block_size
        block = torch.full_like(position, -1)
        inside = column < table.shape[1]
        block[inside] = table[request, column[inside]]
        valid = (block >= 0) & (block < num_blocks)
        latent, rope = exact.token_values(cache, block[valid] * block_size + position[valid] % block_size, own)
        if kv_scale is not None:
            latent, rope = (each.double() * kv_scale.cpu().double() for each in (latent, rope))
        # the product is taken in float32, then rounded to bf16
        latent = latent.to(torch.float32).to(torch.bfloat16)
        workspace[start + position[~valid]] = 0.0
        workspace[start + position[valid]] = torch.cat([latent, rope.to(torch.float32).to(torch.bfloat16)], dim=1)
    return workspace


def findings(
    storage: str,
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    *,
    owned: Tensor | None = None,
    width: int = KV_LORA_RANK,
) -> Iterator[Finding]:
    """Rows of workspaces [n, key width]. owned: [n] bool, the rows of a request, all where it is None. width: of the latent."""
    got_rows, want_rows = got["out"].cpu(), want["out"]
    mine = torch.ones(len(want_rows), dtype=torch.bool) if owned is None else owned

    def symptom(rows: Tensor, column: int):
        def said(where: tuple[int, ...]) -> tuple[str, str]:
            place = int(rows.nonzero()[where[0]]), column + where[1]
            values = f"out is {float(got_rows[place]):g}, expected {float(want_rows[place]):g}"
            return values, f"row {place[0]}, column {place[1]}"

        return said

    yield same_bits("rows that no request owns", got_rows[~mine], want_rows[~mine], symptom=symptom(~mine, 0))
    rope, want_rope = got_rows[mine, width:], want_rows[mine, width:]
    latent, want_latent = got_rows[mine, :width], want_rows[mine, :width]
    limit = limit_of(TOLERANCES, storage, "latent")
    if limit.exact:
        yield same_bits("latent", latent, want_latent, symptom=symptom(mine, 0))
    else:
        yield close("latent", latent, want_latent.double(), limit, symptom=symptom(mine, 0))
    yield same_bits("rope", rope, want_rope, symptom=symptom(mine, width))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherUpconvertParams(Params):
    """One gather_upconvert call.

    Attributes:
        kv, scale_format, block_size: layout of the cache.
        lens: "borders", lengths on and next to those of blocks, an empty request between them; "long", one request of
            many blocks; "empty", requests without tokens; "none", no request at all; "few", what a probe takes;
            "edges", EDGES.
        table: "plain"; "holes", negative entries and blocks past the cache, whose tokens become rows of zeros; "near", by
            little, for `lens` of "few".
        placing: "tight", requests one after the other; "gaps", in another order with unowned rows between; "short", the
            last request runs past the workspace.
        inputs: "packed", or "views" of wider tables. blocks: "packed"; "strided"; "pair", two that lie apart, all of one
            request; "address", of a cache of more than 2**31 elements; "slab", of a layer of a buffer of all layers, of
            more than 2**32.
    """

    primitive = GATHER_UPCONVERT
    says = "{kv}! {scale_format} b{block_size}! lens_{lens}! table_{table} {placing} in{inputs} {blocks}"
    asks = "kv_layout=kv block_size scale_format"
    kv: str
    scale_format: str | None
    block_size: int
    lens: str = "borders"
    table: str = "plain"
    placing: str = "tight"
    inputs: str = "packed"
    blocks: str = "packed"

    def _lengths(self) -> list[int]:
        block = self.block_size
        if self.blocks == "pair":
            return [2 * block - 1]
        kinds = {
            "borders": [1, block, 0, block + 1, 2 * block - 1, 2 * block + 3],
            "long": [3 * block + 37],
            "empty": [0, 0, 0],
            "none": [],
            "few": [block + min(3, block), 1, 1],
            "edges": [length for length, _ in EDGES],
        }
        return kinds[self.lens]

    def _starts(self, lens: list[int]) -> tuple[list[int], int]:
        """First rows of the requests, and W."""
        order = list(range(len(lens)))
        gap = 0
        if self.placing == "gaps":
            order, gap = order[::-1], 3
        starts, row = [0] * len(lens), gap
        for i in order:
            starts[i] = row
            row += lens[i] + gap
        return starts, max(1, row - sum(lens) // 3 if self.placing == "short" else row)

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, layout = generator(seed), Stage(device), LAYOUTS[self.kv]
        kinds = self._lengths()
        turn: list[int] = shuffled(len(kinds), g).tolist()
        lens = [kinds[i] for i in turn]
        starts, num_rows = self._starts(lens) if self.lens != "edges" else ([EDGES[i][1] for i in turn], _EDGE_ROWS)
        more_columns, more_blocks = (0, 0) if self.blocks == "pair" or self.lens == "few" else (1, 3)
        longest = _EDGE_TOKENS if self.lens == "edges" else max(lens, default=0)
        columns = -(-longest // self.block_size) + more_columns
        owned = len(lens) * columns
        num_blocks = owned + more_blocks
        blocks = shuffled(num_blocks, g)[:owned]
        table = blocks.view(len(lens), columns).to(torch.int32)
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
        tokens = cached_rows(len(slots), layout, self.scale_format, g)
        cache = paged_cache(layout, num_blocks, self.block_size, strided=self.blocks in ("strided", "pair"))
        cache.put(slots, tokens)
        original, table_original = cache.view, table
        if self.blocks in ("address", "slab") and isinstance(cache, Paged):
            kv_placed, device_rows, far = vast(
                layout, self.block_size, device, layers=SLAB_LAYERS if self.blocks == "slab" else 0
            )
            far_blocks = (far // self.block_size).unique().flip(0)  # the farthest first: every request reads from it
            far_blocks = far_blocks[torch.linspace(0, len(far_blocks) - 1, min(len(far_blocks), owned)).long()]
            picks = torch.arange(owned) % len(far_blocks)
            table = far_blocks[picks].view(len(lens), columns).to(torch.int32)
            table_original = blocks[picks].view(len(lens), columns).to(torch.int32)
            device_rows[far_blocks.to(device)] = cache.rows[blocks[: len(far_blocks)]].to(device)
        else:
            kv_placed = stage.read_cache("kv_cache", original)
        if self.table == "near":  # what the short requests name
            table[torch.tensor(lens) == 1, 0] = torch.tensor([-1, num_blocks], dtype=torch.int32)
        elif self.table == "holes":
            for i, bad in enumerate((-1, num_blocks, INT32_MIN, num_blocks + 114514)):
                table.view(-1)[i::7] = bad
            table_original = table
        table_placed = stage.read("block_table", table, strided=self.inputs == "views")
        lens_placed = stage.read("seq_lens", torch.tensor(lens, dtype=torch.int32))
        starts_placed = stage.read("workspace_starts", torch.tensor(starts, dtype=torch.int32))
        out = stage.write("out", (num_rows, layout.key_width), torch.bfloat16)
        want = gather_upconvert(
            original,
            table_original,
            torch.tensor(lens, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            out=stage.writes["out"].view.cpu(),
            kv_scale=draw.tensor_scale() if layout.tensor_scale else None,
            kv_layout=self.kv,
        )
        is_owned = torch.zeros(num_rows, dtype=torch.bool)
        for start, length in zip(starts, lens, strict=True):
            is_owned[max(start, 0) : max(start + length, 0)] = True

        storage = layout.tolerance_of(self.scale_format)
        judge = partial(findings, storage, want={"out": want}, owned=is_owned, width=layout.value_width)
        args = {"kv_cache": kv_placed, "block_table": table_placed, "seq_lens": lens_placed, "workspace_starts": starts_placed}
        keywords = {"out": out}
        if layout.tensor_scale:
            keywords["kv_scale"] = stage.read("kv_scale", draw.tensor_scale())
        return Problem(stage, args, keywords, {"out": ((num_rows, layout.key_width), torch.bfloat16)}, judge)


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[GatherUpconvertParams]:
    """What a level asks of an implementation of gather_upconvert."""
    axes: dict[str, list[Any]] = {
        "storage": storages(implementation),
        "block_size": block_sizes(implementation, facts, level),
        "lens": ["borders", "long", "empty", "none"],
        "table": ["plain", "holes"],
        "placing": ["tight", "gaps", "short"],
        "inputs": ["packed", "views"],
        "blocks": ["packed", "strided"],
        "run": ["once", "repeat"],
    }

    def allowed(choice: Choice) -> bool:
        return not (choice.get("lens") in ("empty", "none") and choice.get("placing") == "short")

    cover = partial(GatherUpconvertParams.covering, implementation, facts)
    yield from cover(axes, strength=STRENGTH[level], allowed=allowed)
    for params in () if level == "smoke" else cover(plain_axes(axes), strength=1):
        yield replace(params, lens="edges", placing="tight")
        if params.block_size >= PAIR_BLOCK:
            yield replace(params, blocks="pair")
        if can_hold_vast(params.kv, facts, level):
            yield replace(params, blocks="address")
        if can_hold_vast(params.kv, facts, level, slabs=1):
            yield replace(params, blocks="slab")
        if can_capture(implementation, facts):
            yield replace(params, run="graph", placing="gaps", table="holes")


def _of_request(request: Request, name: str) -> GatherUpconvertParams:
    return GatherUpconvertParams(
        **storage_asked(request, FP8_DS_MLA, "amax"),
        block_size=request.block_size or 16,
        lens="few",
        table="near",
        placing="gaps",
    )


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    block_size = workshop.block_size
    layout = LAYOUTS[case.kv_layout or FP8_DS_MLA.name]
    requests = min(case.rows, _GATHERED)
    length = -(-case.rows // requests)
    columns = -(-length // block_size)
    cached = workshop.cache(case, requests * columns * block_size)
    table = workshop.permutation(requests * columns).view(requests, columns).to(torch.int32)
    starts = torch.arange(requests, device=workshop.device, dtype=torch.int32) * length
    lens = (case.rows - starts).clamp(0, length)
    out = workshop.empty(case.rows, layout.key_width, dtype=torch.bfloat16)
    judged = spread(case.rows, _JUDGED_ROWS, workshop.device)

    def judge(results: Results) -> Iterator[Finding]:
        owner, position = judged // length, judged % length
        slots = table[owner, position // block_size].long() * block_size + position % block_size
        count = judged.shape[0]
        own = torch.arange(count, dtype=torch.int32).view(1, -1)
        blank = torch.zeros(count, layout.key_width, dtype=torch.bfloat16)
        each = taken_rows(layout, cached, slots).unsqueeze(1)  # [n, 1, row], blocks of one token
        want = gather_upconvert(each, own, torch.tensor([count]), torch.tensor([0]), out=blank, kv_layout=layout.name)
        yield from findings(case.storage, {"out": results["out"][judged]}, {"out": want}, width=layout.value_width)

    arguments = {"kv_cache": cached, "block_table": table, "seq_lens": lens, "workspace_starts": starts, "out": out}
    request = workshop.request(case, block_size=block_size)
    moved = case.rows * layout.row_bytes + sum(each.nbytes for each in (out, table, lens, starts))
    return BenchProblem(case, request, arguments, 4, {"out": out}, moved, 0, judge)


PROBLEMS: Final = Problems(
    primitive=GATHER_UPCONVERT,
    oracle=gather_upconvert,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("block_size",),
    variants=one_variant("ragged"),
    bench=Bench(rows=(8_192, 65_536), layouts=("fp8_ds_mla",), make=_make, shape=lambda case: f"W {case.rows}"),
)
