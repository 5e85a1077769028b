# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels between the projections in what conformance does not see: tokens apart, rows of both caches, launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_machine import device, facts, memory_is_poisoned

from mla_portable import primitives
from mla_portable.contracts import DeviceFacts, Request
from mla_portable.kit.triton_launcher import TritonLauncher
from mla_portable.layouts import INDEX_FP8, LAYOUTS
from mla_portable.primitives import NORM_ROPE_WRITE, ROPE_QUANTIZE_QUERIES
from mla_portable_triton import bind_projections

__all__ = ["device", "facts", "memory_is_poisoned"]  # fixtures

TOKENS, Q, HEADS, INDEX_HEADS, ROTARY, BLOCK = 5, 72, 3, 2, 64, 4


@dataclass
class Step:
    """Inputs of a step's tokens: what one projection makes, and the queries behind the next one."""

    projection: Tensor
    queries: Tensor
    index_queries: Tensor
    weights: Tensor
    positions: Tensor
    slots: Tensor
    table: Tensor
    norms: dict[str, Any]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        q_a, latent, key = self.projection.split([Q, 576, 128], dim=1)
        return q_a, latent, key

    def of(self, token: int) -> Step:
        """One of the tokens alone."""
        names = "projection", "queries", "index_queries", "weights", "positions", "slots"
        return Step(*(getattr(self, name)[token : token + 1] for name in names), self.table, self.norms)


@pytest.fixture
def step(device: torch.device) -> Step:
    g = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(device, torch.bfloat16)

    turns = torch.rand((9, ROTARY // 2), generator=g) * 6
    norms = {"q_norm": drawn(Q), "kv_norm": drawn(512), "index_norm": (drawn(128).float(), drawn(128).float())}
    return Step(
        projection=drawn(TOKENS, Q + 576 + 128),
        queries=drawn(TOKENS, HEADS, 192),
        index_queries=drawn(TOKENS, INDEX_HEADS, 128),
        weights=drawn(TOKENS, INDEX_HEADS),
        positions=torch.tensor([3, 0, 8, 5, 1], device=device),
        slots=torch.tensor([6, -1, 0, 9, 3], device=device),
        table=torch.cat([turns.cos(), turns.sin()], dim=1).to(device),
        norms=norms,
    )


def normed(call: Any, step: Step, layout: str = "fp8_ds_mla") -> dict[str, Tensor]:
    """Everything that norm_rope_write makes of a step, in caches of zeros."""
    tokens, where, kind = step.slots.shape[0], step.slots.device, LAYOUTS[layout]
    results = {
        "kv_cache": torch.zeros((3, BLOCK, kind.row_width), dtype=kind.dtype, device=where),
        "index_cache": torch.zeros((3, BLOCK, INDEX_FP8.row_width), dtype=torch.uint8, device=where),
    }
    outputs = {"q_out": Q, "latent_out": 512, "k_rope_out": ROTARY}
    results |= {name: torch.zeros((tokens, width), dtype=torch.bfloat16, device=where) for name, width in outputs.items()}
    call(*step.parts, step.positions, step.table, **step.norms, eps=1e-6, slot_mapping=step.slots, **results)
    return results


def turned(call: Any, step: Step) -> dict[str, Tensor]:
    """Everything that rope_quantize_queries makes of a step; what it does not write is 0."""
    tokens, where = step.slots.shape[0], step.slots.device
    results = {
        "q_out": torch.zeros((tokens, HEADS, 576), dtype=torch.bfloat16, device=where),
        "index_q_out": torch.zeros((tokens, INDEX_HEADS, 128), dtype=torch.uint8, device=where).view(torch.float8_e4m3fn),
        "index_weights_out": torch.zeros((tokens, INDEX_HEADS), device=where),
    }
    call(step.queries, step.index_queries, step.weights, step.positions, step.table, **results, index_scale=0.1)
    return results


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.fixture
def norm(facts: DeviceFacts) -> Any:
    return bind_projections.bind_norm_rope_write(Request(NORM_ROPE_WRITE, facts))


@pytest.fixture
def turn(facts: DeviceFacts) -> Any:
    return bind_projections.bind_rope_quantize_queries(Request(ROPE_QUANTIZE_QUERIES, facts))


def test_a_token_does_not_depend_on_the_others(norm: Any, turn: Any, step: Step) -> None:
    """In a single bit, whatever place it has in a program: a request's tokens are the same in every batch."""
    together, queries = normed(norm, step), turned(turn, step)
    for token in range(TOKENS):
        alone, of_alone = normed(norm, step.of(token)), turned(turn, step.of(token))
        for name in ("q_out", "latent_out", "k_rope_out"):
            assert torch.equal(bits(together[name][token]), bits(alone[name][0])), (name, token)
        for name, each in of_alone.items():
            assert torch.equal(bits(queries[name][token]), bits(each[0])), (name, token)
        if step.slots[token] >= 0:
            block, at = divmod(int(step.slots[token]), BLOCK)
            assert torch.equal(together["kv_cache"][block, at], alone["kv_cache"][block, at])
            pages = INDEX_FP8.parts(together["index_cache"]), INDEX_FP8.parts(alone["index_cache"])
            assert all(torch.equal(mine[block, at], its[block, at]) for mine, its in zip(*pages, strict=True))


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
def test_a_row_is_what_cache_write_makes_of_the_outputs(norm: Any, step: Step, layout: str) -> None:
    made = normed(norm, step, layout)
    want = torch.zeros_like(made["kv_cache"])
    primitives.cache_write(made["latent_out"], made["k_rope_out"], want, step.slots, backend="reference")
    assert torch.equal(bits(made["kv_cache"]), bits(want))


def test_nan_stays_in_its_token(norm: Any, turn: Any, step: Step) -> None:
    before, queries = normed(norm, step), turned(turn, step)
    q_a, latent, key = step.parts
    q_a[2, 5] = latent[2, 7] = key[2, 100] = step.queries[2, 1, 130] = step.index_queries[2, 1, 3] = float("nan")
    after, spoiled = normed(norm, step), turned(turn, step)
    others = [0, 1, 3, 4]
    for name in ("q_out", "latent_out"):
        assert after[name][2].isnan().all() and torch.equal(bits(after[name][others]), bits(before[name][others]))
    assert torch.equal(after["k_rope_out"], before["k_rope_out"]), "the rotary part has no norm"
    assert spoiled["index_q_out"][2, 1].float().isnan().any() and not spoiled["index_q_out"][2, 0].float().isnan().any()
    for name, each in spoiled.items():
        assert torch.equal(bits(each[others]), bits(queries[name][others])), name
    slots = [int(step.slots[token]) for token in others if step.slots[token] >= 0]
    for slot in slots:
        assert torch.equal(after["kv_cache"][slot // BLOCK, slot % BLOCK], before["kv_cache"][slot // BLOCK, slot % BLOCK])


def test_a_call_is_one_launch_and_an_empty_one_is_none(
    norm: Any, turn: Any, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[int, ...]] = []
    monkeypatch.setattr(TritonLauncher, "__call__", lambda self, grid, *arguments, **named: launches.append(grid))
    normed(norm, step)
    turned(turn, step)
    assert len(launches) == 2
    empty = Step(*(each[:0] for each in vars(step).values() if isinstance(each, Tensor) and each is not step.table),
                 step.table, step.norms)  # fmt: skip
    normed(norm, empty)
    turned(turn, empty)
    assert len(launches) == 2
