# SPDX-License-Identifier: Apache-2.0
"""SGLang's own test kit for its DSA backend, on the CPU; calls that are served here are also judged by the float64 oracle."""

from __future__ import annotations

import os
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit
from sglang_version import FUSED, SELECTORS
from torch import Tensor

from mla_portable.attention import SlotAttention
from mla_portable.contracts import DeviceFacts
from mla_portable.engines.sglang import indexer, serving, stock

CASE = unittest.TestCase()
DEVICE = os.environ.get("MLA_TEST_SGLANG_DEVICE", "cpu")
"""Where the cases run: `ci/gpu_sglang` has them on a GPU."""


@dataclass
class Judged:
    """Calls of SlotAttention, each as (kind, arguments).

    Attributes: worst: the greatest difference from the oracle. wanted: the oracle's last result.
    """

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    worst: float = 0.0
    wanted: Tensor | None = None

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.calls]


@contextmanager
def judging() -> Iterator[Judged]:
    """Compare the results of every call in the block with the oracle's. No warm-up calls: they have tests of their own."""
    judged, forward = Judged(), SlotAttention.forward

    def compare(self: SlotAttention, q: Tensor, kv: Tensor, slots: Tensor, **named: Any) -> Tensor:
        out = forward(self, q, kv, slots, **named)
        sink = named.get("attn_sink")
        wanted, _ = oracle.sparse_prefill(
            q.cpu(),
            kv.cpu(),
            slots.long().cpu(),
            softmax_scale=named["softmax_scale"],
            attn_sink=None if sink is None else sink.cpu(),
        )
        judged.worst = max(judged.worst, float((out.double().cpu() - wanted).abs().max()))
        judged.wanted = wanted
        torch.testing.assert_close(out.double().cpu(), wanted, rtol=1e-2, atol=8e-3)
        kind = f"{'decode' if named['decodes'] else 'prefill'} {self.spec.kv_layout}"
        judged.calls.append((kind, {"q": q, "kv": kv, "slots": slots, **named}))
        return out

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(SlotAttention, "forward", compare)
        patches.setattr(serving, "warm_slots", lambda layer: None)
        yield judged


def cases() -> dict[str, Any]:
    """The kit's cases by name. Its prefixes of 2048 tokens, longer than SGLang's limit for dense prompts, are shorter.

    SGLang 0.5.16 writes BF16 rows by a kernel as well.
    """
    found = [
        replace(case, prefix_lens=tuple(min(n, 260) for n in case.prefix_lens)) for case in kit.make_dsa_sparse_cases("dsa")
    ]
    return {case.name: case if SELECTORS else small(case) for case in found}


def small(case: Any) -> Any:
    """The case with short prefixes: rows of an FP8 cache are written by a kernel in the interpreter, at 20 ms each."""
    return replace(case, prefix_lens=tuple(9 + 4 * i for i, _ in enumerate(case.prefix_lens)))


def run(case: Any, **options: Any) -> None:
    """Run a case of the kit and compare with its own reference, which reads the BF16 keys whatever the cache is.

    The kit's tolerances are several times the size of a result; these are of the rounding of BF16 rows, and of FP8 rows.
    """
    compare(fixture(case, **options))


def compare(built: Any) -> None:
    actual, wanted = kit.run_dsa_sparse_fixture_eager(built, CASE), kit.expected_dsa_sparse_fixture_output(built)
    fp8 = built.backend.dsa_kv_cache_store_fp8
    torch.testing.assert_close(actual, wanted, rtol=0.02, atol=0.03 if fp8 else 0.004)


def fixture(case: Any, *, fused: bool = FUSED, **options: Any) -> Any:
    """A case's objects. Where SGLang fuses top-k it expects slots, in place of the kit's positions in a request."""
    built = kit.build_dsa_sparse_attention_fixture(CASE, case, device=DEVICE, **options)
    gathers = built.backend.dsa_kv_cache_store_fp8 and options.get("dsa_prefill_backend") == "flashmla_sparse"
    if fused and not gathers:
        requests = torch.tensor([i for i, rows in enumerate(case.input_lens) for _ in range(rows)]).to(DEVICE)
        table = built.runner.req_to_token_pool.req_to_token[built.forward_batch.req_pool_indices[requests]]
        slots = table.gather(1, built.topk_indices.clamp(min=0).long()).to(torch.int32)
        built.topk_indices = slots.masked_fill(built.topk_indices < 0, -1)
    return built


@contextmanager
def without_rope() -> Iterator[None]:
    """In the block the kit's model has no rotary part: as in GLM-5.3-Flash, queries and keys end with an empty one."""

    def project_q(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_nope_proj(hidden), hidden.new_empty((len(hidden), self.num_heads, 0))

    def project_k(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_nope_proj(hidden), hidden.new_empty((len(hidden), 1, 0))

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(kit, "DSA_SPARSE_QK_ROPE_HEAD_DIM", 0)
        patches.setattr(kit.ProjectedDSASparseAttention, "project_q", project_q)
        patches.setattr(kit.ProjectedDSASparseAttention, "project_k", project_k)
        patches.setattr(kit, "expected_dsa_sparse_fixture_output", expected_without_rope)
        yield


def expected_without_rope(built: Any) -> Tensor:
    """The kit's reference, which cannot shape a rotary part of nothing, over the BF16 keys."""
    module, case = built.actual_module, built.case
    queries = module.q_nope_proj(built.input_hidden).view(-1, case.num_heads, module.qk_nope_head_dim).float()
    outputs, row = [], 0
    for prefix, own in zip(built.prefix_hidden, built.input_hidden.split(list(case.input_lens)), strict=True):
        keys = module.k_nope_proj(torch.cat([prefix, own])).float()
        for _ in range(len(own)):
            selected = keys[[position for position in built.topk_rows[row] if position >= 0]]
            weights = torch.softmax(queries[row] @ selected.T * module.attn.scaling, dim=-1)
            outputs.append((weights @ selected).flatten())
            row += 1
    return module.o_proj(torch.stack(outputs).to(built.input_hidden.dtype))


def pretend_for_indexer(patches: pytest.MonkeyPatch, facts: DeviceFacts, *, installed: bool = True) -> None:
    """The process has this device, with DeepGEMM or without."""
    registry = SimpleNamespace(facts=lambda device: facts, default_device=lambda: "cuda:0")
    patches.setattr(indexer, "get_registry", lambda: registry)
    patches.setattr(stock, "_import_error", lambda module: None if installed else f"No module named {module!r}")


def server_of(backend: Any) -> serving.BackendLayers | None:
    return getattr(backend, serving.LAYERS)
