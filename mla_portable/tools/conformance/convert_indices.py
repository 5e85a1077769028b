# SPDX-License-Identifier: Apache-2.0
"""The cases of convert_indices: slots, counts and their order are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.primitives import CONVERT_INDICES
from mla_portable.reference import oracle
from mla_portable.tools.conformance.compare import Finding, attributes, same_bits, same_object
from mla_portable.tools.conformance.cover import Choice, covering, crossed
from mla_portable.tools.conformance.inputs import INT32_MAX, INT32_MIN, PATTERNS, generator, index_rows, shuffled
from mla_portable.tools.conformance.params import (
    Params,
    accepted,
    block_sizes,
    can_capture,
    narrow_topks,
    says_something,
    topks,
)
from mla_portable.tools.conformance.problem import Guarded, Problem, Stage

__all__ = ["ConvertIndicesParams", "convert_indices_params"]

NUM_REQUESTS: Final = 4
NUM_TOKENS: Final = 7
MANY_TOKENS: Final = 70_000
"""More than the second and third axis of a CUDA grid can have (65535)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertIndicesParams(Params):
    """One convert_indices call.

    Attributes:
        topk, block_size: K, tokens a block. tokens: T.
        pattern: where positions are invalid (`inputs.PATTERNS`); positions past the table's width are among them.
        table: "plain"; "holes", negative entries and blocks past the cache; "huge", blocks whose slots pass int32.
        limit: pass num_slots.
        compact: valid entries first.
        workspace: "none"; "mixed", some tokens map to the prefill workspace; "all" do.
        inputs, outputs: "packed" or "views" into larger memory; outputs also "fresh", allocated by the callee.
    """

    primitive = CONVERT_INDICES
    topk: int
    block_size: int
    tokens: int = NUM_TOKENS
    pattern: str = "dense"
    table: str = "plain"
    limit: bool = False
    compact: bool = False
    workspace: str = "none"
    inputs: str = "packed"
    outputs: str = "fresh"

    def words(self) -> list[str]:
        """See Params."""
        remarks = {
            f"t{self.tokens}": self.tokens != NUM_TOKENS,
            f"table_{self.table}": self.table != "plain",
            "limit": self.limit,
            "compact": self.compact,
            f"workspace_{self.workspace}": self.workspace != "none",
            "inviews": self.inputs == "views",
            f"out_{self.outputs}": self.outputs != "fresh",
            self.run: self.run != "once",
        }
        return [f"k{self.topk}", f"b{self.block_size}", self.pattern, *(word for word, said in remarks.items() if said)]

    def request(self, device: DeviceFacts) -> Request:
        """See Params."""
        return Request(
            primitive=self.primitive,
            device=device,
            topk=self.topk,
            block_size=self.block_size,
            rows=self.tokens,
            compact=self.compact,
            prefill_workspace=self.workspace != "none",
            graph=self.run == "graph",
        )

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
        positions = self._positions(columns * self.block_size, g)
        requests = torch.randint(0, NUM_REQUESTS, (self.tokens,), generator=g, dtype=torch.int32)
        originals: dict[str, Tensor] = {"topk_indices": positions, "req_id_per_token": requests, "block_table": table}
        if self.workspace != "none":
            ids = torch.randint(0, 3, (self.tokens,), generator=g, dtype=torch.int32)
            if self.workspace == "mixed":
                ids[torch.rand(self.tokens, generator=g) < 0.5] = -1
            originals["prefill_request_ids"] = ids
            originals["prefill_workspace_starts"] = torch.tensor([0, 1000, INT32_MAX - 40], dtype=torch.int32)[shuffled(3, g)]
        placed = {name: stage.read(name, t, strided=self.inputs == "views") for name, t in originals.items()}
        # fewer slots than the table names: whole blocks, and the last ones of a block, fall outside
        num_slots = num_blocks * self.block_size * 3 // 4 - 1 if self.limit else None
        static: dict[str, Any] = {"block_size": self.block_size, "num_slots": num_slots, "compact": self.compact}
        given: tuple[Tensor, Tensor] | None = None
        if self.outputs != "fresh":
            strided = self.outputs == "views"
            given = (
                stage.write("indices", (self.tokens, self.topk), torch.int32, strided=strided),
                stage.write("counts", (self.tokens,), torch.int32),
            )
        judged = torch.linspace(0, self.tokens - 1, 96).long() if self.tokens > 96 else torch.arange(self.tokens)
        per_token = ("topk_indices", "req_id_per_token", "prefill_request_ids")
        judged_originals = {name: t[judged] if name in per_token else t for name, t in originals.items()}
        want = oracle.convert_indices(**judged_originals, **static)
        positional = [placed.pop(name) for name in ("topk_indices", "req_id_per_token", "block_table")]

        def call(bound: Callable[..., Any]) -> tuple[Tensor, ...]:
            indices, counts = bound(*positional, **placed, **static, out=given)
            return indices, counts

        def explain(where: tuple[int, ...]) -> str:
            token = int(judged[where[0]])
            position = int(positions[token, where[1]]) if len(where) > 1 else None
            request = f"request {int(requests[token])}"
            return request if position is None else f"position {position}, {request}"

        def judge(results: tuple[Tensor, ...], writes: dict[str, Guarded]) -> Iterator[Finding]:
            for name, got, expected in zip(("indices", "counts"), results, want, strict=True):
                shape = (self.tokens, *expected.shape[1:])
                found = attributes(f"{name} tensor", got, shape, torch.int32, device)
                yield found
                if found.message:
                    return
                if name in writes:
                    yield same_object(f"{name} identity", got, writes[name].view)
                    yield writes[name].outside(name)
                yield same_bits(name, got.cpu()[judged], expected, explain=explain)

        return Problem(stage, call, judge)

    def _positions(self, width: int, g: torch.Generator) -> Tensor:
        """[T, K] int32 positions below `width`, the borders of blocks among them."""
        borders = torch.tensor([0, self.block_size - 1, self.block_size, width - 1]).clamp(max=width - 1).unique()
        others = shuffled(width, g)
        used = torch.cat([borders, others[~torch.isin(others, borders)]])[: max(self.topk, len(borders))]
        return index_rows(self.pattern, self.tokens, self.topk, used, used[:0], width, None, g)


def convert_indices_params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[ConvertIndicesParams]:
    """What a level asks of an implementation of convert_indices."""
    compact = accepted(implementation, facts, "compact", [False, True])
    workspace = accepted(implementation, facts, "prefill_workspace", [False, True])
    axes: dict[str, list[Any]] = {
        "pattern": ["corpus", "absent", "last", "holes"] if level == "smoke" else list(PATTERNS),
        "topk": topks(implementation, facts, level),
        "block_size": block_sizes(implementation, facts, level),
        "compact": compact,
        "workspace": ["none", "mixed", "all"] if True in workspace else ["none"],
        "table": ["plain", "holes", "huge"],
        "limit": [True, False],
        "outputs": ["fresh", "packed", "views"],
        "inputs": ["packed", "views"],
        "run": ["once", "repeat"],
    }
    if not all(axes.values()):
        return

    def allowed(choice: Choice) -> bool:
        if not says_something(choice):
            return False
        request = Request(
            primitive=CONVERT_INDICES,
            device=facts,
            topk=choice.get("topk"),
            block_size=choice.get("block_size"),
            compact=choice.get("compact", False),
            prefill_workspace=choice.get("workspace", "none") != "none",
        )
        return not any(True for _ in implementation.support.shape_reasons(request))

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
        if level == "full" and facts.device_type != "cpu":
            yield replace(params, tokens=MANY_TOKENS)
    narrow = plain | {"topk": narrow_topks(implementation, facts), "pattern": ["dense", "absent"], "compact": compact}
    if level != "smoke" and narrow["topk"]:
        yield from (ConvertIndicesParams(**choice) for choice in covering(narrow, strength=1, allowed=allowed))
    if level != "smoke" and can_capture(implementation, facts):
        graphed = axes | {"run": ["graph"], "outputs": ["packed"], "topk": axes["topk"][-1:], "inputs": ["packed"]}
        for choice in covering(graphed, strength=1, allowed=allowed):
            yield ConvertIndicesParams(**choice)
